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
# Bytes are not what you pay. You pay with time: nodes that wait for the wire do not train. This tutorial turns bytes
# into seconds, on networks you do not have.
#
# You will learn
#
# - what an average over N nodes costs on a given network, and why;
# - to ask, before anything is trained, which strategy suits a model, a fleet and a network;
# - to train on a *virtual clock* and see who computes, sends and waits;
# - what one slow node does to all.
#
# About five seconds on one core, with ExoGym [installed](../docs/getting_started.md#install) and its extra `[demo]`.
# Read [Four nodes on your laptop](tutorial_basic.py) first.

# %%
import matplotlib.pyplot as plt
import numpy as np

from exogym.advise import advise
from exogym.compare import compare
from exogym.network import PRESETS, Network

# %% [markdown]
# ## What one average costs
#
# A network is two numbers per link: the bandwidth B, and the latency α, which every message pays whatever its size. N
# nodes that average S bytes in a ring take
#
#     2 (N - 1) (α + S / (N B))
#
# seconds: 2 (N - 1) rounds, and in each a node passes on an N-th of the bytes. Let us average GPT-2 small, 124
# million numbers, on Wi-Fi and on cable.

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
# From 8 to 64 nodes it hardly grows. That is the ring's merit: the bytes per node are 2 (N - 1) / N S, at most 2 S.
#
# ## Ask before you train
#
# A step of this model takes 0.8 s on a good laptop GPU. DDP averages after every step: on Wi-Fi 40 s of waiting for
# 0.8 s of computing. `advise` reckons that for any strategy, by formula.

# %%
STRATEGIES = ["ddp", "demo", "sparta:p_sparta=0.005", "diloco:H=10", "diloco:H=100"]
advice = advise(parameters=124e6, num_nodes=4, network="wifi", step_seconds=0.8, strategies=STRATEGIES)
for row in advice.rows:
    print(f"{row.strategy}: {row.seconds_per_step:.2f} s a step, {row.speedup:.2f} times one laptop")
# > sparta:p_sparta=0.005: 1.02 s a step, 3.14 times one laptop
# > diloco:H=100: 1.20 s a step, 2.67 times one laptop
# > demo: 1.74 s a step, 1.84 times one laptop
# > diloco:H=10: 4.77 s a step, 0.67 times one laptop
# > ddp: 40.50 s a step, 0.08 times one laptop

# %% [markdown]
# Four laptops under DDP are twelve times slower than one. With DiLoCo and H = 100 they are 2.7 times as fast.
# `speedup` counts examples per second, not what is learnt from them; for that you must train, and we shall.
#
# How fast must the network be? A picture over all bandwidths, with 20 ms of latency:

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
# Each curve is the same S, moved to the left by what the strategy saves. Below the dotted line you had better use one
# machine.
#
# ## Train on the clock
#
# `compare(..., network=...)` trains as before, to the bit, and keeps a virtual clock beside it. The table then has
# predicted seconds, the share of them waited, and the time at which a loss was reached. A step of our small model
# would take no time, so we say that it takes 20 ms.

# %%
METHODS = "ddp,diloco:H=10,sparta:p_sparta=0.01"
result = compare("digits", METHODS, max_steps=120, batch_size=8, lr=3e-3, seeds=1, network="wifi", step_seconds="20ms")
for row in result.rows:
    print(f"{row['strategy']}: {row['time_s']:.1f} s, of which {row['waiting_share']:.0%} waiting")
# > ddp: 6.1 s, of which 60% waiting
# > diloco:H=10: 2.8 s, of which 13% waiting
# > sparta:p_sparta=0.01: 6.0 s, of which 60% waiting
print(result.finding)

# %% [markdown]
# SPARTA sends a hundredth of DDP's bytes and waits as long! It meets at every step, and in a model of 2,410 numbers a
# meeting is all latency. On Wi-Fi what counts for a small model is how *often* you meet; for a large one, how much
# you send.
#
# ## One slow node
#
# A fleet is rarely alike. `speeds` says how fast each node is. If one is half as fast, everybody who waits for it is.

# %%
for speeds in ([1, 1, 1, 1], [1, 1, 1, 0.5]):
    rows = compare(
        "digits", "diloco:H=10", max_steps=60, seeds=1, network="wifi", step_seconds="20ms", speeds=speeds
    ).rows
    print(f"speeds {speeds}: {rows[0]['time_s']:.1f} s, waiting {rows[0]['waiting_share']:.0%}")
# > speeds [1, 1, 1, 1]: 1.4 s, waiting 12%
# > speeds [1, 1, 1, 0.5]: 2.6 s, waiting 42%

# %% [markdown]
# Two remedies: give the slow node less to do (`fit(balance="batch")`), or let nobody wait (`async_diloco`). Both are
# in [unequal machines](../docs/real_machines.md#unequal-machines).
#
# ## Your own network
#
# A preset, a text, links that differ, islands, or measurements: whatever takes a network takes all of them.

# %%
print(len(PRESETS), "presets:", ", ".join(PRESETS))
offices = Network.groups([4, 4], inside="lan-10g", between="100Mbps,20ms")  # two offices, one line between them
home = Network(up="20Mbps", down="100Mbps", latency="15ms")
for name, network in (("offices", offices), ("home", home)):
    print(f"{name}: 8 nodes average 100 MB in {network.cost('all_reduce', 1e8, 8).seconds:.0f} s")
# > offices: 8 nodes average 100 MB in 14 s
# > home: 8 nodes average 100 MB in 70 s

# %% [markdown]
# `exogym doctor --measure` measures the network between your own machines and writes a file that `--network` takes.
# [Predictions](../docs/predictions.md) says how far such predictions were off.
#
# ## Change something
#
# Your flat: four computers on `home` lines. A step of your model takes 0.3 s, and it has 10 million parameters. Which
# H does DiLoCo need for four computers to be three times as fast as one?
#
# ## A question
#
# In the picture DeMo's curve rises earlier than that of DiLoCo with H = 10, but its reduction of bytes is not ten
# times DDP's on every number of nodes. On which side does it get worse with 64 nodes, and why?
#
# **Answer.** What DeMo's nodes send are packed coefficients, which cannot be summed on the way. Each node gets those
# of all others: an all-gather, whose cost grows with N, while DiLoCo's all-reduce stays below 2 S. With 64 nodes
# DeMo's curve moves to the right, and DiLoCo's stays where it is. [The benchmark](../docs/benchmark.md#many-nodes)
# has the table.
