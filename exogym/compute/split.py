"""A model split over the processes of a node: which columns are where, and how gradients come about."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from exogym.base import pulse
from exogym.communicator import Inside
from exogym.compute.outputs import Loss
from exogym.errors import ModelError
from exogym.fleet.layout import Layout, Slot, layouts_of
from exogym.mesh import NodeMesh

Part = tuple[Any, float]  # of a batch, and its share of it
Context = Callable[[], contextlib.AbstractContextManager[Any]]


class Split:
    """A model over the devices of a node, each a process with some columns of the node's row.

    It is whole until `split`. From then on `point` says where the columns here lie, plain tensors in `parts`' order,
    `compute` adds up gradients and `gradients` takes them. All processes of the node call all of these.

    Args:
        model: whole; changed in place.
        mesh: of the node.
        inside: the processes of the node.
        device: of the model.

    Attributes:
        parts: the layouts of each process, one per block of the fleet. What is in the row of another process has an
            empty box.
        shards: how many processes have a part of the batch each; gradients are the mean over these.
        way: a number for what `compute` and `gradients` have gone through since the last `refresh`, where the processes
            of a node gather for each other, and so must go the same way.
    """

    shards = 1
    way = 0
    parts: list[list[Layout]]

    def __init__(self, model: nn.Module, mesh: NodeMesh, inside: Inside, device: torch.device):
        self.model, self.mesh, self.inside, self.device = model, mesh, inside, device
        self.part, self.size = inside.part, inside.parts

    @property
    def evaluated(self) -> tuple[int, int]:
        """Which part of an evaluation's batch is this process's, and of how many."""
        return self.mesh.coordinates(self.part)["shard"], self.mesh.shard

    def keeper_of(self, buffer: str) -> int | None:
        """Return which process of the node has a buffer as a step left it; None: each has one, of its own examples."""
        return None

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model can be evaluated; mostly it can be as it is."""
        return contextlib.nullcontext()

    def walk(self, loss: Loss, passes: Sequence[Sequence[Part]]) -> None:
        """Go the way of `passes` with the model, which is whole yet, where processes are to gather for each other.

        Raises:
            ModelError: those of a node go different ways.
        """

    def split(self) -> None:
        """Split the model; it computes with nothing sensible before `point`.

        Raises:
            ModelError: torch cannot.
        """
        raise NotImplementedError

    def let_go(self) -> None:
        """Let go of the memory of the whole parameters; `plain` does not bring their numbers back."""
        raise NotImplementedError

    def plain(self) -> None:
        """Undo `split`: the modules have the parameters that they had."""
        raise NotImplementedError

    def point(self, views: Sequence[Tensor]) -> None:
        """Let the model compute with `views`, one for each parameter, of the columns here."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Take what is in the rows of other processes of the node from there; called before each gradient."""
        raise NotImplementedError

    def compute(self, loss: Loss, parts: Sequence[Part], scale: float, context: Context) -> Tensor:
        """Add up the gradients of `parts`; return what this process has of their loss, both `scale` times.

        What the processes of the node return adds up to the loss of the parts of all of them. `context` is entered for
        each forward pass, as autocast.
        """
        raise NotImplementedError

    def gradients(self) -> list[Tensor | None]:
        """Return the mean gradient over shards of the columns here, one for each parameter, and hold it no longer.

        None: no process has one.
        """
        raise NotImplementedError


class InPlace(Split):
    """A split in which parameters stay the plain ones of the model, some of them with other memory."""

    def split(self) -> None:
        named = dict(self.model.named_parameters())
        self._slots = [slot for layout in self.parts[self.part] for slot in layout]
        self._held = [named[slot.name] for slot in self._slots]
        self._homes = [p.data for p in self._held]
        for slot, p in zip(self._slots, self._held, strict=True):
            p.data = self._memory(slot, p.data)

    def _memory(self, slot: Slot, home: Tensor) -> Tensor:
        """Return what a parameter, `home` until now, computes with."""
        return home.clone()

    def let_go(self) -> None:
        self._homes = [home.new_empty(0) for home in self._homes]

    def plain(self) -> None:
        for p, home in zip(self._held, self._homes, strict=True):
            p.data, p.grad = home, None

    def _there(self) -> list[bool]:
        """Return of each parameter whether any process of the node has a gradient."""
        told = self.inside.sum(torch.tensor([p.grad is not None for p in self._held]).long())
        return [count > 0 for count in told.tolist()]


def whole_layouts(model: nn.Module, what: str) -> list[Layout]:
    """Return the layouts of a model that is to be split; `what` is done to its parameters, for the message.

    Raises:
        ModelError: a parameter without an axis.
    """
    whole = layouts_of(model)
    for layout in whole:
        for slot in layout:
            if not slot.shape:
                raise ModelError(
                    f"parameter {slot.name!r} is one number without an axis, which cannot be {what}: give it the shape "
                    "(1,)"
                )
    return whole


def check_ways(split: Split) -> None:
    """Refuse gradients for which the processes of a node have gone different ways; every one of them calls it.

    Raises:
        ModelError: they have.
    """
    refuse_ways(split.inside.sum(as_told(split)), split.inside.parts, split.mesh)


def as_told(split: Split) -> Tensor:
    return torch.tensor([split.way, split.way**2], dtype=torch.float64)


def refuse_ways(told: Tensor, parts: int, mesh: NodeMesh) -> None:
    """Do as `check_ways` with the sum of what the processes told: all numbers are one if the sum squared says so."""
    if int(told[0]) ** 2 != parts * int(told[1]):
        raise ModelError(
            f"with {mesh} the devices of a node went different ways through the model: each ran other blocks, in "
            "another order, or has gradients of other parameters, as of experts that not all examples ask, or layers "
            "left out at random. So what they gathered was not what they asked for; give zero=2 or zero=1, where each "
            "has the whole model"
        )


def passes(
    loss: Loss, parts: Sequence[Part], scale: float, context: Context, before: Callable[[bool], None] | None = None
) -> Tensor:
    """Add to `.grad` the gradients of `parts` of a batch, each with its share; return their loss, both `scale` times.

    Args:
        context: entered for each forward pass, as autocast.
        before: called before a backward pass; says whether it is the last one.
    """
    total = torch.zeros((), dtype=torch.float64)
    for k, (part, share) in enumerate(parts):
        with context():
            value = loss(part)
        if before is not None:
            before(k == len(parts) - 1)
        (value * (share * scale)).backward()
        pulse.step_taken()
        total += value.detach().double().cpu() * (share * scale)
    return total
