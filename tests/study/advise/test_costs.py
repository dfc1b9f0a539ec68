"""What a whole run takes and costs, its limits, and the answer in three lines."""

import io
import json
import math
import re
import shlex
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer, NodeMesh
from exogym.callbacks import Every
from exogym.cli import main
from exogym.errors import ArgumentError
from exogym.network import Network
from exogym.strategy.registry import STRATEGIES, parse_strategy
from exogym.study.advise import Failures, Run, Spot, advise, simulate
from exogym.study.advise.costs import HOUR_S, PERIODS, Limits, Prices
from exogym.study.advise.prediction import DEFAULT_STRATEGIES
from exogym.study.tasks import load_task

pytestmark = pytest.mark.usefixtures("no_pictures")

FLEET = {"parameters": 124e6, "num_nodes": 4, "network": "100Mbps,5ms", "step_seconds": 0.8}
ASKED = ["advise", "--parameters", "124M", "--nodes", "4", "--network", "100Mbps,5ms", "--step-seconds", "0.8"]
STEPS = 20_000
PRICE = "1.5USD/h, 0.09USD/GB"


def rows_of(run, **options):
    advice = advise(**FLEET | options, run=run)
    return advice, {row.strategy: row for row in advice.rows}


# What a run costs


def test_money_is_machines_times_hours_and_gigabytes():
    _, rows = rows_of(Run(STEPS, price=PRICE))
    for row in rows.values():
        seconds = row.cost.steps * row.seconds_per_step
        money = 1.5 * 4 * seconds / HOUR_S + 0.09 * 4 * row.cost.steps * row.tx_bytes_per_step / 1e9
        assert row.cost.seconds == pytest.approx(seconds)
        assert row.cost.money.amount == pytest.approx(money) and row.cost.money.currency == "USD"
        assert not row.cost.over  # no limit, nothing over it
    assert len({row.cost.money.amount for row in rows.values()}) > 8


def test_a_run_ends_at_ddps_loss():
    """A strategy that needs more steps than DDP takes longer and sends more, so that limits count to the same loss."""
    advice, rows = rows_of(Run(STEPS))
    assert rows["ddp"].cost.steps == STEPS
    for row in rows.values():
        assert row.cost.steps == math.ceil(STEPS * row.ddp_steps)
        assert row.cost.seconds == pytest.approx(row.cost.steps * row.seconds_per_step)
    assert rows["diloco:H=500"].cost.steps > rows["diloco:H=10"].cost.steps > STEPS
    best = advice.recommended
    assert f"for {best.cost.steps} steps" in advice.answer.takes and f"after {STEPS} steps" in advice.because


@pytest.mark.parametrize("text", ["ddp", "diloco:H=5", "fedavg:H=5:transport=server", "diloco:H=5:transport=tree",
                                  "async_diloco:H=5"])  # fmt: skip
def test_the_busiest_line_carries_what_the_run_counts(text):
    """Sent and received together, of the node whose line carries most; nodes of different speeds take part."""
    steps, speeds = 100, [1.0, 1.0, 0.5]
    network = Network("1Mbps", "1ms")
    trainer = LocalTrainer(
        nn.Linear(32, 32, bias=False), TensorDataset(torch.randn(64, 32), torch.randint(0, 32, (64,))),
        loss_fn=F.cross_entropy,
    )  # fmt: skip
    given = {"network": network, "step_seconds": [0.1 / speed for speed in speeds]}
    counted = []

    def count(loop):
        counted.append(loop.fleet.comm.ledger.tx_bytes + loop.fleet.comm.ledger.rx_bytes)

    trainer.fit(
        parse_strategy(text), num_nodes=3, max_steps=steps, batch_size=1, device="cpu", final_sync=False,
        callbacks=[Every(steps, count)], **given,
    )  # fmt: skip
    (row,) = advise(parameters=1024, num_nodes=3, strategies=[text], algorithm="recorded", **given).rows
    rough = 0.1 if text.startswith("async") else 1e-9  # the end of training cuts the last round short
    assert row.line_bytes_per_step * steps == pytest.approx(counted[-1].max(), rel=rough)
    assert counted[-1].max() > counted[-1].min() or text in ("ddp", "diloco:H=5", "fedavg:H=5:transport=server")


