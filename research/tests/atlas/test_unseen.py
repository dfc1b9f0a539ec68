"""The tasks for judging advice: real data from packages, which train here and are divided among 4 and 16 nodes."""

import shutil

import pytest

from exogym.errors import DataError
from exogym.strategy.registry import parse_strategy
from exogym.study.compare import compare
from research.atlas import Place, studies_of
from research.atlas.places import CANDIDATES, KINDS, UNSEEN
from research.atlas.steps import REFERENCE, is_asynchronous
from research.reproduce.problems import problem

SAMPLES = {"tumors": 569, "cars": 392, "roles": 2877, "words": 96955, "strokes": 5000, "spoken": 800}
SPOKEN = pytest.param("spoken", marks=[pytest.mark.slow, pytest.mark.skipif(
    shutil.which("espeak-ng") is None, reason="espeak-ng is not installed"
)])  # fmt: skip


@pytest.mark.parametrize("name", [*(name for name in UNSEEN if name != "spoken"), SPOKEN])
def test_the_task_learns_and_is_divided(name: str) -> None:
    task, split = problem(KINDS[name].task)
    if "tinyshakespeare" not in task.origin and "mnist.npz" not in task.origin:
        assert len(task.train) + len(task.val) == pytest.approx(SAMPLES[name], rel=0.02)  # type: ignore[arg-type]
    result = compare(
        task, ["ddp"], max_steps=40, seeds=1, partitioner=task.partitioner or split, device="cpu", progress=False
    )
    losses = result.histories[("ddp", 0)].column("val_loss")[1]
    assert losses[-1] < 0.97 * losses[0]
    (study,) = studies_of([Place(name, 16)], ["ddp"], 2)
    assert study.cell.batch_size == 2 and study.cell.task == name


def test_a_task_from_a_package_takes_no_other_data() -> None:
    with pytest.raises(DataError, match="the task cars has its data from the package mlxtend: leave data out"):
        problem("cars", "somewhere.csv")


def test_the_candidates_can_be_judged() -> None:
    """Each has a common step and a plan, and DDP is among them."""
    assert REFERENCE in CANDIDATES and len(set(CANDIDATES)) == len(CANDIDATES)
    for method in CANDIDATES:
        assert parse_strategy(method).plan(1000, 4, 4).traffic and not is_asynchronous(method)
