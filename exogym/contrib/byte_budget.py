"""A budget of bytes: a wrapper that lets nodes synchronize as often as the budget allows.

    ByteBudget(DiLoCoStrategy(H=10), 50e6)

After each round, the wrapper chooses the next H so that B bytes per node last to the end of the run. With t steps left,
s bytes sent by a node, c bytes per synchronization and d bytes in each step for any H:

    H <- ceil(t / floor((B - s - d t) / c))

c and d follow from the strategy's formula; if a synchronization took more than c, the largest measured value replaces
c.

The rule is ExoGym's own. Choices depend only on the run so far and are saved in checkpoints, so they are equal in all
processes and do not change with placement or a resume. The wrapper sends nothing.

State: the steps at which rounds ended, and the choices.
"""

from __future__ import annotations

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


def ByteBudget(strategy: CommunicateOptimizeStrategy, total_bytes: float) -> CommunicateOptimizeStrategy:
    """Return the strategy with an H that follows a budget of bytes during the run.

    Args:
        strategy: a strategy with rounds of `H` steps; its `H` is the first value.
        total_bytes: B, the bytes that a node may send in the whole run, averaged over nodes.

    The first round and the last synchronization (`final_sync`) always happen, so B must cover both. The rule does not
    reserve bytes for returning nodes. The history has the chosen values (`tuned_H`).

    Raises:
        ArgumentError: the strategy has no H, or another option sets it; before training, if B does not cover the first
            round and the last synchronization.
        TrainingError: during training, if a synchronization takes more bytes than the formula says and B does not cover
            them.

    >>> from exogym.strategy import DiLoCoStrategy
    >>> budget = ByteBudget(DiLoCoStrategy(H=5), 1000.0).tuning.budget
    >>> budget.choose(5, steps_left=80, sent=200, costs=Costs(each=100))
    10
    """
    strategy, budget = modular(strategy), Budget(total_bytes)
    kind, known, given = type(strategy), type(strategy).__signature__.parameters, vars(strategy)["given_arguments"]
    if "H" not in known:
        refuse(features_of(tuner=budget) | {"nothing to tune": f"{kind.__name__}, which does not take H"})
    H = given.get("H", known["H"].default)
    if callable(H) or isinstance(H, Rounds):
        refuse(features_of(tuner=budget) | {"H as a function": f"H={H!r}"})
    tuning = BudgetTuning(budget, H)
    made = kind(**{name: x for name, x in given.items() if name in known} | {"H": tuning.rounds})
    made.average_by(strategy.averaging)
    vars(made)["given_arguments"] = given | {"tuner": total_bytes}
    made.tuning = tuning
    check(made.features())
    rounds = [getattr(module, "rounds", None) for module in made.communication_modules]
    tuning.modules = [m for m, own in enumerate(rounds) if own is tuning.rounds]
    if not tuning.modules:
        what = f"{kind.__name__}, which does not follow H in its own rounds"
        refuse(features_of(tuner=budget) | {"nothing to tune": what})
    return made


@dataclass(frozen=True)
class Costs:
    """The bytes that a node sends in the rest of a run, as a mean over nodes.

    Attributes:
        each: bytes per synchronization.
        per_step: bytes in each step for any choice.
        final: bytes of the last synchronization, or 0 if the run ends without it.
    """

    each: float
    per_step: float = 0.0
    final: float = 0.0


@dataclass(frozen=True)
class Budget:
    """The rule of `ByteBudget`, for a budget of `total_bytes`."""

    total_bytes: float

    def __post_init__(self) -> None:
        check_number("total_bytes", self.total_bytes, over=0)

    def __repr__(self) -> str:
        return f"ByteBudget({self.total_bytes!r})"

    def choose(self, H: int, steps_left: int, sent: float, costs: Costs) -> int:
        """Return the next H.

        Args:
            H: the current value.
            steps_left: steps until the end of the run.
            sent: bytes that a node has sent so far, as a mean over nodes.
            costs: the costs of the rest of the run.
        """
        if not costs.each:
            return H
        steps, left = max(1, steps_left), self.total_bytes - sent - costs.per_step * steps_left
        rounds = math.floor(left / costs.each + 1e-9)
        if rounds < 1 and costs.final and steps_left:
            raise TrainingError(
                f"tuner={self!r}: a node has sent {sent:,.0f} bytes, and the last synchronization takes "
                f"{costs.final:,.0f} more: raise the budget, or give final_sync=False"
            )
        return math.ceil(steps / rounds) if rounds > 0 else steps + 1

    def check(self, H: int, costs: Costs, total_steps: int) -> None:
        """Raise ArgumentError if the budget does not cover the first round and the last synchronization."""
        meetings = [f"after H={H} steps"] * (total_steps >= H)
        meetings += ["at the end (final_sync)"] * (costs.final > 0 and total_steps != H)
        least = costs.each * len(meetings) + costs.per_step * total_steps
        if least > self.total_bytes * (1 + 1e-9):
            raise ArgumentError(
                f"tuner={self!r} is too small: a node synchronizes {' and '.join(meetings)}, which takes {least:,.0f} "
                "bytes in all, averaged over nodes: raise the budget, or H to the steps of the run, or give "
                "final_sync=False, or leave it out"
            )


