"""Send the model and data to an engine's own processes, such as Ray's, train there, and fetch the results."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exogym.callbacks import Callback
from exogym.core.base.devices import Device, one_thread
from exogym.core.base.rng import preserved_state
from exogym.core.clock import Clock
from exogym.core.combinations import check
from exogym.core.communicator import Wire
from exogym.core.engine import world_size
from exogym.core.record.history import History
from exogym.core.training.options import FitOptions, Subject
from exogym.core.training.placement import run_placed
from exogym.core.training.workplace import check_memory
from exogym.errors import Stopped


@dataclass
class Left:
    """What a run in an engine's own processes returns: the model's tensors by name, and each callback's state."""

    state: dict[str, Any]
    history: History
    description: dict[str, Any]
    traffic: dict[str, dict[str, float]]
    clock: Clock | None
    callbacks: list[dict[str, Tensor]]


def send(trainer: Any, options: FitOptions, device: torch.device) -> None:
    """Train a `LocalTrainer`'s model in the engine's own processes, and store the results in the trainer.

    Raises:
        ArgumentError: a launcher started this script in several processes, and each would start the engine's own.
    """
    if (world := world_size()) > 1:
        launched = {"processes of a launcher": f"a script that runs as {world} processes"}
        check({"engine": f"engine={options.placement.engine!r}"} | launched)
    engine = None if isinstance(options.placement.engine, str) else options.placement.engine
    body = functools.partial(_train, type(trainer), trainer.subject, trainer.max_stretch)
    try:
        _take(trainer, run_placed(trainer.subject, options, device, body, engine), options)
    except (Stopped, SystemExit) as end:
        stop = end if isinstance(end, Stopped) else end.__cause__
        if isinstance(stop, Stopped):
            _take(trainer, stop.left, options)
        raise


def _take(trainer: Any, left: Left | None, options: FitOptions) -> None:
    """Store the results in the trainer."""
    assert left is not None
    trainer.history, trainer.description = left.history, left.description
    trainer.traffic, trainer.clock = left.traffic, left.clock
    trainer.model.load_state_dict(left.state)
    for callback, state in zip(options.callbacks, left.callbacks, strict=True):
        if isinstance(callback, Callback):
            callback.load_state(state)


def _train(kind: type[Any], subject: Subject, max_stretch: int | None, options: FitOptions, wire: Wire) -> Left | None:
    """In one of the engine's processes, train the rows that `wire` assigns to it. Process 0 returns the results."""
    trainer = kind(subject.model, subject.train_dataset, subject.val_dataset)
    trainer.subject, trainer.max_stretch = subject, max_stretch
    device = Device.named(options.device).place
    check_memory(
        subject.model,
        options.strategy,
        device,
        num_nodes=options.num_nodes,
        rows=len(wire.ranks),
        together=options.compute == "vmap",
    )

    def left() -> Left | None:
        if not wire.is_main:
            return None
        state = {name: x.detach().cpu() for name, x in subject.model.state_dict().items()}
        kept = [x.state() if isinstance(x, Callback) else {} for x in options.callbacks]
        states = [{name: x.detach().cpu() for name, x in one.items()} for one in kept]
        return Left(state, trainer.history, trainer.description, trainer.traffic, trainer.clock, states)

    with preserved_state(device), one_thread(device):
        try:
            trainer._train(device, options, wire)
        except Stopped as stop:
            stop.left = left()
            raise
    return left()
