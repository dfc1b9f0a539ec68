"""How long a whole run takes, and the answer in three lines."""

import io
import json
import math
import re
import shlex
import sys

import numpy as np
import pytest

from exogym.cli import main
from exogym.errors import ArgumentError
from exogym.network import Network
from exogym.strategy.registry import STRATEGIES, parse_strategy
from exogym.study.advise import advise
from exogym.study.advise.prediction import DEFAULT_STRATEGIES

pytestmark = pytest.mark.usefixtures("no_pictures")

FLEET = {"parameters": 124e6, "num_nodes": 4, "network": "100Mbps,5ms", "step_seconds": 0.8}
ASKED = ["advise", "--parameters", "124M", "--nodes", "4", "--network", "100Mbps,5ms", "--step-seconds", "0.8"]
STEPS = 20_000


def rows_of(steps, **options):
    advice = advise(**FLEET | options, steps=steps)
    return advice, {row.strategy: row for row in advice.rows}


def test_a_run_ends_at_ddps_loss():
    """A strategy that needs more steps than DDP takes longer and sends more, to the same loss."""
    advice, rows = rows_of(STEPS)
    assert rows["ddp"].steps == STEPS
    for row in rows.values():
        assert row.steps == math.ceil(STEPS * row.ddp_steps)
        assert row.seconds == pytest.approx(row.steps * row.seconds_per_step)
    assert rows["diloco:H=500"].steps > rows["diloco:H=10"].steps > STEPS
    best = advice.recommended
    assert f"for {best.steps} steps" in advice.answer.takes and f"after {STEPS} steps" in advice.because


# The answer in three lines


def test_a_trial_has_at_most_100_nodes_unless_the_strategy_needs_more():
    texts = {"diloco:H=50": "--nodes 100 ", "decoupled_diloco:quorum=150": "--nodes 200 "}
    fleet = {"parameters": 1e6, "num_nodes": 200, "network": "1Gbps,1ms", "step_seconds": 1.0}
    for text, words in texts.items():
        assert words in advise(**fleet, strategies=[text]).answer.run


class Terminal(io.StringIO):
    def isatty(self):
        return True


def answer_of(printed):
    run, takes, because = printed.splitlines()[:3]
    assert takes.startswith("takes: ") and because.startswith("because ")
    return shlex.split(re.fullmatch("run: exogym (.*)", run)[1])


