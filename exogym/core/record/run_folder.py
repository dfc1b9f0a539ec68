"""The run folder: a run's options, records, events, status and result, in files that you can read without ExoGym.

    run.json        the description that decides the run, versions, device, command line; enough to repeat it
    status.json     state (running, done, stopped, failed), step of total, process, heartbeat; replaced as a whole
    records.jsonl   a line per record: step, epoch, node, losses, metrics, bytes, ...; only whole lines are appended
    events.jsonl    a line per event: communication, evaluation, checkpoint, node away or back, error, end
    summary.json    the averaged model's last record, and bytes by collective; written at the run's end
    checkpoints/    checkpoints, if the run saves without a save_dir

Other modules write notes.json (`exogym.study.notes`), timeline.json (`exogym.clock`) and hosts.json
(`exogym.machines.remote.health`) into the run folder. `exogym.core.record.schema` lists the fields of each file.

A resumed run appends to the events. It rewrites the records up to its first step from the checkpoint's history, because
a power cut may lose the newest records, while a checkpoint on the disk is complete.

A running run locks its folder (see `exogym.core.base.locks`), so two runs never write to one folder. A full disk or a
lost folder doesn't end training: the run prints one notice, and writes `trouble` into status.json as soon as it can
write again. Once a record or event is lost, the run appends no more of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from exogym.core.base.files import cut_torn_line, is_plain, write_json
from exogym.core.base.locks import Lock, acquire
from exogym.core.base.processes import described, is_alive
from exogym.core.base.retired import is_same
from exogym.core.progress import notice
from exogym.core.record import schema
from exogym.core.record.observers import Fields
from exogym.core.record.schema import FILES
from exogym.errors import ArgumentError
from exogym.logger.base import in_json
from exogym.logger.files import JSONLinesLogger, OnDisk

RESUME = "EXOGYM_RESUME"  # environment variable: run_dir of the run to resume
BEAT_S = 1.0  # least seconds between two heartbeats
LOST_S = 60.0  # a run on another machine counts as lost after so many seconds without a heartbeat
ENDS = {"done": "done", "stopped": "stopped", "error": "failed"}  # final events, and the state that each means
# The description's fields that may differ in a resumed run
FREE = ("limits", "placement", "chosen", "rounds", "shared", "device")


class RunFolder(OnDisk):
    """An observer that writes a run's folder, or raises ArgumentError if it is in use, of another run, or not writable.

    Args:
        folder: the run folder, created if missing. The folder must hold no run, or the run to resume.
        total_steps: the run's last step.
        resume: whether a new run may resume the run in the folder.
        more: further fields for run.json.
    """

    def __init__(self, folder: str | os.PathLike[str], total_steps: int, resume: bool, more: Fields | None = None):
        self.folder, self.total_steps, self.more = Path(folder), total_steps, dict(more or {})
        self._process, self.resume = described(), resume
        self._check()
        self._records = JSONLinesLogger(self.folder / "records.jsonl")
        self._events: IO[str] | None = None
        self._lock: Lock | None = None
        self._state, self._step, self._beat, self._started = "running", 0, 0.0, time.time()

    def _check(self) -> None:
        there = [name for name in FILES if os.path.lexists(self.folder / name)]
        if strange := [name for name in there if not is_plain(self.folder / name)]:
            raise ArgumentError(
                f"run_dir={str(self.folder)!r}: {strange[0]} is a link, a folder, a pipe or a device. Remove it, or "
                "pass another folder"
            )
        if there and not self.resume:
            raise ArgumentError(
                f"run_dir={str(self.folder)!r} already contains a run: pass another folder, or resume the run with "
                "resume=True"
            )

    def _check_nothing_is_lost(self) -> None:
        """For a run that starts at step 0: don't overwrite a run with results; print a notice for any other."""
        state, asked = read_status(self.folder).get("state"), os.environ.get(RESUME)
        was_asked = asked is not None and os.path.realpath(asked) == os.path.realpath(self.folder)
        if state == "done" or (state is not None and was_asked):
            raise ArgumentError(
                f"run_dir={str(self.folder)!r} contains a run ({state}) without a checkpoint, so it would "
                "start anew and overwrite its records: pass another folder. To save checkpoints, pass save_dir or "
                "checkpoint_interval"
            )
        if state is not None:
            notice(f"{self.folder} contains a run ({state}) without a checkpoint: starting at step 0")

    def start(self, run: Fields) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = acquire(self.folder, secrets.token_hex(8), "run_dir")
            self._check()  # again, because another run may have started and ended in the meantime
            self._begin(run)
        except OSError as error:
            self._let_go()
            raise ArgumentError(
                f"run_dir={str(self.folder)!r} cannot be written ({error}): choose another folder"
            ) from error
        except BaseException:
            self._let_go()
            raise

    def _begin(self, run: Fields) -> None:
        described = {key: value for key, value in run.items() if key != "resumed_step"}
        self._check_same(in_json(described))
        if "resumed_step" not in run:
            self._check_nothing_is_lost()
        self._records.start(described)
        cut_torn_line(self.folder / "events.jsonl")  # a killed run may have left one
        self._events = open(self.folder / "events.jsonl", "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        (self.folder / "summary.json").unlink(missing_ok=True)  # from before the resume
        self._step = run.get("resumed_step") or 0
        about = {"description": described, "command": sys.argv, "folder": os.getcwd(), "versions": versions()}
        about["process"] = self._process
        if not ("resumed_step" in run and (self.folder / "run.json").exists()):
            about = in_json(about | {"started_s": self._started} | self.more)
            schema.check_file("run.json", about)  # a run whose folder could not be read again must not start
            _write(self.folder / "run.json", about)
        self.event({"kind": "start", "step": self._step, "process": self._process})
        self._say()

    def _check_same(self, now: Fields) -> None:
        """Refuse to write into the folder of another run."""
        before: Any = read_object(self.folder / "run.json").get("description")
        common = before.keys() & now.keys() - set(FREE) if isinstance(before, dict) else set()
        if unlike := [f"{name}: {before[name]!r}, now {now[name]!r}"[:200] for name in sorted(common)
                      if not is_same(name, before[name], now[name])]:  # fmt: skip
            raise ArgumentError(
                f"run_dir={str(self.folder)!r} contains another run: pass another folder. The runs differ in\n  "
                + "\n  ".join(unlike)
            )

    def restore(self, records: Callable[[], Iterable[Fields]]) -> None:
        self._records.restore(records)

    def log(self, record: Fields) -> None:
        if self.trouble is None:
            self._records.log(record)

    def event(self, event: Fields) -> None:
        self._state = ENDS.get(event["kind"], self._state)
        with self.writing(self.folder):
            if self._events is not None:
                self._events.write(json.dumps(in_json({"at_s": round(time.time(), 3), **event})) + "\n")

    def beat(self, step: int, figures: Fields) -> None:
        self._step = step
        if time.monotonic() >= self._beat:
            self._say()

    def finish(self, summary: Fields) -> None:
        self._records.finish(summary)
        if self._lock is None:
            return
        if self._state == "running":  # no final event: the run failed before it started
            self._state = "failed"
        with self.writing(self.folder):
            self._lock.check()
            _write(self.folder / "summary.json", {"state": self._state, **summary})
        self._say()
        self._let_go()

    def _say(self) -> None:
        """Write status.json."""
        self._beat = time.monotonic() + BEAT_S
        status = {
            "state": self._state, "step": self._step, "total_steps": self.total_steps, "process": self._process,
            "started_s": self._started, "heartbeat_s": time.time(),
        }  # fmt: skip
        with self.writing(self.folder):
            assert self._lock is not None
            self._lock.check()
            self._lock.beat()
            _write(self.folder / "status.json", status | ({"trouble": self.trouble} if self.trouble else {}))

    def _abandon(self) -> None:
        self._leave_events()
        if self._lock is not None and self._lock.is_ours():
            cut_torn_line(self.folder / "events.jsonl")

    def _leave_events(self) -> None:
        if self._events is not None:
            with contextlib.suppress(OSError):  # what is left of a line that could not be written
                self._events.close()
            self._events = None

    def _let_go(self) -> None:
        self._leave_events()
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def read_status(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the status of the run in a folder (see `standing`). Return {} if the folder has no valid status.

    >>> read_status("nowhere")
    {}
    """
    try:
        return standing(folder)
    except ArgumentError:
        return {}


def standing(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the status of the run in a folder; {} if the folder has no status.

    The state "running" becomes "lost" if the run's process has ended. If the run is on another machine, its state
    becomes "lost" after a minute without a heartbeat. Raise ArgumentError if status.json has a field that no run
    writes.
    """
    status = schema.read_file(Path(folder) / "status.json")
    process, heard_s = status.get("process"), status.get("heartbeat_s")
    if process is None or heard_s is None or process.get("pid") is None:
        return {}
    if status.get("state") == "running":
        alive = is_alive(process)
        if alive is False or (alive is None and not time.time() - heard_s <= LOST_S):
            status["state"] = "lost"
    return status


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a run folder's file; {} if the file is missing or does not fit the schema.

    >>> read_object(Path("nowhere/run.json"))
    {}
    """
    try:
        return schema.read_file(path)
    except ArgumentError:
        return {}


def versions() -> dict[str, str]:
    """Return the versions of software on which a run's result may depend.

    >>> "torch" in versions()
    True
    """
    from importlib.metadata import PackageNotFoundError, version

    import torch

    try:
        own = version("exogym")
    except PackageNotFoundError:
        own = "not installed"
    found = {"exogym": own, "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    return found | {"system": platform.platform(), "machine": f"{platform.system()} {platform.machine()}"}


def _write(path: Path, value: Mapping[str, Any]) -> None:
    write_json(path, in_json(value))
