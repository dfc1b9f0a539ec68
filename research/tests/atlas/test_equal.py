"""Methods at equal inner rates: ranks by hand, and the command that trains the runs once."""

import json
from pathlib import Path
from typing import Any

import pytest

from exogym.errors import ArgumentError
from research.__main__ import main
from research.atlas import Table
from research.atlas.equal import ranks_at_rates, studies_at_rates
from research.atlas.measures import results_of
from research.atlas.page import text_of
from research.atlas.table import RATES, SEEDS
from research.atlas.tuning import INNER_RATES
from research.tests.tables import ABOUT
from research.tests.tables import atlas_row as row

# method: losses as tuned, at the low rate and at the high rate
LOSSES: dict[str, tuple[float, float, float | None]] = {
    "ddp": (1.0, 2.0, 1.5), "diloco": (2.0, 1.0, 3.0), "fedavg": (3.0, 3.0, None), "sparta": (0.5, 0.5, 0.5),
    "muloco": (0.1, 0.1, 0.1),
}  # fmt: skip


def table_with(folder: Path, losses: dict[str, tuple[float, float, float | None]]) -> Table:
    table = Table(folder / "atlas.json")
    for place in ("digits-2", "digits-4"):
        for method, (tuned, *at_rates) in losses.items():
            rows = [row(place, method, "trial", 0, tuned)]
            rows += [row(place, method, kind, s, tuned) for kind in ("tuned", "default") for s in SEEDS]
            for kind, loss, rate in zip(RATES, at_rates, INNER_RATES["adamw"], strict=True):
                rows += [row(place, method, kind, s, loss) | {"options": {"lr": rate}} for s in SEEDS]
            table.put(ABOUT | {"nodes": int(place[-1])}, rows)
    return table


def test_ranks_and_differences_by_hand(tmp_path: Path) -> None:
    table = table_with(tmp_path, LOSSES)
    ranks = ranks_at_rates({place: results_of(table, place) for place in table.places})
    assert {kind: each.mean for kind, each in ranks.items()} == {
        "low rate": {"sparta": 1.0, "diloco": 2.0, "ddp": 3.0, "fedavg": 4.0},
        "high rate": {"sparta": 1.0, "ddp": 2.0, "diloco": 3.0, "fedavg": 4.0},
    }
    text = " ".join(text_of(table, tmp_path / "atlas.md").replace("|", " ").split())
    assert "`sparta` 1.0 1.0 1.0 `diloco` 3.0 2.0 3.0 `ddp` 2.0 3.0 2.0 `fedavg` 4.0 4.0 4.0" in text
    assert "digits-2 -50.0% †, +100.0% † +50.0% †, failed" in text  # DDP is worse than its defaults at both rates
    assert "of 4 methods over 2 places go from 1.0 (`sparta`) to 4.0 at the low rate and from 1.0" in text
    assert f"python -m research benchmark rates --page {tmp_path / 'atlas.md'}" in text


def test_a_failed_ddp_is_named(tmp_path: Path) -> None:
    table = table_with(tmp_path, LOSSES | {"ddp": (1.0, 1.0, None)})
    text = " ".join(text_of(table, tmp_path / "atlas.md").replace("|", " ").split())
    assert "digits-2 +0.0%, `ddp` failed +200.0%, failed" in text


def test_a_place_that_lacks_a_run_or_has_other_rates_is_not_shown(tmp_path: Path) -> None:
    table = table_with(tmp_path, LOSSES)
    lost = ("digits-4", "diloco", RATES[1], 2)
    rows = [each for each in table.rows if tuple(each[key] for key in ("place", "method", "kind", "seed")) != lost]
    table.path.write_text(json.dumps({"places": table.places, "rows": rows}))
    text = text_of(Table(table.path), tmp_path / "atlas.md")
    assert "Not trained yet at these rates: digits-4." in text and "Mean ranks over digits-2." in text
    for each in rows:
        each["options"] |= {"lr": "0.001"} if each["kind"] == RATES[0] else {}
    table.path.write_text(json.dumps({"places": table.places, "rows": rows}))
    assert "## At equal inner rates" not in text_of(Table(table.path), tmp_path / "atlas.md")
    rows[0]["options"] = {"lr": "nan"}
    table.path.write_text(json.dumps({"places": table.places, "rows": rows}))
    with pytest.raises(ArgumentError, match="a rate that is not above 0"):
        Table(table.path)


def test_the_command_trains_what_the_table_lacks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page, where = tmp_path / "atlas.md", ["--out", str(tmp_path), "--page", str(tmp_path / "atlas.md")]
    assert main(["benchmark", "rates", *where]) == 2
    assert "has no place with ddp and another of ddp, diloco" in capfd.readouterr().err
    asked = ["benchmark", "--trials", "2", "--tasks", "digits", "--nodes", "2", "--steps", "20", "--device", "cpu"]
    assert main([*asked, "--strategies", "ddp,sgp,diloco", *where]) == 0
    trials = [each for each in Table(page.with_suffix(".json")).rows if each["kind"] == "trial"]
    assert main(["benchmark", "rates", "--device", "cpu", *where]) == 0
    table = Table(page.with_suffix(".json"))
    assert [study.method for study in studies_at_rates(table, "digits-2")] == ["ddp", "diloco"]  # named beforehand
    rows: dict[Any, Any] = {(r["method"], r["kind"], r["seed"]): r["options"] for r in table.rows if r["kind"] in RATES}
    assert len(rows) == 2 * len(RATES) * len(SEEDS)
    tuned = next(each["options"] for each in table.rows if (each["method"], each["kind"]) == ("diloco", "tuned"))
    for kind, rate in zip(RATES, INNER_RATES["adamw"], strict=True):
        assert rows["ddp", kind, 1] == {"lr": rate} and rows["diloco", kind, 2] == tuned | {"lr": rate}
    assert [each for each in table.rows if each["kind"] == "trial"] == trials
    assert "## At equal inner rates" in page.read_text()
