"""Compute the place of each named parameter in a row of the fleet matrix.

Each dtype has one layout: a row of P numbers holds one node's trainable parameters one after the other, in the order of
`named_parameters()`. Tied parameters share one column range. Frozen parameters have no columns, because all nodes share
them. If a node has several processes, each process has a part of the layout: a box of every parameter. A box is a range
on each axis of the parameter. The box's columns keep their order in the whole row.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from exogym.core.base.torch_private import in_this_process
from exogym.errors import ModelError

Box = tuple[tuple[int, int], ...]  # (start, stop) on each axis of a parameter


@dataclass(frozen=True)
class Slot:
    """The location of one parameter in a row: columns `start` to `stop`, viewed as a tensor of shape `shape`.

    Attributes:
        box: the elements of the parameter in this row, as a range (start, stop) for each axis, or None for all
            elements.
    """

    name: str
    shape: torch.Size
    start: int
    numel: int
    box: Box | None = None

    @property
    def stop(self) -> int:
        return self.start + self.numel

    def of(self, rows: Tensor) -> Tensor:
        """Return this parameter's columns in `rows` (..., P), as a view (..., *shape)."""
        return rows[..., self.start : self.stop].unflatten(-1, self.shape) if self.shape else rows[..., self.start]

    def cut(self, x: Tensor) -> Tensor:
        """Return the elements of the whole parameter `x` that are in this row."""
        return x if self.box is None else x[tuple(slice(*ends) for ends in self.box)]


@dataclass(frozen=True)
class Layout:
    """The columns of one block: all trainable parameters of one dtype, or a part of them.

    Attributes:
        whole: the layout of the whole row if this layout is one process's part, otherwise None.
        room: number of elements after a row's end that torch may read.

    >>> layout, = layouts_of(nn.Linear(3, 2))
    >>> layout.numel, [(s.name, s.start, tuple(s.shape)) for s in layout.slots]
    (8, [('weight', 0, (2, 3)), ('bias', 6, (2,))])
    """

    dtype: torch.dtype
    slots: tuple[Slot, ...]
    whole: Layout | None = None
    room: int = 0

    @property
    def numel(self) -> int:
        return self.slots[-1].stop if self.slots else 0

    @property
    def total(self) -> int:
        """The number of columns of the whole row, P."""
        return self.numel if self.whole is None else self.whole.numel

    @functools.cached_property
    def columns(self) -> Tensor:
        """The columns of the whole row that this part has, (numel,), in ascending order."""
        if self.whole is None:
            return torch.arange(self.numel)
        every, places = torch.arange(self.whole.numel), {slot.name: slot for slot in self.whole}
        found = [slot.cut(places[slot.name].of(every)).reshape(-1) for slot in self]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)

    def here(self, indices: Tensor) -> Tensor:
        """Return the positions in this part of columns of the whole row, in ascending order.

        `indices` are the columns' numbers in the whole row, ascending. Columns that this part lacks are ignored.
        """
        if self.whole is None:
            return indices
        wanted = torch.zeros(self.total, dtype=torch.bool)
        wanted[indices.cpu()] = True
        return wanted[self.columns].nonzero().flatten().to(indices.device)

    def part(self, boxes: Mapping[str, Box]) -> Layout:
        """Return the layout of a part that has only the elements in `boxes`, {parameter's name: box}.

        A box has a range (start, stop) for each axis of the parameter.

        >>> layout, = layouts_of(nn.Linear(3, 2))
        >>> half = layout.part({"weight": ((1, 2), (0, 3)), "bias": ((1, 2),)})
        >>> half.numel, half.total, half.columns.tolist()
        (4, 8, [3, 4, 5, 7])
        """
        slots: list[Slot] = []
        for slot in self:
            if slot.name in boxes:
                shape = torch.Size(stop - start for start, stop in boxes[slot.name])
                start = slots[-1].stop if slots else 0
                slots.append(Slot(slot.name, shape, start, shape.numel(), boxes[slot.name]))
        return Layout(self.dtype, tuple(slots), self)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)


