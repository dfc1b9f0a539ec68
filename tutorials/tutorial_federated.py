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
# A thousand phones have photographs that must not leave them. A server has the model. In each *round* it asks a few
# phones, each trains on its own data, and the server averages what comes back. Here a phone is a *client*, and a
# client is a node.
#
# You will learn
#
# - to simulate a thousand clients, of which twenty take part in a round;
# - what it means that no two clients have the same kind of data, and what helps;
# - what it costs when clients come, go and are slow;
# - what privacy costs.
#
# About ten seconds on one core, with ExoGym [installed](../docs/getting_started.md#install) and its extras
# `[examples,privacy]`. Read [Four nodes on your laptop](tutorial_basic.py) first.

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
from exogym.strategy import DifferentialPrivacy, FedAvgStrategy, FedOptStrategy, FedProxStrategy, ScaffoldStrategy

source = mnist(flat=True)  # 4,000 digits of 28x28 to train on
labels = source.train.tensors[1].numpy()
of_class = [np.flatnonzero(labels == digit) for digit in range(10)]

# %% [markdown]
# ## The data of a client
#
# With many clients nobody wants to make all data sets beforehand. So the data come from a function: given a client,
# it returns that client's data set. It is called when the client first takes part. Ours has 20 digits of only two
# classes. That is the hard case: what a client learns is wrong for nearly everyone else.

# %%
CLIENTS = 1000
SHORT = "EXOGYM_SHORT" in os.environ  # fewer steps: it shows that all runs, and its numbers mean nothing


def data_of(client, num_clients, is_train):
    draw = np.random.default_rng((0, client))
    pool = np.concatenate([of_class[c] for c in draw.choice(10, 2, replace=False)])
    return Subset(source.train, draw.choice(pool, 20, replace=False).tolist())


print("client 7 has the digits", sorted({int(labels[i]) for i in data_of(7, CLIENTS, True).indices}))


# %% [markdown]
# ## Federated averaging
#
# In a round of **FedAvg** each client that is asked starts from the server's weights, takes H steps of plain SGD, and
# sends its weights back. `client_fraction` says how many are asked. All other clients cost nothing: they have no row
# in memory.


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
# Twenty of a thousand clients, in thirty rounds: some six hundred requests, each for five steps on twenty digits.
#
# ## Others
#
# - **FedProx** pulls each client back towards the server's weights while it trains.
# - **SCAFFOLD** has every client remember how its own gradient differs from that of all, and corrects for it. It
#   sends twice as much.
# - **FedOpt** lets the server apply the mean change as a gradient, here with Adam.

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
# FedAdam is ahead here; the other three cannot be told apart. One run proves little: repeat it with other seeds
# (`seed=1` in `fit`) and other learning rates before you choose.
#
# ## Clients come and go
#
# A phone takes part when it is charging and on Wi-Fi. `Devices` plays a fleet of kinds, each with its speed and the
# share of time it is there. The server asks a third more clients than it needs (`over_sampling`), waits at most 30
# seconds (`deadline_s`), and gives a round up if fewer than ten report.

# %%
fleet = Devices({"phone": Profile(0.8, speed=0.2, online=0.1, session_s=7200), "laptop": Profile(0.2, 1.0, 0.3, 10800)})
real = train(
    FedAvgStrategy(**COMMON, over_sampling=0.3, deadline_s=30, min_reports=10),
    faults=Faults(trace=fleet), step_seconds=1.0,
)  # fmt: skip
last = real.history.last
print(
    f"accuracy {last['val_accuracy']:.0%}; asked {last['asked']:.0f}, {last['reports']:.0f} reported in time,", end=" "
)
print(f"{last['failed_rounds']:.0f} rounds given up, {last['server_time_s'] / 60:.0f} minutes")
# > accuracy 86%; asked 26, 20 reported in time, 0 rounds given up, 12 minutes

# %% [markdown]
# ## What privacy costs
#
# The server sees each client's weights, and weights tell something of the data. **DP-FedAvg** bounds how much: what a
# client changes is shortened to a length of at most `clip`, and noise is added to the sum. *epsilon* says how much an
# onlooker can learn about whether one client took part; smaller is safer, and over 10 says little. It grows with each
# round.

# %%
private = train(
    FedAvgStrategy(
        **COMMON, weighting="uniform", privacy=DifferentialPrivacy(clip=1.0, noise_multiplier=0.6, delta=1e-3)
    )
)
last = private.history.last
print(f"accuracy {last['val_accuracy']:.0%} at epsilon {last['epsilon']:.1f}")
# > accuracy 69% at epsilon 3.2

# %% [markdown]
# The noise is the same whether 20 clients take part or 2,000, so real systems ask thousands in a round. Secure
# aggregation, where the server sees the sum only, is an option too: `secure_aggregation=True`.
#
# ## Change something
#
# Ask 100 clients in a round instead of 20, with the same noise. What happens to accuracy and to epsilon? Then make
# the data easy: `draw.choice(10, 10, replace=False)`.
#
# ## A question
#
# With 1,000 clients and 20 in a round, how many rows of parameters does the simulation hold? How many would it hold
# with a million clients?
#
# **Answer.** About forty, and about forty. Only the clients of the round that ends and of the next one have a row;
# all others start from the server's weights when they are asked. A client that must remember something (SCAFFOLD) has
# it in a store once it has taken part. [Federated simulation](../docs/federated.md) has the details and a run with a
# hundred thousand clients.
