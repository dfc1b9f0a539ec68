"""Comparisons on a network: predicted times, the target loss, and the files."""

import csv
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exogym.core.clock import Clock, StepTime
from exogym.core.record.history import History
from exogym.errors import ArgumentError
from exogym.models.mlp import MLP
from exogym.network import Network
from exogym.study.compare import compare, measured_step_s
from exogym.study.compare.comparison import FILES, TIMED_FILES, Comparison
from exogym.study.compare.plots import Curve, draw
from exogym.study.compare.summary import Track, target_of
from exogym.study.tasks import load_task

STEPS, NODES, STEP_S = 20, 4, 0.02
TASK = load_task("digits")
SIZE = sum(p.numel() for p in TASK.make_model().parameters())
LINE = Network("1Mbps", "10ms")


def timed(strategies: str = "ddp,diloco:H=5", **options: object) -> Comparison:
    given = {
        "max_steps": STEPS,
        "seeds": 1,
        "num_nodes": NODES,
        "partitioner": "iid",
        "network": LINE,
        "step_seconds": STEP_S,
    }
    return compare(TASK, strategies, **given | options)  # type: ignore[arg-type]


def times(result: Comparison) -> dict[str, float]:
    return {row["strategy"]: row["time_s"] for row in result.rows}


# ---------------------------------------------------------------- one comparison with everything


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return timed("single,ddp,diloco:H=5,sparta", seeds=2, speeds=[1, 1, 1, 0.5],
                 out=tmp_path_factory.mktemp("timed"))  # fmt: skip


