"""Send an error from one process to another, as bytes."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence

from exogym.errors import TrainingError

MOST = 40_000  # characters of a traceback


def packed(error: BaseException) -> tuple[bytes, str]:
    """Return the pickled error and its traceback. A TrainingError with the same text replaces an unpicklable error."""
    text = "".join(traceback.format_exception(error))
    try:
        given = pickle.dumps(error)
        pickle.loads(given)
    except Exception:
        given = pickle.dumps(TrainingError(f"{type(error).__name__}: {error}"))
    return given, text[-MOST:]


def unpacked(given: bytes, text: str, who: str) -> BaseException:
    """Return the error that `packed` was given, with a note that says where it was raised.

    >>> unpacked(*packed(ValueError("no")), "worker process 1").__notes__[0].splitlines()
    ['raised in worker process 1:', 'ValueError: no']
    """
    error: BaseException = pickle.loads(given)
    error.add_note(f"raised in {who}:\n{text}")
    return error


def held(nodes: Sequence[int]) -> str:
    """Return a text that names the consecutive nodes `nodes`, for messages.

    >>> held([2, 3, 4]), held([7])
    ('nodes 2 to 4', 'node 7')
    """
    return f"nodes {nodes[0]} to {nodes[-1]}" if len(nodes) > 1 else f"node {nodes[0]}"
