"""Standard streams that are closed, broken or know few letters: what is said there never ends a run."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Any

BROKEN_PIPE = 141  # exit status where nobody reads stdout any more: 128 + SIGPIPE, as of other commands
GONE = (errno.EPIPE, errno.EIO)  # nobody reads it any more, or its terminal was closed


def printable(text: str) -> str:
    """Return a text without what would steer a terminal.

    >>> printable("loss\\x1b[2Jgone")
    'loss?[2Jgone'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


class Stderr:
    """The stderr of the moment, as a file. What it cannot take is left out: a run has its results elsewhere.

    >>> print("exogym: going on", file=STDERR)
    """

    def write(self, text: str) -> int:
        stream: Any = sys.stderr
        try:
            stream.write(text)
        except UnicodeEncodeError as error:
            return self.write(text.encode(error.encoding, "replace").decode(error.encoding))
        except (AttributeError, OSError, ValueError) as error:  # there is none, it is gone or full, it was closed
            _leave(stream, error)
        return len(text)

    def flush(self) -> None:
        stream: Any = sys.stderr
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError) as error:
            _leave(stream, error)

    def isatty(self) -> bool:
        with contextlib.suppress(AttributeError, OSError, ValueError):
            return sys.stderr.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


STDERR: Any = Stderr()


def _leave(stream: Any, error: BaseException) -> None:
    """Let a standard stream that is gone lead nowhere, so that neither later writes nor the end of Python fail."""
    if isinstance(error, OSError) and error.errno in GONE and stream in (sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def is_stdout_gone() -> bool:
    """Say whether nobody reads stdout any more, as behind `| head`; then what is written there goes nowhere."""
    try:
        sys.stdout.flush()
    except OSError as error:
        _leave(sys.stdout, error)
        return error.errno in GONE
    return False


def fill_in() -> None:
    """Give this process the null device for standard streams that it was started without.

    Else the next files that it opens would take their numbers, and what others write to stderr would land in them.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(number, True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def replace_letters() -> None:
    """Let stdout print "?" for a letter that it does not know, as in ASCII, where it would raise an error."""
    stream: Any = sys.stdout
    if getattr(stream, "errors", None) == "strict":
        stream.reconfigure(errors="replace")


def flush() -> None:
    """Write out what stdout and stderr hold back: a fork would write it a second time."""
    STDERR.flush()
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
