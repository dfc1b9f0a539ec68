"""Compare bytes on each host's cable with bytes that the ledger records for the host's node, in both directions.

    python benchmarks/wire_bytes.py --hosts 2,4,6
    python benchmarks/wire_bytes.py --hosts 4 --strategies diloco,demo

Each strategy of the battery, and each collective alone, runs on hosts in network namespaces (see `namespaces.py`), one
node per host. This needs Linux, root, and Debian's iproute2. The script compares what each host's interface counts
between two steps with the ledger's bytes sent and received of the host's node, buffers included. It leaves out 66 bytes
a packet (Ethernet, IP, TCP with timestamps) and bytes that TCP sent again (`bytes_retrans` of ss). Averages with a
delay complete before the script reads the counters.

*off* is the difference for all hosts together. *worst* is the largest difference of one host in one direction, as a
share of the mean recorded bytes of a host in a direction. The script fails if one of them is more than `--limit`.

Two methods send other bytes than the ledger says, and the script compares their total with a formula. `SERVER` has
strategies with sampled clients: the ledger records a server, which gets S from each of m clients and sends S to each of
m clients. Hosts have no server. The clients add their rows among themselves, 2 (m - 1) S, and every host gets the
result, (N - 1) S. `ROOT` has `reduce`: the ledger records a binomial tree. On hosts, each node sends its row to the
root, which adds the rows in the fixed tree. That is the same total.

`--json` stores each finished cell (see `cells.py`), so you can stop the command and repeat it. `--csv` writes a
table.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cells import AGAIN, Cells
from namespaces import HEADER_BYTES, SUBNET, enter, hosts
from torch import Tensor, nn

from exogym import LocalTrainer, Placement
from exogym.callbacks import Every
from exogym.core.communicator import Communicator, Event
from exogym.core.fleet import Fleet
from exogym.core.training import loop
from exogym.core.training.calling import Calling
from exogym.strategy import CommunicateOptimizeStrategy, PeriodicModule, PowerSGDStrategy, Strategy
from exogym.testing import small_problem

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from strategies import NODES, STRATEGIES

FIRST, LAST = 12, 24  # the steps between which bytes are counted: a few rounds of every strategy here
WAYS = ("tx", "rx")
RECORDED: dict[str, dict[int, float]] = {}  # see `record`
SEEN: list[dict[str, Any]] = []  # counters of this host at both steps
SERVER = ("fedavg sampling", "fedopt sampling", "scaffold sampling")
ROOT = ("call reduce",)


class Calls(PeriodicModule):
    """Call a collective after every fourth step, on a copy of the parameters."""

    interval_steps = 4

    def __init__(self, call: Callable[[Communicator, Tensor], Any]):
        super().__init__()
        self.call = call

    def communicate(self, fleet: Fleet, step: int) -> None:
        self.call(fleet.comm, fleet.blocks[0].params.clone())


def sliced(comm: Communicator, x: Tensor) -> Tensor:
    return x[:, : x.shape[1] // comm.num_nodes * comm.num_nodes].reshape(len(x), comm.num_nodes, -1)


CALLS: dict[str, Callable[[Communicator, Tensor], Any]] = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "all_reduce in pairs": lambda comm, x: comm.all_reduce(x, groups=pairs(comm.num_nodes)),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "all_to_all": lambda comm, x: comm.all_to_all(sliced(comm, x)),
    "broadcast": lambda comm, x: comm.broadcast(x, 1),
    "broadcast to two": lambda comm, x: comm.broadcast(x, 1, members=[0, 1]),
    "exchange": lambda comm, x: comm.exchange(
        x, [i ^ 1 if i | 1 < comm.num_nodes else i for i in range(comm.num_nodes)]
    ),
    "mix": lambda comm, x: comm.mix(x, torch.eye(comm.num_nodes).roll(1, 0) / 2 + torch.eye(comm.num_nodes) / 2),
    "reduce": lambda comm, x: comm.reduce(x, 1),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(sliced(comm, x)),
    "scatter": lambda comm, x: comm.scatter(sliced(comm, x), 1),
}


def pairs(n: int) -> list[list[int]]:
    return [[i, i + 1] for i in range(0, n - 1, 2)]


def strategy_of(name: str) -> Strategy:
    """Return a strategy of the battery, or one that calls a collective."""
    if name == "powersgd":  # with so large a rank that the headers of messages do not count
        return PowerSGDStrategy(lr=0.02, rank=32, start_step=2, min_rate=1.0)
    if name in STRATEGIES:
        return STRATEGIES[name].make()
    return CommunicateOptimizeStrategy("sgd", [Calls(CALLS[name.removeprefix("call ")])], lr=0.01)


def counters(device: str = "eth0") -> dict[str, Any]:
    """Return bytes that this host has sent and received, without headers, and bytes sent again to each host."""
    (fields,) = (
        line.split(":")[1].split()
        for line in Path("/proc/net/dev").read_text().splitlines()
        if line.strip().startswith(f"{device}:")
    )
    received, got, sent, gave = (int(fields[k]) for k in (0, 1, 8, 9))
    told = subprocess.run(["ss", "-tinHO"], check=True, capture_output=True, text=True).stdout
    again: dict[str, int] = {}
    for line in told.splitlines():
        peer, size = re.findall(rf"{re.escape(SUBNET)}\.(\d+)\]?:", line)[-1:], re.search(r"bytes_retrans:(\d+)", line)
        if peer and size:
            again[peer[0]] = again.get(peer[0], 0) + int(size[1])
    return {"tx": sent - HEADER_BYTES * gave, "rx": received - HEADER_BYTES * got, "again": again}


def small_loss(x: Tensor, y: Tensor) -> Tensor:
    """Return a loss with such small gradients that no strategy diverges."""
    return 0.01 * nn.functional.mse_loss(x, y)


def train(job: dict[str, Any], mark: Callable[[Any], Any], **options: Any) -> LocalTrainer:
    """Train a strategy of the battery. Store this host's counters at two steps."""
    # Measuring the nodes' distance gathers their rows. This is not training traffic, and the ledger leaves it out.
    loop.spread = lambda fleet: {"consensus_distance": 0.0}
    SEEN.clear()
    torch.manual_seed(0)
    width = job["width"]
    layers = [nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, width // 2), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(width // 2, 2))
    trainer = LocalTrainer(model, small_problem()[1], loss_fn=small_loss)
    trainer.fit(
        strategy_of(job["strategy"]), num_nodes=job["hosts"], max_steps=LAST + 1, batch_size=8, device="cpu",
        placement=Placement(reduction="tree"), progress=False, callbacks=[Every(FIRST, mark, may_end=False)], **options,
    )  # fmt: skip
    return trainer


def record(event: Event, seen: dict[str, dict[int, float]]) -> None:
    """Add the bytes of an event, with the tag "buffers", too: way -> node -> bytes."""
    for way in WAYS:
        nodes, sizes = seen.setdefault(way, {}), getattr(event, f"{way}_bytes")
        for node, size in zip(event.members, sizes, strict=False):  # an arrival has no sizes
            nodes[node] = nodes.get(node, 0.0) + float(size)


def noted(call: Any) -> Any:
    """Return a method of the loop that calls callbacks, and before that stores this host's counters."""

    def noting(self: Any, every: bool = True) -> None:
        if every and self.step in (FIRST, LAST):
            comm = self.fleet.comm
            comm.settle()
            dist.barrier()
            if not SEEN:
                RECORDED.clear()
                comm.ledger.listeners.append(lambda event: record(event, RECORDED))
            SEEN.append(counters() | {"ledger": {way: dict(nodes) for way, nodes in RECORDED.items()}})
            dist.barrier()
        call(self, every)

    return noting


def counted() -> list[dict[str, Any]]:
    """Return this host's counters, in a host."""
    return SEEN


def row_of(name: str, seen: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Return each host's counted and recorded bytes between the two steps, [tx, rx], and how far they are apart."""
    hosts = range(len(seen))
    again = [{k: n - before["again"].get(k, 0) for k, n in after["again"].items()} for before, after in seen]
    cable = [
        [
            seen[k][1]["tx"] - seen[k][0]["tx"] - sum(again[k].values()),
            seen[k][1]["rx"] - seen[k][0]["rx"] - sum(again[j].get(str(k + 1), 0) for j in hosts),
        ]
        for k in hosts
    ]
    ledger = [[seen[k][1]["ledger"].get(way, {}).get(k, 0.0) for way in WAYS] for k in hosts]
    wanted, n, m = sum(map(sum, ledger)), len(seen), -(-len(seen) // 2)
    mean = wanted / 2 / n
    differences = (c - w for got, want in zip(cable, ledger, strict=True) for c, w in zip(got, want, strict=True))
    off = {"worst": max(differences, key=abs) / mean}
    if name in (*SERVER, *ROOT):
        wanted *= (2 * (m - 1) + n - 1) / m if name in SERVER else 1.0
        off = {}
    off["all"] = sum(map(sum, cable)) / wanted - 1
    return {"cable": cable, "ledger": ledger, "again": again, "expected": wanted, "off": off}


def compare(count: int, names: list[str], width: int, cells: Cells) -> None:
    """Measure the wanted strategies on `count` hosts."""
    wanted = [name for name in names if name not in STRATEGIES or STRATEGIES[name].any_size or count == NODES]
    if all(cells.has(f"{count}/{name}") for name in wanted) or cells.is_over:
        return
    with hosts(count, train) as group:
        group.meet()
        for name in wanted:
            if cells.wants(f"{count}/{name}"):
                job = {"strategy": name, "hosts": count, "width": width}
                with cells.watched(group.pids) as watched:
                    group.train(job)
                row = job | row_of(name, group.call(counted))
                cells.put(f"{count}/{name}", row | watched)
                show(row)


def show(row: dict[str, Any]) -> None:
    cable, ledger, expected, off, worst = figures(row)
    name, worst = row["strategy"], "" if worst is None else f"{worst:+8.2%}"
    print(
        f"{row['hosts']:5d} {name:28s} {cable:13,.0f} {ledger:13,.0f} {expected:13,.0f} {off:+7.2%} {worst}", flush=True
    )


def figures(row: dict[str, Any]) -> list[Any]:
    """Return mean bytes of a host in a direction: on the cable, in the ledger, expected; and the differences."""
    sums = [*(sum(map(sum, row[key])) for key in ("cable", "ledger")), row["expected"]]
    return [*(total / 2 / row["hosts"] for total in sums), row["off"]["all"], row["off"].get("worst")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="2,4,6")
    parser.add_argument("--strategies", default="", help="names in the battery, by commas (default: all)")
    parser.add_argument("--width", type=int, default=1000, help="units of the first layer (default: 1000)")
    parser.add_argument("--limit", type=float, default=0.03)
    parser.add_argument("--json", help="file for finished cells")
    parser.add_argument("--csv", help="file for the table")
    parser.add_argument("--again", choices=AGAIN, help="measure these cells again")
    parser.add_argument("--turn", type=float, help="seconds after which no cell begins")
    given = parser.parse_args()
    known = [*STRATEGIES, *(f"call {name}" for name in CALLS)]
    names = [name for name in given.strategies.split(",") if name] or known
    enter()
    Calling.call = noted(Calling.call)  # type: ignore[method-assign]
    cells = Cells(given.json, given.again, given.limit, given.turn)
    print(f"hosts {'strategy':28s} {'cable, bytes':>13s} {'ledger':>13s} {'expected':>13s} {'off':>7s} {'worst':>8s}")
    for count in map(int, given.hosts.split(",")):
        compare(count, names, given.width, cells)
    rows = [*cells.rows.values()]
    if given.csv:
        write(Path(given.csv), sorted(rows, key=lambda row: (known.index(row["strategy"]), row["hosts"])))
    if cells.left:
        print(f"{cells.left} cells left: repeat the command")
    worst = max((abs(off) for row in rows for off in row["off"].values()), default=0.0)
    if worst > given.limit:
        raise SystemExit(f"wire_bytes: {worst:.1%} off, more than {given.limit:.0%}")


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    """Write a table: the mean bytes of a host in a direction, and the differences."""
    with file.open("w", newline="") as out:
        table = csv.writer(out, lineterminator="\n")
        table.writerow(["strategy", "hosts", "cable_bytes", "ledger_bytes", "expected_bytes", "off", "worst"])
        for row in rows:
            *sizes, off, worst = figures(row)
            ends = [f"{off:.4f}", "" if worst is None else f"{worst:.4f}"]
            table.writerow([row["strategy"], row["hosts"], *map(round, sizes), *ends])


if __name__ == "__main__":
    main()
