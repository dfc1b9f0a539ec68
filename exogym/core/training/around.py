"""A base class for wrappers of an `Algorithm`. Features that change which nodes act, or when, derive from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from exogym.core.compute.spans import Losses, RowSpan
from exogym.core.training.driver import Algorithm


class Around(Algorithm):
    """Pass every call on to a wrapped algorithm, `within`. Subclasses override the methods that a feature changes."""

    def __init__(self, within: Algorithm):
        self.within, self.fleet, self.compute = within, within.fleet, within.compute
        self.needs_gradients, self.leaves_out, self.keeps_time = (
            within.needs_gradients,
            within.leaves_out,
            within.keeps_time,
        )

    @property
    def nodes(self) -> Sequence[int]:
        return self.within.nodes

    def lr(self, step: int) -> float:
        return self.within.lr(step)

    def next_event(self, step: int) -> int:
        return self.within.next_event(step)

    def begin(self, step: int) -> None:
        self.within.begin(step)

    def work(self, first: int, last: int) -> np.ndarray | None:
        return self.within.work(first, last)

    def server_round(self, step: int) -> tuple[list[int], float] | None:
        return self.within.server_round(step)

    def seated(self, step: int) -> tuple[Sequence[int], Sequence[int]]:
        return self.within.seated(step)

    def spans(self, losses: Losses, counts: Sequence[int]) -> list[RowSpan]:
        return self.within.spans(losses, counts)

    def on_gradients(self, step: int, rows: Sequence[int], skip: bool) -> Sequence[int]:
        return self.within.on_gradients(step, rows, skip)

    def act(self, step: int, losses: Losses, before_mixing: Callable[[], None]) -> bool:
        return self.within.act(step, losses, before_mixing)

    def end_stretch(self, losses: Losses) -> tuple[Sequence[int], Tensor]:
        return self.within.end_stretch(losses)

    def rejoin(self, nodes: Sequence[int], source: int, step: int, forget: bool, as_fleet: bool) -> None:
        self.within.rejoin(nodes, source, step, forget, as_fleet)

    def finish(self, step: int) -> None:
        self.within.finish(step)

    def consensus(self) -> list[Tensor] | None:
        return self.within.consensus()

    def consensus_buffers(self) -> dict[str, Tensor] | None:
        return self.within.consensus_buffers()

    def close(self) -> None:
        self.within.close()
