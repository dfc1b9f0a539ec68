"""balance="nodes": processes that are fast hold more of the nodes."""

from __future__ import annotations

import contextlib
import os
import warnings
from dataclasses import replace

import torch

from exogym.balance import Balance, speeds_of
from exogym.core.base.devices import resolve_device
from exogym.core.communicator import Wire, barrier
from exogym.core.engine import Engine, EngineOptions
from exogym.core.engine.protocol import place
from exogym.core.progress import notice
from exogym.core.training.options import FitOptions
from exogym.core.training.speeds import step_seconds
from exogym.core.training.subject import Subject
from exogym.core.training.workplace import workplace


def deal_by_speed(
    balance: Balance, engine: Engine, even: EngineOptions, options: FitOptions, subject: Subject
) -> tuple[EngineOptions, FitOptions]:
    """Return what is asked, `even` before, with the ids of each process, and the options with the speeds."""
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
    """Take a few training steps in each process, at the same time; return what one takes in each, everywhere.

    `device` None: of another machine, where it is looked for.
    """
    device = device or resolve_device(options.device)
    with contextlib.ExitStack() as undo:
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the run says it again
        (node,) = wire.ranks
        stream, worker, _ = workplace(subject, options, device, Wire([node]), undo)
        barrier(wire)
        found = torch.tensor([[step_seconds(worker, stream, node)]], dtype=torch.float64)
        return wire.rows(found, range(len(wire.placement)))[:, 0].tolist()
