"""The Ray engine: actors hold the rows. The process that called `fit` watches the actors and holds no rows.

If an actor or its machine is lost, the others end, and the run restarts from its last checkpoint on the remaining
machines if `max_restarts` allows. If the cluster gets room for more processes, the run saves itself, places its rows
again and continues. Results stay bitwise identical, because sums always go through the fixed tree.
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

from exogym.clusters.ray.cluster import check_machines, connect, needs_gpu, no_room, room
from exogym.clusters.ray.seat import Seat, SeatPlan, error_of
from exogym.communicator import Wire
from exogym.core.engine import EngineOptions, Moved, Result
from exogym.errors import ArgumentError, Stopped, WorkerError, check_choice, checked

POLL_S, LOOK_S = 0.2, 2.0  # seconds between looks at the processes, and at the free room
ROOM_S = 60.0  # seconds until Ray gives free room; in this time it notices a lost machine
GRACE_S = 20.0  # seconds until Ray names a lost process that others miss
BACK_S = 10.0  # seconds until this run's room is free again


class Ray:
    """Runs the training on a Ray cluster. `Placement(engine="ray")` is the same as `Placement(engine=Ray())`.

    ExoGym starts as many processes as the cluster has room for, but at most one per node; `processes=P` sets the
    number. Each process takes `cpus_per_process` CPUs, and one GPU if the run uses GPUs. Ray's own pickle carries
    model, data, strategy, loggers and callbacks to the processes. Process 0 writes `save_dir` and `run_dir`: give
    folders that all machines share.

    Args:
        address: "auto" (this machine's cluster), "host:port", or None. None means the address in RAY_ADDRESS, or a new
            cluster here if RAY_ADDRESS is not set. A new cluster listens on the loopback interface only and ends with
            the script.
        placement: "pack" the processes onto few machines, or "spread" them over many.
        runtime_env: code, packages and environment of the processes, as in Ray's `runtime_env` (working_dir,
            py_modules, pip, env_vars).

    >>> Ray("10.0.0.1:6379", placement="spread").placement
    'spread'
    """

    shares_memory, runs_again, keeps_rows, is_here = False, True, False, False

    @checked
    def __init__(
        self, address: str | None = None, *, placement: str = "pack", runtime_env: Mapping[str, Any] | None = None
    ):
        if not isinstance(address, str | None) or address == "":
            raise ArgumentError(f"address={address!r} must be 'auto', host:port, or None to start a cluster here")
        check_choice("placement", placement, ("pack", "spread"))
        if not isinstance(runtime_env, Mapping | None):
            raise ArgumentError(f"runtime_env={runtime_env!r} must be a dict in the form of Ray's runtime_env")
        self.address, self.placement, self.runtime_env = address, placement, runtime_env

    def applies(self, options: EngineOptions) -> bool:
        return options.engine == "ray"

    def processes(self, options: EngineOptions) -> int:
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
    """Return the CPUs and GPUs that a process needs."""
    gpu = {"GPU": 1.0} if needs_gpu(str(options.wanted)) else {}
    return {"CPU": float(options.cpus_per_process)} | gpu


def _with_groups() -> type:
    """Return the actors' class. Its methods `stop` and `ask` answer while `train` runs."""
    import ray

    class ExoGym(Seat):  # Ray's tools and the system's process list show this name
        stop = ray.method(concurrency_group="control")(Seat.stop)
        ask = ray.method(concurrency_group="meeting")(Seat.ask)

    return ExoGym


def _packed(body: Callable[..., Any]) -> bytes:
    import ray.cloudpickle

    try:
        return ray.cloudpickle.dumps(body)
    except Exception as error:
        raise ArgumentError(
            "engine='ray' sends model, data, loss, metrics, strategy, loggers and callbacks to other machines, "
            f"but one of them cannot be pickled: {error}. Pass a factory for the data, and open files and connections "
            "where you use them"
        ) from error


@contextlib.contextmanager
def _room_for(processes: int, need: Mapping[str, float], placement: str) -> Iterator[list[tuple[str, Any]]]:
    """Reserve room for `processes` inside. Yield each process's machine and its place, as Ray schedules them.

    Raises:
        Moved: the counted room is gone; count again.
        ArgumentError: Ray reports free room but does not give it.
    """
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    before = room(need)
    group = placement_group([dict(need)] * processes, strategy=placement.upper())
    try:
        until = time.monotonic() + ROOM_S
        while not group.wait(1):
            if sum(room(need).values()) < processes:
                raise Moved("the cluster's free CPUs or GPUs have changed", begun=False)
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
    """Watches a run's processes until the run ends."""

    def __init__(self, seats: Sequence[Any], calls: Sequence[Any], options: EngineOptions, need: Mapping[str, float]):
        self.seats, self.calls, self.options, self.need = seats, list(calls), options, need
        self.ended: dict[int, tuple[Any, ...]] = {}
        self.received: signal.Signals | None = None
        self.asked = False
        self.moving = ""

    def result(self) -> Any:
        """Wait for the end of the run. Return process 0's result.

        Raises:
            Moved: the run has saved itself, and there is room for more processes.
            Stopped: the run has stopped after a signal.
            SystemExit: the run has stopped after SIGTERM. The cause of this error is a `Stopped`.
            WorkerError: a process was lost.
            Exception: any error that a process of the run raised.
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
            raise WorkerError(f"{why}; earlier checkpoints are valid")
        return self._outcome(self.ended[0])

    def _outcome(self, end: tuple[Any, ...]) -> Any:
        if end[0] == "done":
            if self.received is not None:  # the run had ended before the signal
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
        """Return why the run has failed, if known. A process that only misses another one is not the cause."""
        for process, end in sorted(self.ended.items()):
            first, last = self.options.placement[process][0], self.options.placement[process][-1]
            who = f"worker process {process} ({f'node {first}' if first == last else f'nodes {first} to {last}'})"
            if end[0] == "gone":
                return WorkerError(f"{who} is lost: {_first_lines(end[1])}; earlier checkpoints are valid")
            if end[0] == "error":
                return error_of(end, who)
        return None

    def _look_for_room(self) -> None:
        """Ask the run to move if it can and if more processes would leave fewer rows to each."""
        asked, nodes, now = self.options.processes, self.options.num_nodes, len(self.seats)
        if self.asked or not self.options.may_move or asked not in (1, "auto") or now == nodes:
            return
        possible = min(nodes, now + sum(room(self.need).values()))
        if -(-nodes // possible) < -(-nodes // now):
            self.moving = f"there is room for {possible} processes instead of {now}"
            self._ask()

    def _ask(self) -> None:
        """Ask all processes to stop at a point that they reach together."""
        if not self.asked:
            self.asked = True
            for seat in self.seats:
                seat.stop.remote()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Inside, only note the first Ctrl-C or SIGTERM. The second acts at once."""
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
    """Return Ray's text about a lost actor, without its lists of addresses and advice."""
    lines = [line.strip() for line in text.partition("Worker exit detail:")[0].splitlines() if line.strip()]
    facts = ("class_name", "actor_id", "pid", "namespace", "ip", "name")
    return " ".join(line for line in lines if line.partition(":")[0] not in facts)[:400].rstrip(". ")
