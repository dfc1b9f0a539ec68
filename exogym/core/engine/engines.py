"""The engines. An engine decides which processes hold a run's rows, and runs code in these processes.

This file has the engines whose processes run this script: one process, its forks, or processes that a launcher started.
To add an engine, add a file next to this one with a class like `Engine`, and an entry in `ENGINES`, or in `NAMED` if
users choose it with `Placement(engine=)`. The engine also needs a wire between its processes: `ProcessWire`, if they
form a torch process group.

A run uses the engine that the user names, otherwise the first engine that applies:

>>> two = EngineOptions(num_nodes=4, processes=2, device=torch.device("cpu"))
>>> [engine.applies(two) for engine in (Group(), Forked(), Alone())]
[False, True, False]
>>> one = EngineOptions(num_nodes=4, processes=1, device=torch.device("cpu"), placement=[range(4)])
>>> chosen: Engine = engine_for(one)
>>> chosen.run(one, lambda wire: len(wire.owner))
4
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from exogym.core.base.devices import CPU, Device
from exogym.core.combinations import check
from exogym.core.communicator import Wire
from exogym.errors import ArgumentError

if TYPE_CHECKING:
    from exogym.core.engine.nodes import Nodes

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


class Moved(Exception):
    """Raised (not as a failure) to continue the run in other processes, with the rows divided anew.

    `why` is the reason. A run that has `begun` continues from the checkpoint that it has written.
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
            f"{processes} processes for num_nodes={num_nodes}: every process needs a node, so start at most {num_nodes}"
        )
    counts = [num_nodes // processes + (k < num_nodes % processes) for k in range(processes)]
    if speeds is not None:
        from exogym.balance import share_out

        counts = share_out(num_nodes, speeds)
    ends = list(itertools.accumulate(counts, initial=0))
    return [list(range(first, last)) for first, last in itertools.pairwise(ends)]


def world_size() -> int:
    """Return how many processes run this script: the group's size, torchrun's WORLD_SIZE without a group, or 1."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def local_device(device: str | torch.device) -> str | torch.device:
    """Return this process's device.

    If several processes run and the host has accelerators, "auto" and their kind's name, such as "cuda", become the
    accelerator with the local rank's number.
    """
    own = None if world_size() == 1 else Device.accelerator()
    if own is None or str(device) not in ("auto", own.place.type):
        return device
    return f"{own.place.type}:{int(os.environ.get('LOCAL_RANK', '0')) % torch.accelerator.device_count()}"


class Alone:
    """The engine for a single process, which has all rows."""

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
        from exogym.core.engine.children import Forks
        from exogym.core.engine.forks import run_forked

        if options.device != CPU or not Forks.are_possible():
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
        from exogym.core.engine.hangs import watched
        from exogym.core.engine.wire import ProcessWire
        from exogym.core.engine.world import join_world

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


ENGINES: list[Engine] = [Group(), Forked(), Alone()]  # the first one that applies is used
# The names for `Placement(engine=)` -> an engine's module and class, imported when a run needs them.
NAMED = {"ray": ("exogym.clusters.ray", "Ray")}
# The function with the option `node` -> the module and class of its nodes of several devices.
DEVICES = {"fit": ("exogym.mesh.nodes", "MeshNodes"), "attach": ("exogym.mesh.attached", "Shards")}


def named_engine(name: str) -> type[Engine]:
    """Return the class of the engine that `Placement(engine=name)` runs on.

    >>> named_engine("ray").__name__
    'Ray'
    """
    home, kind = NAMED[name]
    found: type[Engine] = getattr(importlib.import_module(home), kind)
    return found


def several_devices(where: str) -> Any:
    """Return the class of the nodes of several devices for the option `node` of `where`, "fit" or "attach".

    >>> several_devices("fit").sharing([2, 2])
    NodeMesh(shard=2, tensor=1, stages=1, microbatches=None, parallelize=None, zero=3, probe=True)
    """
    home, kind = DEVICES[where]
    return getattr(importlib.import_module(home), kind)


def engine_for(options: EngineOptions) -> Engine:
    """Return a run's engine: the engine that its options name, otherwise the first engine that applies.

    >>> type(engine_for(EngineOptions(4, 2, torch.device("cpu")))).__name__
    'Forked'
    """
    if options.engine is not None:
        return named_engine(options.engine)()
    return next(engine for engine in ENGINES if engine.applies(options))
