"""`python -m exogym.launch [options] script.py [script arguments]`.

The launcher's own options may come before or after the script's name. All other words after the script's name, and
everything after `--`, are the script's arguments. The exit status is 0, or the status of the first process that failed.
It is 2 for invalid arguments, 1 if the machines could not connect to each other, and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
from collections.abc import Sequence
from typing import Any

from exogym.core.base.streams import STDERR, fill_in
from exogym.errors import ArgumentError, ExoGymError, nearest
from exogym.machines.launch.config import LaunchConfig
from exogym.machines.launch.launcher import DistributedLauncher

HELP = {
    "nproc_per_node": (int, "number of processes on this machine"),
    "nnodes": (int, "number of machines; the launcher must be started once on each machine"),
    "node_rank": (int, "number of this machine, from 0 to nnodes - 1"),
    "master_addr": (str, "host name or address of machine 0, required if there are several machines"),
    "master_port": (
        int,
        "port of machine 0 to which the other machines connect (29500 for several machines, otherwise any free port)",
    ),
    "backend": (str, "backend for scripts whose init_process_group() names none: gloo or nccl"),
    "max_restarts": (int, "maximum number of times that all processes are restarted after a failure"),
    "monitor_interval": (float, "seconds between checks that all processes are still running"),
    "start_timeout": (int, "seconds to wait until the launchers of all machines have connected"),
    "log_dir": (str, "folder in which each rank's output is appended to training_rank_{rank}.log"),
}
ALIKE = 0.85  # a script's option this similar to a launcher's option counts as a typing error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ArgumentError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m exogym.launch",
        usage="%(prog)s [options] script.py [script arguments]\n       %(prog)s [options] -m module [arguments]",
        description="Run a script in several processes, on one or more machines.",
        epilog="Options can be given before or after the script; all words after -- are passed to the script. Each "
        "process finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment.",
        allow_abbrev=False,
    )
    for field in dataclasses.fields(LaunchConfig):
        kind, text = HELP[field.name]
        shown = "" if field.default is None else f" (default {field.default})"
        spellings = list(dict.fromkeys([f"--{field.name}", f"--{field.name.replace('_', '-')}"]))
        parser.add_argument(*spellings, dest=field.name, type=kind, default=field.default, help=text + shown)
    parser.add_argument(
        "-m", dest="module", metavar="MODULE", help="module to run instead of a script, as with python -m"
    )
    return parser


def split(words: Sequence[str]) -> tuple[list[str], str | None, bool, list[str]]:
    """Split a command line into (launcher's options, script or None, whether it is a module, the script's arguments).

    >>> split(["train.py", "--nproc_per_node=4", "--lr", "0.1"])
    (['--nproc_per_node=4'], 'train.py', False, ['--lr', '0.1'])
    >>> split(["--nnodes", "1", "train.py", "--", "--backend", "mine"])
    (['--nnodes', '1'], 'train.py', False, ['--backend', 'mine'])

    Raises:
        ArgumentError: an unknown option before the script, or a misspelled option after it.
    """
    own: list[str] = []
    script: str | None = None
    module, arguments = False, []
    known = [f"--{name}" for name in HELP]
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name = word.partition("=")[0].replace("-", "_").replace("__", "--", 1)
        if word == "--":
            if script is None and rest:
                script = rest.pop(0)
            arguments += rest
            break
        if name in known:
            own.append(word)
            if "=" not in word and rest:
                own.append(rest.pop(0))
        elif script is None and word == "-m":
            module, script = True, rest.pop(0) if rest else None
        elif script is None and word in ("-h", "--help"):
            own.append(word)
        elif script is None and word.startswith("-"):
            raise ArgumentError(f"unknown option {word.partition('=')[0]}: {nearest(name, known)}")
        elif script is None:
            script = word
        elif word.startswith("--") and (alike := difflib.get_close_matches(name, known, 1, ALIKE)):
            raise ArgumentError(
                f"{word.partition('=')[0]} after the script resembles {alike[0]}: correct it, or put -- before it "
                "if it belongs to the script"
            )
        else:
            arguments.append(word)
    return own, script, module, arguments


def main(words: Sequence[str] | None = None) -> int:
    """Run the launcher with the command-line arguments `words` (default: this process's). Return the exit status."""
    fill_in()
    try:
        own, script, module, arguments = split(sys.argv[1:] if words is None else words)
        options = vars(_parser().parse_args(own))
        del options["module"]
        if script is None:
            raise ArgumentError("no script: name a script, as in python -m exogym.launch --nproc_per_node 2 script.py")
        return DistributedLauncher(LaunchConfig(**options)).launch(script, *arguments, module=module)
    except KeyboardInterrupt:
        print("exogym.launch: interrupted", file=STDERR)
        return 130
    except ExoGymError as error:
        print("exogym.launch: error: " + " ".join(str(error).split()), file=STDERR)
        return 2 if isinstance(error, ArgumentError) else 1


if __name__ == "__main__":
    sys.exit(main())
