"""The command line: what it prints and writes, and one clear line for whatever is wrong."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import python

import exogym
from exogym.cli import COMMANDS, main
from exogym.cli.live import print_table
from exogym.strategy.registry import parse_strategy
from exogym.study.compare import Standing
from exogym.study.compare.comparison import FILES, SVG_FILES, Comparison
from exogym.study.compare.live import LiveTable

pytestmark = pytest.mark.usefixtures("no_pictures")

SHORT = ["compare", "--steps", "10", "--seeds", "1", "--device", "cpu"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder, with the data of packages only; how slow the machine is decides no line."""
    monkeypatch.setattr("exogym.study.compare.live.SELDOM_S", 1e9)
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
    assert sorted(path.name for path in made.iterdir() if path.is_file()) == sorted([*FILES, *SVG_FILES])
    lines = printed.out.splitlines()
    assert lines[0].startswith("8x8 handwritten digits") and "2 nodes, 10 steps" in lines[0]
    assert [line.split("|")[1].strip() for line in lines[6:9]] == ["single", "ddp", "diloco:H=5"]
    assert lines[2].startswith("Training starts at a validation loss of ") and lines[2].endswith("before you choose.")
    assert lines[-1].startswith(f"written to runs/{made.name}/: run.json")
    assert [line.split(" has finished")[0] for line in printed.err.splitlines()] == [
        "exogym: single", "exogym: ddp", "exogym: diloco:H=5"
    ]  # fmt: skip


def test_a_comparison_on_a_network(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "2", "--network", "1Mbps,20ms", "--step-seconds", "10ms", "--speeds", "1,0.5"]
    assert main([*SHORT, "--strategies", "ddp,diloco:H=5", "--processes", "2", "--target-loss", "2.5", *options]) == 0
    printed = capsys.readouterr()
    (made,) = (folder / "runs").iterdir()
    names = [*FILES, "loss_vs_time.png", *SVG_FILES, "loss_vs_time.svg"]
    assert printed.out.splitlines()[-1] == f"written to runs/{made.name}/: {', '.join(names)}"
    assert sorted(path.name for path in made.iterdir() if path.is_file()) == sorted(names)
    assert "Time predicted on 1Mbps,20ms, 10 ms to 20 ms a step" in printed.out and " to loss 2.5 |" in printed.out
    assert "Training starts at a validation loss of 2.5 (as asked for) or below: train longer" in printed.out


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
    assert (
        "left" in err.getvalue()
        and "finished" not in err.getvalue()
        and "|" not in out.getvalue()
        and "fedavg" in out.getvalue()
    )


OWN = """
from exogym.study.tasks import Task, load_task
from dataclasses import replace
def make():
    return replace(load_task("digits"), name="my task/1", description="mine")
"""


def test_a_task_of_ones_own_in_the_current_folder(folder: Path) -> None:
    (folder / "own_cli_task.py").write_text(OWN)
    exogym = Path(sys.executable).with_name("exogym")  # a script, whose folder is not the current one
    done = python(exogym, *SHORT, "--strategies", "ddp", "--dataset", "own_cli_task:make")
    assert done.returncode == 0 and done.stdout.startswith("mine. 4 nodes"), done.stderr
    assert [path.name.startswith("my-task-1-") for path in (folder / "runs").iterdir()] == [True]
    (made,) = (folder / "runs").iterdir()
    unsaid = python(exogym, "compare", "--resume", "--out", made)
    assert unsaid.returncode == 2 and "pass --dataset own_cli_task:make" in unsaid.stderr
    again = python(exogym, "compare", "--resume", "--out", made, "--dataset", "own_cli_task:make")
    assert again.returncode == 0 and again.stdout.startswith("mine. 4 nodes")


