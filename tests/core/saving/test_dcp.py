"""A run's nodes in other trainers and back: real FSDP2 over gloo, real files of torch.distributed.checkpoint."""

import io
import pickle
import random
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from corrupted import FEW, MANY, mutated, read_or_refused
from processes import in_groups
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import TensorDataset

from exogym import LocalTrainer, export_dcp, import_dcp
from exogym.core.fleet.layout import hidden_matrices, layouts_of
from exogym.core.saving.checkpoint import load_newest
from exogym.core.saving.dcp import _is_covered, _newest, _Subject
from exogym.data import Stream
from exogym.errors import ArgumentError, CheckpointError, ModelError
from exogym.strategy import (
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    FedProxStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    SPARTAStrategy,
    Strategy,
)
from exogym.testing import fingerprint

NODES, BATCH, LEFT, AWAY, END = 2, 8, 6, 3, 14


def data() -> TensorDataset:
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))


def make() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def diloco(**options: Any) -> DiLoCoStrategy:
    return DiLoCoStrategy(**{"H": 5, "lr": 0.01, **options})


def fit(strategy: Strategy, max_steps: int, model: nn.Module | None = None, **options: Any) -> LocalTrainer:
    trainer = LocalTrainer(make() if model is None else model, data(), data(), loss_fn=nn.functional.mse_loss)
    given: dict[str, Any] = {"num_nodes": NODES, "batch_size": BATCH, "final_sync": False, "device": "cpu"}
    trainer.fit(strategy, max_steps=max_steps, **given | options)
    return trainer


def under_fsdp2(folder: Path, trips: list[tuple[Path, Path, list[Any]]], make: Any = make, lr: float = 0.01) -> None:
    """A plain FSDP2 script in two processes: for each trip (from, to, batches) load, a step for each batch, save."""
    import torch._dynamo  # torch imports it in fully_shard: once here, not once in each fork
    from torch.distributed.fsdp import fully_shard

    def train(source: Path, target: Path, batches: list[Any], rank: int) -> None:
        model = make()
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": moments}, checkpoint_id=source)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        for x, y in batches:
            share = len(x) // 2
            mine = slice(rank * share, (rank + 1) * share)
            nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=target)

    in_groups(2, folder, lambda rank: [train(*trip, rank) for trip in trips])


def in_one(call: Callable[..., Any], state: dict[str, Any], checkpoint_id: Path) -> None:
    """Save or load in this process, of which torch warns."""
    with pytest.warns(UserWarning, match=r"torch.distributed is disabled, .* in a single process"):
        call(state, checkpoint_id=checkpoint_id, no_dist=True)


def alone(source: Path, target: Path, batches: list[Any]) -> None:
    """Do the same as `under_fsdp2` in this process, without FSDP2."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    weights, moments = get_state_dict(model, optimizer)
    in_one(dcp.load, {"model": weights, "optim": moments}, checkpoint_id=source)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    for x, y in batches:
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer)
    in_one(dcp.save, {"model": weights, "optim": moments}, checkpoint_id=target)


def batches_of(node: int, nodes: int = NODES, size: int = BATCH, steps: int = AWAY) -> list[Any]:
    return list(Stream(data(), num_nodes=nodes, batch_size=size, seed=0).batches(node, LEFT, steps))


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's checkpoints at step 6, exported, and the folders with which two plain trainers came back."""
    folder = tmp_path_factory.mktemp("left")
    fit(diloco(), LEFT, save_dir=folder / "kept")
    for node, source in enumerate(export_dcp(folder / "kept", folder / "away", make(), diloco())):
        alone(source, folder / "back" / source.name, batches_of(node))
    return folder


