"""The examples that each node sees at each of its steps, which depend only on (seed, epoch, node, step)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from exogym.core import combinations
from exogym.core.base import rng
from exogym.core.base.devices import CPU, Device
from exogym.data.bulk import Take, batch_bytes, bulk_take, split_batch
from exogym.errors import ArgumentError, DataError, check_count, checked

if TYPE_CHECKING:
    from exogym.data.iterated import Iterated
    from exogym.data.loading import Loading
    from exogym.data.partition import Partitioner

CHUNK_BYTES = 2**20  # bytes gathered at once: several steps that fit into the cache
KEPT_ORDERS = 2**20  # examples in the stored permutations; at least two epochs are stored
# what to do about a node without examples
ONLY_SAMPLED = (
    "give it examples, leave it out, or let fit sample clients (such as FedAvgStrategy(client_fraction=0.999)): only "
    "sampled clients may have none"
)
UNKNOWN = 2**40  # stands for the examples of an iterable without a length


class Stream:
    """The batches of every node at every step, which you can request in any order.

    One data set of D examples without a partitioner is dealt anew in each epoch e, as in torch's `DistributedSampler`:
    a permutation of the D examples, drawn with (seed, "shuffle", e), is repeated up to N * ceil(D / N) examples, and
    node i takes every N-th example from the i-th on.

    With a partitioner or a factory, node i keeps its shard of n_i examples and passes through it in its own epochs, in
    an order drawn with (seed, "shuffle", e, i) for its own epoch e:

        own_epoch, within = divmod(step, ceil(n_i / batch_size))

    The last batch of an own epoch may be short, and a shard smaller than a batch is one batch. With
    `dataloader_kwargs={"drop_last": True}`, each node drops its short last batch in training: an own epoch has max(1,
    floor(n_i / batch_size)) steps, and an epoch that deals the data anew max(1, floor(D / (N batch_size))). If the data
    are shuffled, each epoch drops different examples.

    Tensor data sets are indexed in bulk; others use one torch DataLoader. Before each `dataset[i]`, the generators of
    Python, numpy and torch are seeded with (seed, epoch, example), so random augmentation does not depend on the node
    or the worker.

    Iterables are read in order (see `exogym.data.iterated`). Request their steps in order, because going back means
    reading from an epoch's start.

    Args:
        dataset: a torch `Dataset`, any sequence of examples, an iterable (see `IterableData`), or a factory `(rank,
            num_nodes, is_train) -> data set`, which is called once per node and again if the node's data set did not
            stay in memory (`kept`). A third argument named `train_dataset` is passed by name.
        num_nodes: N, the number of nodes.
        batch_size: examples per node and step. With gradient accumulation, pass `batch_size * gradient_accumulation`.
        seed: seed of all orders and shards.
        shuffle: whether to shuffle. False keeps the order of the data set or shard.
        partitioner: a `Partitioner`, or its text as on the command line, such as "dirichlet:0.3".
        is_train: passed to a factory.
        dataloader_kwargs: arguments of the DataLoader (`num_workers`, `collate_fn`, `pin_memory`, ...). With any except
            `drop_last`, tensor data sets also use the DataLoader.
        kept: the number of a factory's data sets that stay in memory, those used last; others are made again when
            needed. Default: all.
        asks_all: whether all data sets of a factory are made at the start, to know their lengths. Otherwise `length`
            makes a node's data set when needed, and `learn` stores lengths that other processes found.
        may_be_empty: whether a node may have no examples (an empty shard, or None or an empty data set from the
            factory). Such nodes are in `empty` and have no batches.

    Attributes:
        iterates: whether the data are iterables.
        iterated: the reading of iterables; None for other data.
        endless: whether an epoch's length is unknown because an iterable has no length.
        examples: (N,) examples of each node in one own epoch: 0 if unknown, 2**40 for iterables without a length.
        empty: the nodes known to have no examples.
        is_shared: whether all nodes share one data set, not one each from a factory.
        total: examples of all nodes, or D if the nodes share one data set.
        batch_sizes: (N,) examples in a step of each node: `batch_size`, or the sizes from `share_out`.
        steps_per_epoch: steps of an epoch: ceil(total / (N * batch_size)), with `drop_last` the floor and at least 1,
            or 0 if lengths are unknown.
        drops_last: whether short last batches of training data are dropped.

    Raises:
        DataError: `dataset` is not a data set, has no examples or no length, or a node has no examples.
        ArgumentError: an argument is unknown or impossible.

    >>> stream = Stream(list(range(10)), num_nodes=2, batch_size=3, shuffle=False)
    >>> [batch.tolist() for batch in stream.batches(node=1, first_step=0, count=2)]
    [[1, 3, 5], [7, 9]]
    >>> stream.indices(node=1, step=2)
    (array([1, 3, 5]), 1)
    """

    @checked
    def __init__(
        self,
        dataset: Any,
        num_nodes: int,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        partitioner: Partitioner | str | None = None,
        is_train: bool = True,
        dataloader_kwargs: dict[str, Any] | None = None,
        kept: int | None = None,
        asks_all: bool = True,
        may_be_empty: bool = False,
    ) -> None:
        check_count("num_nodes", num_nodes)
        check_count("batch_size", batch_size)
        if partitioner is not None:
            from exogym.data.partition import partitioner_of, shards_of

            partitioner = partitioner_of(partitioner)
        self.num_nodes, self.batch_size, self.seed, self.shuffle = num_nodes, batch_size, seed, bool(shuffle)
        self._loader_kwargs: dict[str, Any] = {}
        if dataloader_kwargs is not None:
            from exogym.data.loading import check_dataloader_kwargs

            self._loader_kwargs = check_dataloader_kwargs(dataloader_kwargs)
        self.drops_last = bool(self._loader_kwargs.pop("drop_last", False)) and is_train
        self._shards: list[np.ndarray] | None = None
        self._kept, self._is_train = kept, is_train
        self.empty: set[int] = set()
        self._private = is_factory(dataset)  # each node has its own data set
        self.iterates, self.endless = not self._private and is_iterable(dataset), False
        if self._private:
            from exogym.data.made import Made

            combinations.check(
                combinations.features_of(partitioner=partitioner) | {"data factory": "a data set factory"}
            )
            check = functools.partial(check_made, may_be_empty=may_be_empty)
            self._datasets: Any = Made(dataset, num_nodes, is_train, check, kept)
            self.examples = np.zeros(num_nodes, dtype=np.int64)
            self.iterates = is_iterable(self._first_made())
            if asks_all:
                self.learn((node, self.length(node)) for node in range(num_nodes))
            self.total = int(self.examples.sum())
        else:
            self._datasets = [dataset if self.iterates else check_dataset(dataset)]
            self.total = self._length_of(dataset)
            self.examples = np.full(num_nodes, -(-self.total // num_nodes), dtype=np.int64)
            if partitioner is not None and not self.iterates:
                self._shards = shards_of(partitioner, dataset, num_nodes, seed, may_be_empty)
                self.examples = np.array([len(shard) for shard in self._shards], dtype=np.int64)
                self.empty = set(np.flatnonzero(self.examples == 0).tolist())
                self.total = int(self.examples.sum())
        if self.iterates:
            combinations.check(self.features() | combinations.features_of(partitioner=partitioner))
        self.is_shared = not self._private
        self._dealt = not self._private and self._shards is None and not self.iterates
        self.total = 0 if self.endless else self.total
        self.steps_per_epoch = self._batches_of(self.total, num_nodes * batch_size)
        self.iterated: Iterated | None = None
        self.share_out([batch_size] * num_nodes)
        self._orders: dict[int, tuple[int, Tensor]] = {}
        self._start()

    def features(self) -> dict[str, str]:
        """Return the features of iterables, by names in `exogym.core.refusals`."""
        if not self.iterates:
            return {}
        if self._private:
            self.length(self.first)
        what = "an iterable for each node" if self._private else "one iterable for all nodes"
        found = {"iterable data": what, what: what}
        others = {name: value for name, value in self._loader_kwargs.items() if name != "collate_fn" and value}
        others |= {"drop_last": True} if self.drops_last else {}  # no batch of an iterable is short
        if others:
            found["dataloader_kwargs except collate_fn"] = f"dataloader_kwargs={others!r}"
        if self.endless:
            found["iterable without a length"] = "an iterable without a length"
        if self.endless and self._private:
            found["iterables of unknown lengths"] = "iterables without lengths"
        return found

    def share_out(self, batch_sizes: Sequence[int]) -> None:
        """Let node i take `batch_sizes[i]` examples per step from now on, with an unchanged sum of N * batch_size.

        If each epoch deals the data anew, all nodes finish together. Let b be `batch_sizes` and g their greatest common
        divisor. Node i takes b_i / g of every sum(b) / g examples of the permutation, which is repeated up to whole
        groups of sum(b) / g examples, so that every step, including the last, has examples in proportion to b.
        """
        self.batch_sizes = np.array(batch_sizes, dtype=np.int64)
        if self.iterated is not None:
            self.iterated.share_out(batch_sizes)
        if self._dealt:
            self._parts = (self.batch_sizes // np.gcd.reduce(self.batch_sizes)).tolist()
            self.examples = -(-self.total // sum(self._parts)) * np.array(self._parts, dtype=np.int64)
        self._deals: dict[int, tuple[Tensor, ...]] = {}

    def _start(self) -> None:
        """Build the parts that are not pickled, which access the data sets."""
        whole = self._private or self._loader_kwargs or self.iterates
        self._take = None if whole else bulk_take(self._datasets[0])
        self._chunk_steps: dict[tuple[int, int], int] = {}  # by data set and batch size
        self._loading: Loading | None = None  # for data sets read one example at a time
        self.iterated = None
        if self.iterates:
            from exogym.data.iterated import Iterated

            self.iterated = Iterated(
                self._datasets, self.num_nodes, self._private, self.batch_sizes, self.seed, self.shuffle,
                self._loader_kwargs.get("collate_fn"), self._kept, self._is_train,
            )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        dropped = ("_take", "_loading", "_deals", "_orders", "iterated")
        return {name: value for name, value in self.__dict__.items() if name not in dropped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._deals, self._orders = {}, {}
        self._start()

    def indices(self, node: int, step: int) -> tuple[np.ndarray, int]:
        """Return the examples' indices at the node's own step `step` (from 0) and the node's own epoch."""
        self._check(node, step)
        if self.iterates:
            raise DataError("an iterable's examples have no indices: use batches")
        epoch, within = divmod(step, self.own_steps(node))
        size = int(self.batch_sizes[node])
        return self._order(node, epoch)[within * size : (within + 1) * size].numpy().copy(), epoch

    def batches(self, node: int, first_step: int, count: int) -> Iterator[Any]:
        """Yield collated CPU batches of `node` for `count` steps from its own step `first_step`.

        Tensor batches are views of a chunk of several steps. Several iterators may run at once.
        """
        self._check(node, first_step)
        if not self.length(node):
            raise DataError(f"node {node} has no examples but needs a batch: {ONLY_SAMPLED}")
        if self.iterated is not None:
            return self.iterated.batches(node, first_step, count)
        take = self._take
        if self._private and not self._loader_kwargs:
            take = self._datasets.takes(node)
        return self._loaded(node, first_step, count) if take is None else self._taken(take, node, first_step, count)

    def epoch(self, node: int) -> Iterator[Any]:
        """Yield the batches of the node's first own epoch, or none if the node has no examples.

        An iterable's epoch ends where the iterable ends.
        """
        if not self.length(node):
            return iter(())
        if self.iterated is not None:
            return self.iterated.epoch(node)
        return self.batches(node, 0, self.own_steps(node))

    def close(self) -> None:
        """Stop the DataLoader's worker processes and close iterables. A later `batches` starts anew."""
        if self._loading is not None:
            self._loading.close()
        if self.iterated is not None:
            self.iterated.close()

    def _taken(self, take: Take, node: int, step: int, count: int) -> Iterator[Any]:
        end, size, own_steps = step + count, int(self.batch_sizes[node]), self.own_steps(node)
        home = node if self._private else 0
        if (home, size) not in self._chunk_steps:
            bytes_per_step = batch_bytes(take(torch.tensor([0]))) * size
            self._chunk_steps[home, size] = max(1, CHUNK_BYTES // max(1, bytes_per_step))
        longest = self._chunk_steps[home, size]
        while step < end:
            epoch, within = divmod(step, own_steps)
            steps = min(end - step, own_steps - within, longest)
            order = self._order(node, epoch)
            wanted = order[within * size : (within + steps) * size]
            try:
                batch = take(wanted)
            except Exception as error:
                raise DataError(
                    f"the data set failed at indices {wanted[:8].tolist()}{' and more' if len(wanted) > 8 else ''}, "
                    f"examples of {self._whose(node)}: {type(error).__name__}: {error}"
                ) from error
            if steps == 1:
                yield batch
            else:
                yield from split_batch(batch, size)
            step += steps

    def _whose(self, node: int) -> str:
        return f"node {node}" if self._is_train else "the validation data"

    def _loaded(self, node: int, step: int, count: int) -> Iterator[Any]:
        home = node if self._private else 0
        requests = []
        for t in range(step, step + count):
            indices, epoch = self.indices(node, t)
            requests.append((home, epoch, indices, self._whose(node)))
        if self._loading is None:
            from exogym.data.loading import Loading

            self._loading = Loading(self._datasets, self._private, self.seed, self._loader_kwargs)
        return self._loading.batches(requests)

    def _order(self, node: int, epoch: int) -> Tensor:
        """Return the examples of `node` in its own epoch's order, (n_i,) int64. Recent orders are cached."""
        if self._dealt:
            if epoch not in self._deals:
                self._deals[epoch] = self._deal(epoch)
                while len(self._deals) > max(2, KEPT_ORDERS // self.total):
                    self._deals.pop(next(iter(self._deals)))  # the oldest
            return self._deals[epoch][node]
        kept = self._orders.get(node)
        if kept is None or kept[0] != epoch:
            self._orders.pop(node, None)
            kept = self._orders[node] = (epoch, self._shard_order(node, epoch))
            while self._kept is not None and len(self._orders) > self._kept:
                self._orders.pop(next(iter(self._orders)))  # the oldest
        return kept[1]

    def length(self, node: int) -> int:
        """Return the number of examples of `node`, making its data set first if the number is unknown."""
        if not self.examples[node] and node not in self.empty:
            made = self._datasets[node]
            self.learn([(node, 0 if made is None else self._length_of(made))])
        return int(self.examples[node])

    def examples_of(self, nodes: Sequence[int]) -> np.ndarray:
        """Return how many examples each node takes per step, (nodes,).

        That is the node's batch size, or all its examples if it has fewer.
        """
        return np.minimum(self.batch_sizes, self.examples)[list(nodes)]

    def learn(self, lengths: Iterable[tuple[int, int]]) -> None:
        """Store known numbers of examples, as pairs (node, number of examples)."""
        for node, examples in lengths:
            self.examples[node] = examples
            if not examples:
                self.empty.add(node)

    def state(self) -> dict[str, Tensor]:
        """Return the nodes that are known to have no examples, (nodes,)."""
        return {"nodes": torch.tensor(sorted(self.empty), dtype=torch.int64)}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that `state` returned."""
        self.learn((int(node), 0) for node in tensors.get("nodes", ()))  # checkpoints of before 0.1 may lack them

    @property
    def first(self) -> int:
        """The first node with examples."""
        return next(node for node in range(self.num_nodes) if node not in self.empty)

    def _first_made(self) -> Any:
        """Return the factory's first data set with examples, and record the nodes before it, which have none."""
        for node in range(self.num_nodes):
            made = self._datasets[node]
            if made is not None:
                return made
            self.learn([(node, 0)])
        what = "training" if self._is_train else "validation"
        raise DataError(
            f"the factory returned no examples for any of {self.num_nodes:,} nodes: give at least one {what} example"
        )

    def _length_of(self, dataset: Any) -> int:
        """Return the number of examples, or `UNKNOWN` for an iterable without a length."""
        if is_iterable(dataset) != self.iterates:
            raise DataError(
                "the factory makes iterables for some nodes and data sets with positions for others: give all nodes "
                "the same kind"
            )
        if not self.iterates:
            return len(dataset)
        from exogym.data.reading import described

        data = described(dataset)
        self.endless = self.endless or data.length is None
        return UNKNOWN if data.length is None else -(-data.length // data.nodes)

    def own_steps(self, node: int) -> int:
        """Return the steps of one own epoch of the node."""
        if self._dealt:
            return self.steps_per_epoch
        return self._batches_of(self.length(node), int(self.batch_sizes[node]))

    def _batches_of(self, examples: int, size: int) -> int:
        """Return how many batches of `size` an epoch of `examples` has."""
        return max(min(1, examples), examples // size) if self.drops_last else -(-examples // size)

    @property
    def last_batches(self) -> np.ndarray:
        """(N,) examples in the last batch of each node's own epoch; 0 if the node's examples are unknown."""
        whole = np.minimum(self.examples, self.batch_sizes)
        if self.drops_last or self.iterates:
            return whole
        return np.where(self.examples, (self.examples - 1) % self.batch_sizes + 1, 0)

    def _deal(self, epoch: int) -> tuple[Tensor, ...]:
        """Deal one epoch to all nodes: for equal batches, `DistributedSampler`'s perm[i::N], repeated as needed."""
        if self.shuffle:
            perm = torch.randperm(self.total, generator=rng.generator(self.seed, "shuffle", epoch))
        else:
            perm = torch.arange(self.total)
        width = sum(self._parts)
        rows = -(-self.total // width)
        wrapped = perm.repeat(-(-rows * width // self.total))[: rows * width].view(rows, width)
        return tuple(part.reshape(-1).contiguous() for part in wrapped.split(self._parts, 1))

    def _shard_order(self, node: int, epoch: int) -> Tensor:
        count = self.length(node)
        shard = torch.arange(count) if self._shards is None else torch.from_numpy(self._shards[node])
        if not self.shuffle:
            return shard
        return shard[torch.randperm(count, generator=rng.generator(self.seed, "shuffle", epoch, node))]

    def _check(self, node: int, step: int) -> None:
        if not (0 <= node < self.num_nodes and step >= 0):
            raise ArgumentError(
                f"node={node}, step={step}: expected a node in 0..{self.num_nodes - 1} and a step from 0"
            )


def check_made(made: Any, origin: str, may_be_empty: bool) -> Any:
    """Check and return the data set that a factory made for a node, or None if the node may have no examples."""
    if made is not None and (is_iterable(made) or len(check_dataset(made, origin, least=0))):
        return made
    if not may_be_empty:
        what = "is None" if made is None else f"({type(made).__name__}) is empty"
        raise DataError(f"{origin} {what}: {ONLY_SAMPLED}")
    return None


def is_iterable(dataset: Any) -> bool:
    """Return whether `dataset` is read in order: an object with `__iter__` and no positions.

    Iterators, which can be read only once, and sets, which have no order, do not count.

    >>> from torch.utils.data import DataLoader
    >>> data = [torch.zeros(1)]
    >>> [is_iterable(x) for x in (DataLoader(data, batch_size=None), DataLoader(data), data, iter(data), {1, 2})]
    [True, False, False, False, False]
    """
    kind = type(dataset)
    if isinstance(dataset, IterableDataset):
        return True
    if isinstance(dataset, DataLoader):
        return dataset.batch_size is None and dataset.batch_sampler is None
    if isinstance(dataset, type | Iterator | Mapping | Set):
        return False
    return hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__")


def length_of(dataset: Any, origin: str) -> int:
    """Return the number of examples of a data set, or of an iterable's epoch.

    Raises:
        DataError: an iterable without a length.

    >>> from exogym.data import IterableData
    >>> length_of([1, 2], "the data"), length_of(IterableData([1, 2], length=2), "the data")
    (2, 2)
    """
    if not is_iterable(dataset):
        return len(dataset)
    from exogym.data.reading import described

    length = described(dataset).length
    if length is None:
        raise DataError(
            f"{origin} is an iterable without a length ({type(dataset).__name__}): pass "
            "exogym.data.IterableData(dataset, length=...)"
        )
    return length


def is_factory(dataset: Any) -> bool:
    """Return whether `dataset` is a factory to call for each node: a callable that has no examples."""
    by_itself = isinstance(dataset, Dataset) or hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")
    return callable(dataset) and not by_itself


def _check_order(dataset: Any, origin: str) -> None:
    """Raise DataError for a class, and for data that have no positions or no order."""
    kind = type(dataset).__name__
    if isinstance(dataset, type):
        raise DataError(f"{origin} is the class {dataset.__name__}: pass an instance, {dataset.__name__}(...)")
    if is_iterable(dataset):
        raise DataError(
            f"{origin} is an iterable ({kind}), which has no positions: read what you need into a list, "
            "list(itertools.islice(dataset, count))"
        )
    if isinstance(dataset, Iterator):
        raise DataError(
            f"{origin} is a {kind}, which can be read only once, so no run could resume: pass an object whose "
            "__iter__ starts anew each time, such as an IterableDataset or torchdata.nodes.Loader(node)"
        )
    if isinstance(dataset, Set):
        raise DataError(f"{origin} is a {kind}, which has no order, so no run could repeat: use sorted(...)")


def check_dataset(dataset: Any, origin: str = "the data set", least: int = 1) -> Any:
    """Return `dataset` if it has a length of at least `least` and can be indexed by position.

    Raises:
        DataError: `dataset` has no such length or cannot be indexed. The message says what to do.
    """
    kind = type(dataset).__name__
    _check_order(dataset, origin)
    if isinstance(dataset, (str, bytes, dict)) or not hasattr(dataset, "__getitem__"):
        wanted = "a torch Dataset, a sequence of examples, or a factory (rank, num_nodes, is_train) -> Dataset"
        hint = (
            "; for a DataLoader give its .dataset (and its collate_fn in dataloader_kwargs), or batch_size=None"
            if isinstance(dataset, torch.utils.data.DataLoader)
            else ""
        )
        raise DataError(f"{origin} is a {kind}: expected {wanted}{hint}")
    if isinstance(dataset, tuple) and dataset and all(isinstance(part, (Tensor, np.ndarray)) for part in dataset):
        raise DataError(f"{origin} is a tuple of {len(dataset)} tensors or arrays: use TensorDataset(*tensors)")
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):
        raise DataError(f"{origin} ({kind}) has no length: define __len__") from None
    except (ValueError, OverflowError) as error:
        raise DataError(f"{origin} ({kind}) has an impossible length ({error}): correct its __len__") from None
    order_bytes, there_bytes = 16 * length, Device(CPU).total_bytes()  # a permutation, and its copy
    if order_bytes > there_bytes:
        raise DataError(
            f"{origin} ({kind}) claims {length} examples: their order takes {order_bytes / 1e9:.3g} GB of "
            f"memory, and this machine has {there_bytes / 1e9:.3g} GB: correct its __len__, or give a "
            f"part, such as torch.utils.data.Subset(dataset, range({there_bytes // 160}))"
        )
    if length < least:
        raise DataError(f"{origin} ({kind}) is empty: provide at least one example")
    return dataset
