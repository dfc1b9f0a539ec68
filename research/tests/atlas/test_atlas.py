"""The atlas: equal budgets, selection that never sees test data, and tables that are the union of their parts."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from exogym.errors import ArgumentError
from exogym.strategy import DiLoCoStrategy, SimpleReduceStrategy, Strategy
from exogym.strategy.registry import STRATEGIES
from exogym.study.sweep.search import BATCH
from research.__main__ import main
from research.atlas import Atlas, Place, Table, halves, studies_of, training
from research.atlas.measures import comparable, ranks_of, results_of
from research.atlas.table import RATES, SEEDS
from research.atlas.training import Ended, TimeIsUp
from research.atlas.tuning import axes_of_method, best_of, next_trials

PLACE, METHODS, TRIALS = Place("digits", 2), ("ddp", "diloco"), 5


def atlas_in(folder: Path, methods: Any = METHODS, **options: Any) -> Atlas:
    return Atlas(folder, studies_of([PLACE], methods, 20), trials=TRIALS, device="cpu", **options)


def table_of(atlas: Atlas, path: Path) -> Table:
    """Train what is missing, and return the table."""
    table = Table(path)
    atlas.train(lambda study: table.put(atlas.place_of(study), atlas.rows(study)))
    table.write()
    return table


def without_times(table: Table) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "wall_s"} for row in table.rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    folder = tmp_path_factory.mktemp("atlas")
    yield table_of(atlas_in(folder), folder / "atlas.json")


def test_every_method_gets_the_same_budget_and_starts_with_its_defaults(whole: Table) -> None:
    for method in METHODS:
        rows = [row for row in whole.rows if row["method"] == method]
        trials = [row for row in rows if row["kind"] == "trial"]
        assert [row["number"] for row in trials] == list(range(TRIALS)) and trials[0]["options"] == {}
        assert {row["seed"] for row in trials}.isdisjoint(SEEDS) and len(rows) == TRIALS + 2 * len(SEEDS)
        (chosen,) = {json.dumps(row["options"]) for row in rows if row["kind"] == "tuned"}
        assert json.loads(chosen) == best_of([(row["options"], row["loss"]) for row in trials])
    about = whole.places["digits-2"]
    assert (about["steps"], about["trials"], about["parameters"], about["batch_size"]) == (20, TRIALS, 2410, 8)


def test_two_parts_merged_are_the_whole(whole: Table, tmp_path: Path) -> None:
    """A part is interrupted after each batch, and trained on."""
    for method in METHODS:
        for _ in range(3):
            with pytest.raises(TimeIsUp):
                table_of(atlas_in(tmp_path / method, [method], hours=0.0), tmp_path / "never.json")
        told: list[Ended] = []
        table_of(atlas_in(tmp_path / method, [method], watch=told.append), tmp_path / f"{method}.json")
        assert [at.runs_left for at in told][-1] == told[-1].left_s == 0
    both = Table(tmp_path / "both.json")
    assert [both.add(tmp_path / f"{method}.json") for method in METHODS] == [TRIALS + 2 * len(SEEDS)] * 2
    assert without_times(both) == without_times(whole)
    assert both.add(whole.path) == 0  # the same runs again


def test_studies_in_the_table_are_not_trained_again(
    whole: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page's command trains the missing rows alone, also where the runs' folders are gone."""
    atlas = atlas_in(tmp_path)
    atlas.know(whole)
    assert atlas.studies == [] and atlas.runs_left() == 0
    for kind in ("trial", "tuned", "default"):
        part = Table(tmp_path / f"{kind}.json")
        rows = [row for row in whole.rows if row["method"] != "ddp" or row["kind"] != kind or row["seed"] == 1]
        part.put(whole.places["digits-2"], rows)
        atlas = atlas_in(tmp_path)
        atlas.know(part)
        assert [study.method for study in atlas.studies] == ["ddp"], kind
    monkeypatch.setattr(training, "next_trials", lambda *_: [{"lr": "0.001"}])  # as another version of optuna
    atlas = atlas_in(tmp_path)
    atlas.know(whole)
    assert atlas.studies == []
    (first,) = (
        row for row in whole.rows if row["method"] == "diloco" and row["kind"] == "trial" and not row["options"]
    )
    assert first["arguments"]["H"] == 10
    for change, name in (({"lr": 9.0}, "lr"), ({"strategy": "diloco:H=9"}, "strategy"), ({"arguments": {"H": 9}}, "H"),
                          ({"arguments": {"unknown": 9}}, None)):  # fmt: skip
        other = Table(tmp_path / "other.json")
        known = {} if "arguments" in change else {"arguments": {}}  # as in older tables
        other.put(whole.places["digits-2"], [row | change | known if row == first else row for row in whole.rows])
        atlas = atlas_in(tmp_path)
        if name is None:
            atlas.know(other)
            assert atlas.studies == []
        else:
            with pytest.raises(ArgumentError, match=rf"other.json has digits-2, diloco with other defaults \({name}\)"):
                atlas.know(other)


