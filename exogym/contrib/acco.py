"""ACCO: DDP whose all-reduces travel while nodes compute, with an estimate of the parameters instead of old ones.

Nabli et al., ACCO: Accumulate While You Communicate, arXiv:2406.02613, with details from the authors' training loop
(edouardoyallon/acco). theta are the parameters, theta~ their estimate, and Opt is the inner optimizer. A round has two
steps, in which node i has the gradients g_i and h_i:

    first step:   g_i at theta~;  A of the last round arrives;   theta <- Opt(theta, clip(A));   send B = mean_i g_i
    second step:  h_i at theta;   B arrives;   theta~ <- Opt(theta, clip(B));   send A = mean_i (g_i + h_i) / 2

The estimate's step changes neither theta nor Opt's state, so each gradient counts once, and half of each mean's
gradients are taken at theta itself. In the first round theta~ = theta, and nothing arrives in the run's first step; the
run's last mean is not used. The schedule gives the rate of each step. As in DDP, a parameter that no node used for a
mean does not step with this mean. (In the authors' code all parameters step, so weight decay shrinks unused ones.)

Payload: P b bytes per node and step, for P parameters of b bytes, as in DDP: ring all-reduce, tx = rx = 2 (N-1)/N P b.
The all-reduce overlaps with the next step, on hosts only with gloo and whole nodes in each process. Evaluation uses
theta.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from exogym.contrib.onebit_adam import spread
from exogym.core.fleet import Block, Fleet
from exogym.core.fleet.state import Tensors, below
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, GradientModule, PeriodicModule
from exogym.strategy.compressed_gradients import own_gradients
from exogym.strategy.simple_reduce import broadcast_buffers, mark_used
from exogym.strategy.strategy import InnerOptions, Run
from exogym.strategy.traffic import Traffic

OPTIMIZER = "optimizer"  # the name of Opt's state in `fleet.state`


class GradientsUnderWay(GradientModule):
    """Send each step's mean gradients, and give the inner optimizer the mean sent a step earlier.

    State: theta, the pending mean and which of its entries some node used, one copy for all nodes; each node's g_i, and
    Opt's state before an estimate that is not yet undone.
    """

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return [Traffic("all_reduce", P * b, overlap_steps=1)]

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.comm, self.state, self.way = fleet.comm, fleet.state, fleet.comm.new_flight()
        self.row_state = {f"first.{b}": block.zeros() for b, block in enumerate(fleet.blocks)}
        self.shared_state = {f"theta.{b}": block.params[:1].clone() for b, block in enumerate(fleet.blocks)}
        self.shared_state |= {f"mean.{b}": torch.zeros_like(block.params[:1]) for b, block in enumerate(fleet.blocks)}
        self.shared_state |= {
            f"used.{b}": torch.zeros_like(block.params[:1], dtype=torch.bool) for b, block in enumerate(fleet.blocks)
        }
        self.kept: list[Tensors] = [{} for _ in fleet.ranks]

    def transform(self, fleet: Fleet, step: int, lr: float) -> None:
        fleet.comm.arrive(self.way)
        is_first = step % 2 == 1
        for b, block in enumerate(fleet.blocks):
            g = self.row_state[f"first.{b}"]
            own = own_gradients(fleet, block)
            arrived = self.shared_state[f"mean.{b}"].clone()
            arrives = self._used(fleet, block, b, is_first) & (step > 1)
            if is_first:
                g.copy_(own)
                block.params.copy_(self.shared_state[f"theta.{b}"].expand_as(g))
                sent = g
            else:
                wide = torch.promote_types(g.dtype, torch.float32)
                sent = ((g.to(wide) + own) / 2).to(g)
            with fleet.comm.on_its_way(self.way):
                mean = fleet.comm.all_reduce(sent, "mean")
            self.shared_state[f"mean.{b}"] = mean[:1]
            block.grads = arrived.expand_as(own)
            block.has_grad[:] = arrives
        opt = [OPTIMIZER] if OPTIMIZER in self.state.parts else []
        for row in range(len(fleet)):
            if is_first and step > 1:
                self.state.load_row(row, self.kept[row], opt)
            before = {} if is_first else self.state.row(row, opt)
            self.kept[row] = {name: x.clone() for name, x in before.items()}
        broadcast_buffers(fleet)

    def _used(self, fleet: Fleet, block: Block, b: int, is_first: bool) -> Tensor:
        """Record which parameters the mean being sent covers, and return the parameters of the mean that arrives."""
        mark_used(fleet, block)
        used = self.shared_state[f"used.{b}"]
        arrives = torch.tensor([bool(slot.of(used).any()) for slot in block.layout])
        sent = block.has_grad[0] if is_first else block.has_grad[0] | arrives  # A has the gradients of B, too
        used.copy_(spread(sent, [slot.numel for slot in block.layout]))
        return arrives

    # State in checkpoints

    def row(self, row: int) -> Tensors:
        return super().row(row) | {f"kept.{name}": x for name, x in self.kept[row].items()}

    def load_row(self, row: int, tensors: Tensors) -> None:
        super().load_row(row, tensors)
        self.kept[row] = {name: x.clone() for name, x in below("kept.", tensors).items()}

    def save_state(self) -> Tensors:
        self.comm.settle(self.way)
        return super().save_state()


class Committed(PeriodicModule):
    """Record theta after each step that is not an estimate. Nodes send nothing.

    Args:
        gradients: the strategy's gradient module, which has theta.
    """

    def __init__(self, gradients: GradientsUnderWay):
        super().__init__()
        self.gradients = gradients

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return []

    def communicate(self, fleet: Fleet, step: int) -> None:
        if step % 2:
            for b, block in enumerate(fleet.blocks):
                self.gradients.shared_state[f"theta.{b}"].copy_(block.params[:1])

    def consensus(self, fleet: Fleet) -> list[Tensor]:
        return [self.gradients.shared_state[f"theta.{b}"][0] for b in range(len(fleet.blocks))]


class ACCOStrategy(CommunicateOptimizeStrategy):
    """ACCO: DDP whose all-reduces travel during the next step, with gradients at theta and at its estimate theta~.

    Use it when you want DDP's loss and an all-reduce takes about as long as a step.

        first step:   g_i at theta~;   theta <- Opt(theta, clip(mean_i (g_i + h_i) / 2)) with the last round's gradients
        second step:  h_i at theta;    theta~ <- Opt(theta, clip(mean_i g_i)), which leaves theta and Opt as they are

    g_i and h_i are node i's gradients, theta are the parameters, which evaluation uses, and Opt is the inner optimizer.
    Two steps are a round. Payload: P b bytes per node and step, for P parameters of b bytes.

    Args:
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: see `Strategy`. The authors use AdamW.

    >>> strategy = ACCOStrategy("adamw", lr=1e-3)
    """

    name, title, paper, payload = "acco", "ACCO", "arXiv:2406.02613", "P b"
    tried = ()
    ranges = ()
    equation = (
        "g_i at theta~, theta <- Opt(theta, mean_i (g_i + h_i) / 2); h_i at theta, theta~ <- Opt(theta, mean_i g_i)"
    )
    needs = "all nodes, every step; an all-reduce may take a step"
    identities = (
        "N nodes, batch B = one node, batch N B",
        "constant gradients: 2 T + 1 steps = T steps of ddp",
    )

    def __init__(self, inner_optim: Any = "adamw", **options: Unpack[InnerOptions]):
        gradients = GradientsUnderWay()
        super().__init__(inner_optim, [Committed(gradients)], gradient_modules=[gradients], **options)
