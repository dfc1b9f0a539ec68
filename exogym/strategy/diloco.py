"""DiLoCo: Distributed Low-Communication training of language models.

Douillard et al., DiLoCo, arXiv:2311.08105. Every H inner steps, with the outer parameters theta:

    Delta_i = theta - theta_i                       # each node's outer gradient
    Delta   = (1/N) sum_i Delta_i                   # all-reduce of P elements
    theta   <- OuterOpt(theta, Delta)               # Nesterov: v <- mu v + Delta; theta <- theta - eta_r (Delta + mu v)
    theta_i <- theta                                # for all i

The outer learning rate eta_r is eta, or eta s(r) with a schedule s over the outer rounds r = 0, 1, ..., R - 1; with W
rounds of warm-up it is eta (r+1)/W for r < W, and then, by name, eta shape((r-W)/(R-W)) (`Schedule`, with rounds as
steps). H may be a function of the round: round r takes H(r) steps, and R counts a last round that training cuts short.

Inner optimizer states stay local and are kept. Payload P b bytes per node every H steps; ring all-reduce,
tx = rx = 2 (N-1)/N P b. With outer SGD(lr=1), no momentum and the same
weighting this is FedAvg.

With absent nodes: Delta is the mean over the n nodes that are there, each of which sends 2 (n-1)/n P b bytes (one alone
none, and its outer step is on its own Delta_i); with nobody there is no outer step. A node whose synchronisation was
lost keeps theta_i and goes on another H steps; its next Delta_i is measured against the theta it last received. A node
that was down comes back with theta: P b bytes, broadcast by one that stayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from exogym.errors import ArgumentError, check_choice, checked
from exogym.fleet import Fleet
from exogym.fleet.presence import all_present, rows_of, shared_row, where_present
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, PeriodicModule, example_weights
from exogym.strategy.optim import OptimSpec
from exogym.strategy.packing import load_optimizer_state, optimizer_state
from exogym.strategy.rounds import RoundLength
from exogym.strategy.schedule import Schedule, Scheduler, check_schedule, forget_rates, set_rates
from exogym.strategy.strategy import Run
from exogym.strategy.traffic import Traffic


def outer_spec(outer_optim: Any, outer_lr: float | None) -> OptimSpec:
    """Return the outer optimizer: 'sgd' by name is the paper's Nesterov, lr 0.7, momentum 0.9.

    Raises:
        ArgumentError: a learning rate that is no number.
    """
    if outer_lr is not None and (isinstance(outer_lr, bool) or not isinstance(outer_lr, int | float) or outer_lr < 0):
        remedy = ": give it as outer_lr_scheduler, a factor for each outer round" if callable(outer_lr) else ""
        raise ArgumentError(f"outer_lr={outer_lr!r} must be a number of at least 0{remedy}")
    if isinstance(outer_optim, str) and outer_optim.lower() == "sgd":
        return OptimSpec(torch.optim.SGD, lr=0.7 if outer_lr is None else outer_lr, momentum=0.9, nesterov=True)
    return OptimSpec.of(outer_optim, lr=outer_lr)


class DiLoCoCommunicator(PeriodicModule):
    """The outer step of DiLoCo, after every step divisible by H.

    Args:
        H: inner steps between outer steps, or a pure function of the round (from 0) that gives them.
        outer_optim: 'sgd' (the paper's Nesterov), any other name, a class, or an `OptimSpec`.
        outer_lr: eta; 0.7 for 'sgd'.
        outer_lr_scheduler: eta_r as `lr_scheduler` gives a rate, over outer rounds: "constant", "cosine", "linear", a
            torch scheduler class or a callable of the round that gives a factor on eta.
        outer_warmup_rounds: W.
        weighting: "uniform", or "examples" to weight outer gradients by each node's examples (non-IID, section 6.1).

    State: theta and the outer optimizer's, one copy for all nodes; of earlier thetas those that a node last received.
    """

    weighted_means = True

    @checked
    def __init__(
        self,
        H: RoundLength = 100,
        outer_optim: Any = "sgd",
        *,
        outer_lr: float | None = None,
        outer_lr_scheduler: Scheduler = None,
        outer_warmup_rounds: int = 0,
        weighting: str = "uniform",
    ):
        super().__init__()
        self.take_rounds(H)
        check_choice("weighting", weighting, ("uniform", "examples"))
        check_schedule(outer_lr_scheduler, outer_warmup_rounds, ("outer_lr_scheduler", "outer_warmup_rounds"))
        self.outer_lr_scheduler, self.outer_warmup_rounds = outer_lr_scheduler, outer_warmup_rounds
        self.outer = outer_spec(outer_optim, outer_lr)
        self.weighting = weighting

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return [Traffic("all_reduce", P * b, self.interval_steps)]

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.weights = example_weights(run, self.weighting)
        self.theta = [block.params[:1].clone() for block in fleet.blocks]
        self.received = torch.zeros(fleet.num_nodes, dtype=torch.int64)  # the number of each node's last theta
        self.earlier: dict[int, list[Tensor]] = {}  # number to theta, where a node's last is not the newest
        self.shared_state = {f"theta.{b}": theta for b, theta in enumerate(self.theta)} | {"received": self.received}
        named = {
            slot.name: nn.Parameter(view[0], requires_grad=False)
            for block, theta in zip(fleet.blocks, self.theta, strict=True)
            for slot, view in block.views(theta)
        }
        self.outer_params = list(named.values())
        if self.outer.try_out(named, fleet.hidden):
            raise ArgumentError(
                f"outer_optim={self.outer!r} draws random numbers, which would differ between processes"
            )
        self.optimizer = self.outer.build(named, hidden=fleet.hidden)
        eta, rounds = self.outer.base_lr(), self.round_of(run.total_steps) + 1
        self.outer_schedule = Schedule(self.outer_lr_scheduler, self.outer_warmup_rounds, rounds, eta)

    def communicate(self, fleet: Fleet, step: int) -> None:
        grads: list[Tensor] = []
        rows = rows_of(fleet, fleet.comm.present)
        for b, block in enumerate(fleet.blocks):
            x = block.params
            if len(rows) == len(x) and not self.earlier:
                torch.sub(self.theta[b], x, out=x)  # Delta_i, in the place of theta_i
            else:
                for row in rows:
                    torch.sub(self._last_theta(fleet.ranks[row])[b][0], x[row], out=x[row])
            out = None if all_present(fleet) else x
            delta = fleet.comm.all_reduce(x, "mean", weights=self.weights, out=out)
            grads += [view[0] for _, view in block.views(shared_row(fleet, delta))]
        self._number_theta(fleet)
        for p, g in zip(self.outer_params, grads, strict=True):
            p.grad = g
        set_rates(self.optimizer, self.outer_schedule, self.round_of(step))
        self.optimizer.step()
        for p in self.outer_params:
            p.grad = None
        for block, theta in zip(fleet.blocks, self.theta, strict=True):
            block.params.copy_(where_present(fleet, theta.expand_as(block.params), block.params))
        fleet.synchronise_buffers()

    def _last_theta(self, node: int) -> list[Tensor]:
        """Return the theta that `node` last received, (1, P) per block."""
        return self.earlier.get(int(self.received[node]), self.theta)

    def _number_theta(self, fleet: Fleet) -> None:
        """The present nodes are about to receive a new theta; keep this one for those who then last received it."""
        newest = int(self.received.max())
        self.received[fleet.comm.present] = newest + 1
        if bool((self.received == newest).any()):
            self.earlier[newest] = [theta.clone() for theta in self.theta]
        self._forget()

    def _forget(self) -> None:
        held = set(self.received.tolist())
        self.earlier = {number: theta for number, theta in self.earlier.items() if number in held}

    def rejoin(self, fleet: Fleet, nodes: Sequence[int], step: int) -> None:
        self.received[list(nodes)] = self.received.max()
        self._forget()

    def consensus(self, fleet: Fleet) -> list[Tensor]:
        return [theta[0] for theta in self.theta]

    def save_state(self) -> dict[str, Tensor]:
        forget_rates(self.optimizer)  # they follow from the round
        earlier = {f"earlier.{number}.{b}": x for number, theta in self.earlier.items() for b, x in enumerate(theta)}
        return self.shared_state | earlier | {f"outer.{k}": v for k, v in optimizer_state(self.optimizer).items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        super().load_state({k: v for k, v in tensors.items() if k in self.shared_state})
        numbers = {int(k.split(".")[1]) for k in tensors if k.startswith("earlier.")}
        blocks = range(len(self.theta))
        self.earlier = {n: [tensors[f"earlier.{n}.{b}"].to(self.theta[b]) for b in blocks] for n in numbers}
        load_optimizer_state(self.optimizer, {k[6:]: v for k, v in tensors.items() if k.startswith("outer.")})


class DiLoCoStrategy(CommunicateOptimizeStrategy):
    """DiLoCo: H local steps with an inner optimizer, then one outer step on the average difference.

    Args:
        inner_optim: inner optimizer; the paper's is AdamW.
        outer_optim: outer optimizer; 'sgd' is Nesterov with lr 0.7 and momentum 0.9.
        H: inner steps between outer steps, or a pure function of the round (from 0) that gives them.
        lr, inner_lr, max_norm, lr_scheduler, warmup_steps: of the inner optimizer, as `Strategy`.
        outer_lr: eta; it grows with N and H (arXiv:2503.09799: 0.4 to 0.8).
        outer_lr_scheduler, outer_warmup_rounds: as `DiLoCoCommunicator`; the first is constant by default.
        weighting: "uniform" or "examples".

    The evaluation model is theta. N=1 is a valid setting (an outer momentum over one node).

    >>> strategy = DiLoCoStrategy(inner_optim='adamw', outer_optim='sgd', H=100, lr=3e-4)
    """

    name, title, paper, payload = "diloco", "DiLoCo", "arXiv:2311.08105", "P b / H"
    equation = "Delta = mean_i (theta - theta_i); theta <- OuterOpt(theta, Delta); theta_i <- theta"
    needs = "all nodes every H steps"
    identities = (
        "outer SGD(lr=1) = fedavg",
        "H=1, inner SGD = ddp with Nesterov SGD",
        "N=1, outer SGD(lr=1) = the inner optimizer",
        "equal data = one node",
    )

    @checked
    def __init__(
        self,
        inner_optim: Any = "adamw",
        outer_optim: Any = "sgd",
        H: RoundLength = 100,
        *,
        lr: float | None = None,
        inner_lr: float | None = None,
        outer_lr: float | None = None,
        outer_lr_scheduler: Scheduler = None,
        outer_warmup_rounds: int = 0,
        max_norm: float | None = None,
        lr_scheduler: Scheduler = None,
        warmup_steps: int = 0,
        weighting: str = "uniform",
    ):
        diloco = DiLoCoCommunicator(
            H, outer_optim, outer_lr=outer_lr, outer_lr_scheduler=outer_lr_scheduler,
            outer_warmup_rounds=outer_warmup_rounds, weighting=weighting,
        )  # fmt: skip
        super().__init__(
            inner_optim, [diloco], lr=lr, inner_lr=inner_lr, max_norm=max_norm, lr_scheduler=lr_scheduler,
            warmup_steps=warmup_steps,
        )  # fmt: skip
