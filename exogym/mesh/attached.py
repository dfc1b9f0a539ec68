"""A node of several processes, whose model the user has sharded with torch's `fully_shard`.

Each process holds some columns of the node's row. The sharded parameters of the user's model are views of these
columns, so the user's forward and backward passes, optimizer and checkpoints work as without `attach`. The strategy
sees plain tensors of the same memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from exogym.communicator import gather
from exogym.core.compute.pointer import Pointer
from exogym.core.engine import world_size
from exogym.core.engine.wire import ProcessWire
from exogym.core.engine.world import join_world
from exogym.errors import ArgumentError, ModelError
from exogym.fleet import Layout
from exogym.mesh import NodeMesh
from exogym.mesh.devices import share_buffers
from exogym.mesh.places import even_part, local_of
from exogym.mesh.split import whole_layouts
from exogym.mesh.torch_private import hold_shard, sharded_parameters, take_gradient
from exogym.mesh.wire import MeshWire

HOW = "shard it with fully_shard(model, mesh=...) on the mesh that you pass as node="


class Shards:
    """Point the model's sharded parameters at this process's columns of the node's row, in place of `NodeDevices`.

    Args:
        model: the model, sharded by `fully_shard` over the node's processes along each parameter's first axis.
        wire: the communication between processes.

    Attributes:
        parts: each process's layouts, one per block of the fleet.
        parameters: plain tensors of this process's columns, one per trainable parameter.
        stream: numbers in the name of this process's random stream, which differs from other processes' streams.
    """

    def __init__(self, model: nn.Module, wire: MeshWire):
        self.wire, self.inside = wire, wire.devices
        part, size = self.inside.part, self.inside.parts
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        handles = {id(getattr(module, name)): handle for module, name, handle in sharded_parameters(model)}
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._sharded: list[nn.Parameter] = []
        self._handles: list[Any] = []
        whole = whole_layouts(model)
        self.parts = [[_room(even_part(layout, k, size), layout, size) for layout in whole] for k in range(size)]
        for slot in (slot for layout in self.parts[part] for slot in layout):
            p = named[slot.name]
            _check(slot.name, p, handles.get(id(p)), dist.get_process_group_ranks(self.inside.group))
            if local_of(p).shape != slot.shape:
                raise ModelError(
                    f"{slot.name!r} has {tuple(local_of(p).shape)} in process {part} of its node, expected "
                    f"{tuple(slot.shape)}: {HOW}"
                )
            self._sharded.append(p)
            self._handles.append(handles[id(p)])
        self._homes = [local_of(p).detach() for p in self._sharded]
        self.stream = (part,) if part else ()

    def holding(self, pointer: Pointer) -> Shards:
        """Use `pointer` to find this process's columns; return self."""
        self._pointer, self.fleet = pointer, pointer.fleet
        pointer.parameters = [nn.Parameter(view) for view in pointer.views(0)]
        self.parameters = pointer.parameters
        self.add_buffers = pointer.add_buffers
        return self

    def point(self, row: int) -> None:
        self._pointer.point(row)
        self._hold(self._pointer.at)

    def point_at(self, vectors: Sequence[Tensor], buffers: dict[str, Tensor]) -> None:
        self._pointer.point_at(vectors, buffers)
        self._hold(self._pointer.at)

    def check(self, row: int) -> None:
        """Raise ModelError if the user's code has replaced a parameter, or moved it to other memory."""
        self._pointer.check(row)
        for name, p, view in zip(self._pointer.names, self._sharded, self._pointer.at, strict=True):
            if local_of(p).data_ptr() != view.data_ptr():
                raise ModelError(
                    f"training moved parameter {name!r} to other memory: change its values in place, or load them with "
                    "set_model_state_dict"
                )

    def share_buffers(self) -> None:
        """Make the buffers that training changes equal in the node's processes, which saw different examples."""
        share_buffers(self.fleet.buffers, 0, self.inside, lambda name: range(self.inside.parts))

    def shared(self, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of `buffers` that are equal in the node's processes."""
        rows = {name: x[None].clone() for name, x in buffers.items()}
        share_buffers(rows, 0, self.inside, lambda name: range(self.inside.parts))
        return {name: x[0] for name, x in rows.items()}

    def set_home(self, vectors: Sequence[Tensor], buffers: dict[str, Tensor]) -> None:
        """Give the model its original memory, with the values of this process's columns in `vectors`."""
        self._pointer.point_at(vectors, buffers)
        with torch.no_grad():
            for home, view in zip(self._homes, self._pointer.at, strict=True):
                home.copy_(view)
        self._pointer.bring_buffers_home(buffers)
        self._hold(self._homes)

    def go_home(self) -> None:
        self._pointer.go_home()

    def gathered(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    # Gradients

    def take_gradients(self) -> None:
        """Move the model's gradients into `.grad` of `parameters`."""
        for p, handle in zip(self.parameters, self._handles, strict=True):
            p.grad = take_gradient(handle.sharded_param)

    def give_gradients(self) -> None:
        """Give the model's parameters the gradients in `.grad` of `parameters`, for the user's optimizer."""
        for p, own in zip(self._sharded, self.parameters, strict=True):
            assert isinstance(p, DTensor)
            p.grad = None if own.grad is None else DTensor.from_local(
                own.grad, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )  # fmt: skip

    def clear_gradients(self) -> None:
        for p in self._sharded:
            p.grad = None

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of `value` over the node's processes, which have equal numbers of examples."""
        return self.inside.sum(value.double().cpu() / self.inside.parts).to(value.dtype)

    def _hold(self, views: Sequence[Tensor]) -> None:
        for module in self._modules:
            module.reshard()  # an evaluation may have left gathered parameters
        for handle, view in zip(self._handles, views, strict=True):
            hold_shard(handle, view)

    @staticmethod
    def wire_between(node: Any, device: torch.device) -> MeshWire:
        """Return the wire between nodes of several processes each, given this process's node.

        Args:
            node: the node's processes, as a process group or a one-axis device mesh. Nodes have equal numbers of
                consecutive ranks.
        """
        if isinstance(node, DeviceMesh):
            if node.ndim != 1:
                raise ArgumentError(
                    f"expected a mesh with one axis, such as mesh['shard'], but node= has {node.ndim}. Inside an "
                    "attached node only fully_shard divides the model. For more, use LocalTrainer.fit(node=...)"
                )
            ranks = node.mesh.tolist()
        elif isinstance(node, dist.ProcessGroup):
            ranks = dist.get_process_group_ranks(node)
        else:
            raise ArgumentError(
                f"node={node!r} must be the node's process group or DeviceMesh, such as init_device_mesh(...)['shard']"
            )
        join_world(device)
        world, size = world_size(), len(ranks)
        told = gather(ProcessWire([[k] for k in range(world)]), ranks)
        if told != [list(range(k - k % size, k - k % size + size)) for k in range(world)] or world % size:
            nodes = sorted({tuple(one) for one in told})
            raise ArgumentError(
                f"the nodes' processes are {nodes[:4]}: every node needs the same number of consecutive ranks; build "
                "the mesh with init_device_mesh(device, (nodes, processes), mesh_dim_names=('node', 'shard'))['shard']"
            )
        return MeshWire([[k] for k in range(world // size)], [NodeMesh(shard=size)] * (world // size))


def _room(part: Layout, whole: Layout, size: int) -> Layout:
    """Return `part` with room after its end: torch gathers all shards with the size of the first, the largest."""
    first = {slot.name: slot.numel for slot in even_part(whole, 0, size)}
    return replace(part, room=max(0, *(slot.start + first[slot.name] - part.numel for slot in part)))


def _check(name: str, p: Tensor, handle: Any, ranks: Sequence[int]) -> None:
    """Raise ModelError unless `fully_shard` divides the parameter `p` over the processes `ranks`."""
    if not isinstance(p, DTensor):
        raise ModelError(
            f"{name!r} is not sharded, so each process of a node would train it differently: call "
            "fully_shard on the whole model too, or freeze this parameter"
        )
    if handle is None or p.device_mesh.ndim != 1 or list(p.placements) != [Shard(0)]:
        raise ModelError(
            f"{name!r} is a DTensor placed as {p.placements} on a mesh of {p.device_mesh.ndim} axes. In an attached "
            "node only fully_shard divides parameters, over one axis and along their first axis. Tensor parallelism, "
            "pipelines and copies inside a node (HSDP) need LocalTrainer.fit(node=NodeMesh(...))"
        )
    if handle.offload_to_cpu:
        raise ModelError(f"{name!r} is offloaded to the CPU: call fully_shard without CPUOffloadPolicy")
    if (own := p.device_mesh.mesh.tolist()) != list(ranks):
        raise ModelError(
            f"{name!r} is sharded over the processes {own}, but this node has the processes {list(ranks)}: {HOW}"
        )
