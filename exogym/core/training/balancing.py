"""The option `balance`: measure the speeds of nodes or processes, and share the load by speed.

Measuring does not change the run's result.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import warnings
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from exogym.balance import Balance, speeds_of
from exogym.core.base.devices import Device
from exogym.core.communicator import Wire, barrier, say
from exogym.core.compute.worker import Worker
from exogym.core.engine.engines import Engine, EngineOptions, place
from exogym.core.progress import notice
from exogym.core.training.options import FitOptions, Subject
from exogym.core.training.workplace import workplace
from exogym.data.stream import Stream

TRIAL_S, LEAST, MOST = 0.3, 4, 64  # steps are timed for so long, so many at least and at most


def step_seconds(worker: Worker, stream: Stream, node: int) -> float:
    """Return the median seconds of a step of `node`: loading a batch, the forward pass and the backward pass.

    The steps run in this process's first row and change no parameters or buffers. `worker` must be bound to a fleet.
    """
    fleet = worker.fleet
    taken: list[float] = []
    buffers = {name: rows[0].clone() for name, rows in fleet.buffers.items()}
    worker.point(0)
    batches = iter(stream.batches(node, 0, MOST))
    start = time.perf_counter()
    while len(taken) < MOST and (len(taken) < LEAST or time.perf_counter() - start < TRIAL_S):
        before = time.perf_counter()
        batch = next(batches)
        worker.reseed(node, len(taken))
        worker.gradient(batch, 0)
        Device(worker.device).synchronize()
        taken.append(time.perf_counter() - before)
        worker.clear_grads()
    worker.check(0)
    worker.scaling.overflowed = False
    for name, value in buffers.items():
        fleet.buffers[name][0].copy_(value)
    return statistics.median(taken[1:])


def node_speeds(balance: Balance, wire: Wire, worker: Worker, stream: Stream) -> list[float]:
    """Return the N nodes' given or measured speeds, equal in all processes.

    Because a process takes its nodes' steps one after the other, each of its k nodes has 1/k of the process's speed.
    """
    if balance.speeds is not None:
        return balance.speeds
    nodes = range(stream.num_nodes)
    if not wire.is_shared:
        notice(
            f"balance={balance.kind!r} changes nothing: one process holds all nodes, so all nodes are equally fast. "
            "To try it here, pass the nodes' speeds: Balance(kind, speeds=[...])"
        )
        return [1.0 for _ in nodes]
    barrier(wire)
    mine = step_seconds(worker, stream, wire.ranks[0]) * len(wire.ranks)
    seconds = wire.rows(torch.full((len(wire.ranks), 1), mine, dtype=torch.float64), nodes)[:, 0].tolist()
    return speeds_of(seconds)


def share_out(
    weighing: Balance, chosen: dict[str, Any], worker: Worker, stream: Stream, is_fresh: bool
) -> tuple[np.ndarray | None, list[Fraction]]:
    """Set the nodes' weights, and their batch sizes or numbers of steps (the kind of `weighing` decides), by speed.

    A new run (`is_fresh`) stores its given or measured speeds in `chosen`. A resumed run reads the speeds from
    `chosen`.

    Returns:
        Two values. The first is (N,) each node's batch size relative to the option `batch_size`, or None if the kind of
        `weighing` is not "batch". The second is each node's share of the local steps, or [] if the kind is not "steps".
    """
    fleet = worker.fleet
    if is_fresh:
        chosen["speeds"] = node_speeds(weighing, fleet.comm.wire, worker, stream)
    balance = Balance(weighing.kind, chosen["speeds"])
    shares = balance.shares()
    sizes = balance.counts(stream.num_nodes * stream.batch_size)
    what, weights = "batches of " + ", ".join(map(str, sizes)), None
    if balance.kind == "steps":
        what = "each node takes that share of the local steps"
        weights = torch.tensor([float(share) for share in shares], dtype=torch.float64)
    elif len(set(sizes)) > 1:
        stream.share_out(sizes)
        weights = torch.from_numpy(np.minimum(stream.batch_sizes, stream.examples).astype(np.float64))
    spelt = ", ".join(f"{float(share):.3g}" for share in shares)
    say(fleet.comm.wire, f"balance={balance.kind!r}: the nodes' speeds are {spelt}; {what}")
    if min(shares) < 1:  # else the bits of a run without
        fleet.comm.weights = weights
    work = stream.batch_sizes / stream.batch_size if balance.kind == "batch" else None
    return work, shares if balance.kind == "steps" else []


def deal_by_speed(
    balance: Balance, engine: Engine, even: EngineOptions, options: FitOptions, subject: Subject
) -> tuple[EngineOptions, FitOptions]:
    """Return `even` with a new placement that deals the nodes to processes by speed, and `options` with the speeds."""
    assert even.placement is not None
    processes, nodes = len(even.placement), sum(map(len, even.placement))
    balance.check_speeds(processes, "processes")
    if balance.speeds is None and nodes > processes:
        each = replace(even, placement=[[k] for k in range(processes)], native=False)
        device = even.device if engine.is_here else None
        seconds = engine.run(each, lambda wire: _process_seconds(wire, subject, options, device))
        balance = Balance("nodes", speeds_of(seconds))
    if balance.speeds is None:
        notice(f"balance='nodes' changes nothing: each of {processes} processes has one node")
        return even, options
    placement = place(nodes, processes, balance.speeds)
    if int(os.environ.get("RANK", 0)) == 0:
        speeds, held = (", ".join(f"{x:g}" for x in row) for row in (balance.speeds, map(len, placement)))
        notice(f"balance='nodes': the processes' speeds are {speeds}; they hold {held} nodes")
    return replace(even, placement=placement), replace(options, balance=balance)


def _process_seconds(wire: Wire, subject: Subject, options: FitOptions, device: torch.device | None) -> list[float]:
    """Take a few training steps in all processes at the same time. Return each process's seconds per step.

    `device=None`: the process is on another machine, and chooses a device there.
    """
    device = device or Device.named(options.device).place
    with contextlib.ExitStack() as undo:
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the run says it again
        (node,) = wire.ranks
        stream, worker, _ = workplace(subject, options, device, Wire([node]), undo)
        barrier(wire)
        found = torch.tensor([[step_seconds(worker, stream, node)]], dtype=torch.float64)
        return wire.rows(found, range(len(wire.placement)))[:, 0].tolist()
