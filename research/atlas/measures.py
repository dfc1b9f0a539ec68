"""What the atlas's rows say: losses and predicted times, Pareto fronts, ranks, and what tuning gained."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from exogym.core.base.rng import numpy_generator
from exogym.errors import ArgumentError
from exogym.strategy.traffic import Plan
from exogym.study.advise import advise
from exogym.study.advise.beliefs import task_of
from exogym.study.advise.plans import plan_of
from research.atlas.table import RATES, SEEDS, Row, Table
from research.atlas.tuning import INNER_RATES

NETWORKS = {"Wi-Fi": "wifi", "1 Gbit/s": "lan-1g", "50 Mbit/s, 80 ms": "50Mbps,80ms"}
BEGIN_WITH_DDP = ("post_local_sgd", "pier")  # they send more often at first, not more each time
DRAWS, SHARE = 2000, 0.95  # for intervals and the critical difference


@dataclass(frozen=True)
class Result:
    """A method's results at a place, as means over seeds.

    Attributes:
        options: the chosen settings; {} are the defaults.
        losses: each seed's test loss with the chosen settings; infinite if a run failed.
        default_losses: the same with the method's defaults.
        trials: validation losses of all trials, in order.
        at_rates: dict from a kind of `research.atlas.table.RATES` to the losses with a given inner rate and the
            other chosen settings. It lacks a kind while a run is missing.
        tx_bytes: bytes that a node sends in the whole run.
        predicted_s: dict from network to the predicted seconds of the whole run, or None without a formula.
    """

    method: str
    options: Mapping[str, str]
    losses: Sequence[float]
    default_losses: Sequence[float]
    trials: Sequence[float]
    at_rates: Mapping[str, Sequence[float]]
    accuracy: float | None
    tx_bytes: float
    predicted_s: Mapping[str, float | None]

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses)

    @property
    def std(self) -> float:
        return statistics.stdev(self.losses) if math.isfinite(self.loss) and len(self.losses) > 1 else math.nan

    @property
    def gain(self) -> float:
        """How much lower the test loss is than with the defaults, as a share of the defaults' loss.

        It is 1 if only runs with the defaults failed, and NaN if a run with the chosen settings failed.
        """
        before = statistics.fmean(self.default_losses)
        return 1 - self.loss / before if math.isfinite(self.loss) and before else math.nan

    @property
    def sensitivity(self) -> float:
        """The median trial's loss over the best trial's; 1 means that the settings hardly matter.

        It is NaN if all trials failed, or the best loss is 0.
        """
        best = min(self.trials)
        return statistics.median(self.trials) / best if 0 < best < math.inf else math.nan


def results_of(table: Table, place: str, times: bool = True) -> list[Result]:
    """Return the results of all methods at a place whose runs are complete, best first.

    Args:
        times: whether to predict times. If False, `predicted_s` is empty.
    """
    groups: dict[str, dict[str, list[Row]]] = {}
    for row in table.rows:
        if row["place"] == place:
            groups.setdefault(row["method"], {}).setdefault(row["kind"], []).append(row)
    about, found = table.places[place], []
    for method, kinds in groups.items():
        measured = [[row["seed"] for row in kinds.get(kind, ())] for kind in ("tuned", "default")]
        if "trial" not in kinds or any(seeds != [*SEEDS] for seeds in measured):
            continue  # not whole yet
        tuned = kinds["tuned"]
        accuracies = [row["accuracy"] for row in tuned if row["accuracy"] is not None]
        sent = [row["tx_bytes"] for row in tuned if row["tx_bytes"] is not None]
        found.append(Result(
            method, tuned[0]["options"], _losses(tuned), _losses(kinds["default"]), _losses(kinds["trial"]),
            {kind: _losses(rows) for kind, rows in kinds.items() if _is_at_rate(kind, rows)},
            statistics.fmean(accuracies) if len(accuracies) == len(tuned) else None,
            statistics.fmean(sent) if sent else math.nan, _predicted(tuned[0], about) if times else {},
        ))  # fmt: skip
    return sorted(found, key=lambda result: result.loss)


def _is_at_rate(kind: str, rows: Sequence[Row]) -> bool:
    """Return whether rows are all runs at one of the two given inner rates."""
    if kind not in RATES or len(rows) != len(SEEDS):
        return False
    return {row["options"]["lr"] for row in rows} <= {rates[RATES.index(kind)] for rates in INNER_RATES.values()}


def _losses(rows: Sequence[Row]) -> list[float]:
    return [math.inf if row["loss"] is None else row["loss"] for row in rows]


def _predicted(row: Row, about: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the predicted seconds of a run on each network, with a node's step as measured on this machine."""
    try:
        plan = _plan_of(row, about)
    except ArgumentError:
        return dict.fromkeys(NETWORKS)
    given = {"parameters": about["parameters"], "num_nodes": about["nodes"], "step_seconds": about["step_s"]}
    found = {name: advise(**given, network=network, strategies=[plan]).rows[0] for name, network in NETWORKS.items()}
    return {name: predicted.seconds_per_step * about["steps"] for name, predicted in found.items()}


