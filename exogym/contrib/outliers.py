"""EDiT's test for unusually large norms, by a running mean and variance of each node's own norms."""

from __future__ import annotations

import torch
from torch import Tensor

from exogym.core.fleet.state import Tensors


class Outliers:
    """Tell which norms are unusually large. Each node has its own history, a separate one for each layer.

    A norm G is unusual if z(G) > reject max(1, std of the last `memory` values of z), where z(G) = (G - m) / sqrt(s).
    Each norm then updates the mean m and the variance s: d = G - m, m <- m + a d, s <- (1 - a) (s + a d (G - m)).

    Args:
        rows, layers: the number of rows and of layers.
        reject: standard deviations over the mean from which a norm is unusual.
        memory: norms before a norm can be unusual.
        decay: a, the weight of a new norm.

    >>> watch = Outliers(1, 1, reject=3.0, memory=2, decay=0.5)
    >>> [bool(watch.see(0, torch.tensor([G]))) for G in (1.0, 1.1, 1.0, 9.0)]
    [False, False, False, True]
    """

    def __init__(self, rows: int, layers: int, reject: float, memory: int, decay: float):
        self.reject, self.memory, self.decay = reject, memory, decay
        self.count, self.m, self.s = (torch.zeros(rows, layers, dtype=torch.float64) for _ in range(3))
        self.z = torch.zeros(rows, layers, memory, dtype=torch.float64)

    def state(self) -> Tensors:
        """Return the histories, (rows, ...) each, by their names in checkpoints."""
        return {"count": self.count, "m": self.m, "s": self.s, "z": self.z}

    def see(self, row: int, G: Tensor) -> Tensor:
        """Return (L,), whether each layer's norm in `G` is unusual for the node in `row`. Add `G` to its history."""
        count, m, s, window = self.count[row], self.m[row], self.s[row], self.z[row]
        unusual = (count >= self.memory) & (_z(G, m, s) > self.reject * window.std(-1).clamp(min=1.0))
        count += 1
        d = G - m
        m.add_(d, alpha=self.decay)
        s.add_(d * (G - m), alpha=self.decay).mul_(1 - self.decay)
        at = ((count - 1) % self.memory).long()[:, None]
        window.scatter_(1, at, torch.where(count >= self.memory, _z(G, m, s), 0.0)[:, None])
        return unusual


def _z(G: Tensor, m: Tensor, s: Tensor) -> Tensor:
    return torch.where(s > 0, (G - m) / s.sqrt(), 0.0)
