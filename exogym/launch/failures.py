"""Which rank failed first, and what to say about it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def _recorded(failure: ProcessFailure) -> dict[str, str | float]:
    """Return what the rank wrote about its error: `message` and `time_s`; {} if it could write nothing."""
    message = failure.error_file_data.get("message")
    if not isinstance(message, dict):
        return {}
    extra = message.get("extraInfo", {})
    return {"message": message.get("message", ""), "time_s": float(extra.get("time_s", extra.get("timestamp", 0)))}


def first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return (rank, failure) of the one that the others follow from.

    A rank that died without a word (killed, crashed) comes first: the others' errors come of its silence. Then the
    earliest error. Last those that the launcher stopped.
    """

    def order(rank: int) -> tuple[int, float, int]:
        failure = failures[rank]
        if recorded := _recorded(failure):
            return 1, float(recorded["time_s"]), rank
        return (2 if failure.exitcode == -signal.SIGTERM else 0), failure.timestamp, rank

    rank = min(failures, key=order)
    return rank, failures[rank]


def exit_code(failure: ProcessFailure) -> int:
    """Return the exit code of the launch, as a shell would give it: 128 + the signal for a rank that was killed.

    A rank that was stopped while it was still ending from an error of its own counts as one that ended: 1.
    """
    if failure.exitcode == -signal.SIGTERM and _recorded(failure):
        return 1
    return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode


def describe(rank: int, failure: ProcessFailure, world_size: int | None, log_dir: Path | None) -> str:
    """Return one line on the failure, and where to read on."""
    recorded = _recorded(failure)
    if failure.exitcode < 0 and exit_code(failure) > 128:
        how = f"was killed by signal {-failure.exitcode} ({failure.signal_name()})"
    else:
        how = f"ended with exit code {exit_code(failure)}"
    text = f"rank {rank}{'' if world_size is None else f' of {world_size}'} {how}"
    if recorded:
        text += f": {str(recorded['message']).splitlines()[0]}"
    where = [f'above, after "[rank {rank}]"']
    if log_dir is not None:
        where.append(f"in {log_dir / f'training_rank_{rank}.log'}")
    return f"{text}; what it printed is {' and '.join(where)}"
