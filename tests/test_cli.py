"""The command line: what it prints and writes, and one clear line for whatever is wrong."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

import exogym
from exogym.cli import main
from exogym.comparison import FILES

SHORT = ["compare", "--steps", "10", "--seeds", "1", "--device", "cpu"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder, with the data of packages only."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv("EXOGYM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return here


def test_a_comparison_without_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--strategies", "single,ddp,diloco:H=5", "--nodes", "2", "--partition", "shards:2"]) == 0
    printed = capsys.readouterr()
    (made,) = (folder / "runs").iterdir()
    assert sorted(path.name for path in made.iterdir()) == sorted(FILES)
    lines = printed.out.splitlines()
    assert lines[0].startswith("8x8 handwritten digits") and "2 nodes, 10 steps" in lines[0]
    assert [line.split("|")[1].strip() for line in lines[4:7]] == ["single", "ddp", "diloco:H=5"]
    assert "with 1/5 of its bytes; one node alone reached" in printed.out
    assert lines[-1].startswith(f"written to runs/{made.name}/: run.json")
    assert [line.split(" has finished")[0] for line in printed.err.splitlines()] == [
        "exogym: single", "exogym: ddp", "exogym: diloco:H=5"
    ]  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_comparison_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    assert main([*SHORT, "--strategies", "ddp,fedavg"]) == 0
    assert "\x1b[" in err.getvalue() and "0/1" in err.getvalue() and "10/10" in err.getvalue()
    assert "finished" not in err.getvalue() and "|" not in out.getvalue() and "fedavg" in out.getvalue()


BAD = {
    "dataset": (["--dataset", "digit"], "did you mean 'digits'"),
    "data": (["--data", "nowhere"], "does not exist"),
    "no data": (["--dataset", "cifar10"], "cifar10 was not found"),
    "strategy": (["--strategies", "ddp,dilco"], "did you mean 'diloco'"),
    "option of a strategy": (["--strategies", "diloco:HH=5"], "did you mean 'H'"),
    "value of an option": (["--strategies", "diloco:H=many"], "H='many'"),
    "nodes": (["--nodes", "0"], "nodes=0"),
    "no number": (["--nodes", "four"], "--nodes"),
    "steps": (["--steps", "-1"], "steps=-1"),
    "batch size": (["--batch-size", "0"], "batch_size=0"),
    "seeds": (["--seeds", "0"], "seeds=0"),
    "learning rate": (["--lr", "-0.1"], "lr=-0.1"),
    "partition": (["--partition", "dirichle:1"], "did you mean 'dirichlet'"),
    "alpha": (["--partition", "dirichlet:-1"], "alpha=-1.0"),
    "device": (["--device", "tpu"], "device='tpu'"),
    "processes": (["--processes", "2"], "--processes=2"),
    "out": (["--out", "../file/below/it"], "cannot be written"),
    "unknown option": (["--nods", "3"], "--nods"),
    "too much": (["digits"], "digits"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_leaves_nothing(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    options, message = BAD[name]
    (folder.parent / "file").touch()
    assert main([*SHORT, "--strategies", "ddp", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("exogym: error: ") and message in printed.err
    assert list(folder.iterdir()) == [] and [path.name for path in folder.parent.glob("f*")] == ["file"]


def test_debug_shows_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--nodes", "0", "--debug"]) == 2
    error = capsys.readouterr().err
    assert (
        "Traceback" in error and "check_count" in error and error.splitlines()[-1].startswith("exogym: error: nodes=0")
    )


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (KeyboardInterrupt(), 130, "exogym: interrupted"),
        (
            OSError(28, "No space left on device"),
            1,
            "exogym: error: OSError: [Errno 28] No space left on device (--debug",
        ),
        (exogym.errors.TrainingError("two\nlines"), 1, "exogym: error: two lines"),
    ],
)
def test_failures_that_are_not_bad_input(
    error: BaseException, status: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("exogym.cli.compare.run_comparison", fail)
    assert main(SHORT) == status
    (said,) = capsys.readouterr().err.split("\n")[-2:-1]
    assert said.startswith(line)


@pytest.mark.filterwarnings("default")
def test_warnings_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--strategies", "diloco:H=50"]) == 0
    error = capsys.readouterr().err
    assert error.startswith("exogym: warning: DiLoCoStrategy first communicates after step 50")
    assert error.count("\n") == 2  # and the line of the finished strategy


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"exogym {exogym.__version__}\n"
    assert main(["--help"]) == 0
    assert "compare" in capsys.readouterr().out
    assert main(["compare", "--help"]) == 0
    text = capsys.readouterr().out
    options = ("dataset", "data", "strategies", "nodes", "steps", "batch-size", "seeds", "lr", "partition", "processes")
    assert all(f"--{option}" in text for option in (*options, "device", "out", "debug", "help"))
    assert "[default: the task's]" in text
    assert main([]) == 0
    assert "Usage: exogym" in capsys.readouterr().out
    assert main(["compre"]) == 2
    assert "compare" in capsys.readouterr().err


def test_the_installed_command_answers(folder: Path) -> None:
    command = Path(sys.executable).with_name("exogym")
    done = subprocess.run([command, "compare", "--nodes", "0"], capture_output=True, text=True, env=os.environ)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr == (
        "exogym: error: nodes=0 must be a whole number of at least 1\n"
    )
    assert list(folder.iterdir()) == []
