"""Outer steps around DDP: Pier, SNOO, GPA; each against its rule in plain torch, and where two must agree."""

from __future__ import annotations

import pytest
import torch
from problems import Regressor, adamw, average_gradients, plain, put, rows_of, same, shards, train, unlike, vector
from torch import Tensor, nn

from exogym.errors import ArgumentError
from exogym.strategy import DiLoCoStrategy, GPAStrategy, OptimSpec, PierStrategy, SimpleReduceStrategy, SNOOStrategy

Models = list[nn.Module]


# Pier


def pier(T: int, H: int, W: int, early: tuple[float, float] = (0.99, 0.95)) -> tuple[Tensor, Tensor]:
    """theta and the rows after T steps, of which W warm up, by the paper's rule and its published loop."""
    theta = vector(Regressor())
    v = torch.zeros_like(theta)

    def before(models: Models, step: int) -> None:
        if step <= W:
            average_gradients(models)

    def after(models: Models, step: int) -> None:
        nonlocal theta
        if step % H:
            return
        delta = theta - rows_of(models).mean(0)
        if step <= W:
            v.mul_(0.9).add_(delta)
            theta = theta - delta
            return
        mu = early[0] if step < 0.15 * T else early[1] if step < 0.2 * T else 0.9
        eta = 0.9 if step >= 0.8 * T else 1.1 * min(1.0, (step - W) / (0.1 * T))
        v.mul_(mu).add_(delta)
        theta = theta - eta * (delta + mu * v)
        for m in models:
            put(m, theta)

    rows = plain(shards(3), T, adamw, before=before, after=after)
    return theta, rows


def test_pier_is_its_rule() -> None:
    ours = train(PierStrategy(H=2, lr=0.02), shards(3), 3, steps=40)
    theta, rows = pier(40, 2, 4)
    same(ours.model, theta)
    same(ours.rows, rows)
    unlike(ours.model, pier(40, 2, 4, early=(0.9, 0.9))[0])
    unlike(ours.model, pier(40, 2, 6)[0])
    assert ours.payload.tolist() == [(4 + 18) * 57 * 8.0] * 3
    reckoned = PierStrategy(H=2).plan(57, 3, 8).traffic
    assert ours.payload.tolist() == [sum(40 * t.payload_bytes / t.every_steps for t in reckoned)] * 3


def test_pier_without_warm_up_and_decay_is_diloco() -> None:
    diloco = train(DiLoCoStrategy(H=4, lr=0.02))
    pier = PierStrategy(H=4, lr=0.02, outer_lr=0.7, outer_momentum=0.9, warmup=0.0, decay=False)
    plain_outer = train(pier)
    assert torch.equal(plain_outer.rows, diloco.rows) and torch.equal(plain_outer.model, diloco.model)
    assert plain_outer.payload.tolist() == diloco.payload.tolist()
    unlike(train(PierStrategy(H=4, lr=0.02, outer_lr=0.7, warmup=0.0)).rows, diloco.rows)


def test_pier_that_warms_up_to_the_end_is_ddp() -> None:
    ddp = train(SimpleReduceStrategy(lr=0.02))
    for final_sync in (False, True):  # nothing is left to synchronise
        pier = train(PierStrategy(H=5, lr=0.02, warmup=1.0), final_sync=final_sync)
        assert torch.equal(pier.rows, ddp.rows) and torch.equal(pier.model, ddp.model)
        assert pier.payload.tolist() == ddp.payload.tolist()
    unlike(train(PierStrategy(H=5, lr=0.02, warmup=0.2)).rows, ddp.rows)


