"""What a prediction starts from: every collective by size, warm and cold, every pair's link, the step of one's model.

The fields are those that `Network.of` reads (docs/network.md, "From measurements").
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from exogym.distributed import wire
from exogym.distributed.group import require_group
from exogym.distributed.measure import DEFAULT_SIZES_BYTES, ITEM_BYTES, Row, self_test
from exogym.distributed.operation import ReduceOp
from exogym.engine.sockets import ports_closed_afterwards
from exogym.errors import DataError, checked

NAME_BYTES = 256  # of a host, at most
PAIR_BYTES = 1 << 20  # of the message that measures a pair's bandwidth
ROUND_TRIPS = 20
OF_ALL_PARTS = ("all_gather", "gather")  # whose size in the self-test is that of all parts, where a payload is one
STEP = """
import sys
from exogym.compare import measured_step_s
from exogym.tasks import load_task

sys.path.insert(0, "")
task, batch_size, data = sys.argv[1:]
print(measured_step_s(load_task(task, data or None), int(batch_size) if batch_size else None))
"""


@checked
def measure(
    sizes_bytes: Sequence[int] = DEFAULT_SIZES_BYTES,
    repeats: int = 5,
    step_s: float | None = None,
    task: str | None = None,
) -> tuple[list[Row], dict[str, Any]]:
    """Run the self-test and probe the links; all processes call it, and all get the same.

    The first time of a kind is measured in a new group of all processes, whose connections no message has used. A
    pair's latency is half the round trip of 4 bytes, its bandwidth that of 1 MiB less this; pairs take turns. What else
    the hosts do only adds time, and more bytes never take less of it, so a probe that took longer than a larger one, or
    than the first of all, has the time of that one.

    Args:
        sizes_bytes, repeats: as `self_test`.
        step_s, task: seconds of a step of one's model on this host, on all or on none, and what was trained.

    Returns:
        The rows of the self-test, and the fields of a file for `Network.of`, one node for each process.

    Raises:
        GroupError, ArgumentError: as `self_test`.
    """
    require_group("measure")
    rows = self_test(sizes_bytes, repeats)
    return rows, _fields(rows, step_s, task)


def step_seconds(task: str, batch_size: int | None = None, data: str | None = None) -> float:
    """Return the median seconds of a step of a task here, measured in a process of its own that is in no world.

    Raises:
        DataError: it could not be trained; the message has the last line that the process said.
    """
    world = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    alone = {name: value for name, value in os.environ.items() if name not in world and name[:8] != "EXOGYM_N"}
    words = [sys.executable, "-c", STEP, task, "" if batch_size is None else str(batch_size), data or ""]
    done = subprocess.run(words, env=alone, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise DataError(f"a step of the task {task!r} cannot be measured: {said[-1] if said else done.returncode}")
    return float(done.stdout.split()[-1])


def as_line(fields: dict[str, Any]) -> str:
    """Return the fields as one line of JSON."""
    return json.dumps(fields)


def _fields(rows: Sequence[Row], step_s: float | None, task: str | None) -> dict[str, Any]:
    n = dist.get_world_size()
    collectives: dict[str, dict[str, float]] = {}
    for row in rows:
        name = row["collective"]
        if name == "send":
            continue  # the pairs have it
        parts = n if name in OF_ALL_PARTS else 1
        table = collectives.setdefault(name, {str(ITEM_BYTES * n // parts): row["latency_s"]})
        table[str(row["size_bytes"] // parts)] = row["time_s"]
    largest = max(row["size_bytes"] for row in rows)
    first = {name: _first(call) for name, call in _cold(largest // ITEM_BYTES).items()}
    for name, table in collectives.items():
        least_s = first.get(name, float("inf"))
        for size in sorted(table, key=int, reverse=True):
            least_s = table[size] = min(least_s, table[size])
    fields: dict[str, Any] = {
        "num_nodes": n,
        "hosts": _hosts(),
        "pairs": _pairs(),
        "collectives": collectives,
        "first": first,
        "versions": {
            "torch": torch.__version__, "python": sys.version.split()[0], "backend": dist.get_backend(),
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    own = torch.tensor([-1.0 if step_s is None else step_s], dtype=torch.float64, device=wire.device())
    steps = [torch.empty_like(own) for _ in range(n)]
    seconds = [float(step) for step in wire.all_gather_(steps, own)]
    if min(seconds) >= 0:
        fields["step_s"] = seconds
        fields["versions"] |= {"task": task}
    return fields


def _hosts() -> list[str]:
    """Return the name of each process's host."""
    name = socket.gethostname().encode()[:NAME_BYTES]
    own = torch.zeros(NAME_BYTES, dtype=torch.uint8)
    own[: len(name)] = torch.frombuffer(bytearray(name), dtype=torch.uint8)
    names = [torch.empty(NAME_BYTES, dtype=torch.uint8, device=wire.device()) for _ in range(dist.get_world_size())]
    gathered = wire.all_gather_(names, own.to(wire.device()))
    return [bytes(name.tolist()).rstrip(b"\0").decode("utf-8", "replace") for name in gathered]


