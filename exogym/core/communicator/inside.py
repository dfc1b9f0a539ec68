"""Inside a node: the processes that hold the parts of its row.

A node may be several devices, each a process with some of the columns of the node's row. Between nodes the processes
with the same columns are a world of their own, and the strategy's; what a number of the whole row is, as the norm of a
gradient or the bytes of a payload, the processes of a node tell each other here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Inside:
    """A process that is all of its node: what it says is what the node says.

    Attributes:
        part, parts: which of the node's processes this is, and how many there are.
    """

    part, parts = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the node's processes, the same bits in each; `x` itself may take it."""
        return x

    def maximum(self, x: Tensor) -> Tensor:
        """Return the largest of each element of `x` over the node's processes."""
        return x

    def gather(self, x: Tensor, sizes: list[int]) -> list[Tensor]:
        """Return the (sizes[j],) elements `x` of each process j of the node, in each."""
        return [x]

    def swap(self, outgoing: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Give process j of the node the (n,) `outgoing[j]`; return what each gave, `sizes[j]` elements."""
        return outgoing

    def tell(self, value: Any) -> list[Any]:
        """Return the `value` (JSON-able) of each process of the node, in each."""
        return [value]

    def mesh(self, axes: dict[str, int]) -> Any:
        """Return torch's DeviceMesh of the node, with these axes."""
        raise NotImplementedError

    def along(self, axis: Any) -> Inside:
        """Return those of the node's processes that are on one axis of its mesh, torch's DeviceMesh, with this one."""
        raise NotImplementedError

    def total(self, number: int) -> int:
        """Return the sum of whole numbers, exactly."""
        return number if self.parts == 1 else int(self.sum(torch.tensor([number], dtype=torch.int64)).item())

    def any(self, flag: bool) -> bool:
        """Return whether any process of the node says True."""
        return flag if self.parts == 1 else bool(self.total(int(flag)))

    def norms(self, x: Tensor) -> Tensor:
        """Return the 2-norms of what all hold together, from (rows,) or () those of what is here."""
        return x if self.parts == 1 else self.sum(x.square()).sqrt()


ALONE = Inside()  # a node that is one device
