"""One copy of the user's module, pointed at one row after another.

The module's parameters keep their identity (closures, hooks and optimizers that hold them stay right); only
their data is set to views of a row. After a stretch the pointers are compared: a buffer the module
re-assigned is copied back, a parameter that moved is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from exogym.core.base.torch_private import own_buffers, own_parameters
from exogym.core.fleet import Fleet
from exogym.errors import ModelError

MAX_CACHED_VIEWS = 50_000


class Pointer:
    """Points a module's parameters and changing buffers at rows.

    Args:
        model: the user's, trained in place.
        fleet: the places it will be pointed at; its buffers are made here.
        changing: names of the buffers that a training step changes; these have rows.

    Attributes:
        names, parameters: the trainable parameters in fleet order, block after block.
        at: the views that these point at; homes: their own memory.
        places: (parameter, module, name there) of all of the module's, which is to keep them.
    """

    def __init__(self, model: nn.Module, fleet: Fleet, changing: Sequence[str]):
        named = dict(model.named_parameters())
        self.fleet = fleet
        self.names = [slot.name for block in fleet.blocks for slot in block.layout]
        self.parameters = [named[name] for name in self.names]
        self.homes = [p.data for p in self.parameters]
        self.places = [(p, *owner_of(model, name)) for name, p in named.items()]
        self._buffer_owners = {name: owner_of(model, name) for name in changing}
        buffers = dict(model.named_buffers())
        self._buffer_homes = {name: buffers[name] for name in changing}
        self._buffers_at_first = {name: buffers[name].clone() for name in changing}
        for name in changing:
            fleet.buffers[name] = buffers[name].detach()[None].repeat(len(fleet), *[1] * buffers[name].dim())
        self._views: dict[int, list[Tensor]] = {}
        self.at: Sequence[Tensor] = self.homes

    def views(self, row: int) -> list[Tensor]:
        """Return the parameters of `row` as views, in fleet order."""
        found = self._views.get(row)
        if found is None:
            found = [slot.of(block.params[row]) for block in self.fleet.blocks for slot in block.layout]
            if len(self._views) * len(found) < MAX_CACHED_VIEWS:
                self._views[row] = found
        return found

    def point(self, row: int) -> None:
        """Point the module's parameters and changing buffers at `row`."""
        self._set(self.views(row), {name: rows[row] for name, rows in self.fleet.buffers.items()})

    def point_at(self, vectors: Sequence[Tensor], buffers: dict[str, Tensor]) -> None:
        """Point the module at any parameter `vectors`, (P,) per block, and `buffers`."""
        views = [slot.of(v) for block, v in zip(self.fleet.blocks, vectors, strict=True) for slot in block.layout]
        self._set(views, buffers)

    def check(self, row: int) -> None:
        """Compare pointers after a stretch on `row`.

        Raises:
            ModelError: the module replaced or moved a parameter.
        """
        for p, owner, attribute in self.places:
            if own_parameters(owner).get(attribute) is not p:
                raise ModelError(
                    f"training replaced parameter {attribute!r} of {type(owner).__name__} by another object; change "
                    "it in place (under torch.no_grad()) so that the row keeps it"
                )
        for name, p, view in zip(self.names, self.parameters, self.at, strict=True):
            if p.data_ptr() != view.data_ptr():
                raise ModelError(
                    f"training moved parameter {name!r} to other memory (p.data = ...); change it in place"
                )
        self.keep_buffers(row)

    def keep_buffers(self, row: int) -> None:
        """Copy buffers back that the module has re-assigned."""
        for name, (owner, attribute) in self._buffer_owners.items():
            current, home = own_buffers(owner)[attribute], self.fleet.buffers[name][row]
            if current is not None and current.data_ptr() != home.data_ptr():
                home.copy_(current.detach())

    def set_home(self, vectors: Sequence[Tensor], buffers: dict[str, Tensor], together: bool = True) -> None:
        """Give the module its own memory again, holding `vectors` and `buffers`; `together`: all processes do so."""
        self.point_at(vectors, buffers)
        with torch.no_grad():
            for home, view in zip(self.homes, self.at, strict=True):
                home.copy_(view)
        self.bring_buffers_home(buffers)
        self._set(self.homes, self._buffer_homes)

    def bring_buffers_home(self, buffers: dict[str, Tensor]) -> None:
        """Give the module its own buffers again, holding `buffers`."""
        self.set_buffers(self._buffer_homes)
        with torch.no_grad():
            for name, home in self._buffer_homes.items():
                home.copy_(buffers[name])

    def go_home(self) -> None:
        """Give the module its own memory again, as it was when it was bound."""
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
        """Put `buffers` where the module has its own that change."""
        for name, (owner, attribute) in self._buffer_owners.items():
            own_buffers(owner)[attribute] = buffers[name]


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds a parameter or buffer, and its name there."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute
