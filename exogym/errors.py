"""ExoGym's own errors, and functions that check arguments.

    ExoGymError
    ├── ArgumentError    a wrong, unknown or misspelled argument     (also a ValueError and a TypeError)
    ├── ModelError       a model that cannot be trained as a row of the fleet
    ├── DataError        a data set, shard or batch that cannot be used
    ├── StrategyError    a strategy that breaks the rules for strategies
    ├── TrainingError    training itself went wrong (a loss that is not a number, ...)
    ├── CheckpointError  a checkpoint that is missing, damaged, or from another run
    └── WorkerError      a process of the run is gone (killed, out of memory, cut off)

Each message names the expected and the given value, and says what to do.

Catch an error by its own class or by a base class:

>>> for kind in (ArgumentError, ModelError, DataError, StrategyError, TrainingError, CheckpointError, WorkerError):
...     try:
...         raise kind("given, wanted, remedy")
...     except ExoGymError as error:
...         assert type(error) is kind
>>> try:
...     raise Stopped(signal.SIGTERM, step=120)
... except KeyboardInterrupt as stop:  # not an error: somebody wanted it
...     print(stop)
SIGTERM after step 120
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import math
import operator
import os
import reprlib
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Real
from types import MappingProxyType, TracebackType
from typing import Any, TypeVar

from exogym.core.base.retired import retired as retired  # public from here
from exogym.core.base.streams import BROKEN_PIPE, STDERR, fill_in, is_stdout_gone, replace_letters


class ExoGymError(Exception):
    """Base class of ExoGym's own errors.

    Retired names, and adapters whose library is not installed, raise ImportError, and methods to override raise
    NotImplementedError.
    """


class ArgumentError(ExoGymError, ValueError, TypeError):
    """An argument is unknown, misspelled, of the wrong kind or out of range.

    If the argument must be one of a few strings, `choices` holds them.
    """

    def __init__(self, *said: object, choices: Iterable[str] = ()):
        super().__init__(*said)
        self.choices = tuple(choices)


class ModelError(ExoGymError):
    """The model can't be trained as a row of the fleet, for the reason in the message."""


class DataError(ExoGymError):
    """A data set, shard or batch cannot be used."""


class StrategyError(ExoGymError):
    """A strategy breaks the rules for strategies."""


class TrainingError(ExoGymError):
    """Training failed, for example because a loss is not a number."""


class CheckpointError(ExoGymError):
    """A checkpoint is missing, damaged, or from another run."""


class WorkerError(ExoGymError):
    """A process of the run has ended: it was killed, ran out of memory, or lost its connection."""


class Stopped(KeyboardInterrupt):
    """A signal ended the run, which first wrote a checkpoint if `save_dir` is set. Not an `ExoGymError`.

    Args:
        by: the signal, or None if another process received the signal.
        step: the number of completed steps.

    Attributes:
        left: the results so far of a run in other processes (such as Ray's).
    """

    def __init__(self, by: signal.Signals | None, step: int):
        super().__init__(f"{'a signal to another process' if by is None else by.name} after step {step}")
        self.elsewhere, self.step = by is None, step
        self.left: Any = None


def nearest(given: str, known: Iterable[str]) -> str:
    """Return "did you mean 'x'?" with the most similar known name, or a list of the known names. Case does not matter.

    A name that is the only one to end in the given word is preferred, so "nodes" gives "num_nodes" and not "node". A
    name with the same letters in another order comes next.

    >>> nearest("h", ["H", "island_H"]), nearest("quorum", ["H", "lr"]), nearest("nodes", ["node", "num_nodes"])
    ("did you mean 'H'?", 'known: H, lr', "did you mean 'num_nodes'?")
    """
    names = sorted(known)
    small = {name.lower(): name for name in reversed(names)}
    close = [name for name in small if name.endswith("_" + given.lower()) and given.lower() not in small]
    if len(close) != 1:
        close = [name for name in small if sorted(name) == sorted(given.lower())]
    if len(close) != 1:
        close = difflib.get_close_matches(given.lower(), small, n=1, cutoff=0.6)
    if close:
        return f"did you mean {small[close[0]]!r}?"
    return "known: " + ", ".join(names)


