"""What serves callbacks: the run as they see it, and the processes that do what the main one's callbacks ask of all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from exogym.core.base import pulse
from exogym.core.communicator import tell
from exogym.core.fleet.state import Shared
from exogym.core.record.history import History
from exogym.core.training.agenda import Agenda, divides
from exogym.core.training.evaluating import Model, Models
from exogym.core.training.standing import Standing
from exogym.errors import ArgumentError

if TYPE_CHECKING:
    from exogym.core.training.timing import Timing


class Calling:
    """The run as a callback sees it (`exogym.callbacks.Running`); it calls the callbacks that are due.

    Callbacks run in the main process. A model that they ask for lies in all processes, so the others wait in `_serve`
    for wishes, and do what the main one is about to do.

    Attributes:
        driver, worker, timing: for looking deeper than `Running` promises.
    """

    def __init__(self, agenda: Agenda, standing: Standing, models: Models, timing: Timing | None = None):
        self.standing, self.models = standing, models
        self._agenda, self._wire = agenda, models.wire
        self._is_calling = False
        self.fleet, self.driver, self.worker, self.timing = models.fleet, models.driver, models.driver.worker, timing
        for k, callback in enumerate(agenda.callbacks):
            part = Shared(callback.state, callback.load_state)
            self.fleet.state.register(f"callback {k} {type(callback).__name__}", part)

    @property
    def step(self) -> int:
        return self.standing.step

    @property
    def evaluated_at(self) -> int:
        return self.standing.evaluated_at

    @property
    def epoch(self) -> int:
        return self.standing.epoch

    @property
    def history(self) -> History:
        return self.standing.history

    def evaluate(self, node: int | None = None) -> dict[str, float]:
        """Evaluate the averaged (or outer) model, or one node's, on the validation set; {} without one.

        Raises:
            ArgumentError: no such node, or one that sits out the round: it holds no model.
        """
        if self.models.evaluator is None:
            return {}
        self.models.check_node(node)
        self._ask("evaluate", node)
        return self.models.evaluate(node)

    def measure(self, vectors: list[Tensor], buffers: dict[str, Tensor]) -> dict[str, float]:
        """Evaluate parameters, (P,) per block, and buffers on the validation set; {} without one."""
        if self.models.evaluator is None:
            return {}
        if self._wire.devices.parts > 1:
            self._ask("measure")
        return self.models.measure(vectors, buffers)

    def average(self) -> Model:
        """Return (P,) per block and the buffers of the averaged (or outer) model; traffic is not recorded."""
        self._ask("average")
        return self.models.average()

    def rows(self) -> list[Tensor]:
        """Return the parameters of all nodes, (N, P) per block; traffic is not recorded.

        Where clients are sampled, of those at work: `fleet.comm.present`.
        """
        self._ask("rows")
        return self.models.rows()

    def save(self) -> Path:
        """Write a checkpoint of this moment; return its folder."""
        self._ask("save")
        return self.standing.save()

    def beat(self) -> None:
        """Say, from a callback that takes long, that it goes on: the time that `hang_s` gives it starts anew."""
        pulse.beat()

    # Calling

    def call(self, every: bool = True) -> None:
        """Call the callbacks that are due here; without `every` those only that follow an evaluation."""
        is_evaluated = self.evaluated_at == self.step
        due = [
            callback for callback in self._agenda.callbacks
            if (every and divides(callback.steps, self.step)) or (callback.at_evaluations and is_evaluated)
        ]  # fmt: skip
        if not due:
            return
        if not self._wire.is_main:
            self._serve()
            return
        running: Any = self
        self._is_calling = True
        try:
            for callback in due:
                self.beat()
                if callback(running) is True:
                    if not callback.may_end:
                        raise ArgumentError(f"{type(callback).__name__} says may_end=False and returned True: drop one")
                    self.standing.stopped = True
        finally:
            self._is_calling = False
        tell(self._wire, ["go on", self.standing.stopped])

    def _ask(self, wish: str, value: Any = None) -> None:
        """Have the other processes, which `_serve`, do what this one is about to."""
        if self._is_calling:
            tell(self._wire, [wish, value])

    def _serve(self) -> None:
        """Take part in what the main process's callbacks ask of all, until they are done."""
        wishes: dict[str, Callable[[Any], Any]] = {
            "evaluate": self.models.evaluate,
            "measure": lambda _: self.models.measure(None, {}),
            "average": lambda _: self.models.average(),
            "rows": lambda _: self.models.rows(),
            "save": lambda _: self.standing.save(),
        }
        while True:
            wish, value = tell(self._wire, None)
            if wish == "go on":
                self.standing.stopped = value
                return
            wishes[wish](value)
