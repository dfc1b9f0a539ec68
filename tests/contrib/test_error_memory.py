"""Methods that remember what compression left out, beside plain loops; their identities, bytes, and absent nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import Regressor, adamw, fleet_of, plain, put, rows_of, run_of, same, sgd, shards, train, unlike, vector
from torch import Tensor, nn

from exogym.core.base.rng import numpy_generator
from exogym.errors import ArgumentError
from exogym.strategy import (
    CHOCOStrategy,
    CocktailSGDStrategy,
    EF21Strategy,
    FedAvgStrategy,
    GossipStrategy,
    OneBitAdamStrategy,
    OptimSpec,
    SimpleReduceStrategy,
)
from exogym.strategy.graphs import edges_of, metropolis

Models = list[nn.Module]
P = 57
LR = 0.05


def largest(rows: Tensor, k: int) -> Tensor:
    """Row by row the k entries of largest size, zeros elsewhere."""
    out = torch.zeros_like(rows)
    for row, sent in zip(rows, out, strict=True):
        for j in sorted(range(len(row)), key=lambda j, row=row: -abs(float(row[j])))[:k]:
            sent[j] = row[j]
    return out


def scaled_signs(rows: Tensor) -> Tensor:
    """Tensor by tensor the mean size, with each entry's sign."""
    sizes = [p.numel() for p in Regressor().parameters()]
    parts = [
        t.abs().mean(1, keepdim=True).float().double() * torch.where(t >= 0, 1.0, -1.0) for t in rows.split(sizes, 1)
    ]
    return torch.cat(parts, 1)


COMPRESS: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda rows: largest(rows, round(0.1 * P)),
    "sign": scaled_signs,
}


# CHOCO-SGD


def choco(graph: str, n: int, gamma: float, C: Callable[[Tensor], Tensor], H: int = 1, order: str = "paper") -> Tensor:
    """The paper's algorithm 2 with all copies in one matrix."""
    W = metropolis(edges_of(graph, n), tuple(range(n)), n)
    hat = vector(Regressor()).expand(n, P).clone()

    def after(models: Models, step: int) -> None:
        nonlocal hat
        if step % H:
            return
        x = rows_of(models)
        if order == "late":  # mixes with the copies of the round before
            x = x + gamma * (W @ hat - hat)
        hat = hat + C(x - hat)
        if order == "paper":
            x = x + gamma * (W @ hat - hat)
        for m, row in zip(models, x, strict=True):
            put(m, row)

    return plain(shards(n), 12, sgd, after=after)


@pytest.mark.parametrize("compressor", COMPRESS)
@pytest.mark.parametrize(("graph", "n", "H"), [("ring", 4, 1), ("exponential", 5, 2)])
def test_choco_is_the_papers_loop(compressor: str, graph: str, n: int, H: int) -> None:
    density = 0.1 if compressor == "topk" else None
    strategy = CHOCOStrategy("sgd", graph, H, gamma=0.3, compressor=compressor, density=density, lr=LR)
    ours = train(strategy, shards(n), n).rows
    same(ours, choco(graph, n, 0.3, COMPRESS[compressor], H))
    unlike(ours, choco(graph, n, 0.3, COMPRESS[compressor], H, "late"))
    unlike(ours, choco(graph, n, 0.5, COMPRESS[compressor], H))


@pytest.mark.parametrize("graph", ["ring", "torus"])
def test_choco_that_sends_all_is_gossip(graph: str) -> None:
    ours = train(CHOCOStrategy("adamw", graph, 2, gamma=1.0, density=1.0, lr=0.02), shards(5), 5).rows
    gossip = train(GossipStrategy("adamw", graph, 2, lr=0.02), shards(5), 5).rows
    same(ours, gossip)
    for gamma, density in ((0.9, 1.0), (1.0, 0.9)):
        other = CHOCOStrategy("adamw", graph, 2, gamma=gamma, density=density, lr=0.02)
        unlike(train(other, shards(5), 5).rows, gossip)