def run_script(main: Callable[[], object]) -> None:
    """Call `main`. If it fails, print one line and exit with a status: 1 for an ExoGym error, 130 for Ctrl-C.

    The status is 141 if the reader of stdout closed the pipe, as `| head` does.

    >>> run_script(lambda: print("trained"))
    trained
    """
    fill_in()
    replace_letters()
    try:
        main()
        sys.stdout.flush()
    except ExoGymError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted", file=STDERR)
        sys.exit(130)
    except BrokenPipeError:
        if not is_stdout_gone():
            raise
        sys.exit(BROKEN_PIPE)


# alias of an argument -> the argument and a mapping of its values (None: not set); {}: the values are the same
ALIASES: dict[str, tuple[str, dict[Any, Any]]] = {
    "autocast": ("precision", {True: "bf16", False: None}),
    "inner_lr": ("lr", {}),
}
# DataLoader's arguments, which functions accept inside `dataloader_kwargs`
LOADER_ARGUMENTS = (
    "collate_fn", "drop_last", "multiprocessing_context", "num_workers", "persistent_workers", "pin_memory",
    "pin_memory_device", "prefetch_factor", "timeout", "worker_init_fn",
)  # fmt: skip
_PACKAGE = os.path.dirname(__file__) + os.sep
F = TypeVar("F", bound=Callable[..., Any])


def checked(function: F) -> F:
    """Make `function` reject unknown keyword arguments with an error that suggests the most similar name.

    The decorated function also accepts aliases of arguments (`ALIASES`). Arguments annotated as `bool` must be True or
    False, because the string "no" would count as true.

    If `function` is an `__init__`, the decorator also stores the passed arguments in `self.given_arguments`, from which
    objects describe themselves. The traceback of an ArgumentError ends at the user's call, unless Python runs in
    development mode (`python -X dev`).

    A class or function may have a dict `not_taken` that maps arguments of similar classes to the reason why this class
    doesn't accept them. The error for such an argument gives the reason instead of a similar name.

    Raises:
        ArgumentError: `function` doesn't accept an argument, or a required argument is missing.

    >>> @checked
    ... def train(num_nodes=1): ...
    >>> train(num_node=2)
    Traceback (most recent call last):
    ...
    exogym.errors.ArgumentError: train() has no argument 'num_node': did you mean 'num_nodes'?
    """
    signature, where = inspect.signature(function), function.__qualname__.removesuffix(".__init__")
    is_init = function.__name__ == "__init__"

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        known = getattr(type(args[0]) if is_init else function, "not_taken", {})
        try:
            bound, kwargs = bind(where, signature, args, kwargs, known)
            if is_init and "given_arguments" not in vars(args[0]):
                vars(args[0])["given_arguments"] = {k: v for k, v in bound.items() if k != "self"}
            return function(*args, **kwargs)
        except ArgumentError as error:
            if not sys.flags.dev_mode and _is_ours(error.__traceback__):
                error.__traceback__ = None
            raise  # no `from`: it would hide an error that the caller was handling

    return call  # type: ignore[return-value]


def _is_ours(traceback: TracebackType | None) -> bool:
    """Return whether all frames are ExoGym's own, which tell users nothing about their mistake."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        traceback = traceback.tb_next
    return traceback is None


def bind(
    where: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any],
    not_taken: Mapping[str, str] = MappingProxyType({}),
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Check a call's arguments as `checked` does. Return all arguments by name, and `kwargs` without aliases.

    Args:
        where: the function's name in messages.
        signature: the function's signature.
        args, kwargs: the arguments of the call.
        not_taken: see `checked`.
    """
    parameters = signature.parameters
    names = [name for name in parameters if name != "self"]
    kwargs = without_aliases(kwargs, names, kept=names)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in [name for name in kwargs if name not in parameters and not takes_all]:
        if "dataloader_kwargs" in names and name in LOADER_ARGUMENTS:
            not_taken = {name: f"pass it to torch's DataLoader, with dataloader_kwargs={{{name!r}: ...}}"}
        instead = not_taken.get(name) or retired(name, where) or nearest(name, names)
        raise ArgumentError(f"{where}() has no argument {name!r}: {instead}")
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(f"{where}(): {error}; arguments: {', '.join(names)}") from None
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if parameters[name].annotation in (bool, "bool"):
            check_switch(name, value)
        found |= value if parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return found, kwargs


