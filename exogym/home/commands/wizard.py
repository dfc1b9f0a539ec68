"""`exogym wizard`: train a model on the computers of a network, after a few questions."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from exogym.cli.asking import Asker, count, pairs, say
from exogym.cli.distributed import train
from exogym.cli.doctor import print_checks
from exogym.cli.values import DATASETS, KEY_FILE, At, Debug, KeyFile, SSHConfig
from exogym.data.stream import length_of
from exogym.errors import ArgumentError, check_choice, needs
from exogym.files import write_json
from exogym.home.commands.finding import Finder
from exogym.home.wizard import Proposal, WizardRun, make_session, propose
from exogym.home.wizard.session import CONFIG, HOSTS, MEASURED, PROFILE
from exogym.machines.remote.measuring import measure_hosts
from exogym.machines.remote.profile import RunProfile, evaluations_of, options_of
from exogym.network import Network, readable_seconds
from exogym.remote import HostsConfig, check_hosts
from exogym.study.tasks import Task, load_task, size_of

START, CHANGE, FILES, STOP = "start", "change", "files", "stop"
SAVES, RESTARTS, RETRIES = 5, 1, 2  # checkpoints of a run, restarts of its processes, restarts of the whole run
LABELS = {"val_wer": "word error rate"}
MOST_LOSS = 700.0  # exp of more is infinite


def wizard(
    task: Annotated[
        str | None, typer.Option("--task", metavar="NAME", help=f"What to train: {', '.join(DATASETS)}.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="The task's data, copied to the computers. [default: search the usual places]"
        ),
    ] = None,
    task_options: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Options of the task, such as 'lora_rank=8, lines=40'.")
    ] = None,
    hosts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Hosts file. Paired computers are added to it.")
    ] = None,
    computers: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Names of the computers to use, separated by commas, or all.")
    ] = None,
    code: Annotated[
        list[str] | None,
        typer.Option("--code", metavar="NAME=CODE", help="Pairing code that computer NAME shows. Repeatable."),
    ] = None,
    at: At = None,
    here: Annotated[
        bool | None, typer.Option("--here/--not-here", help="When pairing, also train on this computer. [default: yes]")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each node. [default: the task's]")] = None,
    strategy: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Strategy, such as 'diloco:H=50'. [default: chosen for the network]"),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Examples per node and batch. [default: the task's]")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate. [default: the task's]")] = None,
    balance: Annotated[
        str | None, typer.Option(metavar="HOW", help="Divide the load by speed: nodes, batch or steps.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    save_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder for five checkpoints, to resume from after a failure.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for all files of this run. [default: exogym-TASK]")
    ] = None,
    path_on_hosts: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder on the other computers. [default: ~/exogym/NAME]")
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Use this earlier measurement instead of measuring.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="IP", help="Address at which the others reach this computer. [default: the default route's]"
        ),
    ] = None,
    key: KeyFile = KEY_FILE,
    ssh_config: SSHConfig = None,
    yes: Annotated[bool, typer.Option("--yes", help="Measure and train without asking.")] = False,
    debug: Debug = False,
) -> None:
    """Train on the computers on your network, after a few questions.

    The wizard finds computers that run exogym agent, or reads a hosts file. It checks these computers, measures the
    network and the time of a step, proposes a strategy, H and batch size with the predicted time, and trains if you
    agree. You can answer every question with an option, so the command also runs without a terminal. With --yes, it
    measures and trains without asking.
    """
    needs("questionary", "wizard")
    asker = Asker()
    if folder is not None and folder.exists() and any(folder.iterdir()):
        raise ArgumentError(f"--folder={os.fspath(folder)!r} is not empty: choose a new folder")
    what = task or asker.choose("--task", "What do you want to train?", {name: name for name in DATASETS})
    check_choice("--task", what, DATASETS)
    if what == "whisper" and data is not None and data.is_file():
        raise ArgumentError(f"--data={os.fspath(data)!r} is a file: pass the folder with the clips and the manifest")
    profile = RunProfile(
        what, strategy or "diloco", steps=steps, batch_size=batch_size, lr=lr, balance=balance, seed=seed,
        save_dir=save_dir, retries=RETRIES,
    )  # fmt: skip
    problem = load_task(what, data, **options_of(task_options))
    finder = Finder(asker, hosts or Path(HOSTS), key, ssh_config, address)
    if hosts is None or not hosts.exists() or computers is not None:
        finder.find(computers, pairs("--code", code or []), at or [], here)
    else:
        _refuse_pairing(hosts, {"--here": here, "--code": code or None, "--at": at or None})
    place = RunPlace.of(folder or free(f"exogym-{what}"), path_on_hosts, finder.file, data, weights_of(task_options))
    profile = replace(
        profile, data=place.data_there, task_options=place.options_there(task_options),
        steps=steps or asker.text("--steps", "How many steps on each computer?", count, str(problem.max_steps)),
        batch_size=batch_size or problem.batch_size,
    )  # fmt: skip
    run = Preparing(asker, profile, strategy, problem, place, yes)
    if not run.look():
        raise typer.Exit(1)
    if measured is None and not run.may_measure():
        say("nothing was done: pass --yes to measure and train")
        return
    plan = run.agree(measured)
    if plan is None:
        run.leave()
        return
    session = run.write(plan)
    if run.starts:
        carry_out(session, plan, problem)


def _refuse_pairing(hosts: Path, given: Mapping[str, object]) -> None:
    """Refuse options that are for pairing, because the hosts file already names the computers."""
    for option, value in given.items():
        if value is not None:
            raise ArgumentError(
                f"{option} is for pairing, but --hosts={os.fspath(hosts)!r} already names the computers: leave "
                f"{option} out, or name the computers to pair with in --computers"
            )


def weights_of(options: str | None) -> Path | None:
    """Return the file or folder of this computer that the task's option `weights` names, or None if it names neither.

    Other weights are a name: the task knows it, or says that it does not exist.
    """
    given = options_of(options).get("weights")
    path = Path(str(given)).expanduser()
    return path if given is not None and path.exists() else None


def free(name: str) -> Path:
    """Return `name` if no such file or folder exists, otherwise `name` with a number."""
    return next(path for n in range(1, 10_000) if not (path := Path(name if n == 1 else f"{name}-{n}")).exists())


@dataclass(frozen=True)
class RunPlace:
    """The run's folder on this computer, and the contents of its hosts file.

    Attributes:
        folder: the run's folder.
        hosts: the hosts file's contents.
        data: the task's data, which is copied into the folder. None means that each host has the data in the usual
            places.
        weights: the file or folder of the task's option `weights`, which is copied, too.
    """

    folder: Path
    hosts: dict[str, Any]
    data: Path | None
    weights: Path | None = None

    @classmethod
    def of(
        cls, folder: Path, there: str | None, hosts_file: Path, data: Path | None, weights: Path | None = None
    ) -> RunPlace:
        """Return the `RunPlace` for a run in `folder`, with the contents of the hosts file.

        Raises:
            ArgumentError: the hosts file is wrong or names only one computer.
        """
        config = HostsConfig.load(hosts_file)
        if config.slots < 2:
            raise ArgumentError(f"{hosts_file} has only one computer: add a second with exogym discover --pair")
        fields = json.loads(hosts_file.read_text("utf-8")) | {"project_path": there or f"~/exogym/{folder.name}"}
        for entry in [fields["master"], *fields.get("workers", [])]:
            if isinstance(entry, dict):
                entry.pop("path", None)
        return cls(folder, fields, data, weights)

    @property
    def data_there(self) -> str | None:
        return None if self.data is None else f"data/{self.data.resolve().name}"

    def options_there(self, options: str | None) -> str | None:
        """Return the task's options, with the weights' path relative to the run's folder, valid on each host."""
        if options is None or self.weights is None:
            return options
        own = f" weights=weights/{self.weights.resolve().name}"
        parts = (own if part.partition("=")[0].strip() == "weights" else part for part in options.split(","))
        return ",".join(parts).strip()

    def make(self) -> None:
        """Make the run's folder and copy the task's data and weights into it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for kind, source in (("data", self.data), ("weights", self.weights)):
            if source is not None:
                target = self.folder / kind / source.resolve().name
                target.parent.mkdir(exist_ok=True)
                (shutil.copytree if source.is_dir() else shutil.copy)(source, target)


class Preparing:
    """Checks and measures the hosts, proposes a plan, and lets the user change it.

    Args:
        asker: asks the questions.
        profile: the run's options so far.
        strategy: the strategy to use. If None, ExoGym chooses a strategy that suits the network.
        task: the task to train.
        place: the run's folder and hosts.
        yes: whether to start without asking.

    Attributes:
        starts: whether the user agreed to train. If False, the user wants no training, at most files.
    """

    def __init__(
        self, asker: Asker, profile: RunProfile, strategy: str | None, task: Task, place: RunPlace, yes: bool,
    ):  # fmt: skip
        self.asker, self.profile, self.strategy, self.task = asker, profile, strategy, task
        self.place, self.yes = place, yes
        self.config = HostsConfig.load(place.hosts)
        self.starts = False
        self._network: Network | None = None
        self._made = False
        self._batch: int | None = None  # batch size of the measured step

    def look(self) -> bool:
        """Check the hosts until all checks pass. Return False if the user gives up."""
        while True:
            say(f"checking {_several(len(self.config.hosts), 'computer')} ...")
            checks = check_hosts(self.config, sync=True, code=False)
            failed = [check for check in checks if not check.ok]
            if not failed:
                say("all checks passed: " + ", ".join(host.address for host in self.config.hosts))
                return True
            print_checks(failed, sys.stdout)
            if not self.asker.sure("Check again?"):
                return False

    def may_measure(self) -> bool:
        """Say what the measurement does to the hosts, ask whether to measure, and return the answer."""
        there = self.place.hosts["project_path"]
        with_ = [*(["the data"] if self.place.data else []), *(["the weights"] if self.place.weights else [])]
        data = f" with {' and '.join(with_)}" if with_ else ""
        say(
            f"next: copy the folder {self.place.folder}{data} to {there} on each computer, and measure the network and "
            f"a step of {self.profile.task}, which takes about half a minute"
        )
        return self.yes or self.asker.sure("Measure now?")

    def agree(self, measured: Path | None) -> Proposal | None:
        """Return the plan that the user agreed to, or None if the user stopped.

        Args:
            measured: the file of an earlier measurement.
        """
        if measured is not None:
            network = Network.of(os.fspath(measured))
            if network.measurement is None:
                raise ArgumentError(
                    f"--measured={os.fspath(measured)!r} was not written by exogym doctor --measure: pass a file that "
                    "it wrote"
                )
            network.measurement.check_hosts(self.config.addresses)
            self._network, self._batch = network, self.profile.batch_size
        while True:
            plan = self._plan()
            say(f"\n{plan}\n")
            said = self._said()
            self.starts = said == START
            if said in (START, FILES):
                return plan
            if said == STOP:
                return None
            self._change(plan)

    def write(self, plan: Proposal) -> WizardRun:
        """Write all files of the run. Print their names and the command that repeats the run."""
        place = self.place
        self._make()
        assert self._network is not None and self._network.measurement is not None
        write_json(place.folder / MEASURED, self._network.measurement.describe())
        session = make_session(place.folder, self._fields(plan), place.hosts, sync=True)
        say(f"written to {place.folder}/: {HOSTS}, {CONFIG}, {MEASURED}")
        say(f"to repeat the run, use this command in that folder: {session.command}")
        return session

    def _fields(self, plan: Proposal) -> dict[str, Any]:
        """Return the profile's fields that are set."""
        profile = replace(self.profile, strategy=plan.strategy)
        if profile.save_dir is not None:
            often = max(1, plan.steps // SAVES)
            profile = replace(profile, checkpoint_interval=often, max_restarts=RESTARTS)
        return {name: x for name, x in asdict(profile).items() if x or name == "seed"}

    def leave(self) -> None:
        """Remove the run's folder if the wizard made it."""
        if self._made:
            shutil.rmtree(self.place.folder, ignore_errors=True)
        say("nothing was trained")

    def _make(self) -> None:
        if not self._made:
            self.place.make()
            self._made = True

    def _plan(self) -> Proposal:
        profile, val = self.profile, self.task.val
        if self._network is None or self._batch != profile.batch_size:
            self._make()
            say("measuring ...")
            self._network = measure_hosts(
                self.config, self.place.folder / MEASURED, sync=True, task=profile.task, data=profile.data,
                batch_size=profile.batch_size, task_options=profile.task_options, project=self.place.folder,
            )  # fmt: skip
            self._batch = profile.batch_size
        assert profile.steps is not None and profile.batch_size is not None
        return propose(
            network=self._network, parameters=size_of(self.task), steps=profile.steps,
            batch_size=profile.batch_size, strategy=self.strategy,
            evaluations=evaluations_of(profile.steps), evaluated=length_of(val, "the validation data set"),
        )  # fmt: skip

    def _said(self) -> str:
        if self.yes:
            return START
        if not self.asker.can_ask:
            say("nothing was trained: pass --yes to start")
            return STOP
        choices = {
            START: "start training", CHANGE: "change something", FILES: "only write the files", STOP: "stop",
        }  # fmt: skip
        return self.asker.choose("--yes", "Start training?", choices, START)

    def _change(self, plan: Proposal) -> None:
        """Ask for strategy, steps, batch size and balance."""
        asker = self.asker
        rows = {
            row.strategy: f"{row.strategy}, {row.speedup:.3g} times as fast as the fastest computer alone"
            for row in plan.advice.rows
        }
        self.strategy = asker.choose("--strategy", "Which strategy?", rows, plan.strategy)
        steps = asker.text("--steps", "How many steps?", count, str(plan.steps))
        batch_size = asker.text("--batch-size", "How many examples per node and batch?", count, str(plan.batch_size))
        shares = {
            "": "equally", "nodes": "nodes: more nodes on faster computers",
            "batch": "batch: larger batches on faster computers", "steps": "steps: fewer steps on slower computers",
        }  # fmt: skip
        balance = asker.choose("--balance", "How should the load be divided?", shares, self.profile.balance or "")
        self.profile = replace(self.profile, steps=steps, batch_size=batch_size, balance=balance or None)


def carry_out(session: WizardRun, plan: Proposal, task: Task) -> None:
    """Train on the hosts, then print the validation losses and times.

    Args:
        session: the run's folder, profile and hosts.
        plan: the plan that the user agreed to.
        task: the task.

    Raises:
        typer.Exit: a host failed.
    """
    begun = time.monotonic()
    with contextlib.chdir(session.folder):
        found = train(PROFILE, session.profile, session.hosts, session.sync)
    rows = [row for row in found.history.rows(node=None) if row["val_loss"] is not None]
    for name in (name for name in (rows[0] if rows else {}) if name.startswith("val_")):
        if rows[0][name] is not None and rows[-1].get(name) is not None:
            label = LABELS.get(name, name.removeprefix("val_").replace("_", " "))
            on = "" if task.evaluates is None else f", on {task.evaluates}"
            before, after = float(rows[0][name]), float(rows[-1][name])
            if name == "val_loss" and task.perplexity:
                was, now = (math.inf if loss > MOST_LOSS else math.exp(loss) for loss in (before, after))
                say(f"validation perplexity: {was:.4g} before, {now:.4g} after{on}")
            say(f"validation {label}: {before:.4f} before, {after:.4f} after{on}")
    if rows and (took_s := rows[-1]["wall_s"]) is not None:
        off = took_s / plan.seconds - 1
        took, estimated, total = map(readable_seconds, (took_s, plan.seconds, time.monotonic() - begun))
        more = f"{abs(off) * 100:.0f} % {'more' if off >= 0 else 'less'}"
        say(f"training took {took}, {more} than the estimated {estimated}; {total} including start and copying")


def _several(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
