"""The sentence about a run's nodes, from real runs: absent, slow and bad nodes are named, healthy ones are not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from exogym import LocalTrainer
from exogym.faults import Faults
from exogym.strategy import DiLoCoStrategy, FedAvgStrategy
from exogym.study import runs
from exogym.testing import small_problem
from exogym.ui.health import absent_of, health_of
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
    found = {"nodes": [0, 1, 2], "of": 3, "steps": list(range(40)), "loss": rows, "away": [[], [], []], "shares": {}}
    assert health_of(found) == "Node 2 has a high training loss: 9, the median node 1.8."
    rows[2] = [1.0] * 40  # node 1's last step does not triple the mean of its newest ten
    assert health_of(found) == "All 3 nodes are healthy."
    assert health_of(found | {"nodes": [0], "loss": rows[:1], "away": [[]], "of": 1}) == ""
    assert health_of({"nodes": [], "of": 0, "steps": [], "loss": [], "away": [], "shares": {}}) == ""


@pytest.mark.parametrize(("nodes", "part"), [(4, 0.5), (12, 0.25)])  # with a row for each client, and for some
def test_clients_that_are_not_sampled_are_not_absent(tmp_path: Path, nodes: int, part: float) -> None:
    model, data = small_problem()
    trainer = LocalTrainer(model, data, loss_fn=torch.nn.functional.mse_loss)
    strategy = FedAvgStrategy("sgd", H=4, lr=0.02, client_fraction=part)
    trainer.fit(strategy, num_nodes=nodes, max_steps=41, batch_size=8, device="cpu", run_dir=tmp_path / "a")
    run = runs.load(tmp_path / "a")
    found = nodes_of(run.records, run.events)
    assert any(row[-1] is None for row in found["loss"])
    assert "absent" not in health_of(found) and absent_of(found) == []


def test_an_absent_client_of_a_sampling_run_is_named() -> None:
    rows = [{"step": step, "node": node, "train_loss": 1.0} for step in range(1, 9) for node in (step % 2, 2)]
    events: list[dict[str, Any]] = [
        {"kind": "away", "step": 4, "nodes": [2]},
        {"kind": "back", "step": 7, "nodes": [2]},
    ]
    rows = [row for row in rows if row["node"] != 2 or row["step"] not in (4, 5)]
    assert health_of(nodes_of(rows, events)) == "Node 2 was absent earlier, at steps from 4 to 5."
    rows = [row for row in rows if row["node"] != 2 or row["step"] < 6]
    found = nodes_of(rows, [*events[:1], {"kind": "start", "step": 5}, {"kind": "away", "step": 6, "nodes": [2]}])
    assert health_of(found) == "Node 2 has been absent since step 4." and absent_of(found) == [2]


def test_nobody_is_absent_while_the_first_step_is_written() -> None:
    found = nodes_of([{"step": 1, "node": node, "train_loss": None if node else 1.0} for node in range(3)], [])
    assert absent_of(found) == []
    assert health_of(found) == "All 3 nodes are healthy."
