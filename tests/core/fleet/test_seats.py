"""Seats: a fleet with rows for those only that act is the fleet with all rows, bit for bit."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from battery import each
from clients import ALL_ROWS, CLIENTS, MOMENTUM, SAMPLED, WITH_A_SERVER, client, same, trained
from processes import everywhere
from torch.utils.data import TensorDataset
from wrapped import made

from exogym import LocalTrainer, Placement
from exogym.core.fleet.seats import Seats, Store, packed, rows_for, unpacked
from exogym.core.saving.checkpoint import save
from exogym.core.saving.checkpoint_files import Snapshot, load
from exogym.errors import ArgumentError, TrainingError
from exogym.strategy import DifferentialPrivacy, FedAvgStrategy, OptimSpec, ScaffoldStrategy, SPARTADiLoCoStrategy

STOPPED = {"fedavg, momentum kept", "scaffold", "fedopt, personal"}  # the others by make slow


@pytest.mark.parametrize("name", each(WITH_A_SERVER, fast=STOPPED | {"dp-fedavg", "fedavg", "fedopt"}))
def test_seats_are_all_rows(name: str) -> None:
    make, norm = WITH_A_SERVER[name], name in ("fedavg", "scaffold", "fedopt, personal")
    wanted = trained(make(), norm, faults=ALL_ROWS)
    seated = trained(make(), norm)
    assert same(seated, wanted)
    assert same(trained(make(), norm, processes=3), wanted)
    acted = {row["node"] for row in seated.history if row["node"] is not None}
    assert acted == {row["node"] for row in wanted.history if row["node"] is not None}
    assert 4 < len(acted) < CLIENTS


@pytest.mark.parametrize(
    "name", [name if name in STOPPED else pytest.param(name, marks=pytest.mark.slow) for name in WITH_A_SERVER]
)
@pytest.mark.parametrize(
    "step", [pytest.param(8, marks=pytest.mark.slow, id="between rounds"), pytest.param(10, id="within a round")]
)
def test_stopped_and_resumed_on_other_layouts(name: str, step: int, tmp_path: Path) -> None:
    make = WITH_A_SERVER[name]
    wanted = trained(make())
    for before, afters in ((1, [3]), (3, [1, 2])):
        folder = tmp_path / str(before)
        trained(
            make(), save_dir=folder, checkpoint_interval=1, placement=Placement(keep_checkpoints=100), processes=before
        )
        for after in afters:
            there = tmp_path / f"{before} {after}"
            shutil.copytree(folder / f"step_{step:010d}", there / f"step_{step:010d}")
            assert same(trained(make(), save_dir=there, resume=True, processes=after), wanted)


def test_a_store_that_is_full_goes_to_files(tmp_path: Path) -> None:
    make = WITH_A_SERVER["scaffold"]
    wanted = trained(make())
    written: list[int] = []
    write = Store._write

    def seen(store: Store, node: int, tensors: Any) -> None:
        write(store, node, tensors)
        written.append(node)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "_write", seen)
        assert same(trained(make(), save_dir=tmp_path, placement=Placement(client_state_memory=0)), wanted)
    assert written
    assert not list(tmp_path.glob(".clients*"))  # they are in the checkpoints, where there are any


def test_a_store_holds_no_file_open_and_a_checkpoint_no_name_for_each_client(tmp_path: Path) -> None:
    """A process may have so many files in its memory, and a file of tensors so many names."""
    store = Store(0, tmp_path / "store")
    for node in range(50):
        store.put(node, {"part.x": torch.full((3,), node), "part.n": torch.tensor(node)})
    held = {node: store.get(node) for node in store}
    assert "node-" not in Path("/proc/self/maps").read_text()
    tensors = packed({node: dict(theirs) for node, theirs in held.items()} | {50: {"part.x": torch.zeros(2)}})
    assert len(tensors) == 5
    found = unpacked(tensors)
    assert sorted(found) == list(range(51)) and found[50]["part.x"].tolist() == [0, 0]
    assert all(found[k]["part.x"].tolist() == [k] * 3 and found[k]["part.n"] == k for k in range(50))
    store.close()


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    for process in (0, 5):
        folder = tmp_path / f".clients-{process}"
        folder.mkdir()
        (folder / "node-3.safetensors").write_text("half")
    trained(WITH_A_SERVER["fedavg"](), save_dir=tmp_path)
    assert not list(tmp_path.glob(".clients*"))


def test_how_many_processes_does_not_decide_who_has_a_row(tmp_path: Path) -> None:
    """Else a checkpoint of one layout would be of no use to another."""
    make = lambda: ScaffoldStrategy("sgd", **SAMPLED | {"client_fraction": 0.25})  # noqa: E731
    wanted = trained(make())
    assert same(trained(make(), faults=ALL_ROWS), wanted)
    for before, after in ((1, 3), (3, 1)):
        folder = tmp_path / str(before)
        trained(make(), save_dir=folder, processes=before, max_steps=10, final_sync=False)
        assert same(trained(make(), save_dir=folder, processes=after, resume=True), wanted)


def test_rows_that_nobody_has_are_shared_out(tmp_path: Path) -> None:
    """A run in few processes reads the rows of one in many, each once."""
    path = save(
        tmp_path,
        Snapshot({row: {"x": torch.tensor(row)} for row in range(30)}, {"x": torch.ones(1)}, {"step": 1}),
        keep=1,
    )
    parts = [load(path, range(2 * k, 2 * k + 2), range(4 + k, 1 << 62, 2)).rows for k in range(2)]
    assert sorted(row for part in parts for row in part) == list(range(30))


def test_a_node_without_a_row_is_not_evaluated() -> None:
    def evaluates(loop: Any) -> None:
        assert loop.evaluate(loop.fleet.comm.present[0])
        loop.evaluate(next(node for node in range(CLIENTS) if node not in loop.fleet.comm.present))

    with pytest.raises(ArgumentError, match=r"evaluate\(\d+\): pass a node .* one of fleet.comm.present"):
        trained(WITH_A_SERVER["fedavg"](), callbacks=[evaluates], processes=2)


def test_a_disk_that_is_full_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("exogym.core.fleet.seats.save_file", full)
    with pytest.raises(TrainingError, match=r"the state of node \d+ could not be written .*No space left.*free space"):
        trained(WITH_A_SERVER["scaffold"](), save_dir=tmp_path, placement=Placement(client_state_memory=0))
    with pytest.raises(ArgumentError, match=r"client_state_memory=.* needs save_dir"):
        trained(WITH_A_SERVER["scaffold"](), placement=Placement(client_state_memory=0))
    with pytest.raises(ArgumentError, match="client_state_memory=-1 must be a number of at least 0, in bytes"):
        trained(WITH_A_SERVER["scaffold"](), placement=Placement(client_state_memory=-1))


@pytest.mark.parametrize("name", ["fedavg, momentum kept", "scaffold"])
def test_what_is_not_kept_is_missed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the store, the bits are others."""
    wanted = trained(WITH_A_SERVER[name]())
    monkeypatch.setattr(Seats, "_kept", lambda seats, row: {})
    assert not same(trained(WITH_A_SERVER[name]()), wanted)


