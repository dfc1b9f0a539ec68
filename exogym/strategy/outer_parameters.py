"""Outer parameters for strategies with late averages, with fragments, or whose nodes keep a share of their values.

theta are the outer parameters of the whole model or a fragment, theta_i node i's parameters, and OuterOpt is the outer
optimizer. Delta is the mean outer gradient over the present nodes. In a synchronization, a node keeps the share alpha
of its theta_i:

    Delta   = mean_i (theta - theta_i)          # sent after a step t
    theta   <- OuterOpt(theta, Delta)           # after step t + delay
    theta_i <- alpha theta_i + (1 - alpha) theta

Streaming DiLoCo, delayed DiLoCo, PULSELoCo, SlowMo, Pier and SNOO use this module. DiLoCo itself (alpha = 0, no delay,
one fragment) is written out in `exogym.strategy.diloco`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.core.fleet.cuts import Cut, cut_of
from exogym.core.fleet.fleet import all_present, rows_of, shared_row
from exogym.core.fleet.state import Tensors, below
from exogym.strategy.communicate_optimize import CommunicationModule, PeriodicModule
from exogym.strategy.fragments import Fragment, Piece, whole
from exogym.strategy.outer import OuterOptimizer, OuterRule, Received


class Codec(Protocol):
    """Encodes outer gradients for sending.

    `encode` turns a (rows, p) tensor into one or several tensors with as many rows, and `decode` reverses it.
    """

    def encode(self, x: Tensor) -> Sequence[Tensor]: ...
    def decode(self, *parts: Tensor) -> Tensor: ...


@dataclass
class Flight:
    """A pending average, which nodes have sent and not yet received.

    Attributes:
        mean: the average, a (1, p) tensor for each piece of the fragment.
        senders: the nodes whose outer gradients are averaged.
        round_: the outer round that ended when these nodes sent.
        due: the step after which the average arrives.
    """

    mean: list[Tensor]
    senders: list[int]
    round_: int
    due: int


class OuterParameters:
    """The outer parameters theta of a fragment, one copy for all nodes, with their outer optimizer.

    Args:
        rule: the outer optimizer and its schedules.
        rounds: the run's number of outer rounds, for the schedules.
        fragment: the part of the model. None means all parameters.
        delay: steps from sending an average to its arrival.
        keep: alpha, the share of its parameters that a node keeps in a synchronization.
        weights: the nodes' weights in the mean, (num_nodes,). None means equal weights.
        codec: a function that returns the encoder for a piece of the fragment. None means plain values, by an
            all-reduce.

    If nodes also send at the step at which an average arrives, all present nodes receive the new theta. Otherwise only
    the average's senders that are present do, and all other nodes keep their parameters (see `Received`).
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
        """Return the average of the present nodes' outer gradients after `step`.

        Payload: b bytes per element for parameters of b bytes, or the encoded message's bytes.
        """
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
            like = x[0] if x.dtype == torch.float32 else None  # decoded values are fp32
            return fleet.comm.sum_decoded(codec.encode(x), codec.decode, "mean", like=like).to(x.dtype)
        return fleet.comm.all_reduce(x, "mean", weights=self.weights, out=None if all_present(fleet) else x)

    def equal_parameters(self, fleet: Fleet) -> list[Tensor]:
        """Return the parameters of equal nodes, (1, p) for each piece. Nodes send nothing."""
        return [shared_row(fleet, piece.take(piece.block.params)).clone() for piece in self.fragment]

    def views(self, x: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters' tensors in `x`, (1, p) for each piece."""
        return [view[0] for piece, x_k in zip(self.fragment, x, strict=True) for _, view in piece.views(x_k)]

    def arrive(self, fleet: Fleet, flight: Flight, takers: Sequence[int]) -> None:
        """Take the outer step with the arrived average `flight`, and give theta to the nodes `takers`."""
        self.received.renew(takers)
        self.optimizer.step(self.views(flight.mean), flight.round_)
        self.give(fleet, takers)

    def give(self, fleet: Fleet, takers: Sequence[int]) -> None:
        """Write theta into the rows of the nodes `takers`."""
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
        """Send an average if an outer round ends after `step`, and use an average that is due.

        Return whether an average was used.

        Args:
            round_: the number of the outer round that ends, or None if no round ends.
        """
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
        """Synchronize at the end of a run, using the pending average.

        Args:
            round_: the outer round whose steps nodes have not sent, which they then also average. None if there are
                none.
        """
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
        """Start with a pending average of zeros, for strategies whose averages take a whole round to arrive."""
        nothing = [torch.zeros_like(theta) for theta in self.theta]
        self.flight = Flight(nothing, list(range(fleet.num_nodes)), 0, self.delay)

    def rejoin(self, nodes: Sequence[int]) -> None:
        """Record that the returned `nodes` now have the newest theta."""
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
        """Return the slice of the tensor `name` that this process holds; None: all of it (see `Stateful.cut`)."""
        kind, _, rest = name.partition(".")
        if kind in ("theta", "earlier", "flight"):
            piece = self.fragment[int(rest.rpartition(".")[2])]
            return cut_of(piece.block.layout, piece.slots)
        slots = [(piece.block.layout, slot) for piece in self.fragment for slot in piece.slots]
        return self.optimizer.cut(rest, shape, slots) if kind == "outer" else None


class OuterModule(PeriodicModule):
    """Base class of modules that synchronize the whole model's outer parameters at the end of rounds.

    Subclasses set `outer` in `start`.
    """

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
        return super().cut(name, shape) if name in self.row_state else self.outer.cut(name, shape)


class OuterFragments(CommunicationModule):
    """Base class of modules that synchronize the outer parameters of the model's fragments.

    Subclasses set `outer` in `start`, with one element per fragment.
    """

    outer: list[OuterParameters]

    def rejoin(self, fleet: Fleet, nodes: Sequence[int], step: int) -> None:
        for outer in self.outer:
            outer.rejoin(nodes)

    def consensus(self, fleet: Fleet) -> list[Tensor]:
        """Return the outer parameters of all fragments, as one (P,) tensor per block."""
        result = {id(block): block.params.new_empty(1, block.layout.numel) for block in fleet.blocks}
        for outer in self.outer:
            for piece, theta in zip(outer.fragment, outer.theta, strict=True):
                piece.put(result[id(piece.block)], theta)
        return [result[id(block)][0] for block in fleet.blocks]

    def save_state(self) -> Tensors:
        return {f"{p}.{name}": x for p, outer in enumerate(self.outer) for name, x in outer.state().items()}

    def load_state(self, tensors: Tensors) -> None:
        for p, outer in enumerate(self.outer):
            outer.load_state(below(f"{p}.", tensors))

    def cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        p, _, rest = name.partition(".")
        return self.outer[int(p)].cut(rest, shape) if p.isdigit() else super().cut(name, shape)
