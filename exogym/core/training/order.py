"""The order in virtual time of an asynchronous run's events: local steps, arrivals and pulls.

In an arrival, a node's update reaches the server. In a pull, a node gets the server's parameters. A relay is a message
between an island's server and the server above it. A grace period is the time for which the server waits for more
updates.

The order depends only on the clock's settings, never on computed values, so every process computes the same order.
Events are sorted by (time, kind, node). At the same time, relays come first, then arrivals, steps and the end of a
grace period. The clock determines when a round ends. Within a round, all steps of a node count as equally long.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from exogym.core.clock import Clock
from exogym.core.clock.steps import TICKS_PER_S
from exogym.errors import ArgumentError

RELAY, ARRIVAL, STEP, CLOSE = range(-1, 3)
NOBODY = -1
ROWS = ("taken", "start", "end", "done", "arrival")


class Order:
    """Sort the events of all nodes' rounds by virtual time.

    Args:
        clock: the virtual clock, which `advance` and each recorded push and pull move.
        work: (N,) each node's local steps per round.
        grace_s: after the updates of `quorum` nodes have arrived, the server waits this many seconds for other nodes.
        islands: number of islands, if each has its own server below another server; otherwise 0.

    Attributes:
        taken: (N,) local steps of each node so far.
        queue: a heap of events (tick, kind, node): each node's next step or arrival, the end of the grace period, and
            each island's relay (with the island as the node). A tick is a nanosecond of virtual time.
        relays: (islands,) tick at which each island's relay ends, or `NOBODY`.
        now: the tick of the last event.
        waiting: nodes whose update has arrived, and which wait for the server's parameters.
    """

    def __init__(self, clock: Clock, work: np.ndarray, grace_s: float = 0.0, quorum: int = 1, islands: int = 0):
        size = clock.num_nodes
        self.clock, self.work = clock, work
        self.grace_s, self.quorum = grace_s, quorum
        self._ahead = copy.deepcopy(clock)  # a copy that finds a round's end in advance
        self.taken, self.start, self.end, self.done = (np.zeros(size, dtype=np.int64) for _ in range(4))
        self.arrival = np.full(size, NOBODY)
        self.relays = np.full(islands, NOBODY)
        self.waiting: list[int] = []
        self.closes = NOBODY  # tick at which the current grace period ends
        self.now = 0
        self.queue: list[tuple[int, int, int]] = []
        self.begin(range(size))

    # What comes next

    @property
    def next(self) -> tuple[int, int, int]:
        """The next event: (tick, kind, node)."""
        return self.queue[0]

    def steps_to_event(self) -> int:
        """Return the number of all nodes' local steps until the next end of a round, arrival or pull."""
        queue, done = self.queue.copy(), self.done.copy()
        count = 0
        while queue[0][1] == STEP:
            node = queue[0][2]
            count += 1
            done[node] += 1
            if done[node] == self.work[node]:
                break
            heapq.heapreplace(queue, self._step_of(node, int(done[node]) + 1))
        return count

    def _step_of(self, node: int, number: int) -> tuple[int, int, int]:
        start, end = int(self.start[node]), int(self.end[node])
        return start + number * (end - start) // int(self.work[node]), STEP, node

    # What happens

    def begin(self, nodes: range | list[int]) -> None:
        """Begin a new round for `nodes` at their clocks' times. These nodes just got the server's parameters."""
        ids = list(nodes)
        work = np.zeros_like(self.work)
        work[ids] = self.work[ids]
        self._ahead.load_state(self.clock.state())
        self._ahead.advance(work)
        self.start[ids], self.end[ids] = ticks(self.clock)[ids], ticks(self._ahead)[ids]
        self.done[ids] = 0
        for node in ids:
            heapq.heappush(self.queue, self._step_of(node, 1))

    def step(self) -> tuple[int, bool]:
        """Take the next local step. Return the node that takes it, and whether the step ends the node's round."""
        self.now, _, node = self.next
        self.taken[node] += 1
        self.done[node] += 1
        if self.done[node] == self.work[node]:
            heapq.heappop(self.queue)
            return node, True
        heapq.heapreplace(self.queue, self._step_of(node, int(self.done[node]) + 1))
        return node, False

    def advance(self) -> None:
        """Advance the clock by the local steps that were taken since the last call."""
        self.clock.advance(self.taken - self.clock.steps)

    def sent(self, node: int) -> None:
        """Record that the update pushed by `node` arrives at the server at the current time of the node's clock."""
        self.arrival[node] = ticks(self.clock)[node]
        heapq.heappush(self.queue, (int(self.arrival[node]), ARRIVAL, node))

    def arrive(self) -> list[int]:
        """Process an update's arrival at the server. Return the nodes that now get the server's parameters."""
        self.now, _, node = heapq.heappop(self.queue)
        self.arrival[node] = NOBODY
        self.waiting.append(node)
        enough = len(self.waiting) >= self.quorum
        at_once = self.grace_s == 0 and self.quorum == 1  # otherwise nodes that arrive at the same moment join
        if at_once or len(self.waiting) == len(self.work):
            if self.closes != NOBODY:
                self.queue = [event for event in self.queue if event[1] != CLOSE]
                heapq.heapify(self.queue)
            return self._released()
        if enough and self.closes == NOBODY and not math.isinf(self.grace_s):
            self.closes = self.now + round(self.grace_s * TICKS_PER_S)
            heapq.heappush(self.queue, (self.closes, CLOSE, NOBODY))
        return []

    def relay(self, island: int, tick: int) -> None:
        """Record that a message between the server of `island` and the server above it ends at `tick`."""
        self.relays[island] = tick
        heapq.heappush(self.queue, (tick, RELAY, island))

    def relayed(self) -> int:
        """End the next relay. Return its island."""
        self.now, _, island = heapq.heappop(self.queue)
        self.relays[island] = NOBODY
        return island

    def close(self) -> list[int]:
        """End the grace period. Return the nodes that now get the server's parameters, and set their clocks."""
        self.now, *_ = heapq.heappop(self.queue)
        nodes = self._released()
        hold(self.clock, nodes, self.now)
        return nodes

    def _released(self) -> list[int]:
        nodes, self.waiting, self.closes = sorted(self.waiting), [], NOBODY
        return nodes

    def unfinished(self) -> list[int]:
        """Return the nodes whose steps or update the server has not received yet, in the order of their clocks."""
        here = ticks(self.clock)
        nodes = [node for node in range(len(self.work)) if self.done[node] and node not in self.waiting]
        return sorted(nodes, key=lambda node: (int(here[node]), node))

    def interrupt(self) -> list[int]:
        """End all rounds early. Return the nodes that were in a round or waited. These nodes get parameters now."""
        nodes = sorted([*self.unfinished(), *self.waiting])
        self.queue, self.waiting, self.closes = [], [], NOBODY
        self.arrival[:] = self.relays[:] = NOBODY
        return nodes

    # State

    def state(self) -> dict[str, Tensor]:
        """Return the state of this object and its clock, as tensors."""
        rows = {name: torch.from_numpy(getattr(self, name).copy()) for name in ROWS}
        more = {"waiting": torch.tensor(self.waiting, dtype=torch.int64), "at": torch.tensor([self.now, self.closes])}
        more |= {"relays": torch.from_numpy(self.relays.copy())} if len(self.relays) else {}
        return rows | more | {f"clock.{name}": value for name, value in self.clock.state().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load tensors that `state` returned."""
        for name in ROWS:
            setattr(self, name, state[name].numpy().copy())
        self.waiting = state["waiting"].tolist()
        self.now, self.closes = state["at"].tolist()
        prefix = "clock."
        self.clock.load_state({name[len(prefix) :]: x for name, x in state.items() if name.startswith(prefix)})
        self.queue = [] if self.closes == NOBODY else [(self.closes, CLOSE, NOBODY)]
        self.relays = state["relays"].numpy().copy() if len(self.relays) else self.relays
        self.queue += [(int(tick), RELAY, island) for island, tick in enumerate(self.relays) if tick != NOBODY]
        for node in range(len(self.work)):
            if self.arrival[node] != NOBODY:
                self.queue.append((int(self.arrival[node]), ARRIVAL, node))
            elif node not in self.waiting:
                self.queue.append(self._step_of(node, int(self.done[node]) + 1))
        heapq.heapify(self.queue)


def seconds_of_steps(clock: Clock) -> np.ndarray:
    """Return (N,) each node's mean seconds per step, or raise ArgumentError if a node's steps take no time."""
    seconds = clock.step_time.mean_s(clock.num_nodes)
    if (seconds * TICKS_PER_S).min() < 1:
        raise ArgumentError(
            f"a step of node {int(seconds.argmin())} takes {seconds.min():g} s, but asynchronous training needs step "
            "times: set step_seconds above 0, for example step_seconds=0.01, or pass a value per node"
        )
    return seconds


def ticks(clock: Clock) -> np.ndarray:
    """Return (N,) each node's virtual time in whole nanoseconds."""
    return clock.state()["ticks"].numpy()


def hold(clock: Clock, nodes: list[int], tick: int) -> None:
    """Advance the clocks of `nodes` to `tick` (virtual nanoseconds), as waiting time."""
    state = clock.state()
    pause = (tick - state["ticks"][nodes]).clamp(min=0)
    state["ticks"][nodes] += pause
    state["part.waiting"][nodes] += pause
    clock.load_state(state)
