"""A process that reads mutated files of strangers by the command line, and tells on itself.

    python strangers.py READER SEED COUNT FOLDER

It prints a JSON object: how many files it `read` and `refused`, the `slowest_s`, and `faults` of [mutation, happened].
An audit hook notes each command that starts, each connection, and each file outside FOLDER that is opened, written or
removed. A module named in a mutation (`trap`) leaves a mark when it is imported. Runs are not trained.
"""

import contextlib
import importlib
import io
import json
import os
import re
import signal
import site
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_S = 10.0
STARTS = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.forkpty",
    "socket.connect",
    "pty.spawn",
)
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree")
OF_THE_SYSTEM = re.compile(r"/proc/(self|sys|\d+)/[a-z/]+|/sys/.*|/dev/null|/proc/meminfo|/etc/(hosts|resolv.conf)")
CODE = ("subprocess", "os", "trap")  # modules that mutations name


class Accepted(BaseException):
    """Raised instead of training: the files have been read."""


class Late(BaseException):
    """Raised when a file takes too long."""


class Watch:
    """Notes what happens while `on`."""

    def __init__(self, folder: Path):
        import exogym

        self.on, self.seen = False, list[str]()
        libraries = {sys.prefix, sys.base_prefix, *site.getsitepackages(), *sysconfig.get_paths().values()}
        package = Path(exogym.__file__).parent
        places = [folder, package, package.with_name("exogym.egg-info"), *map(Path, libraries)]
        self.allowed = tuple(os.path.realpath(place) + os.sep for place in places)
        sys.addaudithook(self.note)
        real = importlib.import_module

        def imported(name: str, package: str | None = None) -> Any:
            if self.on and name.partition(".")[0] in CODE:
                self.seen.append(f"import {name}")
            return real(name, package)

        importlib.import_module = imported

    def note(self, event: str, given: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in STARTS:
            self.seen.append(f"{event} {given[:2]!r}"[:300])
        elif event == "open" or event in CHANGES:
            path = given[0]
            if isinstance(path, str | bytes) and not self.is_allowed(os.fsdecode(path)):
                self.seen.append(f"{event} {path!r}"[:300])

    def is_allowed(self, path: str) -> bool:
        if OF_THE_SYSTEM.fullmatch(path):
            return True
        self.on = False
        try:
            return (os.path.realpath(path) + os.sep).startswith(self.allowed)
        finally:
            self.on = True


HOSTS = {
    "master": "10.9.8.1", "workers": ["10.9.8.2", {"address": "10.9.8.3", "user": "ann", "slots": 2}],
    "ssh_user": "matt",
    "ssh_key_path": "keys/id", "ssh_port": 22, "python_env": "/opt/env/bin/python", "project_path": "~/work",
    "master_port": 29500,
}  # fmt: skip
CONFIG = """\
[medium]
task = shakespeare
lr = 0.003

[distributed:mine]
base_profile = medium
strategy = diloco:outer_lr=0.4
communication_interval = 100
hosts_config = hosts.json
steps = 2000
save_dir = saved
nodes = 4
task_options = block_size=32
"""
STUDY = ["--steps", "2", "--seeds", "1", "--nodes", "2", "--device", "cpu"]
COMPARE = ["compare", "--strategies", "ddp,diloco:H=2", *STUDY]
SWEEP = ["sweep", "--sweep", "H=2,5", *STUDY, "--processes", "1"]


def made(reader: str, folder: Path) -> tuple[Path, list[list[str]]]:
    """Make what a reader reads. Return the file to mutate, and the commands that read it."""
    from exogym.cli import main

    if reader in ("hosts", "config"):
        (folder / "hosts.json").write_text(json.dumps(HOSTS))
        (folder / "config.ini").write_text(CONFIG)
        words = ["distributed-train", "mine", "--hosts", "hosts.json"]
        return folder / {"hosts": "hosts.json", "config": "config.ini"}[reader], [words]
    if reader == "run.json":
        with contextlib.redirect_stdout(io.StringIO()):
            assert main([*COMPARE, "--out", "runs"]) == 0
        (made_there,) = (folder / "runs").iterdir()
        out = str(made_there.relative_to(folder))
        commands = [["runs", "list"], ["runs", "show", made_there.name], ["compare", "--resume", "--out", out]]
        return ended(made_there / "run.json"), commands
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*SWEEP, "--out", "runs/sweep"]) == 0
    commands = [["runs", "list"], ["runs", "show", "sweep"], [*SWEEP, "--resume", "--out", "runs/sweep"]]
    return ended(folder / "runs" / "sweep" / "sweep.json"), commands


def ended(path: Path) -> Path:
    """Make a study of this process one of a process that has gone."""
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | {"state": "interrupted", "process": found["process"] | {"started": "1"}}))
    return path


