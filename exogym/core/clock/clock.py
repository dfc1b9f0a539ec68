"""The virtual clock: each node's time on a given network.

Time is counted in whole nanoseconds, so that sums don't depend on their order: ten calls of one step end at the same
time as one call of ten steps. For each node

    time = computing + waiting + sending

where "waiting" is the time for which the node waits for other nodes, and "sending" is its time in collectives.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exogym.core.clock.steps import TICKS_PER_S, StepTime
from exogym.core.clock.timeline import Span, Timeline
from exogym.core.communicator import Event
from exogym.errors import ArgumentError, check_count, checked, nearest
from exogym.network import Network

PARTS = ("computing", "waiting", "sending")
ROWS = ("_ticks", "_line_free", "steps", "tx_bytes", "rx_bytes")
KINDS = ("push", "pull")  # of messages between a node and a server
ALL = slice(None)


@dataclass(frozen=True)
class _Flight:
    """A running collective: its members, and its cost and end in ticks (for a mix, each member's own end)."""

    members: Any
    cost: int
    end: Any
    name: str


class Clock:
    """Keep each node's virtual time.

    `advance` adds the time of local steps. `event` adds a collective of the communicator, which ends for all members at
    the latest member's time plus the collective's cost. A collective that overlaps with computation starts with `begin`
    and ends at `wait`. A node's network line carries one collective at a time, so if the line is busy, the next
    collective starts later.

    A server's line also carries one message at a time in each direction, and pushes and pulls wait for earlier
    messages. (Sharing the line would delay all messages whenever one is added; the rate of a full line is the same.)

    Delayed averages overlap with computation. On hosts, the overlap requires gloo, whole nodes in each process, and
    neither `faults` nor `min_hosts`; otherwise nodes wait for each average right after they send it.

    Args:
        num_nodes: the number of nodes, N.
        network: a `Network`, or text for `Network.parse`.
        step_seconds: a `StepTime`, or the `seconds` of a `StepTime` (a number, text, or one of these per node).
        timeline: whether to keep `spans` (when each node computed, sent and waited) for `save_spans`.

    Attributes:
        steps: (N,) steps of each node so far.
        tx_bytes, rx_bytes: (N,) bytes that each node has sent and received.
        events: number of collectives so far. The network's jitter depends on a collective's number.
        island_size: nodes that share an island's server, below the server for all; None without islands.

    Raises:
        ArgumentError: the network or the step times are for another number of nodes.

    >>> clock = Clock(4, "1Gbps,0.5ms", 0.01)
    >>> clock.advance(10)
    >>> clock.time_s.tolist()
    [0.1, 0.1, 0.1, 0.1]

    Attached to a communicator, the clock counts every collective:

    >>> from exogym.communicator import Communicator
    >>> comm = Communicator(range(4), 4)
    >>> comm.ledger.listeners.append(clock.event)
    >>> _ = comm.all_reduce(torch.zeros(4, 250_000))  # 1 MB: 6 (0.0005 + 0.25e6 * 8 / 1e9) s
    >>> clock.time_s.tolist()
    [0.115, 0.115, 0.115, 0.115]
    """

    @checked
    def __init__(
        self,
        num_nodes: int,
        network: Network | str,
        step_seconds: StepTime | Any = 0.0,
        *,
        timeline: bool = False,
    ):
        check_count("num_nodes", num_nodes)
        self.num_nodes, self.network = num_nodes, Network.of(network)
        self.step_time = step_seconds if isinstance(step_seconds, StepTime) else StepTime(step_seconds)
        for name, given in (("network", self.network.num_nodes), ("step_seconds", self.step_time.num_nodes)):
            if given is not None and given != num_nodes:
                raise ArgumentError(
                    f"{name} is for {given} nodes, but the clock is for {num_nodes}: pass {name} for {num_nodes} nodes"
                )
        self._timeline = Timeline() if timeline else None
        self._ticks = np.zeros(num_nodes, dtype=np.int64)
        self._parts = {name: np.zeros(num_nodes, dtype=np.int64) for name in PARTS}
        self._line_free = np.zeros(num_nodes, dtype=np.int64)
        self.island_size: int | None = None
        self._server_busy: dict[
            tuple[int, str], list[tuple[int, int]]
        ] = {}  # spans in order, by island (or -1) and kind
        self.steps = np.zeros(num_nodes, dtype=np.int64)
        self.tx_bytes, self.rx_bytes = np.zeros(num_nodes), np.zeros(num_nodes)
        self.events = 0
        self._flights: dict[int, _Flight] = {}
        self._on_their_way: dict[int, list[int]] = {}  # number of an event's flight to handles

    # Moving the clock

    def __repr__(self) -> str:
        at = f"{self.steps.max()} steps, {self.time_s.max():.6g} s"
        return f"<Clock of {self.num_nodes} nodes on {self.network!r}: {at}>"

    def advance(self, counts: int | np.ndarray, measured_s: Any = None) -> None:
        """Add the time of every node's next `counts` steps.

        Args:
            counts: a number of steps for all nodes, or (N,) numbers.
            measured_s: the measured total time of a node's `counts` steps in seconds, a number or (N,), which replaces
                the clock's step time.

        Raises:
            ArgumentError: a count is negative, or `counts` is for another number of nodes.
        """
        counts = np.asarray(counts, dtype=np.int64)
        if counts.shape not in ((), (self.num_nodes,)) or counts.min() < 0:
            raise ArgumentError(f"counts={counts.tolist()} must be at least 0: one number, or one per node")
        counts = np.broadcast_to(counts, self.num_nodes)
        if measured_s is None:
            work = self.step_time.ticks(self.steps, counts)
        else:
            seconds = np.asarray(measured_s, dtype=float)
            if not (np.isfinite(seconds) & (seconds >= 0)).all():
                raise ArgumentError(f"measured_s={measured_s!r} must be seconds, at least 0")
            work = np.where(counts > 0, np.rint(seconds * TICKS_PER_S).astype(np.int64), 0)
        end = self._ticks + work
        if self._timeline is not None:
            self._timeline.computing(self._ticks, end)
        self._parts["computing"] += work
        self._ticks = end
        self.steps = self.steps + counts

    def event(self, event: Event) -> None:
        """Add a collective: its members wait for the latest member, and then for the collective's cost.

        If the event has a `flight` (a number), the collective only starts, and its members wait for it at a later event
        of kind "arrive" with the same `flight`. If the network has a `memory`, the collective's copies and sums take
        processor time until then. A relay takes no node's time: see `relay`.
        """
        if event.algorithm == "relay":
            return
        if event.flight is None:
            self.wait(self.begin(event))
        elif event.kind != "arrive":
            self._on_their_way.setdefault(event.flight, []).append(self.begin(event))
            busy_s = self.network.processor_s(event.kind, event.payload_bytes, len(event.members), event.algorithm)
            if busy := round(busy_s * TICKS_PER_S):
                members = self._members(event.members)
                self._arrive(_Flight(members, busy, self._ticks[members] + busy, "copies and sums"))
        else:
            for handle in self._on_their_way.pop(event.flight, ()):
                self.wait(handle)

    def relay(self, event: Event, start: int) -> int:
        """Return the tick at which a message between two servers ends if it begins at the tick `start`.

        The message occupies neither nodes nor their lines. Its bytes count for the event's member.
        """
        members = list(event.members)
        start = self._served(event, start)
        cost = round(self._seconds(event, start, members) * TICKS_PER_S)
        self.tx_bytes[members] += event.tx_bytes
        self.rx_bytes[members] += event.rx_bytes
        self.events += 1
        return start + cost

    def begin(self, event: Event) -> int:
        """Start a collective while its members keep computing, and return a handle for `wait`.

        The collective starts when all members have made this call and their lines are free.
        """
        members = self._members(event.members)
        start: Any
        if event.links:
            start = self._starts(event, np.maximum(self._ticks, self._line_free))
        else:  # few members among many nodes: touch only these
            start = int(np.maximum(self._ticks[members], self._line_free[members]).max())
        if event.kind in KINDS:
            start = self._served(event, start)
        cost = round(self._seconds(event, start, members) * TICKS_PER_S)
        if cost:
            self._line_free[members] = start + cost
        self.tx_bytes[members] += event.tx_bytes
        self.rx_bytes[members] += event.rx_bytes
        handle, self.events = self.events, self.events + 1
        self._flights[handle] = _Flight(members, cost, start + cost, f"{event.algorithm} {event.kind}")
        return handle

    def agree(self, times: int = 1) -> None:
        """Add the time of `times` agreements on a few bytes between all nodes (`network.message_s` each).

        On several hosts the processes agree before they communicate, and again to collect the losses.
        """
        cost = times * round(self.network.message_s * TICKS_PER_S)
        if cost and self.num_nodes > 1:
            self._arrive(_Flight(ALL, cost, int(self._ticks.max()) + cost, "agreement"))

    def meet(self, until_s: float = 0.0, nodes: Sequence[int] | None = None) -> None:
        """Make `nodes` (by default all) wait until the latest node's time, and at least until `until_s`.

        A server's round ends in this way. Nodes that did not take part also wait, because they receive the next
        parameters only after the round.

        >>> clock = Clock(2, "1Gbps", 0.01)
        >>> clock.advance(np.array([5, 0]))
        >>> clock.meet()
        >>> clock.time_s.tolist(), clock.seconds("waiting").tolist()
        ([0.05, 0.05], [0.0, 0.05])
        """
        end = max(int(self._ticks.max()), round(until_s * TICKS_PER_S))
        self._arrive(_Flight(ALL if nodes is None else np.asarray(nodes, dtype=np.int64), 0, end, "server"))

    def wait(self, handle: int) -> None:
        """Make a collective's members wait until the collective ends.

        The time in which a member computed since `begin` does not count as waiting.

        Args:
            handle: the collective, from `begin`.

        Raises:
            ArgumentError: no running collective has this handle.
        """
        if handle not in self._flights:
            raise ArgumentError(f"handle={handle!r} is not a running collective; running: {sorted(self._flights)}")
        self._arrive(self._flights.pop(handle))

    def _arrive(self, flight: _Flight) -> None:
        here = self._ticks[flight.members]
        stall = np.maximum(flight.end - here, 0)
        sending = np.minimum(stall, flight.cost)
        if self._timeline is not None:
            ids = np.arange(self.num_nodes)[flight.members]
            self._timeline.collective(ids, here, stall - sending, sending, flight.name)
        self._parts["sending"][flight.members] += sending
        self._parts["waiting"][flight.members] += stall - sending
        self._ticks[flight.members] += stall

    # Reading the clock

    @property
    def time_s(self) -> np.ndarray:
        """Each node's virtual time in seconds, (N,)."""
        return self._ticks / TICKS_PER_S

    @property
    def last_s(self) -> float:
        """The latest node's virtual time in seconds: the maximum of `time_s`."""
        return float(self._ticks.max() / TICKS_PER_S)

    def share(self, part: str, of: Any = ALL) -> np.ndarray:
        """Return the share of each node's time that it spent on `part`, (N,).

        A node's shares of the three parts sum to 1. At time 0 all shares are 0.

        Args:
            part: "computing", "waiting" (for other nodes) or "sending".
            of: the nodes, as a number, a slice or an array of numbers. Default: all nodes.
        """
        if part not in PARTS:
            raise ArgumentError(f"part={part!r} is not one of {', '.join(map(repr, PARTS))}: {nearest(part, PARTS)}")
        return self._parts[part][of] / np.maximum(self._ticks[of], 1)

    def seconds(self, part: str, of: Any = ALL) -> np.ndarray:
        """Return the seconds that each node spent on `part`, (N,). The arguments are as in `share`."""
        return self.share(part, of) * (self._ticks[of] / TICKS_PER_S)

    def figures(self, node: int) -> dict[str, float]:
        """Return one node's `time_s`, `waiting_share` and `bandwidth_use` as a dict."""
        time_s = float(self._ticks[node] / TICKS_PER_S)
        return {
            "time_s": time_s,
            "waiting_share": float(self.share("waiting", node) + self.share("sending", node)),
            "bandwidth_use": float(self._line_use(node)),
        }

    @property
    def waiting_share(self) -> np.ndarray:
        """The share of each node's time in which it waited or sent instead of computing, (N,)."""
        return self.share("waiting") + self.share("sending")

    @property
    def bandwidth_use(self) -> np.ndarray:
        """The share of each node's bandwidth that it used so far, (N,): the larger of upload and download."""
        return self._line_use(ALL)

    @property
    def spans(self) -> list[Span]:
        """The spans in which each node computed, sent or waited. The clock needs `timeline=True`.

        Raises:
            ArgumentError: the clock keeps no timeline.
        """
        if self._timeline is None:
            raise ArgumentError("this clock keeps no timeline: create it with Clock(..., timeline=True)")
        return self._timeline.spans

    # Checkpoints

    def state(self) -> dict[str, Tensor]:
        """Return the clock's state as tensors, without the timeline."""
        tensors = {name.strip("_"): torch.from_numpy(getattr(self, name).copy()) for name in ROWS}
        tensors |= {f"part.{name}": torch.from_numpy(part.copy()) for name, part in self._parts.items()}
        tensors["part.down"] = torch.zeros(self.num_nodes, dtype=torch.int64)  # in the checkpoints of earlier versions
        members = np.zeros((len(self._flights), self.num_nodes), dtype=bool)
        for row, flight in zip(members, self._flights.values(), strict=True):
            row[flight.members] = True
        numbers = {handle: number for number, handles in self._on_their_way.items() for handle in handles}
        table = [[handle, f.cost, f.end, numbers.get(handle, -1)] for handle, f in self._flights.items()]
        busy = [[k, KINDS.index(kind), *span] for (k, kind), spans in self._server_busy.items() for span in spans]
        tensors |= {"server_busy": torch.tensor(busy, dtype=torch.int64)} if busy else {}
        return tensors | {
            "events": torch.tensor(self.events),
            "under_way": torch.tensor(table, dtype=torch.int64).reshape(-1, 4),
            "under_way_members": torch.from_numpy(members),
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the tensors that `state` returned.

        Raises:
            ArgumentError: the state is from a clock with another number of nodes.
        """
        if len(state["ticks"]) != self.num_nodes:
            raise ArgumentError(
                f"the state is for {len(state['ticks'])} nodes, but the clock is for {self.num_nodes}: use the same "
                "number of nodes"
            )
        for name in ROWS:
            setattr(self, name, state[name.strip("_")].numpy().copy())
        self._parts = {name: state[f"part.{name}"].numpy().copy() for name in PARTS}
        self.events = int(state["events"])
        self._server_busy = {}
        for k, kind, begin, end in state["server_busy"].tolist() if "server_busy" in state else []:
            self._server_busy.setdefault((k, KINDS[kind]), []).append((begin, end))
        rows = zip(state["under_way"].tolist(), state["under_way_members"].numpy(), strict=True)
        self._flights, self._on_their_way = {}, {}
        for (handle, cost, end, number), of in rows:
            self._flights[handle] = _Flight(np.flatnonzero(of), cost, end, "")
            if number >= 0:
                self._on_their_way.setdefault(number, []).append(handle)

    # Inside

    def _line_use(self, of: Any) -> Any:
        up, down = (bps[of] for bps in self.network.line_bps(self.num_nodes))
        busy_s = 8 * np.maximum(self.tx_bytes[of] / up, self.rx_bytes[of] / down)
        return busy_s / np.maximum(self._ticks[of] / TICKS_PER_S, 1 / TICKS_PER_S)

    def _members(self, members: Sequence[int]) -> Any:
        """Return an index that picks the members out of (N,) arrays."""
        if len(members) == self.num_nodes:
            return ALL
        ids = np.asarray(members)
        if ids.max() >= self.num_nodes:
            raise ArgumentError(f"node {ids.max()} takes part, but the clock is for {self.num_nodes} nodes")
        return ids

    def _seconds(self, event: Event, start: Any, members: Any) -> float:
        """Return a collective's seconds, which depend on its `start` in ticks if connections start slowly."""
        used = int(self._line_free[members].max()) if self.network.tcp else 0
        idle_s = float(np.max(start)) / TICKS_PER_S - used / TICKS_PER_S if used else math.inf
        return self.network.seconds(event, self.events, idle_s)

    def _starts(self, event: Event, ready: np.ndarray) -> np.ndarray:
        """Return when each member of a mix can start, (members,): once all its senders are ready."""
        starts = ready.copy()
        for giver, taker in event.links:
            starts[taker] = max(starts[taker], ready[giver])
        return starts[list(event.members)]

    def _served(self, event: Event, ready: int) -> int:
        """Return when the server's line is free for a push or pull from the tick `ready` on, and occupy it.

        Messages may arrive here in another order than they are ready, so the line's gaps count, not only its last end.
        """
        if self.num_nodes == 1:
            return ready
        near, size = event.algorithm == "island", self.island_size or self.num_nodes
        island = event.members[0] // size if near else -1
        nodes = range(self.num_nodes)[island * size : (island + 1) * size] if near else range(self.num_nodes)
        busy_s = self.network.server_s(event.payload_bytes * len(event.members), nodes, near)
        busy = round(busy_s * TICKS_PER_S)
        spans = self._server_busy.setdefault((island, event.kind), [])
        k = bisect.bisect_left(spans, (ready,))  # the first that begins at `ready` or later
        start = max(ready, spans[k - 1][1]) if k else ready
        while k < len(spans) and start + busy > spans[k][0]:
            start, k = spans[k][1], k + 1
        if busy:
            begin, end = start, start + busy
            if k and spans[k - 1][1] == begin:
                k -= 1
                begin, _ = spans.pop(k)
            if k < len(spans) and spans[k][0] == end:
                _, end = spans.pop(k)
            spans.insert(k, (begin, end))
            first = int(self._ticks.min())  # no message is ready before
            del spans[: next((i for i, span in enumerate(spans) if span[1] > first), len(spans))]
        return start