def _plan_of(row: Row, about: Mapping[str, Any]) -> Plan:
    """Return the plan of a row's strategy, with as many bytes in all as the run sent.

    Formulas assume long runs of large models, and some assume how much of a model changes.

    Raises:
        ArgumentError: the strategy has no formula.
    """
    plan = plan_of(row["strategy"], about["parameters"], about["nodes"])
    told = (
        advise(
            parameters=about["parameters"],
            num_nodes=about["nodes"],
            network="1Gbps",
            step_seconds=1.0,
            strategies=[plan],
            algorithm="recorded",
        )
        .rows[0]
        .tx_bytes_per_step
    )
    sent = row["tx_bytes"]
    if not told or sent is None:
        return plan
    factor = sent / about["steps"] / told
    if row["method"].partition(":")[0] in BEGIN_WITH_DDP:
        return replace(plan, traffic=tuple(replace(t, every_steps=t.every_steps / factor) for t in plan.traffic))
    return replace(plan, traffic=tuple(replace(t, payload_bytes=factor * t.payload_bytes) for t in plan.traffic))


def front_of(points: Mapping[str, tuple[float | None, float]]) -> set[str]:
    """Return the names of the points (cost, loss) that no other point beats in both, the Pareto front.

    >>> sorted(front_of({"a": (1.0, 3.0), "b": (2.0, 2.0), "c": (2.5, 2.0), "d": (3.0, 1.0), "e": (None, 0.0)}))
    ['a', 'b', 'd']
    """
    front, best = set[str](), math.inf
    known = [(cost, loss, name) for name, (cost, loss) in points.items() if cost is not None and not math.isnan(cost)]
    for _, loss, name in sorted(known):
        if loss < best:
            front.add(name)
            best = loss
    return front


@dataclass(frozen=True)
class Ranks:
    """Mean ranks of methods over places; rank 1 has the lowest test loss.

    Attributes:
        mean: dict from method to its mean rank, best first.
        low, high: ends of the intervals with 95 % of the mean ranks over resampled places and seeds. With few places
            these intervals are too narrow for confidence.
        critical: the critical difference. If all methods were equal, the best and worst mean rank would differ by more
            in 5 % of tables. Places with the same data count as one: chance gives them the same order.
    """

    mean: Mapping[str, float]
    low: Mapping[str, float]
    high: Mapping[str, float]
    critical: float


def comparable(places: Mapping[str, Sequence[Result]]) -> dict[str, Sequence[Result]]:
    """Return the places with at least two methods where DDP trained and did not fail.

    DDP cannot train where a server asks clients.
    """
    return {
        place: results
        for place, results in places.items()
        if len(results) > 1 and any(result.method == "ddp" and math.isfinite(result.loss) for result in results)
    }


def ranks_of(places: Mapping[str, Sequence[Result]]) -> Ranks | None:
    """Return the ranks of the methods that have results at all places, or None for fewer than two such methods."""
    shared = [{result.method for result in results} for results in places.values()]
    methods = sorted(set.intersection(*shared)) if shared else []
    if len(methods) < 2:
        return None
    losses = _by_place(places, methods, lambda result: result.losses)
    rng = numpy_generator(0, "atlas ranks")
    mean = np.mean([_ranked([statistics.fmean(seeds) for seeds in rows]) for rows in losses], 0)
    picked = rng.integers(len(losses), size=(DRAWS, len(losses)))
    drawn = np.zeros((DRAWS, len(methods)))
    for k, each in enumerate(losses):
        for column in picked.T:
            rows = np.flatnonzero(column == k)
            means = [np.mean(np.array(s)[rng.integers(len(s), size=(len(rows), len(s)))], 1) for s in each]
            drawn[rows] += _ranked(np.stack(means, 1)) / len(losses)
    data = np.array([*Counter(map(task_of, places)).values()])
    orders = rng.permuted(np.tile(np.arange(len(methods)), (DRAWS, len(data), 1)), axis=2)
    by_chance = np.average(orders, 1, data)
    chance = by_chance.max(1) - by_chance.min(1)
    low, high = np.quantile(drawn, [(1 - SHARE) / 2, (1 + SHARE) / 2], axis=0)
    order = np.argsort(mean, kind="stable")
    by_name = [{methods[k]: float(values[k]) for k in order} for values in (mean, low, high)]
    return Ranks(by_name[0], by_name[1], by_name[2], critical=float(np.quantile(chance, SHARE)))


def mean_ranks(
    places: Mapping[str, Sequence[Result]], methods: Sequence[str], losses: Callable[[Result], Sequence[float]]
) -> dict[str, float]:
    """Return the mean rank of each of `methods` over places, by the mean of some losses. All must have results there.

    Args:
        losses: function from a result to the losses of its seeds, such as those with the defaults.
    """
    rows = _by_place(places, methods, losses)
    mean = np.mean([_ranked([statistics.fmean(seeds) for seeds in each]) for each in rows], 0)
    return dict(zip(methods, mean.tolist(), strict=True))


def _by_place(
    places: Mapping[str, Sequence[Result]], methods: Sequence[str], losses: Callable[[Result], Sequence[float]]
) -> list[list[Sequence[float]]]:
    by_name = [{result.method: losses(result) for result in results} for results in places.values()]
    return [[each[method] for method in methods] for each in by_name]


def _ranked(losses: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the ranks from 1 along the last axis; equal losses share the mean of their ranks."""
    mine = np.asarray(losses)
    others, mine = mine[..., None, :], mine[..., None]
    return 1 + (others < mine).sum(-1) + ((others == mine).sum(-1) - 1) / 2
