"""What processes say to each other over a wire, built on its four primitives. Nothing is pickled.

Values travel as JSON, in rows of bytes; of named tensors what they are goes ahead as JSON, then their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from exogym.core.communicator.wire import Parcel, Wire
from exogym.core.progress import notice

Described = list[tuple[str, str, list[int]]]  # name, dtype, shape


def tell(wire: Wire, value: Any, process: int | None = None) -> Any:
    """Return the `value` (JSON-able) of one process of `placement`, by default the main one, in every process.

    Where nodes are several processes each, one of `placement` tells those with the same columns.
    """
    if not wire.is_shared:
        return value
    return _told(wire.world if process is None else wire, value, [process or 0])[0]


def gather(wire: Wire, value: Any) -> list[Any]:
    """Return the `value` (JSON-able) of every process, in their order, in every process."""
    return _told(wire.world, value, range(len(wire.world.placement))) if wire.is_shared else [value]


def _told(wire: Wire, value: Any, processes: Sequence[int]) -> list[Any]:
    """Return the values of `processes`, in every process: their texts travel as rows, of one length."""
    firsts, text = [wire.placement[process][0] for process in processes], b""
    if wire.process in processes:
        text = json.dumps(value).encode()
    lengths = wire.rows(torch.tensor([[len(text)]]).expand(len(wire.ranks), -1), firsts).flatten().tolist()
    letters = torch.frombuffer(bytearray(text.ljust(max(lengths))[: max(lengths)]), dtype=torch.uint8)
    rows = wire.rows(letters.expand(len(wire.ranks), -1), firsts)
    return [json.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]


def say(wire: Wire, text: str, about: str | None = None) -> None:
    """Have the main process tell the user a line; `about`: see `exogym.core.progress.without_notices`."""
    if wire.is_main:
        notice(text, about)


def barrier(wire: Wire) -> None:
    """Wait for all processes."""
    wire.agree(False)


def hand_over(wire: Wire, given: Mapping[int, Tensor], parcels: Sequence[Parcel]) -> dict[int, Tensor]:
    """Return what each node here gets, some of it the giver's own memory.

    Args:
        given: what the nodes here give.
        parcels: of all processes, in the same order everywhere; a node gives once at most and takes once at most.
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


def described(tensors: Mapping[str, Tensor]) -> Described:
    """Return what `tensors` are, as JSON; `blank` makes tensors like them.

    >>> described({"a": torch.zeros(2, 3)})
    [('a', 'float32', [2, 3])]
    """
    return [(name, str(x.dtype).removeprefix("torch."), list(x.shape)) for name, x in tensors.items()]


def blank(what: Sequence[Sequence[Any]], device: torch.device | None = None) -> dict[str, Tensor]:
    """Return tensors, with no numbers yet, that are as `described` says.

    >>> blank([["a", "float32", [2, 3]]])["a"].shape
    torch.Size([2, 3])
    """
    return {name: torch.empty(shape, dtype=getattr(torch, dtype), device=device) for name, dtype, shape in what}


def ship(
    wire: Wire, tensors: Mapping[str, Tensor], source: int, takers: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """Return the named tensors of the process that holds node `source`, in every process or those of nodes `takers`.

    Every process makes this call; what it gives as `tensors` counts in the one of `source` only. Nothing is recorded.
    Each tensor travels by itself, so no copy of all of them is made.
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
