"""Train a sweep's runs on a Ray cluster. Each run is a Ray task. At its end, its files are copied to this machine.

If a run's machine is lost, Ray starts the run again on another machine. Unfinished runs are not saved. So a resumed
sweep starts its unfinished runs from the beginning.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

from exogym.clusters.ray.cluster import check_machines, connect, machines
from exogym.core.base.locks import BEAT_S
from exogym.errors import ArgumentError
from exogym.files import beside, temporary_folder
from exogym.study.compare.folder import OUTCOME
from exogym.study.sweep.workers import Job, check_none_lost

Files = dict[str, bytes]  # contents by path in a folder
TRIES = 3  # attempts for a run whose machine is lost


def train_all(jobs: Sequence[Job], processes: int | None, ended: Callable[[Job], None]) -> None:
    """Train all runs, at most `processes` at the same time.

    If `processes` is None, as many runs train at the same time as the cluster has room for.

    Raises:
        ArgumentError: no cluster was found, its machines have other versions, or the sweep's problem cannot be sent.
        WorkerError: a run ended without a result; raised after all other runs have ended.
        KeyboardInterrupt: the user pressed Ctrl-C; raised after the active runs were ended.
    """
    connect(None, None)
    import ray

    check_machines(machines())
    task = ray.remote(num_cpus=1, num_gpus=_gpus(jobs), max_retries=TRIES)(_settled)
    waiting, running, lost = list(jobs), dict[Any, Job](), list[str]()
    try:
        while waiting or running:
            while waiting and (processes is None or len(running) < processes):
                job = waiting.pop(0)
                running[task.remote(ray.put(_packed(job)), job[1], job[2])] = job
            found, _ = ray.wait(list(running), num_returns=1, timeout=BEAT_S)
            jobs[0][0].beat()
            if not found:
                continue
            (done,) = found
            job = running.pop(done)
            try:
                _write(job, ray.get(done))
            except ray.exceptions.RayError as error:
                lost.append(f"{job[1]}, seed {job[2]} ({' '.join(str(error).split())[-300:]})")
            else:
                ended(job)
    finally:
        for call in running:
            ray.cancel(call, force=True)
    check_none_lost(jobs, lost)


def _gpus(jobs: Sequence[Job]) -> int:
    return int(any(session.place.type == "cuda" for session, _, _ in jobs))


def _packed(job: Job) -> bytes:
    import ray.cloudpickle

    session = copy.copy(job[0])
    session.watch, session.outcomes = None, {}
    try:
        return ray.cloudpickle.dumps(session)
    except Exception as error:
        raise ArgumentError(
            f"engine='ray' sends the sweep's problem to other machines, but the problem cannot be pickled: {error}"
        ) from error


def _settled(packed: bytes, label: str, seed: int) -> Files:
    """Train one run on the machine that calls this. Return its files."""
    import ray.cloudpickle

    session = ray.cloudpickle.loads(packed)
    with temporary_folder("exogym-sweep-") as top:
        session.folder.path = top
        session.settle(label, seed)
        return {str(path.relative_to(top)): path.read_bytes() for path in sorted(top.rglob("*")) if path.is_file()}


def _write(job: Job, files: Files) -> None:
    """Write a run's files into the sweep's folder. The file that marks the run as complete comes last."""
    session = job[0]
    assert session.folder is not None
    for name in sorted(files, key=lambda name: os.path.basename(name) == OUTCOME):
        with beside(session.folder.path / name) as made:
            made.write_bytes(files[name])