@pytest.fixture
def kept(left: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoints, to which a test may add."""
    return Path(shutil.copytree(left / "kept", tmp_path / "kept"))


@pytest.fixture
def back(left: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(left / "back", tmp_path / "back"))


def test_three_steps_under_fsdp2_and_back_equal_the_run_that_never_left(left: Path, kept: Path, tmp_path: Path) -> None:
    never_left = fit(diloco(), END)
    folders = [left / "away" / "node_0", left / "away" / "node_1"]
    trips = [(folder, tmp_path / "fsdp" / folder.name, batches_of(node)) for node, folder in enumerate(folders)]
    under_fsdp2(tmp_path, trips)
    assert import_dcp(kept, tmp_path / "fsdp", make(), diloco(), steps=AWAY).name == "step_0000000009"
    model = make()
    came_back = fit(diloco(), END, model, save_dir=kept, resume=True)
    torch.testing.assert_close(dict(model.state_dict()), dict(never_left.model.state_dict()), rtol=1e-5, atol=1e-6)
    recorded = [row["step"] for row in came_back.history.rows(node=None)]
    assert recorded == [*range(LEFT + 1), *range(LEFT + AWAY + 1, END + 1)]
    assert came_back.history.last["tx_bytes"] == never_left.history.last["tx_bytes"]
    stayed = fit(diloco(), END, make(), save_dir=shutil.copytree(left / "kept", tmp_path / "stayed"), resume=True)
    assert fingerprint(stayed.model) == fingerprint(never_left.model) != fingerprint(model)


def test_ddp_leaves_as_one_model_and_comes_back_to_all_nodes(tmp_path: Path) -> None:
    """Two DDP nodes are one trainer with both batches."""
    strategy = SimpleReduceStrategy(lr=0.01)
    never_left, kept, model = fit(strategy, END), tmp_path / "kept", make()
    fit(strategy, LEFT, save_dir=kept)
    assert export_dcp(kept, tmp_path / "away", make(), strategy, node=0) == [tmp_path / "away"]
    both = zip(batches_of(0), batches_of(1), strict=True)
    alone(tmp_path / "away", tmp_path / "back", [(torch.cat([x, u]), torch.cat([y, v])) for (x, y), (u, v) in both])
    import_dcp(kept, tmp_path / "back", make(), strategy, steps=AWAY)
    fit(strategy, END, model, save_dir=kept, resume=True)
    torch.testing.assert_close(dict(model.state_dict()), dict(never_left.model.state_dict()), rtol=1e-5, atol=1e-6)


class Odd(nn.Module):
    """A tied weight, a frozen parameter, BatchNorm's changing buffers, a constant buffer, and two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.norm = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)
        self.again, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 1).double()
        self.again.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.register_buffer("constant", torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x))) * self.frozen + self.constant
        return self.last(torch.tanh(self.again(x)).double()).float()


@pytest.mark.parametrize(
    "inner",
    ["adamw", "muon", OptimSpec(torch.optim.SGD, lr=0.05, momentum=0.9), OptimSpec(torch.optim.SGD, lr=0.05),
     OptimSpec(torch.optim.AdamW, lr=0.01, groups=[("norm.*", {"weight_decay": 0.0})])],
)  # fmt: skip
def test_an_odd_model_is_whole_in_the_export_and_returns_unchanged(inner: Any, tmp_path: Path) -> None:
    """Loaded into torch's own objects the export is the node; an import of the same values changes only steps."""
    strategy, kept = DiLoCoStrategy(inner, H=5), tmp_path / "kept"
    fit(strategy, LEFT, Odd(), save_dir=kept)
    (snapshot, _), model = load_newest(kept), Odd()
    folders = export_dcp(kept, tmp_path / "away", model, strategy)
    assert snapshot is not None and fingerprint(model) == fingerprint(Odd())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = strategy.inner.spec.build(trained, may_fuse=False, hidden=hidden_matrices(model))
    weights, moments = get_state_dict(model, optimizer)
    in_one(dcp.load, {"model": weights, "optim": {"state": moments["state"]}}, checkpoint_id=folders[1])
    wanted = load_node(Odd(), snapshot.rows[1])
    assert weights.keys() == wanted.state_dict().keys()
    for name, x in wanted.state_dict().items():
        assert torch.equal(weights[name], x), name
    for folder in folders:
        held = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        state = {name: torch.empty(x.size, dtype=x.properties.dtype) for name, x in held.items() if hasattr(x, "size")}
        in_one(dcp.load, state, checkpoint_id=folder)
        for name in state:
            if name.endswith(".step"):
                state[name] += 2
        in_one(dcp.save, state, checkpoint_id=tmp_path / "back" / folder.name)
    import_dcp(kept, tmp_path / "back", Odd(), strategy, steps=2)
    again, _ = load_newest(kept)
    assert again is not None and again.meta["step"] == LEFT + 2
    for node, row in again.rows.items():
        before = snapshot.rows[node]
        assert row.keys() == before.keys()
        for name, x in row.items():
            counts = name.endswith(".step") or name == "steps.taken"
            assert name == "mark" or torch.equal(x, before[name] + 2 * counts), name
    fit(strategy, END, Odd(), save_dir=kept, resume=True)  # the run accepts it


