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
# Compare strategies over several seeds, and see how the loss depends on H and on differences between the nodes' data.
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
# Every strategy has a short name for `compare` and the command line. For example, `diloco:H=20:outer_lr=0.4` means
# `DiLoCoStrategy(H=20, outer_lr=0.4)`. The page on [strategies](../docs/strategies.md) lists equations and papers.

# %%
print(len(STRATEGIES), "strategies, among them", ", ".join(sorted(STRATEGIES)[:6]))
# > 46 strategies, among them acco, async_diloco, choco, cocktail, ddp, decoupled_diloco

# %% [markdown]
# ## A comparison
#
# For each seed, all strategies start from the same weights and see the same data in the same order. `single` is one of
# the four nodes training alone on its share of the data, and a strategy that communicates should beat it. We use two
# seeds here, but use at least five for real decisions.

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
# For how many steps can nodes train without synchronizing? With `iid`, all nodes see the same mix of digits. With
# `dirichlet:0.3`, each node sees mostly a few of the ten digits.

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
# Here, a medium H is best. With H = 1, the outer momentum overshoots, because it was designed for rounds of hundreds of
# steps. A large H increases the loss, especially if the nodes' data differ. These results apply to this problem, this
# learning rate and 120 steps; [Evidence](../docs/evidence.md#shakespeare) has longer runs on text.
#
# To run such a comparison from the command line, use `exogym compare --dataset digits --strategies
# single,ddp,diloco:H=10 --nodes 4 --seeds 5`.
#
# ## Change something
#
# Add `fedavg:H=50` and `diloco:H=50:outer_lr=0.7` to the first comparison. Which of the two tolerates rare
# synchronizations better?
#
# ## A question
#
# SPARTA with `p_sparta=0.01` sends one number in a hundred at each step. Why isn't SPARTA's reduction 100?
#
# **Answer.** The nodes still differ at the end of the run, so they average all P parameters once to get a single model.
# The 120 steps send 1.2 P numbers and this final synchronization sends P more, so the reduction is 120 / 2.2 = 55. To
# leave the final synchronization out, pass `fit(final_sync=False)`.
#
# ## Next
#
# - [Your own strategy](tutorial_custom.py)
# - [Networks and time](tutorial_networks.py)
# - [Sweeps](../docs/runs.md#sweeps) and [recipes](../docs/recipes.md)
