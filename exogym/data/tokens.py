"""Token files for language models: write them once, then read blocks of them through memory maps."""

from __future__ import annotations

import functools
import os
import reprlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from exogym.core.base.files import check_regular
from exogym.data.bulk import BulkDataset, shifted
from exogym.errors import ArgumentError, DataError, check_choice, check_count, checked

DTYPES = ("uint16", "uint32")
SUFFIXES = (".bin", ".npy")

PathLike = str | os.PathLike[str]


class TokenFiles(BulkDataset):
    """Blocks of tokens from files, for language models: example i is (x, y), where y is x shifted by one token.

    x has T = `block_size` tokens. Blocks begin at every `stride`-th token of a file and never span two files: a file of
    n tokens has floor((n - T - 1) / stride) + 1 blocks, or none if n <= T. The files are memory-mapped, so a batch
    reads only its own blocks, and processes on one machine share the pages. Tokens are returned as int64.

    Args:
        files: a file, a list of files, or a folder, whose `.npy` and `.bin` files are read in the order of their names.
            A `.npy` file contains one array of integers, (n,), and a `.bin` file bare numbers.
        block_size: T, the number of tokens in x.
        stride: tokens between the starts of two blocks. Default: `block_size`, so that blocks' x don't overlap.
        dtype: the type of the numbers in `.bin` files, "uint16" or "uint32".

    Raises:
        DataError: a file does not exist or has other content, or no file has enough tokens for a block; while reading,
            if a token is negative.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> np.save(f"{folder}/a.npy", np.arange(10, dtype=np.uint16))
    >>> tokens = TokenFiles(folder, block_size=4)
    >>> len(tokens), tokens[1]
    (2, (tensor([4, 5, 6, 7]), tensor([5, 6, 7, 8])))
    """

    @checked
    def __init__(
        self,
        files: PathLike | Sequence[PathLike],
        block_size: int,
        stride: int | None = None,
        dtype: str = "uint16",
    ) -> None:
        check_count("block_size", block_size)
        stride = block_size if stride is None else stride
        check_count("stride", stride)
        check_choice("dtype", dtype, DTYPES)
        self.block_size, self.stride, self.dtype = block_size, stride, dtype
        self.files = _files(files)
        lengths = [len(tokens) for tokens in self._maps]
        blocks = [max(0, (length - block_size - 1) // stride + 1) for length in lengths]
        self.num_tokens, self._ends = sum(lengths), np.cumsum(blocks)
        if not len(self):
            raise DataError(
                f"{len(self.files)} files with {self.num_tokens:,} tokens have no block of block_size={block_size} + 1 "
                "tokens: lower block_size, or use longer files"
            )

    @functools.cached_property
    def _maps(self) -> list[np.ndarray]:
        return [_mapped(file, self.dtype) for file in self.files]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        wanted = indices.numpy()
        homes = np.searchsorted(self._ends, wanted, side="right")
        blocks = np.empty((len(wanted), self.block_size + 1), dtype=np.int64)
        for row, (index, home) in enumerate(zip(wanted.tolist(), homes.tolist(), strict=True)):
            first = (index - (int(self._ends[home - 1]) if home else 0)) * self.stride
            blocks[row] = self._maps[home][first : first + self.block_size + 1]
        if (blocks < 0).any():  # of a signed type, or above 2^63
            file = self.files[int(homes[(blocks < 0).any(axis=1).argmax()])]
            raise DataError(f"{file} has a token that is negative or above 2^63: expected token ids from 0 on")
        return shifted(torch.from_numpy(blocks))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_maps"}  # maps open files again


@checked
def tokenize_folder(
    folder: PathLike,
    encode: Callable[[str], Any],
    out: PathLike,
    *,
    end: int | None = None,
    dtype: str = "uint16",
    pattern: str = "**/*.txt",
) -> int:
    """Write the tokens of a folder's texts into one file for `TokenFiles`, and return their number.

    The texts follow each other in the order of their paths, with one text in memory at a time. `out` appears when it is
    complete.

    Args:
        folder: the folder with the texts (UTF-8).
        encode: function that maps a text to its tokens, such as `tokenizer.encode` of the packages `transformers` or
            `tokenizers`.
        out: the `.npy` file to write. An existing file is an error.
        end: token to write after each text. Default: none.
        dtype: "uint16" for vocabularies of at most 65,536 tokens, or "uint32".
        pattern: which files to read (see `pathlib.Path.glob`).

    Raises:
        DataError: the folder has no such file, a file is not UTF-8, `out` exists or cannot be written, or `encode`
            fails or returns something other than tokens that fit `dtype`.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.txt").write_text("To be"), (folder / "b.txt").write_text("or not")
    >>> tokenize_folder(folder, lambda text: text.encode(), folder / "tokens.npy", end=0)
    13
    >>> bytes(np.load(folder / "tokens.npy").astype(np.uint8))
    b'To be\\x00or not\\x00'
    """
    check_choice("dtype", dtype, DTYPES)
    if not callable(encode):
        raise ArgumentError(f"encode={encode!r} is not callable: pass a function that maps a text to its tokens")
    source, target = Path(folder).expanduser(), Path(out).expanduser()
    texts = sorted(path for path in source.glob(pattern) if path.is_file())
    if not texts:
        raise DataError(f"{source} has no file {pattern!r}: pass the folder of the texts, or another pattern")
    if target.suffix != ".npy":
        raise DataError(f"out={os.fspath(out)!r} must end in .npy")
    if target.exists():
        raise DataError(f"{target} exists: remove it, or name another file")
    part = target.with_name(f"{target.name}.{os.getpid()}.part")  # another process may write the same file
    count = 0
    try:
        with open(part, "wb") as file:
            _write_header(file, 0, dtype)
            for path in texts:
                tokens = encoded(encode, text_of(path), end, os.fspath(path), dtype)
                file.write(tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
                count += len(tokens)
            file.seek(0)
            _write_header(file, count, dtype)  # as long as the first one: numpy leaves room for a longer array
        os.replace(part, target)
    except OSError as error:
        raise DataError(f"{target} cannot be written ({error}): name a file in an existing folder") from error
    finally:
        part.unlink(missing_ok=True)
    return count


def text_of(path: Path) -> str:
    """Return the text of a file. Raise DataError if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 (at byte {error.start}): convert the file, for example by iconv -f latin1 -t utf-8, "
            "or leave it out"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error})") from None


def encoded(encode: Callable[[str], Any], text: str, end: int | None, where: str, dtype: str) -> np.ndarray:
    """Return a text's tokens followed by the token `end`, (n,) integers that fit `dtype`.

    Args:
        where: the text's name, for errors.

    Raises:
        DataError: `encode` fails, or returns something other than tokens that fit `dtype`.
    """
    try:
        given = encode(text)
    except Exception as error:
        raise DataError(f"encode failed for {where}: {type(error).__name__}: {error}") from error
    try:
        found = np.asarray(list(getattr(given, "ids", given)) + ([] if end is None else [end]))
    except (TypeError, ValueError):  # no list, or lists of several lengths
        found = np.empty(0, object)
    if found.ndim != 1 or found.dtype.kind not in ("iu" if len(found) else "iuf"):
        raise DataError(
            f"encode returned {reprlib.repr(given)} for {where}: expected a list of token ids, such as "
            "tokenizer.encode(text)"
        )
    if len(found) and not (found.min() >= 0 and found.max() <= np.iinfo(dtype).max):
        raise DataError(
            f"{where}: token numbers from {found.min()} to {found.max()} do not fit {dtype}"
            + (": give dtype='uint32'" if found.min() >= 0 and dtype == "uint16" else "")
        )
    return found


def _write_header(file: IO[bytes], count: int, dtype: str) -> None:
    kind = np.dtype(dtype).newbyteorder("<").str
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": (count,)})


def _files(given: PathLike | Sequence[PathLike]) -> list[Path]:
    """Return the files with absolute paths, because other processes may have another current folder."""
    if isinstance(given, str | os.PathLike):
        place = Path(given).expanduser().absolute()
        found = sorted(x for x in place.iterdir() if x.suffix in SUFFIXES) if place.is_dir() else [place]
        if not found:
            raise DataError(f"{place} has no .npy or .bin file: write one with exogym.data.tokenize_folder")
        return found
    found = [Path(file).expanduser().absolute() for file in given]
    if not found:
        raise DataError("files=[] has no file: pass at least one")
    return found


def _mapped(file: Path, dtype: str) -> np.ndarray:
    """Map a file's tokens into memory, (n,) integers."""
    if file.suffix not in SUFFIXES:
        raise DataError(f"{file} is neither a .npy nor a .bin file: write one with exogym.data.tokenize_folder")
    tokens: np.ndarray
    try:
        check_regular(file)
        if file.suffix == ".npy":
            tokens = np.lib.format.open_memmap(file, mode="r")
        elif file.stat().st_size % np.dtype(dtype).itemsize:
            raise ValueError(f"{file.stat().st_size} bytes are not a multiple of {dtype}")
        elif not file.stat().st_size:
            tokens = np.empty(0, dtype)
        else:
            tokens = np.memmap(file, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
    except Exception as error:  # numpy parses a header, and raises also TokenError, SyntaxError and others
        raise DataError(f"{file} is not a readable file of tokens: {type(error).__name__}: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise DataError(f"{file} contains {tokens.dtype} {tokens.shape}: expected integers of shape (n,)")
    return tokens