class TunedRounds(Rounds):
    """Rounds whose length a tuner chooses during the run; ended rounds keep their length."""

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
        """End the current round at `step`, with rounds of H steps after it."""
        while self._ends[-1] + self.H <= step:
            self._ends.append(self._ends[-1] + self.H)
        if self._ends[-1] < step:  # a round that was cut short
            self._ends.append(step)
        self.H = H


class BudgetTuning(Stateful):
    """A budget in a run, which watches the bytes and chooses H.

    Args:
        budget: the rule.
        H: the first value.

    Attributes:
        modules: the numbers of the communication modules that follow the choice.
    """

    def __init__(self, budget: Budget, H: int):
        self.budget, self.rounds = budget, TunedRounds(H)
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
        costs = costs_of(composition.modules, self.rounds, composition.strategy.averaging, fleet, run)
        self._per_step, self._most = (0.0, 0.0) if costs is None else (costs.per_step, costs.each)
        if costs is not None:
            self.budget.check(self.rounds.H, costs, run.total_steps)
        fleet.state.register("tuning", self)

    def _bytes(self) -> float:
        return float(self.composition.fleet.comm.ledger.tx_bytes.mean())

    def before_meeting(self, acting: Sequence[int]) -> None:
        self._before = self._bytes()

    def after_meeting(self, acting: Sequence[int], step: int) -> None:
        if not {*acting} & {*self.modules}:
            return
        self._sent = self._bytes()
        self._most = max(self._most, self._sent - self._before)
        costs = Costs(self._most, self._per_step, self._most if self.run.final_sync else 0.0)
        H = self.budget.choose(self.rounds.H, self.run.total_steps - step, self._sent, costs)
        self.rounds.end(step, H)

    def figures(self) -> dict[str, float]:
        return {"tuned_H": float(self.rounds.H)}

    def shared(self) -> Tensors:
        numbers = [self.rounds.H, self._sent, math.nan, math.nan, 0.0, self._most]  # three are of tuners of before
        return {"numbers": torch.tensor(numbers, dtype=torch.float64), "ends": torch.tensor(self.rounds._ends)}

    def load_shared(self, tensors: Tensors) -> None:
        H, self._sent, *_, self._most = tensors["numbers"].tolist()
        self.rounds._ends, self.rounds.H = tensors["ends"].tolist(), int(H)


def costs_of(modules: Sequence[Module], rounds: Rounds, averaging: Averaging, fleet: Fleet, run: Run) -> Costs | None:
    """Return the costs of the rest of a run by the formulas of `modules`, or None if a module has none.

    Args:
        modules: the strategy's modules.
        rounds: the rounds whose length the tuner chooses.
        averaging: the strategy's averaging options.
    """
    P = sum(block.layout.total for block in fleet.blocks)
    b = sum(block.layout.total * block.layout.dtype.itemsize for block in fleet.blocks) / P

    def sent(traffic: list[Traffic]) -> float:
        repeated = averaging.traffic(traffic, run.num_nodes, b)
        return sum(t.sent_bytes(run.num_nodes) / t.every_steps for t in repeated)

    def follows(module: Any) -> bool:
        return any(getattr(x, "rounds", None) is rounds for x in (module, getattr(module, "average", None)))

    try:
        formulas = [(m, m.traffic(P, run.num_nodes, b)) for m in modules]
    except ArgumentError:
        return None
    each = sent([t for m, traffic in formulas if follows(m) for t in traffic]) * rounds.end_after(0)
    per_step = sent([t for m, traffic in formulas if not follows(m) for t in traffic])
    return Costs(each, per_step, each if run.final_sync else 0.0)
