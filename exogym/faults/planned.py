"""Planned faults: nodes that drop out and return, slow nodes, lost synchronizations.

Presence depends only on (step, node). So it is the same on every placement and after every resume, however training
is cut into stretches. Steps are the fleet's, counted from 1.

    absent  the node neither computes nor communicates; when it returns, it takes another node's parameters
    lost    the node misses the synchronization after that step: it keeps its own parameters and continues
    slow    the node takes only a share of the local steps, and synchronizes what it has
    bad     the node sends wrong updates to the others (`exogym.strategy.updates`); its own training is correct

`Outages` are unplanned: a run on real hosts records which nodes were absent when. As `Faults(absent=..., forget=True)`
they give the same run in simulation.
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
    """Faults as a schedule, as rates with a seed, or both.

    Args:
        absent: node to its outages [(first, last), ...]: the node is absent from step `first` and present again at
            step `last`; None: it does not return.
        drop_rate: probability per step that a present node drops out. Nodes drop out independently. A node is absent
            for a share drop_rate m / (1 + drop_rate m) of the steps, where m is the mean outage.
        mean_outage_steps: m, at least 1; lengths of outages are geometric.
        lost: node to the steps whose synchronization it loses.
        lost_rate: probability that a node loses a synchronization.
        slow: node to the share of its steps that it takes, over 0 and at most 1. It takes
            floor(share * n) of its first n steps while present.
        forget: True: a returning node has restarted and lost its state. Besides parameters it takes the inner
            optimizer's state and the strategy's state from the same node. False: it was only unreachable.
        seed: seed of the rates, of the choice of bad nodes, and of their noise.
        bad_nodes: ids of the nodes that send wrong updates, or their share of all nodes, rounded, drawn from the seed.
        attack: the wrong updates: "sign_flip", "noise" or "scale".
        trace: which clients a server can ask for a round, and how fast each is: a file, or a `Trace`, `Diurnal` or
            `Devices` (`exogym.faults.availability`). Only for strategies that sample clients, and
            without planned faults.
        attack_factor: c, over 0. The wrong update is the right one times -c ("sign_flip"), noise of c times its norm
            ("noise"), or the right one times c ("scale"). Default: 1 for "sign_flip", 10 for the others.

    Raises:
        ArgumentError: an impossible node, step, rate or share.

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
                raise ArgumentError(f"{name}={given!r} must map nodes, such as {_EXAMPLES[name]}")
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
        """Return the sorted ids of the bad nodes among `num_nodes`; they are the same in every step.

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
        """Return the attendance of a fleet of `num_nodes`: which nodes are present at each step.

        Args:
            shares: each node's share of the steps; a share in `slow` multiplies it.
            lockstep: the nodes take every step together, because gradients meet at each. Then a lost synchronization
                is a missed step, after which the node returns, and no node can be slow.

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
    """Which nodes are present at each step of a run. `Faults.bind` makes it.

    Every answer depends only on the arguments; stored values are a cache.
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
        """Clear the cache because the schedule has changed."""
        self._outages = [_NodeOutages(self.faults, node) for node in range(self.num_nodes)]
        self._span, self._attending = (
            (0, 1),
            list(range(self.num_nodes)),
        )  # present from a step up to another

    def up(self, step: int) -> list[int]:
        """Return the sorted ids of the nodes that compute in step `step`, all before step 1. May be empty."""
        nodes = self._not_away(step)
        if self.lockstep and self._loses:
            lost = self._losers(step)
            return [node for node in nodes if node not in lost]
        return list(nodes)

    def present(self, step: int) -> list[int]:
        """Return the sorted ids of the nodes that communicate after step `step`.

        The list is empty if all nodes are absent or lose the synchronization. Then no node communicates.
        """
        nodes = self.up(step)
        if self.lockstep or not self._loses or not nodes:
            return nodes
        lost = self._losers(step)
        return [node for node in nodes if node not in lost]

    def returning(self, step: int) -> tuple[list[int], int | None]:
        """Return the nodes that are back at step `step`, and the node whose state they take.

        That node is the lowest id among the nodes that stayed. If none stayed, it is the lowest id among those
        present nodes that were present last; it may itself be returning. Without returning nodes: ([], None).
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
        """Return the last step with the same present nodes as step `step + 1`. A stretch ends there."""
        if self.lockstep and self._loses:
            return step + 1
        self._not_away(step + 1)
        return self._span[1] - 1

    def steps_between(
        self, first: int, last: int, work: Callable[[int, int], np.ndarray | None] | None = None
    ) -> np.ndarray:
        """Return (N,) the local steps that each node takes while the fleet goes from step `first` to step `last`.

        Additive: steps(a, b) + steps(b, c) == steps(a, c). `work(first, last)` returns the strategy's steps for each
        node, also additive; None means every step. A node takes a step only if faults and strategy both allow it.
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
        """Return the last step before `step` at which the node was present; 0: before training."""
        while True:
            step -= 1
            away, begin, _ = self._outages[node].state(step)
            step = begin - 1 if away else step
            if step <= 0 or not (self.lockstep and self._loses and node in self._losers(step)):
                return max(step, 0)


class Outages(Faults):
    """A run's unplanned outages as they happen. `Faults(absent=outages.as_absent(), forget=True)` repeats them.

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
        """From step `step + 1` on only the nodes `present` are present. This replaces earlier notes for these steps."""
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
        """Load what `state` returned."""
        self.absent = {}
        for node, first, last in state:
            self.absent.setdefault(node, []).append((first, last))
        self._clear_caches()

    def as_absent(self) -> dict[int, list[tuple[int, int | None]]]:
        """Return the outages for `Faults(absent=...)`. None stands for an outage that has not ended."""
        return {
            node: [(first, None if last == NEVER else last) for first, last in spans]
            for node, spans in sorted(self.absent.items())
        }

    def _clear_caches(self) -> None:
        for attendance in self._bound:
            attendance.reread()


class _NodeOutages:
    """One node's outages, disjoint and in order: planned outages, and random ones drawn up to a growing horizon."""

    def __init__(self, faults: Faults, node: int):
        self.faults, self.node = faults, node
        self.horizon = 0
        self._learn(FIRST_HORIZON)

    def state(self, step: int) -> tuple[bool, int, int]:
        """Return whether the node is absent at `step`, the first step of that state, and the first step after it."""
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
        """Return for how many of the steps 1 to `step` the node was absent."""
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
        """Draw the outages that begin before `horizon`, in order. A longer horizon continues the same list."""
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
                f"faults name node {node} in {name}, but num_nodes={num_nodes}: nodes are 0 to {num_nodes - 1}"
            )


def _intervals(node: int, given: Any) -> list[tuple[int, int]]:
    wanted = "a list of (first, last) steps such as [(100, 200)]; last=None if the node does not return"
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