def load_node(model: nn.Module, row: dict[str, torch.Tensor]) -> nn.Module:
    """Load a row of a checkpoint into a model, by the layout's own rule."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for b, layout in enumerate(layouts_of(model)):
            for slot in layout:
                parameters[slot.name].copy_(slot.of(row[f"fleet.params.{b}"]))
        for name, x in model.named_buffers():
            if f"fleet.buffer.{name}" in row:
                x.copy_(row[f"fleet.buffer.{name}"])
    return model


# What is refused


@pytest.mark.parametrize(
    ("steps", "strategy", "message"),
    [
        (4, diloco(), r"synchronizes after step 10, so after step 6 .* at most 3 steps, but steps=4"),
        (0, diloco(), "steps=0 must be a whole number"),
        (2, diloco(), "took 3 steps since the newest checkpoint, but steps=2"),
        (3, diloco(H=7), r"another run:\n  strategy.H: saved 5, now 7"),
        (3, diloco(lr=0.1), r"strategy.lr: saved 0.01, now 0.1"),
    ],
)
def test_steps_and_strategies_that_do_not_fit(
    steps: int, strategy: Strategy, message: str, kept: Path, back: Path
) -> None:
    with pytest.raises((ArgumentError, CheckpointError), match=message):
        import_dcp(kept, back, make(), strategy, steps=steps)
    assert [path.name for path in kept.glob("step_*")] == ["step_0000000006"]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (SPARTAStrategy(p_sparta=0.1, lr=0.01), "synchronizes after step 7, so after step 6 .* at most 0 steps"),
        (FedProxStrategy(mu=0.1, H=5, lr=0.01), "FedProxStrategy does not take plain local steps"),
        (DeMoStrategy(lr=0.01), "DeMoStrategy does not take plain local steps"),
        (FedAvgStrategy(client_fraction=0.5, H=5, lr=0.01), r"nodes have taken \[.*\] steps|only some clients"),
        (FedAvgStrategy(local_epochs=1, lr=0.01), "the run has local_epochs=, which changes the local steps"),
        (FedAvgStrategy(local_steps=[5, 5], H=5, lr=0.01), "the run has local_steps="),
    ],
)
def test_runs_that_cannot_leave(strategy: Strategy, message: str, back: Path, tmp_path: Path) -> None:
    fit(strategy, LEFT, save_dir=tmp_path / "other")
    with pytest.raises(ArgumentError, match=message):
        import_dcp(tmp_path / "other", back, make(), strategy, steps=AWAY)


def test_ddp_wants_one_model(back: Path, tmp_path: Path) -> None:
    strategy = SimpleReduceStrategy(lr=0.01)
    fit(strategy, LEFT, save_dir=tmp_path / "ddp")
    with pytest.raises(ArgumentError, match="all nodes have one model: pass the folder of one DCP checkpoint"):
        import_dcp(tmp_path / "ddp", back, make(), strategy, steps=AWAY)


def test_another_model_and_folders_that_do_not_fit(left: Path, kept: Path, back: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="of another model than this Linear: see"):
        export_dcp(kept, tmp_path / "new", nn.Linear(6, 1), diloco())
    with pytest.raises(ArgumentError, match="exists: pass a new folder"):
        export_dcp(kept, back, make(), diloco())
    with pytest.raises(ArgumentError, match=r"node=2 has no row in .*: pass one of \[0, 1\]"):
        export_dcp(kept, tmp_path / "new", make(), diloco(), node=2)
    with pytest.raises(ArgumentError, match=r"lacks .*node_0/.metadata"):
        import_dcp(kept, tmp_path, make(), diloco(), steps=AWAY)
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        import_dcp(tmp_path / "none", back, make(), diloco(), steps=AWAY)
    with pytest.raises(ModelError, match="other frozen parameters or constant buffers"):
        fit(diloco(), LEFT, Odd(), save_dir=tmp_path / "odd")
        model = Odd()
        model.constant += 1
        export_dcp(tmp_path / "odd", tmp_path / "new", model, diloco())
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArgumentError, match="cannot be written"):
        export_dcp(kept, tmp_path / "file" / "sub", make(), diloco())
    assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".*"))


def test_a_run_that_trains_is_left_alone(kept: Path, back: Path) -> None:
    said: list[str] = []

    def come_back(loop: Any) -> None:
        with pytest.raises(ArgumentError, match="in use by another run") as error:
            import_dcp(kept, back, make(), diloco(), steps=AWAY)
        said.append(str(error.value))

    fit(diloco(), LEFT + 1, save_dir=kept, resume=True, callbacks=[come_back])
    assert said


# Folders from strangers


def saved(folder: Path, state: dict[str, Any]) -> None:
    shutil.rmtree(folder)
    in_one(dcp.save, state, checkpoint_id=folder)


def held(folder: Path) -> dict[str, Any]:
    index = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {name: torch.empty(x.size, dtype=x.properties.dtype) for name, x in index.items() if hasattr(x, "size")}
    in_one(dcp.load, state, checkpoint_id=folder)
    return state


def test_tensors_that_are_missing_or_do_not_fit(kept: Path, back: Path) -> None:
    state = held(back / "node_1")
    for change, message in [
        ({"model.0.weight": None}, "'model.0.weight' is nothing, expected torch.float32 \\(16, 6\\)"),
        ({"model.0.weight": torch.zeros(6, 16)}, r"is torch.float32 \(6, 16\), expected"),
        ({"model.0.weight": torch.zeros(16, 6, dtype=torch.bfloat16)}, "is torch.bfloat16 .* expected torch.float32"),
        (
            {name: None for name in state if name.startswith("optim")},
            "save the optimizer's state dict as 'optim' as well",
        ),
        ({"model.0.weight": "text"}, "'model.0.weight' is nothing"),
        ({"optim.state.0.weight.exp_avg": None}, "'optim.state.0.weight.exp_avg' is nothing, expected torch.float32"),
    ]:
        saved(back / "node_1", {name: x for name, x in (state | change).items() if x is not None})
        with pytest.raises(CheckpointError, match=message):
            import_dcp(kept, back, make(), diloco(), steps=AWAY)


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_no_code_of_a_stranger_runs(kept: Path, back: Path, tmp_path: Path) -> None:
    """In the index, in place of a tensor, and beside the tensors; torch's own reader would run the first."""
    mark, folder = tmp_path / "ran", back / "node_0"
    index, good = folder / ".metadata", (folder / ".metadata").read_bytes()
    index.write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(CheckpointError, match=r"it names pathlib.*Path.touch, which no index of DCP needs|names"):
        import_dcp(kept, back, make(), diloco(), steps=AWAY)
    assert not mark.exists()
    with pytest.raises(AttributeError):
        dcp.FileSystemReader(folder).read_metadata()
    assert mark.exists()  # the control
    mark.unlink()

    metadata = pickle.loads(good)
    metadata.planner_data = Evil(mark)
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="which no index of DCP needs"):
        import_dcp(kept, back, make(), diloco(), steps=AWAY)

    zipped = io.BytesIO()
    torch.save(Evil(mark), zipped)
    for data, message in (
        (pickle.dumps(Evil(mark)), "is damaged at .*not a zip file"),
        (zipped.getvalue(), "not a DCP checkpoint"),
    ):
        metadata = pickle.loads(good)
        for k, info in enumerate(metadata.storage_data.values()):
            info.offset, info.length = k * len(data), len(data)
        (folder / info.relative_path).write_bytes(data * (k + 1))
        index.write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=message):
            import_dcp(kept, back, make(), diloco(), steps=AWAY)
        assert not mark.exists()


