"""Write files atomically, read only regular files, and create folders.

>>> with temporary_folder() as folder:
...     write_json(folder / "run.json", {"lr": 0.1}, indent=None)
...     with replacing(folder / "log.txt") as file:  # a block that fails leaves the old file
...         print("step 1", file=file)
...     with opened_regular(folder / "log.txt") as file:
...         print(file.read(4), end_of(folder / "log.txt", 3), regular_text(folder / "run.json").strip())
...     with beside(folder / "copy.txt") as made:  # a path for who writes the file
...         _ = made.write_text("step 1")
...     new_folder(folder / "results", "first").name.startswith("first-20")
b'step' b' 1\\n' {"lr": 0.1}
True
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path, PureWindowsPath
from typing import IO, Any

from exogym.errors import ArgumentError, ExoGymError

# What tools use, as `exogym.files`.
__all__ = [
    "beside",
    "end_of",
    "new_folder",
    "opened_regular",
    "regular_text",
    "replacing",
    "temporary_folder",
    "write_json",
]

SHORT_BYTES = 1 << 20  # largest file that a person writes


@contextlib.contextmanager
def beside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A context that yields a temporary path, whose file replaces `path` if the block succeeds.

    If the block fails, the temporary file is removed. If `path` doesn't exist, the block may also create a folder.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _remove(made)  # left by a killed process with the same number; a link would lead elsewhere
        yield made
        os.replace(made, path)
    finally:
        with contextlib.suppress(OSError, ValueError):
            _remove(made)


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[str]]:
    """A context that opens a new text file, which replaces `path` if the block succeeds.

    If the block fails, the new file is removed.
    """
    with beside(path) as made, open(made, "x", encoding="utf-8", newline="") as file:
        yield file


def write_json(path: str | os.PathLike[str], value: Any, indent: int | None = 1) -> None:
    """Write a value to a file as JSON, atomically."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=indent) + "\n")


def is_plain(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a plain file, not a link, a folder, a pipe or a device.

    Raises:
        FileNotFoundError: `path` does not exist.
    """
    return stat.S_ISREG(os.lstat(path).st_mode)


def opened_plain(path: str | os.PathLike[str]) -> Any:
    """Open a plain file for reading bytes.

    Raises:
        OSError: `path` is not a plain file, or cannot be read.
    """
    if not is_plain(path):
        raise OSError(f"{os.fspath(path)} is a link, a folder, a pipe or a device, but must be a plain file")
    return os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)), "rb")


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise OSError unless `path` is a regular file or a link to one. (Opening a pipe would block.)

    Call this function before another package opens a path that came from a folder or an index.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"{os.fspath(path)} is a folder, a pipe or a device, but must be a regular file")


def opened_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a regular file, or a link to one, for reading bytes.

    Raises:
        OSError: `path` is not a regular file, or cannot be read.
    """
    check_regular(path)
    return os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")


def regular_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a regular file, or of a link to one.

    Raises:
        OSError, UnicodeDecodeError: `path` is not a regular file, or cannot be read.
    """
    with opened_regular(path) as file:
        return file.read().decode("utf-8")


def indexed(index: Path) -> list[Path]:
    """Return the files of weights that an index in Hugging Face's layout names, in the order of their names.

    They are in the index's folder, where they may be links to any place, as in Hugging Face's cache.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError: the index can't be read, or names
        anything but files of its folder.
    """
    names = json.loads(regular_text(index))["weight_map"].values()
    return sorted({inside(index.parent, name) for name in names})


def inside(folder: Path, name: Any) -> Path:
    """Return the path of a file that another file in `folder` names.

    Raises:
        OSError, ValueError: `name` is not the name of a regular file in `folder`, or of a link to one.
    """
    plain = isinstance(name, str) and "\0" not in name and name not in ("", "..")
    if not plain or Path(name).name != name or PureWindowsPath(name).name != name:
        raise ValueError(f"{name!r} is named in {folder}, but is not in this folder")
    check_regular(folder / name)
    return folder / name


def end_of(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Return the last bytes of a file, at most `most_bytes`. Return b"" if the file is missing or not a plain file."""
    try:
        with opened_plain(path) as file:
            file.seek(max(file.seek(0, os.SEEK_END) - most_bytes, 0))
            found: bytes = file.read(most_bytes)
            return found
    except OSError:
        return b""


def short_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a short file that the user wrote by hand.

    Raises:
        OSError, UnicodeDecodeError: the file cannot be read.
        ArgumentError: the file is longer than `SHORT_BYTES`, for example an endless device.
    """
    with open(path, "rb") as file:
        data = file.read(SHORT_BYTES + 1)
    if len(data) > SHORT_BYTES:
        raise ArgumentError(
            f"{os.fspath(path)!r} is longer than {SHORT_BYTES >> 20} MiB: pass a text file written by hand"
        )
    return data.decode("utf-8")


@contextlib.contextmanager
def temporary_folder(prefix: str = "exogym-") -> Iterator[Path]:
    """A context that creates a temporary folder and removes it at the end.

    Raises:
        ExoGymError: no temporary folder can be written.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    except OSError as error:
        raise ExoGymError(
            f"no temporary folder can be created ({error}): set TMPDIR to a folder that you can write to"
        ) from error
    with folder as name:
        yield Path(name)


def cut_torn_line(path: str | os.PathLike[str]) -> None:
    """Remove a plain file's last line if it is incomplete, as after a write to a full disk."""
    with contextlib.suppress(OSError):
        if is_plain(path):
            with open(path, "rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)


def missing_folders(path: Path) -> list[Path]:
    """Return the folders that don't exist yet, among `path` and its parents, the deepest first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def make_folder(path: str | os.PathLike[str]) -> list[Path]:
    """Create a folder if it is missing, and test that it is writable. Return the new folders, the deepest first.

    Raises:
        OSError, ValueError, RecursionError: the folder can't be created or written (ValueError: its name is
            impossible). New folders are removed again.
    """
    folder, made = Path(path), []
    try:
        made = missing_folders(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"exogym")
    except (OSError, ValueError, RecursionError):
        remove_folders(made)
        raise
    return made


def remove_folders(made: Iterable[Path]) -> None:
    """Remove the folders that `make_folder` created, if they are empty."""
    for folder in made:
        with contextlib.suppress(OSError, ValueError):
            folder.rmdir()


def new_folder(out: str | os.PathLike[str], name: str) -> Path:
    """Create and return the folder `<out>/<name>-<time>`, with a number at the end if that name exists.

    Raises:
        ArgumentError: the folder can't be created. New parent folders are removed again.
    """
    out, base = Path(out).expanduser(), f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    above: list[Path] = []
    count = 1
    try:
        above = make_folder(out)
        while True:
            with contextlib.suppress(FileExistsError):
                folder = out / (base if count == 1 else f"{base}-{count}")
                folder.mkdir()
                return folder
            count += 1
    except (OSError, ValueError) as error:
        remove_folders(above)
        raise ArgumentError(
            f"out={os.fspath(out)!r} cannot be written ({getattr(error, 'strerror', error)}): pass another folder"
        ) from error
