"""Split layers over several devices of a node (tensor parallelism), and find the axes of the cuts."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from exogym.errors import ModelError
from exogym.mesh import NodeMesh
from exogym.mesh.splits import tensor_plan

PARALLEL_STYLES: dict[str, ParallelStyle] = {  # by their names in `exogym.mesh.splits.tensor_plan`
    "colwise": ColwiseParallel(),
    "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel(),
    "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
}


def split_layers(model: nn.Module, mesh: NodeMesh, devices: DeviceMesh) -> None:
    """Split the layers of `model` in place by `parallelize` or `tensor_plan`; raise ModelError if torch cannot."""
    if mesh.parallelize is not None:
        mesh.parallelize(model, devices)  # its errors are the user's
    elif mesh.tensor > 1:
        with torchs_refusals(mesh):
            plan = {name: PARALLEL_STYLES[style] for name, style in tensor_plan(model).items()}
            parallelize_module(model, devices["tensor"], plan)


@contextlib.contextmanager
def torchs_refusals(mesh: NodeMesh) -> Iterator[None]:
    """Turn torch's errors into a ModelError while torch splits a model."""
    try:
        yield
    except (NotImplementedError, AssertionError, ValueError, RuntimeError) as error:
        raise ModelError(f"torch cannot split this model with {mesh}: {error}") from error


def cut_axes(model: nn.Module, mesh: NodeMesh, devices: DeviceMesh) -> dict[str, int]:
    """Split a copy on the meta device; return {name: axis} for the parameters that the mesh axis "tensor" cuts.

    Raise ModelError if torch cannot split the model, or a parameter's part is not a range of one axis.
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
                raise ModelError(f"parameter {name!r} is split as {p.placements}, but must be a range of one axis")
            found[name] = placed[0].dim
    return found
