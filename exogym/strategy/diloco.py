"""DiLoCo: Distributed Low-Communication training of language models.

Douillard et al., DiLoCo, arXiv:2311.08105. theta are the outer parameters, theta_i node i's parameters, and OuterOpt is
the outer optimizer. Every H inner steps:

    Delta_i = theta - theta_i                       # each node's outer gradient
    Delta   = (1/N) sum_i Delta_i                   # all-reduce of P elements
    theta   <- OuterOpt(theta, Delta)               # Nesterov: v <- mu v + Delta; theta <- theta - eta_r (Delta + mu v)
    theta_i <- theta                                # for all i

mu is the outer momentum and v its buffer. The outer learning rate eta_r is eta, or eta s(r) with a schedule s over the
outer rounds r = 0, ..., R - 1: eta (r+1)/W in the first W rounds (warm-up), then eta shape((r-W)/(R-W)) with the shape
that the schedule's name chooses (`Schedule`, with rounds as steps). The outer momentum can have a schedule in the same
way, mu_r = mu s(r). H may be a function of the round: round r takes H(r) steps. R includes a last round that the end of
training cuts short.

For averages that arrive late, see `exogym.strategy.delayed_diloco` (`delay`) and `eager_diloco` (`eager`). Islands are
the s nodes (0, ..., s-1), the next s nodes (s, ..., 2s-1), and so on, which also average their parameters inside the
island every H_island steps, except right before an outer step (`exogym.strategy.island`).

Each node keeps its inner optimizer state. Payload: P b bytes per node every H steps, for P parameters of b bytes; ring
all-reduce, tx = rx = 2 (N-1)/N P b. Islands add P b bytes every H_island steps, tx = rx = 2 (s-1)/s P b. With outer
SGD(lr=1), no momentum and the same weighting, DiLoCo is FedAvg.

If nodes are absent, Delta is the mean over the n present nodes, and each sends 2 (n-1)/n P b bytes. A single present
node sends nothing and takes the outer step with its own Delta_i; if no node is present, there is no outer step. A node
that missed the synchronization keeps theta_i and trains another H steps, and its next Delta_i is theta_last - theta_i,
where theta_last is the theta that it last received. A node that was down receives theta from a node that stayed, which
broadcasts P b bytes.

>>> outer_spec("sgd", None).kwargs["lr"]
0.7
>>> outer = DiLoCoCommunicator(H=20, outer_lr=0.5)
>>> inside = IslandCommunicator(island_size=2, H=5, above=outer)
>>> strategy = CommunicateOptimizeStrategy("adamw", [inside, outer], lr=1e-3)  # DiLoCoStrategy with islands
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

from torch import Tensor

from exogym.core.combinations import check, features_of
from exogym.core.fleet import Fleet
from exogym.core.fleet.cuts import Cut
from exogym.core.fleet.fleet import all_present, rows_of, shared_row
from exogym.core.fleet.state import Tensors, below
from exogym.errors import ArgumentError, check_count
from exogym.strategy.averaging import FLAT, Averaging, averaging_of
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, PeriodicModule
from exogym.strategy.delayed_diloco import DelayedCommunicator
from exogym.strategy.eager_diloco import EagerCommunicator
from exogym.strategy.island import IslandCommunicator
from exogym.strategy.modules import views
from exogym.strategy.options import split
from exogym.strategy.outer import OuterOptimizer, OuterSteps, OuterStepsOptions, Received, outer_spec
from exogym.strategy.rounds import RoundLength
from exogym.strategy.strategy import InnerOptions, Run, Strategy
from exogym.strategy.traffic import Traffic

__all__ = ["DiLoCoCommunicator", "DiLoCoStrategy", "IslandCommunicator", "outer_spec"]


class DiLoCoCommunicator(OuterSteps):
    """Take DiLoCo's outer step after every step divisible by H. `OuterSteps` describes the arguments.

    State: the outer parameters theta and the outer optimizer's state, one copy for all nodes, and an older theta while
    some node has received none newer.
    """

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return [Traffic("all_reduce", P * b, self.interval_steps)]

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.theta = [block.params[:1].clone() for block in fleet.blocks]  # (1, P) per block
        self.received = Received(fleet.num_nodes, self.theta)
        self.slots = [(layout, slot) for layout in self.layouts for slot in layout]
        parameters = zip((slot.name for _, slot in self.slots), views(self.theta, self.layouts, 0), strict=True)
        self.outer = OuterOptimizer(self.rule, dict(parameters), fleet.hidden, self.outer_rounds)

    def communicate(self, fleet: Fleet, step: int) -> None:
        present = fleet.comm.present
        rows = None if all_present(fleet) else rows_of(fleet, present)  # None: all
        Delta = []
        for b, block in enumerate(fleet.blocks):
            Delta_i = self.received.differences(fleet, b, block.params, out=block.params)  # theta - theta_i
            mean = fleet.comm.all_reduce(Delta_i, "mean", weights=self.weights, out=None if rows is None else Delta_i)
            Delta.append(shared_row(fleet, mean))
        self.received.renew(present)
        self.outer.step(views(Delta, self.layouts, 0), self.round_of(step))  # theta <- OuterOpt(theta, Delta)
        for block, theta in zip(fleet.blocks, self.theta, strict=True):
            block.params[slice(None) if rows is None else rows] = theta  # theta_i <- theta
        fleet.synchronise_buffers()

    def rejoin(self, fleet: Fleet, nodes: Sequence[int], step: int) -> None:
        self.received.rejoin(nodes)

    def consensus(self, fleet: Fleet) -> list[Tensor]:
        return [theta[0] for theta in self.theta]

    def save_state(self) -> Tensors:
        return self.received.state() | {f"outer.{name}": x for name, x in self.outer.state().items()}

    def load_state(self, tensors: Tensors) -> None:
        self.received.load_state(tensors)
        self.outer.load_state(below("outer.", tensors))

    def cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        is_outer = name.startswith("outer.")
        return self.outer.cut(name.removeprefix("outer."), shape, self.slots) if is_outer else super().cut(name, shape)


class DiLoCoOptions(OuterStepsOptions, InnerOptions, total=False):
    """Options that `DiLoCoStrategy` shares with other strategies."""


class DiLoCoStrategy(CommunicateOptimizeStrategy):
    """DiLoCo: nodes take H local steps, then one outer step along their mean difference from theta.

    Use it when the network is slow and the run has many rounds.

        Delta = mean_i (theta - theta_i);   theta <- OuterOpt(theta, Delta);   theta_i <- theta

    theta are the outer parameters, which evaluation uses, theta_i node i's parameters, and OuterOpt is the outer
    optimizer. A single node (N=1) also takes outer steps. Payload: P b bytes per node every H steps, for P parameters
    of b bytes.

    Args:
        inner_optim: inner optimizer. The paper uses AdamW.
        outer_optim: outer optimizer. 'sgd' is Nesterov SGD with lr 0.7 and momentum 0.9.
        H: inner steps between two outer steps, as a number or a pure function of the round (from 0).
        lr, inner_lr, max_norm, lr_scheduler, warmup_steps: arguments of the inner optimizer; see `Strategy`.
        outer_lr: eta, the outer learning rate. The best value grows with N and H (arXiv:2503.09799: 0.4 to 0.8).
        outer_lr_scheduler, outer_warmup_rounds, outer_momentum, outer_momentum_scheduler: see `OuterRule`. By default
            the outer rate and momentum are constant.
        weighting: "uniform", or "examples" to weight outer gradients by each node's number of examples.
        delay: d, the number of steps by which the average arrives late, from 0 to H.
        eager: if True, each node uses its own share of the average at once, and the other nodes' share a round later
            (`EagerCommunicator`).
        island_size: s, the number of nodes in an island. None means no islands.
        island_H: steps between two averages inside an island, below H. Pass it together with `island_size`.
        averaging: an `Averaging` with a `transport`.

    Late averages overlap with computing. On hosts, this needs gloo and whole nodes in each process, without `faults` or
    `min_hosts`; otherwise nodes wait for each average right after sending it.

    >>> strategy = DiLoCoStrategy(inner_optim='adamw', outer_optim='sgd', H=100, lr=3e-4)
    """

    name, title, paper, payload = "diloco", "DiLoCo", "arXiv:2311.08105", "P b / H"
    ranges = ("outer_lr=0.1..1.5", "outer_momentum=0.0..0.95")
    averages, not_taken = ("transport",), Strategy.not_taken | {"transport": FLAT["transport"]}
    equation = "Delta = mean_i (theta - theta_i); theta <- OuterOpt(theta, Delta); theta_i <- theta"
    needs = "all nodes, every H steps"
    identities = (
        "outer SGD(lr=1) = fedavg",
        "H=1, inner SGD = ddp with Nesterov SGD",
        "N=1, outer SGD(lr=1) = inner optimizer",
        "equal data = one node",
    )

    def __init__(
        self,
        inner_optim: Any = "adamw",
        outer_optim: Any = "sgd",
        H: RoundLength = 100,
        *,
        delay: int = 0,
        eager: bool = False,
        island_size: int | None = None,
        island_H: int | None = None,
        averaging: Averaging | None = None,
        **options: Unpack[DiLoCoOptions],
    ):
        outer_options, others = split(options, OuterSteps)
        check(features_of(eager=eager, delay=delay or None, island_H=island_H))
        check_count("delay", delay, least=0)
        outer: OuterSteps
        if eager:
            outer = EagerCommunicator(H, outer_optim, **outer_options)
        elif delay:
            outer = DelayedCommunicator(H, outer_optim, delay=delay, **outer_options)
        else:
            outer = DiLoCoCommunicator(H, outer_optim, **outer_options)
        modules: list[PeriodicModule] = [outer]
        if (island_size is None) != (island_H is None):
            raise ArgumentError(
                f"island_size={island_size} and island_H={island_H} must be given together: pass the nodes per island "
                "and the steps between two averages inside an island"
            )
        if island_size is not None and island_H is not None:
            check(outer.features() | features_of(island_H=island_H))
            if island_H >= outer.interval_steps:
                raise ArgumentError(
                    f"island_H={island_H} must be below the steps of a round, H={outer.interval_steps} here"
                )
            modules = [IslandCommunicator(island_size, island_H, outer), outer]
        super().__init__(inner_optim, modules, **others)
        self.average_by(averaging_of(averaging))
