"""Small problems, runs of them, and plain-torch loops to hold the strategies against."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.core.communicator import Event, Ledger
from exogym.core.fleet import Fleet
from exogym.strategy import Run, Strategy

FEATURES, HIDDEN = 6, 7
BATCH = 4


class Regressor(nn.Module):
    """A small non-linear regression in fp64: 2 weight matrices, 2 biases."""

    def __init__(self, hidden: int = HIDDEN, dtype: torch.dtype = torch.float64, bias: bool = True):
        super().__init__()
        g = torch.Generator().manual_seed(7)
        self.first = nn.Linear(FEATURES, hidden, bias=bias)
        self.second = nn.Linear(hidden, 1, bias=bias)
        for p in self.parameters():
            nn.init.normal_(p, std=0.5, generator=g)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class MixedRegressor(nn.Module):
    """fp64 weights, then fp32 ones: two blocks of the fleet."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = nn.Linear(FEATURES, 5).double(), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)).float()).double()


def examples(count: int, seed: int = 0, shift: float = 0.0) -> TensorDataset:
    """`count` examples (x, y) in fp64; another `shift` is another distribution."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=g, dtype=torch.float64) + shift
    y = torch.sin(x.sum(1, keepdim=True)) + x[:, :1] * (1 + shift) + shift
    return TensorDataset(x, y)


def shards(num_nodes: int, count: int = 5 * BATCH, same: bool = False) -> list[TensorDataset]:
    """A data set per node, each of another distribution, or all the same."""
    return [examples(count, 0 if same else i, 0.0 if same else 0.3 * i) for i in range(num_nodes)]


def factory(node_data: Sequence[TensorDataset]) -> Callable[[int, int, bool], TensorDataset]:
    return lambda rank, num_nodes, is_train: node_data[rank]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


@dataclass
class Result:
    """Where a run ended.

    Attributes:
        model: (P,) of the model that `fit` gave back.
        rows: (N, P) of the nodes; blocks side by side, in fp64.
        losses: (N, T).
        payload, tx, rx: (N,) bytes.
        events: all collectives.
    """

    model: Tensor
    rows: Tensor
    losses: np.ndarray
    payload: np.ndarray
    tx: np.ndarray
    rx: np.ndarray
    events: list[Event]
    buffers: dict[str, Tensor]
    trainer: LocalTrainer


def flat(fleet: Fleet) -> Tensor:
    return torch.cat([block.params.double() for block in fleet.blocks], 1).clone()


def train(
    strategy: Strategy,
    node_data: Sequence[TensorDataset] | TensorDataset | None = None,
    num_nodes: int = 4,
    steps: int = 12,
    model: nn.Module | None = None,
    **fit: Any,
) -> Result:
    """Train and look at what is left. Data per node come in order, unless they are one data set; no final sync."""
    if node_data is None:
        node_data = shards(num_nodes)
    whole = isinstance(node_data, TensorDataset)
    model = copy.deepcopy(Regressor() if model is None else model)
    trainer = LocalTrainer(model, node_data if whole else factory(node_data), loss_fn=nn.functional.mse_loss)
    seen: dict[str, Any] = {}
    events: list[Event] = []
    add = Ledger.add

    def note(ledger: Ledger, event: Event) -> None:
        events.append(event)
        add(ledger, event)

    def look(loop: Any) -> None:  # at the end
        ledger = loop.fleet.comm.ledger
        seen["rows"] = flat(loop.fleet)
        seen["buffers"] = {name: x.clone() for name, x in loop.fleet.buffers.items()}
        seen["bytes"] = [x.copy() for x in (ledger.payload_bytes, ledger.tx_bytes, ledger.rx_bytes)]

    options = {"max_steps": steps, "batch_size": BATCH, "shuffle": whole, "final_sync": False, "callbacks": ()} | fit
    options["callbacks"] = [*options["callbacks"], look]
    with mock.patch.object(Ledger, "add", note):
        trainer.fit(strategy, num_nodes=num_nodes, **options)
    losses = np.full((num_nodes, steps), np.nan)
    for node in range(num_nodes):
        at, values = trainer.history.column("train_loss", node)
        losses[node, at - 1] = values
    vector = parameters_to_vector([p.detach().double() for p in model.parameters() if p.requires_grad])
    return Result(vector, seen["rows"], losses, *seen["bytes"], events, seen["buffers"], trainer)


def unwarned(strategy: Strategy, *args: Any, **kwargs: Any) -> Result:
    """`train` where nodes meet only at the end, which warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*first communicates after step")
        return train(strategy, *args, **kwargs)


