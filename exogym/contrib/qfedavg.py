"""q-FedAvg: FedAvg that moves theta further for clients with large losses, so that clients' losses become more alike.

Li, Sanjabi, Beirami, Smith, Fair Resource Allocation in Federated Learning, arXiv:1905.10497. The method minimizes
sum_i F_i(theta)^(q+1) / (q+1), where F_i is client i's loss. L is a constant, 1/eta for the clients' learning rate eta.
In a round with the clients S:

    theta_i <- H local steps from theta                                     for i in S
    Delta_i = L (theta - theta_i)
    theta   <- theta - sum_i F_i^q Delta_i / sum_i h_i,   h_i = q F_i^(q-1) |Delta_i|^2 + L F_i^q

F_i is the loss at theta. The authors compute it over all of the client's examples; here it is the loss of the client's
first local step of the round, which needs no further pass over the data and is the same for full batches. As in the
authors' code, 1e-10 is added to F_i. Clients have equal weights, as in the paper.

Payload: P b + 8 bytes per client every H steps, for P parameters of b bytes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from exogym.core.base.devices import widest
from exogym.core.fleet import Fleet
from exogym.core.fleet.fleet import rows_of
from exogym.errors import TrainingError, check_number
from exogym.strategy.capabilities import SeesLosses
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.federated_averaging import AveragingCommunicator, FederatedOptions
from exogym.strategy.federated_rounds import RoundModule
from exogym.strategy.fedprox import ProximalTerm
from exogym.strategy.options import split
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import Inner, Run
from exogym.strategy.traffic import Traffic

LEAST = 1e-10


class FairShares(RoundModule, SeesLosses):
    """Scale each client's change so that the clients' mean is q-FedAvg's next theta.

    This module precedes the averaging in the list of modules.

    Args:
        near: the module that stores the theta that each client received.
        q: the exponent.
        L: the constant of the server's step.

    State: each client's F_i, (rows, 1), infinite until its first step of the round.
    """

    def __init__(self, average: AveragingCommunicator, near: ProximalTerm, q: float, L: float):
        super().__init__(average)
        self.near, self.q, self.L = near, q, L

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return [replace(traffic, payload_bytes=8) for traffic in self.average.traffic(P, N, b)]

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.F = torch.full((len(fleet), 1), torch.inf, dtype=torch.float64)
        self.row_state = {"F": self.F}

    def see_losses(self, fleet: Fleet, first: int, losses: Tensor) -> None:
        for row, seen in enumerate(losses.cpu().double()):
            if self.F[row].isinf() and len(finite := seen[seen.isfinite()]):
                self.F[row] = finite[0]

    def communicate(self, fleet: Fleet, step: int) -> None:
        members = self.members(fleet, step)
        if not members:
            return
        share, h = torch.zeros(len(fleet), dtype=torch.float64), torch.zeros(len(fleet), dtype=torch.float64)
        received, changed = list(self.near.row_state.values()), False
        for row in rows_of(fleet, members):
            moved = [theta[row] - block.params[row] for block, theta in zip(fleet.blocks, received, strict=True)]
            square = sum(float(widest(x).square().sum()) for x in moved)
            F = float(self.F[row]) + LEAST
            changed = changed or square > 0
            if F <= 0 and square:
                raise TrainingError(
                    f"q-FedAvg needs a positive loss, but node {fleet.ranks[row]} had {F - LEAST:g} in this round: "
                    "use a positive loss"
                )
            if 0 < F < math.inf:  # otherwise no loss of the node was finite
                share[row] = _power(F, self.q)
                h[row] = share[row] + self.q * _power(F, self.q - 1) * self.L * square
        mean = float(self.all_reduce(fleet, h, "mean", members))
        if math.isinf(mean) or share.isinf().any() or (changed and not mean):
            raise TrainingError(
                f"q-FedAvg divides by the sum of h_i, which is {mean:g} with q={self.q:g} and losses from "
                f"{float(self.F.min()):g} to {float(self.F.max()):g}: use a smaller q, or scale the loss nearer to 1"
            )
        for row in rows_of(fleet, members):
            for block, theta in zip(fleet.blocks, received, strict=True):
                block.params[row] = torch.lerp(theta[row], block.params[row], float(share[row]) / (mean or 1.0))
            self.F[row] = torch.inf


def _power(x: float, y: float) -> float:
    try:
        return float(x**y)
    except OverflowError:
        return math.inf


class QFedAvgStrategy(CommunicateOptimizeStrategy):
    """q-FedAvg: FedAvg whose server counts clients with a large loss more, for losses that are more alike.

    Use it when no client's loss may be much larger than the others', even if the mean loss rises.

        theta <- theta - sum_i F_i^q L (theta - theta_i) / sum_i h_i,  h_i = q F_i^(q-1) |L (theta - theta_i)|^2 + L F_i^q

    theta are the server's parameters, theta_i client i's parameters and F_i its loss at theta. Payload: P b + 8 bytes
    per client every H steps, for P parameters of b bytes.

    Args:
        q: how much large losses count (0.001 to 15 with SGD in the paper). 0 is FedAvg with equal weights. With AdamW,
            a large q hardly learns in short runs.
        L: the constant of the server's step. None means 1/lr for the clients' learning rate lr, as in the paper.
        H, client_fraction, local_steps, local_epochs, keep_inner_state: see `AveragingCommunicator`. Clients have equal
            weights, as in the paper.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: the clients' inner optimizer; see `Strategy`.

    Raises:
        TrainingError: during training, if a client's loss is not positive, or if F_i^q overflows.

    >>> strategy = QFedAvgStrategy(inner_optim='sgd', q=1.0, H=5, lr=0.01)
    """  # noqa: E501

    name, title, paper, payload = "qfedavg", "q-FedAvg", "arXiv:1905.10497", "(P b + 8) / H"
    tried = ()
    equation = "theta <- theta - sum_i F_i^q L (theta - theta_i) / sum_i h_i; F_i: loss at theta"
    needs = "clients, every H steps"
    ranges = ("q=0.001..5.0",)
    not_taken: ClassVar = {
        "personal": "the server's step depends on the change of all parameters: use fedavg, fedprox or fedopt",
        "privacy": "clients send their losses in the clear: use fedavg, fedopt or fedprox",
        "weighting": "the paper's clients have equal weights, and their losses change the weights",
    }
    identities = (
        "q=0 = fedavg with equal weights",
        "one client: theta + F d / (F + q L d^2), d = theta_1 - theta",
        "quadratic clients: theta goes to the minimum of sum_i F_i^(q+1)",
    )

    def __init__(
        self,
        inner_optim: Any = "sgd",
        q: float = 0.01,
        H: RoundLength = 10,
        *,
        L: float | None = None,
        **options: Unpack[FederatedOptions],
    ):
        check_number("q", q, least=0)
        if L is not None:
            check_number("L", L, over=0)
        clients, others = split(options, AveragingCommunicator)
        average = AveragingCommunicator(H, weighting="uniform", **clients)
        rate = float(Inner.of(inner_optim, others).base_lr)
        near = ProximalTerm(average, 0.0)
        L = (1 / rate if rate else 1.0) if L is None else L  # with a rate of 0 nothing moves
        shares = FairShares(average, near, float(q), float(L))
        super().__init__(inner_optim, [shares, average, near], **others)
