"""Transfers from a node that was present all the time to nodes that return, with their traffic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from exogym.core.communicator import blank, described, tell
from exogym.core.fleet.fleet import Fleet, rows_of


def take_rows(fleet: Fleet, x: Tensor, source: int, nodes: Sequence[int], given: Tensor | None = None) -> None:
    """Send node `source`'s row of `x` (rows, ...), or the row `given` (1, ...), to `nodes`, which overwrite their rows.

    The transfer is recorded as a broadcast among these nodes, with the row's bytes as payload.
    """
    sent = x if given is None else given.expand_as(x)
    taken = fleet.comm.broadcast(sent, source, members=sorted({source, *nodes}))
    rows = rows_of(fleet, nodes)
    x[rows] = taken[rows]


def give_shared(fleet: Fleet, tensors: Iterable[Tensor], nodes: Sequence[int]) -> None:
    """Record the broadcasts, from a node that was always present, of shared `tensors` to returning `nodes`."""
    stayed = [rank for rank in fleet.comm.present if rank not in nodes]
    for x in tensors if stayed else ():
        fleet.comm.broadcast(x.expand(len(fleet), *x.shape), stayed[0], members=sorted({stayed[0], *nodes}))


def take_state(
    fleet: Fleet, state: dict[str, Tensor] | None, source: int, nodes: Sequence[int], device: torch.device
) -> dict[str, Tensor]:
    """Send node `source`'s named tensors to `nodes`, and return them (on `device`) in their processes.

    Return {} in other processes. Only the process with the row of `source` needs to pass `state`. The traffic is
    recorded as broadcasts among these nodes, with the tensors' bytes as payload. Names and shapes are not counted.
    """
    wire, members = fleet.comm.wire, sorted({source, *nodes})
    here = state if source in fleet.ranks and state is not None else {}
    what = tell(wire, described(here), next(k for k, ids in enumerate(wire.placement) if source in ids))
    rows, taken = rows_of(fleet, nodes), {}
    for name, x in ({name: x.to(device) for name, x in here.items()} or blank(what, device)).items():
        sent = fleet.comm.broadcast(x.expand(len(fleet), *x.shape), source, members=members)
        if rows:
            taken[name] = sent[rows[0]].clone()
    return taken
