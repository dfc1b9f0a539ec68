"""Judge advice: replay finished trainings on many networks, and compare the advised method with the best method.

A training's losses do not depend on the network. So a run of the atlas's table gives its time to a loss on every
network: its steps to the loss, times the seconds of a step by formula. A *case* is a place of the table, a network, a
size and a level. The target is the level times the final loss of a run of DDP that takes half of the table's steps
(`research.atlas.steps`), so every other method has twice DDP's steps to reach it.

    regret = seconds of the advised method / seconds of the best method - 1

The regret is infinite if the advised method never reaches the target. Each place counts twice: with its own model, and
with the bytes and seconds of a model of 100M parameters whose step takes a second (`SIZES`).

An adviser is a function of a `Question`, which holds nothing of the judged place except its size, its network, the
label skew of its data and what a pilot would measure. Earlier runs come from places with other tasks only.

Methods whose nodes do not wait for each other are left out, because the network decides their losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from exogym.core.base.rng import numpy_generator
from exogym.errors import ArgumentError
from exogym.network import Network
from exogym.strategy.traffic import ModelSize
from exogym.study.advise import advise
from exogym.study.advise.beliefs import Belief, Earlier, beliefs_of, chosen, known, known_skews, likeness, task_of
from exogym.study.advise.plans import period_of, plan_of
from research.atlas.steps import LEVELS, REFERENCE, SHARE, Curve, curves_of, steps_of
from research.atlas.table import Table
from research.judge.halving import halve

SIZES: dict[str, tuple[float, float] | None] = {"own": None, "100M": (1e8, 1.0)}  # parameters and seconds of a step
FIXED = "diloco:H=30"
PILOT = 0.1  # of DDP's steps: what a pilot may train, summed over methods
FAR = 0.2  # a choice that takes more than this share longer is far off
TIE = 0.02  # methods whose times differ by at most this share are tied
TRACE_S, TRACE_PART_S = 4 * 3600.0, 600.0
RESAMPLES, INTERVAL = 2000, 0.95
ROUNDING = 1e-9
WORST = 10.0  # for the best single method: larger times over the best time count as this multiple


@dataclass(frozen=True)
class Site:
    """A network with its nodes' speeds.

    Attributes:
        network: the network that an adviser sees. If its rates change, this network has the first rates.
        later: further networks with the seconds from which they hold.
        speeds: the nodes' speeds, or None for equal speeds.
    """

    network: Network
    later: tuple[tuple[float, Network], ...] = ()
    speeds: tuple[float, ...] | None = None


def sites(nodes: int) -> dict[str, Site]:
    """Return the twelve networks, by name.

    The trace is drawn: for each 10 minutes, a rate from 20 Mbit/s to 1 Gbit/s, uniform in its logarithm.
    """
    rng = numpy_generator(0, "judge trace")
    rates = [f"{rate:.0f}Mbps" for rate in 20 * 50 ** rng.random(round(TRACE_S / TRACE_PART_S))]
    traced = [Network(rate, "10ms") for rate in rates]
    halves = [nodes // 2, nodes - nodes // 2]
    return {
        "Wi-Fi": Site(Network.of("wifi")),
        "1 Gbit/s": Site(Network.of("lan-1g")),
        "10 Gbit/s": Site(Network.of("lan-10g")),
        "50 Mbit/s": Site(Network("50Mbps", "10ms")),
        "200 Mbit/s": Site(Network("200Mbps", "10ms")),
        "50 Mbit/s, 80 ms": Site(Network("50Mbps", "80ms")),
        "1 Gbit/s, 80 ms": Site(Network("1Gbps", "80ms")),
        "one slow line": Site(Network([*["1Gbps"] * (nodes - 1), "50Mbps"], "1ms")),
        "one slow computer": Site(Network.of("lan-1g"), speeds=(*[1.0] * (nodes - 1), 0.25)),
        "20 up, 100 down": Site(Network.of("home")),
        "two islands": Site(Network.groups(halves, inside="10Gbps,50us", between="100Mbps,20ms")),
        "4-hour trace": Site(traced[0], tuple((k * TRACE_PART_S, net) for k, net in enumerate(traced) if k)),
    }


@dataclass(frozen=True)
class Question:
    """The facts that an adviser may know.

    Attributes:
        parameters, nodes, step_s: the model's size, the number of nodes, and each node's seconds per step.
        site: the network.
        level: the target is DDP's final loss times this number.
        steps: DDP's steps.
        seconds_per_step: dict from each candidate to its seconds per step, by formula.
        earlier: steps to the target at places with other tasks, as in `beliefs_of`.
        known: the steps of earlier runs that ExoGym ships, without runs of the same task.
        alike: dict from each earlier place to its weight, by the label skew of its data and of the judged place's data.
        pilot: each candidate's curve for one seed. A pilot may read the curve's beginning.
    """

    parameters: float
    nodes: int
    step_s: tuple[float, ...]
    site: Site
    level: float
    steps: int
    seconds_per_step: Mapping[str, float]
    earlier: Earlier
    known: Earlier
    alike: Mapping[str, float]
    pilot: Mapping[str, Curve]

    @property
    def periods(self) -> dict[str, int]:
        """A dict from each candidate to the steps between its synchronizations."""
        return {method: period_of(plan_of(method, self.parameters, self.nodes)) for method in self.seconds_per_step}

    @property
    def alone_s(self) -> float:
        """Seconds in which the fastest node alone computes a step of all nodes."""
        return self.nodes * min(self.step_s)


@dataclass(frozen=True)
class Advised:
    """An adviser's answer: a method, the seconds that finding it took, and its probability of being right if known."""

    method: str
    cost_s: float = 0.0
    sure: float | None = None


