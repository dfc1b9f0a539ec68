"""Planned faults: nodes that drop out and come back, slow nodes, lost synchronisations.

Who is there is a function of (step, node) alone: the same on every layout, with nothing to carry over a stop, however
training is cut into stretches. Steps are the fleet's, counted from 1.

    away    the node neither computes nor communicates; back, it takes the others' parameters
    lost    the synchronisation after that step passes the node by: it keeps its own parameters and goes on
    slow    the node takes only a share of the local steps, and takes part with what it has
    bad     the node brings wrong updates to the others (`exogym.strategy.updates`); its own training is right

`Outages` are the faults that nobody planned: a run on real hosts writes down who was away when, and the same written
into `Faults(absent=..., forget=True)` gives the same run in simulation.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from exogym.core.base.draws import numpy_generator
from exogym.core.combinations import check
from exogym.errors import ArgumentError, check_choice, check_count, check_number, checked
from exogym.faults.availability import Availability, Trace

NEVER = 2**62  # a step after all others
ATTACKS = {"sign_flip": 1, "noise": 10, "scale": 10}  # each with its factor
FIRST_HORIZON = 1024


class Faults:
    """What goes wrong in a run, as a schedule, as rates with a seed, or both.

    Args:
        absent: node to its outages [(first, last), ...]: it is away from step `first` on and there again at step
            `last`; None: it does not come back.
        drop_rate: probability per step that a node that is there drops out. Each node has its own chain, so it is
            away drop_rate m / (1 + drop_rate m) of the time, m being the mean outage.
        mean_outage_steps: m, at least 1; outages last a geometric number of steps.
        lost: node to the steps whose synchronisation it loses.
        lost_rate: probability that a node loses a synchronisation.
        slow: node to the share of its steps that it takes, over 0 and at most 1: floor(share * n) of the first n
            steps it is there for.
        forget: a node that comes back was started anew and remembers nothing: besides parameters it takes the state of
            its inner optimizer, and what its strategy keeps, from the node whose parameters it takes. Otherwise it was
            out of reach only.
        seed: of the rates, of which nodes are bad, and of their noise.
        bad_nodes: ids of the nodes that send wrong updates, or a share of all, rounded, drawn by the seed.
        attack: what they send: "sign_flip", "noise" or "scale".
        trace: whom a server can ask for a round, and how fast each is: a file, or a `Trace`, `Diurnal` or `Devices`
            (`exogym.faults.availability`). For strategies that sample clients; with none of the others.
        attack_factor: c, over 0: the update times -c, noise of c times its norm, or the update times c; by default 1
            for "sign_flip", and 10 for the others.

    Raises:
        ArgumentError: a node, step, rate or share that cannot be.

    >>> faults = Faults(absent={3: [(100, 200)], 1: [(150, None)]}, slow={2: 0.5})
    >>> there = faults.bind(num_nodes=4)
    >>> there.up(99), there.up(100), there.up(150), there.up(200)
    ([0, 1, 2, 3], [0, 1, 2], [0, 2], [0, 2, 3])
    >>> there.steps_between(90, 110).tolist()
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
                raise ArgumentError(f"{name}={given!r} must map nodes, as in {_EXAMPLES[name]}")
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
                raise ArgumentError(
                    f"trace={trace!r} must be a CSV or Parquet file, or a Trace, Diurnal or Devices of exogym.faults"
                )
            others: dict[str, Any] = {"absent": absent, "lost": lost, "slow": slow, "bad_nodes": bad_nodes}
            others |= {"drop_rate": drop_rate, "lost_rate": lost_rate, "forget": forget}
            planned = ", ".join(f"{name}={value!r}" for name, value in others.items() if value)
            check({"trace": f"faults with trace={trace!r}"} | ({"planned faults": planned} if planned else {}))

    def bad(self, num_nodes: int) -> list[int]:
        """Return the sorted ids of the bad nodes among `num_nodes`: the same in every step.

        Raises:
            ArgumentError: a node that the fleet does not have.

        >>> Faults(bad_nodes=0.25).bad(8), Faults(bad_nodes=[5, 1]).bad(8)
        ([0, 7], [1, 5])
        """
        if isinstance(self.bad_nodes, int | float):
            drawn = numpy_generator(self.seed, "bad").permutation(num_nodes)
            return sorted(drawn[: round(self.bad_nodes * num_nodes)].tolist())
        _check_nodes("bad_nodes", self.bad_nodes, num_nodes)
        return sorted(set(self.bad_nodes))

    def bind(self, num_nodes: int, lockstep: bool = False, shares: Sequence[Fraction] = ()) -> Attendance:
        """Return who is there in a fleet of `num_nodes`.

        Args:
            shares: of the steps that each node takes, beside `slow`, which then takes a share of that.
            lockstep: the nodes take every step together (gradients meet at each): then a lost synchronisation is
                a missed step, after which the node comes back, and no node can be slow.

        Raises:
            ArgumentError: a node that the fleet does not have; slow nodes in lockstep.
        """
        check_count("num_nodes", num_nodes)
        for name in _EXAMPLES:
            _check_nodes(name, getattr(self, name), num_nodes)
        if lockstep and any(share < 1 for share in self.slow.values()):
            together = {"gradients at every step": "a strategy that takes every step of all nodes together"}
            check({"slow": f"faults with slow={self.slow!r}"} | together)
        return Attendance(self, num_nodes, lockstep, shares)