def test_the_fastest_asynchronous_node_fills_its_line_first():
    """Its line carries more than the mean line, so a cap between the two is exceeded."""
    unlike = {"step_seconds": [0.2, 0.8, 0.8, 0.8], "strategies": ["async_diloco:H=100"]}
    _, rows = rows_of(Run(STEPS), **unlike)
    (row,) = rows.values()
    mean, most = 2 * row.tx_bytes_per_step * row.cost.steps, row.line_bytes_per_step * row.cost.steps
    assert most > 1.3 * mean
    cap = f"{mean * 1.2 / 1e9:.6f}GB/month"
    (over,) = rows_of(Run(STEPS, within=cap), **unlike)[1].values()
    (kept,) = rows_of(Run(STEPS, within=cap), **unlike | {"step_seconds": 0.35})[1].values()
    assert over.cost.over == (f"carries {most / 1e9:.3g} GB a month",) and not kept.cost.over


def test_a_cap_counts_a_period_of_a_long_run_and_all_of_a_short_run():
    for period, seconds in PERIODS.items():
        _, rows = rows_of(Run(STEPS, within=f"1PB/{period}"), strategies=["ddp", "diloco:H=100"])
        for row in rows.values():
            share = min(1.0, seconds / row.cost.seconds)
            assert row.cost.line_bytes == pytest.approx(2 * row.tx_bytes_per_step * row.cost.steps * share)
    assert rows["ddp"].cost.seconds > 24 * HOUR_S > rows["diloco:H=100"].cost.seconds


def test_spot_machines_take_longer_send_again_and_cost_more():
    spot = Spot("0.5/h", "6min", "30min")
    (plain,), (again,) = (
        rows_of(Run(STEPS, price=PRICE, spot=s), strategies=["diloco:H=100"])[1].values() for s in (None, spot)
    )
    seconds = plain.cost.seconds * (1 + 4 * 0.5 * (0.1 + 0.25))
    assert again.cost.seconds == pytest.approx(seconds)
    assert again.cost.line_bytes == pytest.approx(plain.cost.line_bytes * (1 + 4 * 0.5 * 0.25))
    sent = 0.09 * 4 * plain.cost.steps * plain.tx_bytes_per_step / 1e9
    assert again.cost.money.amount == pytest.approx(6 * seconds / HOUR_S + sent * 1.5)
    assert again.cost.going_on_s == pytest.approx(plain.cost.seconds * 1.05)
    assert again.cost.going_on_money.amount == pytest.approx(plain.cost.money.amount)
    cap = f"{plain.cost.line_bytes * 1.2 / 1e9:.3f}GB/month"  # enough without losses, too little with them
    for s, exceeded in ((None, 0), (spot, 1)):
        (row,) = rows_of(Run(STEPS, within=cap, spot=s), strategies=["diloco:H=100"])[1].values()
        assert len(row.cost.over) == exceeded


def test_failures_make_the_run_longer():
    (row,) = rows_of(Run(STEPS), strategies=["ddp"], failures=Failures(10_000, "8760h", "5min"))[1].values()
    assert row.cost.seconds == pytest.approx(STEPS * row.seconds_per_step * row.utilisation / row.goodput)
    assert row.cost.seconds > STEPS * row.seconds_per_step


def test_a_node_of_several_devices_has_one_price_and_its_inside_is_free():
    mesh = {"node": NodeMesh(shard=4, network="pcie"), "strategies": ["diloco:H=100"]}
    (row,) = rows_of(Run(STEPS, price=PRICE), **mesh)[1].values()
    hours = row.cost.steps * row.seconds_per_step / HOUR_S
    between = 2 * 3 / 4 * 124e6 * 4 / 100
    assert row.tx_bytes_per_step == pytest.approx(between)
    assert row.cost.money.amount == pytest.approx(4 * 1.5 * hours + 0.09 * 4 * row.cost.steps * between / 1e9)
    (alone,) = rows_of(Run(STEPS, price=PRICE), strategies=["diloco:H=100"])[1].values()
    assert row.cost.money.amount < alone.cost.money.amount


