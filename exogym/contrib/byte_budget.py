"""A budget of bytes: a wrapper of one strategy. Nodes synchronize as often, or send as much, as the budget allows.

    ByteBudget(DiLoCoStrategy(H=10), 50e6)

After each synchronization the wrapper chooses the next H (or SPARTA's share p) so that B bytes per node last to the end
of the run. After each round, t steps are left and a node has sent s bytes. A synchronization takes c bytes, and each
step takes d bytes for any H or p:

    H <- ceil(t / floor((B - s - d t) / c));   p <- (B - s - d t - w - m) / (w' t)

w are the bytes of the last synchronization, w' the bytes of a step with p = 1. The margin m = 4 w' sqrt(p/P), for P
parameters and averages at every step, stays unspent, because the number of drawn indices is random. c, d and w follow
from the strategy's formula. If a synchronization took more than c, the largest measured value replaces c.

The rule is ExoGym's own. Choices are equal in all processes and follow from the run so far. Checkpoints save the
choices, so neither placement nor a stop changes a choice. The wrapper sends nothing.

State: the steps at which rounds ended, and the choices.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exogym.contrib.robust import modular
from exogym.core.combinations import check, features_of, refuse
from exogym.core.fleet import Fleet, Stateful
from exogym.core.fleet.state import Tensors
from exogym.errors import ArgumentError, TrainingError, check_count, check_number
from exogym.strategy.averaging import Averaging
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, Composition
from exogym.strategy.modules import Module
from exogym.strategy.rounds import Rounds
from exogym.strategy.strategy import Run
from exogym.strategy.traffic import Traffic

TUNED = ("H", "p_sparta")  # the arguments that a budget can choose; the first that the strategy has


def ByteBudget(strategy: CommunicateOptimizeStrategy, total_bytes: float) -> CommunicateOptimizeStrategy:
    """Return the strategy, whose H (or SPARTA's share) follows a budget of bytes during the run.

    Args:
        strategy: a strategy with rounds of `H` steps, or SPARTA. Its `H` (or `p_sparta`) is the first value.
        total_bytes: B, the bytes that a node may send in the whole run, averaged over nodes.

    The first round and the last synchronization (`final_sync`) always happen, so B must pay for both. The rule does not
    plan for bytes that returning nodes take. The history has the chosen values (`tuned_H`, `tuned_p_sparta`).

    Raises:
        ArgumentError: the strategy has no such argument, or another option sets it. Before training: B does not pay for
            the first round and the last synchronization.
        TrainingError: during training, if a synchronization takes more bytes than the formula says, and B does not pay
            for these bytes.

    >>> from exogym.strategy import DiLoCoStrategy
    >>> budget = ByteBudget(DiLoCoStrategy(H=5), 1000.0).tuning.budget
    >>> budget.choose("H", 5, steps_left=80, sent=200, costs=Costs(each=100))
    10
    """
    strategy, budget = modular(strategy), Budget(total_bytes)
    kind, known, given = type(strategy), type(strategy).__signature__.parameters, vars(strategy)["given_arguments"]
    of = next((name for name in TUNED if name in known), None)
    if of is None:
        what = f"{kind.__name__}, which does not take {' or '.join(TUNED)}"
        refuse(features_of(tuner=budget) | {"nothing to tune": what})
    value = given.get(of, known[of].default)
    if callable(value) or isinstance(value, Rounds):
        refuse(features_of(tuner=budget) | {"H as a function": f"{of}={value!r}"})
    if of == "H":
        check_count("H", value)
    tuning = Tuning(budget, of, value)
    own = {name: x for name, x in given.items() if name in known}
    made = kind(**own | ({} if tuning.rounds is None else {"H": tuning.rounds}))
    made.average_by(strategy.averaging)
    vars(made)["given_arguments"] = given | {"tuner": total_bytes}
    made.tuning = tuning
    check(made.features())
    tuning.modules = [
        m for m, module in enumerate(made.communication_modules)
        if (tuning.rounds is None or getattr(module, "rounds", None) is tuning.rounds)
        and (of != "p_sparta" or hasattr(module, "take_share"))
    ]  # fmt: skip
    tuning.take(made.communication_modules)
    if not tuning.modules:
        what = f"{kind.__name__}, which does not follow {of} in its own rounds"
        refuse(features_of(tuner=budget) | {"nothing to tune": what})
    return made


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


@dataclass(frozen=True)
class Budget:
    """The rule of `ByteBudget`, for a budget of `total_bytes`."""

    total_bytes: float

    def __post_init__(self) -> None:
        check_number("total_bytes", self.total_bytes, over=0)

    def __repr__(self) -> str:
        return f"ByteBudget({self.total_bytes!r})"

    def choose(self, name: str, value: float, steps_left: int, sent: float, costs: Costs | None) -> float:
        """Return the next value of the argument `name`.

        Args:
            value: the current value.
            steps_left: steps until the end of the run.
            sent: bytes that a node has sent on average, since the run began.
            costs: the bytes that the rest of the run costs, or None if the strategy has no formula.
        """
        steps = max(1, steps_left)
        if costs is None or not costs.each:
            return value
        left = self.total_bytes - sent - costs.per_step * steps_left
        if name == "H":
            rounds = math.floor(left / costs.each + 1e-9)
            if rounds < 1 and costs.final and steps_left:
                raise TrainingError(
                    f"tuner={self!r}: a node has sent {sent:,.0f} bytes, and the last synchronization takes "
                    f"{costs.final:,.0f} more: raise the budget, or give final_sync=False"
                )
            return math.ceil(steps / rounds) if rounds > 0 else steps + 1
        left -= costs.final
        p = min(1.0, max(0.0, left) / (costs.each * steps))
        return min(1.0, max(0.0, left - 4 * costs.scatter * math.sqrt(p)) / (costs.each * steps))

    def check(self, name: str, value: float, costs: Costs, total_steps: int) -> None:
        """Raise ArgumentError if the budget does not pay for the first round and the last synchronization."""
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
                f"over nodes: {do}, or leave it out"
            )


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
    """A budget in a run: the value that it chooses, and the bytes that it watches.

    Args:
        budget: the rule.
        name: the argument that the budget chooses.
        value: the argument's first value.

    Attributes:
        modules: the numbers of the communication modules that follow the choice.
    """

    def __init__(self, budget: Budget, name: str, value: float):
        self.budget, self.name, self.value = budget, name, value
        self.rounds = TunedRounds(int(value)) if name == "H" else None
        self.modules: list[int] = []
        self._sent = 0.0

    def features(self) -> dict[str, str]:
        """Return the feature "tuner" of `exogym.core.refusals`, with its text."""
        return {"tuner": f"tuner={self.budget!r}"}

    def start(self, composition: Composition, run: Run) -> None:
        """Prepare for a run, before training.

        Raises:
            ArgumentError: the budget is too small.
        """
        self.run, self.composition, fleet = run, composition, composition.fleet
        followers = [composition.communications[m] for m in self.modules]
        averaging = composition.strategy.averaging
        costs = costs_of(composition.modules, followers, self.rounds, averaging, fleet, run)
        self._costs, self._most = costs, 0.0 if costs is None else costs.each
        if costs is not None:
            self.budget.check(self.name, self.value, costs, run.total_steps)
        fleet.state.register("tuning", self)

    def _bytes(self) -> float:
        return float(self.composition.fleet.comm.ledger.tx_bytes.mean())

    def before_meeting(self, acting: Sequence[int]) -> None:
        self._before = self._bytes()

    def after_meeting(self, acting: Sequence[int], step: int) -> None:
        if not {*acting} & {*self.modules}:
            return
        sent = self._bytes()
        self._most = max(self._most, sent - self._before)
        costs = self._costs
        if costs is None or self.name == "H":
            final = self._most if self.run.final_sync else 0.0
            costs = Costs(self._most, 0.0 if costs is None else costs.per_step, final)
        self._sent = sent
        self.value = self.budget.choose(self.name, self.value, self.run.total_steps - step, sent, costs)
        if self.rounds is not None:
            self.rounds.end(step, int(self.value))
        self.take(self.composition.communications)

    def take(self, modules: Sequence[Any]) -> None:
        """Give SPARTA's share to the module that averages it, if the budget chooses this share."""
        for m in self.modules if self.name == "p_sparta" else ():
            modules[m].take_share(self.value)

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


def costs_of(
    modules: Sequence[Module],
    tuned: Sequence[Module],
    rounds: Rounds | None,
    averaging: Averaging,
    fleet: Fleet,
    run: Run,
) -> Costs | None:
    """Return the costs of the rest of a run, by the formulas of `modules`, or None if a module has no formula.

    Args:
        modules: the strategy's modules.
        tuned: the modules whose argument the tuner changes.
        rounds: the rounds whose length the tuner chooses, or None if the tuner does not choose H.
        averaging: the strategy's averaging options.
    """
    P = sum(block.layout.total for block in fleet.blocks)
    row_bytes = sum(block.layout.total * block.layout.dtype.itemsize for block in fleet.blocks)

    def sent(traffic: list[Traffic]) -> float:
        repeated = averaging.traffic(traffic, run.num_nodes, row_bytes / P)
        return sum(t.sent_bytes(run.num_nodes) / t.every_steps for t in repeated)

    def follows(module: Any) -> bool:
        return any(getattr(x, "rounds", None) is rounds for x in (module, getattr(module, "average", None)))

    def at(module: Any, p: float) -> float:
        other = copy.copy(module)
        other.take_share(p)
        return sent(other.traffic(P, run.num_nodes, row_bytes / P))

    try:
        if rounds is None:
            slope = sum(2 * (at(m, 1.0) - at(m, 0.5)) for m in tuned)
            final = sent([Traffic("all_reduce", float(row_bytes))]) if run.final_sync else 0.0
            offset = max(0.0, sum(at(m, 1.0) for m in tuned) - slope)
            every = max(getattr(m, "interval_steps", 1) for m in tuned)
            return Costs(slope, offset, final, slope * every / math.sqrt(P))
        formulas = [(m, m.traffic(P, run.num_nodes, row_bytes / P)) for m in modules]
    except ArgumentError:
        return None
    each = sent([t for m, traffic in formulas if follows(m) for t in traffic]) * rounds.end_after(0)
    per_step = sent([t for m, traffic in formulas if not follows(m) for t in traffic])
    return Costs(each, per_step, each if run.final_sync else 0.0)