Adviser = Callable[[Question], Advised | None]  # None: the adviser has no answer here


@dataclass(frozen=True)
class Case:
    """A place, a network, a size and a level.

    `steps` and `seconds` are dicts from each candidate to its steps and seconds to the target. They are infinite if the
    candidate never reaches the target.
    """

    place: str
    network: str
    size: str
    level: float
    question: Question = field(repr=False)
    steps: Mapping[str, float] = field(repr=False)
    seconds: Mapping[str, float] = field(repr=False)

    @property
    def best(self) -> str:
        return min(self.seconds, key=lambda method: self.seconds[method])

    @property
    def is_tied(self) -> bool:
        """Whether the second-best method takes at most 2 % longer than the best method."""
        first, *rest = sorted(self.seconds.values())
        return bool(rest) and rest[0] <= (1 + TIE) * first

    @property
    def is_slow(self) -> bool:
        """Whether the fastest node alone reaches the target sooner than every candidate, in DDP's number of steps."""
        return self.question.alone_s * self.steps[REFERENCE] < self.seconds[self.best]

    def regret(self, advised: Advised, with_cost: bool = False) -> float:
        return (self.seconds[advised.method] + with_cost * advised.cost_s) / self.seconds[self.best] - 1


def cases_of(table: Table, prior: Table | None = None) -> list[Case]:
    """Return all cases of a table.

    Args:
        prior: the table with earlier runs; by default the judged table. In both, places with the judged place's task do
            not count.

    Raises:
        ArgumentError: no place of the table has DDP and another method with a formula.
    """
    before = table if prior is None else prior
    earlier = {level: steps_of(before, level) for level in LEVELS}
    truth = {level: steps_of(table, level) for level in LEVELS}
    skews = {place: each.get("skew") for place, each in before.places.items()} | known_skews()
    found = []
    for place in sorted(truth[LEVELS[0]]):
        ours = {p: steps for p, steps in known().items() if task_of(p) != task_of(place)}
        about, first = table.places[place], curves_of(table, place, seeds=1)
        alike = likeness(about.get("skew"), skews)
        for network, site in sites(about["nodes"]).items():
            for size, given in SIZES.items():
                parameters, step_s = (_own_size(about), about["step_s"]) if given is None else given
                each_s = tuple(step_s / speed for speed in site.speeds or (1.0,) * about["nodes"])
                speeds = _seconds_per_step(parameters, each_s, site, list(truth[LEVELS[0]][place]))
                for level in LEVELS:
                    others = {p: steps for p, steps in earlier[level].items() if task_of(p) != task_of(place)}
                    now = {method: pace[0][1] for method, pace in speeds.items()}
                    question = Question(
                        parameters, about["nodes"], each_s, site, level, round(SHARE * about["steps"]), now, others,
                        ours, alike, {method: first[method] for method in now},
                    )  # fmt: skip
                    steps = truth[level][place]
                    seconds = {method: seconds_until(steps[method], pace) for method, pace in speeds.items()}
                    found.append(Case(place, network, size, level, question, steps, seconds))
    if not any(len(case.seconds) > 1 for case in found):
        raise ArgumentError(f"{table.path} has no place with ddp and another method that can be judged")
    return found


