"""One node's batches for a loop of the user, dealt as `LocalTrainer.fit` deals them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from exogym.core.base.batches import batch_examples, micro_batches, slice_batch
from exogym.core.combinations import check
from exogym.data.stream import UNKNOWN, Stream
from exogym.errors import ArgumentError, DataError, check_count, check_switch
from exogym.strategy.strategy import Strategy


class NodeLoader:
    """Yield a node's batches of one epoch, for one node's loop. `Nodes.loader` makes this object.

    An iteration begins at the node's current step and ends with the epoch. So after a resume, the first iteration
    yields the rest of the interrupted epoch. If an iterable has no length, an iteration has no end.

    Args:
        stream: the batches of all nodes.
        node: the node's rank.
        batches_per_step: batches of one optimizer step. If it is 1, an item is a batch. Otherwise an item is a list of
            the step's batches.
        step: a function that returns the node's number of steps so far.
        share: (k, n): yield the k-th of n equal parts of each batch. A node of n processes has n parts.

    >>> loader = NodeLoader(Stream(list(range(8)), 2, batch_size=2, shuffle=False), node=1, step=lambda: 0)
    >>> len(loader), [batch.tolist() for batch in loader]
    (2, [[1, 3], [5, 7]])
    """

    def __init__(
        self, stream: Stream, node: int, batches_per_step: int = 1, step: Callable[[], int] = lambda: 0,
        share: tuple[int, int] = (0, 1),
    ):  # fmt: skip
        self.stream, self.node, self.batches_per_step, self._step = stream, node, batches_per_step, step
        self.share = share

    def __len__(self) -> int:
        """Return the steps of an epoch.

        Raises:
            ArgumentError: the data are an iterable without a length. (It is also a TypeError, so `list` and progress
                bars do without the number.)
        """
        if self.stream.endless:
            raise ArgumentError(
                "len(loader): the data are an iterable without a length, so an epoch's steps are unknown: give "
                "exogym.data.IterableData(dataset, length=...), or count the steps in your loop"
            )
        return self.stream.steps_per_epoch

    def steps(self) -> Iterator[Any]:
        """Yield the examples of each step as one batch."""
        first, epoch = self._step(), self.stream.steps_per_epoch or UNKNOWN
        batches = self.stream.batches(self.node, first, epoch - first % epoch)
        return batches if self.share == (0, 1) else map(self._part, batches)

    def __iter__(self) -> Iterator[Any]:
        batches = self.steps()
        if self.batches_per_step == 1:
            return batches
        size = self.stream.batch_size // self.batches_per_step // self.share[1]
        return ([part for part, _ in micro_batches(batch, size)] for batch in batches)

    def _part(self, batch: Any) -> Any:
        """Return this process's part of the node's batch."""
        (k, parts), total = self.share, batch_examples(batch)
        if total % parts:
            raise DataError(
                f"a batch of node {self.node} has {total} examples, which its {parts} processes cannot share evenly: "
                "give each node at least batch_size examples"
            )
        return slice_batch(batch, k * total // parts, (k + 1) * total // parts)


def stream_of_node(
    dataset: Any, strategy: Strategy, num_nodes: int, seed: int, *, parts: int = 1, batch_size: int,
    gradient_accumulation: int, shuffle: bool, partitioner: Any, dataloader_kwargs: dict[str, Any] | None,
) -> Stream:  # fmt: skip
    """Return the stream that deals `dataset` to the nodes, for the loops of nodes of `parts` processes.

    Raises:
        ArgumentError: an argument is wrong, the strategy cannot train on these data, or a node's processes cannot share
            its batches evenly.
        DataError: `dataset` cannot be used.
    """
    check_count("batch_size", batch_size)
    check_count("gradient_accumulation", gradient_accumulation)
    check_switch("shuffle", shuffle)
    if batch_size % parts:
        raise ArgumentError(
            f"batch_size={batch_size} over the {parts} processes of a node is not even, so the mean of their losses "
            f"would weigh examples differently: give a multiple of {parts}"
        )
    stream = Stream(
        dataset, num_nodes, batch_size=batch_size * gradient_accumulation, seed=seed, shuffle=shuffle,
        partitioner=partitioner, dataloader_kwargs=dataloader_kwargs,
    )  # fmt: skip
    if stream.iterates:
        found = stream.features()
        found.pop("one iterable for all nodes", None)
        check(strategy.features() | found)
    elif left := [n for n in stream.last_batches.tolist() if n % parts]:
        raise ArgumentError(
            f"a node's last batch of an epoch has {left[0]} examples, which its {parts} processes cannot share evenly: "
            f"give a data set whose length is a multiple of {parts * num_nodes} (nodes x processes), such as "
            "torch.utils.data.Subset(dataset, range(n))"
        )
    return stream
