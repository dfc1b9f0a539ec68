"""Point the parameters of the user's one module at one row after another.

The module's parameters stay the same Python objects, so closures, hooks and optimizers that hold them still work. Only
their `.data` changes: it becomes a view of a row. After a stretch `check` looks for changes that the user's code made:
a buffer that was re-assigned is copied into the row, and a parameter that was replaced or moved is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from exogym.core.base.torch_private import own_buffers, own_parameters
from exogym.core.fleet import Fleet
from exogym.errors import ModelError

OWN = "own_buffers"
MAX_CACHED_VIEWS = 50_000


class Pointer:
    """Point a module's parameters, and the buffers that training changes, at a fleet's rows.

    Args:
        model: the user's module, trained in place.
        fleet: the fleet with the rows. The constructor makes its `buffers`.
        changing: names of the buffers that a training step changes. Each row has its own values of these buffers.

    Attributes:
        names, parameters: names and tensors of the trainable parameters in fleet order, block after block.
        at: the tensors that `parameters` now point at.
        homes: the tensors that `parameters` pointed at in the beginning.
        owners: (parameter, module, attribute) for each parameter, to check that training does not replace it.
    """

    def __init__(self, model: nn.Module, fleet: Fleet, changing: Sequence[str]):
        named = dict(model.named_parameters())
        self.fleet = fleet
        self.names = [slot.name for block in fleet.blocks for slot in block.layout]
        self.parameters = [named[name] for name in self.names]
        self.homes = [p.data for p in self.parameters]
        self.owners = [(p, *owner_of(model, name)) for name, p in named.items()]
        self.add_buffers(model, changing)
        self._views: dict[int, list[Tensor]] = {}
        self.at: Sequence[Tensor] = self.homes

    def add_buffers(self, model: nn.Module, changing: Sequence[str]) -> None:
        """Give each row its own values of the buffers `changing`, which begin as the module's.

        Raise ModelError if `own_buffers` names no buffer, or the node's processes would have to share such a buffer.
        """
        kept = kept_by_nodes(model)
        if kept and self.fleet.comm.wire.columns.parts > 1:
            raise ModelError(
                f"{OWN} ({', '.join(sorted(kept))}) with nodes of several processes, which see different examples and "
                "average their buffers: leave node= out, or keep no state between batches"
            )
        self._buffer_owners = {name: owner_of(model, name) for name in changing}
        buffers = dict(model.named_buffers())
        self._buffer_homes = {name: buffers[name] for name in changing}
        self._buffers_at_first = {name: buffers[name].clone() for name in changing}
        for name in changing:
            rows = buffers[name].detach()[None].repeat(len(self.fleet), *[1] * buffers[name].dim())
            self.fleet.buffers[name] = rows
        self.fleet.keep_own(name for name in changing if name in kept)

    def views(self, row: int) -> list[Tensor]:
        """Return views of the row's parameters, in fleet order."""
        found = self._views.get(row)
        if found is None:
            found = [slot.of(block.params[row]) for block in self.fleet.blocks for slot in block.layout]
            if len(self._views) * len(found) < MAX_CACHED_VIEWS:
                self._views[row] = found
        return found

    def point(self, row: int) -> None:
        """Point the module's parameters, and the buffers that training changes, at `row`."""
        self._set(self.views(row), {name: rows[row] for name, rows in self.fleet.buffers.items()})

    def point_at(self, vectors: Sequence[Tensor], buffers: dict[str, Tensor]) -> None:
        """Point the module at parameters in `vectors`, one vector (P,) per block, and at `buffers`."""
        views = [slot.of(v) for block, v in zip(self.fleet.blocks, vectors, strict=True) for slot in block.layout]
        self._set(views, buffers)

    def check(self, row: int) -> None:
        """Raise ModelError if training moved or replaced a parameter; save re-assigned buffers into `row`."""
        for p, owner, attribute in self.owners:
            if own_parameters(owner).get(attribute) is not p:
                raise ModelError(
                    f"training replaced parameter {attribute!r} of {type(owner).__name__} by another object; change "
                    "its values in place (under torch.no_grad()), so that they stay in the node's row"
                )
        for name, p, view in zip(self.names, self.parameters, self.at, strict=True):
            if p.data_ptr() != view.data_ptr():
                raise ModelError(
                    f"training moved parameter {name!r} to other memory (p.data = ...); change its values in place"
                )
        self.keep_buffers(row)

    def keep_buffers(self, row: int) -> None:
        """Copy the buffers that the module re-assigned into `row`. Raise ModelError if a shape has changed."""
        for name, (owner, attribute) in self._buffer_owners.items():
            current, home = own_buffers(owner)[attribute], self.fleet.buffers[name][row]
            if current is not None and current.shape != home.shape:
                raise ModelError(
                    f"training changed the shape of the buffer {name!r} from {tuple(home.shape)} to "
                    f"{tuple(current.shape)}: keep its first shape, for example with batches of equal size "
                    "(dataloader_kwargs={'drop_last': True})"
                )
            if current is not None and current.data_ptr() != home.data_ptr():
                home.copy_(current.detach())

    def set_home(self, vectors: Sequence[Tensor], buffers: dict[str, Tensor], together: bool = True) -> None:
        """Point the module at its original memory, with the values `vectors`, (P,) per block, and `buffers`.

        `together` says whether all processes make this call together.
        """
        self.point_at(vectors, buffers)
        with torch.no_grad():
            for home, view in zip(self.homes, self.at, strict=True):
                home.copy_(view)
        self.bring_buffers_home(buffers)
        self._set(self.homes, self._buffer_homes)

    def bring_buffers_home(self, buffers: dict[str, Tensor]) -> None:
        """Give the module its original buffer tensors, and copy the values of `buffers` into these tensors."""
        self.set_buffers(self._buffer_homes)
        with torch.no_grad():
            for name, home in self._buffer_homes.items():
                home.copy_(buffers[name])

    def go_home(self) -> None:
        """Point the module at its original memory, with the values from before the run."""
        with torch.no_grad():
            for name, home in self._buffer_homes.items():
                home.copy_(self._buffers_at_first[name])
        self._set(self.homes, self._buffer_homes)

    def _set(self, views: Sequence[Tensor], buffers: dict[str, Tensor]) -> None:
        for p, view in zip(self.parameters, views, strict=True):
            p.data = view
            p.grad = None
        self.set_buffers(buffers)
        self.at = views

    def set_buffers(self, buffers: dict[str, Tensor]) -> None:
        """Put the tensors in `buffers` into the module, in place of the buffers that training changes."""
        for name, (owner, attribute) in self._buffer_owners.items():
            own_buffers(owner)[attribute] = buffers[name]


def kept_by_nodes(model: nn.Module) -> set[str]:
    """Return the buffers in modules' `own_buffers`, which nodes neither average nor send, or raise ModelError."""
    named, there = set(), dict(model.named_buffers())
    for path, module in model.named_modules():
        keys = getattr(module, OWN, ())
        listed = isinstance(keys, list | tuple | set | frozenset)
        own = {f"{path}.{key}" if path else key for key in (keys if listed else ())}
        if not listed or not own <= there.keys():
            raise ModelError(
                f"{OWN} of {type(module).__name__} must be a tuple of names of its buffers "
                f"{[name for name, _ in module.named_buffers()]}, not {keys!r}"
            )
        named |= own
    return named


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that holds the parameter or buffer `name`, and the attribute's name in that submodule."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute
