"""The run folder: what a run was, what it did and where it stands, for any tool to read without ExoGym.

    run.json        what decides the run (its description), versions, device, command line; enough to repeat it
    status.json     state (running, done, stopped, failed), step of total, process, heartbeat; replaced as a whole
    records.jsonl   a line per record: step, epoch, node, losses, metrics, bytes, ...; whole lines, only added to
    events.jsonl    communication, evaluation, checkpoint, node away or back, error, end; likewise
    summary.json    the last record of the averaged model, and bytes by collective; there once the run has ended
    checkpoints/    where the run saves and was given no other place

A run that goes on in its folder adds to the events, and drops the records after the step that it goes on from.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from exogym.base.files import replacing
from exogym.base.processes import described, is_alive
from exogym.errors import ArgumentError
from exogym.logger import JSONLinesLogger, in_json
from exogym.progress import notice
from exogym.record.observers import Fields, Observer

BEAT_S = 1.0  # between two heartbeats at least
LOST_S = 60.0  # without one, a run on another machine counts as lost
ENDS = {"done": "done", "stopped": "stopped", "error": "failed"}  # events that say how a run has ended
FILES = ("run.json", "status.json", "records.jsonl", "events.jsonl", "summary.json")


class RunFolder(Observer):
    """Writes the folder of a run.

    Args:
        folder: made where it is not there; it must hold no run, or the one that goes on.
        total_steps: of the run.
        resume: whether a run may go on here.
        more: what else belongs into run.json.

    Raises:
        ArgumentError: the folder holds a run and `resume` is False, a living process writes to it, or it cannot be
            written.
    """

    reads_records = True

    def __init__(self, folder: str | os.PathLike[str], total_steps: int, resume: bool, more: Fields | None = None):
        self.folder, self.total_steps, self.more = Path(folder), total_steps, dict(more or {})
        self._process = described()
        self._check(resume)
        self._records = JSONLinesLogger(self.folder / "records.jsonl")
        self._events: IO[str] | None = None
        self._state, self._step, self._beat, self._started = "running", 0, 0.0, time.time()

    def _check(self, resume: bool) -> None:
        if not self.folder.exists() or not any((self.folder / name).exists() for name in FILES):
            return
        status = read_status(self.folder)
        if status.get("state") == "running" and status.get("process") != self._process:
            raise ArgumentError(
                f"run_dir={str(self.folder)!r}: process {status['process']['pid']} on {status['process']['host']} is "
                "training in it: give another folder"
            )
        if not resume:
            raise ArgumentError(
                f"run_dir={str(self.folder)!r} holds a run already: give another folder, or go on with it by "
                "resume=True"
            )

    def _check_nothing_is_lost(self) -> None:
        """Of a run that starts at its beginning: refuse to write over one that was whole, and say so of any other."""
        state = read_status(self.folder).get("state")
        if state == "done":
            raise ArgumentError(
                f"run_dir={str(self.folder)!r} holds a run that came to its end, and no checkpoint to go on from: give "
                "another folder"
            )
        if state is not None:
            notice(f"{self.folder} holds a run ({state}) and no checkpoint to go on from: starting at the beginning")

    def start(self, run: Fields) -> None:
        if "resumed_step" not in run:
            self._check_nothing_is_lost()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._events = open(self.folder / "events.jsonl", "a", buffering=1, encoding="utf-8")  # noqa: SIM115
            self._end_torn_line()
            (self.folder / "summary.json").unlink(missing_ok=True)  # of the part before
        except OSError as error:
            raise ArgumentError(
                f"run_dir={str(self.folder)!r} cannot be written ({error}): give another folder"
            ) from error
        self._records.start(run)
        self._step = run.get("resumed_step") or 0
        described = {key: value for key, value in run.items() if key != "resumed_step"}
        about = {"description": described, "command": sys.argv, "versions": versions(), "process": self._process}
        if not ("resumed_step" in run and (self.folder / "run.json").exists()):
            _write(self.folder / "run.json", about | {"started_s": self._started} | self.more)
        self.event({"kind": "start", "step": self._step} | ({"process": self._process}))
        self._say()

    def record(self, row: Fields) -> None:
        self._records.log(row)

    def event(self, event: Fields) -> None:
        assert self._events is not None
        self._state = ENDS.get(event["kind"], self._state)
        self._events.write(json.dumps(in_json({"at_s": round(time.time(), 3), **event})) + "\n")

    def beat(self, step: int, figures: Fields) -> None:
        self._step = step
        if time.monotonic() >= self._beat:
            self._say()

    def finish(self, summary: Fields) -> None:
        self._records.finish(summary)
        if self._events is None:
            return
        self._events.close()
        self._events = None
        if self._state == "running":  # nothing has said how it ended: it could not even begin
            self._state = "failed"
        _write(self.folder / "summary.json", {"state": self._state, **summary})
        self._say()

    def _say(self) -> None:
        """Write where the run stands."""
        self._beat = time.monotonic() + BEAT_S
        status = {
            "state": self._state, "step": self._step, "total_steps": self.total_steps, "process": self._process,
            "started_s": self._started, "heartbeat_s": time.time(),
        }  # fmt: skip
        _write(self.folder / "status.json", status)

    def _end_torn_line(self) -> None:
        """Begin on a new line where a run that was killed left half a one."""
        path = self.folder / "events.jsonl"
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            assert self._events is not None
            self._events.write("\n")


def read_status(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return where the run of a folder stands; {} where it does not say.

    A run that says it is running and whose process is gone is "lost", as is one on another machine that has not been
    heard of for a minute.
    """
    try:
        status = json.loads((Path(folder) / "status.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if status.get("state") == "running":
        alive = is_alive(status["process"])
        if alive is False or (alive is None and time.time() - status["heartbeat_s"] > LOST_S):
            status["state"] = "lost"
    return status


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    from importlib.metadata import version

    found = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    return found | {"exogym": version("exogym"), "system": platform.platform()}


def _write(path: Path, value: Mapping[str, Any]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(in_json(value), indent=1) + "\n")
