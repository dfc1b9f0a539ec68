"""Learning-rate schedules against torch's own, and every optimizer of torch inside and outside."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import Regressor, plain, same, shards, train, unlike
from torch import nn
from torch.optim import lr_scheduler as S

from exogym.errors import ArgumentError
from exogym.strategy import DiLoCoStrategy, FedAvgStrategy, OptimSpec, SimpleReduceStrategy, SPARTAStrategy, Strategy
from exogym.strategy.diloco import outer_spec
from exogym.strategy.optim import load_optimizer_state, optimizer_state
from exogym.strategy.schedule import Schedule

LR = 0.05


def torchs(scheduler: Callable[..., Any], steps: int, **arguments: Any) -> list[float]:
    """The learning rates that torch's own scheduler gives to `steps` optimizer steps."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR, momentum=0.9)
    stepping = scheduler(optimizer, **arguments)
    rates = []
    for k in range(steps):
        if k:
            optimizer.step()
            stepping.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def ours(scheduler: Any, steps: int, warmup: int = 0) -> list[float]:
    schedule = Schedule(scheduler, warmup, steps, LR)
    return [schedule.lr(step) for step in range(steps)]


CLASSES: dict[str, tuple[Any, Callable[..., Any], Callable[[int], dict[str, Any]]]] = {
    "StepLR": (functools.partial(S.StepLR, step_size=7), S.StepLR, lambda T: {"step_size": 7}),
    "ExponentialLR": (functools.partial(S.ExponentialLR, gamma=0.9), S.ExponentialLR, lambda T: {"gamma": 0.9}),
    "LambdaLR": (functools.partial(S.LambdaLR, lr_lambda=math.cos), S.LambdaLR, lambda T: {"lr_lambda": math.cos}),
    "CosineAnnealingLR": (S.CosineAnnealingLR, S.CosineAnnealingLR, lambda T: {"T_max": T}),
    "CosineAnnealingLR over 5": (
        functools.partial(S.CosineAnnealingLR, T_max=5), S.CosineAnnealingLR, lambda T: {"T_max": 5},
    ),
    "CosineAnnealingWarmRestarts": (
        functools.partial(S.CosineAnnealingWarmRestarts, T_0=4), S.CosineAnnealingWarmRestarts, lambda T: {"T_0": 4},
    ),
    "OneCycleLR": (S.OneCycleLR, S.OneCycleLR, lambda T: {"total_steps": T, "max_lr": LR, "cycle_momentum": False}),
    "LinearLR": (S.LinearLR, S.LinearLR, lambda T: {"total_iters": T}),
    "ConstantLR": (S.ConstantLR, S.ConstantLR, lambda T: {"total_iters": T}),
    "PolynomialLR": (
        functools.partial(S.PolynomialLR, power=2), S.PolynomialLR, lambda T: {"total_iters": T, "power": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("steps", [1, 2, 30, 63, 64, 65, 200])
@pytest.mark.parametrize("name", CLASSES)
def test_torchs_classes_give_torchs_rates(name: str, steps: int) -> None:
    given, cls, arguments = CLASSES[name]
    assert ours(given, steps) == torchs(cls, steps, **arguments(steps))


def test_rates_may_be_asked_in_any_order() -> None:
    schedule = Schedule(S.CosineAnnealingLR, 0, 300, LR)
    assert [schedule.lr(step) for step in (250, 3, 299, 0)] == [
        ours(S.CosineAnnealingLR, 300)[k] for k in (250, 3, 299, 0)
    ]
    assert schedule.lr(1000) == schedule.lr(299)  # past the end: as at the end


@pytest.mark.parametrize("warmup", [1, 5, 29, 30])
def test_warm_up_is_linear_and_the_rest_follows(warmup: int) -> None:
    steps = 30
    climb = [LR * (k + 1) / warmup for k in range(warmup)]
    for name in ("CosineAnnealingLR", "OneCycleLR", "StepLR"):
        given, cls, arguments = CLASSES[name]
        expected = torchs(cls, steps - warmup, **arguments(steps - warmup)) if warmup < steps else []
        assert ours(given, steps, warmup) == pytest.approx(climb + expected)
    rest = steps - warmup
    assert ours("constant", steps, warmup) == pytest.approx(climb + [LR] * rest)
    assert ours(None, steps, warmup) == ours("constant", steps, warmup)
    assert ours("linear", steps, warmup) == pytest.approx(climb + [LR * (1 - k / rest) for k in range(rest)])
    cosine = [LR * 0.5 * (1 + math.cos(math.pi * k / rest)) for k in range(rest)]
    assert ours("cosine", steps, warmup) == pytest.approx(climb + cosine)


def test_the_named_cosine_is_torchs() -> None:
    assert ours("cosine", 40) == pytest.approx(torchs(S.CosineAnnealingLR, 40, T_max=40))


def test_a_callable_is_a_factor_of_the_step_as_in_lambda_lr() -> None:
    def factor(step: int) -> float:
        return 1 / (1 + step)

    assert ours(factor, 20) == torchs(S.LambdaLR, 20, lr_lambda=factor)
    assert ours(factor, 20, warmup=4)[4:] == ours(factor, 20)[4:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr_scheduler": "cosin"}, "did you mean 'cosine'"),
        ({"lr_scheduler": 3}, "lr_scheduler=3 is not a name"),
        ({"lr_scheduler": S.ReduceLROnPlateau}, "follows a metric"),
        ({"lr_scheduler": functools.partial(S.ReduceLROnPlateau, patience=3)}, "follows a metric"),
        ({"lr_scheduler": S.StepLR}, r"cannot be built.*step_size.*functools.partial"),
        ({"lr_scheduler": functools.partial(S.StepLR, size=3)}, "cannot be built.*size"),
        ({"lr_scheduler": functools.partial(S.OneCycleLR, pct_start=3.0)}, "cannot be built.*pct_start"),
        ({"lr_scheduler": functools.partial(S.OneCycleLR, cycle_momentum=True)}, "only the learning rate"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"warmup_steps": 1.5}, "warmup_steps=1.5"),
        ({"lr": -0.1}, "lr=-0.1"),
        ({"lr": 0.1, "inner_lr": 0.2}, "inner_lr=0.2 means lr=0.2, but lr=0.1 was passed as well"),
        ({"max_norm": 0}, "max_norm=0"),
        ({"inner_optim": "adamv"}, "unknown optimizer 'adamv'"),
        ({"inner_optim": OptimSpec("sgd", lr=0.1), "lr": 0.2}, "given twice"),
        ({"inner_optim": 3}, "not 3"),
    ],
)
def test_what_cannot_be_a_schedule_or_an_optimizer_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SimpleReduceStrategy(**arguments)


@pytest.mark.parametrize(
    "scheduler", ["cosine", S.OneCycleLR, functools.partial(S.StepLR, step_size=3), lambda t: 0.9**t]
)
def test_a_run_takes_the_scheduled_rates(scheduler: Any) -> None:
    rates = ours(scheduler, 12, warmup=3)

    def loop(rates: list[float]) -> Any:
        steps = iter(rates)

        def before(models: list[nn.Module], step: int) -> None:
            rate = next(steps)
            for p in (p for m in models for p in m.parameters()):
                p.grad *= rate

        return plain(shards(2), 12, lambda p: torch.optim.SGD(p, lr=1.0, foreach=False), before=before)

    options: dict[str, Any] = dict(lr=LR, lr_scheduler=scheduler, warmup_steps=3)
    run = train(SPARTAStrategy("sgd", 0.0, **options), num_nodes=2)
    same(run.rows, loop(rates))
    unlike(run.rows, loop([rates[1], *rates[1:]]))
    assert run.trainer.history.column("lr", 0)[1] == pytest.approx(rates)
    # The rounds of DiLoCo do not start it again: two rounds of six steps see the same twelve rates.
    diloco = train(DiLoCoStrategy("sgd", OptimSpec("sgd", lr=1.0), H=6, **options), shards(1), 1)
    same(diloco.rows, run.rows[:1])


def test_a_schedule_follows_the_rows_own_step() -> None:
    """A node that takes 2 steps of each 4 sees the first rates in turn, not every other one."""
    options: dict[str, Any] = dict(lr=LR, lr_scheduler=lambda t: 0.7**t)
    data = shards(2, same=True)
    uneven = train(FedAvgStrategy("sgd", H=4, island_size=1, local_steps=[4, 2], **options), data, 2, steps=8)
    half = train(FedAvgStrategy("sgd", H=4, **options), data[:1], 1, steps=4)
    same(uneven.rows[1:], half.rows)
    unlike(uneven.rows[:1], half.rows)


# Optimizers

NAMES = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
)
REFUSED = {"LBFGS": "evaluates the loss several times", "SparseAdam": "sparse gradients"}
WORKING = [name for name in NAMES if name not in REFUSED]


