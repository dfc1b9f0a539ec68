"""Train the cells of a list on a Ray cluster. Each is a Ray task. At its end, its files are copied to this machine.

If a cell's machine is lost, Ray starts the cell again on another machine. Unfinished runs are not saved. So a resumed
sweep starts its unfinished runs from the beginning.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from exogym.clusters.ray.cluster import check_machines, connect, has_gpus, machines, needs_gpu
from exogym.errors import ArgumentError
from exogym.files import beside, temporary_folder
from exogym.study.cells import Cell
from exogym.study.compare.folder import OUTCOME

Files = dict[str, bytes]  # contents by path in a folder
TRIES = 3  # attempts for a cell whose machine is lost
LOOK_S = 15.0  # longest wait for a cell's end: the sweep's lock needs a heartbeat now and then


class ClusterPool:
    """A Ray cluster as a `exogym.study.cells.Pool`. Ray itself waits until a processor is free.

    Raise ArgumentError if no cluster was found, its machines have other versions, or a cell cannot be sent.
    """

    def __init__(self, cells: Sequence[Cell]) -> None:
        connect(None, None)
        import ray

        check_machines(machines())
        gpus = int(has_gpus() and any(needs_gpu(str(cell.place)) for cell in cells))
        self.ray, self.folders = ray, dict[Any, Path]()
        self.task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=TRIES)(_settled)

    def has_room(self) -> bool:
        return True

    def start(self, cell: Cell) -> Any:
        import ray.cloudpickle

        assert cell.folder is not None
        try:
            packed = ray.cloudpickle.dumps(cell)
        except Exception as error:
            raise ArgumentError(
                f"engine='ray' sends the sweep's problem to other machines, but the problem cannot be pickled: {error}"
            ) from error
        run = self.task.remote(ray.put(packed))
        self.folders[run] = cell.folder
        return run

    def ended(self, running: Sequence[Any]) -> Iterator[tuple[Any, str]]:
        for run in self.ray.wait(list(running), num_returns=1, timeout=LOOK_S)[0]:
            try:
                _write(self.folders[run], self.ray.get(run))
                yield run, ""
            except self.ray.exceptions.RayError as error:
                yield run, " ".join(str(error).split())[-300:]

    def stop(self, running: Sequence[Any]) -> None:
        for run in running:
            self.ray.cancel(run, force=True)


def _settled(packed: bytes) -> Files:
    """Train one cell on the machine that calls this. Return its files."""
    import ray.cloudpickle

    cell = ray.cloudpickle.loads(packed)
    with temporary_folder("exogym-sweep-") as top:
        there = top / "cell"
        replace(cell, folder=there).settle()
        return {str(path.relative_to(there)): path.read_bytes() for path in sorted(there.rglob("*")) if path.is_file()}


def _write(folder: Path, files: Files) -> None:
    """Write a cell's files into its folder. The file that marks it as complete comes last."""
    for name in sorted(files, key=lambda name: os.path.basename(name) == OUTCOME):
        with beside(folder / name) as made:
            made.write_bytes(files[name])
