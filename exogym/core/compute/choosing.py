"""`compute="auto"`: time each way of computing for a few steps, and choose the fastest way for this run.

Compiling takes seconds to a minute. So ExoGym tries "compiled" only if compiling would take at most a tenth of the
run's time, estimated from the number of operations. ExoGym chooses "compiled" only if all steps would then take less
time than with the other ways. This time includes loading the compiled code in each process.
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

LEAST_COMPILE_S, OPERATION_S = 10.0, 0.15  # to compile: fixed, and per operation; see benchmarks/RESULTS.md
LOAD_S = 6.0  # to load compiled code from the cache, in each process
SHARE = 0.1  # of a run, at most, for a trial that may fail
REPEATS = 3


def choose(worker: Worker, stream: Stream, strategy: Strategy, total_steps: int) -> str:
    """Choose a way of computing for a run: return "loop", "vmap" or "compiled", and print the reason."""
    if strategy.driven_by == "clock":
        notice(f"compute='auto' chose 'loop' ({type(strategy).__name__} computes its nodes one after another)")
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
    if "loop" in found:  # otherwise the run itself raises the error
        attempt("vmap", CHUNK_ROWS, 2)
        run_s = min(found.values()) * steps
        if run_s * SHARE < LEAST_COMPILE_S:
            why.append(f"compiling would take longer than it could save in a run of about {run_s:.2g} s")
        elif (compile_s := trial.compile_s(why)) > run_s * SHARE:
            why.append(f"compiling would take about {compile_s:.0f} s, more than a tenth of the run's {run_s:.0f} s")
        elif compile_s:
            attempt("compiled", 2, 10)
    left_s = {name: seconds * steps + (LOAD_S if name == "compiled" else 0.0) for name, seconds in found.items()}
    chosen = min(left_s, key=lambda name: left_s[name], default="loop")
    times = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in found.items())
    notice(f"compute='auto' chose {chosen!r} ({'; '.join([f'{times} for a step of one node', *why])})")
    return chosen


class _Trial:
    """Take steps as the run would, and restore everything afterwards."""

    def __init__(self, worker: Worker, stream: Stream, strategy: Strategy, total_steps: int):
        self.worker, self.stream, self.total_steps = worker, stream, total_steps
        self.inner = None if strategy.needs_gradients else strategy.inner

    def __call__(self, way: str, rows: Sequence[int], count: int) -> float:
        """Return the seconds per step of a row: the minimum over `REPEATS` repetitions after a warm-up."""
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
        """Estimate the seconds to compile. If compiling is impossible, return 0 and add the reason to `why`."""
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
