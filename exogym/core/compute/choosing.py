"""`compute="auto"`: a short trial says which way of computing ends the run soonest.

Compiling costs seconds to a minute, so it is tried only where a run is so long that even a trial in vain costs it a
tenth at most, by a guess from the number of operations; and taken only if what is left of the run then ends sooner.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from torch import Tensor

from exogym.core.compute.compiled import Stretches
from exogym.core.compute.finite import Watch
from exogym.core.compute.inner import InnerOptimizer
from exogym.core.compute.spans import Compute, Losses, Span, way_of
from exogym.core.compute.vmap import CHUNK_ROWS
from exogym.core.compute.worker import Worker
from exogym.core.progress import notice
from exogym.data.stream import Stream
from exogym.errors import ModelError, TrainingError
from exogym.strategy.strategy import Strategy

LEAST_COMPILE_S, OPERATION_S = 10.0, 0.15  # to compile anything, and one operation more; see benchmarks/RESULTS.md
LOAD_S = 6.0  # to take what was compiled from the cache again, which each process does
SHARE = 0.1  # of a run, at most, for a trial of what may not pay
REPEATS = 3


def choose(worker: Worker, stream: Stream, strategy: Strategy, total_steps: int) -> str:
    """Return "loop", "vmap" or "compiled", and say why."""
    if strategy.driven_by == "clock":
        notice(f"compute='auto' chose 'loop' ({type(strategy).__name__} takes its nodes one after another)")
        return "loop"
    rows, steps = len(worker.fleet), total_steps * len(worker.fleet)
    trial = _Trial(worker, stream, strategy, total_steps)
    found: dict[str, float] = {}
    why: list[str] = []

    def attempt(name: str, at_once: int, count: int) -> None:
        try:
            found[name] = trial(name, range(min(rows, at_once)), min(count, total_steps))
        except (ModelError, TrainingError) as error:
            why.append(str(error))

    attempt("loop", 2, 2)
    if "loop" in found:  # where not, the run itself says what is wrong
        attempt("vmap", CHUNK_ROWS, 2)
        run_s = min(found.values()) * steps
        if run_s * SHARE < LEAST_COMPILE_S:
            why.append(f"to compile would take longer than it could save of about {run_s:.2g} s")
        elif (compile_s := trial.compile_s(why)) > run_s * SHARE:
            why.append(f"to compile would take about {compile_s:.0f} s of {run_s:.0f}")
        elif compile_s:
            attempt("compiled", 2, 10)
    left_s = {name: seconds * steps + (LOAD_S if name == "compiled" else 0.0) for name, seconds in found.items()}
    chosen = min(left_s, key=lambda name: left_s[name], default="loop")
    times = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in found.items())
    notice(f"compute='auto' chose {chosen!r} ({'; '.join([f'{times} per node-step', *why])})")
    return chosen


class _Trial:
    """Takes steps as the run would, and puts everything back."""

    def __init__(self, worker: Worker, stream: Stream, strategy: Strategy, total_steps: int):
        self.worker, self.stream, self.total_steps = worker, stream, total_steps
        self.inner = None if strategy.needs_gradients else strategy.inner

    def __call__(self, way: str, rows: Sequence[int], count: int) -> float:
        """Return the seconds of a step of one of `rows`, the least of a few repetitions after a first one."""
        fleet, best = self.worker.fleet, math.inf
        parts = dict(fleet.state.parts)
        kept = [x[: len(rows)].clone() for x in [*(b.params for b in fleet.blocks), *fleet.buffers.values()]]
        try:
            compute = self._made(way)
            for repetition in range(1 + REPEATS):
                losses = Losses(len(fleet), self.worker.device)
                losses.begin(0, count)
                start = time.perf_counter()
                if self.inner is None:
                    compute.gradients(rows)
                else:
                    compute.steps([Span(row, range(count)) for row in rows], losses)
                taken = len(rows) * (1 if self.inner is None else count)
                if repetition:
                    best = min(best, (time.perf_counter() - start) / taken)
                self._put_back(kept, rows)
                compute.taken[:] = 0
        finally:
            self._put_back(kept, rows)
            self.worker.clear_grads()
            fleet.state.parts.clear()
            fleet.state.parts.update(parts)
        return best

    def compile_s(self, why: list[str]) -> float:
        """Return about how long it takes to compile; 0, and why, where it cannot be."""
        try:
            found = Stretches(self.worker, self.stream, self._optimizer())
            return LEAST_COMPILE_S + OPERATION_S * found.operations * found.most
        except ModelError as error:
            why.append(str(error))
            return 0.0

    def _made(self, way: str) -> Compute:
        return way_of(way)(self.worker, self.stream, self._optimizer(), Watch("ignore", self.worker))

    def _optimizer(self) -> InnerOptimizer | None:
        return None if self.inner is None else InnerOptimizer(self.inner, self.worker, self.total_steps)

    def _put_back(self, kept: Sequence[Tensor], rows: Sequence[int]) -> None:
        fleet = self.worker.fleet
        for x, before in zip([*(b.params for b in fleet.blocks), *fleet.buffers.values()], kept, strict=True):
            x[: len(rows)] = before