def test_an_index_changes_no_class(kept: Path, back: Path) -> None:
    """A pickle may set attributes of what it names, without calling anything."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (back / "node_0" / ".metadata").write_bytes(name + b"(N(dS'stolen'\nI01\nstb.")
    with pytest.raises(CheckpointError, match="must contain DCP's Metadata, not type"):
        import_dcp(kept, back, make(), diloco(), steps=AWAY)
    assert not hasattr(dcp.metadata.Metadata, "stolen")
    pickle.loads(name + b"(N(dS'stolen'\nI01\nstb.")
    assert dcp.metadata.Metadata.stolen  # type: ignore[attr-defined]  # the control
    del dcp.metadata.Metadata.stolen  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["../node_1/__0_0.distcp", "/etc/passwd", "none"])
def test_an_index_names_only_files_of_its_folder(where: str, kept: Path, back: Path) -> None:
    index = back / "node_0" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = where
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"names '.*', which is no plain file in"):
        import_dcp(kept, back, make(), diloco(), steps=AWAY)


def test_damaged_files_are_named(kept: Path, back: Path) -> None:
    index, whole = back / "node_0" / ".metadata", (back / "node_0" / ".metadata").read_bytes()
    for content in (b"", b"x", whole[: len(whole) // 2], pickle.dumps({}), pickle.dumps(torch.float32)):
        index.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"node_0/\.metadata"):
            import_dcp(kept, back, make(), diloco(), steps=AWAY)
    index.unlink()
    index.symlink_to(back / "node_1" / ".metadata")
    with pytest.raises(CheckpointError, match="must be a regular file"):
        import_dcp(kept, back, make(), diloco(), steps=AWAY)
    index.unlink()
    index.write_bytes(whole)
    (file,) = (back / "node_0").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match=r"node_0/__0_0\.distcp is damaged at .*: copy the file again"):
        import_dcp(kept, back, make(), diloco(), steps=AWAY)
    assert [path.name for path in kept.glob("step_*")] == ["step_0000000006"]


def test_a_short_index_asks_for_little_memory(kept: Path, back: Path) -> None:
    before, subject = _newest(kept).rows[0], _Subject(make(), diloco())
    for content in (b"\x80\x05\x96" + (1 << 30).to_bytes(8, "little") + b"x", b"\x80\x04Nr" + b"\xff\xff\xff\x0f."):
        (back / "node_0" / ".metadata").write_bytes(content)
        tracemalloc.start()
        try:
            with pytest.raises(CheckpointError, match=r"node_0/\.metadata is not a DCP checkpoint"):
                subject.row(before, back / "node_0", AWAY)
            assert tracemalloc.get_traced_memory()[1] < 50_000_000
        finally:
            tracemalloc.stop()


Piece = tuple[tuple[int, ...], tuple[int, ...]]


@pytest.mark.parametrize(
    ("size", "pieces", "whole"),
    [
        ((), [((), ())], True),
        ((), [((), ()), ((), ())], False),
        ((0,), [((0,), (0,))], True),
        ((6,), [((0,), (2,)), ((4,), (2,)), ((2,), (2,)), ((6,), (0,))], True),
        ((6,), [((0,), (4,)), ((2,), (2,))], False),  # six elements, two of them twice
        ((6,), [((1,), (6,))], False),
        ((6,), [((-1,), (6,))], False),
        ((6,), [((0, 0), (6, 1))], False),
        ((4, 4), [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2)), ((2, 2), (2, 2))], True),
        ((4, 4), [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((2, 0), (2, 2)), ((2, 0), (2, 2))], False),
        ((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 1)), ((2, 1), (2, 3))], True),  # no grid
        ((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 1)), ((2, 1), (2, 3))], False),
    ],
)  # fmt: skip
def test_pieces_cover_a_tensor_once(size: tuple[int, ...], pieces: list[Piece], whole: bool) -> None:
    assert _is_covered(size, pieces) == _is_covered(size, pieces[::-1]) == whole


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_mutated_folders_never_come_back_with_other_numbers(count: int, kept: Path, back: Path) -> None:
    """Half of the mutations are single bits. torch compares no checksum when it reads."""
    before, subject, folder = _newest(kept).rows[0], _Subject(make(), diloco()), back / "node_0"

    def row() -> dict[str, torch.Tensor]:
        """Return what import_dcp writes for node 0. To write it would take most of the time."""
        return subject.row(before, folder, AWAY)

    true = row()
    wholes = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    outcomes = []
    for seed in range(count):
        draw = random.Random(seed)
        path = draw.choice([*wholes])
        data = bytearray(wholes[path])
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data if seed % 2 else mutated(draw, wholes[path]))
        outcome, found = read_or_refused(row, folder)
        outcomes.append(outcome)
        if found is not None:
            assert found.keys() == true.keys(), seed
            assert all(torch.equal(x, found[name]) for name, x in true.items()), seed
        path.write_bytes(wholes[path])
    assert {*outcomes} == {"read", "refused"}
