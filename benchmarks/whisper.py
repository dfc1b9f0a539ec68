"""Whisper tiny.en on lines of Shakespeare read by espeak-ng: the share of wrong words before and after fine-tuning.

    python benchmarks/whisper.py --steps 80                        simulated: one node alone, and two with DiLoCo
    python benchmarks/whisper.py --steps 80 --hosts                the two on hosts, of which one is killed on the way
    python benchmarks/whisper.py --steps 40 --H 8 --data FOLDER    either of them with speech of your own
    python benchmarks/whisper.py --audio jfk.flac --text "And so ..."   is every word of a recording right?

The lines that are held out are read by the voices that are trained on, and by another one. The hosts are network
namespaces on links of 100 Mbit/s, with a real sshd each; that needs Linux, root, iproute2 and openssh-server. Both have
the same two cores. Afterwards the same profile is trained in one process, with nodes away as the host was, and both
models are compared bit for bit. Beside the seconds stands what the clock predicts from a step measured in the
simulation.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from exogym import LocalTrainer, Placement, load_model
from exogym.core.progress import readable_bytes
from exogym.core.record.history import History
from exogym.core.record.run_folder import read_status
from exogym.faults import Faults
from exogym.home.speech import SpeechClips, Voice, read_audio, spoken
from exogym.home.whisper import WhisperModelWrapper, WordErrors
from exogym.machines.remote.profile import RunProfile, load_profile
from exogym.machines.remote.results import facts_of
from exogym.strategy import DiLoCoStrategy, SimpleReduceStrategy
from exogym.study.tasks import Task, load_task
from exogym.testing import fingerprint

STRANGER = Voice("en-gb-scotland+m2", 165, 45)  # never used for training
PROFILE = """
[distributed:whisper]
task = whisper
{data}strategy = diloco
communication_interval = {H}
steps = {steps}
min_hosts = 1
max_restarts = 1
hosts_config = hosts.json
"""
RATE, NETWORK = "100mbit", "100Mbps,0.2ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80, help="steps of each node (default: 80)")
    parser.add_argument("--H", type=int, default=10, help="steps between two averages (default: 10)")
    parser.add_argument("--hosts", action="store_true", help="train on two hosts, and kill the worker of one")
    parser.add_argument("--undisturbed", action="store_true", help="with --hosts: kill no process")
    parser.add_argument("--data", type=Path, help="a folder with a manifest (default: espeak-ng reads Shakespeare)")
    parser.add_argument("--audio", help="only transcribe this recording")
    parser.add_argument("--text", default="", help="the recording's text")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.audio:
        model = WhisperModelWrapper.from_weights()
        (heard,) = model.transcribe([read_audio(args.audio)[0]])
        print(heard)
        if args.text:
            print(WordErrors.of([args.text], [heard]))
        return
    task = load_task("whisper", args.data)
    print(f"{task.description}; {len(task.val)} lines held out", flush=True)
    if args.hosts:
        on_hosts(task, args.data, args.steps, args.H, not args.undisturbed)
    else:
        simulated(task, args.steps, args.H)


def simulated(task: Task, steps: int, H: int) -> None:
    for window_s in (30.0, task.val.window_s):  # type: ignore[attr-defined]
        say(f"before, window of {window_s:g} s", WhisperModelWrapper.from_weights(window_s=window_s), task)
    inner = {"lr": task.lr, "max_norm": 1.0, "lr_scheduler": "cosine", "warmup_steps": task.warmup_steps}
    outer = {"outer_lr": task.outer_lr, "outer_momentum": task.outer_momentum}
    every_other = TensorDataset(*task.train.take(torch.arange(0, len(task.train), 2)))  # type: ignore[attr-defined,arg-type]
    runs: dict[str, Any] = {
        "one node alone, half of the lines": (1, every_other, SimpleReduceStrategy(**inner)),  # type: ignore[arg-type]
        "two nodes, DiLoCo": (2, task.train, DiLoCoStrategy(H=H, **inner, **outer)),  # type: ignore[arg-type]
    }
    for name, (nodes, train, strategy) in runs.items():
        trainer = LocalTrainer(task.make_model(0), train, task.val)
        start = time.perf_counter()
        trainer.fit(
            strategy, num_nodes=nodes, max_steps=steps, batch_size=task.batch_size, val_interval=steps, progress=False,
            network=NETWORK if nodes > 1 else None,
        )  # fmt: skip
        told(name, trainer.model, task, trainer.history, time.perf_counter() - start)


def on_hosts(task: Task, data: Path | None, steps: int, H: int, kills: bool) -> None:
    root = Path(__file__).parent.parent
    sys.path.insert(0, str(root / "tests"))
    from hosts import Hosts

    with tempfile.TemporaryDirectory() as folder, Hosts(2, Path(folder) / "hosts") as hosts:
        hosts.limit(RATE)
        project = Path(folder) / "project"
        project.mkdir()
        hosts.file(project / "hosts.json")
        line = "" if data is None else f"data = {data.absolute()}\n"
        (project / "config.ini").write_text(PROFILE.format(H=H, steps=steps, data=line))
        words = [sys.executable, "-m", "exogym", "distributed-train", "whisper"]
        before, start = sent(hosts), time.perf_counter()
        with open(project / "said", "w") as file:
            run = hosts.controller.start(words, cwd=project, stdout=file, stderr=subprocess.STDOUT)
        while kills and not any(step_of(path) >= steps // 3 for path in project.glob("runs/*")):
            if run.poll() is not None:
                raise SystemExit((project / "said").read_text())
            time.sleep(0.2)
        for pid, line in hosts[1].processes().items():
            if kills and "runner.py" in line:
                os.kill(pid, signal.SIGKILL)
                print(f"killed the worker of host 1 at step {max(map(step_of, project.glob('runs/*')))}", flush=True)
        code, seconds = run.wait(), time.perf_counter() - start
        lines = (project / "said").read_text().splitlines()
        print("\n".join(line for line in lines if "gone" in line or "go on" in line or "is back" in line or code))
        (run_folder,) = project.glob("runs/*")
        model = load_model(task.make_model(0), run_folder / "fit_1.model.safetensors")
        name = "two hosts, one killed on the way" if kills else "two hosts"
        told(name, model, task, facts_of(run_folder, 1).history, seconds)
        each = [after - old for after, old in zip(sent(hosts), before, strict=True)]
        print(f"sent by the hosts, start and results included: {', '.join(map(readable_bytes, each))}")
        away = json.loads((run_folder / "fit_1.facts.json").read_text())["description"].get("outages", {})
        same = fingerprint(again(load_profile(project / "config.ini", "whisper"), away)) == fingerprint(model)
        print(f"nodes away in the steps {away}; the same in simulation: {'the same' if same else 'OTHER'} bits")
        raise SystemExit(not same)


def again(profile: RunProfile, away: dict[str, list[list[int]]]) -> torch.nn.Module:
    """Return the model that the profile trains in this process, with the same nodes away in the same steps."""
    task = profile.load()
    model = task.make_model(profile.seed)
    options = profile.fit_options(task) | {"num_nodes": 2, "placement": Placement()}
    spans = {int(node): [(first, last) for first, last in own] for node, own in away.items()}
    faults = Faults(absent=spans, forget=True) if spans else None
    LocalTrainer(model, task.train, task.val).fit(profile.make_strategy(task), **options, faults=faults, progress=False)
    return model


def sent(hosts: Any) -> list[int]:
    """Return the bytes that each host's interface has sent."""
    counter = ["cat", "/sys/class/net/eth0/statistics/tx_bytes"]
    return [int(host.run(counter).stdout or 0) for host in hosts.machines]


