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
# # From simulation to real machines
#
# Run the strategy that you simulated on real computers: the line of code that names it stays the same, and the result
# is bitwise identical. In this tutorial one computer acts as two, with real processes and sockets. To use a second
# computer, you only change an address.
#
# You need Linux or macOS, and ExoGym [installed](../docs/getting_started.md#install) with its extra `[demo]`. This
# tutorial opens no port to your network. Read [Four nodes on your laptop](tutorial_basic.py) first.

# %%
import json
import socket
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from exogym.network import Network
from exogym.remote import check_hosts

# %% [markdown]
# ## One script
#
# Every machine starts the same script, so we write it to a file.

# %%
TRAIN = """
import json
import sys
from pathlib import Path

import torch
from torch import nn

from exogym import LocalTrainer, NetworkTrainer
from exogym.data import digits
from exogym.distributed import get_rank, is_initialized
from exogym.strategy import DiLoCoStrategy
from exogym.testing import fingerprint

name, hosts = sys.argv[1], sys.argv[2:]
source = digits()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
data = {"loss_fn": nn.functional.cross_entropy}
if hosts:
    trainer = NetworkTrainer(hosts[0], model, source.train, source.val, **data)
else:
    trainer = LocalTrainer(model, source.train, source.val, **data)
trainer.fit(DiLoCoStrategy(H=10, lr=3e-3, outer_lr=0.4), num_nodes=4, max_steps=100, batch_size=8, val_interval=20)

if not (is_initialized() and get_rank() > 0):  # under torchrun every process comes here; one speaks
    rows = [row for row in trainer.history.rows(node=None) if row["val_loss"] is not None]
    result = {"model": fingerprint(model), "steps": [r["step"] for r in rows], "losses": [r["val_loss"] for r in rows]}
    Path(f"result_{name}.json").write_text(json.dumps(result | {"wall_s": rows[-1]["wall_s"]}))
"""
Path("train.py").write_text(TRAIN)


def start(*words):
    """Start a Python, and wait for it."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# %% [markdown]
# ## Simulated: four nodes, one process

# %%
start("train.py", "simulated")

# %% [markdown]
# ## Two processes
#
# `python -m exogym.launch` starts the script twice, and so does `torchrun`. Each process holds two nodes.

# %%
start("-m", "exogym.launch", "--nproc_per_node", "2", "train.py", "launched")

# %% [markdown]
# ## Two hosts
#
# `NetworkTrainer` starts the processes for you over SSH, on all hosts in a *hosts file*. Our hosts file lists this
# computer twice, under two names, and needs no SSH to reach it.

# %%
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
hosts = {
    "master": {"address": "localhost", "device": "cpu"},
    "workers": [{"address": "127.0.0.1", "device": "cpu"}],
    "master_port": port,  # left out, it is 29500
}
Path("hosts.json").write_text(json.dumps(hosts, indent=2))

# %% [markdown]
# First check the hosts, as `exogym doctor --hosts hosts.json` does:

# %%
checks = check_hosts("hosts.json", code=False)
print(sum(check.ok for check in checks), "of", len(checks), "checks are ok, on", len({c.host for c in checks}), "hosts")
# > 19 of 19 checks are ok, on 2 hosts
for check in checks:
    if not check.ok:
        print(f"{check.host}, {check.check}: {check.seen}. {check.remedy}")

# %% [markdown]
# Then train. The script starts itself on the hosts, and fetches the model and the history at the end.

# %%
start("train.py", "hosts", "hosts.json")

# %% [markdown]
# ## The same model, bit for bit
#
# ExoGym sums in an order that doesn't depend on where the nodes are, so the three models are bitwise identical.

# %%
results = {name: json.loads(Path(f"result_{name}.json").read_text()) for name in ("simulated", "launched", "hosts")}
print(len({result["model"] for result in results.values()}), "model from three ways of running")
# > 1 model from three ways of running

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for (name, result), width in zip(results.items(), (7, 4, 1.5), strict=True):
    axes.plot(result["steps"], result["losses"], linewidth=width, label=name)
axes.set(xlabel="steps", ylabel="validation loss", yscale="log")
axes.legend(frameon=False)
figure.savefig("tutorial_real_machines.png", dpi=80)

# %% [markdown]
# ![Three equal curves, one over the other](../docs/images/tutorial_real_machines.png)
#
# ## Measure the network
#
# A self-test measures collectives between the processes and writes a file, which you can pass as `network=` wherever
# ExoGym predicts times.

# %%
start("-m", "exogym.launch", "--nproc_per_node", "2", "-m", "exogym.distributed", "--json", "measured.json")
measured = Network.of("measured.json")
print(f"1 MB averaged by two processes here: {1e3 * measured.cost('all_reduce', 1e6, 2).seconds:.1f} ms")

# %% [markdown]
# `exogym advise --network measured.json --parameters 124M --nodes 2 --step-seconds 0.8` now makes predictions for
# *your* machines.
#
# ## A second computer
#
# You must be able to log in to the second computer by SSH without a password. It needs the same versions of Python
# packages and your script's folder, which `sync=True` copies. Put its address into the hosts file:
#
# ```
# {
#   "master": "192.168.1.100",
#   "workers": [{"address": "192.168.1.101", "user": "ann", "python": "~/env/bin/python"}]
# }
# ```
#
# Traffic between hosts is not encrypted, so use a network that you trust. `exogym wizard` does all of these steps for
# you.
#
# ## Change something
#
# Give the worker two slots (`"slots": 2`). How many processes start, and which nodes does each of them hold? The answer
# is in `runs/`.
#
# ## A question
#
# Why does a script for `NetworkTrainer` call `torch.manual_seed(0)` before it makes the model, although all processes
# receive rank 0's weights?
#
# **Answer.** Rank 0 sends only the weights that differ. With the same seed, all processes create the same weights, so
# nothing has to be sent.
#
# ## Where to go from here
#
# - [Real machines](../docs/real_machines.md): the hosts file, lost hosts, tunnels.
