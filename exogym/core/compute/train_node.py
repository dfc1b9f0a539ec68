"""A node's own training: its batches, its gradients, its inner optimizer, on its row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exogym.core.compute.finite import Watch
from exogym.core.compute.inner import InnerOptimizer
from exogym.core.compute.worker import Worker
from exogym.data.stream import Stream


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