def runs(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0, words
    return capsys.readouterr().out


@pytest.mark.usefixtures("no_pictures")
def test_the_command_for_a_model_of_which_only_the_size_is_known_runs(tmp_path, monkeypatch, capsys):
    assert main([*ASKED, "--strategies", "ddp,diloco:H=50"]) == 0
    words = answer_of(capsys.readouterr().out)
    assert words[words.index("--strategies") + 1] == "ddp,diloco:H=50"
    shorter = [*words, "--steps", "50"]  # with all steps: see the slow test
    assert "| diloco:H=50" in runs(shorter, tmp_path, monkeypatch, capsys)


def multiple_of(strategy, capsys):
    """How many of DDP's steps a strategy needs on digits, as believed from the shipped runs, in a short run."""
    asked = [
        "--dataset",
        "digits",
        "--network",
        "wifi",
        "--step-seconds",
        "1",
        "--steps",
        "12",
        "--strategies",
        strategy,
    ]
    assert main(["advise", *asked, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["rows"][0]["ddp_steps"]


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("how", [["--speeds", "1,1,1,0.5"], ["--flops", "1e6", "--device", "cpu-core"]], ids=str)
def test_the_command_for_a_task_runs_on_its_network(how, tmp_path, monkeypatch, capsys):
    step = [] if "--flops" in how else ["--step-seconds", "10ms"]
    asked = ["--dataset", "digits", "--network", "1Mbps,20ms", "--strategies", "diloco:H=4", *step]
    multiple = multiple_of("diloco:H=4", capsys)
    asked += ["--steps", str(next(n for n in range(12, 40) if math.ceil(n * multiple) % 4 == 0))]  # whole rounds
    assert main(["advise", *asked, *how]) == 0
    words = answer_of(capsys.readouterr().out)
    assert words[words.index("--network") + 1] == "1Mbps,20ms"
    assert main(["advise", *asked, *how, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    steps = told["rows"][0]["steps"]
    assert words[words.index("--steps") + 1] == str(steps)
    assert shlex.split(told["run"])[1:] == words and told["because"] and told["recommended"] == "diloco:H=4"
    table = runs([*words, "--seeds", "1", "--device", "cpu"], tmp_path, monkeypatch, capsys)
    assert "diloco:H=4" in table and "waiting" in table
    row = next(row for row in told["rows"] if row["strategy"] == "diloco:H=4")
    (run,) = (tmp_path / "runs").glob("*/summary.csv")
    header, *lines = run.read_text().splitlines()
    ran = next(dict(zip(header.split(","), line.split(","), strict=False)) for line in lines if "diloco" in line)
    assert float(ran["time_s"]) == pytest.approx(steps * row["seconds_per_step"], rel=0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("nodes", ["1", "5"])
@pytest.mark.parametrize("text", DEFAULT_STRATEGIES)
def test_the_command_runs_for_every_strategy_that_is_compared_by_default(text, nodes, tmp_path, monkeypatch, capsys):
    asked = ["--parameters", "1M", "--nodes", nodes, "--network", "wifi", "--step-seconds", "0.1"]
    assert main(["advise", *asked, "--strategies", text]) == 0
    assert text in runs(answer_of(capsys.readouterr().out), tmp_path, monkeypatch, capsys)


def test_the_answer_leaves_out_numbers_that_say_nothing():
    one, fast = {"num_nodes": 1, "strategies": ["ddp"]}, {"network": "10TB/s"}
    assert advise(**FLEET | one, steps=STEPS).answer.takes == "4.44 h to DDP's loss, for 20000 steps of 800 ms"
    takes = advise(**FLEET | fast, strategies=["ddp"], steps=STEPS).answer.takes
    assert takes.endswith("; 4 times as soon as the fastest node alone, which probably takes 17.8 h")


def test_a_narrow_terminal_does_not_break_the_command(monkeypatch, capsys):
    for name, value in {"TERM": "xterm", "COLUMNS": "40"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main([*ASKED, "--strategies", "diloco:H=50"]) == 0
    words = answer_of(re.sub("\x1b.*?m", "", sys.stdout.getvalue()))
    assert words[-4:] == ["--steps", "400", "--seeds", "1"]


def test_the_answer_names_a_strategy_that_no_command_knows():
    (own,) = advise(**FLEET, strategies=[parse_strategy("diloco:H=50")]).rows
    advice = advise(**FLEET, strategies=[parse_strategy("diloco:H=50")])
    assert str(advice).startswith(f"run: {own.strategy}, your own strategy\n")


# Every strategy, and the founding fault


OURS = [name for name, kind in STRATEGIES.items() if kind.__module__.startswith("exogym.")]
CASES = {
    "equal": {},
    "unlike lines": {"network": Network(["1Gbps", "1Gbps", "50Mbps", "1Gbps"], "10ms")},
    "unlike speeds": {"step_seconds": [0.2, 0.4, 0.4, 0.8]},
}


@pytest.mark.parametrize("case", CASES)
def test_every_strategy_has_a_number_or_a_stated_reason(case):
    sampled = [f"{name}:client_fraction=0.5" for name in ("fedavg", "fedprox", "fedopt", "scaffold", "fednova")]
    texts = [*OURS, *sampled, "async_diloco:grace_s=1", "fedavg:local_epochs=2"]
    advice, rows = rows_of(1000, strategies=texts, **CASES[case])
    assert rows.keys() | advice.left_out.keys() == set(texts) and not rows.keys() & advice.left_out.keys()
    for row in rows.values():
        assert np.isfinite([row.seconds_per_step, row.seconds]).all()
        assert row.tx_bytes_per_step > 0
    assert set(advice.left_out) == {"async_diloco:grace_s=1", "fedavg:local_epochs=2"}
    assert "- not ranked: fedavg:local_epochs=2: " in str(advice) and "give H instead" in str(advice)
    with pytest.raises(ArgumentError, match="did you mean 'diloco'"):
        advise(**FLEET, strategies=["ddp", "dilco"])


def test_two_hosts_on_a_fast_line_and_one_behind_a_slow_line(capsys):
    """The founding fault: a method whose slowest line keeps its node waiting was recommended."""
    words = ["advise", "--parameters", "10M", "--network", "1Gbps,1Gbps,50Mbps:10ms", "--step-seconds", "0.1"]
    words += ["--strategies", "ddp,async_diloco:H=100,diloco:H=100,diloco:H=1000", "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["recommended"] == "diloco:H=100"
    rows = {row["strategy"]: row for row in told["rows"]}
    assert not rows["async_diloco:H=100"]["keeps_up"] and rows["diloco:H=1000"]["keeps_up"]


def test_the_answer_says_when_one_node_alone_probably_reaches_the_loss_sooner():
    """It computes all nodes' examples itself, in DDP's steps: `steps` times N times the time of its step."""
    fleet = {"parameters": 1e7, "num_nodes": 2, "step_seconds": 1.0, "steps": 1000}
    for network, strategy, sooner in (
        ("100Gbps", "ddp", False), ("100Gbps", "diloco:H=10", False), ("100Mbps", "ddp", True),
        ("8Mbps", "diloco:H=10", True), ("4Mbps", "diloco:H=100", True),  # faster than the node, but more steps
    ):  # fmt: skip
        advice = advise(**fleet, network=network, strategies=[strategy])
        (row,), said = advice.rows, "sooner, probably in 33.3 min" in advice.answer.takes
        assert said == sooner == (row.seconds > 2000)
    assert row.speedup > 1 and re.search("the nodes compute 1.* times as fast, and need .* steps$", advice.answer.takes)


def test_ddp_is_not_recommended_where_one_node_alone_is_faster():
    """That node reaches DDP's loss after as many steps, so a method that may never reach it is the better guess."""
    for network, best in (("100Gbps", "ddp"), ("1Mbps", "diloco:H=10000")):
        fleet = {"parameters": 1e7, "num_nodes": 2, "network": network, "step_seconds": 1.0}
        advice = advise(**fleet, strategies=["ddp", "diloco:H=10000"], steps=10_000)
        assert advice.recommended.strategy == best
        assert any("the fastest node alone" in line for line in advice.assumptions) == (best != "ddp")
    only = advise(**fleet, strategies=["ddp"])
    assert only.recommended.strategy == "ddp" and "the fastest node alone reaches the loss sooner" in only.answer.takes
    assert not any("not recommended" in line for line in only.assumptions)
