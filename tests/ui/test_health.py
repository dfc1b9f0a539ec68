"""The sentence about a run's nodes, from real runs: absent, slow and bad nodes are named, healthy ones are not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from exogym import LocalTrainer
from exogym.faults import Faults
from exogym.strategy import DiLoCoStrategy
from exogym.study import runs
from exogym.testing import small_problem
from exogym.ui.health import gone_of, health_of, settled
from exogym.ui.views import nodes_of


def said(folder: Path, **options: Any) -> str:
    """Train 40 steps on three nodes; return the sentence of the run."""
    model, data = small_problem()
    trainer = LocalTrainer(model, data, loss_fn=torch.nn.functional.mse_loss)
    given: dict[str, Any] = {"num_nodes": 3, "max_steps": 40, "batch_size": 8, "device": "cpu", "run_dir": folder}
    trainer.fit(DiLoCoStrategy(lr=0.02, H=4), **given | options)
    run = runs.load(folder)
    return health_of(nodes_of(run.records, run.events))


def test_nodes_that_train_alike_are_healthy(tmp_path: Path) -> None:
    clock = {"network": "1Mbps,20ms", "step_seconds": [0.01, 0.011, 0.01]}
    assert said(tmp_path / "a", **clock) == said(tmp_path / "b") == "All 3 nodes are healthy."


def test_a_slow_node_is_named(tmp_path: Path) -> None:
    text = said(tmp_path / "a", network="1Gbps,1ms", step_seconds=[0.01, 0.01, 0.03])
    assert text.startswith("Node 2 is slow: it computes ") and text.endswith("%.") and "waits 6" in text


@pytest.mark.parametrize(
    ("absent", "text"),
    [
        ({1: [(5, 9)]}, "Node 1 was absent earlier, at steps from 5 to 8."),
        ({1: [(31, 41)]}, "Node 1 has been absent since step 31."),
        (
            {1: [(31, 41)], 0: [(5, 9)]},
            "Node 1 has been absent since step 31. Node 0 was absent earlier, at steps from 5 to 8.",
        ),
    ],
    ids=["earlier", "now", "both"],
)
def test_absent_nodes_are_named(tmp_path: Path, absent: Any, text: str) -> None:
    assert said(tmp_path / "a", faults=Faults(absent=absent)) == text


def test_a_high_loss_is_named() -> None:
    rows = [[1.0] * 40, [1.0] * 39 + [9.0], [1.0] * 30 + [9.0] * 10]
    found = {"nodes": [0, 1, 2], "of": 3, "steps": list(range(40)), "loss": rows, "shares": {}}
    assert health_of(found) == "Node 2 has a high training loss: 9, the median node 1.8."
    rows[2] = [1.0] * 40  # node 1's last step does not triple the mean of its newest ten
    assert health_of(found) == "All 3 nodes are healthy."
    assert health_of(found | {"nodes": [0], "loss": rows[:1], "of": 1}) == ""
    assert health_of({"nodes": [], "of": 0, "steps": [], "loss": [], "shares": {}}) == ""


def test_nobody_is_absent_while_the_first_step_is_written() -> None:
    found = {"nodes": [0, 1, 2], "of": 3, "steps": [1], "loss": [[1.0], [None], [None]], "shares": {}}
    assert gone_of(found["nodes"], settled(found["loss"])) == {}
    assert health_of(found) == "All 3 nodes are healthy."
