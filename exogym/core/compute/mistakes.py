"""Explain torch's errors after the most common mistakes with data, models and losses.

This code runs only after an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from exogym.core.base.batches import MISSING, RAISED, TARGET_KEYS, described, targets_of, tensors_in
from exogym.core.base.torch_private import uncompiled
from exogym.errors import DataError, ExoGymError, ModelError

ONE_VALUE = "Expected more than 1 value per channel"  # of torch's batch normalization
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def explain(
    error: Exception, model: nn.Module, loss_fn: Callable[..., Any] | None, batch: Any, out: Any = MISSING
) -> ExoGymError | None:
    """Return an error that explains `error`, and names the wrong value and the line to change; None if unknown.

    Args:
        error: an error from the model, `loss_fn` or the backward pass, raised for `batch`.
        out: the model's output; MISSING if the model raised `error`.
    """
    if isinstance(error, ExoGymError):
        return None
    text = (str(error).strip().splitlines() or [""])[0]
    targets = targets_of(batch)
    try:
        if isinstance(error, IndexError):
            said = _out_of_range(error, text, model, batch, out, targets)
        elif out is not MISSING and loss_fn is not None and not isinstance(out, Tensor):
            said = _no_tensor(out, loss_fn, model)
        elif isinstance(error, RuntimeError):
            said = _targets(text, loss_fn, out, targets) or _types(text, model, batch)
        elif ONE_VALUE in text:
            said = (
                "batch normalization needs at least 2 examples at once, but got 1: use a larger batch_size or "
                'minibatch_size, dataloader_kwargs={"drop_last": True} if an epoch ends with 1 example, or another '
                "layer, such as torch.nn.GroupNorm"
            )
        elif isinstance(error, TypeError) and out is MISSING:
            said = _names(text, model, batch, loss_fn) or _no_tensors(text, batch)
        else:
            said = None
    except RAISED:  # numbers cannot be read here, for example inside vmap: keep torch's error
        return None
    kind = DataError if out is MISSING or isinstance(out, Tensor) else ModelError
    return None if said is None else kind(f"{said} (torch: {text})")


def _names(text: str, model: nn.Module, batch: Any, loss_fn: Callable[..., Any] | None) -> str | None:
    """Explain that the keys of a batch are not the arguments of the model's `forward`."""
    if not isinstance(batch, Mapping) or not ("unexpected keyword" in text or "missing" in text):
        return None
    forward: Any = uncompiled(model).forward
    parameters = inspect.signature(forward).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    keys = [str(key) for key in batch if loss_fn is None or key not in TARGET_KEYS]
    taken = [p.name for p in named]
    lacking = [p.name for p in named if p.default is p.empty and p.name not in keys]
    more = [] if any(p.kind is p.VAR_KEYWORD for p in parameters) else [key for key in keys if key not in taken]
    if not (more or lacking):
        return None
    beside = "" if loss_fn is None else " beside the targets"
    said = f"a batch has the keys {keys}{beside}, and forward takes the arguments {taken}: "
    if not lacking:
        return f"{said}remove {more} from the examples, or add **kwargs to forward"
    return f"{said}rename the keys, or the arguments, so that forward gets {lacking}"


def _no_tensors(text: str, batch: Any) -> str | None:
    """Explain that an input is a list, which torch's layers don't accept."""
    if "must be Tensor, not" not in text:
        return None
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch if isinstance(batch, tuple | list) else ())
    for key, value in items:
        if isinstance(value, tuple | list) and value:
            return (
                f"batch[{key!r}] is a {type(value).__name__} of {len(value)} ({described(value[0])} first), but a "
                "layer of the model needs a tensor: return tensors from the data set, or combine the examples with a "
                "collate_fn in dataloader_kwargs"
            )
    return None


def _out_of_range(
    error: Exception, text: str, model: nn.Module, batch: Any, out: Any, targets: Tensor | None
) -> str | None:
    """Explain a class without an output, or a token without an embedding row."""
    if text.startswith("Target") and "out of bounds" in text:
        found = text.split()[1]
        if isinstance(out, Tensor) and targets is not None and out.dim() == targets.dim() + 1:
            classes = out.shape[1]
            range_ = f"the model's output has shape {tuple(out.shape)}: {classes} classes, 0 to {classes - 1}"
            remedy = f"use at least {int(found) + 1} outputs in the last layer" if int(found) > 0 else ""
        else:
            range_, remedy = "the model has fewer classes", ""
        remedy = remedy or "use one output per class in the last layer"
        return f"a target is {found}, and {range_}: {remedy}, or number the classes of the data set from 0"
    if "index out of range in self" in text:
        asked, indices = _asked(error)
        tables = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Embedding)]
        by_rows = sorted(tables, key=lambda table: table[1].num_embeddings)
        whole = [x for x in tensors_in(batch) if x.dtype in WHOLE and x.numel()]
        is_data = indices is None or any(x.shape == indices.shape and torch.equal(x, indices) for x in whole)
        for name, table in [found for found in tables if found[1] is asked] or by_rows:
            rows = table.num_embeddings
            for x in whole if indices is None else [indices]:
                if int(x.max()) >= rows or int(x.min()) < 0:
                    wrong = int(x.min()) if int(x.min()) < 0 else int(x.max())
                    given, remedy = f"the data contain the number {wrong}", "correct the data"
                    if not is_data:
                        given = f"the model looks up row {wrong}, which it computed"
                        remedy = "use shorter examples if rows are positions"
                    return (
                        f"{given}, but the embedding {name!r} has rows 0 to {rows - 1}: make it larger, "
                        f"nn.Embedding({max(wrong + 1, rows)}, ...), or {remedy}"
                    )
    return None


