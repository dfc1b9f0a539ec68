"""Compressed gradients: beside plain loops and torch's PowerSGD hook; what they are equal to; bytes; what is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems import BATCH, MixedRegressor, Regressor, dyadic, fleet_of, plain, run_of, same, shards, train, unlike
from processes import in_groups
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from wrapped import made

from exogym.errors import ArgumentError
from exogym.strategy import (
    CommunicateOptimizeStrategy,
    OptimSpec,
    PowerSGDStrategy,
    QSGDStrategy,
    QuantizedReduceStrategy,
    SignSGDStrategy,
    SimpleReduceStrategy,
    TopKStrategy,
)
from exogym.strategy.powersgd import LowRankMean

P = sum(p.numel() for p in Regressor().parameters())  # 57
LR = 0.05
MOMENTUM = OptimSpec("sgd", lr=LR, momentum=0.9, nesterov=True)


@functools.cache
def ddp(momentum: bool = False) -> Tensor:
    return train(SimpleReduceStrategy(MOMENTUM if momentum else OptimSpec("sgd", lr=LR))).rows


# What they are equal to


EQUAL: dict[str, tuple[Callable[[], CommunicateOptimizeStrategy], Callable[[], CommunicateOptimizeStrategy], float]] = {
    "all of top-k": (lambda: TopKStrategy(MOMENTUM, 1.0), lambda: TopKStrategy(MOMENTUM, 0.3), 1e-12),
    "all, nothing kept": (
        lambda: TopKStrategy(MOMENTUM, 1.0, error_feedback=False),
        lambda: TopKStrategy(MOMENTUM, 0.3, error_feedback=False),
        1e-12,
    ),
    "a million levels": (lambda: QSGDStrategy(MOMENTUM, 2**20), lambda: QSGDStrategy(MOMENTUM, 64), 1e-5),
    "full rank": (
        lambda: PowerSGDStrategy(MOMENTUM, 7, min_rate=0.1),
        lambda: PowerSGDStrategy(MOMENTUM, 1, min_rate=0.1),
        1e-12,
    ),
    "not begun": (lambda: PowerSGDStrategy(MOMENTUM, 1, 12), lambda: PowerSGDStrategy(MOMENTUM, 1, 6), 1e-12),
    "16 bits": (lambda: QuantizedReduceStrategy(MOMENTUM, 16), lambda: QuantizedReduceStrategy(MOMENTUM, 4), 1e-3),
}


@pytest.mark.parametrize("name", EQUAL)
def test_where_nothing_is_lost_it_is_ddp(name: str) -> None:
    make, control, tolerance = EQUAL[name]
    ours = train(make()).rows
    same(ours, ddp(momentum=True), tolerance)
    assert torch.equal(ours, ours[:1].expand_as(ours))
    lossy = train(control()).rows
    unlike(lossy, ddp(momentum=True))
    assert torch.equal(lossy, lossy[:1].expand_as(lossy))


def signs_of(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([t.sign() for t in tensors]).sum(0).sign()


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_the_vote_is_the_sign_of_the_sum_of_signs(num_nodes: int) -> None:
    """No gradient is exactly zero here; of two nodes that differ neither wins."""
    data = shards(num_nodes)

    def vote(models: list[nn.Module], step: int) -> None:
        for group in zip(*(m.parameters() for m in models), strict=True):
            sign = signs_of([p.grad for p in group])
            for p in group:
                p.grad = sign

    ours = train(SignSGDStrategy("sgd", lr=0.01), data, num_nodes).rows
    same(ours, plain(data, 12, lambda p: torch.optim.SGD(p, lr=0.01, foreach=False), before=vote))
    unlike(ours, train(SimpleReduceStrategy("sgd", lr=0.01), data, num_nodes).rows)


def test_ties_move_nothing_and_zeros_vote_in_turn() -> None:
    def voted(g: Tensor, step: int) -> list[float]:
        fleet, acting = begun(SignSGDStrategy(), len(g))
        fleet.blocks[0].own_grads().copy_(g)
        acting.transform_gradients(step, 1.0)
        return fleet.blocks[0].grads[0, :4].tolist()

    g = dyadic(2, P) * 0
    g[:, :4] = torch.tensor([[1.0, -1.0, 1.0, 0.0], [1.0, -2.0, -3.0, 0.0]])
    assert voted(g, 1) == [1.0, -1.0, 0.0, 0.0]  # of two nodes without a gradient one is for it
    assert [voted(g[:1], step)[3] for step in (1, 2, 3)] == [-1.0, 1.0, -1.0]


# Error feedback


class Kept:
    """The classical rule for one node in plain torch: p = gamma g + e, q = C(p), e = p - q."""

    def __init__(self, compress: Callable[[Tensor], Tensor]):
        self.e, self.compress = torch.zeros(P, dtype=torch.float64), compress

    def send(self, g: Tensor, gamma: float) -> Tensor:
        p = gamma * g + self.e
        q = self.compress(p)
        self.e = p - q
        return q


def largest(k: int) -> Callable[[Tensor], Tensor]:
    return lambda p: p.where(p.abs() >= p.abs().topk(k).values[-1], torch.zeros_like(p))


def scaled_signs(p: Tensor) -> Tensor:
    parts = p.split([t.numel() for t in Regressor().parameters()])
    return torch.cat(
        [t.abs().mean().float().double() * torch.ones_like(t).where(t >= 0, -torch.ones_like(t)) for t in parts]
    )


WITH_FEEDBACK: dict[str, tuple[Callable[..., CommunicateOptimizeStrategy], Callable[[Tensor], Tensor]]] = {
    "topk": (functools.partial(TopKStrategy, "sgd", 0.1), largest(round(0.1 * P))),
    "signs": (functools.partial(SignSGDStrategy, "sgd", error_feedback=True), scaled_signs),
}


@pytest.mark.parametrize("name", WITH_FEEDBACK)
@pytest.mark.parametrize("num_nodes", [1, 3])
def test_error_feedback_is_the_published_loop(name: str, num_nodes: int) -> None:
    """Also where the rate changes: what was kept is in units of the parameters."""
    make, compress = WITH_FEEDBACK[name]
    data = shards(num_nodes)

    def rates(step: int) -> float:
        return LR * (step + 1) / 3 if step < 3 else LR * (1 - (step - 3) / 9)

    def run(compress: Callable[[Tensor], Tensor], rates: Callable[[int], float]) -> Tensor:
        kept = [Kept(compress) for _ in data]

        def exchange(models: list[nn.Module], step: int) -> None:
            grads = [torch.cat([p.grad.flatten() for p in m.parameters()]) for m in models]
            update = torch.stack([k.send(g, rates(step - 1)) for k, g in zip(kept, grads, strict=True)]).mean(0)
            for m in models:
                sizes = [p.numel() for p in m.parameters()]
                for p, part in zip(m.parameters(), update.split(sizes), strict=True):
                    p.grad = part.view_as(p).clone()

        return plain(data, 12, lambda p: torch.optim.SGD(p, lr=1.0, foreach=False), before=exchange)

    ours = train(make(lr=LR, lr_scheduler="linear", warmup_steps=3), data, num_nodes).rows
    same(ours, run(compress, rates))
    unlike(ours, run(compress, lambda step: LR))
    unlike(ours, run(lambda p: p, rates))


def begun(strategy: CommunicateOptimizeStrategy, num_nodes: int = 3, dtype: torch.dtype = torch.float64) -> Any:
    model = Regressor(dtype=dtype)
    fleet = fleet_of(torch.zeros(num_nodes, P, dtype=dtype), model=model)
    return fleet, strategy.on(fleet, run_of(num_nodes))


KEEPS: dict[str, Callable[[], CommunicateOptimizeStrategy]] = {
    "topk": lambda: TopKStrategy("sgd", 0.1),
    "signs": lambda: SignSGDStrategy("sgd", error_feedback=True),
    "powersgd": lambda: PowerSGDStrategy("sgd", 1, min_rate=1.0),
}


@pytest.mark.parametrize("name", KEEPS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_what_is_sent_and_what_is_kept_add_up_to_all_gradients(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """In the mean over nodes, in units of the parameters; a rate of zero sends nothing."""
    fleet, acting = begun(KEEPS[name](), dtype=dtype)
    (block,) = fleet.blocks
    given, moved = torch.zeros(P, dtype=dtype), torch.zeros(P, dtype=dtype)
    rates = [0.1] * 6 if name == "powersgd" else [0.1, 0.2, 0.2, 0.0, 0.05, 0.05]  # its error is of gradients
    for step, gamma in enumerate(rates, 1):
        g = torch.randn(3, P, generator=torch.Generator().manual_seed(step)).to(dtype)
        block.own_grads().copy_(g)
        acting.transform_gradients(step, gamma)
        given += gamma * g.mean(0)
        moved += gamma * block.grads[0]
    (kept,) = acting.strategy.gradient_modules[0].row_state.values()
    kept = kept.mean(0) * (0.1 if name == "powersgd" else 1)
    assert (moved + kept - given).abs().max() <= tolerance * given.abs().max()
    assert (moved - given).abs().max() > 0.01 * given.abs().max()  # the control: something is kept


@pytest.mark.parametrize("name", KEEPS)
def test_a_node_that_is_away_rests_and_comes_back_with_nothing_kept(name: str) -> None:
    fleet, acting = begun(KEEPS[name]())
    (block,), module = fleet.blocks, acting.strategy.gradient_modules[0]
    (kept,) = module.row_state.values()
    for step in (1, 2):
        block.own_grads().copy_(torch.randn(3, P, generator=torch.Generator().manual_seed(step)))
        if step == 2:
            before, fleet.comm.present = kept.clone(), [0, 2]
            block.own_grads()[1] = torch.nan  # nothing was computed there
        acting.transform_gradients(step, 0.1)
    assert torch.equal(kept[1], before[1]) and kept[1].any() and block.grads.isfinite().all()
    assert not torch.equal(kept[[0, 2]], before[[0, 2]])
    fleet.comm.present = [0, 1, 2]
    acting.bring_back([1], 0, 3)
    assert not kept[1].any() and kept[[0, 2]].any()


def test_what_was_kept_moves_a_parameter_that_has_no_gradient_any_more() -> None:
    fleet, acting = begun(TopKStrategy("sgd", 1 / P), 1)  # one entry a step
    (block,) = fleet.blocks
    g = torch.zeros(1, P, dtype=torch.float64)
    g[0, 0], g[0, -1] = 2.0, 1.0  # of the first tensor and of the last
    seen = []
    for step in (1, 2, 3):
        block.own_grads().copy_(g if step == 1 else 0 * g)
        block.has_grad[:] = step == 1
        acting.transform_gradients(step, 1.0)
        seen.append((block.grads[0].nonzero().flatten().tolist(), block.has_grad[0].tolist()))
    assert seen == [([0], [True] * 4), ([P - 1], [False, False, False, True]), ([], [False] * 4)]


# Draws and rounding


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_mean_is_off_by_half_a_step_on_each_way(num_nodes: int, bits: int) -> None:
    fleet, acting = begun(QuantizedReduceStrategy("sgd", bits, bucket=16), num_nodes)
    (block,) = fleet.blocks
    g = torch.randn(num_nodes, P, generator=torch.Generator().manual_seed(num_nodes)).double()
    block.own_grads().copy_(g)
    acting.transform_gradients(1, 1.0)
    scale = g.abs().max() / (2 ** (bits - 1) - 1)  # no bucket's is larger
    off = (block.grads[0] - g.mean(0)).abs().max() / scale
    assert 0.02 < off <= 1.01  # half a step, twice
    assert torch.equal(block.grads, block.grads[:1].expand_as(block.grads))


def test_numbers_on_the_grid_are_averaged_exactly() -> None:
    """Codes of -127 to 127 in each bucket, and so are their means."""
    fleet, acting = begun(QuantizedReduceStrategy("sgd", bucket=P), 1)
    (block,) = fleet.blocks
    g = torch.linspace(-127, 127, P, dtype=torch.float64).round()[None] / 8
    block.own_grads().copy_(g)
    acting.transform_gradients(1, 1.0)
    assert torch.equal(block.grads, g)
    block.own_grads().copy_(g + 0.01)
    acting.transform_gradients(1, 1.0)
    assert not torch.equal(block.grads, g + 0.01)


# PowerSGD


RANKS, STEPS, TORCH_START = 2, 8, 2


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def rows_of_numbers(rank: int) -> TensorDataset:
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(STEPS * BATCH, 6, generator=g, dtype=torch.float64) * (1 + rank)
    return TensorDataset(x, torch.randn(len(x), 3, generator=g, dtype=torch.float64))


def real_process(rank: int, folder: Path) -> None:
    """One of two ranks: torch's DDP with its hook, for some ranks of the matrices; what comes out goes to a file."""
    results = {}
    for r in (1, 2, 16):
        model = DistributedDataParallel(Deep())
        state = powerSGD_hook.PowerSGDState(None, r, start_powerSGD_iter=TORCH_START, min_compression_rate=1.0)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optim = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        for step in range(STEPS):
            x, y = rows_of_numbers(rank)[step * BATCH : (step + 1) * BATCH]
            optim.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optim.step()
        results[r] = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.save(results, folder / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Tensor]]:
    folder: Path = tmp_path_factory.mktemp("powersgd")
    in_groups(RANKS, folder, lambda rank: real_process(rank, folder))
    yield torch.load(folder / "rank0.pt")


