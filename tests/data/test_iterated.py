"""Data read in order: dealt without overlap, gone on with at any example, the same on every layout."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_order import DATA, D, InOrder, IteratorWithState, WithState, X, own
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from exogym import LocalTrainer
from exogym.balance import Balance
from exogym.data import IterableData, Stream, iterated
from exogym.data.iterated import Dealer
from exogym.data.reading import Reader, described
from exogym.errors import ArgumentError, CheckpointError, DataError
from exogym.faults import Faults
from exogym.strategy import AsyncDiLoCoStrategy, DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy
from exogym.testing import fingerprint

KINDS = [InOrder, WithState, IteratorWithState]


def stream_of(data: Any, nodes: int = 3, batch: int = 2, shuffle: bool = False, **options: Any) -> Stream:
    return Stream(data, nodes, batch_size=batch, shuffle=shuffle, seed=5, **options)


def taken(stream: Stream, node: int, first: int, count: int) -> list[int]:
    return [int(k) for batch in stream.batches(node, first, count) for k in batch]


# --- dealing


def test_example_k_goes_to_node_k_mod_n_without_a_gap_between_epochs() -> None:
    stream = stream_of(InOrder(11), nodes=3, batch=2)
    whole = [k % 11 for k in range(66)]
    for node in (2, 0, 1):
        assert taken(stream, node, 0, 11) == whole[node::3]
    assert taken(stream, 1, 4, 3) == whole[1::3][8:14]  # and back


@pytest.mark.parametrize("shuffle", [False, True])
def test_dealt_like_the_same_data_with_positions(shuffle: bool) -> None:
    """Where both are defined: the epochs hold whole steps, and a window holds an epoch."""
    for sizes in ([2, 2, 2], [1, 2, 3]):
        both = [stream_of(data, 3, 2, shuffle) for data in (InOrder(), list(range(D)))]
        for stream in both:
            stream.share_out(sizes)
        for node in range(3):
            ours, theirs = ([x.tolist() for x in stream.batches(node, 0, 40)] for stream in both)
            assert ours == theirs
    other = stream_of(InOrder(), 3, 2, not shuffle)
    assert taken(other, 0, 0, 5) != taken(both[0], 0, 0, 5)


def test_windows_are_shuffled_by_themselves_and_by_the_epoch() -> None:
    stream = stream_of(IterableData(InOrder(25), window=10), nodes=1, batch=5, shuffle=True)
    epochs = [taken(stream, 0, 5 * epoch, 5) for epoch in range(2)]
    for epoch in epochs:
        assert [sorted(epoch[a:b]) for a, b in ((0, 10), (10, 20), (20, 25))] == [
            list(range(a, b)) for a, b in ((0, 10), (10, 20), (20, 25))
        ]
    assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])


def test_each_node_of_a_factory_reads_its_own() -> None:
    stream = stream_of(lambda rank, num_nodes, is_train: InOrder(5 * rank + 5, 5 * rank), nodes=2, batch=2)
    assert taken(stream, 1, 0, 5) == [5, 6, 7, 8, 9] * 2 and taken(stream, 0, 2, 2) == [4, 0, 1, 2]
    assert stream.endless and not stream.is_shared and stream.iterated.most_steps is None
    known = stream_of(lambda rank, num_nodes, is_train: IterableData(range(rank + 4)), nodes=2, batch=2)
    assert known.examples.tolist() == [4, 5] and known.total == 9 and not known.endless
    with pytest.raises(DataError, match="for some nodes"):
        stream_of(lambda rank, num_nodes, is_train: InOrder() if rank else [1, 2])


# --- going on


def marks_at(data: Any, step: int, processes: int, shuffle: bool, nodes: int = 3) -> tuple[dict[str, Any], list[int]]:
    """Let `processes` read up to `step`, and return what process 0 saves, and all that was seen."""
    found, seen = {}, []
    for ranks in np.array_split(np.arange(nodes), processes):
        stream = stream_of(data, nodes, 2, shuffle)
        taken(stream, 0, 0, 2)  # the trial steps before a run
        place = stream.iterated.begin(type("Fleet", (), {"ranks": ranks.tolist()}))
        for start in range(0, step, 7):
            for node in ranks.tolist():
                seen += taken(stream, node, start, min(7, step - start))
        found = found or place.shared()
    return found, seen


@pytest.mark.parametrize("kind", KINDS)
def test_every_example_once_an_epoch_wherever_a_run_is_killed(kind: type[InOrder]) -> None:
    """67 stops for each of three kinds, in four epochs of 101 examples; with 1, 2 and 3 processes before and after."""
    size, nodes, steps = 101, 3, 68
    data = IterableData(kind(size), window=20)
    orders = [[taken(stream_of(data, nodes, 2, x), node, 0, steps) for node in range(nodes)] for x in (False, True)]
    for stop in range(1, steps):
        shuffle = stop % 4 < 2
        whole = orders[shuffle]
        marks, seen = marks_at(data, stop, 1 + stop % 3, shuffle)
        marks = {name: x.clone() for name, x in marks.items()}
        rest: list[list[int]] = [[], [], []]
        for ranks in np.array_split(np.arange(nodes), 1 + stop % 2 + stop % 5 % 2):
            stream = stream_of(data, nodes, 2, shuffle)
            taken(stream, 0, 0, 2)
            place = stream.iterated.begin(type("Fleet", (), {"ranks": ranks.tolist()}))
            place.load_shared(marks)
            for node in ranks.tolist():
                rest[node] = taken(stream, node, stop, steps - stop)
        assert rest == [row[2 * stop :] for row in whole]
        counts = Counter(seen + [k for row in rest for k in row])
        last = (2 * nodes * steps) % size  # of the fifth epoch
        assert set(counts) == set(range(size)) and sum(counts.values()) == 2 * nodes * steps
        assert sum(count == 5 for count in counts.values()) == last and set(counts.values()) == {4, 5}


def test_a_state_saves_reading_and_no_state_reads_one_epoch_at_most() -> None:
    marks, _ = marks_at(WithState(1000), 160, 1, shuffle=False)
    WithState.read = []
    stream = stream_of(WithState(1000))
    stream.iterated.begin(type("Fleet", (), {"ranks": [0, 1, 2]})).load_shared(marks)
    assert taken(stream, 0, 160, 1) == [960, 963] and min(WithState.read) == 959 // 64 * 64
    marks, _ = marks_at(InOrder(1000), 500, 1, shuffle=False)
    assert "state" not in marks and marks["place"][:3].tolist() == [2, 2000, 2960]


def test_other_data_are_found_when_a_run_goes_on() -> None:
    before, after = (list(range(first, first + 100)) for first in (0, 1))
    for kind in (InOrder, WithState):
        marks, _ = marks_at(kind(100, 0, before), 12, 1, shuffle=False)
        stream = stream_of(kind(100, 0, after))
        stream.iterated.begin(type("Fleet", (), {"ranks": [0, 1, 2]})).load_shared(marks)
        with pytest.raises(DataError, match="differs from the example before the interruption"):
            taken(stream, 0, 12, 1)


class Buffered(WithState):
    """Its state loses two examples, as the state of a shuffle buffer does."""

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at + 2}


def test_a_state_that_loses_examples_is_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    whole = taken(stream_of(Buffered(400)), 1, 0, 60)
    marks, _ = marks_at(Buffered(400), 30, 1, shuffle=False)
    stream = stream_of(Buffered(400))
    stream.iterated.begin(type("Fleet", (), {"ranks": [0, 1, 2]})).load_shared(marks)
    assert taken(stream, 1, 30, 30) == whole[60:]
    assert "does not restore the next examples" in capsys.readouterr().err


def test_marks_of_another_node_are_left_out() -> None:
    """A node that returns after an absence copies the state of another."""
    stream = stream_of(lambda rank, num_nodes, is_train: WithState(100 * rank + 100, 100 * rank), nodes=2)
    place = stream.iterated.begin(type("Fleet", (), {"ranks": [0, 1]}))
    taken(stream, 1, 0, 50)
    place.load_row(0, place.row(1))
    assert taken(stream, 0, 0, 1) == [0, 1] and place.shared() == {} and int(place.row(1)["node"]) == 1


def test_only_the_last_open_iterables_of_many_clients_stay() -> None:
    def factory(rank: int, num_nodes: int, is_train: bool) -> WithState:
        return WithState(rank * 100 + 100, rank * 100)

    stream = stream_of(factory, nodes=8, batch=2, kept=2, asks_all=False)
    place = stream.iterated.begin(type("Fleet", (), {"ranks": list(range(8))}))
    WithState.read = []
    for step in (0, 40):
        for node in range(8):
            first = 100 * node + 2 * step % 100
            assert taken(stream, node, step, 1) == [first, first + 1]
    assert len(stream.iterated._dealers) == 2
    assert int(place.row(3)["place"][2]) == 64  # closed, but its place is known


# --- memory


def test_examples_for_absent_nodes_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterated, "KEPT_BYTES", 8 * 6 * 10)
    stream = stream_of(InOrder(None))
    taken(stream, 0, 0, 1)
    assert stream.iterated.most_steps == 10
    stream.iterated.begin(type("Fleet", (), {"ranks": [0, 1, 2]}))
    for step in range(1000):
        for node in (0, 1):
            assert taken(stream, node, step, 1) == [6 * step + node, 6 * step + 3 + node]
    (dealer,) = stream.iterated._dealers.values()
    assert max(map(len, dealer.queues.values())) <= 200
    assert taken(stream, 2, 1000, 1) == [6002, 6005]  # it is back
    assert taken(stream, 2, 3, 1) == [20, 23]  # and may ask for what it missed


def test_one_process_keeps_examples_of_its_own_nodes_only() -> None:
    dealer = Dealer(Reader(IterableData(range(1000)), 0, False), dict.fromkeys(range(50), 1), here=[3, 4])
    assert dealer.take(3, 0, 10) == list(range(3, 500, 50)) and sum(map(len, dealer.queues.values())) == 10


# --- order that is not known


class Unordered(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(random.SystemRandom().sample(range(1000), 1000))


class Random(IterableDataset[Any]):
    """Random by the generators that ExoGym sets, so a function of the epoch and the example."""

    def __iter__(self) -> Iterator[float]:
        return (random.random() + float(torch.rand(())) + np.random.rand() for _ in range(100))


def test_an_order_that_changes_is_refused() -> None:
    stream = stream_of(Unordered())
    taken(stream, 0, 0, 2)
    stream.iterated.begin(type("Fleet", (), {"ranks": [0, 1, 2]}))
    with pytest.raises(DataError, match="read a second time, the iterable begins with other examples"):
        taken(stream, 0, 0, 2)


def test_random_examples_do_not_depend_on_who_reads() -> None:
    streams = [stream_of(Random()) for _ in range(2)]
    before = random.getstate()
    ours = [float(x) for batch in streams[0].batches(1, 0, 60) for x in batch]
    assert random.getstate() == before
    theirs = [float(x) for step in (30, 0) for batch in streams[1].batches(1, step, 30) for x in batch]
    assert ours == theirs[60:] + theirs[:60] and len(set(ours)) == 120


class Once(IterableDataset[Any]):
    def __init__(self) -> None:
        self.left = list(range(20))

    def __iter__(self) -> Iterator[int]:
        while self.left:
            yield self.left.pop(0)


class Fails(InOrder):
    def __iter__(self) -> Iterator[int]:
        yield from range(3)
        raise OSError("no more disk")


def test_what_cannot_be_read_says_why() -> None:
    for data, message in (
        (InOrder(0), "the iterable has no examples$"),
        (Once(), "has no examples in epoch 1: let __iter__ start anew"),
        (Fails(), "failed at example 0 of epoch 0, or at one of the next 64: OSError: no more disk"),
        (IterableData(InOrder(30), length=31), "expected 31 examples in an epoch, got 30"),
        (IterableData(InOrder(300), length=31), "expected 31 examples in an epoch, got at least 64"),
        (IterableData([1, "a"] * 9), "do not form a batch.*collate_fn"),
    ):
        with pytest.raises(DataError, match=message):
            taken(stream_of(data), 0, 0, 30)
    for wrong in (3, "text", iter([1]), {1, 2}):
        with pytest.raises(DataError, match="starts anew"):
            IterableData(wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="window=0"):
        IterableData([1], window=0)
    with pytest.raises(DataError, match="have no indices"):
        stream_of(InOrder()).indices(0, 0)
    assert described(InOrder()).length is None and described(DataLoader(DATA, batch_size=None)).length == D


# --- runs


def trained(data: Any, strategy: Any = None, val: Any = None, **options: Any) -> str:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 2))
    given = {"num_nodes": 3, "max_steps": 20, "batch_size": 4, "device": "cpu"} | options
    trainer = LocalTrainer(model, data, val, loss_fn=mse_loss)
    found = fingerprint(trainer.fit(strategy or DiLoCoStrategy(H=5, lr=0.01), **given))
    return found if val is None else found + str(trainer.history.last["val_loss"])


def examples(kind: type[InOrder] = InOrder) -> InOrder:
    return kind(D, 0, DATA)


@pytest.mark.parametrize("shuffle", [False, True])
def test_bits_of_every_layout_and_of_the_same_data_with_positions(shuffle: bool, tmp_path: Path) -> None:
    wanted = trained(DATA, shuffle=shuffle)
    assert trained(examples(), shuffle=shuffle) == wanted != trained(examples(), shuffle=shuffle, seed=1)
    for kind in (InOrder, WithState):
        for number, (before, after) in enumerate(((1, 2), (3, 1))):
            given = {"shuffle": shuffle, "save_dir": tmp_path / f"{kind.__name__}{number}"}
            trained(examples(kind), max_steps=13, processes=before, **given)
            assert trained(examples(kind), processes=after, resume=True, **given) == wanted
    ddp = [trained(x, SimpleReduceStrategy(lr=0.01), shuffle=shuffle) for x in (DATA, examples())]
    assert ddp[0] == ddp[1] != wanted


def test_bits_of_nodes_that_are_absent_or_have_other_batches() -> None:
    for options in (
        {"faults": Faults(absent={1: [(3, 11)]}, drop_rate=0.1)},
        {"balance": Balance("batch", speeds=[1, 2, 3])},
        {"gradient_accumulation": 2},
    ):
        assert trained(examples(), shuffle=False, **options) == trained(DATA, shuffle=False, **options)


def own_with_positions(rank: int, num_nodes: int, is_train: bool) -> Any:
    return [DATA[k] for k in range(16 * rank, 16 * rank + 16)]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (AsyncDiLoCoStrategy(H=4, lr=0.01), {"network": "1Gbps,1ms", "step_seconds": [0.1, 0.2, 0.3, 0.1, 0.1, 0.5]}),
        (FedAvgStrategy(H=3, client_fraction=0.4, lr=0.01), {}),
        (FedAvgStrategy(local_epochs=1, lr=0.01), {}),
        (DiLoCoStrategy(H=5, lr=0.01), {"faults": Faults(slow={1: 0.5})}),
        (DiLoCoStrategy(H=5, lr=0.01), {"balance": Balance("steps", speeds=[1, 2, 3, 1, 1, 1])}),
    ],
)
def test_nodes_at_their_own_pace_read_their_own_iterables(strategy: Any, options: Any, tmp_path: Path) -> None:
    options = {"num_nodes": 6, "shuffle": False} | options
    wanted = trained(own_with_positions, strategy, **options)
    trained(own, strategy, save_dir=tmp_path, **options | {"max_steps": 9})
    assert trained(own, strategy, save_dir=tmp_path, resume=True, processes=2, **options) == wanted


def test_evaluations_end_where_the_iterable_ends() -> None:
    wanted = trained(DATA, val=TensorDataset(*DATA[:30]), shuffle=False)
    assert trained(examples(), val=IterableData(InOrder(30, 0, DATA), length=30), shuffle=False) == wanted
    assert trained(examples(), val=InOrder(30, 0, DATA), val_size=50, shuffle=False) == wanted
    assert trained(examples(), val=InOrder(None, 0, DATA), val_size=30, shuffle=False) == wanted
    with pytest.raises(
        ArgumentError, match="a val_dataset without a length needs val_size: the evaluation might never"
    ):
        trained(examples(), val=InOrder(None, 0, DATA))


def test_an_epoch_of_a_known_length() -> None:
    assert trained(IterableData(examples(), length=D), max_steps=None, num_epochs=2) == trained(
        DATA, max_steps=None, num_epochs=2
    )
    for options, message in (
        ({"num_epochs": 2}, "an iterable without a length with num_epochs=2: an epoch's length is unknown"),
        ({"max_steps": None}, "an iterable without a length needs max_steps"),
        ({"partitioner": "iid"}, "a partitioner needs all examples at once"),
        ({"dataloader_kwargs": {"num_workers": 2}}, "StatefulDataLoader"),
        ({"strategy": FedAvgStrategy(H=2, client_fraction=0.5)}, "the examples of slow nodes would fill the memory"),
    ):
        with pytest.raises(ArgumentError, match=message):
            trained(examples(), **options)


def test_a_window_is_part_of_what_a_resumed_run_must_have(tmp_path: Path) -> None:
    trained(IterableData(examples(), window=32), max_steps=9, save_dir=tmp_path)
    with pytest.raises(CheckpointError, match="window"):
        trained(IterableData(examples(), window=16), save_dir=tmp_path, resume=True)


# --- real packages, and real kills


def collated(given: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([one["x"] for one in given]), torch.stack([one["y"] for one in given])


def gone_on_with(make: Any, folder: Path, **options: Any) -> str:
    trained(make(), save_dir=folder, **options | {"max_steps": 13, "processes": 2})
    return trained(make(), save_dir=folder, resume=True, **options)


@pytest.mark.slow
def test_hugging_faces_streaming_data_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    datasets = pytest.importorskip("datasets")

    def make() -> Any:
        rows = datasets.Dataset.from_dict({"x": X.tolist(), "y": (X[:, :2] * 2).tolist()})
        return rows.to_iterable_dataset(num_shards=4).with_format("torch")

    options = {"shuffle": False, "dataloader_kwargs": {"collate_fn": collated}}
    wanted = trained(make(), **options)
    assert trained(make(), max_steps=8, **options) == trained(DATA, max_steps=8, shuffle=False)  # one epoch
    assert trained(make(), processes=3, **options) == wanted == gone_on_with(make, tmp_path / "a", **options)
    assert "does not restore" not in capsys.readouterr().err
    shuffled = gone_on_with(lambda: make().shuffle(seed=3, buffer_size=20), tmp_path / "b", **options)
    assert shuffled == trained(make().shuffle(seed=3, buffer_size=20), **options) != wanted
    by_shard = trained(lambda rank, num_nodes, is_train: make().shard(num_nodes, rank), num_nodes=4, **options)
    assert by_shard == trained(
        lambda rank, num_nodes, is_train: make().shard(num_nodes, rank), num_nodes=4, processes=2, **options
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_torchdatas_loaders(tmp_path: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    import torchdata.nodes

    wanted = trained(DATA, shuffle=False)
    for number, make in enumerate((
        lambda: stateful.StatefulDataLoader(DATA, batch_size=None),
        lambda: stateful.StatefulDataLoader(DATA, batch_size=None, num_workers=2),
        lambda: torchdata.nodes.Loader(torchdata.nodes.IterableWrapper(examples())),
    )):  # fmt: skip
        assert gone_on_with(make, tmp_path / str(number), shuffle=False) == wanted
    with pytest.raises(DataError, match=r"IterableWrapper, which can be read only once.*torchdata\.nodes\.Loader"):
        trained(torchdata.nodes.IterableWrapper(examples()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_web_datasets(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    with wds.ShardWriter(str(tmp_path / "shard-%d.tar"), maxcount=16, verbose=0) as writer:
        for k, (x, y) in enumerate(DATA):
            writer.write({"__key__": f"{k:05d}", "x.pth": x, "y.pth": y})
    shards = [str(tmp_path / f"shard-{k}.tar") for k in range(6)]

    def make() -> Any:
        data = wds.WebDataset(shards, shardshuffle=False, nodesplitter=None, empty_check=False)
        return data.decode("torch").to_tuple("x.pth", "y.pth")

    assert gone_on_with(make, tmp_path / "kept", shuffle=False) == trained(DATA, shuffle=False)


@pytest.mark.slow
def test_memory_stays_flat() -> None:
    """A million examples; see benchmarks/streams.py for whole runs."""
    import tracemalloc

    stream = stream_of(IterableData(InOrder(None)), nodes=4, batch=50, shuffle=True)
    stream.iterated.begin(type("Fleet", (), {"ranks": [0, 1, 2, 3]}))
    tracemalloc.start()
    try:
        peaks = []
        for first in range(0, 5000, 500):
            for node in range(4):
                for _ in stream.batches(node, first, 500):
                    pass
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.reset_peak()
    finally:
        tracemalloc.stop()
    assert max(peaks[1:]) < 1.02 * peaks[1] and peaks[-1] > 500 * 50 * 3 * 28
