"""Gather the whole model on each device of a node once per step; rows and optimizer state stay divided.

Before a step's gradient, the devices on the axis "shard" gather each other's parts of the parameters and compute with
the whole parameters. Afterward each device receives summed gradients, for its own part (Rajbhandari et al.,
arXiv:1910.02054). Only pipeline stages (`mesh.staged`) use zero=3 here: they free the gathered memory after the step.
The devices on the axis "tensor" compute layers together (`mesh.tensors`). If several processes need the same elements,
one process stores these elements in its row and sends them to the others before the step (`mesh.places`).

With k shards and P parameters of b bytes, a process sends (k-1)/k b P bytes per step to gather parameters. It sends the
same number of bytes for gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from exogym.errors import ModelError
from exogym.mesh.places import box_shape
from exogym.mesh.sending import gather, hand_on, scatter_sums
from exogym.mesh.split import Context, Loss, Part, Placed, passes
from exogym.mesh.torch_private import hold_local, take_gradient

Numbers = Sequence[Sequence[int]]  # numbers of parameters, for each process on an axis


class Replicated(Placed):
    """A `Split` whose processes gather their parameters once for each gradient.

    Attributes:
        handles: the parameters of the split model, in the row's order. A parameter's number is its index in this list.
        kinds: ranges of parameter numbers, one for each dtype.
        here: numbers of the parameters with which this process computes.
        first: for each parameter, the stage whose row holds it.
    """

    @property
    def evaluated(self) -> tuple[int, int]:
        return self.part // self.mesh.tensor, self.size // self.mesh.tensor

    # The model's parameters

    def _divide(self, named: dict[str, nn.Parameter], places: dict[tuple[nn.Module, str], str]) -> None:
        handles: dict[str, nn.Parameter] = {}
        for (module, attribute), name in places.items():
            if handles.setdefault(name, getattr(module, attribute)) is not getattr(module, attribute):
                raise ModelError(
                    f"parameter {name!r} is in several modules, but {self.mesh} splits only some of them: give each "
                    "module its own parameter, or do not split these layers, with NodeMesh(parallelize=)"
                )
        if any(isinstance(module, FSDPModule) for module in self.model.modules()):
            raise ModelError(
                f"parallelize= has called fully_shard, but with zero={self.mesh.zero} and {self.mesh} ExoGym itself "
                "gathers the shards: let parallelize= only split layers, over the axis 'tensor'"
            )
        self.handles = [handles[slot.name] for layout in self._wholes for slot in layout]
        self._lay_out()
        for p, home in self._homes:
            p.data = home.new_empty(0)
        self.lose(range(len(self.handles)))

    def _lay_out(self) -> None:
        """Note for each parameter which part is in this process, and which processes send it."""
        whole, at, places = [slot for layout in self._wholes for slot in layout], self.at, self._places
        kinds = [layout.dtype for layout in self._wholes for _ in layout]
        self.first = [places.stages(slot.name)[0] for slot in whole]
        self._own = [places.owns(slot.name, self.part) for slot in whole]
        self._slots = [slot for layout in self.parts[self.part] for slot in layout]
        self._shapes = [box_shape(places.computed(slot, self.part)) for slot in whole]
        self.here = [k for k, slot in enumerate(whole) if at["stages"] in places.stages(slot.name)]
        ends = list(itertools.accumulate((len(layout.slots) for layout in self._wholes), initial=0))
        self.kinds = [range(*pair) for pair in itertools.pairwise(ends)]  # one range per dtype
        self._empty = [torch.empty(0, dtype=kind, device=self.device) for kind in kinds]
        shapes = [box_shape(places.held(slot, self.part)) for slot in whole]
        self._mirrors = {k: self._empty[k].new_zeros(shapes[k]) for k in self.here if not self._own[k]}
        self._memory: dict[int, Tensor] = {}
        self._gives = {name: [list[int]() for _ in range(size)] for name, size in self.mesh.axes.items()}
        self._takes = {name: [list[int]() for _ in range(size)] for name, size in self.mesh.axes.items()}
        for k in self.here:
            (first, *others), dealt = places.stages(whole[k].name), places.dealt(whole[k].name)
            if dealt in (None, at["tensor"]) and others:  # first across stages, then over "tensor"
                if at["stages"] == first:
                    for other in others:
                        self._gives["stages"][other].append(k)
                else:
                    self._takes["stages"][first].append(k)
            if dealt == at["tensor"]:
                for other in range(self.mesh.tensor):
                    self._gives["tensor"][other] += [k] if other != dealt else []
            elif dealt is not None:
                self._takes["tensor"][dealt].append(k)

    def lose(self, these: Iterable[int]) -> None:
        """Free the memory of the parameters whose numbers are in `these`, and keep their shapes."""
        for k in these:
            self._memory.pop(k, None)
            hold_local(self.handles[k], self._empty[k].new_zeros(()).expand(self._shapes[k]))

    # Communication between processes

    def point(self, views: Sequence[Tensor]) -> None:
        self._pieces = {k: self._mirrors.get(k, views[k]) for k in self.here}
        if self.mesh.shard == 1:
            for k, piece in self._pieces.items():
                hold_local(self.handles[k], piece)

    @torch.no_grad()
    def refresh(self) -> None:
        for these in self.kinds:
            for name in ("stages", "tensor"):
                for k, told in self.hand_on(name, self._pieces, self._gives[name], self._takes[name], these):
                    self._pieces[k].copy_(told)
            here = [k for k in these if k in self._pieces] if self.mesh.shard > 1 else []
            for k in here:
                if k not in self._memory:
                    self._memory[k] = self._empty[k].new_empty(self._shapes[k])
                    hold_local(self.handles[k], self._memory[k])
            if here:
                gather(self.along["shard"], [self._pieces[k] for k in here], [self._memory[k] for k in here])

    def hand_on(
        self, axis: str, tensors: dict[int, Tensor], gives: Numbers, takes: Numbers, these: range
    ) -> Iterator[tuple[int, Tensor]]:
        """Exchange parameters with the other processes on a mesh axis; yield (number, tensor) for each received one.

        Args:
            tensors: this process's tensors, by the parameter's number.
            gives, takes: for each process on the axis, the numbers of the parameters to send to it and to receive from
                it.
            these: exchange only parameters with these numbers.
        """
        few = [[[k for k in some if k in these and k in tensors] for some in way] for way in (gives, takes)]
        return hand_on(self.along[axis], tensors, *few)

    def compute(self, loss: Loss, parts: Sequence[Part], scale: float, context: Context) -> Tensor:
        return passes(loss, parts, scale, context) / self.mesh.tensor

    def gradients(self) -> list[Tensor | None]:
        given = [take_gradient(handle) for handle in self.handles]
        told = torch.tensor([[g is not None, g is not None and k not in self._pieces] for k, g in enumerate(given)])
        counts, strange = self.inside.sum(told.long()).unbind(1)
        if bool(strange.any()):
            name = [slot.name for layout in self._wholes for slot in layout][int(strange.argmax())]
            raise ModelError(
                f"parameter {name!r} is used outside its own stage: use a parameter only in its own module. "
                "To penalize parameters, use the optimizer's weight_decay"
            )
        has_grad = (counts > 0).tolist()
        found: list[Tensor | None] = [None] * len(given)
        for these in self.kinds:
            here, grads = [k for k in these if k in self._pieces and has_grad[k]], list[Tensor]()
            for k in here:
                grad = given[k]
                grads.append(self._empty[k].new_zeros(self._shapes[k]) if grad is None else grad)
            if self.mesh.shard > 1 and grads:
                grads = scatter_sums(self.along["shard"], grads)
            pieces = dict(zip(here, grads, strict=True))
            for k, told in self.hand_on("stages", pieces, self._takes["stages"], self._gives["stages"], these):
                pieces[k] += told  # towards the owner
            for k in these:
                if has_grad[k]:
                    found[k] = pieces[k] if self._own[k] else self._empty[k].new_empty(self._slots[k].shape)
        return found
