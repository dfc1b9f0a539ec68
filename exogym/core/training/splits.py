"""What goes with nodes of several processes, looked at before anything is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exogym.core.combinations import check
from exogym.core.training.options import FitOptions

if TYPE_CHECKING:
    from exogym.core.mesh import NodeMesh


def check_split(options: FitOptions) -> tuple[NodeMesh, ...]:
    """Return the splits of the nodes of a fit in several processes.

    Raises:
        ArgumentError: something that does not go with nodes of several processes.
    """
    in_parts = options.strategy.features_in_parts()
    check(options.features() | in_parts | {"node in several processes": "node= in several processes"})
    return options.meshes if any(mesh.size > 1 for mesh in options.meshes) else ()
