# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Comparing strategies
#
# Compare strategies over several seeds, and see how H and differences between the nodes' data change the loss.
#
# [Install](../docs/getting_started.md#install) ExoGym with the extra `[demo]`. Read [Four nodes on your
# laptop](tutorial_basic.py) first.

# %%
import os

import matplotlib.pyplot as plt

from exogym.compare import compare
from exogym.strategy.registry import STRATEGIES

# %% [markdown]
# ## Available strategies
#
# Every strategy has a short name, for `compare` and for the command line. `diloco:H=20:outer_lr=0.4` means
# `DiLoCoStrategy(H=20, outer_lr=0.4)`. [The table of strategies](../docs/strategies.md) has equations and papers.

# %%
print(len(STRATEGIES), "strategies, among them", ", ".join(sorted(STRATEGIES)[:6]))
# > 46 strategies, among them acco, async_diloco, choco, cocktail, ddp, decoupled_diloco

# %% [markdown]
# ## A comparison
#
# With the same seed, all strategies start from the same weights and see the same data in the same order. `single` is
# one of the four nodes alone with its share of the data; a strategy that communicates must beat it. We use two seeds,
# but use five for real decisions.

# %%
SHORT = "EXOGYM_SHORT" in os.environ  # fewer steps, to test that it runs; ignore the numbers
STEPS, SEEDS = (40, 1) if SHORT else (120, 2)
METHODS = "single,ddp,fedavg:H=10,diloco:H=10,sparta:p_sparta=0.01,demo"
result = compare("digits", METHODS, num_nodes=4, max_steps=STEPS, batch_size=8, seeds=SEEDS, lr=3e-3)
print(result.to_markdown())

# %% [markdown]
# Read the columns:
#
# - **validation loss**: mean and standard deviation across seeds. Ignore differences below the standard deviation.
# - **quality**: DDP's loss divided by the strategy's.
# - **sent/node**: bytes that a node sent. **reduction**: DDP's bytes divided by the strategy's.

# %%
by_name = {row["strategy"]: row for row in result.rows}
for name in ("fedavg:H=10", "diloco:H=10", "sparta:p_sparta=0.01"):
    print(f"{name} sends 1/{by_name[name]['reduction']:.0f} of DDP's bytes")
# > fedavg:H=10 sends 1/10 of DDP's bytes
# > diloco:H=10 sends 1/10 of DDP's bytes
# > sparta:p_sparta=0.01 sends 1/55 of DDP's bytes

# %% [markdown]
# ## The interval between synchronizations
#
# How long may nodes train alone? `iid` gives all nodes the same mix of digits. With `dirichlet:0.3` each node mostly
# sees a few of the ten digits.

# %%
SEVERAL = (1, 5, 15, 40)
texts = ["ddp", *(f"diloco:H={H}:outer_lr=0.4" for H in SEVERAL)]
found = {}
for partition in ("iid", "dirichlet:0.3"):
    rows = compare(
        "digits", texts, num_nodes=4, max_steps=STEPS, batch_size=8, seeds=SEEDS, lr=3e-3, partitioner=partition
    ).rows
    found[partition] = rows

figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
for partition, rows in found.items():
    losses = [row["val_loss"] for row in rows[1:]]
    spread = [row["val_loss_std"] or 0.0 for row in rows[1:]]
    line = axes.errorbar(SEVERAL, losses, spread, fmt="o-", capsize=3, label=f"DiLoCo, {partition}")
    axes.axhline(rows[0]["val_loss"], color=line[0].get_color(), linestyle=":", label=f"DDP, {partition}")
axes.set(xscale="log", xlabel="H, steps between two synchronizations", ylabel="validation loss")
axes.set_xticks(SEVERAL, [f"{H}\n1/{H} of the bytes" if H > 1 else "1" for H in SEVERAL])
axes.legend(frameon=False, fontsize=8)
figure.savefig("tutorial_strategies.png", dpi=80)

# %% [markdown]
# ![Validation loss of DiLoCo against H](../docs/images/tutorial_strategies.png)
#
# Here the best H is in the middle. With H = 1 the outer momentum, made for rounds of hundreds of steps, overshoots, and
# a large H costs more if the nodes' data differ. This holds for this problem, this learning rate and
# 120 steps. [Evidence](../docs/evidence.md#shakespeare) has longer runs on text.
#
# On the command line: `exogym compare --dataset digits --strategies single,ddp,diloco:H=10 --nodes 4 --seeds 5`.
#
# ## Change something
#
# Add `fedavg:H=50` and `diloco:H=50:outer_lr=0.7` to the first comparison. Which strategy tolerates rare
# synchronizations better?
#
# ## A question
#
# SPARTA with `p_sparta=0.01` sends one number in a hundred in each step. Why isn't its reduction 100?
#
# **Answer.** At the end the nodes still differ, so they average all parameters once to get one model. The 120 steps
# send 1.2 P numbers, and this final synchronization P more: 120 / 2.2 = 55. `fit(final_sync=False)` omits it.
#
# ## Next
#
# - [Your own strategy](tutorial_custom.py)
# - [Networks and time](tutorial_networks.py)
# - [Sweeps](../docs/runs.md#sweeps) and [recipes](../docs/recipes.md)
