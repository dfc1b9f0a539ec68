"""The server of sampled clients: theta between rounds, and the buffers that clients last sent."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.core.fleet.presence import rows_of
from exogym.core.fleet.state import Tensors
from exogym.strategy.privacy import DifferentialPrivacy


class Server:
    """Theta, (1, P) per block, and buffers, (1, ...) each.

    Args:
        fraction: C, for `privacy`.
    """

    def __init__(self, fleet: Fleet, privacy: DifferentialPrivacy | None, fraction: float, seed: int):
        self.theta = [block.params[:1].clone() for block in fleet.blocks]
        self.buffers = {name: rows[:1].clone() for name, rows in fleet.buffers.items()}
        self.privacy, self.wanted, self.seed = privacy, fraction * fleet.num_nodes, seed

    def state(self) -> Tensors:
        """Return its state, by the names in checkpoints."""
        named = {f"theta.{b}": theta for b, theta in enumerate(self.theta)}
        return named | {f"buffer.{name}": rows for name, rows in self.buffers.items()}

    def serve(self, fleet: Fleet, round_: int, came: list[int], clients: list[int], following: list[int]) -> None:
        """Take theta from the clients that reported, which hold the new mean. Copy it to the next round's clients.

        Args:
            came: clients that reported; perhaps none.
            clients, following: the clients of the round that ends, and of the next round.
        """
        present, holder = fleet.comm.present, came[:1]
        for b, (block, theta) in enumerate(zip(fleet.blocks, self.theta, strict=True)):
            mean = fleet.comm.wire.rows(block.params, holder) if holder else theta
            if self.privacy is None:
                theta.copy_(mean)
            else:
                theta.add_(mean - theta, alpha=len(came) / self.wanted)
                theta.add_(self.privacy.noise(theta, self.wanted, self.seed, b, round_))
                _give(block.params, rows_of(fleet, came), theta)  # the server's message to its clients
            _give(block.params, rows_of(fleet, [i for i in following if i in present]), theta)
        # resting nodes do not use their own buffers before they receive these
        lost = rows_of(fleet, [i for i in {*following, *clients} if i not in present])
        for name, rows in fleet.buffers.items() if holder else ():
            theirs = rows[lost]
            self.buffers[name].copy_(fleet.comm.wire.rows(rows, holder))
            rows.copy_(self.buffers[name].expand_as(rows))
            rows[lost] = theirs


def _give(params: Tensor, rows: Sequence[int], theta: Tensor) -> None:
    for row in rows:
        params[row] = theta[0]
