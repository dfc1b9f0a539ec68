"""Split tensors in a checkpoint: each process of a node writes its pieces, and any process can join all pieces.

Beside each file of rows or shared state, a file `<file>.part-<j>.safetensors` has the pieces of each process j of a
node, under their tensors' names. The tensor "cut/<c>", of shape (m, 2), says where a piece belongs in the whole tensor,
as m ranges of elements of the last axes. The file's metadata gives the number c for each piece, and the shape of these
axes. Reading joins the pieces, so a run can resume with another split, or without a split.
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

from exogym.core.fleet.cuts import Cut
from exogym.errors import CheckpointError

CUT = "cut/"
Cuts = dict[str, Cut]


@dataclass
class Parts:
    """The slices of a snapshot's tensors that this process has. `part` is the process's number inside its node.

    `is_first` says whether the node is the first. `rows` and `shared` say, by tensor name, where each slice belongs.
    """

    part: int
    is_first: bool
    rows: dict[int, Cuts]
    shared: Cuts


def part_file(file: str, part: int) -> str:
    """Return the file name for a process's pieces.

    >>> part_file("rows-0-1.safetensors", 2)
    'rows-0-1.part-2.safetensors'
    """
    return f"{file.removesuffix('.safetensors')}.part-{part}.safetensors"


def as_file(pieces: Mapping[str, tuple[Tensor, Cut]]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata for a file that holds `pieces`."""
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


Key = tuple[int | None, str]  # node (None: shared state), and a tensor's name


@dataclass(frozen=True)
class _Piece:
    """A piece as its file describes it, before its numbers are read: `ranges` and `shape` of the whole's last axes."""

    file: Path
    key: str
    ahead: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    ranges: list[list[int]]


def joined_pieces(files: Sequence[Path], wanted: Callable[[int], bool]) -> dict[Key, Tensor]:
    """Join the pieces in `files`. Return the whole tensors by (node, name). For shared state, the node is None.

    A tensor is allocated only after a check that its pieces are complete. So a forged file cannot cause an allocation
    larger than the pieces. Raise CheckpointError if the pieces do not form whole tensors. The message names the file.
    """
    pieces: dict[Key, list[_Piece]] = {}
    for file in sorted(files):
        try:
            for at, piece in _described(file):
                if at[0] is None or wanted(at[0]):
                    pieces.setdefault(at, []).append(piece)
        except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
            raise CheckpointError(f"{file} is not a file of a checkpoint's tensors: {error!r}") from error
    for (_, name), these in pieces.items():
        _check_whole(name, these)
    found: dict[Key, Tensor] = {}
    with contextlib.ExitStack() as stack:  # open each file once: opening reads all of its names
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
    """Yield a file's pieces by its description. Of its numbers, only the ranges are read."""
    first, _, last = file.name.partition(".")[0].removeprefix("rows-").partition("-")
    nodes = range(int(first), int(last) + 1) if file.name.startswith("rows-") else None
    with safe_open(file, framework="pt") as opened:
        told = json.loads((opened.metadata() or {}).get("cuts", "{}"))
        names = set(opened.keys())
        cuts = {name: _ranges(opened.get_tensor(name), file) for name in names if name.startswith(CUT)}
        if strange := (names - cuts.keys()) ^ told.keys():
            raise CheckpointError(f"{file}: its tensors and its description differ at {min(strange)!r}")
        for key, (number, shape, axes) in told.items():
            node, slash, name = key.partition("/") if nodes is not None else ("", "", key)
            if nodes is not None and (not slash or str(int(node)) != node or int(node) not in nodes):
                raise CheckpointError(f"{file} contains {key!r}, of a node that is not in {file.name}")
            given, ranges = opened.get_slice(key), cuts[CUT + number]
            sides = tuple(given.get_shape())
            if not all(type(x) is int and x >= 0 for x in (axes, *shape)) or axes > len(sides):
                raise CheckpointError(f"{file}: the piece of {key!r} has the wrong shape {shape!r}")
            ahead, here = sides[: len(sides) - axes], math.prod(sides[len(sides) - axes :])
            if here != sum(b - a for a, b in ranges) or (ranges and ranges[-1][1] > math.prod(shape)):
                raise CheckpointError(f"{file}: the piece of {key!r} does not fit its ranges")
            at = (None if nodes is None else int(node), name)
            yield at, _Piece(file, key, ahead, tuple(shape), given.get_dtype(), ranges)


def _check_whole(name: str, pieces: Sequence[_Piece]) -> None:
    """Raise CheckpointError unless each element of a tensor is in exactly one of its pieces."""
    first = pieces[0]
    for piece in pieces:
        if (piece.ahead, piece.shape, piece.dtype) != (first.ahead, first.shape, first.dtype):
            raise CheckpointError(
                f"{piece.file}: the tensor {name!r} has dtype {piece.dtype} and shape {(*piece.ahead, *piece.shape)}, "
                f"but in {first.file.name} dtype {first.dtype} and shape {(*first.ahead, *first.shape)}: the "
                "checkpoint is damaged"
            )
    end = 0
    for (start, stop), file in sorted((ends, piece.file) for piece in pieces for ends in piece.ranges):
        if start != end:
            raise CheckpointError(f"{file}: pieces of {name!r} are missing or doubled at element {min(start, end)}")
        end = stop
    if end != math.prod(first.shape):
        raise CheckpointError(f"{first.file}: pieces of {name!r} are missing at element {end}")


def _ranges(ranges: Tensor, file: Path) -> list[list[int]]:
    if ranges.dtype != torch.int64 or ranges.dim() != 2 or ranges.shape[1:] != (2,):
        raise CheckpointError(f"{file} contains invalid ranges")
    if bool((ranges[:, 0] >= ranges[:, 1]).any()) or bool((ranges < 0).any()):
        raise CheckpointError(f"{file} contains invalid ranges")
    if bool((ranges[1:, 0] < ranges[:-1, 1]).any()):
        raise CheckpointError(f"{file} contains overlapping ranges")
    return ranges.tolist()
