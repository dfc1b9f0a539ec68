"""Self-tuning: a run's own figures decide how often nodes synchronize, how much they send, or how far outer steps go.

A tuner chooses an argument's next value after each synchronization.

ByteBudget chooses H (or SPARTA's share p) so that B bytes per node last to the end of the run. After each round, t
steps are left and a node has sent s bytes. A synchronization takes c bytes, and each step takes d bytes for any H or p:

    H <- ceil(t / floor((B - s - d t) / c));   p <- (B - s - d t - w - m) / (w' t)

w are the bytes of the last synchronization, w' the bytes of a step with p = 1. The margin m = 4 w' sqrt(p/P), for P
parameters and averages at every step, stays unspent, because the number of drawn indices is random. c, d and w follow
from the strategy's formula. If a synchronization took more than c, the largest measured value replaces c.

Drift chooses H by the nodes' disagreement rho. u_i is the change of node i since its last synchronization:

    rho = mean_i |u_i - mean u|^2 / mean_i |u_i|^2,  from 0 (all alike) to 1, with the weights of the mean
    H <- floor(H / 2) if rho > target, otherwise H + max(1, floor(H / 4))

Autocorrelation chooses the outer rate eta by the agreement of the outer gradient Delta from round r-1 to round r, as
the multiplicative rule of hypergradient descent (Baydin et al., arXiv:1703.04782):

    eta <- eta (1 + gain (cos(Delta_r, Delta_(r-1)) - target))

ByteBudget and Drift are ExoGym's own rules. Drift and Autocorrelation stay within given bounds. Choices are equal in
all processes and follow from the run so far. Checkpoints save the choices, so neither placement nor a stop changes a
choice.

Bytes: Drift sums two numbers per node in each round, a ring all-reduce of 16 bytes. The other tuners send nothing.
State: the steps at which rounds ended, and the choices. Drift also keeps each node's values at its last
synchronization, (rows, P); Autocorrelation keeps the last Delta, (P,).
"""

from __future__ import annotations

import inspect
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from exogym.core.combinations import check, features_of, refuse
from exogym.core.communicator import Columns
from exogym.core.fleet import Fleet, Stateful
from exogym.core.fleet.layout import Cut, cut_of
from exogym.core.fleet.presence import rows_of
from exogym.core.fleet.state import Tensors
from exogym.errors import ArgumentError, StrategyError, TrainingError, check_choice, check_count, check_number
from exogym.strategy.rounds import Rounds
from exogym.strategy.strategy import Run

DRIFT_BYTES = 16


@dataclass(frozen=True)
class Costs:
    """The bytes that a node sends in the rest of a run, averaged over nodes.

    Attributes:
        each: bytes per synchronization if H is tuned; bytes per step with p = 1 if SPARTA's share p is tuned.
        per_step: bytes in each step, independent of the choice.
        final: bytes of the last synchronization; 0 if the run ends without it.
        scatter: the standard deviation of a step's bytes with p = 1, if the averaged indices are drawn.
    """

    each: float
    per_step: float = 0.0
    final: float = 0.0
    scatter: float = 0.0


@dataclass
class Sight:
    """The figures on which a tuner may decide after a round.

    Attributes:
        value: the current value of the tuned argument.
        steps_left: steps until the end of the run.
        sent, last: bytes that a node has sent on average, since the run began (`sent`) and in this round (`last`).
        drift: the nodes' disagreement rho, from 0 to 1; nan if the tuner does not use it.
        correlation: the cosine between the last two outer gradients; nan before the second outer gradient.
        costs: the bytes that the rest of the run costs, for a tuner that sees "bytes".
    """

    value: float
    steps_left: int
    sent: float
    last: float
    drift: float = math.nan
    correlation: float = math.nan
    costs: Costs | None = None


