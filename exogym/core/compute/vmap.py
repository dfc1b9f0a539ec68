"""`compute="vmap"`: compute the gradients of several rows at once with `torch.func.vmap`.

The results equal those with `compute="loop"` up to rounding. Models with dropout are rejected, because vmap would draw
other random numbers, and so are models whose steps change buffers (BatchNorm), which vmap doesn't support.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from exogym.core.base import pulse
from exogym.core.base.batches import batch_examples, beside_tensors, described, stack_nested
from exogym.core.compute.finite import Watch
from exogym.core.compute.inner import InnerOptimizer
from exogym.core.compute.loop import Loop
from exogym.core.compute.spans import CHUNK_ROWS, Losses, RowSpan
from exogym.core.compute.worker import Worker
from exogym.data.stream import Stream
from exogym.errors import ModelError


class Vmap(Loop):
    """Compute the gradients of up to 10 rows at a time with vmap. Each row's own optimizer then takes the step.

    Raise ModelError if a training step draws random numbers or changes buffers, the run uses micro-batches or fp16, or
    vmap does not support one of the model's operations.
    """

    together = True

    def __init__(
        self, worker: Worker, stream: Stream, inner: InnerOptimizer | None, watch: Watch,
        bucket_bytes: int | None = None,
    ):  # fmt: skip
        reasons = [
            (worker.draws_torch or worker.draws_python, "its training step draws random numbers (dropout)"),
            (bool(worker.changing), f"a training step changes its buffers ({', '.join(worker.changing[:3])})"),
            (worker.micro_batch_size is not None, "the run uses micro-batches"),
            (worker.scaled, "fp16 scales each node's loss separately"),
        ]
        for refused, why in reasons:
            if refused:
                raise ModelError(f"compute='vmap' cannot train this model: {why}; use compute='loop'")
        super().__init__(worker, stream, inner, watch)
        self._compared = False

        def loss_of(parameters: dict[str, Tensor], batch: Any) -> tuple[Tensor, Tensor]:
            def call(*args: Any, **kwargs: Any) -> Any:
                return torch.func.functional_call(worker.model, parameters, args, kwargs)

            loss = worker.loss.of(call, batch).loss
            return loss, loss.detach()

        self._gradient = torch.func.vmap(torch.func.grad(loss_of, has_aux=True))

    def steps(self, spans: Sequence[RowSpan], losses: Losses, may_stop: bool = True) -> None:
        """Take the steps of `spans`: the first step of all spans, then the second, and so on."""
        inner = self.inner
        assert inner is not None
        done = [(span, int(self.taken[span.row]), list[Tensor]()) for span in spans]
        for k in range(max((len(span.columns) for span in spans), default=0)):
            if self.worker.should_stop() and may_stop:
                break
            now = [one for one in done if k < len(one[0].columns)]
            rows = [span.row for span, *_ in now]
            for (span, first, taken), loss in zip(now, self._losses(rows), strict=True):
                row = span.row
                if self.watch.at_once:
                    loss = self.watch.losses(self.nodes[row].rank, row, loss.reshape(1), first + k)[0]
                taken.append(loss)
                self.worker.point(row)
                inner.enter(row)
                self.point_gradients(row)
                inner.step(row, first + k if span.at is None else int(span.at[k]))
                self.taken[row] += 1
        self._end([(span, first, torch.stack(taken)) for span, first, taken in done if taken], losses)

    def gradients(self, rows: Sequence[int]) -> Tensor:
        for block in self.fleet.blocks:
            block.own_grads()
        self.spoilt = []
        return self._looked_at(rows, self._losses(rows))

    def _losses(self, rows: Sequence[int]) -> Tensor:
        """Write the gradients of the next step of `rows` into the blocks; return the losses, (len(rows),)."""
        if not rows:
            return torch.empty(0, device=self.worker.device)
        return self._computed(rows, [self.nodes[row].next_batch() for row in rows])

    def _computed(self, rows: Sequence[int], batches: Sequence[Any]) -> Tensor:
        """Write the gradients of `rows` into the blocks' `grads`, given a batch for each row.

        Return the losses, (len(rows),). The first call compares one row's gradient with `compute="loop"`.
        """
        losses: dict[int, Tensor] = {}
        for block in self.worker.fleet.blocks:
            block.own_grads()
            block.has_grad[list(rows)] = True
        if not self._compared:
            self._compare_with_loop(rows[0], batches[0])
            self._compared = True
        sizes = [batch_examples(batch) for batch in batches]
        for size in sorted(set(sizes)):
            alike = [k for k, s in enumerate(sizes) if s == size]
            for start in range(0, len(alike), CHUNK_ROWS):
                part = alike[start : start + CHUNK_ROWS]
                losses.update(zip(part, self._chunk([rows[k] for k in part], [batches[k] for k in part]), strict=True))
        return torch.stack([losses[k] for k in range(len(rows))])

    def _compare_with_loop(self, row: int, batch: Any) -> None:
        """Compare one row's gradient from vmap with its gradient from the loop.

        The test is needed because vmap ignores some uses of a parameter, such as in a closure, without an error. Raise
        ModelError if the gradients differ, or a parameter has no gradient (vmap would give a gradient of zero).
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
                    f"compute='vmap' cannot train this model: a step gives {name!r} no gradient; freeze this parameter "
                    "(requires_grad=False), or use compute='loop'"
                )
            tolerance = 0.05 if torch.bfloat16 in (worker.dtype, a.dtype) or a.dtype == torch.float16 else 1e-3
            if not (a - b).norm().item() <= tolerance * a.norm().item() + 1e-7:
                raise ModelError(
                    f"compute='vmap' cannot train this model: its gradient of {name!r} differs from the gradient of "
                    "compute='loop'. A cause can be a function that holds the parameter itself. Use compute='loop'"
                )

    def _chunk(self, rows: Sequence[int], batches: Sequence[Any]) -> Tensor:
        fleet = self.worker.fleet
        if more := beside_tensors(batches[0]):
            raise ModelError(
                f"compute='vmap' cannot train this model: its batches have more than tensors ({described(more[0])}); "
                "use compute='loop'"
            )
        here = _index(rows, self.worker.device)
        parameters = {slot.name: slot.of(block.params[here]) for block in fleet.blocks for slot in block.layout}
        stacked = stack_nested([self.worker.to_device(batch) for batch in batches])
        with self.worker.autocast():
            try:
                grads, losses = self._gradient(parameters, stacked)
            except RuntimeError as error:
                raise ModelError(f"compute='vmap' cannot train this model: {error}; use compute='loop'") from error
        for block in fleet.blocks:
            assert block.grads is not None
            for slot in block.layout:
                slot.of(block.grads)[here] = grads[slot.name].detach().to(block.grads.dtype)
        pulse.step_taken()
        return losses.to(torch.float32)


def _index(rows: Sequence[int], device: torch.device) -> slice | Tensor:
    """Return `rows` as a slice if they follow one another, otherwise on the device: each use would copy a list."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, device=device)
