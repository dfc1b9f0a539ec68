"""Options that many constructors take: written once where they are used, and named by a typed dict everywhere else.

A constructor that passes options on names them by a typed dict, which editors and type checkers show:

    def __init__(self, inner_optim: Any = "adamw", H: int = 10, **options: Unpack[AveragingOptions]): ...

`defined` says which callables use a typed dict's options; their defaults come from there. `taking` gives the
constructor a signature with all names, and refuses any other name.

>>> import inspect
>>> from typing import TypedDict, Unpack
>>> class Brush(TypedDict, total=False):
...     width: int
>>> def paint(width: int = 3): return f"{width} wide"
>>> defined(Brush, paint)
>>> class Wall:
...     @taking
...     def __init__(self, colour: str, **options: Unpack[Brush]):
...         self.coat = colour + ", " + paint(**options)
>>> Wall("red", width=4).coat, str(inspect.signature(Wall))
('red, 4 wide', "(colour: 'str', *, width: 'int' = 3)")
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Unpack, get_args, get_origin

from exogym.errors import ALIASES, checked, without_aliases

__all__ = ["Unpack", "defined", "parameters_of", "signature_of", "split", "taking"]

_OPTIONS: dict[str, inspect.Parameter] = {}  # by name


def defined(kind: type, *uses: Callable[..., Any]) -> None:
    """Record that the options of the typed dict `kind`, except known ones, are arguments of `uses`.

    An alias has the default of the argument for which it stands.

    Raises:
        KeyError: an option is an argument of none of `uses`.
    """
    arguments = {name: p for use in uses for name, p in inspect.signature(use).parameters.items()}
    for name in kind.__annotations__.keys() - _OPTIONS.keys():
        _OPTIONS[name] = arguments[ALIASES.get(name, (name,))[0]].replace(
            name=name, kind=inspect.Parameter.KEYWORD_ONLY
        )


def parameters_of(kind: type) -> list[inspect.Parameter]:
    """Return the options of a typed dict as parameters."""
    return [_OPTIONS[name] for name in kind.__annotations__]


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of `function`, with the options of `**options: Unpack[...]` in its place."""
    given = inspect.signature(function)
    parameters = list(given.parameters.values())
    last = parameters[-1] if parameters else None
    if last is None or last.kind is not last.VAR_KEYWORD or last.annotation is last.empty:
        return given
    kind = last.annotation
    if isinstance(kind, str):
        kind = eval(kind, getattr(function, "__globals__", {}))
    if get_origin(kind) is not Unpack:
        return given
    return given.replace(parameters=[*parameters[:-1], *parameters_of(get_args(kind)[0])])


def taking(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that takes exactly the arguments of `signature_of`, and their aliases."""
    signature = signature_of(init)

    @functools.wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **without_aliases(kwargs, signature.parameters))

    call.__signature__ = signature  # type: ignore[attr-defined]
    return checked(call)


@functools.cache
def _names(use: Callable[..., Any]) -> frozenset[str]:
    return frozenset(signature_of(use).parameters)


def split(options: Mapping[str, Any], use: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that are arguments of `use`, and the others."""
    names = _names(use)
    return (
        {name: value for name, value in options.items() if name in names},
        {name: value for name, value in options.items() if name not in names},
    )
