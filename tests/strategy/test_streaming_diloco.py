"""Streaming DiLoCo: its identities, torchft's traces, its schedule, its fragments, and quantised outer gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from problems import Regressor, adamw, distance, plain, put, run_of, same, shards, train, unlike, vector
from torch import Tensor, nn

from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError
from exogym.models import CharGPT
from exogym.strategy import DiLoCoStrategy, OptimSpec, StreamingDiLoCoStrategy
from exogym.strategy.fragments import fragments, layers_of

PLAIN = OptimSpec("sgd", lr=1.0)


def streaming(**options: Any) -> StreamingDiLoCoStrategy:
    return StreamingDiLoCoStrategy(**{"H": 4, "lr": 0.02} | options)


# Identities


def test_one_fragment_is_diloco_bit_for_bit() -> None:
    diloco = train(DiLoCoStrategy(H=4, lr=0.02), steps=14)
    one = train(streaming(num_fragments=1), steps=14)
    assert torch.equal(one.rows, diloco.rows) and torch.equal(one.model, diloco.model)
    assert one.tx.tolist() == diloco.tx.tolist()
    together = train(streaming(num_fragments=2, offsets=[0, 0]), steps=14)
    assert torch.equal(together.rows, diloco.rows) and torch.equal(together.model, diloco.model)
    apart = train(streaming(num_fragments=2), steps=14)
    unlike(apart.rows, diloco.rows)
    late = train(streaming(num_fragments=1, fragment_sync_delay=3), steps=15)
    assert torch.equal(late.rows, train(DiLoCoStrategy(H=4, lr=0.02, delay=3), steps=15).rows)


@pytest.mark.parametrize("delay", [0, 1])
def test_with_alpha_one_nodes_train_alone(delay: int) -> None:
    alone = plain(shards(4), 12, adamw)
    kept = train(streaming(fragment_update_alpha=1.0, fragment_sync_delay=delay))
    same(kept.rows, alone)
    again = train(streaming(fragment_update_alpha=1.0, fragment_sync_delay=delay, outer_lr=0.1))
    assert torch.equal(kept.rows, again.rows)
    unlike(kept.model, again.model)  # theta moves
    unlike(train(streaming(fragment_update_alpha=0.9, fragment_sync_delay=delay)).rows, alone)


# torchft's traces


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        for p in self.parameters():
            nn.init.ones_(p)


def values(text: str) -> list[float]:
    return [float(word.replace("−", "-")) for word in text.split()]


ALONE = " ".join(str(1 - 2 * s) for s in range(16))
TRACES = {  # (delay, alpha): both fragments before each step; gradient 2, inner lr 1, outer lr 2, two nodes, H = 6
    (0, 0.0): (
        "1 −1 −3 −11 −13 −15 −17 −19 −21 −35 −37 −39 −41 −43 −45 −59",
        "1 −1 −3 −5 −7 −9 −23 −25 −27 −29 −31 −33 −47 −49 −51 −53",
    ),
    (0, 0.5): (
        "1 −1 −3 −8 −10 −12 −14 −16 −18 −24.5 −26.5 −28.5 −30.5 −32.5 −34.5 −40.25",
        "1 −1 −3 −5 −7 −9 −17 −19 −21 −23 −25 −27 −32 −34 −36 −38",
    ),
    (0, 1.0): (ALONE, ALONE),
    (1, 1.0): (ALONE, ALONE),
    (1, 0.0): (
        "1 −1 −3 −7 −9 −11 −13 −15 −17 −27 −29 −31 −33 −35 −37 −47",
        "1 −1 −3 −5 −7 −9 −19 −21 −23 −25 −27 −29 −39 −41 −43 −45",
    ),
    (1, 0.5): (
        "1 −1 −3 −6 −8 −10 −12 −14 −16 −21.5 −23.5 −25.5 −27.5 −29.5 −31.5 −35.75",
        "1 −1 −3 −5 −7 −9 −15 −17 −19 −21 −23 −25 −29 −31 −33 −35",
    ),
}


def trace(delay: int, alpha: float, offsets: Sequence[int]) -> list[list[float]]:
    strategy = StreamingDiLoCoStrategy(
        "sgd", OptimSpec("sgd", lr=2.0), H=6, num_fragments=2, fragment_sync_delay=delay, fragment_update_alpha=alpha,
        offsets=offsets,
    )  # fmt: skip
    fleet = Fleet(Two(), [0, 1], 2, torch.device("cpu"))
    acting = strategy.on(fleet, run_of(2))
    seen = [fleet.blocks[0].params[0].tolist()]
    for step in range(1, 16):
        fleet.blocks[0].params -= 2.0
        acting.communicate(step)
        seen.append(fleet.blocks[0].params[0].tolist())
    assert torch.equal(fleet.blocks[0].params[0], fleet.blocks[0].params[1])
    return [list(column) for column in zip(*seen, strict=True)]


@pytest.mark.parametrize(("delay", "alpha"), TRACES)
def test_torchfts_traces(delay: int, alpha: float) -> None:
    """torchft sends `delay` steps before the multiples of H/F and applies at them; fragment 0 comes first."""
    wanted = [values(text) for text in TRACES[delay, alpha]]
    assert trace(delay, alpha, [((k + 1) * 6 // 2 - delay) % 6 for k in range(2)]) == wanted  # docs/compared.md
    if alpha < 1:
        assert trace(delay, alpha, [2 - delay, (5 - delay) % 6]) != wanted


# By the rule


def by_the_rule(steps: int, H: int, tau: int, alpha: float, half: float = 0.5) -> tuple[Tensor, Tensor]:
    """theta and rows of two fragments, Linear(6, 7) and Linear(7, 1); `half` of H is the second one's offset."""
    theta = vector(Regressor())
    v, flights = torch.zeros_like(theta), {}
    parts = [(slice(0, 49), 0), (slice(49, 57), int(half * H))]

    def after(models: list[nn.Module], step: int) -> None:
        rows = torch.stack([vector(m) for m in models])
        for part, offset in parts:
            if (step - offset) % H == 0:
                flights[step + tau, offset] = (theta - rows.mean(0))[part]
            if (step, offset) in flights:
                delta = flights.pop((step, offset))
                v[part] = 0.9 * v[part] + delta
                theta[part] -= 0.4 * (delta + 0.9 * v[part])
                rows[:, part] = alpha * rows[:, part] + (1 - alpha) * theta[part]
        for m, row in zip(models, rows, strict=True):
            put(m, row)

    rows = plain(shards(3), steps, adamw, after=after)
    return theta, rows


