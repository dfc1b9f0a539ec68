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
# # Stop, resume and survive failures
#
# Practice with runs that take seconds: stop a run and resume it bitwise identically, notice that a run has died, lose a
# node, handle NaNs, stop early, and share the model.
#
# [Install](../docs/getting_started.md#install) ExoGym with the extra `[demo]`. Read [Four nodes on your
# laptop](tutorial_basic.py) first.

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
shutil.rmtree("runs/production", ignore_errors=True)  # left by an earlier run of this tutorial


def make_trainer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return LocalTrainer(model, source.train, source.val, loss_fn=nn.functional.cross_entropy)


def strategy():
    return DiLoCoStrategy(H=10, lr=3e-3, outer_lr=0.4, max_norm=1.0)


COMMON = {"num_nodes": 4, "batch_size": 8, "val_interval": 10, "partitioner": "shards:3"}  # few digits per node

# %% [markdown]
# ## Stop and resume
#
# `save_dir` is the folder for checkpoints. The first run below is never interrupted. The second ends at step 70, and
# the third call resumes it, as it would in a new process.

# %%
whole = make_trainer().fit(strategy(), max_steps=120, **COMMON)

make_trainer().fit(strategy(), max_steps=70, save_dir="runs/production/saved", **COMMON)
resumed = make_trainer().fit(strategy(), max_steps=120, save_dir="runs/production/saved", resume=True, **COMMON)
print("the same model:", fingerprint(whole) == fingerprint(resumed))
# > the same model: True

# %% [markdown]
# ExoGym refuses to resume with options that would change the run:

# %%
try:
    make_trainer().fit(strategy(), max_steps=120, save_dir="runs/production/saved", resume=True, **COMMON | {"seed": 1})
except CheckpointError as error:
    print(str(error).splitlines()[-1].strip())
# > seed: saved 0, now 1

# %% [markdown]
# If you press Ctrl-C, the run saves a checkpoint and then stops. A cluster scheduler's SIGTERM does the same if you
# start the script with `python -m exogym.launch` or a [job file](../docs/processes.md#clusters).
#
# ## Watch a run, and notice that it died
#
# If you pass `run_dir`, a run writes its events to a folder as plain JSON. Here a second Python process trains, and we
# kill it.

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
    while process.poll() is None and not list(folder.glob("checkpoints/step_*")):  # until its first checkpoint
        pass
    os.kill(process.pid, signal.SIGKILL)
run = runs.load(folder)
print("state:", run.state)
# > state: lost

# %% [markdown]
# `status.json` still says `running`, but the process no longer exists, so `exogym runs list` and `exogym ui` show the
# run as lost. Because the script passes `resume=True`, rerunning it would continue from the last checkpoint.
#
# ## A lost node, and a node with NaNs
#
# How much would an outage harm the model? `Faults` simulates one: node 3 is absent from step 40 to step 90, and forgets
# its state.

# %%
calm, outage, rubbish = make_trainer(), make_trainer(), make_trainer()
calm.fit(strategy(), max_steps=120, **COMMON)
outage.fit(strategy(), max_steps=120, faults=Faults(absent={3: [(40, 90)]}, forget=True), **COMMON)

# %% [markdown]
# The other nodes continue, and node 3 copies their weights when it returns. In the meantime, the model forgets the
# digits that only node 3 has seen. The next problem is a node whose loss becomes NaN. By default, it ends the run with
# an error; with `on_nonfinite="skip"`, the node misses that round instead.


# %%
class Poisoned(nn.Module):
    """A model whose loss becomes nan on a marked digit."""

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
# ## Stop early
#
# Callbacks run after each evaluation. If a callback returns True, the run ends normally.


# %%
def good_enough(loop):
    return loop.history.last["val_accuracy"] > 0.9


early = make_trainer()
early.fit(strategy(), max_steps=1000, callbacks=[good_enough], run_dir="runs/production/early", **COMMON)
print("ended before step 500:", early.history.last["step"] < 500)
# > ended before step 500: True

# %% [markdown]
# ## Share the run
#
# The run folder contains the run's settings, the versions of packages, and all records.

# %%
torch.save(early.model.state_dict(), "runs/production/model.pt")
early.history.to_csv("runs/production/history.csv")
described = json.loads(Path("runs/production/early/run.json").read_text())
print(", ".join(described))

# %% [markdown]
# See [Unattended runs](../docs/troubleshooting.md#unattended-runs) for a checklist for long runs.
#
# ## Change something
#
# Let two nodes stay absent until the end: `Faults(absent={2: [(40, None)], 3: [(40, None)]})`. What is the loss then?
#
# ## A question
#
# The run that ended at step 70 synchronized its nodes there, and so did the uninterrupted run, because H is 10. If it
# had ended at step 75 instead, would the resumed run still be bitwise identical?
#
# **Answer.** Yes, because the checkpoint saves each node's own state from before the final synchronization.
