"""Planned faults: nodes that drop out and return, slow nodes, lost synchronizations.

Whether a node is present depends only on (step, node), and not on the placement or a resume. Steps are the run's steps,
counted from 1.

    absent  the node neither computes nor communicates; when it returns, it copies another node's parameters
    lost    the node misses the synchronization after this step: it keeps its own parameters and continues
    slow    the node takes only a share of the local steps, and then synchronizes its parameters as usual
    bad     the node sends wrong updates to the other nodes (`exogym.strategy.updates`); its own training is correct

`Outages` are unplanned: a run on real hosts records when each node was absent, and a simulation with these outages as
`Faults(absent=..., forget=True)` repeats the run.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from exogym.core.base.rng import numpy_generator
from exogym.core.combinations import check
from exogym.errors import ArgumentError, as_call, check_choice, check_count, check_number, checked
from exogym.faults.availability import Availability, Trace

NEVER = 2**62  # a step after all others
ATTACKS = {"sign_flip": 1, "noise": 10, "scale": 10}  # each with its factor
FIRST_HORIZON = 1024


class Faults:
    """Planned faults of nodes: a schedule, random faults with a seed, or both.

    Args:
        absent: {node: [(first, last), ...]}, each node's outages. The node is absent from step `first` on and present
            again at step `last`, or never if last=None.
        drop_rate: the probability per step that a present node drops out, independently of others. With m =
            `mean_outage_steps`, a node is absent in a mean share drop_rate m / (1 + drop_rate m) of the steps.
        mean_outage_steps: the mean length of random outages in steps, at least 1. Lengths are geometric.
        lost: {node: steps}, the steps whose synchronization the node misses.
        lost_rate: the probability that a node misses a synchronization.
        slow: {node: share}, the fraction of its local steps that the node takes, above 0 and at most 1. It takes
            floor(share * n) of the first n steps in which it is present.
        forget: if True, a returning node has lost its state and copies parameters, the inner optimizer's state and the
            strategy's state from another node. If False, the node was only unreachable and copies only parameters.
        seed: seed for the random faults, the choice of bad nodes, and the noise that bad nodes send.
        bad_nodes: a list of the nodes that send wrong updates, or their share of all nodes, a number below 1, which is
            rounded to whole nodes drawn with the seed.
        attack: the kind of wrong updates, "sign_flip", "noise" or "scale".
        trace: when each client is available and how fast it is: a file, `Trace` or `Devices`
            (`exogym.faults.availability`). It needs a strategy that samples clients, and excludes planned faults.
        attack_factor: c, over 0. The wrong update is the correct one times -c ("sign_flip"; default 1), noise with c
            times its norm ("noise"; default 10), or the correct one times c ("scale"; default 10).

    Raises:
        ArgumentError: a node, step, rate or share is impossible.

    >>> faults = Faults(absent={3: [(100, 200)], 1: [(150, None)]}, slow={2: 0.5})
    >>> attendance = faults.bind(num_nodes=4)
    >>> attendance.up(99), attendance.up(100), attendance.up(150), attendance.up(200)
    ([0, 1, 2, 3], [0, 1, 2], [0, 2], [0, 2, 3])
    >>> attendance.steps_between(90, 110).tolist()
    [20, 20, 10, 9]
    """

    @checked
    def __init__(
        self,
        absent: Mapping[int, Sequence[tuple[int, int | None]]] | None = None,
        *,
        drop_rate: float = 0.0,
        mean_outage_steps: float = 10.0,
        lost: Mapping[int, Sequence[int]] | None = None,
        lost_rate: float = 0.0,
        slow: Mapping[int, float] | None = None,
        forget: bool = False,
        seed: int = 0,
        bad_nodes: float | Sequence[int] = (),
        attack: str = "sign_flip",
        attack_factor: float | None = None,
        trace: str | os.PathLike[str] | Availability | None = None,
    ):
        for name, given in (("absent", absent), ("lost", lost), ("slow", slow)):
            if not isinstance(given, Mapping | None):
                raise ArgumentError(f"{name}={given!r} must map nodes to values, such as {_EXAMPLES[name]}")
            for node in given or {}:
                check_count(f"each node of {name}", node, least=0)
        for name, rate in (("drop_rate", drop_rate), ("lost_rate", lost_rate)):
            check_number(name, rate, least=0, most=1)
        check_number("mean_outage_steps", mean_outage_steps, least=1, under=NEVER)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ArgumentError(f"seed={seed!r} must be a whole number")
        self.absent = {node: _intervals(node, given) for node, given in (absent or {}).items()}
        self.lost = {node: _steps(node, given) for node, given in (lost or {}).items()}
        for node, share in (slow or {}).items():
            check_number(f"slow={{{node}: ...}}: the share of its steps that a node takes", share, over=0, most=1)
        self.slow = dict(slow or {})
        self.drop_rate, self.mean_outage_steps = drop_rate, mean_outage_steps
        self.lost_rate, self.seed = lost_rate, seed
        if not isinstance(forget, bool):
            raise ArgumentError(f"forget={forget!r} must be True or False")
        self.forget = forget
        if isinstance(bad_nodes, list | tuple | range):
            for node in bad_nodes:
                check_count("each of bad_nodes", node, least=0)
        else:
            check_number("bad_nodes", bad_nodes, least=0, under=1, more=": a share of the nodes, or a list of them")
        check_choice("attack", attack, ATTACKS)
        if attack_factor is not None:
            check_number("attack_factor", attack_factor, over=0)
        self.bad_nodes, self.attack = bad_nodes, attack
        self.attack_factor = float(ATTACKS[attack] if attack_factor is None else attack_factor)

        self.trace = Trace(trace) if isinstance(trace, str | os.PathLike) else trace
        if self.trace is not None:
            if not isinstance(self.trace, Availability):
                raise ArgumentError(f"trace={trace!r} must be a CSV file, or a Trace or Devices of exogym.faults")
            others: dict[str, Any] = {"absent": absent, "lost": lost, "slow": slow, "bad_nodes": bad_nodes}
            others |= {"drop_rate": drop_rate, "lost_rate": lost_rate, "forget": forget}
            planned = ", ".join(f"{name}={value!r}" for name, value in others.items() if value)
            check({"trace": f"faults with trace={trace!r}"} | ({"planned faults": planned} if planned else {}))

    def __repr__(self) -> str:
        return as_call(self)

    def bad(self, num_nodes: int) -> list[int]:
        """Return the sorted ranks of the bad nodes among `num_nodes` nodes, the same in every step.

        Raises:
            ArgumentError: a node in `bad_nodes` does not exist.

        >>> Faults(bad_nodes=0.25).bad(8), Faults(bad_nodes=[5, 1]).bad(8)
        ([0, 7], [1, 5])
        """
        if isinstance(self.bad_nodes, int | float):
            drawn = numpy_generator(self.seed, "bad").permutation(num_nodes)
            return sorted(drawn[: round(self.bad_nodes * num_nodes)].tolist())
        _check_nodes("bad_nodes", self.bad_nodes, num_nodes)
        return sorted(set(self.bad_nodes))

    def bind(self, num_nodes: int, lockstep: bool = False, shares: Sequence[Fraction] = ()) -> Attendance:
        """Return the `Attendance` of `num_nodes` nodes: which of them are present at each step.

        Args:
            shares: the share of the steps that each node takes, which `slow` multiplies.
            lockstep: whether all nodes take every step together because the strategy averages gradients. A node that
                loses a synchronization then misses the step, and no node can be slow.

        Raises:
            ArgumentError: a node does not exist, or a node is slow in lockstep.
        """
        check_count("num_nodes", num_nodes)
        for name in _EXAMPLES:
            _check_nodes(name, getattr(self, name), num_nodes)
        if lockstep and any(share < 1 for share in self.slow.values()):
            together = {"gradients at every step": "a strategy that takes every step of all nodes together"}
            check({"slow": f"faults with slow={self.slow!r}"} | together)
        return Attendance(self, num_nodes, lockstep, shares)


class Attendance:
    """Which nodes are present at each step of a run, as `Faults.bind` returns it.

    Every method's result depends only on its arguments; stored values are a cache.
    """

    def __init__(self, faults: Faults, num_nodes: int, lockstep: bool, shares: Sequence[Fraction] = ()):
        self.faults, self.num_nodes, self.lockstep = faults, num_nodes, lockstep
        self.reread()
        slow = {node: Fraction(str(share)) for node, share in faults.slow.items()}
        taken = dict(enumerate(shares))
        both = {node: slow.get(node, Fraction(1)) * taken.get(node, 1) for node in slow | taken}
        self._shares = {node: share for node, share in both.items() if share < 1}
        self._loses = bool(faults.lost) or faults.lost_rate > 0

    def reread(self) -> None:
        """Clear the cache after the schedule has changed."""
        self._outages = [_NodeOutages(self.faults, node) for node in range(self.num_nodes)]
        self._span, self._attending = (
            (0, 1),
            list(range(self.num_nodes)),
        )  # present from a step up to another

    def up(self, step: int) -> list[int]:
        """Return the sorted ranks of the nodes that compute in step `step`, or all nodes before step 1."""
        nodes = self._not_away(step)
        if self.lockstep and self._loses:
            lost = self._losers(step)
            return [node for node in nodes if node not in lost]
        return list(nodes)

    def present(self, step: int) -> list[int]:
        """Return the sorted ranks of the nodes that communicate after step `step`.

        The list is empty if all nodes are absent or lose the synchronization.
        """
        nodes = self.up(step)
        if self.lockstep or not self._loses or not nodes:
            return nodes
        lost = self._losers(step)
        return [node for node in nodes if node not in lost]

    def returning(self, step: int) -> tuple[list[int], int | None]:
        """Return the nodes that return at step `step`, and the node whose state they copy.

        Returning nodes copy the state of the lowest-ranked node that was also present in the previous step. If there is
        none, they copy the returning node with the shortest absence (the lowest rank if several are equal). If no node
        returns, the result is ([], None).
        """
        now, before = self.up(step), set(self.up(step - 1))
        back = [node for node in now if node not in before]
        if not back:
            return [], None
        stayed = [node for node in now if node in before]
        if not stayed:
            seen = {node: self._last_up(node, step) for node in now}
            stayed = [node for node in now if seen[node] == max(seen.values())]
        return back, stayed[0]

    def next_change(self, step: int) -> int:
        """Return the last step up to which the same nodes are present as at `step + 1`."""
        if self.lockstep and self._loses:
            return step + 1
        self._not_away(step + 1)
        return self._span[1] - 1

    def steps_between(
        self, first: int, last: int, work: Callable[[int, int], np.ndarray | None] | None = None
    ) -> np.ndarray:
        """Return the number of local steps that each node takes in the run's steps first + 1 to last, (N,).

        A node takes a step only if both the faults and the strategy allow it. The result is additive: steps_between(a,
        b) + steps_between(b, c) == steps_between(a, c).

        Args:
            work: a function of (first, last) that returns the strategy's local steps of each node, (N,), which must be
                additive, too. If it is None or returns None, the strategy takes every step.
        """
        if self.lockstep and self._loses:
            return sum((self._flags(step) for step in range(first + 1, last + 1)), np.zeros(self.num_nodes, np.int64))
        counts = np.array([self._taken(node, last) - self._taken(node, first) for node in range(self.num_nodes)])
        asked = None if work is None else work(first, last)
        if work is None or asked is None:
            return counts
        if ((counts == 0) | (counts == last - first)).all():
            return np.where(counts == 0, 0, asked)
        total = np.zeros_like(counts)
        for step in range(first + 1, last + 1):
            wanted = work(step - 1, step)
            total += (
                self.steps_between(step - 1, step) if wanted is None else self.steps_between(step - 1, step) * wanted
            )
        return total

    def _not_away(self, step: int) -> list[int]:
        if not self._span[0] <= step < self._span[1]:
            states = [outages.state(step) for outages in self._outages]
            self._span = (max(begin for _, begin, _ in states), min(end for _, _, end in states))
            self._attending = [node for node, (away, _, _) in enumerate(states) if not away]
        return self._attending

    def _losers(self, step: int) -> set[int]:
        lost = {node for node, steps in self.faults.lost.items() if step in steps}
        if self.faults.lost_rate > 0 and step > 0:
            drawn = numpy_generator(self.faults.seed, "lost", step).random(self.num_nodes) < self.faults.lost_rate
            lost.update(np.flatnonzero(drawn).tolist())
        return lost

    def _flags(self, step: int) -> np.ndarray:
        flags = np.zeros(self.num_nodes, np.int64)
        flags[self.up(step)] = 1
        return flags

    def _taken(self, node: int, step: int) -> int:
        """Return the node's local steps among the first `step`: floor(share * steps while present)."""
        present = step - self._outages[node].steps_until(step)
        share = self._shares.get(node)
        return present if share is None else present * share.numerator // share.denominator

    def _last_up(self, node: int, step: int) -> int:
        """Return the last step before `step` at which the node was present, or 0 for before training."""
        while True:
            step -= 1
            away, begin, _ = self._outages[node].state(step)
            step = begin - 1 if away else step
            if step <= 0 or not (self.lockstep and self._loses and node in self._losers(step)):
                return max(step, 0)


