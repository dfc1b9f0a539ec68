"""Claims about DiLoCo: nodes, steps between synchronisations, the outer optimizer, the inner one."""

from __future__ import annotations

from exogym.study.reproduce.checks import ascending, best_H_grows, best_is, bytes_are, lower, no_worse
from exogym.study.reproduce.claim import Cell, Claim

DDP, SINGLE = Cell("ddp"), Cell("single")
DILOCO = Cell("diloco:H=30:outer_lr=0.7")  # 33 outer rounds in the 1,000 steps of the task
MODERATE = Cell("diloco:H=30:outer_lr=0.4")

CLAIMS = [
    Claim(
        "R1",
        "One node < DiLoCo < DDP at equal steps",
        "Douillard et al., DiLoCo, arXiv:2311.08105; Charles et al., arXiv:2503.09799",
        "150M parameters, C4, N = 8, H = 500, perplexity: one worker 16.23, DiLoCo 15.02, 8 times the batch 15.30, "
        "8 times the updates 14.72. In the second paper data-parallel training is ahead of DiLoCo with N > 1 at small "
        "sizes: 35M, N = 4, H = 30: loss 3.554 against 3.485.",
        "N = 4, H = 30: is DDP ahead of DiLoCo, and DiLoCo of one node alone, in every seed?",
        {"one node": SINGLE, "DiLoCo": DILOCO, "DDP": DDP},
        [lower("DDP", "DiLoCo"), lower("DiLoCo", "one node")],
        "curves",
        "In one seed DiLoCo ends behind one node. With H = 10 and an outer rate of 0.4 on the same task it is ahead "
        "of one node in the table of the results page (2.0901 ± 0.0143 against 2.1958 ± 0.0094). With H = 30 an outer "
        "rate of 0.4 is no better (R13). The outer momentum has 33 rounds here; the paper's has 128, after 24,000 "
        "steps of one node.",
    ),
    Claim(
        "R2",
        "DiLoCo's gap to DDP grows with the number of nodes at equal tokens",
        "Charles et al., Scaling laws for DiLoCo, arXiv:2503.09799",
        "35M parameters, H = 30, the global batch shared out, loss over data-parallel's: N = 1 -0.1 %, N = 2 +0.7 %, "
        "N = 4 +2.0 %, N = 8 +3.9 %. The best outer rates there: 0.4, 0.6, 0.6, 0.8.",
        "The same with a global batch of 32 windows and the paper's outer rates: does the loss rise from N = 2 to 4 to "
        "8, and is N = 1 ahead of DDP?",
        {
            "DDP": DDP,
            "N=1": Cell("diloco:H=30:outer_lr=0.4", nodes=1, batch_size=32),
            "N=2": Cell("diloco:H=30:outer_lr=0.6", nodes=2, batch_size=16),
            "N=4": Cell("diloco:H=30:outer_lr=0.6"),
            "N=8": Cell("diloco:H=30:outer_lr=0.8", nodes=8, batch_size=4),
        },
        [ascending(["N=2", "N=4", "N=8"]), lower("N=1", "DDP"), lower("DDP", "N=2")],
        notes="The outer steps begin small (0.76 of a round's change in the first, with this rate and momentum), and "
        "one node has 33 of them to make up for it; the paper's runs are longer.",
    ),
    Claim(
        "R3",
        "Loss grows slowly with H, bytes fall as 1/H",
        "Douillard et al., DiLoCo, arXiv:2311.08105",
        "H from 50 to 2,000: H = 1,000 costs 2.9 % of perplexity over H = 50, at a twentieth of the communication.",
        "3,000 steps, H = 10, 30 and 100 (300, 100 and 30 rounds). The outer rate is 0.4 at H = 10, where 0.7 is known "
        "to fail (see the results page), and 0.7 else. Is H = 100 at most 5 % above H = 10, at a tenth of the bytes?",
        {
            "H=10": Cell("diloco:H=10:outer_lr=0.4", steps=3000),
            "H=30": Cell("diloco:H=30:outer_lr=0.7", steps=3000),
            "H=100": Cell("diloco:H=100:outer_lr=0.7", steps=3000),
        },
        [ascending(["H=10", "H=30", "H=100"]), no_worse("H=100", "H=10", 0.05), bytes_are("H=100", "H=10", 0.1)],
        notes="H = 100 has 30 rounds here, H = 10 has 300; the paper's H = 1,000 still has 64.",
    ),
    Claim(
        "R4",
        "For large H an outer Nesterov step is at least as good as plain averaging",
        "Douillard et al., DiLoCo, arXiv:2311.08105, outer optimizers",
        "Of SGD (which is FedAvg), SGD with momentum, Nesterov and Adam as outer optimizers at H = 500, Nesterov is "
        "best.",
        "H = 50, 1,500 steps (30 rounds), outer rate 0.7: is DiLoCo ahead of FedAvg in every seed? The bytes are "
        "equal.",
        {
            "DiLoCo": Cell("diloco:H=50:outer_lr=0.7", steps=1500),
            "FedAvg": Cell("fedavg:H=50", steps=1500),
        },
        [lower("DiLoCo", "FedAvg")],
        notes="A second check, that the bytes are equal, was taken out after the training: it holds by construction, "
        "and let a claim that does not come out come out in part. The paper's runs have 128 rounds. Other outer rates "
        "were not tried at this H.",
    ),
    Claim(
        "R15",
        "Muon inside DiLoCo beats AdamW inside, as Muon beats AdamW in DDP",
        "Therien et al., MuLoCo, arXiv:2505.23725",
        "From 150M to 3.1B parameters MuLoCo is ahead of DiLoCo for all numbers of workers.",
        "N = 4, H = 30, the same learning rate for both inner optimizers (Muon's update has the size of AdamW's) and "
        "the same outer one: is Muon ahead in every seed, in DiLoCo and in DDP?",
        {
            "DDP, AdamW": DDP,
            "DDP, Muon": Cell("ddp:inner_optim=muon"),
            "DiLoCo, AdamW": DILOCO,
            "DiLoCo, Muon": Cell("diloco:H=30:outer_lr=0.7:inner_optim=muon"),
        },
        [lower("DiLoCo, Muon", "DiLoCo, AdamW"), lower("DDP, Muon", "DDP, AdamW")],
    ),
    Claim(
        "muloco-one",
        "MuLoCo with one worker is at least as good as Muon in DDP",
        "Therien et al., MuLoCo, arXiv:2505.23725",
        "Loss 2.6773 with one worker, 2.6792 with data-parallel Muon. The published package for one worker has an "
        "outer rate of 0.7 and momentum 0.6.",
        "One node with the global batch of 32 windows, H = 30, these outer settings: is the loss at most "
        "0.5 % above that of Muon in DDP?",
        {
            "MuLoCo, N=1": Cell("muloco:H=30:outer_lr=0.7:outer_momentum=0.6", nodes=1, batch_size=32),
            "DDP, Muon": Cell("ddp:inner_optim=muon"),
        },
        [no_worse("MuLoCo, N=1", "DDP, Muon", 0.005)],
        notes="Behind by 0.6 %, where 0.5 % was allowed: less than the sum of the two spreads. 33 outer steps here.",
    ),
    Claim(
        "momentum",
        "No outer momentum is best at small H, 0.5 to 0.9 at large H",
        "Public draft, not reviewed",
        "Loss with outer momentum 0 / 0.5 / 0.9: H = 16 1.352 / 1.363 / 1.438, H = 256 1.381 / 1.367 / 1.398.",
        "H = 8 (1,000 steps) and H = 64 (2,000 steps, 31 rounds), outer rate 0.7 throughout.",
        {
            f"H={H}, momentum {mu}": Cell(f"diloco:H={H}:outer_lr=0.7:outer_momentum={mu}", steps=steps)
            for H, steps in ((8, 1000), (64, 2000))
            for mu in (0.0, 0.5, 0.9)
        },
        [
            best_is([f"H=8, momentum {mu}" for mu in (0.0, 0.5, 0.9)], ["H=8, momentum 0.0"], "at H = 8"),
            best_is(
                [f"H=64, momentum {mu}" for mu in (0.0, 0.5, 0.9)],
                ["H=64, momentum 0.5", "H=64, momentum 0.9"],
                "at H = 64",
            ),
        ],
        notes="At H = 8 the outer rate of 0.7 is held for all three: without momentum each round goes only 0.7 of the "
        "way of its nodes, with momentum 0.5 up to 1.4.",
    ),
    Claim(
        "bandwidth",
        "The best H grows as bandwidth shrinks",
        "Charles et al., Scaling laws for DiLoCo, arXiv:2503.09799, utilisation tables; follows from R3",
        "At 10B parameters and 0.8 s a step, 95 % utilisation needs 222 Gbit/s with DDP, 152.6 with H = 10, 23.3 with "
        "H = 100, 9.1 with H = 300, while the loss grows slowly with H.",
        "Pictures in label shards, H = 2, 5, 10, 20 and 50, outer rate 0.4, 1,500 steps. Time is predicted from the "
        "steps and bytes: 4 nodes, 20 ms a step, 0.5 ms of latency, a ring.",
        {f"H={H}": Cell(f"diloco:H={H}:outer_lr=0.4", "pictures", steps=1500) for H in (2, 5, 10, 20, 50)},
        [
            best_H_grows(
                {H: f"H={H}" for H in (2, 5, 10, 20, 50)},
                ["10Gbps", "1Gbps", "100Mbps", "10Mbps", "1Mbps"],
                5e-4,
                0.02,
                4,
            )
        ],
        "curves",
        "The rule was made stricter after the training: it first took the mean over seeds of the losses (best H 10, "
        "10, 10, 20, 20), which wander more from one evaluation to the next than cells differ; now every seed must "
        "agree. With one outer rate for all, H = 2 and 5 end no better than H = 10.",
    ),
]