@pytest.mark.parametrize(("tau", "alpha"), [(0, 0.0), (1, 0.5), (3, 0.25)])
def test_it_is_its_rule(tau: int, alpha: float) -> None:
    options: dict[str, Any] = {"fragment_sync_delay": tau, "fragment_update_alpha": alpha, "outer_lr": 0.4}
    ours = train(streaming(**options), shards(3), 3, steps=15)
    theta, rows = by_the_rule(15, 4, tau, alpha)
    same(ours.model, theta)
    same(ours.rows, rows)
    unlike(ours.model, by_the_rule(15, 4, tau, alpha, half=0.25)[0])


@pytest.mark.parametrize(
    ("steps", "sends", "moved"),
    [  # fragment 0 is sent after 4 and 8, 1 after 2, 6 and 10; each arrives a step later
        (7, (2, 2), (True, False)),  # 1 has just arrived, and what it was trained meanwhile is not sent
        (8, (2, 3), (True, True)),  # 0 is on its way
        (9, (2, 3), (False, True)),
        (10, (3, 3), (True, True)),
    ],
)
def test_at_the_end_a_fragment_is_sent_once_more_unless_it_is_on_its_way_or_has_just_arrived(
    steps: int, sends: tuple[int, int], moved: tuple[bool, bool]
) -> None:
    """Bytes by hand. The steps taken while a fragment was on its way would make (2, 3), (2, 3), (3, 3), (3, 3)."""
    options: dict[str, Any] = {"fragment_sync_delay": 1, "fragment_update_alpha": 0.5}
    ended = train(streaming(**options), steps=steps, final_sync=True)
    assert ended.payload.tolist() == [(sends[0] * 49 + sends[1] * 8) * 8.0] * 4
    left = train(streaming(**options), steps=steps).model
    for part, has_moved in zip((slice(0, 49), slice(49, 57)), moved, strict=True):
        assert torch.equal(ended.model[part], left[part]) != has_moved


# Schedule and bytes


@pytest.mark.parametrize(("H", "F", "sent"), [(6, 2, {3: [1], 6: [0], 9: [1]}), (5, 2, {2: [1], 5: [0], 7: [1]}),
                                              (6, 3, {2: [1], 4: [2], 6: [0], 8: [1]})])  # fmt: skip
def test_fragments_are_spread_over_the_round(H: int, F: int, sent: dict[int, list[int]]) -> None:
    (module,) = streaming(H=H, num_fragments=F).modules
    sends: Any = module
    assert {step: p for step in range(1, max(sent) + 1) if (p := sends.sends(step))} == sent
    steps, step = [], 0
    while step < max(sent):
        steps.append(step := module.next_event(step))  # type: ignore[attr-defined]
    assert steps == list(sent)


# Fragments


