"""The part of `Strategy` that runs in training: how a strategy written for one node takes its steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from exogym.core.base.torch_private import bare_step, scale_
from exogym.core.communicator import ALONE, Columns
from exogym.core.fleet.layout import hidden_matrices
from exogym.strategy import communicate
from exogym.strategy.schedule import Schedule, set_rates


class OneNode:
    """One of many nodes, with its model and inner optimizer. `Strategy` describes its attributes and methods."""

    stacked = False
    overflowed = False
    inner: Any  # an `Inner`
    model: nn.Module
    rank: Any
    num_nodes: int
    present: list[int]
    optim: Optimizer
    schedule: Schedule
    local_step: int
    total_steps: int

    def _init_node(self, model: nn.Module, rank: Any, num_nodes: int) -> None:
        """Set up the node once before training. Overrides call `super()._init_node(model, rank, num_nodes)`."""
        self.model, self.rank, self.num_nodes = model, rank, num_nodes
        self.present = list(range(num_nodes))
        self.local_step = 0
        self.schedule = self.inner.schedule(self.total_steps)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        hidden = hidden_matrices(model)
        self.inner.spec.try_out(named, hidden)
        self.optim = self.inner.spec.build(named, may_fuse=not self.stacked, hidden=hidden)  # several rows cannot fuse
        self._set_lr()

    def communicate_gradients(self) -> None:
        """Average the gradients over the present nodes, by an all-reduce.

        The payload is P b bytes for P parameters of b bytes. As in torch's DDP, a parameter's missing gradient counts
        as zeros if another node has one. A parameter without a gradient on any node stays unchanged.
        """
        parameters = self._parameters()
        mine = torch.tensor([p.grad is not None for p in parameters])
        used = communicate.agree(mine.expand(len(self.rank), -1) if self.stacked else mine)
        for p, needed in zip(parameters, used.tolist(), strict=True):
            if needed:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                communicate.all_reduce(p.grad, op="mean")

    def update_parameters(self) -> None:
        """Clip the gradient to `max_norm` and step the inner optimizer, unless gradients overflowed in fp16."""
        if self.overflowed:
            return
        if self.inner.max_norm is not None:
            clip_rows([p.grad for p in self._parameters() if p.grad is not None], self.inner.max_norm, self.stacked)
        bare_step(self.optim)()

    def step(self) -> None:
        """End the step by advancing the learning-rate schedule. Overrides call `super().step()` last."""
        self.local_step += 1
        self._set_lr()

    def rejoin(self, nodes: list[int], source: int) -> None:
        """Adjust this node's state after `nodes` have returned from an absence.

        ExoGym calls this method on every present node before the first step of the returned nodes, which now hold the
        values of the node `source`. Override it to reset a node's own state; it may call collectives:

            if self.rank in nodes:
                self.residual.zero_()
        """

    def _parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _set_lr(self) -> None:
        set_rates(self.optim, self.schedule, self.local_step)


def clip_rows(grads: list[torch.Tensor], max_norm: float, stacked: bool, columns: Columns = ALONE) -> None:
    """Scale gradients in place so that each node's 2-norm over all tensors is at most `max_norm` (torch's rule).

    If a norm is NaN, nothing is scaled, so that the NaN stays in its tensor and messages can name this tensor.

    Args:
        stacked: whether each tensor is (rows, *shape) and every row has its own norm.
        columns: the processes that hold a node's parameters; the norm is over all of them.
    """
    if not grads:
        return
    if not stacked:
        total = columns.norms(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads])))
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0).nan_to_num(1.0)
        scale_(grads, factor)
        return
    # Row by row: a kernel over several rows may add in another order than over one row.
    rows = zip(*(g.unbind(0) for g in grads), strict=True)
    norms = torch.stack(
        [torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in row])) for row in rows]
    )
    factor = (max_norm / (columns.norms(norms) + 1e-6)).clamp(max=1.0).nan_to_num(1.0)
    for g in grads:
        g.mul_(factor.view(-1, *[1] * (g.dim() - 1)))
