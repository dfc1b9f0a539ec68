"""FedProx: FedAvg with a term that keeps clients near the parameters with which they started the round.

Li et al., arXiv:1812.06127. In a round, client i minimizes F_i(w) + (mu/2) |w - theta|^2, where F_i is its loss and
theta are the parameters that it last received:

    g_i(w) + mu (w - theta)                         # at every local step, before clipping and the inner optimizer
    theta <- sum_i n_i theta_i / sum_i n_i          # as FedAvg

n_i is client i's number of examples, and g_i its gradient. Clients may take different numbers of steps, and the server
averages all of them. The proximal term is part of the gradient, so it enters Adam's moments, while decoupled weight
decay does not. A parameter without a gradient in a step gets no proximal term. Clients are sampled as in FedAvg and
weighted by `weighting` (the paper samples them in proportion to n_i, with equal weights). With `personal`, the term
covers only the shared parameters.

Payload: P b bytes per client every H steps, for P parameters of b bytes, as in FedAvg; each client keeps a copy of
theta. Absent nodes are handled as in FedAvg. A node that missed the synchronization stays near the theta that it last
received.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from exogym.core.base.torch_private import add_, differences
from exogym.core.fleet import Fleet
from exogym.core.fleet.fleet import rows_of
from exogym.errors import check_number
from exogym.strategy.averaging import FLAT, Averaging, averaging_of
from exogym.strategy.capabilities import Corrects
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.federated_averaging import AveragingCommunicator, FederatedOptions
from exogym.strategy.federated_rounds import RoundModule, with_gradient
from exogym.strategy.modules import views
from exogym.strategy.options import split
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import Run


class ProximalTerm(RoundModule, Corrects):
    """Add the proximal term mu (w - theta) to every local gradient.

    w are the node's parameters, and theta the parameters that the node last received. This module follows the averaging
    in the list of modules. `when` returns whether the term applies now (None: always).

    State: the theta that each node last received, (rows, P).
    """

    def __init__(self, average: AveragingCommunicator, mu: float, when: Callable[[], bool] | None = None):
        super().__init__(average)
        check_number("mu", mu, least=0)
        self.mu, self.when = float(mu), when

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.layouts = [block.layout for block in fleet.blocks]
        self.row_state = {f"received.{b}": block.params.clone() for b, block in enumerate(fleet.blocks)}

    def communicate(self, fleet: Fleet, step: int) -> None:
        self._receive(fleet, fleet.comm.present)

    def rejoin(self, fleet: Fleet, nodes: Sequence[int], step: int) -> None:
        self._receive(fleet, nodes)

    def _receive(self, fleet: Fleet, nodes: Sequence[int]) -> None:
        rows = rows_of(fleet, nodes)
        for block, received in zip(fleet.blocks, self.row_state.values(), strict=True):
            received[rows] = block.params[rows]

    @torch.no_grad()
    def correct(self, row: int, parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        if self.mu and (self.when is None or self.when()):
            received = views(list(self.row_state.values()), self.layouts, row)
            trained, w, theta = with_gradient(self.average.shared_only(grads), parameters, received)
            if trained:
                add_(trained, differences(w, theta), alpha=self.mu)


class FedProxStrategy(CommunicateOptimizeStrategy):
    """FedProx: FedAvg with a proximal term that keeps clients near theta.

    Use it when clients' data differ or clients take different numbers of steps.

        g_i <- g_i + mu (theta_i - theta) at every local step;   theta <- sum_i n_i theta_i / sum_i n_i

    theta are the server's parameters, theta_i client i's parameters, g_i its gradient and n_i its number of examples.
    Payload: P b bytes per client every H steps, for P parameters of b bytes.

    Args:
        mu: weight of the proximal term (0.001 to 1 in the paper). 0 is FedAvg.
        H, client_fraction, weighting, local_steps, local_epochs, keep_inner_state: see `AveragingCommunicator`.
        averaging: an `Averaging` with `transport`, `privacy` or `personal`.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: the clients' inner optimizer; see `Strategy`.

    >>> strategy = FedProxStrategy(inner_optim='sgd', mu=0.1, H=5, lr=0.01)
    """

    name, title, paper, payload = "fedprox", "FedProx", "arXiv:1812.06127", "P b / H"
    averages, not_taken = ("transport", "privacy", "personal"), FLAT
    ranges = ("mu=1e-3..1.0",)
    equation = "g_i <- g_i + mu (theta_i - theta) at every local step; then as fedavg"
    needs = "clients, every H steps"
    identities = ("mu=0 = fedavg", "H=1 = fedavg", "quadratic clients: (A + mu I)^-1 (A w + mu theta)")

    def __init__(
        self,
        inner_optim: Any = "sgd",
        mu: float = 0.01,
        H: RoundLength = 10,
        *,
        weighting: str = "examples",
        averaging: Averaging | None = None,
        **options: Unpack[FederatedOptions],
    ):
        means = averaging_of(averaging)
        clients, others = split(options, AveragingCommunicator)
        average = AveragingCommunicator(
            H, weighting=weighting, privacy=means.privacy, personal=means.personal, **clients
        )
        super().__init__(inner_optim, [average, ProximalTerm(average, mu)], **others)
        self.average_by(means)