def _asked(error: Exception) -> tuple[Any, Tensor | None]:
    """Return the embedding that raised an error and the rows it looked up; None for whatever is unknown."""
    asked: Any = None
    indices: Any = None
    trace = error.__traceback__
    while trace is not None:
        if isinstance(found := trace.tb_frame.f_locals.get("self"), nn.Embedding):
            asked, indices = found, trace.tb_frame.f_locals.get("input")
        trace = trace.tb_next
    try:
        return asked, torch.tensor(indices.tolist()) if isinstance(indices, Tensor) and indices.numel() else None
    except RAISED:  # inside vmap
        return asked, None


def _no_tensor(out: Any, loss_fn: Callable[..., Any], model: nn.Module) -> str:
    """Explain that a model returns more than predictions, and give two remedies."""
    name = _name_of(loss_fn)
    parts = ", ".join(map(described, out)) if isinstance(out, tuple | list) else ""
    inside = f" ({parts})" if parts else ""
    if isinstance(out, Mapping):
        pick = f"out[{next((key for key in out if 'logit' in str(key)), next(iter(out), 'logits'))!r}]"
    else:
        pick = "out[0]"
    return (
        f"the model {type(model).__name__} returned {described(out)}{inside}, but loss_fn={name} needs predictions in "
        f"one tensor: return only the predictions from forward, or pass loss_fn=lambda out, y: {name}({pick}, y). If "
        "the model computes its own loss, leave loss_fn out"
    )


def _targets(text: str, loss_fn: Callable[..., Any] | None, out: Any, targets: Tensor | None) -> str | None:
    """Explain a wrong type or shape of the targets, if the loss function raised the error."""
    if not isinstance(out, Tensor) or targets is None or loss_fn is None:
        return None
    given = f"the targets are {_kind(targets)} and the predictions {_kind(out)}"
    name = _name_of(loss_fn)
    if "multi-target not supported" in text and out.dim() == targets.dim():
        return f"{given}, but loss_fn={name} needs one class number per example: use y = y.squeeze(1) in the data set"
    if out.dim() == targets.dim() + 1 and targets.dtype != torch.int64 and "Long" in text:
        more = "; to predict numbers use torch.nn.functional.mse_loss" if targets.is_floating_point() else ""
        return f"{given}, but loss_fn={name} needs class numbers (int64): use y = y.long() in the data set{more}"
    if out.shape == targets.shape and targets.dtype in WHOLE and out.is_floating_point():
        return f"{given}, but loss_fn={name} needs the same type for both: use y = y.float() in the data set"
    if targets.is_floating_point() and targets.dtype != out.dtype:
        return f"{given}: {_convert(targets.dtype, out.dtype, 'y')}"
    return None


def _types(text: str, model: nn.Module, batch: Any) -> str | None:
    """Explain which data have another type than the model's parameters."""
    if not any(word in text.lower() for word in ("dtype", "type (", "scalar type")):
        return None
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    if own is None:
        return None
    if "indices" in text:
        wrong = next(((place, x) for place, x in _leaves(batch) if x.dtype not in (torch.int32, torch.int64)), None)
        return wrong and (
            f"{wrong[0]} is {_kind(wrong[1])}, but the model's embedding needs whole numbers, int32 or int64: use x = "
            "x.long() in the data set"
        )
    targets = targets_of(batch)
    if "target dtype" in text and targets is not None and targets.dtype != torch.int64:  # the model computes the loss
        place = next(place for place, x in _leaves(batch) if x is targets)
        return (
            f"{place} is {_kind(targets)}, but the loss needs class numbers (int64): use y = y.long() in the data set"
        )
    for place, x in _leaves(batch):
        is_target = x is targets
        if x.dtype != own and (x.is_floating_point() if is_target else x.dtype in (*FLOATS, *WHOLE)):
            name = "y" if is_target else "x"
            return f"{place} is {_kind(x)} and the model is {_short(own)}: {_convert(x.dtype, own, name)}"
    return None


def _convert(given: torch.dtype, own: torch.dtype, name: str) -> str:
    """Return the line that converts the data."""
    as_own = {torch.float32: f"{name}.float()", torch.float64: f"{name}.double()"}.get(own, f"{name}.to({own})")
    other = ", or train model.double(). NumPy makes float64 by default" if given == torch.float64 else ""
    return f"use {name} = {as_own} in the data set{other}"


def _leaves(batch: Any, place: str = "the batch") -> Iterator[tuple[str, Tensor]]:
    """Yield (place, tensor) for each tensor in a nested batch."""
    if isinstance(batch, Tensor):
        yield place, batch
        return
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch if isinstance(batch, tuple | list) else ())
    start = "batch" if place == "the batch" else place
    for key, value in items:
        yield from _leaves(value, f"{start}[{key!r}]")


def _kind(x: Tensor) -> str:
    return f"{_short(x.dtype)} {tuple(x.shape)}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", None) or f"{type(function).__name__}()"
