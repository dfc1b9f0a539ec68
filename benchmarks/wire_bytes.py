"""Bytes on the network interface against the bytes that the communicator records, one node per process.

    python benchmarks/wire_bytes.py --nodes 4
    python benchmarks/wire_bytes.py --nodes 2 --strategies diloco,demo

The run happens under torchrun in a network namespace of its own (as root; else on the machine's loopback, where other
traffic counts too). What the interface counted between two steps, less 66 bytes a packet (Ethernet, IP, TCP with
timestamps), stands beside the tx bytes of all nodes in the ledger, buffers included. The script fails where they
differ by more than `--limit`.

FedAvg with client sampling is counted in the server's form, S up and S down for a client. Without a server process,
all processes keep the server's copy: the m clients all-reduce among themselves, 2 (m-1) S in all, and one of them
sends the result to the other N - 1. That is what is expected there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
HEADER_BYTES = 66
FIRST, LAST = 24, 48  # the steps between which bytes are counted: whole rounds of every strategy here
NOT_COUNTED = ("stacked",)  # the same traffic as DDP, one tensor at a time


def interface_counters() -> tuple[int, int]:
    """Return the bytes and packets sent over the loopback interface."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (fields,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("lo:"))
    return int(fields[8]), int(fields[9])


def worker(names: list[str], result: str) -> None:
    """Train each strategy in this process's world; rank 0 writes what was counted."""
    import torch
    from torch import nn

    sys.path.insert(0, str(TESTS))
    from strategies import STRATEGIES

    from exogym import LocalTrainer
    from exogym.callbacks import Every
    from exogym.testing import small_problem

    nodes = int(os.environ["WORLD_SIZE"])
    rows = []
    for name in names or [name for name, entry in STRATEGIES.items() if name not in NOT_COUNTED]:
        torch.manual_seed(0)
        layers = [nn.Linear(6, 600), nn.BatchNorm1d(600), nn.Tanh(), nn.Linear(600, 300), nn.Tanh(), nn.Linear(300, 2)]
        model = nn.Sequential(*layers)
        data = small_problem()[1]
        seen: list[tuple[int, int, float]] = []

        def mark(loop: Any, seen: list[tuple[int, int, float]] = seen) -> None:
            ledger = loop.fleet.comm.ledger
            seen.append((*interface_counters(), ledger.tx_bytes.sum() + ledger.buffer_bytes.sum()))

        trainer = LocalTrainer(model, data, loss_fn=nn.functional.mse_loss)
        strategy = STRATEGIES[name].make()
        trainer.fit(
            strategy, num_nodes=nodes, max_steps=LAST + 1, batch_size=8, device="cpu", callbacks=[Every(FIRST, mark)]
        )
        if os.environ["RANK"] == "0":
            (wire, packets, recorded), after = seen[0], seen[1]
            expected = after[2] - recorded
            if name == "fedavg sampling":
                clients = -(-nodes // 2)
                expected *= (2 * (clients - 1) + nodes - 1) / clients
            rows.append([name, after[0] - wire, after[1] - packets, expected])
    if os.environ["RANK"] == "0":
        Path(result).write_text(json.dumps(rows))


def measure(nodes: int, names: list[str]) -> list[list[Any]]:
    """Return [name, bytes, packets, expected bytes] of each strategy."""
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "rows.json")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nodes)),
            *("--master-addr", "127.0.0.1", "--master-port", "29555", __file__, "--worker", result),
            *("--strategies", ",".join(names)),
        ]
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
    parser.add_argument("--strategies", default="", help="names of the battery, by commas; all by default")
    parser.add_argument("--limit", type=float, default=0.03)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = [name for name in given.strategies.split(",") if name]
    if given.worker:
        worker(names, given.worker)
        return
    worst = 0.0
    print(f"{'strategy':26s} {'on the wire':>13s} {'packets':>8s} {'less headers':>13s} {'recorded':>13s}  off")
    for name, wire, packets, expected in measure(given.nodes, names):
        net = wire - HEADER_BYTES * packets
        off = net / expected - 1
        worst = max(worst, abs(off))
        print(f"{name:26s} {wire:13,d} {packets:8,d} {net:13,d} {expected:13,.0f} {off:+.1%}")
    if worst > given.limit:
        raise SystemExit(f"wire_bytes: {worst:.1%} off, more than {given.limit:.0%}")


if __name__ == "__main__":
    main()
