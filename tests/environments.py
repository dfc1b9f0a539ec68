"""`make matrix`: install the wheel and the source distribution into empty environments, each extra alone; try them."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINS = (ROOT / "constraints.txt").read_text("utf-8")
(TORCH,) = re.findall(r"(?m)^torch==(.*)", PINS)
UV = [sys.executable, "-m", "uv"]
DEMO = ["exogym", "demo", "--steps", "4", "--seeds", "1", "--batch-size", "4"]
NO_DEMO = "pip install 'exogym[demo]'"  # what `exogym demo` says where the extra is missing
COLUMNS = ("install", "import", "demo", "own command")
FIT = """
import torch
from exogym import LocalTrainer
from exogym.strategy import DiLoCoStrategy
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
loss_of, make = torch.nn.functional.cross_entropy, lambda: torch.nn.Linear(4, 2)
plain = DiLoCoStrategy(H=2, outer_lr=1.0, outer_momentum=0.0)
def fit(**options):
    LocalTrainer(make(), data, loss_fn=loss_of).fit(plain, num_nodes=2, max_steps=4, batch_size=4, **options)
"""
LOGGER = FIT + "from exogym.logger import {0}\nfit(logger={0}({1}))"
# Extra -> what it makes possible: words of the command line, or Python. all, docs and dev are tried by make's targets.
TRIED = {
    "": FIT + "fit()",
    "demo": "exogym compare --dataset digits --steps 4 --strategies ddp,diloco --seeds 1",
    "examples": f"python {ROOT}/run/mnist.py --steps 2",
    "wandb": LOGGER.format("WandbLogger", "project='p', mode='offline'"),
    "tensorboard": LOGGER.format("TensorBoardLogger", "'logs'"),
    "mlflow": LOGGER.format("MLflowLogger", "'p', tracking_uri='sqlite:///runs.db'"),
    "gpt": FIT + """
import transformers
sizes = dict(n_layer=1, n_head=2, n_embd=8, n_positions=8, vocab_size=16)
rows = [dict.fromkeys(("input_ids", "labels"), torch.randint(16, (8,))) for _ in range(32)]
from exogym.integrations.transformers import ExoGymCallback
callback, model = ExoGymCallback(plain), transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
model.loss_type = "ForCausalLM"
given = transformers.TrainingArguments("out", train_sampling_strategy="sequential", max_grad_norm=0.0, max_steps=4)
transformers.Trainer(model, given, train_dataset=callback.deal(rows), callbacks=[callback]).train()""",
    "ui": """
import re, subprocess, urllib.request
page = subprocess.Popen(["exogym", "ui", "--port", "0", "--no-open"], stdout=-1, stderr=-2, text=True)
address = next(filter(None, (re.search(r"http://\\S+", line) for line in page.stdout)))[0]
said = urllib.request.build_opener(urllib.request.HTTPCookieProcessor).open(address).read()
page.terminate()
assert b"ExoGym" in said""",
    "search": FIT + """
from exogym import sweep, tasks
class Line(torch.nn.Linear):
    def forward(self, x, targets): return loss_of(super().forward(x), targets)
task = tasks.Task("line", "two halves", "here", data, data, lambda: Line(4, 2), 2, 4, 4, 0.01, 2)
assert len(sweep.sweep(task, {"lr": "0.001..0.1"}, search=2, seeds=1, processes=1).rows) == 2""",
    "discover": "exogym discover --seconds 0.5",
    "ray": FIT + "from exogym import Placement\nfit(processes=2, placement=Placement(engine='ray'))",
    "wizard": """
import os, pty
pid, terminal = pty.fork()
said = b"" if pid else os.execvp("exogym", ["exogym", "wizard"])
while b"What do you want to train?" not in said: said += os.read(terminal, 4096)
os.write(terminal, b"\\x03")""",
    "privacy": "from exogym.strategy import privacy; privacy.DifferentialPrivacy(1.0, 1.0, 1e-5).epsilon(0.1, 9)",
    "whisper": "import soundfile; from exogym.home import whisper as to\n"
    "to.WhisperModelWrapper.from_weights('small-random', window_s=1.0, lora_rank=2); to.WordErrors.of(['a'], ['b'])",
    "language": "import gguf; from exogym.home import language as to\n"
    "to.LanguageModelWrapper.from_weights('small-random', lora_rank=2)",
    "lightning": FIT + """
