"""What the value of `fit(node=)` can do for an engine: a node of several devices.

>>> from exogym.engine import several_devices
>>> kind: type[Nodes] = several_devices("fit")
>>> kind.__name__
'MeshNodes'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from exogym.core.communicator import Wire


class Nodes(Protocol):
    """Nodes of several devices: the value of `fit(node=)`, once it is checked.

    Attributes:
        sizes: each node's number of devices.
    """

    sizes: tuple[int, ...]

    def features(self) -> dict[str, str]:
        """Return the features for the table of refusals (`exogym.core.refusals`)."""

    def describe(self) -> Any:
        """Return what decides a run's result, as JSON."""

    def check(self, batch_size: int) -> None:
        """Raise ArgumentError if the devices cannot share a batch of `batch_size`."""

    def processes(self, world: int) -> int:
        """Return how many groups of processes hold the nodes, if `world` processes run the script.

        Raises:
            ArgumentError: the requested number is impossible.
        """

    def wire(self, placement: Sequence[Sequence[int]], native: bool) -> Wire:
        """Return the wire between processes that are devices. `placement` has each group's nodes."""

    def at_once(self, node: int, examples: int) -> int:
        """Return how many of a batch's `examples` a device of node `node` computes at once."""

    def tried(self, examples: int) -> tuple[int, str] | None:
        """Return the fewest of `examples` that a device computes at once, and the option that says so.

        None: the parts of a batch need no trial.
        """

    def devices(self, model: nn.Module, wire: Wire, device: torch.device) -> Any:
        """Return the object that trains this process's part of a node (`Worker.devices`); None for whole nodes.

        Raises:
            ModelError: the nodes cannot divide the model.
        """
