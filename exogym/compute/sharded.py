"""`fully_shard` inside a node: of every parameter each process holds some of the first axis, and gathers the rest.

Each block of the model is gathered before its forward pass and before its backward pass, and let go of afterwards;
gradients are summed so that each process gets those of its own columns (ZeRO-3, Rajbhandari et al., arXiv:1910.02054;
torch's FSDP2). A process's shards are its columns of the row themselves, no copies, so what training or the strategy
does to the row the model sees. Sent by a process per step, with k processes, P parameters of b bytes, of which P_blocks
are in blocks that are gathered twice: (k-1)/k b (P + P_blocks) gathering and (k-1)/k b P of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from exogym.base.torch_private import Plain, hold_shard, sharded_parameters, take_shard_gradient
from exogym.communicator import Inside
from exogym.errors import ModelError
from exogym.fleet.layout import Box, Layout, layouts_of
from exogym.mesh.splits import blocks_of


class Sharded:
    """A model whose trainable parameters are sharded over the processes of a node.

    Args:
        model: whole, as it is until `split`.
        inside: the processes of the node.
        device: of the model.

    Attributes:
        parts: the layouts of each process, one per block of the fleet.
        shards: how many processes have a part of the batch each; gradients are the mean over these.
    """

    def __init__(self, model: nn.Module, inside: Inside, device: torch.device):
        self.model, self.inside, self.device = model, inside, device
        self.group, self.part, self.size = inside.group, inside.part, inside.parts
        self.shards = self.size
        whole = layouts_of(model)
        for layout in whole:
            for slot in layout:
                if not slot.shape:
                    raise ModelError(
                        f"parameter {slot.name!r} is one number without an axis, which cannot be sharded: give it the "
                        "shape (1,)"
                    )
        self.parts = [[self._part(layout, k) for layout in whole] for k in range(self.size)]

    def _part(self, layout: Layout, part: int) -> Layout:
        found = layout.part({slot.name: self._box(slot.shape, part) for slot in layout})
        largest = {slot.name: slot.numel for slot in layout.part({s.name: self._box(s.shape, 0) for s in layout})}
        room = max(0, *(slot.start + largest[slot.name] - found.numel for slot in found))
        return replace(found, room=room)  # shards are gathered in the size of the largest

    def _box(self, shape: torch.Size, part: int) -> Box:
        each = -(-shape[0] // self.size)
        first = (min(part * each, shape[0]), min((part + 1) * each, shape[0]))
        return (first, *((0, n) for n in shape[1:]))

    def split(self) -> None:
        """Shard the model; it holds no numbers before `point`."""
        self._plain = Plain(self.model)
        named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        frozen = {p for p in self.model.parameters() if not p.requires_grad}
        names = {
            (module, attribute): name
            for path, module in self.model.named_modules(remove_duplicate=False)
            for attribute, p in module.named_parameters(recurse=False)
            for name, other in named.items()
            if p is other
        }
        assert isinstance(self.group, dist.ProcessGroup)
        mesh = DeviceMesh.from_group(self.group, self.device.type, mesh_dim_names=("shard",))
        try:
            for block in blocks_of(self.model).values():
                fully_shard(block, mesh=mesh, ignored_params=frozen)
            fully_shard(self.model, mesh=mesh, ignored_params=frozen)
        except (NotImplementedError, AssertionError, ValueError, RuntimeError) as error:
            self._plain.restore()
            raise ModelError(f"torch cannot shard this model: {error}") from error
        handles = {names[module, attribute]: x for module, attribute, x in sharded_parameters(self.model)}
        self._handles = [handles[slot.name] for layout in self.parts[self.part] for slot in layout]
        self._modules = [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    def plain(self) -> None:
        """Undo `split`: the modules have the parameters that they had, with what these hold now."""
        self._plain.restore()

    def point(self, views: Sequence[Tensor]) -> None:
        """Let the model compute with `views`, one for each parameter, of the columns here."""
        for module in self._modules:
            module.reshard()
        for handle, view in zip(self._handles, views, strict=True):
            hold_shard(handle, view)

    def collect(self, last: bool) -> None:
        """Say before a backward pass whether its gradients, and those before it, are to be summed over processes."""
        self._modules[0].set_is_last_backward(last)
        self._modules[0].set_requires_gradient_sync(last)

    def gradients(self) -> list[Tensor | None]:
        """Return the mean over processes of what each has, of the columns here, one for each parameter."""
        return [take_shard_gradient(handle) for handle in self._handles]
