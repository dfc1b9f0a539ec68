"""A node's own training: its batches, its gradients, its inner optimizer, on its row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from exogym.compute.finite import Watch
from exogym.compute.worker import Worker
from exogym.data.stream import Stream
from exogym.fleet.state import Stateful, Tensors
from exogym.strategy.kernels import bare_step
from exogym.strategy.packing import load_optimizer_state, optimizer_state
from exogym.strategy.schedule import forget_rates, set_rates
from exogym.strategy.strategy import Inner, clip_rows


class InnerOptimizer(Stateful):
    """An optimizer per row, all over the module's parameters.

    The parameters are re-pointed from row to row, and the row's optimizer steps: whatever an optimizer keeps, and
    wherever, is its row's own. It is built when the row is first entered, the module pointing at it.

    Attributes:
        optimizers: of the rows that were entered.
        steps: (rows,) steps each row has taken; schedules follow the row's own step.

    Raises:
        ArgumentError: the optimizer cannot work on a row.
    """

    def __init__(self, inner: Inner, worker: Worker, rows: int, total_steps: int):
        self.parameters = worker.parameters
        self.spec, self.max_norm = inner.spec, inner.max_norm
        self.schedule = inner.schedule(total_steps)
        self._named = dict(zip(worker.names, worker.parameters, strict=True))
        self._hidden = worker.fleet.hidden
        self.optimizers: dict[int, Optimizer] = {}
        self.steps = np.zeros(rows, dtype=np.int64)
        self._build()  # what cannot be built is to be known now
        worker.draws_torch |= self.spec.try_out(self._named, self._hidden)

    def enter(self, row: int) -> None:
        """Work on `row` from now on; the module must point at it."""
        if row not in self.optimizers:
            self.optimizers[row] = self._build()
        self.optimizer = self.optimizers[row]
        self._take_step = bare_step(self.optimizer)

    def _build(self) -> Optimizer:
        return self.spec.build(self._named, hidden=self._hidden)

    def step(self, row: int, clip: bool = True, skip: bool = False) -> None:
        """Take the row's next step with the gradients in `.grad`, and drop them. `skip` counts without stepping."""
        if not self.schedule.is_constant:
            set_rates(self.optimizer, self.schedule, int(self.steps[row]))
        if not skip:
            if clip and self.max_norm is not None:
                clip_rows([p.grad for p in self.parameters if p.grad is not None], self.max_norm, stacked=False)
            self._take_step()
        for p in self.parameters:
            p.grad = None
        self.steps[row] += 1

    def reset(self, row: int) -> None:
        """Start the row's optimizer afresh."""
        self.optimizers.pop(row, None)

    def row(self, row: int) -> Tensors:
        """Return what the row's optimizer keeps, as `optimizer_state`; nothing where it has not begun."""
        if row not in self.optimizers:
            return {}
        forget_rates(self.optimizers[row])
        return optimizer_state(self.optimizers[row])

    def load_row(self, row: int, tensors: Tensors) -> None:
        """Put a row's state back."""
        self.reset(row)
        if tensors:
            self.enter(row)
            load_optimizer_state(self.optimizer, tensors)


class Steps(Stateful):
    """Steps that each row has taken, (rows,): batches and learning rates follow a row's own."""

    def __init__(self, steps: np.ndarray):
        self.steps = steps

    def row(self, row: int) -> Tensors:
        return {"taken": torch.tensor(self.steps[row])}

    def load_row(self, row: int, tensors: Tensors) -> None:
        self.steps[row] = int(tensors["taken"])


class TrainNode:
    """One node: its row of the fleet, its share of the data, its optimizer state.

    Args:
        rank: global id.
        row: the row here.
        worker, stream, inner, watch: shared by the nodes of this process.
    """

    def __init__(self, rank: int, row: int, worker: Worker, stream: Stream, inner: InnerOptimizer, watch: Watch):
        self.rank, self.row = rank, row
        self.worker, self.stream, self.inner, self.watch = worker, stream, inner, watch

    def train(self, count: int) -> Tensor:
        """Take `count` local steps one after the other; return their losses, (count,), or fewer if told to stop.

        A node that is to be skipped when its numbers are not finite rests from then on; such a step's loss is inf.

        Raises:
            TrainingError: a loss or an update is not finite; the message names node, step and tensor.
        """
        worker, inner, row, watch = self.worker, self.inner, self.row, self.watch
        first = int(inner.steps[row])
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
                        inner.steps[row] = first + count
                        losses += [math.inf] * (count - k)
                        break
                    loss = math.inf
            losses.append(loss)
            inner.step(row, skip=worker.overflowed)
            worker.update_scale(row)
            if worker.should_stop():
                break
        worker.check(row)
        if watch.at_once:
            taken = torch.tensor(losses)
        else:
            taken = watch.losses(self.rank, row, torch.stack(losses).to(torch.get_default_dtype()), first)
        watch.row(self.rank, row, first + len(losses))
        return taken

    def compute_gradient(self) -> Tensor:
        """Compute loss and gradients of the node's next step, into `.grad`; return the loss, inf if it is not finite.

        Raises:
            TrainingError: it is not finite, unless the node is to be skipped then.
        """
        worker, first = self.worker, int(self.inner.steps[self.row])
        worker.point(self.row)
        (batch,) = self.stream.batches(self.rank, first, 1)
        worker.reseed(self.rank, first)
        loss = worker.gradient(batch, self.row)
        worker.check(self.row)
        return self.watch.losses(self.rank, self.row, loss.reshape(1), first)[0]
