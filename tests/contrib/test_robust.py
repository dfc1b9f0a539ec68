"""Bad peers: what they bring is wrong, drags the mean away, and leaves the robust means where they were."""

import functools
import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from battery import each, in_turn, outcome, train
from problems import Regressor, dyadic, fleet_of, run_of
from strategies import STRATEGIES
from wrapped import made, parsed

from exogym.contrib import ByteBudget, NormCap, Robust, Secure
from exogym.contrib.robust import RobustAveraging
from exogym.contrib.rules import Krum, Median, TrimmedMean, bad_among, rule_of
from exogym.core.base.rng import generator
from exogym.core.communicator import Communicator
from exogym.core.fleet import Fleet
from exogym.core.training.options import describe
from exogym.errors import ArgumentError, CheckpointError
from exogym.faults import Faults
from exogym.strategy import CommunicateOptimizeStrategy, DiLoCoStrategy, FedAvgStrategy, OptimSpec, SimpleReduceStrategy
from exogym.strategy.averaging import Averaging
from exogym.strategy.registry import parse_strategy

RULES = ("median", "trimmed_mean", "krum")
WHOLE = RULES[2:]  # those that compare whole vectors
ROBUST = (*RULES, "norm_cap")
PLAIN = OptimSpec(torch.optim.SGD, lr=1.0)
SIZES = (1, 2, 3, 5, 8)


# The rules, against plain numpy