@dataclass(frozen=True)
class Tuner:
    """The base class of tuners: a subclass is a rule that chooses an argument during a run.

    Rules must not use times or random numbers.

    Attributes:
        of: the arguments that the tuner can tune. The tuner tunes the first of these arguments that the strategy has.
        sees: the figures that the rule needs, from "bytes", "drift" and "correlation".
    """

    of: ClassVar[tuple[str, ...]] = ("H",)
    sees: ClassVar[str] = "bytes"

    def choose(self, name: str, seen: Sight) -> float:
        """Return the next value of the argument `name`, by the figures `seen`."""
        raise NotImplementedError

    def check(self, name: str, value: float, costs: Costs, total_steps: int) -> None:
        """Raise ArgumentError if the rule cannot work with these costs, such as a budget that is too small.

        ExoGym calls this method before training, if the tuner sees "bytes".
        """


@dataclass(frozen=True)
class ByteBudget(Tuner):
    """Synchronize as often, or send as many parameters, as a budget of bytes allows.

    Args:
        total_bytes: B, the bytes that a node may send in the whole run, averaged over nodes.

    The first round and the last synchronization (`final_sync`) always happen, so B must pay for both. The rule does not
    plan for bytes that returning nodes take.

    Raises:
        ArgumentError: before training, if B does not pay for the first round and the last synchronization.
        TrainingError: during training, if a synchronization takes more bytes than the formula says, and B does not pay
            for these bytes.

    >>> ByteBudget(1000.0).choose("H", Sight(value=5, steps_left=80, sent=200, last=100, costs=Costs(each=100)))
    10
    """

    total_bytes: float
    of: ClassVar[tuple[str, ...]] = ("H", "p_sparta")

    def __post_init__(self) -> None:
        check_number("total_bytes", self.total_bytes, over=0)

    def choose(self, name: str, seen: Sight) -> float:
        costs, steps = seen.costs, max(1, seen.steps_left)
        if costs is None or not costs.each:
            return seen.value
        left = self.total_bytes - seen.sent - costs.per_step * seen.steps_left
        if name == "H":
            rounds = math.floor(left / costs.each + 1e-9)
            if rounds < 1 and costs.final and seen.steps_left:
                raise TrainingError(
                    f"tuner={self!r}: a node has sent {seen.sent:,.0f} bytes, and the last synchronization takes "
                    f"{costs.final:,.0f} more: raise the budget, or give final_sync=False"
                )
            return math.ceil(steps / rounds) if rounds > 0 else steps + 1
        left -= costs.final
        p = min(1.0, max(0.0, left) / (costs.each * steps))
        return min(1.0, max(0.0, left - 4 * costs.scatter * math.sqrt(p)) / (costs.each * steps))

    def check(self, name: str, value: float, costs: Costs, total_steps: int) -> None:
        if name == "H":
            meetings = [f"after H={value:g} steps"] * (value <= total_steps)
            meetings += ["at the end (final_sync)"] * (costs.final > 0 and value != total_steps)
            least, what = costs.each * len(meetings), f"synchronizes {' and '.join(meetings)}"
            do = "raise the budget, or H to the steps of the run, or give final_sync=False"
        else:
            least, what = costs.each * value + costs.final, f"sends p={value:g} of all values first, and all at the end"
            do = "raise the budget"
        least += costs.per_step * total_steps
        if least > self.total_bytes * (1 + 1e-9):
            raise ArgumentError(
                f"tuner={self!r} is too small: a node {what}, which takes {least:,.0f} bytes in all, averaged "
                f"over nodes: {do}, or leave tuner out"
            )


@dataclass(frozen=True)
class Drift(Tuner):
    """Synchronize more often if nodes drift apart, and less often if they move the same way.

    Args:
        target: the disagreement rho above which nodes synchronize more often, over 0 and under 1. rho is 0 if all nodes
            move alike. For N nodes that move at random it is (N-1)/N.
        least, most: bounds of H, the steps of a round. `most=None` means no upper bound.

    >>> [Drift(0.5).choose("H", Sight(value=10, steps_left=80, sent=0, last=0, drift=rho)) for rho in (0.4, 0.6)]
    [12, 5]
    """

    target: float = 0.5
    least: int = 1
    most: int | None = None
    sees: ClassVar[str] = "drift"

    def __post_init__(self) -> None:
        check_number("target", self.target, over=0, under=1)
        check_count("least", self.least)
        if self.most is not None:
            check_count("most", self.most, least=self.least)

    def choose(self, name: str, seen: Sight) -> float:
        H = int(seen.value)
        if math.isnan(seen.drift):
            return H
        H = H // 2 if seen.drift > self.target else H + max(1, H // 4)
        return max(self.least, H if self.most is None else min(H, self.most))


