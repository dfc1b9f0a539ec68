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
# # Islands of GPUs
#
# Two labs have four GPUs each. Inside a lab, NVLink connects the GPUs at 450 GB/s, but the line between the labs has
# only 100 Mbit/s. How should the eight GPUs train one model?
#
# In this tutorial you build a *node* from several simulated GPUs that share its model and batch (`NodeMesh`), and count
# the bytes inside and between islands. You don't need a GPU. [Install](../docs/getting_started.md#install) ExoGym with
# `[demo]`, and read [Four nodes on your laptop](tutorial_basic.py) and [Networks and time](tutorial_networks.py) first.

# %%
import copy

import matplotlib.pyplot as plt
import torch
from torch import nn

from exogym import LocalTrainer, NodeMesh
from exogym.data import digits
from exogym.network import Network
from exogym.strategy import DiLoCoStrategy, SimpleReduceStrategy

source = digits()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
BETWEEN = "100Mbps,20ms"
labs = Network.groups([4, 4], inside="nvlink", between=BETWEEN)
S = 124e6 * 4  # bytes of GPT-2 small
for who, members in (("of one lab", range(4)), ("of both", range(8))):
    print(f"the GPUs {who} average it in {labs.cost('all_reduce', S, list(members)).seconds:.2g} s")
# > the GPUs of one lab average it in 0.0017 s
# > the GPUs of both average it in 70 s

# %% [markdown]
# ## Three ways
#
# We train a small model on eight GPUs, with 32 digits per step in total. One GPU takes 20 ms for four digits.
#
# **One: DDP over all GPUs.** Eight nodes average over the slow line at every step.


# %%
def train(strategy, **options):
    trainer = LocalTrainer(copy.deepcopy(model), source.train, source.val, loss_fn=nn.functional.cross_entropy)
    trainer.fit(strategy, max_steps=150, val_interval=15, **options)
    last = trainer.history.last
    print(f"loss {last['val_loss']:.2f}, {last['time_s']:.1f} s, {last['tx_bytes'] / 1e3:.0f} kB sent per node")
    return trainer


INNER = {"inner_optim": "adamw", "lr": 3e-3}
eight = {"num_nodes": 8, "batch_size": 4, "network": labs, "step_seconds": "20ms"}
ddp = train(SimpleReduceStrategy(**INNER), **eight)
# > loss 0.23, 45.2 s, 2530 kB sent per node

# %% [markdown]
# **Two: DiLoCo over all GPUs.** Eight nodes, each with its own weights, average every 15 steps.

# %%
OUTER = {"H": 15, "outer_lr": 0.4}
diloco = train(DiLoCoStrategy(**INNER, **OUTER), **eight)
# > loss 0.22, 5.8 s, 169 kB sent per node

# %% [markdown]
# **Three: each lab is one node.** `NodeMesh(shard=4)` builds a node from four GPUs that split its weights, optimizer
# state and batch, as PyTorch's FSDP does. The two nodes train with DiLoCo. A lab's four GPUs take 20 ms for 16 digits.

# %%
lab = NodeMesh(shard=4)
islands = train(
    DiLoCoStrategy(**INNER, **OUTER), num_nodes=2, batch_size=16, node=lab, network=BETWEEN, step_seconds="20ms"
)
# > loss 0.21, 3.4 s, 96 kB sent per node

# %% [markdown]
# The third way rarely uses the slow line, its two replicas drift apart less than eight would, and each GPU holds only a
# quarter of the model.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.3), layout="constrained")
for name, trainer in (("DDP over all", ddp), ("DiLoCo over all", diloco), ("labs as nodes", islands)):
    rows = [row for row in trainer.history.rows(node=None) if row["val_loss"] is not None]
    left.plot([row["time_s"] for row in rows], [row["val_loss"] for row in rows], "o-", markersize=3, label=name)
left.set(xlabel="predicted seconds", ylabel="validation loss", xscale="symlog", yscale="log")
left.legend(frameon=False, fontsize=8)

# %% [markdown]
# ## A pipeline
#
# You can also split a large model into *stages* of layers, one per GPU. The last GPU waits at the start and the end of
# a step, and the first GPU waits in between for gradients; this idle time is called the *bubble*. With S stages and M
# micro-batches, the bubble takes (S - 1) / (M + S - 1) of the time.

# %%
micro_batches = [4, 8, 16, 32, 64]
lost = [NodeMesh(stages=4, microbatches=m).bubble(64) for m in micro_batches]
right.plot(micro_batches, [100 * share for share in lost], "o-")
print(f"{lost[0]:.0%} lost with 4 micro-batches, {lost[-1]:.0%} with 64")
# > 43% lost with 4 micro-batches, 4% with 64
right.set(xlabel="micro-batches of a step, 4 stages", ylabel="share of the step in the bubble, %")
right.set_xscale("log", base=2)
right.set_xticks(micro_batches, [str(m) for m in micro_batches])
figure.savefig("tutorial_islands.png", dpi=80)

# %% [markdown]
# ![Loss against predicted seconds, and the bubble of a pipeline](../docs/images/tutorial_islands.png)
#
# To train on real devices, start one process per device: `python -m exogym.launch --nproc_per_node 4 train.py`.
# [Islands](../docs/islands.md) explains how.
#
# ## Change something
#
# Keep eight nodes, but let the GPUs of each lab also average among themselves: `DiLoCoStrategy(**INNER, **OUTER,
# island_size=4, island_H=3)`. Compare the loss and the time.
#
# ## A question
#
# With labs as nodes, each node sent 96 kB; with DiLoCo over all GPUs, it sent 169 kB. How many bytes cross the line
# between the labs in each case?
#
# **Answer.** 96 kB in each direction with labs as nodes, and 169 kB with DiLoCo over all GPUs, because two of the
# ring's eight links cross the line. The two numbers differ by the factor 2 (N - 1) / N, which is 1 for two nodes and
# 1.75 for eight.
