"""The wire for nodes of several processes each, and the communication inside such a node.

With k processes per node, the run's processes form teams of k, each with the rows of one node or several nodes. Process
r is in team r // k, and holds part r % k of each of the team's rows. There are three kinds of process groups: the
processes that hold the same part of different nodes carry columns between nodes; the processes of a team communicate
inside a node; and all processes of the run agree on flags, such as whether to stop.

If nodes have different numbers of processes, every node cuts its rows into K parts, where K is the greatest common
divisor of these numbers. Only a node's first K processes communicate with other nodes. Each other process holds the
same columns as one of the first K processes, and receives that process's results.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from exogym.communicator import Columns, Move, Wire, barrier, gather
from exogym.core.base import pulse
from exogym.core.base.devices import Device
from exogym.core.engine.sockets import ports_closed_afterwards
from exogym.core.engine.wire import ProcessWire, as_bytes
from exogym.core.engine.world import new_group
from exogym.mesh import NodeMesh
from exogym.mesh.torch_private import forget_groups


class NodeColumns(Columns):
    """The processes of a node, as a process group. Each process holds some columns of the node's rows."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, by_axis: Mapping[str, dist.ProcessGroup] | None = None
    ):
        self.group, self.device, self.by_axis = group, device, by_axis
        self.part, self.parts = dist.get_rank(group), dist.get_world_size(group)
        self.groups = [group, *(by_axis or {}).values()]
        self._meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}
        self._lines = ProcessWire([[k] for k in range(self.parts)], group)

    @pulse.at(pulse.WAITING)
    def sum(self, x: Tensor) -> Tensor:
        return self._reduced(x, dist.ReduceOp.SUM)

    @pulse.at(pulse.WAITING)
    def maximum(self, x: Tensor) -> Tensor:
        return self._reduced(x, dist.ReduceOp.MAX)

    @pulse.at(pulse.WAITING)
    def gather(self, x: Tensor, sizes: list[int]) -> list[Tensor]:
        longest = max(sizes)
        mine = x.new_zeros(longest)
        mine[: len(x)] = x
        mine = mine.to(self.device)
        found = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(found, mine, group=self.group)
        return [one[:size].to(x.device) for one, size in zip(found, sizes, strict=True)]

    @pulse.at(pulse.WAITING)
    def swap(self, outgoing: list[Tensor], sizes: list[int]) -> list[Tensor]:
        moved = [x.to(self.device).contiguous() for x in outgoing]
        found = self._lines.swap(moved, sizes, list(range(self.parts)))
        return [x.to(outgoing[0].device) for x in found]

    @pulse.at(pulse.WAITING)
    def mesh(self, axes: dict[str, int]) -> DeviceMesh:
        """Return torch's DeviceMesh of the node's processes. `axes` has the size of each axis, by name."""
        key = tuple(axes.items())
        if key not in self._meshes:
            forget_groups(self.device)
            if len(axes) == 1:
                self._meshes[key] = DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=tuple(axes))
            elif self.by_axis is not None:  # nodes' axes differ; all groups exist already
                ranks = torch.tensor(dist.get_process_group_ranks(self.group)).view(*axes.values())
                held = [self.by_axis[name] for name in axes]
                self._meshes[key] = DeviceMesh.from_group(held, self.device.type, ranks, mesh_dim_names=tuple(axes))
            else:
                shape = (dist.get_world_size() // self.parts, *axes.values())
                with ports_closed_afterwards(Device(self.device).backend):
                    whole = init_device_mesh(self.device.type, shape, mesh_dim_names=("node", *axes))
                self._meshes[key] = whole[tuple(axes)]
                self.groups += whole.get_all_groups()
                dist.barrier()  # see `MeshWire`
        return self._meshes[key]

    def along(self, axis: DeviceMesh) -> NodeColumns:
        """Return the processes along one axis of the node's mesh."""
        return NodeColumns(axis.get_group(), self.device)

    def tell(self, value: Any) -> list[Any]:
        return gather(self._lines, value)

    def _reduced(self, x: Tensor, op: Any) -> Tensor:
        moved = x.to(self.device, copy=True).contiguous()
        dist.all_reduce(moved, op, group=self.group)
        return moved.to(x.device)


class MeshWire(Wire):
    """Carries columns between the processes that hold the same part of different nodes' rows.

    Args:
        placement: node ids of each group of processes, together 0..N-1 ascending.
        meshes: each node's split. If the splits differ, each node has its own processes.
        native: as in `ProcessWire`.
    """

    shares_memory = False

    def __init__(self, placement: Sequence[Sequence[int]], meshes: Sequence[NodeMesh], native: bool = False):
        own = [meshes[ids[0]] for ids in placement]
        firsts = list(itertools.accumulate((mesh.size for mesh in own), initial=0))
        nodes = [list(range(*ends)) for ends in itertools.pairwise(firsts)]
        rank, parts = dist.get_rank(), math.gcd(*(mesh.size for mesh in own))
        self.process = next(g for g, ranks in enumerate(nodes) if rank in ranks)
        super().__init__(placement[self.process], native)
        self.place(placement)
        are_alike, are_even = len(set(own)) == 1, all(mesh.size == parts for mesh in own)
        holders = [ranks[k : k + parts] for ranks in nodes for k in range(0, len(ranks), parts)]
        # every process makes every group
        between = _own_group([[first + part for first in firsts[:-1]] for part in range(parts)])
        devices = _own_group(nodes)
        inside = devices if are_even else _own_group(holders if parts > 1 else [])
        self._copies = _own_group([ranks[k::parts] for ranks in nodes if len(ranks) > parts for k in range(parts)])
        by_axis = None if are_alike else _own_axes(own, nodes)
        self._world = ProcessWire([[k] for k in range(dist.get_world_size())])
        self._between = None if between is None else ProcessWire(placement, between, native)
        self.devices: NodeColumns = NodeColumns(_known(devices), self._world.device, by_axis)
        if parts > 1:
            self.columns = self.devices if are_even else NodeColumns(_known(inside), self._world.device)
        self._groups = [between, self._copies, None if are_even else inside]
        barrier(self)  # gloo fails in a process that is still connecting when another process has left

    @property
    def world(self) -> ProcessWire:
        return self._world

    # Results from other nodes. Copies receive them too

    def rows(self, x: Tensor, ids: Sequence[int]) -> Tensor:
        return self._found((len(ids), *x.shape[1:]), x, lambda wire: wire.rows(x, ids))

    def reduce(
        self, x: Tensor, ids: Sequence[int], op: str, weights: Tensor | None = None, everywhere: bool = True
    ) -> Tensor:
        wanted = everywhere or not self.row_of.keys().isdisjoint(ids)
        shape = (x.shape[1] if wanted else 0,)
        return self._found(shape, x, lambda wire: wire.reduce(x, ids, op, weights, everywhere))

    def all_to_all(self, x: Tensor, ids: Sequence[int]) -> Tensor:
        shape = (sum(i in self.row_of for i in ids), *x.shape[1:])
        return self._found(shape, x, lambda wire: wire.all_to_all(x, ids))

    def carry(self, given: Mapping[int, Tensor], moves: Sequence[Move]) -> dict[int, Tensor]:
        got = {} if self._between is None else self._between.carry(given, moves)
        for _, taker, parcel in moves if self._copies is not None else ():
            if taker in self.row_of:
                like = torch.empty(0, dtype=parcel.dtype, device=self._world.device)
                got[taker] = self._shared_with_copies(got.get(taker, like.new_empty(parcel.shape)))
        return got

    def agree(self, flag: bool) -> bool:
        return self._world.agree(flag)

    def _found(self, shape: Sequence[int], like: Tensor, find: Callable[[ProcessWire], Tensor]) -> Tensor:
        """Return the result of `find`, in copies too. It has the shape `shape`, and the dtype and device of `like`."""
        return self._shared_with_copies(like.new_empty(shape) if self._between is None else find(self._between))

    def _shared_with_copies(self, found: Tensor) -> Tensor:
        """Return `found` of the copied process. In a copy, `found` has only the right shape, dtype and device."""
        if self._copies is None or not found.numel():
            return found
        with pulse.at(pulse.WAITING):
            shared = found.to(self._world.device).contiguous()
            dist.broadcast(as_bytes(shared, 1).flatten(), group=self._copies, group_src=0)
        return shared.to(found.device)

    def leave(self) -> None:
        """Wait for all processes, then leave the process groups of this run."""
        barrier(self)
        for group in [*self.devices.groups, *self._groups]:
            if group is not None:
                dist.destroy_process_group(group)
        forget_groups(self._world.device)  # a later mesh of the user's would equal a mesh of this run


def _own_group(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Make a process group for each list of ranks in `groups`. Return this process's group; None: in no group."""
    found = None
    for ranks in groups:
        group = new_group(ranks)
        found = group if dist.get_rank() in ranks else found
    return found if isinstance(found, dist.ProcessGroup) else None


def _known(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    assert group is not None
    return group


def _own_axes(meshes: Sequence[NodeMesh], nodes: Sequence[Sequence[int]]) -> dict[str, dist.ProcessGroup]:
    """Make the process groups along each axis of nodes with several axes. Return this process's groups by axis."""
    found = {}
    for mesh, ranks in zip(meshes, nodes, strict=True):
        axes = {name: size for name, size in mesh.axes.items() if size > 1}
        for k, name in enumerate(axes if len(axes) > 1 else ()):
            lines = torch.tensor(ranks).view(*axes.values()).movedim(k, -1).flatten(0, -2)
            if (group := _own_group(lines.tolist())) is not None:
                found[name] = group
    return found