# What limits do to the choice


def test_no_limit_changes_no_choice():
    for run in (Run(STEPS), Run(STEPS, price=PRICE), Run(STEPS, within="99999h,99PB/month")):
        advice = advise(**FLEET, run=run)
        assert advice.recommended.strategy == advise(**FLEET, run=Run(STEPS)).recommended.strategy


@pytest.mark.parametrize(
    ("within", "price", "key"),
    [
        ("16h", "1USD/GB,0.01USD/h", lambda cost: cost.money.amount),
        ("16h", PRICE, lambda cost: cost.money.amount),
        ("150USD", PRICE, lambda cost: cost.seconds),
        ("300USD,1TB/month", PRICE, lambda cost: cost.seconds),
    ],
)
def test_the_cheapest_within_the_deadline_and_the_fastest_within_the_money(within, price, key):
    advice, rows = rows_of(Run(STEPS, price=price, within=within))
    kept = [row for row in rows.values() if not row.cost.over]
    assert 1 < len(kept) < len(rows) and advice.recommended in kept
    assert key(advice.recommended.cost) == min(key(row.cost) for row in kept if "async" not in row.strategy)
    assert f", which {len(kept)} of {len(rows)} strategies keep" in advice.because
    assert advice.because.startswith("it is the " + ("fastest" if "USD" in within else "cheapest"))


@pytest.mark.parametrize("within", ["5h", "15h", "30h", "80GB/month", "2TB/month", "100h,80GB/month", "1GB/day"])
def test_a_strategy_over_a_limit_is_marked_and_not_advised_while_another_keeps_it(within):
    advice, rows = rows_of(Run(STEPS, within=within))
    over = {text for text, row in rows.items() if row.cost.over}
    limits = Limits.of(within)
    for text, row in rows.items():
        late = limits.deadline_s is not None and row.cost.seconds > limits.deadline_s
        full = limits.cap_bytes is not None and row.cost.line_bytes > limits.cap_bytes
        assert (text in over) == (late or full)
    if len(over) < len(rows):
        assert over and advice.recommended.strategy not in over
    else:
        excess = {row.cost.excess for row in rows.values()}
        assert advice.recommended.cost.excess == min(excess) > 1
        assert re.match("no strategy keeps .*comes closest: it (carries|ends after)", advice.because)
    headers, cells = advice.table()
    at = headers.index("over the limits")
    assert {row[0].rstrip(" *") for row in cells if row[at] != "no"} == over


def test_a_deadline_counts_for_a_simulation_until_the_target_loss():
    """DiLoCo comes to the loss later in steps and earlier in time; a cap decides otherwise than the clock."""
    task, texts = load_task("digits"), "ddp,diloco:H=5"
    given = {"network": "1Mbps,20ms", "step_seconds": "10ms", "max_steps": 20, "strategies": texts, "target_loss": 2.2}
    plain = simulate(task, **given)
    first, second = (row for row in plain.rows[:2])
    assert first.target_s < second.target_s and first.cost.seconds == pytest.approx(first.target_s)
    late = simulate(task, **given, run=Run(within=f"{first.target_s * 0.5:.6f}s"))
    assert late.because.startswith("no strategy keeps") and late.recommended.strategy == first.strategy
    enough = simulate(task, **given, run=Run(price="1EUR/GB", within=f"{second.target_s * 1.01:.6f}s"))
    sent = {r.strategy: r.tx_bytes_per_step * r.target_s / r.seconds_per_step for r in enough.rows[:2]}
    assert enough.recommended.strategy == min(sent, key=sent.get)
    assert "until the validation loss is 2.2" in enough.answer.takes
    with pytest.raises(ArgumentError, match="leave steps out"):
        simulate(task, **given, run=Run(100))


