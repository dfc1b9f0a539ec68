"""Stretches of local steps: the steps of each row (`RowSpan`), their losses, and the interface of ways of computing."""

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

CHUNK_ROWS = 10  # whose gradients "vmap" computes at once
# `fit(compute=)`'s names -> the class in this folder's module of the same name.
WAYS = {"loop": "Loop", "vmap": "Vmap"}


@dataclass(frozen=True)
class RowSpan:
    """Consecutive local steps of one row (its number in this process).

    Attributes:
        columns: (K,) the columns of `Losses` that get the losses of the K steps.
        at: (K,) step numbers for the learning rate's schedule, by default the row's own.
    """

    row: int
    columns: Sequence[int] | np.ndarray
    at: np.ndarray | None = None


class Losses(Stateful):
    """Collect the losses of the current stretch.

    In one step of the run, a row may take several local steps or none, so a sum of losses and a count of local steps
    are kept for each row and step.

    Attributes:
        first, last: the stretch's first step, and the step after its last.
        counts: (rows, last - first) local steps taken so far, for each step of the stretch.
        under_way: whether a stretch has begun and not ended.

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

    def end_at(self, last: int) -> None:
        """Shorten the current stretch so that it ends at `last`."""
        count = last - self.first
        self.last, self.sums, self.counts = last, self.sums[:, :count], self.counts[:, :count]

    def forget(self) -> None:
        """Discard the losses of the current stretch."""
        self.under_way = False

    def add(self, row: int, columns: Sequence[int] | np.ndarray, values: Tensor) -> None:
        """Add `values`, the losses (K,) of the row's next K local steps, at the first K of `columns`."""
        columns = columns[: len(values)]
        if isinstance(columns, range):
            here = slice(columns.start, columns.stop)
            self.sums[row, here] = values.to(self.sums)
            self.counts[row, here] = 1
            return
        index = np.asarray(columns, dtype=np.int64)
        sums = self.sums[row].cpu()  # the CPU adds in order; a GPU does not
        self.sums[row] = sums.index_add_(0, torch.from_numpy(index), values.cpu().to(sums.dtype)).to(self.device)
        np.add.at(self.counts[row], index, 1)

    def done(self, row: int) -> int:
        """Return the number of local steps that the row has taken in this stretch."""
        return int(self.counts[row].sum())

    def end(self) -> Tensor:
        """End the stretch; return its `means`."""
        self.under_way = False
        return self.means()

    def means(self) -> Tensor:
        """Return each row's mean loss in each step, (rows, last - first); NaN if it took no local step."""
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
    """A way of computing rows' local steps, "loop" or "vmap". All ways must agree with "loop".

    A way of computing doesn't measure time, so it may run a span step by step, or many rows at once.

    Attributes:
        fleet: the fleet of this process's rows.
        taken: (rows,) each row's number of local steps so far. This number decides the row's next batch and learning
            rate.
        together: whether several rows are computed at once. Otherwise the caller can time each row separately.
        overflowed: whether a gradient of the last `gradients` call overflowed in fp16.
        spoilt: rows whose gradient was not finite in the last `gradients` call.
    """

    fleet: Fleet
    taken: np.ndarray
    together: bool
    overflowed: bool
    spoilt: list[int]

    def steps(self, spans: Sequence[RowSpan], losses: Losses, may_stop: bool = True) -> None:
        """Take the local steps of `spans`. If `may_stop`, a stop request ends the call between two steps."""
        ...

    def gradients(self, rows: Sequence[int]) -> Tensor:
        """Write the gradients of the next step of `rows` into the blocks' `grads`; return the losses, (len(rows),)."""
        ...

    def apply(self, rows: Sequence[int], skip: bool = False) -> None:
        """Take the inner step of `rows` with the blocks' `grads`. If `skip` is true, only count the step."""
        ...

    def rescale(self, rows: Sequence[int], overflowed: bool) -> None:
        """Update the fp16 loss scales of `rows`; `overflowed` says whether a gradient overflowed."""
        ...

    def reset(self, row: int) -> None:
        """Delete the state of the row's inner optimizer."""
        ...

    def close(self) -> Any:
        """Remove hooks and free resources."""
        ...


def way_of(name: str) -> Callable[..., Compute]:
    """Return the class of the way of computing with this name.

    The class takes (worker, stream, inner, watch, bucket_bytes=None) and is a `Compute`.

    >>> way_of("loop").__name__
    'Loop'
    """
    return getattr(importlib.import_module(f"exogym.core.compute.{name}"), WAYS[name])
