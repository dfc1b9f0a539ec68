"""Split a model differently from its row, so that nodes with different splits can communicate.

Processes of different nodes communicate if they hold the same columns, so all nodes cut their rows into K parts, where
K is the greatest common divisor of the nodes' numbers of processes. A node of k processes stores its row k/K times, and
splits its model over all k processes in separate memory. Before each gradient, a process copies its part of the model
from the row; afterward, it receives the gradient of its part of the row.

With P parameters of b bytes, a process sends per step about b P / k bytes of parameters and b P / K bytes of gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from exogym.communicator import Columns
from exogym.core.fleet.dealing import Route
from exogym.fleet import Layout, layouts_of, row_matrix
from exogym.mesh.places import even_part
from exogym.mesh.split import Context, Loss, Part, Split


class Recut(Split):
    """A `Split` with the model split as in `split`, and the row cut over the K processes `inside` of a copy."""

    def __init__(self, split: Split, inside: Columns):
        super().__init__(split.model, split.mesh, split.inside, split.device)
        self.within, self._held = split, split.parts[self.part]
        whole = layouts_of(split.model)
        self.parts = [[even_part(layout, k, inside.parts) for layout in whole] for k in range(inside.parts)]
        self._own = self.parts[inside.part]
        first = self.part - inside.part  # the first process that holds this copy of the row
        self._in, self._out = list[Route](), list[Route]()
        for b in range(len(whole)):
            cut, held = [layouts[b] for layouts in self.parts], [layouts[b] for layouts in split.parts]
            self._in.append(Route(cut, held[first : first + inside.parts], inside))
            self._out.append(Route(held, [cut[k % inside.parts] for k in range(self.size)], split.inside))
        self._rooms = [row_matrix(1, x.numel, x.dtype, self.device, x.room).zero_() for x in self._held]

    @property
    def evaluated(self) -> tuple[int, int]:
        return self.within.evaluated

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        self._take()
        with self.within.gathered():
            yield

    def keepers(self, buffer: str) -> range:
        return self.within.keepers(buffer)

    def split(self) -> None:
        self.within.split()

    def let_go(self) -> None:
        self.within.let_go()

    def plain(self) -> None:
        self.within.plain()

    def point(self, views: Sequence[Tensor]) -> None:
        self._views = list(views)
        rooms = zip(self._held, self._rooms, strict=True)
        self.within.point([slot.of(room[0]) for layout, room in rooms for slot in layout])

    def refresh(self) -> None:
        self._take()
        self.within.refresh()

    def compute(self, loss: Loss, parts: Sequence[Part], scale: float, context: Context) -> Tensor:
        return self.within.compute(loss, parts, scale, context)

    def gradients(self) -> list[Tensor | None]:
        grads, found = self.within.gradients(), list[Tensor | None]()
        own = [[torch.zeros(slot.shape, dtype=x.dtype, device=self.device) for slot in x] for x in self._held]
        for layout, zeros, route, mine in zip(self._held, own, self._out, self._own, strict=True):
            these, grads = grads[: len(zeros)], grads[len(zeros) :]
            given = [zero if grad is None else grad for grad, zero in zip(these, zeros, strict=True)]
            row = route(_one_row(given, layout))[0]
            found += [None if grad is None else slot.of(row) for grad, slot in zip(these, mine, strict=True)]
        return found

    @torch.no_grad()
    def _take(self) -> None:
        """Copy this process's part of the model from the row."""
        views = self._views
        for layout, route, room in zip(self._own, self._in, self._rooms, strict=True):
            these, views = views[: len(layout.slots)], views[len(layout.slots) :]
            room.copy_(route(_one_row(these, layout)))


def _one_row(pieces: Sequence[Tensor], layout: Layout) -> Tensor:
    """Return a layout's pieces side by side, (1, P)."""
    return torch.cat([x.detach().reshape(-1) for x in pieces]).view(1, layout.numel)
