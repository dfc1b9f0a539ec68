"""A run's virtual clock: it predicts the time on a given network while the run trains.

A step takes the given seconds, or the seconds that ExoGym measures on this machine for each node. The network
determines the collectives' seconds. Training does not depend on the clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from exogym.core.base.devices import Device
from exogym.core.clock import Clock, StepTime
from exogym.core.clock.clock import PARTS
from exogym.core.communicator import Event
from exogym.core.fleet import Fleet
from exogym.core.fleet.state import Shared

MOST_NODES = 64  # in an event


class Timing:
    """Advance a `Clock` by the time for which a fleet's nodes compute and send.

    Delayed averages overlap with computation as `Clock` says. On a measured network, an all-reduce takes as long as
    ExoGym's exact all-reduce on hosts, or as torch's all-reduce with `Placement(reduction="native")`.

    Args:
        fleet: from now on, the clock follows the events of this fleet's communicator.
        network, step_seconds, timeline: as for `Clock`. With `step_seconds=None` ExoGym measures the steps.
        work: (N,) size of each node's steps relative to `step_seconds`, if sizes differ.
        overlap: whether averages that arrive late overlap with computing.

    >>> from exogym.fleet import Fleet
    >>> fleet = Fleet(torch.nn.Linear(2, 1), range(2), 2, torch.device("cpu"))
    >>> timing = Timing(fleet, "1Gbps", "10ms")
    >>> timing.computed(np.array([3, 1]))
    >>> timing.clock.time_s.tolist()
    [0.03, 0.01]
    """

    def __init__(
        self,
        fleet: Fleet,
        network: Any,
        step_seconds: Any = None,
        timeline: bool = False,
        work: np.ndarray | None = None,
        overlap: bool = True,
    ):
        self.fleet, self.is_measured, self.overlap = fleet, step_seconds is None, overlap
        self.clock = Clock(fleet.num_nodes, network, 0.0 if self.is_measured else step_seconds, timeline=timeline)
        of_hosts = self.clock.network.measurement is not None or self.clock.network.tcp
        self._is_exact = of_hosts and not fleet.comm.wire.native
        if work is not None:
            self.clock.step_time = self.clock.step_time.for_work(work)
        self.taken_s = np.zeros(len(fleet))
        fleet.comm.ledger.listeners.append(self._hear)
        fleet.state.register("clock", Shared(self.clock.state, self.clock.load_state))

    def took(self, steps: Sequence[tuple[int, int]], begin: float) -> None:
        """Record `steps`, pairs (row, count), which together took the time since `begin` (`time.perf_counter`)."""
        if self.is_measured:
            Device(self.fleet.blocks[0].params.device).synchronize()
        taken_s = time.perf_counter() - begin
        total = sum(count for _, count in steps)
        for row, count in steps:
            self.taken_s[row] += taken_s * count / total

    def computed(self, counts: np.ndarray | int, agreements: int = 0) -> None:
        """Record that the nodes took `counts` steps, (N,) or one number, with `agreements` between their processes."""
        counts = np.broadcast_to(np.asarray(counts), self.fleet.num_nodes)
        if not self.is_measured:
            self.clock.advance(counts)
            self.clock.agree(agreements)
            return
        mine = self.fleet.comm.wire.devices.maximum(torch.from_numpy(self.taken_s.copy())[:, None])
        nodes = sorted(i for ids in self.fleet.comm.wire.placement for i in ids)
        taken_s = np.zeros(self.fleet.num_nodes)
        taken_s[nodes] = self.fleet.comm.wire.rows(mine, nodes)[:, 0].numpy()
        self.clock.advance(counts, np.where(counts > 0, taken_s, 0.0))
        self.taken_s[:] = 0
        self.clock.agree(agreements)

    def _hear(self, event: Event) -> None:
        if not self.overlap:
            if event.kind == "arrive":
                return
            event = replace(event, flight=None)
        if self._is_exact and (event.kind, event.algorithm) == ("all_reduce", "ring"):
            event = replace(event, algorithm="exact")
        self.clock.event(event)

    @property
    def time_s(self) -> float:
        """Predicted seconds of the run so far: the latest time on any node's clock."""
        return self.clock.last_s

    def parts(self) -> dict[str, list[float]]:
        """Return the seconds so far of computing, waiting and sending, for each of the first 64 nodes."""
        return {part: self.clock.seconds(part, slice(MOST_NODES)).round(6).tolist() for part in PARTS}

    def values(self, node: int | None = None) -> dict[str, float]:
        """Return time_s, waiting_share and bandwidth_use of `node`, or the largest time_s and the mean shares."""
        clock = self.clock
        if node is not None:
            return clock.figures(node)
        return {
            "time_s": self.time_s,
            "waiting_share": float(clock.waiting_share.mean()),
            "bandwidth_use": float(clock.bandwidth_use.mean()),
        }


def mean_seconds(step_seconds: Any, num_nodes: int) -> np.ndarray:
    """Return (N,) the mean seconds of each node's step, from the option `step_seconds`."""
    time_ = step_seconds if isinstance(step_seconds, StepTime) else StepTime(step_seconds)
    return time_.mean_s(num_nodes)
