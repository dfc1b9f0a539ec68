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
# # Runs you can rely on
#
# A run of a minute may fail: you start it again. A run of a week must survive its machine, tell you how it is doing,
# and be the same run afterwards. This tutorial practises that on a run of seconds.
#
# You will learn
#
# - to stop a run and go on, and why the bits are the same;
# - to follow it from another program, also when it was killed;
# - what happens to the others when a node is lost or sends rubbish;
# - to stop early, to keep the best numbers, and to hand over the model.
#
# About ten seconds on one core, with ExoGym [installed](../docs/getting_started.md#install) and its extra `[demo]`.
# Read [Four nodes on your laptop](tutorial_basic.py) first.

# %%
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

from exogym import LocalTrainer, runs
from exogym.data import digits
from exogym.errors import CheckpointError, TrainingError
from exogym.faults import Faults
from exogym.strategy import DiLoCoStrategy
from exogym.testing import fingerprint

source = digits()
shutil.rmtree("runs/production", ignore_errors=True)  # of an earlier start of this tutorial


def make_trainer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return LocalTrainer(model, source.train, source.val, loss_fn=nn.functional.cross_entropy)


def strategy():
    return DiLoCoStrategy(H=10, lr=3e-3, outer_lr=0.4, max_norm=1.0)


COMMON = {"num_nodes": 4, "batch_size": 8, "val_interval": 10, "partitioner": "shards:3"}  # few digits each

# %% [markdown]
# ## Stop, and go on
#
# `save_dir` is where checkpoints go. Each is written beside the last one and then renamed, so a power cut never
# leaves half of one. First the run that nobody disturbs, 120 steps. Then the same one, which ends at step 70, in the
# middle of a round. In a new process you would write exactly the third line.

# %%
whole = make_trainer().fit(strategy(), max_steps=120, **COMMON)

make_trainer().fit(strategy(), max_steps=70, save_dir="runs/production/saved", **COMMON)
resumed = make_trainer().fit(strategy(), max_steps=120, save_dir="runs/production/saved", resume=True, **COMMON)
print("the same model:", fingerprint(whole) == fingerprint(resumed))
# > the same model: True

# %% [markdown]
# The same bits: weights, the momentum of four optimizers and of the outer one, the place in the data, random numbers.
# An option that would change the run is refused, so that you never go on with something else by mistake:

# %%
try:
    make_trainer().fit(strategy(), max_steps=120, save_dir="runs/production/saved", resume=True, **COMMON | {"seed": 1})
except CheckpointError as error:
    print(str(error).splitlines()[-1].strip())
# > seed: saved 0, now 1

# %% [markdown]
# Ctrl-C saves and then stops. So does the SIGTERM of a cluster's scheduler, if you start the script with `python -m
# exogym.launch` or one of the [job files](../docs/clusters.md).
#
# ## Follow it, and find out that it died
#
# `run_dir` writes what happens into a folder of plain JSON. Here a second Python trains, and we kill it the hard way,
# so that it cannot say a word.

# %%
script = """
import torch
from torch import nn
from exogym import LocalTrainer
from exogym.data import digits
from exogym.strategy import DiLoCoStrategy

source = digits()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
trainer = LocalTrainer(model, source.train, source.val, loss_fn=nn.functional.cross_entropy)
trainer.fit(
    DiLoCoStrategy(H=10, lr=3e-3, outer_lr=0.4, max_norm=1.0), num_nodes=4, batch_size=8, val_interval=20,
    max_steps=100_000, run_dir="runs/production/long", checkpoint_interval=20, progress=False, resume=True,
)
"""
folder = Path("runs/production/long")
with subprocess.Popen([sys.executable, "-c", script]) as process:
    while process.poll() is None and not list(folder.glob("checkpoints/step_*")):  # until it has saved once
        pass
    os.kill(process.pid, signal.SIGKILL)
run = runs.load(folder)
print("state:", run.state)
# > state: lost

# %% [markdown]
# `lost` stands in no file, for who would have written it? The reader finds out: the file says `running`, and the
# process is not there. `exogym runs list` shows all runs so, and `exogym ui` in the browser. The script above would
# go on from its last checkpoint if you started it again, since it says `resume=True`.
#
# ## A node that is lost, and one that sends rubbish
#
# Before you buy or borrow machines: what would an outage cost? `Faults` plays it. Node 3 is away from step 40 to step
# 90, and forgets what it knew.

