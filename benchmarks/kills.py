"""Kill runs at random moments, resume them until they are done, and compare them with the undisturbed run.

    python benchmarks/kills.py --kills 200 --seed 0    about five minutes

Four nodes of a small model train with one of `METHODS`, with a checkpoint every few steps, in one, two or three
processes, drawn anew at each start. One or two signals of `SIGNALS` hit the main process, another process, or all, at a
random moment or during the writing of a checkpoint. After each kill nothing of the run may remain: no process, and no
incomplete checkpoint under a checkpoint's name. Each completed run must have the weights and the history of an
undisturbed one.

Runs are forked from this process, which has imported torch. Each leads its own session, which identifies its remaining
processes. The script kills only processes of these sessions. It exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from exogym import LocalTrainer
from exogym.core.saving.checkpoint import list_checkpoints, load
from exogym.errors import CheckpointError, WorkerError
from exogym.strategy import DeMoStrategy, DiLoCoStrategy, FedAvgStrategy, SPARTAStrategy
from exogym.testing import fingerprint, small_problem

KINDS = ("the main process", "another process", "all of them")
SIGNALS = {
    "SIGKILL": (signal.SIGKILL,),
    "SIGTERM": (signal.SIGTERM,),
    "SIGINT": (signal.SIGINT,),
    "SIGTERM twice": (signal.SIGTERM, signal.SIGTERM),
    "SIGINT twice": (signal.SIGINT, signal.SIGINT),
    "SIGINT, SIGTERM": (signal.SIGINT, signal.SIGTERM),
}
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "DiLoCo": (lambda: DiLoCoStrategy(lr=0.02, H=7), {}),
    "DiLoCo, DataLoader workers": (
        lambda: DiLoCoStrategy(lr=0.02, H=7), {"dataloader_kwargs": {"num_workers": 1}, "data": "read one by one"},
    ),
    "SPARTA 8-bit": (lambda: SPARTAStrategy(lr=0.02, p_sparta=0.2, quantization_bits=8), {}),
    "FedAvg, sampled": (lambda: FedAvgStrategy("adamw", lr=0.02, H=5, client_fraction=0.5), {}),
    "DeMo": (lambda: DeMoStrategy(lr=0.01, compression_topk=4, compression_chunk=8), {}),
}  # fmt: skip
STEPS, WORKER_GONE, STOPPED = 60, 3, 4
# For what is left of a killed run to vanish (a DataLoader's worker looks for its parent every 5 s); for a run to end
# by itself; between two signals at most.
PATIENCE_S, LONGEST_S, LONGEST_GAP_S = 10.0, 60.0, 0.05
TIMED = ("wall_s", "memory_bytes", "device_use", "examples_per_s")
MOST_STARTS = 60


def train(folder: Path, method: str, processes: int) -> None:
    """Resume or start the run in `folder`. Write its result there."""
    model, data = small_problem()
    make, options = METHODS[method]
    if options:
        data = list(zip(*data.tensors, strict=True))  # what is read at once needs no workers
    options = {name: value for name, value in options.items() if name != "data"}
    trainer = LocalTrainer(model, data, data, loss_fn=nn.functional.mse_loss)
    trainer.fit(
        make(), num_nodes=4, max_steps=STEPS, batch_size=8, device="cpu", val_interval=10,
        processes=processes, save_dir=folder / "run", checkpoint_interval=3, resume=True,
        **options,
    )  # fmt: skip
    history = [{name: value for name, value in row.items() if name not in TIMED} for row in trainer.history]
    (folder / "part").write_text(json.dumps([fingerprint(model), history]))
    (folder / "part").rename(folder / "result")


def start(folder: Path, method: str, processes: int) -> int:
    """Fork a process that trains in its own session. Return its number."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        train(folder, method, processes)
        code = 0
    except (KeyboardInterrupt, SystemExit):
        code = STOPPED
    except WorkerError:
        code = WORKER_GONE
    except BaseException:
        with open(folder / "errors", "a") as file:
            traceback.print_exc(file=file)
    finally:
        os._exit(code)


