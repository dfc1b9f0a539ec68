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
# # Real machines
#
# A run on several computers ends in the same bits as its simulation, also if a computer is lost on the way. You need
# no second computer to see that: two addresses of this one, `localhost` and `127.0.0.1`, stand for two hosts, with
# processes of their own that meet over TCP.
#
# You will learn
#
# - to write a hosts file, and to ask the doctor what is missing;
# - to train with `NetworkTrainer`, in a script that each host starts;
# - that hosts and simulation agree to the last bit;
# - what happens when a host is lost in the middle, and how to have the same run again.
#
# About a minute on one core. `pip install 'exogym[demo]'`. Read [Four nodes on your laptop](tutorial_basic.py)
# first.

# %%
import ast
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

from exogym import LocalTrainer, load_model, runs
from exogym.data import digits
from exogym.faults import Faults
from exogym.record.run_folder import read_status
from exogym.remote import check_hosts
from exogym.strategy import DiLoCoStrategy
from exogym.testing import fingerprint

SHORT = "EXOGYM_SHORT" in os.environ  # for a test: nobody is lost
project = Path("two_hosts")
shutil.rmtree(project, ignore_errors=True)  # of an earlier start of this tutorial
project.mkdir()

# %% [markdown]
# ## The hosts file
#
# One master, where the hosts meet, and workers. With other computers there would be their addresses, who logs in, which
# Python is used; [Real machines](../docs/real_machines.md#set-up) has all fields. `exogym wizard` writes the file for
# you. We take a port that is free.

# %%
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
hosts = {
    "master": {"address": "localhost", "device": "cpu"},
    "workers": [{"address": "127.0.0.1", "device": "cpu"}],
    "master_port": port,
}
(project / "hosts.json").write_text(json.dumps(hosts, indent=2))
checks = check_hosts(hosts, code=False)
print(len({check.host for check in checks}), "hosts, all well:", all(check.ok for check in checks))
# > 2 hosts, all well: True

# %% [markdown]
# The same from a terminal is `exogym doctor --hosts hosts.json`. It looks at SSH, Python, versions, clocks, disks and
# ports, and says for each thing that is wrong what to do about it.
#
# ## A script
#
# Every host starts the same script, so there must be one: a notebook cannot run elsewhere. `NetworkTrainer` takes the
# place of `LocalTrainer`, with the hosts file in front; nothing else is different. What stands after `fit` runs where
# you started it, once.

# %%
SCRIPT = """
import os
import sys
import time

import torch
from torch import nn

from exogym import NetworkTrainer
from exogym.callbacks import Every
from exogym.data import digits
from exogym.strategy import DiLoCoStrategy

steps, min_hosts = int(sys.argv[1]), int(sys.argv[2]) or None
print("process", os.getpid(), flush=True)
source = digits()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
trainer = NetworkTrainer(
    "hosts.json", model, source.train, source.val, loss_fn=nn.functional.cross_entropy, min_hosts=min_hosts
)
trainer.fit(
    DiLoCoStrategy(H=10, lr=3e-3, outer_lr=0.4, max_norm=1.0), max_steps=steps, batch_size=8, val_interval=50,
    max_restarts=1 if min_hosts else 0, callbacks=[Every(10, lambda loop: time.sleep(0.5))] if min_hosts else [],
)
print("outages:", trainer.outages)
"""
(project / "train.py").write_text(SCRIPT)