def never_train() -> None:
    """Replace what begins to train, or starts a command for the page, by `Accepted`."""
    from exogym import cli
    from exogym.cli import distributed
    from exogym.study.compare.folder import Folder
    from exogym.study.sweep.run import _Sweep
    from exogym.ui import starting

    known: dict[str, Any] = {}  # putting a command together takes longer than most files take to read
    real = cli._Loaded.__getitem__
    cli._Loaded.__getitem__ = lambda self, name: known.get(name) or known.setdefault(name, real(self, name))
    starting.PATIENCE_S = 0.0  # it waits so long for a process that may still run, such as another machine's

    def accept(*_: Any) -> None:
        raise Accepted

    Folder.describe = accept  # type: ignore[method-assign]
    _Sweep.train = accept  # type: ignore[method-assign]
    distributed.train = accept  # type: ignore[assignment]
    _Sweep.describe = lambda *_, **__: None  # type: ignore[method-assign]


def page(path: Path, top: Path) -> Callable[[], str | None]:
    """Return a function that asks the page's parts about a folder. It returns None, or the error for the browser."""
    import typer.main

    from exogym.cli import app
    from exogym.cli.ui import forms_of
    from exogym.errors import ExoGymError
    from exogym.ui.repeat import command_of, snippet_of
    from exogym.ui.starting import Starter
    from exogym.ui.views import grid_of, verdict_of

    class Kept(Starter):
        def _begin(self, name: str, words: list[str], *_: Any) -> int:
            tasks = [word for word in words if word.startswith("--dataset=") and ":" in word]
            assert words[:2] == ["-m", "exogym"] and not tasks, words
            raise Accepted

    context = typer.Context(typer.main.get_command(app), info_name="exogym")
    starter = Kept(top, lambda: forms_of(context))

    def ask() -> str | None:
        said = None
        about = json.loads("{}")
        for part in (
            lambda: starter.choices(path), lambda: starter.again(path), lambda: starter.resume(path),
            lambda: verdict_of(path), lambda: grid_of(path, {}), lambda: command_of(about),
            lambda: snippet_of(path / "ddp-seed-0", about),
        ):  # fmt: skip
            signal.setitimer(signal.ITIMER_REAL, MOST_S)
            try:
                part()
            except Accepted:
                pass
            except ExoGymError as error:
                said = str(error)
        return said

    return ask


def late(*_: Any) -> None:
    raise Late(f"over {MOST_S:g} s: {''.join(traceback.format_stack(limit=14)[:-1])[-1500:]}")


def run(reader: str, seed: int, count: int, folder: Path) -> dict[str, Any]:
    from mutations import mutations

    from exogym.cli import main
    from exogym.study.compare import comparison

    comparison.draw = lambda paths, *_: [Path(path).touch() for path in paths]  # drawing takes as long as all the rest
    os.chdir(folder)
    (folder / "trap.py").write_text("open('sprung', 'w').close()\n")
    sys.path.insert(0, str(folder))
    path, commands = made(reader, folder)
    healthy, watch = path.read_bytes(), Watch(folder)
    asks = page(path.parent, folder / "runs") if reader.endswith(".json") else None
    never_train()
    signal.signal(signal.SIGALRM, late)

    def read() -> tuple[bool, list[str]]:
        """Return whether the last command has refused the file, and what went wrong."""
        refused, wrong = False, list[str]()
        for words in commands:
            out, err = io.StringIO(), io.StringIO()
            signal.setitimer(signal.ITIMER_REAL, MOST_S)
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    status = main(words)
                except Accepted:
                    status = 0
            lines = err.getvalue().splitlines()
            errors = [line for line in lines if line.startswith("exogym: error: ")]
            if any(not line.startswith("exogym: ") for line in lines) or "--debug shows where" in err.getvalue():
                wrong.append(f"{words[0]}: {err.getvalue()[-600:]}")
            if status and len(errors) != 1:
                wrong.append(f"{words[0]}: status {status} with {len(errors)} lines: {err.getvalue()[-300:]}")
            refused = status != 0
        if asks is not None:
            asks()
        return refused, wrong

    refused, wrong = read()
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert not wrong and not refused, (refused, wrong)
    found: dict[str, Any] = {"read": 0, "refused": 0, "slowest_s": 0.0, "faults": []}
    for k, data in enumerate(mutations(healthy, seed, count)):
        path.write_bytes(data)
        begun, wrong, watch.seen = time.monotonic(), [], []
        try:
            watch.on = True
            refused, wrong = read()
            found["refused" if refused else "read"] += 1
        except BaseException as error:
            wrong.append(f"{type(error).__name__}: {error}"[:2000])
        finally:
            watch.on = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        found["slowest_s"] = max(found["slowest_s"], time.monotonic() - begun)
        wrong += watch.seen
        if (folder / "sprung").exists():
            wrong.append("the trap was imported")
            (folder / "sprung").unlink()
        if wrong:
            found["faults"].append([k, wrong[:3]])
            if os.environ.get("KEEP"):
                Path(os.environ["KEEP"], f"{reader}-{k}").write_bytes(data)
    return found


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]).resolve())))
