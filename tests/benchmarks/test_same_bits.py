"""Two commits compared: every method is among the runs, and a run that one of them lacks is a difference."""

import copy
from typing import Any

import pytest
from paths import ROOT

from exogym import strategy
from exogym.strategy.registry import STRATEGIES


@pytest.fixture
def same_bits(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import same_bits

    return same_bits


def test_every_method_is_compared(same_bits: Any) -> None:
    assert {name: getattr(strategy, kind) for name, kind in same_bits.METHODS.items()} == STRATEGIES
    assert set(same_bits.CLOCKED) == {name for name, kind in STRATEGIES.items() if kind.driven_by == "clock"}
    assert set(same_bits.every_method()) == {f"= {name}" for name in STRATEGIES}
    assert same_bits.RETIRED.keys() <= same_bits.runs().keys()


def test_what_differs_and_what_is_missing_fails(same_bits: Any) -> None:
    run = {"weights": "a", "traffic": {"all_reduce": 8}, "history": [{"step": 1, "train_loss": 0.5}]}
    gone = {same_bits.FAILED: "ArgumentError: gone"}
    before = {name: copy.deepcopy(run) for name in ("= ddp", "= topk", "diloco drift")}

    def differs(**now: Any) -> tuple[str, int]:
        changed = before | {"= ddp": run | now}
        lines, count = same_bits.report(before, changed, rows=True)
        return "\n".join(lines), count

    assert differs()[1] == 0
    assert differs(weights="b")[1] == 1 and "    weights" in differs(weights="b")[0]
    said, count = differs(history=[{"step": 1, "train_loss": 0.25}])
    assert count == 1 and "train_loss, first in row 0 (step 1): 0.5 before, 0.25 now" in said
    without = {name: run for name, run in before.items() if name != "= topk"}
    for lacking in (without, without | {"= topk": gone}):
        for given in ((before, lacking), (lacking, before)):
            lines, count = same_bits.report(*given)
            assert count == 1 and any("= topk" in line and "DIFFERS" in line for line in lines)
    lines, count = same_bits.report(before, before | {"diloco drift": gone})
    assert count == 0 and any("retired  the tuner Drift" in line for line in lines)
    both = {"= ddp": gone}
    assert same_bits.report(both, both)[1] == 1  # neither tree trains it
