"""FedNova: FedAvg that does not favour clients which take more steps.

Wang et al., arXiv:2007.07481, for plain local SGD, where the norm of a client's weights of its gradients is their
number a_i:

    d_i = (theta - theta_i) / a_i;   tau = sum_i w_i a_i;   theta <- theta - tau sum_i w_i d_i

with FedAvg's weights w_i over the round's clients. So each client is brought to theta - (tau / a_i) (theta - theta_i)
before the mean. a_i counts the steps that a client has really taken, whatever was planned.

Payload P b + 8 bytes per client every H steps: a_i goes along. With absent nodes: as FedAvg; one whose synchronisation
was lost has taken the more steps next time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from exogym.base.torch_private import copy_
from exogym.errors import checked
from exogym.fleet import Fleet
from exogym.fleet.presence import rows_of
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.federated_averaging import AveragingCommunicator
from exogym.strategy.federated_rounds import RoundModule, views
from exogym.strategy.rounds import RoundLength
from exogym.strategy.schedule import Scheduler
from exogym.strategy.strategy import Run
from exogym.strategy.traffic import Traffic


class EqualisedWork(RoundModule):
    """Scales what each client has come to by tau / a_i; before the averaging.

    State: where a client began its round, (rows, P), and the steps since, (rows, 1).
    """

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return [replace(traffic, payload_bytes=8) for traffic in self.average.traffic(P, N, b)]

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.layouts = [block.layout for block in fleet.blocks]
        self.began = [block.params.clone() for block in fleet.blocks]
        self.taken = torch.zeros(len(fleet), 1, dtype=torch.float64)
        self.row_state = {f"began.{b}": began for b, began in enumerate(self.began)} | {"taken": self.taken}

    @torch.no_grad()
    def correct(self, row: int, parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        if not self.taken[row]:
            copy_(views(self.began, self.layouts, row), list(parameters))
        self.taken[row] += 1

    def communicate(self, fleet: Fleet, step: int) -> None:
        members = self.members(fleet, step)
        if not members:
            return
        tau = float(self.all_reduce(fleet, self.taken[:, 0], "mean", members, self.average.weights_among(members)))
        rows = [row for row in rows_of(fleet, members) if self.taken[row]]
        for block, began in zip(fleet.blocks, self.began, strict=True):
            scale = (tau / self.taken[rows]).to(began)
            block.params[rows] = began[rows] - scale * (began[rows] - block.params[rows])
        self.taken[rows] = 0

    def rejoin(self, fleet: Fleet, nodes: Sequence[int], step: int) -> None:
        self.taken[rows_of(fleet, nodes)] = 0


class FedNovaStrategy(CommunicateOptimizeStrategy):
    """Federated averaging of normalised changes.

    Args:
        H, client_fraction, weighting, local_steps, local_epochs, keep_inner_state, over_sampling,
            deadline_s, min_reports: as `AveragingCommunicator`; without
            `local_steps` or `local_epochs` (or slow nodes) all take the same number of steps, and it is FedAvg.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: of the clients, as `Strategy`; for plain SGD.

    >>> strategy = FedNovaStrategy(inner_optim='sgd', local_epochs=1, lr=0.01)
    """

    name, title, paper, payload = "fednova", "FedNova", "arXiv:2007.07481", "(P b + 8) / H"
    equation = "theta <- theta - (sum_i w_i a_i) sum_i w_i (theta - theta_i) / a_i, a_i being the steps of client i"
    needs = "all nodes every H steps; with client_fraction a server and those clients"
    not_taken: ClassVar = {
        "privacy": "the numbers of steps that clients took are averaged in the clear: take fedavg, fedopt or fedprox"
    }
    identities = ("equal numbers of steps = fedavg",)

    @checked
    def __init__(
        self,
        inner_optim: Any = "sgd",
        H: RoundLength = 10,
        *,
        lr: float | None = None,
        inner_lr: float | None = None,
        max_norm: float | None = None,
        lr_scheduler: Scheduler = None,
        warmup_steps: int = 0,
        client_fraction: float = 1.0,
        weighting: str = "examples",
        local_steps: Sequence[int] | None = None,
        local_epochs: int | None = None,
        keep_inner_state: bool = True,
        over_sampling: float = 0.0,
        deadline_s: float | None = None,
        min_reports: int = 1,
    ):
        average = AveragingCommunicator(
            H, client_fraction=client_fraction, weighting=weighting, local_steps=local_steps,
            local_epochs=local_epochs, keep_inner_state=keep_inner_state,
            over_sampling=over_sampling, deadline_s=deadline_s, min_reports=min_reports,
        )  # fmt: skip
        super().__init__(
            inner_optim, [EqualisedWork(average), average], lr=lr, inner_lr=inner_lr, max_norm=max_norm,
            lr_scheduler=lr_scheduler, warmup_steps=warmup_steps,
        )  # fmt: skip