def step_of(folder: Path) -> int:
    return int(read_status(folder).get("step") or 0) if (folder / "status.json").exists() else 0


def told(name: str, model: Any, task: Task, history: History, seconds: float) -> None:
    rows = [row for row in history.rows(node=None) if row["val_loss"] is not None]
    losses = f"loss {rows[0]['val_loss']:.3f} to {rows[-1]['val_loss']:.3f}"
    predicted = f" (predicted {rows[-1]['time_s']:.0f} s)" if rows[-1].get("time_s") else ""
    size, training_s = readable_bytes(rows[-1]["tx_bytes"]), rows[-1]["wall_s"]
    say(
        name,
        model,
        task,
        f"{losses}; {size} sent per node; trained {training_s:.0f} s{predicted}, in all {seconds:.0f} s",
    )


def say(name: str, model: Any, task: Task, more: str = "") -> None:
    clips: Any = task.val
    assert isinstance(clips, SpeechClips)
    other = [row["audio"]["array"][: model.samples] for row in spoken(clips.texts, [STRANGER])]
    own = model.errors_on([clips.clip(i) for i in range(len(clips))], clips.texts).rate
    strange = model.errors_on(other, clips.texts).rate
    print(f"{name}: {own:.1%} of the words wrong, {strange:.1%} with another voice; {more}", flush=True)


if __name__ == "__main__":
    main()
