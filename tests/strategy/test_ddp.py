"""DDP: against torch's DistributedDataParallel on two real gloo processes, and its buffers, masks and bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from problems import BATCH, MixedRegressor, Regressor, distance, examples, loss_of, same, shards, train, unlike
from processes import everywhere
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from exogym import LocalTrainer, Placement
from exogym.strategy import FedAvgStrategy, OptimSpec, SimpleReduceStrategy, Strategy

RANKS, STEPS = 2, 8
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


class Classifier(nn.Module):
    """A multilayer perceptron, or a convolutional network with BatchNorm."""

    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(3)
        if kind == "mlp":
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 5))
        else:
            self.net = nn.Sequential(
                nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                nn.Linear(36, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5),
            )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def pictures(rank: int) -> TensorDataset:
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(STEPS * BATCH, 1, 8, 8, generator=g) * (1 + rank) + rank
    return TensorDataset(x, torch.randint(0, 5, (len(x),), generator=g))


CASES = [
    ("mlp", "sgd", None),
    ("mlp", "adamw", None),
    ("cnn", "sgd", None),
    ("cnn", "adamw", None),
    ("cnn", "sgd", 0.5),
]


def real_process(rank: int, folder: str) -> None:
    """One of two ranks: each case with DistributedDataParallel; what comes out goes to a file."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    data, results = pictures(rank), {}
    for kind, optimizer, max_norm in CASES:
        model = DistributedDataParallel(Classifier(kind))
        cls, arguments = OPTIMIZERS[optimizer]
        optim = cls(model.parameters(), **arguments)
        losses = []
        for step in range(STEPS):
            x, y = data[step * BATCH : (step + 1) * BATCH]
            optim.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optim.step()
            losses.append(loss.item())
        results[kind, optimizer, max_norm] = (losses, {k: v.clone() for k, v in model.module.state_dict().items()})
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.barrier()  # the process ends at once after this: torch has hung while it took a group apart on a busy machine


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[Any, Any]]]:
    folder: Path = tmp_path_factory.mktemp("ddp")
    everywhere(RANKS, lambda rank: real_process(rank, str(folder)))
    yield [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


def ours(strategy: Strategy, kind: str) -> tuple[np.ndarray, dict[str, Tensor]]:
    model = Classifier(kind)
    trainer = LocalTrainer(model, lambda rank, n, is_train: pictures(rank), loss_fn=nn.functional.cross_entropy)
    trainer.fit(strategy, num_nodes=RANKS, max_steps=STEPS, batch_size=BATCH, shuffle=False)
    losses = np.stack([trainer.history.column("train_loss", rank)[1] for rank in range(RANKS)])
    return losses, model.state_dict()


@pytest.mark.parametrize(("kind", "optimizer", "max_norm"), CASES)
def test_equals_torchs_distributed_data_parallel(
    kind: str, optimizer: str, max_norm: float | None, real: list[dict[Any, Any]]
) -> None:
    cls, arguments = OPTIMIZERS[optimizer]
    spec = OptimSpec(cls, **arguments)
    losses, state = ours(SimpleReduceStrategy(spec, max_norm=max_norm), kind)
    for rank in range(RANKS):
        assert np.abs(losses[rank] - real[rank][kind, optimizer, max_norm][0]).max() <= 1e-6
    expected = real[0][kind, optimizer, max_norm][1]  # buffers: torch broadcasts those of rank 0
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert float((value - expected[name]).abs().max()) <= 1e-6 * max(1.0, float(expected[name].abs().max())), name
    apart, control = ours(FedAvgStrategy(spec, H=4, max_norm=max_norm), kind)
    assert np.abs(apart - losses).max() > 1e-4
    assert max(distance(v.double(), expected[n].double()) for n, v in control.items() if "tracked" not in n) > 1e-4


# Gradients that some nodes do not have


class Branching(nn.Module):
    """`second` is used only where the first feature of the first example is positive; `never` not at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.never = (nn.Linear(6, 1, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return y + self.second(x) if x[0, 0] > 0 else y


def branching_data(node: int) -> TensorDataset:
    """Node 0 takes the branch from its third step on, node 1 at the second step only."""
    x, y = (t.clone() for t in examples(6 * BATCH, node).tensors)
    for step in range(6):
        x[step * BATCH, 0] = 1.0 if (step >= 2 if node == 0 else step == 1) else -1.0
    return TensorDataset(x, y)


def test_where_a_gradient_is_rounding_noise_adam_tells_two_sums_apart() -> None:
    """A bias before BatchNorm: what the documents except from "equal up to rounding". SGD takes the noise as it is."""
    apart = {}
    for name in ("sgd", "adamw"):
        models = []
        for reduction in ("tree", "native"):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1))
            x = torch.randn(120, 6, generator=torch.Generator().manual_seed(2))
            trainer = LocalTrainer(model, TensorDataset(x, x.sum(1, keepdim=True)), loss_fn=nn.functional.mse_loss)
            options: dict[str, Any] = {"num_nodes": 5, "max_steps": 10, "batch_size": 4, "device": "cpu"}
            trainer.fit(SimpleReduceStrategy(name, lr=0.01), placement=Placement(reduction=reduction), **options)
            models.append(dict(model.named_parameters()))
        apart[name] = {key: float((p - models[1][key]).detach().abs().max()) for key, p in models[0].items()}
    noise = {name: values.pop("0.bias") for name, values in apart.items()}
    assert noise["sgd"] < 1e-6 < 1e-4 < noise["adamw"]
    assert max(apart["sgd"].values()) < 1e-5 and max(apart["adamw"].values()) < noise["adamw"] / 10


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_node_may_meet_a_parameter_late(name: str) -> None:
    """torch's fused SGD fails where only some parameters have a momentum; the node must train all the same."""
    cls, arguments = OPTIMIZERS[name]
    result = train(FedAvgStrategy(OptimSpec(cls, **arguments), H=6), [branching_data(0)], 1, 6, Branching())
    model = Branching()
    optimizer = cls(model.parameters(), **arguments, foreach=False)
    for step in range(6):
        x, y = branching_data(0)[step * BATCH : (step + 1) * BATCH]
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()
    same(result.rows, torch.cat([p.detach().flatten() for p in model.parameters()])[None])


@pytest.mark.parametrize("cls", [torch.optim.Rprop, torch.optim.Adagrad, torch.optim.Adafactor, torch.optim.NAdam])
def test_no_optimizer_spoils_the_shared_mean_gradient(cls: type[torch.optim.Optimizer]) -> None:
    """All rows read one expanded mean; an optimizer that worked in it would give later rows another gradient."""
    for foreach in (False, True):
        rows = train(SimpleReduceStrategy(OptimSpec(cls, lr=0.02, foreach=foreach)), num_nodes=3).rows
        assert torch.equal(rows, rows[:1].expand_as(rows))


# Buffers


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def test_buffers_are_those_of_the_lowest_id_and_counted_apart() -> None:
    data = shards(3)
    result = train(SimpleReduceStrategy("sgd", lr=0.05), data, 3, steps=4, model=Normed())
    own = torch.nn.BatchNorm1d(6).double()
    for step in range(4):
        own(data[0][step * BATCH : (step + 1) * BATCH][0])
    for row in range(3):
        same(result.buffers["norm.running_mean"][row], own.running_mean)
        same(result.buffers["norm.running_var"][row], own.running_var)
        assert int(result.buffers["norm.num_batches_tracked"][row]) == 4
    width = 6 + 6 + 6 + 1
    assert result.payload.tolist() == [4 * 8 * width] * 3
    buffers = [event for event in result.events if event.tag == "buffers"]
    assert sum(event.tx_bytes.sum() for event in buffers) == 4 * 2 * (6 * 8 + 6 * 8 + 8)  # trees to two others


# Bytes


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 5])
def test_bytes_are_those_of_a_ring(num_nodes: int) -> None:
    for model, size in (
        (Regressor(), 57 * 8),
        (Regressor(dtype=torch.float32), 57 * 4),
        (MixedRegressor(), 35 * 8 + 6 * 4),
    ):
        data = [TensorDataset(*(t.to(next(model.parameters()).dtype) for t in d.tensors)) for d in shards(num_nodes)]
        result = train(SimpleReduceStrategy("sgd", lr=0.01, max_norm=1.0), data, num_nodes, steps=3, model=model)
        expected = 3 * size if num_nodes > 1 else 0
        assert result.payload.tolist() == [expected] * num_nodes
        assert result.tx == pytest.approx(2 * (num_nodes - 1) / num_nodes * expected)
        assert result.rx.tolist() == result.tx.tolist()


def test_the_mixed_model_clips_over_both_dtypes() -> None:
    data = shards(1)

    def clipped(limit: float | None) -> Tensor:
        return train(SimpleReduceStrategy("sgd", lr=0.1, max_norm=limit), data, 1, steps=1, model=MixedRegressor()).rows

    model = MixedRegressor()
    x, y = data[0][:BATCH]
    loss_of(model, x, y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    expected = torch.cat([(p.detach().double() - 0.1 * p.grad).flatten() for p in model.parameters()])
    same(clipped(0.1)[0], expected, 1e-7)
    unlike(clipped(None)[0], expected)
