"""Shared parts of models from transformers: the folder with weights, LoRA adapters, and a run's model file."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from exogym.core.base.files import check_regular, indexed, inside, regular_text
from exogym.core.base.streams import printable
from exogym.errors import DataError, check_count, needs

Weights = str | os.PathLike[str] | None
SMALL = "small-random"  # as weights: a model made anew, for tests


def usual_weights(variable: str, name: str, package: str, inside: str = "", files: bool = False) -> str | None:
    """Return the first weights in the usual places: a folder, a file if `files`, "small-random", or None.

    Args:
        variable: the environment variable that names the weights.
        name: the folder exogym/NAME in the user's cache ($XDG_CACHE_HOME, or ~/.cache).
        package: an installed package with weights in its subfolder `inside`.

    Raises:
        DataError: the variable names something else.
    """
    given = os.environ.get(variable)
    if given == SMALL:
        return SMALL
    if given:
        path = Path(given).expanduser()
        if not (path.is_dir() or (files and path.is_file())):
            wanted = f"a folder{' or a file' * files}"
            raise DataError(f"{variable}={given} is not {wanted}: correct this environment variable, or unset it")
        return str(path)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exogym" / name
    if cache.is_dir():
        return str(cache)
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.submodule_search_locations:
        return str(Path(next(iter(spec.submodule_search_locations))) / inside)
    return None


def from_pretrained(kind: Any, name: str, wanted: str, **options: Any) -> Any:
    """Return the object that transformers' class `kind` reads from a folder.

    The function executes no code from the folder and opens only the folder's files, which may be links to anywhere, as
    in Hugging Face's cache.

    Args:
        wanted: what to pass instead, for the error.
        options: further options of `kind.from_pretrained`.

    Raises:
        DataError: transformers cannot read the folder, or the folder has an adapter or refers to files outside.
    """
    try:
        _check_inside(Path(name))
        return kind.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:  # damaged files raise whatever the parsers of several packages raise
        why = printable((str(error).strip() or "no reason given").splitlines()[0])
        what = "/".join([name, *([options["gguf_file"]] if "gguf_file" in options else [])])
        raise DataError(
            f"weights={what!r}: transformers cannot load them ({type(error).__name__}: {why}): {wanted}"
        ) from error


def _check_inside(folder: Path) -> None:
    """Raise an error if a folder's files lead transformers to weights outside the folder or to a pipe."""
    if (folder / "adapter_config.json").exists():  # it names another model, which transformers would load
        raise ValueError("the folder has an adapter, adapter_config.json: merge it into the model")
    for index in sorted(folder.glob("*.index.json")):
        indexed(index)
    file = folder / "config.json"
    if file.exists():
        config = json.loads(regular_text(file))
        if isinstance(config, dict) and config.get("transformers_weights") is not None:
            inside(folder, config["transformers_weights"])


def model_from_pretrained(kind: Any, name: str, wanted: str, **options: Any) -> Any:
    """Return the model that transformers' class `kind` reads from a folder, in fp32.

    The arguments are as in `from_pretrained`.

    Raises:
        DataError: transformers cannot read the folder, or the folder lacks a tensor of the model.
    """
    options |= {"dtype": torch.float32, "weights_only": True, "output_loading_info": True}
    model, found = from_pretrained(kind, name, wanted, **options)
    absent = sorted([*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])])
    if absent:  # transformers draws random numbers for these
        raise DataError(
            f"weights={name!r} lack {len(absent)} tensors of the model that config.json describes, such as "
            f"{absent[0]!r}: {wanted}"
        )
    return model


def byte_tokenizer(marks: Sequence[str], extra: str) -> Any:
    """Return a `tokenizers.Tokenizer` of the 256 bytes, followed by the special tokens `marks`.

    Args:
        extra: ExoGym's extra that installs the package tokenizers.
    """
    tokenizers = needs("tokenizers", extra)
    bytes_level = tokenizers.pre_tokenizers.ByteLevel
    letters = {letter: i for i, letter in enumerate(sorted(bytes_level.alphabet()))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = bytes_level(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(marks))
    return tokenizer


def checkpointed(model: Any) -> None:
    """Make a model from transformers recompute its layers' outputs instead of storing them."""
    name = "activation_checkpointing_enable"  # since transformers 5.20 or so
    enable = getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")
    enable({"use_reentrant": False})


def with_adapters(model: Any, rank: int, targets: Sequence[str] | str, extra: str, **options: Any) -> Any:
    """Add LoRA adapters (Hu et al. 2021) to a model from transformers, freeze everything else, and return the model.

    A matrix W becomes W + 2 B A, where A has `rank` rows and B, initially zero, `rank` columns.

    Args:
        targets: names of the matrices, or "all-linear" for every matrix except the last.
        extra: ExoGym's extra that installs the package peft.
        options: further options of `peft.LoraConfig`.

    Raises:
        ArgumentError: the rank is not a whole number of at least 1.
    """
    check_count("lora_rank", rank)
    peft = needs("peft", extra)
    adapters = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, lora_dropout=0.0, **options)
    return peft.inject_adapter_in_model(adapters, model)


def merged(model: nn.Module) -> Any:
    """Return a copy of a model with its adapters merged into its matrices."""
    plain: Any = copy.deepcopy(model)
    for name, layer in list(plain.named_modules()):
        if hasattr(layer, "get_base_layer"):
            layer.merge()
            plain.set_submodule(name, layer.get_base_layer())
    return plain


def read_trained(file: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the state dict in a safetensors file that a run saved.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        check_regular(file)
        return load_file(str(file))
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{os.fspath(file)!r} cannot be read: {error}; expected the model file of a run") from error


def rank_of(state: dict[str, Tensor]) -> int | None:
    """Return the adapters' rank in a run's state dict, or None if it has no adapters."""
    return next((len(x) for name, x in state.items() if ".lora_A." in name), None)


def fill(model: nn.Module | None, state: dict[str, Tensor], what: str, missing: str = "") -> None:
    """Load a run's state dict into `model`.

    Args:
        model: the model with the weights from which the run started, or None if `state` is of no such model.
        what: text for the error: the file, the kind of model and the weights.
        missing: the name of the tensor that identifies the kind of model, for the error.

    Raises:
        DataError: `model` has other tensors, so the run started from other weights.
    """
    wanted = {} if model is None else {name: x.shape for name, x in model.state_dict().items()}
    unlike = sorted(
        name for name in wanted.keys() | state.keys() if name not in state or wanted.get(name) != state[name].shape
    )
    if model is None or unlike:
        raise DataError(
            f"{what} ({unlike[0] if unlike and model is not None else missing} differs or is missing): pass the "
            "weights with which the run started"
        )
    model.load_state_dict(state)
