"""Findings of the atlas: chosen by a rule from the table, and judged by seeds that chose nothing."""

import json
import math
from pathlib import Path

import pytest

from research.__main__ import main
from research.atlas import Table
from research.atlas.findings import MARGIN, Finding, confirmed, findings_of
from research.atlas.page import text_of
from research.atlas.table import FRESH, SEEDS, TRIAL_SEEDS
from research.tests.tables import ABOUT
from research.tests.tables import atlas_row as row

PLACES = ("digits-2", "digits-4")


def table_with(folder: Path, losses: dict[str, tuple[float, float, float]], doubted: str = "") -> Table:
    """Return a table with two places. `losses` has each method's tuned loss, default loss and bytes.

    At the place `doubted` DDP's defaults are better than its tuned settings.
    """
    table = Table(folder / "atlas.json")
    for place in PLACES:
        for method, (tuned, default, sent) in losses.items():
            if (method, place) == ("ddp", doubted):
                default = tuned / 2
            rows = [row(place, method, "trial", 0, tuned, sent)]
            rows += [row(place, method, "tuned", seed, tuned, sent) for seed in SEEDS]
            rows += [row(place, method, "default", seed, default, sent) for seed in SEEDS]
            table.put(ABOUT | {"nodes": int(place[-1])}, rows)
    return table


def again(table: Table, finding: Finding, losses: dict[tuple[str, str], list[float | None]]) -> None:
    for place, method, kind in set(finding.asks):
        rows = [row(place, method, f"{kind} again", s, x) for s, x in zip(FRESH, losses[method, kind], strict=True)]
        table.put(table.places[place], rows)


LOSSES = {
    "ddp": (1.0, 1.1, 100.0), "diloco": (1.04, 1.1, 10.0), "sparta": (1.06, 3.0, 1.0), "fedavg": (0.9, 1.0, 20.0),
}  # fmt: skip


def test_the_rule_chooses_three_statements(tmp_path: Path) -> None:
    cheap, best, tuning = findings_of(table_with(tmp_path, LOSSES))
    # sparta sends less than diloco, but its loss is too high
    assert (cheap.low, cheap.high, cheap.offset) == (("diloco", "tuned"), ("ddp", "tuned"), math.log(MARGIN))
    assert "sends 1/10 of `ddp`'s bytes" in cheap.says
    assert (best.low, best.high, best.offset) == (("fedavg", "tuned"), ("ddp", "tuned"), 0.0)
    assert (tuning.low, tuning.high) == (("sparta", "tuned"), ("sparta", "default"))
    assert tuning.offset == pytest.approx(-math.log(3.0 / 1.06) / 2)
    cheaper = LOSSES | {"sparta": (1.049, 1.0, 1.0), "fedavg": (1.2, 1.2, 20.0)}
    cheap, best, tuning = findings_of(table_with(tmp_path / "b", cheaper))
    assert cheap.low[0] == "sparta" and (best.low[0], best.high[0]) == ("ddp", "diloco") and tuning.low[0] == "ddp"
    assert findings_of(table_with(tmp_path / "c", {"diloco": (1.0, 1.0, 1.0), "fedavg": (1.0, 1.0, 1.0)})) == []


def test_methods_that_share_the_best_rank_are_named(tmp_path: Path) -> None:
    equal = LOSSES | {"diloco": (0.9, 1.1, 10.0)}
    assert findings_of(table_with(tmp_path, equal))[1].why == "`diloco` shares the best mean rank with `fedavg`"
    assert findings_of(table_with(tmp_path / "b", LOSSES))[1].why == "`fedavg` has the best mean rank"


