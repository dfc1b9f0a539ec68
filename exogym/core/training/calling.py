"""Callbacks in a run: the interface that callbacks use, and how the worker processes answer a callback's requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exogym.core.base import pulse
from exogym.core.communicator import tell
from exogym.core.fleet.state import Shared
from exogym.core.record.history import History
from exogym.core.training.driver import Model
from exogym.core.training.standing import Agenda, RunStanding, divides
from exogym.errors import ArgumentError, ModelError

if TYPE_CHECKING:
    from exogym.callbacks import Callback
    from exogym.core.training.timing import Timing


class Calling:
    """The object through which callbacks use the run (`exogym.callbacks.Running`). It also calls callbacks.

    Callbacks run in the main process. Because their requests may need rows from all processes, the worker processes
    wait in `_serve` and repeat each call of the main process. `driver`, `worker` and `timing` are internal.
    """

    def __init__(self, agenda: Agenda, standing: RunStanding, timing: Timing | None = None):
        self.standing, self.driver, self.fleet = standing, standing.driver, standing.fleet
        self.worker, self.timing = self.driver.worker, timing
        self._agenda, self._wire = agenda, self.fleet.comm.wire
        self._is_calling = False
        for k, callback in enumerate(agenda.callbacks):
            part = Shared(callback.state, callback.load_state)
            self.fleet.state.register(f"callback {k} {type(callback).__name__}", part)

    @property
    def step(self) -> int:
        return self.standing.step

    @property
    def evaluated_at(self) -> int:
        return self.standing.evaluated_at

    @property
    def epoch(self) -> int:
        return self.standing.epoch

    @property
    def history(self) -> History:
        return self.standing.history

    def evaluate(self, node: int | None = None, *, own_data: bool = False) -> dict[str, float]:
        """Evaluate the averaged (or outer) model, or the model of `node`. Return {} without a validation set.

        With `own_data`, evaluate the model of `node` on the node's own validation set. Raise ArgumentError if the node
        does not exist, or it has no model because it does not train in this round; or nodes have no own validation
        sets.
        """
        evaluator = self.driver.evaluator
        if own_data and (evaluator is None or evaluator.stream.num_nodes < self.fleet.num_nodes):
            raise ArgumentError(
                "there are no validation sets per node: pass a function as val_dataset to the trainer, which "
                "returns the validation set of (node, num_nodes, is_train)"
            )
        if evaluator is None:
            return {}
        on = node if own_data else None
        known = self.clients if on is not None and self.driver.shares_model else self.driver.algorithm.nodes
        if node is not None and node not in known:
            raise ArgumentError(
                f"evaluate({node!r}): pass a node from 0 to {self.fleet.num_nodes - 1} or, with client sampling, one "
                "of fleet.comm.present"
            )
        self._ask("evaluate", node=node, own_data=own_data)
        return self.driver.evaluate(node, on)

    @property
    def clients(self) -> Sequence[int]:
        """The nodes whose models can be evaluated now: all, if they share the server's model."""
        return range(self.fleet.num_nodes) if self.driver.shares_model else list(self.fleet.comm.present)

    def measure(self, vectors: list[Tensor] | None, buffers: dict[str, Tensor]) -> dict[str, float]:
        """Evaluate given parameters, (P,) per block, and buffers. Return {} without a validation set.

        The first node's processes evaluate; only process 0 needs `vectors`.
        """
        evaluator, devices = self.driver.evaluator, self._wire.devices
        if evaluator is None or self._wire.process:
            return {}
        if devices.parts > 1:
            self._ask("measure", vectors=None, buffers={})
        else:
            assert vectors is not None
            return evaluator(vectors, buffers)
        here = []
        for b, block in enumerate(self.fleet.blocks):
            layout = block.layout
            whole = block.params.new_zeros(layout.total) if vectors is None else vectors[b].clone()
            here.append(devices.sum(whole)[layout.columns.to(whole.device)])
        told = {name: buffers.get(name, torch.zeros_like(x[0])) for name, x in self.fleet.buffers.items()}
        return evaluator(here, {name: devices.sum(x) for name, x in told.items()})

    def average(self) -> Model:
        """Return the averaged (or outer) model: (P,) per block, and buffers by name. Traffic does not include it."""
        self._ask("average")
        vectors, buffers = self.driver.model()
        return self.fleet.whole(vectors), buffers  # one that is split over a node's processes is joined

    def rows(self) -> list[Tensor]:
        """Return all nodes' parameters, (N, P) per block. The traffic does not include the bytes sent for this.

        With client sampling, return only the rows of the clients that train now (`fleet.comm.present`).
        """
        self._ask("rows")
        nodes = self.driver.algorithm.nodes
        return self.fleet.whole([self._wire.rows(block.params, nodes) for block in self.fleet.blocks])

    def save(self) -> Path | None:
        """Write a checkpoint now, and return its folder. Return None if the run has no `save_dir`."""
        self._ask("save")
        return None if self.standing.kept is None else self.standing.kept.save()

    def beat(self) -> None:
        """Report that a long callback is still running. The time limit `hang_s` starts anew."""
        pulse.beat()

    # Calling

    def call(self, every: bool = True) -> None:
        """Call the callbacks due at this step. With `every=False`, call only those that follow an evaluation."""
        is_evaluated = self.evaluated_at == self.step
        due = [
            callback for callback in self._agenda.callbacks
            if (every and divides(callback.steps, self.step)) or (callback.at_evaluations and is_evaluated)
        ]  # fmt: skip
        if not due:
            return
        if not self._wire.is_main:
            self._serve()
            return
        running: Any = self
        self._is_calling = True
        try:
            for callback in due:
                self.beat()
                before = self._settings()
                if callback(running) is True:
                    if not callback.may_end:
                        raise ArgumentError(
                            f"{type(callback).__name__} returned True, but has may_end=False: set may_end=True, or "
                            "return None"
                        )
                    self.standing.stopped = True
                self._check_kept(callback, before)
        finally:
            self._is_calling = False
        tell(self._wire, ["go on", self.standing.stopped])

    def _ask(self, wish: str, **given: Any) -> None:
        """Tell the other processes, which are in `_serve`, to make the same call as this one."""
        if self._is_calling:
            tell(self._wire, [wish, given])

    def _serve(self) -> None:
        """Make the calls that the main process's callbacks make, until these are done."""
        while True:
            wish, given = tell(self._wire, None)
            if wish == "go on":
                self.standing.stopped = given
                return
            getattr(self, wish)(**given)

    # What callbacks may not change in the model

    def _settings(self) -> dict[tuple[str, str], bool]:
        """Return which parameters train, and which submodules are in training mode."""
        model = self.worker.model
        trained = {(name, "requires_grad"): p.requires_grad for name, p in model.named_parameters()}
        return trained | {(name, "training"): module.training for name, module in model.named_modules()}

    def _check_kept(self, callback: Callback, before: dict[tuple[str, str], bool]) -> None:
        """Raise ModelError if the callback changed a setting: rows, buffers and random draws follow those at first."""
        if self.standing.stopped or self.step == self._agenda.total_steps:
            return
        now = self._settings()
        changed = [of for of, was in before.items() if now.get(of, was) != was]
        if changed:
            name, what = changed[0]
            raise ModelError(
                f"after step {self.step} {type(callback).__name__} set {what}={now[changed[0]]} for "
                f"{name or 'the model itself'!r}, but fit trains the same parameters, in the same modes, from "
                "beginning to end. Put the setting back at the callback's end. Or train in two fits: the first with "
                f"max_steps={self.step}, or ended by a callback that returns True. Then change the setting, and fit "
                "again"
            )
