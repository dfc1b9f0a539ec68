"""Estimate from a rule of thumb and earlier runs how methods do in a new run, and choose a method.

A `Belief` is a distribution of a method's steps to a target loss, as a multiple of the S steps in which DDP reaches it.
For a method that synchronizes the whole model every H steps, the rule of thumb gives the logarithm of the multiple and
the probability that the method never reaches the target:

    m_0 = 0.1 + 0.12 log H,   with a standard deviation of 0.5
    p_0 = 0.1 + 2 H / S,      at most 0.9: few synchronizations are too few

The rule counts like two earlier places. Let r_1 ... r_n be the logarithms of the multiple at the n places where the
method reached the target. If a place has the method only with another H', 0.12 log(H / H') is added to its r_i. Then

    mean  = (2 m_0 + sum of r_i) / (2 + n)
    sd^2  = (2 0.5^2 + sum of (r_i - mean)^2) / (2 + n) (1 + 1 / (2 + n))
    never = (2 p_0 + sum of w_i over places where it never arrived) / (2 + sum of w_i)

Places of the same task (`task_of`) together count as one: each of a task's k places has the weight 1 / k in all sums
above, and n is the sum of the weights.

If the label skew of the new run's data is known, the weight of a place is multiplied by exp(-d / 0.3), where d is the
difference between the skews, or by 1 / 2 if the place's skew is unknown.

Earlier runs are short: a place has R_i = S_i / H' synchronizations, the new run R = S / H. If the method never reached
the target at the place, w_i is min(1, R_i / R), because more synchronizations may suffice. Otherwise w_i is min(1, R /
R_i).

`beliefs_of` computes beliefs from the steps of earlier runs (`research.atlas.steps.steps_of` reads these from the
atlas's table, and `known` returns those that ExoGym ships). `chosen` combines beliefs with the seconds of a step on a
network:

    seconds to the target = seconds per step * DDP's steps * exp(mean + sd z),   z normal

>>> earlier = {"digits-4": {"ddp": 100.0, "diloco:H=10": 150.0}, "words-4": {"ddp": 400.0, "diloco:H=10": 500.0}}
>>> beliefs: dict[str, Belief] = beliefs_of({"ddp": 1, "diloco:H=10": 10}, 300, earlier)
>>> round(beliefs["diloco:H=10"].steps, 2), beliefs["ddp"].steps
(1.41, 1.0)
>>> choice: Choice = chosen({"ddp": 0.5, "diloco:H=10": 0.1}, beliefs)
>>> choice.method, round(choice.sure, 2)
('diloco:H=10', 0.92)
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from exogym.errors import ArgumentError, check_count, check_number
from exogym.streams import numpy_generator

REFERENCE = "ddp"
MORE_STEPS, MORE_PER_LOG, SPREAD = 0.1, 0.12, 0.5  # the rule of thumb: m_0, and its standard deviation
LEAST_NEVER, MOST_NEVER, ROUNDS = 0.1, 0.9, 2  # the rule of thumb: p_0
WORTH = 2  # the number of places like which the rule counts
NEAR = 0.05  # a method counts as right if it takes at most this fraction longer than the best
WORST = 10.0  # a method that never reaches the target counts as this many times slower than the best
DRAWS = 4000
ALIKE = 0.3  # difference in label skew that divides a place's weight by e
UNKNOWN = 0.5  # weight of a place with unknown skew
SAME_TASK = {  # the same data with another partition or model
    "digits-iid": "digits", "digits-shards": "digits", "speakers": "characters", "clients": "pictures",
    "strokes": "pictures",
}  # fmt: skip
KNOWN = Path(__file__).with_name("earlier.json")

Earlier = Mapping[str, Mapping[str, float]]  # place to method to its steps to the target
Weights = Mapping[str, float]  # place to its weight, 1 by default


@dataclass(frozen=True)
class Belief:
    """An estimate of a method's steps to a target loss, as a multiple of DDP's steps, with its uncertainty.

    Attributes:
        mean, sd: of the natural logarithm of the multiple, if the method reaches the target.
        never: probability that the method doesn't reach the target.
    """

    mean: float
    sd: float
    never: float

    def __post_init__(self) -> None:
        check_number("mean", self.mean)
        check_number("sd", self.sd, least=0)
        check_number("never", self.never, least=0, most=1)

    @property
    def steps(self) -> float:
        """The median multiple of DDP's steps, if the method reaches the target."""
        return math.exp(self.mean)


