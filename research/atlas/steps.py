"""Steps to a target loss, from the atlas's table: what `exogym.study.advise.beliefs` learns from.

A place's target is DDP's test loss after half of the steps, times `level`. If the learning rate is constant, this is
DDP's final loss in a run of half the steps, and every other method has twice DDP's steps to reach it. If all had the
same steps, a method that needs a few more steps than DDP would seem never to reach the target. Losses are means over
seeds, with tuned settings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exogym.strategy.registry import STRATEGIES
from exogym.study.compare.summary import Track
from research.atlas.table import Row, Table

REFERENCE = "ddp"
SHARE = 0.5  # of the steps, after which DDP's loss is the target
LEVELS = (1.0, 1.02, 1.1)  # multiples of this loss


@dataclass(frozen=True)
class Curve:
    """A method's mean test loss over seeds, at the steps of its evaluations."""

    steps: tuple[float, ...]
    losses: tuple[float, ...]

    def at(self, share: float) -> float:
        """Return the loss after a share of the steps, interpolated linearly.

        >>> Curve((0.0, 10.0, 20.0), (3.0, 2.0, 1.0)).at(0.25)
        2.5
        """
        return float(np.interp(share * self.steps[-1], self.steps, self.losses))

    def until(self, target_loss: float) -> float:
        """Return the step at which the loss first reached a target, interpolated linearly; infinite if it never did.

        >>> curve = Curve((0.0, 10.0, 20.0), (3.0, 2.0, 1.0))
        >>> curve.until(1.5), curve.until(0.5)
        (15.0, inf)
        """
        track = Track({"step": np.array(self.steps), "val_loss": np.array(self.losses)}, {})
        found = track.until(target_loss, "step")
        return math.inf if found is None else found


def curves_of(table: Table, place: str, seeds: int | None = None) -> dict[str, Curve]:
    """Return the curves at a place: a dict from a method with its H, such as "diloco:H=30", to its `Curve`.

    Methods without a common step, whose nodes do not wait for each other, are left out: their losses depend on the
    network.

    Args:
        seeds: take only the first seeds; None takes all.
    """
    groups: dict[str, list[Row]] = {}
    for row in table.rows:
        if row["place"] == place and row["kind"] == "tuned" and not is_asynchronous(row["method"]):
            groups.setdefault(named(row), []).append(row)
    return {method: _mean(rows[:seeds]) for method, rows in groups.items()}


def steps_of(table: Table, level: float = 1.0, places: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Return each method's steps to the target: a dict from place to a dict from method to steps.

    Steps are infinite if a method never reached the target, and otherwise at least 1. Places at which DDP did not train
    or failed are left out.

    Args:
        level: the target is DDP's loss after `SHARE` of the steps, times this number.
        places: names of places, or None for all places of the table.
    """
    found = {}
    for place in table.places if places is None else places:
        curves = curves_of(table, place)
        target = level * curves[REFERENCE].at(SHARE) if REFERENCE in curves else math.inf
        if math.isfinite(target):
            found[place] = {method: max(1.0, curve.until(target)) for method, curve in curves.items()}
    return found


def named(row: Row) -> str:
    """Return a row's method, with the H that the task set if the method's text does not set it."""
    method, strategy = str(row["method"]), str(row["strategy"])
    if "H" in _options(method) or "H" not in _options(strategy):
        return method
    return f"{method}:H={_options(strategy)['H']}"


def _options(text: str) -> dict[str, str]:
    parts = (part.partition("=") for part in text.split(":")[1:])
    return {name.strip(): value.strip() for name, _, value in parts}


def is_asynchronous(method: str) -> bool:
    """Return whether a method's nodes do not wait for each other, so that the network decides its losses."""
    kind = STRATEGIES.get(method.partition(":")[0].strip())
    return kind is not None and kind.driven_by == "clock"


def _mean(rows: Sequence[Row]) -> Curve:
    """Return the mean curve of runs with the same evaluations. From a failed run's end on, the loss is infinite."""
    longest = max((row["steps"] for row in rows), key=len)
    padded = [[*row["losses"], *[None] * (len(longest) - len(row["losses"]))] for row in rows]
    losses = [[math.inf if loss is None else float(loss) for loss in each] for each in padded]
    return Curve(tuple(map(float, longest)), tuple(np.mean(losses, axis=0).tolist()))
