"""Find steps that compute a single example at once, on which batch normalization cannot train."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from exogym.data.stream import UNKNOWN, Stream
from exogym.errors import DataError

NAMED = 5  # nodes in a message


def single(stream: Stream, nodes: Sequence[int], steps: int = UNKNOWN, micro: int | None = None) -> str | None:
    """Return which of `nodes` compute a single example at once and what to do, or None if no node does.

    Args:
        stream: the data. Nodes whose number of examples is unknown are left out.
        steps: the number of steps that a node takes, which decides whether the short last batch of an epoch counts.
        micro: examples computed at once. None means all examples of a batch.

    >>> stream = Stream(range(18), 2, batch_size=4)
    >>> single(stream, [0, 1], steps=2) is None
    True
    >>> str(single(stream, [0, 1], steps=3)).partition(":")[0]
    'nodes 0, 1 get 1 example at the end of an epoch (9 examples in batches of 4)'
    """
    ids = np.asarray(nodes, dtype=np.int64)
    ids = ids[stream.examples[ids] > 0]
    counts, sizes = stream.examples[ids], stream.batch_sizes[ids]
    usual, last = np.minimum(counts, sizes), stream.last_batches[ids]

    def are_single(batches: np.ndarray) -> np.ndarray:
        """Return whether each batch's smallest part is a single example."""
        if micro is None:
            return batches == 1
        rest = np.where(batches > micro, batches % micro, batches)
        return np.where(rest, rest, micro) == 1

    if len(found := ids[sizes == 1]):
        return f"{_named(found, 'take')} 1 example per step: use a larger batch_size"
    if len(found := ids[counts == 1]):
        return f"{_named(found, 'have')} 1 example in all: provide more examples, or leave out such nodes"
    if (odd := are_single(usual)).any():
        return (
            f"{_named(ids[odd], 'compute')} 1 example at once ({usual[odd][0]} examples in parts of {micro}): give "
            "another minibatch_size or batch_size"
        )
    odd = are_single(last)
    odd[odd] = [stream.own_steps(node) <= steps for node in ids[odd].tolist()]
    if odd.any():
        parts = "" if micro is None else f", in parts of {micro}"
        return (
            f"{_named(ids[odd], 'get')} 1 example at the end of an epoch ({counts[odd][0]} examples in batches of "
            f'{sizes[odd][0]}{parts}): give dataloader_kwargs={{"drop_last": True}}, so that each node drops its '
            "short last batch"
        )
    return None


def check_single(stream: Stream, nodes: Sequence[int], steps: int = UNKNOWN, micro: int | None = None) -> None:
    """Raise DataError if batch normalization would get a single example, for the arguments of `single`."""
    if (said := single(stream, nodes, steps, micro)) is not None:
        raise DataError(
            f"batch normalization needs at least 2 examples at once, but {said}; or replace it, for example by "
            "torch.nn.GroupNorm"
        )


def _named(nodes: np.ndarray, verb: str) -> str:
    """Return the numbers of the first nodes with a verb.

    >>> _named(np.array([3]), "get"), _named(np.arange(7), "have")
    ('node 3 gets', 'nodes 0, 1, 2, 3, 4 and 2 more have')
    """
    if len(nodes) == 1:
        return f"node {nodes[0]} {'has' if verb == 'have' else verb + 's'}"
    more = f" and {len(nodes) - NAMED:,} more" if len(nodes) > NAMED else ""
    return f"nodes {', '.join(map(str, nodes[:NAMED].tolist()))}{more} {verb}"