@pytest.mark.skipif("Muon" not in NAMES, reason="this torch has no Muon")
def test_muon_refuses_biases_before_training_and_leaves_the_model_as_it_was() -> None:
    strategies: list[Strategy] = [FedAvgStrategy(torch.optim.Muon), DiLoCoStrategy("sgd", torch.optim.Muon)]
    for strategy in strategies:
        with pytest.raises(ArgumentError, match=r"Muon.*cannot be built.*2D"):
            train(strategy, model=Regressor())


def test_the_sgd_by_name_outside_is_the_papers() -> None:
    paper = OptimSpec("sgd", lr=0.7, momentum=0.9, nesterov=True)
    assert repr(outer_spec("SGD", None)) == repr(outer_spec("sgd", None)) == repr(paper)
    assert outer_spec("sgd", 0.4).kwargs["lr"] == 0.4
    assert outer_spec(OptimSpec("sgd", lr=1.0), None).kwargs == {"lr": 1.0}


def test_an_explicit_kernel_is_kept() -> None:
    for asked in ({"foreach": True}, {"fused": False}, {"foreach": False}):
        built = OptimSpec("sgd", lr=0.1, momentum=0.9, **asked).build([nn.Parameter(torch.zeros(2))])
        assert {k: built.defaults[k] for k in asked} == asked and type(built) is torch.optim.SGD
    assert OptimSpec("adamw").build([nn.Parameter(torch.zeros(2))]).defaults["fused"]


@pytest.mark.parametrize("name", [n for n in WORKING if n != "Muon"])
def test_the_state_of_an_optimizer_comes_back_to_where_torch_keeps_it(name: str) -> None:
    """A checkpoint is read to the CPU; the meta device stands for a GPU, which a test may not have."""
    parameters = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(()))]
    spec = OptimSpec(name, foreach=False)
    optimizer = spec.build(parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved = optimizer_state(optimizer)
    assert len(saved) > 0 or name == "SGD"
    away = spec.build([nn.Parameter(p.detach().to("meta")) for p in parameters])
    load_optimizer_state(away, saved)
    places = {key: value.device.type for key, value in optimizer_state(away).items()}
    assert places == {key: "cpu" if key.endswith(".step") else "meta" for key in saved}
    # And once more on the CPU: the next step is the one that would have been taken.
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    again = spec.build(copies)
    load_optimizer_state(again, saved)
    for p in (*parameters, *copies):
        p.grad = torch.full_like(p, 0.5)
    optimizer.step()
    again.step()
    for p, copy_ in zip(parameters, copies, strict=True):
        assert torch.equal(p, copy_)
