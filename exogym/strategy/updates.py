"""What a node brings to the others: its update since it last met them, and what becomes of it on the way.

The update u_i of node i is its gradient where gradients are averaged, and theta_i less what it held after it last met
others elsewhere. So this needs no word of the strategy: the rows are changed before its modules see them.

Bad peers (`Faults(bad_nodes=..., attack=...)`), with the factor c of the attack:

    sign_flip   u <- -c u
    scale       u <- c u
    noise       u <- c |u| z / |z|, z Gaussian, drawn from (seed of the faults, node, step)

They train as the others do; only what they bring is wrong. Where rows stay what they were brought as (SPARTA's other
coordinates, a gossiping node's own part), a bad node goes on from the wrong one.

Norm capping (Sun, Kairouz, Suresh, McMahan, Can You Really Backdoor Federated Learning?, arXiv:1911.07963), M the cap:

    u <- u min(1, M / |u|)

With M the median of the norms (of two in the middle the lower; who brings nothing does not count), nodes tell each
other theirs: an all-gather of 8 bytes. A fixed M costs nothing.

State: what each node held after it last met others, (rows, P), where there are communication modules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from exogym.core.base.rng import generator
from exogym.core.fleet import Fleet
from exogym.core.fleet.presence import rows_of
from exogym.faults import Faults
from exogym.strategy.averaging import NormCap
from exogym.strategy.modules import Module
from exogym.strategy.strategy import Run
from exogym.strategy.traffic import Traffic


class Updates(Module):
    """Changes updates before the modules of a strategy see them.

    Args:
        cap: of the norms; None: none.
        faults: whose bad nodes bring wrong ones; None: none.
        on_parameters: whether nodes bring parameters, not gradients alone.
    """

    weighted_means = True

    def __init__(self, cap: NormCap | None, faults: Faults | None, on_parameters: bool):
        super().__init__()
        self.cap, self.faults, self.on_parameters = cap, faults, on_parameters

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return []  # `NormCap`'s goes with the meetings of the others; `Averaging.traffic` knows it

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
        """Change the gradients of those who are there."""
        grads = [block.grads for block in fleet.blocks if block.grads is not None]
        self._change(fleet, step, {row: [g[row] for g in grads] for row in self._rows(fleet)})

    def before_parameters(self, fleet: Fleet, step: int) -> None:
        """Change the parameters of those who are there by changing what they have moved since they last met."""
        met = list(self.row_state.values())
        both = list(zip(fleet.blocks, met, strict=True))
        moved = {row: [block.params[row] - old[row] for block, old in both] for row in self._rows(fleet)}
        for row in self._change(fleet, step, moved):
            for (block, old), u in zip(both, moved[row], strict=True):
                torch.add(old[row], u, out=block.params[row])

    def after_meeting(self, fleet: Fleet) -> None:
        """Note what those who were there hold now."""
        self._note(fleet, fleet.comm.present)

    def _note(self, fleet: Fleet, nodes: Sequence[int]) -> None:
        rows = rows_of(fleet, nodes)
        for old, block in zip(self.row_state.values(), fleet.blocks, strict=True) if self.row_state else ():
            old[rows] = block.params[rows]

    def _rows(self, fleet: Fleet) -> list[int]:
        """Return the rows here of those who are there and whose updates are looked at."""
        return rows_of(fleet, [i for i in fleet.comm.present if self.cap is not None or i in self.bad])

    def _change(self, fleet: Fleet, step: int, updates: dict[int, list[Tensor]]) -> list[int]:
        """Change `updates`, (P,) per block of each row, in place; return the rows whose updates are others now."""
        changed = {row for row in updates if fleet.ranks[row] in self.bad}
        for row in changed:
            self._attack(fleet, updates[row], fleet.ranks[row], step)
        if self.cap is not None:
            changed |= self._cap(fleet, updates, self.cap)
        return sorted(changed)

    def _attack(self, fleet: Fleet, u: list[Tensor], node: int, step: int) -> None:
        assert self.faults is not None
        c = self.faults.attack_factor
        if self.faults.attack == "noise":
            g = generator(self.faults.seed, "attack", node, step)
            layouts = [block.layout for block in fleet.blocks]
            z = [torch.randn(x.total, generator=g)[x.columns] for x in layouts]
            c *= _norm(u, fleet) / _norm(z, fleet)
            for x, noise in zip(u, z, strict=True):
                x.copy_(noise.mul_(c))
            return
        for x in u:
            x.mul_(-c if self.faults.attack == "sign_flip" else c)

    def _cap(self, fleet: Fleet, updates: dict[int, list[Tensor]], cap: NormCap) -> set[int]:
        norms = {row: _norm(u, fleet) for row, u in updates.items()}
        most = cap.norm
        if most is None:
            mine = torch.tensor([norms.get(row, 0.0) for row in range(len(fleet))], dtype=torch.float64)
            told = fleet.comm.wire.rows(mine, fleet.comm.present).tolist()  # who brings something is known
            movers = [node for node, norm in zip(fleet.comm.present, told, strict=True) if norm]
            if not movers:
                return set()
            most = float(fleet.comm.all_gather(mine, members=movers)[0].median())
        over = {row: norm for row, norm in norms.items() if norm > most}
        for row, norm in over.items():
            for x in updates[row]:
                x.mul_(most / norm)
        return set(over)


def _norm(u: list[Tensor], fleet: Fleet) -> float:
    """Return the 2-norm of a node's update over all blocks, which does not depend on where its row lies.

    Where nodes are several processes, all of a node's ask for those of the same updates, and get the same.
    """
    here = sum(float(x.double().square().sum()) for x in u)
    return math.sqrt(float(fleet.comm.wire.inside.sum(torch.tensor(here, dtype=torch.float64))))
