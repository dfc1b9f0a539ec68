"""The fleet: one matrix X with N rows and P columns holds the P parameters of each of N nodes.

Row r of a process belongs to the node `ranks[r]`. Local training changes single rows; communication mixes rows. A
process holds some rows with all columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from exogym.core.base.torch_private import in_this_process
from exogym.core.communicator import Communicator, Wire
from exogym.core.fleet.cuts import Cut, cut_of
from exogym.core.fleet.layout import Layout, Slot, hidden_matrices, layouts_of
from exogym.core.fleet.state import Shared, State, Stateful, Tensors

ALIGNMENT_BYTES = 64


def row_matrix(rows: int, width: int, dtype: torch.dtype, device: torch.device, room: int = 0) -> Tensor:
    """Return an uninitialized (rows, width) matrix whose rows all start at a 64-byte boundary.

    Kernels may round differently at different alignments, so identical bits need equal alignment.

    Args:
        room: number of elements that the memory has after the last row.
    """
    stride = -(-width * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES // dtype.itemsize
    if room:
        return torch.zeros(rows * stride + room, dtype=dtype, device=device).as_strided((rows, width), (stride, 1))
    return torch.empty(rows, stride, dtype=dtype, device=device)[:, :width]


class Block:
    """Hold the columns of one dtype, for all rows of this process.

    Attributes:
        layout: the place of each parameter in a row.
        params: (rows, P) parameters, the matrix X of the equations.
        grads: (rows, P) gradients, or None if the strategy needs no gradients. After an average, all rows are the same
            memory (stride 0).
        has_grad: (rows, parameters) bool: whether the step gave the parameter a gradient.
    """

    def __init__(self, layout: Layout, rows: int, device: torch.device):
        self.layout = layout
        self.params = row_matrix(rows, layout.numel, layout.dtype, device, layout.room)
        self.grads: Tensor | None = None
        self._own_grads: Tensor | None = None
        self.has_grad = torch.ones(rows, len(layout.slots), dtype=torch.bool)

    def own_grads(self) -> Tensor:
        """Return the (rows, P) matrix into which each step copies its gradients."""
        if self._own_grads is None:
            rows, width = self.params.shape
            self._own_grads = row_matrix(rows, width, self.layout.dtype, self.params.device)
        self.grads = self._own_grads
        return self._own_grads

    def give_grads_away(self) -> None:
        """Drop the gradient matrix, so that the next gradients get new memory. Views of the old matrix remain valid."""
        self.grads = self._own_grads = None

    def views(self, rows: Tensor) -> Iterator[tuple[Slot, Tensor]]:
        """Yield (slot, view) for each parameter: the view (rows, *shape) of its columns in the matrix `rows`."""
        for slot in self.layout:
            yield slot, slot.of(rows)

    def zeros(self, rows: int | None = None) -> Tensor:
        """Return a matrix of zeros like `params`, with `rows` rows (default: as many rows as `params`)."""
        n = len(self.params) if rows is None else rows
        return row_matrix(n, self.layout.numel, self.layout.dtype, self.params.device).zero_()


class Fleet:
    """Hold a process's rows, the rows' buffers, and the communicator between all nodes.

    Attributes:
        blocks: one `Block` per dtype of trainable parameters.
        buffers: {name: (rows, *shape)} for the buffers that a training step changes.
        own: the buffers among them that nodes neither average nor send, with their values before training.
        ranks: the rank of the node in each row.
        num_nodes: number of nodes in all processes together.
        comm: the `Communicator`.
        names: names of all trainable parameters of the model, in the module's order, which differs from the blocks'
            order if the model has several dtypes.
        hidden: names of the matrices that map one hidden vector to another, for the optimizer Muon.
        state: the `State` that a checkpoint saves. It has the rows, byte counts and other objects' state.
        parts: the layouts in all processes of one node. `parts[k][b]` is the layout of block b in the node's process k.
    """

    def __init__(
        self, module: nn.Module, ranks: Sequence[int], num_nodes: int, device: torch.device, wire: Wire | None = None,
        parts: Sequence[Sequence[Layout]] | None = None,
    ):  # fmt: skip
        self.num_nodes = num_nodes
        self.comm = Communicator(ranks, num_nodes, wire)
        self.ranks = self.comm.ranks
        self.parts = [layouts_of(module)] if parts is None else parts
        self.blocks = [Block(layout, len(self.ranks), device) for layout in self.parts[self.comm.wire.columns.part]]
        self.buffers: dict[str, Tensor] = {}
        self.own: dict[str, Tensor] = {}
        self.names = [name for name, p in module.named_parameters() if p.requires_grad]
        self.hidden = hidden_matrices(module)
        self.state = State()
        self.state.register("fleet", _Matrix(self))
        self.state.register("ledger", Shared(self.comm.ledger.state, self.comm.ledger.load_state))
        parameters = dict(module.named_parameters())
        for block in self.blocks:
            for slot, view in block.views(block.params):
                own = in_this_process(given := parameters[slot.name].detach())
                view.copy_((slot.cut(own) if own is given else own).expand_as(view))

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def there(self) -> list[int]:
        """The ranks of the present nodes, or of all nodes with a row if no node is present."""
        return self.comm.present or sorted(i for ids in self.comm.wire.placement for i in ids)

    @property
    def parameter_bytes(self) -> int:
        """The bytes of one row's parameters, over all blocks."""
        return sum(block.layout.total * block.layout.dtype.itemsize for block in self.blocks)

    def gradients_of(self, row: int) -> list[Tensor | None]:
        """Return, for each parameter in fleet order, a view of its gradient in `row`, or None if it has no gradient."""
        found: list[Tensor | None] = []
        for block in self.blocks:
            assert block.grads is not None
            grads, there = block.grads[row], block.has_grad[row].tolist()
            found += [slot.of(grads) if has else None for slot, has in zip(block.layout, there, strict=True)]
        return found

    def wholes(self, vectors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Collect whole parameters from the processes of a node, and yield each parameter, (..., *shape).

        All processes of the node must call this together.

        Args:
            vectors: this process's columns, (..., P) per block.
        """
        columns = self.comm.wire.columns
        for b, (block, vector) in enumerate(zip(self.blocks, vectors, strict=True)):
            for k, slot in enumerate(block.layout):
                if block.layout.whole is None:
                    yield slot.of(vector)
                    continue
                ahead, shape = vector.shape[:-1], block.layout.whole.slots[k].shape
                theirs = [layouts[b].slots[k] for layouts in self.parts]
                sizes = [ahead.numel() * other.numel for other in theirs]
                found = vector.new_empty(*ahead, *shape)
                for other, piece in zip(theirs, columns.gather(slot.of(vector).reshape(-1), sizes), strict=True):
                    assert other.box is not None
                    places: Any = (..., *(slice(start, stop) for start, stop in other.box))
                    found[places] = piece.view(*ahead, *other.shape)
                yield found

    def whole(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Return `vectors`, (..., P) per block, with the columns of all processes of the node.

        All processes of the node must call this method together, each with its own columns.
        """
        if self.comm.wire.columns.parts == 1:
            return list(vectors)
        found, result = self.wholes(vectors), []
        for block, vector in zip(self.blocks, vectors, strict=True):
            ahead = vector.shape[:-1]
            result.append(torch.cat([next(found).reshape(*ahead, -1) for _ in block.layout], -1))
        return result

    def average(self) -> list[Tensor]:
        """Return the mean of the present nodes' parameters, (P,) per block, without recording traffic."""
        wire, everyone = self.comm.wire, self.there
        share = self.comm.share(everyone)
        return [wire.reduce(block.params, everyone, "mean", share) for block in self.blocks]

    def average_buffers(self) -> dict[str, Tensor]:
        """Return one value for each buffer that training changes, without recording traffic.

        A floating-point buffer's value is the mean over the present nodes. Other buffers have the lowest rank's value.
        The nodes' own buffers are as before training.
        """
        wire, everyone = self.comm.wire, self.there
        result = {name: value.clone() for name, value in self.own.items()}
        for name, rows in self.shared_buffers.items():
            if rows.is_floating_point():
                share = self.comm.share(everyone)
                result[name] = wire.reduce(rows.reshape(len(rows), -1), everyone, "mean", share).view(rows.shape[1:])
            else:
                result[name] = wire.rows(rows, everyone[:1])[0]
        return result

    @property
    def shared_buffers(self) -> dict[str, Tensor]:
        """The buffers that nodes average and send: all in `buffers` except `own`."""
        return {name: rows for name, rows in self.buffers.items() if name not in self.own}

    def keep_own(self, names: Iterable[str]) -> None:
        """From now on, don't average or send the buffers `names`, whose rows are equal now."""
        self.own = {name: self.buffers[name][0].clone() for name in names}
        if self.own:
            self.state.register("own", _Own(self))

    def forget_own(self, nodes: Sequence[int]) -> None:
        """Reset the own buffers of `nodes`, which have lost their state, to the values before training."""
        for name, value in self.own.items():
            self.buffers[name][rows_of(self, nodes)] = value

    def synchronise_buffers(self, groups: Sequence[Sequence[int]] | None = None, without: Sequence[str] = ()) -> None:
        """Make the buffers that training changes equal in each group of nodes.

        Floating-point buffers are averaged. All other buffers take the value of the group's lowest rank. The bytes
        are recorded as buffer traffic, apart from the parameters' traffic.

        Args:
            groups: lists of ranks. Default: one group of all present nodes.
            without: names of buffers that stay as they are.
        """
        with self.comm.counted_as("buffers"):
            for name, rows in self.shared_buffers.items():
                if name in without:
                    continue
                if rows.is_floating_point():
                    self.comm.all_reduce(rows, "mean", groups=groups, out=rows)
                    continue
                for group in groups or [self.comm.present]:
                    rows.copy_(self.comm.broadcast(rows, min(group), members=group).clone())


class _Matrix(Stateful):
    """The matrix itself: a row's parameters, block by block, and its buffers."""

    def __init__(self, fleet: Fleet):
        self.fleet = fleet

    def row(self, row: int) -> Tensors:
        params = {f"params.{b}": block.params[row] for b, block in enumerate(self.fleet.blocks)}
        return params | {f"buffer.{name}": x[row] for name, x in self.fleet.shared_buffers.items()}

    def load_row(self, row: int, tensors: Tensors) -> None:
        for b, block in enumerate(self.fleet.blocks):
            block.params[row] = tensors[f"params.{b}"]
        for name, x in self.fleet.shared_buffers.items():
            x[row] = tensors[f"buffer.{name}"]

    def cut(self, name: str, shape: Sequence[int]) -> Cut | None:
        kind, _, b = name.partition(".")
        return cut_of(self.fleet.blocks[int(b)].layout) if kind == "params" else None


class _Own(Stateful):
    """The nodes' own buffers. Apart from `_Matrix`, so that a sampled client's stay when it gives up its row."""

    def __init__(self, fleet: Fleet):
        self.fleet = fleet

    def row(self, row: int) -> Tensors:
        return {name: self.fleet.buffers[name][row] for name in self.fleet.own}

    def load_row(self, row: int, tensors: Tensors) -> None:
        for name in self.fleet.own:
            self.fleet.buffers[name][row] = tensors[name]

    def shared(self) -> Tensors:
        return self.fleet.own

    def load_shared(self, tensors: Tensors) -> None:
        self.fleet.own = {name: tensors[name].clone() for name in self.fleet.own}


# Present nodes: those that take part in the current communication (`fleet.comm.present`), without faults all nodes.


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