def test_rows_are_those_of_two_rounds_and_data_of_those_who_act() -> None:
    made: list[int] = []

    def noted(rank: int, num_nodes: int, is_train: bool) -> TensorDataset:
        made.append(rank)
        return client(rank, num_nodes, is_train)

    found = trained(FedAvgStrategy("sgd", **SAMPLED | {"client_fraction": 4e-4}), data=noted, num_nodes=10_000)
    assert found.description["placement"]["processes"] == 1 and rows_for(4, 1) == 8
    acted = {row["node"] for row in found.history} - {None}
    assert len(acted) > 16  # of six rounds
    assert set(made) == acted | {0} or set(made) > acted  # node 0's first batch tries out the model
    assert len(set(made)) <= 4 * 7 + 1  # and the clients of a next round, which did not come to act
    rows = []
    trained(
        FedAvgStrategy("sgd", **SAMPLED | {"client_fraction": 4e-4}), num_nodes=10_000,
        callbacks=[lambda loop: rows.append([len(loop.fleet), len(loop.rows()[0]), len(loop.fleet.comm.present)])],
    )  # fmt: skip
    assert rows and all(found == [8, 4, 4] for found in rows)


def test_who_keeps_all_rows() -> None:
    """Where others than the clients of a round need their rows, all have one."""
    assert FedAvgStrategy(H=4, client_fraction=0.1).clients.seats(1000) == 100
    assert FedAvgStrategy(H=4).clients.seats(1000) is None
    assert FedAvgStrategy(H=4, client_fraction=0.1, island_size=2).clients.seats(1000) is None
    assert SPARTADiLoCoStrategy().clients.seats(1000) is None
    private = made(FedAvgStrategy, H=4, client_fraction=0.1, weighting="uniform", privacy=DifferentialPrivacy(1.0, 1.0))
    assert 150 < (private.clients.seats(1000) or 0) < 300