Pace = Sequence[tuple[float, float]]  # (second from which it holds, seconds per step)


def _seconds_per_step(
    parameters: float, step_s: tuple[float, ...], site: Site, methods: Sequence[str]
) -> dict[str, Pace]:
    """Return each method's seconds per step as time goes on. Methods without a formula are left out."""
    changes = [(0.0, site.network), *site.later]
    paces: dict[str, Pace] = {}
    for method in methods:
        try:
            paces[method] = [(start_s, _step_s(parameters, step_s, net, method)) for start_s, net in changes]
        except ArgumentError:
            continue
    return paces


def _own_size(about: Mapping[str, Any]) -> float:
    """Return the size of a place's model: with the parameters' shapes, if the table has them."""
    return ModelSize.of(about["shapes"]) if "shapes" in about else float(about["parameters"])


def _step_s(parameters: float, step_s: tuple[float, ...], network: Network, method: str) -> float:
    advice = advise(
        parameters=parameters, num_nodes=len(step_s), network=network, step_seconds=list(step_s), strategies=[method],
        algorithm="recorded",
    )  # fmt: skip
    return advice.rows[0].seconds_per_step


def seconds_until(steps: float, pace: Pace) -> float:
    """Return the seconds of a number of steps, if the seconds per step change over time.

    >>> seconds_until(10, [(0.0, 1.0)]), seconds_until(10, [(0.0, 1.0), (4.0, 2.0)])
    (10.0, 16.0)
    """
    left = steps
    for (start_s, step_s), (end_s, _) in zip(pace, [*pace[1:], (math.inf, 0.0)], strict=True):
        if start_s + left * step_s <= end_s:
            return start_s + left * step_s
        left -= (end_s - start_s) / step_s
    return math.inf


# ---------------------------------------------------------------- advisers


def by_utilization(question: Question) -> Advised:
    """Advise the strategy that communicates most while the slowest node computes for 90 % of the time."""
    advice = advise(
        parameters=question.parameters, num_nodes=question.nodes, network=question.site.network,
        step_seconds=list(question.step_s), strategies=list(question.seconds_per_step),
    )  # fmt: skip
    able = [row for row in advice.rows if row.can_train]
    busy = [row for row in able if row.keeps_up]
    if not busy:
        return Advised(min(able, key=lambda row: row.seconds_per_step).strategy)
    return Advised(min(busy, key=lambda row: (row.couples_every, -row.tx_bytes_per_step)).strategy)


def by_rule(question: Question) -> Advised:
    """Advise by formula and by the rule of thumb, without earlier runs."""
    return _believing(question, {})


def by_advise(question: Question) -> Advised:
    """Advise what `exogym advise` recommends: by formula, the rule of thumb and the runs that ExoGym ships."""
    return _believing(question, question.known)


def by_table(question: Question) -> Advised:
    """Advise by formula and by the beliefs from the table's other tasks."""
    return _believing(question, question.earlier)


def _believing(question: Question, earlier: Earlier) -> Advised:
    beliefs = beliefs_of(question.periods, question.steps, earlier, question.alike)
    seconds = question.seconds_per_step
    able = {method: s for method, s in seconds.items() if method != REFERENCE or s <= question.alone_s}
    choice = chosen(able or seconds, beliefs)
    return Advised(choice.method, sure=choice.sure)


def believed(question: Question) -> dict[str, Belief]:
    """Return the beliefs about all candidates that `exogym advise` has."""
    return beliefs_of(question.periods, question.steps, question.known, question.alike)


def by_pilot(question: Question) -> Advised:
    """Advise after a pilot of a tenth of DDP's steps, without earlier runs."""
    return _after_pilot(question, {})


