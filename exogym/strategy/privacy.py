"""Differential privacy of clients: what a run says of any one of them is bounded, and the bound is counted.

McMahan, Ramage, Talwar, Zhang, Learning Differentially Private Recurrent Language Models, arXiv:1710.06963 (DP-FedAvg,
flat clipping, fixed denominator). In each round every one of N clients takes part with probability q, independently:

    Delta_i <- Delta_i min(1, C / |Delta_i|)                          Delta_i = theta_i - theta, at the client
    theta   <- theta + (sum of Delta_i + noise) / (q N)               noise ~ N(0, (z C)^2) in each element

A round in which nobody takes part adds noise like any other. Clients weigh the same: weights by examples would have to
be bounded, too. The epsilon spent after R rounds, for neighbouring sets of clients that differ in one, is that of R
Gaussian mechanisms with noise multiplier z under Poisson sampling with rate q, by Renyi accounting (`dp-accounting`).

Bytes: as FedAvg with sampled clients. The numbers drawn follow from the run's seed: who knows it can take them away.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exogym.core.base.rng import generator
from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError, check_number


@dataclass(frozen=True)
class DifferentialPrivacy:
    """How updates of clients are clipped and blurred.

    Args:
        clip: C, the most that the 2-norm of a client's update may be.
        noise_multiplier: z; 0 clips only, and epsilon is infinite.
        delta: of (epsilon, delta); under 1 / N, as a rule.

    Raises:
        ArgumentError: a number that cannot be; `dp-accounting` is not installed.

    >>> round(DifferentialPrivacy(clip=1.0, noise_multiplier=1.0, delta=1e-5).epsilon(rate=0.1, rounds=100), 2)
    7.9
    """

    clip: float
    noise_multiplier: float
    delta: float = 1e-5

    def __post_init__(self) -> None:
        check_number("DifferentialPrivacy: clip", self.clip, over=0)
        check_number("DifferentialPrivacy: noise_multiplier", self.noise_multiplier, least=0)
        check_number("DifferentialPrivacy: delta", self.delta, over=0, under=1)
        accounting()

    def epsilon(self, rate: float, rounds: int) -> float:
        """Return the epsilon spent by `rounds` rounds, each with a share `rate` of the clients in the mean."""
        if not rounds:
            return 0.0
        if not self.noise_multiplier:
            return math.inf
        dp = accounting()
        event = dp.GaussianDpEvent(self.noise_multiplier)
        event = event if rate == 1 else dp.PoissonSampledDpEvent(rate, event)
        log = logging.getLogger("absl")  # which warns of each order that gives no bound, and is then left out
        before = log.level
        log.setLevel(logging.ERROR)
        try:
            return float(dp.rdp.RdpAccountant().compose(event, rounds).get_epsilon(self.delta))
        finally:
            log.setLevel(before)

    def clip_rows(self, fleet: Fleet, rows: Sequence[int], theta: Sequence[Tensor]) -> None:
        """Shorten what the nodes in `rows` have moved from `theta`, (1, P) per block, to `clip` where it is longer."""
        for row in rows:
            moved = [block.params[row] - x[0] for block, x in zip(fleet.blocks, theta, strict=True)]
            norm = math.sqrt(sum(float(u.double().square().sum()) for u in moved))
            if norm > self.clip:
                for block, x, u in zip(fleet.blocks, theta, moved, strict=True):
                    torch.add(x[0], u, alpha=self.clip / norm, out=block.params[row])

    def noise(self, like: Tensor, clients: float, seed: int, *ids: int) -> Tensor:
        """Return the noise on a mean over `clients` in the mean, shaped `like`."""
        drawn = torch.randn(like.shape, generator=generator(seed, "privacy", *ids), dtype=torch.float64)
        return (drawn * (self.noise_multiplier * self.clip / clients)).to(like.device, like.dtype)


def accounting() -> Any:
    """Return `dp_accounting`.

    Raises:
        ArgumentError: it is not installed.
    """
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError as error:
        raise ArgumentError("privacy needs dp-accounting: pip install 'exogym[privacy]'") from error
    return dp_accounting