def test_what_a_table_lacks_is_trained_and_nothing_else(whole: Table, tmp_path: Path) -> None:
    """The runs' folders are gone, and the table lacks the last trial and the chosen settings of DDP."""
    part = Table(tmp_path / "part.json")
    lacks = [row for row in whole.rows if row["method"] == "ddp" and (row["kind"], row["number"]) in (
        ("tuned", 0), ("trial", TRIALS - 1))]  # fmt: skip
    part.put(whole.places["digits-2"], [row for row in whole.rows if row not in lacks])
    told: list[Ended] = []
    atlas = atlas_in(tmp_path / "runs", watch=told.append)
    atlas.know(part)
    atlas.train(lambda study: part.put(atlas.place_of(study), atlas.rows(study)))
    assert len(told) == len(lacks) and without_times(part) == without_times(whole)


def test_given_inner_rates_replace_that_of_the_best_trial(whole: Table, tmp_path: Path) -> None:
    """A method without other options to tune needs no trials then, and the table takes part in a later run."""
    studies = [replace(study, rates=("0.001", "0.004")) for study in atlas_in(tmp_path).studies]
    atlas = Atlas(tmp_path, studies, trials=2, defaults=False, device="cpu")
    ddp, diloco = atlas.studies
    assert (atlas.trials_possible(ddp), atlas.trials_possible(diloco), atlas.runs_left()) == (0, 2, 2 * 6 + 2)
    table = table_of(atlas, tmp_path / "rates.json")
    rows = {(row["method"], row["kind"], row["seed"]): row for row in table.rows}
    assert len(table.rows) == 2 * 6 + 2
    assert {str(row["options"]) for row in table.rows if row["method"] == "ddp"} == {
        "{'lr': '0.001'}",
        "{'lr': '0.004'}",
    }
    best = best_of([(row["options"], row["loss"]) for row in table.rows if row["kind"] == "trial"])
    for kind, rate in zip(RATES, ("0.001", "0.004"), strict=True):
        assert all(rows["diloco", kind, seed]["options"] == {**best, "lr": rate} for seed in SEEDS)
    assert "arguments" in rows["ddp", "low rate", 1]
    again = Atlas(tmp_path / "empty", studies, trials=2, defaults=False, device="cpu")
    again.know(Table(table.path))
    assert again.studies == []
    found = json.loads(table.path.read_text())
    (wrong,) = (row for row in found["rows"] if (row["method"], row["kind"], row["seed"]) == ("diloco", "low rate", 1))
    wrong["options"]["outer_lr"] = "0.5"
    table.path.write_text(json.dumps(found))
    with pytest.raises(ArgumentError, match="diloco at digits-2 has other settings than its best trial"):
        Table(table.path)


