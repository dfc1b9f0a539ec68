"""Robust means: rules that replace a mean over nodes when some nodes may send anything.

Yin, Chen, Ramchandran, Bartlett, Byzantine-Robust Distributed Learning, arXiv:1803.01498 (median, trimmed mean);
Blanchard, El Mhamdi, Guerraoui, Stainer, Machine Learning with Adversaries, arXiv:1703.02757 (Krum). n
members have the vectors x_1, ..., x_n, and f members may be bad:

    median        of each coordinate the middle value; of an even number the mean of the two in the middle
    trimmed mean  of each coordinate the mean without the f largest and the f smallest values
    Krum          x_i with the least s(i) = sum of |x_i - x_j|^2 over the n - f - 2 other j that are closest to i; among
                  equals the lowest id
    multi-Krum    the mean of the m vectors with the least s

All members have equal weight, because a bad member could claim any weight. f is floor(share n), but at least 1 and at
most (n-1)/2, for Krum (n-3)/2, rounded down. So f is 0 with n < 3, and for Krum with n < 5. With n < 3 every rule is
the mean, because two nodes cannot tell which is bad. Strategies refuse a rule whose f is 0 when all members are present
(`Rule.least`). If members are absent, the others use the rule with the f for their number.

Bytes, S being the payload. The median and the trimmed mean work slice by slice. Each member gets its slice of all
vectors, (n-1)/n S, and all gather the results. This takes 2(n-1)/n S each way, as a ring all-reduce, "exact". Krum
compares whole vectors, so every member gets all of them: an all-gather, (n-1) S each way. Through a server each takes S
each way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exogym.core.communicator.inside import ALONE, Inside
from exogym.core.communicator.wire import HALVES, Wire, reduce_rows, tree_sum
from exogym.errors import ArgumentError, check_choice, check_count

CHUNK = 1 << 20  # elements whose distances are summed at once


@dataclass(frozen=True)
class Rule:
    """A robust mean. Rules that act on columns say how many values they leave out on each side.

    Attributes:
        collective: kind and algorithm of its all-reduce without a server.
        least: the fewest members with which it tolerates a bad member.
    """

    collective = ("all_reduce", "exact")
    least = 3

    def trimmed(self, n: int) -> int:
        """Return how many of n values are left out on each side."""
        raise NotImplementedError

    def of(self, wire: Wire, x: Tensor, ids: Sequence[int], inside: Inside = ALONE) -> Tensor:
        """Return the (F,) robust mean of the rows `ids` of `x` (rows, F), in every process.

        `inside` are the node's processes with the other columns.
        """
        return wire.reduce(x, ids, f"trimmed {self.trimmed(len(ids))}")

    def of_rows(self, members: Tensor, ids: Sequence[int], inside: Inside = ALONE) -> Tensor:
        """Return the (F,) robust mean of `members` (n, F)."""
        return reduce_rows(members, ids, f"trimmed {self.trimmed(len(ids))}")


@dataclass(frozen=True)
class Median(Rule):
    """The median of each coordinate.

    >>> Median().of_rows(torch.tensor([[1.0], [2.0], [99.0]]), range(3))
    tensor([2.])
    """

    def trimmed(self, n: int) -> int:
        return (n - 1) // 2


@dataclass(frozen=True)
class TrimmedMean(Rule):
    """The mean of each coordinate without its extremes.

    Args:
        share: share of the members that may be bad, over 0 and under one half (the paper's beta).

    >>> TrimmedMean(0.25).of_rows(torch.tensor([[1.0], [2.0], [4.0], [99.0]]), range(4))
    tensor([3.])
    """

    share: float = 0.25

    def __post_init__(self) -> None:
        check_share(self.share)

    def trimmed(self, n: int) -> int:
        return bad_among(n, self.share, (n - 1) // 2)


@dataclass(frozen=True)
class Krum(Rule):
    """The vector that lies closest to its neighbors, or the mean of the `keep` closest.

    Args:
        share: share of the members that may be bad, over 0 and under one half.
        keep: m of multi-Krum; 1 is Krum. At most all members minus the bad ones.

    >>> Krum().of_rows(torch.tensor([[1.0], [1.5], [1.75], [99.0]]), range(4))
    tensor([1.5000])
    """

    share: float = 0.25
    keep: int = 1
    collective = ("all_gather", "ring")
    least = 5

    def __post_init__(self) -> None:
        check_share(self.share)
        check_count("keep", self.keep)

    def of(self, wire: Wire, x: Tensor, ids: Sequence[int], inside: Inside = ALONE) -> Tensor:
        return self.of_rows(wire.rows(x, ids), ids, inside)

    def of_rows(self, members: Tensor, ids: Sequence[int], inside: Inside = ALONE) -> Tensor:
        n = len(members)
        if n < 3:
            return reduce_rows(members, ids, "mean")
        f = bad_among(n, self.share, (n - 3) // 2)
        scores = distances(members, inside).sort(1).values[:, 1 : n - f - 1].sum(1)  # the closest is the node itself
        chosen = scores.sort(stable=True).indices[: min(self.keep, n - f)].sort().values.tolist()
        return tree_sum(members[chosen], range(len(chosen)), None, len(chosen))


# robust means by name
RULES: dict[str, type[Rule]] = {"median": Median, "trimmed_mean": TrimmedMean, "krum": Krum}


def bad_among(n: int, share: float, most: int) -> int:
    """Return f of n members: floor(share n), at least 1 and at most `most`.

    >>> [bad_among(n, 0.25, (n - 1) // 2) for n in (1, 2, 3, 4, 8, 9, 12)]
    [0, 0, 1, 1, 2, 2, 3]
    """
    return max(0, min(max(1, math.floor(share * n + 1e-9)), most))


def check_share(share: float) -> None:
    """Raise ArgumentError unless fewer than half may be bad."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 0.5:
        raise ArgumentError(f"share={share!r} of bad nodes must be over 0 and under 0.5: no rule can bear more")


def rule_of(given: str | Rule) -> Rule:
    """Return a rule by its name, or unchanged.

    Raises:
        ArgumentError: the name is unknown.
    """
    if isinstance(given, Rule):
        return given
    check_choice("robust", given, RULES)
    return RULES[given]()


def distances(members: Tensor, inside: Inside = ALONE) -> Tensor:
    """Return the (n, n) squared distances of `members` (n, F), in float64; infinite for members that are not finite.

    They sum over the columns of all processes of `inside`. Each pair's difference is computed alone, so the bits do not
    depend on where the rows lie.
    """
    n, width = members.shape
    out = torch.zeros(n, n, dtype=torch.float64)
    exact = torch.float32 if members.dtype in HALVES else members.dtype
    for start in range(0, width, CHUNK):
        part = members[:, start : start + CHUNK].to(exact)
        for i in range(n):
            for j in range(i):
                out[i, j] += (part[i] - part[j]).double().square().sum().cpu()
    out = inside.sum(out)
    out += out.T.clone()
    return out.nan_to_num(nan=math.inf, posinf=math.inf).fill_diagonal_(0)
