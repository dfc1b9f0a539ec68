"""Run inner optimizers that need whole tensors, when each process of a node has a part of every parameter.

In every step, each process receives its share of whole parameters (always the same ones) and their gradients, its
optimizer steps them, and it sends the results back. With k processes and P parameters of b bytes, a process sends about
(k-1)/k^2 b P bytes three times per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from exogym.core.base.torch_private import without_compiler
from exogym.core.fleet import Fleet
from exogym.core.fleet.cuts import Cut
from exogym.core.fleet.dealing import Dealing
from exogym.core.fleet.state import Tensors
from exogym.strategy.optim import OptimSpec, remember_as_built


class WholeTensors:
    """Move whole parameters to the processes whose optimizers step them, and the results back (`named`: those here)."""

    def __init__(self, fleet: Fleet, spec: OptimSpec):
        self.fleet, self.dealing = fleet, Dealing(fleet, "tensors")
        (block,) = self.dealing.view.blocks
        self._slots = list(block.layout)
        empty = block.params.new_empty(1)
        self.named = {s.name: nn.Parameter(empty.expand(s.numel).view(s.shape).clone()) for s in self._slots}
        whole = fleet.blocks[0].layout.whole
        assert whole is not None
        self.spec, self._everyone = spec, {s.name: nn.Parameter(empty.expand(s.numel).view(s.shape)) for s in whole}
        names = {id(p): name for name, p in self._everyone.items()}
        # The numbering of a dense run's optimizer, so that checkpoints do not depend on the split.
        self.order = [names[id(p)] for group in self._dense().param_groups for p in group["params"]]
        self.own = [name for name in self.order if name in self.named]

    def _dense(self) -> Optimizer:
        return self.spec.build(self._everyone, hidden=self.fleet.hidden)

    def build(self) -> Optimizer:
        """Return an optimizer for this process's whole parameters, with the same groups as the user's optimizer."""
        dense = self._dense()
        names = {id(p): name for name, p in self._everyone.items()}
        groups = []
        for group in dense.param_groups:
            mine = [self.named[names[id(p)]] for p in group["params"] if names[id(p)] in self.named]
            groups += [group | {"params": mine}] if mine else []
        with without_compiler():
            return remember_as_built(type(dense)(groups, **self.spec.kwargs))

    def step(self, row: int, parameters: Sequence[nn.Parameter], take: Callable[[], object] | None) -> None:
        """Receive whole parameters and gradients of `row`, step them with `take`, and send the results back.

        `parameters` are this process's parts, with gradients. `take` is None if this process steps no parameter.
        """
        (block,) = self.fleet.blocks
        rows = block.params[row : row + 1]
        grads = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])[None]
        with_grad = {slot.name for slot, p in zip(block.layout, parameters, strict=True) if p.grad is not None}
        dealt, dealt_grads = self.dealing.deal(rows), self.dealing.deal(grads)
        for slot in self._slots:
            p = self.named[slot.name]
            p.data = slot.of(dealt[0])
            p.grad = slot.of(dealt_grads[0]) if slot.name in with_grad else None
        if take is not None:
            take()
        rows.copy_(self.dealing.deal_back(dealt))
        for p in self.named.values():
            p.grad = None

    # Checkpoints number parameters as in a dense run

    def renamed(self, tensors: Tensors, given: Sequence[str], wanted: Sequence[str]) -> Tensors:
        """Renumber an optimizer's `tensors`, from the order of names in `given` to the order in `wanted`."""
        found = {}
        for name, x in tensors.items():
            number, _, rest = name.partition(".")
            if not number.isdigit():
                found[name] = x
            elif given[int(number)] in wanted:
                found[f"{wanted.index(given[int(number)])}.{rest}"] = x
        return found

    def cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        number = name.partition(".")[0]
        if not number.isdigit():
            return None
        if self.order[int(number)] not in self.named:
            raise KeyError(name)
        return Cut(tuple(shape), tuple(shape), torch.arange(torch.Size(shape).numel()))
