"""Predict the bytes of the rest of a run by the formulas of a strategy's modules, for tuners that see bytes."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError
from exogym.strategy.averaging import Averaging
from exogym.strategy.modules import Module
from exogym.strategy.rounds import Rounds
from exogym.strategy.strategy import Run
from exogym.strategy.traffic import Traffic
from exogym.strategy.tuning import Costs


def costs_of(
    modules: Sequence[Module],
    tuned: Sequence[Module],
    rounds: Rounds | None,
    averaging: Averaging,
    fleet: Fleet,
    run: Run,
) -> Costs | None:
    """Return the costs of the rest of a run, by the formulas of `modules`, or None if a module has no formula.

    Args:
        modules: the strategy's modules.
        tuned: the modules whose argument the tuner changes.
        rounds: the rounds whose length the tuner chooses, or None if the tuner does not choose H.
        averaging: the strategy's averaging options.
    """
    P = sum(block.layout.total for block in fleet.blocks)
    row_bytes = sum(block.layout.total * block.layout.dtype.itemsize for block in fleet.blocks)

    def sent(traffic: list[Traffic]) -> float:
        repeated = averaging.traffic(traffic, run.num_nodes, row_bytes / P)
        return sum(t.sent_bytes(run.num_nodes) / t.every_steps for t in repeated)

    def follows(module: Any) -> bool:
        return any(getattr(x, "rounds", None) is rounds for x in (module, getattr(module, "average", None)))

    def at(module: Any, p: float) -> float:
        other = copy.copy(module)
        other.tune("p_sparta", p)
        return sent(other.traffic(P, run.num_nodes, row_bytes / P))

    try:
        if rounds is None:
            slope = sum(2 * (at(m, 1.0) - at(m, 0.5)) for m in tuned)
            final = sent([Traffic("all_reduce", float(row_bytes))]) if run.final_sync else 0.0
            offset = max(0.0, sum(at(m, 1.0) for m in tuned) - slope)
            every = max(getattr(m, "interval_steps", 1) for m in tuned)
            return Costs(slope, offset, final, slope * every / math.sqrt(P))
        formulas = [(m, m.traffic(P, run.num_nodes, row_bytes / P)) for m in modules]
    except ArgumentError:
        return None
    each = sent([t for m, traffic in formulas if follows(m) for t in traffic]) * rounds.end_after(0)
    per_step = sent([t for m, traffic in formulas if not follows(m) for t in traffic])
    return Costs(each, per_step, each if run.final_sync else 0.0)
