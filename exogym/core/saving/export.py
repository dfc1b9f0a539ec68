"""Write a trained model to one safetensors file, and read it again; split a history into tensors and JSON values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from exogym.core.base.files import beside, check_regular, indexed, write_json
from exogym.core.record.history import History
from exogym.errors import ArgumentError, ModelError

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"  # names in Hugging Face's layout


def save_model(model: nn.Module, path: str | Path, shard_bytes: int | None = None) -> Path:
    """Write the state dict of `model` to the safetensors file `path`, atomically. Return the path.

    A tensor with several names (tied weights) is written once for each name, so any program finds all names. Nothing is
    pickled.

    Args:
        shard_bytes: with a number, `path` is a new folder in Hugging Face's layout. A model of at most `shard_bytes` is
            one file, model.safetensors. A larger model is several files of at most `shard_bytes` (or of one tensor),
            model-00001-of-00003.safetensors and so on, with the index model.safetensors.index.json.
            transformers also needs a config.json, from `model.config.save_pretrained(path)`.

    Raises:
        ArgumentError: the file or folder cannot be written, or the folder exists.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = save_model(torch.nn.Linear(3, 2), f"{folder}/final_model.safetensors")
    ...     model = load_model(torch.nn.Linear(3, 2), path)
    ...     sorted(x.name for x in save_model(model, f"{folder}/shards", shard_bytes=24).iterdir())[1:]
    ['model-00002-of-00002.safetensors', 'model.safetensors.index.json']
    """
    path = Path(path)
    tensors = {name: x.detach().cpu().contiguous().clone() for name, x in model.state_dict().items()}
    if shard_bytes is not None and (type(shard_bytes) is not int or shard_bytes < 1):
        raise ArgumentError(
            f"shard_bytes={shard_bytes!r} must be a whole number of bytes over 0, such as 5_000_000_000"
        )
    try:
        if shard_bytes is not None:
            return _save_shards(tensors, path, shard_bytes)
        with beside(path) as made:
            save_file(tensors, made, metadata={"format": "pt"})
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise ArgumentError(f"the model could not be written to {str(path)!r}: {error}; pass another file") from error
    return path


def _save_shards(tensors: dict[str, Tensor], folder: Path, shard_bytes: int) -> Path:
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, x in tensors.items():
        if shards[-1] and filled + x.nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = x
        filled += x.nbytes
    names = [f"model-{k:05}-of-{len(shards):05}.safetensors" for k in range(1, len(shards) + 1)]
    names = names if len(names) > 1 else [WHOLE]
    if folder.exists() or folder.is_symlink():
        raise ArgumentError(f"path={str(folder)!r} exists: pass a new folder")
    with beside(folder) as made:
        made.mkdir()
        for name, shard in zip(names, shards, strict=True):
            save_file(shard, made / name, metadata={"format": "pt"})
        if len(names) > 1:
            places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            total = {"total_size": sum(x.nbytes for x in tensors.values())}
            write_json(made / INDEX, {"metadata": total, "weight_map": places}, indent=2)
    return folder


def load_model(model: nn.Module, path: str | Path) -> nn.Module:
    """Read a file or folder that `save_model` wrote. Load its values into `model`, in place, and return `model`.

    Raises:
        ArgumentError: the file is missing, incomplete or not a safetensors file.
        ModelError: the file holds another model. The message lists the differences, and `model` stays as it was.
    """
    try:
        files = [Path(path)]
        if os.path.isdir(path):  # in Hugging Face's layout
            index = Path(path) / INDEX
            files = indexed(index) if index.exists() else [Path(path) / WHOLE]
        for file in files:
            check_regular(file)
        tensors = {name: x for file in files for name, x in load_file(str(file)).items()}
    except (OSError, ValueError, SafetensorError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArgumentError(f"{str(path)!r} cannot be read: {error}; pass a file that save_model wrote") from error
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
        raise ModelError(f"{str(path)!r} contains another model than this {type(model).__name__}:\n  {shown}")
    model.load_state_dict(tensors)
    return model


def split_history(history: History) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a history's state, as tensors and JSON values from which it can be made again."""
    state = history.state()
    arrays = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in state.items() if isinstance(x, np.ndarray)}
    return arrays, {name: x for name, x in state.items() if name not in arrays}
