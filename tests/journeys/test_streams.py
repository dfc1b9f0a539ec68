"""Closed, broken and ASCII streams, no temporary folder, endless files, and Ctrl-C: one line at most, no traceback."""

import contextlib
import http.cookiejar
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from processes import PATIENCE_S, python, start

from exogym.cli import main
from exogym.core.base.files import SHORT_BYTES, short_text, temporary_folder
from exogym.core.base.streams import STDERR, replace_letters
from exogym.core.progress import GOING_ON, notice, without_notices
from exogym.core.record.run_folder import read_status
from exogym.errors import ArgumentError, ExoGymError, WorkerError
from exogym.machines.launch.__main__ import main as launch
from exogym.machines.remote.hosts import HostsConfig
from exogym.network import Network
from exogym.strategy import DiLoCoStrategy
from exogym.study.cells import Cell, train
from exogym.study.tasks import load_task

TRAIN = """
import os, sys, torch
from exogym import LocalTrainer
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem
model, data = small_problem()
trainer = LocalTrainer(model, data, data, loss_fn=torch.nn.functional.mse_loss)
trainer.fit(DiLoCoStrategy(lr=0.02, H=4), num_nodes=4, max_steps=12, device="cpu", processes=2, progress=True,
            run_dir="run", callbacks=[lambda loop: os.write(2, b"noise")])
open("done", "w").write(str(trainer.history.last["step"]))
"""
CLOSED = "import os, sys\nos.close(2)\nsys.stderr = sys.__stderr__ = None\n"
BROKEN = "import os, sys\nread, write = os.pipe()\nos.close(read)\nos.dup2(write, 2)\nos.dup2(write, 1)\n"
NO_FOLDER = "import tempfile\ntempfile.tempdir = None\ntempfile._candidate_tempdir_list = lambda: ['/nowhere']\n"
COMPARE = ["-m", "exogym", "compare", "--strategies", "ddp,diloco", "--steps", "20", "--nodes", "2", "--out", "cmp"]


def is_trained(folder: Path) -> bool:
    """Whether `TRAIN` came to its end there, and nothing but records is in its records."""
    for line in (folder / "run" / "records.jsonl").read_text().splitlines():
        json.loads(line)
    return (folder / "done").read_text() == "12" and read_status(folder / "run")["state"] == "done"


# Streams


@pytest.mark.parametrize("streams", [CLOSED, BROKEN, NO_FOLDER], ids=["closed", "broken", "no folder"])
def test_a_run_whose_streams_are_closed_or_broken_trains(streams: str, tmp_path: Path) -> None:
    """Nor does what others write to stderr land in the run's files, which would have its number."""
    code = TRAIN if streams != BROKEN else TRAIN.replace('os.write(2, b"noise")', "None")
    done = python("-c", streams + code, cwd=tmp_path)
    assert done.returncode == 0 and is_trained(tmp_path), done.stderr


def test_a_command_whose_reader_has_gone_ends_with_141_in_silence(tmp_path: Path) -> None:
    code = (
        "import os, sys\nread, write = os.pipe()\nos.close(read)\nos.dup2(write, 1)\n"
        "kept = sys.stdout, sys.__stdout__\nsys.stdout = sys.__stdout__ = open(1, 'w')\n"
        "from exogym.__main__ import main\nsys.argv = ['exogym', *sys.argv[1:]]\nsys.exit(main())\n"
    )
    for words in (["--help"], ["--version"]):
        done = python("-c", code, *words, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (141, ""), words
    script = code.split("from exogym")[0] + "from exogym.errors import run_script\nrun_script(lambda: print('trained'))"
    assert python("-c", script).returncode == 141


@pytest.mark.slow
def test_a_comparison_whose_reader_has_gone_is_kept(tmp_path: Path) -> None:
    words = f"set -o pipefail; {sys.executable} {' '.join(COMPARE)} 2>&1 | true"
    assert subprocess.run(["bash", "-c", words], cwd=tmp_path, timeout=PATIENCE_S).returncode == 141
    (found,) = (tmp_path / "cmp").iterdir()
    assert (found / "summary.csv").exists()


def test_a_full_disk_behind_stdout_is_an_error_in_one_line(tmp_path: Path) -> None:
    code = (
        "import os, sys\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
        "from exogym.cli import main\nsys.exit(main(['--version']))\n"
    )
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 1 and re.fullmatch(r"exogym: error: .*No space left.*\n", done.stderr)


def test_a_letter_that_is_not_in_ascii_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = [io.BytesIO(), io.BytesIO()]
    out, err = (io.TextIOWrapper(file, encoding="ascii", write_through=True) for file in raw)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with pytest.raises(UnicodeEncodeError):
        print("1 ± 2")
    replace_letters()
    print("1 ± 2")
    notice("1 ± 2")
    assert raw[0].getvalue() == b"1 ? 2\n" and raw[1].getvalue() == b"exogym: 1 ? 2\n"


@pytest.mark.parametrize("stream", [None, "closed"])
def test_stderr_may_be_none_or_closed(stream: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    file = open(os.devnull, "w")  # noqa: SIM115
    file.close()
    monkeypatch.setattr(sys, "stderr", None if stream is None else file)
    notice("nobody hears this")
    print("nor this", file=STDERR, flush=True)
    assert not STDERR.isatty()


def test_notices_about_one_thing_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with without_notices(GOING_ON):
        notice("how it goes on", GOING_ON)
        notice("something else")
    notice("how it goes on", GOING_ON)
    assert capsys.readouterr().err == "exogym: something else\nexogym: how it goes on\n"


# Temporary folders, and files without end


@pytest.fixture
def no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])


