"""Claims about methods whose nodes never have equal parameters."""

from __future__ import annotations

from research.reproduce.checks import no_worse, spread_follows_lr, spread_shrinks
from research.reproduce.claim import Cell, Claim
from research.reproduce.claims.diloco import DILOCO

NOLOCO = Cell("noloco:H=30")

CLAIMS = [
    Claim(
        "R9",
        "NoLoCo is as good as DiLoCo; its nodes move together as the learning rate falls",
        "Kolehmainen et al., NoLoCo, arXiv:2506.10911",
        "With 125M parameters and 8 nodes, the perplexity of DiLoCo and NoLoCo is 27.6 and 27.3 on Reddit, and 35.4 "
        "and 34.5 on C4. NoLoCo synchronizes every 50 steps, DiLoCo every 100.",
        "We use N = 4 and H = 30 for both, so NoLoCo and DiLoCo synchronize equally often. Is NoLoCo's loss at most "
        "2 % above DiLoCo's loss? Is the last distance between NoLoCo's nodes at most half of the largest distance?",
        {"DiLoCo": DILOCO, "NoLoCo": NOLOCO},
        [no_worse("NoLoCo", "DiLoCo", 0.02), spread_shrinks("NoLoCo", 0.5)],
    ),
    Claim(
        "R10",
        "The nodes' distance follows the inner learning rate",
        "Kolehmainen et al., NoLoCo, arXiv:2506.10911, theorem on the variance",
        "The correlation between the nodes' distance from each other and the inner learning rate is 0.91 to 0.97.",
        "NoLoCo trains with N = 4, H = 30 and a cosine schedule. Is this correlation at least 0.9 in every seed? We "
        "take only the evaluations after 15 % of the steps.",
        {"NoLoCo": NOLOCO},
        [spread_follows_lr("NoLoCo", 0.9)],
        "spread",
    ),
]
