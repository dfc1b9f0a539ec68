"""DeMo against a reference written from the update rule of the specification, and its conservation law and bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import MixedRegressor, Regressor, fleet_of, loss_of, run_of, same, shards, train, unlike
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from exogym.errors import ArgumentError
from exogym.strategy import DeMoStrategy


def divisor(n: int, target: int) -> int:
    return next(d for d in range(min(n, target), 0, -1) if n % d == 0)


def cosines(n: int) -> Tensor:
    return torch.tensor(
        [
            [math.cos(math.pi * k * (2 * i + 1) / (2 * n)) * math.sqrt((1 if k == 0 else 2) / n) for i in range(n)]
            for k in range(n)
        ],
        dtype=torch.float64,
    )


class Reference:
    """The rule of section 13 for one parameter, one block at a time."""

    def __init__(self, theta: Tensor, nodes: int, decay: float, k: int, chunk: int, weight_decay: float):
        self.theta, self.decay, self.k, self.weight_decay = theta.clone(), decay, k, weight_decay
        self.shape = theta.shape
        self.n, self.m = (1, theta.numel()) if theta.dim() < 2 else (theta.shape[0], theta[0].numel())
        self.h, self.w = divisor(self.n, chunk), divisor(self.m, chunk)
        self.e = [torch.zeros(self.n, self.m, dtype=torch.float64) for _ in range(nodes)]

    def step(self, grads: list[Tensor], gamma: float) -> None:
        self.theta *= 1 - gamma * self.weight_decay
        row, column = cosines(self.h), cosines(self.w)
        direction = torch.zeros(self.n, self.m, dtype=torch.float64)
        for e, g in zip(self.e, grads, strict=True):
            e.mul_(self.decay).add_(gamma * g.reshape(self.n, self.m))
        for top in range(0, self.n, self.h):
            for left in range(0, self.m, self.w):
                at = (slice(top, top + self.h), slice(left, left + self.w))
                totals, senders = torch.zeros(self.h * self.w), torch.zeros(self.h * self.w)
                totals = totals.double()
                for e in self.e:
                    coefficients = (row @ e[at] @ column.T).flatten()
                    largest = sorted(range(len(coefficients)), key=lambda j, c=coefficients: -abs(c[j]))[: self.k]  # type: ignore[misc]
                    sent = torch.zeros_like(coefficients)
                    sent[largest] = coefficients[largest]
                    e[at] -= row.T @ sent.view(self.h, self.w) @ column
                    totals += sent
                    senders[largest] += 1
                mean = (totals / senders.clamp(min=1)).view(self.h, self.w)
                direction[at] = row.T @ mean @ column
        self.theta -= gamma * direction.sign().view(self.shape)


class Shapes(nn.Module):
    """Weights of one to four dimensions, none of them cut evenly by all chunks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv1d(1, 4, 3, padding=1)  # (4, 1, 3)
        self.conv2 = nn.Conv2d(4, 6, (1, 3), padding=(0, 1), bias=False)  # (6, 4, 1, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(36, 1)  # (1, 36), (1,)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.conv(x[:, None]))
        h = torch.tanh(self.conv2(h[:, :, None])) * self.scale
        return self.head(h.flatten(1))


