"""The rows of present nodes, and how a returning node takes the state of a node that stayed.

`fleet.comm.present` holds the ids that take part in the current communication; without faults, all nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from exogym.core.communicator import blank, described, tell
from exogym.core.fleet import Fleet


def all_present(fleet: Fleet) -> bool:
    """Return whether every node takes part."""
    return len(fleet.comm.present) == fleet.num_nodes


def rows_of(fleet: Fleet, nodes: Sequence[int]) -> list[int]:
    """Return the local rows of `nodes`."""
    wanted = set(nodes)
    return [row for row, rank in enumerate(fleet.ranks) if rank in wanted]


def where_present(fleet: Fleet, new: Tensor, old: Tensor) -> Tensor:
    """Return `new` (rows, ...) in the rows of present nodes and `old` in the others."""
    if all_present(fleet):
        return new
    is_present = torch.tensor([rank in fleet.comm.present for rank in fleet.ranks], device=new.device)
    return torch.where(is_present.view(-1, *[1] * (new.dim() - 1)), new, old)


def shared_row(fleet: Fleet, result: Tensor) -> Tensor:
    """Return the (1, ...) row that the present nodes share after a collective, in every process."""
    return result[:1] if all_present(fleet) else fleet.comm.wire.rows(result, fleet.comm.present[:1])


def take_rows(fleet: Fleet, x: Tensor, source: int, nodes: Sequence[int], given: Tensor | None = None) -> None:
    """Overwrite the rows of `nodes` in `x` (rows, ...) by the row of `source`, or by `given` (1, ...), which it sends.

    Recorded as a broadcast among them: payload the row's bytes.
    """
    sent = x if given is None else given.expand_as(x)
    taken = fleet.comm.broadcast(sent, source, members=sorted({source, *nodes}))
    rows = rows_of(fleet, nodes)
    x[rows] = taken[rows]


def give_shared(fleet: Fleet, tensors: Iterable[Tensor], nodes: Sequence[int]) -> None:
    """Record that returning `nodes` get values that all nodes share: broadcasts by a node that stayed."""
    stayed = [rank for rank in fleet.comm.present if rank not in nodes]
    for x in tensors if stayed else ():
        fleet.comm.broadcast(x.expand(len(fleet), *x.shape), stayed[0], members=sorted({stayed[0], *nodes}))


def take_state(
    fleet: Fleet, state: dict[str, Tensor] | None, source: int, nodes: Sequence[int], device: torch.device
) -> dict[str, Tensor]:
    """Return the named tensors of `source` in every process that holds one of `nodes`, {} elsewhere.

    Recorded as broadcasts among them: payload the tensors' bytes. Names and shapes travel uncounted.

    Args:
        state: the tensors, in the process with the row of `source`; ignored elsewhere.
        device: of the returned tensors.
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
