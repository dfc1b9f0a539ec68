"""The command line as a page, written from the program that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer
from reference import escaped

from exogym.cli import app


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, command) of a command line and all below it, those that do something."""
    below = getattr(command, "commands", {})
    if not below:
        yield name, command
    for word, other in below.items():
        yield from commands(other, f"{name} {word}")


def command_line() -> str:
    """Return every command with its options, as its `--help` has them."""
    parts = []
    for name, command in commands(typer.main.get_command(app), "exogym"):
        with command.make_context(name, [], resilient_parsing=True) as context:
            usage = " ".join([name, *command.collect_usage_pieces(context)])
            records = [parameter.get_help_record(context) for parameter in command.params]
        told = [escaped(paragraph) for paragraph in (command.help or "").split("\n\n")]
        listed = [f"`{record[0]}`\n: {escaped(record[1]) or '(no description)'}" for record in records if record]
        parts.append("\n\n".join([f"## {name}", f"```text\n{usage}\n```", *told, *listed]))
    return "\n\n".join(parts)
