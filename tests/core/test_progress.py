"""The progress bar: drawn on a terminal (a real pty here), quiet elsewhere, cheap to call."""

import contextlib
import inspect
import io
import os
import pty
import re
import sys
import time
from collections.abc import Iterator

import pytest
from processes import start

from exogym.core.progress import notice
from exogym.core.record import bar as module
from exogym.core.record.bar import Bar

IMPORTS = """
from __future__ import annotations
import contextlib, time, torch
from exogym import LocalTrainer
from exogym.core.record.bar import Bar
from exogym.progress import notice
"""


@contextlib.contextmanager
def shown(total_steps: int, wanted: bool | None = None) -> Iterator[Bar]:
    """A context in which a run's bar is shown."""
    bar = Bar(total_steps, wanted)
    bar.start({})
    try:
        yield bar
    finally:
        bar.finish({})


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def on_a_terminal(code: str) -> tuple[str, str]:
    """Run Python code with stderr on a pty; return what it drew there, and its stdout (a pipe)."""
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    head = IMPORTS + inspect.getsource(shown)
    ours, theirs = os.pipe()
    pid = start(["-W", "error", "-c", head + code], env=environment, files=(None, theirs, slave))
    os.close(theirs)
    os.close(slave)
    drawn = b""
    try:
        while part := os.read(master, 65536):
            drawn += part
    except OSError:  # the end of a pty on Linux
        pass
    os.close(master)
    with open(ours) as pipe:
        out = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0, drawn.decode()
    return drawn.decode(), out


def plain(drawn: str) -> str:
    """Return what was drawn without colours; where a line was cleared, a new one begins."""
    drawn = drawn.replace("\r\x1b[2K", "\n")
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn)


def test_a_terminal_shows_a_bar_and_notices_above_it() -> None:
    drawn, out = on_a_terminal("""
with shown(50) as bar:
    bar.beat(20, {"loss": 2.25, "val_loss": 1.5})
    notice("micro-batches of [bold]8[/bold] fit")
    print("the user's own line")
    bar._due = 0.0  # as after the pause between drawings
    bar.beat(30, {"loss": 2.125, "tx_bytes": 3_200_000})
    bar.beat(49, {"loss": 2.0625})
""")
    text = plain(drawn)
    assert "\x1b[2K" in drawn  # a line was cleared to draw it again
    for part in ("20/50", "loss 2.25", "val 1.5", "30/50", "49/50", "loss 2.062", "sent 3.2 MB/node"):
        assert part in text
    assert re.search(r"^exogym: micro-batches of \[bold\]8\[/bold\] fit\r?$", text, re.MULTILINE)
    assert out == "the user's own line\n"
    assert text.rindex("val 1.5") > text.index("30/50")  # what is not given keeps its value


def test_the_last_line_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(2, True) as bar:
        bar.beat(2, {"loss": 2.5})
    assert capsys.readouterr().err.splitlines() == ["exogym: step 2/2  loss 2.5"]
    with shown(2, True) as bar:
        bar.beat(1, {"loss": 2.5})
        bar.beat(2, {})  # too soon after the line before: it waits for the end
    assert capsys.readouterr().err.splitlines() == ["exogym: step 1/2  loss 2.5", "exogym: step 2/2  loss 2.5"]


def test_it_can_be_turned_off_on_a_terminal() -> None:
    drawn, _ = on_a_terminal("""
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem
model, data = small_problem()
trainer = LocalTrainer(model, data, loss_fn=torch.nn.functional.mse_loss)
trainer.fit(DiLoCoStrategy(H=2, outer_momentum=0), num_nodes=2, max_steps=4, progress=False)
notice("hello")
""")
    assert drawn == "exogym: hello\r\n"


