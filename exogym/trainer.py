"""Trainers: one call trains a model on a fleet of nodes and gives back the averaged model."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from exogym.core.base.devices import OneThread, resolve_device
from exogym.core.base.rng import preserved_state
from exogym.core.base.streams import fill_in
from exogym.core.record.history import History
from exogym.core.training.options import FitOptions, takes
from exogym.core.training.subject import Subject
from exogym.errors import ArgumentError, checked

if TYPE_CHECKING:  # what a run is made of is loaded by the first fit
    from exogym.core.clock import Clock
    from exogym.core.communicator import Wire
    from exogym.core.engine import Engine
    from exogym.core.record.metrics import Metric
    from exogym.core.training.loop import TrainingLoop
    from exogym.strategy.strategy import Strategy


class _Turn:
    """Lets one thread of this process train at a time: random generators and thread counts are the process's.

    In that thread a callback may train another model meanwhile: each step puts the generators where it needs them.
    """

    def __init__(self) -> None:
        self.lock, self.thread = threading.Lock(), 0
        self.models: list[nn.Module] = []

    @contextlib.contextmanager
    def taken(self, model: nn.Module) -> Iterator[None]:
        if not self.lock.acquire(blocking=False):
            if self.thread != threading.get_ident():
                raise ArgumentError(
                    "another thread of this process is in fit: both would draw from the same random generators, and "
                    "neither result would be right. Call one fit after the other, or give each a process of its own; "
                    "to use more cores for one fit, give it processes="
                )
            mine = {id(p) for p in model.parameters()}
            if any(id(p) in mine for outer in self.models for p in outer.parameters()):
                raise ArgumentError(
                    "this model is being trained already, by the fit that called this one (from a callback): its "
                    "parameters stand at a node's row. Train a copy.deepcopy of it, or train after that fit"
                )
        self.thread = threading.get_ident()
        self.models.append(model)
        try:
            yield
        finally:
            self.models.pop()
            if not self.models:
                self.lock.release()

    def forked(self) -> None:
        """In a new process: of the threads there is the one that forked."""
        if self.thread != threading.get_ident():
            self.__init__()  # type: ignore[misc]


_turn = _Turn()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turn.forked)


class Trainer(ABC):
    """What all trainers share: the model, the data, and what the last `fit` left.

    Args:
        model: a module whose `model(batch)` gives its loss (`exogym.core.compute.outputs`), or predictions
            with `loss_fn`.
        train_dataset: a data set, or a factory called as `factory(rank, num_nodes, is_train)`.
        val_dataset: likewise, or None.
        loss_fn: `loss_fn(predictions, targets)` for models that return predictions.
        metrics: name to `function(predictions, targets)`, reported as val_<name>.

    Attributes:
        history: a `History` of the last fit; a sequence of dicts.
        description: the last run as one JSON-able value.
        clock: the virtual clock of the last fit with a `network`, else None.
        traffic: of the last fit: name of the collective to its calls and its payload, tx and rx bytes, over all nodes.

    >>> from exogym import LocalTrainer
    >>> trainer: Trainer = LocalTrainer(nn.Linear(1, 1), [0.0])
    >>> len(trainer.history), trainer.traffic, trainer.clock
    (0, {}, None)
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        train_dataset: Any,
        val_dataset: Any = None,
        *,
        loss_fn: Callable[..., Tensor] | None = None,
        metrics: dict[str, Metric] | None = None,
    ):
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"model is a {type(model).__name__}, wanted a torch.nn.Module")
        if loss_fn is not None and not callable(loss_fn):
            raise ArgumentError(f"loss_fn={loss_fn!r} cannot be called: wanted loss_fn(predictions, targets)")
        if isinstance(loss_fn, type):
            raise ArgumentError(f"loss_fn={loss_fn.__name__} is a class: give an object of it, {loss_fn.__name__}()")
        if not isinstance(metrics, Mapping | None) or not all(callable(f) for f in (metrics or {}).values()):
            raise ArgumentError(f"metrics={metrics!r} must map names to functions of (predictions, targets)")
        self.subject = Subject(model, train_dataset, val_dataset, loss_fn, dict(metrics or {}))
        self.history = History()
        self.description: dict[str, Any] = {}
        self.traffic: dict[str, dict[str, float]] = {}
        self.clock: Clock | None = None

    @property
    def model(self) -> nn.Module:
        return self.subject.model

    @abstractmethod
    def fit(self, strategy: Strategy) -> nn.Module:
        """Train the model under `strategy`; each trainer says where."""


