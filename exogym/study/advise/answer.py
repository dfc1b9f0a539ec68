"""The answer of `exogym advise` in three lines: the command to run, the time that the run takes, and the reason."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import Any

TRIAL_STEPS, TRIAL_NODES, TRIAL_PARAMETERS = 400, 100, 2410  # least steps, most nodes, size of a trial on digits


@dataclass(frozen=True)
class Answer:
    """The answer of `exogym advise`. `print` shows three lines.

    Attributes:
        run: a command that can be pasted into a terminal.
        takes: the time of the run.
        because: the reason, as one sentence.

    >>> print(Answer("exogym compare --strategies ddp", "2 min for 1000 steps", "it is the only strategy"))
    run: exogym compare --strategies ddp
    takes: 2 min for 1000 steps
    because it is the only strategy
    """

    run: str
    takes: str
    because: str

    def __str__(self) -> str:
        return f"run: {self.run}\ntakes: {self.takes}\nbecause {self.because}"


def command(*words: str, **options: Any) -> str:
    """Return an `exogym` command. An option that is None is left out.

    >>> command("compare", dataset="digits", strategies="ddp,diloco:H=50", nodes=4, data=None)
    'exogym compare --dataset digits --strategies ddp,diloco:H=50 --nodes 4'
    """
    given = [(f"--{name.replace('_', '-')}", value) for name, value in options.items() if value is not None]
    return " ".join(["exogym", *map(shlex.quote, words), *(f"{name} {shlex.quote(str(x))}" for name, x in given)])


def beside_ddp(strategy: str) -> str:
    """Return the list of strategies that compares a strategy with DDP.

    >>> beside_ddp("diloco:H=50"), beside_ddp("ddp")
    ('ddp,diloco:H=50', 'ddp')
    """
    return strategy if strategy.partition(":")[0] == "ddp" else f"ddp,{strategy}"


def trial(strategy: str, num_nodes: int, couples_every: float) -> str:
    """Return a command that tries a strategy on a small task, for advice about a model that ExoGym does not have.

    >>> trial("diloco:H=500", 4, 500)
    'exogym compare --dataset digits --strategies ddp,diloco:H=500 --nodes 4 --steps 1000 --seeds 1'
    """
    rounds = 2 * math.ceil(couples_every) if math.isfinite(couples_every) else 0
    return command(
        "compare", dataset="digits", strategies=beside_ddp(strategy), nodes=num_nodes,
        steps=max(TRIAL_STEPS, rounds), seeds=1,
    )  # fmt: skip
