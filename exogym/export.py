"""A trained model as one safetensors file, and back."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from exogym.errors import ArgumentError, ModelError


def save_model(model: nn.Module, path: str | Path) -> Path:
    """Write the state dict of `model` to the safetensors file `path`, whole or not at all; return the path.

    Tied tensors are written once for each of their names, so any reader finds every name. Nothing is pickled.

    Raises:
        ArgumentError: the file cannot be written.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_model(torch.nn.Linear(3, 2), f"{folder}/final_model.safetensors")
    ...     model = load_model(torch.nn.Linear(3, 2), path)
    """
    path = Path(path)
    tensors = {name: x.detach().cpu().contiguous().clone() for name, x in model.state_dict().items()}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, metadata={"format": "pt"})
        os.replace(temporary, path)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        with contextlib.suppress(OSError, ValueError):
            temporary.unlink()
        raise ArgumentError(f"the model could not be written to {str(path)!r}: {error}; name another file") from error
    return path


def load_model(model: nn.Module, path: str | Path) -> nn.Module:
    """Read the file that `save_model` wrote into `model`, in place; return it.

    Raises:
        ArgumentError: the file is missing, torn or not a safetensors file.
        ModelError: it holds another model; the message lists what differs, and `model` is left as it was.
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
