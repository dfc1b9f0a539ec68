"""Examples in tar files, as the package webdataset writes them: files with the same name before the dot form one."""

from __future__ import annotations

import functools
import itertools
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from torch.utils.data import IterableDataset

from exogym.core.base.files import opened_regular
from exogym.errors import ArgumentError, DataError, check_count, checked

PathLike = str | os.PathLike[str]
BLOCK = 512  # bytes: the unit of tar files
GLOBAL = tarfile.XGLTYPE
EXTENDED = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, GLOBAL, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
MOST_EXTENDED, EXTENDED_BYTES = 8, 1 << 18  # limits on the extended headers before one file
GLOBAL_BYTES = 1 << 18  # limit on a tar file's global headers: tarfile copies them for each file


class TarShards(IterableDataset[Any]):
    """Read examples from uncompressed tar files, one after another.

    The files `cat/7.jpg` and `cat/7.txt` in a tar file form the example {"__key__": "cat/7", "jpg": bytes, "txt":
    bytes}. Files of one example must be adjacent. Folders, names without a dot and names that begin with a dot are
    ignored. A resumed run continues at the next example's place in its file, without reading the examples before it.

    Args:
        files: a list of tar files, or a folder, whose `.tar` files are read in the order of their names.
        decode: function that maps this dict to the example. Default: the dict itself.

    Raises:
        DataError: a folder has no tar file. While reading: a tar file does not exist, is a pipe or a device, is damaged
            or ends too early; has a sparse file, two files of one name in a row, or extended headers of over 256 KiB;
            or `decode` failed.

    >>> import io, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with tarfile.open(f"{folder}/a.tar", "w") as tar:
    ...     for name in ("0.txt", "0.cls", "1.txt"):
    ...         info = tarfile.TarInfo(name)
    ...         info.size = 2
    ...         tar.addfile(info, io.BytesIO(b"hi"))
    >>> shards = TarShards(folder, decode=lambda example: sorted(example))
    >>> list(shards), len(shards.files)
    ([['__key__', 'cls', 'txt'], ['__key__', 'txt']], 1)
    """

    @checked
    def __init__(
        self, files: PathLike | Sequence[PathLike], decode: Callable[[dict[str, Any]], Any] | None = None
    ) -> None:
        if isinstance(files, str | os.PathLike) and Path(files).expanduser().is_dir():
            found = sorted(Path(files).expanduser().glob("*.tar"))
        else:
            found = [Path(x) for x in ([files] if isinstance(files, str | os.PathLike) else files)]
        if not found:
            raise DataError(f"files={files!r}: no tar file: pass a folder with .tar files, or a list of files")
        if decode is not None and not callable(decode):
            raise ArgumentError(f"decode={decode!r} is not callable: pass a function of an example's files")
        self.files, self.decode = [path.expanduser().absolute() for path in found], decode

    def shard(self, num_shards: int, index: int) -> TarShards:
        """Return a data set of every `num_shards`-th file from file `index` on: a node's part, in a factory."""
        check_count("num_shards", num_shards)
        if not 0 <= index < num_shards <= len(self.files):
            raise DataError(
                f"shard({num_shards}, {index}) of {len(self.files)} tar files: expected an index from 0 to "
                f"{num_shards - 1}, and at least one file for each shard"
            )
        return TarShards(self.files[index::num_shards], self.decode)

    def __iter__(self) -> Iterator[Any]:
        return _Walk(self)


