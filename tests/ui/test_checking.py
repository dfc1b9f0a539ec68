"""What the check of a line says: the error of Python, or the plan."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import typer

from exogym.cli import app
from exogym.cli.ui import forms_of
from exogym.errors import ArgumentError
from exogym.options import placed
from exogym.strategy.registry import STRATEGIES
from exogym.study.compare import compare
from exogym.study.sweep import sweep
from exogym.ui.apart import Apart, Replaced
from exogym.ui.checking import check
from exogym.ui.starting import CannotStart, Starter


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    forms = forms_of(typer.main.get_command(app).make_context("exogym", [], resilient_parsing=True))
    starter = Starter(Path("none"), lambda: forms)
    yield starter
    starter.close()


@pytest.mark.parametrize(
    "given",
    [
        {"num_nodes": 0}, {"max_steps": 2.5}, {"batch_size": -1}, {"lr": "fast"}, {"hang_s": -1}, {"val_size": 0},
        {"precision": "bf17"}, {"compute": "lop"}, {"on_nonfinite": "x"}, {"network": "1Gb"}, {"partitioner": "iid:1"},
        {"partitioner": "nowhere"}, {"partitioner": "shards:100000"}, {"partitioner": f"shards:{2**53}"},
        {"device": "abacus"}, {"max_memory_usage": 2}, {"minibatch_size": 0},
        {"target_loss": "low"}, {"speeds": "1,1"}, {"step_seconds": "10ms"}, {"balance": "cores"}, {"num_nodes": 3000},
    ],
)  # fmt: skip
def test_the_error_is_that_of_compare(given: dict[str, Any]) -> None:
    """Given as text, as the page does, it is the same sentence as from Python."""
    ((name, value),) = given.items()
    of_python = [1, 1] if name == "speeds" else value
    with pytest.raises(Exception) as caught:
        compare("digits", "ddp", **placed({name: of_python}))
    assert check("compare", {name: str(value), "strategies": "ddp"})["error"] == str(caught.value)


def wrong(command: str, **options: Any) -> str:
    return check(command, options)["error"]


def test_a_strategy_is_checked_as_the_command_does() -> None:
    assert "did you mean 'diloco'" in wrong("compare", strategies="ddp,dilco")
    assert "exogym.contrib.ByteBudget(strategy" in wrong("compare", strategies="ddp:tuner=9")
    assert "twice" in wrong("compare", strategies="ddp,ddp")
    few = {"num_nodes": "2", "strategies": "decoupled_diloco:quorum=9"}
    assert "quorum=9 is more than the 2 nodes" in wrong("compare", **few)
    assert wrong("compare", **few | {"num_nodes": "9"}) == ""
    everything = ",".join(["single", *sorted(STRATEGIES)])
    for nodes in ("1", "2", "3"):
        assert wrong("compare", num_nodes=nodes, seeds="1", strategies=everything) == ""
    assert "'nothing'" in wrong("compare", dataset="whisper", strategies="nothing")  # its data are not loaded


def test_a_sweep_is_checked_cell_by_cell() -> None:
    with pytest.raises(ArgumentError) as caught:
        sweep("digits", ["H=5,0"])
    assert wrong("sweep", axes=["H=5,0"], strategy="diloco") == str(caught.value)
    assert "should look like" in wrong("sweep", axes=["H"])
    assert "is a range" in wrong("sweep", axes=["lr=1e-4..1e-1"])
    swept = {"axes": ["network=wifi,lan-1g"], "step_seconds": "10ms", "strategy": "diloco"}
    assert wrong("sweep", **swept) == ""  # an option that needs a swept option
    assert "step_seconds" in wrong("sweep", step_seconds="10ms", axes=["H=5"])
    many = ",".join(map(str, range(1, 101)))
    axes = [f"{name}={many}" for name in ("H", "batch_size", "lr", "nodes")]
    assert "100,000,000 cells" in wrong("sweep", axes=axes)


def test_the_plan_counts_the_runs() -> None:
    assert check("compare", {})["plan"].startswith("18 runs: one node alone, DDP, DiLoCo (H=10), SPARTA, ")
    plan = check("compare", {"strategies": "ddp", "seeds": "1", "max_steps": "7", "num_nodes": "3"})["plan"]
    assert plan.startswith("1 run: DDP, 1 seed each. ") and "3 nodes, 7 steps" in plan
    assert check("sweep", {"axes": ["H=2,5", "nodes=2,4"], "seeds": "2"})["plan"].startswith(
        "8 runs: 4 cells, 2 seeds each"
    )
    assert check("compare", {"seeds": str(10**9)})["plan"].startswith("6000000000 runs")  # at once: few are checked


def test_what_may_not_start_is_not_checked_either(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Apart, "_begin", None)
    for options in ({"dataset": "os:getcwd"}, {"network": "/etc/passwd"}, {"strategies": "ddp:lr=os.system('x')"}):
        assert "--allow-code" in starter.check("compare", options)["error"]
        with pytest.raises(CannotStart, match="--allow-code"):
            starter.estimate("compare", options)
    for options in ({"out": "x"}, {"estimate": True}, {"max_steps": "1\n2"}):
        assert next(iter(options)) in starter.check("compare", options)["error"], options
    for command, given in (("doctor", {}), ("compare", []), ("compare", None)):
        with pytest.raises(ArgumentError):
            starter.check(command, given)


def test_of_checks_at_the_same_time_the_newest_wins(starter: Starter) -> None:
    def checked(_: int) -> dict[str, Any] | None:
        try:
            return starter.check("compare", {"strategies": "ddp"})
        except Replaced:
            return None

    with ThreadPoolExecutor(8) as pool:
        found = [each for each in pool.map(checked, range(64)) if each is not None]
    assert found and all(not each["error"] and each["plan"] for each in found)


def test_a_switch_is_checked_as_the_command_takes_it(starter: Starter) -> None:
    assert starter.check("compare", {"strategies": "ddp", "shuffle": True})["error"] == ""
    found = starter.check("compare", {"strategies": "ddp", "step_seconds": "20ms"})["error"]
    assert "step_seconds" in found and "network" in found


def test_a_library_is_checked_as_the_command_takes_it(starter: Starter) -> None:
    given = {"strategies": "ddp", "library": "nccl"}
    assert "3 runs" in starter.check("compare", {**given, "network": "wifi"})["plan"]
    assert "library needs network" in starter.check("compare", given)["error"]
    assert "'gloo', 'nccl', 'any'" in starter.check("compare", {**given, "network": "wifi", "library": "mpi"})["error"]


def test_forms_have_the_choices_of_python(starter: Starter) -> None:
    form = {option["name"]: option for option in starter.forms["compare"]}
    assert form["precision"]["choices"] == ["fp32", "bf16", "fp16"] and "wifi" in form["network"]["choices"]
    assert form["num_nodes"]["is_basic"] and not form["hang_s"]["is_basic"]
    assert not {"out", "resume", "estimate", "debug"} & form.keys()
    own = [option["name"] for option in starter.strategies["diloco"]["options"]]
    assert {"H", "outer_lr", "lr", "transport"} <= set(own) and len(own) == len(set(own))


@pytest.mark.slow
def test_an_estimate_is_made_elsewhere_one_at_a_time(starter: Starter) -> None:
    options = {"strategies": "ddp", "max_steps": 10, "num_nodes": 2, "seeds": 1}
    assert starter.estimate("compare", options)["text"].startswith("Time: about ")
    with pytest.raises(ArgumentError, match="H=0 must be"):
        starter.estimate("compare", options | {"strategies": "diloco:H=0"})
    starter._estimating.acquire()
    with pytest.raises(ArgumentError, match="another estimate"):
        starter.estimate("compare", options)
    starter._estimating.release()
    assert not Path("none").exists()
