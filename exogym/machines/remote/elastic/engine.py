"""The engine of hosts that come and go: each process has some rows, and only the members of a generation meet."""

from __future__ import annotations

from collections.abc import Callable

from exogym.core.communicator import Wire
from exogym.core.engine import EngineOptions
from exogym.core.engine.hangs import watched
from exogym.core.engine.protocol import Result
from exogym.machines.remote.elastic.member import Generation, Member
from exogym.machines.remote.elastic.wire import ElasticWire


class Elastic:
    """Runs where `member` is one; it is given to a trainer, since only a member can say so.

    Args:
        member: this process.
        size: number of processes in the complete run.
        generation: the generation that was joined before training; None: others are training already.
    """

    shares_memory, runs_again, keeps_rows, is_here = False, False, True, True

    def __init__(self, member: Member, size: int, generation: Generation | None):
        self.member, self.size, self.generation = member, size, generation

    def applies(self, options: EngineOptions) -> bool:
        return True

    def processes(self, options: EngineOptions) -> int:
        return self.size

    def run(self, options: EngineOptions, body: Callable[[Wire], Result]) -> Result:
        with watched(options.hang_s, self.member.rank):
            return body(ElasticWire(self.member, options.placement, self.generation, options.native))
