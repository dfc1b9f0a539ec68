"""FedOpt: FedAvg whose server steps along the mean change with an optimizer (FedAvgM, FedAdagrad, FedAdam, FedYogi).

Reddi et al., arXiv:2003.00295; FedAvgM: Hsu, Qi, Brown, arXiv:1909.06335. x is the (weighted) mean of the parameters of
a round's clients, and D = x - theta. After each round:

    momentum:  m <- beta1 m + D;                  theta <- theta + eta m
    the others: m <- beta1 m + (1 - beta1) D;     theta <- theta + eta m / (sqrt(v) + tau)
        adagrad: v <- v + D^2;   adam: v <- beta2 v + (1 - beta2) D^2;   yogi: v <- v - (1 - beta2) D^2 sign(v - D^2)

theta are the server's parameters, eta is its learning rate, m and v are the moments of D (m = 0 and v = tau^2 at
first), and tau is a small constant. As in the paper, m and v have no bias correction. With bias_correction=True, adam
and yogi divide m by 1 - beta1^r and v by 1 - beta2^r in round r, as `torch.optim.Adam` does. (The library Flower uses r
+ 1 instead of r, and treats tau differently.)

Payload: P b bytes per client every H steps, for P parameters of b bytes, as in FedAvg; the server sends theta instead
of the mean. Without sampling, every node computes the server's step itself. Absent nodes are handled as in FedAvg. If
none of a round's clients is present, the server takes no step.

With `privacy`, D is (the sum of clipped updates + noise) / (C N) in every round, even one without clients, where C is
the share of the N nodes that are clients (`exogym.strategy.privacy`). The server's step does not change the epsilon.
"""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.core.fleet.fleet import rows_of, shared_row
from exogym.errors import check_choice, check_number
from exogym.strategy.averaging import FLAT, Averaging, averaging_of
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.federated_averaging import AveragingCommunicator, FederatedOptions
from exogym.strategy.federated_rounds import RoundModule
from exogym.strategy.options import split
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import Run

RATES = {"adam": 0.1, "yogi": 0.01, "adagrad": 0.1, "momentum": 1.0}  # Flower's


class ServerStep(RoundModule):
    """Take FedOpt's server step after the averaging. `FedOptStrategy` describes the arguments.

    State: theta and the moments m and v of the server's optimizer, one copy for all nodes.
    """

    counters = ("updates",)

    def __init__(
        self,
        average: AveragingCommunicator,
        rule: str,
        lr: float | None = None,
        beta1: float | None = None,
        beta2: float = 0.99,
        tau: float = 1e-3,
        initial_v: float | None = None,
        bias_correction: bool = False,
    ):
        super().__init__(average)
        check_choice("server_optim", rule, RATES)
        self.rule, self.lr = rule, RATES[rule] if lr is None else lr
        self.beta1 = (0.0 if rule == "adagrad" else 0.9) if beta1 is None else beta1
        self.beta2, self.tau, self.bias_correction = beta2, tau, bias_correction
        check_number("tau", tau, least=0)
        self.initial_v = tau**2 if initial_v is None else initial_v
        for name, value in (("beta1", self.beta1), ("beta2", beta2)):
            check_number(name, value, least=0, under=1)
        for name, value in (("server_lr", self.lr), ("initial_v", self.initial_v)):
            check_number(name, value, least=0)
        self.updates = 0

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.updates = 0
        self.shared_state = {}
        for b, block in enumerate(fleet.blocks):
            self.shared_state[f"theta.{b}"] = block.params[:1].clone()
            self.shared_state[f"m.{b}"] = block.zeros(1)
            if self.rule != "momentum":
                self.shared_state[f"v.{b}"] = block.zeros(1).fill_(self.initial_v)

    def communicate(self, fleet: Fleet, step: int) -> None:
        if not self.members(fleet, step) and self.average.privacy is None:
            return
        self.updates += 1
        next_clients = self.average.clients(self.average.round_of(step) + 1)
        receivers = [i for i in next_clients if i in fleet.comm.present]
        for b, block in enumerate(fleet.blocks):
            theta = self.shared_state[f"theta.{b}"]
            server = self.average.shared_state[f"theta.{b}"] if self.average.has_server else None
            mean = shared_row(fleet, block.params) if server is None else server
            theta += self.lr * self._direction(b, mean - theta)
            if server is not None:
                server.copy_(theta)
            block.params[rows_of(fleet, receivers)] = theta
        if self.average.personal is not None:
            self.average.personal.forget(fleet, [self.shared_state[f"theta.{b}"] for b in range(len(fleet.blocks))])
            self.average.give_own(fleet, receivers)

    def _direction(self, b: int, D: Tensor) -> Tensor:
        """Return the update of theta at a learning rate of 1 for the change D, (1, P)."""
        m = self.shared_state[f"m.{b}"]
        if self.rule == "momentum":
            return m.mul_(self.beta1).add_(D)
        v, squares = self.shared_state[f"v.{b}"], D.square()
        m.mul_(self.beta1).add_(D, alpha=1 - self.beta1)
        if self.rule == "adagrad":
            v.add_(squares)
        elif self.rule == "adam":
            v.mul_(self.beta2).add_(squares, alpha=1 - self.beta2)
        else:
            v.sub_(squares * (v - squares).sign(), alpha=1 - self.beta2)
        if not self.bias_correction or self.rule == "adagrad":
            return m / (v.sqrt() + self.tau)
        corrected = v / (1 - self.beta2**self.updates)
        return m / (1 - self.beta1**self.updates) / (corrected.sqrt() + self.tau)

    def consensus(self, fleet: Fleet) -> list[Tensor]:
        return [self.shared_state[f"theta.{b}"][0] for b in range(len(fleet.blocks))]


