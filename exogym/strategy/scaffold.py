"""SCAFFOLD: FedAvg whose clients correct their gradients for the difference between their data and everyone's.

Karimireddy et al., arXiv:1910.06378. The server has the parameters theta and the control variate c, and client i the
control variate c_i; c and c_i start at zero. K is the number of a round's local steps. In a round, client i starts with
y_i = theta:

    y_i <- y_i - eta_l (g_i(y_i) - c_i + c)                  # K local steps from theta
    c_i+ = (1/K) sum of the round's g_i(y_i)                 # SGD: option II, c_i - c + (theta - y_i) / (K eta_l)
    theta <- theta + eta_g mean_{i in S} (y_i - theta);   c <- c + (1/N) sum_{i in S} (c_i+ - c_i);   c_i <- c_i+

eta_l is the clients' learning rate and eta_g the server's; g_i is client i's gradient, N counts all clients, and S are
the round's clients. With SGD, the paper's option II equals the mean of the round's local gradients. This code computes
that mean, of gradients before clipping and weight decay, so it also works for other inner optimizers and schedules.

Payload: 2 P b bytes per client every H steps, for P parameters of b bytes: y_i and c_i+ - c_i, each sent as in FedAvg.
If nodes are absent, S counts only the present clients. A node that missed a synchronization continues, and its next
c_i+ is the mean over all its steps since its last synchronization. A node that was down keeps its c_i and receives c
with the parameters, 2 P b bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor

from exogym.core.base.torch_private import add_, differences
from exogym.core.fleet import Block, Fleet
from exogym.core.fleet.fleet import rows_of
from exogym.core.fleet.returning import give_shared
from exogym.errors import check_number
from exogym.strategy.averaging import FLAT, Averaging, averaging_of
from exogym.strategy.capabilities import Corrects
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.federated_averaging import AveragingCommunicator, FederatedOptions
from exogym.strategy.federated_rounds import RoundModule, with_gradient
from exogym.strategy.fedopt import ServerStep
from exogym.strategy.modules import views
from exogym.strategy.options import split
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import Run
from exogym.strategy.traffic import Traffic


class ControlVariates(RoundModule, Corrects):
    """Add c - c_i to every local gradient of client i, and update c and c_i at the end of each round.

    c is the server's control variate and c_i client i's. This module precedes the averaging in the list of modules.

    State: c, one copy for all nodes; c_i and the sum of a round's gradients, (rows, P) each; the number of these
    gradients, (rows, 1).
    """

    weighted_means = False  # c is a sum over clients

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return self.average.traffic(P, N, b)

    def couples_every(self, N: int) -> float:
        return self.average.couples_every(N)

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.layouts, blocks = [block.layout for block in fleet.blocks], list(enumerate(fleet.blocks))
        self.c = [block.zeros(1) for block in fleet.blocks]
        self.own = [block.zeros() for block in fleet.blocks]
        self.seen = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in map(Block.zeros, fleet.blocks)]
        self.taken = torch.zeros(len(fleet), 1, dtype=torch.int64)
        self.shared_state = {f"c.{b}": self.c[b] for b, _ in blocks}
        self.row_state = {f"own.{b}": self.own[b] for b, _ in blocks} | {f"seen.{b}": self.seen[b] for b, _ in blocks}
        self.row_state["taken"] = self.taken

    @torch.no_grad()
    def correct(self, row: int, parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        mine = (views(x, self.layouts, at) for x, at in ((self.c, 0), (self.own, row), (self.seen, row)))
        trained, c, own, seen = with_gradient(grads, *mine)
        if trained:
            add_(seen, trained)
            add_(trained, differences(c, own))
        self.taken[row] += 1

    def communicate(self, fleet: Fleet, step: int) -> None:
        members = self.members(fleet, step)
        if not members:
            return
        rows = [row for row in rows_of(fleet, members) if self.taken[row]]
        for c, own, seen in zip(self.c, self.own, self.seen, strict=True):
            new = (seen[rows] / self.taken[rows].to(seen)).to(own)
            change = torch.zeros_like(own)
            change[rows] = new - own[rows]
            c += self.all_reduce(fleet, change, "sum", members) / fleet.num_nodes
            own[rows] = new
            seen[rows] = 0
        self.taken[rows] = 0

    def rejoin(self, fleet: Fleet, nodes: Sequence[int], step: int) -> None:
        rows = rows_of(fleet, nodes)
        for seen in self.seen:
            seen[rows] = 0
        self.taken[rows] = 0
        give_shared(fleet, [c[0] for c in self.c], nodes)


class ScaffoldStrategy(CommunicateOptimizeStrategy):
    """SCAFFOLD: FedAvg with control variates, which correct each local gradient for the client's own data.

    Use it when clients' data differ and each client returns often, because its c_i is old otherwise.

        g_i <- g_i + c - c_i at every local step;   c_i <- mean of the round's g_i;   c <- c + sum_i (change of c_i) / N

    g_i is the gradient of client i, c_i its control variate, c the server's control variate, and N the number of
    clients. Payload: 2 P b bytes per client every H steps, for P parameters of b bytes.

    Args:
        server_lr: eta_g, the server's learning rate.
        H, client_fraction, weighting, local_steps, local_epochs, keep_inner_state: see `AveragingCommunicator`. By
            default clients have equal weights, as in the paper.
        averaging: an `Averaging` with a `transport`.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: the clients' inner optimizer, SGD in the paper;
            see `Strategy`.

    >>> strategy = ScaffoldStrategy(inner_optim='sgd', H=5, lr=0.01)
    """

    temporary_rows = 4.0
    name, title, paper, payload = "scaffold", "SCAFFOLD", "arXiv:1910.06378", "2 P b / H"
    ranges = ("server_lr=0.3..1.5",)
    equation = "g_i <- g_i + c - c_i at every local step; c_i <- mean of the round's g_i, c likewise; then as fedavg"
    needs = "clients, twice every H steps"
    averages = ("transport",)
    not_taken: ClassVar = {
        "transport": FLAT["transport"],
        "personal": "a client's control variate covers all parameters, also those that stay with the client: use "
        "fedavg, fedprox or fedopt",
        "privacy": "a client also sends its control variate, which depends on all its gradients. Clipping it and "
        "adding noise would be another method: use fedavg, fedopt or fedprox",
    }
    identities = ("first round = fedavg", "H=1, SGD = ddp", "equal data = fedavg", "all clients: c = mean_i c_i")

    def __init__(
        self,
        inner_optim: Any = "sgd",
        H: RoundLength = 10,
        *,
        server_lr: float = 1.0,
        weighting: str = "uniform",
        averaging: Averaging | None = None,
        **options: Unpack[FederatedOptions],
    ):
        check_number("server_lr", server_lr, least=0)
        clients, others = split(options, AveragingCommunicator)
        average = AveragingCommunicator(H, weighting=weighting, **clients)
        server = [] if server_lr == 1 else [ServerStep(average, "momentum", server_lr, beta1=0.0)]
        super().__init__(inner_optim, [ControlVariates(average), average, *server], **others)
        self.average_by(averaging_of(averaging))
