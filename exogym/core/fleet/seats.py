"""Seats: rows that nodes use in turn, if a fleet has more nodes than rows.

If only a few of N nodes take part in a round, only they need rows. Before nodes act, each gets an unused row, into
which its own state (step count, inner optimizer, control variate) is copied. When another node gets the row, this state
moves to a store. Parameters are not stored, because the strategy sets a node's parameters when it gets a row. No result
depends on which node has which row.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from exogym.core.communicator import gather, ship
from exogym.core.fleet.fleet import Fleet
from exogym.core.fleet.state import Tensors, below
from exogym.errors import CheckpointError, StrategyError, TrainingError

NOT_KEPT = ("fleet", "losses")  # parts of the state that nodes without a row don't have


def rows_for(most: int, processes: int) -> int:
    """Return how many rows each process needs if up to `most` nodes act in a round.

    There are rows for the nodes of this round and of the next round, divided evenly over the processes.

    >>> rows_for(20, 1), rows_for(20, 3)
    (40, 14)
    """
    return 2 * math.ceil(most / processes)


class Store:
    """Store each node's named tensors. If the tensors take more than `limit_bytes`, the oldest tensors go to files.

    Args:
        limit_bytes: most bytes of tensors in memory. Default: no limit.
        folder: the folder for the files. It is made when needed, and `close` removes it. A limit needs a folder.

    >>> import torch
    >>> store = Store()
    >>> store.put(7, {"momentum": torch.ones(3)})
    >>> 7 in store, len(store), store.pop(7)["momentum"].tolist(), len(store)
    (True, 1, [1.0, 1.0, 1.0], 0)
    """

    def __init__(self, limit_bytes: float | None = None, folder: Path | None = None):
        self.limit_bytes, self.folder = limit_bytes, folder
        self.memory_bytes = 0
        self._here: OrderedDict[int, Tensors] = OrderedDict()
        self._in_files: set[int] = set()

    def __len__(self) -> int:
        return len(self._here) + len(self._in_files)

    def __contains__(self, node: object) -> bool:
        return node in self._here or node in self._in_files

    def __iter__(self) -> Iterator[int]:
        return iter(sorted([*self._here, *self._in_files]))

    def put(self, node: int, tensors: Tensors) -> None:
        """Store `tensors` for `node`. Do not change the tensors afterward.

        Raise TrainingError if a file could not be written.
        """
        self._here[node] = tensors
        self.memory_bytes += _size(tensors)
        while self.limit_bytes is not None and self.memory_bytes > self.limit_bytes and self._here:
            self._write(*self._here.popitem(last=False))

    def get(self, node: int) -> Tensors:
        """Return the tensors of `node`, which remain in the store."""
        return self._here[node] if node in self._here else self._read(node)

    def pop(self, node: int) -> Tensors:
        """Return the tensors of `node`, and remove them from the store."""
        if node in self._here:
            tensors = self._here.pop(node)
            self.memory_bytes -= _size(tensors)
            return tensors
        tensors = self._read(node)
        self._in_files.discard(node)
        self._file(node).unlink(missing_ok=True)
        return tensors

    def clear(self) -> None:
        """Remove all tensors and files from this store."""
        self._here.clear()
        self._in_files.clear()
        self.memory_bytes = 0
        self.close()

    def close(self) -> None:
        """Remove this store's files."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, node: int) -> Path:
        assert self.folder is not None
        return self.folder / f"node-{node}.safetensors"

    def _read(self, node: int) -> Tensors:
        if node not in self._in_files:
            raise KeyError(node)
        return {name: x.clone() for name, x in load_file(self._file(node)).items()}  # a view would hold the file open

    def _write(self, node: int, tensors: Tensors) -> None:
        file = self._file(node)
        self.memory_bytes -= _size(tensors)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: x.contiguous() for name, x in tensors.items()}, file)
        except Exception as error:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
            raise TrainingError(
                f"the state of node {node} could not be written to {file} ({error}): free space on the disk, or raise "
                f"client_state_memory, now {self.limit_bytes:,.0f} bytes for each process"
            ) from error
        self._in_files.add(node)


