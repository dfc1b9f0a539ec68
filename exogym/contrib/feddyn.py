"""FedDyn: FedAvg with a changing term in each client's loss, so that all clients agree at the global minimum.

Acar et al., arXiv:2111.04263. Client i keeps a vector a_i, the gradient of its loss where it ended its last round. The
server has the parameters theta and the vector h. a_i and h start at zero. In a round with the clients S:

    g_i(w) - a_i + alpha (w - theta)                # at every local step from w = theta
    a_i   <- a_i - alpha (theta_i - theta)          # theta_i is where client i ends
    h     <- h - (1/N) sum_{i in S} (theta_i - theta)
    theta <- mean_{i in S} theta_i - h

g_i is client i's gradient, alpha the weight of both terms, and N counts all clients. (The paper's h is alpha times this
h.) If a client minimized its changed loss exactly, as in the paper, a_i would be its gradient at theta_i; here clients
take H local steps instead. The terms are part of the gradient, so they enter Adam's moments.

Payload: P b bytes per client every H steps, for P parameters of b bytes, as in FedAvg. Only the server needs h. Without
sampling, every node computes the server's step itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from exogym.core.base.torch_private import add_
from exogym.core.fleet import Fleet
from exogym.core.fleet.fleet import rows_of
from exogym.errors import check_number
from exogym.strategy.capabilities import Corrects
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.federated_averaging import AveragingCommunicator, FederatedOptions
from exogym.strategy.federated_rounds import RoundModule, with_gradient
from exogym.strategy.fedprox import ProximalTerm
from exogym.strategy.modules import views
from exogym.strategy.options import split
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import Run


class LinearTerm(RoundModule, Corrects):
    """Subtract a_i from every local gradient of client i, and update a_i at the end of each round.

    This module precedes the averaging in the list of modules.

    Args:
        near: the proximal term, which stores the theta that each client received.

    State: a_i, (rows, P).
    """

    def __init__(self, average: AveragingCommunicator, near: ProximalTerm):
        super().__init__(average)
        self.near = near

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.row_state = {f"own.{b}": block.zeros() for b, block in enumerate(fleet.blocks)}

    @torch.no_grad()
    def correct(self, row: int, parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        trained, own = with_gradient(grads, views(list(self.row_state.values()), self.layouts, row))
        if trained:
            add_(trained, own, alpha=-1)

    def communicate(self, fleet: Fleet, step: int) -> None:
        rows = rows_of(fleet, self.members(fleet, step))
        received = self.near.row_state.values()
        for block, own, theta in zip(fleet.blocks, self.row_state.values(), received, strict=True):
            own[rows] -= self.near.mu * (block.params[rows] - theta[rows])


class DynamicServer(RoundModule):
    """Take FedDyn's server step after the averaging: theta <- mean - h. State: theta and h, one copy for all nodes."""

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        blocks = list(enumerate(fleet.blocks))
        self.shared_state = {f"theta.{b}": block.params[:1].clone() for b, block in blocks}
        self.shared_state |= {f"h.{b}": block.zeros(1) for b, block in blocks}

    def communicate(self, fleet: Fleet, step: int) -> None:
        members = self.members(fleet, step)
        if not members:
            return
        receivers = rows_of(fleet, self.average.clients(self.average.round_of(step) + 1))
        for b, block in enumerate(fleet.blocks):
            theta, h = self.shared_state[f"theta.{b}"], self.shared_state[f"h.{b}"]
            server = self.average.shared_state[f"theta.{b}"] if self.average.has_server else None
            mean = block.params[:1] if server is None else server
            h.sub_(mean - theta, alpha=len(members) / fleet.num_nodes)
            theta.copy_(mean - h)
            if server is not None:
                server.copy_(theta)
            block.params[receivers] = theta

    def consensus(self, fleet: Fleet) -> list[Tensor]:
        return [self.shared_state[f"theta.{b}"][0] for b in range(len(fleet.blocks))]


class FedDynStrategy(CommunicateOptimizeStrategy):
    """FedDyn: FedAvg with a proximal term and a linear term that learns each client's gradient.

    Use it when clients' data differ a lot and clients return often: it corrects their bias at FedAvg's bytes.

        g_i <- g_i - a_i + alpha (theta_i - theta) at every local step;   a_i <- a_i - alpha (theta_i - theta)
        h <- h - sum_i (theta_i - theta) / N;   theta <- mean_i theta_i - h

    theta are the server's parameters, which evaluation uses, theta_i client i's parameters and g_i its gradient. N
    counts all clients; the sum and the mean are over the round's clients. Payload: P b bytes per client every H steps,
    for P parameters of b bytes.

    Args:
        alpha: weight of both terms, over 0 (0.001 to 0.1 with SGD in the paper). With AdamW, whose steps are longer,
            0.3 and more learn better.
        H, client_fraction, local_steps, local_epochs, keep_inner_state: see `AveragingCommunicator`. Clients have equal
            weights, as in the paper.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: the clients' inner optimizer; see `Strategy`.

    >>> strategy = FedDynStrategy(inner_optim='sgd', alpha=0.1, H=5, lr=0.01)
    """

    name, title, paper, payload = "feddyn", "FedDyn", "arXiv:2111.04263", "P b / H"
    tried = ('compute="vmap"',)
    ranges = ("alpha=1e-3..1.0",)
    equation = "g_i <- g_i - a_i + alpha (theta_i - theta) at every local step; theta <- mean_i theta_i - h"
    needs = "clients, every H steps"
    not_taken: ClassVar = {
        "personal": "a client's a_i and the server's h cover all parameters, also those that stay with the client: "
        "use fedavg, fedprox or fedopt",
        "privacy": "the server's h and a client's a_i must come from the same changes, and clipping and noise would "
        "alter only the server's. Use fedavg, fedopt or fedprox",
        "weighting": "h is a plain sum over clients, so that at the minimum the clients' terms cancel: all clients "
        "have equal weights",
    }
    identities = (
        "first round = fedprox with mu=alpha and a server step of 2",
        "all clients: h = mean_i a_i / alpha",
        "quadratic clients: theta goes to the global minimum",
    )

    def __init__(
        self,
        inner_optim: Any = "sgd",
        alpha: float = 0.3,
        H: RoundLength = 10,
        **options: Unpack[FederatedOptions],
    ):
        check_number("alpha", alpha, over=0)
        clients, others = split(options, AveragingCommunicator)
        average = AveragingCommunicator(H, weighting="uniform", **clients)
        near = ProximalTerm(average, alpha)
        super().__init__(inner_optim, [LinearTerm(average, near), average, DynamicServer(average), near], **others)
