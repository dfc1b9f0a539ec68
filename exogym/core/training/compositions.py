"""Strategies made of modules: the nodes take local steps, then the modules mix the rows of the whole fleet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from exogym.core.compute.spans import Losses
from exogym.core.fleet.fleet import rows_of
from exogym.core.fleet.returning import take_state
from exogym.core.training.driver import Algorithm, Setting, meet
from exogym.strategy.capabilities import Corrects
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy

COMPUTING = ("optimizer", "scale")  # beside parameters, what makes the computing of two nodes equal


class Compositions(Algorithm):
    """The adapter through which the driver trains with a `CommunicateOptimizeStrategy`."""

    leaves_out = True

    def __init__(self, strategy: CommunicateOptimizeStrategy, setting: Setting):
        super().__init__(strategy, setting)
        self.strategy, self.worker, self.watch = strategy, setting.worker, setting.watch
        self.needs_gradients = strategy.needs_gradients
        corrections = [module for module in strategy.communication_modules if isinstance(module, Corrects)]
        self.compute = setting.compute(strategy.inner, strategy.bucket_bytes, corrections)
        self.composition = strategy.on(self.fleet, setting.run)

    def next_event(self, step: int) -> int:
        return self.composition.next_event(step)

    def work(self, first: int, last: int) -> np.ndarray | None:
        return self.composition.clients.local_steps(first, last)

    def server_round(self, step: int) -> tuple[list[int], float] | None:
        return self.composition.clients.server_round(step)

    def seated(self, step: int) -> tuple[Sequence[int], Sequence[int]]:
        return self.composition.clients.seated(step)

    def on_gradients(self, step: int, rows: Sequence[int], skip: bool) -> Sequence[int]:
        if not skip:
            self.composition.transform_gradients(step, self.lr(step - 1))
        return rows

    def act(self, step: int, losses: Losses, before_mixing: Callable[[], None]) -> bool:
        if self.composition.seeing:
            self.composition.see_losses(losses.first, losses.means())
        if self.composition.is_event(step):
            before_mixing()
        if self.composition.communicate(step):
            for row in range(len(self.fleet)):
                self.compute.reset(row)
        meets = self.next_event(step - 1) == step
        if meets:
            self.watch.shared(self.consensus(), "the outer parameters", step)
        return meets

    def rejoin(self, nodes: Sequence[int], source: int, step: int, forget: bool, as_fleet: bool) -> None:
        fleet, there = self.fleet, self.fleet.comm.present
        meet(fleet, [i for i in there if i not in nodes] or [source])  # nobody receives their own old parameters
        outer = self.consensus()
        meet(fleet, there)
        if not self.composition.bring_back(nodes, source, step + 1, forget, outer):
            return
        state = fleet.state.row(fleet.ranks.index(source), COMPUTING) if source in fleet.ranks else None
        taken = take_state(fleet, state, source, nodes, self.worker.device)
        for row in rows_of(fleet, nodes):
            fleet.state.load_row(row, {name: x.clone() for name, x in taken.items()}, COMPUTING)
            if as_fleet:
                self.compute.taken[row] = step

    def finish(self, step: int) -> None:
        self.composition.finish(step)

    def consensus_buffers(self) -> dict[str, Tensor] | None:
        return self.composition.consensus_buffers()

    def consensus(self) -> list[Tensor] | None:
        return self.composition.consensus()