# Units


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"price": "100"}, "price='100' has no unit: write '100USD/h' .* or '100USD/GB'"),
        ({"price": "1.2/h"}, "price='1.2/h' is no price: write '1.20USD/h'"),
        ({"price": "1USD/h,2EUR/GB"}, "two currencies, USD and EUR"),
        ({"price": "1USD/h,2USD/h"}, "two prices for each h"),
        ({"price": "USD/h"}, "is no price"),
        ({"price": "$1$/h"}, "is no price"),
        ({"price": "1USD/h,"}, "empty part"),
        ({"within": "100"}, "within='100' has no unit: write '100h' .*, '100GB/month' .* or '100USD'"),
        ({"within": "12hours"}, "within='12hours' has no known unit: wanted .* min, h or d"),
        ({"within": "1TB"}, "within='1TB' has no period: write '1TB/month' .h, day, week, month."),
        ({"within": "1Tb/month"}, "within='1Tb' has no known unit: wanted B, kB"),
        ({"within": "100/month"}, "within='100' has no unit: write '100MB'"),
        ({"within": "0h"}, "must be over 0 seconds"),
        ({"within": "0GB/month"}, "must be over 0"),
        ({"within": "1e308TB/month"}, "must be over 0 and finite"),
        ({"within": "0USD", "price": "1USD/h"}, "must be over 0"),
        ({"within": "1h,2h"}, "two limits of one kind"),
        ({"within": "soon"}, "within='soon' is not a number"),
        ({"within": "50USD"}, "'50 USD' limits the money: give the prices too"),
        ({"within": "50EUR", "price": "1USD/h"}, "'50 EUR' limits the money: write it in USD"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 1.5}, "steps=1.5"),
    ],
)
def test_a_number_without_a_unit_is_an_error_that_names_units(given, message):
    with pytest.raises(ArgumentError, match=message):
        Run(**{"steps": 10} | given)


