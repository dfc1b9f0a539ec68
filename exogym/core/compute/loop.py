"""`compute="loop"`: the rows here one after the other, around one module. What every other way is held to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from exogym.core.base.torch_private import copy_
from exogym.core.compute.finite import Watch
from exogym.core.compute.inner import InnerOptimizer, Steps
from exogym.core.compute.spans import Losses, Span
from exogym.core.compute.worker import Worker
from exogym.data.stream import Stream

if TYPE_CHECKING:
    from exogym.core.compute.buckets import Buckets


class TrainNode:
    """One node: its row of the fleet, its share of the data, its optimizer state.

    Args:
        row: the row here.
        worker, stream, inner, watch: shared by the nodes of this process; `inner` None: somebody else takes the steps.
        taken: (rows,) local steps of each row, counted here.

    Made by a run for each of its rows; a callback finds them:

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
        """The global id of the node whose row it is now."""
        return self.worker.fleet.ranks[self.row]

    def train(
        self, count: int, at: np.ndarray | None = None, may_stop: bool = True, source: tuple[int, int] | None = None
    ) -> Tensor:
        """Take `count` local steps one after the other; return their losses, (count,).

        Told to stop, and if it `may_stop`, it ends after the step at hand, with fewer.

        A node that is to be skipped when its numbers are not finite rests from then on; such a step's loss is inf.

        Args:
            at: (count,) steps that the learning rate follows; None: the node's own.
            source: the node whose batches it takes, and that one's step of the first; None: its own.

        Raises:
            TrainingError: a loss or an update is not finite; the message names node, step and tensor.
        """
        worker, inner, row, watch = self.worker, self.inner, self.row, self.watch
        assert inner is not None
        first = int(self.taken[row])
        losses: list[Any] = []
        worker.point(row)
        inner.enter(row)
        for k, batch in enumerate(self.stream.batches(*((self.rank, first) if source is None else source), count)):
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
        if watch.at_once:
            taken = torch.tensor(losses)
        else:
            taken = watch.losses(self.rank, row, torch.stack(losses).to(torch.get_default_dtype()), first)
        watch.row(self.rank, row, first + len(losses))
        return taken

    def next_batch(self) -> Any:
        """Return the batch of the node's next step."""
        (batch,) = self.stream.batches(self.rank, int(self.taken[self.row]), 1)
        return batch

    def compute_gradient(self) -> Tensor:
        """Compute loss and gradients of the node's next step, into `.grad`; return the loss, inf if it is not finite.

        Raises:
            TrainingError: it is not finite, unless the node is to be skipped then.
        """
        worker, first = self.worker, int(self.taken[self.row])
        worker.point(self.row)
        batch = self.next_batch()
        worker.reseed(self.rank, first)
        loss = worker.gradient(batch, self.row)
        worker.check(self.row)
        return self.watch.losses(self.rank, self.row, loss.reshape(1), first)[0]


class Together(Protocol):
    """What computes several rows of a `plain` loop at once."""

    def steps(self, plain: Loop, spans: Sequence[Span], losses: Losses, may_stop: bool) -> Sequence[Span]:
        """Take the steps of `spans`; return what is left of them to be taken row by row."""

    def gradients(self, plain: Loop, rows: Sequence[int]) -> Tensor | None:
        """Write the gradients of the next step into the blocks; return the losses. None: they are to go row by row."""


class Loop:
    """Computes row by row: each takes its whole stretch before the next one does, so it stays in the cache.

    Registers the inner optimizers and the steps taken with the fleet's state. The other ways are this one with another
    `node` for each row, or with rows computed together.

    Args:
        worker: bound to its fleet.
        inner: of the rows; None where somebody else takes the steps.
        bucket_bytes: send the gradients of a process's one row while they are computed, in buckets of so many bytes,
            where the wire can; None: not.
        node: makes what trains a row by itself, as `TrainNode` does.
        at_once: computes rows together, before the others go row by row.
    """

    def __init__(
        self,
        worker: Worker,
        stream: Stream,
        inner: InnerOptimizer | None,
        watch: Watch,
        bucket_bytes: int | None = None,
        node: Callable[..., Any] = TrainNode,
        at_once: Together | None = None,
    ):
        self.at_once, self.together = at_once, at_once is not None
        self.worker, self.inner, self.watch, self.fleet = worker, inner, watch, worker.fleet
        self.taken = np.zeros(len(self.fleet), dtype=np.int64)
        self.nodes = [node(row, worker, stream, inner, watch, self.taken) for row in range(len(self.fleet))]
        self.overflowed, self.spoilt = False, list[int]()
        if inner is not None:
            self.fleet.state.register("optimizer", inner)
        self.fleet.state.register("steps", Steps(self.taken))
        self.buckets: Buckets | None = None
        if bucket_bytes is not None and self.fleet.comm.wire.overlaps and not (worker.scaled or watch.skips):
            from exogym.core.compute.buckets import Buckets

            self.buckets = Buckets(worker, self.fleet, bucket_bytes)
            worker.before_last_backward = self.buckets.arm

    def steps(self, spans: Sequence[Span], losses: Losses, may_stop: bool = True) -> None:
        for span in spans if self.at_once is None else self.at_once.steps(self, spans, losses, may_stop):
            if may_stop and self.worker.should_stop():
                return
            taken = self.nodes[span.row].train(len(span.columns), span.at, may_stop, span.source)
            losses.add(span.row, span.columns, taken)

    def gradients(self, rows: Sequence[int]) -> Tensor:
        for block in self.fleet.blocks:
            block.own_grads()
        self.overflowed, self.spoilt = False, []
        if self.at_once is not None and (found := self.at_once.gradients(self, rows)) is not None:
            for row in rows:
                self._look_at_gradient(row)
            return found
        losses = []
        for row in rows:
            node = self.nodes[row]
            losses.append(node.compute_gradient())
            self.overflowed = self.overflowed or self.worker.scaling.overflowed
            if self.buckets is None:
                self._copy_gradients(row)
                self._look_at_gradient(row)
            else:
                self.buckets.finish()
                self.watch.gradients(node.rank, [p.grad for p in self.worker.parameters], int(self.taken[row]) + 1)
                self.worker.clear_grads()
        return torch.stack(losses) if losses else torch.empty(0, device=self.worker.device)

    def apply(self, rows: Sequence[int], skip: bool = False) -> None:
        for row in rows:
            assert self.inner is not None
            self.worker.point(row)
            self.inner.enter(row)
            if not skip:
                self.point_gradients(row)
            self.inner.step(row, int(self.taken[row]), clip=False, skip=skip)
            self.taken[row] += 1
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

    def _look_at_gradient(self, row: int) -> None:
        """Note whether the gradient is finite; one that overflowed in fp16 is looked after by its scale."""
        if self.worker.scaled and self.worker.scaling.overflowed:
            return
        if not self.watch.gradient(self.nodes[row].rank, row, int(self.taken[row]) + 1):
            self.spoilt.append(row)

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
                copy_(targets, sources)
        self.worker.clear_grads()

    def point_gradients(self, row: int) -> None:
        """Let the module have the row's gradients in the blocks as its own."""
        for p, grad in zip(self.worker.parameters, self.fleet.gradients_of(row), strict=True):
            p.grad = grad
