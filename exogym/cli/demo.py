"""`exogym demo`: run a first comparison, and print its command."""

from __future__ import annotations

import shlex
from typing import Any

import typer

from exogym.progress import notice
from exogym.study.compare import DEFAULT_STRATEGIES

WORDS = ("--dataset", "digits", "--strategies", ",".join(DEFAULT_STRATEGIES), "--nodes", "4")
PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": ["-h", "--help"]}


def demo(context: typer.Context) -> None:
    """Compare six ways to train four nodes on 1,797 handwritten digits, in about half a minute.

    Prints an exogym compare command and runs it. Accepts the options of exogym compare.
    """
    words = [*WORDS, *context.args]
    notice(f"exogym compare {shlex.join(words)}")
    assert context.parent is not None
    commands: Any = context.parent.command
    commands.commands["compare"].main(words, prog_name="exogym demo", standalone_mode=False)