def test_choco_of_one_node_is_the_inner_optimizer_and_sends_nothing() -> None:
    ours = train(CHOCOStrategy("adamw", density=0.1, gamma=0.5, lr=0.02), shards(1), 1)
    same(ours.rows, plain(shards(1), 12, adamw), 1e-12)
    assert not ours.tx.any()
    unlike(ours.rows, plain(shards(1), 11, adamw))


def begun(strategy: Any, rows: Tensor) -> Any:
    fleet = fleet_of(rows)
    return fleet, strategy.on(fleet, run_of(len(rows)))


def test_choco_keeps_the_mean_and_brings_nodes_together() -> None:
    """Nodes that do not train, and begin apart from the copies that all have of them."""
    fleet, acting = begun(CHOCOStrategy("sgd", density=0.1, gamma=0.2), vector(Regressor()).expand(5, P))
    (block,) = fleet.blocks
    block.params += torch.randn(5, P, generator=torch.Generator().manual_seed(0)).double()
    before = block.params.clone()
    for step in range(1, 101):
        acting.communicate(step)
    same(block.params.mean(0), before.mean(0), 1e-12)
    spread = (block.params - before.mean(0)).norm() / (before - before.mean(0)).norm()
    assert spread < 0.05
    copies, sums = acting.strategy.modules[0].row_state.values()
    W = metropolis(edges_of("ring", 5), tuple(range(5)), 5)
    same(sums, W @ copies, 1e-12)
    unlike(copies, before)