@pytest.mark.parametrize("width", [80, 50])
def test_a_narrow_terminal_cuts_nothing(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"val_loss": 2.1958, "val_accuracy": 0.362, "quality": 0.895, "reduction": 19.6, "examples_per_s": 637.0}
    row = numbers | {f"{name}_std": value / 100 for name, value in numbers.items()}
    row |= {"strategy": "sparta:p_sparta=0.05", "tx_bytes": 33e6, "notes": "H=10, outer_lr=0.4"}
    for name, value in {"TERM": "xterm", "COLUMNS": str(width)}.items():
        monkeypatch.setenv(name, value)
    result = Comparison("heading", "finding", [row], {}, {})
    out = Terminal()
    print_table(result, out)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    headers, rows = result.table()
    assert all(cell in text for cell in [*headers, *rows[0]]) and "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_a_long_comparison_without_a_terminal_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    live = LiveTable(["ddp"], 2)
    with live:
        live.update(Standing("ddp", 1, 2, 100, 1000, 2.5, 1e6, 90.0))
        assert capsys.readouterr().err == ""
        live._due = 0.0  # half a minute later
        live.update(Standing("ddp", 1, 2, 200, 1000, 2.25, 2e6, 80.0))
        live.update(Standing("ddp", 1, 2, 300, 1000, 2.0, 3e6, 70.0))
        live.update(Standing("ddp", 2, 2, 1000, 1000, 1.5, 9e6, 0.0))
    assert capsys.readouterr().err.splitlines() == [
        "exogym: ddp, seed 1 of 2, step 200 of 1000: validation loss 2.2500, 2 MB sent per node; about 1.33 min left",
        "exogym: ddp has finished: validation loss 1.5000 (of the last seed), 9 MB sent per node",
    ]


