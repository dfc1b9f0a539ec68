"""Count the traffic inside nodes of several devices, by formula."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from torch import nn

from exogym.core.communicator import Ledger
from exogym.core.mesh import NodeMesh
from exogym.core.mesh.splits import check_split
from exogym.core.mesh.traffic import Facts, InsideCost, watched


class Insides:
    """Compute the bytes that a node's devices send each other.

    Args:
        model: the model that all nodes train.
        meshes: each node's mesh, N in all.

    Raises:
        ModelError: the model cannot be split over one of the meshes.
    """

    def __init__(self, model: nn.Module, meshes: Sequence[NodeMesh]):
        self.meshes = meshes
        self._model = model
        self._facts: dict[NodeMesh, Facts] = {}
        self._costs: list[InsideCost] = []
        self._ledger: Ledger | None = None
        for mesh in dict.fromkeys(meshes):
            check_split(model, mesh)

    def watching(self) -> contextlib.ExitStack:
        """Return a context that records the sizes of the model's activations. Run a training step inside it."""
        found = contextlib.ExitStack()
        self._facts = {mesh: found.enter_context(watched(self._model, mesh)) for mesh in dict.fromkeys(self.meshes)}
        return found

    def count(self, ledger: Ledger, at_once: int | None) -> None:
        """From now on add inside bytes to `ledger`.

        Args:
            at_once: the most examples that a node computes at once (micro-batches). Without `at_once`, a node
                computes the whole batch at once.
        """
        costs = {mesh: InsideCost(mesh, facts, at_once) for mesh, facts in self._facts.items()}
        self._costs, self._ledger = [costs[mesh] for mesh in self.meshes], ledger

    def took(self, node: int, examples: int) -> None:
        """Add the inside bytes of one step of node `node` to the ledger, given the step's number of examples."""
        if self._ledger is not None:
            self._ledger.inside_bytes[node] += self._costs[node].tx_bytes(examples)
