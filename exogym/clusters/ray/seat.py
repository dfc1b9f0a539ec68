"""A process of a run, as a Ray actor, and its connection to the run's other processes.

The processes find each other through a key-value store in the first process, which the others call through Ray, without
a port. gloo uses the machine's address in Ray, and its own port is closed once all processes are connected.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from exogym.core.base.devices import CPU, Device
from exogym.core.base.shelf import LineStore, Shelf
from exogym.core.engine.hangs import watched
from exogym.core.engine.reports import packed, unpacked
from exogym.core.engine.wire import ProcessWire
from exogym.core.engine.world import join_group, leave_group
from exogym.errors import ArgumentError, Stopped, WorkerError
from exogym.machines.remote.onhost.interfaces import interface_of

Result = TypeVar("Result")
FOREVER = timedelta(days=30)  # the process that called `fit` detects processes that wait too long


class Unreachable(WorkerError):
    """Raised when another process of the run cannot be reached."""


@dataclass(frozen=True)
class SeatPlan:
    """The settings of a run that each process receives.

    Attributes:
        placement: the node ids of each process.
        on_gpu: whether each process has its own GPU.
        folder: the script's folder, to which each process changes if it exists there. None: Ray's runtime_env sets it.
    """

    placement: Sequence[Sequence[int]]
    native: bool
    hang_s: float | None
    on_gpu: bool
    folder: str | None


def _or_lost(call: Callable[[], Result]) -> Result:
    try:
        return call()
    except RuntimeError as error:  # torch raises it for all lost connections
        raise Unreachable(f"another process of the run cannot be reached: {error}") from error


class Seat:
    """A Ray actor that is one process of a run. `train` runs in one thread, `stop` and `ask` meanwhile in others."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._shelf, self._lock, self._numbers = Shelf[int](), threading.Lock(), itertools.count()
        self._open: dict[int, Future[Any]] = {}

    def stop(self) -> None:
        """Ask the run to stop at a point that all processes reach together."""
        self._asked.set()

    def ask(self, said: dict[str, Any]) -> dict[str, Any]:
        """Pass the request `said` to the key-value store in this process. Return the store's answer."""
        own: Future[dict[str, Any]] = Future()
        with self._lock:
            number = next(self._numbers)
            self._open[number] = own
            for who, answer in self._shelf.take(number, said):
                self._open.pop(who).set_result(answer)
        return own.result()

    def train(self, process: int, seating: SeatPlan, work: bytes, first: Any) -> tuple[Any, ...]:
        """Run `work`, a pickled function of a wire, together with all processes. The actor `first` holds the store.

        Returns:
            ("done", result), ("stopped", step, `Stopped.left`), ("lost", reason) or ("error", *`packed`).
        """
        try:
            if seating.folder is not None and os.path.isdir(seating.folder):
                os.chdir(seating.folder)
            body = _loaded(work)
            with watched(seating.hang_s, process), _group(process, seating, first):
                wire = ProcessWire(seating.placement, native=seating.native)
                wire.around = wire.around_aside = _or_lost
                wire.asked_to_stop = self._asked.is_set
                found = body(wire)
                wire.leave()
                return "done", found
        except Stopped as stop:
            return "stopped", stop.step, stop.left
        except Unreachable as lost:
            return "lost", str(lost)
        except BaseException as error:
            return "error", *packed(error)


def error_of(end: tuple[Any, ...], who: str) -> BaseException:
    """Return the error of a process whose `train` returned ("error", ...), with a note that names the process."""
    return unpacked(end[1], end[2], who)


def _loaded(work: bytes) -> Callable[[ProcessWire], Any]:
    import ray.cloudpickle

    try:
        return ray.cloudpickle.loads(work)
    except ImportError as error:
        raise ArgumentError(
            f"this machine lacks the run's code ({error}). Send it with "
            "engine=Ray(runtime_env={'working_dir': '.'}), or put it into the script itself"
        ) from error


@contextlib.contextmanager
def _group(process: int, seating: SeatPlan, first: Any) -> Any:
    """Inside, all processes of the run are in torch's default process group."""
    import ray

    def say(said: dict[str, Any]) -> None:
        try:
            store.hear(ray.get(first.ask.remote(said)))
        except ray.exceptions.RayError as error:
            store.fail(f"the first process of the run cannot be reached: {error}")

    store = LineStore(say)
    with contextlib.suppress(LookupError):  # then gloo chooses an interface itself
        name = interface_of(ray.util.get_node_ip_address(), is_loopback=True)
        os.environ |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    device = Device.named("auto" if seating.on_gpu else CPU)
    if seating.on_gpu:
        device.make_current()  # Ray shows each process only its own GPU
    try:
        _or_lost(
            lambda: join_group(
                device.backend, store=dist.PrefixStore("exogym", store), rank=process,
                world_size=len(seating.placement), timeout=FOREVER,
            )
        )  # fmt: skip
        yield
    finally:
        with contextlib.suppress(RuntimeError):
            leave_group()
