"""Split a model over a node's processes: which process holds which columns, and how they compute gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from exogym.communicator import ALONE
from exogym.core.base import pulse
from exogym.errors import ModelError
from exogym.fleet import Layout, layouts_of
from exogym.mesh import NodeMesh
from exogym.mesh.places import Places, places_in
from exogym.mesh.tensors import cut_axes, split_layers
from exogym.mesh.torch_private import Plain
from exogym.mesh.wire import NodeColumns

Part = tuple[Any, float]  # a part of a batch, and its share of the batch
Context = Callable[[], contextlib.AbstractContextManager[Any]]
Loss = Callable[[Any], Tensor]  # of a part of a batch


class Split:
    """A model that is split over a node's devices. Each device is a process with some columns of the node's row.

    The model is whole until `split`. After that, `point` sets this process's columns (plain tensors in `parts`' order),
    `compute` adds up gradients, and `gradients` returns them. All processes of the node make the same calls.

    Args:
        model: the whole model, changed in place.
        mesh: the node's mesh.
        inside: communication between the node's processes.
        device: the model's device.

    Attributes:
        parts: each process's layouts, one per block of the fleet, without the parameters that only other processes
            store.
        way: a number for the order in which this process used blocks and gradients since the last `refresh`. It must be
            equal in all processes that gather parameters during a pass.
    """

    way = 0
    parts: list[list[Layout]]

    def __init__(self, model: nn.Module, mesh: NodeMesh, inside: NodeColumns, device: torch.device):
        self.model, self.mesh, self.inside, self.device = model, mesh, inside, device
        self.part, self.size = inside.part, inside.parts

    @property
    def evaluated(self) -> tuple[int, int]:
        """The number of this process's part of an evaluation batch, and the number of parts."""
        return self.mesh.coordinates(self.part)["shard"], self.mesh.shard

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Return a context in which the split model can be evaluated. Call `point` before you enter the context."""
        self.refresh()
        yield

    def keepers(self, buffer: str) -> range:
        """Return the processes that change the buffer `buffer`, whose value is their mean if it is a float."""
        return range(self.size)

    def walk(self, loss: Loss, parts: Sequence[Part]) -> None:
        """Compute `parts` with the whole model, to set `way` if processes gather parameters in a pass."""

    def split(self) -> None:
        """Split the model, or raise ModelError if torch cannot. Call `point` before computing with it."""
        raise NotImplementedError

    def let_go(self) -> None:
        """Free the memory of the whole model's parameters. `plain` can then no longer restore their values."""
        raise NotImplementedError

    def plain(self) -> None:
        """Undo `split`: give the modules their original parameters."""
        raise NotImplementedError

    def point(self, views: Sequence[Tensor]) -> None:
        """Set this process's columns: `views` has one tensor per parameter. Call `refresh` before computing."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Fetch the columns that the node's other processes hold. Call this method once before each gradient."""
        raise NotImplementedError

    def compute(self, loss: Loss, parts: Sequence[Part], scale: float, context: Context) -> Tensor:
        """Add up the gradients of `parts`, and return this process's share of the loss.

        The gradients and the share are multiplied by `scale`. The shares of all processes of the node add up to the
        loss of all their parts. Each forward pass runs in `context`, such as autocast.
        """
        raise NotImplementedError

    def gradients(self) -> list[Tensor | None]:
        """Return and clear the gradients of this process's columns over all parts: a tensor or None per parameter."""
        raise NotImplementedError


class Placed(Split):
    """Base class of splits whose processes store some elements of each parameter, and copies of other elements.

    Args:
        stages: {parameter's name: the stages that hold it} in a pipeline, or None without a pipeline.

    Attributes:
        devices: torch's device mesh with the mesh's axes.
        along: the communication between the processes along each axis.
        at: this process's coordinates on the axes.
    """

    def __init__(
        self, model: nn.Module, mesh: NodeMesh, inside: NodeColumns, device: torch.device,
        stages: dict[str, list[int]] | None = None,
    ):  # fmt: skip
        super().__init__(model, mesh, inside, device)
        self.devices = inside.mesh({name: size for name, size in mesh.axes.items() if size > 1})
        self.along = {n: inside.along(self.devices[n]) if size > 1 else ALONE for n, size in mesh.axes.items()}
        self.at = mesh.coordinates(self.part)
        self._wholes = whole_layouts(model)
        self._places = Places(mesh, self._wholes, cut_axes(model, mesh, self.devices), stages or {})
        self.parts = [[self._layout(layout, k) for layout in self._wholes] for k in range(self.size)]

    def _layout(self, whole: Layout, part: int) -> Layout:
        return self._places.layout(whole, part)

    def split(self) -> None:
        self._plain = Plain(self.model)
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._homes = [(p, p.data) for p in named.values()]
        places = places_in(self.model, named)
        try:
            split_layers(self.model, self.mesh, self.devices)
            self._divide(named, places)
        except BaseException:
            self.plain()
            raise

    def _divide(self, named: dict[str, nn.Parameter], places: dict[tuple[nn.Module, str], str]) -> None:
        """Divide the parameters `named` over the processes, after the split of the layers; see `places_in`."""
        raise NotImplementedError

    def let_go(self) -> None:
        self._homes = [(p, home.new_empty(0)) for p, home in self._homes]

    def plain(self) -> None:
        self._plain.restore()
        for p, home in self._homes:
            p.data, p.grad = home, None


def whole_layouts(model: nn.Module) -> list[Layout]:
    """Return the layouts of a model before its split, or raise ModelError if a parameter has no axis."""
    whole = layouts_of(model)
    for layout in whole:
        for slot in layout:
            if not slot.shape:
                raise ModelError(f"parameter {slot.name!r} is a scalar and cannot be divided: give it the shape (1,)")
    return whole


def check_ways(split: Split) -> None:
    """Raise ModelError unless the node's processes used the same blocks and gradients in the same order."""
    refuse_ways(split.inside.sum(as_told(split)), split.inside.parts, split.mesh)


def as_told(split: Split) -> Tensor:
    """Return `split.way` and its square. Their sums over the processes show whether all ways are equal."""
    return torch.tensor([split.way, split.way**2], dtype=torch.float64)


def refuse_ways(told: Tensor, parts: int, mesh: NodeMesh) -> None:
    """Raise ModelError if `told`, the sum of `as_told` over `parts` processes, shows different orders of blocks."""
    if int(told[0]) ** 2 != parts * int(told[1]):
        raise other_ways(mesh)


def other_ways(mesh: NodeMesh) -> ModelError:
    """Return the error for a node whose processes use the model's blocks or gradients in different orders."""
    return ModelError(
        f"with {mesh} the devices of a node use the model differently: they run different blocks, run blocks in "
        "different orders, or have gradients of different parameters (experts, or layers left out at random). So they "
        "would gather the wrong tensors. Pass zero=2, where each device has the whole model"
    )


def passes(
    loss: Loss, parts: Sequence[Part], scale: float, context: Context, before: Callable[[bool], None] | None = None
) -> Tensor:
    """Add the gradients of a batch's `parts`, weighted by their shares, to `.grad`; return the weighted sum of losses.

    `scale` multiplies the gradients and the sum, and each forward pass runs in `context`, such as autocast. `before` is
    called before each backward pass, with whether the pass is the last.
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
