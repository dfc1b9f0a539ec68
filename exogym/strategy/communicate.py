"""Collectives for a strategy written for one node, with the interface of `torch.distributed`.

A collective returns when all present nodes have made the same call; `send`, `recv` and `exchange` wait for one other
node. As in torch, `all_reduce` and `broadcast` change the tensor in place; they also return it. Call collectives only
inside `Strategy.step` and `Strategy._init_node`. `exogym.communicator` describes how bytes are counted.

This example calls every collective in one step on three nodes. Each returns what `torch.distributed` would return on
that rank:

>>> from exogym import LocalTrainer
>>> from exogym.strategy import Strategy
>>> from exogym.testing import small_problem
>>> class Talk(Strategy):
...     def step(self):
...         mine = torch.tensor([1.0 + self.rank])  # 1, 2 and 3
...         assert all_reduce(mine.clone()) == 6 and all_reduce(mine.clone(), op="max") == 3
...         assert broadcast(mine.clone(), src=2) == 3 and all_gather(mine) == [1, 2, 3]
...         if self.rank == 0:  # one way, between two nodes
...             send(mine, dst=1)
...         if self.rank == 1:
...             assert recv(src=0) == 1
...         if self.rank < 2:  # and both ways
...             assert exchange(mine, partner=1 - self.rank) == 2 - self.rank
...         total, parts = reduce(mine.clone(), dst=0), gather(mine, dst=0)
...         assert self.rank > 0 or (total == 6 and parts == [1, 2, 3])
...         rows = torch.arange(3.0)[:, None]  # a row for each node
...         assert scatter(rows, src=1) == self.rank and reduce_scatter(rows) == 3 * self.rank
...         barrier()
...         super().step()
>>> model, data = small_problem()
>>> trainer = LocalTrainer(model, data, loss_fn=torch.nn.functional.mse_loss)
>>> _ = trainer.fit(Talk(), num_nodes=3, max_steps=1, batch_size=8)
>>> int(trainer.traffic["ring all_reduce"]["calls"])  # of 4 bytes each
2
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from exogym.errors import ArgumentError, StrategyError, check_choice

__all__ = [
    *("all_gather", "all_reduce", "barrier", "broadcast", "exchange", "gather", "recv", "reduce", "reduce_scatter"),
    *("scatter", "send"),
]

OPERATIONS = ("sum", "mean", "max", "min")


class Place(Protocol):
    """A running node. `meet` lets it take part in a collective with the other nodes."""

    def meet(self, kind: str, tensor: Tensor | None, **options: Any) -> Tensor | None: ...


_here = threading.local()


def set_place(place: Place | None) -> None:
    """Set the node for which this thread calls collectives. Called by the code that runs the strategy's nodes."""
    _here.place = place


def _meet(kind: str, given: Tensor | None, **options: Any) -> Tensor:
    if kind not in ("barrier", "recv") and not isinstance(given, Tensor):
        raise StrategyError(f"{kind}() got a {type(given).__name__}, expected a tensor")
    tensor = None if given is None else given.detach()
    place = getattr(_here, "place", None)
    if place is None:
        raise StrategyError(
            f"{kind}() was called outside a strategy's step, so no other node can answer: call it in Strategy.step"
        )
    return place.meet(kind, tensor, **options)


def _in_place(kind: str, tensor: Tensor, **options: Any) -> Tensor:
    result = _meet(kind, tensor, **options)
    with torch.no_grad():
        return tensor.copy_(result)


def _check_op(op: str) -> None:
    if isinstance(op, dist.ReduceOp.RedOpType):
        word = "mean" if op.name == "AVG" else op.name.lower()
        raise ArgumentError(f"op=ReduceOp.{op.name} is torch.distributed's: write op={word!r}, one of {OPERATIONS}")
    check_choice("op", op, OPERATIONS)


def all_reduce(tensor: Tensor, op: str = "sum") -> Tensor:
    """Reduce `tensor` over all present nodes, in place. Payload: `tensor.nbytes`.

    `op`: "sum" (the default, as in torch), "mean", "max" or "min".
    """
    _check_op(op)
    return _in_place("all_reduce", tensor, op=op)


def broadcast(tensor: Tensor, src: int = 0) -> Tensor:
    """Copy the tensor of node `src` into `tensor` on every present node."""
    return _in_place("broadcast", tensor, src=src)


def reduce(tensor: Tensor, dst: int = 0, op: str = "sum") -> Tensor:
    """Reduce `tensor` over all present nodes, in place on node `dst`; other nodes' tensors do not change."""
    _check_op(op)
    return _in_place("reduce", tensor, dst=dst, op=op)


def all_gather(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all present nodes in rank order."""
    return list(_meet("all_gather", tensor).clone().unbind(0))


def gather(tensor: Tensor, dst: int = 0) -> list[Tensor] | None:
    """Return the tensors of all present nodes in rank order on node `dst`, and None on other nodes."""
    gathered: Any = _meet("gather", tensor, dst=dst)
    return None if gathered is None else list(gathered.unbind(0))


def scatter(tensors: Tensor, src: int = 0) -> Tensor:
    """Return this node's slice of the (n, ...) tensor of node `src`: slice k for the k-th of n present nodes."""
    return _meet("scatter", tensors, src=src).clone()


def reduce_scatter(tensors: Tensor, op: str = "sum") -> Tensor:
    """Reduce an (n, ...) tensor over the n present nodes, and return slice k to the k-th node."""
    _check_op(op)
    return _meet("reduce_scatter", tensors, op=op).clone()


def send(tensor: Tensor, dst: int) -> None:
    """Send `tensor` to node `dst`, which must call `recv(src=...)` with this node's rank; return on arrival.

    This node sends `tensor.nbytes` bytes, and `dst` receives them. A StrategyError is raised if no node can continue
    because `dst` never calls `recv` or all nodes send before they receive.
    """
    _meet("send", tensor, dst=dst)


def recv(src: int) -> Tensor:
    """Return the tensor, of any shape, that node `src` sends to this node."""
    return _meet("recv", None, src=src)


def exchange(tensor: Tensor, partner: int) -> Tensor:
    """Swap tensors of equal shape with node `partner` and return the partner's; other nodes don't wait.

    The partner must call `exchange` with this node's rank. Each of the two sends and receives `tensor.nbytes` bytes. A
    node that names itself as `partner` sends nothing and gets a copy of `tensor`.
    """
    return _meet("exchange", tensor, partner=partner)


def agree(flags: Tensor) -> Tensor:
    """Return for each of the bool `flags` whether any node has set it. The bytes are not counted, as in torch's DDP."""
    return _meet("agree", flags)


def barrier() -> None:
    """Wait for all present nodes."""
    _meet("barrier", None)
