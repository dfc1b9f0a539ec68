"""The history of a run on disk: pieces that are written once, and linked into every later checkpoint.

A piece is the file `history-<first>-<last>.safetensors` with the records of that many steps. A checkpoint names all of
its pieces, from the first record on, so it reaches as far as they do, whatever other checkpoints hold. The new records
since the last checkpoint become a piece, together with the pieces before it that are not longer: sizes fall from piece
to piece, there are about log2(steps) of them, and a record is written about log2(steps) times in all.

What has changed since it was written (a metric that came late) is written again, and all that follows it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exogym.core.record.history import History
from exogym.errors import CheckpointError

SMALL = ("extra_columns", "last_step", "totals")  # beside the pieces, in the description of the run
EVALUATIONS = "evaluations"


@dataclass(frozen=True)
class Piece:
    """Records `first` up to, not with, `last`; `sha256` of its file, "" while there is none."""

    first: int
    last: int
    sha256: str = ""

    @property
    def name(self) -> str:
        return f"history-{self.first}-{self.last - 1}.safetensors"

    @property
    def records(self) -> int:
        return self.last - self.first


class Segments:
    """What of a history is on disk, as one process knows it."""

    def __init__(self, history: History):
        self.history = history
        self.pieces: list[Piece] = []
        self.path: Path | None = None  # the checkpoint that holds them
        self._seen: dict[str, tuple[int, int]] = {}

    def due(self) -> list[Piece]:
        """Return the pieces of the next checkpoint: those that stay, and one without a sum for what is to be written.

        >>> history = History()
        >>> segments = Segments(history)
        >>> for step in range(1, 8):
        ...     history.add_evaluation(step, 0, {"val_loss": 1.0})
        ...     history.settled, segments.pieces = step, segments.due()
        >>> [piece.name for piece in segments.pieces]
        ['history-0-3.safetensors', 'history-4-5.safetensors', 'history-6-6.safetensors']
        """
        kept = [piece for piece in self.pieces if piece.last <= self.history.settled]
        start, end = kept[-1].last if kept else 0, self.history.records
        if start == end:
            return kept
        while kept and kept[-1].records <= end - start:
            start = kept.pop().first
        return [*kept, Piece(start, end)]

    def link(self, due: Sequence[Piece], folder: Path) -> list[Piece]:
        """Link the pieces that are on disk into `folder`; return those that are not, or could not be linked there."""
        lacking = []
        for piece in due:
            if not (piece.sha256 and piece in self.pieces and self._linked(piece.name, folder)):
                lacking.append(piece)
        return lacking

    def _linked(self, name: str, folder: Path) -> bool:
        """Link a file that nobody has touched since it was written. Some file systems have no links."""
        assert self.path is not None
        with contextlib.suppress(OSError):
            if _mark(self.path / name) == self._seen[name]:
                os.link(self.path / name, folder / name)
                return True
        return False

    def cut(self, piece: Piece) -> dict[str, Tensor]:
        """Return the records of a piece as tensors."""
        state = self.history.state(piece.first, min(piece.last, self.history.records))
        arrays = {name: np.ascontiguousarray(x) for name, x in state.items() if isinstance(x, np.ndarray)}
        tensors = {name: torch.from_numpy(x) for name, x in arrays.items()}
        return tensors | {EVALUATIONS: torch.tensor(list(json.dumps(state[EVALUATIONS]).encode()), dtype=torch.uint8)}

    def reach(self) -> dict[str, Any]:
        """Return what the description of a checkpoint says of its history."""
        end = self.history.records
        state = self.history.state(end)
        return {"records": end} | {name: state[name] for name in SMALL}

    def written(self, due: Sequence[Piece], sums: Mapping[str, str], path: Path) -> None:
        """The checkpoint `path` holds the pieces of `due`, whose files have these sums."""
        self.pieces = [Piece(piece.first, piece.last, sums[piece.name]) for piece in due]
        self.path, self.history.settled = path, self.history.records
        self._seen = {}
        for piece in due:
            with contextlib.suppress(OSError):  # then it will not be linked
                self._seen[piece.name] = _mark(path / piece.name)


def _mark(file: Path) -> tuple[int, int]:
    info = os.stat(file, follow_symlinks=False)
    return info.st_size, info.st_mtime_ns


def joined(pieces: Mapping[str, Mapping[str, Tensor]], reach: Mapping[str, Any]) -> dict[str, Any]:
    """Return `History.state()` of the pieces, by file name, of a checkpoint that `reach` describes.

    Raises:
        CheckpointError: they are not the records from the first to the last one, or not tensors as `cut` makes them.
    """
    if trouble := _unlike(reach):
        raise CheckpointError(f"what its description says of the history is wrong: {trouble}")
    spans = {name: tuple(int(part) for part in name.removesuffix(".safetensors").split("-")[1:]) for name in pieces}
    names = sorted(pieces, key=lambda name: spans[name])
    ends = [0, *(spans[name][1] + 1 for name in names)]
    if [spans[name][0] for name in names] != ends[:-1] or ends[-1] != reach["records"]:
        raise CheckpointError(
            f"its history has the pieces {', '.join(names) or 'none'}, wanted records 0 to {reach['records'] - 1}"
        )
    empty = History().state()
    parts: dict[str, list[np.ndarray]] = {name: [x] for name, x in empty.items() if isinstance(x, np.ndarray)}
    evaluations: list[Any] = []
    blocks = 0
    for name in names:
        piece = {key: x.numpy() for key, x in pieces[name].items()}
        if trouble := _trouble(piece, spans[name][1] + 1 - spans[name][0], parts):
            raise CheckpointError(f"{name} is not a piece of a history: {trouble}")
        of_stretch = piece["line_block"] >= 0
        piece["line_block"] = np.where(of_stretch, piece["line_block"] + blocks, piece["line_block"])
        blocks += len(piece["block_shapes"])
        for key in parts:
            parts[key].append(piece[key])
        more, steps = json.loads(piece[EVALUATIONS].tobytes()), set(piece["line_step"].tolist())
        if not isinstance(more, list) or not all(_is_evaluation(item, steps) for item in more):
            raise CheckpointError(f"{name} is not a piece of a history: its evaluations are of no step in it")
        evaluations += more
    arrays = {name: np.concatenate(x) for name, x in parts.items()}
    if np.any(np.diff(arrays["line_step"]) <= 0):
        raise CheckpointError("the steps of its history do not ascend")
    return arrays | {EVALUATIONS: evaluations} | {name: reach[name] for name in SMALL}


def _unlike(reach: Mapping[str, Any]) -> str:
    """Return what is wrong with what `Segments.reach` gave; "" where nothing is."""
    numbers = {name: reach.get(name) for name in ("records", "last_step")}
    if wrong := [name for name, x in numbers.items() if type(x) is not int or not 0 <= x < 1 << 62]:
        return f"{wrong[0]}={reach.get(wrong[0])!r}"
    columns, totals = reach.get("extra_columns"), reach.get("totals")
    if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
        return f"extra_columns={columns!r}"
    if not isinstance(totals, list) or [type(x) for x in totals] != [float] * 5:
        return f"totals={totals!r}"
    return ""


def _is_evaluation(item: Any, steps: Collection[int]) -> bool:
    """Say whether `item` is [step, node or None, {name: number, text or None}] of one of the `steps`."""
    if not (isinstance(item, list) and len(item) == 3 and type(item[0]) is int and item[0] in steps):
        return False
    values = item[2].values() if isinstance(item[2], dict) else [[]]
    return type(item[1]) in (int, type(None)) and all(isinstance(x, str | int | float | None) for x in values)


def _trouble(piece: Mapping[str, np.ndarray], records: int, wanted: Mapping[str, Sequence[np.ndarray]]) -> str:
    """Return what is wrong with a piece of so many records; "" where nothing is."""
    if piece.keys() != wanted.keys() | {EVALUATIONS}:
        return f"its names are {', '.join(sorted(piece))}"
    for name, (like,) in ((name, arrays[:1]) for name, arrays in wanted.items()):
        found = piece[name]
        rows = records if name.startswith("line_") else len(found) if found.ndim else -1
        if found.dtype != like.dtype or found.shape != (rows, *like.shape[1:]):
            return f"{name} is {found.dtype} {found.shape}"
    shapes, block, position = piece["block_shapes"], piece["line_block"], piece["line_position"]
    nodes, losses = int(shapes[:, 0].sum()), int(shapes.prod(1).sum())
    if np.any(shapes < 0) or len(piece["block_nodes"]) != nodes or len(piece["block_losses"]) != losses:
        return "its losses are not as many as the blocks say"
    inside = block >= 0
    numbers = np.repeat(np.arange(len(shapes)), shapes[:, 1])
    places = np.concatenate([np.empty(0, np.int64), *(np.arange(count) for count in shapes[:, 1])])
    if not (np.array_equal(block[inside], numbers) and np.array_equal(position[inside], places)):
        return "its records and losses do not fit"
    return ""
