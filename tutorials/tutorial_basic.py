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
# You know how to train a network on one machine. This tutorial trains one on **four nodes**, without a second
# machine. ExoGym plays all four in one process. The mathematics is that of real nodes: each has its own weights, its
# own data and its own optimizer, and knows of the others only what they send.
#
# You will learn
#
# - what a *node*, a *step*, a *round* and a *strategy* are;
# - how to train with data parallelism (DDP) and with DiLoCo;
# - where the losses, the bytes and the final model are.
#
# A few seconds on one core, with ExoGym [installed](../docs/getting_started.md#install) and its extra `[demo]`:
# the data set and the plots.

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
# 1,797 handwritten digits of 8x8 pixels, and a small network. Nothing here is ExoGym's: any `nn.Module` will do, and
# any data set that torch's `DataLoader` takes.

# %%
source = digits()
print(len(source.train), "to train on,", len(source.val), "to validate on")
# > 1438 to train on, 359 to validate on

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

# %% [markdown]
# ## A node alone
#
# First a fleet of one. `LocalTrainer` takes the model, the data and the loss. `fit` takes the *strategy*: how nodes
# learn from each other. One node has nobody to learn from, so under any strategy it is plain training.
#
# `fit` changes the model that it is given. We want to start from the same weights again, so each trainer gets a copy.


# %%
def train(strategy, num_nodes, **options):
    """Train a copy of the model for 200 steps; say what came out."""
    trainer = LocalTrainer(copy.deepcopy(model), source.train, source.val, loss_fn=nn.functional.cross_entropy)
    trainer.fit(strategy, num_nodes=num_nodes, max_steps=200, batch_size=8, val_interval=20, **options)
    last = trainer.history.last
    print(f"loss {last['val_loss']:.2f}, accuracy {last['val_accuracy']:.0%}, {last['tx_bytes'] / 1e6:.2f} MB per node")
    return trainer


alone = train(SimpleReduceStrategy(inner_optim="adamw", lr=3e-3), num_nodes=1)
# > loss 0.29, accuracy 93%, 0.00 MB per node

# %% [markdown]
# `history.last` is the newest row of the *history*: all that is known after the last step. Losses, bytes, how far
# nodes are apart, the learning rate, the seconds.
#
# ## Four nodes that meet at every step
#
# In **data parallel training** (DDP) every node computes a gradient on a batch of its own. The nodes average their
# gradients, and all take the same step. So their weights stay alike, bit for bit.

# %%
ddp = train(SimpleReduceStrategy(inner_optim="adamw", lr=3e-3), num_nodes=4)
# > loss 0.17, accuracy 95%, 2.89 MB per node

# %% [markdown]
# Four nodes saw four times as many digits in the same number of steps, and the loss is lower. The price is
# communication. The model has 2,410 parameters of 4 bytes, and in each step a node sends 2 (N - 1) / N times that. So
# much does a ring of N nodes need for an average. Over 200 steps:

# %%
parameters = sum(p.numel() for p in model.parameters())
formula = 200 * 2 * 3 / 4 * parameters * 4
print(f"{parameters} parameters; by the formula {formula:.0f} bytes, counted {ddp.history.last['tx_bytes']:.0f}")
# > 2410 parameters; by the formula 2892000 bytes, counted 2892000

# %% [markdown]
# For this model that is nothing. With a billion parameters each node sends 6 GB *per step*. A home connection that
# sends 20 Mbit/s needs forty minutes for it.
#
# ## Four nodes that meet now and then
#
# **DiLoCo** (Distributed Low-Communication training) lets each node train alone for H steps. Then the nodes average
# how far they have moved, and an *outer optimizer* applies that to the weights they all started from. H steps and the
# meeting after them are a *round*. With H = 20 a node sends a twentieth of DDP's bytes. Only the strategy changes.

# %%
diloco = train(DiLoCoStrategy(inner_optim="adamw", lr=3e-3, H=20, outer_lr=0.4), num_nodes=4)
# > loss 0.19, accuracy 94%, 0.14 MB per node

# %% [markdown]
# ## What the nodes did in between
#
# Between two meetings the nodes drift apart, since each sees other digits. `consensus_distance` says how far: the
# root mean squared distance of the nodes to their mean, taken just before they meet.

# %%
for name, trainer in (("DDP", ddp), ("DiLoCo", diloco)):
    steps, distance = trainer.history.column("consensus_distance")
    print(f"{name}: {distance[list(steps).index(100)]:.1f} apart after 100 steps")
# > DDP: 0.0 apart after 100 steps
# > DiLoCo: 0.3 apart after 100 steps

# %% [markdown]
# ## A picture
#
# `history.rows(node=None)` are the rows of the averaged model. Against steps the two fleets look much alike. Against
# bytes they do not.

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
# ## The model you get
#
# `fit` returns the model, and `trainer.model` is the same one. It is an ordinary module again: the average of the
# nodes, or under DiLoCo the outer model.

# %%
images, labels = source.val.tensors
with torch.no_grad():
    guesses = diloco.model(images).argmax(1)
print(f"{(guesses == labels).float().mean():.0%} of the validation digits are right")
# > 94% of the validation digits are right

# %% [markdown]
# ## Change something
#
# Give each node digits of few kinds: `partitioner="dirichlet:0.3"` as one more option of `train(...)`. How far apart
# are the nodes of DiLoCo after 100 steps now, and what does it do to the loss? Then try `H=5`.
#
# ## A question
#
# DiLoCo sent a twentieth of DDP's bytes. FedAvg averages the weights of the nodes every 20 steps and has no outer
# optimizer. Does it send less than DiLoCo, as much, or more?
#
# **Answer.** As much. Both send one row of parameters in a round. The outer optimizer works on what has arrived, and
# each node can do that for itself. Count it: `FedAvgStrategy(inner_optim="adamw", lr=3e-3, H=20)` of
# `exogym.strategy`.
#
# ## Where to go from here
#
# - [Comparing strategies](tutorial_strategies.py): several of them on the same problem, and how sure we are.
# - [Your own strategy](tutorial_custom.py).
# - [Getting started](../docs/getting_started.md): what a model may return, how data are dealt, all of the history.