def by_pilot_and_known(question: Question) -> Advised:
    """Advise what `exogym advise --pilot 0.1` recommended, after a pilot that starts from ExoGym's runs."""
    return _after_pilot(question, question.known)


def by_pilot_and_table(question: Question) -> Advised:
    """Advise after a pilot that begins with the beliefs from the table's other tasks."""
    return _after_pilot(question, question.earlier)


def _after_pilot(question: Question, earlier: Earlier) -> Advised:
    """Replay a pilot. It computes all nodes in turn on one of the fastest machines, without a network."""

    def train(method: str, until: int) -> list[tuple[float, float]]:
        curve = question.pilot[method]
        seen = [(s, loss) for s, loss in zip(curve.steps, curve.losses, strict=True) if s < until]
        return [*seen, (float(until), float(np.interp(until, curve.steps, curve.losses)))]

    beliefs = beliefs_of(question.periods, question.steps, earlier, question.alike)
    found = halve(
        train, question.seconds_per_step, beliefs, steps=question.steps, budget=int(PILOT * question.steps),
        periods=question.periods,
    )  # fmt: skip
    cost_s = found.spent * question.nodes * min(question.step_s)
    return Advised(found.choice.method, cost_s, found.choice.sure)


def by_one_seed(question: Question) -> Advised:
    """Advise the method that is fastest in one seed, after training all candidates to the end of the table's steps."""
    target = question.level * question.pilot[REFERENCE].at(SHARE)
    times = {m: s * question.pilot[m].until(target) for m, s in question.seconds_per_step.items()}
    steps = sum(question.pilot[method].steps[-1] for method in times)
    return Advised(min(times, key=lambda m: times[m]), steps * question.nodes * min(question.step_s))


def always(method: str) -> Adviser:
    """Return the adviser that always advises a method."""
    return lambda question: Advised(method) if method in question.seconds_per_step else None


ADVISERS: dict[str, Adviser] = {
    "advise": by_advise, "rule of thumb": by_rule, "table": by_table, "pilot": by_pilot,
    "advise --pilot 0.1": by_pilot_and_known, "pilot and table": by_pilot_and_table,
    "90 % utilization": by_utilization, f"always {FIXED}": always(FIXED), "all, one seed": by_one_seed,
}  # fmt: skip


# ---------------------------------------------------------------- results


@dataclass(frozen=True)
class Score:
    """How good an adviser is.

    Attributes:
        cases: number of cases for which the adviser has an answer.
        best: share of cases in which it advised the best method.
        tied: share of cases in which it advised another method that takes at most 2 % longer.
        never: share of cases in which the advised method never reaches the target.
        median, high: the median and the 95th percentile of the regret.
        median_range, high_range: intervals with 95 % of these numbers if tasks are resampled.
        cost: median share by which the search for the method adds to the best method's time.
        median_with_cost, high_with_cost: the same percentiles, if the time of the search counts.
        sure: mean probability of being right that the adviser stated, or None.
        right: share of cases in which the advised method took at most 5 % longer than the best.
    """

    cases: int
    best: float
    tied: float
    never: float
    median: float
    high: float
    median_range: tuple[float, float]
    high_range: tuple[float, float]
    cost: float
    median_with_cost: float
    high_with_cost: float
    sure: float | None
    right: float


@dataclass(frozen=True)
class Judgement:
    """All cases, and each adviser's answers in the order of the cases.

    Attributes:
        hindsight: the best single method in hindsight: it has the smallest mean logarithm of its time over the best
            time. The adviser "best single method" always advises this method.
    """

    cases: Sequence[Case]
    answers: Mapping[str, Sequence[Advised | None]]
    hindsight: str

    @cached_property
    def scores(self) -> dict[str, Score | None]:
        """Each adviser's score, or None if it has no answer in any case."""
        answered = {adviser: self.answered(adviser) for adviser in self.answers}
        return {adviser: _score(pairs) if pairs else None for adviser, pairs in answered.items()}

    def answered(self, adviser: str) -> list[tuple[Case, Advised]]:
        """Return an adviser's answers, each with its case."""
        pairs = zip(self.cases, self.answers[adviser], strict=True)
        return [(case, answer) for case, answer in pairs if answer is not None]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(task_of(case.place) for case in self.cases))

    @property
    def candidates(self) -> list[str]:
        """All methods among which advisers choose."""
        return list(dict.fromkeys(method for case in self.cases for method in case.seconds))

    @property
    def tied(self) -> int:
        """The number of cases in which the two best methods are tied."""
        return sum(case.is_tied for case in self.cases)

    @property
    def slow(self) -> int:
        """The number of cases in which the fastest node alone is faster than every candidate."""
        return sum(case.is_slow for case in self.cases)


