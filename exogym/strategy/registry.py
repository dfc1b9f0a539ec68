"""Strategies by name: parse a strategy from text, as on the command line (`diloco:H=20`)."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

from torch.optim import SGD

from exogym.core.base.retired import retired
from exogym.errors import ArgumentError, nearest
from exogym.network.units import value_of
from exogym.strategy.averaging import Averaging
from exogym.strategy.names import CONTRIB, short_names
from exogym.strategy.strategy import STRATEGIES as STRATEGIES
from exogym.strategy.strategy import Strategy

DEFAULTS = ("inner_optim", "lr", "max_norm", "lr_scheduler", "warmup_steps", "H", "outer_lr", "outer_momentum")
_ELSEWHERE = {  # methods that are options of other strategies here, by their names in papers
    "streaming": "streaming_diloco", "eager": "diloco:eager=true", "delayed_diloco": "diloco:delay=50",
    "hierarchical_diloco": "diloco:island_size=2:island_H=10", "delayed_nesterov": "async_diloco", "muon": "muloco",
    "fedbuff": "async_diloco:rule=fedbuff", "local_sgd": "fedavg", "fedavgm": "fedopt:server_optim=momentum",
    "fedadam": "fedopt:server_optim=adam", "fedyogi": "fedopt:server_optim=yogi",
    "fedadagrad": "fedopt:server_optim=adagrad", "ef_signsgd": "signsgd:error_feedback=true", "dpsgd": "gossip",
    "d_psgd": "gossip", "lookahead": "diloco", **importlib.import_module(CONTRIB).ELSEWHERE,
}  # fmt: skip


def parse_strategy(text: str, *, lr_for: str | None = None, **defaults: Any) -> Strategy:
    """Return the strategy that a text describes: `name` or `name:option=value:option=value`.

    Args:
        text: a name in `STRATEGIES`, then arguments of its class. A value is parsed as an integer, a float, `true`,
            `false` or `none` if possible, otherwise as text.
        **defaults: values for the arguments in `DEFAULTS`. A default applies if the class accepts the argument and the
            text does not set it. In addition, `outer_lr` requires that the text does not set `outer_optim`;
            `outer_momentum`, neither `outer_optim` nor `outer_lr`; `lr`, not `inner_lr`; and `inner_optim`, a class
            whose equation allows this optimizer (`only_inner`).
        lr_for: the optimizer for which the default `lr` was chosen, such as a task's "adamw"; `lr` then does not apply
            to a strategy that uses SGD. None means the strategy's own optimizer.

    Raises:
        ArgumentError: a strategy or option is unknown (the message suggests the nearest), or a value is not allowed.

    >>> parse_strategy("diloco:H=20:outer_lr=0.5", lr=0.01, max_norm=1.0).given_arguments
    {'H': 20, 'outer_lr': 0.5, 'lr': 0.01, 'max_norm': 1.0}
    >>> of_a_task = {"inner_optim": "adamw", "lr": 0.002, "lr_for": "adamw"}
    >>> parse_strategy("fedavg", **of_a_task).inner.base_lr, parse_strategy("fednova", **of_a_task).inner.base_lr
    (0.002, 0.1)
    """
    for name in defaults:
        if name not in DEFAULTS:
            raise ArgumentError(f"parse_strategy() has no default {name!r}: {nearest(name, DEFAULTS)}")
    name, *parts = (part.strip() for part in text.split(":"))
    name = name.lower()
    if name not in STRATEGIES:
        raise unknown(name)
    kind = STRATEGIES[name]
    known = written_options(kind)
    untyped = [option for option, parameter in known.items() if parameter.kind is parameter.VAR_KEYWORD]
    given: dict[str, Any] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if not equals or not value:
            raise ArgumentError(f"strategy {text!r}: {part!r} should look like option=value, as in 'diloco:H=20'")
        if untyped and option not in {*known} - {*untyped}:
            raise ArgumentError(
                f"strategy {text!r}: {kind.__name__}.__init__ takes **{untyped[0]} without a type, so the names of its "
                f"options are unknown: declare {option} as an argument, or write **{untyped[0]}: Unpack[InnerOptions] "
                "(exogym.strategy.strategy)"
            )
        if option not in known:
            instead = kind.not_taken.get(option) or retired(option, kind.__name__) or nearest(option, known)
            raise ArgumentError(f"strategy {text!r}: {name} has no option {option!r}: {instead}")
        if option in given:
            raise ArgumentError(f"strategy {text!r} gives {option} twice: give it once")
        given[option] = value_of(value)
    if kind.only_inner and defaults.get("inner_optim") not in kind.only_inner:
        defaults.pop("inner_optim", None)
    if "inner_lr" in given:
        defaults.pop("lr", None)
    if "outer_optim" in given:
        defaults.pop("outer_lr", None)
    if "outer_optim" in given or "outer_lr" in given:
        defaults.pop("outer_momentum", None)
    taken = {option: value for option, value in defaults.items() if option in known and value is not None}
    try:
        averaging = {option: given.pop(option) for option in [*given] if option in averages_of(kind)}
        given |= {"averaging": Averaging(**averaging)} if averaging else {}
        strategy = kind(**(taken | given))
        on_sgd = strategy.inner.spec.cls is SGD and not strategy.own_rule
        if on_sgd and lr_for not in (None, "sgd") and taken.pop("lr", None) is not None:
            strategy = kind(**(taken | given))
        return strategy
    except ArgumentError as error:
        raise ArgumentError(f"strategy {text!r}: {error}") from error
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"strategy {text!r}: a value is of the wrong kind ({error})") from error


def averages_of(kind: type[Strategy]) -> tuple[str, ...]:
    """Return the options of an `Averaging` that a class accepts."""
    return getattr(kind, "averages", ())


def written_options(kind: type[Strategy]) -> dict[str, inspect.Parameter]:
    """Return a class's options by name, as in a text: with the options of its `Averaging` among them.

    >>> from exogym.strategy import DiLoCoStrategy
    >>> [name for name in written_options(DiLoCoStrategy) if name in ("averaging", "transport")]
    ['transport']
    """
    of_averages = inspect.signature(Averaging).parameters
    known = dict(inspect.signature(kind).parameters)
    for name in averages_of(kind):
        known.pop("averaging", None)
        known[name] = of_averages[name].replace(kind=inspect.Parameter.KEYWORD_ONLY)
    return known


def unknown(name: str, *further: str) -> ArgumentError:
    """Return the error for an unknown strategy, which suggests the method's name in ExoGym or the nearest name.

    Args:
        name: the unknown name.
        *further: known names besides `STRATEGIES`.

    >>> print(unknown("fedadam"))
    unknown strategy 'fedadam': it is 'fedopt:server_optim=adam' here
    >>> print(unknown("dilco"))
    unknown strategy 'dilco': did you mean 'diloco'?
    """
    plain = re.sub("[-_ ]", "", name)
    here = next((ours for other, ours in _ELSEWHERE.items() if other.replace("_", "") == plain), None)
    said = nearest(name, [*STRATEGIES, *further]) if here is None else f"it is {here!r} here"
    return ArgumentError(f"unknown strategy {name!r}: {said}")


def is_ours(kind: type[Strategy]) -> bool:
    """Return whether a class belongs to ExoGym (`exogym.strategy` or `exogym.contrib`)."""
    return kind.__module__.startswith((f"{__package__}.", f"{CONTRIB}."))


def class_named(name: str) -> type[Strategy] | None:
    """Return ExoGym's class with this class name, or None."""
    short = short_names().get(name)
    return None if short is None else STRATEGIES[short]