def test_prices_and_limits_as_people_write_them():
    assert Prices.of("$2/h") == Prices.of("2.0 $ / h") == Prices(2.0, 0.0, "$")
    assert Limits.of("2d") == Limits.of("48 h") and Limits.of("1TB/month") == Limits.of("1000GB/month")
    assert [str(Limits.of(money)) for money in ("50RUB", "9 THB")] == ["50 RUB", "9 THB"]  # not bytes
    assert str(Limits.of("€50,12h")) == "a deadline of 12 h and €50" and str(Limits()) == "no limit"
    with pytest.raises(ArgumentError, match="need the run's length: give steps"):
        advise(**FLEET, run=Run(within="12h"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--price", "2"], "write '2USD/h'"),
        (["--within", "12"], "write '12h'"),
        (["--spot", "0.1"], "'0.1/h'"),
        (["--spot", "0.1/h", "--restart", "5"], "--restart='5' has no unit: write '5us', '5ms', '5s', '5min' or '5h'"),
        (["--spot", "0.1/h", "--checkpoint", "5"], "--checkpoint='5' has no unit"),
        (["--accelerators", "10", "--mtbf", "8760"], "--mtbf='8760' has no unit"),
        (["--network", "100"], "bandwidth='100' has no unit"),
        (["--network", "1Gbps,10"], "latency='10' has no unit"),
        (["--node", "stages=2", "--layers", "2", "--activation-bytes", "100"], "--activation-bytes='100' has no unit"),
        (["--within", "12h"], "need the run's length: give steps"),
        (["--dataset", "digits", "--parameters", "1M"], "both give the model's size"),
    ],
)
def test_the_command_asks_for_units(words, message, capsys):
    assert main([*ASKED, *words]) == 2
    assert message in capsys.readouterr().err


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
@pytest.mark.parametrize("simulated", [[], ["--simulate", "--target-loss", "2.2"]], ids=str)
def test_the_command_for_a_task_runs_on_its_network(how, simulated, tmp_path, monkeypatch, capsys):
    step = [] if "--flops" in how else ["--step-seconds", "10ms"]
    asked = ["--dataset", "digits", "--network", "1Mbps,20ms", "--strategies", "diloco:H=4", *step]
    multiple = 1.0 if simulated else multiple_of("diloco:H=4", capsys)
    asked += ["--steps", str(next(n for n in range(12, 40) if math.ceil(n * multiple) % 4 == 0))]  # whole rounds
    assert main(["advise", *asked, *how, *simulated]) == 0
    words = answer_of(capsys.readouterr().out)
    assert words[words.index("--network") + 1] == "1Mbps,20ms"
    assert main(["advise", *asked, *how, *simulated, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    steps = 12 if simulated else math.ceil(told["rows"][0]["cost"]["steps"])
    assert words[words.index("--steps") + 1] == str(steps)
    assert shlex.split(told["run"])[1:] == words and told["because"] and told["recommended"] == "diloco:H=4"
    table = runs([*words, "--seeds", "1", "--device", "cpu"], tmp_path, monkeypatch, capsys)
    assert "diloco:H=4" in table and "waiting" in table
    row = next(row for row in told["rows"] if row["strategy"] == "diloco:H=4")
    (run,) = (tmp_path / "runs").glob("*/summary.csv")
    header, *lines = run.read_text().splitlines()
    ran = next(dict(zip(header.split(","), line.split(","), strict=False)) for line in lines if "diloco" in line)
    assert float(ran["time_s"]) == pytest.approx(steps * row["seconds_per_step"], rel=0.05)


@pytest.mark.usefixtures("no_pictures")
def test_nodes_of_several_devices_are_tried_without_a_network(tmp_path, monkeypatch, capsys):
    """`compare` has no --node, so its times would not be those of the advice."""
    asked = ["--dataset", "digits", "--network", "1Mbps,20ms", "--step-seconds", "10ms", "--strategies", "diloco:H=4"]
    assert main(["advise", *asked, "--steps", "12", "--node", "shard=2,network=pcie"]) == 0
    words, steps = answer_of(capsys.readouterr().out), math.ceil(12 * multiple_of("diloco:H=4", capsys))
    assert words == shlex.split(f"compare --dataset digits --strategies ddp,diloco:H=4 --nodes 4 --steps {steps}")
    assert "diloco:H=4" in runs([*words, "--seeds", "1"], tmp_path, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("nodes", ["1", "5"])
@pytest.mark.parametrize("text", DEFAULT_STRATEGIES)
def test_the_command_runs_for_every_strategy_that_is_compared_by_default(text, nodes, tmp_path, monkeypatch, capsys):
    asked = ["--parameters", "1M", "--nodes", nodes, "--network", "wifi", "--step-seconds", "0.1"]
    assert main(["advise", *asked, "--strategies", text]) == 0
    assert text in runs(answer_of(capsys.readouterr().out), tmp_path, monkeypatch, capsys)


def test_the_answer_leaves_out_numbers_that_say_nothing():
    (one, fast), common = ({"num_nodes": 1}, {"network": "nvlink"}), {"run": Run(STEPS, within="99999h")}
    assert advise(**FLEET | one, **common).answer.takes == "4.44 h for 20000 steps of 800 ms"
    assert advise(**FLEET | fast, strategies=["diloco:H=100"]).answer.takes.endswith(
        "; 4 times as fast as the fastest node alone"
    )
    assert advise(**FLEET | fast, **common).because.endswith(
        "; within a deadline of 1e+05 h, which all strategies keep"
    )


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
    "devices": {"node": NodeMesh(shard=2, network="pcie")},
    "unlike lines": {"network": Network(["1Gbps", "1Gbps", "50Mbps", "1Gbps"], "10ms")},
    "unlike speeds": {"step_seconds": [0.2, 0.4, 0.4, 0.8]},
}


@pytest.mark.parametrize("case", CASES)
def test_every_strategy_has_a_number_or_a_stated_reason(case):
    sampled = [f"{name}:client_fraction=0.5" for name in ("fedavg", "fedprox", "fedopt", "scaffold", "fednova")]
    texts = [*OURS, *sampled, "async_diloco:grace_s=1", "fedavg:local_epochs=2"]
    advice, rows = rows_of(Run(1000, price=PRICE), strategies=texts, **CASES[case])
    assert rows.keys() | advice.left_out.keys() == set(texts) and not rows.keys() & advice.left_out.keys()
    for row in rows.values():
        assert np.isfinite([row.seconds_per_step, row.cost.seconds, row.cost.money.amount]).all()
        assert row.line_bytes_per_step >= row.tx_bytes_per_step > 0
    assert set(advice.left_out) == {"async_diloco:grace_s=1", "fedavg:local_epochs=2"}
    assert "- not ranked: fedavg:local_epochs=2: " in str(advice) and "give H instead" in str(advice)
    with pytest.raises(ArgumentError, match="did you mean 'diloco'"):
        advise(**FLEET, strategies=["ddp", "dilco"])


def test_two_hosts_on_a_fast_line_and_one_behind_a_slow_line(capsys):
    """The founding fault: a method whose slowest line keeps its node waiting was recommended."""
    words = ["advise", "--parameters", "10M", "--network", "1Gbps,1Gbps,50Mbps:10ms", "--step-seconds", "0.1"]
    words += ["--strategies", "ddp,async_diloco:H=100,diloco:H=100,diloco:H=1000", "--json"]
    for more, best in (([], "diloco:H=100"), (["--target-utilisation", "0.9"], "diloco:H=1000")):
        assert main([*words, *more]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["recommended"] == best
    rows = {row["strategy"]: row for row in told["rows"]}
    assert not rows["async_diloco:H=100"]["meets_target"] and rows["diloco:H=1000"]["meets_target"]


def test_the_answer_says_when_one_node_alone_probably_reaches_the_loss_sooner():
    """It computes all nodes' examples itself, in DDP's steps: `steps` times N times the time of its step."""
    fleet = {"parameters": 1e7, "num_nodes": 2, "step_seconds": 1.0, "run": Run(1000)}
    for network, strategy, sooner in (
        ("100Gbps", "ddp", False), ("100Gbps", "diloco:H=10", False), ("100Mbps", "ddp", True),
        ("8Mbps", "diloco:H=10", True), ("50Mbps", "diloco:H=100", True),  # faster than the node, but more steps
    ):  # fmt: skip
        advice = advise(**fleet, network=network, strategies=[strategy])
        (row,), said = advice.rows, "that node alone probably takes only 33.3 min" in advice.answer.takes
        assert said == sooner == (row.cost.seconds > 2000)
    assert row.speedup > 1 and advice.answer.takes.endswith(", because it needs fewer steps")


def test_ddp_is_not_recommended_where_one_node_alone_is_faster():
    """That node reaches DDP's loss after as many steps, so a method that may never reach it is the better guess."""
    for network, best in (("100Gbps", "ddp"), ("1Mbps", "diloco:H=10000")):
        fleet = {"parameters": 1e7, "num_nodes": 2, "network": network, "step_seconds": 1.0}
        advice = advise(**fleet, strategies=["ddp", "diloco:H=10000"], run=Run(10_000))
        assert advice.recommended.strategy == best
        assert any("the fastest node alone" in line for line in advice.assumptions) == (best != "ddp")
    only = advise(**fleet, strategies=["ddp"])
    assert only.recommended.strategy == "ddp" and "that node alone probably takes only" in only.answer.takes
    assert not any("not recommended" in line for line in only.assumptions)
    near = {"parameters": 1e7, "num_nodes": 2, "network": "300Mbps", "step_seconds": 1.0}  # a bit slower than one node
    free, held = (advise(**near, strategies=["ddp", "diloco:H=10000"], run=Run(10_000, within=within))
                  for within in (None, "6h"))  # fmt: skip
    assert free.recommended.strategy != "ddp" == held.recommended.strategy  # a deadline that only DDP keeps
    assert any("not recommended" in line for line in free.assumptions)
    assert not any("not recommended" in line for line in held.assumptions)