@pytest.fixture
def draws_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the matrices Q begin as those of torch's hook: one seed, matrices in the order of its only bucket."""
    start = LowRankMean.start

    def start_as_torch(self: LowRankMean, fleet: Any, run: Any) -> None:
        start(self, fleet, run)
        (block,) = fleet.blocks
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
            for slot in reversed(list(block.layout)):  # DDP's buckets go backwards
                if (shape := self.matrix(slot.shape)) is not None:
                    self.shared_state[f"Q.{slot.name}"].copy_(torch.randn(1, *shape[1:], dtype=torch.float64)[0])

    monkeypatch.setattr(LowRankMean, "start", start_as_torch)


@pytest.mark.parametrize("rank", [1, 2, 16])
def test_equals_torchs_powersgd_hook(rank: int, real: dict[int, Tensor], draws_of_torch: None) -> None:
    spec = OptimSpec("sgd", lr=LR, momentum=0.9)
    data = [rows_of_numbers(i) for i in range(RANKS)]

    def ours(start_step: int) -> Tensor:
        return train(PowerSGDStrategy(spec, rank, start_step, min_rate=1.0), data, RANKS, STEPS, Deep()).model

    same(ours(TORCH_START), real[rank], 1e-10)
    if rank < 16:
        unlike(ours(TORCH_START + 1), real[rank])


