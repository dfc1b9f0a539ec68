"""Redistribute the columns of a row inside a node, for modules that need whole tensors or the whole row.

If a node has several processes, each process holds a part of every parameter, but a module that can't work on parts
needs whole parameters. If it needs "tensors", each process gets some whole parameters, with about equally many numbers
per process; if it needs the "row", the first process gets all parameters. The columns move before the module acts and
move back afterward. With k processes, (k-1)/k of the columns move inside the node each time. The module's traffic
between nodes doesn't change.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exogym.core.communicator import Columns, Communicator, Event
from exogym.core.communicator.ledger import FACTORS
from exogym.core.fleet.cuts import Cut
from exogym.core.fleet.fleet import Block, Fleet, row_matrix
from exogym.core.fleet.layout import Layout
from exogym.errors import ModelError

Ranges = list[tuple[int, int]]


class Dealing:
    """Redistribute the columns of `fleet` for a module that needs whole "tensors" or the whole "row" (`kind`).

    The module sees `view`, and `is_here` says whether this process has columns for it. All parameters need one dtype.
    """

    def __init__(self, fleet: Fleet, kind: str):
        if len(fleet.blocks) > 1:
            dtypes = ", ".join(str(block.layout.dtype) for block in fleet.blocks)
            raise ModelError(
                f"the model has parameters of {dtypes}, but with node= a strategy that acts on whole {kind} needs one "
                "dtype: convert the model, or use a strategy that acts on elements (DDP, DiLoCo, FedAvg, SPARTA, ...)"
            )
        self.fleet, self.columns = fleet, fleet.comm.wire.columns
        (block,) = fleet.blocks
        assert block.layout.whole is not None
        owners = _owners(block.layout.whole, 1 if kind == "row" else self.columns.parts)
        dealt = [_whole_parameters(block.layout.whole, owners, part) for part in range(self.columns.parts)]
        self.view = copy.copy(fleet)
        self.view.parts = [[layout] for layout in dealt]
        self.is_here = bool(dealt[self.columns.part].slots)
        self.view.blocks = [Block(dealt[self.columns.part], 0, block.params.device)]
        before = [layouts[0] for layouts in fleet.parts]
        self.deal = Route(before, dealt, self.columns)
        self.deal_back = Route(dealt, before, self.columns)
        self._own = [owners[slot.name] == self.columns.part for slot in block.layout]

    @contextlib.contextmanager
    def acting(self, gradients: bool) -> Iterator[Fleet | None]:
        """Return a context in which the module changes the yielded fleet. At the exit, the columns move back.

        All processes of the node must enter the context; each records its columns' traffic. With `gradients`, the
        module changes gradients, otherwise parameters. Yield the fleet with whole tensors, or None without columns
        here.
        """
        (block,), (dealt,) = self.fleet.blocks, self.view.blocks
        dealt.params = self.deal(block.params)
        if gradients:
            assert block.grads is not None
            dealt.grads, dealt.has_grad = self.deal(block.grads), block.has_grad[:, self._own]
        with _apart(self.fleet.comm):
            yield self.view if self.is_here else None
        if gradients:
            self._take_gradients(block, dealt)
        else:
            block.params.copy_(self.deal_back(dealt.params))
        dealt.params, dealt.grads = dealt.params.new_empty(len(block.params), 0), None
        for name, rows in self.fleet.buffers.items():  # the first process has acted on them
            mine = rows if self.columns.part == 0 else torch.zeros_like(rows)
            self.fleet.buffers[name].copy_(self.columns.sum(mine))

    def back(self, vectors: Sequence[Tensor] | None) -> list[Tensor] | None:
        """Move a module's result `vectors`, (P,) per block, back: return this process's own columns.

        Return None if no process has a result.
        """
        if not self.columns.any(vectors is not None):
            return None
        (dealt,) = self.view.blocks
        (given,) = [dealt.params.new_empty(0)] if vectors is None else vectors
        return [self.deal_back(given[None])[0]]

    def _take_gradients(self, block: Block, dealt: Block) -> None:
        grads = dealt.grads if dealt.grads is not None else dealt.params[:, :0]
        are_one = not self.columns.any(self.is_here and grads.stride(0) != 0 and len(grads) > 1)
        found = self.deal_back(grads[:1] if are_one else grads)
        block.grads = found.expand_as(block.params) if are_one else found
        flags = torch.zeros(len(block.params), len(self._own), dtype=torch.int64)
        flags[:, self._own] = dealt.has_grad.long()
        block.has_grad = self.columns.sum(flags) > 0


class Route:
    """Send columns from the processes that have them to the processes that need them, inside a node.

    Args:
        before: for each process, the layout of the columns that it has. If several processes have a column, only one
            of their layouts may list it.
        after: for each process, the layout of the columns that it needs. Several processes may need the same column.
        columns: the communication between these processes.
    """

    def __init__(self, before: Sequence[Layout], after: Sequence[Layout], columns: Columns):
        self.columns, self.width = columns, after[columns.part].numel
        self._given = [_common(before[columns.part], layout) for layout in after]
        self._taken = [_common(after[columns.part], layout) for layout in before]

    def __call__(self, x: Tensor) -> Tensor:
        """Return (rows, P), the columns needed here; each process gives (rows, p), the columns it has."""
        outgoing = [torch.cat([x[:, a:b] for a, b in [*ranges, (0, 0)]], 1).reshape(-1) for ranges in self._given]
        sizes = [len(x) * sum(b - a for a, b in ranges) for ranges in self._taken]
        found = row_matrix(len(x), self.width, x.dtype, x.device)
        for ranges, got in zip(self._taken, self.columns.swap(outgoing, sizes), strict=True):
            pieces = got.view(len(x), -1).split([b - a for a, b in ranges], 1) if ranges else ()
            for (a, b), piece in zip(ranges, pieces, strict=True):
                found[:, a:b] = piece
        return found


def _owners(whole: Layout, parts: int) -> dict[str, int]:
    """Return the process of each parameter: the largest first, each to the process with the least so far."""
    loads, owners = [0] * parts, {}
    for slot in sorted(whole, key=lambda slot: -slot.numel):
        part = loads.index(min(loads))
        owners[slot.name] = part
        loads[part] += slot.numel
    return owners


def _whole_parameters(whole: Layout, owners: dict[str, int], part: int) -> Layout:
    return whole.part({s.name: tuple((0, n) for n in s.shape) for s in whole if owners[s.name] == part})


def _common(layout: Layout, other: Layout) -> Ranges:
    """Return where `layout` has the columns that `other` has too, in ascending order."""
    return [(a, b) for a, b in Cut((), (), layout.here(other.columns)).ranges().tolist()]


# The traffic of a node whose processes send whole tensors apart


@contextlib.contextmanager
def _apart(comm: Communicator) -> Iterator[None]:
    """A context, for all processes of a node, in which each sends some whole tensors as part of the node's events."""
    comm.held = held = list[Event]()
    try:
        yield
    finally:
        comm.held = None
    for event in together(comm.wire.columns.tell(list(map(described, held)))):
        comm.ledger.add(event) if event.kind != "arrive" else comm.ledger.tell(event)


