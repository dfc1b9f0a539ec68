"""`python -m research`: the commands of the studies."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from exogym import cli

COMMANDS = {
    "reproduce": ("research.commands.reproduce", "Test claims of papers in small runs."),
    "benchmark": ("research.commands.benchmark", "Measure bytes, quality and speed of every method."),
    "judge": ("research.commands.judge", "Judge advice on the trainings of a table."),
}
app = cli.application(COMMANDS, "Train the project's own studies again, and write their pages.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        arguments: the command and its options. None means the process's own arguments.
    """
    return cli.main(arguments, app, "python -m research")


if __name__ == "__main__":
    sys.exit(main())
