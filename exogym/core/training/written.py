"""Options of runs as text: the command line's shorter names, and each option's type and description."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from exogym.core.training.options import FitOptions, Placement, args_of

# What tools use, as `exogym.options`.
__all__ = ["LONG", "descriptions", "in_full", "placed", "written_as"]

# The command line has shorter names for these: --nodes, --steps, --partition.
LONG = {"nodes": "num_nodes", "steps": "max_steps", "partition": "partitioner"}


def in_full(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options under their Python names. The command line's shorter names are translated.

    >>> in_full({"nodes": 4, "H": 5})
    {'num_nodes': 4, 'H': 5}
    """
    return {LONG.get(name, name): value for name, value in options.items()}


def placed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in which those that belong to a `Placement` are in `placement`, as `fit` takes them.

    >>> placed({"num_nodes": 4, "max_restarts": 3})
    {'num_nodes': 4, 'placement': Placement(max_restarts=3)}
    """
    own = {field.name: options[field.name] for field in fields(Placement) if field.name in options}
    rest = {name: value for name, value in options.items() if name not in own}
    return rest | ({"placement": replace(rest.get("placement", Placement()), **own)} if own else {})


@functools.cache
def descriptions(options: Any) -> Mapping[str, str]:
    """Return the description of each option in `args_of`, by name.

    >>> descriptions(FitOptions)["log_interval"]
    'Steps between records.'
    """
    found: dict[str, str] = {}
    for entry in re.split(r"^    (?=\S)", args_of(options), flags=re.MULTILINE):
        names, _, text = " ".join(entry.split()).partition(": ")
        for name in names.split(", "):
            found.setdefault(name, text)
    return found


@functools.cache
def written_as(name: str) -> type | None:
    """Return the type to which the command line converts an option's text; None if text cannot express the option.

    >>> written_as("max_restarts"), written_as("hang_s"), written_as("balance"), written_as("faults")
    (<class 'int'>, <class 'float'>, <class 'str'>, None)
    """
    (annotation,) = (f.type for kind in (FitOptions, Placement) for f in fields(kind) if f.name == name)
    parts = str(annotation).split(" | ")
    return next((kind for kind in (int, float, bool, str) if kind.__name__ in parts), None)
