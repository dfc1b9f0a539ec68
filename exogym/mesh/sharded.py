"""Shard a model over a node's devices: each device holds a part of every parameter.

The axis "shard" uses torch's `fully_shard` (ZeRO-3, Rajbhandari et al., arXiv:1910.02054). The processes gather the
parameters of a block of layers before its forward pass and again before its backward pass, and free them after each.
Each process receives the summed gradients for its own columns. On the axis "tensor" the devices compute each layer
together (`mesh.tensors`).

The model's parameters in a process are views of its row, so the model sees every change of the row. If several
processes on the axis "tensor" need the same elements (norms, embeddings), one process stores them in its row, and sends
them to the others before the step.

In each step a process sends (k-1)/k b (P + P_blocks) bytes to gather parameters, and (k-1)/k b P bytes of gradients,
where k is the number of shards, P the number of parameters, b the bytes per parameter, and P_blocks the number of
parameters inside blocks of layers, which are gathered twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from exogym.errors import ModelError
from exogym.fleet import Layout
from exogym.mesh.places import box_shape
from exogym.mesh.sending import hand_on
from exogym.mesh.split import Context, Loss, Part, Placed
from exogym.mesh.split import passes as add_gradients
from exogym.mesh.splits import blocks_of
from exogym.mesh.tensors import torchs_refusals
from exogym.mesh.torch_private import (
    hold_local,
    hold_shard,
    sharded_parameters,
    take_gradient,
)

WAYS = 999_983  # a prime; a double holds its square exactly


class Sharded(Placed):
    """A `Split` that divides each parameter over the node's processes."""

    def _layout(self, whole: Layout, part: int) -> Layout:
        found = super()._layout(whole, part)
        first = {slot.name: box_shape(self._places.held(slot, part % self.mesh.tensor)).numel() for slot in whole}
        room = max(0, *(slot.start + first[slot.name] - found.numel for slot in found))
        return replace(found, room=room)  # torch gathers all shards with the size of the first, the largest

    def walk(self, loss: Loss, parts: Sequence[Part]) -> None:
        self.way = 0
        if self.mesh.shard == 1 or self.mesh.parallelize is not None:  # a user's `parallelize` gathers in its own way
            return
        with contextlib.ExitStack() as undo:
            for k, block in enumerate(blocks_of(self.model).values(), start=2):
                undo.callback(block.register_forward_pre_hook(lambda module, inputs, k=k: self._go(k)).remove)
            add_gradients(loss, parts, 1.0, contextlib.nullcontext)
        for p in self.model.parameters():
            self._go(p.grad is not None)
            p.grad = None

    def _divide(self, named: dict[str, nn.Parameter], places: dict[tuple[nn.Module, str], str]) -> None:
        if self.mesh.shard > 1 and not isinstance(self.model, FSDPModule):
            blocks, frozen = blocks_of(self.model), {p for p in self.model.parameters() if not p.requires_grad}
            _check_types(named, blocks)
            with torchs_refusals(self.mesh):
                for block in [*blocks.values(), self.model]:
                    fully_shard(block, mesh=self.devices["shard"], ignored_params=frozen)
        self._slots = [slot for layout in self.parts[self.part] for slot in layout]
        handles = {places[module, attribute]: x for module, attribute, x in sharded_parameters(self.model)}
        now = {name: getattr(module, attribute) for (module, attribute), name in places.items()}
        self._handles = [handles.get(slot.name, now[slot.name]) for slot in self._slots]
        self._modules = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for k, module in enumerate(self._modules, start=2):
            module.register_forward_pre_hook(lambda module, inputs, k=k: self._go(k))
        self._mirrors = {}  # this process's copies of elements in another process's row
        for whole in (slot for layout in self._wholes for slot in layout):
            if not self._places.owns(whole.name, self.part):
                shape = box_shape(self._places.held(whole, self.part))
                self._mirrors[whole.name] = torch.zeros(shape, dtype=named[whole.name].dtype, device=self.device)

    def let_go(self) -> None:
        super().let_go()
        for p, home in self._homes:
            p.data = home

    def point(self, views: Sequence[Tensor]) -> None:
        for module in self._modules:
            module.reshard()
        self._held = [self._mirrors.get(slot.name, view) for slot, view in zip(self._slots, views, strict=True)]
        for handle, held in zip(self._handles, self._held, strict=True):
            if isinstance(handle, nn.Parameter):
                hold_local(handle, held)
            else:
                hold_shard(handle, held)

    def refresh(self) -> None:
        self.way = 0
        if self.mesh.tensor == 1:
            return
        owners, mine, held = [self._places.dealt(slot.name) for slot in self._slots], self.at["tensor"], self._held
        for dtype in dict.fromkeys(x.dtype for x in held):
            dealt = [k for k, owner in enumerate(owners) if owner is not None and held[k].dtype == dtype]
            own = [k for k in dealt if owners[k] == mine]
            gives = [own if other != mine else [] for other in range(self.mesh.tensor)]
            takes = [[k for k in dealt if owners[k] == other != mine] for other in range(self.mesh.tensor)]
            for k, told in hand_on(self.along["tensor"], dict(enumerate(held)), gives, takes):
                held[k].copy_(told)

    def compute(self, loss: Loss, parts: Sequence[Part], scale: float, context: Context) -> Tensor:
        shards = self.mesh.shard  # torch averages over them
        return add_gradients(loss, parts, scale * shards, context, self._collect) / (shards * self.mesh.tensor)

    def _go(self, where: int) -> None:
        self.way = (31 * self.way + where) % WAYS

    def _collect(self, last: bool) -> None:
        if self._modules:
            self._modules[0].set_is_last_backward(last)
            self._modules[0].set_requires_gradient_sync(last)

    def gradients(self) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for slot, handle in zip(self._slots, self._handles, strict=True):
            grad = take_gradient(handle if isinstance(handle, nn.Parameter) else handle.sharded_param)
            self._go(grad is not None)
            mine = slot.name not in self._mirrors
            found.append(grad if grad is None or mine else grad.new_empty(slot.shape))
        return found


def _check_types(named: Mapping[str, nn.Parameter], blocks: Iterable[str]) -> None:
    """Raise ModelError if a block has several dtypes. A block is gathered as one tensor."""
    kinds: dict[str, tuple[str, torch.dtype]] = {}
    for name, p in named.items():
        block = next((block for block in blocks if name.startswith(f"{block}.")), "")
        other, kind = kinds.setdefault(block, (name, p.dtype))
        if kind != p.dtype:
            raise ModelError(
                f"{other!r} is {kind} and {name!r} is {p.dtype}, but with shard= a block needs one dtype: convert one "
                "parameter, or pass zero=2, where each device has the whole model"
            )
