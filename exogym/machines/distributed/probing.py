"""Measure a network for predictions: the times of collectives, of messages between pairs, and of your model's step.

A collective is timed for several message sizes, over open connections ("warm") and over new ones ("cold"). The probes
use the same collectives as a run, including the wire's copies and sums. Both all-reduces are probed: torch's own
(`reduction="native"`) and ExoGym's exact sum ("exact all_reduce"). `Network.of` reads the result (docs/network.md,
"From measurements").
"""

from __future__ import annotations

import datetime
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from exogym.core.communicator import Communicator, gather
from exogym.core.engine.wire import ProcessWire
from exogym.core.engine.world import new_group
from exogym.errors import DataError, checked
from exogym.machines.distributed import bare
from exogym.machines.distributed.group import require_group
from exogym.machines.distributed.measure import ITEM_BYTES, Row, finish, seconds_of, self_test, slowest
from exogym.network.measured import never_falling

PAIR_BYTES = 1 << 20  # message that measures a pair's bandwidth
ROUND_TRIPS = 20
PROBED_BYTES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
MOST_S = 1.0  # seconds for the timed calls of a collective at one size; at least two calls are timed
PAUSE_S = 0.01  # pause before each call, so that lines are idle as while hosts compute
MESSAGES = 20
OF_ALL_PARTS = ("all_gather", "gather")  # for these a size counts all parts together, and a payload is one part
COLD = ("all_reduce", "exact all_reduce", "broadcast", "all_gather")  # collectives whose first call is timed, too
KINDS = (*COLD, "reduce", "reduce_scatter", "gather", "scatter", "all_to_all")
Call = Callable[[Tensor], Any]
STEP = """
import sys
from exogym.study.compare import measured_evaluation_s, measured_step_s
from exogym.machines.remote.profile import options_of
from exogym.study.tasks import load_task

sys.path.insert(0, "")
task, batch_size, data, options = sys.argv[1:]
loaded = load_task(task, data or None, **options_of(options))
size = int(batch_size) if batch_size else None
print(measured_step_s(loaded, size), measured_evaluation_s(loaded, size) if loaded.val is not None else "none")
"""