SAME = Belief(0.0, 0.0, 0.0)  # DDP's multiple is 1


def beliefs_of(
    periods: Mapping[str, int], steps: int, earlier: Earlier | None = None, weights: Weights | None = None
) -> dict[str, Belief]:
    """Return a belief for each method.

    Args:
        periods: dict from a strategy as text, such as "diloco:H=30", to the steps between synchronizations.
        steps: S, DDP's steps to the target.
        earlier: for each place, a dict from method to its steps to the target, infinite if the method never reached it.
            A place counts only if DDP reached the target there. If a place doesn't have a strategy's text, the strategy
            with the same name and the most similar options counts. None means no earlier runs.
        weights: dict from place to its weight, 1 by default; see `likeness`.

    >>> beliefs_of({"ddp": 1, "diloco:H=50": 50}, 1000)["diloco:H=50"].never
    0.2
    """
    check_count("steps", steps)
    return {method: _belief(earlier or {}, method, period, steps, weights or {}) for method, period in periods.items()}


def likeness(skew: float | None, skews: Mapping[str, float | None]) -> dict[str, float]:
    """Return the weight of each earlier place for data with this label skew, or 1 for all if the skew is None.

    Args:
        skews: dict from place to its label skew, or None if unknown (`exogym.data.label_skew`).

    >>> likeness(0.6, {"digits-iid-4": 0.0, "pictures-4": 0.6, "speakers-4": None})
    {'digits-iid-4': 0.1353352832366127, 'pictures-4': 1.0, 'speakers-4': 0.5}
    """
    if skew is None:
        return dict.fromkeys(skews, 1.0)
    return {place: UNKNOWN if other is None else math.exp(-abs(skew - other) / ALIKE) for place, other in skews.items()}


def _belief(earlier: Earlier, method: str, period: int, steps: int, alike: Weights) -> Belief:
    if method.partition(":")[0] == REFERENCE:
        return SAME
    thumb = MORE_STEPS + MORE_PER_LOG * math.log(period)
    ratios, likenesses, weights, lost = [], [], [], 0.0
    others = {
        place: other for place, known in earlier.items()
        if math.isfinite(known.get(REFERENCE, math.inf)) and (other := _nearest(method, period, known)) is not None
    }  # fmt: skip
    same = Counter(map(task_of, others))
    for place, other in others.items():
        known = earlier[place]
        base, like = known[REFERENCE], alike.get(place, 1.0) / same[task_of(place)]
        there = h_of(other) or period
        here = h_of(method) or there
        rounds = base / there / (steps / here)
        if math.isfinite(known[other]):
            ratios.append(math.log(known[other] / base) + MORE_PER_LOG * math.log(here / there))
            likenesses.append(like)
            weights.append(likenesses[-1] * min(1.0, 1 / rounds))
        else:
            weights.append(like * min(1.0, rounds))
            lost += weights[-1]
    count = WORTH + math.fsum(likenesses)
    mean = (WORTH * thumb + _dot(likenesses, ratios)) / count
    squares = WORTH * SPREAD**2 + _dot(likenesses, [(r - mean) ** 2 for r in ratios])
    rule = min(MOST_NEVER, LEAST_NEVER + ROUNDS * period / steps)
    never = (WORTH * rule + lost) / (WORTH + math.fsum(weights))
    return Belief(mean, math.sqrt(squares / count * (1 + 1 / count)), never)


def task_of(place: str) -> str:
    """Return the task of a place's name, such as "digits" for "digits-iid-4".

    >>> task_of("digits-iid-4"), task_of("speakers-16"), task_of("words")
    ('digits', 'characters', 'words')
    """
    kind = place.rpartition("-")[0] or place
    return SAME_TASK.get(kind, kind)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _nearest(method: str, period: int, known: Mapping[str, float]) -> str | None:
    """Return a strategy of the same name, preferably with the same other options, with the most similar H."""
    if method in known:
        return method
    name, options, H = method.partition(":")[0], without_h(method), h_of(method) or period

    def far(other: str) -> tuple[bool, float, str]:
        there = h_of(other)
        return without_h(other) != options, 0.0 if there is None else abs(math.log(H / there)), other

    return min((other for other in known if other.partition(":")[0] == name), key=far, default=None)


