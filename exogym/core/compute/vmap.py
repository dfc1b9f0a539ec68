"""`compute="vmap"`: gradients of several rows at once, with `torch.func.vmap`.

Exact up to rounding, and refused where it could not be: a step that draws random numbers would draw
others than one node at a time, and buffers that a step changes (BatchNorm) cannot be vmapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from exogym.core.base import pulse
from exogym.core.base.batches import batch_examples, stack_nested
from exogym.core.compute.finite import Watch
from exogym.core.compute.inner import InnerOptimizer
from exogym.core.compute.loop import Loop
from exogym.core.compute.spans import Losses, Span
from exogym.core.compute.worker import Worker
from exogym.data.stream import Stream
from exogym.errors import ModelError

CHUNK_ROWS = 10


class Vmap:
    """Computes the gradients of all rows that take a step at once, and lets each row's optimizer step by itself.

    Raises:
        ModelError: the model draws random numbers or changes buffers while training, or the run needs
            micro-batches or fp16 scaling, or vmap has no rule for one of its operations.
    """

    def __init__(self, worker: Worker, chunk_rows: int = CHUNK_ROWS):
        reasons = [
            (worker.draws_torch or worker.draws_python, "its training step draws random numbers (dropout)"),
            (bool(worker.changing), f"a training step changes its buffers ({', '.join(worker.changing[:3])})"),
            (worker.micro_batch_size is not None, "the run uses micro-batches"),  # seen where "auto" tries it
            (worker.scaled, "fp16 scales each node's loss by itself"),
        ]
        for refused, why in reasons:
            if refused:
                raise ModelError(f"compute='vmap' cannot train this model: {why}; use compute='loop'")
        self.worker, self.chunk_rows = worker, chunk_rows
        self._compared = False

        def loss_of(parameters: dict[str, Tensor], batch: Any) -> tuple[Tensor, Tensor]:
            def call(*args: Any, **kwargs: Any) -> Any:
                return torch.func.functional_call(worker.model, parameters, args, kwargs)

            loss = worker.loss.of(call, batch).loss
            return loss, loss.detach()

        self._gradient = torch.func.vmap(torch.func.grad(loss_of, has_aux=True))

    def steps(self, plain: Loop, spans: Sequence[Span], losses: Losses, may_stop: bool) -> Sequence[Span]:
        """Take the steps of `spans`, step by step; nothing is left."""
        inner = plain.inner
        assert inner is not None
        for k in range(max((len(span.columns) for span in spans), default=0)):
            if self.worker.should_stop() and may_stop:
                break
            now = [span for span in spans if k < len(span.columns)]
            for span, loss in zip(now, self.gradients(plain, [span.row for span in now]), strict=True):
                row, step = span.row, int(plain.taken[span.row])
                losses.add(row, span.columns[k : k + 1], loss.reshape(1))
                self.worker.point(row)
                inner.enter(row)
                plain.point_gradients(row)
                inner.step(row, step if span.at is None else int(span.at[k]))
                plain.taken[row] += 1
                if k + 1 == len(span.columns):
                    plain.watch.row(plain.nodes[row].rank, row, step + 1)
        return ()

    def gradients(self, plain: Loop, rows: Sequence[int]) -> Tensor:
        """Compute the gradients of the next step of `rows`; return the losses, (len(rows),), inf as `Watch.losses`."""
        if not rows:
            return torch.empty(0, device=self.worker.device)
        found = self.losses(rows, [plain.nodes[row].next_batch() for row in rows])
        looked = [
            plain.watch.losses(plain.nodes[row].rank, row, found[k : k + 1], int(plain.taken[row]))
            for k, row in enumerate(rows)
        ]
        return torch.cat(looked)

    def losses(self, rows: Sequence[int], batches: Sequence[Any]) -> Tensor:
        """Write the gradients of `rows` on their `batches` into the fleet's `own_grads`; return losses (len(rows),)."""
        losses = torch.empty(len(rows), device=self.worker.device)
        for block in self.worker.fleet.blocks:
            block.own_grads()
            block.has_grad[list(rows)] = True
        if not self._compared:
            self._compare_with_loop(rows[0], batches[0])
            self._compared = True
        sizes = [batch_examples(batch) for batch in batches]
        for size in sorted(set(sizes)):
            alike = [k for k, s in enumerate(sizes) if s == size]
            for start in range(0, len(alike), self.chunk_rows):
                part = alike[start : start + self.chunk_rows]
                losses[part] = self._chunk([rows[k] for k in part], [batches[k] for k in part])
        return losses

    def _compare_with_loop(self, row: int, batch: Any) -> None:
        """Compute one row's gradient both ways: what vmap cannot follow (a closure over a parameter) fails silently.

        Raises:
            ModelError: they differ, or a parameter has no gradient, which vmap cannot tell from zero.
        """
        worker = self.worker
        self._chunk([row], [batch])
        worker.point(row)
        worker.gradient(batch, row)
        alone = [p.grad for p in worker.parameters]
        worker.clear_grads()
        together = [slot.of(block.own_grads()[row]) for block in worker.fleet.blocks for slot in block.layout]
        for name, a, b in zip(worker.names, alone, together, strict=True):
            if a is None:
                raise ModelError(
                    f"compute='vmap' cannot train this model: a step gives {name!r} no gradient; freeze it "
                    "(requires_grad=False), or use compute='loop'"
                )
            tolerance = 0.05 if torch.bfloat16 in (worker.dtype, a.dtype) or a.dtype == torch.float16 else 1e-3
            if not (a - b).norm().item() <= tolerance * a.norm().item() + 1e-7:
                raise ModelError(
                    f"compute='vmap' cannot train this model: it gives {name!r} another gradient than one node at a "
                    "time, as where a function holds the parameter itself; use compute='loop'"
                )

    def _chunk(self, rows: Sequence[int], batches: Sequence[Any]) -> Tensor:
        fleet = self.worker.fleet
        parameters = {slot.name: slot.of(block.params[rows]) for block in fleet.blocks for slot in block.layout}
        stacked = stack_nested([self.worker.to_device(batch) for batch in batches])
        with self.worker.autocast():
            try:
                grads, losses = self._gradient(parameters, stacked)
            except RuntimeError as error:
                raise ModelError(f"compute='vmap' cannot train this model: {error}; use compute='loop'") from error
        for block in fleet.blocks:
            assert block.grads is not None
            for slot in block.layout:
                slot.of(block.grads)[rows] = grads[slot.name].detach().to(block.grads.dtype)
        pulse.step_taken()
        return losses.to(torch.float32)


def way(
    worker: Worker, stream: Stream, inner: InnerOptimizer | None, watch: Watch, bucket_bytes: int | None = None
) -> Loop:
    return Loop(worker, stream, inner, watch, at_once=Vmap(worker))
