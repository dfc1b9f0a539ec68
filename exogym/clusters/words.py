"""Check the texts that go into job scripts and manifests, so that no text can act as code or as an option."""

from __future__ import annotations

import re

from exogym.errors import ArgumentError

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
LABEL = r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?"  # RFC 1123, with room for suffixes that the cluster appends
TIME = r"\d+|(\d+-)?\d+:\d{2}(:\d{2})?|\d+-\d+"
MEMORY = r"\d+[KMGT]?"
QUANTITY = r"\d+(\.\d+)?(m|[KMGTPE]i?)?"
IMAGE = r"[a-z0-9]([a-z0-9._/-]|:\d+/)*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?"


def check_word(name: str, given: str, pattern: str, wanted: str) -> None:
    """Raise ArgumentError unless the text `given` matches `pattern`.

    Args:
        name: the argument's name, for the message.
        wanted: description of a valid text, for the message.

    >>> check_word("partition", "gpu; rm -rf ~", NAME, "letters, digits, '.', '_' and '-'")
    Traceback (most recent call last):
    ...
    exogym.errors.ArgumentError: partition='gpu; rm -rf ~' must be letters, digits, '.', '_' and '-'
    """
    if not isinstance(given, str) or not re.fullmatch(pattern, given, re.ASCII):
        raise ArgumentError(f"{name}={given!r} must be {wanted}")


def check_arguments(words: tuple[str, ...]) -> None:
    """Raise ArgumentError if an argument contains a zero byte."""
    for word in words:
        if "\0" in word:
            raise ArgumentError(
                f"argument {word!r} contains a zero byte, which command lines cannot carry: leave it out"
            )