def reference_run(
    model: nn.Module,
    data: list[TensorDataset],
    steps: int,
    rates: Callable[[int], float],
    max_norm: float | None,
    **options: Any,
) -> Tensor:
    parameters = list(model.parameters())
    references = [Reference(p.detach(), len(data), **options) for p in parameters]
    for step in range(steps):
        grads: list[list[Tensor]] = []
        for node in data:
            model.zero_grad()
            x, y = node[step % 5 * 4 : (step % 5 + 1) * 4]
            loss_of(model, x, y).backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(parameters, max_norm)
            grads.append([p.grad.clone() for p in parameters])
        for index, (p, reference) in enumerate(zip(parameters, references, strict=True)):
            reference.step([g[index] for g in grads], rates(step))
            with torch.no_grad():
                p.copy_(reference.theta)
    return torch.cat([p.detach().flatten() for p in parameters])


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4])
@pytest.mark.parametrize(("topk", "chunk"), [(1, 4), (3, 6), (2, 64)])
def test_equals_the_published_rule(num_nodes: int, topk: int, chunk: int) -> None:
    data, steps = shards(num_nodes), 8

    def rates(step: int) -> float:
        return 0.01 * (step + 1) / 3 if step < 3 else 0.01 * (1 - (step - 3) / 5)

    options = dict(decay=0.9, k=topk, chunk=chunk, weight_decay=0.2)
    strategy = DeMoStrategy(
        lr=0.01, compression_decay=0.9, compression_topk=topk, compression_chunk=chunk, weight_decay=0.2,
        lr_scheduler="linear", warmup_steps=3, max_norm=1.0,
    )  # fmt: skip
    ours = train(strategy, data, num_nodes, steps, Shapes()).rows
    assert torch.equal(ours, ours[:1].expand_as(ours))  # replicas are identical
    same(ours[0], reference_run(Shapes(), data, steps, rates, 1.0, **options), 1e-9)
    for change in ({"decay": 0.5}, {"weight_decay": 0.0}, {"k": topk + 1}):
        unlike(ours[0], reference_run(Shapes(), data, steps, rates, 1.0, **(options | change)))
    unlike(ours[0], reference_run(Shapes(), data, steps, lambda step: 0.01, 1.0, **options))
    unlike(ours[0], reference_run(Shapes(), data, steps, rates, None, **options))  # clipping is of the own gradient


def started(strategy: DeMoStrategy, num_nodes: int = 3) -> tuple[Any, Any]:
    width = sum(p.numel() for p in Shapes().parameters())
    fleet = fleet_of(torch.zeros(num_nodes, width, dtype=torch.float64), model=Shapes())
    strategy.on(fleet, run_of(num_nodes))
    return fleet, strategy.gradient_modules[0]


def test_what_is_sent_and_what_is_kept_add_up_to_all_gradients() -> None:
    fleet, momentum = started(DeMoStrategy(compression_decay=1.0, compression_topk=2, compression_chunk=6))
    (block,) = fleet.blocks
    total, sent, gamma = torch.zeros_like(block.params), torch.zeros_like(block.params), 0.1
    (residual,) = momentum.row_state.values()
    for step in range(1, 7):
        g = torch.randn(block.params.shape, dtype=torch.float64)
        before = residual.clone()
        block.own_grads().copy_(g)
        momentum.transform(fleet, step, gamma)
        sent += before + gamma * g - residual
        total += gamma * g
        # What was sent is k coefficients of each chunk, so it has 2 non-zero ones in the transform.
        (slot, now), t = list(block.views(before + gamma * g - residual))[3], momentum.transforms[0][3]
        assert slot.name == "conv2.weight"
        assert ((t.encode(now).abs() > 1e-9).sum(-1) == 2).all()
    same(sent + residual, total, 1e-12)
    unlike(sent, total)


def test_a_tensor_without_a_gradient_keeps_its_momentum() -> None:
    """Before, nodes took its largest coefficients out of the momentum, and moved nothing by them."""
    fleet, momentum = started(DeMoStrategy(compression_decay=1.0, compression_topk=1))
    (block,) = fleet.blocks
    (residual,), slot = momentum.row_state.values(), block.layout.slots[3]
    assert slot.name == "conv2.weight"
    for step in (1, 2, 3):
        block.own_grads().copy_(torch.randn(block.params.shape, dtype=torch.float64))
        block.has_grad[:] = True
        if step == 2:
            slot.of(block.grads).zero_()
            block.has_grad[:, 3] = False
        before = residual.clone()
        momentum.transform(fleet, step, 0.1)
        assert torch.equal(slot.of(residual), slot.of(before)) == (step == 2)
        assert bool(block.has_grad[0, 3]) == (step != 2) and bool(block.has_grad[0, 1])


