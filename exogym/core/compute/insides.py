"""Nodes of several devices in one process: what these would say to each other, counted while the node trains."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
from torch import nn

from exogym.core.communicator import Ledger
from exogym.core.mesh import NodeMesh
from exogym.core.mesh.splits import check_split
from exogym.core.mesh.traffic import Facts, InsideCost, watched


class Insides:
    """The inside of each node.

    Args:
        model: of all nodes; meshes: (N,) of each.

    Raises:
        ModelError: a mesh that the model cannot be split over.
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
        """Return a context in which a training step shows what flows through the model."""
        found = contextlib.ExitStack()
        self._facts = {mesh: found.enter_context(watched(self._model, mesh)) for mesh in dict.fromkeys(self.meshes)}
        return found

    def count(self, ledger: Ledger, at_once: int | None) -> None:
        """Count in `ledger` from here on; a node computes `at_once` examples at once, at most."""
        costs = {mesh: InsideCost(mesh, facts, at_once) for mesh, facts in self._facts.items()}
        self._costs, self._ledger = [costs[mesh] for mesh in self.meshes], ledger

    def took(self, node: int, examples: int) -> None:
        """Node `node` has computed the gradients of so many examples."""
        if self._ledger is not None:
            self._ledger.inside_bytes[node] += self._costs[node].tx_bytes(examples)

    def spread(self, examples: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return (N,) the share of one device's time that a step of `examples` (N,) takes, and (N,) seconds on top."""
        each = list(zip(self._costs, examples, strict=True))
        shares = [cost.mesh.compute_share(size) for cost, size in each]
        return np.array(shares), np.array([cost.talk(size).seconds for cost, size in each])
