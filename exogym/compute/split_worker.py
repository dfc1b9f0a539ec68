"""The worker of a process that is one of several devices of a node: it holds some columns of the node's rows."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from exogym.base.torch_private import own_parameters
from exogym.communicator import Inside
from exogym.compute.outputs import batch_examples
from exogym.compute.replicated import Replicated
from exogym.compute.split import as_told, refuse_ways
from exogym.compute.worker import Worker
from exogym.fleet import Fleet
from exogym.fleet.layout import Layout
from exogym.mesh import NodeMesh
from exogym.mesh.value import even

Part = tuple[Any, float]  # of a batch, and its share of it


class SplitWorker(Worker):
    """Computes with the other processes of the node; what it returns, and when it stops, is the same in all of them.

    Until `begin` the model is whole and nothing is split. From then on `parameters` are of the columns here, plain
    tensors, and inner optimizers step these; `set_home` makes the model whole again in the main process, and leaves the
    others' without numbers (on the meta device).
    """

    mesh: NodeMesh
    inside: Inside
    _asked: Callable[[], bool]

    def divide(self, mesh: NodeMesh, inside: Inside) -> list[list[Layout]]:
        """Compute as one of the devices of `mesh`; return the layouts of each of them, one per block of the fleet.

        Raises:
            ModelError: the model cannot be split so.
        """
        from exogym.compute.sharded import Sharded  # torch's FSDP takes a while to import
        from exogym.compute.staged import Staged

        kind: Any = Staged if mesh.depth > 1 else Sharded if mesh.zero == 3 else Replicated
        self.mesh, self.inside = mesh, inside
        self.split = kind(self.model, mesh, inside, self.device)
        self.shard = mesh.coordinates(inside.part)["shard"]
        self.stream = (self.shard,) if self.shard else ()
        self.is_split = self._stops = False
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
        from exogym.compute.probing import check_on, check_split

        batch, probe = self.to_device(batch), self.mesh.probe
        if probe is True:
            check_split(self.split, self.loss, batch, self._passes(batch), self.mesh)
        else:
            if isinstance(probe, nn.Module):
                check_on(probe, self.loss, batch, self._passes(batch), self.split, self.mesh)
            self.split.split()
        self.is_split, self._places, self._homes = True, [], []
        self.split.let_go()

    def check(self, row: int) -> None:
        self._keep_buffers(row)
        for name, rows in self.fleet.buffers.items():
            keeper, own = self.split.keeper_of(name), rows[row]
            if keeper is None and own.is_floating_point():  # each process has seen other examples
                rows[row] = self.inside.sum(own / self.inside.parts)
            else:
                own = own if own.is_floating_point() or own.is_complex() else own.long()
                rows[row] = self.inside.sum(own if self.inside.part == (keeper or 0) else torch.zeros_like(own))

    def set_home(self, vectors: Sequence[Tensor], buffers: dict[str, Tensor], together: bool = True) -> None:
        found = self.fleet.wholes(vectors) if together else ()
        is_main = self.fleet.comm.wire.is_main
        self.split.plain()
        self.is_split = False
        for p, whole in zip(self._originals, found, strict=False):
            if is_main:
                p.data = whole
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
        layouts = (block.layout.whole for block in self.fleet.blocks)
        shapes = [slot.shape for layout in layouts if layout is not None for slot in layout]
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
        self.split.refresh()
        total = torch.zeros((), dtype=torch.float64)
        for parts in self._passes(batch):
            total += self.split.compute(self.loss, parts, scale, self.autocast) / scale
        for p, grad in zip(self.parameters, self.split.gradients(), strict=True):
            p.grad = grad
        if self.scaled:
            self._unscale(row)
        own = torch.stack([total, *map(_flag, (self.overflowed, self._asked()))])
        told = self.inside.sum(torch.cat([own, as_told(self.split)]))
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
            return [self.weights.parts(batch, _bounds(sum(shares[: self.shard]), even(shares[self.shard], count)))]
        found = []
        for start in range(0, total, whole):
            sizes = self.mesh.micro_batches(min(whole, total - start))
            sizes = (*sizes, *[0] * (self.mesh.depth - len(sizes)))
            found.append(self.weights.parts(batch, _bounds(start, sizes)))
        return found

    def ask(self, batch: Any) -> float:
        with self.split.gathered() if self.is_split else contextlib.nullcontext():
            return super().ask(batch)

    @contextlib.contextmanager
    def evaluating(self, vectors: Sequence[Tensor], buffers: dict[str, Tensor]) -> Iterator[None]:
        with super().evaluating(vectors, buffers), self.split.gathered() if self.is_split else contextlib.nullcontext():
            yield

    def own_share(self, batch: Any) -> tuple[Any, float]:
        part, parts = self.split.evaluated
        total = batch_examples(batch)
        shares = even(total, parts)
        ((found, weight),) = self.weights.parts(batch, _bounds(sum(shares[:part]), shares[part : part + 1]))
        return found, weight * total


def _bounds(start: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (start, stop) of pieces of these sizes, one after the other."""
    ends = list(itertools.accumulate(sizes, initial=start))
    return list(itertools.pairwise(ends))


def _flag(value: bool) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)
