"""`compute="loop"`: compute row after row with one module. All other values of `compute` must give the same results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from exogym.core.base.torch_private import copy_
from exogym.core.compute.finite import Watch
from exogym.core.compute.inner import InnerOptimizer, Steps
from exogym.core.compute.spans import Losses, RowSpan
from exogym.core.compute.worker import Worker
from exogym.data.stream import Stream

if TYPE_CHECKING:
    from exogym.core.compute.buckets import Buckets


class TrainNode:
    """Train one node, with its row of the fleet, its share of the data and its optimizer state.

    Args:
        row: the node's row in this process.
        worker, stream, inner, watch: objects that all nodes of this process share. Without `inner`, the strategy's
            own `step` method steps the optimizer.
        taken: (rows,) each row's number of local steps. The node updates its own number.

    A run makes a `TrainNode` for each of its rows. A callback can read these objects:

    >>> from exogym import LocalTrainer
    >>> from exogym.strategy import DiLoCoStrategy
    >>> from exogym.testing import small_problem
    >>> seen = []
    >>> def look(loop):
    ...     nodes: list[TrainNode] = loop.driver.compute.nodes
    ...     seen.append([node.rank for node in nodes])
    >>> model, data = small_problem()
    >>> trainer = LocalTrainer(model, data, data, loss_fn=torch.nn.functional.mse_loss)
    >>> _ = trainer.fit(DiLoCoStrategy(H=2, lr=0.01), num_nodes=3, max_steps=2, batch_size=8, callbacks=[look])
    >>> seen[-1]
    [0, 1, 2]
    """

    def __init__(
        self, row: int, worker: Worker, stream: Stream, inner: InnerOptimizer | None, watch: Watch,
        taken: np.ndarray,
    ):  # fmt: skip
        self.row, self.taken = row, taken
        self.worker, self.stream, self.inner, self.watch = worker, stream, inner, watch

    @property
    def rank(self) -> int:
        """The number of the node that now uses this row."""
        return self.worker.fleet.ranks[self.row]

    def train(self, count: int, at: np.ndarray | None = None, may_stop: bool = True) -> Tensor:
        """Take `count` local steps and return their losses, (count,). Unless `watch.at_once`, nothing is checked yet.

        If `may_stop` is true, a stop request ends the method after the current step, with fewer losses. Under
        on_nonfinite="skip", a node whose parameters are not finite takes no more steps, and inf replaces the losses of
        the missing steps.

        Args:
            at: (count,) step numbers for the learning rate's schedule. Without `at`, the node's own step numbers are
                used.

        Raises:
            TrainingError: a loss or an update is not finite; the message names node, step and tensor.
        """
        worker, inner, row, watch = self.worker, self.inner, self.row, self.watch
        assert inner is not None
        first = int(self.taken[row])
        losses: list[Any] = []
        worker.point(row)
        inner.enter(row)
        for k, batch in enumerate(self.stream.batches(self.rank, first, count)):
            worker.reseed(self.rank, first + k)
            loss: Any = worker.gradient(batch, row)
            if watch.at_once:
                loss = float(loss)
                if not math.isfinite(loss):
                    if watch.is_spoilt(self.rank, row, loss, first + k + 1):
                        worker.clear_grads()
                        self.taken[row] = first + count
                        losses += [math.inf] * (count - k)
                        break
                    loss = math.inf
            losses.append(loss)
            inner.step(row, first + k if at is None else int(at[k]), skip=worker.scaling.overflowed)
            self.taken[row] += 1
            worker.scaling.update(row)
            if worker.should_stop() and may_stop:
                break
        worker.check(row)
        worker.check_frozen()
        if not watch.at_once:
            return torch.stack(losses).to(torch.get_default_dtype())
        watch.row(self.rank, row, first + len(losses))
        return torch.tensor(losses)

    def next_batch(self) -> Any:
        """Return the batch for the node's next step."""
        (batch,) = self.stream.batches(self.rank, int(self.taken[self.row]), 1)
        return batch

    def compute_gradient(self) -> Tensor:
        """Compute the gradients of the node's next step into `.grad`; return the loss, which is not checked yet."""
        worker, first = self.worker, int(self.taken[self.row])
        worker.point(self.row)
        batch = self.next_batch()
        worker.reseed(self.rank, first)
        loss = worker.gradient(batch, self.row)
        worker.check(self.row)
        worker.check_frozen()
        return loss.reshape(())


