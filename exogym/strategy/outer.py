"""Building blocks of strategies with outer parameters theta: the outer optimizer, and the theta each node last got."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from exogym.core.base.torch_private import bare_step
from exogym.core.fleet import Fleet
from exogym.core.fleet.cuts import Cut
from exogym.core.fleet.fleet import rows_of
from exogym.core.fleet.layout import Layout, Slot
from exogym.core.fleet.state import Tensors
from exogym.errors import ArgumentError, check_choice
from exogym.strategy.modules import PeriodicModule, example_weights
from exogym.strategy.optim import OptimSpec
from exogym.strategy.options import defined, taking
from exogym.strategy.packing import load_optimizer_state, optimizer_cut, optimizer_state
from exogym.strategy.rounds import RoundLength
from exogym.strategy.schedule import Schedule, Scheduler, check_schedule, forget_rates, set_rates
from exogym.strategy.strategy import InnerOptions, Run


def outer_spec(outer_optim: Any, outer_lr: float | None, outer_momentum: float | None = None) -> OptimSpec:
    """Return the `OptimSpec` of an outer optimizer.

    Args:
        outer_optim: see `OuterRule`.
        outer_lr: the outer learning rate. None means 0.7 for 'sgd', otherwise the optimizer's default.
        outer_momentum: the outer momentum. None means 0.9 for 'sgd', otherwise the optimizer's default.

    Raises:
        ArgumentError: the learning rate or momentum is not a number, or is out of range.
    """
    if outer_lr is not None and (isinstance(outer_lr, bool) or not isinstance(outer_lr, int | float) or outer_lr < 0):
        remedy = ": to change it over rounds, pass outer_lr_scheduler" if callable(outer_lr) else ""
        raise ArgumentError(f"outer_lr={outer_lr!r} must be a number of at least 0{remedy}")
    if outer_momentum is not None and not (isinstance(outer_momentum, int | float) and 0 <= outer_momentum < 1):
        remedy = ": to change it over rounds, pass outer_momentum_scheduler"
        remedy = remedy if callable(outer_momentum) else ""
        raise ArgumentError(f"outer_momentum={outer_momentum!r} must be a number from 0 to below 1{remedy}")
    if isinstance(outer_optim, str) and outer_optim.lower() == "sgd":
        rate, momentum = 0.7 if outer_lr is None else outer_lr, 0.9 if outer_momentum is None else outer_momentum
        return OptimSpec(torch.optim.SGD, lr=rate, momentum=momentum, nesterov=momentum > 0)
    return OptimSpec.of(outer_optim, lr=outer_lr, momentum=outer_momentum)


class OuterRule:
    """A description of the outer optimizer: its class, its arguments, and its schedules over outer rounds.

    Args:
        outer_optim: a name, an optimizer class or an `OptimSpec`. 'sgd' is SGD with Nesterov momentum, as in the DiLoCo
            paper.
        outer_lr: eta, the outer learning rate. None means 0.7 for 'sgd', otherwise the optimizer's default.
        outer_lr_scheduler: the schedule of the outer learning rate over outer rounds: "constant", "cosine", "linear", a
            torch scheduler class, or a function that maps the round to a factor of eta.
        outer_warmup_rounds: number of outer rounds of linear warm-up.
        outer_momentum: mu, the outer momentum. None means 0.9 for 'sgd', otherwise the optimizer's default.
        outer_momentum_scheduler: the schedule of the outer momentum, with the same choices; it scales the first beta if
            the optimizer has betas.
    """

    def __init__(
        self,
        outer_optim: Any = "sgd",
        outer_lr: float | None = None,
        outer_lr_scheduler: Scheduler = None,
        outer_warmup_rounds: int = 0,
        outer_momentum: float | None = None,
        outer_momentum_scheduler: Scheduler = None,
    ):
        check_schedule(outer_lr_scheduler, outer_warmup_rounds, ("outer_lr_scheduler", "outer_warmup_rounds"))
        check_schedule(outer_momentum_scheduler, 0, ("outer_momentum_scheduler", "outer_warmup_rounds"))
        self.spec = outer_spec(outer_optim, outer_lr, outer_momentum)
        self.lr_scheduler, self.warmup_rounds = outer_lr_scheduler, outer_warmup_rounds
        self.momentum_scheduler = outer_momentum_scheduler


def few_rounds(strategy: Any, total_steps: int) -> str | None:
    """Return a notice if the outer rate and momentum are the defaults and the run has too few rounds for them.

    A momentum of mu sums the outer gradients of about 1 / (1 - mu) rounds (ten for 0.9). In a shorter run outer steps
    still grow at the end, so the model overshoots.

    >>> from exogym.strategy import DiLoCoStrategy
    >>> few_rounds(DiLoCoStrategy(H=5), 100) is None, few_rounds(DiLoCoStrategy(H=5, outer_lr=0.4), 20) is None
    (True, True)
    >>> few_rounds(DiLoCoStrategy(H=5), 20).partition(":")[0]
    'DiLoCoStrategy takes 4 outer steps in 20 steps, too few for the default outer_lr=0.7 and outer_momentum=0.9'
    """
    given = vars(strategy).get("given_arguments", {})
    if any(name.startswith("outer_") and name != "outer_optim" for name in given):
        return None
    usual = outer_spec("sgd", None)
    least = round(1 / (1 - usual.kwargs["momentum"]))
    for module in getattr(strategy, "communication_modules", ()):
        rule = getattr(module, "rule", None)
        if not isinstance(rule, OuterRule) or repr(rule.spec) != repr(usual):
            continue
        rounds: Any = getattr(module, "rounds", None)
        H: Any = getattr(module, "H", None) or getattr(module, "interval_steps", 1)
        count = -(-total_steps // H) if rounds is None else len(rounds.lengths(total_steps))
        if total_steps >= H and count < least:  # a run shorter than H has a warning of its own
            more = f", or use H={total_steps // least} for {least} outer steps" if total_steps >= least else ""
            taken = f"{count} outer step{'s' * (count > 1)}"
            return (
                f"{type(strategy).__name__} takes {taken} in {total_steps:,} steps, too few for the "
                f"default outer_lr=0.7 and outer_momentum=0.9: momentum needs about {least}. In a short run, as in "
                f"fine-tuning, pass outer_lr=1.0, outer_momentum=0.0{more}"
            )
    return None


class OuterRates(TypedDict, total=False):
    """Arguments of `OuterRule`: the outer learning rate, its scheduler and its warm-up."""

    outer_lr: float | None
    outer_lr_scheduler: Scheduler
    outer_warmup_rounds: int


class OuterAndInnerOptions(OuterRates, InnerOptions, total=False):
    """Options of strategies with an outer and an inner optimizer."""

    outer_momentum: float | None


class OuterRuleOptions(OuterRates, total=False):
    """All arguments of `OuterRule` except `outer_optim`."""

    outer_momentum: float | None
    outer_momentum_scheduler: Scheduler


defined(OuterRuleOptions, OuterRule)


class OuterSteps(PeriodicModule):
    """Base class of DiLoCo's modules, which take an outer step after every step divisible by H.

    Args:
        H: inner steps between two outer steps, as a number or a pure function of the round (from 0).
        outer_optim, outer_lr, outer_lr_scheduler, outer_warmup_rounds, outer_momentum, outer_momentum_scheduler: see
            `OuterRule`.
        weighting: "uniform", or "examples" to weight outer gradients by each node's number of examples (section 6.1).
    """

    weighted_means = True

    @taking
    def __init__(
        self,
        H: RoundLength = 100,
        outer_optim: Any = "sgd",
        *,
        weighting: str = "uniform",
        **outer: Unpack[OuterRuleOptions],
    ):
        super().__init__()
        self.take_rounds(H)
        check_choice("weighting", weighting, ("uniform", "examples"))
        self.rule, self.weighting = OuterRule(outer_optim, **outer), weighting

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.weights = example_weights(run, self.weighting)
        self.outer_rounds = self.round_of(run.total_steps) + 1


class OuterStepsOptions(OuterRuleOptions, total=False):
    """All arguments of `OuterSteps` except `H` and `outer_optim`."""

    weighting: str


defined(OuterStepsOptions, OuterSteps)


class OuterOptimizer:
    """The outer optimizer of a run, which changes the outer parameters in place.

    Args:
        rule: the optimizer and its schedules.
        named: the outer parameters by name.
        hidden: names of the hidden matrices, which "muon" updates with Muon.
        rounds: the run's number of outer rounds, for the schedules.

    Raises:
        ArgumentError: the optimizer draws random numbers, or has no momentum for `outer_momentum_scheduler`.
    """

    def __init__(self, rule: OuterRule, named: Mapping[str, Tensor], hidden: frozenset[str], rounds: int):
        parameters = {name: nn.Parameter(x, requires_grad=False) for name, x in named.items()}
        if rule.spec.try_out(parameters, hidden):
            raise ArgumentError(
                f"outer_optim={rule.spec!r} draws random numbers, which would differ between processes: use an "
                "optimizer that draws none"
            )
        self.rule, self.parameters = rule, list(parameters.values())
        self.optimizer = rule.spec.build(parameters, hidden=hidden)
        self.rates = Schedule(rule.lr_scheduler, rule.warmup_rounds, rounds, rule.spec.base_lr())
        self.factors = Schedule(rule.momentum_scheduler, 0, rounds, 1.0)
        if not self.factors.is_constant and not any(map(_momentum, self.optimizer.param_groups)):
            raise ArgumentError(f"outer_momentum_scheduler: {rule.spec!r} has no momentum: use outer_optim='sgd'")

    def step(self, gradients: Sequence[Tensor], round_: int) -> None:
        """Take the outer step of round `round_` (from 0) with one gradient per outer parameter tensor."""
        for p, g in zip(self.parameters, gradients, strict=True):
            p.grad = g
        set_rates(self.optimizer, self.rates, round_)
        if self.factors.is_constant:
            bare_step(self.optimizer)()
        else:
            self._step_with(self.factors.lr(round_))
        for p in self.parameters:
            p.grad = None

    def _step_with(self, factor: float) -> None:
        """Step with all momenta multiplied by `factor`."""
        groups = [(group, name) for group in self.optimizer.param_groups if (name := _momentum(group))]
        before = [group[name] for group, name in groups]
        for group, name in groups:
            value = group[name]
            group[name] = (value[0] * factor, *value[1:]) if isinstance(value, tuple) else value * factor
        bare_step(self.optimizer)()
        for (group, name), value in zip(groups, before, strict=True):
            group[name] = value

    def state(self) -> Tensors:
        forget_rates(self.optimizer)  # the round gives the rates
        return optimizer_state(self.optimizer)

    def load_state(self, tensors: Tensors) -> None:
        load_optimizer_state(self.optimizer, tensors)

    def cut(self, name: str, shape: Sequence[int], slots: Sequence[tuple[Layout, Slot]]) -> Cut | None:
        """Return the slice of the state tensor `name` that this process holds, or None if it holds all of it.

        Args:
            shape: the tensor's shape.
            slots: layout and slot of each outer parameter tensor.
        """
        return optimizer_cut(self.optimizer, self.parameters, slots, name, shape)


def _momentum(group: dict[str, Any]) -> str | None:
    """Return the name under which a parameter group holds its momentum."""
    return next((name for name in ("momentum", "betas") if name in group), None)


class Received:
    """The outer parameters theta that each node last received, for runs in which nodes can miss synchronizations.

    The outer gradient Delta_i of a node that has missed synchronizations is the theta that it last received minus its
    parameters, so this class keeps a copy of an older theta while a node needs it. Other code changes `theta` in place.

    Args:
        num_nodes: the number of nodes.
        theta: the newest outer parameters, as (1, p) tensors.
    """

    def __init__(self, num_nodes: int, theta: list[Tensor]):
        self.theta, self.number = theta, 0
        self.last = torch.zeros(num_nodes, dtype=torch.int64)  # the number of each node's last theta
        self.earlier: dict[int, list[Tensor]] = {}  # number -> an older theta that some node last received

    def of(self, node: int) -> list[Tensor]:
        """Return the outer parameters theta that `node` last received."""
        return self.earlier.get(int(self.last[node]), self.theta)

    def differences(self, fleet: Fleet, k: int, x: Tensor, out: Tensor) -> Tensor:
        """Write each present node's outer gradient into `out` and return `out`.

        The outer gradient is the theta that the node last received minus the node's row of `x`.

        Args:
            fleet: the fleet, for the present nodes.
            k: the number of the tensor of theta.
            x: the nodes' parameters, (rows, p).
            out: where to write, (rows, p).
        """
        rows = rows_of(fleet, fleet.comm.present)
        if len(rows) == len(x) and not self.earlier:
            return torch.sub(self.theta[k], x, out=out)
        for row in rows:
            torch.sub(self.of(fleet.ranks[row])[k][0], x[row], out=out[row])
        return out

    def renew(self, takers: Sequence[int]) -> None:
        """Prepare for a new theta that only the nodes `takers` receive: copy the old one if other nodes need it."""
        self.last[list(takers)] = self.number + 1
        if bool((self.last == self.number).any()):
            self.earlier[self.number] = [theta.clone() for theta in self.theta]
        self.number += 1
        self._forget()

    def rejoin(self, nodes: Sequence[int]) -> None:
        """Record that the returned `nodes` now have the newest theta."""
        self.last[list(nodes)] = self.number
        self._forget()

    def _forget(self) -> None:
        held = set(self.last.tolist())
        self.earlier = {number: theta for number, theta in self.earlier.items() if number in held}

    def state(self) -> Tensors:
        """Return the tensors for a checkpoint, including theta."""
        tensors = {f"theta.{k}": theta for k, theta in enumerate(self.theta)}
        tensors |= {"received": self.last, "number": torch.tensor(self.number)}
        return tensors | {f"earlier.{n}.{k}": x for n, theta in self.earlier.items() for k, x in enumerate(theta)}

    def load_state(self, tensors: Tensors) -> None:
        for k, theta in enumerate(self.theta):
            theta.copy_(tensors[f"theta.{k}"])
        self.last.copy_(tensors["received"])
        self.number = int(tensors["number"])
        numbers = {int(name.split(".")[1]) for name in tensors if name.startswith("earlier.")}
        self.earlier = {
            n: [tensors[f"earlier.{n}.{k}"].clone().to(theta) for k, theta in enumerate(self.theta)]
            for n in sorted(numbers)
        }