def described(event: Event) -> list[Any]:
    """Return an event as a JSON list, which `together` reads."""
    sizes = [event.payload_bytes, event.tx_bytes.tolist(), event.rx_bytes.tolist()]
    rest = [list(event.givers), list(map(list, event.links)), event.flight]
    return [event.kind, event.algorithm, list(event.members), event.tag, *rest, *sizes]


def together(reports: Sequence[Sequence[Any]]) -> list[Event]:
    """Join the events of a node's processes (from `described`) into the events of the node.

    The k-th events of the same kind in all processes become one event with the sum of their bytes. The sum is rounded
    up to whole bytes. Buffers are the same in all processes, so they count once.
    """
    found: dict[str, list[Any]] = {}
    for events in reports:
        seen: dict[str, int] = {}
        for event in events:
            kind = json.dumps(event[:7])
            seen[kind] = seen.get(kind, 0) + 1
            key = f"{seen[kind]} {kind}"
            if key not in found:
                found[key] = [*event[:7], event[7], np.array(event[8]), np.array(event[9])]
            elif event[3] != "buffers":
                found[key][7] += event[7]
                found[key][8:] = [found[key][8] + np.array(event[8]), found[key][9] + np.array(event[9])]
    return [_whole(*event) for event in found.values()]


def _whole(
    kind: str, algorithm: str, members: list[int], tag: str, givers: list[int], links: list[list[int]],
    flight: int | None, payload: float, tx: np.ndarray, rx: np.ndarray,
) -> Event:  # fmt: skip
    if kind == "mix" and payload:  # each receiver gets a whole payload
        tx, rx = (np.rint(sent / payload) * math.ceil(payload) for sent in (tx, rx))
    payload, factor = math.ceil(payload), FACTORS.get((kind, algorithm))
    if factor is not None and kind not in ("push", "pull") and algorithm != "tree":  # one payload's bits, rounded once
        tx = rx = np.full(len(members), factor(len(members)) * payload)
    ways = tuple((giver, taker) for giver, taker in links)
    return Event(kind, algorithm, tuple(members), payload, tx, rx, tag, tuple(givers), ways, flight)