def as_call(made: Any) -> str:
    """Return the call that made an object, with the arguments that were passed. Checked classes use it as `__repr__`.

    >>> from exogym.strategy import DiLoCoStrategy
    >>> DiLoCoStrategy(H=20, lr=0.01)
    DiLoCoStrategy(H=20, lr=0.01)
    """
    given = vars(made).get("given_arguments", {})
    short = reprlib.Repr()
    short.maxother = short.maxstring = 60  # letters of a value
    return f"{type(made).__name__}({', '.join(f'{name}={short.repr(value)}' for name, value in given.items())})"


def without_aliases(given: dict[str, Any], names: Collection[str], kept: Collection[str] = ()) -> dict[str, Any]:
    """Return the `given` arguments for a function with the parameters `names`, with aliases (`ALIASES`) replaced.

    Args:
        kept: aliases that are not replaced, because the function's signature has them.

    Raises:
        ArgumentError: an argument is passed under both names with different values, or its value is not allowed.
    """
    for alias in given.keys() & ALIASES.keys() - set(kept):
        name, values = ALIASES[alias]
        if name not in names:
            continue
        asked = given[alias]
        given = {other: value for other, value in given.items() if other != alias}
        if values:
            check_choice(alias, asked, values)
        value = values[asked] if values else asked
        if value is None:
            continue
        if given.get(name) is None:
            given[name] = value
        if given[name] != value:
            raise ArgumentError(
                f"{alias}={asked!r} means {name}={value!r}, but {name}={given[name]!r} was passed as well: drop one "
                "of them"
            )
    return given


def check_choice(name: str, given: Any, choices: Iterable[str]) -> None:
    """Raise ArgumentError unless `given` is one of `choices`."""
    choices = list(choices)
    if given not in choices:
        near = nearest(str(given), choices)
        more = f": {near}" if near.startswith("did") else ""
        raise ArgumentError(f"{name}={given!r} is not one of {', '.join(map(repr, choices))}{more}", choices=choices)


MOST_COUNT = 2**53  # the largest whole number that JSON readers keep exactly


def check_count(name: str, given: Any, least: int = 1) -> None:
    """Raise ArgumentError unless `given` is a whole number from `least` to 2^53."""
    if isinstance(given, bool) or not isinstance(given, int) or not least <= given <= MOST_COUNT:
        high = " and at most 2^53" if isinstance(given, int) and given > MOST_COUNT else ""
        raise ArgumentError(f"{name}={given!r} must be a whole number of at least {least}{high}")


def check_switch(name: str, given: Any) -> None:
    """Raise ArgumentError unless `given` is True or False."""
    if not isinstance(given, bool):
        raise ArgumentError(f"{name}={given!r} must be True or False")


def check_number(
    name: str, given: Any, *, over: float | None = None, least: float | None = None, under: float | None = None,
    most: float | None = None, more: str = "",
) -> None:  # fmt: skip
    """Raise ArgumentError, with a message that ends with `more`, unless `given` is a finite number in the range.

    >>> check_number("decay", 1.5, least=0, under=1, more=", or None")
    Traceback (most recent call last):
    ...
    exogym.errors.ArgumentError: decay=1.5 must be a number of at least 0 and under 1, or None
    """
    number: Any = given  # may be numpy's, too
    fits = isinstance(given, Real) and not isinstance(given, bool) and -math.inf < number < math.inf
    words = []
    for bound, text, holds in (
        (over, "over", operator.gt), (least, "of at least", operator.ge), (under, "under", operator.lt),
        (most, "at most", operator.le),
    ):  # fmt: skip
        if bound is not None:
            words.append(f"{text} {bound:g}")
            fits = fits and holds(number, bound)
    if not fits:
        raise ArgumentError(f"{name}={given!r} must be a number {' and '.join(words) or 'that is finite'}{more}")


def needs(module: str, extra: str | None = None) -> Any:
    """Import and return a module of an optional package.

    Raises:
        ExoGymError: the package is not installed. The message names ExoGym's extra that installs it, if there is one.

    >>> needs("surely_not_installed", "whisper")
    Traceback (most recent call last):
    ...
    exogym.errors.ExoGymError: the module surely_not_installed is not installed: pip install 'exogym[whisper]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        remedy = module if extra is None else f"'exogym[{extra}]'"
        raise ExoGymError(f"the module {module} is not installed: pip install {remedy}") from None
