"""What goes with nodes of several processes, looked at before anything is started."""

from __future__ import annotations

from exogym.core.combinations import check
from exogym.core.mesh import NodeMesh
from exogym.core.training.options import FitOptions
from exogym.errors import ArgumentError


def check_split(options: FitOptions) -> tuple[NodeMesh, ...]:
    """Return the splits of the nodes of a fit in several processes.

    Raises:
        ArgumentError: something that does not go with nodes of several processes.
    """
    balance = options.shares
    if balance is not None and (balance.kind == "nodes" or balance.speeds is None):
        raise ArgumentError(
            f"balance={balance.kind!r} with node= in several processes: each node has its own there, and its speed is "
            "not known before the model is split; give speeds, as in Balance('batch', speeds=[1, 2]), or leave it out"
        )
    check(options.features() | {"node in several processes": "node= in several processes"})
    options.strategy.check_parts()
    return options.meshes if any(mesh.size > 1 for mesh in options.meshes) else ()
