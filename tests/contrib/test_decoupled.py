"""Decoupled DiLoCo: against a loop in plain torch, its identities, the laws."""

import copy
import math
from typing import Any

import pytest
import torch
from problems import BATCH, Regressor, loss_of, same, shards, train, unlike, vector
from torch import Tensor, nn

from exogym.errors import ArgumentError
from exogym.network import Network
from exogym.strategy import AsyncDiLoCoStrategy, DecoupledDiLoCoStrategy, DiLoCoStrategy

FREE = Network(1e30)
SPEEDS = [3.0, 1.5, 1.0, 0.5]


def by_hand(seconds: list[float], H: int, steps: int, quorum: int, grace_s: float, eta: float, beta: float) -> Tensor:
    """The same training, a local step at a time in the order of time and id; messages take no time. Returns theta."""
    size, data = len(seconds), shards(len(seconds))
    models = [copy.deepcopy(Regressor()) for _ in data]
    theta = vector(models[0])
    m = torch.zeros_like(theta)
    pulled, start, done, taken = [theta.clone() for _ in data], [0.0] * size, [0] * size, [0] * size
    waiting: list[int] = []
    closes = math.inf
    count = 0
    while True:
        going = [(start[i] + (done[i] + 1) * seconds[i], i) for i in range(size) if i not in waiting]
        at, w = min(going, default=(math.inf, -1))
        if at <= closes and waiting != list(range(size)):
            if count == size * steps:
                return theta
            count += 1
            x, y = data[w].tensors
            k = taken[w] % (len(x) // BATCH) * BATCH
            models[w].zero_grad()
            loss_of(models[w], x[k : k + BATCH], y[k : k + BATCH]).backward()
            with torch.no_grad():
                for p in models[w].parameters():
                    p -= 0.05 * p.grad
            taken[w] += 1
            done[w] += 1
            if done[w] < H:
                continue
            waiting = sorted([*waiting, w])
            if len(waiting) < quorum:
                continue
            closes = min(closes, at + grace_s)
            if (grace_s or quorum > 1) and len(waiting) < size:
                continue
        now = min(at, closes) if len(waiting) < size else at
        g = sum(pulled[i] - vector(models[i]) for i in waiting) / len(waiting)  # equal weights
        m = beta * m + g
        theta = theta - eta * (g + beta * m)
        for i in waiting:
            nn.utils.vector_to_parameters(theta.clone(), models[i].parameters())
            pulled[i], start[i], done[i] = theta.clone(), now, 0
        waiting, closes = [], math.inf


def decoupled(**options: Any) -> DecoupledDiLoCoStrategy:
    return DecoupledDiLoCoStrategy("sgd", **{"H": 4, "lr": 0.05, "outer_lr": 0.5, "outer_momentum": 0.6} | options)


@pytest.mark.parametrize("quorum", [1, 2, 3, 4])
def test_as_a_loop_in_plain_torch(quorum: int) -> None:
    run = train(decoupled(quorum=quorum), steps=21, network=FREE, step_seconds=SPEEDS, final_sync=False)
    expected = by_hand(SPEEDS, 4, 21, quorum, 0.0, 0.5, 0.6)
    same(run.model, expected)
    unlike(run.model, by_hand(SPEEDS, 4, 21, quorum % 4 + 1, 0.0, 0.5, 0.6))


def test_the_grace_window_lets_others_join() -> None:
    """Nodes 3 and 2 come after 2 and 4 s; with 1.5 s of grace after two of them, node 1 is waited for at 5.5 s."""
    theta = {}
    for grace_s in (0.0, 1.5, 2.5):
        run = train(decoupled(quorum=2, grace_s=grace_s), steps=4, network=FREE, step_seconds=SPEEDS, final_sync=False)
        theta[grace_s] = run.model
    unlike(theta[0.0], theta[2.5])
    same(theta[2.5], by_hand(SPEEDS, 4, 4, 2, 2.5, 0.5, 0.6))
    same(theta[1.5], by_hand(SPEEDS, 4, 4, 2, 1.5, 0.5, 0.6))


def test_a_full_quorum_is_diloco() -> None:
    ours = train(decoupled(quorum=4), steps=20, network=FREE, step_seconds=SPEEDS)
    theirs = DiLoCoStrategy("sgd", H=4, lr=0.05, outer_optim=torch_outer())
    same(ours.model, train(theirs, steps=20).model, 1e-12)
    unlike(train(decoupled(quorum=3), steps=20, network=FREE, step_seconds=SPEEDS).model, ours.model)
    infinite = train(decoupled(quorum=1, grace_s=math.inf), steps=20, network=FREE, step_seconds=SPEEDS)
    same(infinite.model, ours.model, 1e-12)


def torch_outer() -> Any:
    from exogym.strategy import OptimSpec

    return OptimSpec(torch.optim.SGD, lr=0.5, momentum=0.6, nesterov=True)


def test_one_at_a_time_is_the_naive_rule() -> None:
    """Bit for bit: the weight is a power of two."""
    options: dict[str, Any] = {"steps": 19, "network": FREE, "step_seconds": SPEEDS}
    given: dict[str, Any] = {"rule": "nesterov", "outer_lr": 0.5, "outer_momentum": 0.6, "H": 4, "lr": 0.05}
    naive = train(AsyncDiLoCoStrategy("sgd", period=1, **given), **options).model
    assert torch.equal(train(decoupled(quorum=1), **options).model, naive)
    unlike(train(AsyncDiLoCoStrategy("sgd", period=2, **given), **options).model, naive)


def test_weights_are_tokens_squared_by_steps() -> None:
    from exogym.contrib.decoupled_diloco import QuorumServer

    server = QuorumServer([torch.zeros(2, dtype=torch.float64)], eta=1.0, beta=0.0)
    for x, steps, batch in ((1.0, 10, 4), (5.0, 5, 8), (-2.0, 1, 16)):
        server.apply([torch.full((2,), x, dtype=torch.float64)], 0, steps, batch)
    server.release()
    weights = [(10 * 4) ** 2 / 10, (5 * 8) ** 2 / 5, 16**2]
    expected = sum(w * x for w, x in zip(weights, (1.0, 5.0, -2.0), strict=True)) / sum(weights)
    assert server.theta[0][0].item() == pytest.approx(-expected, rel=1e-14) and server.version == 1
    server.release()  # nobody has arrived: nothing moves
    assert server.version == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quorum": 0}, "quorum=0 must be"),
        ({"grace_s": -1.0}, r"grace_s=-1.0 must be a number from 0"),
        ({"outer_momentum": 2}, "outer_momentum=2 must be a number from 0 to 1"),
        ({"H": 0}, "H=0 must be"),
    ],
)
def test_bad_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        decoupled(**options)


def test_a_quorum_that_cannot_be() -> None:
    with pytest.raises(ArgumentError, match="quorum=5 is more than the 4 nodes of this run: lower it"):
        train(decoupled(quorum=5), steps=4)
