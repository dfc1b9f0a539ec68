"""Callbacks: functions that the training loop calls after evaluations, or every n steps.

A callback is any callable that takes one argument, the training loop (a `Running` object). `fit` calls it after each
evaluation or, if it is wrapped in `Every(n, function)`, after each n-th step, in the main process only. A callback can
end the training by returning True. Callbacks must leave submodules in their mode, and can't freeze or unfreeze
parameters (for that, train in two fits).

This callback is called every two steps, and has state that checkpoints save:

>>> import torch
>>> from exogym import LocalTrainer
>>> from exogym.strategy import DiLoCoStrategy
>>> from exogym.testing import small_problem
>>> class Norms(Callback):
...     steps, at_evaluations, may_end = 2, False, False
...     def __init__(self):
...         self.seen = []
...     def __call__(self, loop: Running):
...         self.seen.append((loop.step, float(loop.rows()[0].norm())))
...     def state(self):
...         return {"seen": torch.tensor(self.seen)}
...     def load_state(self, state):
...         self.seen = state["seen"].tolist() if state else []
>>> model, data = small_problem()
>>> trainer, norms = LocalTrainer(model, data, loss_fn=torch.nn.functional.mse_loss), Norms()
>>> _ = trainer.fit(DiLoCoStrategy(H=2, lr=0.01), num_nodes=2, max_steps=4, batch_size=8, callbacks=[norms])
>>> [step for step, norm in norms.seen]
[2, 4]
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from exogym.core.base.lazy import absent
from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError, check_count, checked

__getattr__ = functools.partial(absent, __name__)  # callbacks that used to be here


class Running(Protocol):
    """The training loop, which callbacks receive.

    Attributes:
        step: the number of steps done.
        evaluated_at: the step of the last evaluation.
        history: the run's records. Add your own numbers by `history.add_evaluation(step, epoch, values, node=None)`.
        fleet: this process's rows (blocks and their layout) and buffers.
    """

    step: int
    evaluated_at: int
    history: Any
    fleet: Fleet

    @property
    def epoch(self) -> int:
        """The epoch of the last step, from 0."""

    def rows(self) -> list[Tensor]:
        """Return all N nodes' P parameters, (N, P) per block, from all processes. The traffic is not counted."""

    def average(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the averaged (or outer) model: its P parameters, (P,) per block, and its buffers by name."""

    def evaluate(self, node: int | None = None, *, own_data: bool = False) -> dict[str, float]:
        """Return losses and metrics of `node`'s model or the averaged model, or {} without a validation set.

        With `own_data`, evaluate the node on its own validation set (`val_dataset` is a function of the node). Between
        rounds, sampled clients without personal parameters all have the server's model.
        """

    @property
    def clients(self) -> Sequence[int]:
        """The nodes that `evaluate(node, own_data=True)` accepts now."""

    def measure(self, vectors: list[Tensor], buffers: dict[str, Tensor]) -> dict[str, float]:
        """Return losses and metrics of any parameters and buffers in the form that `average` returns."""

    def save(self) -> Any:
        """Write a checkpoint if there is a save_dir, and return its folder."""

    def beat(self) -> None:
        """Report that a long callback is still running, which resets the time limit `hang_s` of the `Placement`."""


class Callback:
    """Base class of callbacks that choose when they are called or have state that checkpoints save.

    Attributes:
        steps: call the callback after every step that this number divides. None means never after steps.
        at_evaluations: whether to call the callback after each evaluation.
        may_end: whether the callback may end the training by returning True. If so, the run measures the consensus
            distance before each synchronization at the callback's steps, because the last evaluation may need it.
            Between hosts, this sends all rows twice.
    """

    steps: int | None = None
    at_evaluations = True
    may_end = True

    @staticmethod
    def of(given: Callable[[Running], Any]) -> Callback:
        """Return `given` as a Callback. A plain function is called after each evaluation."""
        return given if isinstance(given, Callback) else _Called(given)

    def __call__(self, loop: Running) -> Any:
        raise NotImplementedError(f"{type(self).__name__} needs a method __call__(loop)")

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint saves."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load tensors that `state` returned, or {} in a new run or if the checkpoint has no such callback."""


class _Called(Callback):
    def __init__(self, function: Callable[[Running], Any]):
        self.function = function

    def __call__(self, loop: Running) -> Any:
        return self.function(loop)


class Every(_Called):
    """Call `function(loop)` after every step that `steps` divides, at which processes wait for each other.

    Pass `may_end=False` if the function never returns True, which saves communication between hosts (see `Callback`).

    >>> Every(100, lambda loop: loop.step >= 500).steps
    100
    """

    at_evaluations = False

    def __init__(self, steps: int, function: Callable[[Running], Any], *, may_end: bool = True):
        super().__init__(function)
        check_count("steps", steps)
        self.steps, self.may_end = steps, may_end


class EvaluateNodes(Callback):
    """At each evaluation, also evaluate each present node's model, as a record per node in the history."""

    may_end = False

    def __call__(self, loop: Running) -> None:
        for node in list(loop.fleet.comm.present):
            loop.history.add_evaluation(loop.step, loop.epoch, loop.evaluate(node), node=node)


class EvaluateClients(Callback):
    """At each evaluation, evaluate each client's own model on the client's own validation set.

    The trainer's `val_dataset` must be a function (node, num_nodes, is_train) that returns the node's validation set.
    The history gets a record per client, and the averaged model's record three numbers for each value, such as
    `val_loss`, over the n clients with equal weights:

        clients_val_loss            the mean
        clients_val_loss_worst      the mean of the worst decile: the ceil(n / 10) smallest values, or the largest if
                                    the value is in `lower_is_better`
        clients_val_loss_spread     the standard deviation (divided by n)

    A client's model is its row, which after a round is theta with the client's personal parameters, so evaluate after
    rounds (`val_interval` a multiple of H). Sampled clients without personal parameters all have the server's model
    theta and all count. Sampled clients with personal parameters count only if they have a row: if idle clients have
    none, only the next round's clients do. Clients without validation data never count. If not all N count, the record
    has the number that do, `clients_counted`.

    Args:
        lower_is_better: names of metrics, without "val_", whose largest values are the worst, such as your own errors.

    >>> from exogym import LocalTrainer
    >>> from exogym.strategy import FedPerStrategy
    >>> from exogym.testing import small_problem
    >>> model, data = small_problem()
    >>> def own(node, num_nodes, is_train): return data
    >>> trainer = LocalTrainer(model, data, own, loss_fn=torch.nn.functional.mse_loss)
    >>> fit = {"num_nodes": 2, "max_steps": 4, "batch_size": 8, "callbacks": [EvaluateClients()]}
    >>> _ = trainer.fit(FedPerStrategy(H=2, lr=0.01), **fit)
    >>> trainer.history.last["clients_val_loss"] <= trainer.history.last["clients_val_loss_worst"]
    True
    """

    may_end = False

    @checked
    def __init__(self, lower_is_better: Collection[str] = ("loss", "perplexity", "wer")):
        if isinstance(lower_is_better, str):
            raise ArgumentError(
                f"lower_is_better={lower_is_better!r} must be a list of names: pass [{lower_is_better!r}]"
            )
        self.lower_is_better = {"loss", *lower_is_better}

    def __call__(self, loop: Running) -> None:
        found: dict[str, list[float]] = {}
        counted = 0
        for node in loop.clients:
            values = loop.evaluate(node, own_data=True)
            if not values:
                continue
            counted += 1
            loop.history.add_evaluation(loop.step, loop.epoch, values, node=node)
            for name, value in values.items():
                found.setdefault(name, []).append(value)
        summary = {} if counted == loop.fleet.num_nodes else {"clients_counted": float(counted)}
        for name, known in found.items():
            descending = name.removeprefix("val_") in self.lower_is_better
            x = torch.tensor(known, dtype=torch.float64).sort(descending=descending).values
            worst = x[: math.ceil(len(x) / 10)].mean()
            for end, number in (("", x.mean()), ("_worst", worst), ("_spread", x.std(correction=0))):
                summary[f"clients_{name}{end}"] = float(number)
        loop.history.add_evaluation(loop.step, loop.epoch, summary)
