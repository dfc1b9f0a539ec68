"""Kill 24 runs at random moments and rerun them to their end, while one process and one page stay up all day.

    python benchmarks/long_day.py            about half an hour
    python benchmarks/long_day.py --runs 6 --seed 1

The runs are README's commands and snippets, a sweep, a launch with two ranks, and the tutorials, in turn. Each is
killed once or twice by a signal, at a random moment of the time that it takes undisturbed, and started again.
Comparisons and sweeps are resumed, and must end with the rows of an undisturbed one. Meanwhile `exogym ui` serves
their folders, and this process trains one interrupted run after another. At the end nothing may be left: no process, no
port, no temporary file, no descriptor, and at most 20 MB more memory. The script exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil
import torch
from torch import nn

from exogym import LocalTrainer
from exogym.strategy import DiLoCoStrategy
from exogym.testing import fingerprint, small_problem

ROOT = Path(__file__).resolve().parents[1]
MARK, SIGNALS = "EXOGYM_LONG_DAY", (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
MOST_GROWTH_MB, PATIENCE_S, WARM = 20, 15, 4  # a DataLoader's worker looks for its parent every 5 s
EXOGYM = (sys.executable, "-m", "exogym")
SWEEP = "sweep --dataset digits --sweep H=5,20 --sweep strategy=diloco,fedavg --nodes 4 --steps 60 --out runs/sweep"


def commands() -> dict[str, list[str]]:
    """Return what runs, by name: README's commands and snippets, and the tutorials."""
    readme = (ROOT / "README.md").read_text()
    found = {"a sweep": [*EXOGYM, *SWEEP.split()], "demo": [*EXOGYM, "demo"]}
    for line in re.findall(r"^exogym (compare .*)", readme, re.M):
        found["README's comparison"] = [*EXOGYM, *line.split(), "--out", "runs"]
    for k, code in enumerate(re.findall(r"```python\n(.*?)```", readme, re.S), 1):
        found[f"README's snippet {k}"] = [sys.executable, "-c", code]
    found["a launch"] = [sys.executable, "-m", "exogym.launch", "--nproc_per_node", "2", "script.py"]
    for path in sorted((ROOT / "tutorials").glob("*.py")):
        found[path.stem] = [sys.executable, str(path)]
    return found


SCRIPT = """
from exogym import LocalTrainer
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem
from torch import nn
model, data = small_problem()
LocalTrainer(model, data, data, loss_fn=nn.functional.mse_loss).fit(
    DiLoCoStrategy(lr=0.02, H=7), num_nodes=2, max_steps=400, save_dir="launched", checkpoint_interval=20, resume=True)
"""