class Outages(Faults):
    """A run's unplanned outages, recorded as they happen.

    A simulation with `Faults(absent=outages.as_absent(), forget=True)` repeats these outages.

    >>> outages = Outages()
    >>> attendance = outages.bind(num_nodes=3)
    >>> outages.note(100, [0, 2])  # node 1 is absent from step 101
    >>> outages.note(160, [0, 1, 2])
    >>> attendance.up(100), attendance.up(101), attendance.up(161), outages.as_absent()
    ([0, 1, 2], [0, 2], [0, 1, 2], {1: [(101, 161)]})
    """

    def __init__(self) -> None:
        super().__init__(forget=True)
        self._bound: list[Attendance] = []

    def bind(self, num_nodes: int, lockstep: bool = False, shares: Sequence[Fraction] = ()) -> Attendance:
        self._bound.append(super().bind(num_nodes, lockstep, shares))
        return self._bound[-1]

    def note(self, step: int, present: Collection[int]) -> None:
        """Record that only the nodes in `present` are present from step `step + 1` on.

        This replaces earlier records of these steps.
        """
        for attendance in self._bound:
            up = set(attendance.up(step + 1))
            for node in up - set(present):
                spans = self.absent.setdefault(node, [])
                first = spans.pop()[0] if spans and spans[-1][1] == step + 1 else step + 1  # it was about to return
                spans.append((first, NEVER))
            for node in set(present) - up:
                first, _ = self.absent[node].pop()
                if first <= step:
                    self.absent[node].append((first, step + 1))
            self.absent = {node: spans for node, spans in self.absent.items() if spans}
        self._clear_caches()

    def state(self) -> list[list[int]]:
        """Return [node, first, last] for each outage, for JSON."""
        return [[node, first, last] for node, spans in sorted(self.absent.items()) for first, last in spans]

    def load(self, state: Sequence[Sequence[int]]) -> None:
        """Replace the recorded outages by the outages in `state`, a result of the method `state`."""
        self.absent = {}
        for node, first, last in state:
            self.absent.setdefault(node, []).append((first, last))
        self._clear_caches()

    def as_absent(self) -> dict[int, list[tuple[int, int | None]]]:
        """Return the outages as for `Faults(absent=...)`, with (first, None) for an outage that has not ended."""
        return {
            node: [(first, None if last == NEVER else last) for first, last in spans]
            for node, spans in sorted(self.absent.items())
        }

    def _clear_caches(self) -> None:
        for attendance in self._bound:
            attendance.reread()


