"""The operations of reductions, and torch's collectives without checks.

Collectives that only move data treat tensors as bytes, so every dtype works with every backend. Tensors must be
contiguous and on the backend's device.
"""

from __future__ import annotations

from enum import StrEnum

import torch
import torch.distributed as dist
from torch import Tensor

from exogym.core.base.devices import Device
from exogym.errors import ArgumentError, nearest


class ReduceOp(StrEnum):
    """How a reduction combines all processes' tensors elementwise. Collectives also accept strings such as "sum".

    >>> ReduceOp.AVERAGE == "average"
    True
    """

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


SENT_AS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVERAGE: dist.ReduceOp.SUM,  # then divided
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}
IN_ROWS = {  # reductions over the first dimension, in rank order
    ReduceOp.SUM: lambda rows: rows.sum(0, dtype=rows.dtype),
    ReduceOp.AVERAGE: lambda rows: rows.sum(0, dtype=rows.dtype),
    ReduceOp.MIN: lambda rows: rows.amin(0),
    ReduceOp.MAX: lambda rows: rows.amax(0),
    ReduceOp.PRODUCT: lambda rows: rows.prod(0, dtype=rows.dtype),
}
_REDUCIBLE = (  # dtypes that both gloo and NCCL can reduce
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
)


def check_operation(op: ReduceOp | str, dtype: torch.dtype) -> ReduceOp:
    """Return `op`, a ReduceOp or a text such as "sum", as a ReduceOp.

    Raises:
        ArgumentError: `op` is unknown, or is not defined for tensors of `dtype`.

    >>> check_operation("averaged", torch.float32)
    Traceback (most recent call last):
    ...
    exogym.errors.ArgumentError: op='averaged' is not a reduction: did you mean 'average'?
    """
    try:
        operation = ReduceOp(op)
    except ValueError:
        raise ArgumentError(f"op={op!r} is not a reduction: {nearest(str(op), [o.value for o in ReduceOp])}") from None
    if dtype not in _REDUCIBLE:
        raise ArgumentError(f"tensors of {dtype} cannot be reduced: convert them, for example with .int() or .float()")
    if operation == ReduceOp.AVERAGE and not (dtype.is_floating_point or dtype.is_complex):
        raise ArgumentError(f"the average of {dtype} tensors is not always a {dtype}: convert them with .float()")
    if dtype.is_complex and operation not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise ArgumentError(f"op={operation.value!r} is not defined for complex numbers: use 'sum' or 'average'")
    return operation


def device() -> torch.device:
    """Return the device whose tensors the process group's backend can send."""
    return Device.of_group().place


def as_bytes(x: Tensor) -> Tensor:
    """Return the memory of `x` as a flat tensor of bytes."""
    return x.view(-1).view(torch.uint8)


def all_reduce_(x: Tensor, op: ReduceOp) -> Tensor:
    """Overwrite `x` on every process with the reduction of all processes' `x`."""
    dist.all_reduce(x, SENT_AS[op])
    return averaged(x, op)


def all_gather_(x: Tensor) -> list[Tensor]:
    """Return the list of all processes' `x`, in rank order, on every process."""
    parts = alike(x)
    dist.all_gather([as_bytes(part) for part in parts], as_bytes(x))
    return parts


def reduce_scatter_(x: Tensor, op: ReduceOp) -> Tensor:
    """Return this rank's part of the reduction of all processes' `x`. The first dimension is divided among the ranks.

    NCCL does this in one call. With other backends, every process sends each other rank its part of `x` and reduces the
    received parts in rank order, which sends as many bytes as a ring.
    """
    size = dist.get_world_size()
    out = torch.empty_like(x[: len(x) // size])
    if dist.get_backend() == "nccl":
        dist.reduce_scatter_tensor(out, x, SENT_AS[op])
    else:
        received = torch.empty_like(x)
        dist.all_to_all_single(as_bytes(received), as_bytes(x))
        out = IN_ROWS[op](received.view(size, *out.shape))
    return averaged(out, op)


def send(x: Tensor, dst: int) -> None:
    """Send `x` to rank `dst`. Return when the memory of `x` may be reused."""
    dist.send(as_bytes(x), dst)


def receive_(x: Tensor, src: int) -> Tensor:
    """Overwrite `x` with the tensor that rank `src` sends."""
    dist.recv(as_bytes(x), src)
    return x


def alike(x: Tensor) -> list[Tensor]:
    """Return one empty tensor like `x` for each process."""
    return [torch.empty_like(x) for _ in range(dist.get_world_size())]


def averaged(x: Tensor, op: ReduceOp) -> Tensor:
    return x.div_(dist.get_world_size()) if op == ReduceOp.AVERAGE else x
