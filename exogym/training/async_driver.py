"""Drives asynchronous strategies: each node at its own pace, a server that applies what arrives.

A step of the fleet is N local steps, taken by whoever is next on the virtual clock. It ends just before the first local
step of the next one, so a push that arrives until then belongs to it. Rounds go on across steps of the fleet, and
computing is put off until something needs it (an arrival, or the end of a stretch); as a round depends only on the
theta that its node pulled, neither stretches nor processes change a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from exogym.compute.finite import Watch
from exogym.compute.train_node import InnerOptimizer, Steps, TrainNode
from exogym.compute.worker import Worker
from exogym.data.stream import Stream
from exogym.errors import ArgumentError
from exogym.faults import Attendance
from exogym.fleet import Fleet, Stateful
from exogym.fleet.presence import rows_of
from exogym.fleet.state import Shared, Tensors
from exogym.network import Network
from exogym.strategy.async_diloco import AsyncDiLoCoStrategy
from exogym.strategy.schedule import Schedule as LearningRate
from exogym.strategy.strategy import Run
from exogym.training.async_schedule import ARRIVAL, STEP, Schedule, seconds_of_steps
from exogym.training.timing import Timing

NO_WAIT_BPS = 1e30
ARRAYS = ("versions", "computed", "columns", "spoilt")


class AsyncDriver:
    """Takes an `AsyncDiLoCoStrategy` through training.

    Every process plays the server, and finds the order of events for itself; the Delta of a node that arrives is
    handed to all of them.

    Args:
        attendance: refused.
        timing: says how long steps and messages take; its clock is moved by this driver alone. None: all nodes are
            equally fast, and messages take no time.

    Raises:
        ArgumentError: planned faults, compute="vmap", or steps whose time is measured or nothing: the order of events
            would not repeat.
    """

    def __init__(
        self,
        strategy: AsyncDiLoCoStrategy,
        fleet: Fleet,
        worker: Worker,
        stream: Stream,
        run: Run,
        compute: str,
        attendance: Attendance | None,
        timing: Timing | None,
        watch: Watch,
    ):
        name = type(strategy).__name__
        if attendance is not None:
            raise ArgumentError(f"{name} takes no planned faults: slow nodes are slow on its clock; leave out faults=")
        if compute != "loop":
            raise ArgumentError(f"{name} takes its nodes one after another: use compute='loop', not {compute!r}")
        if timing is None:
            timing = Timing(fleet, Network(NO_WAIT_BPS), 1.0)
        if timing.is_measured:
            raise ArgumentError(
                f"{name} goes by how long steps take, and measured times would give another order each time: say "
                "step_seconds, for example step_seconds=0.1, or a list with each node's"
            )
        self.strategy, self.fleet, self.worker, self.watch = strategy, fleet, worker, watch
        self.attendance: Attendance | None = None
        self.before_sync: Callable[[], None] | None = None
        self.inner = InnerOptimizer(strategy.inner, worker, len(fleet), run.total_steps)
        self.rates = self.inner.schedule
        self.nodes = [TrainNode(rank, row, worker, stream, self.inner, watch) for row, rank in enumerate(fleet.ranks)]
        self.server = strategy.server(fleet)
        self.pulled = [block.zeros() for block in fleet.blocks]  # theta when each node pulled it, (rows, P)
        self.buffers = {name: rows[0].clone() for name, rows in fleet.buffers.items()}  # the server's
        self.versions = np.zeros(fleet.num_nodes, dtype=np.int64)  # of the theta that each node pulled
        self.computed = np.zeros(fleet.num_nodes, dtype=np.int64)  # local steps that are known to have been computed
        self.columns = np.zeros((fleet.num_nodes, 0), dtype=np.int64)  # local steps by step of the fleet
        self.spoilt = np.zeros(fleet.num_nodes, dtype=bool)  # nodes left out, until they pull
        self.dropped = 0
        work = strategy.local_steps(seconds_of_steps(timing.clock))
        self.schedule = Schedule(timing.clock, work, strategy.grace_s)
        fleet.state.register("optimizer", self.inner)
        fleet.state.register("steps", Steps(self.inner.steps))
        fleet.state.register("rounds", _Kept(self))
        fleet.state.register("server", Shared(self.server.state, self.server.load_state))
        fleet.state.register("schedule", Shared(self.schedule.state, self.schedule.load_state))
        self._give(range(fleet.num_nodes))

    # What the loop asks

    def next_event(self, step: int) -> int:
        """Return the first step of the fleet after `step` in which a push or a pull falls."""
        local = int(self.schedule.taken.sum()) + self.schedule.steps_to_event()
        return max(step + 1, -(-local // self.fleet.num_nodes))

    def lr(self, step: int) -> float:
        return self.rates.lr(step)

    @torch.no_grad()
    def advance(self, first: int, last: int, begun: Tensor | None) -> tuple[Tensor, bool]:
        """Take all local steps from step `first` of the fleet to `last`, at most the next event, and what comes along.

        Args:
            begun: what this gave back where the stretch was stopped in the middle.

        Returns:
            (rows, last - first): the mean loss of the local steps that a node took in each step of the fleet, NaN
            where it took none; and False where the run is to stop before the stretch is done, the losses then being
            sums over the steps taken so far. Once something was sent, the stretch is finished first: its last step.
        """
        schedule, goal = self.schedule, self.fleet.num_nodes * last
        if begun is None:
            self.columns = np.zeros((self.fleet.num_nodes, last - first), dtype=np.int64)
            losses = np.zeros((len(self.nodes), last - first), dtype=np.float32)
        else:
            losses = np.nan_to_num(begun.float().cpu().numpy())
        # The steps before anything is sent: here the run may stop.
        for _ in range(min(schedule.steps_to_event() - 1, goal - int(schedule.taken.sum()))):
            self._step(first)
        if not self._compute(first, losses, may_stop=True):
            return self._by_step(losses, False)
        while True:
            _, kind, node = schedule.next
            if kind == STEP:
                if schedule.taken.sum() == goal:
                    break
                node, ends = self._step(first)
                if ends:
                    self._push(node)
            elif kind == ARRIVAL:
                if self.computed[node] < schedule.taken[node]:
                    self._compute(first, losses)
                self._apply(node)
                self._pull(schedule.arrive())
            else:
                self._pull(schedule.close())
        self._compute(first, losses)
        schedule.advance()
        return self._by_step(losses, True)

    @torch.no_grad()
    def finish(self, step: int) -> None:
        """Push what nodes have not pushed yet, apply it in the order of their clocks, and let these nodes pull."""
        for node in self.schedule.unfinished():
            if self.schedule.arrival[node] < 0:
                self._push(node)
        for node in self.schedule.unfinished():
            self._apply(node)
        self.server.flush()
        self._pull(self.schedule.interrupt())

    def consensus(self) -> list[Tensor]:
        """Return theta, (P,) per block."""
        return [x.clone() for x in self.server.theta]

    def close(self) -> None:
        """Leave nothing behind."""

    # Computing

    def _step(self, first: int) -> tuple[int, bool]:
        """Note the local step that comes next; return whose it is and whether it ends the round."""
        column = int(self.schedule.taken.sum()) // self.fleet.num_nodes - first
        node, ends = self.schedule.step()
        self.columns[node, column] += 1
        return node, ends

    def _compute(self, first: int, losses: np.ndarray, may_stop: bool = False) -> bool:
        """Let the nodes here take the steps they are behind; return False where the run is to stop before that."""
        with torch.enable_grad():
            for node in self.nodes:
                while behind := self._behind(node):
                    order = self._column_of(node.rank)[-behind:]
                    start = int(self.inner.steps[node.row])
                    self.inner.schedule = _FleetRate(self.rates, start, first + order)  # type: ignore[assignment]
                    taken = node.train(behind)
                    np.add.at(losses[node.row], order[: len(taken)], taken.float().cpu().numpy())
                    if may_stop:
                        break
        if may_stop and self.fleet.comm.wire.agree(self.worker.should_stop()):
            return False
        self.computed = self.schedule.taken.copy()
        return True

    def _behind(self, node: TrainNode) -> int:
        """Return how many of a node's steps are still to be computed."""
        return int(self.schedule.taken[node.rank]) - int(self.inner.steps[node.row])

    def _column_of(self, rank: int) -> np.ndarray:
        """Return the column of each local step of a node in this stretch."""
        return np.repeat(np.arange(self.columns.shape[1]), self.columns[rank])

    def _by_step(self, losses: np.ndarray, finished: bool) -> tuple[Tensor, bool]:
        """Return the mean per step of the fleet; of an unfinished stretch the sums, NaN where there is none yet."""
        counts = self.columns[self.fleet.ranks]
        if finished:
            result = np.divide(losses, counts, out=np.full_like(losses, np.nan), where=counts > 0)
            result[np.isinf(result)] = np.nan  # of nodes that are left out
            self.columns = self.columns[:, :0]
        else:
            result = losses
            for node in self.nodes:
                order = self._column_of(node.rank)
                seen = np.bincount(order[: len(order) - self._behind(node)], minlength=losses.shape[1])
                result[node.row, seen == 0] = np.nan
        return torch.from_numpy(result).to(self.worker.device), finished

    # Between a node and the server

    def _push(self, node: int) -> None:
        """The node has ended its round: its Delta is on its way."""
        self.schedule.advance()
        comm = self.fleet.comm
        for block in self.fleet.blocks:
            comm.push(block.params, node)
        with comm.counted_as("buffers"):
            for rows in self.fleet.buffers.values():
                comm.push(rows, node)
        self.schedule.sent(node)

    def _apply(self, node: int) -> None:
        """The server takes in the Delta of `node`."""
        server, strategy, rows = self.server, self.strategy, rows_of(self.fleet, [node])
        self.spoilt[node] = self.watch.skips and node in self.watch.spoilt([node])
        for row in rows if self.spoilt[node] else []:
            self.inner.reset(row)
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
            mine = pulled[rows[0]] - block.params[rows[0]] if rows else theta
            delta = wire.rows(mine.expand(len(self.nodes), -1), [node])[0].clone()
            if strategy.delay_compensation:
                moved = theta - wire.rows(pulled, [node])[0]
                delta.add_(delta.square().mul_(moved), alpha=strategy.delay_compensation)
            deltas.append(delta)
        server.apply(deltas, staleness)
        self.watch.shared(
            server.theta, "the server's parameters", int(self.schedule.taken.sum()) // self.fleet.num_nodes
        )

    def _pull(self, nodes: Sequence[int]) -> None:
        """Nodes get theta, all the same one, and begin their next round."""
        if not nodes:
            return
        if len(nodes) == self.fleet.num_nodes and self.before_sync is not None:
            self.before_sync()
        comm = self.fleet.comm
        for block in self.fleet.blocks:
            comm.pull(block.params, nodes)
        self._mix_buffers(nodes)
        self._give(nodes)
        self.schedule.begin(list(nodes))

    def _give(self, nodes: Sequence[int]) -> None:
        self.versions[list(nodes)] = self.server.version
        rows = rows_of(self.fleet, nodes)
        for theta, pulled, block in zip(self.server.theta, self.pulled, self.fleet.blocks, strict=True):
            for row in rows:
                pulled[row] = theta
                block.params[row] = theta

    def _mix_buffers(self, nodes: Sequence[int]) -> None:
        """Move the server's buffers by n/N towards the mean of those n `nodes` not left out; give them to all."""
        comm, ids, here = self.fleet.comm, sorted(nodes), rows_of(self.fleet, nodes)
        good = [node for node in ids if not self.spoilt[node]]
        share = len(good) / self.fleet.num_nodes
        self.spoilt[ids] = False
        for name, rows in self.fleet.buffers.items():
            if good and rows.is_floating_point():
                mean = comm.wire.reduce(rows.reshape(len(rows), -1), good, "mean").view(rows.shape[1:])
                self.buffers[name].copy_(mean if share == 1 else torch.lerp(self.buffers[name], mean, share))
            elif good:
                self.buffers[name].copy_(comm.wire.rows(rows, good[:1])[0])
            with comm.counted_as("buffers"):
                comm.pull(rows, ids)
            rows[here] = self.buffers[name]


