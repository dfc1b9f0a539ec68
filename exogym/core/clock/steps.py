"""Compute how long steps take: a fixed time, a time per node, or a random time with stragglers.

Node i's step t takes

    seconds_i * exp(sigma z - sigma^2 / 2) * (straggler_factor if u < straggler_share else 1)

where z is a normal and u a uniform random number that depend only on (seed, i, t), so a step's time depends neither on
the process that runs the node nor on the number of steps that are taken at once. The factor with sigma has the mean 1.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from exogym.core.base.rng import stream_seed
from exogym.errors import ArgumentError, check_count, check_number, checked
from exogym.network.units import parse_seconds

TICKS_PER_S = 10**9
MOST_DRAWS = 1 << 20  # per call, to bound the memory


class StepTime:
    """Compute the time of each node's steps.

    Args:
        seconds: seconds of a step, as a number, text such as "80ms", or one of these per node. A whole number of 10
            or more needs a unit, because it is rarely meant in seconds.
        speeds: relative speed of each node, over 0. A node with speed 0.5 takes twice as long.
        sigma: standard deviation of the logarithm of a node's step times.
        straggler_share: fraction of all steps that take `straggler_factor` times as long (Dean, Barroso, The tail at
            scale, CACM 56, 2013).
        straggler_factor: how many times as long a straggler's step takes, at least 1.
        seed: seed of the random times.

    Raises:
        ArgumentError: a value is out of range, or `speeds` and `seconds` are for different numbers of nodes.

    >>> time = StepTime("10ms", speeds=[1.0, 0.5])
    >>> time.ticks(np.array([0, 0]), np.array([3, 3])).tolist()  # nanoseconds of three steps each
    [30000000, 60000000]
    """

    @checked
    def __init__(
        self,
        seconds: Any,
        *,
        speeds: Any = None,
        sigma: float = 0.0,
        straggler_share: float = 0.0,
        straggler_factor: float = 10.0,
        seed: int = 0,
    ):
        several = not isinstance(seconds, str) and np.ndim(seconds) == 1
        for each in seconds if several else [seconds]:
            if isinstance(each, int | str) and str(each).isdecimal() and int(each) >= 10:
                raise ArgumentError(f"step_seconds={each} has no unit: write '{each}s' or '{each}ms'")
        per_node = np.array([parse_seconds(s, "step_seconds") for s in (seconds if several else [seconds])])
        if speeds is not None:
            try:
                speed = np.asarray(speeds, dtype=float)
            except (TypeError, ValueError):  # no numbers
                speed = np.array(np.nan)
            if speed.ndim != 1 or not (np.isfinite(speed) & (speed > 0)).all():
                raise ArgumentError(f"speeds={speeds!r} must be one number over 0 per node")
            if several and len(speed) != len(per_node):
                raise ArgumentError(
                    f"speeds is for {len(speed)} nodes, but seconds is for {len(per_node)}: pass both for all nodes"
                )
            per_node = per_node / speed
        check_number("sigma", sigma, least=0)
        check_number("straggler_share", straggler_share, least=0, most=1)
        check_number("straggler_factor", straggler_factor, least=1)
        check_count("seed", seed, least=0)
        self.seconds, self.sigma = per_node, float(sigma)
        self.straggler_share, self.straggler_factor, self.seed = float(straggler_share), float(straggler_factor), seed
        self._keys = [np.uint64(stream_seed(seed, "step time", purpose)) for purpose in (0, 1)]
        self._fixed_ticks = np.rint(per_node * TICKS_PER_S).astype(np.int64)

    @property
    def num_nodes(self) -> int | None:
        """The number of nodes to which these times apply, or None for any number."""
        return len(self.seconds) if len(self.seconds) > 1 else None

    @property
    def is_fixed(self) -> bool:
        """Whether all steps of a node take the same time."""
        return not self.sigma and not self.straggler_share

    def for_work(self, work: np.ndarray) -> StepTime:
        """Return the step times for nodes whose steps have more or less work.

        Args:
            work: each node's new work per step divided by its old work, (N,).
        """
        other = copy.copy(self)
        other.seconds = self.seconds * work
        other._fixed_ticks = np.rint(other.seconds * TICKS_PER_S).astype(np.int64)
        return other

    def mean_s(self, num_nodes: int) -> np.ndarray:
        """Return each node's mean seconds per step, (num_nodes,)."""
        late = 1 + self.straggler_share * (self.straggler_factor - 1)
        return np.broadcast_to(self.seconds, num_nodes) * late

    def ticks(self, first: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return node i's nanoseconds for its steps `first[i]` to `first[i] + counts[i] - 1`, (N,)."""
        if self.is_fixed:
            return counts * self._fixed_ticks
        total = np.zeros(len(counts), dtype=np.int64)
        for block in np.array_split(np.arange(len(counts)), 1 + int(counts.sum()) // MOST_DRAWS):
            count = counts[block]
            nodes = np.repeat(block, count)
            steps = np.arange(len(nodes)) - np.repeat(np.cumsum(count) - count - first[block], count)
            total += np.bincount(nodes, self.step_ticks(nodes, steps), len(counts)).astype(np.int64)  # exact: whole ns
        return total

    def step_ticks(self, nodes: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Return the whole nanoseconds of single steps: step `steps[k]` of node `nodes[k]`."""
        seconds = self.seconds[nodes] if len(self.seconds) > 1 else np.full(len(nodes), self.seconds[0])
        if self.sigma:
            high, low = _uniform(self._keys[0], nodes, steps)
            z = np.sqrt(-2 * np.log(high)) * np.cos(2 * np.pi * low)  # Box, Muller 1958
            seconds = seconds * np.exp(self.sigma * z - self.sigma**2 / 2)
        if self.straggler_share:
            late = _uniform(self._keys[1], nodes, steps)[0] <= self.straggler_share
            seconds = seconds * np.where(late, self.straggler_factor, 1.0)
        return np.rint(seconds * TICKS_PER_S)


def _uniform(key: np.uint64, nodes: np.ndarray, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two sets of numbers over 0 and up to 1, from the halves of a 64-bit hash of (key, node, step)."""
    bits = _mix(_mix(nodes.astype(np.uint64) + key) ^ steps.astype(np.uint64))
    return ((bits >> np.uint64(32)) + 1.0) / 2**32, ((bits & np.uint64(0xFFFFFFFF)) + 1.0) / 2**32


def _mix(x: np.ndarray) -> np.ndarray:
    """Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
