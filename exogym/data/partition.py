"""Partitioners assign examples to nodes.

A partitioner divides one data set of D examples into N shards, one per node. Use one if nodes' data differ in labels
(`LabelShards`, `Dirichlet`), in amount (`QuantitySkew`), or in source (`ByKey`: a speaker, a hospital, a phone). Every
partitioner here gives each example to exactly one node, and each node at least one example unless min_examples=0. The
shards depend only on (data set, N, seed).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from exogym.core.base.rng import numpy_generator
from exogym.errors import ArgumentError, DataError, check_count, check_number, checked, nearest

REDRAWS = 100


class Partitioner(ABC):
    """Base class of partitioners, which divide a data set into one shard per node. Subclasses implement `split`."""

    @abstractmethod
    def split(self, dataset: Any, num_nodes: int, seed: int) -> list[np.ndarray]:
        """Return N arrays of example indices, one shard per node."""


def labels_of(dataset: Any) -> np.ndarray:
    """Return the labels of all D examples, (D,), without reading the examples if possible.

    The function tries in turn `.targets`, `.labels`, the last tensor of a `TensorDataset`, these three for the data
    sets inside a `Subset` or `ConcatDataset`, and `dataset[i][1]` or `dataset[i]["label"]` of every example.

    Raises:
        DataError: an example does not have exactly one class.

    >>> import torch
    >>> data = TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
    >>> labels_of(Subset(data, [1, 2])).tolist()
    [1, 0]
    """
    labels = stored_labels(dataset)
    if labels is None:
        labels = np.asarray([_read_label(dataset, i) for i in range(len(dataset))])
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    whole = labels.dtype.kind != "f" or bool(np.all(labels == np.floor(labels)))
    if labels.ndim != 1 or labels.dtype.kind not in "biufUS" or not whole:
        raise DataError(
            f"a partition by label needs one class per example; the labels of this {type(dataset).__name__} have "
            f"shape {labels.shape} and type {labels.dtype}: use QuantitySkew, or ByKey with your own key"
        )
    if len(labels) != len(dataset):
        raise DataError(
            f"the data set has {len(dataset)} examples but {len(labels)} labels: provide one label per example"
        )
    return labels


def stored_labels(dataset: Any) -> np.ndarray | None:
    """Return the labels that a data set stores apart from its examples, or None if it stores none."""
    for name in ("targets", "labels"):
        found = getattr(dataset, name, None)
        if found is not None and not callable(found):
            return np.asarray(found)
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[-1].cpu().numpy()
    if isinstance(dataset, Subset):
        whole = stored_labels(dataset.dataset)
        return None if whole is None else whole[np.asarray(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        parts = [stored_labels(part) for part in dataset.datasets]
        return None if any(part is None for part in parts) else np.concatenate(parts)  # type: ignore[arg-type]
    return None


def _read_label(dataset: Any, i: int) -> Any:
    example = dataset[i]
    if isinstance(example, dict):
        for name in ("label", "labels"):
            if name in example:
                return np.asarray(example[name])
    elif isinstance(example, (tuple, list)) and len(example) > 1:
        return np.asarray(example[1])
    raise DataError(
        f"no label in example {i}, a {type(example).__name__}: a partition by label needs examples (x, label), "
        'dicts with "label", or a data set with .targets; otherwise use ByKey with your own key'
    )


@dataclass(frozen=True)
class IID(Partitioner):
    """Divide the examples among the nodes at random and evenly, so that shard sizes differ by at most one.

    The shards are fixed; without a partitioner, `fit` deals the examples anew in each epoch.

    >>> [len(shard) for shard in IID().split(range(10), 4, seed=0)]
    [3, 3, 2, 2]
    """

    def split(self, dataset: Any, num_nodes: int, seed: int) -> list[np.ndarray]:
        _check_enough(dataset, num_nodes)
        order = numpy_generator(seed, "partition").permutation(len(dataset))
        return [np.sort(shard) for shard in np.array_split(order, num_nodes)]


@dataclass(frozen=True)
class LabelShards(Partitioner):
    """Sort the examples by label, divide them into N * s equal shards, and give each node s random shards.

    Use it so that each node has few labels: with s=2 about two, the "pathological" split of McMahan et al. 2017 (arXiv
    1602.05629, section 3).

    Args:
        shards_per_node: s, the number of shards per node.

    Raises:
        DataError: fewer examples than the N * s shards.

    >>> shards = LabelShards(1).split([(0, label) for label in (1, 0, 1, 0)], 2, seed=0)
    >>> sorted(shard.tolist() for shard in shards)
    [[0, 2], [1, 3]]
    """

    shards_per_node: int = 2

    def __post_init__(self) -> None:
        check_count("shards_per_node", self.shards_per_node)

    def split(self, dataset: Any, num_nodes: int, seed: int) -> list[np.ndarray]:
        _check_enough(dataset, num_nodes)
        count = num_nodes * self.shards_per_node
        if count > len(dataset):
            raise DataError(
                f"{self!r} over {num_nodes} nodes cuts {len(dataset)} examples into {count} shards, but a shard needs "
                f"an example: use shards_per_node={len(dataset) // num_nodes} or less, or fewer nodes"
            )
        pieces = np.array_split(np.argsort(labels_of(dataset), kind="stable"), count)
        dealt = numpy_generator(seed, "partition").permutation(count).reshape(num_nodes, self.shards_per_node)
        return [np.sort(np.concatenate([pieces[p] for p in row])) for row in dealt]


@dataclass(frozen=True)
class _Skewed(Partitioner):
    alpha: float
    min_examples: int = 1

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha, over=0)
        check_count("min_examples", self.min_examples, least=0)


@dataclass(frozen=True)
class Dirichlet(_Skewed):
    """Divide each label's examples among the N nodes in random proportions p_label ~ Dirichlet(alpha, ..., alpha).

    Use it for label skew of any strength: a large alpha gives nearly IID data, while with alpha = 0.1 most nodes have
    one or two labels and different numbers of examples. ExoGym draws again, up to 100 times, until every node has
    `min_examples`. The method is from Li et al. 2022 (arXiv 2102.02079), after Yurochkin et al. 2019 and Hsu et al.
    2019 (arXiv 1909.06335).

    Args:
        alpha: concentration, above 0.
        min_examples: the smallest allowed number of examples for a node. It may be 0 if clients are sampled: nodes
            without examples then join no round. A small alpha with many nodes requires 0.

    Raises:
        DataError: no draw gave every node `min_examples`.

    >>> shards = Dirichlet(0.5).split([(0, i % 3) for i in range(90)], 4, seed=0)
    >>> sum(len(shard) for shard in shards), min(len(shard) for shard in shards) >= 1
    (90, True)
    """

    def split(self, dataset: Any, num_nodes: int, seed: int) -> list[np.ndarray]:
        _check_enough(dataset, num_nodes, self.min_examples)
        draws = numpy_generator(seed, "partition")
        labels = labels_of(dataset)
        classes = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        most = 0
        for _ in range(REDRAWS):
            owner = np.empty(len(labels), dtype=np.int64)
            for examples in classes:
                share = draws.dirichlet(np.full(num_nodes, float(self.alpha)))
                cuts = np.rint(np.cumsum(share) * len(examples)).astype(np.int64)
                owner[draws.permutation(examples)] = np.searchsorted(cuts[:-1], np.arange(len(examples)), side="right")
            least = int(np.bincount(owner, minlength=num_nodes).min())
            most = max(most, least)
            if least >= self.min_examples:
                return [np.flatnonzero(owner == node) for node in range(num_nodes)]
        few = "an example" if self.min_examples == 1 else f"{self.min_examples} examples"
        allowed = f"Dirichlet({self.alpha}, min_examples=0) if clients are sampled"
        if self.min_examples > 1:
            allowed = f"a smaller min_examples (the best attempt gave {most}; 0 needs sampled clients)"
        raise DataError(
            f"Dirichlet(alpha={self.alpha}) could not give all {num_nodes} nodes {few} of {len(labels)} in {REDRAWS} "
            f"attempts: use fewer nodes, a larger alpha, or {allowed}"
        )


@dataclass(frozen=True)
class QuantitySkew(_Skewed):
    """Give every node `min_examples` examples, and divide the rest among the nodes in random proportions q.

    Use it if only the nodes' amounts of data differ: labels stay mixed (Li et al. 2022, arXiv 2102.02079, "quantity
    skew"). q is drawn from Dirichlet(alpha, ..., alpha).

    Args:
        alpha: concentration, above 0. A smaller alpha makes the numbers of examples more unequal.
        min_examples: the smallest number of examples for a node. It may be 0 if clients are sampled.

    >>> sizes = [len(shard) for shard in QuantitySkew(0.5).split(range(1000), 4, seed=0)]
    >>> sum(sizes), max(sizes) > 2 * min(sizes)
    (1000, True)
    """

    alpha: float = 1.0

    def split(self, dataset: Any, num_nodes: int, seed: int) -> list[np.ndarray]:
        _check_enough(dataset, num_nodes, self.min_examples)
        draws = numpy_generator(seed, "partition")
        spare = len(dataset) - num_nodes * self.min_examples
        share = draws.dirichlet(np.full(num_nodes, float(self.alpha)))
        cuts = np.rint(np.cumsum(share)[:-1] * spare).astype(np.int64)
        cuts += self.min_examples * np.arange(1, num_nodes)
        return [np.sort(shard) for shard in np.split(draws.permutation(len(dataset)), cuts)]


@dataclass(frozen=True, eq=False)
class ByKey(Partitioner):
    """Give all examples with the same key to the same node: a natural partition, as by speaker, author or hospital.

    The groups of examples with the same key are assigned from the largest to the smallest, each to the node with the
    fewest examples so far.

    Args:
        key: an array or list with one key per example, or a function that maps an example as the data set returns it
            (`dataset[i]`, such as a tuple of input and target) to its key.

    Raises:
        DataError: there are fewer groups than nodes, or the list of keys has the wrong length.

    >>> shards = ByKey(["anna", "bert", "anna", "carl"]).split(range(4), 2, seed=0)
    >>> sorted(shard.tolist() for shard in shards)
    [[0, 2], [1, 3]]

    For texts, a function of the text can return the key:

    >>> lines = ["ROMEO: But, soft!", "JULIET: Ay me!", "ROMEO: She speaks.", "NURSE: Madam!"]
    >>> shards = ByKey(lambda line: line.partition(":")[0]).split(lines, 2, seed=0)
    >>> sorted(shard.tolist() for shard in shards)
    [[0, 2], [1, 3]]
    """

    key: Callable[[Any], Any] | Sequence[Any] | np.ndarray = field(repr=False)

    def split(self, dataset: Any, num_nodes: int, seed: int) -> list[np.ndarray]:
        _check_enough(dataset, num_nodes)
        keys = [self.key(dataset[i]) for i in range(len(dataset))] if callable(self.key) else self.key
        if len(keys) != len(dataset):
            raise DataError(f"ByKey has {len(keys)} keys for {len(dataset)} examples: give one key per example")
        names, owner = np.unique(np.asarray(keys), return_inverse=True)
        if len(names) < num_nodes:
            raise DataError(
                f"ByKey found {len(names)} distinct keys, too few for {num_nodes} nodes (a group stays on one node): "
                f"use num_nodes={len(names)} or less, or a finer key"
            )
        sizes = np.bincount(owner)
        mixed = numpy_generator(seed, "partition").permutation(len(names))
        home = np.empty(len(names), dtype=np.int64)
        loads = np.zeros(num_nodes, dtype=np.int64)
        for group in mixed[np.argsort(-sizes[mixed], kind="stable")]:
            home[group] = loads.argmin()
            loads[home[group]] += sizes[group]
        return [np.flatnonzero(home[owner] == node) for node in range(num_nodes)]


def label_skew(partitioner: Partitioner, dataset: Any, num_nodes: int, seed: int = 0) -> float | None:
    """Return how unequal the nodes' labels are, from 0 (all alike) to 1, or None if the labels are unknown.

    The skew is the mean over nodes of the total variation distance between a node's label distribution and the overall
    one, which is the share of a node's examples that would need another label. No example is read.

    >>> import torch
    >>> data = TensorDataset(torch.zeros(100, 1), torch.arange(100) % 10)
    >>> round(label_skew(LabelShards(2), data, 4), 2), label_skew(IID(), data, 4)
    (0.62, 0.0)
    """
    if isinstance(partitioner, IID):
        return 0.0
    stored = stored_labels(dataset)
    if stored is None or stored.ndim != 1 or stored.dtype.kind not in "biuSU":
        return None
    classes, labels = np.unique(stored, return_inverse=True)
    shards = [np.arange(len(labels)), *shards_of(partitioner, dataset, num_nodes, seed, may_be_empty=True)]
    whole, *each = [np.bincount(labels[x], minlength=len(classes)) / len(x) for x in shards if len(x)]
    return float(np.mean([np.abs(share - whole).sum() / 2 for share in each]))


def _check_enough(dataset: Any, num_nodes: int, min_examples: int = 1) -> None:
    """Raise DataError if there are too few examples for the nodes, before dividing them takes time and memory."""
    if num_nodes * min_examples > len(dataset):
        each = f" with min_examples={min_examples}" if min_examples > 1 else ""
        other = ", or a smaller min_examples (0 requires sampled clients)" if min_examples > 1 else ""
        raise DataError(
            f"{len(dataset)} examples are too few for {num_nodes} nodes{each}: use fewer nodes or more data{other}"
        )


def shards_of(
    partitioner: Partitioner, dataset: Any, num_nodes: int, seed: int, may_be_empty: bool = False
) -> list[np.ndarray]:
    """Split `dataset` and return each node's shard, int64. Raise DataError if shards are missing or invalid.

    Args:
        may_be_empty: whether a shard may be empty without an error.
    """
    shards = partitioner.split(dataset, num_nodes, seed)
    if len(shards) != num_nodes:
        raise DataError(f"{partitioner!r} made {len(shards)} shards for {num_nodes} nodes: return one shard per node")
    arrays = [np.asarray(shard) for shard in shards]
    if not any(map(len, arrays)):
        raise DataError(f"{partitioner!r} gave no node an example: return indices of examples")
    for node, shard in enumerate(arrays):
        if len(shard) == 0 and may_be_empty:
            continue
        if len(shard) == 0:
            raise DataError(
                f"{partitioner!r} leaves node {node} of {len(arrays)} without examples "
                f"({sum(map(len, arrays))} in all), and only sampled clients may have none: use fewer nodes, a milder "
                "split, or more data"
            )
        if shard.ndim != 1 or shard.dtype.kind not in "iu":
            raise DataError(
                f"{partitioner!r} gave node {node} numbers of type {shard.dtype} and shape "
                f"{shard.shape}: return a list of indices"
            )
        if not 0 <= shard.min() <= shard.max() < len(dataset):
            raise DataError(f"{partitioner!r} gave node {node} an index outside 0..{len(dataset) - 1}")
    return [shard.astype(np.int64, copy=False) for shard in arrays]


_NAMES: dict[str, tuple[Callable[..., Partitioner], Callable[[str], Any], str]] = {
    "iid": (IID, str, "iid"),
    "shards": (LabelShards, int, "shards:2"),
    "dirichlet": (Dirichlet, float, "dirichlet:0.3"),
    "quantity": (QuantitySkew, float, "quantity:1.0"),
}

FORMS = tuple(form for _, _, form in _NAMES.values())  # examples of the texts


def partitioner_of(given: Any) -> Partitioner:
    """Return `given` if it is a partitioner, or the partitioner that the text `given` describes.

    Raise ArgumentError for anything else.
    """
    partitioner = parse_partitioner(given) if isinstance(given, str) else given
    if not isinstance(partitioner, Partitioner):
        raise ArgumentError(f"partitioner={given!r} is not a Partitioner: pass one, such as exogym.data.Dirichlet(0.3)")
    return partitioner


@checked
def parse_partitioner(text: str) -> Partitioner:
    """Parse a partitioner as on the command line: `iid`, `shards:2`, `dirichlet:0.3`, `quantity:1.0`.

    Raises:
        ArgumentError: the name is unknown, or a value is missing, unexpected or out of range.

    >>> parse_partitioner("dirichlet:0.3")
    Dirichlet(alpha=0.3, min_examples=1)
    """
    name, colon, value = str(text).strip().lower().partition(":")
    if name not in _NAMES:
        raise ArgumentError(f"partitioner={text!r} is unknown: {nearest(name, _NAMES)} (forms: {', '.join(FORMS)})")
    kind, read, form = _NAMES[name]
    if not colon and name != "dirichlet":
        return kind()
    if not value or name == "iid":
        raise ArgumentError(f"partition {text!r} should look like {form!r}")
    try:
        number = read(value)
    except ValueError:
        raise ArgumentError(f"{value!r} in partition {text!r} is not a number; it should look like {form!r}") from None
    return kind(number)