BAD = {
    "task of one's own": (["--dataset", "nowhere:make"], "there is no module 'nowhere'"),
    "dataset": (["--dataset", "digit"], "did you mean 'digits'"),
    "data": (["--data", "nowhere"], "does not exist"),
    "no data": (["--dataset", "cifar10"], "cifar10 was not found"),
    "strategy": (["--strategies", "ddp,dilco"], "did you mean 'diloco'"),
    "nodes": (["--nodes", "0"], "nodes=0"),
    "no number": (["--nodes", "four"], "--nodes"),
    "steps": (["--steps", "-1"], "steps=-1"),
    "batch size": (["--batch-size", "0"], "batch_size=0"),
    "seeds": (["--seeds", "0"], "seeds=0"),
    "learning rate": (["--lr", "-0.1"], "lr=-0.1"),
    "partition": (["--partition", "dirichle:1"], "did you mean 'dirichlet'"),
    "device": (["--device", "tpu"], "device='tpu'"),
    "processes": (["--processes", "0"], "processes=0"),
    "more processes than nodes": (["--processes", "3", "--nodes", "2"], "3"),
    "network": (["--network", "wify"], "did you mean 'wifi'"),
    "step": (["--network", "wifi", "--step-seconds", "soon"], "step_seconds='soon'"),
    "no step": (["--network", "wifi", "--step-seconds", "0"], "a step must take time"),
    "step without network": (["--step-seconds", "1"], "--step-seconds needs --network"),
    "processes=auto is retired": (["--processes", "auto"], "pass a number, such as processes=4"),
    "timeline is retired": (["--timeline"], "open the run in exogym ui"),
    "speeds without network": (["--speeds", "1,1"], "--speeds needs --network"),
    "words for speeds": (["--network", "wifi", "--speeds", "1,fast"], "--speeds='1,fast' must be numbers"),
    "no speed": (["--network", "wifi", "--nodes", "2", "--step-seconds", "1", "--speeds", "1,0"], "over 0 per node"),
    "number of speeds": (
        ["--network", "wifi", "--nodes", "2", "--step-seconds", "1", "--speeds", "1,1,1"],
        "for 3 nodes",
    ),
    "target": (["--network", "wifi", "--target-loss", "nan"], "target_loss=nan"),
    "out": (["--out", "../file/below/it"], "cannot be written"),
    "unknown option": (["--node", "3"], "unknown option --node: did you mean '--nodes'?"),
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


def test_debug_shows_where(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where ExoGym failed; of a mistake only that it was one, as its traceback ends at the user's call."""

    def failing(*given: object, **options: object) -> None:
        raise RuntimeError("no luck")

    assert main([*SHORT, "--nodes", "0", "--debug"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error and error.splitlines()[-1].startswith("exogym: error: num_nodes=0")
    monkeypatch.setattr("exogym.cli.compare.run_comparison", failing)
    assert main([*SHORT, "--debug"]) == 1
    error = capsys.readouterr().err
    assert "in failing" in error and "no luck" in error.splitlines()[-1]


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


# ---------------------------------------------------------------- advise


FLEET = ["advise", "--parameters", "124M", "--nodes", "4", "--network", "wifi", "--step-seconds", "0.8"]


def test_advice_without_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLEET, "--strategies", "ddp,diloco:H=100,diloco:H=500"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].startswith("run: exogym compare --dataset digits --strategies ddp,diloco:H=100 --nodes 4")
    assert re.match(r"takes: 2\d\.\d min to DDP's loss, for 1\d{3} steps of 1\.2\d? s;", lines[1])
    assert lines[2].startswith("because it has the smallest expected time")
    assert printed.err == "" and list(folder.iterdir()) == []
    lines = lines[next(k for k, line in enumerate(lines) if line.startswith("strategy")) :]
    assert lines[0].startswith("strategy") and "time to loss" in lines[0]
    order = [line.split()[0] for line in lines[1:4]]
    assert order == ["diloco:H=500", "diloco:H=100", "ddp"]
    assert lines[2].startswith("diloco:H=100 *")
    assert "- 4 nodes, 1.24e+08 parameters of 4 bytes on the wire" in printed.out


def test_the_recommended_text_can_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLEET, "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)
    times = [row["seconds"] for row in advice["rows"]]
    assert times == sorted(times) and len(times) > 8 and advice["assumptions"]
    parse_strategy(advice["recommended"])
    assert main([*FLEET, "--json", "--strategies", "streaming:H=100"]) != 0
    assert "unknown strategy 'streaming': it is 'streaming_diloco' here" in " ".join(capsys.readouterr().err.split())


def test_options_reach_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    def seconds(*options: str) -> float:
        assert main(["advise", "--network", "1Gbps", "--strategies", "ddp", "--json", *options]) == 0
        return float(json.loads(capsys.readouterr().out)["rows"][0]["seconds_per_step"])

    base = ["--parameters", "1e8", "--step-seconds", "1s"]
    assert seconds(*base, "--nodes", "2") == pytest.approx(1 + 4e8 * 8 / 1e9)
    assert seconds(*base, "--speeds", "1,0.5") == pytest.approx(2 + 4e8 * 8 / 1e9)
    work = ["--parameters", "1e8", "--nodes", "2", "--flops", "100T", "--device", "a100"]
    assert seconds(*work) == pytest.approx(100 / (0.4 * 312) + 4e8 * 8 / 1e9)


def test_a_named_device_replaces_a_measured_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"num_nodes": 2, "collectives": {"all_reduce": {"4000000": 0.1}}, "step_s": [7.0, 7.0]}
    Path("measured.json").write_text(json.dumps(settings | {"hosts": ["a", "b"]}))
    words = ["advise", "--network", "measured.json", "--parameters", "1M", "--strategies", "ddp"]
    for device, said in (([], "a step takes a node 7 s"), (["--device", "h100"], "h100")):
        assert main([*words, *device]) == 0
        assert said in capsys.readouterr().out


def test_advice_for_a_task(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exogym.cli.advise.measured_step_s", lambda task, batch_size: 0.5)
    assert main(["advise", "--dataset", "digits", "--network", "wifi"]) == 0
    assert "a step takes a node 500 ms" in (printed := capsys.readouterr().out) and "4 nodes, 2410 param" in printed
    assert main(["advise", "--dataset", "digits", "--network", "wifi", "--step-seconds", "measured"]) == 0
    assert "a step takes a node 500 ms" in capsys.readouterr().out


def test_advice_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TERM": "xterm", "COLUMNS": "200"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    assert main([*FLEET, "--strategies", "ddp,diloco:H=500", "--steps", "20000"]) == 0
    assert "\x1b[1m" in out.getvalue() and "ddp,diloco:H=500" in out.getvalue()


WORSE = {
    "nothing": (["--network", "wifi"], "the model's size (--parameters 124M) or a task (--dataset NAME)"),
    "both": ([*FLEET[1:], "--dataset", "digits"], "--parameters and --dataset both set the model's size"),
    "no network": (
        ["--parameters", "1M"],
        "missing: the network (--network wifi); the number of nodes (--nodes 4)",
    ),
    "all": (
        [],
        "(--network wifi); the model's size (--parameters 124M) or a task (--dataset NAME); the number",
    ),
    "parameters": (
        ["--parameters", "12X", "--nodes", "4", "--network", "wifi", "--step-seconds", "1"],
        "--parameters='12X'",
    ),
    "no parameters": (["--parameters", "0", "--nodes", "4", "--network", "wifi", "--step-seconds", "1"], "above 0"),
    "no nodes": (["--parameters", "1M", "--network", "wifi", "--step-seconds", "1"], "--nodes 4"),
    "nodes": ([*FLEET[1:], "--nodes", "0"], "--nodes=0"),
    "no node and no step": (["--parameters", "1M", "--nodes", "0", "--network", "wifi"], "--nodes=0"),
    "steps": (["--parameters", "1M", "--nodes", "4", "--network", "wifi", "--steps", "0"], "--steps=0"),
    "measured what": (
        ["--parameters", "1M", "--nodes", "4", "--network", "wifi", "--step-seconds", "measured"],
        "--flops",
    ),
    "step": ([*FLEET[1:], "--step-seconds", "soon"], "step_seconds='soon'"),
    "step and work": ([*FLEET[1:], "--flops", "1e12"], "give only one"),
    "device without work": ([*FLEET[1:], "--device", "h100"], "--step-seconds and --device both set a step's time"),
    "device": (
        ["--parameters", "1M", "--nodes", "4", "--network", "wifi", "--flops", "1T", "--device", "h10"],
        "'h100'",
    ),
    "network": ([*FLEET[1:], "--network", "wify"], "did you mean 'wifi'"),
    "speeds": ([*FLEET[1:], "--speeds", "1,1"], "speeds is for 2 nodes"),
    "strategy": ([*FLEET[1:], "--strategies", "dilco"], "did you mean 'diloco'"),
    "twice": ([*FLEET[1:], "--strategies", "ddp,ddp"], "contains 'ddp' twice"),
    "dataset": (["--dataset", "digit", "--network", "wifi"], "did you mean 'digits'"),
    "retired": ([*FLEET[1:], "--price", "1USD/h"], "--price: it is retired: multiply the hours"),
}


@pytest.mark.parametrize("name", WORSE)
def test_a_wrong_question_is_one_line(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, message = WORSE[name]
    assert main(["advise", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("exogym: error: ") and message in printed.err


@pytest.mark.parametrize(
    "command, message",
    [
        (["cluster", "cancel", "7"], "use SLURM's scancel NUMBER"),
        (["cluster", "logs", "7"], "read the job's log file"),
        (["reproduce"], "python -m research"),
    ],
)
def test_a_retired_command_says_what_to_do(
    command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    assert main(command) == 2
    error = capsys.readouterr().err
    assert f"No such command {next(w for w in reversed(command) if w.isalpha())!r}: it is retired: " in error
    assert message in error and error.count("\n") == 1


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
    timed = ("network", "step-seconds", "speeds", "target-loss")
    assert all(f"--{option}" in text for option in (*options, *timed, "device", "out", "debug", "help"))
    assert "[default: the task's]" in text
    assert main(["advise", "--help"]) == 0
    text = capsys.readouterr().out
    options = ("parameters", "dataset", "nodes", "network", "step-seconds", "flops", "device", "json")
    assert all(f"--{option}" in text for option in options)
    assert main([]) == 0
    assert "Usage: exogym" in capsys.readouterr().out
    assert main(["compre"]) == 2
    assert "compare" in capsys.readouterr().err


def test_help_and_lists_of_runs_need_no_torch(folder: Path) -> None:
    commands = "main(['--help']); main(['compre'])"
    code = f"import sys; from exogym.cli import main; {commands}; assert 'torch' not in sys.modules"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "did you mean 'compare'" in said.stderr.lower()
    (folder / "runs" / "one").mkdir(parents=True)
    (folder / "runs" / "one" / "run.json").write_text('{"schema": 1, "strategy": {"name": "DiLoCoStrategy"}}')
    subprocess.run([sys.executable, "-c", code.replace("--help", "runs', 'list")], check=True)
    control = subprocess.run([sys.executable, "-c", code.replace("--help", "compare', '--help")], capture_output=True)
    assert control.returncode and b"AssertionError" in control.stderr


def test_every_command_is_listed_with_a_line_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.partition("Commands:\n")[2].splitlines())
    assert told == {name: line for name, (_, line) in COMMANDS.items()}
    assert all(len(f"  {'distributed-train'}  {line}") <= 80 for line in told.values())
    for name in COMMANDS:
        assert main([name, "--help"]) == 0, name
        assert f"Usage: exogym {name} " in capsys.readouterr().out


def test_the_installed_command_answers(folder: Path) -> None:
    command = Path(sys.executable).with_name("exogym")
    done = subprocess.run([command, "compare", "--nodes", "0"], capture_output=True, text=True, env=os.environ)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr == (
        "exogym: error: num_nodes=0 must be a whole number of at least 1\n"
    )
    assert list(folder.iterdir()) == []
