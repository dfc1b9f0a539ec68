"""The models of a run, the averaged (or outer) one and each node's, and what they are worth on the validation set."""

from __future__ import annotations

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
    """The models that nodes hold, taken together; traffic is not recorded.

    All processes make the same calls in the same order, since each holds some of the rows.
    """

    def __init__(self, evaluator: Evaluator | None, driver: Driver, fleet: Fleet):
        self.evaluator, self.driver, self.fleet, self.wire = evaluator, driver, fleet, fleet.comm.wire

    def of(self, node: int | None) -> Model:
        """Return the averaged (or outer) model, or one node's, in every process."""
        if node is None:
            return self.driver.consensus(), self.driver.consensus_buffers()
        rows = self.wire.rows
        vectors = [rows(block.params, [node])[0] for block in self.fleet.blocks]
        return vectors, {name: rows(x, [node])[0] for name, x in self.fleet.buffers.items()}

    def average(self) -> Model:
        """Return the averaged (or outer) model, whole where a node is several processes."""
        vectors, buffers = self.of(None)
        return self.fleet.whole(vectors), buffers

    def rows(self) -> list[Tensor]:
        """Return the parameters of all nodes, (N, P) per block; where clients are sampled, of those at work."""
        return self.fleet.whole([self.wire.rows(block.params, self.driver.seated) for block in self.fleet.blocks])

    def left(self) -> Model:
        """Return the model after a failure: of the nodes at hand, those with finite numbers if there are any."""
        fleet = self.fleet
        if not self.wire.is_shared:
            self.driver.meet_finite()
            return self.of(None)
        finite = [row for row in range(len(fleet)) if all(is_finite(block.params[row]) for block in fleet.blocks)]
        rows = finite or list(range(len(fleet)))
        buffers = {name: x[rows[0]].clone() for name, x in fleet.buffers.items()}
        return [block.params[rows].mean(0) for block in fleet.blocks], buffers

    # What they are worth

    def check_node(self, node: int | None) -> None:
        """Raise ArgumentError where there is no such node, or it sits out the round and holds no model."""
        if node is not None and node not in self.driver.seated:
            raise ArgumentError(
                f"evaluate({node!r}): wanted a node of 0 to {self.fleet.num_nodes - 1}, and where clients are sampled "
                "one of the round, as in fleet.comm.present"
            )

    def evaluate(self, node: int | None = None) -> dict[str, float]:
        """Return losses and metrics of the averaged (or outer) model, or one node's; {} without a validation set."""
        if self.evaluator is None:
            return {}
        vectors, buffers = self.of(node)
        values = self.evaluator(vectors, buffers) if self.wire.process == 0 else {}  # of the first node's processes
        return values if self.wire.shares_memory else tell(self.wire, values)

    def measure(self, vectors: list[Tensor] | None, buffers: dict[str, Tensor]) -> dict[str, float]:
        """Evaluate (P,) per block with the processes of the first node, of which the first knows them (else None)."""
        if self.wire.process or self.evaluator is None:
            return {}
        inside = self.wire.devices
        if inside.parts == 1:
            assert vectors is not None
            return self.evaluator(vectors, buffers)
        here = []
        for b, block in enumerate(self.fleet.blocks):
            layout = block.layout
            whole = block.params.new_zeros(layout.total) if vectors is None else vectors[b].clone()
            here.append(inside.sum(whole)[layout.columns.to(whole.device)])
        told = {name: buffers.get(name, torch.zeros_like(x[0])) for name, x in self.fleet.buffers.items()}
        return self.evaluator(here, {name: inside.sum(x) for name, x in told.items()})