class _Kept(Stateful):
    """What an asynchronous run keeps: each node's theta as pulled, the server's buffers, who is where in its round."""

    def __init__(self, driver: AsyncDriver):
        self.driver = driver

    def row(self, row: int) -> Tensors:
        return {f"pulled.{b}": pulled[row] for b, pulled in enumerate(self.driver.pulled)}

    def load_row(self, row: int, tensors: Tensors) -> None:
        for b, pulled in enumerate(self.driver.pulled):
            pulled[row] = tensors[f"pulled.{b}"]

    def shared(self) -> Tensors:
        driver = self.driver
        arrays = {name: torch.from_numpy(getattr(driver, name).copy()) for name in ARRAYS}
        buffers = {f"buffer.{name}": value for name, value in driver.buffers.items()}
        return arrays | buffers | {"dropped": torch.tensor(driver.dropped)}

    def load_shared(self, tensors: Tensors) -> None:
        driver = self.driver
        for name, value in driver.buffers.items():
            value.copy_(tensors[f"buffer.{name}"])
        for name in ARRAYS:
            setattr(driver, name, tensors[name].numpy().copy())
        driver.dropped = int(tensors["dropped"])


class _FleetRate:
    """The learning rate of a node's steps from number `start` on, which fall into `steps` (K,) of the fleet."""

    is_constant = False

    def __init__(self, rates: LearningRate, start: int, steps: np.ndarray):
        self.rates, self.start, self.steps = rates, start, steps

    def lr(self, step: int, base_lr: float | None = None) -> float:
        return self.rates.lr(int(self.steps[step - self.start]), base_lr)
