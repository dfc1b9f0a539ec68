"""Run the self-test: check every collective against known results, then measure bandwidth and latency."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from exogym.core.base.devices import Device
from exogym.core.progress import readable_bytes
from exogym.errors import ArgumentError, check_count, checked
from exogym.machines.distributed import bare, collectives
from exogym.machines.distributed.bare import ReduceOp
from exogym.machines.distributed.group import GroupError, require_group

Row = dict[str, Any]
ITEM_BYTES = 4
DEFAULT_SIZES_BYTES = (1 << 12, 1 << 20, 1 << 24)
TOLERANCE = 1e-6  # relative error of an average; all else is exact


@checked
def self_test(sizes_bytes: Sequence[int] = DEFAULT_SIZES_BYTES, repeats: int = 5) -> list[Row]:
    """Check and time every collective. All processes must call this function and get the same rows.

    The inputs are small integers and powers of two, whose exact results are known. Every reduction is checked at every
    size, and every root (sending or receiving process) at the smallest size. Torch's own collectives are timed on
    float32 tensors: a time is the median of `repeats` calls after one untimed call, and a call takes as long as its
    slowest process.

    Args:
        sizes_bytes: message sizes to measure, rounded up to multiples of 4 bytes times the number of processes. For
            gather, all_gather, scatter and reduce_scatter, a size counts all processes' parts together.
        repeats: number of timed calls for each size.

    Returns:
        One row per collective and size, with the fields `collective`, `size_bytes`, `world_size`, `time_s`;
        `bytes_per_s`: size divided by time;
        `bus_bytes_per_s`: `bytes_per_s` times the share of the message that crosses each link under the best algorithm.
            With n processes, this share is 2 (n - 1)/n for all_reduce, (n - 1)/n for all_gather, reduce_scatter, gather
            and scatter, and 1 for broadcast, reduce and send;
        `latency_s`: the time of the collective's smallest message, 4 bytes per process.

    Raises:
        GroupError: a result is wrong (the message names the result and the rank), a process was lost, or there is no
            process group.
        ArgumentError: there is only one process.
    """
    require_group("self_test")
    for size in sizes_bytes:
        check_count("sizes_bytes", size)
    check_count("repeats", repeats)
    n = dist.get_world_size()
    if n == 1:
        raise ArgumentError(
            "the self-test needs at least two processes: "
            "python -m exogym.launch --nproc_per_node 2 -m exogym.distributed"
        )
    unit = ITEM_BYTES * n
    sizes = sorted({-(-size // unit) * unit for size in sizes_bytes})
    rows: list[Row] = []
    for name, share in SHARES.items():
        for size in sizes:
            _check(name, size // ITEM_BYTES, roots=range(n) if size == sizes[0] else range(1))
        latency_s = _time(name, n, 4 * repeats)
        for size in sizes:
            time_s = _time(name, size // ITEM_BYTES, repeats)
            rate = size / time_s
            rows.append(
                {
                    "collective": name,
                    "size_bytes": size,
                    "world_size": n,
                    "time_s": time_s,
                    "bytes_per_s": rate,
                    "bus_bytes_per_s": rate * share(n),
                    "latency_s": latency_s,
                }
            )
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows of a self-test as a readable table.

    >>> row = dict(collective="reduce", size_bytes=4096, world_size=2, time_s=1e-3, bytes_per_s=4.096e6)
    >>> print(table([row | dict(bus_bytes_per_s=4.096e6, latency_s=5e-5)]))
    collective        size      time  size/time  bus/time   latency
    reduce          4.1 kB      1 ms  4.1 MB/s   4.1 MB/s     50 us
    """
    head = ("collective", "size", "time", "size/time", "bus/time", "latency")
    lines = [f"{head[0]:<15}{head[1]:>7}{head[2]:>10}  {head[3]:<9}  {head[4]:<9}{head[5]:>9}"]
    for row in rows:
        rate, bus = (f"{readable_bytes(row[key])}/s" for key in ("bytes_per_s", "bus_bytes_per_s"))
        lines.append(
            f"{row['collective']:<15}{readable_bytes(row['size_bytes']):>7}{_seconds(row['time_s']):>10}  {rate:<9}  "
            f"{bus:<9}{_seconds(row['latency_s']):>9}"
        )
    return "\n".join(lines)


def _seconds(time_s: float) -> str:
    scale, unit = next(((s, u) for s, u in ((1, "s"), (1e-3, "ms")) if time_s >= s), (1e-6, "us"))
    return f"{time_s / scale:.3g} {unit}"


# The numbers: process `rank` holds (i mod 7) + 2 rank + 1, whose mean over n processes is (i mod 7) + n.


def _values(rank: int, count: int) -> Tensor:
    return (torch.arange(count, device=bare.device()) % 7 + 2 * rank + 1).float()


def _powers(rank: int, count: int) -> Tensor:
    return 2.0 ** ((torch.arange(count, device=bare.device()) + rank) % 2)


