"""Steps to DDP's losses, read from a table made by hand."""

import math
from pathlib import Path

import pytest

from research.atlas.steps import curves_of, named, steps_of
from research.tests.tables import made_table


def test_steps_are_interpolated_in_the_mean_over_seeds(tmp_path: Path) -> None:
    table = made_table(tmp_path / "table.json", {
        "digits-4": {
            "ddp": [[3.0, 2.0, 1.0], [3.0, 1.8, 1.0]], "diloco": [[3.0, 2.2, 1.6]], "demo": [[3.0, 2.0, 1.95]],
            "sparta": [[3.0, 1.0, 0.5], [3.0, None]], "async_diloco:H=10": [[3.0, 0.5, 0.5]],
        },
        "words-4": {"diloco": [[3.0, 2.0, 0.5]]},  # without DDP
        "tumors-4": {"ddp": [[3.0, None, None]]},  # DDP failed
        "cars-4": {"ddp": [[3.0, 4.0, 5.0]]},  # DDP was best before its first step
    })  # fmt: skip
    curve = curves_of(table, "digits-4")["ddp"]
    assert curve.losses == (3.0, 1.9, 1.0) and curve.at(0.5) == 1.9 and curve.at(0.75) == pytest.approx(1.45)
    assert curves_of(table, "digits-4", seeds=1)["ddp"].losses == (3.0, 2.0, 1.0)
    found = steps_of(table)  # to 1.9, DDP's loss after half of the steps
    assert found["digits-4"] == {
        "ddp": 10.0, "diloco:H=10": pytest.approx(15), "demo": math.inf, "sparta": math.inf,
    }  # fmt: skip
    assert found.keys() == {"digits-4", "cars-4"} and found["cars-4"] == {"ddp": 1.0}
    higher = steps_of(table, 1.1, ["digits-4"])["digits-4"]  # to 2.09
    assert (higher["ddp"], higher["demo"]) == pytest.approx((10 * 0.91 / 1.1, 10 * 0.91))


def test_a_method_has_its_h_in_its_name() -> None:
    assert named({"method": "diloco", "strategy": "diloco:outer_lr=0.7:H=10"}) == "diloco:H=10"
    assert named({"method": "diloco:H=30", "strategy": "diloco:H=30:outer_lr=0.7"}) == "diloco:H=30"
    assert named({"method": "ddp", "strategy": "ddp"}) == "ddp"
