"""Wrappers that advance the virtual clock: by local steps, and by the time for which nodes wait for a server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from exogym.core.compute.spans import Compute, Losses, RowSpan
from exogym.core.training.around import Around
from exogym.core.training.driver import Algorithm
from exogym.core.training.timing import Timing
from exogym.network.pricing import AGREEMENTS

Item = TypeVar("Item", RowSpan, int)


class Charged(Around):
    """Wrap an algorithm, and advance the clock by a stretch's local steps before the nodes synchronize."""

    def __init__(self, within: Algorithm, timing: Timing):
        super().__init__(within)
        self.timing = timing

    def on_gradients(self, step: int, rows: Sequence[int], skip: bool) -> Sequence[int]:
        self._charge(step - 1, step)
        return self.within.on_gradients(step, rows, skip)

    def act(self, step: int, losses: Losses, before_mixing: Callable[[], None]) -> bool:
        if not self.needs_gradients:
            self._charge(losses.first, losses.last)
        return self.within.act(step, losses, before_mixing)

    def _charge(self, first: int, last: int) -> None:
        """Advance the clock by the steps from `first` to `last`; by (N,) counts if nodes differ."""
        work = self.work(first, last)
        self.timing.computed(last - first if work is None else work, AGREEMENTS + self.needs_gradients)


class ServerRounds(Around):
    """Wrap an algorithm whose server waits for only some clients. All nodes wait until the server's round ends."""

    def __init__(self, within: Algorithm, timing: Timing):
        super().__init__(within)
        self.timing = timing

    def act(self, step: int, losses: Losses, before_mixing: Callable[[], None]) -> bool:
        with self._round(step):
            return self.within.act(step, losses, before_mixing)

    def finish(self, step: int) -> None:
        with self._round(step, waits=False):
            self.within.finish(step)

    @contextlib.contextmanager
    def _round(self, step: int, waits: bool = True) -> Iterator[None]:
        round_ = self.within.server_round(step)
        if round_ is None:
            yield
            return
        clock, (clients, wait_s) = self.timing.clock, round_
        until_s = clock.last_s + wait_s if waits else 0.0
        clock.meet(until_s, clients)
        yield
        clock.meet(until_s)


class Measured:
    """Wrap a way of computing, and measure its steps' seconds: of each row, or of all rows if computed together."""

    def __init__(self, within: Compute, timing: Timing):
        self.within, self.timing = within, timing
        self.overflowed, self.spoilt = False, list[int]()

    def steps(self, spans: Sequence[RowSpan], losses: Losses, may_stop: bool = True) -> None:
        for part in self._timed(spans):
            self.within.steps(part, losses, may_stop)

    def gradients(self, rows: Sequence[int]) -> Tensor:
        self.overflowed, self.spoilt, found = False, [], []
        for part in self._timed(rows):
            found.append(self.within.gradients(part))
            self.overflowed = self.overflowed or self.within.overflowed
            self.spoilt += self.within.spoilt
        return torch.cat(found)

    def apply(self, rows: Sequence[int], skip: bool = False) -> None:
        for part in self._timed(rows):
            self.within.apply(part, skip)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.within, name)

    def _timed(self, items: Sequence[Item]) -> Iterator[Sequence[Item]]:
        """Yield `items` in parts, and time the caller's work on each part."""
        if not items:
            yield items
            return
        for part in [items] if self.together else [[item] for item in items]:
            begin = time.perf_counter()
            yield part
            self.timing.took([(x, 1) if isinstance(x, int) else (x.row, len(x.columns)) for x in part], begin)
