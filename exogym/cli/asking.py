"""Questions in the terminal. Each question can also be answered by an option of the command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO, TypeVar

from rich.console import Console

from exogym.errors import ArgumentError
from exogym.progress import notice

T = TypeVar("T")
PLAIN_WIDTH = 160  # without a terminal


def console_on(file: TextIO) -> Console:
    """Return a console for tables. If `file` is no terminal, the console is wide and has no colors."""
    console = Console(file=file, highlight=False)
    return console if console.is_terminal else Console(file=file, highlight=False, width=PLAIN_WIDTH, color_system=None)


def say(text: str) -> None:
    """Print `text`. A terminal breaks its lines between words."""
    console = Console(file=sys.stdout, highlight=False)
    console.print(text, markup=False, soft_wrap=not console.is_terminal)


class Asker:
    """Asks the questions that no option has answered. Without a terminal, prints and returns the default.

    Raises (from each question):
        ArgumentError: there is no terminal and no default; the message names the option.
        KeyboardInterrupt: Ctrl-C.
    """

    def __init__(self) -> None:
        self.can_ask = sys.stdin.isatty() and sys.stdout.isatty()

    def choose(self, flag: str, question: str, choices: Mapping[T, str], default: T | None = None) -> T:
        """Ask for one of `choices`, a dict {value: text}. Return the chosen value."""
        if not self.can_ask:
            return self._without(flag, question, default)
        import questionary

        listed = [questionary.Choice(text, value=value) for value, text in choices.items()]
        chosen = next((choice for choice in listed if choice.value == default), None)
        answer: T = questionary.select(question, choices=listed, default=chosen).unsafe_ask()
        return answer

    def several(self, flag: str, question: str, choices: Mapping[T, str]) -> list[T]:
        """Ask for some of `choices`, a dict {value: text}. All are selected at first. Return the chosen values."""
        if not self.can_ask:
            return self._without(flag, question, None)
        import questionary

        listed = [questionary.Choice(text, value=value, checked=True) for value, text in choices.items()]
        answer: list[T] = questionary.checkbox(
            question, choices=listed, validate=lambda found: bool(found) or "choose at least one, with the space bar"
        ).unsafe_ask()
        return answer

    def text(self, flag: str, question: str, read: Callable[[str], T], default: str | None = None) -> T:
        """Ask for a text, and return `read(text)`. If `read` raises ArgumentError, ask again."""
        if not self.can_ask:
            return read(self._without(flag, question, default))
        import questionary

        def is_good(text: str) -> bool | str:
            try:
                read(text)
            except ArgumentError as error:
                return str(error)
            return True

        return read(questionary.text(question, default=default or "", validate=is_good).unsafe_ask())

    def sure(self, question: str, default: bool = True) -> bool:
        """Ask a question with yes or no, and return whether the answer is yes. Without a terminal, return False."""
        if not self.can_ask:
            return False
        import questionary

        return bool(questionary.confirm(question, default=default).unsafe_ask())

    def _without(self, flag: str, question: str, default: Any) -> Any:
        if default is None:
            raise ArgumentError(f"{question} Without a terminal, pass {flag}")
        notice(f"{flag} {default}")
        return default


def count(text: str) -> int:
    """Read a whole number of at least 1.

    Raises:
        ArgumentError: `text` is not such a number.

    >>> count(" 300 ")
    300
    """
    if not text.strip().isdecimal() or int(text) < 1:
        raise ArgumentError(f"{text.strip()!r} must be a whole number of at least 1")
    return int(text)


def pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """Read the texts NAME=CODE, given for an option, into a dict.

    Raises:
        ArgumentError: a text has no "=".

    >>> pairs("--code", ["den=123-456"])
    {'den': '123-456'}
    """
    for text in given:
        if "=" not in text:
            raise ArgumentError(f"{option}={text!r} must be NAME=CODE, for example {option} studio=123-456")
    return dict(text.split("=", 1) for text in given)
