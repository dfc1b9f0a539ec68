"""What the world gives is answered with one clear error, or gone on from; never with another library's exception."""

import contextlib
import csv
import json
import os
import resource

import pytest
import torch
from checkpoints import RUNS, examples, fit, network, small_disk
from torch import nn

from exogym import LocalTrainer, load_model, save_model
from exogym.errors import ArgumentError, DataError
from exogym.logger import CSVLogger, JSONLinesLogger, TensorBoardLogger
from exogym.remote import HostsConfig
from exogym.strategy import SimpleReduceStrategy
from exogym.testing import fingerprint

MAKE, OPTIONS = RUNS["pieces"]
STRATEGY = SimpleReduceStrategy(lr=0.1)


def train(data=None, **options):
    trainer = LocalTrainer(network(), examples() if data is None else data, loss_fn=nn.functional.cross_entropy)
    trainer.fit(STRATEGY, **{"num_nodes": 2, "max_steps": 2, "batch_size": 4, "device": "cpu"} | options)
    return trainer


# Logs on a disk that fills up


# TensorBoard writes in a thread of its own, which ends with the error that is then said.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [CSVLogger, JSONLinesLogger, TensorBoardLogger])
def test_a_log_on_a_full_disk_is_given_up_and_the_training_goes_on(kind, tmp_path, capsys):
    if kind is TensorBoardLogger:
        pytest.importorskip("tensorboard")
    wanted = fingerprint(fit(MAKE(), **OPTIONS).model)
    folder = tmp_path / "disk"
    with small_disk(folder, 64 * 1024):

        def fill(record):
            if record["step"] == 4 and not (folder / "big").exists():
                with open(folder / "big", "wb", buffering=0) as file, contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(4096))

        path = folder if kind is TensorBoardLogger else folder / "log"
        trainer = fit(MAKE(), logger=[fill, kind(path)], **OPTIONS | {"max_steps": 60})
        said = [line for line in capsys.readouterr().err.splitlines() if "no longer written" in line]
        assert len(said) == 1 and str(path) in said[0] and "No space left on device" in said[0]
        assert trainer.history[-1]["step"] == 60
        os.unlink(folder / "big")
        again = fit(MAKE(), logger=kind(path), **OPTIONS)  # the same logger works where there is room
        assert fingerprint(again.model) == wanted
        if kind is CSVLogger:
            with open(path) as file:
                assert int(list(csv.DictReader(file))[-1]["step"]) == 12
        elif kind is JSONLinesLogger:
            assert json.loads(path.read_text().splitlines()[-1])["step"] == 12
    assert capsys.readouterr().err.count("no longer written") == 0


def test_a_device_that_is_always_full(capsys):
    fit(MAKE(), logger=[CSVLogger("/dev/full"), JSONLinesLogger("/dev/full")], **OPTIONS)
    assert capsys.readouterr().err.count("/dev/full is no longer written") == 2


# Names that no file can have

