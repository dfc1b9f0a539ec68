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
# # Federated learning
#
# A thousand phones have photographs that must stay private. In each *round*, a server asks a few phones (*clients*) to
# train on their own data, and averages the results. In ExoGym, a client is a node.
#
# In this tutorial you simulate a thousand clients, compare methods for clients with different data, and see how absent
# clients and privacy affect the result. [Install](../docs/getting_started.md#install) ExoGym with its extras
# `[examples,privacy]`, and read [Four nodes on your laptop](tutorial_basic.py) first.

# %%
import os

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn
from torch.utils.data import Subset

from exogym import LocalTrainer
from exogym.data import mnist
from exogym.faults import Devices, Faults, Profile
from exogym.strategy import (
    Averaging,
    DifferentialPrivacy,
    FedAvgStrategy,
    FedOptStrategy,
    FedProxStrategy,
    ScaffoldStrategy,
)

source = mnist(flat=True)  # 4,000 digits of 28x28 to train on
labels = source.train.tensors[1].numpy()
of_class = [np.flatnonzero(labels == digit) for digit in range(10)]

# %% [markdown]
# ## The data of a client
#
# A function creates each client's dataset when the client first takes part. Ours returns 20 digits of only two classes,
# so a model that a single client trains alone is wrong about almost all other digits.

# %%
CLIENTS = 1000
SHORT = "EXOGYM_SHORT" in os.environ  # fewer steps, to test the script; ignore its numbers


def data_of(client, num_clients, is_train):
    draw = np.random.default_rng((0, client))
    pool = np.concatenate([of_class[c] for c in draw.choice(10, 2, replace=False)])
    return Subset(source.train, draw.choice(pool, 20, replace=False).tolist())


print("client 7 has the digits", sorted({int(labels[i]) for i in data_of(7, CLIENTS, True).indices}))


# %% [markdown]
# ## Federated averaging
#
# With **FedAvg**, each sampled client takes H steps of plain SGD from the server's weights and sends the result back.


# %%
def train(strategy, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    trainer = LocalTrainer(model, data_of, source.val, loss_fn=nn.functional.cross_entropy)
    trainer.fit(strategy, num_nodes=CLIENTS, max_steps=25 if SHORT else 150, batch_size=20, val_interval=25, **options)
    return trainer


COMMON = {"inner_optim": "sgd", "lr": 0.1, "H": 5, "client_fraction": 20 / CLIENTS}
fedavg = train(FedAvgStrategy(**COMMON))
last = fedavg.history.last
print(f"accuracy {last['val_accuracy']:.0%} after 30 rounds")
# > accuracy 87% after 30 rounds

# %% [markdown]
# ## Other methods
#
# - **FedProx** pulls each client toward the server's weights while it trains.
# - **SCAFFOLD** stores on each client how its gradient differs from the others', corrects for it, and sends twice as
#   much.
# - **FedOpt** uses the mean change as a gradient at the server, here with Adam.

# %%
runs = {
    "FedAvg": fedavg,
    "FedProx, mu = 0.1": train(FedProxStrategy(**COMMON, mu=0.1)),
    "SCAFFOLD": train(ScaffoldStrategy(**COMMON)),
    "FedAdam": train(FedOptStrategy(**COMMON, server_optim="adam", server_lr=0.02)),
}
figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
for name, trainer in runs.items():
    rows = [row for row in trainer.history.rows(node=None) if row["val_accuracy"] is not None]
    axes.plot(
        [row["step"] // 5 for row in rows], [100 * row["val_accuracy"] for row in rows], "o-", markersize=3, label=name
    )
axes.set(xlabel="rounds", ylabel="accuracy, %")
axes.legend(frameon=False, fontsize=8)
figure.savefig("tutorial_federated.png", dpi=80)

# %% [markdown]
# ![Accuracy over rounds](../docs/images/tutorial_federated.png)
#
# FedAdam is ahead here. Before you choose a method, repeat the runs with other seeds (`seed=1` in `fit`) and learning
# rates.
#
# ## Clients come and go
#
# `Devices` simulates several kinds of devices, each with a speed and a share of time online. The server samples clients
# that are online, and waits for those clients that don't disconnect. A round fails if no client reports.

# %%
fleet = Devices({"phone": Profile(0.8, speed=0.2, online=0.1, session_s=7200), "laptop": Profile(0.2, 1.0, 0.3, 10800)})
real = train(FedAvgStrategy(**COMMON), faults=Faults(trace=fleet), step_seconds=1.0)
last = real.history.last
print(
    f"accuracy {last['val_accuracy']:.0%}; asked {last['asked']:.0f}, {last['reports']:.0f} reported in time,", end=" "
)
print(f"{last['failed_rounds']:.0f} rounds given up, {last['server_time_s'] / 60:.0f} minutes")
# > accuracy 86%; asked 20, 19 reported in time, 0 rounds given up, 12 minutes

# %% [markdown]
# ## What privacy costs
#
# Weights reveal something about a client's data. **DP-FedAvg** clips the norm of each client's change to `clip` and
# adds noise to the sum. *epsilon* bounds how much an observer can learn about whether a client took part. It grows with
# each round; smaller values are safer, and above 10 it protects little.

# %%
private = train(
    FedAvgStrategy(
        **COMMON,
        weighting="uniform",
        averaging=Averaging(privacy=DifferentialPrivacy(clip=1.0, noise_multiplier=0.6, delta=1e-3)),
    )
)
last = private.history.last
print(f"accuracy {last['val_accuracy']:.0%} at epsilon {last['epsilon']:.1f}")
# > accuracy 69% at epsilon 3.2

# %% [markdown]
# The noise has the same size for 20 clients as for 2,000. With `exogym.contrib.Secure`, the server sees only the sum.
#
# ## Change something
#
# Sample 100 clients per round, with the same noise. How do the accuracy and epsilon change?
#
# ## A question
#
# How many rows of parameters does the simulation keep in memory with 1,000 clients and 20 per round? How many with a
# million clients?
#
# **Answer.** About forty in both cases, because only the clients of the current and the next round have a row.
# [Federated simulation](../docs/federated.md) explains the details and shows a run with a hundred thousand clients.
