"""The engine of Ray: rows in actors, looked after by the process that called `fit`, which holds none.

A process that is lost (its actor, its machine) ends the others; the run begins again from its last checkpoint where
`max_restarts` allows, on as many machines as there are then. Where room for more processes appears, the run saves
itself, and goes on with its rows dealt anew. Neither changes a bit: the sums go through the same tree.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from exogym.core.combinations import check
from exogym.core.communicator import Wire
from exogym.core.engine.protocol import EngineOptions, Moved, Result
from exogym.core.engine.ray.cluster import check_machines, connect, has_gpus, no_room, room
from exogym.core.engine.reports import held, unpacked
from exogym.core.engine.world import world_size
from exogym.errors import ArgumentError, Stopped, WorkerError, check_choice, checked

POLL_S, LOOK_S = 0.2, 2.0  # between looks at the processes, and at the room that there is
ROOM_S = 60.0  # for room that is free to be given; a machine that is gone is found out meanwhile
GRACE_S = 20.0  # for Ray to say which process is gone, when others miss it
BACK_S = 10.0  # for room that this run had to be free again


class Ray:
    """Runs on a cluster of Ray's: `fit(engine="ray")` is `fit(engine=Ray())`.

    The processes are as many as there is room for, one a GPU, or where there is none one for each `cpus_per_process`,
    and no more than nodes; `processes=P` asks for so many. Model, data, strategy, loggers and callbacks travel there by
    Ray's own pickle. Process 0 writes `save_dir` and `run_dir`: give folders that all machines see.

    Args:
        address: "auto" (the cluster that this machine is part of), "host:port", or None: what RAY_ADDRESS says, or a
            cluster started here, on the loopback only, which ends with the script.
        placement: "pack" onto few machines, or "spread" over many.
        runtime_env: what the processes need there, as Ray's `runtime_env` (working_dir, py_modules, pip, env_vars).

    >>> Ray("10.0.0.1:6379", placement="spread").placement
    'spread'
    """

    shares_memory, runs_again, keeps_rows, is_here = False, True, False, False

    @checked
    def __init__(
        self, address: str | None = None, *, placement: str = "pack", runtime_env: Mapping[str, Any] | None = None
    ):
        if not isinstance(address, str | None) or address == "":
            raise ArgumentError(f"address={address!r} must be 'auto', host:port, or None for a cluster started here")
        check_choice("placement", placement, ("pack", "spread"))
        if not isinstance(runtime_env, Mapping | None):
            raise ArgumentError(f"runtime_env={runtime_env!r} must be a dict, as Ray's runtime_env")
        self.address, self.placement, self.runtime_env = address, placement, runtime_env

    def applies(self, options: EngineOptions) -> bool:
        return options.engine == "ray"

    def processes(self, options: EngineOptions) -> int:
        if (world := world_size()) > 1:
            launched = {"processes of a launcher": f"a script that runs as {world} processes"}
            check({"engine": "engine='ray'"} | launched)
        connect(self.address, self.runtime_env)
        need = _need(options)
        asked = options.processes if isinstance(options.processes, int) and options.processes > 1 else None
        found = sum(room(need).values())
        if asked is not None and asked > options.num_nodes:
            raise ArgumentError(f"processes={asked} for num_nodes={options.num_nodes}: every process needs a node")
        if not found or found < (asked or 1):
            raise no_room(need, asked or 1)
        return asked or min(found, options.num_nodes)

    def run(self, options: EngineOptions, body: Callable[[Wire], Result]) -> Result:
        import ray

        from exogym.core.engine.ray.seat import SeatPlan

        work = _packed(body)
        folder = None if (self.runtime_env or {}).get("working_dir") else os.getcwd()
        need = _need(options)
        seating = SeatPlan(options.placement, options.native, options.hang_s, "GPU" in need, folder)
        with _room_for(len(options.placement), need, self.placement) as places:
            check_machines(places)
            groups = {"control": 1, "meeting": 2 * len(places) + 2}
            actor = ray.remote(concurrency_groups=groups)(_with_groups())
            bundle = {"num_cpus": need.get("CPU", 0), "num_gpus": need.get("GPU", 0)}
            seats = [actor.options(scheduling_strategy=place, max_restarts=0, **bundle).remote() for _, place in places]
            shipped = ray.put(work)
            calls = [seat.train.remote(k, seating, shipped, seats[0]) for k, seat in enumerate(seats)]
            try:
                return _Watch(seats, calls, options, need).result()
            finally:
                for seat in seats:
                    ray.kill(seat)


def _need(options: EngineOptions) -> dict[str, float]:
    """Return what a process needs of its machine."""
    wanted = str(options.wanted)
    on_gpu = wanted.startswith("cuda") or (wanted == "auto" and has_gpus())
    return {"CPU": float(options.cpus_per_process)} | ({"GPU": 1.0} if on_gpu else {})


def _with_groups() -> type:
    """Return the class of the actors, of which some methods answer while another runs."""
    import ray

    from exogym.core.engine.ray.seat import Seat

    class ExoGym(Seat):  # the name by which Ray's tools and the system's list of processes know it
        stop = ray.method(concurrency_group="control")(Seat.stop)
        ask = ray.method(concurrency_group="meeting")(Seat.ask)

    return ExoGym


def _packed(body: Callable[..., Any]) -> bytes:
    import ray.cloudpickle

    try:
        return ray.cloudpickle.dumps(body)
    except Exception as error:
        raise ArgumentError(
            f"with engine='ray' model, data, loss, metrics, strategy, loggers and callbacks travel to other machines, "
            f"and one of them cannot be pickled: {error}. Give a factory for the data, and make files and connections "
            "where they are used"
        ) from error


@contextlib.contextmanager
def _room_for(processes: int, need: Mapping[str, float], placement: str) -> Iterator[list[tuple[str, Any]]]:
    """While entered, there is room for so many processes: yield machine and place of each, as Ray schedules them.

    Raises:
        Moved: the room that there was is gone: count anew.
        ArgumentError: it is said to be there, and is not given.
    """
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    before = room(need)
    group = placement_group([dict(need)] * processes, strategy=placement.upper())
    try:
        until = time.monotonic() + ROOM_S
        while not group.wait(1):
            if sum(room(need).values()) < processes:
                raise Moved("other room than was counted", begun=False)
            if time.monotonic() > until:
                raise no_room(need, processes)
        machines = placement_group_table(group)["bundles_to_node_id"]
        yield [(machines[k], PlacementGroupSchedulingStrategy(group, k)) for k in range(processes)]
    finally:
        remove_placement_group(group)
        until = time.monotonic() + BACK_S
        while time.monotonic() < until:
            now = room(need)
            if all(now[node] >= count for node, count in before.items() if node in now):
                break
            time.sleep(POLL_S / 2)


class _Watch:
    """Looks after the processes of a run until it has come to its end."""

    def __init__(self, seats: Sequence[Any], calls: Sequence[Any], options: EngineOptions, need: Mapping[str, float]):
        self.seats, self.calls, self.options, self.need = seats, list(calls), options, need
        self.ended: dict[int, tuple[Any, ...]] = {}
        self.received: signal.Signals | None = None
        self.asked = False
        self.moving = ""

    def result(self) -> Any:
        """Return what process 0 came to.

        Raises:
            Moved: the run has saved itself, and there is room for more processes.
            Stopped: a signal came, and the run has stopped. SystemExit, whose cause that is: it was SIGTERM.
            WorkerError, or what a process raised.
        """
        import ray

        looked = time.monotonic()
        with self._signals():
            pending, until = list(self.calls), math.inf
            while pending and time.monotonic() < until:
                done, pending = ray.wait(pending, num_returns=1, timeout=POLL_S)
                for call in done:
                    process = self.calls.index(call)
                    try:
                        self.ended[process] = ray.get(call)
                    except ray.exceptions.RayError as error:
                        self.ended[process] = ("gone", str(error))
                if self._cause() is not None:
                    break
                if done and math.isinf(until) and any(end[0] == "lost" for end in self.ended.values()):
                    until = time.monotonic() + GRACE_S
                if self.received is not None:
                    self._ask()
                elif time.monotonic() - looked > LOOK_S:
                    looked = time.monotonic()
                    self._look_for_room()
        cause = self._cause()
        if cause is not None:
            raise cause
        if any(end[0] == "lost" for end in self.ended.values()):
            why = next(end[1] for end in self.ended.values() if end[0] == "lost")
            raise WorkerError(f"{why}; checkpoints written before stand")
        return self._came_to(self.ended[0])

    def _came_to(self, end: tuple[Any, ...]) -> Any:
        if end[0] == "done":
            if self.received is not None:  # too late to stop anything
                signal.raise_signal(self.received)
            return end[1]
        if self.received is None:
            raise Moved(f"{self.moving}; the run was saved after step {end[1]}", begun=True)
        stop = Stopped(self.received, end[1])
        stop.left = end[2]
        if self.received is signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM) from stop
        raise stop

    def _cause(self) -> BaseException | None:
        """Return why the run has failed, where that is known: others only miss the one that did."""
        for process, end in sorted(self.ended.items()):
            who = f"worker process {process} ({held(self.options.placement[process])})"
            if end[0] == "gone":
                return WorkerError(f"{who} is lost: {_first_lines(end[1])}; checkpoints written before stand")
            if end[0] == "error":
                return unpacked(end[1], end[2], who)
        return None

    def _look_for_room(self) -> None:
        """Where the run can go on elsewhere, and more processes would leave each fewer rows, ask it to."""
        asked, nodes, here = self.options.processes, self.options.num_nodes, len(self.seats)
        if self.asked or not self.options.may_move or asked not in (1, "auto") or here == nodes:
            return
        there = min(nodes, here + sum(room(self.need).values()))
        if -(-nodes // there) < -(-nodes // here):
            self.moving = f"there is room for {there} processes, and not only for {here}"
            self._ask()

    def _ask(self) -> None:
        """Ask all processes to stop where they can meet."""
        if not self.asked:
            self.asked = True
            for seat in self.seats:
                seat.stop.remote()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """While entered, the first Ctrl-C or SIGTERM is noted; the second acts at once."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if threading.current_thread() is not threading.main_thread():
            numbers = []
        before: dict[signal.Signals, Any] = {}

        def restore() -> None:
            for number in list(before):
                signal.signal(number, before.pop(number))

        def note(number: int, frame: Any) -> None:
            self.received = signal.Signals(number)
            restore()

        for number in numbers:
            before[number] = signal.signal(number, note)
        try:
            yield
        finally:
            restore()


def _first_lines(text: str) -> str:
    """Return what Ray says of an actor that is gone, without its lists of addresses and advice."""
    lines = [line.strip() for line in text.partition("Worker exit detail:")[0].splitlines() if line.strip()]
    facts = ("class_name", "actor_id", "pid", "namespace", "ip", "name")
    return " ".join(line for line in lines if line.partition(":")[0] not in facts)[:400].rstrip(". ")