class FedOptStrategy(CommunicateOptimizeStrategy):
    """FedOpt: FedAvg whose server takes an optimizer's step along the clients' mean change.

    Use it when FedAvg converges slowly or is hard to tune.

        D = mean_i theta_i - theta;   theta <- theta + eta m / (sqrt(v) + tau)

    theta are the server's parameters, which evaluation uses, theta_i client i's parameters, m and v the first and
    second moment of D, eta is the server's learning rate and tau a small number. Payload: P b bytes per client every H
    steps, for P parameters of b bytes.

    Args:
        server_optim: "adam", "yogi", "adagrad" or "momentum" (FedAvgM).
        server_lr: eta, the server's learning rate. None means 0.1 for adam and adagrad, 0.01 for yogi, 1 for momentum.
        beta1: decay of m. None means 0.9, or 0 for adagrad.
        beta2: decay of v.
        tau: number added to sqrt(v). The smaller tau, the more adaptive the server's step.
        initial_v: v before the first round. None means tau^2.
        bias_correction: whether to correct the bias of adam and yogi, as `torch.optim.Adam` does.
        H, client_fraction, weighting, local_steps, local_epochs, keep_inner_state: see `AveragingCommunicator`.
        averaging: an `Averaging` with `transport`, `privacy` or `personal`.
        inner_optim, lr, inner_lr, max_norm, lr_scheduler, warmup_steps: the clients' inner optimizer; see `Strategy`.

    >>> strategy = FedOptStrategy(inner_optim='sgd', server_optim='adam', server_lr=0.01, H=5, lr=0.01)
    """

    name, title, paper, payload = "fedopt", "FedOpt", "arXiv:2003.00295", "P b / H"
    averages, not_taken = ("transport", "privacy", "personal"), FLAT
    ranges = ("server_lr=3e-3..0.3", "tau=1e-4..0.1")
    equation = "D = mean_i theta_i - theta; theta <- theta + eta m / (sqrt(v) + tau), m and v of D as in adam"
    needs = "clients, every H steps"
    identities = (
        "momentum, beta1=0, lr 1 = fedavg",
        "momentum = diloco with heavy ball",
        "adam, beta1=0, v=0, lr=tau=1e6 = fedavg",
        "adam, H=1, N=1, SGD = torch's Adam",
    )

    def __init__(
        self,
        inner_optim: Any = "sgd",
        server_optim: str = "adam",
        server_lr: float | None = None,
        H: RoundLength = 10,
        *,
        beta1: float | None = None,
        beta2: float = 0.99,
        tau: float = 1e-3,
        initial_v: float | None = None,
        bias_correction: bool = False,
        weighting: str = "examples",
        averaging: Averaging | None = None,
        **options: Unpack[FederatedOptions],
    ):
        means = averaging_of(averaging)
        clients, others = split(options, AveragingCommunicator)
        average = AveragingCommunicator(
            H, weighting=weighting, privacy=means.privacy, personal=means.personal, **clients
        )
        server = ServerStep(average, server_optim, server_lr, beta1, beta2, tau, initial_v, bias_correction)
        super().__init__(inner_optim, [average, server], **others)
        self.average_by(means)