def test_pier_refuses_shares_that_are_none() -> None:
    for wrong in ({"warmup": 1.5}, {"warmup": -0.1}, {"outer_momentum": 1.0}, {"decay": 2}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            PierStrategy(**wrong)


# SNOO


def snoo(T: int, K: int, eta: float, mu: float) -> Tensor:
    """The rows: fast weights of DDP, whose slow weights w move by Nesterov's rule along s = w - fast weights."""
    w = vector(Regressor())
    b = torch.zeros_like(w)

    def after(models: Models, step: int) -> None:
        nonlocal w
        if step % K == 0:
            s = w - rows_of(models).mean(0)
            b.mul_(mu).add_(s)
            w = w - eta * (mu * b + s)
            for m in models:
                put(m, w)

    return plain(shards(3), T, adamw, before=average_gradients, after=after)


def test_snoo_is_its_rule() -> None:
    ours = train(SNOOStrategy(H=4, lr=0.02, outer_lr=0.6, outer_momentum=0.8), shards(3), 3, steps=14)
    same(ours.rows, snoo(14, 4, 0.6, 0.8))
    same(ours.model, ours.rows[0])
    unlike(ours.rows, snoo(14, 4, 0.6, 0.0))
    assert ours.payload.tolist() == [14 * 57 * 8.0] * 3


def test_snoo_with_outer_rate_1_and_no_momentum_is_the_inner_optimizer() -> None:
    look_ahead = SNOOStrategy(H=3, lr=0.02, outer_lr=1.0, outer_momentum=0.0)
    for n in (1, 3):
        same(train(look_ahead, shards(n), n).rows, train(SimpleReduceStrategy(lr=0.02), shards(n), n).rows)
    unlike(train(SNOOStrategy(H=3, lr=0.02), shards(3), 3).rows, train(look_ahead, shards(3), 3).rows)


def test_snoo_of_one_node_is_diloco_of_one_node() -> None:
    diloco = train(DiLoCoStrategy(H=4, lr=0.02, outer_lr=0.5), shards(1), 1)
    snoo = train(SNOOStrategy(H=4, lr=0.02, outer_lr=0.5), shards(1), 1)
    assert torch.equal(snoo.rows, diloco.rows)
    many = train(SNOOStrategy(H=4, lr=0.02, outer_lr=0.5), shards(2), 2)
    unlike(train(DiLoCoStrategy(H=4, lr=0.02, outer_lr=0.5), shards(2), 2).rows, many.rows)


def test_snoo_takes_any_outer_optimizer() -> None:
    adam = OptimSpec("adam", lr=0.01)
    ours = train(SNOOStrategy(outer_optim=adam, H=4, lr=0.02), shards(1), 1)
    assert torch.equal(ours.rows, train(DiLoCoStrategy(outer_optim=adam, H=4, lr=0.02), shards(1), 1).rows)


# GPA


def gpa(T: int, mu_x: float, mu_y: float, n: int = 3, lr: float = 0.02) -> tuple[Tensor, Tensor]:
    """x and the nodes' y after T steps, by the paper's three sequences, with AdamW written out."""
    z = vector(Regressor())
    x, m, v = z.clone(), torch.zeros_like(z), torch.zeros_like(z)

    def after(models: Models, step: int) -> None:
        nonlocal x, z, m, v
        grads = [torch.cat([p.grad.flatten() for p in model.parameters()]) for model in models]
        g = torch.stack(grads).mean(0)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        z = z - lr * 0.01 * z  # decoupled weight decay of the sequence that steps
        z = z - lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
        x = mu_x * x + (1 - mu_x) * z
        for model in models:
            put(model, mu_y * x + (1 - mu_y) * z)

    y = plain(shards(n), T, lambda parameters: torch.optim.SGD(parameters, lr=0.0), after=after)
    return x, y


def test_gpa_is_its_three_sequences() -> None:
    ours = train(GPAStrategy(lr=0.02, mu_x=0.9, mu_y=0.7), shards(3), 3)
    x, y = gpa(12, 0.9, 0.7)
    same(ours.model, x)
    same(ours.rows, y)
    unlike(ours.model, gpa(12, 0.9, 0.5)[0])
    unlike(ours.model, gpa(12, 0.8, 0.7)[0])
    assert ours.payload.tolist() == [12 * 57 * 8.0] * 3


def test_gpa_without_averaging_is_ddp() -> None:
    ddp = train(SimpleReduceStrategy(lr=0.02), shards(3), 3)
    for mu_y in (0.3, 1.0):
        gpa = train(GPAStrategy(lr=0.02, mu_x=0.0, mu_y=mu_y), shards(3), 3)
        same(gpa.rows, ddp.rows)
        same(gpa.model, ddp.model)
    unlike(train(GPAStrategy(lr=0.02, mu_x=0.5), shards(3), 3).rows, ddp.rows)


def test_gpa_of_sgd_with_equal_shares_is_nesterovs_method() -> None:
    mu, lr = 0.8, 0.2
    nesterov = SimpleReduceStrategy(OptimSpec("sgd", lr=(1 - mu) * lr, momentum=mu, nesterov=True))
    wanted = train(nesterov, shards(3), 3).rows
    same(train(GPAStrategy("sgd", lr=lr, mu_x=mu, mu_y=mu), shards(3), 3).rows, wanted, 1e-11)
    unlike(train(GPAStrategy("sgd", lr=lr, mu_x=mu, mu_y=0.7), shards(3), 3).rows, wanted)


def test_gpa_refuses_shares_that_are_none() -> None:
    for wrong in ({"mu_x": 1.0}, {"mu_x": -0.1}, {"mu_y": 1.1}, {"mu_y": "0.5"}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            GPAStrategy(**wrong)
