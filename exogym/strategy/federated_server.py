"""The server of sampled clients. Between rounds it holds theta, and the buffers that clients last sent."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.core.fleet.fleet import rows_of
from exogym.core.fleet.state import Tensors
from exogym.strategy.personal import Personal
from exogym.strategy.privacy import DifferentialPrivacy


class Server:
    """A server that holds the shared parameters theta, (1, P) per block, and buffers, (1, ...) each.

    Args:
        fraction: the expected share of clients among the nodes; only `privacy` uses it.
        personal: the parameters and buffers that stay with the clients, or None.
    """

    def __init__(
        self, fleet: Fleet, privacy: DifferentialPrivacy | None, fraction: float, seed: int,
        personal: Personal | None = None,
    ):  # fmt: skip
        self.personal = personal
        self.theta = [block.params[:1].clone() for block in fleet.blocks]
        self.buffers = {name: rows[:1].clone() for name, rows in fleet.buffers.items()}
        self.privacy, self.wanted, self.seed = privacy, fraction * fleet.num_nodes, seed

    def state(self) -> Tensors:
        """Return theta and the buffers as a dict from the names in checkpoints to tensors."""
        named = {f"theta.{b}": theta for b, theta in enumerate(self.theta)}
        return named | {f"buffer.{name}": rows for name, rows in self.buffers.items()}

    def serve(self, fleet: Fleet, round_: int, came: list[int], clients: list[int], following: list[int]) -> None:
        """End round `round_`: update theta from the reporting clients' mean, and give theta to the next clients.

        With `privacy` the server adds noise to the new theta.

        Args:
            came: the clients that reported; may be empty.
            clients: all clients of the round that ends.
            following: the clients of the next round.
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
        if self.personal is not None:
            self.personal.forget(fleet, self.theta)
        own = () if self.personal is None else self.personal.buffers
        for name, rows in fleet.buffers.items() if holder else ():
            if name in own:
                continue
            theirs = rows[lost]
            self.buffers[name].copy_(fleet.comm.wire.rows(rows, holder))
            rows.copy_(self.buffers[name].expand_as(rows))
            rows[lost] = theirs


def _give(params: Tensor, rows: Sequence[int], theta: Tensor) -> None:
    for row in rows:
        params[row] = theta[0]
