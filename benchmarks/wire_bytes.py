"""Compare bytes on the network interface with bytes that the communicator records, with one node per process.

    python benchmarks/wire_bytes.py --nodes 4
    python benchmarks/wire_bytes.py --nodes 2 --strategies diloco,demo

The run happens under torchrun in a network namespace of its own (as root; else on the machine's loopback, where other
traffic counts too). What the interface counted between two steps, less 66 bytes a packet (Ethernet, IP, TCP with
timestamps) and less what TCP sent again, stands beside the tx bytes of all nodes in the ledger, buffers included. On a
busy machine a receiver is late and TCP sends what was not lost: tens of kilobytes at once on the loopback. The kernel
counts those per connection (`bytes_retrans` of ss). The script fails where they differ by more than `--limit`.

FedAvg with client sampling, and what is built on it, is counted in the server's form, S up and S down for a client.
Without a server process, all processes keep the server's copy: the m clients all-reduce among themselves, 2 (m-1) S in
all, and one of them sends the result to the other N - 1. That is what is expected there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
HEADER_BYTES = 66
FIRST, LAST = 12, 24  # the steps between which bytes are counted: a few rounds of every strategy here


def interface_counters() -> tuple[int, int, int]:
    """Return the bytes and packets sent over loopback, and the bytes that open connections sent again."""
    told = subprocess.run(["ss", "-tinHO"], check=True, capture_output=True, text=True).stdout
    lines = Path("/proc/net/dev").read_text().splitlines()
    (fields,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("lo:"))
    return int(fields[8]), int(fields[9]), sum(map(int, re.findall(r"bytes_retrans:(\d+)", told)))


def worker(names: list[str], result: str) -> None:
    """Train each strategy in this process's world. Rank 0 writes the counts."""
    import torch
    from torch import nn

    sys.path.insert(0, str(TESTS))
    from strategies import NODES, STRATEGIES

    from exogym import LocalTrainer
    from exogym.callbacks import Every
    from exogym.core.training import loop
    from exogym.testing import small_problem

    # Measuring the nodes' distance gathers their rows. This is not training traffic, and the ledger leaves it out.
    loop.spread = lambda fleet: {"consensus_distance": 0.0}

    nodes = int(os.environ["WORLD_SIZE"])
    rows = []
    for name in names or [name for name, entry in STRATEGIES.items() if not entry.is_stacked]:
        torch.manual_seed(0)
        layers = [nn.Linear(6, 600), nn.BatchNorm1d(600), nn.Tanh(), nn.Linear(600, 300), nn.Tanh(), nn.Linear(300, 2)]
        model = nn.Sequential(*layers)
        data = small_problem()[1]
        seen: list[tuple[int, int, int, float]] = []

        def mark(loop: Any, seen: list[tuple[int, int, int, float]] = seen) -> None:
            ledger = loop.fleet.comm.ledger
            seen.append((*interface_counters(), ledger.tx_bytes.sum() + ledger.buffer_bytes.sum()))

        trainer = LocalTrainer(model, data, loss_fn=nn.functional.mse_loss)
        entry = STRATEGIES[name]
        if not entry.any_size and nodes != NODES:
            continue
        trainer.fit(
            entry.make(),
            num_nodes=nodes,
            max_steps=LAST + 1,
            batch_size=8,
            device="cpu",
            callbacks=[Every(FIRST, mark, may_end=False)],
        )
        if os.environ["RANK"] == "0":
            wire, packets, again, expected = (after - before for before, after in zip(seen[0], seen[1], strict=True))
            if name.endswith("sampling"):
                clients = -(-nodes // 2)
                expected *= (2 * (clients - 1) + nodes - 1) / clients
            rows.append([name, wire, packets, again, expected])
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(rows))


def measure(nodes: int, names: list[str]) -> list[list[Any]]:
    """Return [name, bytes, packets, bytes sent again, expected bytes] for each strategy."""
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "rows.json")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nodes)),
            *("--master-addr", "127.0.0.1", "--master-port", "29555", __file__, "--worker", result),
            *("--strategies", ",".join(names)),
        ]
        if not shutil.which("ss"):
            raise SystemExit("wire_bytes: needs ss: apt-get install iproute2")
        if os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip"):
            command = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
        elif os.geteuid() == 0:
            raise SystemExit("wire_bytes: needs unshare and ip: apt-get install util-linux iproute2")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run(command, check=True, env=environment)
        return list(json.loads(Path(result).read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--strategies", default="", help="names in the battery, by commas (default: all)")
    parser.add_argument("--limit", type=float, default=0.03)
    parser.add_argument("--json", help="file for the rows: name, bytes expected, share by which the wire is off")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = [name for name in given.strategies.split(",") if name]
    if given.worker:
        worker(names, given.worker)
        return
    rows = []
    print(
        f"{'strategy':26s} {'on the wire':>13s} {'packets':>8s} {'sent again':>10s} {'net':>13s} {'recorded':>13s}  off"
    )
    for name, wire, packets, again, expected in measure(given.nodes, names):
        net = wire - HEADER_BYTES * packets - again
        rows.append([name, expected, net / expected - 1])
        print(f"{name:26s} {wire:13,d} {packets:8,d} {again:10,d} {net:13,d} {expected:13,.0f} {rows[-1][2]:+.1%}")
    if given.json:
        Path(given.json).write_text(json.dumps(rows))
    worst = max(abs(off) for _, _, off in rows)
    if worst > given.limit:
        raise SystemExit(f"wire_bytes: {worst:.1%} off, more than {given.limit:.0%}")


if __name__ == "__main__":
    main()
