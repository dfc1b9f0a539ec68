"""Write a trained model or a history to one safetensors file, and read it again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from exogym.core.base.files import beside
from exogym.core.record.history import History
from exogym.errors import ArgumentError, ModelError


def save_model(model: nn.Module, path: str | Path) -> Path:
    """Write the state dict of `model` to the safetensors file `path`, completely or not at all. Return the path.

    A tensor with several names (tied weights) is written once for each name, so any program finds all names. Nothing is
    pickled.

    Raises:
        ArgumentError: the file cannot be written.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_model(torch.nn.Linear(3, 2), f"{folder}/final_model.safetensors")
    ...     model = load_model(torch.nn.Linear(3, 2), path)
    """
    path = Path(path)
    tensors = {name: x.detach().cpu().contiguous().clone() for name, x in model.state_dict().items()}
    try:
        with beside(path) as made:
            save_file(tensors, made, metadata={"format": "pt"})
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise ArgumentError(f"the model could not be written to {str(path)!r}: {error}; name another file") from error
    return path


def load_model(model: nn.Module, path: str | Path) -> nn.Module:
    """Read a file that `save_model` wrote. Load its values into `model`, in place, and return `model`.

    Raises:
        ArgumentError: the file is missing, incomplete or not a safetensors file.
        ModelError: the file holds another model. The message lists the differences, and `model` stays as it was.
    """
    try:
        tensors = load_file(str(path))
    except (OSError, ValueError, SafetensorError) as error:
        raise ArgumentError(f"{str(path)!r} cannot be read: {error}; wanted a file that save_model wrote") from error
    wanted = model.state_dict()
    unlike = [f"{name}: only in the file" for name in sorted(tensors.keys() - wanted.keys())]
    unlike += [f"{name}: only in the model" for name in sorted(wanted.keys() - tensors.keys())]
    unlike += [
        f"{name}: {tuple(x.shape)} in the file, {tuple(wanted[name].shape)} in the model"
        for name, x in tensors.items()
        if name in wanted and x.shape != wanted[name].shape
    ]
    if unlike:
        shown = "\n  ".join(unlike[:10])
        raise ModelError(f"{str(path)!r} holds another model than this {type(model).__name__}:\n  {shown}")
    model.load_state_dict(tensors)
    return model


def split_history(history: History) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a history's state, as tensors and JSON values. The tensors and the values are enough to make the history
    again.
    """
    state = history.state()
    arrays = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in state.items() if isinstance(x, np.ndarray)}
    return arrays, {name: x for name, x in state.items() if name not in arrays}


def save_history(history: History, path: str | Path) -> None:
    """Write `history` to the safetensors file `path`, completely or not at all.

    Raises:
        OSError: the file cannot be written.

    >>> import tempfile
    >>> history = History()
    >>> history.add_evaluation(3, 0, {"val_loss": 2.5})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_history(history, f"{folder}/history.safetensors")
    ...     [(row["step"], row["val_loss"]) for row in load_history(f"{folder}/history.safetensors")]
    [(3, 2.5)]
    """
    arrays, plain = split_history(history)
    with beside(path) as made:
        save_file(arrays, made, metadata={"history": json.dumps(plain)})


def load_history(path: str | Path) -> History:
    """Return the history from a file that `save_history` wrote.

    Raises:
        ArgumentError: the file is missing or incomplete, or holds no history.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            state = json.loads(file.metadata()["history"])
            state |= {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
        return History.from_state(state)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{str(path)!r} holds no history: {error!r}; train again") from error
