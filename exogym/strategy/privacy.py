"""Differential privacy of clients: bound and count how much a run reveals about any client.

McMahan, Ramage, Talwar, Zhang, Learning Differentially Private Recurrent Language Models, arXiv:1710.06963 (DP-FedAvg,
flat clipping, fixed denominator). theta are the server's parameters, theta_i client i's parameters after its local
steps. In each round, each of N clients takes part with probability q, independently of the others:

    Delta_i <- Delta_i min(1, C / |Delta_i|)                          Delta_i = theta_i - theta, at the client
    theta   <- theta + (sum of Delta_i + noise) / (q N)               noise ~ N(0, (z C)^2) in each element

C bounds the norm of an update, and z is the noise multiplier. Even a round without clients adds noise. All clients have
equal weights, because unequal weights would need a bound, too.

Two sets of clients are neighbors if they differ in one client. One round is a Gaussian mechanism with noise multiplier
z under Poisson sampling with rate q; the epsilon spent after R rounds composes R of them, by Renyi accounting
(`dp-accounting`).

Bytes are as in FedAvg with sampled clients. The noise follows from the run's seed, so anyone who knows the seed can
subtract it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exogym.core.base.devices import widest
from exogym.core.base.rng import generator
from exogym.core.fleet import Fleet
from exogym.errors import ArgumentError, check_number


@dataclass(frozen=True)
class DifferentialPrivacy:
    """Clip clients' updates and add noise to their mean, so that a run reveals little about any client.

        Delta_i <- Delta_i min(1, C / |Delta_i|);   theta <- theta + (sum_i Delta_i + noise) / (q N)

    Delta_i is client i's update of the server's parameters theta. Each of N clients takes part in a round with
    probability q.

    Args:
        clip: C, the largest 2-norm of a client's update. Longer updates are scaled down to it.
        noise_multiplier: z; the noise has the standard deviation z C in each element. With z = 0, updates are only
            clipped, and epsilon is infinite.
        delta: the delta in (epsilon, delta) differential privacy, usually less than 1 / N.

    Raises:
        ArgumentError: a number is out of range, or `dp-accounting` is not installed.

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
        """Return the epsilon spent in `rounds` rounds in which each client takes part with probability `rate`."""
        if not rounds:
            return 0.0
        if not self.noise_multiplier:
            return math.inf
        dp = accounting()
        event = dp.GaussianDpEvent(self.noise_multiplier)
        event = event if rate == 1 else dp.PoissonSampledDpEvent(rate, event)
        log = logging.getLogger("absl")  # warns about each order without a bound, which the accountant then skips
        before = log.level
        log.setLevel(logging.ERROR)
        try:
            return float(dp.rdp.RdpAccountant().compose(event, rounds).get_epsilon(self.delta))
        finally:
            log.setLevel(before)

    def clip_rows(self, fleet: Fleet, rows: Sequence[int], theta: Sequence[Tensor]) -> None:
        """Scale the updates of the local rows `rows` down to a norm of at most `clip`, in place.

        Args:
            theta: the server's parameters, (1, P) per block; a row's update is the row minus `theta`.
        """
        for row in rows:
            moved = [block.params[row] - x[0] for block, x in zip(fleet.blocks, theta, strict=True)]
            norm = math.sqrt(sum(float(widest(u).square().sum()) for u in moved))
            if norm > self.clip:
                for block, x, u in zip(fleet.blocks, theta, moved, strict=True):
                    torch.add(x[0], u, alpha=self.clip / norm, out=block.params[row])

    def noise(self, like: Tensor, clients: float, seed: int, *ids: int) -> Tensor:
        """Return the noise for a mean over `clients` clients, in the shape of `like`.

        Args:
            clients: the expected number of clients in a round, possibly a fraction.
            seed, *ids: values that determine the noise.
        """
        drawn = torch.randn(like.shape, generator=generator(seed, "privacy", *ids), dtype=torch.float64)
        return (drawn * (self.noise_multiplier * self.clip / clients)).to(like.device, like.dtype)


def check_privacy(given: Any) -> None:
    """Raise ArgumentError unless `given` is a `DifferentialPrivacy` or None."""
    if not isinstance(given, DifferentialPrivacy | None):
        raise ArgumentError(f"privacy={given!r} must be a DifferentialPrivacy, such as DifferentialPrivacy(1.0, 1.0)")


def accounting() -> Any:
    """Import and return the module `dp_accounting`.

    Raises:
        ArgumentError: `dp-accounting` is not installed.
    """
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError as error:
        raise ArgumentError("privacy needs dp-accounting: pip install 'exogym[privacy]'") from error
    return dp_accounting
