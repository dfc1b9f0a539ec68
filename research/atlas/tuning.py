"""Which settings of a method to try, and which trial was the best. Both depend only on earlier trials' losses."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence

from exogym.errors import ArgumentError
from exogym.strategy.registry import STRATEGIES, parse_strategy
from exogym.strategy.strategy import Strategy
from exogym.study.compare.summary import SINGLE
from exogym.study.sweep.axes import Axes, Range, as_text, axes_of
from exogym.study.sweep.search import BATCH, propose

# Rates to try for inner optimizers. A strategy with its own rule declares `lr` in its own ranges.
RATES = {
    "adam": "3e-4..3e-2", "adamw": "3e-4..3e-2", "nadam": "3e-4..3e-2", "radam": "3e-4..3e-2", "muonadamw": "1e-3..0.1",
    "sgd": "3e-3..1.0",
}  # fmt: skip
INNER_RATES = {"adamw": ("0.003756", "0.007512"), "sgd": ("0.01", "0.02")}  # a low and a high one, to compare methods
Options = Mapping[str, str]


def axes_of_method(method: str, inner_optim: str) -> Axes:
    """Return the options to tune, each with its range: the inner rate, and the ranges that the strategy declares.

    Options that the text `method` sets are not tuned. Options that do not go with the text are not tuned either: for
    example, an outer momentum does not go with `outer_optim=adam`.

    Args:
        method: a strategy as text, such as "diloco:H=20".
        inner_optim: the task's inner optimizer.

    Raises:
        ArgumentError: the strategy declares no ranges, or no rates are known for its inner optimizer.

    >>> axes_of_method("diloco:outer_momentum=0.6", "adamw")
    {'lr': Range(low=0.0003, high=0.03), 'outer_lr': Range(low=0.1, high=1.5)}
    >>> list(axes_of_method("diloco:outer_optim=adam", "adamw"))
    ['lr', 'outer_lr']
    """
    name, colon, given = method.partition(":")
    strategy = parse_strategy(f"{'ddp' if name == SINGLE else name}{colon}{given}", inner_optim=inner_optim)
    ranges = type(strategy).ranges
    if ranges is None:
        raise ArgumentError(
            f"strategy {name!r} declares no ranges, so it cannot be tuned: give {type(strategy).__name__} a class "
            "attribute such as ranges = ('outer_lr=0.1..1.5',), or ranges = () to tune only the inner rate"
        )
    axes = axes_of(ranges)
    if "lr" not in axes:
        optimizer = strategy.inner.spec.cls.__name__.lower()
        if optimizer not in RATES:
            raise ArgumentError(
                f"no rates to try are known for the inner optimizer {optimizer!r} of {method!r}: add 'lr=LOW..HIGH' to "
                f"the ranges of {type(strategy).__name__}, or take one of {', '.join(RATES)}"
            )
        axes = axes_of({"lr": RATES[optimizer]}) | axes
    fixed = {part.partition("=")[0].strip() for part in given.split(":")}
    fixed |= {"lr"} if "inner_lr" in fixed else set()
    return {
        name: values for name, values in axes.items()
        if name not in fixed and (name == "lr" or _allowed(method, name, values))
    }  # fmt: skip


def _allowed(method: str, option: str, values: Range | Sequence[str]) -> bool:
    value = as_text(values.low) if isinstance(values, Range) else values[0]
    try:
        parse_strategy(f"{method}:{option}={value}")
    except ArgumentError:
        return False
    return True


def declared(kind: type[Strategy]) -> list[str]:
    """Return the names of the options that a strategy class declares for tuning."""
    return [text.partition("=")[0] for text in kind.ranges or ()]


def next_trials(axes: Axes, losses: Sequence[tuple[Options, float]], trials: int) -> list[dict[str, str]]:
    """Return the next settings to try, at most `BATCH`; the first are the defaults, {}. After all trials, return [].

    Args:
        losses: earlier trials in order: settings and validation loss. The loss of a failed trial is infinite.
    """
    left = min(BATCH, trials - len(losses))
    if left <= 0:
        return []
    if not losses:
        return [{}, *(propose(axes, [], left - 1) if axes and left > 1 else [])]
    tried = [trial for trial in losses if trial[0]]  # the defaults have no place within the ranges
    return propose(axes, tried, left, startup=BATCH - 1) if axes else []


def best_of(losses: Sequence[tuple[Options, float]]) -> Options:
    """Return the settings with the lowest validation loss; among equal losses, those tried first.

    >>> best_of([({}, 0.5), ({"lr": "0.1"}, 0.4), ({"lr": "0.2"}, 0.4)])
    {'lr': '0.1'}
    """
    return min(losses, key=lambda trial: trial[1])[0]


def without(options: Options, names: Collection[str]) -> dict[str, str]:
    """Return the options that have none of `names`."""
    return {name: value for name, value in options.items() if name not in names}


def with_options(method: str, options: Options) -> str:
    """Return a strategy's text with further options. The inner rate is not part of the text."""
    return method + "".join(f":{name}={value}" for name, value in options.items() if name != "lr")


def takes(method: str, option: str) -> bool:
    """Return whether a strategy given as text has an option."""
    kind = STRATEGIES.get(method.partition(":")[0])
    return kind is not None and option in inspect.signature(kind).parameters
