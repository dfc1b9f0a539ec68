"""Tensors in nested containers: batches, and what modules take and give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested mappings, tuples and lists, in order; what else is in them is passed over.

    >>> import torch
    >>> [len(x) for x in tensors_in({"a": torch.ones(2), "b": [torch.ones(3), "c"]})]
    [2, 3]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_in(one)