def _cold(count: int) -> dict[str, Callable[[dist.ProcessGroup], Any]]:
    """Return the collectives whose first time is measured, on `count` numbers."""
    n = dist.get_world_size()
    x = torch.zeros(count, device=wire.device())
    parts = [torch.zeros(count // n, device=wire.device()) for _ in range(n)]
    return {
        "all_reduce": lambda group: dist.all_reduce(x, group=group),
        "broadcast": lambda group: dist.broadcast(x, 0, group=group),
        "all_gather": lambda group: dist.all_gather(parts, parts[0].clone(), group=group),
    }


def _first(call: Callable[[dist.ProcessGroup], Any]) -> float:
    """Return the seconds of a collective that is the first of its group, as slow as its slowest process."""
    with ports_closed_afterwards() if dist.get_backend() == "gloo" else contextlib.nullcontext():
        group = dist.new_group()
    dist.barrier()
    start = time.perf_counter()
    call(group)
    _finish()
    took = torch.tensor([time.perf_counter() - start], device=wire.device())
    dist.destroy_process_group(group)
    return float(wire.all_reduce_(took, ReduceOp.MAX))


def _pairs() -> list[list[list[float] | None]]:
    """Return [i][j] the bits per second and the latency from i to j; None from a process to itself."""
    n, rank = dist.get_world_size(), dist.get_rank()
    found = torch.zeros(n, n, 2, dtype=torch.float64)
    small, large = (torch.zeros(size, dtype=torch.uint8, device=wire.device()) for size in (ITEM_BYTES, PAIR_BYTES))
    for i in range(n):
        for j in range(n):
            dist.barrier()
            if i != j and rank in (i, j):
                trips = [_round_trip_s(i, j, small, small) for _ in range(ROUND_TRIPS + 1)]
                latency_s = statistics.median(trips[1:]) / 2
                longer_s = [_round_trip_s(i, j, large, small) - 2 * latency_s for _ in range(3)]
                seconds = max(statistics.median(longer_s), latency_s / PAIR_BYTES)
                if rank == i:
                    found[i, j] = torch.tensor([8 * PAIR_BYTES / seconds, latency_s])
    total = wire.all_reduce_(found.to(wire.device()), ReduceOp.SUM).cpu()
    return [[None if i == j else total[i, j].tolist() for j in range(n)] for i in range(n)]


def _round_trip_s(i: int, j: int, there: Tensor, back: Tensor) -> float:
    """Return the seconds in which i sends `there` to j and j answers with `back`, as i sees them."""
    start = time.perf_counter()
    if dist.get_rank() == i:
        wire.send(there, j)
        wire.receive_(back, j)
    else:
        wire.receive_(there, i)
        wire.send(back, i)
    _finish()
    return time.perf_counter() - start


def _finish() -> None:
    if wire.device().type == "cuda":
        torch.cuda.synchronize()
