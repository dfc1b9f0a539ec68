"""Find the rows of present nodes, and let returning nodes copy the state of a node that was present before.

`fleet.comm.present` has the ranks of the nodes that take part in the current communication. Without faults these are
all nodes.
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
    """Return the numbers of this process's rows that belong to `nodes`."""
    wanted = set(nodes)
    return [row for row, rank in enumerate(fleet.ranks) if rank in wanted]


def where_present(fleet: Fleet, new: Tensor, old: Tensor) -> Tensor:
    """Return (rows, ...): the rows of `new` for present nodes, and the rows of `old` for absent nodes."""
    if all_present(fleet):
        return new
    is_present = torch.tensor([rank in fleet.comm.present for rank in fleet.ranks], device=new.device)
    return torch.where(is_present.view(-1, *[1] * (new.dim() - 1)), new, old)


def shared_row(fleet: Fleet, result: Tensor) -> Tensor:
    """In every process, return the row (1, ...) of `result` that all present nodes have after a collective."""
    return result[:1] if all_present(fleet) else fleet.comm.wire.rows(result, fleet.comm.present[:1])


def take_rows(fleet: Fleet, x: Tensor, source: int, nodes: Sequence[int], given: Tensor | None = None) -> None:
    """Let the node `source` send its row of `x` (rows, ...) to `nodes`, which overwrite their own rows of `x`.

    The transfer is recorded as a broadcast among these nodes, with the row's bytes as payload.

    Args:
        given: the row (1, ...) to send. Default: the row of `source` in `x`.
    """
    sent = x if given is None else given.expand_as(x)
    taken = fleet.comm.broadcast(sent, source, members=sorted({source, *nodes}))
    rows = rows_of(fleet, nodes)
    x[rows] = taken[rows]


def give_shared(fleet: Fleet, tensors: Iterable[Tensor], nodes: Sequence[int]) -> None:
    """Record the traffic by which returning `nodes` get `tensors` that all nodes share.

    The traffic is recorded as broadcasts from a node that was present all the time.
    """
    stayed = [rank for rank in fleet.comm.present if rank not in nodes]
    for x in tensors if stayed else ():
        fleet.comm.broadcast(x.expand(len(fleet), *x.shape), stayed[0], members=sorted({stayed[0], *nodes}))


def take_state(
    fleet: Fleet, state: dict[str, Tensor] | None, source: int, nodes: Sequence[int], device: torch.device
) -> dict[str, Tensor]:
    """Let the node `source` send its named tensors to `nodes`.

    Return the tensors in each process with one of `nodes`, and {} in other processes. The traffic is recorded as
    broadcasts among these nodes, with the tensors' bytes as payload. Names and shapes are not counted.

    Args:
        state: the tensors of `source`. Only the process with the row of `source` needs to pass these tensors.
        device: the device of the returned tensors.
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