@dataclass(frozen=True)
class Autocorrelation(Tuner):
    """Raise the outer learning rate while outer gradients keep their direction, and lower it when they change
    direction.

    Args:
        target: the cosine between successive outer gradients at which the rate does not change, from -1 to 1.
        gain: how strongly the rate follows the cosine, over 0 and under 0.5.
        least, most: bounds of the factor on the outer learning rate.

    >>> seen = Sight(value=1.0, steps_left=80, sent=0, last=0, correlation=0.5)
    >>> Autocorrelation(gain=0.2).choose("outer_lr", seen)
    1.1
    """

    target: float = 0.0
    gain: float = 0.2
    least: float = 0.1
    most: float = 2.0
    of: ClassVar[tuple[str, ...]] = ("outer_lr",)
    sees: ClassVar[str] = "correlation"

    def __post_init__(self) -> None:
        check_number("gain", self.gain, over=0, under=0.5)
        check_number("least", self.least, over=0)
        check_number("most", self.most, over=0)
        if not -1 <= self.target <= 1 or self.least > self.most:
            raise ArgumentError(
                f"Autocorrelation: target={self.target!r} must be from -1 to 1, and least={self.least!r} at most "
                f"most={self.most!r}"
            )

    def choose(self, name: str, seen: Sight) -> float:
        if math.isnan(seen.correlation):
            return seen.value
        return min(self.most, max(self.least, seen.value * (1 + self.gain * (seen.correlation - self.target))))


TUNERS: dict[str, type[Tuner]] = {"drift": Drift, "autocorrelation": Autocorrelation}


def tuner_of(given: Any) -> Tuner:
    """Return the tuner that `given` names. A number becomes a `ByteBudget` of this many bytes; a tuner is unchanged.

    Raises:
        ArgumentError: the name is unknown, or `given` is not a tuner.
    """
    if isinstance(given, Tuner):
        return given
    if isinstance(given, int | float) and not isinstance(given, bool):
        return ByteBudget(given)
    if not isinstance(given, str):
        raise ArgumentError(f"tuner={given!r} must be a name, such as 'drift', or a tuner, such as ByteBudget(1e9)")
    check_choice("tuner", given, TUNERS)
    return TUNERS[given]()


