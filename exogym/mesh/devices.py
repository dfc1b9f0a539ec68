"""Train a node of several processes, one per device. Each process holds some columns of the node's rows."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from exogym.communicator import Columns, Wire
from exogym.core.base.batches import batch_examples
from exogym.core.compute.pointer import Pointer
from exogym.core.compute.worker import Worker
from exogym.mesh import NodeMesh
from exogym.mesh.recut import Recut
from exogym.mesh.replicated import Replicated
from exogym.mesh.split import Split, as_told, refuse_ways
from exogym.mesh.traffic import InsideTraffic
from exogym.mesh.value import even

Part = tuple[Any, float]  # a part of a batch, and its share of the batch


class NodeDevices:
    """Train with a model that is split over the processes of a node, one process per device.

    All processes of the node return the same losses and stop at the same step. The model is whole until `begin`. Then
    the pointer's `parameters` are plain tensors of this process's columns, which inner optimizers step. `set_home`
    makes the model whole again in the main process; in the other processes its parameters are then on the meta device.

    Args:
        meshes: all nodes' meshes.
        wire: the communication between processes.

    Attributes:
        split: divides the row over the node's processes.
        within: divides the model over the node's processes; differs from `split` only if the nodes' meshes differ.
        stream: numbers in the name of this process's random stream, which shards and stages do not share.
        should_stop: whether the processes stop after this step, as agreed in each gradient.
    """

    def __init__(self, model: nn.Module, meshes: Sequence[NodeMesh], wire: Wire, device: torch.device):
        from exogym.mesh.sharded import Sharded  # torch's FSDP takes a while to import
        from exogym.mesh.staged import Staged

        self.mesh, self.inside = meshes[wire.ranks[0]], wire.devices
        self._traffic: InsideTraffic | None = None
        kind: Any = Staged if self.mesh.depth > 1 else Sharded if self.mesh.zero == 3 else Replicated
        self.within: Split = kind(model, self.mesh, wire.devices, device)
        self.split = self.within if len(set(meshes)) == 1 else Recut(self.within, wire.columns)
        at = self.mesh.coordinates(wire.devices.part)
        self.shard = at["shard"]
        self.stream: tuple[int, ...] = (
            (self.shard, at["stages"]) if at["stages"] else (self.shard,) if self.shard else ()
        )
        self.is_split = self._is_gathered = self._stops = False
        self.ask = lambda: False

    @property
    def ask(self) -> Callable[[], bool]:
        """A function that returns whether this process wants to stop."""
        return self._ask

    @ask.setter
    def ask(self, ask: Callable[[], bool]) -> None:
        self._ask, self._stops = ask, False

    def should_stop(self) -> bool:
        return self._stops

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Return a context that records the sizes of the model's activations. Run a training step inside it."""
        self._traffic = InsideTraffic(self.within.model, self.mesh)
        with self._traffic.watching():
            yield

    # The row

    def holding(self, pointer: Pointer) -> NodeDevices:
        """Use `pointer` to point this process's part of the model at rows; return self."""
        self.pointer, self.fleet, self._originals = pointer, pointer.fleet, pointer.parameters
        pointer.parameters = [nn.Parameter(view) for view in pointer.views(0)]
        return self

    def begin(self, worker: Worker, batch: Any) -> None:
        """Split the model, so that this process keeps only its columns; raise ModelError for wrong gradients."""
        from exogym.mesh.probing import check_split

        if self.mesh.probe:
            check_split(self.within, worker.loss, batch, self._passes(worker, batch), self.mesh)
        else:
            self.within.split()
        self.is_split, self.pointer.owners, self.pointer.homes = True, [], []
        self.split.let_go()

    def point(self, row: int) -> None:
        self.pointer.point(row)
        self._pointed()

    def point_at(self, vectors: Sequence[Tensor], buffers: dict[str, Tensor]) -> None:
        self.pointer.point_at(vectors, buffers)
        self._pointed()

    def _pointed(self) -> None:
        if self.is_split:
            self.split.point(self.pointer.at)

    def check(self, row: int) -> None:
        self.pointer.keep_buffers(row)
        share_buffers(self.fleet.buffers, row, self.inside, self.split.keepers)

    def set_home(self, vectors: Sequence[Tensor], buffers: dict[str, Tensor], together: bool = True) -> None:
        found = self.fleet.wholes(vectors) if together else ()
        is_main = self.fleet.comm.wire.is_main
        self.split.plain()
        self.is_split = False
        for p, whole in zip(self._originals, found, strict=False):
            if is_main:
                p.data = (
                    whole.clone() if whole.untyped_storage().nbytes() > whole.nbytes else whole
                )  # not a view of a row
        self.pointer.bring_buffers_home(buffers)
        if not (together and is_main):
            self._lose_numbers()

    def go_home(self) -> None:
        if self.is_split:  # after a failure: the other processes' numbers are lost
            self.split.plain()
            self.is_split = False
            self._lose_numbers()
        else:
            self.pointer.parameters = self._originals
            self.pointer.go_home()

    def _lose_numbers(self) -> None:
        """Put the trainable parameters on the meta device: shapes without numbers."""
        shapes = [slot.shape for block in self.fleet.blocks for slot in block.layout.whole or block.layout]
        lost = {
            id(p): nn.Parameter(torch.empty(shape, dtype=p.dtype, device="meta"))
            for p, shape in zip(self._originals, shapes, strict=True)
        }
        for module in self.within.model.modules():
            for name, p in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
                if id(p) in lost:
                    module.register_parameter(name, lost[id(p)])

    # Computing

    def gradient(self, worker: Worker, batch: Any, row: int) -> Tensor:
        """Compute the gradients of this process's columns, and return the loss of the node's whole batch.

        All processes of the node must call this method together. In the call they also agree whether to stop.
        """
        scaling = worker.scaling
        scale = scaling.of(row)
        if self._traffic is not None:
            sent = self._traffic.tx_bytes(batch_examples(batch), worker.micro_batch_size)
            self.fleet.comm.ledger.inside_bytes[self.fleet.ranks[row]] += sent
        passes = self._passes(worker, batch)
        self.split.refresh()
        total = torch.zeros((), dtype=torch.float64)
        for parts in passes:
            total += self.split.compute(worker.loss, parts, scale, worker.autocast) / scale
        for p, grad in zip(self.pointer.parameters, self.split.gradients(), strict=True):
            p.grad = grad
        if worker.scaled:
            scaling.unscale(row, self.pointer.parameters)
        own = torch.stack([total, *map(_flag, (scaling.overflowed, self._ask()))])
        told = self.inside.sum(torch.cat([own, as_told(self.within)]))
        refuse_ways(told[3:], self.inside.parts, self.mesh)
        scaling.overflowed, self._stops = bool(told[1]), bool(told[2])
        return told[0].to(worker.device, torch.get_default_dtype())

    def _passes(self, worker: Worker, batch: Any) -> list[list[Part]]:
        """Return the micro-batches of this process's share of a batch: equally many in all of the node's processes.

        A micro-batch without examples gets an example of weight 0. A pipeline makes a pass for each `micro_batch_size`
        examples of the node; any other split makes one pass.
        """
        total = batch_examples(batch)
        whole = min(total, worker.micro_batch_size or total)
        if self.mesh.depth == 1:
            shares = self.mesh.shares(total)
            count = -(-max(shares) // self.mesh.at_once(whole))
            bounds = _bounds(sum(shares[: self.shard]), even(shares[self.shard], count))
            return [worker.parts(batch, bounds)]
        found = []
        for start in range(0, total, whole):
            shares = self.mesh.shares(min(whole, total - start))
            sizes = self.mesh.micro_batches(shares[self.shard])
            first = start + sum(shares[: self.shard])
            sizes = (*sizes, *[0] * (self.mesh.depth - len(sizes)))
            found.append(worker.parts(batch, _bounds(first, sizes)))
        return found

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Return a context in which the split model can be evaluated. Such contexts may be nested."""
        if self._is_gathered or not self.is_split:
            yield
            return
        self._is_gathered = True
        try:
            with self.split.gathered():
                yield
        finally:
            self._is_gathered = False

    def evaluated(self, total: int) -> tuple[int, int]:
        """Return the range (start, stop) of examples that this process evaluates in a batch of `total` examples."""
        part, parts = self.split.evaluated
        shares = even(total, parts)
        return sum(shares[:part]), sum(shares[: part + 1])


def share_buffers(buffers: dict[str, Tensor], row: int, inside: Columns, keepers: Callable[[str], range]) -> None:
    """Average a row's `buffers`, {name: (rows, *shape)}, over the node's processes that change them."""
    for name, rows in buffers.items():
        those, none = keepers(name), torch.zeros_like(rows[row])
        if rows.is_floating_point() or rows.is_complex():
            rows[row] = inside.sum(rows[row] / len(those) if inside.part in those else none)
        elif len(those) < inside.parts:
            rows[row] = inside.sum(rows[row] if inside.part == those[0] else none)
        else:  # counts go up
            rows[row] = inside.maximum(rows[row].long())


def _bounds(start: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, stop) of consecutive pieces of these sizes."""
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=start)))


def _flag(value: bool) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)
