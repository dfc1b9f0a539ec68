"""What a run on several hosts saw of them: how long its collectives took, and a step on each host.

A call of the wire is timed in each process. All make the same calls in the same order, so the process that waited least
for one, having come last, says how long it took by itself. The medians of these make a file for `Network.of`, as the
self-test writes it, of the sizes that the run had. A step is what remains of a process's time in training without the
wire: computing, the strategy's own work and the loop's.
"""

from __future__ import annotations

import datetime
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from exogym.core.engine.group import Group
from exogym.core.engine.wire import ProcessWire
from exogym.network.probes import never_falling
from exogym.strategy.strategy import Strategy
from exogym.study.advise.afterwards import what_it_sends
from exogym.trainer import LocalTrainer

Result = TypeVar("Result")
MOST = 64  # calls of a collective and a size that are timed
LEAST = 3  # calls of a size that say something
AGREEMENT = "agreement"


class WatchedWire(ProcessWire):
    """A `ProcessWire` that times its calls: the first `MOST` of each collective and size; `waited_s` is of all."""

    def __init__(self, placement: Sequence[Sequence[int]], group: Any = None, native: bool = False):
        super().__init__(placement, group, native)
        self.took_s: dict[str, list[float]] = {}  # by "collective bytes"
        self._inside = False

    def rows(self, x: Tensor, ids: Sequence[int]) -> Tensor:
        name = {1: "broadcast", len(self.owner): "all_gather"}.get(len(set(ids)))
        return self._timed(name, x, lambda: super(WatchedWire, self).rows(x, ids))

    def reduce(
        self, x: Tensor, ids: Sequence[int], op: str, weights: Tensor | None = None, everywhere: bool = True
    ) -> Tensor:
        name = "all_reduce" if self.native else "exact all_reduce"
        known = name if op in ("sum", "mean") and len(ids) == len(self.owner) else None
        return self._timed(known, x, lambda: super(WatchedWire, self).reduce(x, ids, op, weights, everywhere))

    def agree(self, flag: bool) -> bool:
        return self._timed(AGREEMENT, torch.empty(1), lambda: super(WatchedWire, self).agree(flag))

    def begin(self, x: Tensor) -> Any:
        return _Begun(self, super().begin(x))

    def hand_over(self, given: Mapping[int, Tensor], parcels: Sequence[Any]) -> dict[int, Tensor]:
        return self._timed(None, torch.empty(0), lambda: super(WatchedWire, self).hand_over(given, parcels))

    def _timed(self, name: str | None, x: Tensor, call: Callable[[], Result]) -> Result:
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
        self.waited_s += took_s
        if name is not None and x.numel():
            taken = self.took_s.setdefault(f"{name} {x[0].numel() * x.element_size()}", [])
            if len(taken) < MOST:
                taken.append(took_s)
        return result

    def _settle(self) -> None:
        """Let a GPU come to the end of what it was given: else it would be timed with what comes next."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def fields(self, step_s: float) -> dict[str, Any] | None:
        """Return what all processes saw, as `Network.of` reads it; None where that says nothing. All call it alike.

        Args:
            step_s: of a step here, without the wire.
        """
        seen, steps = self.gather(self.took_s), self.gather(step_s)
        if len(self.owner) != len(self.placement) or len(self.placement) < 2 or min(steps) <= 0:
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
            "num_nodes": len(self.owner),
            "collectives": {name: {f"{size:.0f}": s for size, s in table.items()} for name, table in tables.items()},
            "step_s": steps,
            "versions": {
                "torch": torch.__version__, "python": sys.version.split()[0], "backend": dist.get_backend(self.group),
            },
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        } | ({"message_s": min(told.values())} if told else {})  # fmt: skip


class _Begun:
    """A sum that was begun; what is waited for it is no computing."""

    def __init__(self, wire: WatchedWire, work: Any):
        self.wire, self.work = wire, work

    def wait(self) -> None:
        self.wire._timed(None, torch.empty(0), self.work.wait)


class Watched:
    """Watches the run of a trainer in a launcher's world, whose engine it becomes."""

    def __init__(self, trainer: LocalTrainer):
        self.trainer, self._wires = trainer, list[WatchedWire]()
        trainer.engine = Group(self._wire)

    def _wire(self, placement: Sequence[Sequence[int]], native: bool) -> WatchedWire:
        self._wires.append(WatchedWire(placement, native=native))
        return self._wires[-1]

    def describe(self, strategy: Strategy) -> None:
        """Add what was seen to the trainer's description: "seen", "seconds_per_step", "plan". All processes call it."""
        description = self.trainer.description
        steps, training_s, own_s = self.trainer.spent
        if (seen := self._wires[-1].fields(own_s / max(1, steps))) is not None:
            description |= {"seen": seen, "seconds_per_step": training_s / steps}
            description |= what_it_sends(strategy, description)
