"""The wire of nodes that are several processes each, and what the processes of a node tell each other.

With k processes for a node, process r holds part r % k of the rows of node group r // k. Processes with the same part
are a process group, through which their columns travel between nodes; those of one node group are another, for what is
said inside a node; what all must agree on goes through the whole world.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from exogym.base import pulse
from exogym.communicator import Inside
from exogym.engine.sockets import ports_closed_afterwards
from exogym.engine.wire import ProcessWire


class ProcessInside(Inside):
    """The processes of a node in a process group, each with some of the columns of its rows."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.part, self.parts = dist.get_rank(group), dist.get_world_size(group)
        self._meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}
        self._lines = ProcessWire([[k] for k in range(self.parts)], group)
        self.device = self._lines.device

    @pulse.waits
    def sum(self, x: Tensor) -> Tensor:
        return self._reduced(x, dist.ReduceOp.SUM)

    @pulse.waits
    def maximum(self, x: Tensor) -> Tensor:
        return self._reduced(x, dist.ReduceOp.MAX)

    @pulse.waits
    def gather(self, x: Tensor, sizes: list[int]) -> list[Tensor]:
        longest = max(sizes)
        mine = x.new_zeros(longest)
        mine[: len(x)] = x
        mine = mine.to(self.device)
        found = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(found, mine, group=self.group)
        return [one[:size].to(x.device) for one, size in zip(found, sizes, strict=True)]

    @pulse.waits
    def swap(self, outgoing: list[Tensor], sizes: list[int]) -> list[Tensor]:
        moved = [x.to(self.device).contiguous() for x in outgoing]
        found = self._lines.all_to_all(moved, sizes, list(range(self.parts)))
        return [x.to(outgoing[0].device) for x in found]

    def mesh(self, axes: dict[str, int]) -> DeviceMesh:
        key = tuple(axes.items())
        if key not in self._meshes:
            if len(axes) == 1:
                self._meshes[key] = DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=tuple(axes))
            else:
                shape = (dist.get_world_size() // self.parts, *axes.values())
                with ports_closed_afterwards() if self.device.type == "cpu" else contextlib.nullcontext():
                    whole = init_device_mesh(self.device.type, shape, mesh_dim_names=("node", *axes))
                self._meshes[key] = whole[tuple(axes)]
                dist.barrier()  # see `MeshWire`
        return self._meshes[key]

    def tell(self, value: Any) -> list[Any]:
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.parts, dtype=torch.int64)
        lengths[self.part] = len(text)
        sizes = self.sum(lengths).tolist()
        return [json.loads(one.numpy().tobytes()) for one in self.gather(text, sizes)]

    def _reduced(self, x: Tensor, op: Any) -> Tensor:
        moved = x.to(self.device, copy=True).contiguous()
        dist.all_reduce(moved, op, group=self.group)
        return moved.to(x.device)


class MeshWire(ProcessWire):
    """Carries columns between the processes that hold the same part of different nodes.

    Args:
        placement: global ids of each group of processes, together 0..N-1 ascending.
        parts: processes of a group.
        native: as `ProcessWire`.
    """

    def __init__(self, placement: Sequence[Sequence[int]], parts: int, native: bool = False):
        self.world = ProcessWire([[k] for k in range(dist.get_world_size())])
        self._key = dist.group.WORLD, parts
        between, inside = _LEFT.pop(self._key, None) or _new_groups(len(placement), parts)
        super().__init__(placement, between, native)
        self.inside: ProcessInside = inside
        self.overlaps = False
        assert self.inside.part == dist.get_rank() % parts
        self.barrier()  # gloo fails in who is still connecting where another one is gone already

    @property
    def is_main(self) -> bool:
        return self.process == 0 and self.inside.part == 0

    @property
    def is_shared(self) -> bool:
        return True

    @property
    def index(self) -> int:
        return self.world.process

    @property
    def count(self) -> int:
        return len(self.world.placement)

    def leave(self) -> None:
        """Leave the process groups to the next run in this world, once nobody has anything to do in them.

        That one must take these: torch's DTensor remembers for good what it has done over a mesh, with the names of its
        groups, and takes a mesh of the same processes for the same one.
        """
        self.barrier()
        _LEFT[self._key] = self.group, self.inside

    def agree(self, flag: bool) -> bool:
        return self.world.agree(flag)

    def tell(self, value: Any, process: int | None = None) -> Any:
        return self.world.tell(value) if process is None else super().tell(value, process)

    def gather(self, value: Any) -> list[Any]:
        return self.world.gather(value)


# (world, processes of a node) -> the groups of this process: between nodes, and inside of its own
_LEFT: dict[tuple[Any, int], tuple[dist.ProcessGroup | None, ProcessInside]] = {}


def _new_groups(nodes: int, parts: int) -> tuple[dist.ProcessGroup, ProcessInside]:
    """Make the groups of all processes, as each of them does; return those of this one."""
    between = _own_group([[g * parts + part for g in range(nodes)] for part in range(parts)])
    return between, ProcessInside(_own_group([[g * parts + part for part in range(parts)] for g in range(nodes)]))


def _own_group(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Make a process group of each of `groups`, ranks of the world; return that of this process."""
    closed = dist.get_backend() == "gloo"
    found = None
    for ranks in groups:
        with ports_closed_afterwards() if closed else contextlib.nullcontext():
            group = dist.new_group(list(ranks))
        found = group if dist.get_rank() in ranks else found
    assert isinstance(found, dist.ProcessGroup)
    return found
