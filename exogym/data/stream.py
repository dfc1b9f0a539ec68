"""Which examples node i sees at its own step t: a pure function of (seed, epoch, node, step)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from exogym.core import combinations
from exogym.core.base import rng
from exogym.core.base.devices import total_memory_bytes
from exogym.data.bulk import Take, batch_bytes, bulk_take, split_batch
from exogym.errors import ArgumentError, DataError, check_count, checked

if TYPE_CHECKING:
    from exogym.data.loading import Loading
    from exogym.data.partition import Partitioner

CHUNK_BYTES = 2**20  # examples gathered at once: several steps, yet few enough to stay in the cache
KEPT_ORDERS = 2**20  # examples in the permutations kept; two epochs at least


class Stream:
    """The batches of every node, at every step, with no state: any node may be asked for any step, in any order.

    With one data set of D examples and no partitioner, the data are dealt anew each epoch e as by torch's
    `DistributedSampler`: a permutation of the D examples from the stream (seed, "shuffle", e), wrapped round to
    N * ceil(D / N), node i taking every N-th from the i-th. With a partitioner or a factory node i keeps its shard
    of n_i examples and goes through it in an order from (seed, "shuffle", e, i), in epochs of its own:

        own_epoch, within = divmod(step, ceil(n_i / batch_size))

    The last batch of an own epoch may be short; a shard smaller than a batch is its own batch. Tensor data sets are
    indexed in bulk; others go through one torch DataLoader, with Python's, numpy's and torch's generators put at
    (seed, epoch, example) before each `dataset[i]`, so that random augmentation depends on neither node nor worker.

    Args:
        dataset: a torch `Dataset`, any sequence of examples, or a factory `(rank, num_nodes, is_train) -> data set`;
            the third argument is passed by keyword if it is named `train_dataset`. A factory is called once per
            node, and again for a node whose data set was dropped (`kept`).
        num_nodes: N.
        batch_size: examples a node takes per step (`batch_size * gradient_accumulation` of a run).
        seed: of all orders and shards.
        shuffle: False keeps the order of the data set or shard.
        partitioner: a `Partitioner`, or its text as on the command line, such as "dirichlet:0.3".
        is_train: what a factory is told.
        dataloader_kwargs: for the DataLoader (`num_workers`, `collate_fn`, `pin_memory`, ...); if any are given,
            tensor data go through it too.
        kept: hold so many data sets of a factory, those last used, and make the others again; None: all.
        asks_all: make all data sets of a factory at once, to know their lengths. Where not, `length` makes one, and
            `learn` is told what others found.
        may_be_empty: a factory may return None for a node, which then has no examples.

    Attributes:
        examples: (N,) examples of each node in one own epoch; 0 where it is not known.
        empty: the nodes that are known to have none.
        is_shared: whether the nodes share one data set; a factory gives each its own.
        total: examples of all nodes, D where they share one data set.
        batch_sizes: (N,) examples of a step of each node: `batch_size`, or as `share_out` was told.
        steps_per_epoch: ceil(total / (N * batch_size)); 0 where not all lengths are known.

    Raises:
        DataError: not a data set, one without examples or length, or a node without examples.
        ArgumentError: an unknown or impossible argument.

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
        if dataloader_kwargs:
            from exogym.data.loading import check_dataloader_kwargs

            self._loader_kwargs = check_dataloader_kwargs(dataloader_kwargs)
        self._shards: list[np.ndarray] | None = None
        self._kept, self._is_train = kept, is_train
        self.empty: set[int] = set()
        self._private = is_factory(dataset)  # each node has a data set of its own
        if self._private:
            from exogym.data.made import Made

            combinations.check(
                combinations.features_of(partitioner=partitioner) | {"data factory": "a data set factory"}
            )
            check = check_or_none if may_be_empty else check_dataset
            self._datasets: Any = Made(dataset, num_nodes, is_train, check, kept)
            self.examples = np.zeros(num_nodes, dtype=np.int64)
            if asks_all:
                self.learn((node, self.length(node)) for node in range(num_nodes))
            self.total = int(self.examples.sum())
        else:
            self._datasets = [check_dataset(dataset)]
            self.total = len(dataset)
            if partitioner is None:
                self.examples = np.full(num_nodes, -(-self.total // num_nodes), dtype=np.int64)
            else:
                self._shards = shards_of(partitioner, dataset, num_nodes, seed)
                self.examples = np.array([len(shard) for shard in self._shards], dtype=np.int64)
                self.total = int(self.examples.sum())
        self.is_shared = not self._private
        self._dealt = not self._private and self._shards is None
        self.steps_per_epoch = -(-self.total // (num_nodes * batch_size))
        self.share_out([batch_size] * num_nodes)
        self._orders: dict[int, tuple[int, Tensor]] = {}
        self._start()

    def share_out(self, batch_sizes: Sequence[int]) -> None:
        """From now on let node i take `batch_sizes[i]` examples per step; their sum stays N * batch_size.

        Where the data are dealt anew each epoch, all nodes go through their parts at the same pace: with g the greatest
        common divisor of the sizes, node i takes b_i / g of every sum(b) / g examples of the permutation, which is
        wrapped round to whole ones of these. So every step, the last one too, holds examples in proportion to b.
        """
        self.batch_sizes = np.array(batch_sizes, dtype=np.int64)
        if self._dealt:
            self._parts = (self.batch_sizes // np.gcd.reduce(self.batch_sizes)).tolist()
            self.examples = -(-self.total // sum(self._parts)) * np.array(self._parts, dtype=np.int64)
        self._deals: OrderedDict[int, tuple[Tensor, ...]] = OrderedDict()

    def _start(self) -> None:
        """Build what is not pickled: the ways into the data sets."""
        self._take = None if self._private or self._loader_kwargs else bulk_take(self._datasets[0])
        self._chunk_steps: dict[tuple[int, int], int] = {}  # by data set and batch size
        self._loading: Loading | None = None  # where examples are read one by one

    def __getstate__(self) -> dict[str, Any]:
        dropped = ("_take", "_loading", "_deals", "_orders")
        return {name: value for name, value in self.__dict__.items() if name not in dropped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._deals, self._orders = OrderedDict(), {}
        self._start()

    def indices(self, node: int, step: int) -> tuple[np.ndarray, int]:
        """Return what `node` sees at its own step `step` (from 0): indices into its data set, and its own epoch."""
        self._check(node, step)
        epoch, within = divmod(step, self._own_steps(node))
        size = int(self.batch_sizes[node])
        return self._order(node, epoch)[within * size : (within + 1) * size].numpy().copy(), epoch

    def batches(self, node: int, first_step: int, count: int) -> Iterator[Any]:
        """Yield the collated CPU batches of `node` for `count` steps from its own step `first_step`.

        Tensor batches are views of a chunk of several steps. Several iterators may be used at once.
        """
        self._check(node, first_step)
        if not self.length(node):
            raise DataError(
                f"node {node} has no examples, and a batch of it is needed: only sampled clients may have none"
            )
        take = self._take
        if self._private and not self._loader_kwargs:
            take = self._datasets.takes(node)
        return self._loaded(node, first_step, count) if take is None else self._taken(take, node, first_step, count)

    def close(self) -> None:
        """End the DataLoader's worker processes, if there are any; a later `batches` starts new ones."""
        if self._loading is not None:
            self._loading.close()

    def _taken(self, take: Take, node: int, step: int, count: int) -> Iterator[Any]:
        end, size, own_steps = step + count, int(self.batch_sizes[node]), self._own_steps(node)
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
        """Return the examples of `node` in the order of its own epoch, (n_i,) int64; the current ones are kept."""
        if self._dealt:
            deal = self._deals.get(epoch)
            if deal is None:
                deal = self._deals[epoch] = self._deal(epoch)
                while len(self._deals) > max(2, KEPT_ORDERS // self.total):
                    self._deals.popitem(last=False)
            return deal[node]
        kept = self._orders.get(node)
        if kept is None or kept[0] != epoch:
            self._orders.pop(node, None)
            kept = self._orders[node] = (epoch, self._shard_order(node, epoch))
            while self._kept is not None and len(self._orders) > self._kept:
                self._orders.pop(next(iter(self._orders)))  # the one that was put first
        return kept[1]

    def length(self, node: int) -> int:
        """Return how many examples `node` has, making its data set where that is not known."""
        if not self.examples[node] and node not in self.empty:
            made = self._datasets[node]
            self.learn([(node, 0 if made is None else len(made))])
        return int(self.examples[node])

    def examples_of(self, nodes: Sequence[int]) -> np.ndarray:
        """Return (nodes,) the examples that each takes in a step: of its batch, or all it has where these are fewer."""
        return np.minimum(self.batch_sizes, self.examples)[list(nodes)]

    def learn(self, lengths: Iterable[tuple[int, int]]) -> None:
        """Take in (node, examples) that were found elsewhere."""
        for node, examples in lengths:
            self.examples[node] = examples
            if not examples:
                self.empty.add(node)

    def state(self) -> dict[str, Tensor]:
        """Return which nodes are known to have no examples, (nodes,)."""
        return {"nodes": torch.tensor(sorted(self.empty), dtype=torch.int64)}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `state` returned."""
        self.learn((node, 0) for node in tensors["nodes"].tolist())

    def _own_steps(self, node: int) -> int:
        """Return the steps of one epoch of the node's own."""
        return -(-self.length(node) // int(self.batch_sizes[node]))

    def _deal(self, epoch: int) -> tuple[Tensor, ...]:
        """Deal one epoch to all nodes; with equal batches as `DistributedSampler` does: perm[i::N], wrapped round."""
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
            raise ArgumentError(f"node={node}, step={step}: wanted a node in 0..{self.num_nodes - 1} and a step from 0")


def check_or_none(made: Any, origin: str) -> Any:
    """Return what a factory made for a node: None, for one without examples, or as `check_dataset`."""
    return None if made is None else check_dataset(made, origin)


def is_factory(dataset: Any) -> bool:
    """Whether `dataset` is to be called for each node's data set: a callable that cannot be indexed."""
    return callable(dataset) and not isinstance(dataset, Dataset) and not hasattr(dataset, "__getitem__")


def check_dataset(dataset: Any, origin: str = "the data set") -> Any:
    """Return `dataset` if it has a length above 0 and can be indexed by position.

    Raises:
        DataError: it is something else; the message says what to do.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, type):
        raise DataError(f"{origin} is the class {dataset.__name__}: give an instance, {dataset.__name__}(...)")
    if isinstance(dataset, IterableDataset):
        raise DataError(
            f"{origin} is an IterableDataset ({kind}), which cannot be indexed, so no run could resume: wrap it as "
            "a map-style Dataset, or read what you need into a list: list(itertools.islice(dataset, count))"
        )
    if isinstance(dataset, (str, bytes, dict)) or not hasattr(dataset, "__getitem__"):
        wanted = "a torch Dataset, a sequence of examples, or a factory (rank, num_nodes, is_train) -> Dataset"
        hint = "; for a DataLoader give its .dataset" if isinstance(dataset, torch.utils.data.DataLoader) else ""
        raise DataError(f"{origin} is a {kind}; wanted {wanted}{hint}")
    if isinstance(dataset, tuple) and dataset and all(isinstance(part, (Tensor, np.ndarray)) for part in dataset):
        raise DataError(f"{origin} is a tuple of {len(dataset)} tensors or arrays: use TensorDataset(*tensors)")
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):
        raise DataError(f"{origin} ({kind}) has no length: give it a __len__") from None
    except (ValueError, OverflowError) as error:
        raise DataError(f"{origin} ({kind}) has a length that none can have ({error}): correct its __len__") from None
    order_bytes, there_bytes = 16 * length, total_memory_bytes(torch.device("cpu"))  # a permutation, and its copy
    if order_bytes > there_bytes:
        raise DataError(
            f"{origin} ({kind}) says that it has {length} examples: to put them in an order takes "
            f"{order_bytes / 1e9:.3g} GB, and this machine has {there_bytes / 1e9:.3g}: correct its __len__, or give "
            f"a part, such as torch.utils.data.Subset(dataset, range({there_bytes // 160}))"
        )
    if length == 0:
        raise DataError(
            f"{origin} ({kind}) is empty: give at least one example (a factory may return None for a client that is to "
            "be left out, where clients are sampled)"
        )
    return dataset
