"""Personal parameters: parameters and buffers that stay with each client, which sends only the others.

With `personal`, clients average and receive only the shared parameters theta. The personal parameters u_i change only
in client i's local steps:

    (theta_i, u_i) <- local steps from (theta, u_i);   theta <- sum_i n_i theta_i / sum_i n_i;   u_i stays

theta_i are client i's values of theta, and n_i is client i's number of examples. A client sends P_s b bytes in a round,
for P_s shared parameters of b bytes. Estimates before a run (`plan`, `advise`) count all P parameters, because P_s
depends on the model.

A client that does not take part in a round keeps its u_i. A node that was down returns with the u_i of its last
synchronization, and all P parameters count as received bytes.

Evaluation uses the mean of all u_i or, if there is a server (`client_fraction`, FedOpt), the initial u_i, because the
server knows no others. Evaluate each client's own model instead.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from exogym.core.fleet import Fleet
from exogym.core.fleet.cuts import Cut, cut_of
from exogym.core.fleet.fleet import rows_of
from exogym.core.fleet.state import Tensors
from exogym.errors import ArgumentError, check_count
from exogym.strategy.fragments import fragment_of

NO_PRIVACY = {
    "privacy": "clipping would count the movement of parameters that are never sent: use fedavg, fedopt or fedprox "
    "without personal parameters"
}
Names = Callable[[Fleet], Sequence[str]]  # the names of a fleet's personal parameters and buffers
Chosen = str | int | Sequence[str] | Names


def check_personal(given: Any) -> None:
    """Raise ArgumentError unless `given` is None, a pattern, a list of patterns, a count of layers, or a function."""
    if isinstance(given, int) and not isinstance(given, bool):
        check_count("personal", given)
        return
    patterns = [given] if isinstance(given, str) else given
    listed = isinstance(patterns, list | tuple) and patterns and all(isinstance(p, str) and p for p in patterns)
    if not (given is None or callable(given) or listed):
        raise ArgumentError(
            f"personal={given!r} must be a pattern of names such as 'head.*', a list of patterns, or the number of the "
            "model's last layers"
        )


def last_layers(names: Sequence[str], count: int) -> list[str]:
    """Return the names of the parameters of the last `count` modules that have parameters.

    >>> last_layers(["body.0.weight", "body.2.weight", "body.2.bias"], 1)
    ['body.2.weight', 'body.2.bias']
    """
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    return [name for name in names if name.rpartition(".")[0] in modules[-count:]]


class Personal:
    """The parameters and buffers that stay with each client, with every client's values.

    Args:
        given: a pattern of names (`fnmatch`) or several, the number of last layers, or a function of the fleet.

    Attributes:
        shared: the parameters that clients average, as pieces of the blocks.
        buffers: names of the buffers that stay with the clients.
        share: the share of the parameters that clients average, P_s / P.

    Raises:
        ArgumentError: a pattern matches nothing, or no parameter is left to average.
    """

    def __init__(self, fleet: Fleet, given: Chosen):
        names = fleet.names
        chosen = self._chosen(fleet, given, names)
        self.shared = fragment_of(fleet.blocks, {name for name in names if name not in chosen})
        if chosen.issuperset(names):
            raise ArgumentError(f"personal={given!r} leaves no parameter to average: choose fewer parameters")
        self.pieces = fragment_of(fleet.blocks, chosen & set(names))
        self.buffers = [name for name in fleet.buffers if name in chosen]
        sizes = {slot.name: slot.numel for block in fleet.blocks for slot in block.layout.whole or block.layout}
        self.share = sum(size for name, size in sizes.items() if name not in chosen) / sum(sizes.values())
        self.own = [piece.take(piece.block.params).clone() for piece in self.pieces]
        self.own_buffers = {name: fleet.buffers[name].clone() for name in self.buffers}
        self.first = [own[:1].clone() for own in self.own]
        self.is_personal = [slot.name in chosen for block in fleet.blocks for slot in block.layout]

    def _chosen(self, fleet: Fleet, given: Chosen, names: Sequence[str]) -> set[str]:
        if callable(given):
            return set(given(fleet))
        if isinstance(given, int):
            return set(last_layers(names, given))
        chosen, known = set(), [*names, *fleet.buffers]
        for pattern in [given] if isinstance(given, str) else given:
            found = fnmatch.filter(known, pattern)
            if not found:
                shown = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
                raise ArgumentError(f"personal={pattern!r} matches no parameter and no buffer: the model has {shown}")
            chosen.update(found)
        return chosen

    def row_state(self) -> Tensors:
        """Return the clients' values, (rows, ...) each, by their names in checkpoints."""
        return {f"own.{k}": own for k, own in enumerate(self.own)} | {
            f"own_buffer.{name}": rows for name, rows in self.own_buffers.items()
        }

    def cut(self, name: str) -> Cut:
        """Return the `Cut` of the state tensor `name` ("own.<k>"), if a node has several processes."""
        piece = self.pieces[int(name.removeprefix("own."))]
        return cut_of(piece.block.layout, piece.slots)

    def keep(self, fleet: Fleet, nodes: Sequence[int]) -> None:
        """Record the values of `nodes` at the end of a round in which they took part."""
        rows = rows_of(fleet, nodes)
        for piece, own in zip(self.pieces, self.own, strict=True):
            own[rows] = piece.take(piece.block.params)[rows]
        for name, own in self.own_buffers.items():
            own[rows] = fleet.buffers[name][rows]

    def give(self, fleet: Fleet, nodes: Sequence[int]) -> None:
        """Restore the values of `nodes` after other code has overwritten their rows."""
        rows = rows_of(fleet, nodes)
        for piece, own in zip(self.pieces, self.own, strict=True):
            values = piece.take(piece.block.params).clone()
            values[rows] = own[rows]
            piece.put(piece.block.params, values)
        for name, own in self.own_buffers.items():
            fleet.buffers[name][rows] = own[rows]

    def forget(self, fleet: Fleet, theta: Sequence[Tensor]) -> None:
        """Set the personal columns of the server's `theta`, (1, P) per block, to their initial values."""
        for piece, first in zip(self.pieces, self.first, strict=True):
            piece.put(theta[fleet.blocks.index(piece.block)], first)
