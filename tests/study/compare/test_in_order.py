"""Comparisons and sweeps on iterables: each run reads the data from its start, and single has the batches of node 0."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import IterableDataset

from exogym import LocalTrainer
from exogym.data import IterableData, Stream
from exogym.data.reading import FirstShare
from exogym.errors import ArgumentError, DataError
from exogym.strategy.registry import parse_strategy
from exogym.study.compare import ComparisonInterrupted, compare, measured_evaluation_s
from exogym.study.sweep import sweep
from exogym.study.tasks import Task

X = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0))
FIT: dict[str, Any] = {"num_nodes": 3, "max_steps": 12, "batch_size": 4, "device": "cpu"}
GIVEN: dict[str, Any] = FIT | {"seeds": 1, "lr": 0.01, "loss_fn": mse_loss}


class InOrder(IterableDataset[Any]):
    """`size` examples an epoch, from the example `first` on."""

    def __init__(self, size: int = 4000, first: int = 0):
        self.size, self.first = size, first

    def __iter__(self) -> Iterator[Any]:
        for k in range(self.first, self.first + self.size):
            yield X[k % 4000], X[k % 4000].sum().view(1)


class Unordered(InOrder):
    def __iter__(self) -> Iterator[Any]:
        self.first += 1
        return super().__iter__()


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Linear(3, 1)


def problem(train: Any = None, val: Any = None) -> Any:
    return model, train or InOrder(), val or InOrder(40)


def losses(result: Any) -> dict[str, float]:
    return {label: history.last["val_loss"] for (label, _), history in result.histories.items()}


def trained(train: Any, val: Any, num_nodes: int, strategy: str) -> float:
    trainer = LocalTrainer(model(), train, val, loss_fn=mse_loss)
    trainer.fit(parse_strategy(strategy, lr=0.01, inner_optim="adamw"), **FIT | {"num_nodes": num_nodes})
    return trainer.history.last["val_loss"]


def test_each_run_reads_from_the_start_and_single_is_node_0() -> None:
    val = list(InOrder(40))
    found = losses(compare(problem(), "single,ddp,diloco:H=5", **GIVEN))
    assert found["ddp"] == trained(InOrder(), val, 3, "ddp") != found["diloco:H=5"]
    assert found["diloco:H=5"] == trained(InOrder(), val, 3, "diloco:H=5")
    assert found["single"] == trained(FirstShare(InOrder(), 3), val, 1, "ddp")
    own_first = list(InOrder())[::3]
    found = losses(compare(problem(val=val), "single,ddp", shuffle=False, **GIVEN))
    alone = LocalTrainer(model(), own_first, val, loss_fn=mse_loss)
    alone.fit(parse_strategy("ddp", lr=0.01, inner_optim="adamw"), **FIT | {"num_nodes": 1, "shuffle": False})
    assert found["single"] == alone.history.last["val_loss"] != found["ddp"]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_first_share_has_the_batches_of_node_0(shuffle: bool) -> None:
    data = IterableData(InOrder(101), length=101, window=20)
    whole, share = (Stream(x, n, batch_size=4, shuffle=shuffle) for x, n in ((data, 3), (FirstShare(data, 3), 1)))
    for ours, theirs in zip(share.batches(0, 0, 30), whole.batches(0, 0, 30), strict=True):
        assert torch.equal(ours[0], theirs[0])
    assert share.examples.tolist() == [34] and share.steps_per_epoch == whole.steps_per_epoch == 9
    assert FirstShare(range(9), 3).length == 9


def test_an_interrupted_comparison_goes_on_and_other_data_are_refused(tmp_path: Path) -> None:
    def stop(standing: Any) -> None:
        if standing.label == "diloco:H=5" and standing.step == 4:
            raise KeyboardInterrupt

    given = GIVEN | {"val_interval": 4}
    whole = losses(compare(problem(), "single,diloco:H=5", **given))
    with pytest.raises(ComparisonInterrupted) as stopped:
        compare(problem(), "single,diloco:H=5", out=tmp_path, watch=stop, **given)
    folder = stopped.value.folder
    assert folder is not None
    for other, named in ((InOrder(first=5), "opening"), (IterableData(InOrder(), window=10), "window 1024")):
        with pytest.raises(ArgumentError, match=named):
            compare(problem(other), "single,diloco:H=5", out=folder, resume=True, **given)
    assert losses(compare(problem(), "single,diloco:H=5", out=folder, resume=True, **given)) == whole


def test_cells_of_a_sweep_read_by_themselves() -> None:
    found = [
        losses(sweep(problem(IterableData(InOrder(), window=50)), {"H": [3, 5]}, processes=p, **GIVEN)) for p in (1, 2)
    ]
    alone = losses(compare(problem(IterableData(InOrder(), window=50)), "diloco:H=3", **GIVEN))
    assert found[0] == found[1] and found[0]["H=3"] == alone["diloco:H=3"] != found[0]["H=5"]


def test_what_needs_positions_is_refused_before_training(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"partitioner": "iid"}, "a partitioner needs all examples at once"),
        ({"strategies": "ddp,async_diloco"}, r"async_diloco: .*so the examples of slow nodes.*accept no factory"),
        ({"strategies": "ddp,fedavg:client_fraction=0.5"}, r"fedavg:client_fraction=0.5: .*accept no factory"),
        ({"strategies": "ddp,fedavg:local_epochs=1"}, r"local_epochs=1: .*accept no factory"),
        ({"dataloader_kwargs": {"num_workers": 2}}, "StatefulDataLoader"),
    ]
    for options, message in refused:
        with pytest.raises(ArgumentError, match=message):
            compare(problem(), **{"strategies": "ddp"} | GIVEN | options, out=tmp_path)
    data: list[tuple[Any, Any, str]] = [
        (Unordered(), None, "begins with other examples"),
        (iter([1]), None, "can be read only once"),
        (None, IterableData(InOrder(9), length=20), "expected 20 examples in an epoch, got 9"),
        (None, InOrder(0), "is empty"),
    ]
    for train, val, message in data:
        with pytest.raises(DataError, match=message):
            compare(problem(train, val), "ddp", **GIVEN, out=tmp_path)
    with pytest.raises(ArgumentError, match="pass a data set instead of a factory"):
        compare(problem(lambda rank, n, is_train: InOrder()), "ddp", **GIVEN, out=tmp_path)
    task = Task("own", "own", "given", InOrder(), InOrder(9), model, 2, 4, 8, 0.1, 4, partitioner="iid")
    with pytest.raises(ArgumentError, match="a partitioner needs all examples at once"):
        compare(task, "ddp", loss_fn=mse_loss, out=tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match=r"the validation data set is an iterable without a length \(InOrder\): pass"):
        measured_evaluation_s(replace(task, partitioner=None))