class Seats:
    """Assign the rows of `fleet` to nodes. Create this object after all state is registered with the fleet.

    All processes must make the same calls together.

    Args:
        store: keeps the state of nodes that have no row now and had their last row in this process.
        arrived: called with the nodes that get a row in this process for the first time in the run.

    Attributes:
        nodes: the sorted ranks of the nodes that need a row now, over all processes. All these nodes have a row.
        working: the sorted ranks of the nodes that act next. They are among `nodes`.

    Raises:
        StrategyError: the rows begin with different state, so a node that gets a row later could not know its own.
    """

    def __init__(self, fleet: Fleet, store: Store, arrived: Callable[[Sequence[int]], None] | None = None):
        self.fleet, self.store, self.arrived = fleet, store, arrived
        self.names = [name for name in fleet.state.parts if name not in NOT_KEPT]
        self.fresh = {name: x.clone() for name, x in fleet.state.row(0, self.names).items()}
        for row in range(1, len(fleet)):
            if _unlike(fleet.state.row(row, self.names), self.fresh):
                raise StrategyError(
                    "nodes start with different state, but a client that is sampled later starts from a common state: "
                    "put what differs into shared_state, or don't sample clients"
                )
        self.home: dict[int, int] = {}  # the process whose store has a node's state
        self._last: dict[int, int] = {}  # the last turn at which a node with a row needed it
        self._turn = 0
        self._seen: set[int] = set()  # nodes that have been seated before
        self.nodes: list[int] = []
        self.working: list[int] = []

    def take(self, working: Sequence[int], also: Sequence[int] = ()) -> None:
        """Give a row to each node in `working`, which act next, and `also`. Divide the working nodes evenly."""
        wire, needed = self.fleet.comm.wire, {*working, *also}
        self._turn += 1
        self._last = {i: self._last.get(i, 0) for i in wire.owner} | dict.fromkeys(needed, self._turn)
        self.nodes, self.working = sorted(needed), sorted(working)
        if coming := sorted(needed - wire.owner.keys()):
            self._seat(coming, needed)
        if self.arrived is not None and (new := sorted(needed - self._seen)):
            self._seen.update(new)
            self.arrived([i for i in new if i in wire.row_of])

    def _seat(self, coming: Sequence[int], needed: set[int]) -> None:
        """Seat nodes that have no row, in rows of nodes that are not `needed`."""
        wire = self.fleet.comm.wire
        places = self._places(coming, needed)
        here = []
        placement = [list(ids) for ids in wire.placement]
        arriving: dict[int, Tensors] = {}
        for node, (process, row) in places.items():
            leaving = placement[process][row]
            if process == wire.process and (kept := self._kept(row)):
                self.store.put(leaving, kept)
            self.home[leaving] = process
            placement[process][row] = node
            arriving[node] = self._fetched(node, process)
            if process == wire.process:
                here.append((node, row))
        wire.place(placement)
        for node, row in here:
            self.fleet.state.load_row(row, self.fresh | arriving[node], self.names)

    def _places(self, coming: Sequence[int], needed: set[int]) -> dict[int, tuple[int, int]]:
        """Return the process and row of each coming node: where its state is, within that process's fair share."""
        wire, working = self.fleet.comm.wire, set(self.working)
        busy = [len(working.intersection(ids)) for ids in wire.placement]
        share = math.ceil(len(working) / len(busy))
        spare = ([(self._last[i], row) for row, i in enumerate(ids) if i not in needed] for ids in wire.placement)
        free = [[row for _, row in sorted(rows, reverse=True)] for rows in spare]  # `pop` takes the last one first
        found: dict[int, tuple[int, int]] = {}
        for node in sorted(coming, key=lambda i: (self.home.get(i, -1) < 0, i)):
            process = self.home.get(node, -1)
            if process < 0 or not free[process] or busy[process] >= share:
                process = min(range(len(busy)), key=lambda k: (not free[k], busy[k]))
            if not free[process]:
                raise TrainingError(
                    f"{len(needed):,} nodes need a row at once, but the run has {sum(map(len, wire.placement)):,} "
                    "rows: the sampling drew far more clients than expected; use another seed"
                )
            found[node] = (process, free[process].pop())
            busy[process] += node in working
        return found

    def _kept(self, row: int) -> Tensors:
        """Return copies of the state of the node in `row` that has changed since the start."""
        tensors = self.fleet.state.row(row, self.names)
        if gone := self.fresh.keys() - tensors.keys():
            raise StrategyError(
                f"a node's tensor {min(gone)!r} existed when the run began, but no longer exists. A node that loses "
                "its row for some time would get the tensor back: keep this tensor, or sample no clients"
            )
        return {
            name: x.detach().cpu().clone()
            for name, x in tensors.items()
            if name not in self.fresh or not torch.equal(x, self.fresh[name])
        }

    def _fetched(self, node: int, process: int) -> Tensors:
        """Return the changed state of `node`, which comes to `process`, in that process; {} elsewhere."""
        wire, home = self.fleet.comm.wire, self.home.pop(node, None)
        mine = self.store.pop(node) if home == wire.process and node in self.store else {}
        if home is None or home == process:
            return mine
        found = self._brought(mine, home, process)
        return found if process == wire.process else {}

    # Checkpoints

    def rows(self) -> dict[int, Tensors]:
        """Return this process's state for a checkpoint: {row's number over all processes: tensors}.

        A row's tensors are the rank of the working node in the row, and this node's state. The first row of a process
        also has the state of all other nodes that this process stores.
        """
        fleet, working = self.fleet, set(self.working)
        wire = fleet.comm.wire
        first = sum(map(len, wire.placement[: wire.process]))
        found: dict[int, Tensors] = {}
        kept = {node: dict(self.store.get(node)) for node in self.store}
        for row, node in enumerate(fleet.ranks):
            found[first + row] = {"node": torch.tensor(node if node in working else -1)}
            if node in working:
                found[first + row] |= fleet.state.row(row)
            elif mine := self._kept(row):
                kept[node] = mine
        found[first] |= packed(kept)
        return found

    def load(self, rows: Mapping[int, Tensors]) -> None:
        """Restore, from all processes together, the state that `rows` returned; other rows raise CheckpointError."""
        fleet, wire = self.fleet, self.fleet.comm.wire
        working: dict[int, Tensors] = {}
        kept: dict[int, Tensors] = {}
        trouble = ""
        try:
            working, kept = by_node(rows)
            kept = {node: {name: x.clone() for name, x in mine.items()} for node, mine in kept.items()}
        except (KeyError, ValueError, RuntimeError) as error:
            trouble = f"rows of process {wire.process} are not rows of seats: {error!r}"
        reports = gather(wire, [sorted(working), sorted(kept), trouble])
        if troubles := [text for *_, text in reports if text]:
            raise CheckpointError(troubles[0])
        holder, keeper = (
            {node: k for k in reversed(range(len(reports))) for node in reports[k][part]} for part in (0, 1)
        )
        self.store.clear()
        self.home.clear()
        for row in range(len(fleet)):
            fleet.state.load_row(row, self.fresh, self.names)
        self.take(sorted(holder))
        seated = {node: self._brought(working.get(node, {}), holder[node], wire.owner[node]) for node in self.working}
        others = {}
        for node, process in sorted(keeper.items()):
            if node in wire.owner:
                others[node] = self.fresh | self._brought(kept.get(node, {}), process, wire.owner[node])
            else:
                self.home[node] = process
                if process == wire.process:
                    self.store.put(node, kept[node])
        # Only now is everything in place, so only now may a process fail to load.
        for found, names in ((seated, None), (others, self.names)):
            for node in found.keys() & wire.row_of.keys():
                fleet.state.load_row(wire.row_of[node], found[node], names)

    def _brought(self, tensors: Tensors, source: int, target: int) -> Tensors:
        """Return the `tensors` of process `source` in process `target`; every process makes the call."""
        wire = self.fleet.comm.wire
        if source == target:
            return tensors
        return ship(wire, tensors, wire.placement[source][0], [wire.placement[target][0]])


