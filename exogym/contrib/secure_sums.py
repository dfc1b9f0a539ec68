"""Secure aggregation: the server learns the sum of the clients' messages, but no single message.

    Secure(FedAvgStrategy(H=5))

Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017 (with honest but curious
parties). n members start the protocol; a member comes through if it finishes it. t = floor(n/2) + 1 shares recover a
secret. u and v are members, PRG is a pseudo-random generator, and g generates a group:

    keys      u sends two public keys: g^s_u for its secret key s_u, and an encryption key
    shares    u sends every other v an encrypted Shamir share of s_u, and of a random seed b_u
    masked    u sends y_u = x_u + PRG(b_u) + sum_{v > u} PRG(s_uv) - sum_{v < u} PRG(s_uv),  s_uv = g^(s_u s_v)
    unmask    each member that came through sends, for each other v, a share of b_v if v came through, otherwise of s_v
    server    sum_{u came through} (y_u - PRG(b_u)) - (these u's masks with v, for each v that dropped out)

x_u is member u's value x in fixed point, times its weight w_u: round(w_u x 2^f) in the integers modulo 2^bits. Masks
cancel exactly, so the result is the mean of the rounded values for any keys, with a rounding error of at most 2^-(f+1)
per member.

ExoGym draws the secrets from the run's seed and uses a group that is too small to be secure, so this module shows the
messages and that the masks cancel, but hides nothing from this process.

Bytes of a member, for F elements of S bytes in all: it sends 2 keys of 32 bytes each, n-1 encrypted pairs of shares of
80 bytes each (2 shares of 32 bytes, and 16 bytes for the encryption), F bits/8 bytes for y_u, and n-1 shares of 32
bytes each. A member receives n-1 pairs of keys of 64 bytes each, n-1 encrypted pairs of shares of 80 bytes each, and
the mean (S bytes). Neither lists of present members nor members that drop out count.

>>> from exogym.communicator import Communicator
>>> comm = Communicator(range(4), 4)
>>> comm.secure = SecureAggregation(bits=32)  # the same mean, in integers that nobody can read alone
>>> comm.all_reduce(torch.arange(8.0).view(4, 2))[0].tolist()
[3.0, 4.0]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from exogym.contrib.robust import wrapped
from exogym.core.base.devices import widest
from exogym.core.base.rng import stream_seed
from exogym.core.communicator import Communicator
from exogym.core.communicator.wire import Wire
from exogym.errors import ArgumentError, TrainingError, check_count
from exogym.strategy.averaging import Averaging
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym.strategy.traffic import Traffic

__all__ = ["SecureAggregation"]

PRIME, BASE = 2**127 - 1, 3  # of the toy group and the field of shares
KEY_BYTES, SHARE_BYTES, SEAL_BYTES = 32, 32, 16
FRACTION_BITS = {32: 16, 64: 40}
DTYPES = {32: torch.int32, 64: torch.int64}


@dataclass(frozen=True)
class SecureAggregation:
    """Secure aggregation of means, with options for how integers represent values.

    Args:
        bits: bits of each element that a member sends: 32 or 64.
        fraction_bits: f, the bits for fractions. None means 16 of 32 bits, or 40 of 64 bits. Values of n members must
            stay under 2^(bits - 1 - f) / n.
        seed: seed of the keys.

    Raises:
        ArgumentError: `bits` is not 32 or 64, or `fraction_bits` leaves no bits for whole numbers.
    """

    bits: int = 64
    fraction_bits: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits not in DTYPES:
            raise ArgumentError(f"SecureAggregation: bits={self.bits!r} must be 32 or 64")
        if self.fraction_bits is not None:
            check_count("fraction_bits", self.fraction_bits, least=0)
            if self.fraction_bits > self.bits - 2:
                raise ArgumentError(
                    f"fraction_bits={self.fraction_bits} leaves none of {self.bits} bits for whole numbers: lower it"
                )

    @property
    def scale(self) -> float:
        """The factor 2^f between a value and the integer that represents it."""
        return 2.0 ** (FRACTION_BITS[self.bits] if self.fraction_bits is None else self.fraction_bits)

    def sent(self, elements: float, size: float, n: int) -> list[tuple[str, float]]:
        """Return the messages of one of n members in order: ("push", bytes sent) or ("pull", bytes received).

        The member's values are `elements` numbers of `size` bytes in all.
        """
        others = n - 1
        shares = others * (2 * SHARE_BYTES + SEAL_BYTES)
        messages = [("push", 2.0 * KEY_BYTES), ("pull", 2.0 * KEY_BYTES * others), ("push", shares), ("pull", shares)]
        return [*messages, ("push", elements * self.bits / 8), ("push", others * SHARE_BYTES), ("pull", size)]

    def mean(
        self, wire: Wire, x: Tensor, came: Sequence[int], members: Sequence[int], share: Tensor | None, call: int
    ) -> Tensor:
        """Return the (F,) mean of the rows `came` of `x` (rows, F).

        Args:
            came: ids of the members that finished the protocol.
            members: ids of the members that started the protocol.
            share: (len(came),) weights of the rows. None means equal weights.
            call: number of this aggregation, which draws its own keys.

        Raises:
            ArgumentError: a value does not fit into the integers.
            TrainingError: too few members came through to unmask the sum.
        """
        n = len(members)
        if len(came) < n // 2 + 1:
            raise TrainingError(
                f"secure aggregation: {len(came)} of {n} nodes came through, but {n // 2 + 1} are needed to unmask "
                "their sum: let fewer nodes drop out, or leave secure_aggregation out"
            )
        weights = torch.ones(len(came), dtype=torch.float64) if share is None else (share / share.max()).cpu()
        self._check_range(wire, x, came, n)
        seeds = Seeds(self.seed, call, members)
        masked = torch.zeros(len(x), x.shape[1], dtype=DTYPES[self.bits])
        for u, weight in zip(came, weights.tolist(), strict=True):
            if u in wire.row_of:
                row = wire.row_of[u]
                fixed = (widest(x[row]) * (weight * self.scale)).round().cpu().to(torch.int64).to(masked.dtype)
                masked[row] = fixed + self._masks(seeds, u, x.shape[1])
        total = wire.reduce(masked, came, "sum") - self._unmasking(seeds, came, x.shape[1])
        return (widest(total) / (self.scale * float(weights.sum()))).to(x.device, x.dtype)

    def _check_range(self, wire: Wire, x: Tensor, came: Sequence[int], n: int) -> None:
        largest = float(wire.reduce(x.abs().amax(1, keepdim=True).cpu().double(), came, "max"))
        most = 2.0 ** (self.bits - 1) / self.scale / n
        if not largest < most:
            raise ArgumentError(
                f"secure aggregation: a value of {largest:.3g} does not fit. A sum of {n} values in {self.bits} bits "
                f"needs values under {most:.3g}: use more bits, as SecureAggregation(bits=64), or fewer fraction_bits"
            )

    def _masks(self, seeds: Seeds, u: int, width: int) -> Tensor:
        """Return the (F,) masks of member `u`."""
        masks = self._drawn(seeds.own[u], width)
        for v in seeds.members:
            if v != u:
                pair = self._drawn(seeds.agreed(u, v), width)
                masks += pair if v > u else -pair
        return masks

    def _unmasking(self, seeds: Seeds, came: Sequence[int], width: int) -> Tensor:
        """Return the (F,) masks left in the sum of the members `came`, computed only from their shares."""
        left = torch.zeros(width, dtype=DTYPES[self.bits])
        for u in came:
            left += self._drawn(recovered(seeds.shares_of_own(u), came, seeds.members), width)
        for v in sorted(set(seeds.members) - set(came)):
            secret = recovered(seeds.shares_of_secret(v), came, seeds.members)
            for u in came:
                pair = self._drawn(pow(seeds.public[u], secret, PRIME), width)
                left += pair if v > u else -pair
        return left

    def _drawn(self, seed: int, width: int) -> Tensor:
        """Return `width` pseudo-random numbers of the ring (PRG)."""
        kind, signed = (np.uint32, np.int32) if self.bits == 32 else (np.uint64, np.int64)
        drawn = np.random.Generator(np.random.Philox(key=seed)).integers(0, 2**self.bits, width, dtype=kind)
        return torch.from_numpy(drawn.view(signed))


class Seeds:
    """The secrets of the members of one aggregation.

    Each method uses only values that member `u` knows in the protocol.
    """

    def __init__(self, seed: int, call: int, members: Sequence[int]):
        self.members, self._names = list(members), (seed, call)
        self.threshold = len(self.members) // 2 + 1
        self.own = {u: self._number("own", u) for u in self.members}
        self._secret = {u: self._number("secret", u) for u in self.members}
        self.public = {u: pow(BASE, secret, PRIME) for u, secret in self._secret.items()}

    def agreed(self, u: int, v: int) -> int:
        """Return the common secret s_uv of members u and v, computed from u's secret key and v's public key."""
        return pow(self.public[v], self._secret[u], PRIME)

    def shares_of_own(self, u: int) -> list[int]:
        """Return each member's share of b_u, the seed of member u's own mask."""
        return self._shares("own", u, self.own[u])

    def shares_of_secret(self, u: int) -> list[int]:
        """Return each member's share of s_u, member u's secret key."""
        return self._shares("secret", u, self._secret[u])

    def _shares(self, what: str, u: int, value: int) -> list[int]:
        """Return Shamir's shares: the values at 1, 2, ..., n of a polynomial of degree t - 1 with `value` at 0."""
        coefficients = [value, *(self._number(f"{what} share", u, k) for k in range(1, self.threshold))]
        return [
            sum(c * pow(at, k, PRIME) for k, c in enumerate(coefficients)) % PRIME
            for at in range(1, len(self.members) + 1)
        ]

    def _number(self, what: str, *ids: int) -> int:
        seed, call = self._names
        high, low = (stream_seed(seed, f"secure {what} {part}", call, *ids) for part in ("high", "low"))
        return ((high << 63) | low) % PRIME


