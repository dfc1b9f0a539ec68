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
# # Your own loop
#
# You have a training loop, and two machines with a slow connection between them. Simulate first to choose a strategy,
# and then *attach* the strategy to your loop. The trained model is bitwise identical to the simulated one.
#
# [Install](../docs/getting_started.md#install) ExoGym with the extra `[demo]`. Read [Four nodes on your
# laptop](tutorial_basic.py) first.

# %%
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

from exogym import LocalTrainer
from exogym.data import digits
from exogym.strategy import DiLoCoStrategy, SimpleReduceStrategy
from exogym.testing import fingerprint

source = digits()
STEPS = 200

# %% [markdown]
# ## Simulate
#
# `LocalTrainer` trains both nodes in one process, without your loop. DDP averages gradients at every step, and DiLoCo
# averages parameters every 20 steps.


# %%
def simulate(strategy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    trainer = LocalTrainer(model, source.train, source.val, loss_fn=nn.functional.cross_entropy)
    trainer.fit(
        strategy,
        num_nodes=2,
        max_steps=STEPS,
        batch_size=8,
        val_interval=20,
        network="20Mbps,20ms",
        step_seconds="50ms",
    )
    last = trainer.history.last
    print(
        f"{type(strategy).__name__}: loss {last['val_loss']:.3f}, {last['tx_bytes'] / 1e3:.0f} kB sent per node, "
        f"{last['time_s']:.0f} s"
    )
    return trainer


ddp = simulate(SimpleReduceStrategy(lr=3e-3))
diloco = simulate(DiLoCoStrategy(lr=3e-3, H=20))
# > SimpleReduceStrategy: loss 0.214, 1928 kB sent per node, 19 s
# > DiLoCoStrategy: loss 0.231, 96 kB sent per node, 10 s

# %% [markdown]
# DiLoCo sends a twentieth of the bytes and is predicted to take half the time, so we choose it.
#
# ## Attach
#
# This is your loop, in its own script. Three lines are new: `attach`, `nodes.loader`, and `nodes.step()`, which
# replaces `optimizer.step()` and `optimizer.zero_grad()`. The rest is an ordinary loop with checkpoints and
# evaluations.

# %%
SCRIPT = """
import os, signal, sys
import torch
from torch import nn
import exogym
from exogym.data import digits
from exogym.strategy import DiLoCoStrategy

source, steps = digits(), int(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
nodes = exogym.attach(model, optimizer, DiLoCoStrategy(H=20))  # new: this process is a node
loader = nodes.loader(source.train, batch_size=8)              # new: this node's batches
images, labels = torch.utils.data.default_collate(list(source.val))
file = f"node-{nodes.rank}.pt"

if "resume" in sys.argv:
    state = torch.load(file)
    nodes.load_state_dict(state["nodes"])
    optimizer.load_state_dict(state["optimizer"])

while nodes.step_count < steps:
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nodes.step(loss)                                       # new: in the place of optimizer.step()
        if nodes.step_count % 20 == 0:
            with nodes.evaluating():  # the averaged model
                val_loss = nn.functional.cross_entropy(model(images), labels)
            if nodes.rank == 0:
                print(f"step {nodes.step_count}: loss {val_loss:.3f}", flush=True)
        if nodes.step_count == 130:
            torch.save({"nodes": nodes.state_dict(), "optimizer": optimizer.state_dict()}, file)
        if nodes.step_count == 150 and "crash" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        if nodes.step_count == steps:
            break

nodes.finish()
torch.save(model, f"model-{nodes.rank}.pt")
"""
Path("my_loop.py").write_text(SCRIPT)


def launch(*words):
    """Start my_loop.py in two processes; return what it prints."""
    command = [sys.executable, "-m", "exogym.launch", "--nproc_per_node", "2", "my_loop.py", str(STEPS), *words]
    return subprocess.run(command, capture_output=True, text=True)


def same_bits():
    wanted = fingerprint(diloco.model)
    return [fingerprint(torch.load(f"model-{k}.pt", weights_only=False)) == wanted for k in range(2)]


printed = launch().stdout
print("the simulation's model in both processes:", same_bits())
# > the simulation's model in both processes: [True, True]

# %% [markdown]
# To run the processes on two hosts instead, start the same script with torchrun on each host ([writing a distributed
# script](../docs/processes.md#write-a-distributed-script)).
#
# ## Resume after a crash
#
# Both processes die at step 150. The second launch resumes from their last checkpoints, saved at step 130, in the
# middle of a round.

# %%
for file in Path().glob("model-*.pt"):
    file.unlink()
print("crashed:", launch("crash").returncode != 0)
launch("resume")
print("after the crash:", same_bits())
# > crashed: True
# > after the crash: [True, True]

# %% [markdown]
# ## Compare
#
# The loop evaluated the averaged model every 20 steps. The losses are the same as in the simulation.

# %%
attached = [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", printed)]
figure, axes = plt.subplots(figsize=(6, 3.5))
for trainer, name in ((ddp, "DDP, simulated"), (diloco, "DiLoCo, simulated")):
    axes.plot(*trainer.history.column("val_loss"), label=name)
axes.plot(*zip(*attached, strict=True), "ko", label="DiLoCo, your loop")
axes.set(xlabel="step", ylabel="validation loss", yscale="log")
axes.legend()
figure.tight_layout()
figure.savefig("tutorial_attach.png", dpi=80)

# %% [markdown]
# ![Validation loss: the attached loop's points lie on the simulation's curve](../docs/images/tutorial_attach.png)
#
# ## When to attach, when to simulate
#
# Simulate to choose: you can try many nodes and several strategies in one process, and predict their times. Attach to
# train: you keep your loop's logging, evaluation, mixed precision and checkpoints. A node can also consist of several
# processes with `fully_shard` ([run/sharded.py](../run/sharded.py)).
#
# ## Change something
#
# - Give the loop dropout. Call `nodes.reseed()` before each forward pass to stay bitwise identical to the simulation.
# - Attach `SPARTAStrategy(p_sparta=0.05)`. The loop stays the same.
# - Give the strategy `max_norm=1.0`. Where is the gradient clipped?
#
# ## A question
#
# The loop calls `optimizer.load_state_dict` as well as `nodes.load_state_dict`. What happens if you leave out the first
# call?
#
# **Answer.** The run resumes with the right parameters, outer parameters and data order, but AdamW starts with empty
# moments, so the result differs. `nodes` saves an inner optimizer only if you passed `optimizer=None` to `attach`.
