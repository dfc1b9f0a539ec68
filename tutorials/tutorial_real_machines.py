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
# What you tried on simulated nodes runs on real computers with the strategy line unchanged, and ends in the same
# bits. You can practise that at home with one computer: it plays two, with real processes, real sockets and the real
# launcher. With a second computer only an address changes.
#
# You will learn
#
# - to write a training script that runs in simulation, under `torchrun` and on several hosts;
# - to start it in all three ways, and to see that the model is the same;
# - what a hosts file is, and what is asked of a host;
# - to measure the network between your machines and predict with it.
#
# About half a minute, on Linux or macOS, with ExoGym [installed](../docs/getting_started.md#install) and its extra
# `[demo]`. Nothing is opened to your network: all addresses here are this computer's own. Read [Four nodes on your
# laptop](tutorial_basic.py) first.

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
# A program that is to run on several machines must be a file: every machine starts it. So we write one here. The only
# line that knows where it runs is the one that makes the trainer.

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
# `python -m exogym.launch` starts the script twice, as `torchrun` would (which works as well). The processes find
# each other, share the four nodes out, two each, and talk through torch's gloo. On two machines you would start it on
# each, with `--nnodes 2 --node_rank 0` and `1`, and the first one's address.

# %%
start("-m", "exogym.launch", "--nproc_per_node", "2", "train.py", "launched")

# %% [markdown]
# ## Two hosts
#
# `NetworkTrainer` does the starting for you: from one computer, over SSH, on all that a *hosts file* names. Ours
# names this computer twice, under two names, and it needs no SSH to reach itself.

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
# First ask the doctor, as you would for real machines (`exogym doctor --hosts hosts.json`): is Python there, are the
# versions the same, is the code the same, is the port free?

# %%
checks = check_hosts("hosts.json", code=False)
print(sum(check.ok for check in checks), "of", len(checks), "checks are ok, on", len({c.host for c in checks}), "hosts")
# > 19 of 19 checks are ok, on 2 hosts
for check in checks:
    if not check.ok:
        print(f"{check.host}, {check.check}: {check.seen}. {check.remedy}")

# %% [markdown]
# Then train. The script that you start is the controller. It checks the hosts, starts itself there, brings the lines
# they print to your terminal, and in the end the model and the history.

# %%
start("train.py", "hosts", "hosts.json")

# %% [markdown]
# ## The same bits
#
# Sums are taken in an order that does not depend on who holds which node. So the three models are equal in every bit,
# and you can debug on your laptop what happened on a cluster.

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
# ![Three curves that lie on each other](../docs/images/tutorial_real_machines.png)
#
# ## Measure the way between them
#
# The launcher can run a self-test that times collectives between the processes. What it writes stands for a network
# wherever one is asked for.

# %%
start("-m", "exogym.launch", "--nproc_per_node", "2", "-m", "exogym.distributed", "--json", "measured.json")
measured = Network.of("measured.json")
print(f"1 MB averaged by two processes here: {1e3 * measured.cost('all_reduce', 1e6, 2).seconds:.1f} ms")

# %% [markdown]
# `exogym advise --network measured.json --parameters 124M --nodes 2 --step-seconds 0.8` now speaks of *your*
# machines.
#
# ## A second computer
#
# Three things are needed on it: SSH from here without a password, the same versions of Python's packages, and the
# folder with your script (`sync=True` copies it). Then the hosts file has its address:
#
# ```
# {
#   "master": "192.168.1.100",
#   "workers": [{"address": "192.168.1.101", "user": "ann", "python": "~/env/bin/python"}]
# }
# ```
#
# and `exogym doctor --hosts hosts.json` says what is still missing. What the hosts send each other is not encrypted,
# so do it in a network that you trust. `exogym wizard` does all of it by asking.
#
# ## Change something
#
# Give the worker two slots (`"slots": 2`). How many processes start, and who has which nodes? Look into `runs/`: each
# start on hosts has a folder with the logs of every rank. Then press Ctrl-C in the middle, and see what is said.
#
# ## A question
#
# Why does a training script for `NetworkTrainer` call `torch.manual_seed(0)` before it makes the model, though only
# the weights of the first process are used?
#
# **Answer.** They are: at the start the weights of rank 0 go to all. But what travels is only what differs. With the
# same seed all processes make the same weights, sums of them are compared, and nothing needs to be sent. And a run
# you may want to repeat should not depend on chance anyway.
#
# ## Where to go from here
#
# - [Real machines](../docs/real_machines.md): the hosts file, what happens when a host is lost, tunnels.
# - [Security](../docs/security.md): who may talk to whom.
# - [Clusters](../docs/clusters.md): SLURM and Kubernetes.
