"""Loss scales of rows in fp16, as torch's GradScaler has them; 1 in any other precision."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from exogym.core.base.torch_private import scale_
from exogym.core.fleet.state import Stateful, Tensors

FIRST_SCALE, SCALE_GROWTH_STEPS = 65536.0, 2000


class Scaling(Stateful):
    """The scale of each row's loss, and the steps since it last changed.

    Attributes:
        scales: (rows,); overflowed: whether the last gradients that were unscaled were not finite.
    """

    def __init__(self, rows: int, scaled: bool):
        self.scaled, self.overflowed = scaled, False
        self.scales = np.full(rows, FIRST_SCALE if scaled else 1.0)
        self._good_steps = np.zeros(rows, dtype=np.int64)

    def of(self, row: int) -> float:
        return float(self.scales[row])

    def unscale(self, row: int, parameters: Sequence[Tensor]) -> None:
        """Divide the gradients of `parameters` by the row's scale, and note whether they overflowed."""
        grads = [p.grad for p in parameters if p.grad is not None]
        scale_(grads, 1.0 / self.of(row))
        self.overflowed = not all(bool(torch.isfinite(g).all()) for g in grads)

    def update(self, row: int) -> None:
        """Halve the row's scale after an overflow, double it after 2,000 good steps (torch's GradScaler rule)."""
        if not self.scaled:
            return
        self._good_steps[row] = 0 if self.overflowed else self._good_steps[row] + 1
        if self.overflowed:
            self.scales[row] *= 0.5
        elif self._good_steps[row] == SCALE_GROWTH_STEPS:
            self.scales[row] *= 2.0
            self._good_steps[row] = 0

    def row(self, row: int) -> Tensors:
        return {"scale": torch.tensor([self.of(row), float(self._good_steps[row])], dtype=torch.float64)}

    def load_row(self, row: int, tensors: Tensors) -> None:
        self.scales[row], self._good_steps[row] = tensors["scale"].tolist()
