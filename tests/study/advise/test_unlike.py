"""What `advise` reckons by formula against the clock of a real run, on lines and nodes that differ."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from battery import in_turn
from torch import nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.contrib import pulseloco
from exogym.network import Network
from exogym.strategy import Averaging, DifferentialPrivacy, FedAvgStrategy, Strategy, powersgd
from exogym.strategy.registry import STRATEGIES, parse_strategy
from exogym.study.advise import advise, prediction

SIDE, LAYERS = 64, 2
WARM = 30  # steps, after which the clock is read until twice as many, or six times; rounds of 5, 6, 15 and 30 end there
TEXTS = {
    "dion": "dion:rank_fraction=1",
    "onebit_adam": "onebit_adam:warmup=1e-9:lr=1e-9",
    "pier": "pier:warmup=0",
    "post_local_sgd": "post_local_sgd:start_step=0",
    "pulseloco": "pulseloco:cast=none",
    "streaming_diloco": "streaming_diloco:H=6:num_fragments=2:fragment_sync_delay=1",
}
MORE = (
    "diloco:eager=true", "diloco:delay=2", "noloco:group_size=3", "fedavg:island_size=2", "async_diloco:dylu=true",
    "decoupled_diloco:quorum=2",
)  # fmt: skip
SAMPLED = (
    "fedavg:client_fraction=0.4", "scaffold:client_fraction=0.5", "fednova:client_fraction=0.7",
    "fedopt:client_fraction=0.5", "fedprox:client_fraction=0.5",
    "private",
)  # fmt: skip
PRIVATE = Averaging(privacy=DifferentialPrivacy(1.0, 1.0))
OURS = [TEXTS.get(name, name) for name, kind in STRATEGIES.items() if kind.__module__.startswith("exogym.")]
OURS = [
    name for name in OURS if name not in ("fedper", "fedrep")
]  # the model decides how much travels; advice counts all
# Who meets is drawn; a node's round ends between the readings; a node waits for its neighbours alone; what is sent is
# drawn, or filled up
ROUGH = {
    "noloco": 0.15, "fedavg:island_size=2": 0.15, "async_diloco": 0.1, "decoupled_diloco": 0.1, "heloco": 0.1,
    "fedasync": 0.1, "halos": 0.1,
    "gossip": 0.03, "choco": 0.03, "sgp": 0.03, "sparta": 0.03, "sparta_diloco": 0.03, "sparseloco": 0.05, "edit": 0.05,
    "onebit_adam": 0.02,  # the formula leaves the scales of the tensors out
}  # fmt: skip


def unlike(seed: int) -> tuple[Network, list[float]]:
    """Return 2 to 5 nodes behind lines of 0.1 to 3 Mbit/s, and the seconds of their steps; of even seeds alike."""
    draw = np.random.default_rng(seed)
    size = int(draw.integers(2, 6))
    lines, latency = 10 ** draw.uniform(5, 6.5, size), draw.uniform(1e-3, 2e-2, (size, size))
    steps_s = draw.uniform(0.02, 0.2, size) if seed % 2 else np.full(size, 0.05)
    return Network.matrix(np.minimum.outer(lines, lines), (latency + latency.T) / 2), steps_s.tolist()


def made(text: str) -> Strategy:
    if text == "private":
        return FedAvgStrategy(H=5, client_fraction=0.5, weighting="uniform", averaging=PRIVATE)
    return parse_strategy(text, H=5)


def by_the_clock(
    text: str, network: Network, steps_s: list[float], end: int, warm: int = WARM
) -> tuple[float, np.ndarray, np.ndarray]:
    """Return the seconds of a step of the fleet, and (N,) shares of computing and seconds of a node's own step."""
    torch.manual_seed(0)
    seen = [(0.0, *[np.zeros(len(steps_s))] * 4)] if not warm else []

    def look(loop) -> None:
        clock = loop.timing.clock
        own_s = clock.seconds("computing") + clock.seconds("sending")
        seen.append((clock.last_s, clock.time_s, clock.seconds("computing"), own_s, clock.steps.copy()))

    trainer = LocalTrainer(
        nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS))),
        TensorDataset(torch.randn(64, SIDE), torch.randint(0, SIDE, (64,))),
        loss_fn=F.cross_entropy,
    )
    trainer.fit(
        made(text), num_nodes=len(steps_s), max_steps=end, batch_size=1, device="cpu", network=network,
        step_seconds=steps_s, final_sync=False, callbacks=[Every(WARM, look, may_end=False)],
    )  # fmt: skip
    last_s, time_s, computing_s, own_s, steps = (b - a for a, b in zip(seen[0], seen[-1], strict=True))
    return last_s / (end - warm), computing_s / time_s, own_s / np.maximum(steps, 1)


