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
    spot, nodes, seconds = Spot(0.2, 1.0, 300.0, 900.0), 10, 2000 * HOUR_S
    random = np.random.default_rng(0)
    losses = random.poisson(nodes * spot.rate_per_h * seconds / HOUR_S)
    played = seconds + losses * 300.0 + random.uniform(0, 900.0, losses).sum()
    again, _ = spot.ways(seconds, nodes)
    assert again.seconds == pytest.approx(played, rel=0.02)
    assert again.money == pytest.approx(nodes * played / HOUR_S, rel=0.02)
    assert spot.ways(seconds, 1)[0].seconds != pytest.approx(played, rel=0.02)  # all wait for the one that is lost


def test_going_on_is_the_mean_of_what_is_drawn() -> None:
    """A machine is there and away in turn; only what is there trains, and is paid."""
    spot, nodes = Spot(2.0, 3.0, 600.0), 4
    random = np.random.default_rng(1)
    there_s, away_s = random.exponential(HOUR_S / 2.0, 20_000).sum(), 20_000 * 600.0
    share = there_s / (there_s + away_s)
    _, on = spot.ways(HOUR_S, nodes)
    assert on.seconds == pytest.approx(HOUR_S / share, rel=0.02)
    assert on.money == pytest.approx(nodes * 3.0 * on.seconds / HOUR_S * share, rel=0.02)


def test_nothing_is_lost_where_nothing_is_taken_away() -> None:
    again, on = Spot(0.0, 2.0).ways(HOUR_S, 5)
    assert (again.seconds, again.money, on.seconds, on.money) == (HOUR_S, 10.0, HOUR_S, 10.0)


@pytest.mark.parametrize("wrong", [{"rate_per_h": -1}, {"price_per_h": float("nan")}, {"restart_s": "soon"}])
def test_numbers_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(ArgumentError):
        Spot(**{"rate_per_h": 0.1, "price_per_h": 1.0} | wrong)  # type: ignore[arg-type]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*ASKED, "--spot", "0.1", "--price", "2", "--restart", "6min", "--checkpoint", "12min"]
    assert main([*asked, "--strategies", "ddp,diloco:H=100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    step_s = {row["strategy"]: row["seconds_per_step"] for row in found["rows"]}
    for name, ways in found["spot"].items():
        assert ways["from_checkpoints_s"] == pytest.approx(1000 * step_s[name] * (1 + 8 * 0.1 * 0.2))
        assert ways["going_on_money"] == pytest.approx(8 * 2 * 1000 * step_s[name] / HOUR_S)
    assert main([*asked, "--strategies", "ddp"]) == 0
    said = capsys.readouterr().out
    assert "from checkpoints" in said and "taken away 0.1 times an hour" in said
    assert main([*ASKED, "--spot", "0.1"]) == 2
    assert "--price (per machine and hour) need each other" in capsys.readouterr().err
    assert main([*ASKED, "--checkpoint", "1min"]) == 2