def test_a_coefficient_counts_fully_though_one_node_sends_it() -> None:
    """The mean is over contributors: (3, 2) of the sum and the difference, not (3, 2 + 2) / N."""
    fleet = fleet_of(torch.zeros(3, 2, dtype=torch.float64), model=nn.Linear(2, 1, bias=False).double())
    strategy = DeMoStrategy(compression_topk=1, compression_chunk=2)
    acting = strategy.on(fleet, run_of(3))
    (block,) = fleet.blocks
    sums, differences = torch.tensor([3.0, 0.5, 0.5]), torch.tensor([0.5, 2.0, 2.0])  # the larger one is sent
    block.own_grads().copy_(torch.stack([sums + differences, sums - differences], 1) / math.sqrt(2))
    acting.transform_gradients(1, 1.0)
    assert block.grads.tolist() == [[1.0, 1.0]] * 3  # 3 + 2 and 3 - 2; over N: 3 + 4 and 3 - 4


def coefficients_of(model: nn.Module, k: int, chunk: int) -> list[tuple[int, int, int]]:
    """(coefficients, index bytes, value bytes) of each parameter, as the docstring promises."""
    result = []
    for p in model.parameters():
        n, m = (1, p.numel()) if p.dim() < 2 else (p.shape[0], p[0].numel())
        h, w = divisor(n, chunk), divisor(m, chunk)
        index = 1 if h * w <= 256 else 2 if h * w <= 32768 else 4
        result.append((n // h * (m // w) * min(k, h * w), index, p.element_size()))
    return result


class Wide(nn.Module):
    """One parameter per index width: chunks of 256, of 32768, and of 65536 coefficients."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(16, 16, bias=False)
        self.medium = nn.Parameter(torch.randn(128, 256) * 0.01)
        self.large = nn.Parameter(torch.randn(256, 256) * 0.01)

    def forward(self, x: Tensor) -> Tensor:
        h = self.small(nn.functional.pad(x, (0, 10)))
        return (nn.functional.pad(h, (0, 112)) @ self.medium @ self.large)[:, :1]


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_bytes_are_values_and_indices(num_nodes: int) -> None:
    cases: list[tuple[nn.Module, int, int]] = [
        (Shapes(), 3, 6), (Shapes(), 10**6, 64), (Regressor(dtype=torch.float32), 2, 8), (MixedRegressor(), 2, 4),
        (Wide(), 5, 256),
    ]  # fmt: skip
    for model, k, chunk in cases:
        first = next(model.parameters()).dtype
        data = [TensorDataset(*(t.to(first) for t in d.tensors)) for d in shards(num_nodes)]
        strategy = DeMoStrategy(lr=1e-3, compression_topk=k, compression_chunk=chunk)
        result = train(strategy, data, num_nodes, steps=2, model=model)
        payload = 2 * sum(count * (index + value) for count, index, value in coefficients_of(model, k, chunk))
        assert result.payload.tolist() == [payload if num_nodes > 1 else 0] * num_nodes
        assert result.tx.tolist() == result.rx.tolist() == [(num_nodes - 1) * payload] * num_nodes


def test_indices_of_the_widest_chunks_survive_their_packing() -> None:
    """A single gradient in the last place of each chunk size: its sign must arrive there."""
    for shape in ((16, 16), (128, 256), (256, 256)):
        model = nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=torch.float64))])
        width = math.prod(shape)
        fleet = fleet_of(torch.zeros(2, width, dtype=torch.float64), model=model)
        strategy = DeMoStrategy(compression_topk=1, compression_chunk=256)
        acting = strategy.on(fleet, run_of(2))
        t = strategy.gradient_modules[0].transforms[0][0]
        assert t.size == width
        last = torch.zeros(1, 1, width, dtype=torch.float64)
        last[..., -1] = 1.0
        (block,) = fleet.blocks
        block.own_grads().copy_(t.decode(last).flatten(1).expand(2, -1))
        acting.transform_gradients(1, 1.0)
        assert torch.equal(block.grads[0], t.decode(last).flatten().sign())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compression_decay": 1.5}, "compression_decay=1.5"),
        ({"compression_topk": 0}, "compression_topk=0"),
        ({"compression_chunk": 2.5}, "compression_chunk=2.5"),
        ({"weight_decay": -1}, "weight_decay=-1"),
        ({"compression_top": 3}, "did you mean 'compression_topk'"),
        ({"inner_optim": "adamw"}, "no argument 'inner_optim'"),
    ],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        DeMoStrategy(**arguments)
