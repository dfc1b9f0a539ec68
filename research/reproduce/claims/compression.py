"""Claims about methods that send less: signs, the largest coefficients, or a share of the parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from research.reproduce.checks import bytes_are, lower, no_worse
from research.reproduce.claim import Cell, Claim
from research.reproduce.claims.diloco import DDP, DILOCO, MODERATE, SINGLE

if TYPE_CHECKING:
    from exogym.strategy.strategy import Strategy
    from exogym.study.compare.entries import ComparisonSetting


def demo_without_transform(setting: ComparisonSetting) -> Strategy:
    """Return DeMo with its defaults and k = 4, but without the transform: nodes send the momentum's largest entries."""
    from research.reproduce.claims import without_transform

    return without_transform.demo_without_transform(setting)


SPARSELOCO = Cell("sparseloco:H=30:outer_lr=1.0")  # the paper's outer rate, not the task's
DENSE = {"SparseLoCo": SPARSELOCO, "DiLoCo, 0.7": DILOCO, "DiLoCo, 0.4": MODERATE}


CLAIMS = [
    Claim(
        "R12",
        "DeMo needs its cosine transform, and few coefficients are as good as all",
        "Peng, Quesnelle, Kingma, DeMo, arXiv:2411.19870",
        "With OLMo 300M, AdamW sends 636.9 MB a step, DeMo 7.49 MB with k = 8 and 0.93 MB with k = 1. Their HellaSwag "
        "scores are 0.35, 0.38 and 0.35.",
        "DeMo sends k = 4 of up to 4,096 coefficients, with decay 0.999. Is the loss with the transform lower than "
        "without the transform in every seed? Is the loss with k = 4 at most 3 % above the loss with all "
        "coefficients, at less than a hundredth of the bytes?",
        {
            "DCT, k=4": Cell("demo:compression_topk=4"),
            "no transform, k=4": Cell(demo_without_transform),
            "all coefficients": Cell("demo:compression_topk=4096"),
        },
        [
            lower("DCT, k=4", "no transform, k=4"),
            no_worse("DCT, k=4", "all coefficients", 0.03),
            lower("DCT, k=4", "all coefficients", by=0.99, measure="payload_bytes"),
        ],
    ),
    Claim(
        "R13",
        "SparseLoCo beats DiLoCo",
        "Sarfi et al., SparseLoCo, arXiv:2508.15706",
        "With 512M parameters and H from 15 to 100, sending 1 to 3 % of the values in 2 bits, with error feedback, is "
        "better than DiLoCo, which sends all values.",
        "We use N = 4, H = 30, chunks of 4,096 values, the k = 64 largest of each chunk in 2 bits, and the default "
        "decay. Is SparseLoCo's loss lower in every seed than DiLoCo's loss with outer rates of 0.7 and 0.4? We did "
        "not expect a lower loss in such a short run, since error feedback needs many rounds.",
        DENSE,
        [lower("SparseLoCo", "DiLoCo, 0.7"), lower("SparseLoCo", "DiLoCo, 0.4")],
        notes="In 33 rounds a node sends 1.6 % of the values each time, so at most half of all values. The paper's "
        "runs are longer. We did not try a larger k or more rounds.",
    ),
    Claim(
        "sparse-bytes",
        "SparseLoCo is near DiLoCo at 1/146 of its bytes",
        "arXiv:2603.08163; Sarfi et al., SparseLoCo, arXiv:2508.15706",
        "SparseLoCo sends the k = 64 largest of each chunk of 4,096 values, with 2 bits for a value and 12 bits for "
        "its index. These are 146 times fewer bytes than all values in fp32.",
        "We use the setting of R13. Is the loss at most 3 % above DiLoCo's loss at both outer rates, with 1/146 of the "
        "payload? Our tensors and chunks are small, and k is rounded up in each chunk. So we allow 15 % more or fewer "
        "bytes.",
        DENSE,
        [
            no_worse("SparseLoCo", "DiLoCo, 0.7", 0.03),
            no_worse("SparseLoCo", "DiLoCo, 0.4", 0.03),
            bytes_are("SparseLoCo", "DiLoCo, 0.7", 64 / 4096 * 14 / 32, within=0.15),
        ],
    ),
    Claim(
        "R14",
        "SPARTA with 0.5 to 5 % of the parameters lies between one node and DDP",
        "SPARTA, openreview stFPf3gzq1",
        "With 124M parameters, averaging 0.05 to 0.5 % of them per step keeps the replicas' correlation above 0.9, "
        "and lowers the loss.",
        "We use N = 4, and nodes average a share p of 0.5 % or 5 % of the parameters per step. In every seed, is DDP "
        "better than SPARTA, and is SPARTA better than one node?",
        {
            "one node": SINGLE,
            "p=0.5%": Cell("sparta:p_sparta=0.005"),
            "p=5%": Cell("sparta:p_sparta=0.05"),
            "DDP": DDP,
        },
        [lower("DDP", "p=5%"), lower("p=5%", "one node"), lower("DDP", "p=0.5%"), lower("p=0.5%", "one node")],
    ),
]
