"""Write output without ending the run even if a standard stream is closed, broken, or can't encode a character."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Any

BROKEN_PIPE = 141  # exit status when nobody reads stdout any more: 128 + SIGPIPE, as in other commands
GONE = (errno.EPIPE, errno.EIO)  # it has no reader any more, or its terminal was closed


def printable(text: str) -> str:
    """Return a text in which "?" replaces each control character, which a terminal would execute.

    >>> printable("loss\\x1b[2Jgone")
    'loss?[2Jgone'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


class Stderr:
    """The current `sys.stderr`, as a file that raises no errors. Text that cannot be written is dropped.

    >>> print("exogym: going on", file=STDERR)
    """

    def write(self, text: str) -> int:
        stream: Any = sys.stderr
        try:
            stream.write(text)
        except UnicodeEncodeError as error:
            return self.write(text.encode(error.encoding, "replace").decode(error.encoding))
        except (AttributeError, OSError, ValueError) as error:  # stderr is missing, gone, full or closed
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


STDERR: Any = Stderr()  # the current `sys.stderr`, as a file that raises no errors


def _leave(stream: Any, error: BaseException) -> None:
    """Redirect a lost standard stream to the null device, so that later writes and Python's exit succeed."""
    if isinstance(error, OSError) and error.errno in GONE and stream in (sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def is_stdout_gone() -> bool:
    """Return whether stdout has no reader any more, as after `| head`, and redirect it to the null device if so."""
    try:
        sys.stdout.flush()
    except OSError as error:
        _leave(sys.stdout, error)
        return error.errno in GONE
    return False


def fill_in() -> None:
    """Open the null device for each missing standard stream.

    Otherwise the next opened files would get the streams' numbers, and libraries would write error messages into them.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            os.set_inheritable(number, True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def replace_letters() -> None:
    """Make stdout print "?" for characters that its encoding doesn't have, instead of raising an error."""
    stream: Any = sys.stdout
    if getattr(stream, "errors", None) == "strict":
        stream.reconfigure(errors="replace")


def flush() -> None:
    """Flush stdout and stderr, because a fork would write buffered text a second time."""
    STDERR.flush()
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
