"""The moments of the inner optimizers as matrices (rows, P), so that a strategy may mix them as it mixes parameters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from exogym.errors import ArgumentError
from exogym.fleet import Block, Fleet
from exogym.fleet.presence import rows_of
from exogym.strategy.optim import OptimSpec

FIRST, SECOND = ("exp_avg", "momentum_buffer"), ("exp_avg_sq", "square_avg")


class Moments:
    """What the optimizers of `spec` keep of each parameter, in its shape.

    Attributes:
        names: of all, as torch names them: "exp_avg", "exp_avg_sq", "momentum_buffer".
        first, second: names of the first and the second moment, or None.

    Raises:
        ArgumentError: an optimizer that keeps nothing of that kind.

    >>> Moments(OptimSpec("adamw")).names, Moments(OptimSpec("sgd", momentum=0.9)).first
    (['exp_avg', 'exp_avg_sq'], 'momentum_buffer')
    """

    def __init__(self, spec: OptimSpec):
        p = nn.Parameter(torch.ones(2, 2))
        optimizer = (
            spec.build({"weight": p}) if not spec.groups else OptimSpec(spec.cls, **spec.kwargs).build({"weight": p})
        )
        p.grad = torch.ones(2, 2)
        optimizer.step()
        state = optimizer.state[p]
        self.names = [name for name, x in state.items() if isinstance(x, Tensor) and x.shape == p.shape]
        if not self.names:
            raise ArgumentError(f"{spec!r} keeps nothing of its parameters that could be averaged: take 'adamw'")
        self.first = next((name for name in FIRST if name in self.names), None)
        self.second = next((name for name in SECOND if name in self.names), None)

    def average(self, fleet: Fleet, name: str) -> None:
        """Average the moment `name` over the nodes that are there: payload P b bytes.

        A parameter that has none yet, as it never had a gradient, counts as zeros and stays without.
        """
        optimizers = getattr(fleet.state.parts.get("optimizer"), "optimizers", {})
        for block in fleet.blocks:
            x = block.zeros()
            places = [(row, place) for row, o in optimizers.items() for place in _places(o, block, name)]
            for row, (start, moment) in places:
                x[row, start : start + moment.numel()] = moment.flatten()
            mean = fleet.comm.all_reduce(x, "mean")
            there = set(rows_of(fleet, fleet.comm.present))
            for row, (start, moment) in places:
                if row in there:
                    moment.copy_(mean[row, start : start + moment.numel()].view_as(moment))


def _places(optimizer: Optimizer, block: Block, name: str) -> Iterator[tuple[int, Tensor]]:
    """Yield (start, tensor) of the moment of each of the block's parameters, side by side in the optimizer's order."""
    start = 0
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.dtype != block.layout.dtype:
            continue
        moment = optimizer.state[p].get(name) if p in optimizer.state else None
        if moment is not None:
            yield start, moment
        start += p.numel()