class Attendance:
    """Who is there at each step of a run; made by `Faults.bind`.

    Every answer is a function of the arguments; what is kept here only saves asking twice.
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
        """Forget what was kept: the schedule has changed."""
        self._outages = [_Outages(self.faults, node) for node in range(self.num_nodes)]
        self._span, self._there = (0, 1), list(range(self.num_nodes))  # who is there from a step up to another

    def up(self, step: int) -> list[int]:
        """Return the sorted ids of the nodes that are there for step `step`; before step 1 all are. May be empty."""
        there = self._not_away(step)
        if self.lockstep and self._loses:
            lost = self._losers(step)
            return [node for node in there if node not in lost]
        return list(there)

    def present(self, step: int) -> list[int]:
        """Return the sorted ids of the nodes that take part in the communication after step `step`.

        Empty where all are away or lose it: then nobody communicates.
        """
        there = self.up(step)
        if self.lockstep or not self._loses or not there:
            return there
        lost = self._losers(step)
        return [node for node in there if node not in lost]

    def returning(self, step: int) -> tuple[list[int], int | None]:
        """Return the nodes that are there at step `step` and were not at the step before, and whose state they take.

        That is the lowest id of those who stayed; where nobody stayed, of those now there who were last there before
        (it may be one of the returning nodes). ([], None) where nobody returns.
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
        """Return the last step for which the same nodes are there as for step `step + 1`; a stretch ends there."""
        if self.lockstep and self._loses:
            return step + 1
        self._not_away(step + 1)
        return self._span[1] - 1

    def steps_between(
        self, first: int, last: int, work: Callable[[int, int], np.ndarray | None] | None = None
    ) -> np.ndarray:
        """Return (N,) local steps that each node takes while the fleet goes from step `first` to `last`.

        Additive: what is taken from a to b and from b to c is what is taken from a to c. `work(first, last)` is what
        the strategy asks of each node, additive too (None: every step); a node takes the steps that both give it.
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
            self._there = [node for node, (away, _, _) in enumerate(states) if not away]
        return self._there

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
        """Local steps of the node's first `step` steps: floor(share * those it was there for)."""
        there = step - self._outages[node].steps_until(step)
        share = self._shares.get(node)
        return there if share is None else there * share.numerator // share.denominator

    def _last_up(self, node: int, step: int) -> int:
        """The last step before `step` at which the node was there; 0: before training."""
        while True:
            step -= 1
            away, begin, _ = self._outages[node].state(step)
            step = begin - 1 if away else step
            if step <= 0 or not (self.lockstep and self._loses and node in self._losers(step)):
                return max(step, 0)