def test_without_a_temporary_folder_it_says_what_to_set(
    no_folder: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ExoGymError, match="set TMPDIR to a folder that you can write"), temporary_folder():
        pass
    (tmp_path / "script.py").write_text("print()")
    assert launch(["--nproc_per_node", "2", str(tmp_path / "script.py")]) == 1
    assert re.fullmatch("exogym.launch: error: no temporary folder .*set TMPDIR .*\n", capsys.readouterr().err)


@pytest.mark.parametrize("path", ["/dev/zero", "long"])
def test_a_file_without_end_is_refused(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if path == "long":
        path = str(tmp_path / "long.json")
        Path(path).write_text(" " * (SHORT_BYTES + 1))
    with pytest.raises(ArgumentError, match=r"hosts file .* is longer than 1 MiB.*, such as {"):
        HostsConfig.load(path)
    assert main(["doctor", "--hosts", path]) == 2
    assert re.fullmatch(r"exogym: error: the hosts file .*\n", capsys.readouterr().err)
    link = tmp_path / "network.json"
    link.unlink(missing_ok=True)
    link.symlink_to(path)
    with pytest.raises(ArgumentError, match=r"network file .* is longer than 1 MiB"):
        Network.of(str(link))
    (tmp_path / "short").write_text("{}")
    assert short_text(tmp_path / "short") == "{}"


# Ctrl-C


@pytest.mark.parametrize("module", ["exogym.cli", "exogym.cli.compare"])
def test_ctrl_c_while_the_command_is_loaded(module: str) -> None:
    code = f"""
import sys
class Stop:
    def find_spec(self, name, *rest):
        if name == "{module}":
            raise KeyboardInterrupt
for name in [name for name in sys.modules if name.startswith("exogym.cli")]:
    del sys.modules[name]
sys.meta_path.insert(0, Stop())
sys.argv = ["exogym", "compare"]
from exogym.__main__ import main
sys.exit(main())
"""
    done = python("-c", code)
    assert done.returncode == 130 and done.stderr.strip() == "exogym: interrupted"


@pytest.mark.slow
def test_ctrl_c_while_torch_is_loaded(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "exogym", "compare", "--steps", "1000000", "--strategies", "ddp"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + PATIENCE_S
        while "libtorch_cpu" not in Path(f"/proc/{process.pid}/maps").read_text():
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 130 and said.strip() == "exogym: interrupted"


def test_ctrl_c_with_a_tab_open(tmp_path: Path) -> None:
    """The tab waits for events, which come without end; its connection is ended, and nothing else is said."""
    (tmp_path / "runs").mkdir()
    read, write = os.pipe()
    with open(tmp_path / "err", "w+") as err:
        pid = start(
            ["-m", "exogym", "ui", "--runs", "runs", "--port", "0"], tmp_path, None, (None, write, err.fileno())
        )
        os.close(write)
        with open(read) as said:
            address = said.readline().strip()
        jar = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        browser = urllib.request.build_opener(urllib.request.ProxyHandler({}), jar)
        browser.open(address, timeout=PATIENCE_S).read()
        with browser.open(f"{address.partition('/?')[0]}/api/events", timeout=PATIENCE_S) as tab:
            assert tab.readline() == b"event: runs\n"
            os.kill(pid, signal.SIGINT)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(OSError):
                tab.read()
        err.seek(0)
        lines = [line for line in err.read().splitlines() if line.strip()]
    assert code == 130 and lines[-1] == "exogym: interrupted" and len(lines) == 2, lines  # the first: it is open


def test_runs_of_a_sweep_that_are_asked_to_stop_show_no_traceback(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Stopped(Cell):
        def settle(self, *callbacks: Any) -> Any:
            sys.exit(128 + signal.SIGTERM)

    with pytest.raises(WorkerError, match=r"2 of 2 runs ended without a result: ddp, seed 0 \(stopped by SIGTERM\); "):
        train([Stopped(load_task("digits"), DiLoCoStrategy(), k, tmp_path / str(k), label="ddp") for k in range(2)], 2)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_ctrl_c_in_a_parallel_sweep(tmp_path: Path) -> None:
    words = ["-m", "exogym", "sweep", "--processes", "2", "--sweep", "H=5,10", "--steps", "1000000", "--seeds", "1"]
    with open(tmp_path / "err", "w+") as err:
        pid = start([*words, "--nodes", "2", "--out", "sw"], tmp_path, None, (None, None, err.fileno()))
        until = time.monotonic() + PATIENCE_S
        while sum(read_status(path.parent).get("step", 0) > 0 for path in tmp_path.rglob("status.json")) < 2:
            assert time.monotonic() < until
            time.sleep(0.05)
        os.killpg(pid, signal.SIGINT)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
        err.seek(0)
        lines = [line for line in err.read().splitlines() if line.strip()]
    assert lines[-1] == "exogym: interrupted" and lines[-2].endswith("--resume --out sw") and len(lines) == 2, lines