def session(leader: int) -> dict[int, int]:
    """Return the processes of a session that have not ended, each with its parent."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
            state, parent, _, at = file.read().rpartition(")")[2].split()[:4]
            if int(at) == leader and state not in "ZX":
                found[int(pid)] = int(parent)
    return found


class Trial:
    """One run after another, and their results.

    Attributes:
        kills: number of kills by (signals, process); `torn`: kills that left an incomplete checkpoint; `aimed`: number
            of kills aimed at the writing of a checkpoint; `layouts`: kills by method and number of processes.
        wrong: errors in words.
    """

    def __init__(self, seed: int, base: Path):
        self.draw, self.base = random.Random(seed), base
        self.kills: Counter[tuple[str, str]] = Counter()
        self.torn: Counter[tuple[str, str]] = Counter()
        self.layouts: Counter[tuple[str, int]] = Counter()
        self.aimed = 0
        self.wanted: dict[str, Any] = {}
        self.run_s: dict[str, float] = {}
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.slowest_s = 0.0

    def reference(self) -> None:
        """Train undisturbed in this process, so that runs find all of torch imported. Store the time that it takes."""
        for method in METHODS:
            for number in range(2):
                (folder := self.base / f"{method} {number}").mkdir()
                before = time.monotonic()
                train(folder, method, 1)
                self.run_s[method] = time.monotonic() - before
            self.wanted[method] = self.result(folder)

    def result(self, folder: Path) -> Any:
        return json.loads((folder / "result").read_text())

    def run(self, most_kills: int) -> None:
        """Train one run to its end through kills, up to `most_kills` in all."""
        method = list(METHODS)[self.seen["runs"] % len(METHODS)]
        folder = self.base / f"run {self.seen['runs']}"
        folder.mkdir()
        for _ in range(MOST_STARTS):
            processes = self.draw.choice((1, 2, 3))
            aimed = self.draw.random() < 0.4
            pid = start(folder, method, processes)
            killed, name = None, self.draw.choice(list(SIGNALS))
            if sum(self.kills.values()) < most_kills:
                self.wait_for_moment(folder / "run", self.run_s[method], aimed)
                killed = self.kill(pid, self.draw.choice(KINDS), SIGNALS[name])
            code = self.wait(pid)
            self.look_around(pid, folder / "run", f"{name} to {killed}, of {processes}, {method}")
            if killed:
                self.kills[name, killed] += 1
                self.aimed += aimed
                self.layouts[method, processes] += 1
                self.torn[name, killed] += any((folder / "run").glob(".step_*.tmp"))
            if code == 0:
                self.seen["runs"] += 1
                if self.result(folder) != self.wanted[method]:
                    self.seen["wrong bits"] += 1
                    self.wrong.append(f"{folder} ended in other bits or another history")
                else:
                    shutil.rmtree(folder)
                return
            if code not in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, WORKER_GONE, STOPPED):
                break
        self.seen["runs"] += 1
        self.seen["lost runs"] += 1
        errors = folder / "errors"
        self.wrong.append(f"{folder} did not come to its end: {errors.read_text() if errors.exists() else 'too slow'}")

    def wait_for_moment(self, folder: Path, run_s: float, aimed: bool) -> None:
        if aimed:
            self.wait_for_writing(folder, run_s, self.draw.randint(1, 12))
            time.sleep(self.draw.uniform(0, 0.004))
        else:
            time.sleep(self.draw.uniform(0, 1.2 * run_s))

    def kill(self, pid: int, kind: str, signals: Sequence[signal.Signals]) -> str | None:
        """Send the signals. Return which process was hit; None if the run had ended before."""
        workers = sorted(other for other, parent in session(pid).items() if parent == pid)
        if self.ended(pid):
            return None
        send: Callable[[int, int], None] = os.kill
        who, hit = pid, "the main process"
        if kind == "all of them" and os.getpgid(pid) == pid:  # else it does not lead a group yet
            send, hit = os.killpg, kind
        elif kind == "another process" and workers:
            who, hit = self.draw.choice(workers), kind
        for k, number in enumerate(signals):
            time.sleep(self.draw.uniform(0, LONGEST_GAP_S) if k else 0)
            with contextlib.suppress(ProcessLookupError):  # the first one was enough
                send(who, number)
        return hit

    def wait_for_writing(self, folder: Path, run_s: float, count: int) -> None:
        """Wait until the `count`-th checkpoint from now is being written, at most as long as a whole run takes."""
        until = time.monotonic() + run_s
        seen = ""
        while count and time.monotonic() < until:
            now = "".join(path.name for path in folder.glob(".step_*.tmp") if ".old." not in path.name)
            count -= bool(now and now != seen)
            seen = now or seen

    def ended(self, pid: int) -> bool:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self, pid: int) -> int:
        """Return the exit code of a run that ends by itself; report a run that hangs."""
        until = time.monotonic() + LONGEST_S
        while not self.ended(pid):
            if time.monotonic() > until:
                self.seen["hung runs"] += 1
                self.wrong.append(f"run {self.seen['runs']} hung")
                os.killpg(pid, signal.SIGKILL)
                break
            time.sleep(0.001)
        # Its number is not given to another process before this.
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def look_around(self, leader: int, folder: Path, what: str) -> None:
        """Check that only complete checkpoints, and files with other names, remain of a run."""
        since = time.monotonic()
        while (left := session(leader)) and time.monotonic() < since + PATIENCE_S:
            time.sleep(0.001)
        self.slowest_s = max(self.slowest_s, time.monotonic() - since)
        for orphan in left:
            self.seen["orphans"] += 1
            self.wrong.append(f"process {orphan} was left ({what})")
            os.kill(orphan, signal.SIGKILL)
        for path in list_checkpoints(folder):
            try:
                load(path)
            except CheckpointError as error:
                self.seen["torn checkpoints"] += 1
                self.wrong.append(f"{error} ({what})")

    def table(self) -> str:
        lines = [f"{'signal':<18}" + "".join(f"{kind:>20}" for kind in KINDS) + f"{'left half-written':>20}"]
        for name in SIGNALS:
            torn = sum(self.torn[name, kind] for kind in KINDS)
            lines.append(f"{name:<18}" + "".join(f"{self.kills[name, kind]:>20}" for kind in KINDS) + f"{torn:>20}")
        lines.append(f"{'processes':<28}" + "".join(f"{processes:>5}" for processes in (1, 2, 3)))
        for method in METHODS:
            lines.append(f"{method:<28}" + "".join(f"{self.layouts[method, p]:>5}" for p in (1, 2, 3)))
        lines.append(f"kills: {sum(self.kills.values())}, {self.aimed} of them aimed at the writing of a checkpoint")
        names = ("runs", "wrong bits", "orphans", "lost runs", "hung runs", "torn checkpoints")
        lines.append(", ".join(f"{name}: {self.seen[name]}" for name in names))
        lines.append(
            f"the last process of a run was gone {1e3 * self.slowest_s:.0f} ms after the main one at the latest"
        )
        return "\n".join([*lines, *self.wrong])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = time.monotonic()
    in_memory = Path("/dev/shm")  # what is synced to a busy disk takes its time
    base = Path(tempfile.mkdtemp(prefix="kills-", dir=in_memory if os.access(in_memory, os.W_OK) else None))
    trial = Trial(arguments.seed, base)
    trial.reference()
    while sum(trial.kills.values()) < arguments.kills:
        trial.run(arguments.kills)
    print(trial.table())
    print(f"{time.monotonic() - before:.0f} s")
    if trial.wrong:
        sys.exit(1)
    shutil.rmtree(base)


if __name__ == "__main__":
    main()
