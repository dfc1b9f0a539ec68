"""The engine's interface: an engine decides which processes hold a run's rows, and runs code in these processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from exogym.core.communicator import Wire
from exogym.errors import ArgumentError

Result = TypeVar("Result")


@dataclass(frozen=True)
class EngineOptions:
    """A run's properties that an engine needs.

    Attributes:
        num_nodes: number of rows. Each node has a row. If only some clients act at a time, each acting client has a
            row.
        processes: number of processes that share the rows.
        device: this process's device.
        native: sum with torch's own operations instead of the exact tree.
        hang_s: seconds without progress after which a process counts as hung. None means no limit.
        placement: ids of each process's rows. `run` needs it, with an entry for each process that
            `Engine.processes` counted.
        engine: name of the engine that the user chose, or None.
        wanted: the user's `device` option, for processes on other machines.
        cpus_per_process: CPUs for each process of a Ray cluster.
        may_move: whether the run can save itself and continue in other processes.
        nodes: the nodes' devices, if a node is several processes. In this case `processes` counts groups: a group is
            the processes that hold the same nodes.
    """

    num_nodes: int
    processes: int
    device: torch.device
    native: bool = False
    hang_s: float | None = None
    placement: Sequence[Sequence[int]] = ()
    engine: str | None = None
    wanted: str | torch.device = "auto"
    cpus_per_process: int = 1
    may_move: bool = False
    nodes: Nodes | None = None


class Nodes(Protocol):
    """Nodes of several devices: the value of `fit(node=)`, once it is checked.

    Attributes:
        sizes: each node's number of devices.
    """

    sizes: tuple[int, ...]

    def features(self) -> dict[str, str]:
        """Return the features for the table of refusals (`exogym.core.refusals`)."""

    def describe(self) -> Any:
        """Return what decides a run's result, as JSON."""

    def check(self, batch_size: int) -> None:
        """Raise ArgumentError if the devices cannot share a batch of `batch_size`."""

    def processes(self, world: int) -> int:
        """Return how many groups of processes hold the nodes, if `world` processes run the script.

        Raises:
            ArgumentError: the requested number is impossible.
        """

    def wire(self, placement: Sequence[Sequence[int]], native: bool) -> Wire:
        """Return the wire between processes that are devices. `placement` has each group's nodes."""

    def at_once(self, node: int, examples: int) -> int:
        """Return how many of a batch's `examples` a device of node `node` computes at once."""

    def tried(self, examples: int) -> tuple[int, str] | None:
        """Return the fewest of `examples` that a device computes at once, and the option that says so.

        None: the parts of a batch need no trial.
        """

    def devices(self, model: nn.Module, wire: Wire, device: torch.device) -> Any:
        """Return a `Worker.devices`, which trains this process's part of a node; None if it computes whole nodes.

        Raises:
            ModelError: the nodes cannot divide the model.
        """


class Moved(Exception):
    """Raised to continue the run in other processes, which divide the run's rows anew. Such a move is not a failure.

    Args:
        why: the reason, as text.
        begun: whether the run has begun. If so, the run has written a checkpoint and continues from this checkpoint.
    """

    def __init__(self, why: str, begun: bool):
        super().__init__(why)
        self.begun = begun


class Engine(Protocol):
    """Runs a function in the processes that hold a run's rows.

    `run` may be called several times, for example to time steps before the training.

    Attributes:
        shares_memory: whether all processes are on this machine and share its memory.
        runs_again: whether `run` may be called again after a failure. If False, the launcher must start the processes
            again.
        keeps_rows: whether each row belongs to the same node during the whole run. If False, `Wire.place` may give a
            row to another node.
        is_here: whether this process holds rows. Otherwise other processes run the function, so the function and its
            result must be picklable.
    """

    shares_memory: bool
    runs_again: bool
    keeps_rows: bool
    is_here: bool

    def applies(self, options: EngineOptions) -> bool:
        """Return whether this engine can run with `options`, given how this process was started."""

    def processes(self, options: EngineOptions) -> int:
        """Return how many processes share the rows.

        Raises:
            ArgumentError: the requested number is impossible.
        """

    def run(self, options: EngineOptions, body: Callable[[Wire], Result]) -> Result:
        """Run `body(wire)` in every process, with a wire to the other processes, and return this process's result.

        Raises:
            ArgumentError: the run is impossible here.
            WorkerError: a process was lost.
            Moved: the caller must call `run` again, with a new placement of the rows.
            Exception: any error that `body` raised, here or in another process.
        """


def place(num_nodes: int, processes: int, speeds: Sequence[float] | None = None) -> list[list[int]]:
    """Divide the nodes' ids among processes. Return each process's ids, which are contiguous.

    The numbers of nodes are proportional to the processes' `speeds`. If `speeds` is None, the numbers are as equal as
    possible.

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
