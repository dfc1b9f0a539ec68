"""Options that strategies share: one definition, which editors, `inspect.signature` and errors show."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest

from exogym.contrib import Robust
from exogym.errors import ArgumentError
from exogym.strategy import CommunicateOptimizeStrategy, FedAvgStrategy, PeriodicModule
from exogym.strategy.registry import STRATEGIES, parse_strategy

OURS = {name: kind for name, kind in STRATEGIES.items() if kind.__module__.startswith("exogym.")}


@pytest.mark.parametrize("name", OURS)
def test_a_constructor_writes_its_own_arguments_and_shows_all(name: str) -> None:
    kind: Any = OURS[name]
    code = inspect.unwrap(kind.__init__).__code__
    assert code.co_argcount + code.co_kwonlyargcount - 1 <= 13
    shown = inspect.signature(kind).parameters
    assert not any(p.kind is p.VAR_KEYWORD for p in shown.values())
    assert {"lr", "inner_lr", "max_norm", "lr_scheduler", "warmup_steps"} <= shown.keys()
    assert all(p.default is not p.empty for p in shown.values())


@pytest.mark.parametrize("name", OURS)
def test_each_method_declares_the_ranges_in_which_it_is_tuned(name: str) -> None:
    """Beside the inner rate. A range holds no option that changes a node's bytes, and both of its ends are allowed."""
    kind: Any = OURS[name]
    assert "ranges" in vars(kind), "state what to tune beside the inner rate, such as ('outer_lr=0.1..1.5',), or ()"
    plain = parse_strategy(name).plan(1e6, 4, 4).traffic
    for text in kind.ranges:
        option, _, span = text.partition("=")
        low, _, high = span.partition("..")
        assert float(low) < float(high)
        for end in (low, high):
            assert parse_strategy(f"{name}:{option}={end}").plan(1e6, 4, 4).traffic == plain, text


@pytest.mark.parametrize("name, option, value", [
    ("sparseloco", "chunk", 0), ("sparseloco", "topk", None), ("sparta", "p_sparta", None), ("noloco", "gamma", ""),
    ("fedopt", "tau", None), ("fedavg", "local_steps", 3), ("streaming_diloco", "offsets", 0),
    ("topk", "error_feedback", "no"), ("fedavg", "keep_inner_state", 1), ("async_diloco", "dylu", "yes"),
])  # fmt: skip
def test_a_value_of_the_wrong_kind_is_refused_by_name(name: str, option: str, value: Any) -> None:
    made: Any = OURS[name]
    with pytest.raises(ArgumentError, match=f"{option}="):
        made(**{option: value})


def test_an_alias_is_the_argument() -> None:
    assert FedAvgStrategy(inner_lr=0.25).inner.base_lr == FedAvgStrategy(lr=0.25, inner_lr=0.25).inner.base_lr == 0.25
    assert FedAvgStrategy(inner_lr=0.25).given_arguments == {"inner_lr": 0.25}  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match=r"inner_lr=0.25 means lr=0.25, but lr=0.5 was passed as well"):
        FedAvgStrategy(lr=0.5, inner_lr=0.25)


def test_a_plain_constructor_is_checked_recorded_and_wrapped() -> None:
    class Silent(PeriodicModule):
        def communicate(self, fleet: Any, step: int) -> None: ...

    class Short(CommunicateOptimizeStrategy):
        def __init__(self, H: int = 3, lr: float | None = None):
            super().__init__("sgd", [Silent()], lr=lr)

    made: Any = Short
    assert list(inspect.signature(made).parameters) == ["H", "lr"]
    assert made(4).given_arguments == {"H": 4} and repr(made(lr=0.5)) == "Short(lr=0.5)"
    assert Robust(made(), "norm_cap").averaging.features()['robust="norm_cap"']
    again = copy.deepcopy(made(H=2))
    assert again.given_arguments == {"H": 2}
    with pytest.raises(ArgumentError, match="has no argument 'max_norm'"):
        made(max_norm=1.0)
