"""Data sets that return many examples in one indexing operation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from exogym.core.base.batches import batch_examples, beside_tensors, map_tensors, slice_batch, tensors_in
from exogym.errors import DataError, check_count

Take = Callable[[Tensor], Any]


class BulkDataset(Dataset, ABC):
    """A data set that returns whole batches. Implement `__len__` and `take`; `dataset[i]` then works, too."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, indices: Tensor) -> Any:
        """Return the batch of the examples `indices`, (k,) int64.

        The batch is a tensor (k, ...), or a tuple, list or dict of such tensors. It must not be random: example j of
        the batch must depend only on `indices[j]`.
        """

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"the data set has {len(self)} examples: index {index} does not exist")
        return map_tensors(self.take(torch.tensor([index % len(self)])), lambda leaf: leaf[0])


class TokenWindows(BulkDataset):
    """Windows of a token stream for language models: example i is (x, y), where y is x shifted by one token.

    x = tokens[i*stride : i*stride + block_size], y = tokens[i*stride + 1 : i*stride + block_size + 1]. The windows are
    a strided view of `tokens`, so only batches are copied.

    Args:
        tokens: (T,) whole numbers, kept in their dtype (uint8 or int16 save memory) and returned as int64.
        block_size: number of tokens in x.
        stride: tokens between the starts of two windows. Default: `block_size`, so that windows' x don't overlap.

    Raises:
        DataError: `tokens` is not one-dimensional, or shorter than one window.

    >>> windows = TokenWindows(torch.arange(10), block_size=4)
    >>> len(windows), windows[1]
    (2, (tensor([4, 5, 6, 7]), tensor([5, 6, 7, 8])))
    """

    def __init__(self, tokens: Tensor | np.ndarray, block_size: int, stride: int | None = None) -> None:
        check_count("block_size", block_size)
        stride = block_size if stride is None else stride
        check_count("stride", stride)
        tokens = torch.as_tensor(tokens)
        if tokens.ndim != 1 or tokens.is_floating_point():
            raise DataError(f"tokens are {tokens.dtype} {tuple(tokens.shape)}: expected integers of shape (T,)")
        if len(tokens) <= block_size:
            raise DataError(f"{len(tokens)} tokens are too few for one window of block_size={block_size} + 1")
        self.tokens, self.block_size, self.stride = tokens, block_size, stride

    @property
    def windows(self) -> Tensor:
        """A view of all windows, (len(self), block_size + 1)."""
        return self.tokens.unfold(0, self.block_size + 1, self.stride)

    def __len__(self) -> int:
        return (len(self.tokens) - self.block_size - 1) // self.stride + 1

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return shifted(self.windows[indices].long())


def shifted(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks (k, T + 1) without their last token and without their first, (k, T) each.

    Both are contiguous, like a DataLoader's batch, because models call `view` on them.
    """
    return blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous()


def bulk_take(dataset: Any) -> Take | None:
    """Return a function that reads a batch of `dataset` in one operation, or None if there is none.

    There is one for a `TensorDataset`, a `BulkDataset` and a `Subset` of these, but not for subclasses of
    `TensorDataset` and `Subset`, which may change `__getitem__`. Its batch equals a DataLoader's.
    """
    if isinstance(dataset, BulkDataset):
        return dataset.take
    if type(dataset) is TensorDataset and all(t.is_cpu for t in dataset.tensors):
        return lambda indices: [tensor.index_select(0, indices) for tensor in dataset.tensors]
    if type(dataset) is Subset:
        inner = bulk_take(dataset.dataset)
        if inner is not None:
            positions = torch.from_numpy(np.array(dataset.indices, dtype=np.int64))
            return lambda indices: inner(positions.index_select(0, indices))
    return None


def split_batch(batch: Any, size: int) -> Sequence[Any]:
    """Split a batch along its first axis into views of `size` examples; the last may have fewer."""
    if isinstance(batch, Tensor):
        return batch.split(size)
    if type(batch) is list:
        return [list(row) for row in zip(*[split_batch(part, size) for part in batch], strict=True)]
    if type(batch) is tuple:
        return list(zip(*[split_batch(part, size) for part in batch], strict=True))
    return [slice_batch(batch, first, first + size) for first in range(0, batch_examples(batch), size)]


def batch_bytes(batch: Any) -> int:
    """Return the bytes of a batch's tensors. Raise DataError if the batch contains anything else."""
    if other := beside_tensors(batch):
        kind = type(other[0]).__name__
        raise DataError(f"take() returned a {kind}: expected a tensor, or a tuple, list or dict of tensors")
    return sum(x.nbytes for x in tensors_in(batch))
