"""Start, stop and resume runs, comparisons and sweeps from the page.

Each value in a form becomes one argument of the command `exogym`. No shell reads these arguments. Each started process
has its own session, so it continues when the page's server ends. The page later finds the process by its run folder.
"""

from __future__ import annotations

import functools
import math
import os
import re
import reprlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from exogym.core.base.processes import is_alive
from exogym.core.record.run_folder import RESUME
from exogym.errors import ArgumentError, ExoGymError, check_choice, nearest
from exogym.files import end_of, new_folder
from exogym.record import read_status
from exogym.study.runs import what_is
from exogym.ui.apart import Apart
from exogym.ui.repeat import folder_of

LOGS = ".started"  # in the runs folder: outputs of started commands
TAIL_BYTES = 4096
PATIENCE_S = 10.0  # seconds to wait for the end of a process that has just stopped
ESTIMATE_S = 120.0
MOST_TEXT = 2000  # characters of an option's value
WORDS = ("strategies", "strategy", "axes", "search")  # options that no number fits, beside those with choices
FILE = re.compile(r"[/\\]|\.[A-Za-z]{2}")  # a path, or a file's ending
Form = Sequence[Mapping[str, Any]]  # a command's options, as `exogym.cli.ui.forms_of` describes them


class CannotStart(ExoGymError):
    """Raised when the options of `exogym ui` do not allow the page to start a command."""


class WrongKind(ArgumentError):
    """Raised for a JSON value of a kind that no form sends."""


