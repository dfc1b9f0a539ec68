"""Goodput of fleets whose accelerators fail: the formula against drawn failures, its limits, published figures."""

import json
import re

import numpy as np
import pytest
from paths import ROOT

from exogym.cli import main
from exogym.errors import ArgumentError
from exogym.study.advise import Failures, advise
from exogym.study.advise.failures import most_of_poissons

YEAR_S = 8760 * 3600.0


def drawn_goodput(failures, round_s, num_nodes, waits, rounds=100_000):
    """Play it: in each round every learner stands still once for each of its failures, and all meet, or not."""
    mean = failures.accelerators / num_nodes * round_s / failures.mtbf_s
    stops = np.random.default_rng(0).poisson(mean, (rounds, num_nodes))
    lost = (stops.max(1) if waits else stops.mean(1)) * failures.restart_s
    return round_s * rounds / (round_s * rounds + lost.sum())


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(("accelerators", "round_s", "num_nodes"), [(1e4, 500, 8), (1e6, 1, 20), (1e6, 1000, 20)])
def test_the_formula_is_the_mean_of_what_is_drawn(accelerators, round_s, num_nodes, waits):
    failures = Failures(accelerators, YEAR_S, 300.0)
    played = drawn_goodput(failures, round_s, num_nodes, waits)
    assert failures.goodput(1.0, round_s, num_nodes, waits) == pytest.approx(played, rel=0.03)
    assert failures.goodput(0.5, round_s, num_nodes, waits) == pytest.approx(played / 2, rel=0.03)


@pytest.mark.parametrize(("mean", "draws"), [(0.1, 3), (5.0, 50), (2e4, 7)])
def test_the_largest_of_draws(mean, draws):
    drawn = np.random.default_rng(1).poisson(mean, (20_000, draws)).max(1)
    assert most_of_poissons(mean, draws) == pytest.approx(drawn.mean(), rel=0.02)
    assert most_of_poissons(mean, 1) == pytest.approx(mean)


def test_the_longer_the_round_the_less_is_waited_for():
    failures = Failures(1e6, YEAR_S, "85s")
    shares = [failures.goodput(1.0, round_s, 20, True) for round_s in (1e-3, 1, 10, 100, 1e4, 1e7)]
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(1 / (1 + 1e6 * 85 / YEAR_S), rel=1e-3)  # every failure stops all
    assert shares[-1] == pytest.approx(failures.goodput(1.0, 1.0, 20, False), rel=0.02)  # each its own
    assert failures.goodput(1.0, 1.0, 1, True) == pytest.approx(shares[0], rel=1e-3)  # one learner has no others


def test_the_published_pair_is_that_of_twenty_learners_of_equal_outages():
    """27 % where all stop means 2.7 outages' time per time of computing; 88 % needs a twentieth of it."""
    restart_s = (1 / 0.27 - 1) * YEAR_S / 1.2e6
    failures = Failures(1.2e6, YEAR_S, restart_s)
    assert failures.goodput(1.0, 1e-3, 20, True) == pytest.approx(0.27, abs=0.001)
    assert failures.goodput(1.0, 1e-3, 20, False) == pytest.approx(0.88, abs=0.005)
    assert failures.goodput(1.0, 1e-3, 8, False) == pytest.approx(0.75, abs=0.005)


def test_advice_has_it_for_each_strategy():
    names = ["ddp", "diloco:H=100", "async_diloco:H=100"]
    known = {"parameters": 1e8, "num_nodes": 20, "network": "100Gbps", "step_seconds": 1.0, "strategies": names}
    rows = {row.strategy: row for row in advise(**known, failures=Failures(1e6, YEAR_S, 85)).rows}
    ddp, diloco, own = (rows[name] for name in names)
    assert ddp.goodput < diloco.goodput < own.goodput
    share = Failures(1e6, YEAR_S, 85).goodput(diloco.utilisation, 100 * diloco.seconds_per_step, 20, True)
    assert diloco.goodput == share
    assert [row.goodput for row in advise(**known).rows] == [None] * 3


def test_the_command_line(capsys):
    words = ["advise", "--parameters", "1B", "--nodes", "20", "--network", "100Gbps", "--step-seconds", "1"]
    failing = ["--accelerators", "10_000", "--mtbf", "8760h", "--restart", "5min"]
    assert main([*words, *failing, "--strategies", "diloco:H=100", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert 0.9 < row["goodput"] < row["utilisation"]
    for lacking, message in ((failing[:2], "--accelerators needs --mtbf"), (failing[4:], "--restart needs --acc")):
        assert main([*words, *lacking]) == 2 and message in capsys.readouterr().err
    assert main([*words, *failing[:3], "never", *failing[4:]]) == 2 and "--mtbf='never'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"), [((0, 1, 1), "accelerators=0"), ((1, 0, 1), "mtbf_s=0"), ((1, 1, 0), "restart_s=0")]
)
def test_what_makes_no_sense_is_refused(given, message):
    with pytest.raises(ArgumentError, match=message):
        Failures(*given)
    with pytest.raises(ArgumentError, match="at least one accelerator per node"):
        Failures(4, 1, 1).goodput(1.0, 1.0, 5, True)


@pytest.mark.parametrize(
    ("accelerators", "mtbf", "restart", "message"),
    [
        ("1M", "1us", "5min", "would fail 6.25e+10 times in a round of 500 ms"),
        ("1e300", "1e-300s", "1s", "would fail inf times"), ("1M", "8760h", "1e300h", "would never end"),
    ],
)  # fmt: skip
def test_fleets_that_only_fail(accelerators, mtbf, restart, message, capsys):
    words = ["advise", "--parameters", "100", "--nodes", "8", "--network", "100Gbps", "--step-seconds", "0.5"]
    failing = ["--strategies", "ddp", "--steps", "1000000000", "--accelerators", accelerators, "--mtbf", mtbf]
    assert main([*words, *failing, "--restart", restart]) == 2 and message in capsys.readouterr().err
    assert main([*words, *failing[:-3], "1M", "--mtbf", "8760h"]) == 0  # the control
    assert Failures(1e300, 1e300, 1).goodput(1.0, 1e-300, 8, True) == 1  # no failure comes


def test_the_page_shows_what_the_code_computes():
    page = (ROOT / "docs" / "predictions.md").read_text()
    rows = re.findall(r"^\| ([\d,]+) \| [\d.]+ (?:min|s) \| (.*) % \| (.*) % \| (.*) % \|$", page, re.M)
    assert len(rows) == 3
    for accelerators, *cells in rows:
        failures = Failures(float(accelerators.replace(",", "")), "8760h", "5min")
        shares = [failures.goodput(1.0, t, 20, waits) for t, waits in ((5.0, True), (500.0, True), (5.0, False))]
        assert [f"{100 * share:.1f}" for share in shares] == cells
