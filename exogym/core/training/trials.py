"""The option `processes="auto"`: choose the number of processes by a short trial."""

from __future__ import annotations

import functools
import io
import os
import sys
import time
import warnings
from dataclasses import replace

import torch

from exogym.core.communicator import Wire
from exogym.core.engine.protocol import EngineOptions
from exogym.core.progress import notice
from exogym.core.training.assembly import assemble
from exogym.core.training.options import FitOptions
from exogym.core.training.subject import Subject

# What is reckoned with; measured, see benchmarks/RESULTS.md.
START_S, MEETING_S, SHARED_BYTES_PER_S = 0.1, 3e-4, 1.5e9
WORTH_IT = 0.8  # of the time of one process, or less
TRIAL_S = 0.3


def chosen_processes(subject: Subject, options: FitOptions, engine_options: EngineOptions, rows: int) -> int:
    """Return the number of processes with which the run probably ends soonest, and print the choice with its reason.

    A short trial trains `rows` rows in one process and measures the time."""
    from exogym.core.engine.forks import can_fork
    from exogym.core.engine.here import Forked

    device = engine_options.device
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = min(cores, options.num_nodes)
    if most == 1 or device.type != "cpu" or not can_fork():
        notice("processes='auto' chose 1: more need two cores, two nodes, the CPU, and a system that forks safely")
        return 1
    trial = functools.partial(_trial, subject=subject, options=options, device=device, rows=rows)
    step_s, meetings, moved_bytes, steps = Forked().run(
        replace(engine_options, placement=[[0], [1]], native=False), trial
    )
    nodes = options.num_nodes if rows == options.num_nodes else rows // 2
    alone_s = steps * nodes * step_s
    shared_s = START_S + steps * -(-nodes // most) * step_s
    shared_s += meetings * MEETING_S + moved_bytes / SHARED_BYTES_PER_S
    chosen = most if shared_s < WORTH_IT * alone_s else 1
    notice(
        f"processes='auto' chose {chosen} (a step of a node takes {1e3 * step_s:.2f} ms: the run takes about "
        f"{alone_s:.1f} s in one process, or {shared_s:.1f} s in {most})"
    )
    return chosen


def _trial(wire: Wire, subject: Subject, options: FitOptions, device: torch.device, rows: int) -> list[float]:
    """Train a few steps in the other process.

    Return seconds per step of a node, and the run's synchronizations, their bytes between processes, and steps.

    The trial prints nothing, because the run itself prints the same messages later.
    """
    found = torch.zeros(1, 4, dtype=torch.float64)
    if wire.is_hidden:
        warnings.simplefilter("ignore")
        sys.stdout = sys.stderr = io.StringIO()
        quiet = replace(
            options, processes=1, logger=None, progress=False, callbacks=(), save_dir=None, checkpoint_interval=None,
            resume=False, run_dir=None, placement=replace(options.placement, max_restarts=0, client_state_memory=None),
        )  # fmt: skip
        loop = assemble(subject, quiet, device, None, Wire(range(rows)))
        total, first_event = loop.agenda.total_steps, min(loop.driver.next_event(0), loop.agenda.total_steps)
        seconds, start = [], time.perf_counter()
        for step in range(min(total, 20)):
            before = time.perf_counter()
            loop.driver.advance(step, step + 1)
            seconds.append(time.perf_counter() - before)
            if time.perf_counter() - start > TRIAL_S:
                break
        meetings = total / first_event
        acting = len(loop.driver.seated)
        moved = meetings * 2.0 * acting * loop.fleet.parameter_bytes
        found[0] = torch.tensor([min(seconds) / acting, meetings, moved, total])
    return wire.rows(found, [1])[0].tolist()
