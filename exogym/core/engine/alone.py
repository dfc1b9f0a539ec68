"""All rows in this process."""

from __future__ import annotations

from collections.abc import Callable

from exogym.core.communicator import Wire
from exogym.core.engine.protocol import EngineOptions, Result


class Alone:
    """Runs here, where nothing needs to move."""

    shares_memory, runs_again, keeps_rows, is_here = True, True, False, True

    def applies(self, options: EngineOptions) -> bool:
        return options.processes == 1

    def processes(self, options: EngineOptions) -> int:
        return 1

    def run(self, options: EngineOptions, body: Callable[[Wire], Result]) -> Result:
        (rows,) = options.placement
        return body(Wire(rows, options.native))