def judge(cases: Sequence[Case], advisers: Mapping[str, Adviser] = ADVISERS) -> Judgement:
    """Ask all advisers in all cases."""
    answers: dict[str, Sequence[Advised | None]] = {
        name: [adviser(case.question) for case in cases] for name, adviser in advisers.items()
    }
    everywhere = [m for m in cases[0].seconds if all(m in case.seconds for case in cases)]
    lost = {m: math.fsum(math.log(min(c.regret(Advised(m)) + 1, WORST)) for c in cases) for m in everywhere}
    hindsight = min(lost, key=lambda method: lost[method])
    answers["best single method"] = [Advised(hindsight) for _ in cases]
    return Judgement(cases, answers, hindsight)


def _score(chosen: Sequence[tuple[Case, Advised]]) -> Score:
    regrets = np.array([case.regret(answer) for case, answer in chosen])
    costly = np.array([case.regret(answer, with_cost=True) for case, answer in chosen])
    costs = np.array([answer.cost_s / case.seconds[case.best] for case, answer in chosen])
    best = np.array([answer.method == case.best for case, answer in chosen])
    sure = [answer.sure for _, answer in chosen if answer.sure is not None]
    ends = resampled(chosen, percentiles)
    median, high = percentiles(regrets)
    median_with_cost, high_with_cost = percentiles(costly)
    return Score(
        len(chosen), float(best.mean()), float((~best & (regrets <= TIE)).mean()), float(np.isinf(regrets).mean()),
        median, high, (ends[0][0], ends[1][0]), (ends[0][1], ends[1][1]),
        float(np.median(costs)), median_with_cost, high_with_cost, float(np.mean(sure)) if sure else None,
        float((regrets <= 0.05).mean()),
    )  # fmt: skip


def resampled(
    chosen: Sequence[tuple[Case, Advised]], numbers_of: Callable[[np.ndarray], tuple[float, ...]]
) -> list[tuple[float, ...]]:
    """Return the low and the high ends of the 95 % of resamples of the tasks, for each number.

    Args:
        numbers_of: function from regrets to numbers, such as `percentiles`.
    """
    regrets = np.array([case.regret(answer) for case, answer in chosen])
    tasks: dict[str, list[int]] = {}
    for k, (case, _) in enumerate(chosen):
        tasks.setdefault(task_of(case.place), []).append(k)
    groups, rng = [np.array(group) for group in tasks.values()], numpy_generator(0, "judge tasks")
    drawn = np.array([
        numbers_of(regrets[np.concatenate([groups[k] for k in rng.integers(len(groups), size=len(groups))])])
        for _ in range(RESAMPLES)
    ])  # fmt: skip
    return [tuple(map(float, end)) for end in _quantiles(drawn, (1 - INTERVAL) / 2, (1 + INTERVAL) / 2)]


def shares(regrets: np.ndarray) -> tuple[float, float, float]:
    """Return the shares of regrets up to `TIE`, over 20 %, and infinite."""
    return float((regrets <= TIE).mean()), float((regrets > FAR).mean()), float(np.isinf(regrets).mean())


def percentiles(regrets: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Return the median and the 95th percentile. Both are among the regrets."""
    median, high = _quantiles(regrets, 0.5, 0.95)
    return float(median), float(high)


def _quantiles(values: Sequence[float] | np.ndarray, *shares: float) -> np.ndarray:
    """Return quantiles over the first axis. They are among the values, so infinite values do no harm."""
    ordered = np.sort(values, axis=0)
    return ordered[[math.ceil(share * len(ordered) - ROUNDING) - 1 for share in shares]]
