"""Claims about DiLoCo: nodes, steps between synchronizations, outer and inner optimizer."""

from __future__ import annotations

from research.reproduce.checks import ascending, best_H_grows, best_is, bytes_are, lower, no_worse
from research.reproduce.claim import Cell, Claim

DDP, SINGLE = Cell("ddp"), Cell("single")
DILOCO = Cell("diloco:H=30:outer_lr=0.7")  # 33 outer rounds in the 1,000 steps of the task
MODERATE = Cell("diloco:H=30:outer_lr=0.4")

CLAIMS = [
    Claim(
        "R1",
        "DiLoCo is better than one node and worse than DDP, at equal steps",
        "Douillard et al., DiLoCo, arXiv:2311.08105; Charles et al., arXiv:2503.09799",
        "With 150M parameters on C4, N = 8 and H = 500, the perplexity is 16.23 for one worker, 15.02 for DiLoCo, "
        "15.30 for 8 times the batch, and 14.72 for 8 times the updates. In the second paper, data-parallel training "
        "of small models is better than DiLoCo with N > 1. With 35M parameters, N = 4 and H = 30, the loss is 3.554 "
        "for DiLoCo and 3.485 for data-parallel training.",
        "We use N = 4 and H = 30. In every seed, is DDP better than DiLoCo, and is DiLoCo better than one node alone?",
        {"one node": SINGLE, "DiLoCo": DILOCO, "DDP": DDP},
        [lower("DDP", "DiLoCo"), lower("DiLoCo", "one node")],
        "curves",
        "In one seed DiLoCo ends worse than one node. On the same task DiLoCo is better than one node with H = 10 and "
        "an outer rate of 0.4 (2.0914 ± 0.0163 against 2.1958 ± 0.0094, on the results page). With H = 30 an outer "
        "rate of 0.4 does not help (R13). Our runs have 33 rounds. The paper's runs have 128 rounds, after 24,000 "
        "steps of one node.",
    ),
    Claim(
        "R2",
        "DiLoCo's gap to DDP grows with the number of nodes at equal tokens",
        "Charles et al., Scaling laws for DiLoCo, arXiv:2503.09799",
        "With 35M parameters, H = 30 and a fixed global batch, the loss differs from data-parallel training's by "
        "-0.1 % for N = 1, +0.7 % for N = 2, +2.0 % for N = 4, and +3.9 % for N = 8. The best outer rates for these N "
        "were 0.4, 0.6, 0.6 and 0.8.",
        "We use the paper's outer rates and a global batch of 32 windows. Does the loss rise from N = 2 to 4 to 8, "
        "and is N = 1 better than DDP?",
        {
            "DDP": DDP,
            "N=1": Cell("diloco:H=30:outer_lr=0.4", nodes=1, batch_size=32),
            "N=2": Cell("diloco:H=30:outer_lr=0.6", nodes=2, batch_size=16),
            "N=4": Cell("diloco:H=30:outer_lr=0.6"),
            "N=8": Cell("diloco:H=30:outer_lr=0.8", nodes=8, batch_size=4),
        },
        [ascending(["N=2", "N=4", "N=8"]), lower("N=1", "DDP"), lower("DDP", "N=2")],
        notes="The first outer steps are small. With an outer rate of 0.4 and momentum 0.9 the first outer step "
        "applies 0.76 of a round's change. One node has only 33 outer steps to catch up; the paper's runs are longer.",
    ),
    Claim(
        "R3",
        "Loss grows slowly with H, bytes fall as 1/H",
        "Douillard et al., DiLoCo, arXiv:2311.08105",
        "Among H from 50 to 2,000, H = 1,000 has 2.9 % more perplexity than H = 50, with a twentieth of the "
        "communication.",
        "We train 3,000 steps with H = 10, 30 and 100 (300, 100 and 30 rounds). The outer rate is 0.7, but 0.4 with "
        "H = 10, where 0.7 fails (see the results page). Is the loss with H = 100 at most 5 % above the loss with "
        "H = 10, at a tenth of the bytes?",
        {
            "H=10": Cell("diloco:H=10:outer_lr=0.4", steps=3000),
            "H=30": Cell("diloco:H=30:outer_lr=0.7", steps=3000),
            "H=100": Cell("diloco:H=100:outer_lr=0.7", steps=3000),
        },
        [ascending(["H=10", "H=30", "H=100"]), no_worse("H=100", "H=10", 0.05), bytes_are("H=100", "H=10", 0.1)],
        notes="Our runs with H = 100 have 30 rounds, and our runs with H = 10 have 300. The paper's run with H = 1,000 "
        "has 64 rounds. The paper's 2.9 % is of the perplexity. Our 5 % is of the loss, which is about 9 % of the "
        "perplexity: a weaker claim.",
    ),
    Claim(
        "R4",
        "For large H an outer Nesterov step is at least as good as plain averaging",
        "Douillard et al., DiLoCo, arXiv:2311.08105, outer optimizers",
        "At H = 500 Nesterov is the best outer optimizer among SGD (which is FedAvg), SGD with momentum, Nesterov and "
        "Adam.",
        "We train 1,500 steps (30 rounds) with H = 50 and an outer rate of 0.7. Is DiLoCo better than FedAvg in every "
        "seed? DiLoCo and FedAvg send the same bytes.",
        {
            "DiLoCo": Cell("diloco:H=50:outer_lr=0.7", steps=1500),
            "FedAvg": Cell("fedavg:H=50", steps=1500),
        },
        [lower("DiLoCo", "FedAvg")],
        notes="After the training we removed a second rule, about equal bytes. That rule always holds, and would have "
        "made the verdict 'partly confirmed'. The paper's runs have 128 rounds. We did not try other outer rates at "
        "this H.",
    ),
    Claim(
        "R15",
        "Muon as inner optimizer beats AdamW, in DiLoCo and in DDP",
        "Therien et al., MuLoCo, arXiv:2505.23725",
        "From 150M to 3.1B parameters MuLoCo, which is DiLoCo with Muon, is better than DiLoCo with AdamW for all "
        "numbers of workers.",
        "We use N = 4, H = 30, one outer rate, and one inner learning rate, since Muon's update has the size of "
        "AdamW's. Is Muon better in every seed, in DiLoCo and in DDP?",
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
        "The loss is 2.6773 for MuLoCo with one worker and 2.6792 for data-parallel Muon. The published package for "
        "one worker uses an outer rate of 0.7 and an outer momentum of 0.6.",
        "One node trains with the global batch of 32 windows, H = 30 and the package's outer rate and momentum. Is "
        "its loss at most 0.5 % above the loss of DDP with Muon?",
        {
            "MuLoCo, N=1": Cell("muloco:H=30:outer_lr=0.7:outer_momentum=0.6", nodes=1, batch_size=32),
            "DDP, Muon": Cell("ddp:inner_optim=muon"),
        },
        [no_worse("MuLoCo, N=1", "DDP, Muon", 0.005)],
        notes="The difference between the two means is less than the sum of their spreads. Our runs have 33 outer "
        "steps.",
    ),
    Claim(
        "momentum",
        "The best outer momentum is 0 at small H, and 0.5 to 0.9 at large H",
        "Public draft, not reviewed",
        "With outer momentum 0 / 0.5 / 0.9 the loss is 1.352 / 1.363 / 1.438 at H = 16, and 1.381 / 1.367 / 1.398 at "
        "H = 256.",
        "We train 1,000 steps with H = 8, and 2,000 steps (31 rounds) with H = 64, always with an outer rate of 0.7. "
        "Which outer momentum is best?",
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
        notes="The outer rate of 0.7 favors momentum here. A round without momentum applies only 0.7 of the nodes' "
        "change. With momentum 0.5 a round's change counts up to 1.4 times over the following rounds.",
    ),
    Claim(
        "bandwidth",
        "The best H grows as bandwidth shrinks",
        "Charles et al., Scaling laws for DiLoCo, arXiv:2503.09799, utilization tables; follows from R3",
        "At 10B parameters and 0.8 s a step, 95 % utilization needs 222 Gbit/s with DDP, 152.6 with H = 10, 23.3 with "
        "H = 100, and 9.1 with H = 300. The loss grows slowly with H.",
        "Four nodes train 1,500 steps on pictures in label shards, with H = 2, 5, 10, 20 and 50 and an outer rate of "
        "0.4. We predict each run's time from its steps and bytes, for steps of 20 ms and a ring with 0.5 ms of "
        "latency. The best H reaches a common loss first. Does the best H grow in every seed?",
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
        "We made the rule stricter after the training. The rule first used the mean loss over seeds, which gives 10, "
        "10, 10, 20 and 20 as best H. But losses vary more between evaluations than between cells, so now every seed "
        "must agree. H = 2 and H = 5 end no better than H = 10, with the same outer rate.",
    ),
]