def test_layers_of_a_transformer_are_dealt_out_and_the_rest_is_a_fragment() -> None:
    model = CharGPT(5, block_size=4, n_layer=4, n_head=1, n_embd=4)
    names = [name for name, _ in model.named_parameters()]
    layers, others = layers_of(names)
    assert len(layers) == 4 and others and not any("blocks" in n for n in others)
    fleet = Fleet(model, [0], 1, torch.device("cpu"))

    def numbers(pattern: str) -> list[set[str]]:
        cut = fragments(fleet, 3, pattern)
        held = [slot.name for f in cut for piece in f for slot in piece.slots]
        assert sorted(held) == sorted(names)
        return [{n for piece in f for n, _ in piece.views(piece.take(fleet.blocks[0].params))} for f in cut]

    strided, sequential = numbers("strided"), numbers("sequential")
    assert strided == [{*layers[0], *layers[2]}, {*layers[1], *layers[3]}, {*others}]
    assert sequential == [{*layers[0], *layers[1]}, {*layers[2], *layers[3]}, {*others}]
    with pytest.raises(ArgumentError, match=r"num_fragments=6.*4 layers.*use at most 5"):
        fragments(fleet, 6)
    x = torch.randn(1, fleet.blocks[0].layout.numel)
    y = torch.zeros_like(x)
    for fragment in fragments(fleet, 5):
        for piece in fragment:
            piece.put(y, piece.take(x))
    assert torch.equal(x, y)


@pytest.mark.parametrize("inner", [torch.float32, torch.float64])
def test_neighboring_layers_are_neighbors_in_the_module_whatever_the_dtypes(inner: torch.dtype) -> None:
    layers = [nn.Linear(2, 2).to(dtype) for dtype in (torch.float64, inner, torch.float64, inner)]
    model = nn.ModuleDict(dict(zip("abcd", layers, strict=True)))
    fleet = Fleet(model, [0], 1, torch.device("cpu"))
    cut = fragments(fleet, 2, "sequential")
    assert [sorted({s.name[0] for piece in f for s in piece.slots}) for f in cut] == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fragment_sync_delay": 4}, "fragment_sync_delay=4 must be below the round's H=4 steps"),
        ({"fragment_update_alpha": 1.5}, r"fragment_update_alpha=1\.5 must be a number of at least 0 and at most 1"),
        ({"bits": 5}, "bits=5 must be 32, 8 or 4"),
        ({"pattern": "stride"}, "strided"),
        ({"offsets": [0]}, r"offsets=\[0\] has 1 steps, but num_fragments=2: give one step"),
        ({"offsets": [0, 4]}, r"offsets=\[0, 4\]: every step must be at least 0 and below H=4"),
        ({"num_fragments": 0}, "num_fragments"),
    ],
)
def test_wrong_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        streaming(**options)


# Quantised


def test_quantised_outer_gradients_are_near_the_exact_ones() -> None:
    """E3M0 is within a factor sqrt(2) of each number, int8 within 1/254 of the largest of its tensor."""
    data = shards(4)
    options: dict[str, Any] = {"outer_optim": PLAIN, "num_fragments": 1}
    exact = train(streaming(**options), data, steps=4)
    start = vector(Regressor())
    moved = (exact.model - start).abs().max()
    errors = {}
    for bits in (8, 4):
        quantised = train(streaming(bits=bits, **options), data, steps=4)
        assert torch.equal(quantised.rows, quantised.model.expand(4, -1))  # all write the same bits
        errors[bits] = float((quantised.model - exact.model).abs().max() / moved)
    assert 0 < errors[8] < 0.02 < errors[4] < 0.5
    assert distance(exact.model, start) > 1e-3
    alone = plain(data, 4, adamw)
    by_hand = torch.stack([e3m0(start - row) for row in alone]).mean(0)
    same(train(streaming(bits=4, **options), data, steps=4).model, start - by_hand, 1e-6)
    unlike(exact.model, start - by_hand)


def e3m0(delta: Tensor) -> Tensor:
    """Per tensor: +-s 2^-e, e = 0 to 6, rounded in the exponent; zero below s 2^-6.5."""
    parts = []
    for part in delta.split([42, 7, 7, 1]):
        s = part.abs().max()
        e = torch.round(torch.log2(s / part.abs())).clamp(min=0)
        parts.append(torch.where(e > 6, torch.zeros_like(part), part.sign() * s * 2.0**-e))
    return torch.cat(parts)


def test_fragments_are_on_their_way_while_nodes_train() -> None:
    """Two fragments of 49 and 8 numbers every 4 steps, one step to arrive: a ring of four each."""
    options: dict[str, Any] = {"network": "80kbps,1ms", "step_seconds": 0.02, "steps": 13}
    large, small = (6 * (1e-3 + size * 8 / 4 * 8 / 80e3) for size in (49, 8))
    assert large > 0.02 > small

    def seconds(**more: Any) -> float:
        return float(train(streaming(**more), shards(4), **options).trainer.clock.time_s.max())

    assert seconds() == pytest.approx(13 * 0.02 + 3 * (large + small))
    assert seconds(fragment_sync_delay=1) == pytest.approx(13 * 0.02 + 3 * (large - 0.02))
    assert seconds(num_fragments=1) == pytest.approx(13 * 0.02 + 3 * 6 * (1e-3 + 57 * 8 / 4 * 8 / 80e3))
