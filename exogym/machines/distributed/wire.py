"""The collectives bare: torch's own calls on tensors that are known to fit. `collectives` checks, then calls these.

Whatever only moves data is moved as bytes, so every dtype travels on every backend. Tensors are contiguous and on the
device of the backend.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from exogym.machines.distributed.operation import ReduceOp, finish, on_the_wire, reduce_rows


def device() -> torch.device:
    """Return where the tensors of this process group's backend live."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def as_bytes(x: Tensor) -> Tensor:
    """Return the memory of `x` as a flat tensor of bytes."""
    return x.view(-1).view(torch.uint8)


def broadcast_(x: Tensor, src: int) -> Tensor:
    """Overwrite `x` by that of `src`."""
    dist.broadcast(as_bytes(x), src)
    return x


def all_reduce_(x: Tensor, op: ReduceOp) -> Tensor:
    """Overwrite `x` by the reduction over all."""
    dist.all_reduce(x, on_the_wire(op))
    return finish(x, op, dist.get_world_size())


def reduce_(x: Tensor, dst: int, op: ReduceOp) -> Tensor:
    """Overwrite `x` by the reduction on `dst`; elsewhere `x` is spoilt."""
    dist.reduce(x, dst, on_the_wire(op))
    return finish(x, op, dist.get_world_size())


def all_gather_(parts: list[Tensor], x: Tensor) -> list[Tensor]:
    """Overwrite `parts` by the tensors of all, in rank order."""
    dist.all_gather([as_bytes(part) for part in parts], as_bytes(x))
    return parts


def gather_(parts: list[Tensor] | None, x: Tensor, dst: int) -> list[Tensor] | None:
    """Overwrite `parts`, on `dst`, by the tensors of all, in rank order; elsewhere it is None."""
    dist.gather(as_bytes(x), None if parts is None else [as_bytes(part) for part in parts], dst)
    return parts


def scatter_(out: Tensor, parts: list[Tensor] | None, src: int) -> Tensor:
    """Overwrite `out` by part `rank` of those of `src`."""
    dist.scatter(as_bytes(out), None if parts is None else [as_bytes(part) for part in parts], src)
    return out


def reduce_scatter_(out: Tensor, received: Tensor, x: Tensor, op: ReduceOp) -> Tensor:
    """Overwrite `out` by part `rank` of the reduction over all, cut along the first dimension.

    NCCL has it as one call; elsewhere everyone sends each process its part (into `received`, as large as `x`) and adds
    up its own in rank order, which is as many bytes as a ring would send.
    """
    size = dist.get_world_size()
    if dist.get_backend() == "nccl":
        dist.reduce_scatter_tensor(out, x, on_the_wire(op))
    else:
        dist.all_to_all_single(as_bytes(received), as_bytes(x))
        out.copy_(reduce_rows(received.view(size, -1), op).view(out.shape))
    return finish(out, op, size)


def send(x: Tensor, dst: int) -> None:
    """Send `x` to `dst`; return when its memory is free."""
    dist.send(as_bytes(x), dst)


def receive_(x: Tensor, src: int) -> Tensor:
    """Overwrite `x` by what `src` sends."""
    dist.recv(as_bytes(x), src)
    return x