# Bytes


def test_blocks_of_two_dtypes_are_compressed_apart() -> None:
    result = train(TopKStrategy("sgd", 0.5), model=MixedRegressor(), steps=1)
    doubles, singles = (e.payload_bytes for e in result.events)
    assert (doubles, singles) == (round(0.5 * 35) * 12, round(0.5 * 6) * 8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopKStrategy(density=0.0), "density=0.0 must be a number over 0"),
        (lambda: TopKStrategy(density=True), "density=True"),
        (lambda: QSGDStrategy(levels=0), "levels=0"),
        (lambda: QSGDStrategy(bucket=0), "bucket=0"),
        (lambda: QuantizedReduceStrategy(bits=9), "quantization_bits=9"),
        (lambda: PowerSGDStrategy(rank=0), "rank=0"),
        (lambda: PowerSGDStrategy(start_step=-1), "start_step=-1"),
        (lambda: PowerSGDStrategy(min_rate=-1.0), "min_rate=-1.0"),
        (lambda: SignSGDStrategy(error_feed=True), "did you mean 'error_feedback'"),
        (lambda: made(PowerSGDStrategy, robust="median"), "whose LowRankMean sends a part of a node's values"),
        (lambda: made(QuantizedReduceStrategy, robust="krum"), "was not tested with a wrapper"),
        (lambda: made(SignSGDStrategy, robust="median"), "averages in its own way .MajorityVote."),
    ],
)
def test_errors(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()