def layouts_of(module: nn.Module) -> list[Layout]:
    """Return the layouts of the module's trainable parameters, one per dtype, in order of appearance.

    Raises:
        ModelError: no parameter is trainable, or a trainable parameter cannot be stored in a row, because it is
            sparse, not floating point, not initialized, or partly overlaps another parameter in memory.
    """
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trainable:
        raise ModelError(
            "the model has no trainable parameter (none with requires_grad=True), so there is nothing to train"
        )
    _refuse_unpointable(trainable)
    slots: dict[torch.dtype, list[Slot]] = {}
    for name, p in trainable.items():
        mine = slots.setdefault(p.dtype, [])
        start = mine[-1].stop if mine else 0
        mine.append(Slot(name, p.shape, start, p.numel()))
    return [Layout(dtype, tuple(s)) for dtype, s in slots.items()]


EMBEDDINGS = re.compile(r"embed[^.]*(\.[^.]*)?$", re.IGNORECASE)  # in the name of a parameter or its module
HEADS = ("head", "lm_head", "classifier", "score")


def hidden_matrices(module: nn.Module) -> frozenset[str]:
    """Return the names of the trainable parameters that map one hidden vector to another.

    These are the parameters with two dimensions, both over 1, except embeddings and the head. A parameter counts as an
    embedding by its module's class or by its name. So a tied head counts as an embedding, too. If the model has the
    method `get_output_embeddings()`, the head is the module that this method returns. Otherwise the head is every layer
    called "head", "lm_head", "classifier" or "score". Without such layers it is the last `nn.Linear`.

    >>> sorted(hidden_matrices(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))))
    ['1.weight']
    """
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    owners = [
        (name, owner) for name, owner in module.named_modules() if next(owner.parameters(False), None) is not None
    ]
    others = {id(p) for n, p in module.named_parameters(remove_duplicate=False) if EMBEDDINGS.search(n)}
    others |= {id(p) for _, o in owners if "embedding" in type(o).__name__.lower() for p in o.parameters(False)}
    found = [f() for m in module.modules() if callable(f := getattr(m, "get_output_embeddings", None))]
    heads: list[nn.Module] = [head for head in found if isinstance(head, nn.Module)]
    heads = heads or [owner for name, owner in owners if name.rpartition(".")[2] in HEADS]
    heads = heads or [owner for _, owner in owners if isinstance(owner, nn.Linear)][-1:]  # type: ignore[assignment]
    others |= {id(p) for head in heads for p in head.parameters()}
    return frozenset(n for n, p in parameters.items() if p.ndim == 2 and min(p.shape) > 1 and id(p) not in others)


def _refuse_unpointable(parameters: dict[str, nn.Parameter]) -> None:
    extents: list[tuple[int, int, str]] = []
    for name, p in parameters.items():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ModelError(f"parameter {name!r} is not initialized: run the lazy model on one batch first")
        if p.is_meta:
            raise ModelError(f"parameter {name!r} is on the meta device and has no values: materialize the model first")
        if p.layout != torch.strided or p.is_quantized or not p.is_floating_point():
            raise ModelError(
                f"parameter {name!r} ({p.dtype}, {p.layout}) is not a dense floating-point tensor and cannot be a row; "
                "freeze it (requires_grad=False) or use another type"
            )
        if p.numel() == 0:
            raise ModelError(f"parameter {name!r} has no elements: remove it or freeze it (requires_grad=False)")
        here = in_this_process(p)
        extents.append((here.data_ptr(), here.data_ptr() + here.numel() * here.element_size(), name))
    extents.sort()
    for (_, end, first), (start, _, second) in itertools.pairwise(extents):
        if start < end:
            raise ModelError(
                f"parameters {first!r} and {second!r} overlap in memory but are not the same parameter. In a row "
                "they would not overlap: tie them as one nn.Parameter, or clone one of them"
            )