@dataclass
class Starter:
    """Starts `exogym` commands, whose results go into the folder `top`.

    `read_forms` returns {command: its options}; it is called once, when a form is first needed. With `allow_code`,
    values in forms may name code and files to load.
    """

    top: Path
    read_forms: Callable[[], Mapping[str, Form]]
    allow_code: bool = False
    _started: list[tuple[str, Path, subprocess.Popen[bytes]]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _apart: Apart = field(default_factory=Apart)
    _estimating: threading.Lock = field(default_factory=threading.Lock)

    @functools.cached_property
    def forms(self) -> Mapping[str, Form]:
        return self.read_forms()

    @functools.cached_property
    def strategies(self) -> dict[str, Any]:
        from exogym.study.compare.catalog import catalog  # loads torch

        return catalog()

    def close(self) -> None:
        """End the processes that check and estimate. Started commands continue."""
        self._apart.close()

    def check(self, command: Any, options: Any) -> dict[str, Any]:
        """Return the first error in a command's options, or its plan (`exogym.ui.checking.check`). Start nothing."""
        with self._apart.turn():
            self._check_kinds(command, options)
            try:
                self.arguments(command, options)  # what may not start is not looked at
            except WrongKind:
                raise
            except (ArgumentError, CannotStart) as error:
                return {"error": str(error), "plan": ""}
            flags = {option["name"]: not option["default"] for option in self.forms[command] if option["is_flag"]}
            given = {n: flags.get(n, value) for n, value in options.items() if n not in flags or value is True}
            return self._apart.check(command, given)

    def _check_kinds(self, command: Any, options: Any) -> None:
        """Raise ArgumentError unless `command` is the name of a form, and `options` a dict that may fit it."""
        if not isinstance(command, str) or len(command) > MOST_TEXT:
            raise WrongKind(f"command={reprlib.repr(command)} must be one of {', '.join(self.forms)}")
        check_choice("command", command, self.forms)
        if not isinstance(options, dict):
            raise WrongKind(f"options={reprlib.repr(options)} must be a JSON object {{option: value}}")
        if len(options) > len(self.forms[command]):
            raise WrongKind(f"options has {len(options)} names, but {command} accepts {len(self.forms[command])}")

    def estimate(self, command: Any, options: Any) -> dict[str, str]:
        """Return the time and memory that a command needs, as `text`. Another process tries it for some seconds."""
        words = [command, *self.arguments(command, options), "--estimate", f"--out={self.top}"]
        if not self._estimating.acquire(blocking=False):
            raise ArgumentError("another estimate is running: wait until it ends")
        try:
            status, output, errors = self._apart.run(words, ESTIMATE_S)
        except subprocess.TimeoutExpired:
            raise ArgumentError(
                f"the trial took over {ESTIMATE_S:g} s: use fewer nodes or a smaller batch size"
            ) from None
        finally:
            self._estimating.release()
        if status:
            raise ArgumentError(errors.strip().rpartition("\n")[2] or "the trial ended without an estimate")
        return {"text": output}

    def again(self, path: Path) -> dict[str, Any]:
        """Return a form with a folder's options (`exogym.ui.again.again_of`)."""
        from exogym.ui.again import again_of  # loads torch

        try:
            return again_of(path, self.forms)
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # a stranger may have written them
            raise ArgumentError(f"{path.name}: its options cannot be read ({error})") from error

    def start(self, command: Any, options: Any) -> int:
        """Start a command and return its process id. `CannotStart`: code or a file needs `allow_code`."""
        words = self.arguments(command, options)
        out = self.top if command == "compare" else new_folder(self.top, command)
        return self._begin(command, ["-m", "exogym", command, *words, f"--out={out}"])

    def arguments(self, command: Any, options: Any) -> list[str]:
        """Return the command's arguments. Each is one word --option=value, so that no value can act as an option."""
        self._check_kinds(command, options)
        known, words = {option["name"]: option for option in self.forms[command]}, list[str]()
        for name, given in options.items():
            if name not in known:
                shown = reprlib.repr(name)
                raise ArgumentError(f"{command} has no option {shown} on this page: {nearest(name[:40], known)}")
            flag = known[name]["flag"]
            if known[name]["is_flag"]:
                if not isinstance(given, bool):
                    raise WrongKind(f"{name}={reprlib.repr(given)} must be true or false")
                words += [flag] if given else []
                continue
            for value in given if known[name]["multiple"] and isinstance(given, list) else [given]:
                is_number = type(value) in (int, float) and -math.inf < value < math.inf
                takes_numbers = name not in WORDS and not known[name]["choices"]
                text, wanted = str(value) if is_number and takes_numbers else value, "a number or " * takes_numbers
                wanted = (
                    f"{name}={reprlib.repr(value)} must be {wanted}one line of text, at most {MOST_TEXT} characters"
                )
                if not isinstance(text, str) or len(text) > MOST_TEXT:
                    raise WrongKind(wanted)
                if not text or not text.isprintable():
                    raise ArgumentError(wanted)
                is_code = (name == "dataset" and ":" in text) or name == "data" or FILE.search(text)
                if is_code and not self.allow_code:
                    raise CannotStart(
                        f"{name}={text!r} names code or a file: start exogym ui with --allow-code to allow it"
                    )
                words.append(f"{flag}={text}")
        return words

    def resume(self, path: Path) -> int:
        """Resume the comparison, sweep or run in a folder, and return the new process's id. A run needs its script."""
        _, about = what_is(path)
        until = time.monotonic() + (0.0 if about.get("state") == "running" else PATIENCE_S)
        while _is_running(path):
            if time.monotonic() >= until:
                raise ArgumentError(f"{path.name} is running: stop it first")
            time.sleep(0.05)
        saved = about.get("arguments")
        if not isinstance(saved, dict):
            return self._run_again(path, about)
        if not _asked_by_command(about):
            raise ArgumentError(f"{path.name} was started from Python: resume it in Python with resume=True")
        command, options = itemgetter("command", "options")(self.again(path))
        words = self.arguments(command, options | {"dataset": saved["problem"]})
        return self._begin(command, ["-m", "exogym", command, *words, f"--out={path}", "--resume"])

    def _run_again(self, path: Path, about: Mapping[str, Any]) -> int:
        """Start a run's script again. An environment variable makes it resume (`training.options.asked_to_go_on`)."""
        if path.parent != self.top:
            raise ArgumentError(f"{path.name} is part of {path.parent.name}: resume {path.parent.name}")
        if read_status(path).get("state") == "done":
            raise ArgumentError(f"{path.name} has trained all its steps and can't be resumed")
        found = folder_of(about)
        if found is None:
            raise ArgumentError(f"{path.name} has no script to start: resume it in Python with resume=True")
        if not self.allow_code:
            raise CannotStart(
                f"{path.name} belongs to a script, which is code: start exogym ui with --allow-code to allow it"
            )
        folder, words = found
        return self._begin(path.name, words, folder, {RESUME: os.path.realpath(path)})

    def stop(self, path: Path) -> int:
        """Ask the process of the run, comparison or sweep in the folder `path` to stop. Return the process's id."""
        kind, process = _process(path)
        if process is None or is_alive(process) is not True:
            raise ArgumentError(f"{path.name} is not running on this machine, so it can't be stopped here")
        pid = int(process["pid"])
        os.kill(pid, signal.SIGINT if kind == "sweep" else signal.SIGTERM)
        return pid

    def choices(self, path: Path) -> dict[str, str]:
        """Return {action: what it does} for each action that is possible now: "stop" and "resume".

        "not_here" says why this page may not resume the run.
        """
        kind, about = what_is(path)
        if path.parent != self.top:
            return {}
        state = str((read_status(path) if kind == "run" else about).get("state"))
        _, process = _process(path)
        if process is not None and is_alive(process) is not False:
            is_here = state == "running" and is_alive(process) is True
            return {"stop": _stop_keeps(kind, about)} if is_here else {}
        if kind != "run":
            can = state not in ("finished", "None") and _asked_by_command(about)
            return {"resume": "Resume starts the missing runs. Finished runs stay."} if can else {}
        if state not in ("stopped", "failed", "lost") or folder_of(about) is None or not _has_checkpoint(path, about):
            return {}
        if not self.allow_code:
            return {"not_here": "Resume would start this run's script again. To allow that, start the page with "
                    "--allow-code."}  # fmt: skip
        return {"resume": "Resume starts the script again. It continues from the newest checkpoint."}

    def output_of(self, pid: Any) -> str:
        """Return the end of the output of a process that this server has started, or "" for any other process."""
        return next((found["output"] for found in self.started() if found["pid"] == pid), "")

    def started(self) -> list[dict[str, Any]]:
        """Return the commands that this server has started, newest first, each with the end of its output."""
        with self._lock:
            return [
                {
                    "command": command, "pid": process.pid, "status": process.poll(),
                    "output": end_of(log, TAIL_BYTES).decode("utf-8", "replace"),
                }
                for command, log, process in reversed(self._started)
            ]  # fmt: skip

    def _begin(self, name: str, words: list[str], folder: str | None = None, more: Mapping[str, str] = {}) -> int:
        logs = self.top / LOGS
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{name}-{time.time_ns()}.log"
        with self._lock, open(log, "xb") as output:
            process = subprocess.Popen(
                [sys.executable, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder,
                env=os.environ | more, start_new_session=True,
            )  # fmt: skip
            self._started.append((name, log, process))
        return process.pid


def _process(path: Path) -> tuple[str, dict[str, Any] | None]:
    """Return a folder's kind (run, comparison, sweep) and the process in its files, or None."""
    kind, about = what_is(path)
    process = (read_status(path) if kind == "run" else about).get("process") or {}
    return kind, process if process.get("pid") is not None else None


def _is_running(path: Path) -> bool:
    _, process = _process(path)
    return process is not None and is_alive(process) is not False


def _stop_keeps(kind: str, about: Mapping[str, Any]) -> str:
    """Return what Stop does, and what remains."""
    if kind != "run":
        return f"Stop ends the {kind} after the current step. All results so far stay, and you can resume it."
    text = "Stop ends the run after its current step. Its records and curves stay."
    if "save_dir" not in about:  # an older run's folder does not say
        return f"{text} You can resume it if it saves checkpoints."
    if about["save_dir"] is None:
        return f"{text} It has no save_dir, so no checkpoint is saved and you cannot resume it."
    return f"{text} It saves a checkpoint in {about['save_dir']} first, and you can resume it."


def _asked_by_command(about: Mapping[str, Any]) -> bool:
    """Say whether a comparison or sweep was started by a command that this page can repeat."""
    saved = about.get("arguments")
    return (
        isinstance(saved, dict) and isinstance(saved.get("problem"), str) and not isinstance(saved.get("seeds"), list)
    )


def _has_checkpoint(path: Path, about: Mapping[str, Any]) -> bool:
    folder = about.get("save_dir", path / "checkpoints")
    return isinstance(folder, str | Path) and any(Path(folder).glob("step_*"))
