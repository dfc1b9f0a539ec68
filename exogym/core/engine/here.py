"""The engines whose processes run this script: one process, its forks, or processes that a launcher started."""

from __future__ import annotations

from collections.abc import Callable

from exogym.core.base.devices import CPU
from exogym.core.combinations import check
from exogym.core.communicator import Wire
from exogym.core.engine.protocol import EngineOptions, Result
from exogym.core.engine.world import join_world, world_size


class Alone:
    """The engine that runs in this process alone, which holds all rows."""

    shares_memory, runs_again, keeps_rows, is_here = True, True, False, True

    def applies(self, options: EngineOptions) -> bool:
        return options.processes == 1

    def processes(self, options: EngineOptions) -> int:
        return 1

    def run(self, options: EngineOptions, body: Callable[[Wire], Result]) -> Result:
        (rows,) = options.placement
        return body(Wire(rows, options.native))


class Forked:
    """The engine that forks this process.

    This process is the main process and holds the first rows. Shared memory carries rows between processes.
    """

    shares_memory, runs_again, keeps_rows, is_here = True, True, False, True

    def applies(self, options: EngineOptions) -> bool:
        return options.processes != 1

    def processes(self, options: EngineOptions) -> int:
        return options.processes

    def run(self, options: EngineOptions, body: Callable[[Wire], Result]) -> Result:
        from exogym.core.engine.forks import can_fork, run_forked

        if options.device != CPU or not can_fork():
            here = {"no forks": f"device {str(options.device)!r} here"}
            check({"processes": f"processes={options.processes}"} | here)
        return run_forked(options.placement, body, options.native, options.hang_s)


class Group:
    """The engine for processes that torchrun or another launcher started. All processes make the same calls."""

    shares_memory, runs_again, keeps_rows, is_here = False, False, False, True

    def applies(self, options: EngineOptions) -> bool:
        return world_size() > 1

    def processes(self, options: EngineOptions) -> int:
        world = world_size()
        if options.processes not in (1, world):
            launched = {"processes of a launcher": f"a script that runs as {world} processes"}
            check({"processes": f"processes={options.processes}"} | launched)
        return world if options.nodes is None else options.nodes.processes(world)

    def run(self, options: EngineOptions, body: Callable[[Wire], Result]) -> Result:
        import torch.distributed as dist

        from exogym.core.engine.hangs import watched
        from exogym.core.engine.wire import ProcessWire

        join_world(options.device)
        others = "" if options.nodes is None else " or another device of its node"
        with watched(options.hang_s, dist.get_rank(), others):
            if options.nodes is not None:
                wire: Wire = options.nodes.wire(options.placement, options.native)
            else:
                wire = ProcessWire(options.placement, native=options.native)
            found = body(wire)
            wire.leave()  # not after a failure: other processes may still use the groups
            return found
