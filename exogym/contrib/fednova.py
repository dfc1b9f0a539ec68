"""FedNova: FedAvg that does not favor clients with more steps.

Wang et al., arXiv:2007.07481. theta are the server's parameters, theta_i client i's parameters and gamma the learning
rate. In a round, theta_i changes by -gamma times a weighted sum of the round's gradients, and a_i is the sum of these
weights (the 1-norm of the paper's vector a_i). With FedAvg's weights w_i over the round's clients

    d_i = (theta - theta_i) / a_i;   tau = sum_i w_i a_i;   theta <- theta - tau sum_i w_i d_i

so each client moves to theta - (tau / a_i) (theta - theta_i) before the mean. For t local steps, the paper gives

    SGD                       a_i = t
    SGD with momentum rho     a_i = (t - rho (1 - rho^t) / (1 - rho)) / (1 - rho)
    SGD, proximal term mu     a_i = (1 - (1 - gamma mu)^t) / (gamma mu)

This code adds up the weights step by step, with the same result. With momentum, a number c starts at 0, and each step
sets c <- rho c + 1, a_i <- a_i + c (Nesterov: a_i + 1 + rho c). With a proximal term, each step sets a_i <- |1 - gamma
mu| a_i + 1. With a learning-rate schedule, step k counts gamma_k / gamma instead of 1, where gamma_k is the step's rate
and gamma the rate at the schedule's factor 1. t counts the steps that a client actually took. Weight decay is part of
the gradient.

The sums cover one round's gradients, so momentum starts each round at zero (`keep_inner_state=False`), as in the
published code. ExoGym refuses other optimizers, dampening, and momentum with a proximal term, for which the paper gives
no a_i, and clipping with a proximal term, because it would cut the term.

Payload: P b + 8 bytes per client every H steps, for P parameters of b bytes; 8 bytes are for a_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.core.fleet.fleet import rows_of
from exogym.errors import ArgumentError
from exogym.strategy.capabilities import Corrects
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.federated_averaging import AveragingCommunicator, FederatedOptions
from exogym.strategy.federated_rounds import RoundModule
from exogym.strategy.fedprox import ProximalTerm
from exogym.strategy.optim_groups import name_of
from exogym.strategy.options import split
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import Inner, Run
from exogym.strategy.traffic import Traffic


class EqualisedWork(RoundModule, Corrects):
    """Scale each client's change by tau / a_i before the averaging.

    a_i is the sum of the weights of client i's gradients in the round, and tau is the clients' weighted mean of a_i.

    Args:
        inner: the strategy's inner optimizer.
        near: the proximal term, which stores the theta that each client received.

    State, (rows, 1) each: a_i; with momentum, the number c that gives the next gradient's weight; with a schedule, the
    client's steps since the run began.

    Raises:
        ArgumentError: the paper gives no a_i for the clients' optimizer.
    """

    def __init__(self, average: AveragingCommunicator, inner: Inner, near: ProximalTerm):
        super().__init__(average)
        self.inner, self.near, self.mu = inner, near, near.mu
        given = inner.spec.kwargs
        self.momentum, self.nesterov = float(given.get("momentum", 0)), bool(given.get("nesterov"))
        if (unknown := self._unknown()) is not None:
            raise ArgumentError(f"FedNova divides by a_i, the sum of a round's gradient weights: {unknown}")

    def _unknown(self) -> str | None:
        """Return why no a_i is known for the clients' optimizer and what to do, or None if a_i is known."""
        spec = self.inner.spec
        if spec.make is not torch.optim.SGD:
            return f"no a_i is known for {name_of(spec.make)}: use inner_optim='sgd', or FedAvg or FedOpt"
        if spec.kwargs.get("dampening"):
            return f"no a_i is known with dampening={spec.kwargs['dampening']}: leave it out"
        uneven = {name for _, options in spec.groups for name in options} - {"weight_decay", "lr"}
        if uneven or (self.mu and any("lr" in options for _, options in spec.groups)):
            return f"groups give several a_i ({', '.join(sorted(uneven)) or 'lr with mu'}): let all groups be alike"
        if self.momentum and self.mu:
            return "the paper gives no a_i for momentum with a proximal term: leave mu or momentum out"
        if self.momentum and not self.average.fresh_inner_state:
            return "kept momentum adds gradients of earlier rounds: pass keep_inner_state=False"
        if self.mu and self.inner.max_norm is not None:
            return f"max_norm={self.inner.max_norm} cuts the proximal term, too: leave mu or max_norm out"
        return None

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return [replace(traffic, payload_bytes=8) for traffic in self.average.traffic(P, N, b)]

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.schedule = self.inner.schedule(run.total_steps)
        self.a, self.velocity, self.steps = (torch.zeros(len(fleet), 1, dtype=torch.float64) for _ in range(3))
        self.row_state = {"a": self.a}
        if self.momentum:
            self.row_state["velocity"] = self.velocity
        if not self.schedule.is_constant:
            self.row_state["steps"] = self.steps

    def correct(self, row: int, parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        base, rate = self.inner.base_lr, 1.0
        if not self.schedule.is_constant:
            rate = self.schedule.lr(int(self.steps[row])) / base if base else 1.0
        self.steps[row] += 1
        one = 1.0
        if self.momentum:
            self.velocity[row] = self.momentum * self.velocity[row] + 1
            one = float(1 + self.momentum * self.velocity[row] if self.nesterov else self.velocity[row])
        self.a[row] = abs(1 - rate * base * self.mu) * self.a[row] + rate * one

    def communicate(self, fleet: Fleet, step: int) -> None:
        self.velocity.zero_()  # like every client's momentum
        members = self.members(fleet, step)
        if not members:
            return
        tau = float(self.all_reduce(fleet, self.a[:, 0], "mean", members, self.average.weights_among(members)))
        rows = [row for row in rows_of(fleet, members) if self.a[row]]
        for block, began in zip(fleet.blocks, self.near.row_state.values(), strict=True):
            scale = (tau / self.a[rows]).to(began)
            block.params[rows] = began[rows] - scale * (began[rows] - block.params[rows])
        self.a[rows] = 0


class FedNovaStrategy(CommunicateOptimizeStrategy):
    """FedNova: FedAvg of normalized changes, so that clients with more steps do not count more.

    Use it when clients take different numbers of steps.

        theta <- theta - (sum_i w_i a_i) sum_i w_i (theta - theta_i) / a_i

    theta are the server's parameters, theta_i client i's parameters, and w_i is client i's weight in FedAvg. a_i is the
    sum of the weights of the round's gradients; for plain SGD, the number of steps. Payload: P b + 8 bytes per client
    every H steps, for P parameters of b bytes.

    Args:
        H, client_fraction, weighting, local_steps, local_epochs, keep_inner_state: see `AveragingCommunicator`. Unless
            you set `local_steps` or `local_epochs`, all clients take equally many steps, and FedNova is FedAvg.
        mu: weight of a proximal term mu (theta_i - theta) in every local gradient, as in FedProx. 0 means no term.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: the clients' inner optimizer, which must be SGD
            without momentum, or with momentum and keep_inner_state=False; see `Strategy`.

    Raises:
        ArgumentError: the paper gives no a_i for the clients' optimizer, such as an optimizer other than SGD, momentum
            kept between rounds, or momentum with a proximal term.

    >>> strategy = FedNovaStrategy(inner_optim='sgd', local_epochs=1, lr=0.01)
    """

    name, title, paper, payload = "fednova", "FedNova", "arXiv:2007.07481", "(P b + 8) / H"
    tried = ('compute="vmap"',)
    ranges = ()
    equation = (
        "theta <- theta - (sum_i w_i a_i) sum_i w_i (theta - theta_i) / a_i; a_i: sum of gradient weights (SGD: steps)"
    )
    needs = "clients, every H steps"
    not_taken: ClassVar = {
        "personal": "the change of all parameters is scaled, also of those that stay with the client: use fedavg, "
        "fedprox or fedopt",
        "privacy": "the clients' numbers of steps are averaged in the clear: use fedavg, fedopt or fedprox",
    }
    identities = ("equal numbers of steps = fedavg",)
    only_inner = ("sgd",)

    def __init__(
        self,
        inner_optim: Any = "sgd",
        H: RoundLength = 10,
        *,
        weighting: str = "examples",
        mu: float = 0.0,
        **options: Unpack[FederatedOptions],
    ):
        clients, others = split(options, AveragingCommunicator)
        average = AveragingCommunicator(H, weighting=weighting, **clients)
        near = ProximalTerm(average, mu)
        work = EqualisedWork(average, Inner.of(inner_optim, others), near)
        super().__init__(inner_optim, [work, average, near], **others)
