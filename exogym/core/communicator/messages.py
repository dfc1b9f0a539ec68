"""Messages between processes, built on a wire's methods `rows`, `reduce`, `carry` and `agree`. Nothing is pickled.

Values are sent as JSON, in rows of bytes. For named tensors, the names, dtypes and shapes are sent as JSON before the
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from exogym.core.base.turns import turns_of
from exogym.core.communicator.wire import Parcel, Wire
from exogym.core.progress import notice

Described = list[tuple[str, str, list[int]]]  # name, dtype, shape


def tell(wire: Wire, value: Any, process: int | None = None) -> Any:
    """Return, in every process, the `value` (JSON-able) of the process with the number `process`.

    If `process` is None, return the main process's value.

    If nodes have several processes each and `process` is not None, only processes with the same columns receive it.
    """
    if not wire.is_shared:
        return value
    return _told(wire.world if process is None else wire, value, [process or 0])[0]


def gather(wire: Wire, value: Any) -> list[Any]:
    """Return a list of all processes' values (JSON-able), in the processes' order, in every process."""
    return _told(wire.world, value, range(len(wire.world.placement))) if wire.is_shared else [value]


def _told(wire: Wire, value: Any, processes: Sequence[int]) -> list[Any]:
    """Return the values of `processes`, in every process. Their texts are sent as rows of equal length."""
    firsts, text = [wire.placement[process][0] for process in processes], b""
    if wire.process in processes:
        text = json.dumps(value).encode()
    lengths = wire.rows(torch.tensor([[len(text)]]).expand(len(wire.ranks), -1), firsts).flatten().tolist()
    letters = torch.frombuffer(bytearray(text.ljust(max(lengths))[: max(lengths)]), dtype=torch.uint8)
    rows = wire.rows(letters.expand(len(wire.ranks), -1), firsts)
    return [json.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]


def say(wire: Wire, text: str, about: str | None = None) -> None:
    """Print a line for the user in the main process.

    `about` is the line's subject (see `exogym.core.progress.without_notices`).
    """
    if wire.is_main:
        notice(text, about)


def barrier(wire: Wire) -> None:
    """Wait until all processes have made this call."""
    wire.agree(False)


def hand_over(wire: Wire, given: Mapping[int, Tensor], parcels: Sequence[Parcel]) -> dict[int, Tensor]:
    """Send tensors between nodes. Return the tensors that this process's nodes receive, by node number.

    A returned tensor may share the giver's memory.

    Args:
        given: the tensors that this process's nodes give, by node number.
        parcels: all tensors that are sent between nodes, the same list in every process. A node sends and receives at
            most one tensor.
    """
    own = [p.giver for p in parcels if p.giver == p.taker and p.giver in wire.row_of]
    got = {node: given[node] for node in own}
    crossing = []
    for giver, taker, parcel in [(*pair, p) for p in parcels for pair in p.moves]:
        if giver in wire.row_of and taker in wire.row_of:
            got[taker] = given[giver]
        elif not any(giver in ids and taker in ids for ids in wire.placement):
            crossing.append((giver, taker, parcel))
    return got | (wire.carry(given, crossing) if crossing else {})


def rows_of_givers(wire: Wire, x: Tensor, links: Sequence[tuple[int, int]]) -> dict[int, dict[int, Tensor]]:
    """Return the rows of `x` that this process's nodes receive: taker -> giver -> row.

    A row is sent only from its giver to its taker. `links` are the (giver, taker) pairs of all processes.
    """
    found: dict[int, dict[int, Tensor]] = {taker: {} for _, taker in links if taker in wire.row_of}
    if wire.shares_memory:
        givers = sorted({giver for giver, _ in links})
        rows = wire.rows(x, givers) if givers else x[:0]  # every process makes the same call
        for giver, taker in links:
            if taker in found:
                found[taker][giver] = rows[givers.index(giver)]
        return found
    given = {rank: x[row].contiguous() for row, rank in enumerate(wire.ranks)}
    for pairs in turns_of(links):
        got = hand_over(wire, given, [Parcel(i, j, x.shape[1:], x.dtype, False) for i, j in pairs])
        for giver, taker in pairs:
            if taker in found:
                found[taker][giver] = got[taker].to(x.device)
    return found


def as_bytes(payload: Sequence[Tensor]) -> Tensor:
    """Return the tensors of `payload`, (rows, ...) each, side by side as bytes, (rows, S)."""
    return torch.cat([part.reshape(len(part), -1).contiguous().view(torch.uint8) for part in payload], 1)


def from_bytes(packed: Tensor, payload: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in `packed` (n, S), which have the dtypes and row shapes of `payload`."""
    sizes = [part[0].numel() * part.element_size() for part in payload]
    return [
        piece.clone(memory_format=torch.contiguous_format).view(part.dtype).view(len(packed), *part.shape[1:])
        for piece, part in zip(packed.split(sizes, 1), payload, strict=True)
    ]