class Outages(Faults):
    """The outages of a run as they happen; `Faults(absent=outages.as_absent(), forget=True)` says the same.

    >>> outages = Outages()
    >>> there = outages.bind(num_nodes=3)
    >>> outages.note(100, [0, 2])  # node 1 is away from step 101 on
    >>> outages.note(160, [0, 1, 2])
    >>> there.up(100), there.up(101), there.up(161), outages.as_absent()
    ([0, 1, 2], [0, 2], [0, 1, 2], {1: [(101, 161)]})
    """

    def __init__(self) -> None:
        super().__init__(forget=True)
        self._bound: list[Attendance] = []

    def bind(self, num_nodes: int, lockstep: bool = False, shares: Sequence[Fraction] = ()) -> Attendance:
        self._bound.append(super().bind(num_nodes, lockstep, shares))
        return self._bound[-1]

    def note(self, step: int, present: Collection[int]) -> None:
        """From step `step + 1` on the nodes `present` are there, and no others, whatever was noted for it before."""
        for there in self._bound:
            up = set(there.up(step + 1))
            for node in up - set(present):
                spans = self.absent.setdefault(node, [])
                first = spans.pop()[0] if spans and spans[-1][1] == step + 1 else step + 1  # it was to return just now
                spans.append((first, NEVER))
            for node in set(present) - up:
                first, _ = self.absent[node].pop()
                if first <= step:
                    self.absent[node].append((first, step + 1))
            self.absent = {node: spans for node, spans in self.absent.items() if spans}
        self._tell()

    def state(self) -> list[list[int]]:
        """Return [node, first, last] of each outage, as JSON."""
        return [[node, first, last] for node, spans in sorted(self.absent.items()) for first, last in spans]

    def load(self, state: Sequence[Sequence[int]]) -> None:
        """Take over what `state` returned."""
        self.absent = {}
        for node, first, last in state:
            self.absent.setdefault(node, []).append((first, last))
        self._tell()

    def as_absent(self) -> dict[int, list[tuple[int, int | None]]]:
        """Return what `Faults(absent=...)` takes, None standing for an outage that has not ended."""
        return {
            node: [(first, None if last == NEVER else last) for first, last in spans]
            for node, spans in sorted(self.absent.items())
        }

    def _tell(self) -> None:
        for there in self._bound:
            there.reread()


class _Outages:
    """The outages of one node, disjoint and in order: the planned ones, and those drawn up to a horizon that grows."""

    def __init__(self, faults: Faults, node: int):
        self.faults, self.node = faults, node
        self.horizon = 0
        self._learn(FIRST_HORIZON)

    def state(self, step: int) -> tuple[bool, int, int]:
        """Return (whether the node is away at `step`, the first step of that, the first step after that)."""
        while True:
            self._learn(step)
            k = bisect_right(self.begins, step) - 1
            away = k >= 0 and step < self.ends[k]
            begin = self.begins[k] if away else self.ends[k] if k >= 0 else 0
            end = self.ends[k] if away else (*self.begins, NEVER)[k + 1]
            if end < self.horizon or self.horizon == NEVER or (away and end == NEVER):
                return away, begin, end
            self._learn(min(end, 2 * self.horizon))  # an outage that is not drawn yet may begin before that

    def steps_until(self, step: int) -> int:
        """Return how many of the steps 1 to `step` the node was away."""
        self._learn(step)
        k = bisect_right(self.begins, step) - 1
        return 0 if k < 0 else self.away_before[k] + min(self.ends[k], step + 1) - self.begins[k]

    def _learn(self, step: int) -> None:
        """Know all outages that begin at `step` or before."""
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
        """Draw the outages that begin before `horizon`, one after the other; a longer horizon adds to the same list."""
        if self.faults.drop_rate == 0:
            return []
        g = numpy_generator(self.faults.seed, "outages", self.node)
        found: list[tuple[int, int]] = []
        at = 0  # the last step at which it was there
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
                f"faults name node {node} in {name}, but num_nodes={num_nodes}: nodes are 0 to {num_nodes - 1}"
            )


def _intervals(node: int, given: Any) -> list[tuple[int, int]]:
    wanted = "a list of (first, last) steps, last being None where the node does not come back, as in [(100, 200)]"
    if not isinstance(given, list | tuple) or not all(isinstance(x, list | tuple) and len(x) == 2 for x in given):
        raise ArgumentError(f"absent={{{node}: {given!r}}} must be {wanted}")
    for first, last in given:
        check_count(f"first step of an outage of node {node}", first)
        if last is not None:
            check_count(f"step at which node {node} is back", last, least=first + 1)
    return [(first, NEVER if last is None else last) for first, last in given]


def _steps(node: int, given: Any) -> set[int]:
    if not isinstance(given, list | tuple | range):
        raise ArgumentError(f"lost={{{node}: {given!r}}} must be a list of steps, as in {_EXAMPLES['lost']}")
    for step in given:
        check_count(f"each step of lost={{{node}: ...}}", step)
    return set(given)
