"""A model split over the processes of a node: which columns are where, and how gradients come about."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from exogym.core.base import pulse
from exogym.core.communicator import Inside
from exogym.core.compute.outputs import Loss
from exogym.core.fleet.layout import Layout, layouts_of
from exogym.core.mesh import NodeMesh
from exogym.errors import ModelError

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
        way: a number for what `compute` and `gradients` have gone through since the last `refresh`, where the processes
            of a node gather for each other, and so must go the same way.
    """

    way = 0
    parts: list[list[Layout]]

    def __init__(self, model: nn.Module, mesh: NodeMesh, inside: Inside, device: torch.device):
        self.model, self.mesh, self.inside, self.device = model, mesh, inside, device
        self.part, self.size = inside.part, inside.parts

    @property
    def evaluated(self) -> tuple[int, int]:
        """Which part of an evaluation's batch is this process's, and of how many."""
        return self.mesh.coordinates(self.part)["shard"], self.mesh.shard

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Be in here where the model is evaluated, after `point`."""
        self.refresh()
        yield

    def keepers(self, buffer: str) -> range:
        """Return which processes of the node change a buffer, by its name; of numbers its value is their mean."""
        return range(self.size)

    def walk(self, loss: Loss, parts: Sequence[Part]) -> None:
        """Find the `way` of `parts` while the model is whole yet; nothing where processes do not gather on the way."""

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
        """Let the model compute with `views`, one for each parameter, of the columns here, once it is refreshed."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Take what is in the rows of other processes of the node from there: once before each gradient."""
        raise NotImplementedError

    def compute(self, loss: Loss, parts: Sequence[Part], scale: float, context: Context) -> Tensor:
        """Add up the gradients of `parts`; return what this process has of their loss, both `scale` times.

        What the processes of the node return adds up to the loss of the parts of all of them. `context` is entered for
        each forward pass, as autocast.
        """
        raise NotImplementedError

    def gradients(self) -> list[Tensor | None]:
        """Return the gradient of the columns here, one for each parameter, summed over all parts; hold it no longer.

        None: no process has one.
        """
        raise NotImplementedError


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
    """Return what a process tells the others of its way, to be summed."""
    return torch.tensor([split.way, split.way**2], dtype=torch.float64)


def refuse_ways(told: Tensor, parts: int, mesh: NodeMesh) -> None:
    """Do as `check_ways` with the sum of what `parts` processes told, all of them one way if it is this large."""
    if int(told[0]) ** 2 != parts * int(told[1]):
        raise other_ways(mesh)


def other_ways(mesh: NodeMesh) -> ModelError:
    return ModelError(
        f"with {mesh} the devices of a node go different ways through the model: they run other blocks, in another "
        "order, or have gradients of other parameters, as of experts that only some examples ask, or of layers left "
        "out at random. What they gather is then not what they ask for: give zero=2 or zero=1, where each has the "
        "whole model"
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
