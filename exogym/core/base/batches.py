"""Batches: tensors in nested mappings, tuples and lists. Modules' inputs and outputs count as batches too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from exogym.errors import DataError

TARGET_KEYS = ("labels", "targets", "target", "label", "y")
# torch's errors for wrong batches and models
RAISED = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)
MISSING: Any = object()  # stands for a model's output if the model did not return


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested mappings, tuples and lists, in order. Other values are skipped.

    >>> [len(x) for x in tensors_in({"a": torch.ones(2), "b": [torch.ones(3), "c"]})]
    [2, 3]
    """
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [x for part in parts for x in tensors_in(part)]


def beside_tensors(value: Any) -> list[Any]:
    """Return the values other than tensors in nested mappings, tuples and lists, in order.

    >>> beside_tensors({"a": torch.ones(2), "b": [torch.ones(3), "c"]})
    ['c']
    """
    if isinstance(value, Mapping | tuple | list):
        return [x for part in (value.values() if isinstance(value, Mapping) else value) for x in beside_tensors(part)]
    return [] if isinstance(value, Tensor) else [value]


def map_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply `function` to every tensor of a nested batch. Mappings become dicts."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(value, function) for value in batch)
    return batch


def batch_examples(batch: Any) -> int:
    """Return the number of examples: the first dimension of the batch's first tensor.

    A list of k tensors next to a tensor of k rows holds one tensor per example, so the number is k.

    >>> batch_examples([torch.zeros(3, 8), torch.zeros(3)]), batch_examples([[torch.zeros(8)] * 3, torch.zeros(3)])
    (3, 3)
    """
    parts = list(batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ())
    rows = {len(part) for part in parts if isinstance(part, Tensor) and part.dim()}
    for part in parts:
        if isinstance(part, tuple | list) and len(part) in rows and tensors_in(part):
            return len(part)
    for leaf in tensors_in(batch):
        if leaf.dim():
            return len(leaf)
    raise DataError(
        f"a batch must contain a tensor whose first dimension counts the examples, but is {described(batch)}"
    )


def _pick(batch: Any, total: int, which: slice | list[int]) -> Any:
    """Pick `which` of the `total` examples of a nested batch. If it is a slice, tensors are views.

    Examples are rows of tensors, and items of lists that hold a text or a tensor per example.
    """
    is_list = isinstance(batch, tuple | list) and len(batch) == total and not hasattr(batch, "_fields")
    if is_list and not any(x.dim() and len(x) == total for x in tensors_in(batch)):
        return type(batch)(batch[which] if isinstance(which, slice) else [batch[k] for k in which])
    if isinstance(batch, Tensor):
        return batch[which] if batch.dim() and len(batch) == total else batch
    if isinstance(batch, Mapping):
        return {key: _pick(value, total, which) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [_pick(part, total, which) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """Return a batch's examples from `start` up to, but not including, `stop`.

    >>> slice_batch([("a", "b", "c"), torch.tensor([1, 2, 3])], 1, 3)
    [('b', 'c'), tensor([2, 3])]
    """
    return _pick(batch, batch_examples(batch), slice(start, stop))


def take_examples(batch: Any, which: list[int]) -> Any:
    """Return the examples of a batch with the indices `which`, in that order."""
    return _pick(batch, batch_examples(batch), which)


def micro_batches(batch: Any, size: int) -> Iterator[tuple[Any, float]]:
    """Yield micro-batches of at most `size` examples, each with its share of the batch's examples.

    The shares add up to 1.
    """
    total = batch_examples(batch)
    if total <= size:
        yield batch, 1.0
        return
    for start in range(0, total, size):
        stop = min(start + size, total)
        yield slice_batch(batch, start, stop), (stop - start) / total


def stack_nested(each: Sequence[Any]) -> Any:
    """Stack nested tensors of the same structure along a new first dimension.

    >>> stack_nested([[torch.tensor(1), (torch.tensor(2),)], [torch.tensor(3), (torch.tensor(4),)]])
    [tensor([1, 3]), (tensor([2, 4]),)]
    """
    stacks = iter([torch.stack(alike) for alike in zip(*map(tensors_in, each), strict=True)])
    return map_tensors(each[0], lambda x: next(stacks))


def targets_of(batch: Any) -> Tensor | None:
    """Return a batch's targets, or None if the batch has no targets.

    In a mapping, they have one of the names in `TARGET_KEYS`; in a tuple or list, they are the last item.
    """
    if isinstance(batch, Mapping):
        found = next((batch[key] for key in TARGET_KEYS if key in batch), None)
    else:
        found = batch[-1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
    return found if isinstance(found, Tensor) else None


def described(value: Any) -> str:
    """Return a short text that describes a value's type and size, for messages.

    >>> described(torch.zeros(2, 3)), described((torch.zeros(2), None))
    ('a tensor of shape (2, 3)', 'a tuple of 2')
    """
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a mapping with {sorted(map(str, value))}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else type(value).__name__