@checked
def measure(
    sizes_bytes: Sequence[int] = PROBED_BYTES,
    repeats: int = 5,
    step_s: float | None = None,
    task: str | None = None,
    evaluation_s: float | None = None,
) -> tuple[list[Row], dict[str, Any]]:
    """Check and time all collectives, and measure the link between each pair of processes.

    All processes must call this function and get the same result. First the self-test runs at the smallest size. Then
    each collective is timed at every size over open connections: a call takes as long as its slowest process, and a
    size's time is the median of its calls. The extra time of a first call is measured at the smallest size in a new
    group of all processes.

    Pairs of processes are measured one after the other. A pair's latency is half the round-trip time of 4 bytes, and
    its bandwidth follows from the time of 1 MiB less the latency.

    Other work on the hosts only adds time, so a probe that took longer than a larger message's gets the larger
    message's time.

    Args:
        sizes_bytes: message sizes to probe, in addition to 4 bytes per process, rounded up to multiples of 4 bytes
            times the number of processes. For gathers, a size counts all processes' parts together.
        repeats: largest number of timed calls per size. Slow calls are timed less often, but at least twice.
        step_s: seconds of a step of your model on this host, passed on all hosts or on none.
        task: the name of the task whose step was measured.
        evaluation_s: seconds of an evaluation on the task's validation set, passed on all hosts or on none.

    Returns:
        The rows of the self-test, and the fields of a file for `Network.of`, with one node per process.

    Raises:
        GroupError, ArgumentError: for the same reasons as in `self_test`.
    """
    require_group("measure")
    rows = self_test([min(sizes_bytes)], repeats)
    unit = ITEM_BYTES * dist.get_world_size()
    sizes = sorted({-(-size // unit) * unit for size in (unit, *sizes_bytes)})
    return rows, _fields(sizes, repeats, {"step_s": step_s, "evaluation_s": evaluation_s}, task)


def step_seconds(
    task: str, batch_size: int | None = None, data: str | None = None, options: str = ""
) -> tuple[float, float | None]:
    """Return the median seconds of a task's step on this machine, and the seconds of an evaluation.

    Both are measured in a separate process outside any process group. The second value is None if the task has no
    validation set.

    Args:
        task: the task's name, or `module:function`.
        options: the task's options, as in a profile's `task_options`.

    Raises:
        DataError: the task could not be trained. The message ends with the last line that the process printed.
    """
    world = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    alone = {name: value for name, value in os.environ.items() if name not in world and name[:8] != "EXOGYM_N"}
    words = [sys.executable, "-c", STEP, task, "" if batch_size is None else str(batch_size), data or "", options]
    done = subprocess.run(words, env=alone, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise DataError(f"a step of the task {task!r} cannot be measured: {said[-1] if said else done.returncode}")
    step_s, evaluation_s = done.stdout.split()[-2:]
    return float(step_s), None if evaluation_s == "none" else float(evaluation_s)


def _fields(sizes: Sequence[int], repeats: int, own_s: Mapping[str, float | None], task: str | None) -> dict[str, Any]:
    n = dist.get_world_size()
    calls, wire = _calls(n), _wire(n)
    tables: dict[str, dict[float, float]] = {}
    for kind in KINDS:
        parts = n if kind in OF_ALL_PARTS else 1
        times = {size // parts: _times(calls[kind], _numbers(kind, size), repeats) for size in sizes}
        tables[kind] = never_falling({size: statistics.median(took) for size, took in times.items()})
    fields: dict[str, Any] = {
        "num_nodes": n,
        "hosts": gather(wire, socket.gethostname()),
        "pairs": gather(wire, _links()),
        "collectives": {kind: {str(size): s for size, s in table.items()} for kind, table in tables.items()},
        "first": {kind: _first(kind, sizes[0], table) for kind, table in tables.items() if kind in COLD},
        "message_s": _message_s(),
        "versions": {
            "torch": torch.__version__, "python": sys.version.split()[0], "backend": dist.get_backend(),
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    for name, own in own_s.items():
        seconds = gather(wire, own)
        if None not in seconds:
            fields[name] = seconds
            fields["versions"] |= {"task": task}
    return fields


def _wire(n: int, group: dist.ProcessGroup | None = None, native: bool = False) -> ProcessWire:
    return ProcessWire([[process] for process in range(n)], group, native)


def _calls(n: int, group: dist.ProcessGroup | None = None) -> dict[str, Call]:
    """Return each kind's collective as a function, called as strategies call it, with one node per process."""
    native, exact = (Communicator([dist.get_rank()], n, _wire(n, group, is_native)) for is_native in (True, False))
    return {
        "all_reduce": lambda x: native.all_reduce(x, out=x),
        "exact all_reduce": lambda x: exact.all_reduce(x, out=x),
        "broadcast": exact.broadcast,
        "all_gather": exact.all_gather,
        "reduce": exact.reduce,
        "reduce_scatter": exact.reduce_scatter,
        "gather": exact.gather,
        "scatter": exact.scatter,
        "all_to_all": exact.all_to_all,
    }


def _numbers(kind: str, size: int) -> Tensor:
    """Return a node's tensor for a collective of `size` bytes."""
    n, count = dist.get_world_size(), size // ITEM_BYTES
    if kind in OF_ALL_PARTS:
        return torch.zeros(1, count // n, device=bare.device())
    x = torch.zeros(1, count, device=bare.device())
    return x.view(1, n, -1) if kind in ("reduce_scatter", "scatter", "all_to_all") else x


def _times(call: Call, x: Tensor, repeats: int) -> list[float]:
    """Return the seconds of several calls after a warm-up call. A call takes as long as its slowest process."""

    def once() -> float:
        time.sleep(PAUSE_S)
        return seconds_of(lambda: call(x))

    (trial_s,) = slowest([once()])
    times = max(2, min(repeats, int(MOST_S / trial_s)))
    return slowest([once() for _ in range(times)])


def _message_s() -> float:
    """Return the seconds to agree on a few bytes: whether to stop, and the losses."""
    between = _wire(dist.get_world_size())

    def both(x: Tensor) -> None:
        between.agree(False)
        between.rows(x, range(len(between.placement)))

    return statistics.median(_times(both, torch.zeros(1, 1, device=bare.device()), MESSAGES)) / 2


def _first(kind: str, size: int, table: Mapping[float, float]) -> float:
    """Return the seconds of the largest collective of `kind` if it is the first call in its group."""
    n = dist.get_world_size()
    group = new_group()
    assert isinstance(group, dist.ProcessGroup)
    call, x = _calls(n, group)[kind], _numbers(kind, size)
    (took,) = slowest([seconds_of(lambda: call(x))])
    dist.destroy_process_group(group)
    return table[max(table)] + max(0.0, took - table[min(table)])


def _links() -> list[list[float] | None]:
    """Return [bits per second, latency] from this process to each process, and None for itself."""
    n, rank = dist.get_world_size(), dist.get_rank()
    found: list[list[float] | None] = [None] * n
    small, large = (torch.zeros(size, dtype=torch.uint8, device=bare.device()) for size in (ITEM_BYTES, PAIR_BYTES))
    for i in range(n):
        for j in range(n):
            dist.barrier()
            if i != j and rank in (i, j):
                trips = [_round_trip_s(i, j, small, small) for _ in range(ROUND_TRIPS + 1)]
                latency_s = statistics.median(trips[1:]) / 2
                longer_s = [_round_trip_s(i, j, large, small) - 2 * latency_s for _ in range(3)]
                seconds = max(statistics.median(longer_s), latency_s / PAIR_BYTES)
                if rank == i:
                    found[j] = [8 * PAIR_BYTES / seconds, latency_s]
    return found


def _round_trip_s(i: int, j: int, message: Tensor, reply: Tensor) -> float:
    """Return the seconds in which i sends `message` to j and receives `reply`, measured on i."""
    start = time.perf_counter()
    if dist.get_rank() == i:
        bare.send(message, j)
        bare.receive_(reply, j)
    else:
        bare.receive_(message, i)
        bare.send(reply, i)
    finish()
    return time.perf_counter() - start