class TunedRounds(Rounds):
    """Rounds whose length a tuner chooses during the run. Ended rounds keep their length."""

    foreseen = False

    def __init__(self, H: int):
        check_count("H", H)
        super().__init__(H)
        self.H: int = H

    def end_after(self, step: int) -> int:
        ended = self._ends
        if step < ended[-1]:
            return ended[bisect_left(ended, step + 1)]
        return ended[-1] + ((step - ended[-1]) // self.H + 1) * self.H

    def of_step(self, step: int) -> int:
        ended = self._ends
        if step <= ended[-1]:
            return bisect_left(ended, step) - 1
        return len(ended) - 1 + (step - ended[-1] - 1) // self.H

    def end(self, step: int, H: int) -> None:
        """End the current round at `step`. The next rounds take H steps."""
        while self._ends[-1] + self.H <= step:
            self._ends.append(self._ends[-1] + self.H)
        if self._ends[-1] < step:  # a round that was cut short
            self._ends.append(step)
        self.H = H


class Tuning(Stateful):
    """A tuner in a run: the value that it tunes, and the figures that it watches.

    Args:
        tuner: the rule.
        name: the argument that the tuner changes.
        value: the argument's first value. For "outer_lr" it is 1, a factor on the outer learning rate.
    """

    def __init__(self, tuner: Tuner, name: str, value: float):
        self.tuner, self.name, self.value = tuner, name, value
        self.rounds = TunedRounds(int(value)) if name == "H" else None
        self.drift = self.correlation = math.nan
        self._sent = 0.0

    def features(self) -> dict[str, str]:
        """Return the tuner's features, as a dict from names in `exogym.core.combinations.FEATURES` to texts."""
        given = f"tuner={self.tuner!r}"
        sees = {"drift": 'tuner="drift"', "correlation": 'tuner="autocorrelation"'}.get(self.tuner.sees)
        return {"tuner": given} | ({} if sees is None else {sees: given})

    def factor(self, round_: int) -> float:
        """Return the tuned factor on the outer learning rate. This method serves as `outer_lr_scheduler`."""
        return self.value

    def start(self, fleet: Fleet, run: Run, costs: Costs | None = None) -> None:
        """Prepare for a run, before training.

        Args:
            costs: the bytes of the run, by the strategy's formula. None means that the strategy has no formula, or that
                the tuner needs no costs.

        Raises:
            ArgumentError: the tuner cannot work with these costs, such as a budget that is too small.
        """
        self._costs, self._most = costs, 0.0 if costs is None else costs.each
        if costs is not None:
            self.tuner.check(self.name, self.value, costs, run.total_steps)
        self.run, self._layouts = run, [block.layout for block in fleet.blocks]
        self._apart = torch.zeros(len(fleet), dtype=torch.float64)
        self._weights = torch.ones(len(fleet), dtype=torch.float64)
        sees_correlation = self.tuner.sees == "correlation"
        self._last = [block.zeros(1)[0] if sees_correlation else torch.empty(0) for block in fleet.blocks]
        self._now: list[Tensor] = []
        self._means = 0  # since the last meeting
        self._counted = 0  # outer gradients so far
        if self.tuner.sees != "bytes":
            fleet.comm.watchers.append(self._watch)

    def _watch(self, fleet_rows: Sequence[int], weights: Sequence[float], x: Tensor, mean: Tensor) -> None:
        """Watch a mean: the rows that take part, their weights, their values (rows, F), and the mean (F,)."""
        self._means += 1
        if self.tuner.sees == "drift":
            for row, weight in zip(fleet_rows, weights, strict=True):
                self._apart[row] += weight * (x[row] - mean).double().square().sum().cpu()
                self._weights[row] = weight
        else:
            self._now.append(mean.clone())

    def before_meeting(self, fleet: Fleet, met: Sequence[Tensor]) -> None:
        """Measure how far each node has moved since its last synchronization, right before the next one.

        Args:
            met: the nodes' parameters after their last synchronization, (rows, P) per block.
        """
        self._before = float(fleet.comm.ledger.tx_bytes.mean())
        self._apart.zero_()
        self._now, self._means = [], 0
        self._moved = torch.zeros(len(fleet), dtype=torch.float64)
        if self.tuner.sees == "drift":
            for row in rows_of(fleet, fleet.comm.present):
                for block, old in zip(fleet.blocks, met, strict=True):
                    self._moved[row] += (block.params[row] - old[row]).double().square().sum().cpu()

    def after_meeting(self, fleet: Fleet, step: int) -> None:
        """Choose the argument's next value after a synchronization at `step`."""
        if self.tuner.sees == "drift":
            self._measure_drift(fleet)
        elif self.tuner.sees == "correlation":
            self._correlate(fleet.comm.wire.columns)
        sent = float(fleet.comm.ledger.tx_bytes.mean())
        last, self._most = sent - self._sent, max(self._most, sent - self._before)
        costs = self._costs
        if costs is None or self.name == "H":
            final = self._most if self.run.final_sync else 0.0
            costs = Costs(self._most, 0.0 if costs is None else costs.per_step, final)
        left = self.run.total_steps - step
        seen = Sight(self.value, left, sent, last, self.drift, self.correlation, costs)
        self._sent = sent
        self.value = self.tuner.choose(self.name, seen)
        if self.rounds is not None:
            self.rounds.end(step, int(self.value))

    def _measure_drift(self, fleet: Fleet) -> None:
        """Set rho from two sums over the nodes that moved: their distances, and their distances from the mean."""
        comm = fleet.comm
        both = comm.wire.columns.sum(torch.stack([self._apart, self._weights * self._moved], 1))
        norms = comm.wire.rows(both[:, 1], comm.present).tolist()  # all processes know who takes part
        movers = [node for node, moved in zip(comm.present, norms, strict=True) if moved]
        if movers and not self._means:
            raise StrategyError(
                f"tuner={self.tuner!r} needs a mean over nodes at each synchronization, but this strategy takes no "
                "mean: take a strategy that averages (DiLoCo, FedAvg, ...), a ByteBudget, or leave the tuner out"
            )
        if movers:
            with comm.of_nodes():
                sums = comm.all_reduce(both, "sum", groups=[movers])
            apart, moved = comm.wire.rows(sums, movers[:1])[0].tolist()
            self.drift = apart / moved

    def _correlate(self, columns: Columns) -> None:
        """Set the cosine of this and the last outer gradient, over all blocks; `inside` holds the other columns."""
        last, now = self._last, self._now
        if [len(x) for x in now] != [len(x) for x in last]:
            raise StrategyError(
                f"tuner={self.tuner!r} needs one mean of all outer gradients, but got {len(now)} means of "
                f"{[len(x) for x in now]} numbers, wanted {[len(x) for x in last]}: take DiLoCo, or leave the tuner out"
            )
        if self._counted:
            here = [
                sum(float((x.double() * y.double()).sum()) for x, y in zip(left, right, strict=True))
                for left, right in ((last, now), (last, last), (now, now))
            ]
            dot, a, b = columns.sum(torch.tensor(here, dtype=torch.float64)).tolist()
            self.correlation = dot / math.sqrt(a * b) if a * b else math.nan
        for x, y in zip(last, now, strict=True):
            x.copy_(y)
        self._counted += 1

    def figures(self) -> dict[str, float]:
        measured = {"drift": self.drift, "correlation": self.correlation}
        chosen = {f"tuned_{self.name}": float(self.value)}
        return chosen | {name: x for name, x in measured.items() if name == self.tuner.sees and not math.isnan(x)}

    def shared(self) -> Tensors:
        numbers = [self.value, self._sent, self.drift, self.correlation, self._counted, self._most]
        tensors = {"numbers": torch.tensor(numbers, dtype=torch.float64)}
        if self.rounds is not None:
            tensors["ends"] = torch.tensor(self.rounds._ends)
        return tensors | {f"last.{b}": x for b, x in enumerate(self._last) if len(x)}

    def cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        kind, _, b = name.partition(".")
        return cut_of(self._layouts[int(b)]) if kind == "last" else None

    def load_shared(self, tensors: Tensors) -> None:
        self.value, self._sent, self.drift, self.correlation, counted, self._most = tensors["numbers"].tolist()
        self._counted = int(counted)
        if self.rounds is not None:
            self.rounds._ends, self.rounds.H = tensors["ends"].tolist(), int(self.value)
        for b, x in enumerate(self._last):
            if len(x):
                x.copy_(tensors[f"last.{b}"])


def begun(tuner: Tuner, own: inspect.Signature, call: inspect.BoundArguments, name: str) -> Tuning:
    """Return the `Tuning` of a strategy that is about to be made, and put the tuned value into its arguments `call`.

    Args:
        tuner: the rule.
        own: the constructor's signature.
        call: the constructor's arguments, which are changed.
        name: the strategy's name, for messages.

    Raises:
        ArgumentError: strategy `name` has no argument that `tuner` can tune, or another option sets this argument.
    """
    of = next((argument for argument in tuner.of if argument in own.parameters), None)
    if of is None or (of == "outer_lr" and "outer_lr_scheduler" not in own.parameters):
        refuse(features_of(tuner=tuner) | {"nothing to tune": f"{name}, which does not take {' or '.join(tuner.of)}"})
    call.apply_defaults()
    if of == "outer_lr":
        scheduler = call.arguments["outer_lr_scheduler"]
        check({"tuner of outer_lr": f"tuner={tuner!r}"} | features_of(outer_lr_scheduler=scheduler))
        tuning = Tuning(tuner, of, 1.0)
        call.arguments["outer_lr_scheduler"] = tuning.factor
        return tuning
    value = call.arguments[of]
    if callable(value):
        refuse(features_of(tuner=tuner) | {"H as a function": f"{of}={value!r}"})
    if of != "H":
        return Tuning(tuner, of, value)
    check_count("H", value)
    tuning = Tuning(tuner, of, value)
    call.arguments["H"] = tuning.rounds
    return tuning
