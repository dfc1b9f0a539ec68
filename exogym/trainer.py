"""Trainers. One call trains a model on many nodes and returns the averaged model."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from exogym.core.base.devices import CPU, Device, one_thread
from exogym.core.base.modes import kept_modes
from exogym.core.base.rng import preserved_state
from exogym.core.base.streams import fill_in
from exogym.core.record.history import History
from exogym.core.training.options import FitOptions, Subject, takes
from exogym.errors import ArgumentError, checked

if TYPE_CHECKING:  # the first fit loads a run's parts
    from exogym.core.clock import Clock
    from exogym.core.communicator import Wire
    from exogym.core.engine.engines import Engine
    from exogym.core.record.metrics import Metric
    from exogym.core.training.loop import TrainingLoop
    from exogym.strategy.strategy import Strategy


class _Turn:
    """A lock that lets one thread of this process train at a time: threads share random generators and thread counts.

    A callback in the training thread may train another model, because each step seeds the generators that it uses.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.models: list[nn.Module] = []

    @contextlib.contextmanager
    def taken(self, model: nn.Module) -> Iterator[None]:
        if not self.lock.acquire(blocking=False):
            raise ArgumentError(
                "another thread of this process is running fit, and both threads would draw from the same random "
                "generators. Call one fit after the other, or run each fit in its own process. To use more cores for "
                "one fit, pass processes="
            )
        self.models.append(model)
        try:
            mine = {id(p) for p in model.parameters()}
            if any(id(p) in mine for outer in self.models[:-1] for p in outer.parameters()):
                raise ArgumentError(
                    "the fit whose callback called this fit is already training this model. Train a copy.deepcopy of "
                    "the model, or train the model after that fit has ended"
                )
            yield
        finally:
            self.models.pop()
            self.lock.release()

    def forked(self) -> None:
        """Reset the lock in a forked process if the lock was held by another thread, which the process lacks."""
        if self.lock.acquire(blocking=False):
            self.lock.release()
        else:
            self.__init__()  # type: ignore[misc]


_turn = _Turn()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turn.forked)


class Trainer(ABC):
    """Base class of all trainers. A trainer holds a model, its data, and the results of the last `fit`.

    Args:
        model: a module. `model(batch)` returns the loss (`exogym.core.compute.outputs`), or predictions if you pass a
            `loss_fn`.
        train_dataset: a data set, an iterable (see `exogym.data.IterableData`), or a factory called as
            `factory(rank, num_nodes, is_train)`.
        val_dataset: the validation set, in the same form, or None.
        loss_fn: for models that return predictions: a function such that `loss_fn(predictions, targets)` returns the
            loss.
        metrics: a dict that maps names to functions. The history records the value of `function(predictions, targets)`
            as val_<name>.

    Attributes:
        history: the last fit's `History`, a sequence of dicts.
        description: the last run's options, as a dict of JSON values.
        clock: the last fit's virtual clock; None without a `network`.
        traffic: the last fit's number of calls and payload, tx and rx bytes per collective, summed over all nodes.

    >>> from exogym import LocalTrainer
    >>> trainer: Trainer = LocalTrainer(nn.Linear(1, 1), [0.0])
    >>> len(trainer.history), trainer.traffic, trainer.clock
    (0, {}, None)
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        if cls is Trainer:
            raise ArgumentError("Trainer is the base class of all trainers: use LocalTrainer(...)")
        return super().__new__(cls)

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
            raise ArgumentError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        if loss_fn is not None and not callable(loss_fn):
            raise ArgumentError(f"loss_fn={loss_fn!r} must be a function: loss_fn(predictions, targets)")
        if isinstance(loss_fn, type):
            raise ArgumentError(f"loss_fn={loss_fn.__name__} is a class: pass an instance, {loss_fn.__name__}()")
        if not isinstance(metrics, Mapping | None) or not all(callable(f) for f in (metrics or {}).values()):
            raise ArgumentError(f"metrics={metrics!r} must map names to functions of (predictions, targets)")
        self.subject = Subject(model, train_dataset, val_dataset, loss_fn, dict(metrics or {}))
        self.history = History()
        self.description: dict[str, Any] = {}
        self.traffic: dict[str, dict[str, float]] = {}
        self.clock: Clock | None = None

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self.model.parameters())
        trained = f", trained to step {self.history.last['step']}" if len(self.history) else ""
        return f"<{type(self).__name__} of {type(self.model).__name__} with {size:,} parameters{trained}>"

    @property
    def model(self) -> nn.Module:
        return self.subject.model

    @abstractmethod
    def fit(self, strategy: Strategy) -> nn.Module:
        """Train the model with `strategy`. The trainer's class determines on which machines the nodes run."""


class LocalTrainer(Trainer):
    """Train N simulated nodes on this machine, in one or several processes, or in the processes that torchrun started.

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

    max_stretch: int | None = None  # longest stretch in steps, for tests; the result doesn't depend on it
    engine: Engine | None = None  # keeps the rows; None: the first of `exogym.engine.ENGINES` that applies
    assembles: Callable[..., TrainingLoop] | None = None  # assembles a run; None: `core.training.assembly`

    @takes(FitOptions)
    def fit(self, asked: FitOptions) -> nn.Module:
        """Train the trainer's model in place, and return it with the final averaged (or outer) parameters.

        Raises:
            ArgumentError, DataError, ModelError, StrategyError: an option, data set, model or strategy is wrong. `fit`
                raises the error before training if possible. It also raises ArgumentError if another thread of this
                process is running `fit`, or if another run uses `save_dir`.
            TrainingError: a loss, gradient or update is not finite. The message names the node, the step and the
                tensor.
            CheckpointError: `resume` found a checkpoint of another run, or checkpoints of which none can be read.
            WorkerError: one of several processes was killed or hung. The message names the step. The other processes
                have been ended, too.
            KeyboardInterrupt, SystemExit: the process received SIGINT (Ctrl-C) or SIGTERM. If `save_dir` is set, the
                run first writes a checkpoint with every node's state. A second signal ends the process immediately.

        After an error, Ctrl-C or SIGTERM during training, the model holds the average of the nodes' parameters at that
        moment, and `trainer.history` holds the records so far. If several processes were training, an error leaves the
        average of this process's nodes only. After an error with `Placement(engine="ray")`, the model and the history
        are as they were before `fit`.

        Every module trains in its current mode, so a BatchNorm or dropout layer in evaluation mode stays in evaluation
        mode. The one exception is a model that is in evaluation mode with all its submodules, as transformers'
        `from_pretrained` returns it: `fit` trains it in training mode. After `fit`, every module has its previous mode
        again. Parameters with `requires_grad=False` are not trained. To freeze or unfreeze parameters during training,
        train in two fits.
        """
        from exogym.core.engine.engines import local_device
        from exogym.core.training.checking import asked_to_go_on, checked_options
        from exogym.core.training.placement import run_placed

        options = checked_options(replace(asked, resume=asked_to_go_on(asked)))
        fill_in()
        is_here = options.placement.engine is None
        # If the engine runs elsewhere, this process trains nothing, and each process there chooses its own machine's
        # device.
        device = Device.named(local_device(options.device)).place if is_here else CPU
        with _turn.taken(self.model), preserved_state(device), one_thread(device), kept_modes(self.model):
            if is_here:
                run_placed(self.subject, options, device, functools.partial(self._train, device), self.engine)
            else:
                from exogym.core.training.away import send

                send(self, options, device)
        return self.model

    def _train(self, device: torch.device, options: FitOptions, wire: Wire) -> None:
        """Train the rows that `wire` assigns to this process."""
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
            loop.end()
