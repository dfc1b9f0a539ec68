"""Partitioners: every example exactly once, every node at least one, the skew that was asked for."""

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from exogym import LocalTrainer
from exogym.data import (
    IID,
    ByKey,
    Dirichlet,
    LabelShards,
    Partitioner,
    QuantitySkew,
    Stream,
    label_skew,
    labels_of,
    parse_partitioner,
)
from exogym.errors import ArgumentError, DataError
from exogym.strategy import FedAvgStrategy

D, N = 600, 6
LABELS = np.random.default_rng(0).integers(0, 10, D)
DATA = TensorDataset(torch.arange(D), torch.from_numpy(LABELS))
SPEAKERS = np.random.default_rng(1).integers(0, 40, D)
ALL = [IID(), LabelShards(2), Dirichlet(0.3), QuantitySkew(0.5), ByKey(SPEAKERS)]


def spread(shards: list[np.ndarray]) -> float:
    """How far the label shares of the nodes lie from those of the whole: mean total variation, 0 to 1."""
    whole = np.bincount(LABELS, minlength=10) / D
    return float(np.mean([np.abs(np.bincount(LABELS[s], minlength=10) / len(s) - whole).sum() / 2 for s in shards]))


@pytest.mark.parametrize("partitioner", ALL, ids=lambda p: type(p).__name__)
def test_each_example_has_one_owner_and_the_seed_decides(partitioner: Partitioner) -> None:
    shards = partitioner.split(DATA, N, seed=3)
    assert len(shards) == N and all(len(shard) > 0 for shard in shards)
    assert np.array_equal(np.sort(np.concatenate(shards)), np.arange(D))
    again, other = partitioner.split(DATA, N, seed=3), partitioner.split(DATA, N, seed=4)
    assert all(np.array_equal(a, b) for a, b in zip(shards, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(shards, other, strict=True))


def test_sizes_are_even_for_iid_and_shards_and_uneven_for_quantity() -> None:
    assert [len(s) for s in IID().split(range(11), 3, 0)] == [4, 4, 3]
    assert {len(s) for s in LabelShards(2).split(DATA, N, 0)} == {D // N}
    sizes = [len(s) for s in QuantitySkew(0.3, min_examples=5).split(DATA, N, 0)]
    assert min(sizes) >= 5 and max(sizes) > 3 * min(sizes)
    assert spread(QuantitySkew(5.0).split(DATA, N, 0)) < 0.25  # labels stay mixed


def test_label_shards_leave_a_node_few_labels() -> None:
    # A shard of 50 from runs of about 60 equal labels touches two labels at most, so two shards touch four.
    counts = [len(np.unique(LABELS[s])) for s in LabelShards(2).split(DATA, N, 0)]
    assert max(counts) <= 4 < min(len(np.unique(LABELS[s])) for s in IID().split(DATA, N, 0))


def test_dirichlet_goes_from_skewed_to_iid_with_alpha() -> None:
    skew = [spread(Dirichlet(alpha).split(DATA, N, 0)) for alpha in (0.05, 1.0, 1000.0)]
    assert skew[0] > 0.5 > skew[1] > 0.2 > 0.05 > skew[2]


def test_dirichlet_shares_have_the_variance_of_the_law() -> None:
    # Var of a Dirichlet share is (1/N)(1 - 1/N) / (N alpha + 1); the estimate is over 200 draws of one label.
    one_label = TensorDataset(torch.zeros(5000, dtype=torch.long))
    shares = [[len(s) / 5000 for s in Dirichlet(2.0).split(one_label, 4, seed)] for seed in range(200)]
    assert np.var(shares) == pytest.approx(0.25 * 0.75 / 9, rel=0.15)


def test_dirichlet_that_cannot_feed_every_node_says_so() -> None:
    with pytest.raises(DataError, match=r"alpha=0\.01\) could not give all 6 nodes 90 examples.*attempt gave \d+"):
        Dirichlet(0.01, min_examples=90).split(DATA, N, 0)


def test_by_key_keeps_groups_whole_and_balanced() -> None:
    shards = ByKey(SPEAKERS).split(DATA, N, 0)
    owners = [{int(k) for k in SPEAKERS[s]} for s in shards]
    assert sum(len(o) for o in owners) == len(np.unique(SPEAKERS))  # no group on two nodes
    sizes = [len(s) for s in shards]
    assert max(sizes) - min(sizes) <= np.bincount(SPEAKERS).max()
    by_function = ByKey(lambda example: int(SPEAKERS[int(example[0])])).split(DATA, N, 0)
    assert all(np.array_equal(a, b) for a, b in zip(shards, by_function, strict=True))


def test_by_key_errors() -> None:
    with pytest.raises(DataError, match=r"2 distinct keys, too few for 3 nodes.*num_nodes=2"):
        ByKey(["a", "b"] * 300).split(DATA, 3, 0)
    with pytest.raises(DataError, match="5 keys for 600 examples"):
        ByKey([1, 2, 3, 4, 5]).split(DATA, 3, 0)


class Pairs:
    """A plain sequence of (x, label), counting what is read."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return D

    def __getitem__(self, i: int) -> tuple[int, int]:
        self.read += 1
        return i, int(LABELS[i])


class WithTargets(Pairs):
    targets = LABELS.tolist()


def test_labels_are_found_without_reading_where_possible() -> None:
    some = [5, 3, 99]
    pairs, stored = Pairs(), WithTargets()
    assert np.array_equal(labels_of(DATA), LABELS)
    assert np.array_equal(labels_of(pairs), LABELS) and pairs.read == D
    assert np.array_equal(labels_of(stored), LABELS) and stored.read == 0
    assert np.array_equal(labels_of(Subset(Subset(DATA, range(600)), some)), LABELS[some])
    assert np.array_equal(labels_of(ConcatDataset([DATA, Subset(DATA, some)])), np.append(LABELS, LABELS[some]))
    assert labels_of([{"text": "a", "label": 4}, {"text": "b", "label": 2}]).tolist() == [4, 2]


def test_labels_that_are_no_classes_are_refused() -> None:
    with pytest.raises(DataError, match=r"float64.*QuantitySkew"):
        labels_of([(0, 0.5), (1, 0.25)])
    with pytest.raises(DataError, match=r"shape \(2, 2\)"):
        labels_of(TensorDataset(torch.zeros(2, 1), torch.zeros(2, 2)))
    with pytest.raises(DataError, match="no label in example 0"):
        labels_of([torch.zeros(3), torch.zeros(3)])


def test_text_forms() -> None:
    assert parse_partitioner("iid") == IID()
    assert parse_partitioner("shards") == LabelShards(2) != parse_partitioner("shards:3") == LabelShards(3)
    assert parse_partitioner(" Dirichlet:0.3 ") == Dirichlet(0.3)
    assert parse_partitioner("quantity:2") == QuantitySkew(2.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dirchlet:0.3", "did you mean 'dirichlet'"),
        ("dirichlet", "look like 'dirichlet:0.3'"),
        ("dirichlet:", "look like 'dirichlet:0.3'"),
        ("dirichlet:much", "'much' in partition"),
        ("dirichlet:-1", "alpha=-1.0 must be a number over 0"),
        ("dirichlet:nan", "alpha=nan"),
        ("shards:0", "shards_per_node=0"),
        ("shards:1.5", "look like 'shards:2'"),
        ("iid:3", "look like 'iid'"),
    ],
)
def test_text_that_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_partitioner(text)


@pytest.mark.parametrize("partitioner", [IID(), LabelShards(1), Dirichlet(0.3), QuantitySkew(), ByKey([0, 1, 2])])
def test_more_nodes_than_examples_are_refused_at_once(partitioner: Partitioner) -> None:
    with pytest.raises(DataError, match="3 examples are too few for 4 nodes: use fewer nodes"):
        Stream([1, 2, 3], 4, batch_size=1, partitioner=partitioner)
    with pytest.raises(DataError, match="3 examples are too few for 9007199254740992 nodes"):  # no memory is asked for
        partitioner.split([1, 2, 3], 2**53, seed=0)


def test_more_shards_than_examples_are_refused_at_once() -> None:
    assert len(LabelShards(D // N).split(DATA, N, 0)) == N  # an example for each shard
    with pytest.raises(DataError, match=rf"use shards_per_node={D // N} or less"):
        LabelShards(D // N + 1).split(DATA, N, 0)
    with pytest.raises(DataError, match="a shard needs an example"):
        LabelShards(2**53).split(DATA, N, 0)
    for partitioner in (Dirichlet(0.3, min_examples=2**53), QuantitySkew(min_examples=2**53)):
        with pytest.raises(DataError, match=r"with min_examples=9007199254740992: .*, or a smaller min_examples"):
            partitioner.split(DATA, N, 0)


def test_many_clients_of_few_labels() -> None:
    """The error's remedies work: Dirichlet(0.1) over 200 clients is the usual setting, whose clients are sampled."""
    data = TensorDataset(torch.zeros(1400, 1), torch.arange(1400) % 10)
    with pytest.raises(DataError, match=r"all 200 nodes an example of 1400 in 100 attempts: .*min_examples=0\) if cl"):
        Dirichlet(0.1).split(data, 200, 0)
    with pytest.raises(DataError, match=r"all 200 nodes 2 examples .* smaller min_examples \(the best attempt gave 0;"):
        Dirichlet(0.1, min_examples=2).split(data, 200, 0)
    with pytest.raises(DataError, match="use fewer nodes or more data, or a smaller min_examples"):
        QuantitySkew(min_examples=2).split(data, 701, 0)
    for partitioner in (Dirichlet(0.1, min_examples=0), QuantitySkew(0.1, min_examples=0)):
        sampled = Stream(data, 200, batch_size=4, partitioner=partitioner, may_be_empty=True)
        lengths = [len(shard) for shard in partitioner.split(data, 200, 0)]
        assert sampled.examples.tolist() == lengths and sum(lengths) == 1400
        assert sampled.empty == {node for node, length in enumerate(lengths) if not length} != set()
        assert lengths[sampled.first] > 0
        with pytest.raises(DataError, match=r"without examples .* and only sampled clients may have none"):
            Stream(data, 200, batch_size=4, partitioner=partitioner)
    assert 0 < label_skew(Dirichlet(0.1, min_examples=0), data, 200) <= 1


def test_sampled_clients_may_have_empty_shards() -> None:
    data = TensorDataset(torch.randn(90, 4), torch.arange(90) % 3)
    trainer = LocalTrainer(torch.nn.Linear(4, 3), data, loss_fn=torch.nn.functional.cross_entropy)
    given = {"num_nodes": 40, "max_steps": 8, "batch_size": 4, "partitioner": Dirichlet(0.05, min_examples=0)}
    trainer.fit(FedAvgStrategy("sgd", H=2, client_fraction=0.2), progress=False, **given)
    assert trainer.history.last["empty_clients"] > 10
    with pytest.raises(DataError, match="only sampled clients may have none"):
        trainer.fit(FedAvgStrategy("sgd", H=2), progress=False, **given)


class Wrong(Partitioner):
    def split(self, dataset: object, num_nodes: int, seed: int) -> list[np.ndarray]:
        return [np.array([0, 1]), np.array([2, 7])][:num_nodes]


def test_a_users_partitioner_is_checked() -> None:
    with pytest.raises(DataError, match=r"node 1 an index outside 0\.\.2"):
        Stream([1, 2, 3], 2, batch_size=1, partitioner=Wrong())
    with pytest.raises(DataError, match="2 shards for 3 nodes"):
        Stream([1, 2, 3], 3, batch_size=1, partitioner=Wrong())
    assert Stream(range(8), 2, batch_size=1, partitioner=Wrong()).examples.tolist() == [2, 2]


def test_label_skew_is_the_share_of_examples_that_need_another_label():
    data = TensorDataset(torch.zeros(40, 1), torch.arange(40) % 4)

    class Halves(Partitioner):
        """Node 0 gets the labels 0 and 1, node 1 the labels 2 and 3."""

        def split(self, dataset, num_nodes, seed):
            labels = labels_of(dataset)
            return [np.flatnonzero(labels < 2), np.flatnonzero(labels >= 2)]

    assert label_skew(Halves(), data, 2) == 0.5  # half of a node's examples
    assert label_skew(LabelShards(1), data, 4) == 0.75
    assert label_skew(IID(), data, 4) == 0 < label_skew(QuantitySkew(1.0), data, 4) < 0.5
    assert label_skew(ByKey([0, 1] * 20), data, 2) == 0.5  # even labels, odd labels
    unread = [(torch.zeros(1), 0), (torch.zeros(1), 1)]  # no labels without reading the examples
    assert label_skew(ByKey([0, 1]), unread, 2) is None and label_skew(IID(), unread, 2) == 0
    assert label_skew(ByKey([0, 1] * 20), TensorDataset(torch.zeros(40, 1), torch.rand(40)), 2) is None
