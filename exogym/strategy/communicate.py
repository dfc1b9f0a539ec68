"""Collectives for a strategy written for one node: what `torch.distributed` would give it.

Each call waits for all nodes to make the same call. `all_reduce` and `broadcast` change the tensor in
place, as torch's do, and return it. They work inside `Strategy.step` and `Strategy._init_node` only.
Bytes are counted as `exogym.communicator` says.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
from torch import Tensor

from exogym.errors import StrategyError, check_choice

OPERATIONS = ("sum", "mean", "max", "min")


class Place(Protocol):
    """Where a node stands while its strategy runs: it can meet the others."""

    def meet(self, kind: str, tensor: Tensor | None, **options: Any) -> Tensor | None: ...


_here = threading.local()


def set_place(place: Place | None) -> None:
    """Tell the collectives of this thread which node they speak for (used by the runner of strategies)."""
    _here.place = place


def _meet(kind: str, tensor: Tensor | None, **options: Any) -> Tensor:
    place = getattr(_here, "place", None)
    if place is None:
        raise StrategyError(f"{kind}() was called outside a strategy's step: nobody to communicate with here")
    return place.meet(kind, tensor, **options)


def all_reduce(tensor: Tensor, op: str = "sum") -> Tensor:
    """Reduce over all nodes, in place: "sum" (as torch), "mean", "max" or "min". Payload: `tensor.nbytes`."""
    check_choice("op", op, OPERATIONS)
    with torch.no_grad():
        return tensor.copy_(_meet("all_reduce", tensor.detach(), op=op))


def broadcast(tensor: Tensor, src: int = 0) -> Tensor:
    """Give every node the tensor of node `src`, in place."""
    with torch.no_grad():
        return tensor.copy_(_meet("broadcast", tensor.detach(), src=src))


def reduce(tensor: Tensor, dst: int = 0, op: str = "sum") -> Tensor:
    """Reduce to node `dst`, in place there; other nodes keep their tensor."""
    check_choice("op", op, OPERATIONS)
    with torch.no_grad():
        return tensor.copy_(_meet("reduce", tensor.detach(), dst=dst, op=op))


def all_gather(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all nodes in rank order."""
    return list(_meet("all_gather", tensor.detach()).unbind(0))


def gather(tensor: Tensor, dst: int = 0) -> list[Tensor] | None:
    """Return the tensors of all nodes in rank order on node `dst`, None on the others."""
    gathered: Any = _meet("gather", tensor.detach(), dst=dst)
    return None if gathered is None else list(gathered.unbind(0))


def scatter(tensors: Tensor, src: int = 0) -> Tensor:
    """Return slice `rank` of the (num_nodes, ...) tensor of node `src`."""
    return _meet("scatter", tensors.detach(), src=src).clone()


def reduce_scatter(tensors: Tensor, op: str = "sum") -> Tensor:
    """Reduce a (num_nodes, ...) tensor over all nodes and return slice `rank`."""
    check_choice("op", op, OPERATIONS)
    return _meet("reduce_scatter", tensors.detach(), op=op).clone()


def barrier() -> None:
    """Wait for all nodes."""
    _meet("barrier", None)
