"""Ctrl-C in scripts of run/ and under the command line: one line, status 130; in `fit` the exception stays.

Real processes, on a terminal (a pty, where Ctrl-C is typed) and, forks, without one (where the signal is sent).
"""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from paths import ROOT
from processes import python

from exogym.errors import ArgumentError, TrainingError, run_script

SCRIPT = [sys.executable, str(ROOT / "run" / "mnist.py"), "--steps", "1000000"]
COMMAND = [sys.executable, "-m", "exogym", "compare", "--strategies", "ddp", "--steps", "1000000", "--seeds", "1"]
WIDTH = 80


def typed(command: list[str], folder: Path, ready: bytes) -> tuple[int, str]:
    """Run on a terminal of 80 columns, type Ctrl-C when `ready` was drawn; return the status and what was drawn."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
    environment = os.environ | {"TERM": "xterm"}
    environment.pop("COLUMNS", None)
    code = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command], stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=folder,
        start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    drawn, is_typed = b"", False
    try:
        while part := os.read(master, 65536):
            drawn += part
            if not is_typed and ready in drawn:
                os.write(master, b"\x03")
                is_typed = True
    except OSError:  # the end of a pty on Linux
        pass
    os.close(master)
    return process.wait(300), drawn.decode()


def on_screen(drawn: str) -> list[str]:
    """Return the lines that are left on a terminal: what was cleared is gone, and long lines wrap."""
    lines, at = [""], 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[a-zA-Z]|\r|\n|[^\x1b\r\n]", drawn):
        if piece == "\n":
            lines, at = [*lines, ""], 0
        elif piece == "\r":
            at = 0
        elif piece.startswith("\x1b"):
            lines[-1] = "" if piece == "\x1b[2K" else lines[-1]
        else:
            if at == WIDTH:
                lines, at = [*lines, ""], 0
            lines[-1] = lines[-1][:at].ljust(at) + piece + lines[-1][at + 1 :]
            at += 1
    return lines


@pytest.mark.slow
def test_ctrl_c_in_a_script_on_a_terminal(tmp_path: Path) -> None:
    status, drawn = typed(SCRIPT, tmp_path, b"acc 0.")
    lines = [line for line in on_screen(drawn) if line]
    assert status == 130 and "Traceback" not in drawn and lines[-1].strip() == "interrupted", drawn[-2000:]
    assert len([line for line in lines if "/1000000" in line]) == 1  # one copy of the bar


def test_the_screen_of_this_test_finds_copies() -> None:
    bar = "x" * WIDTH
    assert on_screen(f"\r\x1b[2K{bar}^C\r\x1b[2K{bar}\r\n") == [bar, bar, ""]
    assert on_screen(f"\r\x1b[2K{bar[4:]}^C\r\x1b[2K{bar[4:]}\r\n") == [bar[4:], ""]


def test_ctrl_c_in_the_command_on_a_terminal(tmp_path: Path) -> None:
    status, drawn = typed(COMMAND, tmp_path, b"/1000000")
    lines = [line.strip() for line in on_screen(drawn) if line.strip()]
    assert status == 130 and "Traceback" not in drawn and lines[-1] == "exogym: interrupted"


@pytest.mark.parametrize("command", [SCRIPT, COMMAND], ids=["script", "command"])
def test_ctrl_c_without_a_terminal(command: list[str], tmp_path: Path) -> None:
    wait = (
        "import os, signal, sys, threading, exogym.core.training.loop as loop\n"
        "run = loop.TrainingLoop._run\n"
        "def begun(self):\n"
        "    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    return run(self)\n"
        "loop.TrainingLoop._run = begun\n"
        "import runpy\n"
        "sys.argv = sys.argv[1:]\n"
        "sys.argv[0] == '-m' and sys.argv.pop(0)\n"
        "run_it = runpy.run_path if sys.argv[0].endswith('.py') else runpy.run_module\n"
        "run_it(sys.argv[0], run_name='__main__')\n"
    )
    done = python("-c", wait, *command[1:], cwd=tmp_path)
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].endswith("interrupted")


def test_the_exception_stays_for_those_who_catch_it(tmp_path: Path) -> None:
    code = """
import os, signal
from exogym import LocalTrainer
from exogym.strategy import DiLoCoStrategy
from exogym.study.tasks import load_task
task = load_task("digits")
trainer = LocalTrainer(task.make_model(), task.train, task.val)
try:
    trainer.fit(DiLoCoStrategy(H=10), num_nodes=2, batch_size=4, val_interval=5,
                callbacks=[lambda loop: os.kill(os.getpid(), signal.SIGINT) if loop.step else None])
except KeyboardInterrupt:
    print("caught after", trainer.history[-1]["step"])
"""
    done = python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "caught after 5\n", "")


@pytest.mark.parametrize(
    ("error", "status"),
    [(ArgumentError("lr=0"), "error: lr=0"), (KeyboardInterrupt(), 130), (TrainingError("nan"), "error: nan")],
)
def test_how_a_script_ends(error: BaseException, status: object) -> None:
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as end:
        run_script(main)
    assert end.value.code == status
    with pytest.raises(ZeroDivisionError):  # what is not ours keeps its traceback
        run_script(lambda: 1 // 0)
