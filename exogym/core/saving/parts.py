"""What is split in a checkpoint, where nodes are several processes: each writes its pieces, anybody puts them together.

Beside a file of rows, or of what all nodes share, lie `<file>.part-<j>.safetensors`, one for each process j of a node,
with its pieces of the tensors that are split. A piece has the name of its tensor. Where it lies in the whole is in
"cut/<c>", (m, 2) ranges of the elements of the whole's last axes; which c is whose, and the shape of these axes, is in
the file's own metadata. What is read is whole, so a run goes on with another split, or with none.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from exogym.core.fleet.layout import Cut
from exogym.errors import CheckpointError

CUT = "cut/"
Cuts = dict[str, Cut]


@dataclass
class Parts:
    """What of a snapshot's tensors is in this process: process `part` of its node, of the first node if `is_first`."""

    part: int
    is_first: bool
    rows: dict[int, Cuts]
    shared: Cuts


def part_file(file: str, part: int) -> str:
    """Return the name of the file of a process's pieces.

    >>> part_file("rows-0-1.safetensors", 2)
    'rows-0-1.part-2.safetensors'
    """
    return f"{file.removesuffix('.safetensors')}.part-{part}.safetensors"


def as_file(pieces: Mapping[str, tuple[Tensor, Cut]]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return what a file of pieces holds: tensors, and metadata."""
    tensors: dict[str, Tensor] = {}
    seen: dict[tuple[int, tuple[int, ...]], str] = {}
    told = {}
    for name, (piece, cut) in pieces.items():
        key = (id(cut.columns), cut.shape)
        if key not in seen:
            seen[key] = str(len(seen))
            tensors[CUT + seen[key]] = cut.ranges()
        told[name] = [seen[key], list(cut.shape), len(cut.here)]
        tensors[name] = piece
    return tensors, {"cuts": json.dumps(told)}


Key = tuple[int | None, str]  # node, and the name of a tensor; None: what all share


@dataclass(frozen=True)
class _Piece:
    """A piece as its file says, before its numbers are read: `ranges` of the last axes, `shape`, of the whole."""

    file: Path
    key: str
    ahead: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    ranges: list[list[int]]


def joined_pieces(files: Sequence[Path], wanted: Callable[[int], bool]) -> dict[Key, Tensor]:
    """Return (node, name) to each whole tensor of the pieces in `files`; node None: what all share.

    Nothing is made before it is known that the pieces make it up, so no more memory is taken than they have bytes.

    Raises:
        CheckpointError: they do not make up whole tensors; the file is named.
    """
    pieces: dict[Key, list[_Piece]] = {}
    for file in sorted(files):
        try:
            for at, piece in _described(file):
                if at[0] is None or wanted(at[0]):
                    pieces.setdefault(at, []).append(piece)
        except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
            raise CheckpointError(f"{file} is not a file of pieces: {error!r}") from error
    for (_, name), these in pieces.items():
        _check_whole(name, these)
    found: dict[Key, Tensor] = {}
    with contextlib.ExitStack() as stack:  # each is opened once: to open one is to read all of its names
        opened = {file: stack.enter_context(safe_open(file, framework="pt")) for file in files}
        for at, these in pieces.items():
            for piece in these:
                mine = opened[piece.file].get_tensor(piece.key)
                if at not in found:
                    found[at] = mine.new_empty((*piece.ahead, *piece.shape))
                flat, start = found[at].view(*piece.ahead, math.prod(piece.shape)), 0
                mine = mine.reshape(*piece.ahead, -1) if mine.numel() else mine.new_empty(*piece.ahead, 0)
                for a, b in piece.ranges:
                    flat[..., a:b] = mine[..., start : start + b - a]
                    start += b - a
    return found


def _described(file: Path) -> Iterator[tuple[Key, _Piece]]:
    """Yield what a file says that it holds; of the numbers in it only the ranges are read."""
    first, _, last = file.name.partition(".")[0].removeprefix("rows-").partition("-")
    nodes = range(int(first), int(last) + 1) if file.name.startswith("rows-") else None
    with safe_open(file, framework="pt") as opened:
        told = json.loads((opened.metadata() or {}).get("cuts", "{}"))
        names = set(opened.keys())
        cuts = {name: _ranges(opened.get_tensor(name), file) for name in names if name.startswith(CUT)}
        if strange := (names - cuts.keys()) ^ told.keys():
            raise CheckpointError(f"{file}: what it holds of {min(strange)!r} is not what it says that it does")
        for key, (number, shape, axes) in told.items():
            node, slash, name = key.partition("/") if nodes is not None else ("", "", key)
            if nodes is not None and (not slash or str(int(node)) != node or int(node) not in nodes):
                raise CheckpointError(f"{file} holds {key!r}, of a node that is not in {file.name}")
            given, ranges = opened.get_slice(key), cuts[CUT + number]
            sides = tuple(given.get_shape())
            if not all(type(x) is int and x >= 0 for x in (axes, *shape)) or axes > len(sides):
                raise CheckpointError(f"{file}: the piece of {key!r} has the shape {shape!r}")
            ahead, here = sides[: len(sides) - axes], math.prod(sides[len(sides) - axes :])
            if here != sum(b - a for a, b in ranges) or (ranges and ranges[-1][1] > math.prod(shape)):
                raise CheckpointError(f"{file}: the piece of {key!r} is not where it says that it is")
            at = (None if nodes is None else int(node), name)
            yield at, _Piece(file, key, ahead, tuple(shape), given.get_dtype(), ranges)


def _check_whole(name: str, pieces: Sequence[_Piece]) -> None:
    """Raise CheckpointError unless each element of a tensor is in one of its pieces."""
    first = pieces[0]
    for piece in pieces:
        if (piece.ahead, piece.shape, piece.dtype) != (first.ahead, first.shape, first.dtype):
            raise CheckpointError(
                f"{piece.file}: its piece of {name!r} is of a tensor of {piece.dtype} {(*piece.ahead, *piece.shape)}, "
                f"that in {first.file.name} of one of {first.dtype} {(*first.ahead, *first.shape)}"
            )
    end = 0
    for (start, stop), file in sorted((ends, piece.file) for piece in pieces for ends in piece.ranges):
        if start != end:
            raise CheckpointError(
                f"{file}: of {name!r} pieces are missing, or there twice, at element {min(start, end)}"
            )
        end = stop
    if end != math.prod(first.shape):
        raise CheckpointError(f"{first.file}: of {name!r} pieces are missing, at element {end}")


def _ranges(ranges: Tensor, file: Path) -> list[list[int]]:
    if ranges.dtype != torch.int64 or ranges.dim() != 2 or ranges.shape[1:] != (2,):
        raise CheckpointError(f"{file} holds ranges that are none")
    if bool((ranges[:, 0] >= ranges[:, 1]).any()) or bool((ranges < 0).any()):
        raise CheckpointError(f"{file} holds ranges that are none")
    if bool((ranges[1:, 0] < ranges[:-1, 1]).any()):
        raise CheckpointError(f"{file} holds ranges that overlap")
    return ranges.tolist()