def packed(kept: Mapping[int, Tensors]) -> Tensors:
    """Pack the state of many nodes, {rank: tensors}, into few tensors. Each tensor leaves its dict once it is packed.

    Nodes whose tensors have the same names, shapes and dtypes are a kind. For each kind the result has the ranks
    (nodes,), and one tensor (nodes, ...) per name. So the number of tensors does not depend on the number of nodes.
    """
    kinds: dict[Any, list[int]] = {}
    for node, tensors in kept.items():
        kind = tuple(sorted((name, str(x.dtype), tuple(x.shape)) for name, x in tensors.items()))
        kinds.setdefault(kind, []).append(node)
    found = {}
    for k, nodes in enumerate(kinds.values()):
        found[f"kept.{k}.nodes"] = torch.tensor(nodes)
        for name in list(kept[nodes[0]]):
            found[f"kept.{k}.of.{name}"] = torch.stack([kept[node].pop(name) for node in nodes])
    return found


def unpacked(tensors: Tensors) -> dict[int, Tensors]:
    """Return each node's state, {rank: tensors}, as views of the `tensors` that `packed` returned."""
    kinds = {name.split(".")[1] for name in tensors if name.startswith("kept.")}
    kept: dict[int, Tensors] = {}
    for k in kinds:
        nodes, stacks = tensors[f"kept.{k}.nodes"].tolist(), below(f"kept.{k}.of.", tensors)
        for at, node in enumerate(nodes):
            kept[node] = {name: stack[at] for name, stack in stacks.items()}
    return kept


def by_node(rows: Mapping[int, Tensors]) -> tuple[dict[int, Tensors], dict[int, Tensors]]:
    """Return two dicts {rank: tensors}, for working nodes and for other nodes, given the result of `Seats.rows`."""
    working: dict[int, Tensors] = {}
    kept: dict[int, Tensors] = {}
    for tensors in rows.values():
        own = {name: x for name, x in tensors.items() if name != "node" and not name.startswith("kept.")}
        if (node := int(tensors["node"])) >= 0:
            working[node] = own
        kept |= unpacked(tensors)
    return working, kept


def _unlike(some: Tensors, others: Tensors) -> bool:
    return some.keys() != others.keys() or any(not torch.equal(x, others[name]) for name, x in some.items())


def _size(tensors: Tensors) -> int:
    return sum(x.numel() * x.element_size() for x in tensors.values())
