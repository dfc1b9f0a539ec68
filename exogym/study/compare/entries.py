"""The strategies of a comparison, and the settings that all of them share."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from exogym.errors import ArgumentError, check_count
from exogym.strategy import Strategy
from exogym.strategy.registry import DEFAULTS, STRATEGIES, parse_strategy, unknown
from exogym.strategy.strategy import Inner
from exogym.study.compare.summary import SINGLE
from exogym.study.tasks import Task

# Evaluations of a run: enough for a curve, few enough for a tenth of the fleet's time. Evaluating an example takes two
# thirds of training it. A node's step takes at least as long as evaluating 24 examples, or training 16.
MOST_EVALUATIONS, LEAST_EVALUATIONS, SHARE, COST, STEP_EXAMPLES = 30, 10, 0.1, 2 / 3, 16

# `single` is node 0 of the fleet alone. Options of what a node is and computes stay (`node`, `precision`, `compute`,
# ...). Options that need several nodes are left out: absent or slow nodes (`faults`), and unequal loads (`balance`).
OF_SEVERAL_NODES = ("faults", "balance")


@dataclass(frozen=True)
class ComparisonSetting:
    """The settings that all strategies of a comparison share."""

    nodes: int
    steps: int
    batch_size: int
    seeds: tuple[int, ...]
    inner_optim: str
    lr: float
    lr_scheduler: str
    warmup_steps: int
    max_norm: float | None
    H: int
    outer_lr: float | None
    outer_momentum: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dict, but not a default outer momentum, because older comparisons lack this field."""
        return {k: v for k, v in asdict(self).items() if k != "outer_momentum" or v is not None}

    def val_interval(self, val_examples: int) -> int:
        """Return the number of steps between two evaluations, if an evaluation takes `val_examples` examples."""
        trained = self.steps * self.nodes * max(self.batch_size, STEP_EXAMPLES)
        affordable = round(SHARE * trained / (COST * val_examples))
        return math.ceil(self.steps / min(max(affordable, LEAST_EVALUATIONS), MOST_EVALUATIONS))


@dataclass(frozen=True)
class Entry:
    """A strategy to compare, with its title and its notes for the table."""

    strategy: Strategy
    title: str
    notes: str
    alone: bool


def split_strategies(strategies: str | Sequence[str] | Mapping[str, str | Strategy]) -> dict[str, str | Strategy]:
    """Return a dict from label to text or `Strategy`. A strategy given as text has this text as its label.

    Raises:
        ArgumentError: there is no strategy, or the same strategy is named twice.
    """
    if isinstance(strategies, Mapping):
        return dict(strategies)
    given = [strategies] if isinstance(strategies, Strategy) else strategies
    if not isinstance(given, Iterable):
        raise ArgumentError(f"strategies={given!r} must be text such as 'ddp,diloco', a list of texts, or a dict")
    texts: list[Any] = given.split(",") if isinstance(given, str) else list(given)
    for text in texts:
        if not isinstance(text, str):
            kind = getattr(text, "__name__", type(text).__name__)
            raise ArgumentError(
                f"strategies: {kind} has no name here: pass a dict, such as {{'mine': DiLoCoStrategy(H=5)}}"
            )
    labels = [text.strip() for text in texts]
    for label in labels:
        if labels.count(label) > 1:
            raise ArgumentError(f"strategies={','.join(labels)!r} contains {label!r} twice: pass each strategy once")
    if not any(labels):
        raise ArgumentError(f"strategies={strategies!r} contains no strategy: pass, for example, 'ddp,diloco'")
    return {label: label for label in labels}


def setting_of(task: Task, num_nodes: Any, max_steps: Any, batch_size: Any, seeds: Any, lr: Any) -> ComparisonSetting:
    nodes, steps = (
        task.num_nodes if num_nodes is None else num_nodes,
        task.max_steps if max_steps is None else max_steps,
    )
    size, rate = task.batch_size if batch_size is None else batch_size, task.lr if lr is None else lr
    for name, count in (("num_nodes", nodes), ("max_steps", steps), ("batch_size", size)):
        check_count(name, count)
    if isinstance(seeds, int):
        check_count("seeds", seeds)
        seeds = range(seeds)
    are_whole = isinstance(seeds, Collection) and all(isinstance(seed, int) for seed in seeds)
    if not are_whole or not seeds or len(set(seeds)) < len(seeds):
        raise ArgumentError(f"seeds={seeds!r} must be the number of seeds, or different whole numbers")
    shared = {name: getattr(task, name) for name in DEFAULTS if name != "lr"}
    return ComparisonSetting(nodes=nodes, steps=steps, batch_size=size, lr=rate, **shared, seeds=tuple(seeds))


def entries_of(strategies: Any, setting: ComparisonSetting, own_lr: bool = False) -> dict[str, Entry]:
    """Return the named strategies.

    Args:
        own_lr: whether the user chose the learning rate. Otherwise it is the task's, and a text with SGD, for which the
            task's rate is not meant, takes SGD's default.
    """
    defaults = {name: getattr(setting, name) for name in DEFAULTS}
    common = Inner(
        setting.inner_optim, lr=setting.lr, max_norm=setting.max_norm, lr_scheduler=setting.lr_scheduler,
        warmup_steps=setting.warmup_steps,
    )  # fmt: skip
    entries = {}
    for label, given in split_strategies(strategies).items():
        notes = []
        if isinstance(given, Strategy):
            entry = Entry(given, label, "", alone=False)
        elif isinstance(given, str):
            entry = _parse(given, None if own_lr else setting.inner_optim, defaults)
            notes = [f"1 of {setting.nodes} shards"] if entry.alone else []
        else:
            raise ArgumentError(f"strategies: {label!r} must be a text or a Strategy, not {given!r}")
        inner = entry.strategy.inner
        if entry.strategy.own_rule:
            notes.append(f"own rule, lr={inner.base_lr:g}")
        elif (inner.spec.cls, inner.base_lr) != (common.spec.cls, common.base_lr):
            notes.append(f"{inner.spec.cls.__name__}, lr={inner.base_lr:g}")
        notes += [note for note in _values(entry.strategy) if note not in label]
        entries[label] = replace(entry, notes=", ".join(notes))
    return entries


def _parse(text: str, lr_for: str | None, defaults: dict[str, Any]) -> Entry:
    name, colon, options = text.partition(":")
    name = name.strip().lower()
    if name not in (SINGLE, *STRATEGIES):
        raise unknown(name, SINGLE)
    alone = name == SINGLE
    title = "one node alone" if alone else STRATEGIES[name].title or name
    title += f" ({options.replace(':', ', ')})" if options else ""
    strategy = parse_strategy(f"{'ddp' if alone else name}{colon}{options}", lr_for=lr_for, **defaults)
    return Entry(strategy, title, "", alone)


def _values(strategy: Strategy) -> list[str]:
    """Return the options that decide a strategy's bytes and outer step, in the form of its text."""
    known = inspect.signature(type(strategy)).parameters
    given = getattr(strategy, "given_arguments", {})
    values = {name: given.get(name, known[name].default) for name in ("H", "outer_lr", "p_sparta") if name in known}
    return [f"{name}={value}" for name, value in values.items() if value is not None]
