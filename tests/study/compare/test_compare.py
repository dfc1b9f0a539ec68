"""Comparisons: what is written is what was trained, under the rules that are stated."""

import csv
import html
import itertools
import json
import math
import re
import shutil
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.core.base.files import new_folder
from exogym.errors import ArgumentError, DataError, TrainingError
from exogym.network import readable_seconds
from exogym.strategy import CommunicateOptimizeStrategy, DiLoCoStrategy, OptimSpec, SimpleReduceStrategy, Strategy
from exogym.strategy.registry import STRATEGIES, parse_strategy
from exogym.study import runs
from exogym.study.cells import Cell
from exogym.study.compare import DEFAULT_STRATEGIES, Standing, colors, compare, comparison, plots
from exogym.study.compare.asked import ComparisonOptions
from exogym.study.compare.comparison import FILES, SVG_FILES, Comparison
from exogym.study.compare.plots import Curve
from exogym.study.compare.run import session_of
from exogym.study.compare.summary import Summary, Track, summary_of
from exogym.study.tasks import load_task

STEPS, SEEDS, NODES = 20, (0, 1), 4
TASK = load_task("digits")
SIZE = sum(p.numel() for p in TASK.make_model().parameters())


# ---------------------------------------------------------------- strategies as text


def test_text_becomes_arguments() -> None:
    strategy = parse_strategy("DiLoCo:H=20:outer_lr=5e-1:max_norm=none:weighting=examples", H=7, lr=0.1, max_norm=2.0)
    assert isinstance(strategy, DiLoCoStrategy)
    assert strategy.given_arguments == {  # type: ignore[attr-defined]
        "H": 20, "outer_lr": 0.5, "max_norm": None, "weighting": "examples", "lr": 0.1,
    }  # fmt: skip
    assert parse_strategy("fedavg:keep_inner_state=false").given_arguments == {"keep_inner_state": False}  # type: ignore[attr-defined]