def test_choco_in_half_precision_keeps_sums_exact() -> None:
    """Copies are in fp32, so that the sum of neighbors' copies does not drift from them."""
    strategy = CHOCOStrategy("sgd", density=0.1, gamma=0.3)
    fleet = fleet_of(vector(Regressor()).expand(4, P).bfloat16(), model=Regressor(dtype=torch.bfloat16))
    acting = strategy.on(fleet, run_of(4))
    (block,) = fleet.blocks
    for step in range(1, 41):
        block.params += torch.randn(4, P, generator=torch.Generator().manual_seed(step)).bfloat16()
        acting.communicate(step)
    copies, sums = acting.strategy.modules[0].row_state.values()
    assert copies.dtype == sums.dtype == torch.float32
    W = metropolis(edges_of("ring", 4), tuple(range(4)), 4)
    assert (sums - W.float() @ copies).abs().max() < 1e-5 * copies.abs().max()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"graph": "matching"}, "draws new neighbors each round"),
        ({"gamma": 0.0}, "gamma=0.0"),
        ({"gamma": 1.5}, "gamma=1.5"),
        ({"density": 0.0}, "density=0.0"),
        ({"compressor": "top"}, "did you mean 'topk'"),
        ({"compressor": "sign", "density": 0.1}, "leave density=0.1 out"),
    ],
)
def test_wrong_options_of_choco(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        CHOCOStrategy("sgd", **options)


# EF21


def ef21(n: int, C: Callable[[Tensor], Tensor], classical: bool = False, momentum: float = 0.0) -> Tensor:
    """The authors' loop over nodes' estimates. `classical`: instead the error is added to the next gradient."""
    g = torch.zeros(n, P, dtype=torch.float64)

    def before(models: Models, step: int) -> None:
        nonlocal g
        grads = torch.stack([torch.cat([p.grad.flatten() for p in m.parameters()]) for m in models])
        if classical:
            sent, g = C(grads + g), grads + g - C(grads + g)
        else:
            sent = g = g + C(grads - g)
        for m in models:
            parts = sent.mean(0).split([p.numel() for p in m.parameters()])
            for p, part in zip(m.parameters(), parts, strict=True):
                p.grad = part.view_as(p).clone()

    return plain(shards(n), 12, lambda p: torch.optim.SGD(p, lr=LR, momentum=momentum, foreach=False), before=before)


@pytest.mark.parametrize("compressor", COMPRESS)
@pytest.mark.parametrize(("n", "momentum"), [(1, 0.0), (3, 0.9)])
def test_ef21_is_the_authors_loop(compressor: str, n: int, momentum: float) -> None:
    density = 0.1 if compressor == "topk" else None
    inner = OptimSpec("sgd", lr=LR, momentum=momentum)
    ours = train(EF21Strategy(inner, compressor=compressor, density=density), shards(n), n).rows
    same(ours, ef21(n, COMPRESS[compressor], momentum=momentum))
    unlike(ours, ef21(n, COMPRESS[compressor], True, momentum))


def test_ef21_that_sends_all_is_ddp() -> None:
    def run(make: Any, **options: Any) -> Tensor:
        return train(make("adamw", lr=0.02, max_norm=0.5, **options), shards(3), 3).rows

    same(run(EF21Strategy, density=1.0), run(SimpleReduceStrategy))
    unlike(run(EF21Strategy, density=0.5), run(SimpleReduceStrategy))


@pytest.mark.parametrize(("compressor", "density", "rate"), [("topk", 0.1, 1e-12), ("sign", None, 0.2)])
def test_ef21_of_constant_gradients_finds_their_mean(compressor: str, density: float | None, rate: float) -> None:
    """After 1 / density steps with top-k; each step is nearer with signs. Top-k without estimates stays away."""
    fleet, acting = begun(EF21Strategy("sgd", compressor=compressor, density=density), vector(Regressor()).expand(3, P))
    (block,) = fleet.blocks
    g = torch.randn(3, P, generator=torch.Generator().manual_seed(0)).double()
    for step in range(1, 12):
        block.own_grads().copy_(g)
        acting.transform_gradients(step, LR)
        module = acting.strategy.gradient_modules[0]
        same(block.grads[0], module.row_state["estimate.0"].mean(0), 1e-12)
        if step == 1:
            unlike(block.grads[0], g.mean(0))
    assert (block.grads[0] - g.mean(0)).norm() <= rate * g.mean(0).norm()


def test_ef21_steps_along_the_mean_of_the_estimates() -> None:
    fleet, acting = begun(EF21Strategy("sgd", density=0.1), vector(Regressor()).expand(3, P))
    (block,), module = fleet.blocks, acting.strategy.gradient_modules[0]
    own, gen = module.row_state["estimate.0"], torch.Generator().manual_seed(2)
    for step in range(1, 7):
        g, old = torch.randn(3, P, generator=gen).double(), own.clone()
        block.own_grads().copy_(g)
        acting.transform_gradients(step, LR)
        same(own, old + largest(g - old, 6), 1e-12)
        same(block.grads[0], own.mean(0), 1e-12)
        unlike(block.grads[0], g.mean(0))


def test_ef21_in_half_precision_keeps_the_mean_of_the_estimates() -> None:
    strategy = EF21Strategy("sgd", density=0.1)
    fleet = fleet_of(vector(Regressor()).expand(4, P).bfloat16(), model=Regressor(dtype=torch.bfloat16))
    acting = strategy.on(fleet, run_of(4))
    for step in range(1, 41):
        fleet.blocks[0].own_grads().copy_(torch.randn(4, P, generator=torch.Generator().manual_seed(step)))
        acting.transform_gradients(step, LR)
    (own,), mean = strategy.modules[0].row_state.values(), strategy.modules[0].shared_state["mean.0"]
    assert own.dtype == mean.dtype == torch.float32 and fleet.blocks[0].grads.dtype == torch.bfloat16
    assert (mean - own.mean(0)).abs().max() < 1e-5 * own.abs().max()


# 1-bit Adam

BETA1, BETA2, EPS, DECAY = 0.8, 0.9, 1e-6, 0.1


def one_bit(parts: list[Tensor]) -> list[Tensor]:
    """The signs, times the root mean square of each tensor, whose 4 bytes travel."""
    return [(p.norm() / p.numel() ** 0.5).float().double() * torch.where(p >= 0, 1.0, -1.0) for p in parts]


def onebit_adam(n: int, warm: int, steps: int = 12, server: bool = True, feedback: bool = True) -> Tensor:
    """The published rule, tensor by tensor: chunk k of each tensor is node k's to average and to compress again."""
    shapes = [p.shape for p in Regressor().parameters()]
    m, v = [torch.zeros(s).double() for s in shapes], [torch.zeros(s).double() for s in shapes]
    workers = [[torch.zeros(s.numel()).double() for s in shapes] for _ in range(n)]
    servers = [torch.zeros(s.numel()).double() for s in shapes]

    def before(models: Models, step: int) -> None:
        for t, group in enumerate(zip(*(model.parameters() for model in models), strict=True)):
            grads = [p.grad for p in group]
            if step <= warm:
                g = torch.stack(grads).mean(0)
                m[t] = BETA1 * m[t] + (1 - BETA1) * g
                v[t] = BETA2 * v[t] + (1 - BETA2) * g * g
            elif n == 1:
                m[t] = BETA1 * m[t] + (1 - BETA1) * grads[0]
            else:
                sent = []
                for i, g in enumerate(grads):
                    full = (BETA1 * m[t] + (1 - BETA1) * g).flatten() + workers[i][t]
                    sent.append(one_bit([full])[0])
                    workers[i][t] = (full - sent[i]) * feedback
                chunks = list((torch.stack(sent).mean(0) + servers[t]).split(-(-full.numel() // n)))
                if server:
                    again = one_bit(chunks)
                    servers[t] = (torch.cat(chunks) - torch.cat(again)) * feedback
                    chunks = again
                m[t] = torch.cat(chunks).view_as(m[t])
            for p in group:
                p.grad = m[t] / (v[t].sqrt() + EPS) + DECAY * p.detach()

    return plain(shards(n), steps, lambda p: torch.optim.SGD(p, lr=0.02, foreach=False), before=before)


def onebit(n: int, warmup: float, steps: int = 12) -> Any:
    strategy = OneBitAdamStrategy(lr=0.02, warmup=warmup, beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=DECAY)
    return train(strategy, shards(n), n, steps)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_onebit_adam_is_the_published_loop(n: int) -> None:
    ours = onebit(n, 1 / 3).rows
    same(ours, onebit_adam(n, 4), 1e-6)  # scales travel in fp32
    assert torch.equal(ours, ours[:1].expand_as(ours))
    for other in ({"server": False}, {"feedback": False}):
        unlike(ours, onebit_adam(n, 4, **other))
    unlike(ours, onebit_adam(n, 5))


class PlainAdam(torch.optim.Optimizer):
    """Adam without correction of the bias."""

    def __init__(self, params: Any, lr: float, frozen: int = 10**9):
        super().__init__(params, {"lr": lr, "frozen": frozen})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["t"] = state.get("t", 0) + 1
                state["m"] = BETA1 * state.get("m", 0.0) + (1 - BETA1) * p.grad
                if state["t"] <= group["frozen"]:
                    state["v"] = BETA2 * state.get("v", 0.0) + (1 - BETA2) * p.grad**2
                p.sub_(group["lr"] * (state["m"] / (state["v"].sqrt() + EPS) + DECAY * p))


def test_onebit_adam_that_warms_up_to_the_end_is_ddp_with_adam() -> None:
    ddp = train(SimpleReduceStrategy(OptimSpec(PlainAdam, lr=0.02)), shards(3), 3).rows
    same(onebit(3, 1.0).rows, ddp)
    unlike(onebit(3, 0.9).rows, ddp)


def test_onebit_adam_of_one_node_is_adam_whose_variance_is_frozen() -> None:
    ours = onebit(1, 1 / 3)
    same(ours.rows, plain(shards(1), 12, lambda p: PlainAdam(p, 0.02, 4)))
    unlike(ours.rows, plain(shards(1), 12, lambda p: PlainAdam(p, 0.02, 5)))
    assert not ours.tx.any()


def test_onebit_adam_sends_in_all_what_it_keeps_the_rest_of() -> None:
    """Over the compressed steps the sum of m, and the errors at the end, are the sum of the nodes' mean momentum."""
    fleet, acting = begun(OneBitAdamStrategy(warmup=0.02, beta1=BETA1), vector(Regressor()).expand(3, P))
    (block,), module = fleet.blocks, acting.strategy.gradient_modules[0]
    m, gen = module.shared_state["m.0"], torch.Generator().manual_seed(3)
    given, sent = torch.zeros(P).double(), torch.zeros(P).double()
    for step in range(1, 10):
        g, old = torch.randn(3, P, generator=gen).double(), m.clone()
        block.own_grads().copy_(g)
        acting.transform_gradients(step, LR)
        if step <= 2:
            same(m, BETA1 * old + (1 - BETA1) * g.mean(0))
            continue
        workers, servers = module.row_state["worker.0"], module.row_state["server.0"]
        given += BETA1 * old + (1 - BETA1) * g.mean(0)
        sent += m
        same(sent + workers.mean(0) + servers.sum(0), given, 1e-6)
        unlike(sent + workers.mean(0), given)
        unlike(sent + servers.sum(0), given)
        if step == 4:
            assert [int((row != 0).sum()) for row in servers] == [
                sum(len(range(k * w, min((k + 1) * w, d))) for d, w in ((42, 14), (7, 3), (7, 3), (1, 1)))
                for k in range(3)
            ]


@pytest.mark.parametrize(("n", "widths"), [(2, (21, 4, 4, 1)), (3, (14, 3, 3, 1)), (5, (9, 2, 2, 1))])
def test_onebit_adam_sends_bits_and_scales(n: int, widths: tuple[int, ...]) -> None:
    """A warm step in DDP's bytes. Then a node's chunk: a bit for each entry, 4 bytes for each of four tensors."""
    message = -(-sum(widths) // 8) + 4 * 4
    ours = onebit(n, 0.01, 4)
    assert ours.payload.tolist() == [P * 8 + 3 * (n + 1) * message] * n
    assert ours.tx.tolist() == ours.rx.tolist() == pytest.approx([2 * (n - 1) / n * P * 8 + 6 * (n - 1) * message] * n)


def test_onebit_adam_leaves_entries_without_variance_alone() -> None:
    """One bit cannot stand for zero, and such an entry would be divided by eps."""
    fleet, acting = begun(OneBitAdamStrategy(warmup=0.01), vector(Regressor()).expand(2, P))
    (block,) = fleet.blocks
    for step in range(1, 4):
        g = torch.randn(2, P, generator=torch.Generator().manual_seed(step)).double()
        g[:, 5] = 0 if step < 3 else 1
        block.own_grads().copy_(g)
        block.has_grad[:, 1] = step == 1  # the second tensor has no gradient later on
        m = acting.strategy.gradient_modules[0].shared_state["m.0"].clone()
        acting.transform_gradients(step, LR)
        assert block.grads[0, 5] == 0 and block.grads[0, :5].abs().min() > 0
        now = acting.strategy.gradient_modules[0].shared_state["m.0"]
        assert torch.equal(now[42:49], m[42:49]) == (step > 1) and not torch.equal(now[:42], m[:42])
        assert block.has_grad[0].tolist() == [True, step == 1, True, True]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup": 0.0}, "warmup=0.0"),
        ({"warmup": 1.1}, "warmup=1.1"),
        ({"beta2": 1.0}, "beta2=1.0"),
        ({"eps": 0}, "eps=0"),
    ],
)
def test_wrong_options_of_onebit_adam(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        OneBitAdamStrategy(**options)


# CocktailSGD


def in_bits(rows: Tensor, bits: int, bucket: int) -> Tensor:
    """Each bucket of a row in steps of its largest size, which travels in fp32."""
    parts = [part.float() for part in rows.split(bucket, 1)]
    scales = [part.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1) for part in parts]
    codes = [(part / scale.where(scale > 0, 1.0)).round() for part, scale in zip(parts, scales, strict=True)]
    return torch.cat([code * scale for code, scale in zip(codes, scales, strict=True)], 1).double()


def mixture(rows: Tensor, topk: float, bits: int | None, bucket: int) -> Tensor:
    k = max(1, int(topk * rows.shape[1]))
    kept = largest(rows, k)
    at = kept.abs().topk(k).indices.sort().values
    values = rows.gather(1, at)
    return torch.zeros_like(rows).scatter(1, at, values if bits is None else in_bits(values, bits, bucket))


def cocktail(n: int, p: float, topk: float, bits: int, bucket: int, keeps: bool = True, moves: bool = True) -> Tensor:
    """The authors' loop: every chunk of a row has its server, and entries of it are drawn at each step."""
    theta = vector(Regressor())
    w = -(-P // n)
    error = torch.zeros(P, dtype=torch.float64)

    def after(models: Models, step: int) -> None:
        x = rows_of(models)
        m = round(p * w)
        turn = step if moves else 1
        drawn = sorted(numpy_generator(0, "cocktail", 0, turn).choice(w, m, replace=False, shuffle=False).tolist())
        for chunk in range(n):
            at = [chunk * w + j for j in drawn if chunk * w + j < P]
            filled = torch.zeros(n, m, dtype=torch.float64)
            filled[:, : len(at)] = (x - theta)[:, at]
            q = mixture(filled, topk, bits, bucket)
            x[:, at] -= q[:, : len(at)]
            served = q.mean(0, keepdim=True)
            served[0, : len(at)] += error[at]
            d = mixture(served, topk, bits, bucket)
            error[at] = (served - d)[0, : len(at)] * keeps
            x[:, at] += d[:, : len(at)]
            theta[at] += d[0, : len(at)]
        for model, row in zip(models, x, strict=True):
            put(model, row)

    return plain(shards(n), 12, sgd, after=after)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_cocktail_is_the_authors_loop(n: int) -> None:
    ours = train(CocktailSGDStrategy("sgd", p=0.5, topk=0.4, bits=4, bucket=3, lr=LR), shards(n), n)
    same(ours.rows, cocktail(n, 0.5, 0.4, 4, 3), 1e-6)  # scales travel in fp32
    unlike(ours.rows, cocktail(n, 0.5, 0.4, 4, 3, keeps=False))
    unlike(ours.rows, cocktail(n, 0.5, 0.4, 4, 3, moves=False))
    unlike(ours.rows, ours.rows[:1].expand_as(ours.rows))  # each keeps what it has not sent


def test_cocktail_that_sends_all_is_an_average_at_every_step() -> None:
    def run(strategy: Any) -> Any:
        return train(strategy, shards(3), 3)

    ours = run(CocktailSGDStrategy("adamw", p=1.0, topk=1.0, bits=None, lr=0.02))
    fedavg = run(FedAvgStrategy("adamw", H=1, lr=0.02))
    same(ours.rows, fedavg.rows)
    same(ours.model, fedavg.model)
    for less in ({"p": 0.5}, {"topk": 0.5}, {"bits": 4}):
        options: dict[str, Any] = {"p": 1.0, "topk": 1.0, "bits": None} | less
        unlike(run(CocktailSGDStrategy("adamw", lr=0.02, **options)).rows, fedavg.rows)


def test_cocktail_of_one_node_is_the_inner_optimizer() -> None:
    ours = train(CocktailSGDStrategy("adamw", lr=0.02), shards(1), 1)
    same(ours.rows, plain(shards(1), 12, adamw))
    same(ours.model, ours.rows[0])
    assert not ours.tx.any()
    unlike(ours.rows, plain(shards(1), 11, adamw))


def test_cocktail_keeps_the_mean_and_what_servers_hold_back() -> None:
    fleet, acting = begun(CocktailSGDStrategy("sgd", p=0.5, topk=0.3, bucket=4), vector(Regressor()).expand(4, P))
    (block,), module = fleet.blocks, acting.strategy.modules[0]
    servers, theta, gen = module.row_state["server.0"], module.shared_state["theta.0"], torch.Generator().manual_seed(4)
    for step in range(1, 9):
        block.params += torch.randn(4, P, generator=gen).double()
        before, held = block.params.mean(0), servers.sum(0)
        acting.communicate(step)
        same(block.params.mean(0) + servers.sum(0), before + held, 1e-12)
        unlike(block.params.mean(0), before)
        assert torch.equal(acting.consensus()[0], theta)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"p": 0.0}, "p=0.0"),
        ({"topk": 1.5}, "topk=1.5"),
        ({"bits": 9}, "quantization_bits=9"),
        ({"bucket": 0}, "bucket=0"),
    ],
)
def test_wrong_options_of_cocktail(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        CocktailSGDStrategy(**options)
