"""Callbacks: a function of the running training, called after evaluations or every so many steps.

A callback is any callable taking a `Running` training. It is called after each evaluation; wrapped in `Every(n,
function)`, after each n-th step. It runs once, whatever the layout, may use what `Running` has,
and ends the training by returning True.

A callback with a rhythm and a state of its own, which checkpoints keep:

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

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError, check_count, checked

Model = TypeVar("Model", bound=nn.Module)


class Running(Protocol):
    """A training as a callback sees it.

    Attributes:
        step: steps done; evaluated_at: the step of the last evaluation.
        history: its records; `history.add_evaluation(step, epoch, values, node=None)` adds numbers of one's own.
        fleet: blocks, their layout, buffers; the rows that this process holds.
    """

    step: int
    evaluated_at: int
    history: Any
    fleet: Fleet

    @property
    def epoch(self) -> int:
        """The epoch of the last step, from 0."""

    def rows(self) -> list[Tensor]:
        """Return the parameters of all nodes, (N, P) per block, from wherever they are; traffic is not recorded."""

    def average(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return (P,) per block and the buffers of the averaged (or outer) model."""

    def evaluate(self, node: int | None = None) -> dict[str, float]:
        """Return losses and metrics of a node's model, or (None) of the averaged one; {} without a validation set."""

    def measure(self, vectors: list[Tensor], buffers: dict[str, Tensor]) -> dict[str, float]:
        """Return the same of any parameters, given as `average` gives them, anywhere."""

    def save(self) -> Any:
        """Write a checkpoint, where there is a save_dir; return its folder."""

    def beat(self) -> None:
        """Say that a callback which takes very long in several processes goes on (see `hang_s` of `fit`)."""


class Callback:
    """A callback that has a rhythm of its own, or state that belongs into checkpoints.

    Attributes:
        steps: it is called after every step divisible by this, where nodes meet; None: never for that.
        at_evaluations: whether it is called after each evaluation.
        may_end: whether it may end the training. If so, how far nodes are apart is measured before a synchronisation at
            its steps, for the evaluation that would follow: between hosts that moves all rows twice.
    """

    steps: int | None = None
    at_evaluations = True
    may_end = True

    @staticmethod
    def of(given: Callable[[Running], Any]) -> Callback:
        """Return a callback as given, or one that calls the function `given` after each evaluation."""
        return given if isinstance(given, Callback) else _AtEvaluations(given)

    def __call__(self, loop: Running) -> Any:
        raise NotImplementedError(f"{type(self).__name__} needs a method __call__(loop)")

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint is to hold."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` returned; it is {} where a run starts, or its checkpoint knew no such callback."""


class Every(Callback):
    """Call `function(loop)` after every step divisible by `steps`. Nodes meet there, so stretches end there.

    With `may_end=False` the function never returns True, which is cheaper between hosts (see `Callback`).

    >>> Every(100, lambda loop: loop.step >= 500).steps
    100
    """

    at_evaluations = False

    def __init__(self, steps: int, function: Callable[[Running], Any], *, may_end: bool = True):
        check_count("steps", steps)
        self.steps, self.function, self.may_end = steps, function, may_end

    def __call__(self, loop: Running) -> Any:
        return self.function(loop)


class _AtEvaluations(Callback):
    def __init__(self, function: Callable[[Running], Any]):
        self.function = function

    def __call__(self, loop: Running) -> Any:
        return self.function(loop)


class EvaluateNodes(Callback):
    """At each evaluation also evaluate every single node that is there, as rows of their own in the history."""

    may_end = False

    def __call__(self, loop: Running) -> None:
        for node in list(loop.fleet.comm.present):
            loop.history.add_evaluation(loop.step, loop.epoch, loop.evaluate(node), node=node)


class WeightAverage(Callback):
    """The average over time of the averaged (or outer) model: exponential (EMA), or of all (SWA).

    After every k-th step, with theta the model there and n the number of models so far, this one included:

        a <- d a + (1 - d) theta      with `decay` d; the first is taken as it is
        a <- a + (theta - a) / n      without

    so for DiLoCo theta is the outer model, which changes at outer steps only. Floating-point buffers (BatchNorm's
    statistics) are averaged likewise, others taken as they are. Nothing is sent: nodes' bytes stay what they were. At
    each evaluation it is evaluated too, as `average_val_loss`, `average_val_accuracy`, ... in the averaged model's row.
    It is saved in checkpoints; a run that goes on without one of its own in the checkpoint begins anew there.

    Polyak, Juditsky, SIAM J. Control Optim. 30, 1992; Izmailov et al., arXiv:1803.05407. Memory: P elements in the
    model's dtype, in the main process.

    Args:
        decay: d, from 0 to under 1; None: the plain mean.
        steps: k.
        start_step: models before this step are left out.

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
            vectors, buffers = self._on(loop.fleet.blocks[0].params.device)
            values = {f"average_{name}": value for name, value in loop.measure(vectors, buffers).items()}
            loop.history.add_evaluation(loop.step, loop.epoch, values)

    def _take(self, vectors: list[Tensor], buffers: dict[str, Tensor]) -> None:
        """Take one more model into the average."""
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

    def _on(self, device: torch.device) -> tuple[list[Tensor], dict[str, Tensor]]:
        return [x.to(device) for x in self._vectors], {name: x.to(device) for name, x in self._buffers.items()}

    @torch.no_grad()
    def load_into(self, model: Model) -> Model:
        """Give `model` the average's parameters and buffers; return it. It is of the architecture that was trained.

        Raises:
            ArgumentError: there is no average (yet), or `model` is another one.
        """
        if not self.count:
            raise ArgumentError("no model was averaged: give this to fit as a callback, with steps within the run")
        there = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        given = {slot.name: slot.of(self._vectors[b]) for slot, b in self._names} | self._buffers
        for name, x in given.items():
            if name not in there or there[name].shape != x.shape:
                raise ArgumentError(f"model has no {name!r} of shape {tuple(x.shape)}: give the model that was trained")
        for name, x in given.items():
            there[name].copy_(x)
        return model

    def state(self) -> dict[str, Tensor]:
        state = {f"vector.{b}": x for b, x in enumerate(self._vectors)}
        state |= {f"buffer.{name}": x for name, x in self._buffers.items()}
        return state | {"counts": torch.tensor([self.count, self._step])}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.count, self._step = state["counts"].tolist() if state else (0, -1)
        self._vectors = [state[f"vector.{b}"] for b in range(sum(name.startswith("vector.") for name in state))]
        self._buffers = {name.removeprefix("buffer."): x for name, x in state.items() if name.startswith("buffer.")}
