"""A pilot: train several methods for a few steps, drop the worse half, train the others further, and advise.

Nothing here trains: the caller's function does, or replays a table of finished runs. So the same rules decide in both.

**A measurement.** Two methods reach the higher of their two last losses at the steps s_a and s_b. log(s_a / s_b)
measures the log ratio of their steps to the target, because methods mostly keep their pace. The error is normal with

    sd(s) = sqrt(0.12^2 + (0.28 log(S / s))^2)

S is the planned run's steps, and s is the later of s_a and s_b. After a tenth of the run, sd is 0.66: so short a pilot
shows a factor of 2, but no less. The two constants come from real runs (docs/network.md). Beliefs are normal too, so
one linear update joins all measurements. DDP need not be among the trained methods. A method that measures slow is also
more likely never to reach the target: in a pilot such methods are slower by a factor of 2 (log ratio 0.7).

**The trained methods.** A method is never trained if its time per step leaves it a probability under 2 % of being
right. The pilot begins with the K most probable other methods, and chooses K by the foreseen probability of a right
choice. Then it halves. Each of ceil(log2 K) rounds gets an equal share of the remaining steps, and the methods share
them equally. A method trains whole periods, because its model changes only at their ends. The pilot ends early if its
choice is 95 % sure.

>>> def train(method, until):
...     slow = {"ddp": 1.0, "diloco:H=10": 1.2, "diloco:H=50": 6.0}[method]
...     return [(0, 3.5), *((s, 0.5 + 3 * (1 + s / slow) ** -0.5) for s in range(10, until + 1, 10))]
>>> seconds = {"ddp": 9.0, "diloco:H=10": 1.0, "diloco:H=50": 0.5}
>>> found: Found = halve(train, seconds, dict.fromkeys(seconds, Belief(0.5, 0.7, 0.0)), steps=1000, budget=400)
>>> found.before.method, found.choice.method, found.hopeless, found.spent <= 400
('diloco:H=50', 'diloco:H=10', ['ddp'], True)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from exogym.core.base.rng import numpy_generator
from exogym.errors import check_count
from exogym.study.advise.beliefs import NEAR, REFERENCE, WORST, Belief, Choice, chosen, losses_of
from exogym.study.compare.summary import Track

HOPELESS, SURE = 0.02, 0.95
LEAST_SURE = 0.5  # with a smaller probability of being right, the safe choice is advised
NOISE, DRIFT = 0.12, 0.28  # sd of a measured log ratio: at the target, and for each log of the distance to the target
SLOWER = 0.7  # log ratio by which methods that never reach the target are slower in a pilot
FORESEEN = 4000  # draws
MORE = (2, 4, 8, 16, 32)  # larger pilots to foresee, as multiples

Evaluations = Sequence[tuple[float, float]]
Train = Callable[[str, int], Evaluations]


@dataclass(frozen=True)
class Found:
    """A pilot's result.

    Attributes:
        choice: the advised method, with its probability of being right.
        before: the choice without the pilot.
        beliefs: dict from method to its belief after the pilot.
        curves: dict from each trained method to its evaluations, (step, loss).
        trained: dict from each trained method to its steps.
        hopeless: methods that were never trained, because they had almost no chance.
        failed: methods whose training failed.
        more: dict from the steps of larger pilots to the foreseen probability of a right choice.
    """

    choice: Choice
    before: Choice
    beliefs: Mapping[str, Belief]
    curves: Mapping[str, Evaluations]
    trained: Mapping[str, int]
    hopeless: Sequence[str] = ()
    failed: Sequence[str] = ()
    more: Mapping[int, float] = field(default_factory=dict)

    @property
    def spent(self) -> int:
        """Steps that the pilot trained, summed over methods."""
        return sum(self.trained.values())


def halve(
    train: Train,
    seconds_per_step: Mapping[str, float],
    beliefs: Mapping[str, Belief],
    *,
    steps: int,
    budget: int,
    periods: Mapping[str, int] | None = None,
) -> Found:
    """Choose among methods by successive halving, with at most `budget` steps of training.

    Args:
        train: function of a method and a step. It trains the method until this step, from where it stopped before, and
            returns all its evaluations so far as (step, loss), with the loss at step 0. A loss that is not finite means
            that the training failed.
        seconds_per_step: dict from each candidate to its seconds per step on the network.
        beliefs: dict from each candidate to the belief before the pilot.
        steps: S, the planned run's steps. The target is a loss that DDP reaches at about this step.
        budget: the most steps to train, summed over methods. With 0, the beliefs alone decide.
        periods: dict from a method to the steps between its synchronizations; 1 for methods that are not named.

    Raises:
        ArgumentError: there is no candidate, a candidate has no belief, or a number is out of range.
    """
    check_count("steps", steps)
    check_count("budget", budget, least=0)
    every = {method: (periods or {}).get(method, 1) for method in seconds_per_step}
    before = safely_chosen(seconds_per_step, beliefs)
    if_reached = {method: replace(beliefs[method], never=0.0) for method in seconds_per_step}
    by_time = chosen(seconds_per_step, if_reached).odds
    able = [method for method in before.odds if by_time[method] >= HOPELESS and beliefs[method].never < 1]
    race = _Race(train, seconds_per_step, beliefs, steps, budget, every, before)
    if budget and before.sure < SURE:
        fit = [method for method in able if every[method] <= budget // 2]
        starts = [fit[:k] for k in range(2, len(fit) + 1)]
        race.run(max(starts, key=race.promise, default=[]))
    more = race.more(able) if race.choice.sure < SURE else {}
    hopeless = [method for method in before.odds if method not in able]
    return Found(race.choice, before, race.now, race.curves, race.trained, hopeless, race.failed, more)


def safely_chosen(seconds_per_step: Mapping[str, float], beliefs: Mapping[str, Belief]) -> Choice:
    """Choose as `chosen`; or, if that choice is unsure, the method that loses least in the worst 5 % of cases."""
    likely = chosen(seconds_per_step, beliefs)
    if likely.sure >= LEAST_SURE:
        return likely
    losses, odds = losses_of(seconds_per_step, beliefs)
    rank = [(round(float(np.quantile(own, 0.95)), 6), float(own.mean())) for own in losses.T]
    safe = min(zip(rank, seconds_per_step, strict=True))[1]
    return replace(likely, method=safe, sure=odds[safe])


@dataclass
class _Race:
    """A pilot's state. The arguments of `halve` come first."""

    train: Train
    seconds: Mapping[str, float]
    beliefs: Mapping[str, Belief]
    steps: int
    budget: int
    every: Mapping[str, int]
    choice: Choice
    now: dict[str, Belief] = field(default_factory=dict)
    apart: dict[str, Belief] = field(default_factory=dict)
    curves: dict[str, Evaluations] = field(default_factory=dict)
    trained: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now, self.apart = dict(self.beliefs), dict(self.beliefs)

    def ends(self, methods: Sequence[str], more: int) -> dict[str, int]:
        """Return the step until which each method trains, if the methods share `more` further steps."""
        already = {method: self.trained.get(method, 0) for method in methods}
        each = min((more + sum(already.values())) // len(methods), self.steps)
        return {method: max(each // self.every[method] * self.every[method], already[method]) for method in methods}

    def promise(self, methods: Sequence[str]) -> float:
        """Return the foreseen probability of a right choice if these methods share the budget."""
        return foreseen(self.seconds, self.beliefs, self.ends(methods, self.budget), self.steps)

    def run(self, racing: Sequence[str]) -> None:
        """Halve the racing methods until two are left, the budget is spent, or the choice is sure."""
        rounds = math.ceil(math.log2(len(racing))) if racing else 0
        for k in range(rounds):
            ends = self.ends(racing, (self.budget - sum(self.trained.values())) // (rounds - k))
            if sum(end > 0 for end in ends.values()) > 1:  # otherwise there is nothing to compare
                for method, end in ends.items():
                    self.go_on(method, end)
                self.learn()
            sound = [method for method in racing if method not in self.failed]
            racing = sorted(sound, key=lambda m: -self.choice.odds[m])[: max(2, math.ceil(len(racing) / 2))]
            if self.choice.sure >= SURE or len(racing) < 2:
                return

    def go_on(self, method: str, end: int) -> None:
        if end > self.trained.get(method, 0):
            self.curves[method], self.trained[method] = self.train(method, end), end
            if not all(math.isfinite(loss) for _, loss in self.curves[method]):
                self.failed.append(method)

    def learn(self) -> None:
        sound = {method: curve for method, curve in self.curves.items() if method not in self.failed}
        found = measured(self.beliefs, sound, self.steps)
        failed = {method: replace(self.beliefs[method], never=1.0) for method in self.failed}
        self.now, self.apart = found.beliefs | failed, found.apart | failed
        self.choice = safely_chosen(self.seconds, self.apart)

    def more(self, able: Sequence[str]) -> dict[int, float]:
        """Return the foreseen probability of a right choice for larger pilots, by their steps."""
        found, spent = dict[int, float](), sum(self.trained.values())
        methods = [method for method in able if method not in self.failed and self.choice.odds[method] >= HOPELESS]
        for factor in MORE if len(methods) > 1 else ():
            further = self.ends(methods, factor * max(self.budget, self.steps // 10) - spent)
            cost = sum((self.trained | further).values())
            if cost > max(found, default=spent):
                found[cost] = foreseen(self.seconds, self.apart, further, self.steps, self.trained)
        return found


@dataclass(frozen=True)
class Measured:
    """What a pilot's curves say about the methods.

    Attributes:
        beliefs: dict from method to its belief.
        apart: the same, but with the standard deviation of a method's distance to the longest trained method. A choice
            needs only distances, which a pilot measures better than the methods' own steps.
    """

    beliefs: dict[str, Belief]
    apart: dict[str, Belief]


def measured(beliefs: Mapping[str, Belief], curves: Mapping[str, Evaluations], steps: int) -> Measured:
    """Update beliefs by the measurements in a pilot's curves. With fewer than two curves nothing is measured.

    >>> curves = {"ddp": [(0, 4.0), (100, 2.0)], "diloco:H=10": [(0, 4.0), (100, 3.0)]}
    >>> found: Measured = measured({method: Belief(0.0, 0.5, 0.1) for method in curves}, curves, steps=100)
    >>> means = {method: round(belief.mean, 2) for method, belief in found.beliefs.items()}
    >>> means, round(found.apart["diloco:H=10"].sd, 2)
    ({'ddp': -0.34, 'diloco:H=10': 0.34}, 0.12)
    """
    base = max(curves, key=lambda method: (curves[method][-1][0], method == REFERENCE), default="")
    pairs = {method: _ratio(curve, curves[base]) for method, curve in curves.items() if method != base}
    seen = {method: pair for method, pair in pairs.items() if pair is not None}
    if not seen:
        return Measured(dict(beliefs), dict(beliefs))
    link = _Link(beliefs, base, {method: _error(at, steps) for method, (_, at) in seen.items()})
    means = link.after(np.array([ratio for ratio, _ in seen.values()]))
    own, k = np.diag(link.covariance), list(beliefs).index(base)
    distances = own + own[k] - 2 * link.covariance[k]

    def updated(squares: np.ndarray) -> dict[str, Belief]:
        sds = np.sqrt(np.maximum(squares, 0.0))
        return {
            method: replace(belief, mean=float(mean), sd=float(sd), never=_never(belief, float(mean), float(own_sd)))
            for (method, belief), mean, sd, own_sd in zip(beliefs.items(), means, sds, np.sqrt(own), strict=True)
        }

    return Measured(updated(own), updated(distances))


def foreseen(
    seconds_per_step: Mapping[str, float],
    beliefs: Mapping[str, Belief],
    ends: Mapping[str, int],
    steps: int,
    done: Mapping[str, int] | None = None,
) -> float:
    """Return the probability of a right choice after a pilot, foreseen from the beliefs before the pilot.

    A choice is right if it takes at most 5 % longer than the best candidate.

    Args:
        ends: dict from each method of the pilot to the step until which it trains.
        done: dict from methods to the steps that the beliefs already contain.

    >>> beliefs = dict.fromkeys(("ddp", "diloco:H=10"), Belief(0.0, 0.5, 0.0))
    >>> seconds = dict.fromkeys(beliefs, 1.0)
    >>> none, short, whole = (foreseen(seconds, beliefs, dict.fromkeys(beliefs, end), 1000) for end in (0, 100, 1000))
    >>> none < short < whole < 1
    True
    """
    methods = list(seconds_per_step)
    rng = numpy_generator(0, "pilot foreseen")
    mean, sd, never = (np.array([getattr(beliefs[m], name) for m in methods]) for name in ("mean", "sd", "never"))
    truth = mean + sd * rng.standard_normal((FORESEEN, len(methods)))
    reaches = rng.random(truth.shape) >= never
    believed = np.broadcast_to(mean, truth.shape)
    base = max(ends, key=lambda method: (ends[method], method == REFERENCE), default="")
    errors = {m: _further_error(end, (done or {}).get(m, 0), steps) for m, end in ends.items() if m != base and end > 0}
    if errors := {method: error for method, error in errors.items() if math.isfinite(error)}:
        link = _Link({m: beliefs[m] for m in methods}, base, errors)
        noise = rng.standard_normal((FORESEEN, len(errors))) @ np.linalg.cholesky(link.errors).T
        believed = link.after(truth @ link.pairs.T + noise)
    seconds = np.log([seconds_per_step[method] for method in methods])
    times = np.where(reaches, truth + seconds, np.inf)
    chosen_s = times[np.arange(FORESEEN), (believed + seconds + never * math.log(WORST)).argmin(1)]
    return float((chosen_s <= times.min(1) + math.log1p(NEAR))[np.isfinite(chosen_s)].sum() / FORESEEN)


class _Link:
    """The linear update of normal beliefs by measured differences from `base`.

    Attributes:
        pairs: (K, M) matrix from all methods' means to the K measured differences.
        errors: (K, K) covariance of the measurements; base's own error is in all of them.
        covariance: (M, M) covariance of the methods after the update.
    """

    def __init__(self, beliefs: Mapping[str, Belief], base: str, errors: Mapping[str, float]) -> None:
        methods, error = list(beliefs), np.array(list(errors.values()))
        self.mean = np.array([belief.mean for belief in beliefs.values()])
        before = np.diag([belief.sd**2 for belief in beliefs.values()])
        self.pairs = np.zeros((len(errors), len(methods)))
        for k, method in enumerate(errors):
            self.pairs[k, [methods.index(method), methods.index(base)]] = 1, -1
        self.errors = (np.diag(error**2) + np.outer(error, error)) / 2
        of_all = before @ self.pairs.T
        self.gain = np.linalg.solve(self.pairs @ of_all + self.errors, of_all.T).T
        self.covariance = before - self.gain @ of_all.T

    def after(self, seen: np.ndarray) -> np.ndarray:
        """Return (..., M) the methods' means after the measured differences (..., K)."""
        return np.asarray(self.mean + (seen - self.pairs @ self.mean) @ self.gain.T)


def _ratio(curve: Evaluations, base: Evaluations) -> tuple[float, float] | None:
    """Return the log ratio of the two curves' steps to the higher of their last lowest losses, and the later step.

    Return None if a curve has not fallen to a loss below its first one.
    """
    (steps, losses), (base_steps, base_losses) = (tuple(zip(*found, strict=True)) for found in (curve, base))
    shared = max(min(losses), min(base_losses))
    own, other = first_step(steps, losses, shared), first_step(base_steps, base_losses, shared)
    if not own or not other:
        return None
    return math.log(own / other), max(own, other)


def _never(before: Belief, mean: float, sd: float) -> float:
    """Return the probability that a method never reaches the target, after its belief became (mean, sd).

    In a pilot, such a method is slower: its log ratio is normal around the belief's mean plus `SLOWER`.
    """
    if not 0 < before.never < 1 or not before.sd:
        return before.never
    learned = (1 - (sd / before.sd) ** 2) / before.sd**2  # 1 / variance of the measurement with the belief
    log_odds = math.log(before.never / (1 - before.never))
    log_odds += SLOWER * (mean - before.mean) / before.sd**2 - SLOWER**2 / 2 * learned
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, log_odds))))


def _error(step: float, steps: int) -> float:
    """Return the standard deviation of a log ratio that was measured at `step`."""
    return math.hypot(NOISE, DRIFT * math.log(steps / min(step, steps)))


def _further_error(step: int, done: int, steps: int) -> float:
    """Return the standard deviation of what a measurement at `step` adds to an earlier one at `done`."""
    if done >= step:
        return math.inf
    known = _error(done, steps) ** -2 if done else 0.0
    return float((_error(step, steps) ** -2 - known) ** -0.5)


def first_step(
    steps: Sequence[float] | np.ndarray, losses: Sequence[float] | np.ndarray, target: float
) -> float | None:
    """Return the step at which a loss is first at most `target`, interpolated; None if none is.

    >>> first_step([0, 10, 20], [3.0, 2.0, 1.0], 1.5), first_step([0, 10], [3.0, 2.0], 1.5)
    (15.0, None)
    """
    track = Track({"step": np.asarray(steps, dtype=float), "val_loss": np.asarray(losses, dtype=float)}, {})
    return track.until(target, "step")
