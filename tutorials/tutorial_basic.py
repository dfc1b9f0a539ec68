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
# # Four nodes on your laptop
#
# Train a network on **four nodes** in one process, first with data parallelism (DDP) and then with DiLoCo. Each node
# has its own weights, data and optimizer.
#
# [Install](../docs/getting_started.md#install) ExoGym with the extra `[demo]`. The [glossary](../docs/glossary.md)
# explains all terms.

# %%
import copy

import matplotlib.pyplot as plt
import torch
from torch import nn

from exogym import LocalTrainer
from exogym.data import digits
from exogym.strategy import DiLoCoStrategy, SimpleReduceStrategy

# %% [markdown]
# ## A model and its data
#
# We train a small network on 1,797 handwritten digits of 8x8 pixels. You can use any `nn.Module` and any torch dataset.

# %%
source = digits()
print(len(source.train), "to train on,", len(source.val), "to validate on")
# > 1438 to train on, 359 to validate on

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

# %% [markdown]
# ## One node
#
# `fit` takes a *strategy*, which defines how the nodes learn from each other. With a single node, every strategy is
# ordinary training. Because `fit` changes the model, we give each trainer a copy, so that all of them start from the
# same weights.


# %%
def train(strategy, num_nodes, **options):
    """Train a copy of the model for 200 steps; print the result."""
    trainer = LocalTrainer(copy.deepcopy(model), source.train, source.val, loss_fn=nn.functional.cross_entropy)
    trainer.fit(strategy, num_nodes=num_nodes, max_steps=200, batch_size=8, val_interval=20, **options)
    last = trainer.history.last
    print(f"loss {last['val_loss']:.2f}, accuracy {last['val_accuracy']:.0%}, {last['tx_bytes'] / 1e6:.2f} MB per node")
    return trainer


alone = train(SimpleReduceStrategy(inner_optim="adamw", lr=3e-3), num_nodes=1)
# > loss 0.29, accuracy 93%, 0.00 MB per node

# %% [markdown]
# ## Four nodes that synchronize at every step
#
# In **data parallel training** (DDP), the nodes average their gradients at every step and then take the same step, so
# their weights stay bitwise identical.

# %%
ddp = train(SimpleReduceStrategy(inner_optim="adamw", lr=3e-3), num_nodes=4)
# > loss 0.17, accuracy 95%, 2.89 MB per node

# %% [markdown]
# The loss is lower because four nodes saw four times as many digits. Averaging in a ring of N nodes, each node sends 2
# (N - 1) / N times the parameters' bytes per step:

# %%
parameters = sum(p.numel() for p in model.parameters())
formula = 200 * 2 * 3 / 4 * parameters * 4
print(f"{parameters} parameters; by the formula {formula:.0f} bytes, counted {ddp.history.last['tx_bytes']:.0f}")
# > 2410 parameters; by the formula 2892000 bytes, counted 2892000

# %% [markdown]
# For a model with a billion parameters, each node would send 6 GB *per step*.
#
# ## Four nodes that synchronize every 20 steps
#
# With **DiLoCo** (Distributed Low-Communication training), each node trains alone for H steps. Then the nodes average
# how much their weights have changed, and an *outer optimizer* applies this average to the weights from which they all
# started. The H steps and the synchronization are called a *round*. With H = 20, a node sends a twentieth of DDP's
# bytes. To switch to DiLoCo, we only pass a different strategy:

# %%
diloco = train(DiLoCoStrategy(inner_optim="adamw", lr=3e-3, H=20, outer_lr=0.4), num_nodes=4)
# > loss 0.19, accuracy 94%, 0.14 MB per node

# %% [markdown]
# ## Drift between nodes
#
# Between two synchronizations the nodes drift apart, because each of them sees different digits. `consensus_distance`
# measures this drift: it is the nodes' root mean squared distance to their mean, just before they synchronize.

# %%
for name, trainer in (("DDP", ddp), ("DiLoCo", diloco)):
    steps, distance = trainer.history.column("consensus_distance")
    print(f"{name}: {distance[list(steps).index(100)]:.1f} apart after 100 steps")
# > DDP: 0.0 apart after 100 steps
# > DiLoCo: 0.3 apart after 100 steps

# %% [markdown]
# ## Plot the loss

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained", sharey=True)
for name, trainer in (("one node", alone), ("DDP", ddp), ("DiLoCo, H = 20", diloco)):
    rows = [row for row in trainer.history.rows(node=None) if row["val_loss"] is not None]
    losses = [row["val_loss"] for row in rows]
    left.plot([row["step"] for row in rows], losses, label=name)
    right.plot([row["tx_bytes"] / 1e6 for row in rows], losses, "o-", markersize=3)
left.set(xlabel="steps of each node", ylabel="validation loss", yscale="log")
left.legend(frameon=False)
right.set(xlabel="MB sent per node")
figure.savefig("tutorial_basic.png", dpi=80)

# %% [markdown]
# ![Validation loss against steps, and against megabytes sent](../docs/images/tutorial_basic.png)
#
# ## The trained model
#
# `fit` returns the trained model, which is also `trainer.model`: the average of the nodes or, with DiLoCo, the outer
# model.
#
# ## Change something
#
# Add `partitioner="dirichlet:0.3"` to `train(...)`, so that each node sees mostly a few kinds of digits. What happens
# to the consensus distance and to the loss? Then try `H=5`.
#
# ## A question
#
# FedAvg averages the nodes' weights every 20 steps, without an outer optimizer. Does a node send fewer bytes than with
# DiLoCo, as many, or more?
#
# **Answer.** As many. Both methods send the parameters once per round, because each node can run the outer optimizer
# itself on the average that it receives. To count the bytes, train with `FedAvgStrategy(inner_optim="adamw", lr=3e-3,
# H=20)` from `exogym.strategy`.
#
# ## Next
#
# - [Comparing strategies](tutorial_strategies.py)
# - [Your own strategy](tutorial_custom.py)
# - [Getting started](../docs/getting_started.md)