class _Walk(Iterator[Any]):
    """Iterates over the tar files. The state is the next example's file and the place of its first header in it."""

    def __init__(self, shards: TarShards):
        self.shards = shards
        self.load_state_dict({"file": 0, "offset": 0})

    def state_dict(self) -> dict[str, int]:
        return {"file": self.file, "offset": self.offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.file, self.offset = state["file"], state["offset"]
        self._examples = self._read()

    def close(self) -> None:
        self._examples.close()

    def __next__(self) -> Any:
        return next(self._examples)

    def _read(self) -> Any:
        decode = self.shards.decode
        while self.file < len(self.shards.files):
            path = self.shards.files[self.file]
            try:
                for example, end in _examples(path, self.offset):
                    self.offset = end
                    yield example if decode is None else _decoded(decode, example, path)
            except (OSError, ValueError, IndexError, OverflowError, MemoryError, tarfile.TarError) as error:
                raise DataError(f"{path} is not a readable tar file: {type(error).__name__}: {error}") from error
            self.file, self.offset = self.file + 1, 0


def _decoded(decode: Callable[[dict[str, Any]], Any], example: dict[str, Any], path: Path) -> Any:
    try:
        return decode(example)
    except Exception as error:
        raise DataError(
            f"decode failed for {example['__key__']!r} in {path}: {type(error).__name__}: {error}"
        ) from error


def _examples(path: Path, offset: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each example from `offset` on, and the next one's offset."""
    with opened_regular(path) as file:
        end = os.fstat(file.fileno()).st_size
        if 0 < offset == end:
            return
        seen = _check_headers(file, offset, 0)
        file.seek(offset)
        with tarfile.open(fileobj=file, mode="r:") as tar:
            example: dict[str, Any] = {}
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # else tarfile keeps every header
                if member.size < 0:  # as an extended header says, so tarfile would go back
                    raise tarfile.ReadError(f"{member.name!r} has {member.size} bytes")
                folder, _, name = member.name.rpartition("/")
                stem, _, suffix = name.partition(".")
                if member.isfile() and stem and suffix:  # not folders, README, and macOS's ._7.jpg
                    key = f"{folder}/{stem}" if folder else stem
                    if example and example["__key__"] != key:
                        yield example, member.offset
                        example = {}
                    example.setdefault("__key__", key)
                    if suffix in example:
                        raise DataError(f"{path} has two files {member.name!r} in a row: give each file its own name")
                    example[suffix] = _content(tar, member, path, end)
                seen += _check_headers(file, tar.offset, seen)
            _check_end(file, tar.offset)
            if example:
                yield example, end


def _check_headers(file: IO[bytes], place: int, seen: int) -> int:
    """Check the headers of the next file at byte `place`, and return the bytes of its global headers.

    tarfile reads a chain of extended headers recursively, and goes back at a size below 0, so it may never end. It
    handles other damage itself.

    Args:
        seen: bytes of the global headers before.

    Raises:
        ReadError: a size is below 0, or extended headers are too many or too long.
    """
    chain = total = shared = 0
    while True:
        file.seek(place)
        try:
            header = tarfile.TarInfo.frombuf(file.read(BLOCK), tarfile.ENCODING, "surrogateescape")
        except tarfile.HeaderError:
            return shared
        if header.size < 0:
            raise tarfile.ReadError(f"at byte {place} there is a header of a file with {header.size} bytes")
        if header.type not in EXTENDED:
            return shared
        chain, total = chain + 1, total + header.size
        shared += header.size * (header.type == GLOBAL)
        if chain > MOST_EXTENDED or total > EXTENDED_BYTES or seen + shared > GLOBAL_BYTES:
            raise tarfile.ReadError(
                f"at byte {place} there are extended headers of {total} bytes: expected at most {MOST_EXTENDED} for a "
                f"file, of at most {EXTENDED_BYTES} bytes"
            )
        place += BLOCK + -(-header.size // BLOCK) * BLOCK


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path, end: int) -> bytes:
    if member.issparse():
        raise DataError(f"{path}: {member.name!r} is a sparse file, with holes: write the tar file without --sparse")
    if not 0 <= member.size <= end - member.offset_data:
        raise tarfile.ReadError(f"{member.name!r} should have {member.size} bytes, but the tar file ends before")
    opened = tar.extractfile(member)
    assert opened is not None
    return opened.read()


def _check_end(file: Any, place: int) -> None:
    """Raise ReadError unless the file has zeros from `place` on, where tarfile found no further header.

    tarfile mistakes a damaged header and the end of a truncated file for the end of the tar file.
    """
    file.seek(place)
    first = file.read(BLOCK)
    blocks = iter(functools.partial(file.read, 1 << 20), b"")
    if len(first) < BLOCK or any(block.strip(b"\0") for block in itertools.chain([first], blocks)):
        raise tarfile.ReadError(f"at byte {place} there is neither a file nor the tar file's end")
