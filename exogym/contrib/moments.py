"""The inner optimizers' moments as matrices (rows, P), so that a strategy can mix them like parameters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from exogym.core.base.torch_private import bare_step
from exogym.core.fleet import Block, Fleet
from exogym.errors import ArgumentError
from exogym.strategy.optim import OptimSpec

FIRST, SECOND = ("exp_avg", "momentum_buffer"), ("exp_avg_sq", "square_avg")
Kind = tuple[str, ...]


class Moments:
    """The moments of the optimizers that `spec` builds. Moments are state tensors in the shapes of their parameters.

    Attributes:
        kinds: the kinds of moments, in the order first, second, others. Each kind is a tuple of the names that torch's
            optimizers use for this kind; a parameter's state has one of these names.

    Raises:
        ArgumentError: the optimizer keeps no such state.

    >>> Moments(OptimSpec("adamw")).kinds, Moments(OptimSpec("sgd", momentum=0.9)).kinds == [FIRST]
    ([('exp_avg', 'momentum_buffer'), ('exp_avg_sq', 'square_avg')], True)
    """

    def __init__(self, spec: OptimSpec):
        named = {"weight": nn.Parameter(torch.ones(2, 2)), "bias": nn.Parameter(torch.ones(2))}
        optimizer = OptimSpec(spec.cls, **spec.kwargs).build(named, hidden={"weight"})
        for p in named.values():
            p.grad = torch.ones_like(p)
        bare_step(optimizer)()  # without importing torch's compiler, which takes a second
        kept = [(p, name, x) for p in named.values() for name, x in optimizer.state[p].items()]
        names = [name for p, name, x in kept if isinstance(x, Tensor) and x.shape == p.shape]
        if not names:
            raise ArgumentError(f"{spec!r} keeps no state per parameter that could be averaged: take 'adamw'")
        own: list[Kind] = [(name,) for name in dict.fromkeys(names) if name not in FIRST + SECOND]
        self.kinds: list[Kind] = [*(kind for kind in (FIRST, SECOND) if {*kind} & {*names}), *own]

    def average(self, fleet: Fleet, kind: Kind) -> None:
        """Average the moments of `kind` over the nodes. The payload is P b bytes.

        A node's moment does not exist yet if its parameter has never had a gradient. Such a moment counts as zeros in
        the mean, and is not created.
        """
        optimizers = getattr(fleet.state.parts.get("optimizer"), "optimizers", {})
        for block in fleet.blocks:
            x = block.zeros()
            places = [(row, place) for row, o in optimizers.items() for place in _places(o, block, kind)]
            for row, (start, moment) in places:
                x[row, start : start + moment.numel()] = moment.flatten()
            mean = fleet.comm.all_reduce(x, "mean")
            for row, (start, moment) in places:
                moment.copy_(mean[row, start : start + moment.numel()].view_as(moment))


def _places(optimizer: Optimizer, block: Block, kind: Kind) -> Iterator[tuple[int, Tensor]]:
    """Yield (start, tensor) for the moment of each parameter of the block, side by side in the optimizer's order."""
    start = 0
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.dtype != block.layout.dtype:
            continue
        state = optimizer.state.get(p, {})
        yield from ((start, state[name]) for name in kind if state.get(name) is not None)
        start += p.numel()
