"""Estimates before the start: of the right size, and of the runs that were asked for."""

import time
from pathlib import Path

import pytest

from exogym.cli import main
from exogym.errors import ArgumentError
from exogym.study.compare import compare
from exogym.study.compare.estimate import estimate
from exogym.study.sweep.run import estimate as estimate_of_sweep


def test_a_run_is_its_start_its_steps_and_its_evaluations() -> None:
    found = estimate("digits", "single,ddp", max_steps=200, seeds=3, val_interval=50, num_nodes=2)
    assert found.runs == 6 and [trial.label for trial in found.trials] == ["single", "ddp"]
    for trial in found.trials:
        assert trial.step_s > 0 and trial.evaluation_s > 0 and trial.start_s > 0
        assert trial.run_s == pytest.approx(trial.start_s + 200 * trial.step_s + 4 * trial.evaluation_s)
    assert found.train_s == pytest.approx(3 * sum(trial.run_s for trial in found.trials))
    assert found.memory_bytes > 1e7 and found.free_bytes > 0 and "for 6 runs" in str(found)


@pytest.mark.slow
def test_the_estimate_is_of_the_size_of_the_run() -> None:
    """Within a factor of 4: other programs use this machine, too. Here it is mostly within 1.3."""
    given = {"max_steps": 1500, "seeds": 1, "num_nodes": 2}
    found = estimate("digits", "ddp,diloco", **given)
    begun = time.perf_counter()
    compare("digits", "ddp,diloco", **given)
    took_s = time.perf_counter() - begun
    assert found.train_s / 4 < took_s < 4 * found.train_s
    few = estimate("digits", "ddp,diloco", **(given | {"max_steps": 15}))
    assert few.train_s < found.train_s / 10  # the control: it depends on what is asked


def test_runs_of_few_steps() -> None:
    for steps in (1, 2, 3):
        found = estimate("digits", "diloco:H=5", max_steps=steps, seeds=1, num_nodes=2)
        assert 0 < found.train_s < 10


def test_a_sweep_tries_some_of_its_cells() -> None:
    values = ",".join(str(k) for k in range(1, 21))
    found = estimate_of_sweep("digits", [f"H={values}"], max_steps=20, seeds=2, num_nodes=2, processes=1)
    assert found.runs == 40 and 5 <= len(found.trials) <= 8 and found.trials[0].label == "H=1"
    with pytest.raises(ArgumentError, match="leave search out"):
        estimate_of_sweep("digits", ["lr=1e-4..1e-1"], search=3)
    with pytest.raises(ArgumentError, match="H=0 must be"):
        estimate_of_sweep("digits", ["H=0,1"], max_steps=20)


def test_the_commands_print_it_and_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs"
    words = ["--steps", "10", "--seeds", "1", "--nodes", "2", "--estimate", "--out", str(out)]
    assert main(["compare", "--strategies", "ddp", *words]) == 0
    assert capsys.readouterr().out.startswith("Time: about ")
    assert main(["sweep", "--sweep", "H=2,5", *words]) == 0
    assert "for 2 runs" in capsys.readouterr().out and not out.exists()
