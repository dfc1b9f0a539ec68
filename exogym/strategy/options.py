"""Options that many constructors share. A typed dict names these options, and each default is written only once.

A constructor takes shared options by a typed dict behind `**`, which editors and type checkers show:

    def __init__(self, inner_optim: Any = "adamw", H: int = 10, **options: Unpack[InnerOptions]): ...

`defined` takes each option's default from the callables that use the typed dict's options. `taking` gives the
constructor a signature with the names of all options, so that it refuses any other name.

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

__all__ = ["Unpack", "arguments_of", "defined", "parameters_of", "signature_of", "split", "taking"]

_OPTIONS: dict[str, inspect.Parameter] = {}  # by name


def defined(kind: type, *uses: Callable[..., Any]) -> None:
    """Record the defaults of a typed dict's options: the defaults of the same arguments in `uses`.

    Known options stay unchanged. An alias has the default of its argument.

    Args:
        kind: the typed dict.
        *uses: callables whose arguments the options are.

    Raises:
        KeyError: an option is an argument of no callable in `uses`.
    """
    arguments = {name: p for use in uses for name, p in inspect.signature(use).parameters.items()}
    for name in kind.__annotations__.keys() - _OPTIONS.keys():
        _OPTIONS[name] = arguments[ALIASES.get(name, (name,))[0]].replace(
            name=name, kind=inspect.Parameter.KEYWORD_ONLY
        )


def parameters_of(kind: type) -> list[inspect.Parameter]:
    """Return the options of the typed dict `kind` as keyword-only `inspect.Parameter` objects."""
    return [_OPTIONS[name] for name in kind.__annotations__]


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of `function` with a typed dict's options instead of `**options: Unpack[...]`."""
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


def arguments_of(init: Callable[..., None]) -> inspect.Signature:
    """Return the signature of the constructor `init`, as `signature_of` does, without `self`."""
    signature = signature_of(init)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def taking(init: Callable[..., None]) -> Callable[..., None]:
    """Make a constructor accept exactly the arguments that `signature_of` returns, and their aliases (a decorator)."""
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
    """Split `options` into two dicts: those that the callable `use` takes, and all others."""
    names = _names(use)
    return (
        {name: value for name, value in options.items() if name in names},
        {name: value for name, value in options.items() if name not in names},
    )
