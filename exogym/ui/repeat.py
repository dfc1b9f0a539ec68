"""Commands that repeat a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exogym.options import RunOptions

Row = dict[str, Any]


def command_of(about: Mapping[str, Any]) -> str:
    """Return the command line that started a run, quoted for a shell. Return "" if the command is unknown.

    >>> command_of({"command": ["/usr/bin/exogym", "compare", "--strategies", "ddp,diloco:H=5", "--name", "it's"]})
    'exogym compare --strategies ddp,diloco:H=5 --name \\'it\\'"\\'"\\'s\\''
    >>> command_of({"command": ["train.py", "--steps", "5"]})
    'python train.py --steps 5'
    """
    words = _words(about)
    if not words or words[0] in ("", "-c", "-"):
        return ""
    first = Path(words[0])
    if first.name == "exogym" or first.parts[-2:] == ("exogym", "__main__.py"):
        return shlex.join(["exogym", *words[1:]])
    return shlex.join(["python", *words])


def usual_of(description: Mapping[str, Any]) -> list[str]:
    """Return the options of a description that have their defaults, or what follows from these."""
    plain = RunOptions().values()
    same = [name for name, value in description.items() if name in plain and value == plain[name]]
    return [*same, *(name for name in ("reduction", "data", "placement", "chosen") if name in description)]


def _words(about: Mapping[str, Any]) -> list[str]:
    words = about.get("command")
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else []


def seeds_of(arguments: Mapping[str, Any]) -> list[int]:
    """Return the seeds of a comparison or sweep. Its `arguments` have a list of seeds, or the number of seeds."""
    seeds = arguments.get("seeds")
    return list(range(seeds)) if isinstance(seeds, int) else list(seeds or [])


def axes_lines(axes: Any) -> list[str]:
    """Return a sweep's axes in the form of its command.

    >>> axes_lines({"H": ["5", "10"], "network": ["wifi", "1Gbps,1ms"], "lr": "1e-4..1e-1"})
    ['H=5,10', 'network=wifi;1Gbps,1ms', 'lr=1e-4..1e-1']
    """
    return [f"{name}={_values(values)}" for name, values in (axes or {}).items()]


def _values(values: Any) -> str:
    if isinstance(values, str):
        return values
    return (";" if any("," in value for value in values) else ",").join(values)


def folder_of(about: Mapping[str, Any]) -> tuple[str, list[str]] | None:
    """Return (folder, command) of the script that started a run. Return None if the script does not exist."""
    words, folder = _words(about), about.get("folder")
    if not words or not isinstance(folder, str) or not words[0].endswith(".py"):
        return None
    return (folder, words) if (Path(folder) / words[0]).is_file() else None