@pytest.mark.parametrize(("text", "seed"), in_turn([*OURS, *MORE], (1, 2)))
def test_a_row_is_what_the_clock_says_on_unlike_lines(text, seed, monkeypatch):
    """The time, the share of computing, and whether the slowest node computes enough, which decides the advice."""
    monkeypatch.setattr(powersgd, "side_of", lambda P: SIDE)
    monkeypatch.setattr(pulseloco, "VISIBLE", 1.0)  # without a cast
    network, steps_s = unlike(seed)
    rough = max([ROUGH.get(text, 0.0), ROUGH.get(text.partition(":")[0], 0.0), 0.005])
    step_s, computing, own_s = by_the_clock(text, network, steps_s, 2 * WARM if rough < 0.1 else 6 * WARM)
    slowest = computing[np.argmax(own_s if parse_strategy(text).driven_by == "clock" else steps_s)]

    def told(target: float):
        monkeypatch.setattr(prediction, "UTILISATION", target)
        return advise(
            parameters=LAYERS * SIDE * SIDE, num_nodes=len(steps_s), network=network, step_seconds=steps_s,
            strategies=[made(text)], algorithm="recorded",
        ).rows[0]  # fmt: skip

    enough, too_little = told(slowest * (1 - rough)), told(min(1.0, slowest * (1 + rough)))
    assert enough.seconds_per_step == pytest.approx(step_s, rel=rough)
    assert enough.utilisation == pytest.approx(computing.mean(), rel=rough)
    assert enough.keeps_up and not too_little.keeps_up


@pytest.mark.parametrize(("text", "seed"), in_turn(SAMPLED, [1, 2, 3]))
def test_a_row_is_what_the_clock_says_of_sampled_clients(text, seed, monkeypatch):
    """Round by round the same clients are drawn for the formula, as many rounds as the run has: all agrees."""
    monkeypatch.setattr(prediction, "MEETINGS", WARM // 5)
    network, steps_s = unlike(seed)
    step_s, computing, _ = by_the_clock(text, network, steps_s, WARM, warm=0)
    slowest = computing[np.equal(steps_s, max(steps_s))].mean()

    def told(target: float):
        monkeypatch.setattr(prediction, "UTILISATION", target)
        return advise(
            parameters=LAYERS * SIDE * SIDE, num_nodes=len(steps_s), network=network, step_seconds=steps_s,
            strategies=[made(text)], algorithm="recorded",
        ).rows[0]  # fmt: skip

    row = told(0.9)
    assert row.seconds_per_step == pytest.approx(step_s, rel=0.005)
    assert row.utilisation == pytest.approx(computing.mean(), rel=0.005)
    assert row.speedup == pytest.approx(min(steps_s) * (computing / steps_s).sum(), rel=0.005)
    if slowest:  # a deadline may leave it out of all rounds
        assert told(slowest * 0.995).keeps_up and not told(slowest * 1.005).keeps_up


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_node_on_a_slow_line_decides_wherever_it_stands(slow):
    """Steps are alike, so the line alone says which node is the slowest; it computes 44 % of its time."""
    lines = np.full(3, 1e9)
    lines[slow] = 50e6
    told = advise(
        parameters=1e7, num_nodes=3, network=Network.matrix(np.minimum.outer(lines, lines), "10ms"), step_seconds=0.1,
        strategies=["async_diloco:H=100", "diloco:H=1000"],
    )  # fmt: skip
    rows = {row.strategy: row for row in told.rows}
    assert not rows["async_diloco:H=100"].keeps_up and rows["diloco:H=1000"].keeps_up
    assert told.recommended is rows["diloco:H=1000"]
    assert "async_diloco:H=100: not recommended" in str(told)
