"""Hosts on lines with rates and latencies: taps, and a process that hands Ethernet frames over as the lines would.

    group = Switched(4, train, urgent=True)
    group.connect()
    group.set(Network("50Mbps", "10ms"))

Each host has a tap device, as in `distant.py`. A frame from host i to host j waits for each line on its way (i's line
up, the line between their islands, j's line down), and arrives after the pair's latency. A network's rates are payload:
the lines are faster by the share of headers (`exogym.network.overheads`). A network's mean jitter is added to each
latency. No frame is dropped. Python hands over about 40,000 frames per second, 0.5 Gbit/s for all lines together.
"""

from __future__ import annotations

import contextlib
import heapq
import multiprocessing
import os
import select
import signal
import time
from typing import Any

from distant import FRAME_BYTES, tap_of
from namespaces import CONTROL, PR_SET_PDEATHSIG, SUBNET, Hosts, linux, shell

from exogym.network import Network
from exogym.network.overheads import PAYLOAD_SHARE

MAC = "02:00:00:00:00:{:02x}"  # of host number - 1
Ways = list[list[tuple[list[int], float]]]  # [i][j]: the lines that a frame from i to j takes, and its latency


def ways_of(network: Network, hosts: int) -> tuple[list[float], Ways]:
    """Return the bits per second of all lines, and each pair's way over these lines."""
    links, groups = network.links, network.group_of
    up, down = ([float(links.line(i)[k]) for i in range(hosts)] for k in (0, 1))
    rates, ways = up + down, [[([i, hosts + j], 0.0) for j in range(hosts)] for i in range(hosts)]
    between = {}
    for i in range(hosts):
        for j in range(hosts):
            if i == j:
                continue
            rate, latency_s = map(float, links.link(i, j))
            way = [i, hosts + j]
            if rate < min(up[i], down[j]):  # a line between the islands, which all their nodes share
                assert groups is not None, network
                key = groups[i], groups[j]
                if key not in between:
                    between[key] = len(rates)
                    rates.append(rate)
                way.insert(1, between[key])
            ways[i][j] = way, latency_s + network.jitter_s
    return [rate / PAYLOAD_SHARE for rate in rates], ways


def hand_over(pids: list[int], orders: Any) -> None:
    """Be the lines. An order is what `ways_of` returns; each order is answered."""
    linux("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(PermissionError):  # else what other programs do is in the times
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))
    taps = [tap_of(pid) for pid in pids]
    hosts = len(taps)
    at = {tap: host for host, tap in enumerate(taps)}
    orders.send(True)
    rates, ways = orders.recv()
    free_s, count = [0.0] * len(rates), 0
    under_way: list[tuple[float, int, int, int, int, bytes]] = []
    while True:
        wait_s = max(0.0, under_way[0][0] - time.perf_counter()) if under_way else None
        for tap in select.select([*taps, orders], [], [], wait_s)[0]:
            if tap is orders:
                rates, ways = orders.recv()
                free_s = [0.0] * len(rates)
                orders.send(True)
                continue
            frame, i = os.read(tap, FRAME_BYTES), at[tap]
            for j in [frame[5] - 1] if frame[0] == 2 else [j for j in range(hosts) if j != i]:
                count += 1
                heapq.heappush(under_way, (time.perf_counter(), count, i, j, 0, frame))
        while under_way and under_way[0][0] <= time.perf_counter():
            due_s, number, i, j, hop, frame = heapq.heappop(under_way)
            way, latency_s = ways[i][j]
            if hop < len(way):  # a line carries frames in the order in which they reach it
                line = way[hop]
                free_s[line] = max(due_s, free_s[line]) + 8 * len(frame) / rates[line]
                late_s = latency_s if hop + 1 == len(way) else 0.0
                heapq.heappush(under_way, (free_s[line] + late_s, number, i, j, hop + 1, frame))
            else:
                with contextlib.suppress(OSError):  # the other end is not up yet
                    os.write(taps[j], frame)


class Switched(Hosts):
    """Hosts, and the lines between them."""

    carrier: Any = None

    def connect(self) -> None:
        fork = multiprocessing.get_context("fork")
        self.lines, there = fork.Pipe()
        self.carrier = fork.Process(target=hand_over, args=(super().pids, there), daemon=True)
        self.carrier.start()
        there.close()
        self.lines.recv()
        self.lines.send(ways_of(Network("10Gbps"), len(self.processes)))
        for rank, process in enumerate(self.processes):
            inside = self._inside(process)
            shell(*inside, "ip", "link", "set", "lo", "up")
            shell(*inside, "ip", "link", "set", "eth0", "address", MAC.format(rank + 1))
            shell(*inside, "ip", "addr", "add", f"{SUBNET}.{rank + 1}/24", "dev", "eth0")
            shell(*inside, "ip", "link", "set", "eth0", "up")
            shell(*inside, "ip", "route", "change", f"{SUBNET}.0/24", "dev", "eth0", "congctl", CONTROL)

    @property
    def pids(self) -> list[int]:
        return [*super().pids, *([] if self.carrier is None else [self.carrier.pid])]

    def set(self, network: Network) -> None:
        """Give the lines the rates and latencies of a network."""
        self.lines.send(ways_of(network, len(self.processes)))
        self.lines.recv()

    def close(self) -> None:
        super().close()
        if self.carrier is not None:
            self.carrier.kill()
            self.carrier.join()
