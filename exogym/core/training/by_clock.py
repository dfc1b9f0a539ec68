"""Asynchronous strategies: each node works at its own pace, and a server applies arriving updates.

A push sends a node's update to the server, and a pull sends the server's parameters to a node. Each island may have its
own server, below a global server. Relays are messages between these servers, which the strategy carries out
(`ClockedStrategy.relays`).

A step of the fleet is N local steps, each by the node that is next on the virtual clock. The fleet's step lasts until
the next step's first local step, so it includes every push that arrives before that local step. Rounds continue across
steps of the fleet. ExoGym computes local steps only when an arrival or the end of a stretch needs them. Because a
round's update depends only on the outer parameters (theta) that the node pulled, results are bitwise identical wherever
stretches end, and for all numbers of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from exogym.core.compute.spans import Losses, RowSpan
from exogym.core.fleet import Stateful
from exogym.core.fleet.fleet import rows_of
from exogym.core.fleet.state import Shared, Tensors
from exogym.core.training.driver import Algorithm, Setting, meet
from exogym.core.training.order import ARRIVAL, RELAY, STEP, Order, seconds_of_steps
from exogym.core.training.timing import Timing
from exogym.network import Network
from exogym.strategy.clocked import ClockedStrategy

NO_WAIT_BPS = 1e30
ARRAYS = ("versions", "computed", "columns", "spoilt")


class ByClock(Algorithm):
    """The adapter through which the driver trains with a `ClockedStrategy`.

    Every process computes the server's updates and the order of events itself. When a node's update arrives at the
    server, every process gets that node's Delta (outer gradient). Without a network, all nodes are equally fast, and
    messages take no time. Raise ArgumentError for planned faults, compute="vmap", and step times that are measured or
    zero, with which the order of events would not be reproducible.
    """

    keeps_time = True

    def __init__(self, strategy: ClockedStrategy, setting: Setting):
        fleet, timing = setting.fleet, setting.timing
        if timing is None:
            timing = Timing(fleet, Network(NO_WAIT_BPS), 1.0)
        super().__init__(strategy, setting)
        self.strategy, self.watch = strategy, setting.watch
        self.batch_sizes = np.broadcast_to(setting.run.batch_size, fleet.num_nodes)
        self.compute = setting.compute(strategy.inner)
        size = strategy.island_size or fleet.num_nodes
        self.islands = [list(range(fleet.num_nodes))[i : i + size] for i in range(0, fleet.num_nodes, size)]
        self.island_of = [island for island, nodes in enumerate(self.islands) for _ in nodes]
        self.servers = [strategy.server(fleet) for _ in self.islands]
        self.pulled = [block.zeros() for block in fleet.blocks]  # the parameters that each node pulled, (rows, P)
        self.buffers = [{name: rows[0].clone() for name, rows in fleet.buffers.items()} for _ in self.servers]
        self.versions = np.zeros(fleet.num_nodes, dtype=np.int64)  # version of the theta that each node pulled
        self.computed = np.zeros(fleet.num_nodes, dtype=np.int64)  # local steps computed so far
        self.columns = np.zeros((fleet.num_nodes, 0), dtype=np.int64)  # local steps by step of the fleet
        self.spoilt = np.zeros(fleet.num_nodes, dtype=bool)  # nodes left out (numbers not finite), until they pull
        self.dropped = 0
        timing.clock.island_size = strategy.island_size
        work = strategy.local_steps(seconds_of_steps(timing.clock))
        below = len(self.islands) if strategy.island_size is not None else 0
        self.order = Order(timing.clock, work, strategy.grace_s, strategy.quorum_of(fleet.num_nodes), below)
        fleet.state.register("rounds", _ClockState(self))
        for island, server in enumerate(self.servers):
            name = f"server_{island}" if below else "server"
            fleet.state.register(name, Shared(server.state, server.load_state))
        fleet.state.register("order", Shared(self.order.state, self.order.load_state))
        self.way, self.relays = "server", None  # with islands: what carries messages above their servers
        if below:
            self.way, self.relays = "island", strategy.relays(self.islands, self.servers, fleet, self.order)
            top = self.relays.top
            fleet.state.register("global_server", Shared(top.state, top.load_state))
            fleet.state.register("relays", Shared(self.relays.state, self.relays.load_state))
        self._give(range(fleet.num_nodes))

    # Called by the driver

    def next_event(self, step: int) -> int:
        """Return the fleet's first step after `step` in which a node sends to the server or receives from it."""
        local = int(self.order.taken.sum()) + self.order.steps_to_event()
        return max(step + 1, -(-local // self.fleet.num_nodes))

    def spans(self, losses: Losses, counts: Sequence[int]) -> list[RowSpan]:
        """Return the nodes' uncomputed local steps before the next message. The run may stop between them."""
        order, nodes = self.order, self.fleet.num_nodes
        if self.columns.shape[1] != losses.last - losses.first:
            self.columns = np.zeros((nodes, losses.last - losses.first), dtype=np.int64)
        for _ in range(min(order.steps_to_event() - 1, nodes * losses.last - int(order.taken.sum()))):
            self._step(losses)
        return self._behind(losses)

    def act(self, step: int, losses: Losses, before_mixing: Callable[[], None]) -> bool:
        """Carry out local steps, and messages to and from the server, up to `step`, in the order of virtual time."""
        order, goal = self.order, self.fleet.num_nodes * step
        self.computed = order.taken.copy()
        self.before_mixing = before_mixing
        while True:
            _, kind, node = order.next
            if kind == STEP:
                if order.taken.sum() == goal:
                    break
                node, ends = self._step(losses)
                if ends:
                    self._push(node)
            elif kind == ARRIVAL:
                if self.computed[node] < order.taken[node]:
                    self._compute(losses)
                self._apply(node)
                self._pull(order.arrive())
                if self.relays is not None:
                    self.relays.begin(self.island_of[node])
            elif kind == RELAY and self.relays is not None:
                self.relays.arrive()
            else:
                self._pull(order.close())
        self._compute(losses)
        order.advance()
        self.columns = self.columns[:, :0]
        return True

    def finish(self, step: int) -> None:
        """Send all remaining updates to the server, apply them in clock order, and send theta to their nodes.

        With islands, the updates wait at their server for relays under way, because a merge would keep them from the
        global server.
        """
        self.before_mixing = lambda: None
        for node in self.order.unfinished():
            if self.order.arrival[node] < 0:
                self._push(node)
        ends = [] if self.relays is None else self.relays.settle()
        for node in self.order.unfinished():
            self._apply(node)
        for server in self.servers:
            server.flush()
        if self.relays is not None:
            self.relays.finish(ends)
        self._pull(self.order.interrupt())

    def consensus(self) -> list[Tensor]:
        """Return theta, the server's parameters: (P,) per block. With islands, the global server's."""
        return (self.servers[0] if self.relays is None else self.relays.top).theta

    def consensus_buffers(self) -> dict[str, Tensor] | None:
        """Return the mean of the nodes' buffers without nodes whose numbers are not finite, if these are skipped."""
        there = self.fleet.there
        spoilt = self.watch.spoilt(there) if self.watch.skips else []
        if not spoilt or len(spoilt) == len(there):
            return None
        meet(self.fleet, [node for node in there if node not in spoilt])
        buffers = self.fleet.average_buffers()
        meet(self.fleet, there)
        return buffers

    # Computing

    def _step(self, losses: Losses) -> tuple[int, bool]:
        """Count the next local step. Return its node, and whether it ends the round."""
        column = int(self.order.taken.sum()) // self.fleet.num_nodes - losses.first
        node, ends = self.order.step()
        self.columns[node, column] += 1
        return node, ends

    def _compute(self, losses: Losses) -> None:
        """Compute all counted steps of this process's nodes. After a message the stretch must be finished."""
        with torch.enable_grad():
            self.compute.steps(self._behind(losses), losses, may_stop=False)
        self.computed = self.order.taken.copy()

    def _behind(self, losses: Losses) -> list[RowSpan]:
        """Return this process's counted but not computed steps. Rates follow the fleet's step."""
        spans = []
        for row, rank in enumerate(self.fleet.ranks):
            columns = np.repeat(np.arange(self.columns.shape[1]), self.columns[rank])[losses.done(row) :]
            if len(columns):
                spans.append(RowSpan(row, columns, losses.first + columns))
        return spans

    # Between a node and the server

    def _push(self, node: int) -> None:
        """End the node's round, and send its Delta."""
        self.order.advance()
        comm = self.fleet.comm
        for block in self.fleet.blocks:
            comm.push(block.params, node, self.way)
        with comm.counted_as("buffers"):
            for rows in self.fleet.shared_buffers.values():
                comm.push(rows, node, self.way)
        self.order.sent(node)

    def _apply(self, node: int) -> None:
        """Let the server apply the Delta of `node`."""
        server, strategy, rows = self.servers[self.island_of[node]], self.strategy, rows_of(self.fleet, [node])
        self.spoilt[node] = self.watch.skips and node in self.watch.spoilt([node])
        for row in rows if self.spoilt[node] else []:
            self.compute.reset(row)
        staleness = server.version - int(self.versions[node])
        if self.spoilt[node]:
            self.dropped += 1
            return
        if strategy.max_staleness is not None and staleness > strategy.max_staleness:
            self.dropped += 1
            return
        wire = self.fleet.comm.wire
        deltas = []
        for theta, pulled, block in zip(server.theta, self.pulled, self.fleet.blocks, strict=True):
            start = theta if strategy.takes_parameters or not rows else pulled[rows[0]]
            mine = start - block.params[rows[0]] if rows else theta
            deltas.append(wire.rows(mine.expand(len(self.fleet), -1), [node])[0].clone())
        server.apply(deltas, staleness, int(self.order.done[node]), int(self.batch_sizes[node]))

    def _pull(self, nodes: Sequence[int]) -> None:
        """Give `nodes` the current parameters of their servers, and begin their next rounds."""
        if not nodes:
            return
        groups = self._by_island(nodes)
        for island, _ in groups:
            server = self.servers[island]
            server.release()
            self.watch.shared(
                server.theta, "the server's parameters", int(self.order.taken.sum()) // self.fleet.num_nodes
            )
        if len(nodes) == self.fleet.num_nodes:
            self.before_mixing()
        comm = self.fleet.comm
        for island, mine in groups:
            for block in self.fleet.blocks:
                comm.pull(block.params, mine, self.way)
            self._mix_buffers(island, mine)
        self._give(nodes)
        self.order.begin(list(nodes))

    def _by_island(self, nodes: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Return the islands of `nodes`, and these nodes of each."""
        groups: dict[int, list[int]] = {}
        for node in nodes:
            groups.setdefault(self.island_of[node], []).append(node)
        return sorted(groups.items())

    def _give(self, nodes: Sequence[int]) -> None:
        for island, mine in self._by_island(nodes):
            server, rows = self.servers[island], rows_of(self.fleet, mine)
            self.versions[mine] = server.version
            for given, pulled, block in zip(server.given(), self.pulled, self.fleet.blocks, strict=True):
                for row in rows:
                    pulled[row] = given
                    block.params[row] = given

    def _mix_buffers(self, island: int, nodes: Sequence[int]) -> None:
        """Move the buffers of an island's server by n/N towards the mean of the n `nodes` not left out, out of N."""
        comm, ids, here = self.fleet.comm, sorted(nodes), rows_of(self.fleet, nodes)
        good = [node for node in ids if not self.spoilt[node]]
        share = len(good) / len(self.islands[island])
        self.fleet.forget_own([node for node in ids if self.spoilt[node]])
        self.spoilt[ids] = False
        buffers = self.buffers[island]
        for name, rows in self.fleet.shared_buffers.items():
            if good and rows.is_floating_point():
                mean = comm.wire.reduce(rows.reshape(len(rows), -1), good, "mean").view(rows.shape[1:])
                buffers[name].copy_(mean if share == 1 else torch.lerp(buffers[name], mean, share))
            elif good:
                buffers[name].copy_(comm.wire.rows(rows, good[:1])[0])
            with comm.counted_as("buffers"):
                comm.pull(rows, ids, self.way)
            rows[here] = buffers[name]


class _ClockState(Stateful):
    """An asynchronous run's saved state: each node's pulled theta and place in its round, and the server's buffers."""

    def __init__(self, clocked: ByClock):
        self.clocked = clocked

    def row(self, row: int) -> Tensors:
        return {f"pulled.{b}": pulled[row] for b, pulled in enumerate(self.clocked.pulled)}

    def load_row(self, row: int, tensors: Tensors) -> None:
        for b, pulled in enumerate(self.clocked.pulled):
            pulled[row] = tensors[f"pulled.{b}"]

    def _buffers(self) -> Tensors:
        return {
            f"buffer.{name}" + (f".{island}" if island else ""): value
            for island, buffers in enumerate(self.clocked.buffers)
            for name, value in buffers.items()
        }

    def shared(self) -> Tensors:
        clocked = self.clocked
        arrays = {name: torch.from_numpy(getattr(clocked, name).copy()) for name in ARRAYS}
        buffers = self._buffers()
        return arrays | buffers | {"dropped": torch.tensor(clocked.dropped)}

    def load_shared(self, tensors: Tensors) -> None:
        clocked = self.clocked
        for name, value in self._buffers().items():
            value.copy_(tensors[name])
        for name in ARRAYS:
            setattr(clocked, name, tensors[name].numpy().copy())
        clocked.dropped = int(tensors["dropped"])
