"""What goes with nodes of several processes, looked at before anything is started."""

from __future__ import annotations

from exogym.errors import ArgumentError
from exogym.training.options import FitOptions


def check_split(options: FitOptions) -> int:
    """Return how many processes each node of a fit in several processes is.

    Raises:
        ArgumentError: nodes of different sizes, or something that does not go with nodes of several processes.
    """
    meshes = set(options.meshes)
    (mesh, *others) = meshes
    if others:
        raise ArgumentError("nodes of different devices are simulated in one process; in several all have one split")
    for name, asked, instead in (
        ("balance", options.balance is not None, "all devices of all nodes do the same"),
        ("network", options.network is not None, "a clock needs one process for each row; predict in one process"),
        ("max_memory_usage", options.max_memory_usage is not None, "give minibatch_size"),
        ("reduction='native'", options.reduction == "native", "take the exact one"),
    ):
        if asked:
            raise ArgumentError(f"{name} with node= in several processes: {instead}; leave it out")
    options.strategy.check_parts()
    return mesh.size
