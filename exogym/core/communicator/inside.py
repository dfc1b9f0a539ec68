"""Inside a node: the processes that hold the parts of its row.

A node may be several devices, each a process with some columns of the node's row. Between nodes, the processes with
the same columns form a separate world, in which the strategy runs. Numbers of the whole row, such as a gradient's norm
or a payload's bytes, need all processes of a node; they meet here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Inside:
    """The one process of a node: each method returns its own value.

    Attributes:
        part: number of this process among the node's processes.
        parts: number of the node's processes.
    """

    part, parts = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the node's processes, the same bits in each. May overwrite `x`."""
        return x

    def maximum(self, x: Tensor) -> Tensor:
        """Return the largest of each element of `x` over the node's processes."""
        return x

    def gather(self, x: Tensor, sizes: list[int]) -> list[Tensor]:
        """Return every process's (sizes[j],) elements `x`, in each process."""
        return [x]

    def swap(self, outgoing: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Give process j of the node the (n,) `outgoing[j]`; return every process's tensor for this one, `sizes[j]`."""
        return outgoing

    def tell(self, value: Any) -> list[Any]:
        """Return every process's `value` (JSON-able), in each process."""
        return [value]

    def mesh(self, axes: dict[str, int]) -> Any:
        """Return torch's DeviceMesh of the node, with these axes."""
        raise NotImplementedError

    def along(self, axis: Any) -> Inside:
        """Return the processes on one axis of the node's mesh (torch's DeviceMesh), including this process."""
        raise NotImplementedError

    def total(self, number: int) -> int:
        """Return the sum of whole numbers, exactly."""
        return number if self.parts == 1 else int(self.sum(torch.tensor([number], dtype=torch.int64)).item())

    def any(self, flag: bool) -> bool:
        """Return whether any process of the node says True."""
        return flag if self.parts == 1 else bool(self.total(int(flag)))

    def norms(self, x: Tensor) -> Tensor:
        """Return the 2-norms of the whole rows from the local parts' norms, (rows,) or ()."""
        return x if self.parts == 1 else self.sum(x.square()).sqrt()


ALONE = Inside()  # a node on one device
