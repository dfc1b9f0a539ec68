"""Options that several commands share, and functions that read the values of options."""

from __future__ import annotations

import math
import os
import re
import sys
from typing import Annotated

import typer

from exogym.errors import ArgumentError, check_choice

INTERRUPTED = 130  # exit status after Ctrl-C
DATASETS = ("digits", "mnist", "shakespeare", "cifar10", "whisper", "language")
KEY_FILE = "~/.ssh/exogym_ed25519"
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback if an error occurs.")]
At = Annotated[
    list[str] | None,
    typer.Option("--at", metavar="IP[:PORT]", help="Address of a computer that mDNS does not find. Repeatable."),
]
KeyFile = Annotated[str, typer.Option(metavar="FILE", help="Private key for SSH, created if the file does not exist.")]
SSHConfig = Annotated[
    str | None, typer.Option(metavar="FILE", help="SSH config file, as for ssh -F. [default: your SSH config]")
]
FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "p": 1e15, "e": 1e18}
_COUNT = re.compile(r"(\d[\d_]*\.?\d*|\.\d+)(e[-+]?\d+)?([a-z]?)", re.IGNORECASE)


def count_of(option: str, text: str) -> float:
    """Read a number such as "124M", "1.3B", "6e14" or "2_410". K, M, B or G, T, P, E are powers of 1000.

    Raises:
        ArgumentError: `text` is not such a number, is not over 0, or is infinite.

    >>> count_of("--parameters", "124M"), count_of("--flops", "6e14")
    (124000000.0, 600000000000000.0)
    """
    match = _COUNT.fullmatch(text.strip())
    if match is None or match[3].lower() not in FACTORS:
        raise ArgumentError(f"{option}={text!r} must be a number such as 124M, 1.3B or 6e14")
    number = float(match[1].replace("_", "") + (match[2] or "")) * FACTORS[match[3].lower()]
    if not 0 < number < math.inf:
        raise ArgumentError(f"{option}={text!r} must be a finite number above 0")
    return number


def numbers_of(option: str, text: str | None) -> list[float] | None:
    """Read numbers such as "1,1,0.5", or return None without a text. Raise ArgumentError for anything else."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"{option}={text!r} must be numbers separated by commas, such as 1,1,0.5") from None


def processes_of(text: str) -> int | str:
    """Read a number of processes, or "auto".

    Raises:
        ArgumentError: `text` is neither "auto" nor a whole number of at least 1.

    >>> processes_of("auto"), processes_of("4")
    ('auto', 4)
    >>> processes_of("all")
    Traceback (most recent call last):
    ...
    exogym.errors.ArgumentError: --processes='all' must be a whole number of at least 1, or auto
    """
    if text == "auto":
        return text
    if not text.isdecimal() or not int(text):
        raise ArgumentError(f"--processes={text!r} must be a whole number of at least 1, or auto")
    return int(text)


def check_dataset(text: str) -> None:
    """Raise ArgumentError for an unknown task. "module:function" may name a module of the current folder."""
    if ":" not in text:
        check_choice("--dataset", text, DATASETS)
    elif os.getcwd() not in sys.path:  # as with python -m
        sys.path.insert(0, os.getcwd())
