"""Self-tuning: a run's own bytes decide how often nodes synchronize, or how much they send.

A tuner chooses an argument's next value after each synchronization.

ByteBudget chooses H (or SPARTA's share p) so that B bytes per node last to the end of the run. After each round, t
steps are left and a node has sent s bytes. A synchronization takes c bytes, and each step takes d bytes for any H or p:

    H <- ceil(t / floor((B - s - d t) / c));   p <- (B - s - d t - w - m) / (w' t)

w are the bytes of the last synchronization, w' the bytes of a step with p = 1. The margin m = 4 w' sqrt(p/P), for P
parameters and averages at every step, stays unspent, because the number of drawn indices is random. c, d and w follow
from the strategy's formula. If a synchronization took more than c, the largest measured value replaces c.

The rule is ExoGym's own. Choices are equal in all processes and follow from the run so far. Checkpoints save the
choices, so neither placement nor a stop changes a choice. The tuner sends nothing.

State: the steps at which rounds ended, and the choices.
"""

from __future__ import annotations

import inspect
import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from exogym.core.combinations import features_of, refuse
from exogym.core.fleet import Fleet, Stateful
from exogym.core.fleet.state import Tensors
from exogym.errors import ArgumentError, TrainingError, check_count, check_number
from exogym.strategy.rounds import Rounds
from exogym.strategy.strategy import Run


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
        costs: the bytes that the rest of the run costs, or None if the strategy has no formula.
    """

    value: float
    steps_left: int
    sent: float
    last: float
    costs: Costs | None = None


@dataclass(frozen=True)
class Tuner:
    """The base class of tuners: a subclass is a rule that chooses an argument during a run.

    Rules must not use times or random numbers.

    Attributes:
        of: the arguments that the tuner can tune. The tuner tunes the first of these arguments that the strategy has.
    """

    of: ClassVar[tuple[str, ...]] = ("H",)

    def choose(self, name: str, seen: Sight) -> float:
        """Return the next value of the argument `name`, by the figures `seen`."""
        raise NotImplementedError

    def check(self, name: str, value: float, costs: Costs, total_steps: int) -> None:
        """Raise ArgumentError if the rule cannot work with these costs, such as a budget that is too small.

        ExoGym calls this method before training.
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


def tuner_of(given: Any) -> Tuner:
    """Return a tuner unchanged, and a number as a `ByteBudget` of this many bytes.

    Raises:
        ArgumentError: `given` is neither.
    """
    if isinstance(given, Tuner):
        return given
    if isinstance(given, int | float) and not isinstance(given, bool):
        return ByteBudget(given)
    raise ArgumentError(f"tuner={given!r} must be a tuner, such as ByteBudget(1e9), or a number of bytes")


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
        value: the argument's first value.
    """

    def __init__(self, tuner: Tuner, name: str, value: float):
        self.tuner, self.name, self.value = tuner, name, value
        self.rounds = TunedRounds(int(value)) if name == "H" else None
        self._sent = 0.0

    def features(self) -> dict[str, str]:
        """Return the tuner's features, as a dict from names in `exogym.core.combinations.FEATURES` to texts."""
        return {"tuner": f"tuner={self.tuner!r}"}

    def start(self, fleet: Fleet, run: Run, costs: Costs | None) -> None:
        """Prepare for a run, before training.

        Args:
            costs: the bytes of the run, by the strategy's formula, or None if the strategy has no formula.

        Raises:
            ArgumentError: the tuner cannot work with these costs, such as a budget that is too small.
        """
        self.run, self._costs, self._most = run, costs, 0.0 if costs is None else costs.each
        if costs is not None:
            self.tuner.check(self.name, self.value, costs, run.total_steps)

    def before_meeting(self, fleet: Fleet) -> None:
        """Note the bytes sent so far, right before a synchronization."""
        self._before = float(fleet.comm.ledger.tx_bytes.mean())

    def after_meeting(self, fleet: Fleet, step: int) -> None:
        """Choose the argument's next value after a synchronization at `step`."""
        sent = float(fleet.comm.ledger.tx_bytes.mean())
        last, self._most = sent - self._sent, max(self._most, sent - self._before)
        costs = self._costs
        if costs is None or self.name == "H":
            final = self._most if self.run.final_sync else 0.0
            costs = Costs(self._most, 0.0 if costs is None else costs.per_step, final)
        self._sent = sent
        self.value = self.tuner.choose(self.name, Sight(self.value, self.run.total_steps - step, sent, last, costs))
        if self.rounds is not None:
            self.rounds.end(step, int(self.value))

    def figures(self) -> dict[str, float]:
        return {f"tuned_{self.name}": float(self.value)}

    def shared(self) -> Tensors:
        numbers = [self.value, self._sent, math.nan, math.nan, 0.0, self._most]  # three are of tuners of before
        tensors = {"numbers": torch.tensor(numbers, dtype=torch.float64)}
        return tensors if self.rounds is None else tensors | {"ends": torch.tensor(self.rounds._ends)}

    def load_shared(self, tensors: Tensors) -> None:
        self.value, self._sent, *_, self._most = tensors["numbers"].tolist()
        if self.rounds is not None:
            self.rounds._ends, self.rounds.H = tensors["ends"].tolist(), int(self.value)


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
    if of is None:
        refuse(features_of(tuner=tuner) | {"nothing to tune": f"{name}, which does not take {' or '.join(tuner.of)}"})
    call.apply_defaults()
    value = call.arguments[of]
    if callable(value):
        refuse(features_of(tuner=tuner) | {"H as a function": f"{of}={value!r}"})
    if of != "H":
        return Tuning(tuner, of, value)
    check_count("H", value)
    tuning = Tuning(tuner, of, value)
    call.arguments["H"] = tuning.rounds
    return tuning
