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
# # Fine-tune Whisper on your voice
#
# Teach Whisper unfamiliar voices and words with your own recordings, on one or several computers. So that this tutorial
# runs quickly, it uses a *tiny random model that understands nothing*. To use a real model, change one line.
#
# You need ExoGym [installed](../docs/getting_started.md#install) with its extras `[whisper,examples]`, and the program
# `espeak-ng`, which reads texts aloud (`apt-get install espeak-ng`, `brew install espeak-ng`). Read [Four nodes on your
# laptop](tutorial_basic.py) first.

# %%
from pathlib import Path

import matplotlib.pyplot as plt

from exogym import LocalTrainer
from exogym.advise import advise
from exogym.strategy import DiLoCoStrategy
from exogym.tasks import load_task

WEIGHTS = "small-random"  # None: tiny.en, if it is here; or "openai/whisper-small", which is fetched
RECORDINGS = None  # None: espeak-ng reads Shakespeare aloud; "recordings": your folder with a manifest.csv

# %% [markdown]
# ## Clips and their texts
#
# To use your own recordings, make a folder with the sound files and a `manifest.csv` with the columns `audio` and
# `text`.

# %%
options = {"weights": WEIGHTS, "lines": 24, "held_out": 6}
task = load_task("whisper", RECORDINGS, **options)
print(task.description)
# > Whisper on 24 clips of up to 4 s, LoRA of rank 8
clip, text = task.val.clip(0), task.val.texts[0]
print(f"{len(clip) / 16_000:.1f} s: {text}")

model = task.make_model(seed=0)
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
left.imshow(model.log_mel(clip[None])[0].numpy(), origin="lower", aspect="auto")
left.set(title=text, xlabel="1/100 s", ylabel="pitch")

# %% [markdown]
# ## Trained parameters
#
# **LoRA** adds two narrow matrices to each matrix of a layer, and only the added matrices are trained and sent.


# %%
def trained_numbers(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


everything = load_task("whisper", RECORDINGS, **options, lora_rank=None).make_model(seed=0)
print(f"an average moves {4 * trained_numbers(everything):,} bytes, with LoRA {4 * trained_numbers(model):,}")
# > an average moves 411,520 bytes, with LoRA 36,864

# %% [markdown]
# For tiny.en, an average moves 2.2 MB with LoRA instead of 151 MB.
#
# ## Fine-tune on two nodes
#
# The two nodes average every eight steps. We use DiLoCo with outer rate 1 and no momentum, because fine-tuning has too
# few rounds for momentum, and train all parameters of the random model.

# %%
trainer = LocalTrainer(everything, task.train, task.val)
strategy = DiLoCoStrategy(H=8, lr=3e-3, outer_lr=1.0, outer_momentum=0.0, max_norm=1.0)
trainer.fit(strategy, num_nodes=2, max_steps=40, batch_size=2, val_interval=8)
rows = [row for row in trainer.history.rows(node=None) if row["val_loss"] is not None]
print(f"loss {rows[0]['val_loss']:.1f} before, {rows[-1]['val_loss']:.1f} after")
# > loss 7.5 before, 3.2 after
print(f"words wrong: {rows[-1]['val_wer']:.0%}")
# > words wrong: 100%

right.plot([row["step"] for row in rows], [row["val_loss"] for row in rows], "o-")
right.set(title="fine-tuning on two nodes", xlabel="steps of each node", ylabel="validation loss")
figure.savefig("tutorial_whisper.png", dpi=80)

# %% [markdown]
# ![Whisper's input, and its loss](../docs/images/tutorial_whisper.png)
#
# Look at the word error rate too. With tiny.en and 96 lines, it fell from 39 % to 23 %
# ([measured](../research/results/measured.md#whisper)).
#
# ## How long does it take on your network?
#
# With LoRA, tiny.en sends 540,672 numbers. On a laptop, a step of two clips takes about a second.

# %%
for network in ("wifi", "home"):
    advice = advise(
        parameters=540_672, num_nodes=3, network=network, step_seconds=1.0, strategies=["ddp", "diloco:H=8"]
    )
    found = {row.strategy: f"{row.speedup:.2f} times one computer" for row in advice.rows}
    print(f"three computers, {network}: ddp {found['ddp']}, diloco {found['diloco:H=8']}")
# > three computers, wifi: ddp 2.56 times one computer, diloco 2.94 times one computer
# > three computers, home: ddp 1.35 times one computer, diloco 2.60 times one computer

# %% [markdown]
# ## Save the model
#
# `save_pretrained` merges LoRA's matrices into the model, and writes a folder that transformers can open.

# %%
model.save_pretrained("better")
print("saved, for example", *sorted(path.name for path in Path("better").iterdir())[:2])

# %% [markdown]
# ## With the real model
#
# ```
# python run/whisper.py --data recordings --num_nodes 2 --save better
# exogym wizard --task whisper --data recordings
# ```
#
# The first command trains on this computer, and the second on other computers too. [Fine-tuning
# Whisper](../docs/fine_tuning.md#whisper) describes all options.
#
# ## Change something
#
# Set `H=1`, and then `H=40`. How do the loss and `tx_bytes` change?
#
# ## A question
#
# Whisper was made for windows of 30 seconds. Why is the window here only one second longer than the longest clip?
#
# **Answer.** The encoder processes the whole window, so most of the work on a 3 s clip in a 30 s window is wasted.
# Nothing must be relearned in a shorter window, because the removed positions are fixed sinusoids.
