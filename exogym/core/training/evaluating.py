"""A run's models (the averaged or outer model, and each node's model), and their evaluation on the validation set."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from exogym.core.communicator import tell
from exogym.core.compute.finite import is_finite
from exogym.core.fleet import Fleet
from exogym.core.record.metrics import Evaluator
from exogym.core.training.driver import Driver
from exogym.errors import ArgumentError

Model = tuple[list[Tensor], dict[str, Tensor]]  # (P,) vectors, one per block, and buffers by name


class Models:
    """Compute and evaluate a run's models. Bytes that processes send for these methods do not count as traffic.

    Each process holds some of the rows, so all processes must make the same calls in the same order.
    """

    def __init__(self, evaluator: Evaluator | None, driver: Driver, fleet: Fleet):
        self.evaluator, self.driver, self.fleet, self.wire = evaluator, driver, fleet, fleet.comm.wire

    def of(self, node: int | None) -> Model:
        """Return the averaged (or outer) model, or the model of `node`, in every process."""
        if node is None:
            return self.driver.consensus(), self.driver.consensus_buffers()
        rows = self.wire.rows
        vectors = [rows(block.params, [node])[0] for block in self.fleet.blocks]
        return vectors, {name: rows(x, [node])[0] for name, x in self.fleet.buffers.items()}

    def average(self) -> Model:
        """Return the averaged (or outer) model. A model that is split over a node's processes is joined first."""
        vectors, buffers = self.of(None)
        return self.fleet.whole(vectors), buffers

    def rows(self) -> list[Tensor]:
        """Return all nodes' parameters, (N, P) per block; with client sampling, only for clients that train."""
        return self.fleet.whole([self.wire.rows(block.params, self.driver.seated) for block in self.fleet.blocks])

    def left(self) -> Model:
        """Return the model after a failure: the mean of this process's rows, without non-finite rows if possible."""
        fleet = self.fleet
        if not self.wire.is_shared:
            self.driver.meet_finite()
            return self.of(None)
        finite = [row for row in range(len(fleet)) if all(is_finite(block.params[row]) for block in fleet.blocks)]
        rows = finite or list(range(len(fleet)))
        buffers = {name: x[rows[0]].clone() for name, x in fleet.buffers.items()}
        return [block.params[rows].mean(0) for block in fleet.blocks], buffers

    # Evaluation

    @property
    def clients(self) -> Sequence[int]:
        """The nodes whose models can be evaluated now: all, if they share the server's model."""
        return range(self.fleet.num_nodes) if self.driver.shares_model else list(self.fleet.comm.present)

    def check_own_data(self) -> None:
        """Raise ArgumentError if the nodes have no own validation sets."""
        if self.evaluator is None or self.evaluator.stream.num_nodes < self.fleet.num_nodes:
            raise ArgumentError(
                "nodes have no own validation sets: give the trainer a function as val_dataset, which returns "
                "the validation set of (node, num_nodes, is_train)"
            )

    def check_node(self, node: int | None, on: int | None = None) -> None:
        """Raise ArgumentError if the node does not exist, or has no model because it does not train in this round."""
        known = self.clients if on is not None and self.driver.shares_model else self.driver.seated
        if node is not None and node not in known:
            raise ArgumentError(
                f"evaluate({node!r}): wanted a node from 0 to {self.fleet.num_nodes - 1}; with client sampling, one of "
                "fleet.comm.present"
            )

    def evaluate(self, node: int | None = None, on: int | None = None) -> dict[str, float]:
        """Return losses and metrics of the averaged (or outer) model, or of `node`; {} without a validation set.

        With `on`, evaluate on this node's own validation set. Clients that keep nothing have the server's model there.
        """
        if self.evaluator is None:
            return {}
        node = None if on is not None and self.driver.shares_model else node
        vectors, buffers = self.of(node)
        values = self.evaluator(vectors, buffers, on) if self.wire.process == 0 else {}  # the first node's processes
        return values if self.wire.shares_memory else tell(self.wire, values)

    def measure(self, vectors: list[Tensor] | None, buffers: dict[str, Tensor]) -> dict[str, float]:
        """Evaluate parameters, (P,) per block, in the first node's processes. Only process 0 needs `vectors`."""
        if self.wire.process or self.evaluator is None:
            return {}
        devices = self.wire.devices
        if devices.parts == 1:
            assert vectors is not None
            return self.evaluator(vectors, buffers)
        here = []
        for b, block in enumerate(self.fleet.blocks):
            layout = block.layout
            whole = block.params.new_zeros(layout.total) if vectors is None else vectors[b].clone()
            here.append(devices.sum(whole)[layout.columns.to(whole.device)])
        told = {name: buffers.get(name, torch.zeros_like(x[0])) for name, x in self.fleet.buffers.items()}
        return self.evaluator(here, {name: devices.sum(x) for name, x in told.items()})