def start(*arguments):
    words = [sys.executable, "train.py", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))}
    return subprocess.Popen(
        words, cwd=project, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def final(folder):
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return load_model(model, folder / "fit_1.model.safetensors")


process = start(100, 0)
said, _ = process.communicate()
if process.returncode:
    raise RuntimeError(said)
print(said.splitlines()[1])
(first,) = (project / "runs").iterdir()
print(sorted(path.name for path in first.glob("*.log")))

# %% [markdown]
# All that a run leaves is in one folder here, though it was trained elsewhere: the final model, the history, what each
# process printed. It is a run folder like any other:

# %%
run = runs.load(first)
steps, losses = run.column("val_loss")
print("state:", run.state, "at step", steps[-1])
# > state: done at step 100

# %% [markdown]
# ## The same bits
#
# The simulation: the same lines with `LocalTrainer`, two nodes, one process.

# %%
source = digits()


def simulated(steps, faults=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    trainer = LocalTrainer(model, source.train, source.val, loss_fn=nn.functional.cross_entropy)
    trainer.fit(
        DiLoCoStrategy(H=10, lr=3e-3, outer_lr=0.4, max_norm=1.0), num_nodes=2, max_steps=steps, batch_size=8,
        val_interval=50, faults=faults, progress=False,
    )  # fmt: skip
    return trainer


trainer = simulated(100)
print("the bits of the simulation:", fingerprint(final(first)) == fingerprint(trainer.model))
# > the bits of the simulation: True

# %% [markdown]
# Sums go through a tree over the nodes' numbers, and which example a node sees depends on the seed, its number and the
# step. So it does not matter which process holds a node, nor on which computer it is. You can try a
# run on your laptop, and what you see is what the hosts will do.
#
# ## A host is lost
#
# With `min_hosts=1` the others go on. We kill the process of the second host the hard way. Its host notices, starts it
# again (`max_restarts=1`), and at the next common moment its node is taken in: it gets the numbers of those that
# stayed.

#
# Our steps are so short that a run would be over before anybody is back. So the script waits every ten steps; that
# changes no bit. It also says which process it is, into the log that each rank has here.


# %%
def lose_one():
    """Train, and kill the process of rank 1 after some steps; return the run's folder and what was said."""
    process = start(STEPS, 1)
    while process.poll() is None:
        for folder in (project / "runs").iterdir():
            log = folder / "training_rank_1.log"
            if folder != first and (folder / "status.json").exists() and log.exists():
                told = re.search(r"process (\d+)", log.read_text())
                if told and (read_status(folder).get("step") or 0) >= 50:
                    os.kill(int(told[1]), signal.SIGKILL)
                    return folder, process.communicate()[0]
        time.sleep(0.1)
    raise RuntimeError(process.communicate()[0])


outages = {}
STEPS = 400
if not SHORT:
    second, said = lose_one()
    print("\n".join(re.findall(r"exogym: (.*(?:gone|go on|is back).*)", said)))
    outages = ast.literal_eval(re.findall(r"outages: (.*)", said)[-1])
    print("nodes and the steps in which they were away:", outages)

# %% [markdown]
# The run has no gap. A lost node's steps since the last common moment are lost, and until it is back nobody trains on
# its share of the data. Which steps these were is written down, and that is all one needs to have the very same run
# again, in simulation: `Faults(absent=...)`, with `forget=True`, since what comes back has forgotten its own.

# %%
if not SHORT:
    trainer = simulated(STEPS, Faults(absent=outages, forget=True))
    print("the bits of that simulation:", fingerprint(final(second)) == fingerprint(trainer.model))
    # > the bits of that simulation: True
    undisturbed = simulated(STEPS)
    print("and of an undisturbed one:", fingerprint(final(second)) == fingerprint(undisturbed.model))
    # > and of an undisturbed one: False

# %% [markdown]
# What did it cost? Few steps, so little that one has to look closely:

# %%
figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for name, shown in {"undisturbed": simulated(STEPS), "with the outage": trainer}.items():
    rows = [row for row in shown.history.rows(node=None) if row["val_loss"] is not None]
    axes.plot([row["step"] for row in rows], [row["val_loss"] for row in rows], "o-", label=name)
for spans in outages.values():
    for begun, back in spans:
        axes.axvspan(begun, back or STEPS, color="#dddddd", label="one node is away")
axes.set(xlabel="step", ylabel="validation loss")
axes.legend(frameon=False)
figure.savefig("tutorial_real_machines.png", dpi=80)

# %% [markdown]
# ![Validation loss with and without an outage](../docs/images/tutorial_real_machines.png)
#
# ## With real computers
#
# Put their addresses into the hosts file, or let them be found: `exogym agent` on each, `exogym wizard` on yours
# ([Computers that find each other](../docs/discovery.md), [the wizard](../docs/wizard.md)). Every host needs the same
# versions of torch and exogym, and SSH without a password. What hosts send each other while they train is not
# encrypted: [Security](../docs/security.md) says what that means, and how to tunnel it.
#
# A run without a script of your own is a section of `config.ini` and `exogym distributed-train NAME`.
#
# ## Change something
#
# Start the script with three hosts: `localhost`, `127.0.0.1` and `127.0.0.1` with `"slots": 2` are four nodes. What has
# to change in the simulation for the bits to agree again?
#
# ## A question
#
# The killed host's node was in the middle of a round of ten steps. Why is the outage a span that begins right after a
# common moment, and not where the process died?
#
# **Answer.** Nobody can ask a dead process how far it was. What the others share with it is the last moment at which
# all stood at the same step, so they go back there, and the node counts as away from the next step on. That makes
# the run repeatable: the outage lies in numbers of steps, not in seconds.
