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
# # Fine-tune a language model on your texts
#
# Teach a language model the words and the tone of your texts, on one or several computers. So that this tutorial runs
# quickly, it uses a *tiny random model that knows nothing*. To use a real model from your disk, change one line.
#
# You need ExoGym [installed](../docs/getting_started.md#install) with its extras `[language,examples]`. Read [Four
# nodes on your laptop](tutorial_basic.py) first.

# %%
import math
from pathlib import Path

import matplotlib.pyplot as plt

from exogym import LocalTrainer
from exogym.advise import advise
from exogym.strategy import DiLoCoStrategy
from exogym.tasks import load_task

WEIGHTS = "small-random"  # or "smol": your folder in transformers' format, or a GGUF file
TEXTS = "texts"  # your folder with files .txt, .md or .jsonl

# %% [markdown]
# ## Texts
#
# Skip this cell if you have your own folder.

# %%
WHO, DOES = ("the red fox", "a blue bird", "the old man", "a cold wind"), ("runs", "sings", "sleeps", "blows")
Path(TEXTS).mkdir(exist_ok=True)
for i in range(20):
    lines = [f"{WHO[(i + j * j) % 4]} {DOES[(i * j) % 4]}." for j in range(60)]
    Path(TEXTS, f"{i:02d}.txt").write_text("\n".join(lines), encoding="utf-8")

task = load_task("language", TEXTS, weights=WEIGHTS, block_size=64)
print(task.description)
# > a language model on 311 blocks of 64 tokens, held out 2 of 20 texts, LoRA of rank 8

# %% [markdown]
# Each example is a *block* of 64 tokens, and the model predicts every token from the tokens before it. Two of the texts
# are *held out*, which means that the model never trains on them.
#
# ## Trained parameters
#
# **LoRA** adds two narrow matrices to each matrix of a layer, and only the added matrices are trained and sent.


# %%
def trained_numbers(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


everything = load_task("language", TEXTS, weights=WEIGHTS, block_size=64, lora_rank=None).make_model(seed=0)
adapters = task.make_model(seed=0)
print(f"an average moves {4 * trained_numbers(everything):,} bytes, with LoRA {4 * trained_numbers(adapters):,}")
# > an average moves 70,144 bytes, with LoRA 16,384

# %% [markdown]
# For SmolLM2-135M, an average moves 9.8 MB with LoRA instead of 538 MB.
#
# ## Fine-tune on two nodes
#
# The two nodes average every eight steps. We use DiLoCo with outer rate 1 and no momentum, because fine-tuning has too
# few rounds for momentum, and train all parameters of the random model. **Perplexity** is exp(loss): a model with
# perplexity 4 is as uncertain as if it had to choose among 4 tokens.

# %%
trainer = LocalTrainer(everything, task.train, task.val)
strategy = DiLoCoStrategy(H=8, lr=1e-2, outer_lr=1.0, outer_momentum=0.0, max_norm=1.0)
trainer.fit(strategy, num_nodes=2, max_steps=120, batch_size=4, val_interval=8)
rows = [row for row in trainer.history.rows(node=None) if row["val_loss"] is not None]
perplexities = [math.exp(row["val_loss"]) for row in rows]
print(f"perplexity {perplexities[0]:.0f} before, {perplexities[-1]:.1f} after")
# > perplexity 252 before, 1.2 after
print(repr(everything.write(["the red"], tokens=40)[0]))

figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
axes.semilogy([row["step"] for row in rows], perplexities, "o-")
axes.set(title="fine-tuning on two nodes", xlabel="steps of each node", ylabel="perplexity of held-out texts")
figure.savefig("tutorial_language.png", dpi=80)

# %% [markdown]
# ![Perplexity falls](../docs/images/tutorial_language.png)
#
# ## How long does it take on your network?
#
# With LoRA, SmolLM2-135M sends 2,442,240 numbers. On a laptop, a step of two blocks of 128 tokens takes two seconds.

# %%
for network in ("wifi", "home"):
    advice = advise(
        parameters=2_442_240, num_nodes=3, network=network, step_seconds=2.0, strategies=["ddp", "diloco:H=8"]
    )
    found = {row.strategy: f"{row.speedup:.2f} times one computer" for row in advice.rows}
    print(f"three computers, {network}: ddp {found['ddp']}, diloco {found['diloco:H=8']}")
# > three computers, wifi: ddp 2.21 times one computer, diloco 2.87 times one computer
# > three computers, home: ddp 0.82 times one computer, diloco 2.26 times one computer

# %% [markdown]
# ## Save the model
#
# `save_pretrained` writes a folder that transformers can open. If the model has LoRA's matrices, it merges them first.

# %%
everything.save_pretrained("better")
print("saved, for example", *sorted(path.name for path in Path("better").iterdir())[:2])

# %% [markdown]
# ## With a real model
#
# ```
# python run/language_model.py --data texts --num_nodes 2 --save better
# exogym wizard --task language --data texts --task-options weights=smol
# ```
#
# The first command trains on this computer, and the second on other computers too. [Fine-tuning language
# models](../docs/fine_tuning.md#language-models) describes all options.
#
# ## Change something
#
# Set `H=1`, and then `H=120`. How do the perplexity and `tx_bytes` change?
#
# ## A question
#
# On the *training* texts, the model's perplexity is even lower. Why does the task measure perplexity on held-out texts?
#
# **Answer.** A model can memorize its training texts. Only texts that it has never seen show whether it has learned the
# language.
