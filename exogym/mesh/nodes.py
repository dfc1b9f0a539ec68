"""What a run asks of nodes of several devices: the value that `fit(node=)` becomes (see `exogym.core.engine.Nodes`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from exogym.communicator import Wire
from exogym.errors import ArgumentError
from exogym.mesh.splits import check_split
from exogym.mesh.value import NodeMesh, PipelineParallel

if TYPE_CHECKING:
    from exogym.mesh.devices import NodeDevices


class MeshNodes:
    """Nodes of several devices: each node's mesh, and in `sizes` its number of devices."""

    def __init__(self, meshes: Sequence[NodeMesh]):
        self.meshes = tuple(meshes)
        self.sizes = tuple(mesh.size for mesh in meshes)

    @classmethod
    def of(cls, node: Any, num_nodes: int) -> MeshNodes:
        """Return each node's split, given one split for all or a list of `num_nodes`; otherwise raise ArgumentError."""
        if isinstance(node, cls):
            node = node.meshes
        found = (node,) * num_nodes if isinstance(node, NodeMesh) else node
        if not isinstance(found, list | tuple) or not all(isinstance(mesh, NodeMesh) for mesh in found):
            raise ArgumentError(
                f"node={node!r} must be a NodeMesh, for example NodeMesh(shard=2), or a list with one NodeMesh per node"
            )
        if len(found) != num_nodes:
            raise ArgumentError(
                f"node=[...] has {len(found)} NodeMeshes for {num_nodes} nodes: pass one NodeMesh for all nodes, or a "
                f"list of {num_nodes}"
            )
        return cls(found)

    @classmethod
    def sharing(cls, sizes: Sequence[int]) -> Any:
        """Return a value for `fit(node=)`: the devices of each node share the model. `sizes` has their numbers."""
        each = [NodeMesh(shard=size) for size in sizes]
        return each if len(set(sizes)) > 1 else each[0]

    @classmethod
    def single(cls, node: NodeMesh | PipelineParallel) -> NodeMesh:
        """Return the split of a single node."""
        return NodeMesh(stages=node) if isinstance(node, PipelineParallel) else node

    def features(self) -> dict[str, str]:
        """Return what the nodes are in the table of refusals."""
        found = {"node": "node="}
        return found | ({"stages": "node= with stages"} if any(mesh.depth > 1 for mesh in self.meshes) else {})

    def describe(self) -> list[dict[str, Any]]:
        """Return the options that decide a run's result, as JSON."""
        return [mesh.describe() for mesh in dict.fromkeys(self.meshes)]

    def check(self, batch_size: int) -> None:
        """Raise ArgumentError if some device would have no example in a batch of `batch_size`."""
        for mesh in self.meshes:
            mesh.check_batch(batch_size)

    def processes(self, world: int) -> int:
        """Return how many groups of processes share the nodes, if `world` processes run the script.

        If all splits are the same, nodes may take turns in a group of processes. If splits differ, each node has its
        own group.

        Raises:
            ArgumentError: `world` processes do not make whole groups, or make more groups than nodes.

        >>> MeshNodes([NodeMesh(shard=2)] * 4).processes(4), MeshNodes([NodeMesh(), NodeMesh(shard=4)]).processes(5)
        (2, 2)
        """
        (mesh, *others), nodes = dict.fromkeys(self.meshes), len(self.meshes)
        if others:
            if world != (wanted := sum(self.sizes)):
                raise ArgumentError(
                    f"{world} processes run this script, but nodes of {', '.join(map(str, self.sizes))} devices need "
                    f"{wanted}, one per device: start {wanted}"
                )
            return nodes
        groups, over = divmod(world, mesh.size)
        if over or not 1 <= groups <= nodes:
            fit = ", ".join(str(mesh.size * n) for n in range(1, min(nodes, 8) + 1))
            more = f" and so on up to {mesh.size * nodes}" if nodes > 8 else ""
            raise ArgumentError(
                f"{world} processes run this script, and a node of {mesh} needs {mesh.size}: to train {nodes} nodes "
                f"start {fit}{more}"
            )
        return groups

    def wire(self, placement: Sequence[Sequence[int]], native: bool) -> Wire:
        """Return the wire between the processes, each a device. `placement` has each group's nodes."""
        from exogym.mesh.wire import MeshWire

        return MeshWire(placement, self.meshes, native)

    def at_once(self, node: int, examples: int) -> int:
        """Return the most examples that a device of node `node` computes at once, of a batch of `examples`."""
        return self.meshes[node].at_once(examples)

    def tried(self, examples: int) -> tuple[int, str] | None:
        """Return the fewest of `examples` that a device computes at once, with its option; None: no trial is needed."""
        found = None
        for mesh in dict.fromkeys(self.meshes):
            if mesh.probe and (size := mesh.at_once(examples)) < examples:
                examples, found = size, (size, f"node={mesh}")
        return found

    def devices(self, model: nn.Module, wire: Wire, device: torch.device) -> NodeDevices | None:
        """Return the `Worker.devices` for this process's part of a node; None if this process computes whole nodes."""
        for mesh in dict.fromkeys(self.meshes):
            check_split(model, mesh)
        if wire.devices.parts == 1:
            return None
        from exogym.mesh.devices import NodeDevices

        return NodeDevices(model, self.meshes, wire, device)
