"""Robust means: rules that replace a mean over nodes when some nodes may send arbitrary values.

Yin, Chen, Ramchandran, Bartlett, Byzantine-Robust Distributed Learning, arXiv:1803.01498 (median, trimmed mean);
Blanchard, El Mhamdi, Guerraoui, Stainer, Machine Learning with Adversaries, arXiv:1703.02757 (Krum). n members have
the vectors x_1, ..., x_n, and f members may be bad:

    median        the middle value of each coordinate; if n is even, the mean of the two middle values
    trimmed mean  the mean of each coordinate without its f largest and f smallest values
    Krum          the vector x_i with the least s(i), the sum of |x_i - x_j|^2 over the n - f - 2 members j that are
                  closest to i; if several s(i) are equal, the vector with the lowest id
    multi-Krum    the mean of the m vectors with the least s

All members have equal weight, because a bad member could claim any weight. The option `share` is the share of members
that may be bad: f is floor(share n), but at least 1 and at most floor((n-1)/2), for Krum floor((n-3)/2), so f is 0 if n
< 3, and for Krum if n < 5. If n < 3, every rule is the mean, because two nodes cannot find out which of them is bad.
Strategies refuse a rule whose f is 0 even if all members are present (`Rule.least`). If some members are absent, n
counts the present ones.

Bytes for a payload S: for the median and the trimmed mean, each member receives its slice of all vectors, (n-1)/n S,
and then all members gather the results, so that each sends and receives 2(n-1)/n S as in a ring all-reduce (the
algorithm "exact"). Krum compares whole vectors, so every member receives all of them in an all-gather: each sends and
receives (n-1) S. With a server, each member sends and receives S.

>>> from exogym.communicator import Wire
>>> rule: Rule = rule_of("median")
>>> rule.of(Wire(range(4)), torch.arange(8.0).view(4, 2), range(4)).tolist()
[3.0, 4.0]
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exogym.core.base.devices import widest
from exogym.core.base.lazy import absent
from exogym.core.communicator import ALONE, Columns
from exogym.core.communicator.wire import HALVES, Wire, reduce_rows, tree_sum
from exogym.errors import ArgumentError, check_choice, check_count

__all__ = ["RULES", "Krum", "Median", "Rule", "TrimmedMean", "rule_of"]

__getattr__ = functools.partial(absent, __name__)  # names that used to be here

CHUNK = 1 << 20  # elements whose distances are summed at once


@dataclass(frozen=True)
class Rule:
    """A rule that replaces a mean over nodes. Rules that treat each column separately override `trimmed`.

    Attributes:
        collective: kind and algorithm of the collective that computes the rule if no server does.
        least: the smallest number of members with which the rule tolerates a bad member.
    """

    collective = ("all_reduce", "exact")
    least = 3

    def trimmed(self, n: int) -> int:
        """Return how many of n values the rule drops at each end, the smallest and the largest."""
        raise NotImplementedError

    def of(self, wire: Wire, x: Tensor, ids: Sequence[int], columns: Columns = ALONE) -> Tensor:
        """Return the (F,) robust mean of the rows `ids` of `x` (rows, F), in every process.

        `columns` connects to the node's other processes, which hold the other columns of `x`.
        """
        return wire.reduce(x, ids, f"trimmed {self.trimmed(len(ids))}")

    def of_rows(self, members: Tensor, ids: Sequence[int], columns: Columns = ALONE) -> Tensor:
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
    """The mean of each coordinate without its largest and smallest values.

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
    """Krum's rule: the vector closest to its nearest neighbors, or the mean of the `keep` closest vectors.

    Args:
        share: share of the members that may be bad, over 0 and under one half.
        keep: number of vectors in the mean, at most the number of good members. 1 is Krum; more is multi-Krum (the
            paper's m).

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

    def of(self, wire: Wire, x: Tensor, ids: Sequence[int], columns: Columns = ALONE) -> Tensor:
        return self.of_rows(wire.rows(x, ids), ids, columns)

    def of_rows(self, members: Tensor, ids: Sequence[int], columns: Columns = ALONE) -> Tensor:
        n = len(members)
        if n < 3:
            return reduce_rows(members, ids, "mean")
        f = bad_among(n, self.share, (n - 3) // 2)
        scores = (
            distances(members, columns).sort(1).values[:, 1 : max(n - f - 1, 2)].sum(1)
        )  # the closest is the vector itself
        chosen = scores.sort(stable=True).indices[: min(self.keep, n - f)].sort().values
        return tree_sum(members[chosen], range(len(chosen)), None, len(chosen))


# robust means by name
RULES: dict[str, type[Rule]] = {"median": Median, "trimmed_mean": TrimmedMean, "krum": Krum}


def bad_among(n: int, share: float, most: int) -> int:
    """Return f, the number of n members that may be bad: floor(share n), but at least 1 and at most `most`.

    >>> [bad_among(n, 0.25, (n - 1) // 2) for n in (1, 2, 3, 4, 8, 9, 12)]
    [0, 0, 1, 1, 2, 2, 3]
    """
    return max(0, min(max(1, math.floor(share * n + 1e-9)), most))


def check_share(share: float) -> None:
    """Raise ArgumentError unless `share`, the share of bad members, is over 0 and under 0.5."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 0.5:
        raise ArgumentError(f"share={share!r} of bad nodes must be over 0 and under 0.5: no rule tolerates more")


def rule_of(given: str | Rule) -> Rule:
    """Return the rule with the given name, or the given `Rule` itself.

    Raises:
        ArgumentError: the name is unknown.
    """
    if isinstance(given, Rule):
        return given
    check_choice("robust", given, RULES)
    return RULES[given]()


def distances(members: Tensor, columns: Columns = ALONE) -> Tensor:
    """Return the (n, n) squared distances between the rows of `members` (n, F), in float64.

    A distance is infinite if one of its rows has a value that is not finite. The distances include the columns of all
    processes of `columns`. Each pair's difference is computed separately, so results do not depend on which process
    holds which row.
    """
    n, width = members.shape
    out = torch.zeros(n, n, dtype=torch.float64)
    exact = torch.float32 if members.dtype in HALVES else members.dtype
    for start in range(0, width, CHUNK):
        part = members[:, start : start + CHUNK].to(exact)
        for i in range(n):
            for j in range(i):
                out[i, j] += widest(part[i] - part[j]).square().sum().cpu()
    out = columns.sum(out)
    out += out.T.clone()
    return out.nan_to_num(nan=math.inf, posinf=math.inf).fill_diagonal_(0)
