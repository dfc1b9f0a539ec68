"""Drives strategies that act on rows: stretches of local steps, then the strategy on the whole fleet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exogym.compute.buckets import Buckets
from exogym.compute.finite import Watch
from exogym.compute.train_node import InnerOptimizer, Steps, TrainNode
from exogym.compute.vmap import VmapGradients
from exogym.compute.worker import Worker
from exogym.data.stream import Stream
from exogym.errors import TrainingError
from exogym.faults import Attendance
from exogym.fleet import Fleet
from exogym.fleet.presence import rows_of, take_state
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.strategy import Run
from exogym.training.timing import Timing

COMPUTING = ("optimizer", "scale")  # beside parameters, what makes the computing of two nodes equal


class StackedDriver:
    """Takes a `CommunicateOptimizeStrategy` through training.

    Between two events nodes are independent, so each takes its whole stretch of steps before the next one does:
    a row stays in the cache, and the module is pointed once per stretch.
    """

    def __init__(
        self,
        strategy: CommunicateOptimizeStrategy,
        fleet: Fleet,
        worker: Worker,
        stream: Stream,
        run: Run,
        compute: str,
        attendance: Attendance | None,
        timing: Timing | None,
        watch: Watch,
    ):
        self.attendance, self.timing, self.watch = attendance, timing, watch
        self.before_sync: Callable[[], None] | None = None
        self.strategy, self.fleet, self.worker = strategy, fleet, worker
        self.inner = InnerOptimizer(strategy.inner, worker, len(fleet), run.total_steps)
        self.nodes = [TrainNode(rank, row, worker, stream, self.inner, watch) for row, rank in enumerate(fleet.ranks)]
        self.vmap = VmapGradients(worker) if compute == "vmap" else None
        fleet.state.register("optimizer", self.inner)
        fleet.state.register("steps", Steps(self.inner.steps))
        strategy.start(fleet, run)
        self.buckets: Buckets | None = None
        size = strategy.bucket_bytes
        if (
            size is not None
            and attendance is None
            and fleet.comm.wire.overlaps
            and self.vmap is None
            and not worker.scaled
            and not watch.skips
        ):
            self.buckets = Buckets(worker, fleet, size)
            worker.before_last_backward = self.buckets.arm

    def next_event(self, step: int) -> int:
        event = self.strategy.next_event(step)
        return event if self.attendance is None else min(event, self.attendance.next_change(step))

    def lr(self, step: int) -> float:
        return self.inner.schedule.lr(step)

    def advance(self, first: int, last: int, begun: Tensor | None) -> tuple[Tensor, bool]:
        """Train from step `first` to `last`, at most up to the next event, and communicate if it is one.

        Args:
            begun: losses of this stretch that are there already, where it was stopped in the middle.

        Returns:
            (rows, last - first) losses, NaN where a node did not act, and False where the run is to stop before the
            stretch is done.
        """
        losses = begun
        if losses is None:
            losses = torch.full((len(self.fleet), last - first), torch.nan, device=self.worker.device)
            if self.watch.skips and self.attendance is None:  # those left out of an evaluation are to be there again
                self.fleet.comm.present = list(range(self.fleet.num_nodes))
            self._bring_back(first)
        done = (~torch.isnan(losses)).sum(1).tolist()
        work = self._work(first, last)
        counts = [last - first if work is None else int(work[rank]) for rank in self.fleet.ranks]
        comm = self.fleet.comm
        wire = comm.wire
        if self.attendance is not None:
            comm.present = self.attendance.present(last)
        everyone = last - first if work is None else work  # steps of all N nodes
        left_out: list[int] = []  # nodes that have not taken the step, as their gradients were not finite
        if self.strategy.needs_gradients:
            if wire.agree(self.worker.should_stop()):
                return losses, False
            left_out = self._step_with_gradients(last, losses, counts, everyone)
        elif self.vmap is not None:
            self._vmap_steps(done, counts, losses)
        else:
            for node, start, count in zip(self.nodes, done, counts, strict=True):
                if start < count and not self.worker.should_stop():
                    with self._timed(node):
                        taken = node.train(count - start)
                    losses[node.row, start : start + len(taken)] = taken
        if not self.strategy.needs_gradients:
            if wire.agree(self.worker.should_stop()):
                return losses, False
            if self.timing is not None:
                self.timing.computed(everyone)
        there = self._up(last)
        spoilt = self.watch.spoilt(there, left_out) if self.watch.skips else []
        meeting = [i for i in comm.present if i not in spoilt] if spoilt else comm.present
        if self.before_sync is not None and self.strategy.is_event(last):
            comm.present = [i for i in there if i not in spoilt]
            self.before_sync()
        comm.present = meeting
        meets = self.strategy.next_event(last - 1) == last
        with torch.no_grad():
            fresh = self.strategy.communicate(self.fleet, last)
        if fresh:
            for node in self.nodes:
                self.inner.reset(node.row)
        if meets:
            self.watch.shared(self.strategy.consensus(self.fleet), "the outer parameters", last)
        if meets and spoilt:
            self._take_in(spoilt, there, last)
        elif self.attendance is not None or spoilt:
            comm.present = [i for i in there if i not in spoilt]
        return losses.where(losses != torch.inf, torch.nan) if self.watch.skips else losses, True

    def _up(self, step: int) -> list[int]:
        return list(range(self.fleet.num_nodes)) if self.attendance is None else self.attendance.up(step)

    def _take_in(self, spoilt: list[int], there: list[int], step: int) -> None:
        """Let the nodes `spoilt`, of those `there`, take all that another holds: they took no part after `step`."""
        comm = self.fleet.comm
        if len(spoilt) == len(there):
            raise TrainingError(
                f"after step {step} no node is left whose numbers are finite, so none can take what another holds: "
                "lower the learning rate, clip gradients (max_norm=1.0), or look at the data"
            )
        source = next(iter(comm.present), min(set(there) - set(spoilt)))
        comm.present = there
        self._take_over(spoilt, source, step, forget=True, as_fleet=self.strategy.needs_gradients)

    def _work(self, first: int, last: int) -> np.ndarray | None:
        """Return (N,) local steps of each node from step `first` to `last`; None: all."""
        if self.attendance is None:
            return self.strategy.local_steps(first, last)
        return self.attendance.steps_between(first, last, self.strategy.local_steps)

    def _bring_back(self, step: int) -> None:
        """Let nodes that were away at `step` and are there for the next one take over what the others hold."""
        if self.attendance is None:
            return
        fleet = self.fleet
        nodes, source = self.attendance.returning(step + 1)
        if source is None:
            return
        fleet.comm.present = self.attendance.up(step + 1)
        self._take_over(nodes, source, step, self.attendance.faults.forget, as_fleet=True)

    def _take_over(self, nodes: list[int], source: int, step: int, forget: bool, as_fleet: bool) -> None:
        """Give `nodes` what `source` holds; with `as_fleet` their number of steps becomes the fleet's, too."""
        fleet = self.fleet
        with torch.no_grad():
            takes_all = self.strategy.bring_back(fleet, nodes, source, step + 1, forget)
        if not takes_all:
            return
        state = fleet.state.row(fleet.ranks.index(source), COMPUTING) if source in fleet.ranks else None
        taken = take_state(fleet, state, source, nodes, self.worker.device)
        for row in rows_of(fleet, nodes):
            fleet.state.load_row(row, {name: x.clone() for name, x in taken.items()}, COMPUTING)
            self.inner.steps[row] = step if as_fleet else self.inner.steps[row]

    @contextlib.contextmanager
    def _timed(self, *nodes: TrainNode) -> Iterator[None]:
        if self.timing is None:
            yield
            return
        self.timing.begin()
        yield
        self.timing.end(*(node.row for node in nodes))

    def _step_with_gradients(
        self, step: int, losses: Tensor, counts: list[int], everyone: np.ndarray | int
    ) -> list[int]:
        """Take one step of all nodes together; return those here that were left out of it."""
        blocks = self.fleet.blocks
        nodes = [node for node, count in zip(self.nodes, counts, strict=True) if count]
        overflowed = False
        if self.vmap is not None:
            if nodes:
                rows = [n.row for n in nodes]
                with self._timed(*nodes):
                    losses[rows, 0] = self.vmap(rows, [self._batch(n) for n in nodes])
            for node in nodes:
                losses[node.row] = self.watch.losses(node.rank, node.row, losses[node.row], step - 1)
        else:
            for block in blocks:
                block.own_grads()
            for node in nodes:
                with self._timed(node):
                    losses[node.row, 0] = node.compute_gradient()
                overflowed = overflowed or self.worker.overflowed
                if self.buckets is None:
                    self._copy_gradients(node.row)
                else:
                    self.buckets.finish()
                    self.watch.gradients(node.rank, [p.grad for p in self.worker.parameters], step)
                    self.worker.clear_grads()
        if self.worker.scaled:
            overflowed = self.fleet.comm.wire.agree(overflowed)
        self.worker.overflowed = overflowed
        if self.timing is not None:
            self.timing.computed(everyone)
        left_out: list[int] = []
        if not overflowed:
            if self.buckets is None:
                left_out = [
                    n.rank for n in nodes if not self.watch.gradient(n.rank, n.row, int(self.inner.steps[n.row]) + 1)
                ]
            if self.watch.skips:
                spoilt = self.watch.spoilt(self._up(step), left_out)
                self.fleet.comm.present = [i for i in self.fleet.comm.present if i not in spoilt]
                left_out = [rank for rank in spoilt if rank in self.fleet.ranks]
            with torch.no_grad():
                self.strategy.transform_gradients(self.fleet, step, self.lr(step - 1))
        for node in nodes:
            if node.rank in left_out:
                continue
            self.worker.point(node.row)
            self.inner.enter(node.row)
            if not overflowed:
                self._point_gradients(node.row)
            with self._timed(node):  # where it is measured, it counts in the next step
                self.inner.step(node.row, clip=False, skip=overflowed)
            self.worker.update_scale(node.row)
            self.watch.row(node.rank, node.row, int(self.inner.steps[node.row]))
        return left_out

    def _vmap_steps(self, done: list[int], counts: list[int], losses: Tensor) -> None:
        assert self.vmap is not None
        for k in range(min(done), max(counts)):
            if self.worker.should_stop():
                return
            spans = zip(self.nodes, done, counts, strict=True)
            nodes = [node for node, start, count in spans if start <= k < count]
            rows = [node.row for node in nodes]
            with self._timed(*nodes):
                losses[rows, k] = self.vmap(rows, [self._batch(node) for node in nodes])
            for node in nodes:
                step = int(self.inner.steps[node.row])
                losses[node.row, k : k + 1] = self.watch.losses(node.rank, node.row, losses[node.row, k : k + 1], step)
                self.worker.point(node.row)
                self.inner.enter(node.row)
                self._point_gradients(node.row)
                with self._timed(node):
                    self.inner.step(node.row)
                if k + 1 == counts[node.row]:
                    self.watch.row(node.rank, node.row, step + 1)

    def _batch(self, node: TrainNode) -> Any:
        (batch,) = node.stream.batches(node.rank, int(self.inner.steps[node.row]), 1)
        return batch

    def _copy_gradients(self, row: int) -> None:
        parameters = iter(self.worker.parameters)
        for block in self.fleet.blocks:
            assert block.grads is not None
            targets, sources = [], []
            for index, slot in enumerate(block.layout):
                grad = next(parameters).grad
                block.has_grad[row, index] = grad is not None
                if grad is None:
                    slot.of(block.grads[row]).zero_()
                else:
                    targets.append(slot.of(block.grads[row]))
                    sources.append(grad)
            if targets:
                torch._foreach_copy_(targets, sources)
        self.worker.clear_grads()

    def _point_gradients(self, row: int) -> None:
        parameters = iter(self.worker.parameters)
        for block in self.fleet.blocks:
            assert block.grads is not None
            mask = block.has_grad[row].tolist()
            grads = block.grads[row]
            for index, slot in enumerate(block.layout):
                p = next(parameters)
                p.grad = slot.of(grads) if mask[index] else None

    def finish(self, step: int) -> None:
        """Synchronise what is left at the end of training."""
        comm, there = self.fleet.comm, self._up(step)
        spoilt = self.watch.spoilt(there) if self.watch.skips else []
        present = there if self.attendance is None else self.attendance.present(step)
        comm.present = [i for i in present if i not in spoilt]
        with torch.no_grad():
            self.strategy.finish(self.fleet, step)
        if spoilt:
            self._take_in(spoilt, there, step)
        comm.present = there
        final = self.strategy.consensus(self.fleet)
        here = rows_of(self.fleet, there)[:1]
        held = [block.params[row] for row in here for block in self.fleet.blocks] or None
        self.watch.shared(held if final is None else final, "the final model", step)

    def consensus(self) -> list[Tensor]:
        """Return the model to evaluate: the outer parameters where there are some, else the mean; (P,) per block."""
        outer = self.strategy.consensus(self.fleet)
        return self.fleet.average() if outer is None else [x.clone() for x in outer]

    def close(self) -> None:
        if self.buckets is not None:
            self.buckets.close()