def as_written(name: str, x: np.ndarray) -> np.ndarray:
    """The rules as the papers write them, for x (n, F), with f = floor(n / 4), or 1 where the rule bears it."""
    n = len(x)
    if name == "median":
        return np.median(x, axis=0)
    if n < 3:
        return x.mean(0)
    f = max(1, n // 4)
    if name == "trimmed_mean":
        return np.sort(x, axis=0)[f : n - f].mean(0)
    f, scores = min(f, (n - 3) // 2), []
    for i in range(n):
        apart = sorted(((x[i] - x[j]) ** 2).sum() for j in range(n) if j != i)
        scores.append(sum(apart[: max(n - f - 2, 1)]))
    return x[int(np.argmin(scores))]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("n", SIZES)
def test_a_rule_is_what_its_paper_says(name: str, n: int) -> None:
    x = torch.randn(n, 7, dtype=torch.float64, generator=generator(1, name, n))
    got = rule_of(name).of_rows(x, range(n))
    np.testing.assert_allclose(got.numpy(), as_written(name, x.numpy()), rtol=1e-12)
    same = x[:1].expand(n, -1)
    torch.testing.assert_close(rule_of(name).of_rows(same, range(n)), same[0], rtol=1e-12, atol=0)
    order = torch.randperm(n, generator=generator(2, name, n))
    if (name, n) != ("krum", 3):  # among two that are closest to each other ids decide
        torch.testing.assert_close(rule_of(name).of_rows(x[order], range(n)), got, rtol=1e-12, atol=0)
    if n > 2:
        assert not torch.allclose(got, x.mean(0))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("n", [5, 6, 8])
def test_fewer_bad_ones_than_a_rule_bears_leave_it_among_the_good(name: str, n: int) -> None:
    x = torch.randn(n, 5, generator=generator(3, name, n))
    f = min(max(1, n // 4), (n - 3) // 2 if name == "krum" else n)
    for bad in combinations(range(n), f):
        good = [i for i in range(n) if i not in bad]
        for wrong in (1e6, -1e6, math.nan):
            y = x.clone()
            y[list(bad)] = wrong
            got = rule_of(name).of_rows(y, range(n))
            assert bool((got >= x[good].amin(0) - 1e-6).all() and (got <= x[good].amax(0) + 1e-6).all())
            assert (
                not torch.isfinite(y.mean(0)).all() or (y.mean(0) - x.mean(0)).abs().min() > 1e4
            )  # the mean is dragged


@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
def test_of_three_a_rule_bears_a_bad_one_and_of_two_none(name: str) -> None:
    def worst(n: int) -> float:
        good = torch.linspace(0, 1, n - 1)[:, None]
        brought = (torch.cat([good, torch.tensor([[wrong]])]) for wrong in (-1e6, 1e6))
        return max(float(rule_of(name).of_rows(x, range(n)).abs()) for x in brought)

    assert rule_of(name).least == 3
    assert worst(3) <= 1 and worst(2) > 1e5


def test_krum_bears_a_bad_one_where_its_paper_says() -> None:
    """Proposition 1: 2 f + 2 < n."""
    assert Krum.least == min(n for n in range(1, 9) if n > 2 * 1 + 2)
    assert [bad_among(n, 0.25, (n - 3) // 2) for n in (3, 4, 5)] == [0, 0, 1]


def test_krum_of_equals_is_the_lowest_and_multi_krum_the_mean_of_several() -> None:
    x = torch.tensor([[9.0], [1.0], [0.0], [1.0], [0.0], [-9.0]])
    assert Krum().of_rows(x, range(6)).item() == 1.0  # 1 and 3 have equal scores as 2 and 4 have
    assert Krum(keep=4).of_rows(x, range(6)).item() == 0.5
    assert Krum(keep=99).of_rows(torch.ones(4, 2), range(4)).tolist() == [1.0, 1.0]


# In the communicator


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("width", [1, 7])
@pytest.mark.parametrize("name", RULES)
def test_bytes(name: str, width: int, n: int) -> None:
    S, x = 8.0 * width, torch.randn(n, width, dtype=torch.float64)
    for transport in (None, "server"):
        comm = Communicator(range(n), n)
        RobustAveraging(transport, robust=name).bind(comm, weighs=False)
        got = comm.all_reduce(x)
        gathered, reduced = n - 1.0, 2 * (n - 1) / n
        factor = (gathered if name in WHOLE else reduced) if transport is None else float(n > 1)
        assert comm.ledger.tx_bytes.tolist() == comm.ledger.rx_bytes.tolist() == pytest.approx([factor * S] * n)
        assert torch.equal(got[0], rule_of(name).of_rows(x, range(n)))


def test_packed_contributions_too_but_no_sums_and_no_buffers() -> None:
    x = torch.tensor([[0.0], [1.0], [90.0]])
    comm = Communicator(range(3), 3)
    comm.rule = Median()
    assert comm.sum_decoded([x], lambda part: part, "mean")[0].item() == 1.0
    assert comm.sum_decoded([x], lambda part: part, "sum")[0].item() == comm.all_reduce(x, "sum")[0].item() == 91.0
    assert comm.all_reduce(x, groups=[[0, 2], [1]])[:, 0].tolist() == [45.0, 1.0, 45.0]
    with comm.counted_as("buffers"):
        assert comm.all_reduce(x)[0].item() == pytest.approx(91 / 3)


def test_a_rule_counts_all_alike() -> None:
    comm = Communicator(range(3), 3)
    comm.rule = Krum()
    with pytest.raises(ArgumentError, match="weighting='uniform'"):
        comm.all_reduce(torch.ones(3, 1), weights=torch.ones(3))


# What bad nodes bring


def moved(strategy: Any, attack: dict[str, Any], steps: Any, faults: bool = True) -> tuple[Fleet, torch.Tensor]:
    """Start at one point, move the rows by `steps` (N, P), meet; return the fleet and that point."""
    n, width = steps.shape
    start = dyadic(1, width)
    fleet = fleet_of(start.expand(n, -1), model=Regressor())
    mine = strategy.beside(Faults(**attack)) if faults else strategy
    acting = mine.on(fleet, run_of(n))
    fleet.blocks[0].params += steps
    acting.communicate(1)
    return fleet, start


WIDTH = sum(p.numel() for p in Regressor().parameters())


@pytest.mark.parametrize("make", [lambda: FedAvgStrategy(H=1), lambda: DiLoCoStrategy(H=1, outer_optim=PLAIN)])
@pytest.mark.parametrize(("attack", "factor"), [("sign_flip", -1), ("sign_flip", -3.0), ("scale", 10), ("scale", 0.5)])
def test_an_update_is_turned_or_scaled(make: Callable[[], Any], attack: str, factor: float) -> None:
    steps = dyadic(4, WIDTH, seed=1)
    given = {"attack_factor": abs(factor)} if factor not in (-1, 10) else {}
    fleet, start = moved(make(), {"bad_nodes": [2], "attack": attack} | given, steps)
    brought = steps.clone()
    brought[2] *= factor
    torch.testing.assert_close(fleet.blocks[0].params, (start + brought.mean(0)).expand(4, -1), rtol=0, atol=1e-12)
    assert (brought.mean(0) - steps.mean(0)).abs().max() > 0.01


def test_noise_has_the_length_that_was_said_and_is_drawn_for_node_and_step() -> None:
    steps = dyadic(3, WIDTH, seed=2)

    def noise(node: int, seed: int = 0) -> torch.Tensor:
        attack = {"bad_nodes": [node], "attack": "noise", "attack_factor": 4.0, "seed": seed}
        fleet, start = moved(FedAvgStrategy(H=1), attack, steps)
        others = steps.sum(0) - steps[node]
        return (fleet.blocks[0].params[0] - start[0]) * 3 - others

    for node in (0, 2):
        assert noise(node).norm().item() == pytest.approx(4 * steps[node].norm().item())
    drawn = [noise(0), noise(2), noise(0, seed=1)]
    assert torch.equal(noise(0), drawn[0])
    assert all(abs(torch.cosine_similarity(a, b, dim=0)) < 0.5 for a, b in combinations(drawn, 2))


def test_gradients_are_attacked_where_gradients_meet() -> None:
    def step(**options: Any) -> torch.Tensor:
        strategy = SimpleReduceStrategy("sgd", lr=0.1)
        if options:
            strategy = strategy.beside(Faults(**options))
        fleet = fleet_of(dyadic(1, WIDTH).expand(4, -1), model=Regressor())
        acting = strategy.on(fleet, run_of(4))
        for block in fleet.blocks:
            block.own_grads().copy_(dyadic(4, WIDTH, seed=3))
        acting.transform_gradients(1, 0.1)
        return fleet.blocks[0].grads[0]  # type: ignore[index]

    steps = dyadic(4, WIDTH, seed=3)
    torch.testing.assert_close(step(), steps.mean(0))
    steps[1] *= -1
    torch.testing.assert_close(step(bad_nodes=[1]), steps.mean(0))


@pytest.mark.parametrize("norm", [None, 2.0])
def test_a_cap_shortens_long_updates_only(norm: float | None) -> None:
    steps = torch.randn(5, WIDTH, dtype=torch.float64, generator=generator(0, "cap"))
    steps *= torch.tensor([0.5, 1.0, 2.0, 3.0, 100.0], dtype=torch.float64)[:, None] / steps.norm(dim=1, keepdim=True)
    strategy = made(FedAvgStrategy, H=1, robust=NormCap(norm))
    fleet, start = moved(strategy, {}, steps, faults=False)
    capped = steps * (2 / steps.norm(dim=1, keepdim=True)).clamp(max=1)  # 2 is the median, too
    torch.testing.assert_close(fleet.blocks[0].params[0], start[0] + capped.mean(0), rtol=0, atol=1e-12)
    extra = 4 * 8.0 if norm is None else 0.0
    assert fleet.comm.ledger.tx_bytes.tolist() == [2 * 4 / 5 * 8 * WIDTH + extra] * 5
    plan = strategy.plan(WIDTH, 5, 8)
    assert [t.payload_bytes for t in plan.traffic if t.kind == "all_gather"] == [8] * (norm is None)


def test_a_cap_over_all_norms_is_the_mean_bit_for_bit_and_equal_norms_are_not_touched() -> None:
    steps = dyadic(4, WIDTH, seed=4)
    wanted = moved(FedAvgStrategy(H=1), {}, steps, faults=False)[0].blocks[0].params
    assert torch.equal(
        moved(made(FedAvgStrategy, H=1, robust=NormCap(1e9)), {}, steps, faults=False)[0].blocks[0].params, wanted
    )
    alike = steps[:1] * torch.tensor([[1.0], [-1.0], [1.0], [1.0]])
    wanted = moved(FedAvgStrategy(H=1), {}, alike, faults=False)[0].blocks[0].params
    assert torch.equal(
        moved(made(FedAvgStrategy, H=1, robust="norm_cap"), {}, alike, faults=False)[0].blocks[0].params, wanted
    )


def test_who_is_bad() -> None:
    assert Faults().bad(4) == Faults(bad_nodes=0.1).bad(4) == []
    shares = [Faults(bad_nodes=0.25, seed=seed).bad(8) for seed in range(20)]
    assert {len(bad) for bad in shares} == {2} and len({tuple(bad) for bad in shares}) > 10


# Whole runs

ROUND = {"num_nodes": 5, "max_steps": 24, "val_interval": None}
NAMES = ("ddp", "diloco:H=4", "fedavg:inner_optim=adamw:H=4", "sparta:p_sparta=0.3", "sparta_diloco:H=6:p_sparta=0.3")


@pytest.fixture(scope="module")
def loss() -> Callable[..., float]:
    """Return the last validation loss of DiLoCo, by its options and faults; each run once."""
    known: dict[str, float] = {}

    def find(options: str = "", **faults: Any) -> float:
        key = f"{options} {faults}"
        if key not in known:
            text = f"diloco:H=4:outer_lr=0.5{options}"
            trainer = train(parsed(text, lr=0.02), faults=Faults(**faults) if faults else None, **ROUND)
            known[key] = trainer.history.last["val_loss"]
        return known[key]

    return find


@pytest.mark.parametrize(("attack", "factor"), [("sign_flip", 8.0), ("noise", None), ("scale", 30.0)])
def test_a_bad_node_drags_the_mean_away_and_no_robust_one(attack: str, factor: float | None, loss: Any) -> None:
    bad = {"bad_nodes": [3], "attack": attack, "attack_factor": factor}
    good = loss()
    assert loss(**bad) > 4 * good
    for rule in ROBUST:
        assert loss(f":robust={rule}", **bad) < 1.7 * good, rule


@pytest.mark.parametrize("name", NAMES)
def test_without_bad_nodes_nothing_changes(name: str) -> None:
    options = ROUND | {"max_steps": 7}
    wanted = outcome(train(parse_strategy(name, lr=0.02), **options))
    assert outcome(train(parse_strategy(name, lr=0.02), faults=Faults(bad_nodes=0.05), **options)) == wanted
    assert outcome(train(parse_strategy(name, lr=0.02), faults=Faults(bad_nodes=[1]), **options))[0] != wanted[0]


@pytest.mark.parametrize(("name", "robust"), in_turn(NAMES, ("krum", "norm_cap")))
def test_no_layout_and_no_stop_changes_anything(name: str, robust: str, tmp_path: Any) -> None:
    faults = Faults({4: [(3, 6)]}, bad_nodes=[2], attack="noise", lost={} if name == "ddp" else {0: [4]})
    options = {"num_nodes": 5, "max_steps": 9, "val_interval": None, "faults": faults}

    def run(**more: Any) -> Any:
        strategy = parsed(f"{name}:robust={robust}", lr=0.02)
        trainer = train(strategy, **options | more)
        return outcome(trainer)[0], trainer.traffic

    wanted = run()
    assert run(processes=2) == wanted
    run(max_steps=5, save_dir=tmp_path)
    assert run(save_dir=tmp_path, resume=True, max_stretch=1) == wanted


@pytest.mark.parametrize("robust", [TrimmedMean(0.4), Krum(keep=2), NormCap(0.5)])
def test_a_rule_with_arguments_is_saved_with_the_run(robust: Any, tmp_path: Any) -> None:
    options = {"num_nodes": 5, "max_steps": 6, "val_interval": None}
    wanted = outcome(train(made(DiLoCoStrategy, H=2, robust=robust), **options))
    train(made(DiLoCoStrategy, H=2, robust=robust), **options | {"max_steps": 3}, save_dir=tmp_path)
    assert outcome(train(made(DiLoCoStrategy, H=2, robust=robust), **options, save_dir=tmp_path, resume=True)) == wanted
    with pytest.raises(CheckpointError, match=r"strategy\.robust: saved"):
        train(made(DiLoCoStrategy, H=2, robust="median"), **options, save_dir=tmp_path, resume=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Faults(bad_nodes=1.0), "under 1: a share of the nodes, or a list of them"),
        (lambda: Faults(bad_nodes=[-1]), "each of bad_nodes"),
        (lambda: Faults(bad_nodes=0.1, attack="flip"), "attack='flip' is not one of"),
        (lambda: Faults(bad_nodes=0.1, attack_factor=0), "attack_factor=0 must be a number over 0"),
        (lambda: train(DiLoCoStrategy(), faults=Faults(bad_nodes=[4])), r"Faults\(bad_nodes=...\) names node 4"),
        (
            lambda: train(parse_strategy("async_diloco"), faults=Faults(bad_nodes=[1])),
            "cannot change, split or leave out the messages",
        ),
        (lambda: made(DiLoCoStrategy, robust="medain"), "did you mean 'median'"),
        (lambda: made(DiLoCoStrategy, robust=3), "must be a name, such as 'median', or a rule"),
        (lambda: made(DiLoCoStrategy, robust="krum", transport="ring"), "sums values on the way"),
        (lambda: parsed("demo:robust=median"), r"averages in its own way \(DCTMomentum\)"),
        *(
            (
                functools.partial(parsed, f"{sparse}:robust={rule}"),
                f"{named} sends a part.*leave robust out, or",
            )
            for rule in RULES
            for sparse, named in (
                ("topk", "CompressedMean"),
                ("topk:error_feedback=false", "CompressedMean"),
                ("signsgd:error_feedback=true", "CompressedMean"),
                ("qsgd", "CompressedMean"),
                ("sparseloco", "SparseOuterStep"),
            )
        ),
        (lambda: TrimmedMean(0.5), "share=0.5 of bad nodes must be over 0 and under 0.5"),
        (lambda: Krum(keep=0), "keep"),
        (lambda: NormCap(0), "wants a number over 0"),
        (lambda: parsed("diloco:robust=bulyan"), "it is retired: use 'krum'"),
        (
            lambda: train(made(DiLoCoStrategy, robust="krum"), balance="batch"),
            r"robust='krum' with balance='batch': a rule counts each node once",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make()


FEW: dict[str, tuple[Callable[[], Any], int, int]] = {
    "krum of four": (lambda: made(DiLoCoStrategy, H=2, robust="krum"), 4, 5),
    "krum of three gradients": (lambda: made(SimpleReduceStrategy, robust=Krum(keep=2)), 3, 5),
    "median of two": (lambda: made(DiLoCoStrategy, H=2, robust="median"), 2, 3),
    "trimmed mean of two": (lambda: made(FedAvgStrategy, H=2, robust=TrimmedMean(0.4)), 2, 3),
}


@pytest.mark.parametrize("name", FEW)
def test_too_few_for_a_rule_are_refused_before_training(name: str) -> None:
    make, few, enough = FEW[name]
    options: dict[str, Any] = {"max_steps": 2, "val_interval": None}
    with pytest.raises(ArgumentError, match=f"needs {enough} nodes to.* averages only {few}: average over {enough}"):
        train(make(), num_nodes=few, **options)
    with pytest.raises(ArgumentError, match=f"only {few}: average"):
        make().plan(1e6, few, 4)
    for allowed in (1, enough):  # one node alone meets nobody
        train(make(), num_nodes=allowed, **options)


def test_islands_and_sampled_clients_too_small_for_a_rule_are_refused() -> None:
    few: tuple[dict[str, Any], ...] = (
        {"H": 2, "island_size": 4},
        {"H": 2, "client_fraction": 0.5},
        {"local_epochs": 1, "client_fraction": 0.5},
    )
    for options in few:
        make = made(FedAvgStrategy, "sgd", lr=0.02, robust="krum", **options)
        with pytest.raises(ArgumentError, match="only 4: average over 5 nodes, or use 'median' or 'trimmed_mean'"):
            train(make, num_nodes=8, max_steps=4, val_interval=None)
        train(
            made(FedAvgStrategy, "sgd", lr=0.02, robust="median", **options),
            num_nodes=8,
            max_steps=4,
            val_interval=None,
        )


@pytest.mark.parametrize("name", each(STRATEGIES))
def test_who_takes_a_median_brings_no_sparse_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of mostly zeros a median is zero, whatever the others bring, and error feedback does not keep what was sent."""
    strategy = STRATEGIES[name].make()
    if not isinstance(strategy, CommunicateOptimizeStrategy):  # which takes no robust=
        return
    shares, of = [], Median.of

    def looked(rule: Any, wire: Any, x: torch.Tensor, ids: Any, *more: Any) -> torch.Tensor:
        shares.append(float((x[list(ids)] == 0).double().mean()))
        return of(rule, wire, x, ids, *more)

    monkeypatch.setattr(Median, "of", looked)
    try:
        train(Robust(strategy, "median"), max_steps=8, val_interval=None)
    except ArgumentError as refused:
        assert "robust='median'" in str(refused)
    else:
        assert shares and max(shares) < 0.5, max(shares)


@pytest.mark.parametrize("name", ["topk:density=0.05", "signsgd:error_feedback=true", "sparseloco:H=4"])
def test_sparse_senders_take_a_cap_that_bears_a_bad_node(name: str) -> None:
    bad = Faults(bad_nodes=[3], attack="sign_flip", attack_factor=8.0)

    def loss(robust: str, faults: Faults | None = bad) -> float:
        strategy = parsed(f"{name}{robust}", lr=0.05)
        trainer = train(strategy, num_nodes=5, max_steps=40, val_interval=None, faults=faults)
        return trainer.history.last["val_loss"]

    good = loss("", None)
    assert loss(":robust=norm_cap") < 2 * good < loss("") / 2


def test_norm_cap_takes_the_lower_of_two_norms_in_the_middle() -> None:
    """So half of the nodes may bring long updates: the cap is a good one's. The mean of the two would be 51."""
    steps = torch.randn(4, WIDTH, dtype=torch.float64, generator=generator(0, "even"))
    steps *= torch.tensor([1.0, 100.0, 2.0, 200.0], dtype=torch.float64)[:, None] / steps.norm(dim=1, keepdim=True)
    fleet, start = moved(made(FedAvgStrategy, H=1, robust="norm_cap"), {}, steps, faults=False)

    def capped(most: float) -> torch.Tensor:
        return start[0] + (steps * (most / steps.norm(dim=1, keepdim=True)).clamp(max=1)).mean(0)

    torch.testing.assert_close(fleet.blocks[0].params[0], capped(2.0), rtol=0, atol=1e-12)
    assert (fleet.blocks[0].params[0] - capped(51.0)).abs().max() > 0.1


def test_weights_by_examples_are_refused_before_training() -> None:
    strategy = made(FedAvgStrategy, H=5, robust="median")
    strategy.communication_modules[0].weights = torch.ones(3)  # type: ignore[attr-defined]
    comm = Communicator(range(3), 3)
    with pytest.raises(ArgumentError, match="weighting='uniform'"):
        strategy.averaging.bind(comm, weighs=True)


def test_a_wrapper_takes_one_strategy_of_modules_and_is_itself_wrapped_by_a_budget() -> None:
    with pytest.raises(ArgumentError, match="is not made of modules"):
        Robust("diloco", "median")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="wrap it once"):
        Secure(Robust(DiLoCoStrategy(), "median"))
    plain = DiLoCoStrategy(H=3, averaging=Averaging(transport="server"))
    both = ByteBudget(Robust(plain, "median"), 1e6)
    assert both.averaging == RobustAveraging("server", robust="median") and plain.averaging == Averaging("server")
    assert describe(both) == describe(plain) | {"robust": "median", "tuner": 1e6}