@cache
def _shipped() -> dict[str, Any]:
    return dict(json.loads(KNOWN.read_text("utf-8")))


@cache
def known() -> dict[str, dict[str, float]]:
    """Return the steps of earlier runs that are shipped with ExoGym, from its atlas and judged trainings."""
    return {
        place: {method: math.inf if steps is None else steps for method, steps in each["steps"].items()}
        for place, each in _shipped().items()
    }


@cache
def known_skews() -> dict[str, float | None]:
    """Return the label skew of the data at each place of `known`, or None if it is unknown."""
    return {place: each["skew"] for place, each in _shipped().items()}


def h_of(method: str) -> float | None:
    """Return the H in a strategy's text, or None if the text has no number there.

    >>> h_of("diloco:H=30"), h_of("ddp")
    (30.0, None)
    """
    for part in method.split(":")[1:]:
        name, _, value = part.partition("=")
        if name.strip() == "H" and value.strip().isdecimal() and int(value):
            return float(value)
    return None


def without_h(method: str) -> str:
    """Return a strategy's text without its H.

    >>> without_h("sparseloco:H=30:topk=16")
    'sparseloco:topk=16'
    """
    return ":".join(part for part in method.split(":") if part.partition("=")[0].strip() != "H")


@dataclass(frozen=True)
class Choice:
    """The advised method.

    Attributes:
        method: the method with the smallest expected logarithm of its time.
        sure: probability that the method is within 5 % of the best candidate's time.
        odds: dict from each candidate to its probability of being within 5 % of the best time, best first.
    """

    method: str
    sure: float
    odds: Mapping[str, float]


def chosen(seconds_per_step: Mapping[str, float], beliefs: Mapping[str, Belief]) -> Choice:
    """Choose the method that is expected to reach the target first on a network.

    The choice is deterministic, because its random draws depend only on the arguments.

    Args:
        seconds_per_step: dict from each candidate to its seconds per step on the network.
        beliefs: dict from each candidate to its belief.

    Raises:
        ArgumentError: there is no candidate, a candidate has no belief, or a number is out of range.
    """
    losses, odds = losses_of(seconds_per_step, beliefs)
    method = list(seconds_per_step)[int(np.argmin(losses.mean(0)))]
    return Choice(method, odds[method], dict(sorted(odds.items(), key=lambda each: -each[1])))


def losses_of(
    seconds_per_step: Mapping[str, float], beliefs: Mapping[str, Belief]
) -> tuple[np.ndarray, dict[str, float]]:
    """Return the logarithms of time over best time, (draws, candidates), and each candidate's odds (`Choice`).

    Raises:
        ArgumentError: as in `chosen`.
    """
    if not seconds_per_step:
        raise ArgumentError("seconds_per_step is empty: pass at least one candidate")
    for method, seconds in seconds_per_step.items():
        check_number(f"seconds_per_step[{method!r}]", seconds, over=0)
        if method not in beliefs:
            raise ArgumentError(f"beliefs has no entry for {method!r}: pass one belief per candidate, see beliefs_of()")
    times = np.stack([_drawn(name, seconds, beliefs[name]) for name, seconds in seconds_per_step.items()], 1)
    best = times.min(1)
    decided = np.isfinite(best)
    ratio = times[decided] / best[decided, None]
    losses, right = np.full_like(times, math.log(WORST)), np.zeros(times.shape, dtype=bool)
    losses[decided] = np.log(np.minimum(ratio, WORST))
    right[decided] = ratio <= 1 + NEAR
    return losses, dict(zip(seconds_per_step, right.mean(0).tolist(), strict=True))


def _drawn(method: str, seconds_per_step: float, belief: Belief) -> np.ndarray:
    """Return seconds to the target per step of DDP, (draws,); infinite where the method doesn't reach it.

    A method's draws don't depend on the other candidates.
    """
    rng = numpy_generator(0, f"belief {method}")
    seconds: np.ndarray = seconds_per_step * np.exp(belief.mean + belief.sd * rng.standard_normal(DRAWS))
    return np.where(rng.random(DRAWS) >= belief.never, seconds, np.inf)
