"""What a run on several hosts saw of them: how long its collectives took, and a step on each host.

A call of the wire is timed in each process. All make the same calls in the same order, so the process that waited least
for one, having come last, says how long it took by itself. The medians of these make a file for `Network.of`, as the
self-test writes it, of the sizes that the run had. A step is a process's time in training without the
wire: computing, the strategy's own work and the loop's.
"""

from __future__ import annotations

import datetime
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from exogym.core.communicator import gather
from exogym.core.engine.here import Group
from exogym.core.engine.wire import ProcessWire
from exogym.network.probes import never_falling
from exogym.strategy.strategy import Strategy
from exogym.study.advise.afterwards import what_it_sends
from exogym.trainer import LocalTrainer

Result = TypeVar("Result")
MOST = 64  # calls of a collective and a size that are timed
LEAST = 3  # calls of a size that say something
AGREEMENT = "agreement"


class Stopwatch:
    """Goes around the calls of a wire and times them: the first `MOST` of each collective and size.

    Attributes:
        took_s: seconds of these calls, by "collective bytes"; the wire's `waited_s` is of all.
    """

    def __init__(self, wire: ProcessWire):
        self.wire = wire
        self.took_s: dict[str, list[float]] = {}
        self._inside = False

    def __call__(
        self, call: Callable[[], Result], what: str, x: Tensor | None = None, ids: Sequence[int] = ()
    ) -> Result:
        if self._inside:
            return call()
        self._inside = True
        try:
            self._settle()
            start = time.perf_counter()
            result = call()
            self._settle()
            took_s = time.perf_counter() - start
        finally:
            self._inside = False
        self.wire.waited_s += took_s
        size = 4 if x is None else x[:1].numel() * x.element_size()
        if size and (name := self._name(what, len(set(ids)))) is not None:
            taken = self.took_s.setdefault(f"{name} {size}", [])
            if len(taken) < MOST:
                taken.append(took_s)
        return result

    def _name(self, what: str, members: int) -> str | None:
        """Return the collective of a call over so many nodes; None: of no interest."""
        everyone = len(self.wire.owner)
        if what in ("reduce sum", "reduce mean") and members == everyone:
            return "all_reduce" if self.wire.native else "exact all_reduce"
        if what == "rows":
            return {1: "broadcast", everyone: "all_gather"}.get(members)
        return AGREEMENT if what == "agree" else None

    def _settle(self) -> None:
        """Let a GPU come to the end of what it was given: else it would be timed with what comes next."""
        if self.wire.device.type == "cuda":
            torch.cuda.synchronize(self.wire.device)

    def fields(self, step_s: float) -> dict[str, Any] | None:
        """Return what all processes saw, as `Network.of` reads it; None where that says nothing. All call it alike.

        Args:
            step_s: of a step here, without the wire.
        """
        seen, steps = gather(self.wire, self.took_s), gather(self.wire, step_s)
        if len(self.wire.owner) != len(self.wire.placement) or len(self.wire.placement) < 2 or min(steps) <= 0:
            return None  # what several nodes of a process do together is not what hosts of one node do
        tables: dict[str, dict[float, float]] = {}
        for key in set.intersection(*(set(one) for one in seen)):
            calls = list(zip(*(one[key] for one in seen), strict=False))
            if len(calls) >= LEAST:
                name, _, size = key.rpartition(" ")
                tables.setdefault(name, {})[float(size)] = statistics.median(map(min, calls))
        told = tables.pop(AGREEMENT, {})
        tables = {name: never_falling(table) for name, table in sorted(tables.items())}
        if not any("all_reduce" in name or name in ("all_gather", "broadcast") for name in tables):
            return None
        return {
            "num_nodes": len(self.wire.owner),
            "collectives": {name: {f"{size:.0f}": s for size, s in table.items()} for name, table in tables.items()},
            "step_s": steps,
            "versions": {
                "torch": torch.__version__, "python": sys.version.split()[0],
                "backend": dist.get_backend(self.wire.group),
            },
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        } | ({"message_s": min(told.values())} if told else {})  # fmt: skip


class Watched:
    """Watches the run of a trainer in a launcher's world, whose engine it becomes."""

    def __init__(self, trainer: LocalTrainer):
        self.trainer, self._watches = trainer, list[Stopwatch]()
        trainer.engine = Group(self._wire)

    def _wire(self, placement: Sequence[Sequence[int]], native: bool) -> ProcessWire:
        wire = ProcessWire(placement, native=native)
        wire.around = watch = Stopwatch(wire)
        self._watches.append(watch)
        return wire

    def describe(self, strategy: Strategy) -> None:
        """Add measurements to the trainer's description: "seen", "seconds_per_step", "plan". All processes call it."""
        description = self.trainer.description
        steps, training_s, own_s = self.trainer.spent
        if (seen := self._watches[-1].fields(own_s / max(1, steps))) is not None:
            description |= {"seen": seen, "seconds_per_step": training_s / steps}
            description |= what_it_sends(strategy, description)