def recovered(shares: Sequence[int], came: Sequence[int], members: Sequence[int]) -> int:
    """Return the secret of `shares`, from the shares of the first t members in `came`.

    `shares` has one share per member in `members`, and the members in `came` finished the protocol. The secret is the
    value at 0 of the Lagrange polynomial through t = floor(n/2) + 1 shares of n members.
    """
    order = list(members)
    points = [order.index(u) + 1 for u in came][: len(order) // 2 + 1]
    total = 0
    for at in points:
        others = [other for other in points if other != at]
        above = math.prod(-other for other in others)
        below = math.prod(at - other for other in others)
        total += shares[at - 1] * above * pow(below, -1, PRIME)
    return total % PRIME


def Secure(
    strategy: CommunicateOptimizeStrategy, settings: SecureAggregation | None = None
) -> CommunicateOptimizeStrategy:
    """Return the strategy with means that a server computes without seeing any node's values.

    Args:
        strategy: a strategy of modules.
        settings: how integers represent values; None means `SecureAggregation()`.

    Raises:
        ArgumentError: `settings` is something else, or the strategy sends more than sums.

    >>> from exogym.strategy import DiLoCoStrategy
    >>> Secure(DiLoCoStrategy(H=5)).averaging
    SecureAveraging(secure_aggregation=True)
    """
    return wrapped(strategy, SecureAveraging, secure_aggregation=True if settings is None else settings)


@dataclass(frozen=True, repr=False)
class SecureAveraging(Averaging):
    """The averages of `Secure`.

    Args:
        secure_aggregation: True, or a `SecureAggregation` with your arguments.
    """

    secure_aggregation: bool | SecureAggregation = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.secure_aggregation is not True and not isinstance(self.secure_aggregation, SecureAggregation):
            raise ArgumentError(f"settings={self.secure_aggregation!r} must be a SecureAggregation, or None")

    @property
    def secure(self) -> SecureAggregation:
        """The settings of secure aggregation."""
        given = self.secure_aggregation
        return given if isinstance(given, SecureAggregation) else SecureAggregation()

    @property
    def sums_buckets(self) -> bool:  # type: ignore[override]
        return False

    def features(self) -> dict[str, str]:
        return super().features() | {"secure_aggregation": f"secure_aggregation={self.secure_aggregation!r}"}

    def traffic(self, given: list[Traffic], N: int, b: float) -> list[Traffic]:
        return [
            Traffic(kind, size, t.every_steps, t.members, "server")
            for t in given
            for kind, size in self.secure.sent(t.payload_bytes / b, t.payload_bytes, t.members or N)
        ]

    def bind(self, comm: Communicator, weighs: bool, seed: int = 0) -> None:
        super().bind(comm, weighs, seed)
        comm.secure = replace(self.secure, seed=seed)
