"""Layers that several devices of a node compute together: which axis of which parameter is cut, and how it is done."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from exogym.core.mesh import NodeMesh
from exogym.core.mesh.splits import tensor_plan
from exogym.errors import ModelError


def styles(plan: dict[str, str]) -> dict[str, ParallelStyle]:
    """Return torch's styles for those of `exogym.core.mesh.splits.tensor_plan`."""
    made: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel(),
        "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
    }
    return {name: made[style] for name, style in plan.items()}


def split_layers(model: nn.Module, mesh: NodeMesh, devices: DeviceMesh) -> None:
    """Split the layers of `model` in place, by the user's `parallelize`, or by what is known of it.

    Raises:
        ModelError: torch cannot.
    """
    if mesh.parallelize is not None:
        mesh.parallelize(model, devices)  # an error in it is its own
    elif mesh.tensor > 1:
        with torchs_refusals(mesh):
            parallelize_module(model, devices["tensor"], styles(tensor_plan(model)))


@contextlib.contextmanager
def torchs_refusals(mesh: NodeMesh) -> Iterator[None]:
    """Inside, where torch is to split a model, what it refuses is a ModelError."""
    try:
        yield
    except (NotImplementedError, AssertionError, ValueError, RuntimeError) as error:
        raise ModelError(f"torch cannot split this model by {mesh}: {error}") from error


def cut_axes(model: nn.Module, mesh: NodeMesh, devices: DeviceMesh) -> dict[str, int]:
    """Return by name the axis along which a parameter is cut over the axis "tensor"; tried on a model without numbers.

    Raises:
        ModelError: it cannot be split, or a parameter is cut in a way that is no range of one axis.
    """
    if mesh.tensor == 1:
        return {}
    memo = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
    hollow = copy.deepcopy(model, memo | {id(b): b.to("meta") for b in model.buffers()})
    split_layers(hollow, mesh, devices)
    found = {}
    for name, p in hollow.named_parameters():
        if isinstance(p, DTensor) and (placed := [x for x in p.placements if not isinstance(x, Replicate)]):
            if len(placed) != 1 or type(placed[0]) is not Shard:
                raise ModelError(f"parameter {name!r} is split as {p.placements}, wanted a range of one axis")
            found[name] = placed[0].dim
    return found
