"""Reduction operations: sum, average, min, max, product."""

from __future__ import annotations

from enum import StrEnum

import torch

from exogym.errors import ArgumentError, nearest


class ReduceOp(StrEnum):
    """Says how a reduction combines all processes' tensors, element by element. Collectives also accept "sum" etc.

    >>> ReduceOp.AVERAGE == "average"
    True
    """

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


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
        raise ArgumentError(f"op={operation.value!r} is not defined for complex numbers: give 'sum' or 'average'")
    return operation
