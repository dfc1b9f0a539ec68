"""Claims about nodes that do not wait for each other."""

from __future__ import annotations

from research.reproduce.checks import lower, no_worse
from research.reproduce.claim import Cell, Claim
from research.reproduce.claims.diloco import MODERATE

SPEEDS = (1.0, 0.75, 0.5, 0.25)


def unequal(rule: str) -> Cell:
    """Return a cell: asynchronous DiLoCo with the options `rule`, and nodes of different speeds."""
    return Cell(f"async_diloco:H=30:outer_lr=0.4:{rule}", speeds=SPEEDS)


CLAIMS = [
    Claim(
        "R7",
        "Waiting beats naive asynchrony, but not delayed Nesterov with dynamic local updates",
        "Liu et al., Asynchronous local-SGD, arXiv:2401.09135",
        "With 20M parameters, H = 50 and 4 workers of very different speeds, the perplexity is 41.35 for synchronous "
        "training, 44.27 for naive asynchrony, and 41.13 for delayed Nesterov with dynamic local updates.",
        "Four nodes have speeds 1, 0.75, 0.5 and 0.25, with H = 30 and an outer rate of 0.4. All strategies take the "
        "same number of local steps in total. Is the naive strategy worse than both others? Is the loss of delayed "
        "Nesterov with dynamic updates at most 1 % above the synchronous loss?",
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
        "An update that is s versions old is multiplied by (1 + s)^-1/2. This discount does not close the gap between "
        "naive asynchrony and waiting.",
        "We use the setting of R7. Is the naive rule's loss at most 1 % above the discounted rule's loss? Is the "
        "discounted rule still worse than delayed Nesterov with dynamic updates?",
        {
            "naive": unequal("rule=nesterov"),
            "discounted": unequal("rule=discount"),
            "delayed Nesterov, dynamic": unequal("dylu=true"),
        },
        [no_worse("naive", "discounted", 0.01), lower("delayed Nesterov, dynamic", "discounted")],
    ),
]