class _NodeOutages:
    """One node's outages, disjoint and in order: planned ones, and random ones drawn up to a growing horizon."""

    def __init__(self, faults: Faults, node: int):
        self.faults, self.node = faults, node
        self.horizon = 0
        self._learn(FIRST_HORIZON)

    def state(self, step: int) -> tuple[bool, int, int]:
        """Return whether the node is absent at `step`, and (first, end): the same holds from `first` to `end - 1`."""
        while True:
            self._learn(step)
            k = bisect_right(self.begins, step) - 1
            away = k >= 0 and step < self.ends[k]
            begin = self.begins[k] if away else self.ends[k] if k >= 0 else 0
            end = self.ends[k] if away else (*self.begins, NEVER)[k + 1]
            if end < self.horizon or self.horizon == NEVER or (away and end == NEVER):
                return away, begin, end
            self._learn(min(end, 2 * self.horizon))  # an outage that is not drawn yet may begin earlier

    def steps_until(self, step: int) -> int:
        """Return the number of steps among 1 to `step` in which the node was absent."""
        self._learn(step)
        k = bisect_right(self.begins, step) - 1
        return 0 if k < 0 else self.away_before[k] + min(self.ends[k], step + 1) - self.begins[k]

    def _learn(self, step: int) -> None:
        """Extend the list to all outages that begin at `step` or before."""
        if step < self.horizon:
            return
        self.horizon = min(2 * max(step, FIRST_HORIZON), NEVER) if self.faults.drop_rate > 0 else NEVER
        merged: list[list[int]] = []
        for begin, end in sorted(self.faults.absent.get(self.node, []) + self._drawn(self.horizon)):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
        self.begins, self.ends = [begin for begin, _ in merged], [end for _, end in merged]
        self.away_before = np.cumsum([0, *(end - begin for begin, end in merged)], dtype=object).tolist()

    def _drawn(self, horizon: int) -> list[tuple[int, int]]:
        """Draw the outages that begin before `horizon`, in order; a longer horizon continues the same list."""
        if self.faults.drop_rate == 0:
            return []
        g = numpy_generator(self.faults.seed, "outages", self.node)
        found: list[tuple[int, int]] = []
        at = 0  # the last step at which the node was present
        while (at := at + int(g.geometric(self.faults.drop_rate))) < horizon:
            end = at + int(g.geometric(1 / self.faults.mean_outage_steps))
            found.append((at, end))
            at = end
        return found


