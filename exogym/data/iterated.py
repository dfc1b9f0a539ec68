"""Iterables, read in order: deal their examples to nodes, and return any node's batch at any of its steps.

An iterable's order is fixed, so a batch is a pure function of the node and its step, as for other data. The stored
place in the iterable and the queued examples of other nodes only avoid reading again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from exogym.core.base import rng
from exogym.core.base.devices import CPU
from exogym.core.base.rng import stream_seed
from exogym.core.fleet.fleet import Fleet
from exogym.core.fleet.state import Shared, Stateful, Tensors
from exogym.data.loading import joined
from exogym.data.reading import AHEAD, Reader, bytes_of, described
from exogym.errors import DataError

KEPT_BYTES = 2**28  # of queued examples, which a process has read for its other nodes


class Dealer:
    """Deal a reader's examples to nodes: node i gets the next `parts[i]` of every sum(parts) examples (a row).

    Examples for other nodes of this process are queued. If a node asks for an example that has left its queue, the
    reader goes back.

    Args:
        reader: the reader.
        parts: examples of each node in a row, by node.
        here: the nodes whose examples are queued. Other nodes are added when they ask.

    >>> from exogym.data import IterableData
    >>> dealer = Dealer(Reader(IterableData(range(100)), 0, shuffle=False), {0: 1, 1: 2}, here=[0, 1])
    >>> dealer.take(0, 0, 3), dealer.take(1, 2, 4), dealer.take(0, 1, 1)
    ([0, 3, 6], [4, 5, 7, 8], [3])
    """

    def __init__(self, reader: Reader, parts: Mapping[int, int], here: Iterable[int]):
        self.reader, self.parts, self.width = reader, parts, sum(parts.values())
        self.starts = dict(zip(parts, np.cumsum([0, *parts.values()])[:-1].tolist(), strict=True))
        self.row = 0
        self.most: int | None = None  # of a node's queued examples
        self.queues: dict[int, deque[Any]] = {node: deque() for node in here}
        self.heads = dict.fromkeys(self.queues, 0)  # the number of a queue's first example, among its node's examples

    def take(self, node: int, at: int, count: int) -> list[Any]:
        """Return `count` of the node's examples, starting at its example number `at`."""
        part = self.parts[node]
        if node not in self.queues:
            self.queues[node], self.heads[node] = deque(), self.row * part
        if at < self.heads[node]:
            self.go_to(at // part)
        queue, end = self.queues[node], at + count
        while True:
            passed = min(at - self.heads[node], len(queue))
            for _ in range(passed):
                queue.popleft()
            self.heads[node] += passed
            lacking = end - self.heads[node] - len(queue)
            if lacking <= 0:
                break
            self._read(min(-(-lacking // part), max(1, AHEAD // self.width)), max(count, 1) + part)
        self.heads[node] += count
        return [queue.popleft() for _ in range(count)]

    def go_to(self, row: int) -> None:
        """Go to a row, and clear the queues."""
        self.reader.seek(row * self.width)
        self.row = row
        for node, queue in self.queues.items():
            queue.clear()
            self.heads[node] = row * self.parts[node]

    def load(self, mark: Tensors) -> None:
        """Go to the first whole row after the place that the reader's `mark` returned."""
        self.reader.load(mark)
        self.go_to(-(-self.reader.first // self.width))

    def _read(self, rows: int, asked: int) -> None:
        read, most = self.reader.read(rows * self.width), None if self.most is None else max(self.most, asked + AHEAD)
        for node, queue in self.queues.items():
            start, part = self.starts[node], self.parts[node]
            if part == 1:
                queue.extend(read[start :: self.width])
            else:
                for first in range(start, len(read), self.width):
                    queue.extend(read[first : first + part])
            while most is not None and len(queue) > most:
                queue.popleft()
                self.heads[node] += 1
        self.row += rows


class Iterated:
    """The batches of every node at every step, from one iterable for all nodes or one per node.

    One iterable: its epochs follow each other without a gap, and example k goes to node k mod N. If nodes' batch sizes
    b differ, node i gets the next b_i / g of every sum(b) / g examples, where g is their greatest common divisor. Every
    process reads the whole iterable, every epoch has each example exactly once, and no batch is short.

    One iterable per node: each node restarts its iterable at the end of an epoch.

    Args:
        datasets: a list of the one iterable, or an iterable per node (`exogym.data.made.Made`).
        own: whether each node has its own iterable.
        collate: a function that collates examples into a batch. Default: torch's `default_collate`.
        kept: the number of nodes' own iterables that stay open. Default: all.
    """

    def __init__(
        self, datasets: Any, num_nodes: int, own: bool, batch_sizes: Any, seed: int, shuffle: bool, collate: Any = None,
        kept: int | None = None, is_train: bool = True,
    ):  # fmt: skip
        self.datasets, self.num_nodes, self.own, self.seed, self.shuffle = datasets, num_nodes, own, seed, shuffle
        self.collate, self.kept, self.is_train = collate, kept, is_train
        self.here: Sequence[int] = range(num_nodes)
        self.example_bytes = 0  # the largest of the first batch
        self._openings: dict[int, int | None] = {}  # the sums of iterables' first examples
        self._marks: dict[int, Tensors] = {}  # places to go to when a node asks
        self._dealers: OrderedDict[int, Dealer] = OrderedDict()
        self.share_out(batch_sizes)

    def share_out(self, batch_sizes: Any) -> None:
        if self._dealers:
            self.close()
        self.sizes = [int(size) for size in batch_sizes]
        self.parts = [size // int(np.gcd.reduce(self.sizes)) for size in self.sizes]

    def batches(self, node: int, first_step: int, count: int) -> Iterator[Any]:
        """Yield the collated batches of `node` for `count` steps from its own step `first_step`."""
        size = self.sizes[node]
        for step in range(first_step, first_step + count):
            dealer = self._dealer(node)
            examples = dealer.take(node, step * size, size)
            if not self.example_bytes:
                self.example_bytes = max(1, *map(bytes_of, examples))
            yield self._joined(examples, node, step)

    def epoch(self, node: int) -> Iterator[Any]:
        """Yield the batches of one epoch; the last may be short."""
        reader, step = self._dealer(node).reader, 0
        reader.seek(0)
        while examples := reader.read(self.sizes[node], in_epoch=True):
            yield self._joined(examples, node, step)
            step += 1
        if not step:
            raise DataError(f"{reader.whose}: the iterable has no examples")

    def begin(self, fleet: Fleet) -> Stateful:
        """Start reading for the fleet's nodes, and return the state of the iterables that checkpoints must save.

        Other nodes can still be read, at a cost.
        """
        self.close()
        self.here = list(fleet.ranks)
        return ReadingPlaces(self, fleet) if self.own else Shared(self.marks, self.load)

    @property
    def window(self) -> int:
        """The number of examples that are shuffled together; 1 without shuffling."""
        return described(next(data for data in self.datasets if data is not None)).window if self.shuffle else 1

    @property
    def most_steps(self) -> int | None:
        """How many steps a node may be ahead of another, so that queued examples take about `KEPT_BYTES` at most.

        None means any number, because no example is queued. All processes that have read a batch return the same.
        """
        if self.own or self.num_nodes == 1:
            return None
        return max(1, KEPT_BYTES // (max(1, self.example_bytes) * sum(self.sizes)))

    def marks(self, node: int = 0) -> Tensors:
        """Return the place in the iterable of `node`, or {} if it has not been read."""
        home = node if self.own else 0
        mark = self._dealers[home].reader.mark() if home in self._dealers else {}
        return mark | {"node": torch.tensor(home)} if mark else self._marks.get(home, {})

    def load(self, marks: Tensors, node: int = 0) -> None:
        """Go to the place that `marks` returned when the node next asks. Other nodes' places are ignored."""
        home = node if self.own else 0
        if marks and int(marks["node"]) == home:
            self._leave(home)
            self._marks[home] = marks

    def close(self) -> None:
        for home in list(self._dealers):
            self._leave(home)

    def _leave(self, home: int) -> None:
        dealer = self._dealers.pop(home, None)
        if dealer is not None:
            self._openings[home] = dealer.reader.opening
            dealer.reader.close()

    def _dealer(self, node: int) -> Dealer:
        home = node if self.own else 0
        dealer = self._dealers.get(home)
        if dealer is None:
            whose = "the training data" if self.is_train else "the validation data"
            whose += f" of node {node}" * self.own
            data = described(self.datasets[home])
            reader = Reader(data, self.seed, self.shuffle, (node,) if self.own else (), whose)
            reader.opening = self._openings.get(home)
            parts = {node: 1} if self.own else dict(enumerate(self.parts * data.nodes))
            dealer = self._dealers[home] = Dealer(reader, parts, [node] if self.own else self.here)
            if self.example_bytes and (steps := self.most_steps) is not None:
                dealer.most = (steps + 1) * max(self.sizes)
            if mark := self._marks.pop(home, None):
                dealer.load(mark)
            while self.kept is not None and len(self._dealers) > self.kept:
                oldest = next(iter(self._dealers))
                self._marks[oldest] = self.marks(oldest)
                self._leave(oldest)
        elif self.kept is not None:
            self._dealers.move_to_end(home)
        return dealer

    def _joined(self, examples: list[Any], node: int, step: int) -> Any:
        which = f"of {f'node {node}' if self.is_train else 'the validation data'} at step {step}"
        if self.collate is None:
            return joined(examples, None, which)
        with rng.preserved_state(CPU):
            seed = stream_seed(self.seed, "collate", node, step)
            rng.seed_python(seed)
            rng.seed_torch(seed, CPU)
            return joined(examples, self.collate, which)


class ReadingPlaces(Stateful):
    """The state in checkpoints if each node has its own iterable: the node's place in it."""

    def __init__(self, iterated: Iterated, fleet: Fleet):
        self.iterated, self.fleet = iterated, fleet

    def row(self, row: int) -> Tensors:
        return self.iterated.marks(self.fleet.ranks[row])

    def load_row(self, row: int, tensors: Tensors) -> None:
        self.iterated.load(tensors, self.fleet.ranks[row])
