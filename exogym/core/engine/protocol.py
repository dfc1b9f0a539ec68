"""The engine's interface: an engine decides where a run's rows live, and runs code in those processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from exogym.core.communicator import Wire
from exogym.errors import ArgumentError

if TYPE_CHECKING:
    from exogym.core.mesh import NodeMesh

Result = TypeVar("Result")


@dataclass(frozen=True)
class EngineOptions:
    """A run's properties that an engine needs.

    Attributes:
        num_nodes: rows: one per node, or one per client at work if only some act at a time.
        processes: number of processes that share the rows. "auto": the fastest number, or all that exist.
        device: this process's device.
        native: reduce as torch does, instead of in the exact tree.
        hang_s: seconds after which a process counts as hung; None: never.
        placement: ids of each process's rows; for a call of `run`, of `processes()` processes.
        engine: name of the engine that the user asked for; None: none.
        wanted: the user's `device` option, for processes elsewhere.
        cpus_per_process: processors for each process elsewhere.
        may_move: the run can save itself and continue in other processes.
        meshes: each node's split, if a node is several processes; then `processes` counts groups of these.
    """

    num_nodes: int
    processes: int | str
    device: torch.device
    native: bool = False
    hang_s: float | None = None
    placement: Sequence[Sequence[int]] = ()
    engine: str | None = None
    wanted: str | torch.device = "auto"
    cpus_per_process: int = 1
    may_move: bool = False
    meshes: Sequence[NodeMesh] = ()


class Moved(Exception):
    """Raised to continue the run in other processes, with its rows dealt anew. Not a failure.

    Args:
        why: the reason, as text.
        begun: the run has saved itself, and continues from there.
    """

    def __init__(self, why: str, begun: bool):
        super().__init__(why)
        self.begun = begun


class Engine(Protocol):
    """The place where rows live. `run` may be called several times, for example to time steps before the training.

    Attributes:
        shares_memory: all processes are on this machine and share its memory.
        runs_again: `run` may be called again after a failure. If False, the launcher must start the processes again.
        keeps_rows: a row belongs to the same node throughout. If False, `Wire.place` may give it to another node.
        is_here: this process holds rows. If False, the body and its result are pickled.
    """

    shares_memory: bool
    runs_again: bool
    keeps_rows: bool
    is_here: bool

    def applies(self, options: EngineOptions) -> bool:
        """Return whether this engine takes the run, given the options and how this process was started."""

    def processes(self, options: EngineOptions) -> int:
        """Return how many processes share the rows.

        Raises:
            ArgumentError: the requested number is impossible.
        """

    def run(self, options: EngineOptions, body: Callable[[Wire], Result]) -> Result:
        """Run `body(wire)` in every process, with a wire to the others, and return this process's result.

        Raises:
            ArgumentError: the run is impossible here.
            WorkerError: a process was lost.
            Moved: run it again, with the rows dealt anew.
            Exception: any error that `body` raised, here or in another process.
        """


def place(num_nodes: int, processes: int, speeds: Sequence[float] | None = None) -> list[list[int]]:
    """Return each process's global ids: contiguous, in proportion to `speeds`, or as even as possible.

    >>> place(5, 2), place(5, 2, speeds=[1, 4])
    ([[0, 1, 2], [3, 4]], [[0], [1, 2, 3, 4]])

    Raises:
        ArgumentError: more processes than nodes.
    """
    if processes > num_nodes:
        raise ArgumentError(
            f"{processes} processes for num_nodes={num_nodes}: every process needs a node; start at most {num_nodes}"
        )
    counts = [num_nodes // processes + (k < num_nodes % processes) for k in range(processes)]
    if speeds is not None:
        from exogym.balance import share_out

        counts = share_out(num_nodes, speeds)
    ends = list(itertools.accumulate(counts, initial=0))
    return [list(range(first, last)) for first, last in itertools.pairwise(ends)]
