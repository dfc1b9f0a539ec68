"""Islands: fixed groups of nearby nodes that average more often than all nodes together."""

from __future__ import annotations

import math

from exogym.core.fleet import Fleet
from exogym.errors import check_count, checked
from exogym.strategy.communicate_optimize import PeriodicModule
from exogym.strategy.traffic import Traffic


class IslandCommunicator(PeriodicModule):
    """Average the parameters inside fixed islands of consecutive nodes, unless `above` acts after the same step.

    Args:
        island_size: the number of nodes in an island; the last is smaller if it does not divide the number of nodes.
        H: steps between two averages.
        above: the module that averages over all islands, and synchronizes the last steps at the end of training.
    """

    weighted_means = True

    @checked
    def __init__(self, island_size: int, H: int, above: PeriodicModule):
        super().__init__()
        check_count("island_size", island_size)
        self.take_rounds(H)
        self.island_size, self.above = island_size, above

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        H, every = self.above.interval_steps, self.interval_steps
        share = 1 / every - 1 / math.lcm(H, every)
        members = min(self.island_size, N)
        return [Traffic("all_reduce", P * b, 1 / share, members)] if share and members > 1 else []

    def couples_every(self, N: int) -> float:
        return self.above.interval_steps

    def communicate(self, fleet: Fleet, step: int) -> None:
        if self.above.is_turn(step):
            return
        present = fleet.comm.present
        starts = range(0, fleet.num_nodes, self.island_size)
        islands = [[node for node in present if start <= node < start + self.island_size] for start in starts]
        groups = [island for island in islands if island]
        for block in fleet.blocks:
            fleet.comm.all_reduce(block.params, "mean", groups=groups, out=block.params)
        fleet.synchronise_buffers(groups)

    def finish(self, fleet: Fleet, step: int, since: int) -> None:
        """Do nothing: the module that averages over all islands synchronizes the last steps."""
