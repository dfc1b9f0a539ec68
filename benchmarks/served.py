"""A server's line beside the clock and `advise`: nodes that push to a server and pull from it over a limited cable.

    python benchmarks/served.py --nodes 2,4,8 --rates 50mbit,100mbit,200mbit --csv served.csv

Hosts are network namespaces with a cable each to a bridge (`namespaces.py`; Linux, root, iproute2). `tc tbf` limits the
server's cable in both directions; the nodes' cables have no limit. ExoGym's hosts have no server, so plain TCP sockets
carry the messages: a node sleeps for H steps, sends S bytes and receives S bytes.

- **async**: the server answers each push at once, as in `async_diloco`. Nodes start one after the other, a part of a
  round apart, since equal nodes that start together would stay together.
- **sync**: the server answers when all nodes have pushed, as in `fedavg` with a server.

A cell is the mean time of a round after the first rounds. The clock's time is the time of a simulation with the
strategy, a model of S bytes, and `Network(..., tcp=True, server=RATE)`; formula is the row of `advise`. Inputs are the
rate, the steps and S. The time of a small message is measured before.
"""

from __future__ import annotations

import argparse
import csv
import os
import socket
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from namespaces import SUBNET, Hosts, bits_per_s, enter, hosts, load
from torch import nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.network import Network
from exogym.strategy import FedAvgStrategy
from exogym.strategy.averaging import Averaging
from exogym.strategy.registry import parse_strategy
from exogym.study.advise import advise

SIDE, H = 500, 10
PARAMETERS = SIDE * SIDE
BYTES = 4 * PARAMETERS  # S
STEP_S = 0.02
WARM, ROUNDS = 4, 12  # rounds of a node that don't count, and that do
PORT = 29400
COLUMNS = ("mode", "nodes", "rate", "measured_s", "clock_s", "formula_s", "clock_error", "formula_error")


def receive(line: socket.socket, size: int) -> None:
    """Read `size` bytes.

    Raises:
        EOFError: the other side has closed the connection.
    """
    buffer = memoryview(bytearray(1 << 20))
    while size:
        got = line.recv_into(buffer, min(size, len(buffer)))
        if not got:
            raise EOFError
        size -= got


def rounds(mode: str, nodes: int, port: int) -> list[float]:
    """Be the server (rank 0) or a node. Return the seconds of this node's rounds; [] from others."""
    rank = dist.get_rank()
    if rank == 0:
        with socket.create_server((f"{SUBNET}.1", port)) as door:
            dist.barrier()
            lines = [door.accept()[0] for _ in range(nodes)]
            serve(lines, mode)
        return []
    dist.barrier()
    if rank > nodes:
        return []
    seconds, payload = [], bytes(BYTES)
    with socket.create_connection((f"{SUBNET}.1", port)) as line:
        if mode == "async":
            time.sleep(H * STEP_S * (rank - 1) / nodes)
        for _ in range(WARM + ROUNDS):
            start = time.perf_counter()
            time.sleep(H * STEP_S)
            line.sendall(payload)
            receive(line, BYTES)
            seconds.append(time.perf_counter() - start)
    return seconds[WARM:]


def serve(lines: list[socket.socket], mode: str) -> None:
    """Answer pushes until all nodes have left."""
    all_here = threading.Barrier(len(lines))
    payload = bytes(BYTES)

    def answer(line: socket.socket) -> None:
        try:
            while True:
                receive(line, BYTES)
                if mode == "sync":
                    all_here.wait()
                line.sendall(payload)
        except (EOFError, ConnectionError, threading.BrokenBarrierError):
            all_here.abort()

    threads = [threading.Thread(target=answer, args=(line,)) for line in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def network_of(rate: str, latency_s: float) -> Network:
    return Network("100Gbps", latency_s, tcp=True, server=bits_per_s(rate))


def predicted(mode: str, nodes: int, network: Network) -> tuple[float, float]:
    """Return the seconds of a round by the clock of a simulation, and by formula."""
    strategy = parse_strategy(f"async_diloco:H={H}")
    if mode == "sync":
        strategy = FedAvgStrategy(H=H, averaging=Averaging(transport="server"))
    row = advise(
        parameters=PARAMETERS, num_nodes=nodes, network=network, step_seconds=STEP_S, strategies=[strategy],
        algorithm="recorded",
    ).rows[0]  # fmt: skip
    model = nn.Linear(SIDE, SIDE, bias=False)
    data = TensorDataset(torch.randn(64, SIDE), torch.randint(0, SIDE, (64,)))
    trainer = LocalTrainer(model, data, loss_fn=nn.functional.cross_entropy)
    total = (WARM + ROUNDS) * H
    given: dict[str, Any] = {"num_nodes": nodes, "max_steps": total, "batch_size": 1, "device": "cpu"}
    trainer.fit(strategy, **given, network=network, step_seconds=STEP_S, final_sync=False)
    return trainer.clock.last_s / (WARM + ROUNDS), H * row.seconds_per_step


def cell(group: Hosts, mode: str, nodes: int, rate: str, latency_s: float, port: int) -> dict[str, Any]:
    group.limit(rate, hosts=[0])
    measured_s = statistics.mean(s for seconds in group.call(rounds, mode, nodes, port) for s in seconds)
    group.limit(None, hosts=[0])
    clock_s, formula_s = predicted(mode, nodes, network_of(rate, latency_s))
    errors = clock_s / measured_s - 1, formula_s / measured_s - 1
    return dict(zip(COLUMNS, (mode, nodes, rate, measured_s, clock_s, formula_s, *errors), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="2,4,8", help="numbers of nodes")
    parser.add_argument("--rates", default="50mbit,100mbit,200mbit", help="rates of the server's cable, as tc has them")
    parser.add_argument("--csv", type=Path, help="file for the rows")
    given = parser.parse_args()
    counts = [int(n) for n in given.nodes.split(",")]
    enter()
    rows = []
    with hosts(max(counts) + 1, lambda *_: None, urgent=True) as group:  # type: ignore[arg-type]
        group.meet()
        latency_s = group.latency_s()
        print(f"{BYTES / 1e6:g} MB, {H} steps of {STEP_S * 1e3:g} ms, latency {latency_s * 1e6:.0f} us; {load()}\n")
        print("| mode | nodes | server's line | measured | clock | formula |\n|" + " --- |" * 6)
        for mode in ("async", "sync"):
            for nodes in counts:
                for rate in given.rates.split(","):
                    row = cell(group, mode, nodes, rate, latency_s, PORT + len(rows))
                    rows.append(row)
                    off = [f"{row[name]:+.1%}".replace("%", " %") for name in ("clock_error", "formula_error")]
                    print(f"| {mode} | {nodes} | {rate} | {row['measured_s']:.3f} s | {' | '.join(off)} |", flush=True)
    if given.csv:
        with given.csv.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            table.writeheader()
            table.writerows([{k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
