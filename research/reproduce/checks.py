"""Checks: a claim's statements about the results of its cells. Each check is a pure function with a stated tolerance.

Runs with the same seed start from the same weights and see the same data. So checks compare cells seed by seed.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from exogym.core.progress import readable_bytes
from exogym.network import Network, readable_seconds
from research.reproduce.claim import Check, Found, Run, Seen

# A measure's name in the results, and its words in a sentence.
WORDS = {
    "val_loss": "validation loss", "payload_bytes": "payload", "mean_val_loss": "validation loss of the nodes' mean",
    "node_val_loss": "validation loss of one node",
}  # fmt: skip


def values_of(found: Found, label: str, measure: str = "val_loss") -> dict[int, float]:
    """Return a dict from seed to `measure` after the last step, for the runs of cell `label`."""
    return {run.seed: float(run.last[measure]) for run in found[label]}


def mean_text(values: Sequence[float], form: str = "{:.4f}") -> str:
    """Return the mean ± standard deviation of `values` as text, or the number of runs that failed.

    >>> mean_text([1.0, 1.2]), mean_text([math.inf, 1.0])
    ('1.1000 ± 0.1414', 'failed in 1 of 2 runs')
    """
    failed = sum(not math.isfinite(x) for x in values)
    if failed:
        return f"failed in {failed} of {len(values)} runs"
    spread = f" ± {form.format(statistics.stdev(values))}" if len(values) > 1 else ""
    return form.format(statistics.fmean(values)) + spread


def lower(first: str, second: str, by: float = 0.0, measure: str = "val_loss", than: str | None = None) -> Check:
    """Return a check that `first` has a lower `measure` than `second` in every seed, by at least the share `by`.

    The check is undecided if seeds disagree. A failed run's loss is infinite. A check of another measure does not hold
    if a run failed.

    Args:
        than: the measure of cell `second`, if it differs from `measure`.
    """

    def check(found: Found) -> Seen:
        a, b = values_of(found, first, measure), values_of(found, second, than or measure)
        seeds = sorted(a.keys() & b.keys())
        wins = sum(a[seed] < b[seed] * (1 - by) for seed in seeds)
        margin = f", by at least {by:.0%}," if by else ""
        other = f"`{second}`" if than is None else f"{WORDS.get(than, than)} of `{second}`"
        says = (
            f"`{first}` has a lower {WORDS.get(measure, measure)} than {other}{margin} in {wins} of {len(seeds)} seeds "
            f"({_text(a, measure)} against {_text(b, than or measure)}{_change(a, b)})"
        )
        return Seen(says, True if wins == len(seeds) else None if wins else False)

    return check if {measure, than or measure} == {"val_loss"} else where_whole([first, second], check)


def no_worse(first: str, second: str, within: float) -> Check:
    """Return a check that the mean loss of cell `first` is at most (1 + `within`) times the mean loss of `second`.

    The check does not hold if a run of cell `first` failed.
    """

    def check(found: Found) -> Seen:
        a, b = values_of(found, first), values_of(found, second)
        means = float(np.mean([*a.values()])), float(np.mean([*b.values()]))
        change = means[0] / means[1] - 1 if math.isfinite(sum(means)) and means[1] else math.nan
        where = "" if math.isnan(change) else f"{abs(change):.1%} {'above' if change > 0 else 'below'}"
        says = (
            f"the mean loss of `{first}` ({_text(a)}) is {where or 'compared with'} the mean loss of `{second}` "
            f"({_text(b)}); the claim allows {within:.1%} above"
        )
        return Seen(says, math.isfinite(means[0]) and means[0] <= means[1] * (1 + within))

    return check


def bytes_are(first: str, second: str, share: float, within: float = 0.05) -> Check:
    """Return a check that cell `first` has `share` times the payload of `second`, with relative tolerance `within`.

    The check does not hold if a run of a cell failed.
    """

    def check(found: Found) -> Seen:
        a, b = (float(np.mean([*values_of(found, x, "payload_bytes").values()])) for x in (first, second))
        says = f"`{first}` has {a / b:.4g} of the payload of `{second}`; the claim is {share:.4g} ± {within:.0%}"
        return Seen(says, abs(a / b - share) <= within * share)

    return where_whole([first, second], check)


def ascending(labels: Sequence[str], measure: str = "val_loss") -> Check:
    """Return a check that the cells' means of `measure` ascend in the order of `labels`.

    The last cell must also exceed the first cell in every seed. The check is undecided if this holds only in some
    seeds.
    """

    def check(found: Found) -> Seen:
        runs = [values_of(found, label, measure) for label in labels]
        means = [float(np.mean([*values.values()])) for values in runs]
        seeds = sorted(set.intersection(*(set(values) for values in runs)))
        over = sum(runs[0][seed] < runs[-1][seed] for seed in seeds)
        rises = all(x < y for x, y in itertools.pairwise(means))
        line = " to ".join(f"`{label}` ({_text(values)})" for label, values in zip(labels, runs, strict=True))
        says = f"the mean loss {'rises' if rises else 'does not always rise'} from {line}; "
        says += f"`{labels[-1]}` is above `{labels[0]}` in {over} of {len(seeds)} seeds"
        return Seen(says, rises if over == len(seeds) else None if over and rises else False)

    return check


def best_is(labels: Sequence[str], expected: Sequence[str], where: str) -> Check:
    """Return a check that the cell with the lowest mean loss among `labels` is in `expected`."""

    def check(found: Found) -> Seen:
        runs = {label: values_of(found, label) for label in labels}
        best = min(labels, key=lambda label: float(np.mean([*runs[label].values()])))
        losses = ", ".join(f"`{label}` {_text(values)}" for label, values in runs.items())
        claimed = " or ".join(f"`{label}`" for label in expected)
        says = f"{where} the cell `{best}` has the lowest mean loss; the claim is {claimed} ({losses})"
        return Seen(says, best in expected)

    return check


def where_whole(labels: Collection[str], check: Check) -> Check:
    """Return a check like `check` that does not hold if a run of the cells `labels` failed.

    `check` reads the curves of these runs, and a failed run has no curves.
    """

    def checked(found: Found) -> Seen:
        failed = {label: sum(run.error is not None for run in found[label]) for label in labels}
        says = ", ".join(f"`{label}` failed in {n} of {len(found[label])} runs" for label, n in failed.items() if n)
        return Seen(says, False) if says else check(found)

    return checked


def spread_shrinks(label: str, to: float = 0.5) -> Check:
    """Return a check that in every seed the last consensus distance is at most `to` times the largest."""

    def check(found: Found) -> Seen:
        shares = []
        for run in found[label]:
            apart = np.asarray(run.curves["consensus_distance"])
            shares.append(float(apart[-1] / np.nanmax(apart)))
        holds = [share <= to for share in shares]
        says = (
            f"the nodes of `{label}` end at {mean_text(shares, '{:.2f}')} of their largest distance; "
            f"the claim is at most {to:g} in every seed"
        )
        return Seen(says, True if all(holds) else None if any(holds) else False)

    return where_whole([label], check)


def spread_follows_lr(label: str, at_least: float = 0.9, after: float = 0.15) -> Check:
    """Return a check that consensus distance and learning rate correlate by at least `at_least` in every seed.

    The correlation is taken over evaluations after the share `after` of the steps.
    """

    def check(found: Found) -> Seen:
        found_r = [_correlation(run, after) for run in found[label]]
        values = ", ".join(f"{r:.3f}" for r in found_r)
        says = (
            f"in `{label}` the nodes' distance and the learning rate have a correlation of {values} (one number per "
            f"seed); the claim is at least {at_least:g} in every seed"
        )
        holds = [r >= at_least for r in found_r]
        return Seen(says, True if all(holds) else None if any(holds) else False)

    return where_whole([label], check)


def _correlation(run: Run, after: float) -> float:
    steps = np.asarray(run.curves["step"], float)
    late = steps > after * steps[-1]
    apart, rate = (np.asarray(run.curves[name], float)[late] for name in ("consensus_distance", "lr"))
    known = np.isfinite(apart) & np.isfinite(rate)
    if min(np.ptp(apart[known]), np.ptp(rate[known])) == 0:
        return math.nan  # a constant has no correlation
    return float(np.corrcoef(apart[known], rate[known])[0, 1])


def late_mean(curve: Sequence[float], share: float = 0.25) -> float:
    """Return the mean over the last `share` of evaluations, without the last one: nodes may synchronize before it."""
    return float(np.mean(curve[-max(2, round(share * len(curve))) : -1]))


def late_order(label: str, measures: Sequence[str], share: float = 0.25) -> Check:
    """Return a check that the means of `measures` late in training ascend in the given order (`late_mean`)."""

    def check(found: Found) -> Seen:
        levels = [[late_mean(run.curves[name], share) for name in measures] for run in found[label]]
        holds = [all(x < y for x, y in itertools.pairwise(level)) for level in levels]
        texts = (
            f"{WORDS.get(name, name)} ({mean_text([*level])})"
            for name, level in zip(measures, zip(*levels, strict=True), strict=True)
        )
        says = (
            f"late in training, these losses of `{label}` rise in this order in {sum(holds)} of {len(holds)} seeds: "
            f"{', '.join(texts)}"
        )
        return Seen(says, True if all(holds) else None if any(holds) else False)

    return where_whole([label], check)


def best_H_grows(cells: Mapping[int, str], bandwidths: Sequence[str], latency_s: float, step_s: float, N: int) -> Check:
    """Return a check that in every seed the best H grows as bandwidth shrinks.

    The best H is the H with which a run reaches the target loss first, in predicted time. The best H must never fall
    from one bandwidth to the next, and must be larger at the last bandwidth than at the first. The check is undecided
    if this holds only in some seeds.

    The predicted time of t steps is t step_s + floor(t / H) C. C is the seconds of an all-reduce among N nodes with the
    payload of one synchronization of the run. Each seed's target loss is the highest of its runs' lowest losses. Losses
    between evaluations are interpolated linearly.

    Args:
        cells: dict from H to the label of its cell.
        bandwidths: from high to low, such as "1Gbps".
        latency_s: the network's latency in seconds.
        step_s: seconds of a step.
        N: the number of nodes.
    """

    def check(found: Found) -> Seen:
        seeds = zip(*(found[label] for label in cells.values()), strict=True)
        best = [_best_H(dict(zip(cells, runs, strict=True))) for runs in seeds]
        holds = [order == sorted(order) and order[-1] > order[0] for order in best]
        says = f"the best H grows in {sum(holds)} of {len(holds)} seeds with {readable_seconds(step_s)} per step. "
        says += "The best H, with one number per seed, is " + ", ".join(
            f"{' / '.join(str(order[k]) for order in best)} at {bandwidth}" for k, bandwidth in enumerate(bandwidths)
        )
        return Seen(says, True if all(holds) else None if any(holds) else False)

    def _best_H(runs: Mapping[int, Run]) -> list[int]:
        """Return the best H at each bandwidth."""
        target = max(min(run.curves["val_loss"]) for run in runs.values())
        arrivals = {H: _first_step(run.curves["step"], run.curves["val_loss"], target) for H, run in runs.items()}
        payloads = {H: run.last["payload_bytes"] / max(1.0, run.curves["step"][-1] // H) for H, run in runs.items()}
        best = []
        for bandwidth in bandwidths:
            net = Network(bandwidth, latency_s)
            sync_s = {H: net.cost("all_reduce", payload, N).seconds for H, payload in payloads.items()}
            seconds = {H: t * step_s + t // H * sync_s[H] for H, t in arrivals.items()}
            best.append(min(seconds, key=lambda H: seconds[H]))
        return best

    return where_whole(cells.values(), check)


def _first_step(steps: Sequence[float], losses: Sequence[float], target: float) -> float:
    """Return the step at which losses, linear between evaluations, first are at most `target`."""
    k = next(k for k, loss in enumerate(losses) if loss <= target)
    if k == 0:
        return float(steps[0])
    share = (losses[k - 1] - target) / (losses[k - 1] - losses[k])
    return float(steps[k - 1] + share * (steps[k] - steps[k - 1]))


def _text(values: Mapping[int, float], measure: str = "val_loss") -> str:
    """Return the mean over seeds as text; for losses with the spread."""
    if measure.endswith("_bytes"):
        return readable_bytes(statistics.fmean(values.values()))
    return mean_text([*values.values()])


def _change(a: Mapping[int, float], b: Mapping[int, float]) -> str:
    """Return the relative difference of a's mean from b's mean as text."""
    first, second = float(np.mean([*a.values()])), float(np.mean([*b.values()]))
    return f", {first / second - 1:+.1%}" if math.isfinite(first) and math.isfinite(second) and second else ""
