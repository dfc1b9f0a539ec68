"""The virtual clock of a run: how long it would take on a given network, predicted while it trains.

Steps take the seconds that are given, or those that were measured here, node by node. Collectives take what the
network says. Training does not depend on it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from exogym.core.clock import Clock, StepTime
from exogym.core.clock.clock import PARTS
from exogym.core.clock.timeline import MOST_NODES
from exogym.core.communicator import Event
from exogym.core.fleet import Fleet
from exogym.core.fleet.state import Shared


class Timing:
    """Drives a `Clock` with what the nodes of a fleet compute and send.

    In a simulation's clock, averages that arrive late overlap with computing. On hosts, a run waits for them where it
    sends them. A network that was measured stands for hosts on which this library runs. An all-reduce then takes what
    the run's own takes, the exact one unless it is native.

    Args:
        fleet: its communicator's events are taken into account from here on.
        network, step_seconds, timeline: as `Clock`; step_seconds None: measured.
        work: (N,) what each node's steps hold, where that differs, in steps as `step_seconds` means them.
        spread: where a node is several devices: (N,) shares of a step's time that they take, and (N,) seconds on top.

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
        spread: tuple[np.ndarray, np.ndarray] | None = None,
    ):
        self.fleet, self.is_measured = fleet, step_seconds is None
        wire = fleet.comm.wire
        are_there = len(wire.world.placement) > len(wire.placement)  # the devices, so that they are measured
        self.spread = None if self.is_measured and are_there else spread
        self.clock = Clock(fleet.num_nodes, network, 0.0 if self.is_measured else step_seconds, timeline=timeline)
        self._is_exact = self.clock.network.measurement is not None and not fleet.comm.wire.native
        if work is not None:
            self.clock.step_time = self.clock.step_time.for_work(work)
        if spread is not None:
            self.clock.step_time = self.clock.step_time.for_work(*spread)
        self.taken_s = np.zeros(len(fleet))
        fleet.comm.ledger.listeners.append(self._hear)
        fleet.state.register("clock", Shared(self.clock.state, self.clock.load_state))

    def took(self, steps: Sequence[tuple[int, int]], begin: float) -> None:
        """Rows have taken (row, count) `steps` since `begin` of `time.perf_counter`, and shared the time so."""
        taken_s = time.perf_counter() - begin
        total = sum(count for _, count in steps)
        for row, count in steps:
            self.taken_s[row] += taken_s * count / total

    def computed(self, counts: np.ndarray | int, agreements: int = 0) -> None:
        """All nodes have taken `counts` steps, (N,) or one number, agree so often, and are about to communicate."""
        counts = np.broadcast_to(np.asarray(counts), self.fleet.num_nodes)
        if not self.is_measured:
            self.clock.advance(counts)
            self.clock.agree(agreements)
            return
        mine = self.fleet.comm.wire.devices.maximum(torch.from_numpy(self.taken_s.copy())[:, None])
        nodes = sorted(i for ids in self.fleet.comm.wire.placement for i in ids)
        taken_s = np.zeros(self.fleet.num_nodes)
        taken_s[nodes] = self.fleet.comm.wire.rows(mine, nodes)[:, 0].numpy()
        if self.spread is not None:
            taken_s = taken_s * self.spread[0] + counts * self.spread[1]
        self.clock.advance(counts, np.where(counts > 0, taken_s, 0.0))
        self.taken_s[:] = 0
        self.clock.agree(agreements)

    def _hear(self, event: Event) -> None:
        if not self.clock.network.late_overlaps:
            if event.kind == "arrive":
                return
            event = replace(event, flight=None)
        if self._is_exact and (event.kind, event.algorithm) == ("all_reduce", "ring"):
            event = replace(event, algorithm="exact")
        self.clock.event(event)

    @property
    def time_s(self) -> float:
        """Predicted seconds until the last node is done with what happened so far."""
        return self.clock.last_s

    def parts(self) -> dict[str, list[float]]:
        """Return the seconds that each node, of the first 64, has spent so far: computing, waiting, sending, down."""
        return {part: self.clock.seconds(part, slice(MOST_NODES)).round(6).tolist() for part in PARTS}

    def values(self, node: int | None = None) -> dict[str, float]:
        """Return time_s, waiting_share and bandwidth_use of a node, or the latest node's time and the mean shares."""
        clock = self.clock
        if node is not None:
            return clock.figures(node)
        return {
            "time_s": self.time_s,
            "waiting_share": float(clock.waiting_share.mean()),
            "bandwidth_use": float(clock.bandwidth_use.mean()),
        }


def mean_seconds(step_seconds: Any, num_nodes: int, spread: tuple[np.ndarray, np.ndarray] | None) -> np.ndarray:
    """Return the (N,) seconds of a step that were given; `spread`, as in `Timing`: of nodes of several devices."""
    time_ = step_seconds if isinstance(step_seconds, StepTime) else StepTime(step_seconds)
    return (time_ if spread is None else time_.for_work(*spread)).mean_s(num_nodes)
