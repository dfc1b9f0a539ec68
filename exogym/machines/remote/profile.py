"""`[distributed:NAME]` profiles of a config file: a training run in a few lines of text.

[medium]
task = shakespeare
lr = 0.003

[distributed:diloco-medium]
base_profile = medium
strategy = diloco:outer_lr=0.4
communication_interval = 100
hosts_config = distributed_hosts.json
steps = 2000
"""

from __future__ import annotations

import configparser
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from exogym.balance import Balance
from exogym.core.base.files import short_text
from exogym.core.combinations import check, features_of
from exogym.core.progress import notice
from exogym.core.training.options import Placement
from exogym.errors import ArgumentError, check_count, nearest
from exogym.network.units import value_of
from exogym.strategy.registry import STRATEGIES, parse_strategy
from exogym.strategy.strategy import Strategy
from exogym.study.tasks import Task, load_task

PREFIX = "distributed:"
EVALUATIONS = 10  # after the first evaluation; a few more if 10 does not divide the steps


@dataclass(frozen=True)
class RunProfile:
    """The fields of a profile: what to train, how, and on which hosts.

    Attributes:
        task, data, task_options: the task, as for `exogym.tasks.load_task`: a name such as "digits" or "whisper", or
            `module:function` of the project; the file or folder of its data; its options, such as
            "lora_rank=8, window_s=10".
        strategy: the strategy, written as on the command line.
        communication_interval: the strategy's H.
        hosts_config: path of the hosts file, relative to the config file's folder.
        balance: the quantity that is larger on faster hosts: "nodes", "batch" (examples per batch) or "steps". None:
            all hosts get the same.
        nodes: number of nodes; default: one per slot.
        steps, batch_size, lr: number of steps, batch size and learning rate; default: the task's values.
        save_dir, checkpoint_interval, seed, resume: as for `NetworkTrainer.fit`.
        max_restarts: as for `exogym.Placement`.
        min_hosts, retries: as for `NetworkTrainer`.
    """

    task: str
    strategy: str = "diloco"
    communication_interval: int | None = None
    hosts_config: str | None = None
    data: str | None = None
    task_options: str | None = None
    nodes: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    balance: str | None = None
    seed: int = 0
    save_dir: str | None = None
    checkpoint_interval: int | None = None
    max_restarts: int = 0
    min_hosts: int | None = None
    retries: int = 0
    resume: bool = False

    def __post_init__(self) -> None:
        for name in ("communication_interval", "nodes", "steps", "batch_size", "checkpoint_interval", "min_hosts"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_count("max_restarts", self.max_restarts, least=0)
        check_count("retries", self.retries, least=0)
        if self.lr is not None and not 0 < self.lr < float("inf"):
            raise ArgumentError(f"lr={self.lr!r} must be a finite number above 0")
        if self.save_dir is None:
            restarts = self.max_restarts if self.min_hosts is None else 0  # otherwise a host copies the others' state
            kept = features_of(
                checkpoint_interval=self.checkpoint_interval, max_restarts=restarts or None, resume=self.resume
            )
            check({"no save_dir": "no save_dir"} | kept)
        if self.balance is not None:
            Balance(self.balance)
        options_of(self.task_options)  # raises an error for an invalid value
        self.make_strategy(None)

    def make_strategy(self, task: Task | None) -> Strategy:
        """Return the profile's strategy. Settings that the profile doesn't have come from `task`.

        Raises:
            ArgumentError: the strategy or an option is unknown, or the strategy has no interval.
        """
        name, *options = (part.strip() for part in self.strategy.split(":"))
        defaults: dict[str, Any] = {"lr": self.lr}
        lr_for = None if task is None or self.lr is not None else task.inner_optim
        if task is not None:
            taken = ("inner_optim", "max_norm", "lr_scheduler", "warmup_steps", "H", "outer_lr", "outer_momentum")
            defaults |= {key: getattr(task, key) for key in taken} | {"lr": self.lr or task.lr}
        if self.communication_interval is not None:
            if any(option.startswith("H=") for option in options):
                raise ArgumentError(f"communication_interval and strategy={self.strategy!r} both set H: set it once")
            if name.lower() in STRATEGIES and "H" not in inspect.signature(STRATEGIES[name.lower()]).parameters:
                raise ArgumentError(
                    f"communication_interval={self.communication_interval}: {name} communicates at every step; leave "
                    "communication_interval out"
                )
            defaults["H"] = self.communication_interval
        return parse_strategy(self.strategy, lr_for=lr_for, **defaults)

    def load(self) -> Task:
        """Return the profile's task with its data.

        Raises:
            ArgumentError: the task, module or function is unknown, or the function does not return a `Task`.
        """
        return load_task(self.task, self.data, **options_of(self.task_options))

    def fit_options(self, task: Task) -> dict[str, Any]:
        """Return the arguments for `NetworkTrainer.fit` except the strategy. Missing ones come from `task`."""
        steps = self.steps or task.max_steps
        return {
            "num_nodes": self.nodes, "max_steps": steps, "batch_size": self.batch_size or task.batch_size,
            "seed": self.seed, "balance": self.balance, "partitioner": task.partitioner,
            "val_interval": None if task.val is None else val_interval(steps), "save_dir": self.save_dir,
            "checkpoint_interval": self.checkpoint_interval, "resume": self.resume,
            "placement": Placement(max_restarts=self.max_restarts),
        }  # fmt: skip


def val_interval(steps: int) -> int:
    """Return the number of steps between two evaluations, for a profile's run of `steps` steps.

    >>> val_interval(40), val_interval(5)
    (4, 1)
    """
    return max(1, steps // EVALUATIONS)


def evaluations_of(steps: int) -> int:
    """Return how often a profile's run of `steps` steps evaluates: at its start, every `val_interval`, and at its end.

    >>> evaluations_of(40), evaluations_of(19), evaluations_of(5)
    (11, 20, 6)
    """
    return 1 + -(-steps // val_interval(steps))


def options_of(text: str | None) -> dict[str, Any]:
    """Return the options in a text such as "lora_rank=8, window_s=10". Values are numbers, true, false, none, or texts.

    Raises:
        ArgumentError: an option has no value, or occurs twice.

    >>> options_of("lora_rank=8, word_errors=false")
    {'lora_rank': 8, 'word_errors': False}
    """
    found: dict[str, Any] = {}
    for part in filter(None, map(str.strip, (text or "").split(","))):
        name, _, value = (word.strip() for word in part.partition("="))
        if not name or not value or name in found:
            raise ArgumentError(
                f"task_options={text!r}: {part!r} must be option=value, and each option may occur only once"
            )
        found[name] = value_of(value)
    return found


KINDS = {"int": int, "int | None": int, "float | None": float, "str": str, "str | None": str}
KNOWN = {field.name: str(field.type) for field in fields(RunProfile) if field.name != "resume"}


def load_profile(path: str | os.PathLike[str], name: str, resume: bool = False) -> RunProfile:
    """Return the profile in the section `[distributed:name]` of a config file, or in the section `[name]`.

    The section's field `base_profile` may name any other section of the file, from which missing fields are taken. In a
    section whose name doesn't start with `distributed:`, unknown fields are ignored with a notice, because they may
    belong to other programs.

    Raises:
        ArgumentError: the file or profile does not exist, or a field is unknown or wrong.
    """
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(short_text(path), os.fspath(path))
    except ArgumentError as error:
        raise ArgumentError(f"the config file {error}") from None
    except (configparser.Error, UnicodeDecodeError) as error:
        raise ArgumentError(f"{os.fspath(path)}: {error}") from None
    except (OSError, ValueError) as error:
        raise ArgumentError(
            f"the config file {os.fspath(path)!r} cannot be read ({error}): pass one with --config"
        ) from None
    section = next((there for there in (PREFIX + name, name) if there in parser), None)
    if section is None:
        profiles = [known.removeprefix(PREFIX) for known in parser.sections() if known.startswith(PREFIX)]
        hint = nearest(name, profiles) if profiles else f"write a section [{PREFIX}{name.removeprefix(PREFIX)}]"
        raise ArgumentError(f"{os.fspath(path)} has no profile {name!r}: {hint}")
    given = _with_bases(parser, section, Path(path).name)
    values: dict[str, Any] = {key: _value(f"[{section}] {key}", key, text) for key, text in given.items()}
    if "task" not in values:
        raise ArgumentError(
            f"[{section}] has no task: set task = digits, mnist, shakespeare, cifar10, whisper, language or "
            "module:function"
        )
    if "hosts_config" in values:
        values["hosts_config"] = str(Path(path).parent / Path(values["hosts_config"]).expanduser())
    try:
        return RunProfile(**values, resume=resume)
    except ArgumentError as error:
        raise ArgumentError(f"[{section}] {error}") from None


def _with_bases(parser: Mapping[str, Mapping[str, str]], section: str, file: str) -> dict[str, str]:
    """Return a section's fields; missing fields come from its bases."""
    chain: list[str] = []
    found: dict[str, str] = {}
    at: str | None = section
    while at is not None:
        if at in chain:
            raise ArgumentError(f"{file}: the sections' base_profile form a circle: {' -> '.join([*chain, at])}")
        chain.append(at)
        own = dict(parser[at])
        base = own.pop("base_profile", None)
        strange = [key for key in own if key not in KNOWN]
        if strange and at.startswith(PREFIX):
            raise ArgumentError(
                f"{file}: [{at}] has no field {strange[0]!r}: {nearest(strange[0], [*KNOWN, 'base_profile'])}"
            )
        if strange:
            notice(f"[{at}] in {file}: unused fields: {', '.join(strange)}")
        found = {key: text for key, text in own.items() if key in KNOWN} | found
        if base is None:
            return found
        at = next((name for name in (base, PREFIX + base) if name in parser), None)
        if at is None:
            raise ArgumentError(
                f"{file}: [{chain[-1]}] base_profile = {base}: there is no such section: {nearest(base, parser)}"
            )
    raise AssertionError


def _value(where: str, key: str, text: str) -> Any:
    kind = KINDS[KNOWN[key]]
    try:
        value = kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise ArgumentError(f"{where} = {text!r}; expected {wanted}") from None
    if value == "":
        raise ArgumentError(f"{where} is empty; set a value or leave the field out")
    return value
