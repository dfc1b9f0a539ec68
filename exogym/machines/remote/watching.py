"""Measure hosts during a run: the time of the run's collectives, and the time of a step on each host.

Each process times its collectives on the wire. All processes call the same collectives in the same order. The process
that calls last waits least for the other processes, so the shortest of the processes' times is the collective's own
time. For each message size of the run, the median over the calls goes into a file for `Network.of`, as after the
self-test. The time of a step is a process's training time without the wire: computing, the strategy's own work and the
loop.
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
MOST = 64  # timed calls per collective and size
LEAST = 3  # fewest calls for a useful median
AGREEMENT = "agreement"


class Stopwatch:
    """Times a wire's calls: the first 64 calls for each collective and message size.

    Args:
        behind: the stopwatch of the wire's own calls. If `behind` is given, the new stopwatch times transfers in
            another thread, and adds the times to the same `took_s`. The process does not wait meanwhile, so `waited_s`
            does not change.

    Attributes:
        took_s: {"collective bytes": seconds of each timed call}. The wire's `waited_s` counts the time of all calls.
    """

    def __init__(self, wire: ProcessWire, behind: Stopwatch | None = None):
        self.wire = wire
        self.took_s: dict[str, list[float]] = {} if behind is None else behind.took_s
        self._waits = behind is None
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
        self.wire.waited_s += took_s * self._waits
        size = 4 if x is None else x[:1].numel() * x.element_size()
        if size and (name := self._name(what, len(set(ids)))) is not None:
            taken = self.took_s.setdefault(f"{name} {size}", [])
            if len(taken) < MOST:
                taken.append(took_s)
        return result

    def _name(self, what: str, members: int) -> str | None:
        """Return the collective's name for a call over `members` nodes; None: do not time it."""
        everyone = len(self.wire.owner)
        if what in ("reduce sum", "reduce mean") and members == everyone:
            return "all_reduce" if self.wire.native else "exact all_reduce"
        if what == "rows":
            return {1: "broadcast", everyone: "all_gather"}.get(members)
        return AGREEMENT if what == "agree" else None

    def _settle(self) -> None:
        """Wait until the GPU has finished its work, so that the next call's time does not include it."""
        if self.wire.device.type == "cuda":
            torch.cuda.synchronize(self.wire.device)

    def fields(self, step_s: float) -> dict[str, Any] | None:
        """Return all processes' measurements for `Network.of`. All processes must call this method.

        Return None if the measurements are too few, or if a process holds several nodes.

        Args:
            step_s: seconds of a step in this process, without the wire.
        """
        seen, steps = gather(self.wire, self.took_s), gather(self.wire, step_s)
        if len(self.wire.owner) != len(self.wire.placement) or len(self.wire.placement) < 2 or min(steps) <= 0:
            return None  # calls of processes with several nodes are not comparable
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
    """Gives a trainer an engine that measures its run, in processes that a launcher has started."""

    def __init__(self, trainer: LocalTrainer):
        self.trainer, self._watches = trainer, list[Stopwatch]()
        trainer.engine = Group(self._wire)

    def _wire(self, placement: Sequence[Sequence[int]], native: bool) -> ProcessWire:
        wire = ProcessWire(placement, native=native)
        wire.around = watch = Stopwatch(wire)
        wire.around_behind = Stopwatch(wire, behind=watch)
        self._watches.append(watch)
        return wire

    def describe(self, strategy: Strategy) -> None:
        """Add the measurements to the trainer's description. All processes must call this method.

        The entries are "seen" (the measurements for `Network.of`), "seconds_per_step" and "plan" (what `strategy`
        sends).
        """
        description = self.trainer.description
        steps, training_s, own_s = self.trainer.spent
        if (seen := self._watches[-1].fields(own_s / max(1, steps))) is not None:
            description |= {"seen": seen, "seconds_per_step": training_s / steps}
            description |= what_it_sends(strategy, description)
