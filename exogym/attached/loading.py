"""One node's batches for a user's training loop, distributed as `LocalTrainer.fit` distributes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from exogym.core.base.batches import batch_examples, micro_batches, slice_batch
from exogym.core.combinations import check
from exogym.data.stream import UNKNOWN, Stream
from exogym.errors import ArgumentError, DataError, check_count, check_switch
from exogym.strategy.strategy import Strategy


class NodeLoader:
    """Yield a node's batches of one epoch for its training loop. `Nodes.loader` creates this object.

    An iteration begins at the node's current step and ends with the epoch, so after a resume, the first iteration
    yields the rest of the interrupted epoch. Over an iterable without a length, an iteration doesn't end.

    Args:
        stream: the batches of all nodes.
        node: the node's rank.
        batches_per_step: batches of one optimizer step. If it is 1, an item is a batch; otherwise it is a list of the
            step's batches.
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
        """Return the number of steps in an epoch.

        Raises:
            ArgumentError: the data set is an iterable without a length. (ArgumentError is also a TypeError, so `list`
                and progress bars do without the length.)
        """
        if self.stream.endless:
            raise ArgumentError(
                "len(loader): the data set is an iterable without a length, so the number of steps in an epoch is "
                "unknown: pass exogym.data.IterableData(dataset, length=...), or count the steps in your loop"
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
                "use a data set with at least batch_size examples per node"
            )
        return slice_batch(batch, k * total // parts, (k + 1) * total // parts)


def stream_of_node(
    dataset: Any, strategy: Strategy, num_nodes: int, seed: int, *, parts: int = 1, batch_size: int,
    gradient_accumulation: int, shuffle: bool, partitioner: Any, dataloader_kwargs: dict[str, Any] | None,
) -> Stream:  # fmt: skip
    """Return the stream that distributes `dataset` to nodes of `parts` processes each.

    Raises:
        ArgumentError: an argument is wrong, the strategy can't train on the data set, or a node's processes can't share
            its batches evenly.
        DataError: `dataset` cannot be used.
    """
    check_count("batch_size", batch_size)
    check_count("gradient_accumulation", gradient_accumulation)
    check_switch("shuffle", shuffle)
    if batch_size % parts:
        raise ArgumentError(
            f"batch_size={batch_size} cannot be divided evenly over the {parts} processes of a node, so the mean of "
            f"their losses would weight examples differently: pass a multiple of {parts}"
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
            f"a node's last batch of an epoch has {left[0]} examples, which its {parts} processes cannot share "
            f"evenly: pass a data set whose length is a multiple of {parts * num_nodes} (nodes x processes), such as "
            "torch.utils.data.Subset(dataset, range(n))"
        )
    return stream
