"""Some rows in each of several processes, forked from this one; they meet in shared memory."""

from __future__ import annotations

from collections.abc import Callable

from exogym.core.combinations import check
from exogym.core.communicator import Wire
from exogym.core.engine.protocol import EngineOptions, Result


class Forked:
    """Forks this process, which is the main one and holds the first rows."""

    shares_memory, runs_again, keeps_rows, is_here = True, True, False, True

    def applies(self, options: EngineOptions) -> bool:
        return options.processes not in (1, "auto")

    def processes(self, options: EngineOptions) -> int:
        return int(options.processes)

    def run(self, options: EngineOptions, body: Callable[[Wire], Result]) -> Result:
        from exogym.core.engine.forks import can_fork, run_forked

        if options.device.type != "cpu" or not can_fork():
            here = {"no forks": f"device {str(options.device)!r} here"}
            check({"processes": f"processes={options.processes}"} | here)
        return run_forked(options.placement, body, options.native, options.hang_s)