def test_times_are_steps_and_collectives(everything: Comparison) -> None:
    found = times(everything)
    once_s = LINE.cost("all_reduce", SIZE * 4, NODES).seconds
    assert found["single"] == pytest.approx(STEPS * STEP_S)  # node 0, of speed 1, with nobody to wait for
    assert found["ddp"] == pytest.approx(STEPS * (STEP_S / 0.5 + once_s))
    assert found["diloco:H=5"] == pytest.approx(STEPS * STEP_S / 0.5 + STEPS // 5 * once_s)
    waiting = {row["strategy"]: row["waiting_share"] for row in everything.rows}
    assert waiting["single"] == 0
    assert waiting["ddp"] == pytest.approx(1 - 1.25 * STEPS * STEP_S / found["ddp"])  # a mean step of (3 + 2)/4
    use = {row["strategy"]: row["bandwidth_use"] for row in everything.rows}
    assert use["ddp"] == pytest.approx(8 * STEPS * 1.5 * SIZE * 4 / 1e6 / found["ddp"]) and use["single"] == 0


def test_training_is_as_without_a_network(everything: Comparison) -> None:
    plain = compare(TASK, "single,ddp,diloco:H=5,sparta", max_steps=STEPS, seeds=2, num_nodes=NODES, partitioner="iid")
    assert "time_s" not in plain.rows[0] and "target_s" not in plain.rows[0] and not plain.is_timed
    for here, there in zip(plain.rows, everything.rows, strict=True):
        assert here["val_loss"] == there["val_loss"] and here["tx_bytes"] == there["tx_bytes"]


def test_time_to_the_target_is_that_of_the_histories(everything: Comparison) -> None:
    last = [list(everything.histories["ddp", seed].rows(None))[-1]["val_loss"] for seed in (0, 1)]
    assert everything.target_loss == pytest.approx(statistics.fmean(last) / 0.95)
    for row in everything.rows:
        runs = [track_of(everything.histories[row["strategy"], seed]) for seed in (0, 1)]
        found = [run.until(everything.target_loss, "time_s") for run in runs]
        reached = [s for s in found if s is not None]
        assert row["target_runs"] == len(reached)
        assert row["target_s"] == (pytest.approx(statistics.fmean(reached)) if len(reached) == 2 else None)
    assert {row["strategy"]: row["target_runs"] for row in everything.rows}["single"] == 0


def test_the_table_and_the_finding_say_it(everything: Comparison) -> None:
    headers, rows = everything.table()
    assert headers[-4:] == ["predicted", "waiting", f"time to loss {everything.target_loss:.4g}", "notes"]
    assert "examples/s" not in headers and rows[0][-4:-1] == ["400 ms", "0.0% ± 0.0%", "not reached"]
    assert "20 ms to 40 ms a step" in everything.heading and "Network('1 Mbps', '10 ms')" in everything.heading
    assert "(95% of DDP's quality)" in everything.finding and "only DDP reached it, after" in everything.finding


def test_files_of_a_timed_comparison(everything: Comparison) -> None:
    assert everything.folder is not None
    drawn = [path.name for path in everything.paths if path.suffix == ".svg"]
    assert drawn == ["loss_vs_steps.svg", "loss_vs_bytes.svg", "loss_vs_time.svg"]
    assert [path.name for path in everything.paths] == [*FILES, *TIMED_FILES, *drawn]
    assert everything.plot("time").axes[0].get_xlabel().startswith("predicted")
    files = [path.name for path in everything.folder.iterdir() if path.is_file()]
    assert sorted(files) == sorted(path.name for path in everything.paths)
    for path in [path for path in everything.paths if path.suffix == ".png"]:
        assert path.read_bytes().startswith(b"\x89PNG") and 10_000 < path.stat().st_size < 150_000
    with open(everything.folder / "summary.csv", encoding="utf-8") as file:
        for row, line in zip(everything.rows, csv.DictReader(file), strict=True):
            assert line == {name: "" if value is None else str(value) for name, value in row.items()}
    with open(everything.folder / "metrics.csv", encoding="utf-8") as file:
        own = [line for line in csv.DictReader(file) if (line["strategy"], line["seed"]) == ("ddp", "1")]
    _, ends_s = everything.histories["ddp", 1].column("time_s")
    assert float(own[-1]["time_s"]) == ends_s[-1] and float(own[-1]["waiting_share"]) > 0.5
    saved = json.loads((everything.folder / "run.json").read_text(encoding="utf-8"))["forecast"]
    assert Network.of(saved["network"]).describe() == LINE.describe()
    assert saved["step_seconds"] == [0.02, 0.02, 0.02, 0.04] and saved["is_measured"] is False
    assert saved["target_loss"] == everything.target_loss


# ---------------------------------------------------------------- laws


def test_the_first_seed_draws_the_same_jitter_as_the_second() -> None:
    result = timed("ddp", seeds=2, network="wifi")
    assert result.rows[0]["time_s_std"] == 0
    assert times(timed("ddp", network="wifi,jitter=0"))["ddp"] < result.rows[0]["time_s"]


def test_processes_change_no_number() -> None:
    one, two = (timed("single,ddp,diloco:H=5", processes=processes) for processes in (1, 2))
    drop = ("examples_per_s", "examples_per_s_std")
    for here, there in zip(one.rows, two.rows, strict=True):
        assert {k: v for k, v in here.items() if k not in drop} == {k: v for k, v in there.items() if k not in drop}
    placements = {run["strategy"]: run["description"]["placement"]["processes"] for run in two.description["runs"]}
    assert placements == {"single": 1, "ddp": 2, "diloco:H=5": 2}


def test_single_is_the_first_node_with_its_own_speed() -> None:
    spread = StepTime(STEP_S, speeds=[0.25, 1, 1, 1], sigma=0.3, seed=5)
    matrix = Network.matrix(np.full((NODES, NODES), 1e6), "1ms")
    found = times(timed("single,ddp", network=matrix, step_seconds=spread))
    clock = Clock(NODES, "1Gbps", spread)
    clock.advance(STEPS)
    assert found["single"] == pytest.approx(float(clock.time_s[0])) and found["ddp"] > found["single"] > 1


def test_a_measured_step_is_the_same_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def measured(*given: object) -> float:
        calls.append(given)
        return 0.5

    monkeypatch.setattr("exogym.study.compare.run.measured_step_s", measured)
    for step_seconds in (None, "measured"):
        result = timed("single,diloco:H=5", step_seconds=step_seconds, speeds=[0.5, 1, 1, 1])
        assert times(result)["single"] == STEPS * 0.5 / 0.5
        assert result.description["forecast"]["is_measured"] and "as measured here" in result.heading
    assert len(calls) == 2


def test_a_measured_step_has_the_time_of_its_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, slept_s, real = list[int](), 0.005, MLP.forward

    def slow(model: Any, batch: Any) -> Any:
        time.sleep(slept_s)
        sizes.append(len(batch[0]))
        return real(model, batch)

    monkeypatch.setattr(MLP, "forward", slow)
    assert slept_s <= measured_step_s(TASK, batch_size=4) < 10 and {4} <= {*sizes}
    with pytest.raises(ArgumentError, match="batch_size=0"):
        measured_step_s(TASK, batch_size=0)


# ---------------------------------------------------------------- the target


def history(losses: list[float], second_s: float = 1.0) -> History:
    made = History()
    for step, loss in enumerate(losses):
        made.add_evaluation(step, 0, {"val_loss": loss, "time_s": second_s * step})
    return made


def track_of(run: History) -> Track:
    track = Track.of_history(run)
    assert track is not None
    return track


def test_seconds_to_a_loss() -> None:
    falling = track_of(history([4.0, 2.0, 3.0, 1.0]))
    assert [falling.until(loss, "time_s") for loss in (5.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.9)] == [
        0.0, 0.0, 0.5, 1.0, 2.75, 3.0, None
    ]  # fmt: skip
    assert track_of(history([4.0, float("nan"), 1.0])).until(2.0, "time_s") == 2.0


def test_the_target_without_being_told() -> None:
    given = {("ddp:lr=1", 0): history([1.0, 0.5]), ("ddp:lr=1", 1): history([1.0, 0.7]), ("b", 0): history([2.0, 0.9])}
    runs = {key: track_of(run) for key, run in given.items()}
    assert target_of(runs) == (pytest.approx(0.6 / 0.95), "95% of DDP's quality")
    assert target_of({("b", 0): runs["b", 0], ("c", 0): track_of(history([1.0, 0.8]))}) == (0.9, "which all runs reach")
    assert target_of(runs, 0.3) == (0.3, "as asked for")


def test_a_target_that_some_runs_reach_has_no_mean() -> None:
    ends = [list(run.rows(None))[-1]["val_loss"] for run in timed("ddp", seeds=2).histories.values()]
    result = timed("ddp", seeds=2, target_loss=statistics.fmean(ends))
    assert result.rows[0]["target_runs"] == 1 and result.rows[0]["target_s"] is None
    assert "in 1 of 2 runs" in result.to_markdown() and "in all its runs" in result.finding


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"network": "wify"}, "did you mean 'wifi'"),
        ({"network": "-1Mbps"}, "must be over 0"),
        ({"network": Network.matrix(np.ones((2, 2)))}, "network is for 2 nodes, but num_nodes=4"),
        ({"step_seconds": "20 minutes"}, "no known unit"),
        ({"step_seconds": 0}, "a step must take time"),
        ({"step_seconds": [1, 2]}, "step_seconds is for 2 nodes"),
        ({"speeds": [1, 1]}, "speeds is for 2 nodes, but num_nodes=4"),
        ({"speeds": [1]}, "speeds is for 1 nodes"),
        ({"speeds": [1, 1, 1, 0]}, "over 0"),
        ({"speeds": [1] * 4, "step_seconds": StepTime(1)}, "speeds cannot be combined with a StepTime"),
        ({"target_loss": float("nan")}, "target_loss=nan"),
        ({"network": None}, "step_seconds=.* needs a network"),
        ({"timeline": True}, "exogym ui draws what the nodes did"),
        ({"log_x": True}, r"plot\(x, log=True\)"),
        ({"network": None, "step_seconds": None, "speeds": [1]}, "speeds=.* needs a network"),
        ({"processes": 5}, "processes"),
        ({"processes": 0}, "processes=0"),
        ({"processes": "many"}, "processes='many'"),
    ],
)
def test_what_makes_no_sense_is_known_before_training(options: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        timed("single,ddp", **options, watch=lambda at: pytest.fail("it trained"))


# ---------------------------------------------------------------- pictures


def test_time_is_drawn_to_the_scale_that_shows_it(tmp_path: Path) -> None:
    steps = np.arange(6)
    ends = (10.0, 20.0), (10.0, 2000.0)
    for name, longest in zip("ab", ends, strict=True):
        curves = [Curve(f"up to {end}", steps, np.full((2, 6), end), steps * 1.0, steps * end / 5) for end in longest]
        draw([tmp_path / f"{name}.png"], curves, "time", None, "heading", "wifi", target_loss=15.0)
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
