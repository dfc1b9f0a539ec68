"""Nodes' updates since their last synchronization, and how attacks change these updates before sending.

A node's update u is its gradient if nodes average gradients, and otherwise its parameters minus their values after its
last synchronization. Rows are changed before the strategy's modules see them, so strategies need no code for attacks.

Bad nodes (`Faults(bad_nodes=..., attack=...)`), with the factor c of the attack:

    sign_flip   u <- -c u
    scale       u <- c u
    noise       u <- c |u| z / |z|, z Gaussian, drawn from (seed of the faults, node, step)

Bad nodes train like other nodes; only their messages are wrong. A bad node does continue from wrong values where its
row is not replaced after sending, such as the coordinates that SPARTA does not average, or the share of its row that a
gossiping node keeps.

State: each node's parameters after its last synchronization, (rows, P), if the strategy has communication modules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from exogym.core.base.devices import widest
from exogym.core.base.rng import generator
from exogym.core.fleet import Fleet
from exogym.core.fleet.fleet import rows_of
from exogym.faults import Faults
from exogym.strategy.modules import Module
from exogym.strategy.strategy import Run
from exogym.strategy.traffic import Traffic


class Updates(Module):
    """Applies the attacks of bad nodes to their updates before a strategy's modules see them.

    A subclass may change more nodes' updates (`changing`, `change`).

    Args:
        faults: the faults whose bad nodes send wrong updates, or None without bad nodes.
        on_parameters: whether nodes send parameters, not only gradients.
    """

    weighted_means = True

    def __init__(self, faults: Faults | None, on_parameters: bool):
        super().__init__()
        self.faults, self.on_parameters = faults, on_parameters

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return []

    def couples_every(self, N: int) -> float:
        return math.inf

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.bad = set() if self.faults is None else set(self.faults.bad(run.num_nodes))
        if self.on_parameters:
            self.row_state = {f"met.{b}": block.params.clone() for b, block in enumerate(fleet.blocks)}

    def rejoin(self, fleet: Fleet, nodes: Sequence[int], step: int) -> None:
        self._note(fleet, nodes)

    def before_gradients(self, fleet: Fleet, step: int) -> None:
        """Change the present nodes' gradients, in place."""
        grads = [block.grads for block in fleet.blocks if block.grads is not None]
        self.change(fleet, step, {row: [g[row] for g in grads] for row in rows_of(fleet, self.changing(fleet))})

    def before_parameters(self, fleet: Fleet, step: int) -> None:
        """Change the present nodes' updates by changing their parameters."""
        met = list(self.row_state.values())
        both = list(zip(fleet.blocks, met, strict=True))
        moved = {
            row: [block.params[row] - old[row] for block, old in both] for row in rows_of(fleet, self.changing(fleet))
        }
        for row in self.change(fleet, step, moved):
            for (block, old), u in zip(both, moved[row], strict=True):
                torch.add(old[row], u, out=block.params[row])

    def after_meeting(self, fleet: Fleet) -> None:
        """Record the present nodes' parameters after a synchronization."""
        self._note(fleet, fleet.comm.present)

    def _note(self, fleet: Fleet, nodes: Sequence[int]) -> None:
        rows = rows_of(fleet, nodes)
        for old, block in zip(self.row_state.values(), fleet.blocks, strict=True) if self.row_state else ():
            old[rows] = block.params[rows]

    def changing(self, fleet: Fleet) -> list[int]:
        """Return the present nodes whose updates may change."""
        return [i for i in fleet.comm.present if i in self.bad]

    def change(self, fleet: Fleet, step: int, updates: dict[int, list[Tensor]]) -> list[int]:
        """Change `updates`, (P,) per block of each row, in place, and return the rows with changed updates."""
        changed = {row for row in updates if fleet.ranks[row] in self.bad}
        for row in changed:
            self._attack(fleet, updates[row], fleet.ranks[row], step)
        return sorted(changed)

    def _attack(self, fleet: Fleet, u: list[Tensor], node: int, step: int) -> None:
        assert self.faults is not None
        c = self.faults.attack_factor
        if self.faults.attack == "noise":
            g = generator(self.faults.seed, "attack", node, step)
            layouts = [block.layout for block in fleet.blocks]
            z = [torch.randn(x.total, generator=g)[x.columns] for x in layouts]
            c *= norm_of(u, fleet) / norm_of(z, fleet)
            for x, noise in zip(u, z, strict=True):
                x.copy_(noise.mul_(c))
            return
        for x in u:
            x.mul_(-c if self.faults.attack == "sign_flip" else c)


def norm_of(u: list[Tensor], fleet: Fleet) -> float:
    """Return the 2-norm of a node's update over all blocks, which does not depend on the row's placement.

    All processes of a node call this for the same updates and get the same norm.
    """
    here = sum(float(widest(x).square().sum()) for x in u)
    return math.sqrt(float(fleet.comm.wire.columns.sum(torch.tensor(here, dtype=torch.float64))))
