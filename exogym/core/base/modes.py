"""Training and evaluation mode of a model's individual submodules.

`model.train()` puts all submodules into training mode, even those that the user keeps in evaluation mode (a frozen
BatchNorm, a frozen backbone with dropout), so ExoGym calls it only through these functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """A context that restores the mode of each submodule of `model` at its end.

    >>> model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())
    >>> with kept_modes(model):
    ...     _ = model.eval()
    >>> model[0].training, model[1].training
    (True, False)
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        model.train(modes[0][1])  # modules may override train()
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """A context in which the whole model is in evaluation mode. Each submodule's mode is restored at the end."""
    with kept_modes(model):
        model.eval()
        yield


def start_training(model: nn.Module) -> list[str]:
    """Put the model into training mode, except submodules in evaluation mode, unless the whole model is in it.

    Return the names of the outermost submodules that therefore stay in evaluation mode. The model itself is "".

    >>> model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())
    >>> start_training(model)
    ['1']
    >>> model[0].training, model[1].training
    (True, False)
    >>> start_training(model.eval())
    []
    >>> model[0].training, model[1].training
    (True, True)
    """
    modes = {module: module.training for module in model.modules()}
    model.train()
    kept: list[str] = []
    if any(modes.values()):
        for name, module in model.named_modules():
            if module.training and not modes.get(module, True):
                module.training = False
                kept += [] if any(name.startswith(f"{outer}.") for outer in kept) else [name]
    return kept


def normalizes(model: nn.Module) -> bool:
    """Return whether the model has a batch normalization in training mode."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    return any(isinstance(module, kinds) and module.training for module in model.modules())
