"""Data-parallel training with compressed gradients: nodes average compressed messages.

Node i has the gradient g_i and the error e_i; C is a compressor and gamma the step's learning rate. Error feedback
(Seide et al., 1-bit SGD, Interspeech 2014; Karimireddy et al., arXiv:1901.09847) computes

    p_i = gamma g_i + e_i;   send C(p_i);   e_i <- p_i - C(p_i);   g = (1 / gamma) mean_i C(p_i)

The inner optimizer steps along g. Without error feedback, g = mean_i C(g_i). With it, the messages of all steps t and
the remaining error add up to the gradients: sum_t C(p_i) + e_i = sum_t gamma g_i. If gamma is 0, nodes send nothing and
e_i does not change.

If nodes are absent, only the n present ones send and step, and an absent node's e_i does not change. A returning node
starts with e_i = 0, because its error belongs to old parameters, receives parameters, buffers and inner optimizer state
from a node that stayed, by a broadcast, and continues at the fleet's step. A node that loses a synchronization misses
this step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from exogym.core.compress import Compressor, Quantized, noise_of, with_feedback
from exogym.core.fleet import Block, Fleet
from exogym.core.fleet.fleet import rows_of, shared_row, where_present
from exogym.core.fleet.layout import Layout
from exogym.strategy.communicate_optimize import GradientModule
from exogym.strategy.simple_reduce import broadcast_buffers, mark_used
from exogym.strategy.strategy import Run
from exogym.strategy.traffic import Traffic


class CompressedMean(GradientModule):
    """Replace every node's gradient by the mean of all nodes' compressed messages, exchanged by an all-gather.

    Args:
        make: a function that returns the compressor for a block's layout.
        payload_bytes: a function of (P, b) that returns the bytes of a node's payload, for `advise`.
        error_feedback: whether each node adds the entries lost in compression to its next message.

    State: with error feedback, each node's error, (rows, P). Clipping acts on each node's own gradient with error
    feedback, and otherwise on the mean.
    """

    weighted_means = right_in_mean = True

    def __init__(
        self,
        make: Callable[[Layout], Compressor],
        payload_bytes: Callable[[float, float], float],
        acts_on: str,
        error_feedback: bool = False,
    ):
        super().__init__()
        self.acts_on = acts_on
        self.make, self.payload_bytes, self.feeds_back = make, payload_bytes, error_feedback
        self.clip_first = error_feedback

    def traffic(self, P: float, N: int, b: float) -> list[Traffic]:
        return [Traffic("all_gather", self.payload_bytes(P, b))]

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.compressors = [self.make(block.layout) for block in fleet.blocks]
        if self.feeds_back:
            self.row_state = {f"error.{b}": block.zeros() for b, block in enumerate(fleet.blocks)}

    def rejoin(self, fleet: Fleet, nodes: Sequence[int], step: int) -> None:
        for error in self.row_state.values():
            error[rows_of(fleet, nodes)] = 0

    def transform(self, fleet: Fleet, step: int, lr: float) -> None:
        for b, block in enumerate(fleet.blocks):
            assert block.grads is not None
            grads = own_gradients(fleet, block)
            compressor, noise = self.compressors[b], None
            if compressor.draws:
                noise = noise_of(fleet, compressor.count, self.run.seed, "rounding", b, step).to(grads.device)
            if self.feeds_back:
                mean = self._with_feedback(fleet, b, grads, lr, noise)
            else:
                mean = self._mean_of(fleet, b, compressor.encode(grads, noise), grads.dtype)
            mean = shared_row(fleet, mean).to(grads.dtype)
            block.grads = mean.expand_as(grads)
            mark_used(fleet, block)
            if self.feeds_back:
                mark_sent(block, mean[0])
        broadcast_buffers(fleet)

    def _with_feedback(self, fleet: Fleet, b: int, grads: Tensor, lr: float, noise: Tensor | None) -> Tensor:
        if lr == 0:
            return torch.zeros_like(grads)
        e = self.row_state[f"error.{b}"]
        away = rows_of(fleet, [rank for rank in fleet.ranks if rank not in fleet.comm.present])
        resting = e[away]
        payload = with_feedback(self.compressors[b], e, lr * grads, noise=noise)
        e[away] = resting
        return self._mean_of(fleet, b, payload, grads.dtype) / lr

    def _mean_of(self, fleet: Fleet, b: int, payload: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return (rows, P), the mean of all decoded payloads, in fp32, or in fp64 for rows of fp64."""
        compressor, wide = self.compressors[b], torch.promote_types(dtype, torch.float32)
        size = size_of(compressor, fleet.blocks[b].layout)
        return fleet.comm.sum_decoded(payload, lambda *parts: compressor.decode(*parts).to(wide), "mean", size=size)


def size_of(compressor: Compressor, layout: Layout) -> float | None:
    """Return the bytes of a message for one device's share of a node's row; None: the bytes of its tensors.

    The number may be a fraction, because the codes of all devices are packed together.
    """
    is_share = layout.whole is not None and isinstance(compressor, Quantized)
    return compressor.share_bytes if is_share else None  # type: ignore[attr-defined]


def mark_sent(block: Block, mean: Tensor) -> None:
    """Record that each parameter with a nonzero entry in `mean`, (P,), has a gradient.

    With error feedback, a parameter without a gradient in this step may receive part of an old one.
    """
    if not block.has_grad.all():
        block.has_grad |= torch.tensor([bool(view.any()) for _, view in block.views(mean)])


def own_gradients(fleet: Fleet, block: Block) -> Tensor:
    """Return the gradients in `block`, (rows, P), with zeros for absent nodes."""
    assert block.grads is not None
    return where_present(fleet, block.grads, torch.zeros_like(block.grads))
