"""What an engine is: it says where the rows of a run live, and carries what is to be done out there."""

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
    """What an engine is told of a run.

    Attributes:
        num_nodes: rows, one for each node or, where few nodes act at a time, for those.
        processes: how many share the rows; "auto": as many as pay, or as there are.
        device: of this process.
        native: reduce as torch does, instead of in the exact tree.
        hang_s: after how long a process counts as hung; None: never.
        placement: the ids of the rows of each process; of `processes()` processes, where `run` is called.
        engine: the name of the engine that was asked for; None: none was.
        wanted: the device as it was asked for, where processes are elsewhere.
        cpus_per_process: processors that a process elsewhere is given.
        may_move: whether the run can save itself and go on in other processes.
        meshes: the split of each node, where nodes are several processes; then `processes` are groups of these.
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
    """The run is to go on in other processes, its rows dealt anew: no failure.

    Args:
        why: in words.
        begun: whether it has saved itself, and goes on from there.
    """

    def __init__(self, why: str, begun: bool):
        super().__init__(why)
        self.begun = begun


class Engine(Protocol):
    """Where rows live. What `run` is given may be run several times, as to time steps before the training.

    Attributes:
        shares_memory: whether all processes are on this machine, and share its memory.
        runs_again: whether `run` may be called again after it failed; else whoever started the processes starts again.
        keeps_rows: whether a row belongs to one node all along; where not, `Wire.place` may give it to another.
        is_here: whether this process is one of those that hold rows; else what is run is pickled, and so is its result.
    """

    shares_memory: bool
    runs_again: bool
    keeps_rows: bool
    is_here: bool

    def applies(self, options: EngineOptions) -> bool:
        """Say whether the run is this engine's: by what was asked, and by how this process was started."""

    def processes(self, options: EngineOptions) -> int:
        """Return how many processes share the rows.

        Raises:
            ArgumentError: as many as were asked for cannot be.
        """

    def run(self, options: EngineOptions, body: Callable[[Wire], Result]) -> Result:
        """Run `body(wire)` in every process, with a wire to the others; return what it gives in this one.

        Raises:
            ArgumentError: it cannot be done here.
            WorkerError: a process was lost.
            Moved: it is to be run again, with the rows dealt anew.
            What `body` raised, here or in another process.
        """


def place(num_nodes: int, processes: int, speeds: Sequence[float] | None = None) -> list[list[int]]:
    """Return the global ids of each process: contiguous, in proportion to their `speeds`, or as even as possible.

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
