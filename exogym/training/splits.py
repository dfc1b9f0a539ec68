"""What goes with nodes of several processes, looked at before anything is started."""

from __future__ import annotations

from exogym.errors import ArgumentError
from exogym.mesh import NodeMesh
from exogym.training.options import FitOptions


def check_split(options: FitOptions) -> tuple[NodeMesh, ...]:
    """Return the splits of the nodes of a fit in several processes.

    Raises:
        ArgumentError: something that does not go with nodes of several processes.
    """
    balance = options.balance
    if balance is not None and (balance.kind == "nodes" or balance.speeds is None):
        raise ArgumentError(
            f"balance={balance.kind!r} with node= in several processes: each node has its own there, and its speed is "
            "not known before the model is split; give speeds, as in Balance('batch', speeds=[1, 2]), or leave it out"
        )
    if options.max_memory_usage is not None:
        raise ArgumentError(
            "max_memory_usage with node= in several processes: what a step takes is not known before the model is "
            "split; give minibatch_size instead"
        )
    for mesh in dict.fromkeys(options.meshes):
        _check_mesh(mesh)
    options.strategy.check_parts()
    return options.meshes if any(mesh.size > 1 for mesh in options.meshes) else ()


def _check_mesh(mesh: NodeMesh) -> None:
    if mesh.depth > 1 and mesh.shard * mesh.tensor > 1:
        raise ArgumentError(
            f"{mesh} in several processes: stages are not split further there; take stages= alone, or shard= and "
            "tensor=, or start the script as one process"
        )
    if mesh.zero < 3 and mesh.tensor > 1:
        raise ArgumentError(
            f"zero={mesh.zero} with tensor={mesh.tensor} in several processes: take zero=3, or tensor=1"
        )
    if mesh.zero < 3 and mesh.parallelize is not None:
        raise ArgumentError(f"zero={mesh.zero} with parallelize= in several processes: take zero=3, or leave it out")
