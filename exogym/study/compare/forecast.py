"""Predicted time in a comparison: the virtual clock's options for each run, and a step's measured seconds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.clock import StepTime
from exogym.data.stream import length_of
from exogym.errors import ArgumentError, check_count, checked
from exogym.network import Network, readable_seconds
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.study.advise.prediction import step_time
from exogym.study.tasks import Task

MEASURED = "measured"
# A short run: this many seconds, but at least this many steps. The first steps warm caches up and don't count.
TRIAL_S, LEAST_STEPS, MOST_STEPS, WARM_UP = 0.5, 8, 1000, 3
FEW = 8  # examples of a short evaluation, from which a long evaluation's time is extrapolated
LONG_S = 2.0  # if an evaluation of all examples would take longer, it is extrapolated
NO_TRAFFIC = Network("1Gbps")  # for `single`, which never sends: any network will do


@dataclass(frozen=True)
class Forecast:
    """The network for which a comparison predicts times, and the seconds of each node's steps.

    Attributes:
        name: the network's name, as the caller passed it.
        measured_step_s: seconds of a step at speed 1, measured on this machine, or None if the caller passed them.
    """

    name: str
    network: Network
    step_time: StepTime
    measured_step_s: float | None = None

    @property
    def is_measured(self) -> bool:
        return self.measured_step_s is not None

    def fit_options(self, alone: bool) -> dict[str, Any]:
        """Return the options of `fit` for a virtual clock. If `alone`, node 0 trains without other nodes."""
        if not alone:
            return {"network": self.network, "step_seconds": self.step_time}
        fleet = self.step_time
        first = StepTime(
            float(fleet.seconds[0]), sigma=fleet.sigma, straggler_share=fleet.straggler_share,
            straggler_factor=fleet.straggler_factor, seed=fleet.seed,
        )  # fmt: skip
        return {"network": NO_TRAFFIC, "step_seconds": first}

    def describe(self) -> dict[str, Any]:
        """Return a description as JSON values, which is enough to predict the same times again."""
        steps = self.step_time
        drawn = {name: getattr(steps, name) for name in ("sigma", "straggler_share", "straggler_factor", "seed")}
        return {
            "title": self.title, "network": self.network.describe(), "step_seconds": steps.seconds.tolist(),
            "is_measured": self.is_measured, "measured_step_s": self.measured_step_s,
        } | ({} if steps.is_fixed else drawn)  # fmt: skip

    @property
    def title(self) -> str:
        """A text of a few words that names the network and the seconds of a step."""
        low, high = (readable_seconds(float(s)) for s in (self.step_time.seconds.min(), self.step_time.seconds.max()))
        return f"{self.name}, {low if low == high else f'{low} to {high}'} a step"

    def __str__(self) -> str:
        exact = "" if self.name == repr(self.network) else f", which is {self.network!r}"
        return f"{self.title}{' as measured here' if self.is_measured else ''}{exact}"


def forecast_of(
    network: Any, step_seconds: Any, speeds: Sequence[float] | None, nodes: int, measure: Callable[[], float]
) -> Forecast:
    """Return the forecast for the arguments of `compare`. `measure()` measures a step and returns its seconds.

    Raise ArgumentError if the network, step times or speeds are for another number of nodes, or a step takes no time.
    """
    given, network = network, Network.of(network)
    name = given if isinstance(given, str) else repr(network)
    is_measured = step_seconds is None or (isinstance(step_seconds, str) and step_seconds.strip() == MEASURED)
    steps = step_time(1.0 if is_measured else step_seconds, speeds, network, nodes)  # raises before a step is measured
    if not is_measured:
        return Forecast(name, network, steps)
    measured_s = measure()
    return Forecast(name, network, step_time(measured_s, speeds, network, nodes), measured_s)


def check_timed(network: Any, step_seconds: Any, speeds: Any, target_loss: Any) -> None:
    """Raise ArgumentError for a target loss that is not finite, and for options of a network without a network."""
    for name, given in (("step_seconds", step_seconds), ("speeds", speeds)):
        if network is None and given is not None:
            raise ArgumentError(
                f"{name}={given!r} needs a network for the virtual time: pass one, for example network='wifi'"
            )
    number = isinstance(target_loss, int | float) and not isinstance(target_loss, bool)
    if target_loss is not None and not (number and math.isfinite(target_loss)):
        raise ArgumentError(f"target_loss={target_loss!r} must be a number: the validation loss to reach")


@checked
def measured_step_s(
    task: Task,
    batch_size: int | None = None,
    device: str | torch.device = "auto",
    loss_fn: Callable[..., Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
) -> float:
    """Measure a node's training step on this machine, in a run of about half a second. Return the median seconds.

    A step consists of loading the batch, the forward pass, the backward pass and the inner optimizer. The time does not
    include a strategy's communication.

    Args:
        batch_size: examples per step, by default the task's batch size.
        device, loss_fn: as in `LocalTrainer`.
        options: further options of `LocalTrainer.fit` that change how a step is computed.

    Raises:
        ArgumentError, DataError, ModelError: the task cannot be trained.
        TrainingError: the task's loss is not a number.

    >>> from exogym.tasks import load_task
    >>> 1e-5 < measured_step_s(load_task("digits")) < 1
    True
    """
    size = task.batch_size if batch_size is None else batch_size
    check_count("batch_size", size)
    start = time.perf_counter()

    def enough(loop: Any) -> bool:
        return loop.step >= LEAST_STEPS + WARM_UP and time.perf_counter() - start > TRIAL_S

    silent = CommunicateOptimizeStrategy(task.inner_optim, lr=task.lr, max_norm=task.max_norm)
    trainer = LocalTrainer(task.make_model(), task.train, loss_fn=loss_fn)
    trainer.fit(
        silent, max_steps=MOST_STEPS, batch_size=size, network=NO_TRAFFIC, device=device, progress=False,
        callbacks=[Every(1, enough)], **(options or {}),
    )  # fmt: skip
    _, ends_s = trainer.history.column("time_s")
    return float(statistics.median(np.diff(ends_s)[WARM_UP - 1 :]))


def measured_evaluation_s(
    task: Task,
    batch_size: int | None = None,
    device: str | torch.device = "auto",
    loss_fn: Callable[..., Tensor] | None = None,
) -> float:
    """Measure an evaluation on the task's whole validation set on this machine. Return its seconds.

    An evaluation may take much longer than a forward pass: Whisper, for example, transcribes speech word by word.
    ExoGym first measures a few examples, and then all examples if they will take at most about two seconds. Otherwise
    it extrapolates.

    Args:
        batch_size, device, loss_fn: as in `measured_step_s`.

    Raises:
        ArgumentError, DataError, ModelError: the task cannot be trained.

    >>> from exogym.tasks import load_task
    >>> 1e-5 < measured_evaluation_s(load_task("digits")) < 10
    True
    """
    whole = length_of(task.val, "the validation data set")

    def timed(examples: int) -> float:
        took: list[float] = []

        def evaluate(loop: Any) -> None:
            start = time.perf_counter()
            loop.evaluate()
            took.append(time.perf_counter() - start)

        silent = CommunicateOptimizeStrategy(task.inner_optim, lr=task.lr, max_norm=task.max_norm)
        trainer = LocalTrainer(task.make_model(), task.train, task.val, loss_fn=loss_fn)
        trainer.fit(
            silent, max_steps=1, batch_size=batch_size or task.batch_size, val_size=examples, device=device,
            progress=False, callbacks=[Every(1, evaluate)],
        )  # fmt: skip
        return took[0]

    few = min(FEW, whole)
    part_s = timed(few)
    expected_s = part_s * whole / few
    return expected_s if few == whole or expected_s > LONG_S else timed(whole)