def test_an_epoch_of_unknown_data() -> None:
    with pytest.raises(ArgumentError, match=r"needs max_steps: .* or num_epochs"):
        trained(WITH_A_SERVER["fedavg"](), max_steps=None)


def test_an_epoch_asks_all_lengths(capfd: pytest.CaptureFixture[str]) -> None:
    found = trained(WITH_A_SERVER["fedavg"](), max_steps=None, num_epochs=1)
    assert found.history.last["step"] == -(-sum(len(client(i, CLIENTS, True)) for i in range(CLIENTS)) // (CLIENTS * 4))
    assert "making the data sets of all 40 nodes once" in capfd.readouterr().err


def test_a_factory_that_fails_says_for_whom() -> None:
    def fails(rank: int, num_nodes: int, is_train: bool) -> TensorDataset:
        if rank:
            raise OSError("no such file")
        return client(rank, num_nodes, is_train)

    with pytest.raises(OSError) as failed:
        trained(WITH_A_SERVER["fedavg"](), data=fails)
    assert "called for node" in failed.value.__notes__[0]


def test_processes_that_meet_over_gloo(tmp_path: Path) -> None:
    """As under torchrun: rows are sent, not shared."""
    wanted = trained(WITH_A_SERVER["scaffold"]())

    def member(rank: int) -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        assert same(trained(WITH_A_SERVER["scaffold"]()), wanted)
        dist.destroy_process_group()

    everywhere(2, member)


@pytest.mark.parametrize("scheduler", [None, "cosine"])
@pytest.mark.parametrize("inner", ["sgd", MOMENTUM, "adamw", OptimSpec("adamw", groups=[("*.bias", {"lr": 0.1})])])
def test_an_optimizer_that_is_used_again_begins_anew(
    inner: Any, scheduler: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building one takes as long as steps do, so a client's goes to the next one, as it was built."""
    build, builds = OptimSpec.build, list[int]()
    monkeypatch.setattr(
        OptimSpec, "build", lambda spec, *args, **more: (builds.append(1), build(spec, *args, **more))[1]
    )

    def run() -> tuple[LocalTrainer, int]:
        builds.clear()
        options = SAMPLED | {"lr_scheduler": scheduler, "keep_inner_state": False}
        return trained(FedAvgStrategy(inner, **options)), len(builds)

    again, few = run()
    monkeypatch.setattr("exogym.core.compute.inner._entries", lambda optimizer: None)
    anew, many = run()
    assert same(again, anew) and few < many - 8
    monkeypatch.undo()
    monkeypatch.setattr("exogym.core.compute.inner.InnerOptimizer._build", _used_as_it_is)
    assert same(run()[0], anew) is (inner == "sgd")  # the control


def _used_as_it_is(self: Any) -> Any:
    return self._spare.pop() if self._spare else self.spec.build(self._named, hidden=self._hidden)
