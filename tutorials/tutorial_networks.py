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
# # Networks and time
#
# Predict how long communication takes on networks that you don't have: for one average, for any strategy before you
# train, and for a whole run on a *virtual clock*.
#
# [Install](../docs/getting_started.md#install) ExoGym with its extra `[demo]`, and read [Four nodes on your
# laptop](tutorial_basic.py) first.

# %%
import matplotlib.pyplot as plt
import numpy as np

from exogym.advise import advise
from exogym.compare import compare
from exogym.network import Network

# %% [markdown]
# ## The cost of one average
#
# Each link of a network has a bandwidth B and a latency α, which every message pays. To average S bytes in a ring, N
# nodes need 2 (N - 1) rounds and send S / N bytes in each, which takes
#
#     2 (N - 1) (α + S / (N B))
#
# Let's average GPT-2 small, which has 124 million parameters.

# %%
S = 124e6 * 4
for name in ("wifi", "lan-1g", "infiniband"):
    network = Network.preset(name)
    seconds = [network.cost("all_reduce", S, nodes).seconds for nodes in (2, 8, 64)]
    print(f"{name}: {seconds[0]:.3g} s for 2 nodes, {seconds[1]:.3g} s for 8, {seconds[2]:.3g} s for 64")
# > wifi: 26.5 s for 2 nodes, 46.3 s for 8, 52.5 s for 64
# > lan-1g: 4.22 s for 2 nodes, 7.38 s for 8, 8.31 s for 64
# > infiniband: 0.00993 s for 2 nodes, 0.0174 s for 8, 0.0202 s for 64

# %% [markdown]
# From 8 to 64 nodes the time hardly grows, because each node sends 2 (N - 1) / N S bytes, which is always less than 2
# S.
#
# ## Predict before you train
#
# A step of this model takes 0.8 s on a good laptop GPU. `advise` predicts the time of any strategy, and lists first the
# strategy that it expects to reach DDP's loss first.

# %%
STRATEGIES = ["ddp", "demo", "sparta:p_sparta=0.005", "diloco:H=10", "diloco:H=100"]
advice = advise(parameters=124e6, num_nodes=4, network="wifi", step_seconds=0.8, strategies=STRATEGIES)
for row in advice.rows:
    print(f"{row.strategy}: {row.seconds_per_step:.2f} s a step, {row.speedup:.2f} times one laptop")
# > diloco:H=100: 1.21 s a step, 2.63 times one laptop
# > sparta:p_sparta=0.005: 1.03 s a step, 3.11 times one laptop
# > demo: 1.75 s a step, 1.83 times one laptop
# > diloco:H=10: 4.95 s a step, 0.65 times one laptop
# > ddp: 42.26 s a step, 0.08 times one laptop

# %% [markdown]
# `speedup` compares only examples per second. To find out about the loss, you must train.
#
# How fast must the network be? We plot the speed-up against the bandwidth, with 20 ms of latency:

# %%
bandwidths = np.logspace(6, 11, 26)  # 1 Mbit/s to 100 Gbit/s
figure, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
for text in STRATEGIES:
    speedups = [
        advise(
            parameters=124e6, num_nodes=4, network=Network(b, 0.02), step_seconds=0.8, strategies=[text]
        ).rows[0].speedup
        for b in bandwidths
    ]  # fmt: skip
    axes.plot(bandwidths / 1e6, speedups, label=text)
axes.axhline(1, color="#999999", linestyle=":")
axes.set(xscale="log", xlabel="bandwidth, Mbit/s", ylabel="speed-up of four nodes over one")
axes.legend(frameon=False, fontsize=8)
figure.savefig("tutorial_networks.png", dpi=80)

# %% [markdown]
# ![Speed-up of four nodes against bandwidth](../docs/images/tutorial_networks.png)
#
# Below the dotted line, one machine alone is faster than four.
#
# ## Train on a virtual clock
#
# `compare(..., network=...)` adds a virtual clock, which doesn't change the training: results stay bitwise identical.
# We assume 20 ms per step.

# %%
METHODS = "ddp,diloco:H=10,sparta:p_sparta=0.01"
result = compare("digits", METHODS, max_steps=120, batch_size=8, lr=3e-3, seeds=1, network="wifi", step_seconds="20ms")
for row in result.rows:
    print(f"{row['strategy']}: {row['time_s']:.1f} s, {row['waiting_share']:.0%} waiting")
# > ddp: 6.1 s, 60% waiting
# > diloco:H=10: 2.8 s, 13% waiting
# > sparta:p_sparta=0.01: 6.0 s, 60% waiting
print(result.finding)

# %% [markdown]
# SPARTA sends a hundredth of DDP's bytes but waits just as long, because it averages at every step, and averaging these
# 2,410 numbers takes hardly more than the latency. On Wi-Fi, average *rarely* if the model is small, and send *little*
# if it is large.
#
# ## One slow node
#
# If one node is half as fast (`speeds`), all nodes that wait for it become half as fast too.

# %%
for speeds in ([1, 1, 1, 1], [1, 1, 1, 0.5]):
    rows = compare(
        "digits", "diloco:H=10", max_steps=60, seeds=1, network="wifi", step_seconds="20ms", speeds=speeds
    ).rows
    print(f"speeds {speeds}: {rows[0]['time_s']:.1f} s, waiting {rows[0]['waiting_share']:.0%}")
# > speeds [1, 1, 1, 1]: 1.4 s, waiting 12%
# > speeds [1, 1, 1, 0.5]: 2.6 s, waiting 42%

# %% [markdown]
# To make the others wait less, give the slow node less work (`fit(balance="batch")`), or use a strategy whose nodes
# don't wait (`async_diloco`). See [unequal machines](../docs/real_machines.md#unequal-machines).
#
# You can also [describe your own network](../docs/network.md#describe-a-network), and look up [how accurate the
# predictions are](../docs/predictions.md).
#
# ## Change something
#
# Imagine four computers on `home` lines, and a model with 10 million parameters and steps of 0.3 s. Which H makes
# DiLoCo three times as fast as one computer?
#
# ## A question
#
# In the plot, DeMo's curve rises at a lower bandwidth than DiLoCo's with H = 10. How does DeMo's curve change with 64
# nodes, and why?
#
# **Answer.** DeMo's curve moves to the right, whereas DiLoCo's stays where it is. DeMo's nodes send packed
# coefficients, which can't be summed along the way, so each node receives the coefficients of all others in an
# all-gather, whose cost grows with N. DiLoCo's all-reduce stays below 2 S. [The
# benchmark](../research/results/benchmark.md#many-nodes) has the numbers.
