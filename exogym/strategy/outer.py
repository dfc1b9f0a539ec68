"""Outer parameters: what the nodes of a DiLoCo share, the optimizer that moves it, and averages on their way.

With theta the outer parameters, of all of the model or of a fragment, and alpha the share of its own that a node keeps:

    Delta   = mean_i (theta - theta_i)          # sent after some step t, over the nodes that are there
    theta   <- OuterOpt(theta, Delta)           # after step t + delay
    theta_i <- alpha theta_i + (1 - alpha) theta
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from exogym.core.fleet import Fleet
from exogym.core.fleet.layout import Cut, Layout, Slot, cut_of
from exogym.core.fleet.presence import all_present, rows_of, shared_row
from exogym.core.fleet.state import Tensors, below
from exogym.errors import ArgumentError, check_count
from exogym.strategy.communicate_optimize import PeriodicModule
from exogym.strategy.fragments import Fragment, Piece, whole
from exogym.strategy.kernels import bare_step
from exogym.strategy.optim import OptimSpec
from exogym.strategy.packing import load_optimizer_state, optimizer_cut, optimizer_state
from exogym.strategy.schedule import Schedule, Scheduler, check_schedule, forget_rates, set_rates


def outer_spec(outer_optim: Any, outer_lr: float | None, outer_momentum: float | None = None) -> OptimSpec:
    """Return the outer optimizer: 'sgd' by name is the paper's Nesterov, lr 0.7, momentum 0.9.

    Raises:
        ArgumentError: a learning rate or a momentum that is no number, or out of range.
    """
    if outer_lr is not None and (isinstance(outer_lr, bool) or not isinstance(outer_lr, int | float) or outer_lr < 0):
        remedy = ": give it as outer_lr_scheduler, a factor for each outer round" if callable(outer_lr) else ""
        raise ArgumentError(f"outer_lr={outer_lr!r} must be a number of at least 0{remedy}")
    if outer_momentum is not None and not (isinstance(outer_momentum, int | float) and 0 <= outer_momentum < 1):
        remedy = ": give it as outer_momentum_scheduler, a factor for each outer round"
        remedy = remedy if callable(outer_momentum) else ""
        raise ArgumentError(f"outer_momentum={outer_momentum!r} must be a number from 0 to below 1{remedy}")
    if isinstance(outer_optim, str) and outer_optim.lower() == "sgd":
        rate, momentum = 0.7 if outer_lr is None else outer_lr, 0.9 if outer_momentum is None else outer_momentum
        return OptimSpec(torch.optim.SGD, lr=rate, momentum=momentum, nesterov=momentum > 0)
    return OptimSpec.of(outer_optim, lr=outer_lr, momentum=outer_momentum)


class OuterRule:
    """The outer optimizer as a value: spec, and what follows from the outer round.

    Args:
        outer_optim: 'sgd' (the paper's Nesterov), any other name, a class, or an `OptimSpec`.
        lr: eta; 0.7 for 'sgd'.
        lr_scheduler: eta_r as `lr_scheduler` gives a rate, over outer rounds: "constant", "cosine", "linear", a torch
            scheduler class or a callable of the round that gives a factor on eta.
        warmup_rounds: W.
        momentum: mu; 0.9 for 'sgd'.
        momentum_scheduler: mu_r likewise, a factor on mu (on the first beta of an optimizer that has betas).
        restarts: K: the outer optimizer forgets its state before the rounds K, 2 K, ...; None: never.
    """

    def __init__(
        self,
        outer_optim: Any = "sgd",
        lr: float | None = None,
        lr_scheduler: Scheduler = None,
        warmup_rounds: int = 0,
        momentum: float | None = None,
        momentum_scheduler: Scheduler = None,
        restarts: int | None = None,
    ):
        check_schedule(lr_scheduler, warmup_rounds, ("outer_lr_scheduler", "outer_warmup_rounds"))
        check_schedule(momentum_scheduler, 0, ("outer_momentum_scheduler", "outer_warmup_rounds"))
        if restarts is not None:
            check_count("outer_restarts", restarts)
        self.spec = outer_spec(outer_optim, lr, momentum)
        self.lr_scheduler, self.warmup_rounds = lr_scheduler, warmup_rounds
        self.momentum_scheduler, self.restarts = momentum_scheduler, restarts


class OuterOptimizer:
    """An outer optimizer over named tensors, which it changes in place.

    Args:
        rounds: R, outer rounds in all, for the schedules.

    Raises:
        ArgumentError: an optimizer that draws random numbers, or has no momentum where one is scheduled.
    """

    def __init__(self, rule: OuterRule, named: Mapping[str, Tensor], hidden: frozenset[str], rounds: int):
        parameters = {name: nn.Parameter(x, requires_grad=False) for name, x in named.items()}
        if rule.spec.try_out(parameters, hidden):
            raise ArgumentError(f"outer_optim={rule.spec!r} draws random numbers, which would differ between processes")
        self.rule, self.parameters = rule, list(parameters.values())
        self.optimizer = rule.spec.build(parameters, hidden=hidden)
        self.rates = Schedule(rule.lr_scheduler, rule.warmup_rounds, rounds, rule.spec.base_lr())
        self.factors = Schedule(rule.momentum_scheduler, 0, rounds, 1.0)
        if not self.factors.is_constant and not any(map(_momentum, self.optimizer.param_groups)):
            raise ArgumentError(f"outer_momentum_scheduler: {rule.spec!r} has no momentum: take outer_optim='sgd'")

    def step(self, gradients: Sequence[Tensor], round_: int) -> None:
        """Step along `gradients`, one for each tensor, in outer round `round_` (from 0)."""
        if self.rule.restarts is not None and round_ > 0 and round_ % self.rule.restarts == 0:
            load_optimizer_state(self.optimizer, {})
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
        """Step with momenta times `factor`."""
        groups = [(group, name) for group in self.optimizer.param_groups if (name := _momentum(group))]
        before = [group[name] for group, name in groups]
        for group, name in groups:
            value = group[name]
            group[name] = (value[0] * factor, *value[1:]) if isinstance(value, tuple) else value * factor
        bare_step(self.optimizer)()
        for (group, name), value in zip(groups, before, strict=True):
            group[name] = value

    def state(self) -> Tensors:
        forget_rates(self.optimizer)  # they follow from the round
        return optimizer_state(self.optimizer)

    def load_state(self, tensors: Tensors) -> None:
        load_optimizer_state(self.optimizer, tensors)

    def cut(self, name: str, shape: Sequence[int], slots: Sequence[tuple[Layout, Slot]]) -> Cut | None:
        """Return what of a tensor of the state is here, where the named tensors are those of `slots`."""
        return optimizer_cut(self.optimizer, self.parameters, slots, name, shape)


def _momentum(group: dict[str, Any]) -> str | None:
    """Return the name under which a parameter group holds its momentum."""
    return next((name for name in ("momentum", "betas") if name in group), None)


class Codec(Protocol):
    """What packs outer gradients for the wire: `encode` (rows, p) into tensors of rows, which `decode` makes again."""

    def encode(self, x: Tensor) -> Sequence[Tensor]: ...
    def decode(self, *parts: Tensor) -> Tensor: ...


@dataclass
class Flight:
    """An average on its way: of outer round `round_`, measured by `senders`, to arrive after step `due`."""

    mean: list[Tensor]  # (1, p) of each piece
    senders: list[int]
    round_: int
    due: int


class OuterParameters:
    """theta of a fragment, in one copy for all nodes, with its outer optimizer, and the average that is on its way.

    Args:
        fragment: None: all parameters.
        delay: steps from sending to arrival.
        keep: alpha.
        weights: (num_nodes,) of the mean; None: all alike.
        codec: packs what each node sends; None: as it is, and it is summed on its way.

    Nodes take theta that have just sent their Delta_i, or, where none is sent when an average arrives, those whose
    Delta_i it holds; they must be there. Any other keeps theta_i, and its next Delta_i is measured against the theta it
    last received. For that, of earlier thetas those are kept that a node last received.
    """

    def __init__(
        self, fleet: Fleet, rule: OuterRule, rounds: int, *, fragment: Fragment | None = None, delay: int = 0,
        keep: float = 0.0, weights: Tensor | None = None, codec: Callable[[Piece], Codec] | None = None,
    ):  # fmt: skip
        self.fragment = whole(fleet.blocks) if fragment is None else fragment
        self.delay, self.keep, self.weights = delay, keep, weights
        self.theta = [piece.take(piece.block.params[:1]).clone() for piece in self.fragment]
        self.codecs = None if codec is None else [codec(piece) for piece in self.fragment]
        named = {n: x[0] for piece, t in zip(self.fragment, self.theta, strict=True) for n, x in piece.views(t)}
        self.optimizer = OuterOptimizer(rule, named, fleet.hidden, rounds)
        self.number = 0  # of theta
        self.received = torch.zeros(fleet.num_nodes, dtype=torch.int64)  # the number of each node's last theta
        self.earlier: dict[int, list[Tensor]] = {}  # number to theta, where a node's last is not the newest
        self.flight: Flight | None = None
        self.way = fleet.comm.new_flight() if delay else None

    def send(self, fleet: Fleet, step: int, round_: int) -> Flight:
        """Return the mean of the present nodes' Delta_i after `step`: payload b bytes per element, or packed."""
        rows, mean = rows_of(fleet, fleet.comm.present), []
        in_place = not self.delay and not self.keep and self.codecs is None  # theta_i is not needed any more
        for k, piece in enumerate(self.fragment):
            x = piece.take(piece.block.params)
            out = x if in_place else torch.empty_like(x) if len(rows) == len(x) else torch.zeros_like(x)
            if len(rows) == len(x) and not self.earlier:
                torch.sub(self.theta[k], x, out=out)
            else:
                for row in rows:
                    torch.sub(self._last_theta(fleet.ranks[row])[k][0], x[row], out=out[row])
            with fleet.comm.on_its_way(self.way):
                average = self._mean(fleet, k, out)
            mean.append(shared_row(fleet, average))
        return Flight(mean, list(fleet.comm.present), round_, step + self.delay)

    def _mean(self, fleet: Fleet, k: int, x: Tensor) -> Tensor:
        if self.codecs is not None:
            codec = self.codecs[k]
            return fleet.comm.sum_decoded(codec.encode(x), codec.decode, "mean").to(x.dtype)
        return fleet.comm.all_reduce(x, "mean", weights=self.weights, out=None if all_present(fleet) else x)

    def arrive(self, fleet: Fleet, flight: Flight, takers: Sequence[int]) -> None:
        """Move theta along an average, and give it to the nodes `takers`."""
        self._number_theta(takers)
        gradients = [x[0] for piece, m in zip(self.fragment, flight.mean, strict=True) for _, x in piece.views(m)]
        self.optimizer.step(gradients, flight.round_)
        rows = rows_of(fleet, takers)
        for piece, theta in zip(self.fragment, self.theta, strict=True):
            x = piece.block.params
            if len(rows) == len(x) and not self.keep:
                piece.put(x, theta.expand(len(x), -1))
                continue
            own = piece.take(x).clone()
            own[rows] = torch.lerp(theta.expand(len(rows), -1), own[rows], self.keep)
            piece.put(x, own)

    def communicate(self, fleet: Fleet, step: int, round_: int | None) -> bool:
        """Send where a round ends (`round_`), and let arrive what is due; return whether something did."""
        if self.flight is not None and step >= self.flight.due:
            self._wait(fleet)
        sent = None if round_ is None else self.send(fleet, step, round_)
        due = sent if self.flight is None else self.flight
        if due is None or step < due.due:
            self.flight = due
            return False
        self.flight = None if due is sent else sent
        self.arrive(fleet, due, fleet.comm.present if sent else self._there(fleet, due))
        return True

    def finish(self, fleet: Fleet, step: int, round_: int | None) -> None:
        """Let everything arrive, and what was trained since it was sent, too, where `round_` says there is some."""
        left = None if round_ is None else self.send(fleet, step, round_)
        self._wait(fleet)
        for flight in (self.flight, left):
            if flight is not None:
                self.arrive(fleet, flight, fleet.comm.present if left else self._there(fleet, flight))
        self.flight = None

    def _wait(self, fleet: Fleet) -> None:
        if self.way is not None:
            fleet.comm.arrive(self.way)

    def _there(self, fleet: Fleet, flight: Flight) -> list[int]:
        return [i for i in flight.senders if i in fleet.comm.present]

    def expect_nothing(self, fleet: Fleet) -> None:
        """Let an average of nothing be on its way, as if of a round before the first, where each waits a round."""
        nothing = [torch.zeros_like(theta) for theta in self.theta]
        self.flight = Flight(nothing, list(range(fleet.num_nodes)), 0, self.delay)

    # Who has which theta

    def _last_theta(self, node: int) -> list[Tensor]:
        """Return the theta that `node` last received, (1, p) per piece."""
        return self.earlier.get(int(self.received[node]), self.theta)

    def _number_theta(self, takers: Sequence[int]) -> None:
        """`takers` are about to receive a new theta; keep this one for those who then last received it."""
        self.received[list(takers)] = self.number + 1
        if bool((self.received == self.number).any()):
            self.earlier[self.number] = [theta.clone() for theta in self.theta]
        self.number += 1
        self._forget()

    def _forget(self) -> None:
        held = set(self.received.tolist())
        self.earlier = {number: theta for number, theta in self.earlier.items() if number in held}

    def rejoin(self, nodes: Sequence[int]) -> None:
        """`nodes` have just taken theta."""
        self.received[list(nodes)] = self.number
        self._forget()

    # What a checkpoint holds

    def state(self) -> Tensors:
        tensors = {f"theta.{k}": theta for k, theta in enumerate(self.theta)}
        tensors |= {"received": self.received, "number": torch.tensor(self.number)}
        tensors |= {f"earlier.{number}.{k}": x for number, theta in self.earlier.items() for k, x in enumerate(theta)}
        if self.flight is not None:
            tensors |= {f"flight.{k}": x for k, x in enumerate(self.flight.mean)}
            tensors["senders"] = torch.tensor(self.flight.senders)
            tensors["due"] = torch.tensor([self.flight.round_, self.flight.due])
        return tensors | {f"outer.{name}": x for name, x in self.optimizer.state().items()}

    def load_state(self, tensors: Tensors) -> None:
        for k, theta in enumerate(self.theta):
            theta.copy_(tensors[f"theta.{k}"])
        self.received.copy_(tensors["received"])
        self.number = int(tensors["number"])
        numbers = {int(name.split(".")[1]) for name in tensors if name.startswith("earlier.")}
        self.earlier = {n: self._pieces(tensors, f"earlier.{n}.") for n in sorted(numbers)}
        self.flight = None
        if "due" in tensors:
            round_, due = tensors["due"].tolist()
            self.flight = Flight(self._pieces(tensors, "flight."), tensors["senders"].tolist(), round_, due)
        self.optimizer.load_state(below("outer.", tensors))

    def cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        """Return what of a tensor of `state` is here (see `Stateful.cut`)."""
        kind, _, rest = name.partition(".")
        if kind in ("theta", "earlier", "flight"):
            piece = self.fragment[int(rest.rpartition(".")[2])]
            return cut_of(piece.block.layout, piece.slots)
        slots = [(piece.block.layout, slot) for piece in self.fragment for slot in piece.slots]
        return self.optimizer.cut(rest, shape, slots) if kind == "outer" else None

    def _pieces(self, tensors: Tensors, prefix: str) -> list[Tensor]:
        return [tensors[f"{prefix}{k}"].clone().to(theta) for k, theta in enumerate(self.theta)]


class OuterModule(PeriodicModule):
    """A module that keeps outer parameters of the whole model and acts at the end of rounds; `start` makes `outer`."""

    outer: OuterParameters

    def communicate(self, fleet: Fleet, step: int) -> None:
        if self.outer.communicate(fleet, step, self.round_of(step) if self.is_turn(step) else None):
            fleet.synchronise_buffers()

    def finish(self, fleet: Fleet, step: int, since: int) -> None:
        on_its_way = self.outer.flight is not None
        left = since > 0 and (not on_its_way or self.outer.delay == self.interval_steps)
        if on_its_way or left:
            self.outer.finish(fleet, step, self.round_of(step) if left else None)
            fleet.synchronise_buffers()

    def rejoin(self, fleet: Fleet, nodes: Sequence[int], step: int) -> None:
        self.outer.rejoin(nodes)

    def consensus(self, fleet: Fleet) -> list[Tensor]:
        return [theta[0] for theta in self.outer.theta]

    def save_state(self) -> Tensors:
        return self.outer.state()

    def load_state(self, tensors: Tensors) -> None:
        self.outer.load_state(tensors)

    def cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        return self.outer.cut(name, shape)

    @property
    def theta(self) -> list[Tensor]:
        """The outer parameters, (1, P) per block."""
        return self.outer.theta