class Day:
    """The runs of a day in `folder`. Attributes: kills: number of kills; wrong: what was wrong, in words."""

    def __init__(self, seed: int, folder: Path):
        self.draw, self.folder, self.kills, self.wrong = random.Random(seed), folder, 0, list[str]()
        self.tmp = folder / "tmp"
        for name in (self.tmp, folder / "runs"):
            name.mkdir()
        (folder / "script.py").write_text(SCRIPT)
        more = {"TMPDIR": str(self.tmp), MARK: str(folder), "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
        self.environment = {**os.environ, **more, "OMP_NUM_THREADS": "1", "EXOGYM_SHORT": "1"}
        self.model: dict[int, str] = {}

    def start(self, command: list[str], cwd: Path) -> subprocess.Popen[bytes]:
        with open(self.folder / "output.txt", "ab") as file:
            return subprocess.Popen(
                command, cwd=cwd, env=self.environment, stdout=file, stderr=file, start_new_session=True
            )

    def run(self, name: str, command: list[str]) -> None:
        """Run a command undisturbed, then through one or two kills to its end. Compare the tables of both."""
        tables, took_s = [], 0.0
        for kills in (0, self.draw.choice((1, 2))):
            cwd = self.folder / f"{name} {kills}".replace("'", "").replace(" ", "_")
            (cwd / "runs").mkdir(parents=True)
            shutil.copy(self.folder / "script.py", cwd)
            for _ in range(kills):
                process = self.start(self.resumed(command, cwd), cwd)
                time.sleep(self.draw.uniform(0.1, 0.95) * took_s)
                with_what = self.draw.choice(SIGNALS)
                if process.poll() is None:
                    process.send_signal(with_what)
                    self.kills += 1
                process.wait(60)
            before = time.monotonic()
            code = self.start(self.resumed(command, cwd), cwd).wait()
            took_s = time.monotonic() - before
            if code:
                self.wrong.append(f"{name} ended with exit status {code} after {kills} kills")
            tables.append([rows(path) for path in sorted(cwd.rglob("summary.csv"))])
            for path in (cwd / "runs").iterdir():
                shutil.move(path, self.folder / "runs" / f"{cwd.name}-{path.name}-{self.kills}")
            shutil.rmtree(cwd)
        if name in ("a sweep", "README's comparison") and (not tables[0] or tables[0] != tables[1]):
            self.wrong.append(f"{name} ended with other rows after kills")

    def resumed(self, command: list[str], cwd: Path) -> list[str]:
        """Return the command that continues the killed one in `cwd`, or the command itself if it has to start anew."""
        if command[3:4] == ["sweep"] and (cwd / "runs" / "sweep" / "sweep.json").exists():
            return [*command, "--resume"]
        if command[3:4] == ["compare"] and (begun := [p.parent for p in (cwd / "runs").glob("*/run.json")]):
            return [*EXOGYM, "compare", "--resume", "--out", str(begun[0])]
        return command

    def train_here(self, number: int) -> None:
        """Train in this process, interrupted at a random step and resumed. Every day has the same model in the end."""
        folder, last = self.folder / "here", self.draw.randint(5, 55)
        for steps in (last, 60):
            model, data = small_problem()
            LocalTrainer(model, data, data, loss_fn=nn.functional.mse_loss).fit(
                DiLoCoStrategy(lr=0.02, H=3), num_nodes=4, max_steps=steps, batch_size=8, device="cpu", resume=True,
                save_dir=folder, checkpoint_interval=5, progress=False, final_sync=steps == 60,
                processes=1 + number % 2,
            )  # fmt: skip
        self.model[number] = fingerprint(model)
        shutil.rmtree(folder)

    def processes(self) -> list[psutil.Process]:
        """Return the day's processes that have not ended, but this one and the page."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


def rows(path: Path) -> list[dict[str, str]]:
    with open(path) as file:
        return [
            {k: v for k, v in row.items() if not re.search("_s$|seconds|memory|per_s", k)}
            for row in csv.DictReader(file)
        ]


def held(process: psutil.Process) -> tuple[float, int, int]:
    """Return a process's memory in MB, its descriptors and its threads."""
    gc.collect()
    return process.memory_full_info().uss / 1e6, process.num_fds(), process.num_threads()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="long-day-"))
    day, shared = Day(asked.seed, folder), set(os.listdir("/dev/shm"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(day.tmp)
    page = subprocess.Popen(
        [*EXOGYM, "ui", "--runs", folder / "runs", "--port", "0", "--no-open"],
        env=day.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert page.stdout is not None
    address = re.search(r"http://\S+", page.stdout.readline())
    assert address is not None
    each, watched = list(commands().items()), {"this process": psutil.Process(), "the page": psutil.Process(page.pid)}
    before: dict[str, tuple[float, int, int]] = {}
    for k in range(asked.runs):
        name, command = each[k % len(each)]
        begun = time.monotonic()
        day.run(name, command)
        day.train_here(k)
        urllib.request.urlopen(address[0].replace("/?", "/api/runs?"), timeout=60).read()
        print(f"{k + 1:>2} {name}: {time.monotonic() - begun:.0f} s, {day.kills} kills so far", flush=True)
        if k + 1 == min(WARM, asked.runs):
            before = {who: held(process) for who, process in watched.items()}
    for who, process in watched.items():
        now = held(process)
        print(f"{who}: " + ", ".join(
            f"{x:.0f} {unit} (after {WARM} runs: {y:.0f})"
            for x, y, unit in zip(now, before[who], ("MB", "descriptors", "threads"), strict=True)
        ))  # fmt: skip
        if now[0] > before[who][0] + MOST_GROWTH_MB or now[1] > before[who][1] or now[2] > before[who][2]:
            day.wrong.append(f"{who} has grown")
    page.send_signal(signal.SIGINT)
    page.wait(30)
    until = time.monotonic() + PATIENCE_S
    while (left := day.processes()) and time.monotonic() < until:
        time.sleep(0.1)
    day.wrong += [f"process {process.pid} is left: {process.cmdline()}" for process in left]
    ours = [path for path in day.tmp.iterdir() if not path.name.startswith("torchinductor_")]  # torch keeps its cache
    day.wrong += [f"temporary file {path.name} is left" for path in ours]
    day.wrong += [f"/dev/shm/{name} is left" for name in {*os.listdir("/dev/shm")} - shared]
    if len({*day.model.values()}) != 1:
        day.wrong.append("interrupted runs of this process ended with other bits")
    print(f"{asked.runs} runs, {day.kills} kills; left: {len(left)} processes, {len(ours)} temporary files")
    if day.wrong:
        sys.exit("\n".join([*day.wrong, f"output: {folder / 'output.txt'}"]))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
