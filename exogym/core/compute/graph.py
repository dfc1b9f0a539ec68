"""Trace a row's local steps into a graph of tensor operations, once per kind of batch.

The graph holds torch's plain operations for K batches: forward, backward, clipping and inner steps. Its inputs are
parameters, optimizer state, buffers, batches, and numbers such as each step's learning rate. Its outputs are the new
values and the losses. So a compiler or a CUDA graph can run it without knowing the model or the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exogym.core.base.batches import micro_batches
from exogym.core.base.torch_private import traced
from exogym.core.compute.updates import SCALARS, State, Update
from exogym.core.compute.worker import Worker
from exogym.errors import ModelError
from exogym.strategy.strategy import clip_rows

Signature = tuple[Any, ...]


@dataclass(frozen=True)
class Stepping:
    """Describe how the optimizer steps a row's parameters inside a graph.

    Attributes:
        updates: each parameter's update. A parameter without a gradient has None, and stays unchanged.
        clock: the number of each parameter's parameter group. `Update.scalars` computes a step's numbers for each
            group.
        max_norm: the norm at which gradients are clipped.
    """

    updates: Sequence[Update | None]
    clock: Sequence[int]
    max_norm: float | None


class Tracer:
    """Trace the local steps of a worker's module into graphs.

    Raises:
        ModelError: a step is not a function of tensors, for example because the model branches on a tensor's values.
    """

    def __init__(self, worker: Worker, how: str):
        self.worker, self.how = worker, how

    def gradient(self, batch: Any) -> Callable[..., Any]:
        """Return the graph of one gradient: (params, buffers, batch) -> (gradients, buffers, loss).

        A parameter has the gradient None if the loss does not depend on the parameter.
        """

        def gradient(params: list[Tensor], buffers: list[Tensor], batch: Any) -> Any:
            return self._gradient(params, buffers, batch)

        return self._traced(gradient, *self._row(), batch)

    def stretch(self, batches: Sequence[Any], stepping: Stepping, kept: Sequence[State]) -> Callable[..., Any]:
        """Return the graph of a step on each of K `batches`.

        The graph is a function (params, kept, buffers, numbers, batches) -> (params, kept, buffers, losses (K,)). Its
        `numbers` hold each step's learning rate and similar numbers (`Update.scalars`).

        Args:
            stepping: how the optimizer steps inside the graph.
            kept: the optimizer's state tensors for each parameter.
        """
        columns = 1 + max(stepping.clock, default=0)
        params, buffers = self._row()
        numbers = torch.zeros(len(batches), columns, SCALARS, dtype=number_dtype(params), device=self.worker.device)

        def steps(params: list[Tensor], kept: list[State], buffers: list[Tensor], numbers: Tensor, batches: Any) -> Any:
            losses = []
            for k, batch in enumerate(batches):
                grads, buffers, loss = self._gradient(params, buffers, batch)
                losses.append(loss)
                present = [g for g in grads if g is not None]
                if stepping.max_norm is not None:
                    clip_rows(present, stepping.max_norm, stacked=False)
                params, kept = list(params), list(kept)
                for i, (update, g) in enumerate(zip(stepping.updates, grads, strict=True)):
                    if update is not None and g is not None:
                        params[i], kept[i] = update(params[i], g, kept[i], numbers[k, stepping.clock[i]].unbind())
            return params, kept, buffers, torch.stack(losses)

        return self._traced(steps, params, list(kept), buffers, numbers, list(batches))

    def together(self, plain: Callable[..., Any], *inputs: Any) -> Callable[..., Any]:
        """Return a graph that applies the graph `plain` to many rows, with vmap.

        The inputs and outputs of the new graph have a first axis for the rows.
        """
        return self._traced(lambda *rows: torch.func.vmap(plain)(*rows), *inputs)

    def _row(self) -> tuple[list[Tensor], list[Tensor]]:
        worker = self.worker
        return list(worker.views(0)), [rows[0] for rows in worker.fleet.buffers.values()]

    def _gradient(self, params: list[Tensor], buffers: list[Tensor], batch: Any) -> Any:
        worker = self.worker
        leaves = [p.detach().requires_grad_() for p in params]
        own = {name: x.clone() for name, x in zip(worker.fleet.buffers, buffers, strict=True)}
        places = dict(zip(worker.names, leaves, strict=True)) | own

        def call(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(worker.model, places, args, kwargs)

        total: Tensor | None = None
        grads: list[Tensor | None] = [None] * len(leaves)
        with torch.enable_grad():
            for part, share in micro_batches(batch, worker.micro_batch_size or 1 << 62):
                with worker.autocast():
                    loss = worker.loss.of(call, part).loss
                found = torch.autograd.grad(loss * share if share != 1.0 else loss, leaves, allow_unused=True)
                grads = [_sum(a, b) for a, b in zip(grads, found, strict=True)]
                loss = loss.detach() * share if share != 1.0 else loss.detach()
                total = loss if total is None else total + loss
        return grads, [places[name] for name in own], total

    def _traced(self, function: Callable[..., Any], *inputs: Any) -> Callable[..., Any]:
        try:
            with torch.no_grad():
                graph = traced(function, *inputs)
        except Exception as error:  # from the user's model, or an operation that torch cannot trace
            raise refusal(self.how, f"torch cannot trace its step as a graph ({first_line(error)})") from error
        for node in graph.graph.nodes:  # type: ignore[attr-defined]
            if "_local_scalar_dense" in str(node.target):
                raise refusal(self.how, "its step reads a number from a tensor (.item())")
        return graph


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def refusal(how: str, why: str) -> ModelError:
    return ModelError(f"compute={how!r} cannot train this model: {why}; use compute='loop'")


def first_line(error: BaseException) -> str:
    """Return an error's type and its message's first line.

    If a compiler's error wraps another error, the inner error is used.
    """
    error = getattr(error, "inner_exception", error)
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def number_dtype(params: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype for learning rates and similar numbers in a graph.

    The dtype is float64 only if a parameter is float64, because float64 slows kernels.
    """
    return torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32


def signature(batch: Any) -> Signature | None:
    """Return the keys, shapes, strides and dtypes of a batch, or None if the batch holds more than tensors."""
    if isinstance(batch, Tensor):
        return (tuple(batch.shape), batch.stride(), batch.dtype)
    if isinstance(batch, Mapping):
        inside = [(key, signature(value)) for key, value in batch.items()]
        return None if any(found is None for _, found in inside) else tuple(inside)
    if isinstance(batch, tuple | list):
        found = [signature(value) for value in batch]
        return None if any(x is None for x in found) else (type(batch).__name__, *found)
    return None
