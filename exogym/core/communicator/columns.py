"""Communication inside a node, between the processes that hold the parts of the node's row.

A node may have several devices. Each device is a process that holds some columns of the node's row. The processes of
all nodes that hold the same columns form a group, and the strategy runs in each of these groups. Some numbers, such as
a gradient's norm or a payload's bytes, depend on the whole row. The node's processes compute these numbers together, by
the methods of `Columns`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Columns:
    """Communication between the processes of a node.

    In this base class the node has one process, which gets its own values.

    Attributes:
        part: the number of this process among the node's processes, from 0.
        parts: how many processes the node has.
    """

    part, parts = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the node's processes, the same bits in every process. May overwrite `x`."""
        return x

    def maximum(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum of `x` over the node's processes."""
        return x

    def gather(self, x: Tensor, sizes: list[int]) -> list[Tensor]:
        """Return the tensors `x` of all processes of the node, in every process.

        Process j's tensor has `sizes[j]` elements.
        """
        return [x]

    def swap(self, outgoing: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Send the tensor `outgoing[j]` to process j of the node, for each j. Return the received tensors.

        The tensor from process j has `sizes[j]` elements.
        """
        return outgoing

    def tell(self, value: Any) -> list[Any]:
        """Return the values of all processes of the node, in every process. A `value` must be JSON-able."""
        return [value]

    def total(self, number: int) -> int:
        """Return the exact sum of `number`, a whole number, over the node's processes."""
        return number if self.parts == 1 else int(self.sum(torch.tensor([number], dtype=torch.int64)).item())

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is True in any process of the node."""
        return flag if self.parts == 1 else bool(self.total(int(flag)))

    def norms(self, x: Tensor) -> Tensor:
        """Return the 2-norms of the node's whole rows. `x`, (rows,) or (), has the norms of this process's columns."""
        return x if self.parts == 1 else self.sum(x.square()).sqrt()


ALONE = Columns()  # a node on one device
