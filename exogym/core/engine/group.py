"""Some rows in each process of the world that torchrun, or a launcher like it, started."""

from __future__ import annotations

from collections.abc import Callable

from exogym.core.combinations import check
from exogym.core.communicator import Wire
from exogym.core.engine.protocol import EngineOptions, Result
from exogym.core.engine.world import join_world, world_size


class Group:
    """Joins the process group; every process of the world makes the same calls.

    Args:
        wire: what makes the wire between them; None: a `ProcessWire`.
    """

    shares_memory, runs_again, keeps_rows, is_here = False, False, False, True

    def __init__(self, wire: Callable[..., Wire] | None = None):
        self.wire = wire

    def applies(self, options: EngineOptions) -> bool:
        return world_size() > 1

    def processes(self, options: EngineOptions) -> int:
        world = world_size()
        if options.processes not in (1, "auto", world):
            launched = {"processes of a launcher": f"a script that runs as {world} processes"}
            check({"processes": f"processes={options.processes}"} | launched)
        if not options.meshes:
            return world
        from exogym.core.mesh.value import groups_of

        return groups_of(options.meshes, world)

    def run(self, options: EngineOptions, body: Callable[[Wire], Result]) -> Result:
        import torch.distributed as dist

        from exogym.core.engine.hangs import watched
        from exogym.core.engine.wire import ProcessWire

        join_world(options.device)
        with watched(options.hang_s, dist.get_rank()):
            if options.meshes:
                from exogym.core.engine.mesh import MeshWire

                wire = MeshWire(options.placement, options.meshes, options.native)
                found = body(wire)
                wire.leave()  # after a failure others may be at work in them, and the process mostly ends
                return found
            return body((self.wire or ProcessWire)(options.placement, native=options.native))
