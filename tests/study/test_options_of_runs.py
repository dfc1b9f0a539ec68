"""Options of `fit` in comparisons and sweeps: each is passed on to the runs, has its own meaning, or is refused."""

import dataclasses
import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from battery import in_turn

from exogym import LocalTrainer, NodeMesh, Placement
from exogym.balance import Balance
from exogym.cli import main
from exogym.core.training.options import FitOptions, RunOptions
from exogym.core.training.written import placed
from exogym.errors import ArgumentError
from exogym.faults import Faults
from exogym.strategy import DiLoCoStrategy
from exogym.study.compare import ComparisonInterrupted, compare
from exogym.study.compare.asked import FLAGS, OF_NO_RESULT, PASSED_AS_TEXT, ComparisonOptions
from exogym.study.compare.entries import OF_SEVERAL_NODES
from exogym.study.sweep import sweep
from exogym.study.sweep.run import SweepOptions
from exogym.testing import small_problem

pytestmark = pytest.mark.usefixtures("no_pictures")

SMALL: dict[str, Any] = {"max_steps": 6, "num_nodes": 2, "device": "cpu", "seeds": 1}
OF_FIT = [field.name for field in dataclasses.fields(FitOptions)]
PASSED_ON = [field.name for field in dataclasses.fields(RunOptions) if field.name != "placement"] + [*FLAGS]
# A value that is not the default, for each; others that it needs.
VALUES: dict[str, Any] = {
    "node": [NodeMesh(shard=2), NodeMesh(shard=4)], "gradient_accumulation": 2, "minibatch_size": 2,
    "max_memory_usage": 0.9, "val_batch_size": 16, "shuffle": False, "precision": "bf16", "compute": "vmap",
    "balance": Balance("steps", speeds=[1.0, 0.5]), "faults": Faults(drop_rate=0.2),
    "on_nonfinite": "skip", "final_sync": False, "log_interval": 2, "reduction": "native",
    "overlap": False, "max_restarts": 1, "hang_s": 60.0, "client_state_memory": 1e9,
    "dataloader_kwargs": {"timeout": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", OF_FIT)
@pytest.mark.parametrize(("study", "options"), [(compare, ComparisonOptions), (sweep, SweepOptions)])
def test_each_option_of_fit_is_taken_or_refused_by_name(name: str, study: Any, options: Any) -> None:
    """A new one is decided: passed on (a field of RunOptions), a field of the study's options, or in `not_taken`."""
    taken = {field.name for field in dataclasses.fields(options)}
    if name in taken:
        assert name not in options.not_taken
        return
    with pytest.raises(ArgumentError) as error:
        study("digits", **{name: None})
    assert f"has no argument {name!r}: {options.not_taken[name]}" in str(error.value)


def test_an_option_of_a_placement_says_where_it_is_now() -> None:
    fit = LocalTrainer(*small_problem()).fit
    for name in (field.name for field in dataclasses.fields(Placement)):
        for function in (fit, compare, sweep) if name in FLAGS else (fit,):
            with pytest.raises(ArgumentError, match=rf"{name}'.* write placement=Placement\({name}=\.\.\.\)"):
                function(DiLoCoStrategy(), **{name: 1})
    for study in (compare, sweep):
        with pytest.raises(ArgumentError, match=r"Placement\(engine='ray'\): .*sweep\(engine='ray'\)"):
            study("digits", {"H": [2]}, placement=Placement(engine="ray"))
        with pytest.raises(ArgumentError, match=r"Placement\(cpus_per_process=2\): .*; leave cpus_per_process out"):
            study("digits", {"H": [2]}, placement=Placement(cpus_per_process=2))


def test_there_is_a_value_for_each_option_that_is_passed_on() -> None:
    assert VALUES.keys() == set(PASSED_ON) and RunOptions(**placed(VALUES)).changed() == VALUES


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options that each fit is given, in order."""
    found: list[dict[str, Any]] = []
    fit = LocalTrainer.fit

    def noted(self: LocalTrainer, strategy: Any, **given: Any) -> Any:
        found.append(FitOptions(strategy, **given).values())
        return fit(self, strategy, **given)

    monkeypatch.setattr(LocalTrainer, "fit", noted)
    return found


@pytest.mark.parametrize("name", PASSED_ON)
def test_what_is_passed_on_reaches_the_fit_of_each_run(name: str, seen: list[dict[str, Any]], tmp_path: Path) -> None:
    value = VALUES[name]
    result = compare("digits", "single,diloco:H=2", out=tmp_path, **SMALL, **placed({name: value}))
    alone, fleet = seen
    assert fleet[name] == value and result.folder is not None
    assert alone[name] == (
        getattr(RunOptions, name) if name in OF_SEVERAL_NODES else value[0] if name == "node" else value
    )
    note = result.rows[0]["notes"]
    assert (f"no {name}" in note) is (name in OF_SEVERAL_NODES) and [row["seeds"] for row in result.rows] == [1, 1]
    about = json.loads((result.folder / "run.json").read_text())
    assert (name in about.get("options", {})) is (name not in OF_NO_RESULT)
    assert f"{name}={value!r}" in result.heading
    del seen[:]
    sweep("digits", {"H": [2]}, processes=1, out=tmp_path / "sweep", **SMALL, **placed({name: value}))
    assert [given[name] for given in seen] == [value]


def test_what_has_no_text_is_known() -> None:
    assert set(PASSED_ON) - PASSED_AS_TEXT.keys() == {"node", "faults", "dataloader_kwargs"}


COMMANDS = {
    "compare": ["--strategies", "diloco:H=2"],
    "sweep": ["--sweep", "H=2", "--processes", "1", "--out", "sweep"],
}


@pytest.mark.parametrize(("name", "study"), in_turn(PASSED_AS_TEXT, list(COMMANDS)))
def test_the_command_line_has_what_can_be_written(
    name: str, study: str, seen: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    value = "batch" if name == "balance" else VALUES[name]
    flag = "--" + name.replace("_", "-")
    words = ["--no-" + flag[2:]] if value is False else [flag, str(value)]
    small = ["--nodes", "2", "--steps", "6", "--seeds", "1", "--device", "cpu", *words]
    assert main([study, *COMMANDS[study], *small]) == 0
    assert [given[name] for given in seen] == [value]


def test_they_can_be_swept(seen: list[dict[str, Any]]) -> None:
    result = sweep("digits", ["precision=fp32,bf16", "shuffle=true,false"], strategy="ddp", processes=1, **SMALL)
    assert [(given["precision"], given["shuffle"]) for given in seen] == [
        ("fp32", True), ("fp32", False), ("bf16", True), ("bf16", False)
    ]  # fmt: skip
    assert len({row["val_loss"] for row in result.rows}) == 4
    sweep("digits", ["overlap=true,false"], strategy="ddp", processes=1, placement=Placement(hang_s=9.0), **SMALL)
    assert [(given["overlap"], given["hang_s"]) for given in seen[4:]] == [(True, 9.0), (False, 9.0)]
    with pytest.raises(ArgumentError, match="shuffle='no' must be true or false"):
        sweep("digits", ["shuffle=no"], **SMALL)


def test_the_defaults_leave_no_trace(tmp_path: Path) -> None:
    """What decides results is, without new options, what it was: comparisons, sweeps and claims go on."""
    folder = compare("digits", "ddp", out=tmp_path, placement=Placement(hang_s=1.0), **SMALL).folder
    assert folder is not None and "options" not in json.loads((folder / "run.json").read_text())
    assert compare("digits", "ddp", out=folder, resume=True, **SMALL).folder == folder
    swept = sweep("digits", {"H": [2]}, out=tmp_path / "sweep", processes=1, **SMALL)
    about = swept.description
    assert "options" not in about
    keys = {"num_nodes", "max_steps", "batch_size", "seeds", "lr", "partitioner", "device", "network", "step_seconds"}
    assert about["given"].keys() - {"val_size", "val_interval"} == keys | {"strategy", "data"}


@pytest.mark.parametrize(("study", "what"), [(compare, "ddp"), (sweep, {"H": [2]})])
def test_what_decides_the_result_must_be_the_same_to_go_on(study: Any, what: Any, tmp_path: Path) -> None:
    with_faults: dict[str, Any] = {"faults": Faults(drop_rate=0.2), "precision": "bf16"}
    first = study("digits", what, out=tmp_path / "out", **SMALL, **with_faults)
    again = study(
        "digits", what, out=first.folder, resume=True, placement=Placement(hang_s=5.0), **SMALL, **with_faults
    )
    assert again.rows == first.rows
    for others, message in (
        ({}, r"options: saved \{'precision': 'bf16', 'faults'"),
        (with_faults | {"precision": "fp32"}, "options.precision: saved 'bf16', now None"),
        (with_faults | {"faults": Faults(drop_rate=0.3)}, "options.faults.drop_rate: saved 0.2, now 0.3"),
    ):
        with pytest.raises(ArgumentError, match=message):
            study("digits", what, out=first.folder, resume=True, **SMALL, **others)


def test_a_sweep_goes_on_that_began_under_earlier_names(tmp_path: Path) -> None:
    folder = sweep("digits", {"H": [2]}, out=tmp_path / "sweep", processes=1, **SMALL).folder
    assert folder is not None
    about = json.loads((folder / "sweep.json").read_text())
    old = {"num_nodes": "nodes", "max_steps": "steps", "partitioner": "partition"}
    about["given"] = {old.get(name, name): x for name, x in about["given"].items() if not name.startswith("val_")}
    (folder / "sweep.json").write_text(json.dumps(about))
    assert sweep("digits", {"H": [2]}, out=folder, resume=True, processes=1, **SMALL).folder == folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"compute": "vmap", "minibatch_size": 2},
            "compute='vmap' with minibatch_size=2: vmap computes all rows at once",
        ),
        ({"faults": "none"}, "faults='none' must be an exogym.faults.Faults"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"faults": Faults(slow={1: 0.5})}, "ddp: faults with slow=.* all nodes take every step together"),
        ({"placement": Placement(max_restarts=1)}, "max_restarts needs a folder: pass it as out"),
        ({"val_size": 0}, "val_size=0"),
    ],
)
def test_what_does_not_go_together_is_refused_before_training(options: dict[str, Any], message: str) -> None:
    def fail(at: object) -> None:
        pytest.fail("it trained")

    with pytest.raises(ArgumentError, match=message):
        compare("digits", "diloco,ddp", watch=fail, **SMALL, **options)


def test_one_node_alone_has_the_batches_of_node_0(seen: list[dict[str, Any]]) -> None:
    """With every option on that it keeps it still trains as node 0 of a silent fleet would."""
    result = compare("digits", "single", val_size=7, val_interval=3, gradient_accumulation=2, **SMALL)
    assert result.description["val_examples"] == 7
    steps, _ = result.histories["single", 0].column("val_loss")
    assert steps.tolist() == [0, 3, 6] and seen[0]["num_nodes"] == 1 and seen[0]["gradient_accumulation"] == 2


def test_the_command_that_goes_on_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def stop(at: Any) -> None:
        if at.label == "diloco:H=2":
            raise KeyboardInterrupt

    options = MappingProxyType({"precision": "bf16", "shuffle": False})
    with pytest.raises(ComparisonInterrupted) as stopped:
        compare("digits", "ddp,diloco:H=2", out="runs", watch=stop, **SMALL, **options)
    folder = stopped.value.folder
    assert folder is not None and main(["compare", "--resume", "--out", str(folder)]) == 0
    assert main(["compare", "--resume", "--out", str(folder), "--shuffle"]) == 2