_EXAMPLES = {"absent": "{3: [(100, 200)]}", "lost": "{2: [100, 300]}", "slow": "{2: 0.5}"}


def _check_nodes(name: str, nodes: Iterable[int], num_nodes: int) -> None:
    for node in nodes:
        if node >= num_nodes:
            raise ArgumentError(
                f"Faults({name}=...) names node {node}, but num_nodes={num_nodes}: nodes are 0 to {num_nodes - 1}"
            )


def _intervals(node: int, given: Any) -> list[tuple[int, int]]:
    wanted = "a list of (first, back) steps such as [(100, 200)], absent from 100, back at 200; back=None: never"
    if not isinstance(given, list | tuple) or not all(isinstance(x, list | tuple) and len(x) == 2 for x in given):
        raise ArgumentError(f"absent={{{node}: {given!r}}} must be {wanted}")
    for first, last in given:
        check_count(f"first step of an outage of node {node}", first)
        if last is not None:
            check_count(f"step at which node {node} returns", last, least=first + 1)
    return [(first, NEVER if last is None else last) for first, last in given]


def _steps(node: int, given: Any) -> set[int]:
    if not isinstance(given, list | tuple | range):
        raise ArgumentError(f"lost={{{node}: {given!r}}} must be a list of steps, such as {_EXAMPLES['lost']}")
    for step in given:
        check_count(f"each step of lost={{{node}: ...}}", step)
    return set(given)