@pytest.mark.parametrize(
    ("mine", "outcome"),
    [
        ([0.90, 0.91, 0.89, 0.90, 0.92], "confirmed"),
        ([1.10, 1.12, 1.09, 1.10, 1.11], "refuted"),
        ([0.80, 1.20, 0.99, 1.01, 1.00], "open"),
        ([0.90, 0.91, 0.89, 0.90, None], "open"),
    ],
)
def test_fresh_seeds_decide(tmp_path: Path, mine: list[float | None], outcome: str) -> None:
    table = table_with(tmp_path, LOSSES)
    best = findings_of(table)[1]
    assert confirmed(best, table) is None
    again(table, best, {("fedavg", "tuned"): mine, ("ddp", "tuned"): [1.0] * len(FRESH)})
    seen = confirmed(best, table)
    assert seen is not None and seen.outcome == outcome
    if None not in mine:
        effects = [-math.log(x) for x in mine if x is not None]
        assert seen.effect == pytest.approx(sum(effects) / 5) and seen.low < seen.effect < seen.high
        assert findings_of(table)[1] == best  # fresh seeds choose nothing
        assert seen.by_place == pytest.approx(dict.fromkeys(PLACES, seen.effect))


def test_the_effect_is_told_without_a_place_where_ddp_was_badly_tuned(tmp_path: Path) -> None:
    """FedAvg wins at digits-2 only, where DDP's defaults are better than its tuned settings."""
    table = table_with(tmp_path, LOSSES, doubted="digits-2")
    best = findings_of(table)[1]
    for place, loss in zip(PLACES, (0.5, 1.25), strict=True):
        for method, value in (("fedavg", loss), ("ddp", 1.0)):
            table.put(table.places[place], [row(place, method, "tuned again", seed, value) for seed in FRESH])
    text = text_of(table, tmp_path / "atlas.md")
    assert f"**Confirmed**: the effect is {math.log(1.6) / 2:.3f}" in text
    assert f"† Without digits-2 it is {-math.log(1.25):.3f} (-0.223 to -0.223): refuted." in text
    assert best.refuted_by in text
    plain = table_with(tmp_path / "plain", LOSSES)
    again(plain, best, {("fedavg", "tuned"): [0.9] * len(FRESH), ("ddp", "tuned"): [1.0] * len(FRESH)})
    assert "Without" not in text_of(plain, tmp_path / "atlas.md")


def test_the_interval_is_students_over_five_seeds(tmp_path: Path) -> None:
    stats = pytest.importorskip("scipy.stats")
    table = table_with(tmp_path, LOSSES)
    best = findings_of(table)[1]
    losses = [0.90, 0.91, 0.89, 0.95, 0.92]
    again(table, best, {("fedavg", "tuned"): [*losses], ("ddp", "tuned"): [1.0] * len(FRESH)})
    effects = [-math.log(x) for x in losses]
    low, high = stats.t.interval(0.95, 4, loc=sum(effects) / 5, scale=stats.sem(effects))
    seen = confirmed(best, table)
    assert seen is not None and (seen.low, seen.high) == pytest.approx((low, high), rel=1e-3)


@pytest.mark.usefixtures("no_pictures")
def test_the_command_trains_fresh_seeds_and_writes_the_verdicts(tmp_path: Path) -> None:
    assert not {*FRESH} & {*SEEDS, *TRIAL_SEEDS}
    page, out = tmp_path / "atlas.md", tmp_path / "runs"
    where = ["--page", str(page), "--out", str(out)]
    assert main(
        ["benchmark", "--trials", "1", "--tasks", "digits", "--nodes", "2", "--strategies", "ddp,fedavg",
         "--steps", "10", *where]
    ) == 0  # fmt: skip
    before = page.read_text()
    assert "Not trained again yet" in before
    assert main(["benchmark", "confirm", *where]) == 0
    after, rows = page.read_text(), json.loads(page.with_suffix(".json").read_text())["rows"]
    assert "Not trained again yet" not in after and "on five fresh seeds" in after
    assert {row["seed"] for row in rows if row["kind"].endswith("again")} == {*FRESH}
    tables = [text.partition("## Over all places")[2] for text in (before, after)]
    assert tables[0] == tables[1] != ""  # fresh seeds change no table
    # what the table has is not trained again: another machine may round differently
    assert main(["benchmark", "confirm", "--page", str(page), "--out", str(tmp_path / "other")]) == 0
    assert not (tmp_path / "other").exists() and page.read_text() == after
