"""The engine for runs whose hosts may be lost and return. Only the processes on present hosts communicate."""

from __future__ import annotations

from collections.abc import Callable

from exogym.core.communicator import Wire
from exogym.core.engine import EngineOptions
from exogym.core.engine.hangs import watched
from exogym.core.engine.protocol import Result
from exogym.machines.remote.elastic.member import Generation, Member
from exogym.machines.remote.elastic.wire import ElasticWire


class Elastic:
    """The engine of a process in a run whose hosts may be lost. `NetworkTrainer` gives it to a `LocalTrainer`.

    Args:
        member: this process's connection to the membership server.
        size: number of processes in the complete run.
        generation: the members with which this process starts the run, or None if the run has already started and this
            process joins later.
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
