"""A base class for wrappers of an `Algorithm`. Features that change which nodes act, or when, derive from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from exogym.core.compute.spans import Losses, Span
from exogym.core.training.algorithm import Algorithm


class Around(Algorithm):
    """Pass every call on to the wrapped algorithm. A subclass overrides the methods that its feature changes."""

    def __init__(self, inner: Algorithm):
        self.inner, self.fleet, self.compute = inner, inner.fleet, inner.compute
        self.needs_gradients, self.leaves_out, self.keeps_time = (
            inner.needs_gradients,
            inner.leaves_out,
            inner.keeps_time,
        )

    @property
    def nodes(self) -> Sequence[int]:
        return self.inner.nodes

    def lr(self, step: int) -> float:
        return self.inner.lr(step)

    def next_event(self, step: int) -> int:
        return self.inner.next_event(step)

    def begin(self, step: int) -> None:
        self.inner.begin(step)

    def work(self, first: int, last: int) -> np.ndarray | None:
        return self.inner.work(first, last)

    def server_round(self, step: int) -> tuple[list[int], float] | None:
        return self.inner.server_round(step)

    def seated(self, step: int) -> tuple[Sequence[int], Sequence[int]]:
        return self.inner.seated(step)

    def spans(self, losses: Losses, counts: Sequence[int]) -> list[Span]:
        return self.inner.spans(losses, counts)

    def on_gradients(self, step: int, rows: Sequence[int], skip: bool) -> Sequence[int]:
        return self.inner.on_gradients(step, rows, skip)

    def act(self, step: int, losses: Losses, before_mixing: Callable[[], None]) -> bool:
        return self.inner.act(step, losses, before_mixing)

    def told(self, losses: Losses) -> tuple[Sequence[int], Tensor]:
        return self.inner.told(losses)

    def rejoin(self, nodes: Sequence[int], source: int, step: int, forget: bool, as_fleet: bool) -> None:
        self.inner.rejoin(nodes, source, step, forget, as_fleet)

    def finish(self, step: int) -> None:
        self.inner.finish(step)

    def outer(self) -> list[Tensor] | None:
        return self.inner.outer()

    def outer_buffers(self) -> dict[str, Tensor] | None:
        return self.inner.outer_buffers()

    def close(self) -> None:
        self.inner.close()