# %%
calm, outage, rubbish = make_trainer(), make_trainer(), make_trainer()
calm.fit(strategy(), max_steps=120, **COMMON)
outage.fit(strategy(), max_steps=120, faults=Faults(absent={3: [(40, 90)]}, forget=True), **COMMON)

# %% [markdown]
# The others go on without it, and it takes their weights when it is back. Here each node has digits of three kinds,
# as the farms or clinics of a real fleet would, so what node 3 alone has seen is forgotten for a while. The loss
# shows it below. A node whose numbers are not numbers is another matter. By default the run ends with an error that
# names node and step. With `on_nonfinite="skip"` the node is left out of that round instead.


# %%
class Poisoned(nn.Module):
    """A model whose loss becomes nan when it sees a digit that is marked."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        return self.inner(x).where(x[:, :1] < 1e6, torch.nan)


images, labels = source.train.tensors
images = images.clone()
images[7] = 1e9  # a broken file
bad_data = torch.utils.data.TensorDataset(images, labels)
for choice in ("raise", "skip"):
    torch.manual_seed(0)
    rubbish = LocalTrainer(Poisoned(), bad_data, source.val, loss_fn=nn.functional.cross_entropy)
    try:
        rubbish.fit(strategy(), max_steps=120, on_nonfinite=choice, **COMMON)
        print(f"{choice}: trained to the end, accuracy {rubbish.history.last['val_accuracy']:.0%}")
    except TrainingError as error:
        print(f"{choice}: {str(error).partition(':')[0]}")
# > raise: the loss of node 1 became nan at its step 19
# > skip: trained to the end, accuracy 91%

# %%
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
for name, trainer in (("undisturbed", calm), ("node 3 away, 40 to 90", outage), ("a broken file, skipped", rubbish)):
    steps, losses = trainer.history.column("val_loss")
    axes.plot(steps, losses, "o-", markersize=3, label=name)
axes.axvspan(40, 90, color="#EEEEEE", zorder=0)
axes.set(xlabel="steps", ylabel="validation loss", yscale="log")
axes.legend(frameon=False)
figure.savefig("tutorial_production.png", dpi=80)

# %% [markdown]
# ![Validation loss with an outage and with a broken file](../docs/images/tutorial_production.png)
#
# ## End it in time
#
# A callback is a function of the running training, called after each evaluation. If it returns True, the run ends as
# at any end: what is left is synchronised and evaluated.


# %%
def good_enough(loop):
    return loop.history.last["val_accuracy"] > 0.9


early = make_trainer()
early.fit(strategy(), max_steps=1000, callbacks=[good_enough], run_dir="runs/production/early", **COMMON)
print("ended before step 500:", early.history.last["step"] < 500)
# > ended before step 500: True

# %% [markdown]
# ## Hand over
#
# The model is an ordinary module, and the numbers are in the run folder for whoever asks in a year: what was run,
# with which versions, on what, and every record.

# %%
torch.save(early.model.state_dict(), "runs/production/model.pt")
early.history.to_csv("runs/production/history.csv")
described = json.loads(Path("runs/production/early/run.json").read_text())
print(", ".join(described))

# %% [markdown]
# ## A list for before a long run
#
# | | |
# | --- | --- |
# | it goes on by itself | `save_dir` or `run_dir`, `checkpoint_interval`, `resume=True` in the script from the start |
# | a process that dies or hangs | `max_restarts=3`; `hang_s` finds what hangs |
# | gradients that explode | `max_norm=1.0` in the strategy |
# | hosts that come and go | `NetworkTrainer(..., min_hosts=2)`, see [real machines](../docs/real_machines.md) |
# | who may read what is sent | [security](../docs/security.md): `torch.distributed` does not encrypt |
# | how long it will take | `exogym advise`, see [networks and time](tutorial_networks.py) |
#
# ## Change something
#
# Let two nodes be away at the same time, for ever: `Faults(absent={2: [(40, None)], 3: [(40, None)]})`. What is the
# loss then? And with `DiLoCoStrategy(H=10, lr=3e-3, outer_lr=0.4, robust="median")` and `Faults(bad_nodes=[1],
# attack="scale")`?
#
# ## A question
#
# The run that ended at step 70 synchronised its nodes there, since a run ends with a synchronisation. The undisturbed
# one met at 70, too, because H is 10. What if it had ended at step 75? Would the resumed run still have the same
# bits?
#
# **Answer.** Yes. The checkpoint is taken where each node stands, before the last synchronisation. That one only
# makes the model that you get at step 75. Try it.