class Loop:
    """Compute row by row. Each row takes all steps of a stretch before the next row begins, which uses the cache well.

    Args:
        worker: the process's worker. It must be bound to its fleet, in whose state the loop registers its own.
        inner: the rows' inner optimizers. Without `inner`, the strategy's own `step` method steps the optimizers.
        bucket_bytes: the size of buckets that are sent during the backward pass, which needs one row in the process and
            a wire that can overlap. Without `bucket_bytes`, gradients are sent after the backward pass.
    """

    together = False

    def __init__(
        self, worker: Worker, stream: Stream, inner: InnerOptimizer | None, watch: Watch,
        bucket_bytes: int | None = None,
    ):  # fmt: skip
        self.worker, self.inner, self.watch, self.fleet = worker, inner, watch, worker.fleet
        self.taken = np.zeros(len(self.fleet), dtype=np.int64)
        self.nodes = [TrainNode(row, worker, stream, inner, watch, self.taken) for row in range(len(self.fleet))]
        self.overflowed, self.spoilt = False, list[int]()
        if inner is not None:
            self.fleet.state.register("optimizer", inner)
        self.fleet.state.register("steps", Steps(self.taken))
        self.buckets: Buckets | None = None
        if bucket_bytes is not None and self.fleet.comm.wire.overlaps and not (worker.scaled or watch.skips):
            from exogym.core.compute.buckets import Buckets

            self.buckets = Buckets(worker, self.fleet, bucket_bytes)
            worker.before_last_backward = self.buckets.arm

    def steps(self, spans: Sequence[RowSpan], losses: Losses, may_stop: bool = True) -> None:
        done: list[tuple[RowSpan, int, Tensor]] = []
        for span in spans:
            if may_stop and self.worker.should_stop():
                break
            first = int(self.taken[span.row])
            done.append((span, first, self.nodes[span.row].train(len(span.columns), span.at, may_stop)))
        self._end(done, losses, self.watch.at_once)

    def _end(self, done: Sequence[tuple[RowSpan, int, Tensor]], losses: Losses, is_checked: bool = False) -> None:
        """Add the losses of spans to `losses`, after a check of them and of the rows unless `is_checked`.

        `done` has each span with the number of steps that its node took before, and with the losses of its steps.
        """
        rows = [span.row for span, *_ in done]
        is_fine = is_checked or self.watch.are_finite([*(x for *_, x in done), *self._parts(rows)])
        for span, first, taken in done:
            rank = self.nodes[span.row].rank
            if not is_fine:
                taken = self.watch.losses(rank, span.row, taken, first)
                self.watch.row(rank, span.row, first + len(taken))
            losses.add(span.row, span.columns, taken)

    def gradients(self, rows: Sequence[int]) -> Tensor:
        for block in self.fleet.blocks:
            block.own_grads()
        self.overflowed, self.spoilt = False, []
        losses, fit = [], list[bool]()
        for row in rows:
            node = self.nodes[row]
            losses.append(node.compute_gradient())
            fit.append(not self.worker.scaling.overflowed)
            self.overflowed = self.overflowed or self.worker.scaling.overflowed
            if self.buckets is None:
                self.keep_gradients(row)
            else:
                self.buckets.finish()
                self.watch.losses(node.rank, row, losses[-1].reshape(1), int(self.taken[row]))
                self.watch.gradients(node.rank, [p.grad for p in self.worker.parameters], int(self.taken[row]) + 1)
                self.worker.clear_grads()
        found = torch.stack(losses) if losses else torch.empty(0, device=self.worker.device)
        return found if self.buckets is not None else self._looked_at(rows, found, fit)

    def apply(self, rows: Sequence[int], skip: bool = False) -> None:
        for row in rows:
            assert self.inner is not None
            self.worker.point(row)
            self.inner.enter(row)
            if not skip:
                self.point_gradients(row)
            self.inner.step(row, int(self.taken[row]), clip=False, skip=skip)
            self.taken[row] += 1
        if not self.watch.are_finite(self._parts(rows)):
            for row in rows:
                self.watch.row(self.nodes[row].rank, row, int(self.taken[row]))

    def rescale(self, rows: Sequence[int], overflowed: bool) -> None:
        self.worker.scaling.overflowed = overflowed
        for row in rows:
            self.worker.scaling.update(row)

    def reset(self, row: int) -> None:
        if self.inner is not None:
            self.inner.reset(row)

    def close(self) -> None:
        if self.buckets is not None:
            self.buckets.close()

    def _parts(self, rows: Sequence[int], grads: bool = False) -> list[Tensor]:
        """Return the parameters of `rows`, or their gradients, in as few tensors as possible."""
        whole = [block.own_grads() if grads else block.params for block in self.fleet.blocks]
        return whole if len(rows) == len(self.fleet) else [matrix[row] for matrix in whole for row in rows]

    def _looked_at(self, rows: Sequence[int], losses: Tensor, fit: Sequence[bool] | None = None) -> Tensor:
        """Check the losses (len(rows),) and the gradients of the next step of `rows`, and return the losses.

        Raise TrainingError if a number is not finite, except under "skip", where inf replaces such a loss. `fit` has
        False for each gradient that overflowed in fp16, which the loss scale handles.
        """
        if self.watch.are_finite([losses, *self._parts(rows, grads=True)]):
            return losses
        found = []
        for k, row in enumerate(rows):
            found.append(self.watch.losses(self.nodes[row].rank, row, losses[k : k + 1], int(self.taken[row])))
            if fit is None or fit[k]:
                self.look_at_gradient(row)
        return torch.cat(found)

    def look_at_gradient(self, row: int) -> None:
        """Record whether the row's gradient is finite."""
        if not self.watch.gradient(self.nodes[row].rank, row, int(self.taken[row]) + 1):
            self.spoilt.append(row)

    def keep_gradients(self, row: int) -> None:
        """Move the gradients in `.grad` into `row` of the blocks."""
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
                copy_(targets, sources)
        self.worker.clear_grads()

    def point_gradients(self, row: int) -> None:
        """Set each parameter's `.grad` to the row's gradient in the blocks."""
        for p, grad in zip(self.worker.parameters, self.fleet.gradients_of(row), strict=True):
            p.grad = grad