def row_of_source(wire: Wire, x: Tensor, source: int, members: Sequence[int]) -> Tensor:
    """Return the row (1, ...) of node `source` in `x`, in the processes that hold one of `members`.

    Other processes get an arbitrary row. The row is sent along a binomial tree, as its bytes are counted.
    """
    if wire.shares_memory or not wire.is_shared or any(i not in wire.owner for i in members):
        return wire.rows(x, [source])
    start = members.index(source)
    nodes: dict[int, int] = {}  # one of each process
    for node in [*members[start:], *members[:start]]:
        nodes.setdefault(wire.owner[node], node)
    firsts = list(nodes.values())
    row = x[wire.row_of[source]].contiguous() if source in wire.row_of else x[0]
    hop = 1 << (len(firsts) - 1).bit_length() >> 1
    while hop:
        steps = [(firsts[k], firsts[k + hop]) for k in range(0, len(firsts) - hop, 2 * hop)]
        given = {giver: row for giver, _ in steps if giver in wire.row_of}
        got = hand_over(wire, given, [Parcel(i, j, tuple(row.shape), row.dtype, False) for i, j in steps])
        for taken in got.values():
            row = taken.to(x.device)
        hop >>= 1
    return row[None]


def described(tensors: Mapping[str, Tensor]) -> Described:
    """Return the names, dtypes and shapes of `tensors` as a JSON list, from which `blank` makes such tensors.

    >>> described({"a": torch.zeros(2, 3)})
    [('a', 'float32', [2, 3])]
    """
    return [(name, str(x.dtype).removeprefix("torch."), list(x.shape)) for name, x in tensors.items()]


def blank(what: Sequence[Sequence[Any]], device: torch.device | None = None) -> dict[str, Tensor]:
    """Return uninitialized tensors with the names, dtypes and shapes that `described` returned.

    >>> blank([["a", "float32", [2, 3]]])["a"].shape
    torch.Size([2, 3])
    """
    return {name: torch.empty(shape, dtype=getattr(torch, dtype), device=device) for name, dtype, shape in what}


def ship(
    wire: Wire, tensors: Mapping[str, Tensor], source: int, takers: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """Send the named tensors of the process that holds node `source`, and return them in the receiving processes.

    The receivers are the processes that hold the nodes `takers`, or all processes if it is None. Every process must
    make this call, but only the source process's `tensors` are used. No traffic is recorded. Tensors are sent one by
    one, so that they are never all copied at once.
    """
    sender = next(k for k, ids in enumerate(wire.placement) if source in ids)
    what = tell(wire, described(tensors), sender)
    is_here = wire.process == sender
    found = dict(tensors) if is_here else blank(what)
    for name, x in found.items():
        if not x.numel() or not wire.is_shared:
            continue
        if takers is None:
            rows = wire.rows(x.expand(len(wire.ranks), *x.shape), [source])
            found[name] = x if is_here else rows[0]
        for taker in takers or ():
            got = hand_over(wire, {source: x}, [Parcel(source, taker, tuple(x.shape), x.dtype, False)])
            if taker in got and not is_here:
                found[name] = got[taker]
    return found if takers is None or is_here or set(takers) & set(wire.ranks) else {}
