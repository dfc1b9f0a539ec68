"""Inner optimizers: each row has its own optimizer, and all these optimizers step the same module's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from exogym.core.base.torch_private import bare_step, is_torchs
from exogym.core.compute.worker import Worker
from exogym.core.fleet.cuts import Cut
from exogym.core.fleet.state import Stateful, Tensors
from exogym.strategy.capabilities import Corrects
from exogym.strategy.one_node import clip_rows
from exogym.strategy.packing import load_optimizer_state, optimizer_cut, optimizer_state
from exogym.strategy.schedule import forget_rates, set_rates
from exogym.strategy.strategy import Inner

if TYPE_CHECKING:
    from exogym.core.compute.whole import WholeTensors


def correct_gradients(corrections: Sequence[Corrects], row: int, parameters: Sequence[Tensor]) -> None:
    """Let `corrections` change the gradients of `parameters`, or take gradients away by None in their list."""
    for module in corrections:
        grads = [p.grad for p in parameters]
        module.correct(row, parameters, grads)
        for p, grad in zip(parameters, grads, strict=True):
            if grad is None:
                p.grad = None


class InnerOptimizer(Stateful):
    """Keep one torch optimizer per row. All these optimizers are built on the parameters of the one module.

    The worker points these parameters at one row after another, and then the row's optimizer steps. So every row has
    its own optimizer state, wherever the optimizer stores it. `enter` builds a row's optimizer at its first call. The
    constructor raises ArgumentError if the optimizer needs more than gradients, or its state cannot be saved.

    Attributes:
        optimizers: the optimizers built so far, by row.
        corrections: modules that change the gradients in place before they are clipped.
    """

    def __init__(self, inner: Inner, worker: Worker, total_steps: int):
        self.parameters = worker.parameters
        self.spec, self.max_norm = inner.spec, inner.max_norm
        self._columns = worker.fleet.comm.wire.columns
        self.schedule = inner.schedule(total_steps)
        self._whole: WholeTensors | None = None
        if self._columns.parts > 1 and inner.spec.acts_on == "tensors":
            from exogym.core.compute.whole import WholeTensors

            self._whole = WholeTensors(worker.fleet, inner.spec)
        named = dict(zip(worker.names, worker.parameters, strict=True))
        self._named = named if self._whole is None else self._whole.named
        self._hidden = worker.fleet.hidden
        self._slots = [(block.layout, slot) for block in worker.fleet.blocks for slot in block.layout]
        self.optimizers: dict[int, Optimizer] = {}
        self.corrections: list[Corrects] = []
        # Optimizers of rows that were reset, for reuse: building one takes as long as several steps.
        self._spare: list[Optimizer] = []
        # Build one now, so that wrong arguments of an optimizer fail before training.
        self._fresh = _entries(self._build()) if self._named else None
        worker.draws_torch |= self.spec.try_out(dict(zip(worker.names, self.parameters, strict=True)), self._hidden)

    def enter(self, row: int) -> None:
        """Make the next `step` use the optimizer of `row`. The module must point at that row."""
        if not self._named:  # the node's other processes step all whole tensors
            return
        if row not in self.optimizers:
            self.optimizers[row] = self._build()
        self.optimizer = self.optimizers[row]
        self._take_step = bare_step(self.optimizer)

    def _build(self) -> Optimizer:
        """Return an optimizer without state. The module must point at the optimizer's row."""
        if not self._spare or self._fresh is None:
            return self.spec.build(self._named, hidden=self._hidden) if self._whole is None else self._whole.build()
        optimizer = self._spare.pop()
        optimizer.state.clear()
        for group, fresh in zip(optimizer.param_groups, self._fresh, strict=True):
            params = group["params"]
            group.clear()
            group.update({"params": params} | fresh)
        return optimizer

    def step(self, row: int, at: int, clip: bool = True, skip: bool = False) -> None:
        """Take the row's optimizer step (unless `skip`) with the gradients in `.grad`, and then set `.grad` to None.

        `at` is the step number for the learning rate's schedule. With `clip`, gradients are clipped to `max_norm`.
        """
        if not self.schedule.is_constant and self._named:
            set_rates(self.optimizer, self.schedule, at)
        if not skip:
            if self.corrections:
                correct_gradients(self.corrections, row, self.parameters)
            if clip and self.max_norm is not None:
                clip_rows([p.grad for p in self.parameters if p.grad is not None], self.max_norm, False, self._columns)
            if self._whole is None:
                self._take_step()
            else:
                self._whole.step(row, self.parameters, self._take_step if self._named else None)
        for p in self.parameters:
            p.grad = None

    def reset(self, row: int) -> None:
        """Delete the row's optimizer and its state. The row's next `enter` makes an optimizer without state."""
        old = self.optimizers.pop(row, None)
        if old is None or self._fresh is None or len(old.param_groups) != len(self._fresh):
            return
        if bare_step(old) != old.step:  # it has no hooks and no changed step
            self._spare.append(old)

    def row(self, row: int) -> Tensors:
        """Return the state of the row's optimizer as `optimizer_state` does; {} before the first `enter`."""
        if row not in self.optimizers:
            return {}
        forget_rates(self.optimizers[row])
        found, whole = optimizer_state(self.optimizers[row]), self._whole
        return found if whole is None else whole.renamed(found, whole.own, whole.order)

    def load_row(self, row: int, tensors: Tensors) -> None:
        """Replace the state of the row's optimizer with `tensors`, a result of the method `row`."""
        self.reset(row)
        if self._whole is not None:
            tensors = self._whole.renamed(tensors, self._whole.order, self._whole.own)
        if tensors and self._named:
            self.enter(row)
            load_optimizer_state(self.optimizer, tensors)

    def cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        if self._whole is not None:
            return self._whole.cut(name, shape)
        optimizer = next(iter(self.optimizers.values())) if self.optimizers else self._build()
        return optimizer_cut(optimizer, self.parameters, self._slots, name, shape)


def _entries(optimizer: Optimizer) -> list[dict[str, Any]] | None:
    """Return the entries of each parameter group, without the parameters.

    Return None if the optimizer may hold state outside its groups and `state`, or if an entry is not a plain value.
    """
    groups = [{name: x for name, x in group.items() if name != "params"} for group in optimizer.param_groups]
    plain = all(_is_plain(x) for group in groups for x in group.values())
    return groups if plain and is_torchs(type(optimizer)) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(x) for x in value)
    return value is None or isinstance(value, bool | int | float | str)


class Steps(Stateful):
    """The number of local steps of each row, (rows,). This number decides the row's next batch and learning rate."""

    def __init__(self, steps: np.ndarray):
        self.steps = steps

    def row(self, row: int) -> Tensors:
        return {"taken": torch.tensor(self.steps[row])}

    def load_row(self, row: int, tensors: Tensors) -> None:
        self.steps[row] = int(tensors["taken"])
