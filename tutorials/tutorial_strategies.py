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
# Which strategy is best? It depends: on the bytes you can afford, on how unlike the nodes' data are, on the model. So
# compare them on *your* problem. This tutorial does that on a small one, and shows how to read what comes out.
#
# You will learn
#
# - to compare strategies from the same weights on the same data, over several seeds;
# - what *quality* and *reduction* mean;
# - how H, the steps between two meetings, trades bytes for loss;
# - what data that differ from node to node change.
#
# It takes about ten seconds on one core, with ExoGym [installed](../docs/getting_started.md#install) and its extra
# `[demo]`.
# Read [Four nodes on your laptop](tutorial_basic.py) first.

# %%
import os

import matplotlib.pyplot as plt

from exogym.compare import compare
from exogym.strategy.registry import STRATEGIES

# %% [markdown]
# ## What there is
#
# Every strategy has a short name, for `compare` and for the command line. `diloco:H=20:outer_lr=0.4` is
# `DiLoCoStrategy(H=20, outer_lr=0.4)`. [The table of all](../docs/strategies.md) has their equations and papers.

# %%
print(len(STRATEGIES), "strategies, among them", ", ".join(sorted(STRATEGIES)[:6]))
# > 26 strategies, among them async_diloco, ddp, decoupled_diloco, demo, desloc, diloco

# %% [markdown]
# ## A comparison
#
# `compare` takes a task by its name, or `(make_model, train, val)` of your own. The same seed gives all strategies
# the same first weights and the same data in the same order. `single` is one of the four nodes alone, with its share
# of the data: what communication has to beat. Two seeds are few. Take five when it matters.

# %%
SHORT = "EXOGYM_SHORT" in os.environ  # fewer steps: it shows that all runs, and its numbers mean nothing
STEPS, SEEDS = (40, 1) if SHORT else (120, 2)
METHODS = "single,ddp,fedavg:H=10,diloco:H=10,sparta:p_sparta=0.01,demo"
result = compare("digits", METHODS, num_nodes=4, max_steps=STEPS, batch_size=8, seeds=SEEDS, lr=3e-3)
print(result.to_markdown())

# %% [markdown]
# Read the table by its columns.
#
# - **validation loss** is that of the averaged (or outer) model after the last step, mean and standard deviation over
#   seeds. A difference that is smaller than the spread is no difference.
# - **quality** is DDP's loss over the strategy's. 100 % is as good as DDP.
# - **sent/node** is what a node has put on the wire, and **reduction** is DDP's bytes over these.
#
# The rows are plain dicts:

# %%
by_name = {row["strategy"]: row for row in result.rows}
for name in ("fedavg:H=10", "diloco:H=10", "sparta:p_sparta=0.01"):
    print(f"{name} sends 1/{by_name[name]['reduction']:.0f} of DDP's bytes")
# > fedavg:H=10 sends 1/10 of DDP's bytes
# > diloco:H=10 sends 1/10 of DDP's bytes
# > sparta:p_sparta=0.01 sends 1/55 of DDP's bytes

# %% [markdown]
# ## How long may nodes be alone?
#
# H is the option that matters most. We train DiLoCo with several, on data dealt alike to all nodes (`iid`), and on
# data in which each node mostly sees a few of the ten digits (`dirichlet:0.3`: the smaller the number, the less
# alike).

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
axes.set(xscale="log", xlabel="H, steps between two meetings", ylabel="validation loss")
axes.set_xticks(SEVERAL, [f"{H}\n1/{H} of the bytes" if H > 1 else "1" for H in SEVERAL])
axes.legend(frameon=False, fontsize=8)
figure.savefig("tutorial_strategies.png", dpi=80)

# %% [markdown]
# ![Validation loss of DiLoCo against H](../docs/images/tutorial_strategies.png)
#
# Two things to see. The loss has its best H in the middle here: with H = 1 the outer momentum, which was made for
# rounds of hundreds of steps, has nothing to smooth and overshoots. And data that are not alike cost more, the longer
# the nodes are left alone.
#
# That is this problem, this learning rate and 120 steps. [Results](../docs/results.md) has longer runs on text.
#
# ## The same on the command line
#
# ```
# exogym compare --dataset digits --strategies single,ddp,diloco:H=10 --nodes 4 --seeds 5
# ```
#
# writes the table, the curves and all that is needed to repeat it into a folder below `runs/`. `exogym sweep` does
# grids of options, and goes on where it was stopped.
#
# ## Change something
#
# Add `fedavg:H=50` and `diloco:H=50:outer_lr=0.7` to the first comparison. Which of the two copes better with rare
# meetings? Then give it `num_nodes=8`.
#
# ## A question
#
# SPARTA with `p_sparta=0.01` sends one number in a hundred in each step. Why is its reduction not 100?
#
# **Answer.** At the end of the training the nodes still differ, so everything is exchanged once more, to have one
# model. Of 120 steps each sends 0.01 P numbers, 1.2 P together, and the last exchange sends P: 120 / 2.2 = 55. In a
# run of 10,000 steps nobody would notice it. `fit(final_sync=False)` leaves it out.
#
# ## Where to go from here
#
# - [Your own strategy](tutorial_custom.py).
# - [Networks and time](tutorial_networks.py): bytes become seconds.
# - [Sweeps](../docs/sweeps.md), and [what is asked for often](../docs/recipes.md).
