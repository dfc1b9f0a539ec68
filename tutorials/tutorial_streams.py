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
# # Endless streams
#
# Tokenize a folder of texts into files, train four nodes on an endless stream with two strategies, kill a run, and
# resume it at the next example.
#
# [Install](../docs/getting_started.md#install) ExoGym with the extras `[language,examples]`. Read [Four nodes on your
# laptop](tutorial_basic.py) first.

# %%
import os
import signal
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from tokenizers import ByteLevelBPETokenizer

from exogym.compare import compare
from exogym.data import TokenFiles, shakespeare, tokenize_folder
from exogym.models.gpt import CharGPT

# %% [markdown]
# ## A folder of texts
#
# Skip this cell if you have your own folder. We split Shakespeare's works into 40 files, and hold four of them out for
# validation.

# %%
works = shakespeare().text
size = len(works) // 40
for i in range(40):
    folder = Path("held_out" if i % 10 == 9 else "texts")
    folder.mkdir(exist_ok=True)
    (folder / f"{i:02d}.txt").write_text(works[i * size : (i + 1) * size], encoding="utf-8")

# %% [markdown]
# ## Tokenize into files
#
# We train a small tokenizer on the texts. For a real model, load the model's own tokenizer with
# `AutoTokenizer.from_pretrained`.

# %%
tokenizer = ByteLevelBPETokenizer()
tokenizer.train(sorted(map(str, Path("texts").glob("*.txt"))), vocab_size=512, show_progress=False)


def encode(text):
    return tokenizer.encode(text).ids


for folder in ("texts", "held_out"):
    Path(f"{folder}.npy").unlink(missing_ok=True)  # of an earlier run of this script
    count = tokenize_folder(folder, encode, f"{folder}.npy")
    print(f"{folder}: {count:,} tokens in {Path(folder + '.npy').stat().st_size:,} bytes")
# > texts: 2,007,290 tokens in 4,014,708 bytes
# > held_out: 222,940 tokens in 446,008 bytes

# %% [markdown]
# ## An endless stream
#
# Each example is a block of 32 tokens from a random position. Because ExoGym needs a fixed order, the position depends
# only on the example's number. `state_dict` and `load_state_dict` let a resumed run continue without rereading earlier
# examples.
#
# We write the class to a file because a second Python process will use it later.

# %%
Path("blocks.py").write_text("""
import torch
from torch.utils.data import IterableDataset
from exogym.data import TokenFiles


class RandomBlocks(IterableDataset):
    def __init__(self, files, block_size):
        self.tokens = TokenFiles(files, block_size, stride=1)
        self.number = 0  # of the next example

    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(self.number)
            self.number += 1
            yield self.tokens[int(torch.randint(len(self.tokens), (), generator=generator))]

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]
""")
sys.path.insert(0, ".")
from blocks import RandomBlocks  # noqa: E402

stream = RandomBlocks("texts.npy", block_size=32)
print(f"{len(stream.tokens):,} places, and no end")
# > 2,007,258 places, and no end

# %% [markdown]
# ## Two strategies
#
# Each run reads the stream from its start, and example k goes to node k mod 4. We turn shuffling off, because the
# blocks are random already, and evaluate on the held-out texts. DiLoCo averages every ten steps. We use no outer
# momentum, because 20 averages are too few for it.


# %%
def make_model():
    return CharGPT(512, block_size=32, n_layer=1, n_head=2, n_embd=32)


problem = (make_model, stream, TokenFiles("held_out.npy", block_size=32))
METHODS = "ddp,diloco:H=10:outer_lr=1:outer_momentum=0"
result = compare(
    problem, METHODS, num_nodes=4, max_steps=200, batch_size=8, seeds=1, lr=5e-3, val_size=200, shuffle=False
)
for row in result.rows:
    print(f"{row['strategy']}: validation loss {row['val_loss']:.2f}, {row['tx_bytes'] / 1e6:.1f} MB per node")
# > ddp: validation loss 4.17, 35.8 MB per node
# > diloco:H=10:outer_lr=1:outer_momentum=0: validation loss 4.61, 3.6 MB per node

figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
for (strategy, _), history in result.histories.items():
    axes.plot(*history.column("val_loss"), "o-", markersize=3, label=strategy)
axes.set(title="four nodes on one stream", xlabel="steps of each node", ylabel="loss of held-out texts")
axes.legend(frameon=False)
figure.savefig("tutorial_streams.png", dpi=80)

# %% [markdown]
# ![The loss of held-out texts falls](../docs/images/tutorial_streams.png)
#
# ## Kill the run, and continue
#
# A second Python process trains and saves a checkpoint every 20 steps. We kill it after the first checkpoint.

# %%
Path("train.py").write_text("""
import sys
import torch
from blocks import RandomBlocks
from exogym import LocalTrainer
from exogym.models.gpt import CharGPT
from exogym.strategy import DiLoCoStrategy
from exogym.testing import fingerprint

if __name__ == "__main__":
    folder, processes = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(0)
    model = CharGPT(512, block_size=32, n_layer=1, n_head=2, n_embd=32)
    trainer = LocalTrainer(model, RandomBlocks("texts.npy", block_size=32))
    trainer.fit(DiLoCoStrategy(H=10, lr=5e-3), num_nodes=4, max_steps=200, batch_size=8, shuffle=False,
                processes=processes, save_dir=folder, checkpoint_interval=20, resume=True)
    print(fingerprint(model)[:12])
""")


def train(folder, processes):
    words = [sys.executable, "train.py", folder, str(processes)]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[-1]


with subprocess.Popen([sys.executable, "train.py", "killed", "1"]) as process:
    while process.poll() is None and not list(Path("killed").glob("step_*")):  # until its first checkpoint
        pass
    os.kill(process.pid, signal.SIGKILL)
print("killed:", process.returncode == -signal.SIGKILL)
# > killed: True

# %% [markdown]
# To resume the run, rerun the command. Here we resume it in two processes, and then train once without interruption to
# compare.

# %%
continued, undisturbed = train("killed", 2), train("undisturbed", 1)
print("the same bits:", continued == undisturbed)
# > the same bits: True

# %% [markdown]
# Because the checkpoint contains the position in the stream, every example was used exactly once, as in the run without
# interruption.
#
# ## On your own data
#
# [Data from files and streams](../docs/data.md) describes other sources (Hugging Face's streaming data sets,
# webdataset, torchdata, tar files) and the rules for order, shuffling and memory. To train on several computers, pass
# the same stream to a `NetworkTrainer`: each computer reads the files and keeps its own nodes' examples.
#
# ## Change something
#
# Remove `state_dict` and `load_state_dict` from `blocks.py`. Is the resumed run still bitwise identical? What does it
# do before it trains?
#
# ## A question
#
# `RandomBlocks` seeds a new generator for each example. Why doesn't it use a single generator for the whole iteration,
# such as `random.Random(0)`?
#
# **Answer.** A single generator would be allowed, because it gives a fixed order too. But then `state_dict` would have
# to save the generator's state; otherwise a resumed run would reread all earlier examples.