def test_places_have_the_order_that_the_file_gives_them(whole: Table, tmp_path: Path) -> None:
    """Otherwise a page that is written after a merge differs from the page of the merged file."""
    table = Table(tmp_path / "two.json")
    for name in ("b-2", "a-2"):
        table.put(whole.places["digits-2"], [whole.rows[0] | {"place": name}])
    table.write()
    assert list(table.places) == list(Table(table.path).places) == ["a-2", "b-2"]


def test_an_older_table_learns_the_shapes(whole: Table, tmp_path: Path) -> None:
    old = json.loads(whole.path.read_text())
    shapes = old["places"]["digits-2"].pop("shapes")
    (tmp_path / "old.json").write_text(json.dumps(old))
    table = Table(tmp_path / "old.json")
    assert "shapes" not in table.places["digits-2"]
    table.add(whole.path)
    assert table.places["digits-2"]["shapes"] == shapes and sum(map(math.prod, shapes)) == 2410


def test_selection_never_sees_test_data(whole: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other labels on one half, only the losses of that half's runs change."""
    before, real = without_times(whole), halves.problem
    for half, changed in (("test", {"tuned", "default"}), ("validation", {"trial"})):

        def poisoned(name: str, data: Any = None, half: str = half) -> Any:
            task, split = real(name, data)
            pictures, labels = (torch.stack([torch.as_tensor(x) for x in part]) for part in zip(*task.val, strict=True))
            labels[halves.HALVES.index(half) :: 2] = 3
            return replace(task, val=TensorDataset(pictures, labels)), split

        monkeypatch.setattr(halves, "problem", poisoned)
        after = without_times(table_of(atlas_in(tmp_path / half, ["ddp"]), tmp_path / f"{half}.json"))
        same = [row for row in before if row["method"] == "ddp"]
        moved = {row["kind"] for row, was in zip(after, same, strict=True) if row["loss"] != was["loss"]}
        assert moved >= changed and (half == "validation" or moved == changed)


def test_a_method_without_declared_ranges_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Strategy.ranges is None
    monkeypatch.setattr(SimpleReduceStrategy, "ranges", None)
    with pytest.raises(
        ArgumentError, match="'ddp' declares no ranges, so it cannot be tuned: give SimpleReduceStrategy a class"
    ):
        atlas_in(tmp_path, ["ddp"])


def test_ranges_follow_the_inner_optimizer_and_what_the_text_fixes() -> None:
    assert str(axes_of_method("ddp", "adamw")["lr"]) == "0.0003..0.03"
    assert str(axes_of_method("ddp", "sgd")["lr"]) == str(axes_of_method("fednova", "adamw")["lr"]) == "0.003..1.0"
    assert str(axes_of_method("muloco", "adamw")["lr"]) == "0.001..0.1"
    assert list(axes_of_method("diloco:outer_lr=0.7", "adamw")) == ["lr", "outer_momentum"]
    assert axes_of_method("fedavg:inner_lr=0.1", "adamw") == {}  # another name of `lr`
    assert list(axes_of_method("demo", "adamw")) == ["lr", "compression_decay"]
    with pytest.raises(ArgumentError, match="no rates to try are known for the inner optimizer 'adafactor'"):
        axes_of_method("ddp", "adafactor")


@pytest.mark.parametrize("name", [name for name, kind in STRATEGIES.items() if kind.__module__.startswith("exogym.")])
def test_every_method_can_be_tuned(name: str) -> None:
    """Without `--strategies` one method without rates would end the whole command."""
    assert "lr" in axes_of_method(name, "adamw")


def test_proposals_depend_only_on_earlier_trials_and_stay_in_their_ranges() -> None:
    axes = axes_of_method("diloco", "adamw")
    done: list[tuple[Any, float]] = []
    while asked := next_trials(axes, done, 10):
        assert asked == next_trials(axes, list(done), 10)
        done += [(options, math.inf if k == 1 else 1.0 / (k + 1)) for k, options in enumerate(asked)]
    assert len(done) == 10 and done[0][0] == {} and len({str(options) for options, _ in done}) == 10
    for options, _ in done[1:]:
        assert all(axes[name].low <= float(value) <= axes[name].high for name, value in options.items())  # type: ignore[union-attr]
    others = [(options, 1.0 * k) for k, (options, _) in enumerate(done[:BATCH])]
    assert next_trials(axes, others, 10) != next_trials(axes, done[:BATCH], 10)  # losses matter


def test_tables_that_contradict_each_other_are_not_merged(whole: Table, tmp_path: Path) -> None:
    found = json.loads(whole.path.read_text())
    other = tmp_path / "other.json"

    def refused(change: Any, why: str) -> None:
        copy = json.loads(json.dumps(found))
        change(copy)
        other.write_text(json.dumps(copy))
        with pytest.raises(ArgumentError, match=why):
            Table(whole.path).add(other)

    refused(lambda t: t["rows"][0].update(loss=9.0), "two results of digits-2, ddp, default 0, seed 1 differ")
    refused(
        lambda t: t["places"]["digits-2"].update(trials=9), "have trials=5 and trials=9: only results with the same"
    )
    refused(lambda t: t["rows"][0].update(kind="best"), "is no table of research benchmark --trials")
    trial, tuned = (
        next(k for k, row in enumerate(found["rows"]) if row["kind"] == kind and row["options"])
        for kind in ("trial", "tuned")
    )
    refused(lambda t: t["rows"][trial].update(number=TRIALS), f"a number that no run of {TRIALS} trials has")
    refused(lambda t: t["rows"][trial].update(seed=1), "has a seed")
    refused(lambda t: t["rows"][trial].update(options={"lr": [1]}), "has an option that is no text")
    refused(
        lambda t: t["rows"][trial].update(options={"lr": "fast"}),
        "is no table of research benchmark --trials",
    )
    refused(
        lambda t: t["rows"][tuned].update(kind="low rate", options={}),
        "is no table of research benchmark --trials",
    )
    refused(lambda t: t["rows"][tuned].update(options={"lr": "1"}), "has other settings than its best trial")
    refused(lambda t: t["places"]["digits-2"].update(task="pictures"), "have task=digits and task=pictures")
    refused(lambda t: t["places"]["digits-2"].update(skew=0.9), "and skew=0.9: only results with the same")
    refused(lambda t: t.pop("places"), "is no table of research benchmark --trials")
    refused(lambda t: t["rows"][0].update(place="nowhere"), "a row's place is not described")
    for name, value in (("loss", "low"), ("loss", math.nan), ("place", []), ("seed", "1"), ("tx_bytes", 10**400)):
        refused(
            lambda t, new=(name, value): t["rows"][0].update([new]),
            "is no table of research benchmark --trials",
        )
    refused(lambda t: t["rows"][0].pop("accuracy"), "is no table of research benchmark --trials")
    refused(lambda t: t["places"]["digits-2"].update(nodes=None), "is no table of research benchmark --trials")
    for shapes in ("abc", None, [["a"]], [[5, 5]]):
        refused(
            lambda t, new=shapes: t["places"]["digits-2"].update(shapes=new),
            "is no table of research benchmark",
        )
    other.write_text("[" * 100_000)
    with pytest.raises(ArgumentError, match="is no table of research benchmark --trials"):
        Table(other)


def test_a_choice_is_checked_against_the_trials_of_both_tables(whole: Table, tmp_path: Path) -> None:
    parts = {kind: Table(tmp_path / f"{kind}.json") for kind in ("trial", "tuned")}
    for kind, part in parts.items():
        rows = [row for row in whole.rows if (row["kind"] == "trial") == (kind == "trial")]
        part.put(
            whole.places["digits-2"],
            [row | {"options": {"lr": "1"}} if row["kind"] == "tuned" else row for row in rows],
        )
        part.write()
    with pytest.raises(ArgumentError, match="has other settings than its best trial"):
        parts["trial"].add(parts["tuned"].path)
    assert all(row["kind"] == "trial" for row in parts["trial"].rows)


def test_a_method_without_its_trials_has_no_results_yet(whole: Table, tmp_path: Path) -> None:
    part = Table(tmp_path / "part.json")
    lacks = [row for row in whole.rows if (row["method"], row["kind"]) != ("ddp", "trial")]
    part.put(whole.places["digits-2"], lacks)
    assert [result.method for result in results_of(part, "digits-2")] == ["diloco"]


def test_two_processes_with_one_table_lose_no_rows(whole: Table, tmp_path: Path) -> None:
    tables = [Table(tmp_path / "shared.json") for _ in METHODS]
    for table, method in zip(tables, METHODS, strict=True):
        table.put(whole.places["digits-2"], [row for row in whole.rows if row["method"] == method])
        table.write()
    assert Table(tmp_path / "shared.json").rows == whole.rows


def test_runs_that_failed_gain_nothing(whole: Table) -> None:
    result = results_of(whole, "digits-2")[0]
    lost = [math.inf] * len(SEEDS)
    assert replace(result, default_losses=lost).gain == 1.0
    assert math.isnan(replace(result, losses=lost).gain)
    assert math.isnan(replace(result, losses=lost, default_losses=lost).gain)


def test_ranks_and_gains(whole: Table) -> None:
    results = results_of(whole, "digits-2")
    assert {result.method for result in results} == set(METHODS)
    assert results[0].loss <= results[1].loss and all(result.sensitivity >= 1 for result in results)
    (ddp,) = (result for result in results if result.method == "ddp")
    assert ddp.gain == pytest.approx(1 - sum(ddp.losses) / sum(ddp.default_losses))
    assert ddp.predicted_s["Wi-Fi"] > ddp.predicted_s["1 Gbit/s"] > 20 * whole.places["digits-2"]["step_s"]  # type: ignore[operator]
    ranks = ranks_of({"a": results, "b": results})
    assert ranks is not None and list(ranks.mean.values()) == [1.0, 2.0] and 0 < ranks.critical <= 1
    both = ranks_of({"digits-2": results, "digits-iid-4": results, "b": results})  # of three places, two have one order
    assert both is not None and both.critical == 1.0
    four = ranks_of({name: results for name in ("a", "b", "c", "d", "e", "f")})
    alike = ranks_of({f"digits-{count}": results for count in range(6)})
    assert four is not None and alike is not None and four.critical < 1 == alike.critical
    assert ranks_of({}) is None
    clients = [result for result in results if result.method != "ddp"]
    assert list(comparable({"a": results, "b": clients, "c": [ddp]})) == ["a"]
    # Two methods have the same order at two places in half of all tables: no evidence that they differ.
    assert max(ranks.mean.values()) - min(ranks.mean.values()) <= ranks.critical


def test_the_command_writes_the_page_and_others_add_to_it(whole: Table, tmp_path: Path, capfd: Any) -> None:
    page = tmp_path / "atlas.md"
    asked = ["benchmark", "--trials", "1", "--tasks", "digits", "--nodes", "2", "--strategies", "sgp", "--steps", "20"]
    assert main([*asked, "--device", "cpu", "--out", str(tmp_path / "runs"), "--page", str(page)]) == 0
    text = page.read_text()
    command = "python -m research benchmark --trials 1 --tasks digits --nodes 2 --strategies sgp --steps 20"
    assert f"{command} --page {page}" in text and f"{command} --out runs/repeat" in text
    assert re.search(r"^\| \*\*`sgp`\*\* +\|", text, re.MULTILINE) and "defaults" in text
    for name in re.findall(r"\]\((images/\S+)\)", text):
        assert 1000 < (page.parent / name).stat().st_size < 60_000
    assert main(["benchmark", "add", str(whole.path), "--page", str(page)]) == 2  # another budget
    assert "have trials=1 and trials=5" in capfd.readouterr().err
    assert main(["benchmark", "add", str(whole.path), "--page", str(tmp_path / "new.md")]) == 0
    assert "`diloco`" in (tmp_path / "new.md").read_text()
    assert "their mean ranks differ by more than 1.0" in (tmp_path / "new.md").read_text()
    capfd.readouterr()
    assert main(["benchmark", "--trials", "1", "--tasks", "clients", "--strategies", "ddp"]) == 2
    assert "none of the strategies ddp has a server that asks clients" in capfd.readouterr().err
    assert main([*asked, "--short"]) == 2 and main(["benchmark", "--hours", "1"]) == 2
    capfd.readouterr()
    assert main(["benchmark", "--hours", "0"]) == 2 and "--hours needs --trials" in capfd.readouterr().err


def test_what_the_page_cannot_hold_is_refused_before_training(
    whole: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    page = tmp_path / "atlas.md"
    whole_text = whole.path.read_text()
    page.with_suffix(".json").write_text(whole_text)
    monkeypatch.setattr(Atlas, "train", lambda *_: pytest.fail("it trains"))
    asked = ["benchmark", "--tasks", "digits", "--strategies", "sgp", "--out", str(tmp_path), "--page", str(page)]
    assert main([*asked, "--nodes", "2", "--steps", "20", "--trials", "2"]) == 2
    assert "have trials=5 and trials=2" in capfd.readouterr().err
    assert main([*asked, "--nodes", "inf", "--trials", "2"]) == 2
    assert "should be whole numbers" in capfd.readouterr().err
    claims, found = tmp_path / "claims.json", json.loads(whole_text)
    found["places"] = {"characters, nodes=4": found["places"].pop("digits-2")}
    claims.write_text(json.dumps(found | {"rows": [row | {"place": "characters, nodes=4"} for row in found["rows"]]}))
    assert main(["benchmark", "add", str(claims), "--page", str(page)]) == 2
    assert "wanted results of python -m research benchmark --trials" in capfd.readouterr().err
    found["places"] = {"digits-three": found["places"].popitem()[1]}  # it has 2 nodes
    claims.write_text(json.dumps(found | {"rows": [row | {"place": "digits-three"} for row in found["rows"]]}))
    assert main(["benchmark", "add", str(claims), "--page", str(page)]) == 2
    assert "has results of 'digits-three'" in capfd.readouterr().err
    assert page.with_suffix(".json").read_text() == whole_text
    assert main(["reproduce", "R1", "--trials", "5", "--page", str(page)]) == 2
    assert "wanted results of python -m research reproduce --trials" in capfd.readouterr().err and not page.exists()


def test_a_place_says_which_methods_it_cannot_train(tmp_path: Path) -> None:
    studies = studies_of([Place("clients", 100)], ["DDP", "FedAvg", "fedavg", "FedAvg:H=0"], 2)
    assert [study.method for study in studies] == ["fedavg", "fedavg:H=0"]  # DDP has no server
    atlas = Atlas(tmp_path, studies, trials=1, device="cpu")
    assert list(atlas.left_out) == ["clients-100, fedavg:H=0"] and "H=0" in atlas.left_out["clients-100, fedavg:H=0"]
    (study,) = atlas.studies
    assert studies_of([Place("digits", 4)], ["FedAsync"])[0].cell.speeds == (1.0,) * 4  # a clock drives it
    assert atlas.cell(study, {"lr": "0.1"}).says == "fedavg:client_fraction=0.1"
    assert atlas.cell(study, {"lr": "0.1"}).lr == 0.1
    assert isinstance(DiLoCoStrategy.ranges, tuple)
