"""What spot machines cost: the formulas against losses that are drawn, and the command."""

import json

import numpy as np
import pytest

from exogym.cli import main
from exogym.errors import ArgumentError
from exogym.study.advise.spot import Spot

HOUR_S = 3600.0
ASKED = ["advise", "--parameters", "124M", "--nodes", "8", "--network", "1Gbps,1ms", "--step-seconds", "0.5"]


def test_beginning_again_is_the_mean_of_what_is_drawn() -> None:
    """Losses come while training goes on; each costs the restart and what was done since the checkpoint."""
    spot, nodes, seconds = Spot(0.2, 300.0, 900.0), 10, 2000 * HOUR_S
    random = np.random.default_rng(0)
    losses = random.poisson(nodes * spot.rate_per_h * seconds / HOUR_S)
    played = seconds + losses * 300.0 + random.uniform(0, 900.0, losses).sum()
    assert spot.again_s(seconds, nodes) == pytest.approx(played, rel=0.02)
    assert spot.redone(nodes) == pytest.approx((played - losses * 300.0) / seconds, rel=0.02)
    assert spot.again_s(seconds, 1) != pytest.approx(played, rel=0.02)  # all wait for the one that is lost


def test_going_on_is_the_mean_of_what_is_drawn() -> None:
    """A machine is there and away in turn; it trains only while it is there."""
    spot = Spot("48/day", 600.0)
    random = np.random.default_rng(1)
    there_s, away_s = random.exponential(HOUR_S / 2.0, 20_000).sum(), 20_000 * 600.0
    share = there_s / (there_s + away_s)
    assert spot.going_on_s(HOUR_S) == pytest.approx(HOUR_S / share, rel=0.02)


def test_nothing_is_lost_where_nothing_is_taken_away() -> None:
    spot = Spot(0.0)
    assert (spot.again_s(HOUR_S, 5), spot.going_on_s(HOUR_S), spot.redone(5)) == (HOUR_S, HOUR_S, 1.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rate_per_h": -1}, "rate_per_h=-1"), ({"restart_s": "soon"}, "restart_s='soon'"),
        ({"rate_per_h": "0.05"}, "has no unit: write '0.05/h'"), ({"rate_per_h": "often"}, "must be a rate"),
        ({"rate_per_h": "1/s"}, "wanted /h or /day"), ({"rate_per_h": "nan/h"}, "spot='nan/h' must be a rate"),
        ({"rate_per_h": "inf/h"}, "spot='inf/h' must be a rate"), ({"rate_per_h": "-1/h"}, "spot='-1/h' must be"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Spot(**{"rate_per_h": 0.1} | wrong)


@pytest.mark.parametrize(
    ("rate", "more"),
    [
        ("1e300/h", {}), ("1e300/h", {"--price": "1USD/h"}), ("1e300/h", {"--within": "1TB/month", "--steps": "9"}),
        ("0.1/h", {"--checkpoint": "1e300h"}), ("1e200/h", {"--restart": "1e200h"}),
    ],
)  # fmt: skip
def test_a_run_that_never_ends(rate: str, more: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ASKED, "--strategies", "ddp,diloco:H=100", "--json"]
    assert main([*words, "--spot", rate, *(word for pair in more.items() for word in pair)]) == 2
    told = capsys.readouterr().err
    assert "would never end" in told and f"taken away {float(rate[:-2]):g} times an hour" in told
    assert main([*words, "--spot", "1e9/h"]) == 0  # long, and a number
    assert "Infinity" not in capsys.readouterr().out


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*ASKED, "--spot", "0.1/h", "--price", "2USD/h", "--restart", "6min", "--checkpoint", "12min"]
    assert main([*asked, "--strategies", "ddp,diloco:H=100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    run_s = {row["strategy"]: row["seconds_per_step"] * row["cost"]["steps"] for row in found["rows"]}
    for name, ways in found["spot"].items():
        assert ways["from_checkpoints_s"] == pytest.approx(run_s[name] * (1 + 8 * 0.1 * 0.2))
        assert ways["going_on_money"] == pytest.approx(8 * 2 * run_s[name] / HOUR_S)
    assert main([*asked, "--strategies", "ddp"]) == 0
    told = capsys.readouterr().out
    assert "going on" in told and "taken away 0.1 times an hour" in told
    assert main([*ASKED, "--spot", "0.1/h", "--strategies", "ddp"]) == 0
    assert "money" not in capsys.readouterr().out  # no price, no money
    assert main([*ASKED, "--spot", "0.1"]) == 2
    assert "write '0.1/h'" in capsys.readouterr().err
    assert main([*ASKED, "--checkpoint", "1min"]) == 2
