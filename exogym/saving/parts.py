"""What is split in a checkpoint, where nodes are several processes: each writes its pieces, anybody puts them together.

Beside a file of rows, or of what all nodes share, lie `<file>.part-<j>.safetensors`, one for each process j of a node,
with its pieces of the tensors that are split. A piece has the name of its tensor. Where it lies in the whole is in
"cut/<c>", (m, 2) ranges of the elements of the whole's last axes; which c is whose, and the shape of these axes, is in
the file's own metadata. What is read is whole, so a run goes on with another split, or with none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from exogym.errors import CheckpointError
from exogym.fleet.layout import Cut

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


def joined_pieces(files: Sequence[Path], wanted: Callable[[int], bool]) -> dict[tuple[int | None, str], Tensor]:
    """Return (node, name) to each whole tensor of the pieces in `files`; node None: what all share.

    Raises:
        CheckpointError: they do not make up whole tensors.
    """
    found: dict[tuple[int | None, str], Tensor] = {}
    covered: dict[tuple[int | None, str], int] = {}
    for file in sorted(files):
        of_rows = file.name.startswith("rows-")
        with safe_open(file, framework="pt") as opened:
            told = json.loads((opened.metadata() or {}).get("cuts", "{}"))
            for key, (number, shape, axes) in told.items():
                node, _, name = key.partition("/") if of_rows else ("", "", key)
                if of_rows and not wanted(int(node)):
                    continue
                piece, places = opened.get_tensor(key), _places(opened.get_tensor(CUT + number), file)
                ahead = piece.shape[: piece.dim() - axes]
                at = (int(node) if of_rows else None, name)
                whole = found.setdefault(at, piece.new_empty((*ahead, *shape)))
                flat = whole.view(*ahead, -1)
                mine = piece.reshape(*ahead, -1)
                if mine.shape[-1] != len(places) or (len(places) and int(places.max()) >= flat.shape[-1]):
                    raise CheckpointError(f"{file}: the piece of {key!r} is not where it says that it is")
                flat[..., places] = mine
                covered[at] = covered.get(at, 0) + len(places)
    for at, whole in found.items():
        lead = whole.numel() // max(1, covered[at])
        if covered[at] * lead != whole.numel():
            raise CheckpointError(f"{files[0].parent}: of {at[1]!r} pieces are missing, or there twice")
    return found


def _places(ranges: Tensor, file: Path) -> Tensor:
    """Return (n,) places of (m, 2) ranges."""
    if ranges.dim() != 2 or ranges.shape[1:] != (2,) or bool((ranges[:, 0] >= ranges[:, 1]).any()):
        raise CheckpointError(f"{file} holds ranges that are none")
    if bool((ranges < 0).any()) or bool((ranges[1:, 0] < ranges[:-1, 1]).any()):
        raise CheckpointError(f"{file} holds ranges that overlap")
    return torch.cat([torch.arange(a, b) for a, b in ranges.tolist()]) if len(ranges) else torch.empty(0).long()