def test_defaults_go_where_they_are_wanted() -> None:
    defaults = {"inner_optim": "sgd", "lr": 0.1, "H": 7, "outer_lr": 0.3, "warmup_steps": 3}
    names = [name for name in STRATEGIES if name != "desloc"]  # which refuses plain SGD
    given = {name: parse_strategy(name, **defaults).given_arguments for name in names}  # type: ignore[attr-defined]
    inner = {"inner_optim": "sgd", "lr": 0.1, "warmup_steps": 3}
    assert given["ddp"] == given["sparta"] == inner
    assert given["fedavg"] == inner | {"H": 7}
    assert given["diloco"] == given["sparta_diloco"] == inner | {"H": 7, "outer_lr": 0.3}
    assert given["demo"] == {"lr": 0.1, "warmup_steps": 3}
    assert parse_strategy("ddp:inner_lr=0.5", lr=0.1).inner.base_lr == 0.5
    assert "outer_lr" not in parse_strategy("diloco:outer_optim=adam", **defaults).given_arguments  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("diloco:H", "should look like option=value"),
        ("diloco:", "should look like option=value"),
        ("diloco:H=2:H=3", "gives H twice"),
        ("diloco:H=soon", "H='soon' must be a whole number"),
        ("sparta:p_sparta=much", "sparta:p_sparta=much.*must be a number"),
        ("", "unknown strategy ''"),
    ],
)
def test_wrong_text_is_explained(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_strategy(text)


def test_an_unknown_default_is_explained() -> None:
    with pytest.raises(ArgumentError, match="no default 'Hs'"):
        parse_strategy("ddp", Hs=3)


# ---------------------------------------------------------------- one comparison of everything


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def everything(out: Path) -> Comparison:
    names = [*DEFAULT_STRATEGIES, "sparta_diloco"]
    return compare(TASK, names, max_steps=STEPS, seeds=SEEDS, num_nodes=NODES, partitioner="iid", out=out)


def final(result: Comparison, label: str, seed: int) -> dict[str, float]:
    return list(result.histories[label, seed].rows(None))[-1]


def test_rows_are_what_the_histories_say(everything: Comparison) -> None:
    assert [row["strategy"] for row in everything.rows] == [*DEFAULT_STRATEGIES, "sparta_diloco"]
    for row in everything.rows:
        runs = [final(everything, row["strategy"], seed) for seed in SEEDS]
        base = [final(everything, "ddp", seed) for seed in SEEDS]
        assert [run["step"] for run in runs] == [STEPS, STEPS] and row["seeds"] == 2
        for name in ("val_loss", "val_accuracy", "tx_bytes", "payload_bytes"):
            assert row[name] == pytest.approx(statistics.fmean(run[name] for run in runs), rel=1e-12)
            assert row[f"{name}_std"] == pytest.approx(statistics.stdev(run[name] for run in runs), rel=1e-9)
        quality = [b["val_loss"] / run["val_loss"] for b, run in zip(base, runs, strict=True)]
        assert row["quality"] == pytest.approx(statistics.fmean(quality), rel=1e-12)
        assert 0 < row["examples_per_s"] < math.inf


def test_bytes_are_the_formulas(everything: Comparison) -> None:
    payload = {row["strategy"]: row["payload_bytes"] for row in everything.rows}
    tx = {row["strategy"]: row["tx_bytes"] for row in everything.rows}
    assert payload["ddp"] == STEPS * SIZE * 4
    assert payload["diloco"] == payload["fedavg"] == STEPS // TASK.H * SIZE * 4
    assert tx["ddp"] == 2 * (NODES - 1) / NODES * payload["ddp"]
    assert payload["single"] == tx["single"] == 0
    assert SIZE * 4 < payload["sparta"] < payload["ddp"] / 5  # its last average, and 0.5 % a step
    reduction = {row["strategy"]: row["reduction"] for row in everything.rows}
    assert reduction["ddp"] == 1 and reduction["diloco"] == reduction["fedavg"] == TASK.H
    assert reduction["single"] is None and reduction["demo"] == pytest.approx(tx["ddp"] / tx["demo"])


def test_all_start_from_the_same_weights(everything: Comparison) -> None:
    for seed in SEEDS:
        first = {history.rows(None)[0]["val_loss"] for (_, s), history in everything.histories.items() if s == seed}
        assert len(first) == 1
    assert everything.histories["ddp", 0].rows(None)[0]["val_loss"] not in first


def test_notes_say_what_differs(everything: Comparison) -> None:
    notes = {row["strategy"]: row["notes"] for row in everything.rows}
    assert notes["ddp"] == "" and notes["single"] == f"1 of {NODES} shards"
    assert notes["demo"] == "own rule, lr=0.002"
    assert notes["diloco"] == f"H={TASK.H}, outer_lr={TASK.outer_lr}" and notes["fedavg"] == f"H={TASK.H}"


def test_single_is_the_first_node_of_the_fleet(everything: Comparison) -> None:
    for seed in SEEDS:
        trainer = LocalTrainer(TASK.make_model(seed), TASK.train, TASK.val)
        silent = CommunicateOptimizeStrategy(TASK.inner_optim, lr=TASK.lr)
        trainer.fit(
            silent, num_nodes=NODES, max_steps=STEPS, batch_size=TASK.batch_size, partitioner="iid", seed=seed,
            final_sync=False, device="cpu",
        )  # fmt: skip
        alone = everything.histories["single", seed]
        for node, same in ((0, True), (1, False)):
            _, losses = trainer.history.column("train_loss", node=node)
            assert np.array_equal(losses, alone.column("train_loss", node=0)[1]) == same


def test_files_hold_the_same(everything: Comparison, out: Path) -> None:
    assert everything.folder is not None and [path.name for path in everything.paths] == [*FILES, *SVG_FILES]
    assert sorted(path.name for path in everything.folder.iterdir() if path.is_file()) == sorted([*FILES, *SVG_FILES])
    for name in SVG_FILES:
        text = (everything.folder / name).read_text(encoding="utf-8")
        assert ">DiLoCo</text>" in text and len(text) < 100_000  # letters stay letters
    assert list(out.iterdir()) == [everything.folder] and everything.folder.name.startswith("digits-")
    with open(everything.folder / "summary.csv", encoding="utf-8") as file:
        for row, line in zip(everything.rows, csv.DictReader(file), strict=True):
            assert line == {name: "" if value is None else str(value) for name, value in row.items()}
    with open(everything.folder / "metrics.csv", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    for (label, seed), history in everything.histories.items():
        steps, losses = history.column("val_loss")
        own = [line for line in lines if (line["strategy"], line["seed"]) == (label, str(seed))]
        assert [int(line["step"]) for line in own] == steps.tolist() and len(own) > 9
        assert [float(line["val_loss"]) for line in own] == losses.tolist()
    for path in everything.paths[3:5]:
        assert path.read_bytes().startswith(b"\x89PNG") and 10_000 < path.stat().st_size < 150_000
    saved = json.loads((everything.folder / "run.json").read_text(encoding="utf-8"))
    assert saved["setting"]["seeds"] == list(SEEDS) and saved["setting"]["lr"] == TASK.lr
    assert saved["versions"]["torch"] == torch.__version__ and saved["strategies"]["diloco"]["H"] == TASK.H
    assert len(saved["runs"]) == len(everything.histories)
    assert saved["summary"] == everything.rows and saved["target_loss"] == everything.target_loss


def test_markdown_is_a_table(everything: Comparison) -> None:
    heading, empty, finding, blank, *table = str(everything).split("\n")
    assert heading == everything.heading and finding == everything.finding and not empty and not blank
    assert len({len(line) for line in table}) == 1 and len(table) == 2 + len(everything.rows)
    assert "± " in table[2] and "10×" in table[4]


def without_speed(result: Comparison) -> list[dict[str, object]]:
    return [{k: v for k, v in row.items() if not k.startswith("examples_per_s")} for row in result.rows]


def test_seeds_fix_the_summary(everything: Comparison) -> None:
    again = compare(TASK, ["ddp", "sparta"], max_steps=STEPS, seeds=SEEDS, num_nodes=NODES, partitioner="iid")
    expected = [row for row in without_speed(everything) if row["strategy"] in ("ddp", "sparta")]
    assert without_speed(again) == expected and again.folder is None and again.paths == ()
    other = compare(TASK, ["ddp", "sparta"], max_steps=STEPS, seeds=[0, 2], num_nodes=NODES, partitioner="iid")
    assert without_speed(other)[0]["val_loss"] != expected[0]["val_loss"]


# ---------------------------------------------------------------- the finding


def test_a_task_by_name_is_the_same(everything: Comparison) -> None:
    named = compare("digits", "ddp", max_steps=STEPS, seeds=SEEDS, num_nodes=NODES, partitioner="iid")
    assert without_speed(named) == [row for row in without_speed(everything) if row["strategy"] == "ddp"]


def runs_of(label: str, ends: list[float], tx_bytes: float = 0.0, time_s: float | None = None) -> dict[Any, Track]:
    """Runs of a strategy, a seed for each loss at the end: linear from 2 in ten steps, and in bytes and time."""
    found = {}
    for seed, end in enumerate(ends):
        rows = [{"step": k, "val_loss": 2 + (end - 2) * k / 10, "tx_bytes": tx_bytes * k / 10} for k in range(11)]
        for k, each in enumerate(rows):
            each |= {} if time_s is None else {"time_s": time_s * k / 10}
        track = Track.of_rows(rows)
        assert track is not None
        found[label, seed] = track
    return found


def summarized(*runs: dict[Any, Track], target: float | None = 1.0, network: str = "") -> Summary:
    tracks = {key: track for each in runs for key, track in each.items()}
    said = {label: ("one node alone" if label == "single" else label.upper(), "") for label, _ in tracks}
    return summary_of(said, range(3), tracks, None if target is None else (target, "so"), network)


def verdict(*runs: dict[Any, Track], target: float | None = 1.0, network: str = "") -> str:
    return summarized(*runs, target=target, network=network).verdict


def test_the_verdict_names_who_needs_the_fewest_bytes() -> None:
    ddp, near = runs_of("ddp", [0.5, 0.5], 300.0), runs_of("near", [0.8, 0.81], 24.0)
    what = "reached a validation loss of 1 (so)"
    text = verdict(ddp, near, runs_of("far", [1.2, 1.2], 1.0))
    assert text == f"NEAR {what} with the fewest bytes: 20.1 B per node, 1/9.96 of DDP's. " + (
        "DDP ended with the lowest validation loss, 0.5000 ± 0.0000."
    )
    assert verdict(ddp, runs_of("far", [1.2, 1.2], 1.0)).startswith(f"Only DDP {what} in all its runs, with 200 B")
    assert verdict(ddp).startswith(f"DDP {what}, with 200 B per node. DDP ended with a validation loss of 0.5")
    lucky = runs_of("lucky", [0.8, 1.2, 0.8], 1.0)
    assert f"per node; LUCKY only in 2 of 3 runs. {'DDP'}" in verdict(ddp, lucky)
    assert verdict(lucky).startswith("No strategy reached a validation loss of 1 (so) in all its runs; LUCKY only in 2")
    alone = runs_of("single", [0.8, 0.8])
    assert "; one node alone reached it without sending a byte. " in verdict(alone, ddp)
    assert verdict(alone).startswith("No strategy that communicates reached")
    assert verdict(alone, runs_of("ddp", [1.5, 1.6], 1.0)).endswith(
        "One node alone ended with the lowest validation loss, 0.8000 ± 0.0000."
    )
    jumped = Track.of_rows([{"step": k, "val_loss": x, "tx_bytes": k} for k, x in enumerate((2, 0.9, 1.1))])
    assert jumped is not None and "DDP (which ended at 1.1) reached" in verdict({("ddp", 0): jumped})
    assert verdict(ddp, near, target=2.0).startswith("Training starts at a validation loss of 2 (so) or below: ")


def test_a_summary_has_all_strategies_between_which_the_seeds_do_not_decide() -> None:
    """The verdict names only three of them."""
    alike = {name: runs_of(name, [0.5, 0.7], 100.0) for name in "abcde"}
    worse, silent = runs_of("worse", [2.0, 2.1], 100.0), runs_of("silent", [0.5, 0.7])
    found = summarized(*alike.values(), worse, silent)
    assert found.undecided == {"val_loss": [*"abcde", "silent"], "target_bytes": [*"abcde"]}
    assert summarized(alike["a"], worse).undecided == {}
    one_seed = [{key: track for key, track in runs.items() if key[1] == 0} for runs in alike.values()]
    assert summarized(*one_seed).undecided == {}


def test_the_verdict_names_no_winner_where_seeds_overlap() -> None:
    one, other = runs_of("one", [0.5, 0.7], 100.0), runs_of("other", [0.6, 0.8], 100.0)
    text = verdict(one, other)
    assert "ONE (71.8 B per node) and OTHER (77.4 B per node) reached" in text and "fewest" in text
    assert text.count("undecided") == 2 and "ended" not in text
    ends = "ONE (0.6000 ± 0.1414) and OTHER (0.7000 ± 0.1414)"
    assert text.endswith(f"The lowest final loss is undecided between {ends}: their seeds don't separate them.")
    for apart in (runs_of("other", [0.75, 0.8], 100.0), runs_of("other", [0.71, 1.5], 100.0)):
        is_decided = apart["other", 1].last["val_loss"] < 1  # else the means are closer than the spread
        assert ("ONE ended with the lowest" in verdict(one, apart)) == is_decided
    single_seed = verdict(runs_of("one", [0.5], 1.0), runs_of("other", [0.6], 9.0))
    assert single_seed.endswith("One seed shows no spread: train with more seeds before you choose.")


def test_the_verdict_of_a_network_says_who_is_first() -> None:
    ddp, fast, slow = (runs_of(n, [0.5, 0.5], b, t) for n, b, t in (("ddp", 9, 90), ("fast", 5, 3), ("slow", 1, 60)))
    assert " On the network wifi, FAST reached it first, after 2 s; DDP after 1 min. " in verdict(
        ddp, fast, slow, network="wifi"
    )
    assert " On the network, FAST reached it first, after 2 s; SLOW after 40 s. " in verdict(slow, fast)
    assert " only FAST reached it, after 2 s. " in verdict(fast, runs_of("slow", [1.5, 1.6], 1, 60))
    near = runs_of("near", [0.5, 0.6], 5, 3)
    text = "wifi, FAST (2 s) and NEAR (2.07 s) reached it first; which of them is faster is undecided: their seeds"
    assert text in verdict(fast, near, network="wifi")
    assert "On " not in verdict(runs_of("far", [1.5, 1.5], 1, 1))


def test_a_folder_tells_the_same_summary(everything: Comparison, tmp_path: Path) -> None:
    assert everything.folder is not None
    saved = runs.summary(everything.folder)
    assert saved is not None and saved.rows == everything.rows and saved.verdict == everything.finding
    half = tmp_path / "half"
    shutil.copytree(everything.folder, half)
    about = json.loads((half / "run.json").read_text(encoding="utf-8"))
    (half / "run.json").write_text(json.dumps(about | {"state": "running"}), encoding="utf-8")
    again = runs.summary(half)
    assert again is not None and again.verdict == everything.finding
    for here, there in zip(again.rows, everything.rows, strict=True):
        assert {k: v for k, v in here.items() if k != "notes"} == {k: v for k, v in there.items() if k != "notes"}
    shutil.rmtree(half / "demo-seed-1")
    (other,) = [row for row in runs.summary(half).rows if row["strategy"] == "demo"]  # type: ignore[union-attr]
    assert other["seeds"] == 1 and other["notes"] == "1 of 2 runs have ended"
    far = runs.summary(everything.folder, target_loss=0.0)
    assert far is not None and far.verdict.startswith("No strategy reached a validation loss of 0 (as asked for)")
    with pytest.raises(ArgumentError, match="no comparison or sweep"):
        runs.summary(tmp_path)


def test_a_target_needs_no_network() -> None:
    result = compare(TASK, "ddp", max_steps=10, seeds=1, target_loss=2.2)
    assert result.target_loss == 2.2 and 0 < result.rows[0]["target_bytes"] < result.rows[0]["tx_bytes"]
    headers, (cells,) = result.table()
    assert "sent to loss 2.2" in headers and cells[headers.index("sent to loss 2.2")].endswith(" kB")


# ---------------------------------------------------------------- other problems, and trouble


def line_problem(examples: int = 64) -> tuple[Callable[[], torch.nn.Module], TensorDataset, TensorDataset]:
    x = torch.randn(examples, 3)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return lambda: torch.nn.Linear(3, 1), data, data


def test_a_problem_and_strategies_of_the_users_own() -> None:
    seen: list[Standing] = []
    with pytest.raises(ArgumentError, match="'plain' must be a text or a Strategy, not OptimSpec"):
        compare(line_problem(), {"plain": OptimSpec("sgd")}, max_steps=10)  # type: ignore[dict-item]
    strategies: dict[str, str | Strategy] = {"mine": SimpleReduceStrategy("sgd", lr=0.1), "theirs": "ddp:lr=0.2"}
    result = compare(
        line_problem(2000),
        strategies,
        num_nodes=2,
        max_steps=10,
        seeds=[5],
        loss_fn=torch.nn.functional.mse_loss,
        watch=seen.append,
    )
    assert [row["notes"] for row in result.rows] == ["SGD, lr=0.1", "AdamW, lr=0.2"]
    assert all(row["quality"] is None and row["val_accuracy"] is None for row in result.rows)
    assert result.description["val_examples"] == 500 and result.description["train_examples"] == 2000
    assert [at.label for at in seen if at.is_last] == ["mine", "theirs"]
    assert seen[0].left_s is None and seen[1].left_s > seen[-1].left_s == 0  # type: ignore[operator]
    assert seen[-1].val_loss == result.rows[1]["val_loss"] and seen[-1].tx_bytes == result.rows[1]["tx_bytes"]


STEP_S = {"single": 0.4, "ddp": 1.0, "diloco": 0.5, "demo": 1.6}  # of all nodes
FIRST_START_S, START_S = 60.0, 2.0


def test_the_time_left_is_right_within_a_factor_of_two_after_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only training moves; the first start is the longest, as imports are."""
    now_s, seen, entered = [0.0], list[tuple[float, float | None]](), list[str]()
    monkeypatch.setattr("exogym.study.cells.time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    session = session_of(ComparisonOptions(TASK, list(STEP_S), num_nodes=NODES, max_steps=STEPS, seeds=3))

    class Working:
        def __init__(self) -> None:
            self.step = -1

        def __call__(self, loop: Any) -> None:
            label = entered[-1]
            if loop.step == 0:
                now_s[0] += START_S if len(entered) > 1 else FIRST_START_S
            now_s[0] += (loop.step - max(self.step, 0)) * STEP_S[label] if loop.step else 0.0
            self.step = loop.step % STEPS

    settle = Cell.settle

    def noted(self: Cell, *callbacks: Any) -> Any:
        entered.append(self.label)
        return settle(self, Working(), *callbacks)

    monkeypatch.setattr(Cell, "settle", noted)
    session.train_all(lambda at: seen.append((now_s[0], at.left_s)))
    work_s = now_s[0] - FIRST_START_S
    after = [(at - FIRST_START_S, left_s) for at, left_s in seen if at - FIRST_START_S > work_s / 10]
    assert len(after) > 50 and seen[0][1] is None
    for at, left_s in after:
        assert left_s is not None and (work_s - at) / 2 <= left_s <= 2 * (work_s - at), (at, left_s, work_s)


def test_a_run_that_diverges_is_left_out() -> None:
    result = compare(TASK, "ddp,ddp:lr=1e30", max_steps=10, seeds=1)
    good, bad = result.rows
    assert bad["seeds"] == 0 and bad["val_loss"] is None and "1 of 1 runs failed: the loss" in bad["notes"]
    assert good["seeds"] == 1 and "ddp:lr=1e30" in result.to_markdown()
    with pytest.raises(TrainingError, match="loss"):
        compare(TASK, "ddp", max_steps=10, seeds=1, lr=1e30)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_nothing_behind(tmp_path: Path, error: type[BaseException]) -> None:
    def fail(at: Standing) -> None:
        assert len(list((tmp_path / "new" / "runs").iterdir())) == 1
        raise error

    with pytest.raises(error):
        compare(TASK, "ddp", max_steps=10, seeds=1, out=tmp_path / "new" / "runs", watch=fail)
    assert list(tmp_path.iterdir()) == []


def test_no_folder_is_used_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "now")
    for name in ("x-now", "x-now-2", "x-now-3"):
        assert new_folder(tmp_path, "x") == tmp_path / name
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_that_cannot_be_made_is_known_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="cannot be written"):
        compare(TASK, "ddp", out=tmp_path / "file" / "below", watch=lambda at: pytest.fail("it trained"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


ONE_MODEL = TASK.build()


def growing_model():
    """Return a function whose every model has one more layer than the model before."""
    count = itertools.count(1)
    return lambda: torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(next(count))))


def unseeded_model(draw: np.random.Generator = np.random.default_rng(0)) -> torch.nn.Module:  # noqa: B008
    model = TASK.build()
    next(model.parameters()).data.fill_(draw.random())
    return model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_nodes": 0}, "num_nodes=0"),
        ({"max_steps": 1.5}, "max_steps=1.5"),
        ({"seeds": 0}, "seeds=0"),
        ({"seeds": [1, 1]}, "different whole numbers"),
        ({"seeds": []}, "must be the number of seeds"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"strategies": "ddp,sngle"}, "did you mean 'single'"),
        ({"strategies": "ddp,ddp"}, "contains 'ddp' twice"),
        ({"strategies": ()}, "contains no strategy"),
        ({"partitioner": "shard:2"}, "did you mean 'shards'"),
        ({"partitioner": 1.5}, "partitioner=1.5 is not a Partitioner"),
        ({"partitioner": 0}, "partitioner=0 is not a Partitioner"),
        ({"partitioner": "shards:1000"}, "use shards_per_node="),
        ({"seeds": 1.5}, "must be the number of seeds"),
        ({"seeds": [[]]}, "different whole numbers"),
        ({"strategies": 3}, "strategies=3 must be text"),
        ({"problem": "digits", "data": 3}, "data=3 must be the path"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"strategies": [SimpleReduceStrategy()]}, "SimpleReduceStrategy has no name here: pass a dict"),
        ({"strategies": SimpleReduceStrategy()}, "SimpleReduceStrategy has no name here: pass a dict"),
        ({"problem": 3}, "must be a Task, .* not 3"),
        ({"problem": (TASK.build, TASK.train)}, "make_model, train, val.*not a tuple of 2"),
        ({"problem": (TASK.build(), TASK.train, TASK.val)}, "pass a function that returns a new model"),
        ({"problem": (lambda: ONE_MODEL, TASK.train, TASK.val)}, "returned the same weights twice"),
        ({"problem": (lambda: unseeded_model(), TASK.train, TASK.val)}, "different weights for the same seed"),
        ({"problem": (growing_model(), TASK.train, TASK.val)}, "different weights for the same seed"),
        ({"problem": "digit"}, "did you mean 'digits'"),
        ({"problem": TASK, "data": "here"}, "data='here' needs a named task"),
        ({"problem": (TASK.build, lambda rank, num_nodes, is_train: TASK.train, TASK.val)}, "instead of a factory"),
        ({"nodes": 3}, "no argument 'nodes': did you mean 'num_nodes'"),
        ({"steps": 3}, "no argument 'steps': did you mean 'max_steps'"),
        ({"partition": "iid"}, "no argument 'partition': did you mean 'partitioner'"),
    ],
)
def test_wrong_arguments_are_explained(options: dict[str, object], message: str) -> None:
    with pytest.raises((ArgumentError, DataError), match=message):
        compare(**{"problem": TASK, "strategies": "ddp", **options}, watch=lambda at: pytest.fail("it trained"))


def test_a_cut_that_leaves_a_node_without_data_is_known_before_training() -> None:
    with pytest.raises(DataError, match="Dirichlet"):
        compare(TASK, "ddp", num_nodes=1000, watch=lambda at: pytest.fail("it trained"))


# ---------------------------------------------------------------- pictures


@pytest.mark.parametrize("x", ["step", "bytes"])
def test_pictures_of_odd_comparisons(x: str, tmp_path: Path) -> None:
    steps = np.arange(5)
    silent = Curve("one node alone", steps, np.full((1, 5), 1.5), np.zeros(5))
    many = [Curve(f"strategy {i}", steps, np.full((2, 5), 1.0 + i / 100), steps * 10.0**i) for i in range(9)]
    long = [replace(curve, title=f"{curve.title} {'with every option ' * 5}") for curve in many]
    for name, curves in {"silent": [silent], "many": [silent, *many], "long": long, "one long": long[:1]}.items():
        plots.draw([tmp_path / f"{name}.png"], curves, x, None, "heading")
    blank, full = (tmp_path / f"{name}.png" for name in ("silent", "many"))
    assert full.stat().st_size > 1.5 * blank.stat().st_size > 5000


def ends_at(title: str, tx_bytes: float, loss: float, steps: np.ndarray) -> Curve:
    losses = loss + 2 * np.exp(-steps / 3)
    return Curve(title, steps, np.stack([losses * 0.99, losses * 1.01]), tx_bytes * steps / steps[-1])


def test_every_title_is_beside_the_axes() -> None:
    """From the highest final loss to the lowest, within the picture, and right of all curves."""
    steps = np.arange(1.0, 11)
    alone = Curve("one node alone", steps, np.full((2, 10), 2.3), np.zeros(10))
    sparta = ends_at("SPARTA (p_sparta=0.05)", 33e6, 2.15, steps)
    shakespeare = [alone, sparta, ends_at("FedAvg", 64e6, 2.13, steps), ends_at("DiLoCo", 65e6, 2.09, steps),
                   ends_at("DDP", 646e6, 1.96, steps)]  # fmt: skip
    for curves in (shakespeare, [sparta], [alone, ends_at("DDP", 646e6, 1.96, steps)]):
        figure = plots.figure_of(curves, "bytes")
        figure.draw_without_rendering()
        (axes,) = figure.axes
        legend = axes.get_legend()
        assert legend is not None
        assert [text.get_text() for text in legend.get_texts()] == [curve.title for curve in curves]
        box = legend.get_window_extent()
        assert axes.get_window_extent().x1 <= box.x0 and box.x1 <= figure.bbox.x1


# ---------------------------------------------------------------- colors, and what a notebook shows


def test_every_strategy_has_its_place_in_the_colors() -> None:
    assert sorted(colors.ORDER) == sorted(
        n for n, kind in STRATEGIES.items() if kind.__module__.startswith("exogym.strategy.")
    )
    first = colors.ORDER[: len(colors.COLORS)]
    assert len({colors.look_of(name).color for name in first}) == len(first)


def test_a_strategy_has_one_color_in_every_picture() -> None:
    """Whatever else is in it, in whatever order. Options change the stroke alone; gray is for one node alone."""
    some = ["ddp", "single", "diloco:H=5", "mine", "diloco:H=20", "sparta"]
    looks, turned = colors.looks_of(some), colors.looks_of(some[::-1])
    assert {k: look.color for k, look in looks.items()} == {k: look.color for k, look in turned.items()}
    assert looks["diloco:H=5"].color == looks["diloco:H=20"].color == colors.look_of("DiLoCo").color
    assert len(set(looks.values())) == len(some) and looks["single"].color == colors.GRAY
    figure = plots.figure_of([ends_at("Any title", 9.0, 1.0, np.arange(1.0, 9.0))], heading="one")
    assert figure.axes[0].lines[0].get_color() == colors.look_of("Any title").color
    named = replace(ends_at("Any title", 9.0, 1.0, np.arange(1.0, 9.0)), label="sparta")
    assert plots.figure_of([named]).axes[0].lines[0].get_color() == colors.look_of("sparta").color


def test_of_many_curves_the_best_eight_have_names() -> None:
    steps = np.arange(1.0, 9.0)
    many = [replace(ends_at(f"title {k}", 9.0, 1.0 + k, steps), label=f"x{k}") for k in range(12)]
    axes = plots.figure_of(many).axes[0]
    drawn = [line.get_color() for line in axes.lines]
    assert drawn.count(colors.GRAY) == 4 and len(drawn) == 12
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert {f"title {k}" for k in range(8)} | {"4 more"} <= set(texts) and "title 8" not in texts


def test_a_comparison_shows_itself(everything: Comparison) -> None:
    for x in ("step", "bytes"):
        for log in (False, True):
            axes = everything.plot(x, log=log).axes[0]
            assert axes.get_xscale() == ("log" if log else "linear") and len(axes.lines) == len(everything.rows)
            assert len(axes.collections) >= len(everything.rows) - 1  # the bands, but that of a level line
    assert everything.plot().axes[0].get_xscale() == "log" != everything.plot("step").axes[0].get_xscale()
    assert everything.plot()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match=r"x='time'.*pass a network to compare"):
        everything.plot("time")
    with pytest.raises(ArgumentError, match=r"x='steps'.*'step'"):
        everything.plot("steps")
    frame = everything.to_pandas()
    assert frame["strategy"].tolist() == [row["strategy"] for row in everything.rows] and "target_bytes" in frame
    text = everything._repr_html_()
    assert (
        "<img src=" in text
        and "<table><tr><th>strategy</th>" in text
        and text.count("<tr>") == 1 + len(everything.rows)
    )
    assert (
        html.escape(everything.finding) in text and len(repr(everything)) < 1000 and "single, ddp" in repr(everything)
    )


def test_each_color_of_an_svg_has_a_dark_one(tmp_path: Path) -> None:
    curves = [Curve(f"{k}", np.array([1, 2]), np.ones((2, 2)), np.array([1.0, 2.0]), label=name)
              for k, name in enumerate([*STRATEGIES, "single"])]  # fmt: skip
    picture = plots.figure_of(curves, "bytes", target_loss=0.5)
    plots.save(picture, tmp_path / "a.svg")
    style, _, drawn = (tmp_path / "a.svg").read_text().partition("</style>")
    used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", drawn)) - {colors.GRAY.lower()}  # the same in the dark
    known = set(re.findall(r'style\*="(?:fill|stroke): (#[0-9a-f]{6})"', style))
    assert "prefers-color-scheme: dark" in style and len(used) > 6 and used <= known


def test_the_titles_beside_the_curves_of_an_svg_are_in_the_picture(tmp_path: Path) -> None:
    curves = [Curve(f"title {k}", np.array([0, 2]), np.full((1, 2), k + 1.0), np.ones(2)) for k in range(3)]
    plots.save(plots.figure_of(curves), tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text()
    width = float(re.findall(r'width="([\d.]+)pt"', drawn)[0])
    places = [float(x) for x in re.findall(r' x="([\d.]+)"[^>]*>title', drawn)]
    assert len(places) == 3 and all(0.7 * width < x < 0.95 * width for x in places)


def test_a_spread_below_the_shown_digits_is_not_shown() -> None:
    row = {"seeds": 2, "target_runs": 2, "time_s": 0.11, "time_s_std": 2e-6}
    assert comparison.reached_text(row, "time_s", readable_seconds) == "110 ms"
    assert comparison.reached_text(row | {"time_s_std": 2e-3}, "time_s", readable_seconds) == "110 ms ± 2 ms"
    assert comparison.reached_text(row | {"time_s_std": 0.2}, "time_s", readable_seconds) == "110 ms ± 200 ms"


def test_progress_is_shown_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Standing] = []
    compare(TASK, "ddp,single", max_steps=10, seeds=1, num_nodes=2, progress=True, watch=seen.append)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == ["ddp has finished", "single has finished"]
    assert "left" in lines[0] and [at.label for at in seen if at.is_last] == ["ddp", "single"]
    compare(TASK, "ddp", max_steps=10, seeds=1, num_nodes=2)
    assert capsys.readouterr().err == ""
