"""Estimate the memory that a run's rows need, and reject a run that doesn't fit."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn

from exogym.core.base.torch_private import bare_step
from exogym.core.compute.spans import CHUNK_ROWS
from exogym.core.fleet import Fleet
from exogym.core.fleet.layout import hidden_matrices
from exogym.errors import ArgumentError
from exogym.strategy.strategy import Run, Strategy

if TYPE_CHECKING:
    from exogym.strategy.clocked import ClockedStrategy

META = torch.device("meta")
ROW_OBJECTS, TENSOR_OBJECTS = 4000, 300  # bytes of Python objects per row, and per optimizer tensor
MOST_STARTED = 1000  # nodes in the trial start; more would take longer and give the same answer


def check_rows(
    model: nn.Module, strategy: Strategy, free: int, *, num_nodes: int, rows: int, processes: int, is_cut: bool,
    buffer_bytes: int, together: bool,
) -> None:  # fmt: skip
    """Raise ArgumentError, which lists the bytes, if a run doesn't fit into `free` bytes, before any row is allocated.

    The check counts parameters, gradients, optimizer state, buffers, strategy state, temporary tensors, servers and
    Python objects. It does not count activations, data and histories. The check itself needs little memory: the
    optimizer steps small parameters with the same number of axes, and the strategy starts on torch's meta device. If
    the optimizer or the strategy fails here, its state is not counted.

    Args:
        rows: the number of the run's rows. It is below `num_nodes` if only some nodes act at a time.
        processes: number of processes that divide the rows. Each process has its own memory.
        is_cut: whether a node is several processes, each with a part of a row.
        buffer_bytes: bytes per row of the buffers that training changes.
        together: whether gradients of several rows are computed at once (`compute="vmap"`).
    """
    parameters = [p for p in model.parameters() if p.requires_grad and not nn.parameter.is_lazy(p)]
    each = {"parameters": sum(p.nbytes for p in parameters), "buffers": buffer_bytes}

    def needed(row_bytes: int) -> int:
        return rows * row_bytes // processes if is_cut else -(-rows // processes) * row_bytes

    each |= _computing(model, strategy, together)
    each["temporary tensors"] = int(strategy.temporary_rows * each["parameters"])
    once = each["parameters"] * (min(rows, CHUNK_ROWS) if together else 1)  # gradients under way
    each["strategy"], shared, servers = _kept(model, strategy, min(num_nodes, MOST_STARTED), buffer_bytes)
    size = getattr(strategy, "island_size", None) or num_nodes
    shared_by_all = shared + -(-num_nodes // size) * servers
    once += shared_by_all
    row_bytes = sum(each.values())
    if needed(row_bytes) + once <= free:
        return
    with_servers = row_bytes + -(-servers * num_nodes * processes // (rows * size))  # every process has all servers
    left = max(0, free - (each["parameters"] + shared + servers))  # the last island may be smaller
    fit = left * processes // with_servers if is_cut else left // with_servers * processes
    most = f"at most {fit} {'nodes' if rows == num_nodes else 'rows'} fit" if fit else "not even one node fits"
    share = f" in each of {processes} processes" if processes > 1 else ""
    counted = [f"{name} {needed(size) / 1e9:.3g}" for name, size in each.items() if size]
    counted += [f"servers {shared_by_all / 1e9:.3g}"] if strategy.driven_by == "clock" else []
    raise ArgumentError(
        f"num_nodes={num_nodes}: {rows} rows of {sum(p.numel() for p in parameters)} parameters need "
        f"{(needed(row_bytes) + once) / 1e9:.3g} GB{share} ({', '.join(counted)}; without activations and data), and "
        f"{free / 1e9:.3g} GB are free: {most}. Train fewer nodes or a smaller model, or use more machines"
    )


def _computing(model: nn.Module, strategy: Strategy, together: bool) -> dict[str, int]:
    """Return the bytes of a row's gradients, optimizer state and Python objects."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad and not nn.parameter.is_lazy(p)}
    keeps_gradients = together or (strategy.needs_gradients and strategy.driven_by != "clock")
    found = {"gradients": sum(p.nbytes for p in named.values()) if keeps_gradients else 0}
    kept: list[int] = []
    if strategy.driven_by != "programs":  # programs may step differently
        small = {
            n: nn.Parameter(torch.zeros([min(side, 2) for side in p.shape], dtype=p.dtype)) for n, p in named.items()
        }
        try:
            optimizer = strategy.inner.spec.build(small, hidden=hidden_matrices(model))
            for p in small.values():
                p.grad = torch.zeros_like(p)
            bare_step(optimizer)()
            kept = [
                _grown(x, p, named[n])
                for n, p in small.items()
                for x in optimizer.state[p].values()
                if isinstance(x, Tensor)
            ]
        except Exception:  # the run raises the error when it builds the optimizer
            kept = []
    found["optimizer state"] = sum(kept)
    return found | {"Python's objects": ROW_OBJECTS + TENSOR_OBJECTS * len(kept)}


def _grown(x: Tensor, small: Tensor, whole: Tensor) -> int:
    """Return the bytes of the optimizer tensor `x` of `small`, scaled to a parameter as large as `whole`."""
    if x.dim() != small.dim():
        return x.nbytes
    axes = zip(x.shape, small.shape, whole.shape, strict=True)
    return x.itemsize * math.prod(full if side == little else side for side, little, full in axes)


def _kept(model: nn.Module, strategy: Strategy, num_nodes: int, buffer_bytes: int) -> tuple[int, int, int]:
    """Return the bytes of a strategy's state: per row without parameters, shared, and of each island's server."""
    if strategy.driven_by == "programs":
        return 0, 0, 0
    try:
        fleet = Fleet(model, [0], num_nodes, META)
        if strategy.driven_by == "clock":
            clocked = cast("ClockedStrategy", strategy)
            pulled, server = fleet.parameter_bytes, _bytes(clocked.server(fleet).state()) + buffer_bytes
            if clocked.island_size is None:
                return pulled, server, 0
            return pulled, _bytes(clocked.global_server(fleet).state()), server + pulled  # with a relay's message
        before = _bytes(fleet.state.row(0))
        copy.deepcopy(strategy).on(fleet, Run(num_nodes, 0, 1, np.ones(num_nodes, dtype=np.int64), 1))  # type: ignore[attr-defined]
        return _bytes(fleet.state.row(0)) - before, _bytes(fleet.state.shared()), 0
    except Exception:  # it needs numbers, or more of the run; the run raises real errors at its start
        return 0, 0, 0


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(x.nbytes for x in tensors.values())
