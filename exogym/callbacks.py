"""Callbacks: functions that the training loop calls after evaluations, or every n steps.

A callback is any callable that takes one argument, the training loop (a `Running` object). `fit` calls the callback
after each evaluation. If you wrap a function in `Every(n, function)`, `fit` calls it after each n-th step. A callback
runs in the main process only. It can end the training by returning True. If it puts submodules into training or
evaluation mode, all nodes train with these modes from then on. It cannot freeze or unfreeze parameters: for that, train
in two fits.

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

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError, check_count, checked

Model = TypeVar("Model", bound=nn.Module)


class Running(Protocol):
    """The object that a callback gets: the training loop of the running training.

    Attributes:
        step: the number of steps done.
        evaluated_at: step of the last evaluation.
        history: the run's records. `history.add_evaluation(step, epoch, values, node=None)` adds your own numbers.
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
        """Return all N nodes' P parameters, (N, P) per block, from all processes. Bytes sent for them do not count."""

    def average(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the averaged (or outer) model: its P parameters, a tensor (P,) per block, and its buffers by name."""

    def evaluate(self, node: int | None = None, *, own_data: bool = False) -> dict[str, float]:
        """Return losses and metrics of the model of `node`, or of the averaged model; {} without a validation set.

        With `own_data`, evaluate the node on its own validation set: `val_dataset` is a function of the node. Between
        rounds, sampled clients without personal parameters all have the server's model.
        """

    @property
    def clients(self) -> Sequence[int]:
        """The nodes that `evaluate(node, own_data=True)` takes now."""

    def measure(self, vectors: list[Tensor], buffers: dict[str, Tensor]) -> dict[str, float]:
        """Return losses and metrics of any parameters and buffers, in the form that `average` returns."""

    def save(self) -> Any:
        """Write a checkpoint if there is a save_dir, and return its folder."""

    def beat(self) -> None:
        """Report that a long callback is still running. The time limit `hang_s` of the `Placement` starts anew."""


class Callback:
    """Base class for callbacks that choose when they are called, or have state that checkpoints save.

    Attributes:
        steps: call the callback after every step that this number divides. If `steps` is None, the callback is not
            called after steps.
        at_evaluations: whether to call the callback after each evaluation.
        may_end: whether the callback may end the training by returning True. If so, the run measures the consensus
            distance before each synchronization at the callback's steps, because the last evaluation may need this
            distance. Between hosts, the measurement sends all rows twice.
    """

    steps: int | None = None
    at_evaluations = True
    may_end = True

    @staticmethod
    def of(given: Callable[[Running], Any]) -> Callback:
        """Return `given` as a Callback. A plain function becomes a callback that is called after each evaluation."""
        return given if isinstance(given, Callback) else _Called(given)

    def __call__(self, loop: Running) -> Any:
        raise NotImplementedError(f"{type(self).__name__} needs a method __call__(loop)")

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint saves."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Load tensors that `state` returned. They are {} in a new run, or if the checkpoint has no such callback."""


class _Called(Callback):
    def __init__(self, function: Callable[[Running], Any]):
        self.function = function

    def __call__(self, loop: Running) -> Any:
        return self.function(loop)


class Every(_Called):
    """Call `function(loop)` after every step that `steps` divides. A stretch ends at each such step.

    Give `may_end=False` if the function never returns True. This saves communication between hosts (see `Callback`).

    >>> Every(100, lambda loop: loop.step >= 500).steps
    100
    """

    at_evaluations = False

    def __init__(self, steps: int, function: Callable[[Running], Any], *, may_end: bool = True):
        super().__init__(function)
        check_count("steps", steps)
        self.steps, self.may_end = steps, may_end


class EvaluateNodes(Callback):
    """At each evaluation, also evaluate each present node's model. The history gets a record for each node."""

    may_end = False

    def __call__(self, loop: Running) -> None:
        for node in list(loop.fleet.comm.present):
            loop.history.add_evaluation(loop.step, loop.epoch, loop.evaluate(node), node=node)


class EvaluateClients(Callback):
    """At each evaluation, evaluate each client's own model on the client's own validation set.

    The trainer's `val_dataset` must be a function (node, num_nodes, is_train) that returns the node's validation set.
    The history gets a record for each client. The averaged model's record gets three numbers for each value, such as
    `val_loss`, over the n clients with equal weights:

        clients_val_loss            the mean
        clients_val_loss_worst      the mean of the worst decile: the ceil(n / 10) smallest values, or the largest if
                                    the value is in `lower_is_better`
        clients_val_loss_spread     the standard deviation (divided by n)

    A client's model is its row: after a round, theta and the client's personal parameters. So let evaluations follow
    rounds (`val_interval` is a multiple of H). Sampled clients without personal parameters all have the server's model
    theta, so all of them count. Sampled clients with personal parameters count only if they have a row: if idle clients
    have no row, these are the next round's clients. Clients without validation data never count. If not all N count,
    the record says how many do: `clients_counted`.

    Args:
        lower_is_better: names of metrics, without "val_", whose largest values are the worst. Name your own errors.

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
                f"lower_is_better={lower_is_better!r} must be several names: give [{lower_is_better!r}]"
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


class WeightAverage(Callback):
    """Average the averaged (or outer) model over time: exponentially (EMA), or as a plain mean (SWA).

    Every k steps, theta (the model after that step) updates the average a. n is the number of models so far:

        a <- d a + (1 - d) theta      with `decay` d; the first model is copied
        a <- a + (theta - a) / n      with `decay=None`

    For DiLoCo theta is the outer model, which changes at outer steps only. Floating-point buffers (BatchNorm's
    statistics) are averaged in the same way; other buffers are copied. The nodes send nothing for this average, so
    their bytes stay the same. Each evaluation also evaluates the average. The averaged model's record gets the values
    `average_val_loss`, `average_val_accuracy`, ... Checkpoints save the average. A resumed run whose checkpoint has no
    average starts a new average.

    Polyak, Juditsky, SIAM J. Control Optim. 30, 1992; Izmailov et al., arXiv:1803.05407. Memory: one element per
    parameter in the model's dtype, in the main process.

    Args:
        decay: d, at least 0 and less than 1. If `decay` is None, a is the plain mean.
        steps: k, the number of steps between two models of the average.
        start_step: ignore models before this step.

    >>> average = WeightAverage(decay=0.99, steps=10)
    """

    may_end = False

    @checked
    def __init__(self, decay: float | None = 0.99, *, steps: int = 1, start_step: int = 0):
        if decay is not None and not (isinstance(decay, int | float) and 0 <= decay < 1):
            raise ArgumentError(f"decay={decay!r} must be from 0 to under 1, or None for the plain mean")
        check_count("steps", steps)
        check_count("start_step", start_step, least=0)
        self.decay, self.steps, self.start_step = decay, steps, start_step
        self.count, self._step = 0, -1
        self._vectors: list[Tensor] = []
        self._buffers: dict[str, Tensor] = {}
        self._names: list[tuple[Any, int]] = []

    def __call__(self, loop: Running) -> None:
        is_turn = self.steps is not None and loop.step % self.steps == 0
        if is_turn and loop.step >= max(1, self.start_step) and loop.step != self._step:
            vectors, buffers = loop.average()
            self._take(vectors, buffers)
            self._step = loop.step
        self._names = [
            (slot, b) for b, block in enumerate(loop.fleet.blocks) for slot in block.layout.whole or block.layout
        ]
        if self.count and loop.evaluated_at == loop.step:
            device = loop.fleet.blocks[0].params.device
            vectors = [x.to(device) for x in self._vectors]
            buffers = {name: x.to(device) for name, x in self._buffers.items()}
            values = {f"average_{name}": value for name, value in loop.measure(vectors, buffers).items()}
            loop.history.add_evaluation(loop.step, loop.epoch, values)

    def _take(self, vectors: list[Tensor], buffers: dict[str, Tensor]) -> None:
        """Add a model to the average."""
        self.count += 1
        if self.count == 1:
            self._vectors = [x.clone() for x in vectors]
            self._buffers = {name: x.clone() for name, x in buffers.items()}
            return
        share = 1 / self.count if self.decay is None else 1 - self.decay
        self._vectors = [old.to(new.device).lerp_(new, share) for old, new in zip(self._vectors, vectors, strict=True)]
        for name, new in buffers.items():
            old = self._buffers[name].to(new.device)
            self._buffers[name] = old.lerp_(new, share) if new.is_floating_point() else new.clone()

    @torch.no_grad()
    def load_into(self, model: Model) -> Model:
        """Copy the average's parameters and buffers into `model`, and return `model`.

        Raises:
            ArgumentError: there is no average yet, or `model` has another architecture than the trained model.
        """
        if not self.count:
            raise ArgumentError(
                "no model was averaged: give this callback to fit(callbacks=[...]), and train past its start_step"
            )
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        given = {slot.name: slot.of(self._vectors[b]) for slot, b in self._names} | self._buffers
        for name, x in given.items():
            if name not in tensors or tensors[name].shape != x.shape:
                raise ArgumentError(f"model has no {name!r} of shape {tuple(x.shape)}: give the model that was trained")
        for name, x in given.items():
            tensors[name].copy_(x)
        return model

    def state(self) -> dict[str, Tensor]:
        state = {f"vector.{b}": x for b, x in enumerate(self._vectors)}
        state |= {f"buffer.{name}": x for name, x in self._buffers.items()}
        return state | {"counts": torch.tensor([self.count, self._step])}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.count, self._step = state["counts"].tolist() if state else (0, -1)
        self._vectors = [state[f"vector.{b}"] for b in range(sum(name.startswith("vector.") for name in state))]
        self._buffers = {name.removeprefix("buffer."): x for name, x in state.items() if name.startswith("buffer.")}
