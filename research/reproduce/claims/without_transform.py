"""DeMo without its transform, which a claim compares with DeMo. This file is loaded only for training."""

from __future__ import annotations

from typing import Any

import torch

from exogym.core.compress import BlockDCT
from exogym.core.fleet import Fleet
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.demo import DCTMomentum
from exogym.strategy.optim import OptimSpec
from exogym.strategy.strategy import Run, Strategy
from exogym.study.compare.entries import ComparisonSetting


class _Blocks(BlockDCT):
    """The same blocks without the transform."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.ch, self.cw = (torch.eye(len(c)).to(c) for c in (self.ch, self.cw))


class _TopKMomentum(DCTMomentum):
    """DeMo's momentum that sends the largest entries of parameter blocks, without the cosine transform."""

    def start(self, fleet: Fleet, run: Run) -> None:
        super().start(fleet, run)
        self.transforms = [
            [_Blocks(slot.shape, self.chunk, block.layout.dtype, block.params.device) for slot in block.layout]
            for block in fleet.blocks
        ]


def demo_without_transform(setting: ComparisonSetting) -> Strategy:
    """Return DeMo with its defaults and k = 4, but without the transform: nodes send the momentum's largest entries."""
    return CommunicateOptimizeStrategy(
        OptimSpec(torch.optim.SGD, lr=setting.lr), lr_scheduler=setting.lr_scheduler, max_norm=setting.max_norm,
        warmup_steps=setting.warmup_steps, gradient_modules=[_TopKMomentum(0.999, 4, 64)],
    )  # fmt: skip
