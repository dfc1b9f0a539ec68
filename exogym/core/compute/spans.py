"""Stretches of local steps: what is asked of a way of computing, the losses that come of it; and the ways."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from exogym.core.fleet import Fleet, Stateful
from exogym.core.fleet.state import Tensors

# By the name that `fit(compute=)` takes, what makes a way in the module of that name in this folder.
WAYS = {"loop": "Loop", "vmap": "way", "compiled": "way", "graphs": "way"}


@dataclass(frozen=True)
class Span:
    """Local steps of one row, one after the other.

    Attributes:
        row: here.
        columns: (K,) the column of `Losses` into which the loss of each of the K steps falls.
        at: (K,) steps that the learning rate of each follows; None: the row's own count.
        source: whose batches they are, and the step there of the first; None: the row's own.
    """

    row: int
    columns: Sequence[int] | np.ndarray
    at: np.ndarray | None = None
    source: tuple[int, int] | None = None


class Losses(Stateful):
    """The losses of a stretch of steps of the fleet, while it is under way and after.

    A row may take no step, one or several in a step of the fleet: sums and counts are kept for each.

    Attributes:
        first, last: the stretch goes from step `first` to step `last` of the fleet.
        counts: (rows, last - first) local steps taken so far.
        under_way: whether a stretch was begun and has not ended.

    >>> losses = Losses(2, torch.device("cpu"))
    >>> losses.begin(10, 13)
    >>> losses.add(0, range(2), torch.tensor([1.0, 2.0]))
    >>> losses.add(1, [2, 2], torch.tensor([1.0, 2.0]))
    >>> losses.done(1), losses.end()
    (2, tensor([[1.0000, 2.0000,    nan],
            [   nan,    nan, 1.5000]]))
    """

    def __init__(self, rows: int, device: torch.device):
        self.rows, self.device = rows, device
        self.first = self.last = 0
        self.under_way = False

    def begin(self, first: int, last: int) -> None:
        self.first, self.last, self.under_way = first, last, True
        self.sums = torch.zeros((self.rows, last - first), device=self.device)
        self.counts = np.zeros((self.rows, last - first), dtype=np.int64)

    def forget(self) -> None:
        """No stretch is under way."""
        self.under_way = False

    def add(self, row: int, columns: Sequence[int] | np.ndarray, values: Tensor) -> None:
        """Take in the losses (K,) of the row's next K steps, which fall into the first K of `columns`."""
        columns = columns[: len(values)]
        if isinstance(columns, range):
            here = slice(columns.start, columns.stop)
            self.sums[row, here] = values.to(self.sums)
            self.counts[row, here] = 1
            return
        index = np.asarray(columns, dtype=np.int64)
        sums = self.sums[row].cpu()  # where they are added in order; a GPU adds in any
        self.sums[row] = sums.index_add_(0, torch.from_numpy(index), values.cpu().to(sums.dtype)).to(self.device)
        np.add.at(self.counts[row], index, 1)

    def done(self, row: int) -> int:
        """Return how many local steps the row has taken in this stretch."""
        return int(self.counts[row].sum())

    def end(self) -> Tensor:
        """End the stretch; return the mean loss of each row in each step of the fleet, NaN where it took none."""
        self.under_way = False
        if (self.counts == 1).all():
            return self.sums
        sums = self.sums
        if self.counts.max(initial=0) > 1:  # divided on the CPU: not every device has doubles
            sums = (sums.cpu().double() / torch.from_numpy(self.counts)).to(sums)
        return sums.where(torch.from_numpy(self.counts > 0).to(self.device), torch.nan)

    def row(self, row: int) -> Tensors:
        if not self.under_way:
            return {}
        return {"sums": self.sums[row], "counts": torch.from_numpy(self.counts[row].copy())}

    def load_row(self, row: int, tensors: Tensors) -> None:
        if self.under_way:
            self.sums[row] = tensors["sums"]
            self.counts[row] = tensors["counts"].numpy()


class Compute(Protocol):
    """A way of computing local steps of rows: `loop`, `vmap`, `compiled`, and what is to come. All are held to `loop`.

    It is timed from outside, so it may run a span as it likes: step by step, many rows at once, as one graph.

    Attributes:
        fleet: of the rows here.
        taken: (rows,) local steps of each row so far; batches and learning rates follow it.
        together: whether it computes the rows it is given at once; where not, each may be timed by itself.
        overflowed, spoilt: of the last `gradients`: whether one overflowed in fp16; rows where one was not finite.
    """

    fleet: Fleet
    taken: np.ndarray
    together: bool
    overflowed: bool
    spoilt: list[int]

    def steps(self, spans: Sequence[Span], losses: Losses, may_stop: bool = True) -> None:
        """Take the local steps of `spans`; if it `may_stop`, up to a moment between two steps where the run is to stop.

        Raises:
            TrainingError: a loss or an update is not finite; the message names node, step and tensor.
        """
        ...

    def gradients(self, rows: Sequence[int]) -> Tensor:
        """Write the gradients of the next step of `rows` into the blocks' `grads`; return the losses, (len(rows),)."""
        ...

    def apply(self, rows: Sequence[int], skip: bool = False) -> None:
        """Take the inner step of `rows` with the blocks' `grads` as they are; `skip` counts it without taking it."""
        ...

    def rescale(self, rows: Sequence[int], overflowed: bool) -> None:
        """Let the loss scales of `rows` follow whether a gradient overflowed, in fp16."""
        ...

    def reset(self, row: int) -> None:
        """Start the row's inner optimizer afresh."""
        ...

    def close(self) -> Any:
        """Leave nothing behind."""
        ...


def way_of(name: str) -> Callable[..., Compute]:
    """Return what makes a way of computing: `way(worker, stream, inner, watch, bucket_bytes=None) -> Compute`.

    >>> way_of("loop").__name__
    'Loop'
    """
    return getattr(importlib.import_module(f"exogym.core.compute.{name}"), WAYS[name])
