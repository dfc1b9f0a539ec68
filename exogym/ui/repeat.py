"""Commands and Python snippets that repeat a run."""

from __future__ import annotations

import pprint
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exogym.errors import ArgumentError
from exogym.options import RunOptions, in_full, placed
from exogym.study.compare.asked import PASSED_AS_TEXT
from exogym.study.compare.folder import Folder
from exogym.study.runs import what_is
from exogym.study.sweep.axes import arguments_of

OF_A_COMPARISON = (
    *("data", "num_nodes", "max_steps", "batch_size", "lr", "partitioner", "device", "network", "step_seconds"),
    *("speeds", "target_loss", "val_size", "val_interval"),
)
OF_A_FOLDER = ("max_restarts", "client_state_memory")  # these need a folder, which the code does not give
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


def snippet_of(path: Path, about: Mapping[str, Any]) -> str:
    """Return Python code that repeats the run in the folder `path`. Return "" if this is not possible.

    For a run of a comparison or sweep, the code is a comparison of one strategy with one seed. For any other run, the
    code runs the run's script again.
    """
    kind, above = what_is(path.parent)
    given = above.get("arguments")
    if kind != "run" and given is not None and given.get("problem") is not None:
        try:
            return _comparison(path, kind, above, given)
        except ArgumentError:  # not a valid cell
            return ""
    words, folder = _words(about), about.get("folder")
    if not words or not words[0].endswith(".py") or not isinstance(folder, str) or Path(words[0]).name == "__main__.py":
        return ""
    return (
        "import os\nimport runpy\nimport sys\n\n"
        f"os.chdir({folder!r})\nsys.argv = {words!r}\n"
        "# The script's run_dir holds this run: change it to a new folder.\n"
        f"runpy.run_path({words[0]!r}, run_name='__main__')\n"
    )


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


def _comparison(path: Path, kind: str, above: Row, given: Row) -> str:
    """Return Python code that repeats one run of a comparison or sweep. "" if the folder is not its run."""
    entries: Row = above.get("cells" if kind == "sweep" else "strategies") or {}
    known = Folder(path.parent, entries)
    found = [(label, seed) for label in entries for seed in seeds_of(given) if known.child(label, seed) == path]
    if not found:
        return ""
    strategy, seed = found[0]
    own: Row = {}
    if kind == "sweep":
        strategy, own = arguments_of(in_full(entries[strategy]), str(given.get("strategy")))
    given = in_full(given)
    plain = RunOptions().values()  # options of runs with their defaults
    objects = [n for n in plain if n not in PASSED_AS_TEXT or isinstance(given.get(n), dict)]
    if any(given.get(name) is not None for name in objects):
        return ""  # an object cannot be written as text, such as `faults`
    names = [name for name in (*OF_A_COMPARISON, *PASSED_AS_TEXT) if name not in OF_A_FOLDER]
    options: Row = {name: given[name] for name in names if given.get(name) not in (None, plain.get(name))}
    options = placed(options | {name: value for name, value in own.items() if name not in OF_A_FOLDER})
    words = [repr(given["problem"]), repr(strategy), f"seeds=[{seed}]"]
    words += [f"{name}={pprint.pformat(value)}" for name, value in options.items()]
    imported = "from exogym import Placement\n" if "placement" in options else ""
    return (
        f"{imported}from exogym.compare import compare\n\n"
        f"result = compare(\n    {', '.join(words[:2])},\n    {', '.join(words[2:])},\n)\n"
        "print(result.rows[0]['val_loss'])\n"
    )


def folder_of(about: Mapping[str, Any]) -> tuple[str, list[str]] | None:
    """Return (folder, command) of the script that started a run. Return None if the script does not exist."""
    words, folder = _words(about), about.get("folder")
    if not words or not isinstance(folder, str) or not words[0].endswith(".py"):
        return None
    return (folder, words) if (Path(folder) / words[0]).is_file() else None
