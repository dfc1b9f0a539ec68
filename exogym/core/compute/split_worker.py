"""The worker of a process that is one of several devices of a node: it holds some columns of the node's rows."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from exogym.core.base.torch_private import own_parameters
from exogym.core.communicator import Inside, Wire
from exogym.core.compute.outputs import batch_examples
from exogym.core.compute.recut import Recut
from exogym.core.compute.replicated import Replicated
from exogym.core.compute.split import Split, as_told, refuse_ways
from exogym.core.compute.worker import Worker
from exogym.core.fleet import Fleet
from exogym.core.fleet.layout import Layout
from exogym.core.mesh import NodeMesh
from exogym.core.mesh.value import even

Part = tuple[Any, float]  # of a batch, and its share of it


class SplitWorker(Worker):
    """Computes with the other processes of the node; what it returns, and when it stops, is the same in all of them.

    Until `begin` the model is whole and nothing is split. From then on `parameters` are of the columns here, plain
    tensors, and inner optimizers step these; `set_home` makes the model whole again in the main process, and leaves the
    others' without numbers (on the meta device).
    """

    mesh: NodeMesh
    inside: Inside  # all processes that compute for the node
    split: Split
    within: Split  # the model's own, where `split` cuts the row otherwise
    _asked: Callable[[], bool]

    def divide(self, meshes: Sequence[NodeMesh], wire: Wire) -> list[list[Layout]]:
        """Compute as one of the devices of a node; return the layouts of each that holds a part of its row, one per
        block of the fleet. `meshes` are those of all nodes.

        Raises:
            ModelError: the model cannot be split so.
        """
        from exogym.core.compute.sharded import Sharded  # torch's FSDP takes a while to import
        from exogym.core.compute.staged import Staged

        mesh = meshes[wire.ranks[0]]
        kind: Any = Staged if mesh.depth > 1 else Sharded if mesh.zero == 3 else Replicated
        self.mesh, self.inside = mesh, wire.devices
        self.within = self.split = kind(self.model, mesh, wire.devices, self.device)
        if len(set(meshes)) > 1:
            self.split = Recut(self.within, wire.inside)
        at = mesh.coordinates(wire.devices.part)
        self.shard = at["shard"]
        self.stream = (self.shard, at["stages"]) if at["stages"] else (self.shard,) if self.shard else ()
        self.is_split = self._is_gathered = self._stops = False
        return self.split.parts

    @property
    def should_stop(self) -> Callable[[], bool]:
        """Whether to stop, as all processes of the node knew after the last gradient: they stop at the same step."""
        return lambda: self._stops

    @should_stop.setter
    def should_stop(self, ask: Callable[[], bool]) -> None:
        self._asked, self._stops = ask, False

    # Binding

    def bind(self, fleet: Fleet) -> None:
        super().bind(fleet)
        self._originals = self.parameters
        self.parameters = [nn.Parameter(view) for view in self.views(0)]

    def begin(self, batch: Any) -> None:
        """Split the model: from here on it holds the columns here only.

        Raises:
            ModelError: it gives other gradients so.
        """
        from exogym.core.compute.probing import check_on, check_split

        batch, probe = self.to_device(batch), self.mesh.probe
        if probe is True:
            check_split(self.within, self.loss, batch, self._passes(batch), self.mesh)
        else:
            if isinstance(probe, nn.Module):
                check_on(probe, self.loss, batch, self._passes(batch), self.within, self.mesh)
            self.within.split()
        self.is_split, self._places, self._homes = True, [], []
        self.split.let_go()

    def check(self, row: int) -> None:
        self._keep_buffers(row)
        for name, rows in self.fleet.buffers.items():  # each process has seen other examples
            keepers, none = self.split.keepers(name), torch.zeros_like(rows[row])
            if rows.is_floating_point() or rows.is_complex():
                rows[row] = self.inside.sum(rows[row] / len(keepers) if self.inside.part in keepers else none)
            elif len(keepers) < self.inside.parts:
                rows[row] = self.inside.sum(rows[row] if self.inside.part == keepers[0] else none)
            else:  # counts go up
                rows[row] = self.inside.maximum(rows[row].long())

    def set_home(self, vectors: Sequence[Tensor], buffers: dict[str, Tensor], together: bool = True) -> None:
        found = self.fleet.wholes(vectors) if together else ()
        is_main = self.fleet.comm.wire.is_main
        self.split.plain()
        self.is_split = False
        for p, whole in zip(self._originals, found, strict=False):
            if is_main:
                p.data = whole.clone() if whole.untyped_storage().nbytes() > whole.nbytes else whole  # not of a row
        self._set_buffers(self._buffer_homes)
        with torch.no_grad():
            for name, home in self._buffer_homes.items():
                home.copy_(buffers[name])
        if not (together and is_main):
            self._lose_numbers()

    def go_home(self) -> None:
        if self.is_split:  # after a failure: the numbers of others are not to be had
            self.split.plain()
            self.is_split = False
            self._lose_numbers()
        else:
            self.parameters = self._originals
            super().go_home()

    def _lose_numbers(self) -> None:
        """Put the trainable parameters on the meta device: they have their shapes and no numbers."""
        shapes = [slot.shape for block in self.fleet.blocks for slot in block.layout.whole or block.layout]
        lost = {
            id(p): nn.Parameter(torch.empty(shape, dtype=p.dtype, device="meta"))
            for p, shape in zip(self._originals, shapes, strict=True)
        }
        for module in self.model.modules():
            own = own_parameters(module)
            own |= {name: lost[id(p)] for name, p in own.items() if id(p) in lost}

    def _set(self, views: Sequence[Tensor], buffers: dict[str, Tensor]) -> None:
        super()._set(views, buffers)
        if self.is_split:
            self.split.point(views)

    # Computing

    def gradient(self, batch: Any, row: int) -> Tensor:
        """As of a process that is all of its node: the loss is that of the node's batch, gradients are of the columns
        here. The processes of the node agree in passing on whether to stop."""
        batch, scale = self.to_device(batch), float(self.scales[row])
        if self.insides is not None:
            self.insides.took(self.fleet.ranks[row], batch_examples(batch))
        passes = self._passes(batch)
        self.split.refresh()
        total = torch.zeros((), dtype=torch.float64)
        for parts in passes:
            total += self.split.compute(self.loss, parts, scale, self.autocast) / scale
        for p, grad in zip(self.parameters, self.split.gradients(), strict=True):
            p.grad = grad
        if self.scaled:
            self._unscale(row)
        own = torch.stack([total, *map(_flag, (self.overflowed, self._asked()))])
        told = self.inside.sum(torch.cat([own, as_told(self.within)]))
        refuse_ways(told[3:], self.inside.parts, self.mesh)
        self.overflowed, self._stops = bool(told[1]), bool(told[2])
        return told[0].to(self.device, torch.get_default_dtype())

    def _passes(self, batch: Any) -> list[list[Part]]:
        """Return the micro-batches of this process's share of a batch, as many as any process of the node has.

        One without an example computes with another one's, which does not count. A pipeline takes a pass for each
        `micro_batch_size` examples of the node, any other split one for all.
        """
        total = batch_examples(batch)
        whole = min(total, self.micro_batch_size or total)
        if self.mesh.depth == 1:
            shares = self.mesh.shares(total)
            count = -(-max(shares) // self.mesh.at_once(whole))
            return [
                self.weights.parts(self.ask, batch, _bounds(sum(shares[: self.shard]), even(shares[self.shard], count)))
            ]
        found = []
        for start in range(0, total, whole):
            shares = self.mesh.shares(min(whole, total - start))
            sizes = self.mesh.micro_batches(shares[self.shard])
            first = start + sum(shares[: self.shard])
            sizes = (*sizes, *[0] * (self.mesh.depth - len(sizes)))
            found.append(self.weights.parts(self.ask, batch, _bounds(first, sizes)))
        return found

    @contextlib.contextmanager
    def evaluating(self, vectors: Sequence[Tensor], buffers: dict[str, Tensor]) -> Iterator[None]:
        with super().evaluating(vectors, buffers), self._gathered():
            yield

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[None]:
        """Be in here where the model is evaluated; once in it, it is as it is."""
        if self._is_gathered or not self.is_split:
            yield
            return
        self._is_gathered = True
        try:
            with self.split.gathered():
                yield
        finally:
            self._is_gathered = False

    def ask(self, batch: Any) -> float:
        with self._gathered():
            return super().ask(batch)

    def own_shares(self, batch: Any) -> list[tuple[Any, float]]:
        part, parts = self.split.evaluated
        total = batch_examples(batch)
        shares = even(total, parts)
        ((found, weight),) = self.weights.parts(self.ask, batch, _bounds(sum(shares[:part]), shares[part : part + 1]))
        return [(found, weight * total)]


def _bounds(start: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, stop) of pieces of these sizes, one after the other."""
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=start)))


def _flag(value: bool) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)