# Plain torch


def plain(
    node_data: Sequence[TensorDataset],
    steps: int,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    *,
    before: Callable[[list[nn.Module], int], None] | None = None,
    after: Callable[[list[nn.Module], int], None] | None = None,
    model: nn.Module | None = None,
    batch: int = BATCH,
    acts: Callable[[int, int], bool] = lambda node, step: True,
) -> Tensor:
    """A loop over copies of the model in plain torch; (N, P) at the end.

    `before(models, step)` is called between backward and the optimizers' steps, `after` after them. A node that
    does not act at a step (counted from 1) takes neither data nor a step.
    """
    models = [copy.deepcopy(Regressor() if model is None else model) for _ in node_data]
    optimizers = [optimizer(m.parameters()) for m in models]
    taken = [0] * len(models)
    for step in range(1, steps + 1):
        acting = [i for i in range(len(models)) if acts(i, step)]
        for i in acting:
            x, y = node_data[i].tensors
            per_epoch = len(x) // batch
            at = taken[i] % per_epoch * batch
            taken[i] += 1
            optimizers[i].zero_grad()
            loss_of(models[i], x[at : at + batch], y[at : at + batch]).backward()
        if before is not None:
            before(models, step)
        for i in acting:
            optimizers[i].step()
        if after is not None:
            with torch.no_grad():
                after(models, step)
    return torch.stack([vector(m) for m in models])


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, foreach=False)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, foreach=False)


def vector(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach().double().clone()


def put(model: nn.Module, values: Tensor) -> None:
    with torch.no_grad():
        sizes = [p.numel() for p in model.parameters()]
        for p, part in zip(model.parameters(), values.split(sizes), strict=True):
            p.copy_(part.view_as(p))


def rows_of(models: Sequence[nn.Module]) -> Tensor:
    return torch.stack([vector(m) for m in models])


def put_rows(models: Sequence[nn.Module], rows: Tensor) -> None:
    for m, row in zip(models, rows, strict=True):
        put(m, row)


def averaged(H: int) -> Callable[[list[nn.Module], int], None]:
    """`after` for `plain`: at every H-th step the models become their mean."""

    def after(models: list[nn.Module], step: int) -> None:
        if step % H == 0:
            put_rows(models, rows_of(models).mean(0).expand(len(models), -1))

    return after


def average_gradients(models: Sequence[nn.Module], step: int = 0) -> None:
    """`before` for `plain`: each gradient becomes the mean over the models."""
    for group in zip(*(m.parameters() for m in models), strict=True):
        mean = torch.stack([p.grad for p in group]).mean(0)
        for p in group:
            p.grad = mean.clone()


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest number of `b`."""
    return float((a - b).abs().max() / b.abs().max())


def same(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    assert a.shape == b.shape
    assert distance(a, b) <= tolerance, f"differ by {distance(a, b):.3g}"


def unlike(a: Tensor, b: Tensor) -> None:
    """The negative control: the test above it can fail."""
    assert distance(a, b) > 1e-4, f"differ by only {distance(a, b):.3g}"


# Strategies without a trainer


def fleet_of(values: Tensor, ranks: Sequence[int] | None = None, model: nn.Module | None = None) -> Fleet:
    """A fleet whose node i holds `values[i]` (N, P), its rows stored in the order of `ranks`."""
    num_nodes = len(values)
    ranks = list(range(num_nodes)) if ranks is None else list(ranks)
    fleet = Fleet(Regressor() if model is None else model, ranks, num_nodes, torch.device("cpu"))
    start = 0
    for block in fleet.blocks:
        width = block.layout.numel
        block.params.copy_(values[ranks, start : start + width])
        start += width
    assert start == values.shape[1]
    return fleet


def run_of(num_nodes: int, seed: int = 0, total_steps: int = 100, sizes: Sequence[int] | None = None) -> Run:
    return Run(num_nodes, seed, total_steps, np.array(sizes or [20] * num_nodes), BATCH)


def dyadic(rows: int, width: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small multiples of 1/8: sums of a few are exact in any order."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-64, 65, (rows, width), generator=g).to(dtype) / 8
