"""Claims about nodes that do not wait for each other."""

from __future__ import annotations

from exogym.study.reproduce.checks import lower, no_worse
from exogym.study.reproduce.claim import Cell, Claim
from exogym.study.reproduce.claims.diloco import MODERATE

SPEEDS = (1.0, 0.75, 0.5, 0.25)


def unequal(rule: str) -> Cell:
    """Return a cell: asynchronous DiLoCo with the options `rule`, and nodes of different speeds."""
    return Cell(f"async_diloco:H=30:outer_lr=0.4:{rule}", speeds=SPEEDS)


CLAIMS = [
    Claim(
        "R7",
        "Naive asynchrony is worse than waiting; delayed Nesterov with dynamic local updates is not",
        "Liu et al., Asynchronous local-SGD, arXiv:2401.09135",
        "With 20M parameters, H = 50 and 4 workers of very different speeds, the perplexity is 41.35 for synchronous "
        "training, 44.27 for naive asynchrony, and 41.13 for delayed Nesterov with dynamic local updates.",
        "N = 4 with speeds 1, 0.75, 0.5, 0.25, H = 30, outer rate 0.4, and the same number of local steps in all. Is "
        "naive worse than both, and is delayed Nesterov with dynamic updates at most 1 % above synchronous?",
        {
            "synchronous": MODERATE,
            "naive": unequal("rule=nesterov"),
            "delayed Nesterov, dynamic": unequal("dylu=true"),
        },
        [
            lower("synchronous", "naive"),
            lower("delayed Nesterov, dynamic", "naive"),
            no_worse("delayed Nesterov, dynamic", "synchronous", 0.01),
        ],
    ),
    Claim(
        "R8",
        "Discounting stale updates hardly helps",
        "Liu et al., Asynchronous local-SGD, arXiv:2401.09135",
        "Discounting updates that are s versions old by (1 + s)^-1/2 does not close naive asynchrony's gap.",
        "In the setting of R7: is the naive rule's loss at most 1 % above the discounted rule's, and is the "
        "discounted rule still worse than delayed Nesterov with dynamic updates?",
        {
            "naive": unequal("rule=nesterov"),
            "discounted": unequal("rule=discount"),
            "delayed Nesterov, dynamic": unequal("dylu=true"),
        },
        [no_worse("naive", "discounted", 0.01), lower("delayed Nesterov, dynamic", "discounted")],
    ),
]
