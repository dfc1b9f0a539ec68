"""Outer parameters whose averages arrive late, come in fragments, or leave each node a share of the node's values.

theta are the outer parameters, of the whole model or of a fragment. A node keeps the share alpha of its theta_i:

    Delta   = mean_i (theta - theta_i)          # sent after some step t, over the present nodes
    theta   <- OuterOpt(theta, Delta)           # after step t + delay
    theta_i <- alpha theta_i + (1 - alpha) theta

Streaming DiLoCo, delayed DiLoCo and SlowMo use them. DiLoCo itself has alpha = 0, no delay and one fragment, and is
written out in `exogym.strategy.diloco`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.core.fleet.layout import Cut, cut_of
from exogym.core.fleet.presence import all_present, rows_of, shared_row
from exogym.core.fleet.state import Tensors, below
from exogym.strategy.capabilities import HasOuterModel
from exogym.strategy.communicate_optimize import PeriodicModule
from exogym.strategy.fragments import Fragment, Piece, whole
from exogym.strategy.outer import OuterOptimizer, OuterRule, Received


class Codec(Protocol):
    """Packs outer gradients for the wire: `encode` turns (rows, p) into tensors with rows, `decode` turns them back."""

    def encode(self, x: Tensor) -> Sequence[Tensor]: ...
    def decode(self, *parts: Tensor) -> Tensor: ...


@dataclass
class Flight:
    """An average in flight: of outer round `round_`, of the nodes `senders`, to arrive after step `due`."""

    mean: list[Tensor]  # (1, p) of each piece
    senders: list[int]
    round_: int
    due: int


class OuterParameters:
    """A fragment's theta, in one copy for all nodes, with its outer optimizer and the average in flight.

    Args:
        fragment: None: all parameters.
        delay: steps from sending to arrival.
        keep: alpha.
        weights: (num_nodes,) of the mean; None: equal weights.
        codec: packs each node's message. None: nodes send plain values, which are summed in flight.

    Present nodes take theta if they have just sent their Delta_i. If none is sent when an average arrives, the senders
    of that average take it. All other nodes keep theta_i (`Received`).
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
        self.received = Received(fleet.num_nodes, self.theta)
        self.flight: Flight | None = None
        self.way = fleet.comm.new_flight() if delay else None

    def send(self, fleet: Fleet, step: int, round_: int) -> Flight:
        """Return the mean of the present nodes' Delta_i after `step`: payload b bytes per element, or packed."""
        rows, mean = rows_of(fleet, fleet.comm.present), []
        in_place = not self.delay and not self.keep and self.codecs is None  # theta_i is not needed any more
        for k, piece in enumerate(self.fragment):
            x = piece.take(piece.block.params)
            out = x if in_place else torch.empty_like(x) if len(rows) == len(x) else torch.zeros_like(x)
            self.received.differences(fleet, k, x, out)
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
        """Take the outer step with an average that arrived, and copy theta to the nodes `takers`."""
        self.received.renew(takers)
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
        """Send if a round ends (`round_`), and let due averages arrive. Return whether either happened."""
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
        """Let averages in flight arrive, and synchronize later steps if `round_` says that there are any."""
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
        """Put an average of zeros in flight, as if from a round before the first, if averages take a whole round."""
        nothing = [torch.zeros_like(theta) for theta in self.theta]
        self.flight = Flight(nothing, list(range(fleet.num_nodes)), 0, self.delay)

    def rejoin(self, nodes: Sequence[int]) -> None:
        """Record that `nodes` have just taken theta."""
        self.received.rejoin(nodes)

    # The state in a checkpoint

    def state(self) -> Tensors:
        tensors = self.received.state()
        if self.flight is not None:
            tensors |= {f"flight.{k}": x for k, x in enumerate(self.flight.mean)}
            tensors["senders"] = torch.tensor(self.flight.senders)
            tensors["due"] = torch.tensor([self.flight.round_, self.flight.due])
        return tensors | {f"outer.{name}": x for name, x in self.optimizer.state().items()}

    def load_state(self, tensors: Tensors) -> None:
        self.received.load_state(tensors)
        self.flight = None
        if "due" in tensors:
            round_, due = tensors["due"].tolist()
            mean = [tensors[f"flight.{k}"].clone().to(theta) for k, theta in enumerate(self.theta)]
            self.flight = Flight(mean, tensors["senders"].tolist(), round_, due)
        self.optimizer.load_state(below("outer.", tensors))

    def cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        """Return this process's part of a tensor of `state` (see `Stateful.cut`)."""
        kind, _, rest = name.partition(".")
        if kind in ("theta", "earlier", "flight"):
            piece = self.fragment[int(rest.rpartition(".")[2])]
            return cut_of(piece.block.layout, piece.slots)
        slots = [(piece.block.layout, slot) for piece in self.fragment for slot in piece.slots]
        return self.optimizer.cut(rest, shape, slots) if kind == "outer" else None


class OuterModule(PeriodicModule, HasOuterModel):
    """A module with outer parameters of the whole model that acts at the end of rounds; `start` makes `outer`."""

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
