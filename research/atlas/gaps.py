"""DiLoCo's gap to DDP over the number of nodes and the model's size, beside the exponents of arXiv:2503.09799.

The paper fits a loss as A P^alpha for each number of nodes, where P are the model's parameters. Here alpha is the
least-squares slope of log(L) over log(P) at the sizes of `GAP_SIZES`, where L is the mean test loss with tuned outer
options and one inner rate for all cells. Its 95 % interval is Student's t of the fit's residuals. So it is wide if the
points are not on a line.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from research.atlas.claims import CENTRAL, SIZES, TINY, disagree, runs_of, slope, studies_at
from research.atlas.intervals import T_95, interval
from research.atlas.table import Table
from research.atlas.training import Study

CLAIM = "R2"  # its cells are DDP, and DiLoCo with 1, 2, 4 and 8 nodes and equal tokens
GAP_SIZES = (*TINY, *SIZES)
PAPER = {"DDP": -0.0953, "N=1": -0.0961, "N=2": -0.0969, "N=4": -0.0992, "N=8": -0.1018}  # alpha, 35M to 2.4B


@dataclass(frozen=True)
class Gaps:
    """Test losses of DDP and of DiLoCo with several numbers of nodes.

    Attributes:
        parameters: dict from size to P.
        gaps: dict from cell to loss / DDP's loss - 1 at each size, of mean losses; NaN if a run failed.
        exponents: dict from cell to alpha and the ends of its interval; NaN if a run failed.
        growth: dict from cell to the slope of log(loss / DDP's loss) over log(P), mean over seeds, and the ends of its
            interval; NaN if a run failed.
        unclear: dict from cell to whether its seeds or DDP's disagree, at each size.
    """

    parameters: Mapping[str, int]
    gaps: Mapping[str, list[float]]
    exponents: Mapping[str, tuple[float, float, float]]
    growth: Mapping[str, tuple[float, float, float]]
    unclear: Mapping[str, list[bool]]


def gap_studies() -> list[Study]:
    """Return the studies of all sizes."""
    return [study for size in GAP_SIZES for study in studies_at(CENTRAL[CLAIM], size).values()]


def gaps_of(table: Table, kind: str) -> Gaps | None:
    """Return the gaps in rows of a kind, such as "low rate", or None while the table lacks a run."""
    losses: dict[str, list[float]] = {label: [] for label in PAPER}  # mean over seeds, by size
    by_seed: dict[str, list[list[float]]] = {label: [] for label in PAPER}
    parameters = {}
    for size in GAP_SIZES:
        for label, study in studies_at(CENTRAL[CLAIM], size).items():
            runs = runs_of(table, study, kind)
            if not runs:
                return None
            by_seed[label].append([run.last["val_loss"] for run in runs])
            mean = statistics.fmean(by_seed[label][-1])
            losses[label].append(mean if math.isfinite(mean) else math.nan)
            parameters[size] = table.places[study.place]["parameters"]
    logs = np.log([*parameters.values()])
    gaps = {
        label: [mine / ddp - 1 for mine, ddp in zip(found, losses["DDP"], strict=True)]
        for label, found in losses.items()
    }
    growth = {}
    for label in PAPER:
        both = np.array([by_seed[label], by_seed["DDP"]])  # (2, sizes, seeds)
        growth[label] = (math.nan, math.nan, math.nan)
        if np.isfinite(both).all():
            growth[label] = interval([slope(logs, seed) for seed in (np.log(both[0]) - np.log(both[1])).T])
    unclear = {
        label: [disagree(mine) or disagree(ddp) for mine, ddp in zip(found, by_seed["DDP"], strict=True)]
        for label, found in by_seed.items()
    }
    exponents = {label: exponent(logs, np.log(found)) for label, found in losses.items()}
    return Gaps(parameters, gaps, exponents, growth, unclear)


def exponent(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Return the least-squares slope of four values y over x, and the ends of the fit's 95 % interval.

    >>> x = np.array([0.0, 1.0, 2.0, 3.0])
    >>> [round(end, 2) for end in exponent(x, np.array([0.0, 1.0, 2.0, 3.4]))]
    [1.12, 0.82, 1.42]
    """
    alpha = slope(x, y)
    residuals = y - y.mean() - alpha * (x - x.mean())
    free = len(x) - 2
    error = math.sqrt(float(residuals @ residuals) / free / float(((x - x.mean()) ** 2).sum()))
    return alpha, alpha - T_95[free] * error, alpha + T_95[free] * error
