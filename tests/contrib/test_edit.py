"""EDiT against its rule in plain torch and Python's numbers, and where it must agree with DiLoCo."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from problems import MixedRegressor, Regressor, adamw, plain, put, same, shards, train, unlike, vector
from torch import Tensor, nn

from exogym.errors import ArgumentError
from exogym.strategy import DiLoCoStrategy, EDiTStrategy

OFF: dict[str, Any] = {"reject": None, "temperature": None, "clip": None}
LAYERS = [6 * 7 + 7, 7 + 1]


class Watch:
    """The running figures of one layer of one node, after the published code."""

    def __init__(self, W: int, a: float, most: float):
        self.W, self.a, self.most = W, a, most
        self.count, self.mean, self.m2 = 0, 0.0, 0.0
        self.window: list[float] = []

    def z(self, G: float) -> float:
        std = math.sqrt(self.m2) if self.count >= 2 else 0.0
        return 0.0 if std == 0 or self.count < self.W else (G - self.mean) / std

    def is_odd(self, G: float) -> bool:
        odd = self.count >= self.W and self.z(G) > self.most * max(1.0, statistics.stdev(self.window))
        self.count += 1
        d = G - self.mean
        self.mean += self.a * d
        self.m2 = (1 - self.a) * (self.m2 + self.a * d * (G - self.mean))
        self.window = [*self.window, self.z(G)][-self.W :]
        return odd


def edit(T: int, H: int, W: int, a: float, most: float, temperature: float, phi: float) -> tuple[Tensor, Tensor, int]:
    """theta, the rows, and how many outer gradients were rejected."""
    theta, n, rejected = vector(Regressor()), 3, 0
    v = torch.zeros_like(theta)
    watches = [[Watch(W, a, most) for _ in LAYERS] for _ in range(n)]

    def after(models: list[nn.Module], step: int) -> None:
        nonlocal theta, v, rejected
        if step % H:
            return
        rows = [(theta - vector(m)).split(LAYERS) for m in models]
        new, momentum = [], []
        for k, (t, b) in enumerate(zip(theta.split(LAYERS), v.split(LAYERS), strict=True)):
            deltas = [row[k] for row in rows]
            norms = [float(d.norm()) for d in deltas]
            odd = [watches[i][k].is_odd(G) for i, G in enumerate(norms)]
            rejected += sum(odd)
            shares = [0.0 if o else math.exp(-G / temperature) for o, G in zip(odd, norms, strict=True)]
            if any(shares):
                delta = sum(s / sum(shares) * d for s, d in zip(shares, deltas, strict=True))
                delta = delta * min(1.0, phi / (float(delta.norm()) + 1e-6))
                b = 0.8 * b + delta
                t = t - 0.7 * (delta + 0.8 * b)
            new.append(t)
            momentum.append(b)
        theta, v = torch.cat(new), torch.cat(momentum)
        for m in models:
            put(m, theta)

    rows = plain(shards(n), T, adamw, after=after)
    return theta, rows, rejected


def test_edit_is_its_rule() -> None:
    given = {"memory": 3, "decay": 0.2, "reject": 1.0, "temperature": 0.1, "clip": 0.15}
    ours = train(EDiTStrategy(H=2, lr=0.02, **given), shards(3), 3, steps=40)
    theta, rows, rejected = edit(40, 2, 3, 0.2, 1.0, 0.1, 0.15)
    same(ours.model, theta, 1e-10)
    same(ours.rows, rows, 1e-10)
    assert rejected > 5
    P, L = 57 * 8, 2 * 8  # an all-reduce of the parameters, and an all-gather of a norm per layer
    assert ours.payload.tolist() == [20 * (P + L)] * 3
    assert ours.tx.tolist() == [pytest.approx(20 * (2 * 2 / 3 * P + 2 * L))] * 3
    for other in ({"reject": None}, {"temperature": None}, {"clip": None}):
        unlike(train(EDiTStrategy(H=2, lr=0.02, **given | other), shards(3), 3, steps=40).model, theta)


def test_edit_without_rejection_weights_and_clipping_is_diloco() -> None:
    for model in (Regressor(), MixedRegressor()):
        diloco = train(DiLoCoStrategy(H=4, lr=0.02, outer_momentum=0.8), model=model)
        edit = train(EDiTStrategy(H=4, lr=0.02, **OFF), model=model)
        assert torch.equal(edit.rows, diloco.rows) and torch.equal(edit.model, diloco.model)
        assert edit.payload.tolist() == diloco.payload.tolist()
        unlike(train(EDiTStrategy(H=4, lr=0.02, **OFF | {"temperature": 0.1}), model=model).rows, diloco.rows)


def test_equal_data_are_one_node() -> None:
    one = train(EDiTStrategy(H=4, lr=0.02), shards(1), 1)
    many = train(EDiTStrategy(H=4, lr=0.02), shards(3, same=True), 3)
    same(many.rows, one.rows.expand_as(many.rows), 1e-10)
    unlike(train(EDiTStrategy(H=4, lr=0.02), shards(3), 3).model, one.model)


def test_a_layer_that_all_reject_stays_and_is_not_sent() -> None:
    """With one node, each norm above the running mean is rejected."""
    strategy = EDiTStrategy(H=1, lr=0.02, reject=1e-9, memory=2, decay=0.5)
    alone = train(strategy, shards(2, same=True), 2, steps=12)
    whole = train(EDiTStrategy(H=1, lr=0.02, reject=None), shards(2, same=True), 2, steps=12)
    assert (alone.payload < whole.payload).all()
    assert torch.equal(alone.rows, alone.model.expand_as(alone.rows))


def test_edit_refuses_numbers_that_are_none() -> None:
    for wrong in ({"reject": 0}, {"temperature": -1.0}, {"clip": 0.0}, {"memory": 1}, {"decay": 0.0}, {"decay": 2.0}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            EDiTStrategy(**wrong)
