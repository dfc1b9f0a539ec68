"""The runs of a sweep on a cluster of Ray's: each is a task, whose folder comes back when it has ended.

A run whose machine is lost is begun again by Ray, on another one. Nothing of a run under way is kept: a sweep that was
interrupted goes on with the runs that have not ended.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

from exogym.core.base.files import beside, temporary_folder
from exogym.core.base.locks import BEAT_S
from exogym.core.engine.ray.cluster import check_machines, connect, machines
from exogym.errors import ArgumentError
from exogym.study.compare.folder import OUTCOME
from exogym.study.sweep.workers import Job, check_none_lost

Files = dict[str, bytes]  # by their path in a folder
TRIES = 3  # of a run whose machine is lost


def train_all_on_ray(jobs: Sequence[Job], processes: int | None, ended: Callable[[Job], None]) -> None:
    """Take all runs to their end, `processes` at once at most (None: as many as there is room for).

    Raises:
        ArgumentError: there is no such cluster, its versions are others, or a problem cannot travel there.
        WorkerError: a run ended without a result; it is raised when all others have come to their end.
        KeyboardInterrupt: after the runs under way were ended.
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
            f"with engine='ray' the problem of a sweep travels to other machines, and it cannot be pickled: {error}"
        ) from error


def _settled(packed: bytes, label: str, seed: int) -> Files:
    """Train one run, on the machine where this is called; return its files."""
    import ray.cloudpickle

    session = ray.cloudpickle.loads(packed)
    with temporary_folder("exogym-sweep-") as top:
        session.folder.path = top
        session.settle(label, seed)
        return {str(path.relative_to(top)): path.read_bytes() for path in sorted(top.rglob("*")) if path.is_file()}


def _write(job: Job, files: Files) -> None:
    """Write the files of a run into the folder of the sweep; that which says that it has ended comes last."""
    session = job[0]
    assert session.folder is not None
    for name in sorted(files, key=lambda name: os.path.basename(name) == OUTCOME):
        with beside(session.folder.path / name) as made:
            made.write_bytes(files[name])
