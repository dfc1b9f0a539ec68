"""Restart a failed run from the last checkpoint, if the engine starts its processes itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from exogym.core.combinations import check
from exogym.core.engine.engines import Moved
from exogym.core.progress import notice
from exogym.core.training.options import FitOptions
from exogym.errors import ArgumentError, CheckpointError, DataError, ModelError, StrategyError

Result = TypeVar("Result")
NOT_CURED = (ArgumentError, CheckpointError, DataError, ModelError, StrategyError)  # by starting again


def restarted(model: nn.Module, options: FitOptions, train: Callable[[FitOptions], Result]) -> Result:
    """Train. After an error that a restart may cure, restart from the last checkpoint, at most `max_restarts` times."""
    most = options.placement.max_restarts
    for attempt, given in enumerate(_attempts(model, options, most)):
        try:
            return _followed(given, train)
        except NOT_CURED:
            raise
        except Exception as error:
            if attempt == most:
                raise
            what = f"{type(error).__name__}: {error}"
            notice(f"{what}; starting again from the last checkpoint, if any ({attempt + 1} of {most})")
    raise AssertionError


def _followed(options: FitOptions, train: Callable[[FitOptions], Result]) -> Result:
    """Train. Each time that the run moves to other processes, train there."""
    while True:
        try:
            return train(options)
        except Moved as moved:
            notice(str(moved))
            options = replace(options, resume=options.resume or moved.begun)


def _attempts(model: nn.Module, options: FitOptions, most: int) -> Iterator[FitOptions]:
    """Yield the options for each try. Before a restart, reset the model, or raise ArgumentError if it is lazy."""
    if not most:
        yield options
        return
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if lazy := [name for name, x in tensors if nn.parameter.is_lazy(x)]:
        check(options.features() | {"lazy modules": f"{lazy[0]!r}, which is lazy"})
    kept = {name: x.detach().clone() for name, x in tensors}
    yield options
    for _ in range(most):
        with torch.no_grad():
            for name, x in [*model.named_parameters(), *model.named_buffers()]:
                if name in kept:
                    x.copy_(kept[name])
        yield replace(options, resume=True)