NAMES = {"nul": "a\0b", "long": "x" * 300, "deep": "y/" * 3000 + "y", "surrogate": "\ud800"}
USES = {
    "save_dir": lambda path: train(save_dir=path),
    "csv": lambda path: train(logger=CSVLogger(path)),
    "jsonl": lambda path: train(logger=JSONLinesLogger(path)),
    "in a folder": lambda path: train(logger=CSVLogger(f"{path}/log.csv")),
    "to_csv": lambda path: train().history.to_csv(path),
    "save_model": lambda path: save_model(nn.Linear(2, 2), path),
    "load_model": lambda path: load_model(nn.Linear(2, 2), path),
    "hosts": HostsConfig.load,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("use", USES)
def test_a_path_that_cannot_be(use, name, tmp_path):
    with pytest.raises(ArgumentError, match=r"cannot be (written|read)|could not be written"):
        USES[use](f"{tmp_path}/{NAMES[name]}")
    assert not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_for_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    for name in NAMES.values():
        with pytest.raises(ArgumentError, match=r"log_dir=.* cannot be written"):
            train(logger=TensorBoardLogger(f"{tmp_path}/{name}"))


# Data sets that say what cannot be


class Says(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return examples()[i % 40]


@pytest.mark.parametrize("length", [-1, 2**40, 2**62, 2**63, 2.5])
@pytest.mark.parametrize("how", ["whole", "factory", "partitioner"])
def test_a_length_that_cannot_be(how, length):
    with pytest.raises(DataError, match=r"length that none can have|to put them in an order takes|has no length"):
        if how == "factory":
            train(lambda rank, num_nodes, is_train: Says(length))
        else:
            train(Says(length), partitioner="iid" if how == "partitioner" else None)


LOADER = {
    "num_workers": ({"num_workers": -1}, "num_workers=-1 must be a whole number, 0 or more"),
    "half a worker": ({"num_workers": 1.5}, "num_workers=1.5 must be"),
    "text": ({"num_workers": "2"}, "num_workers='2' must be"),
    "persistent_workers": ({"persistent_workers": True}, "persistent_workers option needs num_workers > 0"),
    "prefetch": ({"prefetch_factor": 2}, "DataLoader refuses that: prefetch_factor"),
    "no prefetch": ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor=0 must be a whole number of at least 1"),
    "timeout": ({"timeout": 3}, "timeout=3 is for workers: give num_workers"),
    "less than no timeout": ({"timeout": -1, "num_workers": 1}, "timeout option should be non-negative"),
    "context": ({"multiprocessing_context": "bogus", "num_workers": 1}, "valid start method"),
    "collate_fn": ({"collate_fn": 3}, "collate_fn=3 cannot be called"),
    "worker_init_fn": ({"worker_init_fn": 3, "num_workers": 1}, "worker_init_fn=3 cannot be called"),
    "order": ({"in_order": False, "num_workers": 2}, "the order follows from seed"),
}


@pytest.mark.parametrize("name", LOADER)
def test_what_no_dataloader_takes(name):
    given, message = LOADER[name]
    with pytest.raises(ArgumentError, match="dataloader_kwargs") as caught:
        train(dataloader_kwargs=given)
    assert message in str(caught.value)


def test_workers_that_do_not_persist_give_the_same_bits():
    wanted = fingerprint(train(dataloader_kwargs={"num_workers": 0}).model)
    assert fingerprint(train(dataloader_kwargs={"num_workers": 1, "persistent_workers": False}).model) == wanted


# Hosts files

HOSTS = {
    "deep": "[" * 100_000,
    "deep objects": '{"master":' * 100_000,
    "a huge number": '{"master": "a", "master_port": ' + "9" * 5000 + "}",
    "many slots": '{"master": {"address": "a", "slots": 4097}}',
    "slots of 4,000 digits": '{"master": {"address": "a", "slots": ' + "9" * 4000 + "}}",
    "surrogate": '{"master": "a", "project_path": "/\\ud800"}',
    "surrogate python": '{"master": "a", "python_env": "/\\udcff"}',
    "surrogate key": '{"master": "a", "ssh_key_path": "/\\ud800"}',
    "surrogate field": '{"master": "a", "\\ud800": 1}',
    "surrogate host": '{"master": "\\ud800"}',
}


@pytest.mark.parametrize("name", HOSTS)
def test_a_hosts_file_that_cannot_be(name, tmp_path):
    path = tmp_path / "h.json"
    path.write_text(HOSTS[name])
    with pytest.raises(ArgumentError) as caught:
        HostsConfig.load(path)
    text = str(caught.value)
    assert text.startswith("h.json: ") and len(text) < 1000 and text.encode()


def test_a_dict_of_hosts_that_cannot_be():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for given in (
        {"master": deep},
        {"master": "a", "workers": [10**5000]},
        {"master": {"address": "a", "slots": 10**5000}},
    ):
        with pytest.raises(ArgumentError, match=r"^hosts: .*too large to print"):
            HostsConfig.load(given)
    while deep:  # to forget it level by level
        deep = deep.pop()
    assert HostsConfig.load({"master": {"address": "a", "slots": 4096}}).slots == 4096


# Memory


@pytest.mark.parametrize("nodes", [10**9, 10**12, 2**70])
def test_rows_that_have_no_room_are_refused_before_any_is_made(nodes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ArgumentError, match=rf"num_nodes={nodes}: .* GB for the parameters alone, and .* nodes fit"):
        train(num_nodes=nodes)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_what_fits_is_said_and_fits(monkeypatch):
    """90 parameters of 4 bytes: 5 rows have room in 1,999 bytes."""
    numbers = sum(p.numel() for p in network().parameters())
    monkeypatch.setattr("exogym.compute.memory.free_memory_bytes", lambda device: 5 * 4 * numbers + 3)
    with pytest.raises(ArgumentError, match=f"6 rows of {numbers} parameters .* at most 5 nodes fit"):
        train(num_nodes=6)
    train(num_nodes=5)
    monkeypatch.setattr("exogym.compute.memory.free_memory_bytes", lambda device: 3)
    with pytest.raises(ArgumentError, match="not even one node fits"):
        train(num_nodes=1)