def test_no_bar_comes_before_a_folder_that_is_refused() -> None:
    drawn, _ = on_a_terminal("""
from exogym.errors import ArgumentError
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem
model, data = small_problem()
trainer = LocalTrainer(model, data, loss_fn=torch.nn.functional.mse_loss)
with contextlib.suppress(ArgumentError):
    trainer.fit(DiLoCoStrategy(H=2, outer_momentum=0), num_nodes=2, max_steps=4, run_dir="/proc/none/run")
notice("hello")
""")
    assert drawn == "exogym: hello\r\n"


def test_hardly_any_update_draws() -> None:
    drawn, _ = on_a_terminal("""
with shown(100000) as bar:
    bar.beat(0, {"loss": 0.0})
    for step in range(1, 100001):
        bar.beat(step, {"loss": 2.5, "tx_bytes": 1e6})
        if step % 10000 == 0:
            time.sleep(0.03)
""")
    assert 3 <= drawn.count("\x1b[2K") <= 10_000  # it was drawn meanwhile, but not at every update
    assert "100000/100000" in drawn


def test_the_time_left_of_a_resumed_run_is_reckoned_from_where_it_goes_on() -> None:
    drawn, _ = on_a_terminal("""
with shown(1_000_000) as bar:
    for step in range(900_000, 900_008):
        bar.beat(step, {"loss": 1.0})
        time.sleep(0.15)
""")
    hours = [int(found) for found in re.findall(r"(\d+):\d\d:\d\d", plain(drawn))]
    assert hours
    assert hours[-1] >= 3  # 100,000 steps at about 7 a second


def test_it_is_quiet_where_stderr_is_not_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with shown(50) as bar:
        bar.beat(20, {"loss": 2.25})
        notice("hello")
    assert capfd.readouterr() == ("", "exogym: hello\n")


def test_a_long_run_says_something_without_a_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with shown(50) as bar:
        bar.beat(1, {"loss": 2.5})
        assert bar._due > time.perf_counter() + 20
        bar._due = 0.0  # half a minute later
        bar.beat(2, {"loss": 2.25})
        bar.beat(3, {"loss": 2.0})
    assert capfd.readouterr().err.splitlines() == ["exogym: step 2/50  loss 2.25", "exogym: step 3/50  loss 2"]


def test_true_without_a_terminal_prints_plain_lines(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with shown(50, True) as bar:
        bar.beat(1, {"loss": 2.5})
        bar.beat(2, {"loss": 2.25})  # too soon for a line
        monkeypatch.setattr(module, "LINE_PAUSE_S", 0.0)
        bar._due = 0.0
        bar.beat(3, {"loss": 2.0, "tx_bytes": 1500})
        monkeypatch.setattr(module, "LINE_PAUSE_S", 10.0)
        bar.beat(4, {})
        bar.beat(5, {})
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "exogym: step 1/50  loss 2.5",
        "exogym: step 3/50  loss 2  sent 1.5 kB/node",
        "exogym: step 4/50  loss 2  sent 1.5 kB/node",
        "exogym: step 5/50  loss 2  sent 1.5 kB/node",
    ]


def test_nothing_is_said_of_a_run_without_a_step(capfd: pytest.CaptureFixture[str]) -> None:
    with shown(50, True):
        pass
    assert capfd.readouterr() == ("", "")


def test_a_bar_inside_a_bar_stays_quiet_and_the_outer_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(KeyboardInterrupt), shown(50) as outer:
        with shown(70) as inner:
            inner.beat(3, {})
            notice("between")
        outer.beat(49, {})
        raise KeyboardInterrupt
    text = plain(terminal.getvalue())
    assert "/70" not in text
    assert "49/50" in text
    assert "exogym: between" in text
    assert "\x1b[?25h" in terminal.getvalue()  # the cursor is shown again
    assert sys.stderr is terminal
    assert module._shown == []


def test_drawing_takes_a_hundredth_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with shown(50) as bar:
        monkeypatch.setattr(bar._bar, "update", lambda *args, **kwargs: time.sleep(0.02))
        before = time.perf_counter()
        bar.beat(1, {})
        assert bar._due - before >= 2.0