def _reductions(count: int) -> dict[ReduceOp, Tensor]:
    n = dist.get_world_size()
    mean = _values(0, count) - 1 + n
    doubled = torch.stack([_powers(rank, 2) for rank in range(n)]).prod(0)  # values at an even and an odd index
    return {
        ReduceOp.SUM: mean * n,
        ReduceOp.AVERAGE: mean,
        ReduceOp.MIN: _values(0, count),
        ReduceOp.MAX: _values(n - 1, count),
        ReduceOp.PRODUCT: doubled[torch.arange(count, device=mean.device) % 2],
    }


def _check(name: str, count: int, roots: range) -> None:
    """Run a collective on `count` numbers with every operation and root, and check the results."""
    n, rank = dist.get_world_size(), dist.get_rank()
    mine, part = _values(rank, count), count // n
    every = torch.cat([_values(r, part) for r in range(n)])
    if name == "broadcast":
        for root in roots:
            _expect(name, collectives.broadcast(mine, root), _values(root, count))
    elif name in ("all_reduce", "reduce", "reduce_scatter"):
        for op, wanted in _reductions(count).items():
            given = _powers(rank, count) if op == ReduceOp.PRODUCT else mine
            if name == "all_reduce":
                _expect(name, collectives.all_reduce(given, op), wanted, op)
            elif name == "reduce_scatter":
                got = collectives.reduce_scatter(given, op)
                _expect(name, got, wanted[rank * part : (rank + 1) * part], op)
            else:
                for root in roots:
                    _expect(name, collectives.reduce(given, root, op), wanted if rank == root else None, op)
    elif name == "all_gather":
        _expect(name, _together(collectives.all_gather(mine[:part])), every)
    elif name == "gather":
        for root in roots:
            _expect(name, _together(collectives.gather(mine[:part], root)), every if rank == root else None)
    elif name == "scatter":
        for root in roots:
            parts = [_values(root + r, part) for r in range(n)] if rank == root else None
            _expect(name, collectives.scatter(parts, root), _values(root + rank, part))
    else:  # around the ring: all ranks except 0 receive first
        if rank == 0:
            collectives.send(mine, 1)
        _expect(name, collectives.recv((rank - 1) % n), _values((rank - 1) % n, count))
        if rank > 0:
            collectives.send(mine, (rank + 1) % n)


def _together(parts: list[Tensor] | None) -> Tensor | None:
    return None if parts is None else torch.cat(parts)


def _expect(name: str, got: Tensor | None, wanted: Tensor | None, op: ReduceOp | None = None) -> None:
    if got is None and wanted is None:
        return
    if got is not None and wanted is not None and got.shape == wanted.shape:
        if torch.equal(got, wanted):
            return
        allowed = wanted.abs() * (TOLERANCE if op == ReduceOp.AVERAGE else 0.0)
        wrong = ((got - wanted).abs() > allowed).nonzero()
        if not len(wrong):
            return
        place = int(wrong[0])
        difference = f"element {place} is {got[place].item()}, expected {wanted[place].item()}"
    else:
        shapes = ["nothing" if x is None else str(tuple(x.shape)) for x in (got, wanted)]
        difference = f"got {shapes[0]}, expected {shapes[1]}"
    which = name if op is None else f"{name}(op={op.value!r})"
    raise GroupError(f"self-test: {which} is wrong on rank {dist.get_rank()} of {dist.get_world_size()}: {difference}")


def _time(name: str, count: int, repeats: int) -> float:
    """Return a collective's median seconds. Each call is as slow as its slowest process."""
    call = _bare(name, count)
    return statistics.median(slowest([seconds_of(call) for _ in range(repeats + 1)][1:]))


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the seconds that a call takes in this process when all processes start it together."""
    dist.barrier()
    start = time.perf_counter()
    call()
    finish()
    return time.perf_counter() - start


def finish() -> None:
    """Wait until this process's accelerator, if there is one, has finished its work."""
    Device.of_group().synchronize()


def slowest(took: Sequence[float]) -> list[float]:
    """Return, for each of several calls, the seconds of the slowest process."""
    both = torch.tensor(took, dtype=torch.float64, device=bare.device())
    found: list[float] = bare.all_reduce_(both, ReduceOp.MAX).tolist()
    return found


def _bare(name: str, count: int) -> Callable[[], Any]:
    n, rank = dist.get_world_size(), dist.get_rank()
    x, received = torch.zeros(2, count, device=bare.device()).unbind(0)
    part = x[: count // n].clone()
    parts = list(received.view(n, -1).unbind(0))
    at_root = parts if rank == 0 else None

    def send_and_receive() -> None:
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            dist.recv(x, 0)

    return {
        "broadcast": lambda: dist.broadcast(x, 0),
        "reduce": lambda: dist.reduce(x, 0),
        "all_reduce": lambda: dist.all_reduce(x),
        "scatter": lambda: dist.scatter(part, at_root, 0),
        "gather": lambda: dist.gather(part, at_root, 0),
        "all_gather": lambda: dist.all_gather(parts, part),
        "reduce_scatter": lambda: bare.reduce_scatter_(x, ReduceOp.SUM),
        "send": send_and_receive,
    }[name]


SHARES: dict[str, Callable[[int], float]] = {
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "send": lambda n: 1.0,
}