class LocalTrainer(Trainer):
    """Trains on this machine: N simulated nodes, a row each, in one process or several; or in torchrun's world.

    >>> import torch
    >>> from exogym import LocalTrainer
    >>> from exogym.strategy import DiLoCoStrategy
    >>> x = torch.randn(64, 4)
    >>> data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    >>> trainer = LocalTrainer(torch.nn.Linear(4, 1), data, data, loss_fn=torch.nn.functional.mse_loss)
    >>> model = trainer.fit(DiLoCoStrategy(H=4, lr=0.01), num_nodes=4, num_epochs=20, batch_size=4)
    >>> steps, losses = trainer.history.column("val_loss")
    >>> bool(losses[-1] < losses[0])
    True
    """

    max_stretch: int | None = None  # caps every stretch, for tests: it must change no bit
    spent = (0, 0.0, 0.0)  # in the last run: steps after its first stretch, their seconds, those without the wire
    engine: Engine | None = None  # where rows live; None: the first of `exogym.engine.ENGINES` that applies
    assembles: Callable[..., TrainingLoop] | None = None  # puts a run together; None: `core.training.assembly`

    @takes(FitOptions)
    def fit(self, asked: FitOptions) -> nn.Module:
        """Train and return the final (averaged or outer) model, which is the model that was passed in, updated.

        Raises:
            ArgumentError, DataError, ModelError, StrategyError: before training, wherever it can be known; also where
                another thread of this process is in `fit`, or another run holds `save_dir`.
            TrainingError: a loss, gradient or update that is not finite; node, step and tensor are named.
            CheckpointError: `resume` on a checkpoint of another run, or with none that can be read.
            WorkerError: one of several processes was killed, or hung, and where it stood; none of the others is left.
            KeyboardInterrupt, SystemExit: SIGINT (Ctrl-C) or SIGTERM; with `save_dir` the run was saved first, where
                each node stood. A second signal acts at once.

        After an error, Ctrl-C or SIGTERM in training the model holds the average of where the nodes stood (after an
        error with several processes: the nodes here), and `trainer.history` what happened until then. After an error
        with `engine="ray"` both are as they were before.
        """
        from exogym.core.training.checking import asked_to_go_on, checked_options

        self._place(checked_options(replace(asked, resume=asked_to_go_on(asked))))
        return self.model

    def _place(self, options: FitOptions) -> None:
        fill_in()
        from exogym.core.engine.world import local_device
        from exogym.core.training.placement import run_placed

        # Of an engine elsewhere no process is here: each looks for the device of its own machine.
        place = resolve_device(local_device(options.device)) if options.engine is None else torch.device("cpu")
        with _turn.taken(self.model), preserved_state(place), OneThread(place):
            modes = [(module, module.training) for module in self.model.modules()]
            try:
                if options.engine is None:
                    run_placed(self.subject, options, place, functools.partial(self._train, place), self.engine)
                else:
                    from exogym.core.training.away import send

                    send(self, options, place)
            finally:
                for module, training in modes:
                    module.training = training

    def _train(self, device: torch.device, options: FitOptions, wire: Wire) -> None:
        """Train the rows that `wire` says are here."""
        from exogym.core.training.assembly import assemble

        loop = (self.assembles or assemble)(self.subject, options, device, self.max_stretch, wire)
        self.history, self.description = loop.history, loop.description
        self.clock = None if loop.timing is None else loop.timing.clock
        try:
            loop.run()
        finally:
            self.history, self.traffic = loop.history, loop.fleet.comm.ledger.traffic
            if options.timeline and options.run_dir is not None and wire.is_main and self.clock is not None:
                from exogym.core.clock import TIMELINE, save_spans

                save_spans(self.clock, Path(options.run_dir) / TIMELINE)
            self.spent = loop.spent
            loop.end()