import pytorch_lightning
from exogym.integrations.lightning import ExoGymCallback
class Module(torch.nn.Linear, pytorch_lightning.LightningModule):
    def training_step(self, batch, index): return loss_of(self(batch[0]), batch[1])
    def configure_optimizers(self): return torch.optim.AdamW(self.parameters())
callback = ExoGymCallback(plain)
trainer = pytorch_lightning.Trainer(callbacks=[callback], max_steps=4, accelerator="cpu", logger=False)
trainer.fit(Module(4, 2), callback.loader(data, batch_size=8))""",
    "accelerate": FIT + """
from accelerate import Accelerator
from exogym.integrations.accelerate import ExoGymNode
node, accelerator = ExoGymNode(plain), Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model := make(), torch.optim.AdamW(model.parameters()))
nodes = node.attach(accelerator, model, optimizer)
for x, y in node.loader(data, batch_size=8):
    accelerator.backward(loss_of(model(x), y)); optimizer.step(); optimizer.zero_grad()
nodes.finish()""",
}  # fmt: skip


def run(words: list[str], folder: Path, says: str = "", fails: bool = False) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    kept["PATH"] = f"{folder}/env/bin:{os.environ['PATH']}"
    done = subprocess.run(words, cwd=folder, env=kept, capture_output=True, text=True, timeout=1800)
    told = f"$ {' '.join(words)}\n{done.stdout}{done.stderr}"
    assert (done.returncode != 0) == fails and says in told and not (fails and "Traceback" in told), told[-3000:]


def tried(column: str, built: Path, python: str, torch: str, extra: str, folder: Path) -> str:
    """Try one thing in the environment of `folder`, and return a word about it."""
    if column == "install":
        pins = PINS if torch == TORCH else re.sub(r"(?m)^(torch|setuptools)==.*", "", PINS)  # 2.12.1 wants an older one
        (folder / "pins.txt").write_text(f"{pins}\ntorch=={torch}\n")
        run([*UV, "venv", "-q", "--python", python, "env"], folder)
        run([*UV, "pip", "install", "-q", "-c", "pins.txt", "--python", "env", f"{built}[{extra}]"], folder)
    elif column == "import":
        run(["python", "-c", "import exogym, sys; sys.exit(not exogym.__file__.startswith(sys.prefix))"], folder)
    elif column == "demo":
        has = bool(list(folder.glob("env/lib/python*/site-packages/sklearn")))
        run(DEMO, folder, "of DDP's quality" if has else NO_DEMO, fails=not has)
        return "" if has else "names `[demo]`, "
    else:
        run(["python", "-c", TRIED[extra]] if "import" in TRIED[extra] else TRIED[extra].split(), folder)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--python", [sys.executable]), ("--torch", [TORCH]), ("--extras", list(TRIED))):
        parser.add_argument(name, nargs="+", default=default)
    asked = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as top:
        subprocess.run([*UV, "build", "-q", "-b", "constraints.txt", "--out-dir", top], cwd=ROOT, check=True)
        (wheel,), (source,) = Path(top).glob("*.whl"), Path(top).glob("*.tar.gz")
        print(f"| environment | {' | '.join(COLUMNS)} |\n|{' --- |' * 5}")
        for python, torch, extra in ((p, t, e) for p in asked.python for t in asked.torch for e in asked.extras):
            for kind, built in [("wheel", wheel), ("sdist", source)][: 2 if extra in ("", "demo") else 1]:
                cells = [f"{Path(python).name}, torch {torch}, {kind}{f'[{extra}]' if extra else ''}"]
                (folder := Path(top) / "here").mkdir()
                for column in COLUMNS:
                    began = time.monotonic()
                    try:
                        word = tried(column, built, python, torch, extra, folder)
                        cells.append(f"{word}{time.monotonic() - began:.1f} s")
                    except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
                        failures += 1
                        cells.append("**failed**")
                        print(f"{cells[0]}: {error}", file=sys.stderr, flush=True)
                print(f"| {' | '.join(cells)} |", flush=True)
                shutil.rmtree(folder)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
