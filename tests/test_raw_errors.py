"""What the world gives is answered with one clear error, or gone on from; never with another library's exception."""

import contextlib
import csv
import errno
import inspect
import json
import os
import resource

import pytest
import torch
from checkpoints import RUNS, examples, fit, network, small_disk
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from exogym import LocalTrainer, attach, load_model, save_model
from exogym.cli import main
from exogym.core.compute.outputs import Loss
from exogym.data import BulkDataset
from exogym.data.loading import _OURS
from exogym.errors import LOADER_ARGUMENTS, ArgumentError, DataError, ModelError
from exogym.logger import CSVLogger, JSONLinesLogger, TensorBoardLogger
from exogym.machines.remote import HostsConfig
from exogym.strategy import SimpleReduceStrategy
from exogym.testing import fingerprint

MAKE, OPTIONS = RUNS["pieces"]
STRATEGY = SimpleReduceStrategy(lr=0.1)


def train(data=None, **options):
    trainer = LocalTrainer(network(), examples() if data is None else data, loss_fn=nn.functional.cross_entropy)
    trainer.fit(STRATEGY, **{"num_nodes": 2, "max_steps": 2, "batch_size": 4, "device": "cpu"} | options)
    return trainer


# The commonest mistakes: what was given, and the line to change; torch's error is the cause

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 2
CE, MSE, BCE = F.cross_entropy, F.mse_loss, F.binary_cross_entropy_with_logits


def linear():
    return nn.Linear(6, 2)


class Gives(nn.Module):
    """Predictions in the form that `form` gives them."""

    def __init__(self, form):
        super().__init__()
        self.out, self.form = nn.Linear(6, 2), form

    def forward(self, x):
        return self.form(self.out(x[0] if isinstance(x, list) else x))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.table(x))


class Positions(nn.Module):
    """Has fewer positions than words; its loss is its own."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.out = nn.Embedding(9, 6), nn.Embedding(4, 6), nn.Linear(6, 9)

    def forward(self, idx, targets=None):
        out = self.out(self.words(idx) + self.places(torch.arange(idx.shape[1])))
        return out, F.cross_entropy(out.flatten(0, 1), targets.flatten())


def windows(size=4, kind=torch.int64, more=0):
    tokens = (torch.arange(16 * (size + 1)).view(16, -1) % 9 + more).to(kind)
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


class FailsAt13(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        if i == 13:
            raise KeyError("label")
        return X[i], Y[i]


class TakesAt13(BulkDataset):
    def __len__(self):
        return 16

    def take(self, indices):
        if 13 in indices:
            raise KeyError("label")
        return X[indices], Y[indices]


def late(x):
    """Only the last example is another one: no trial step meets it."""
    return [(x if i == 15 else X[i], Y[i]) for i in range(16)]


AS_FLOAT = r"is float64 \(.*, 6\) and the model is float32: use x = x.float\(\) in the data set, or train model.double"
AS_LONG = r"the targets are .*, but loss_fn=cross_entropy needs class numbers \(int64\): use y = y.long\(\)"
TUPLE = (
    r"Gives returned a tuple of 2 \(a tensor of shape \(2, 2\), a tensor of shape \(2, 2\)\), but "
    r"loss_fn=cross_entropy needs predictions.* loss_fn=lambda out, y: cross_entropy\(out\[0\], y\)"
)
MISTAKES = {  # model, data, loss_fn; message
    "double data": (linear, TensorDataset(X.double(), Y), CE, AS_FLOAT),
    "double data late": (linear, late(X[0].double()), CE, AS_FLOAT),
    "bytes": (linear, TensorDataset(X.byte(), Y), CE, r"is uint8 .*: use x = x.float\(\)"),
    "float labels": (linear, TensorDataset(X, Y.float()), CE, AS_LONG + ".*mse_loss"),
    "int labels": (linear, TensorDataset(X, Y.int()), CE, AS_LONG),
    "a column of labels": (linear, TensorDataset(X, Y[:, None]), CE, r"y = y.squeeze\(1\)"),
    "whole targets": (lambda: nn.Linear(6, 1), TensorDataset(X, Y[:, None]), BCE, r"use y = y.float\(\)"),
    "a tuple": (lambda: Gives(lambda p: (p, p)), TensorDataset(X, Y), CE, TUPLE),
    "a mapping": (lambda: Gives(lambda p: {"logits": p}), TensorDataset(X, Y), CE, r"entropy\(out\['logits'\], y\)"),
    "nothing": (lambda: Gives(lambda p: None), TensorDataset(X, Y), CE, "returned None, but loss_fn=.* needs"),
    "classes": (
        linear, TensorDataset(X, Y * 3), CE,
        r"a target is 3, and the model's output has shape \(2, 2\): 2 classes, 0 to 1: use "
        "at least 4 outputs in the last layer",
    ),
    "a class late": (linear, [(X[i], i // 15 * 5) for i in range(16)], CE, "a target is 5, and the model"),
    "tokens": (Tokens, TensorDataset(Y * 9, Y), CE, "the number 9, but the embedding 'table' has rows 0 to 3"),
    "float tokens": (Tokens, TensorDataset(X[:, 0], Y), CE, r"is float32 .*needs whole numbers, .*x.long\(\)"),
    "bytes as tokens": (Tokens, TensorDataset(Y.byte(), Y), CE, r"is uint8 .*needs whole numbers, int32 .*x.long\(\)"),
    "words": (Positions, windows(more=7), None, r"the number 1\d, but the embedding 'words' has rows 0 to 8"),
    "positions": (
        Positions, windows(6), None,
        r"looks up row 5, which it computed, but the embedding 'places' has rows 0 to 3: .*Embedding\(6, .* shorter",
    ),
    "int targets": (Positions, windows(kind=torch.int32), None, r"batch\[1\] is int32 .*: use y = y.long\(\)"),
    "an example": (linear, FailsAt13(), CE, "index 13, an example of node 1: KeyError: 'label'"),
    "a batch": (linear, TakesAt13(), CE, r"failed at indices .*, examples of node 1: KeyError: 'label'"),
    "a key": (
        linear, [{"input": x, "y": y, "id": 0} for x, y in zip(X, Y, strict=True)], CE,
        r"the keys \['input', 'id'\] beside the targets, and forward takes .*\['input'\]: remove \['id'\] from the",
    ),
    "a key of the model's own loss": (
        Positions, [{"idx": y[None], "targets": y[None], "id": 0} for y in Y], None, r"remove \['id'\] from",
    ),
    "another key": (
        linear, [{"inputs": x, "y": y} for x, y in zip(X, Y, strict=True)], CE, r"so that forward gets \['input'\]",
    ),
    "texts": (linear, [("to be", y) for y in Y], CE, r"batch\[0\] is a \w+ of 2 \(str first\), but a layer .* tensor:"),
    "sizes": (linear, late(X[0, :3]), CE, r"the examples \[.*15.*\] of node . do not form a batch: .*collate_fn"),
}  # fmt: skip


@pytest.mark.parametrize("compute", ["loop", "vmap"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_common_mistake_is_named_with_the_line_to_change(name, compute):
    model, data, loss_fn, words = MISTAKES[name]
    options = {"num_nodes": 2, "num_epochs": 1, "batch_size": 2, "device": "cpu", "compute": compute}
    with pytest.raises((DataError, ModelError), match=words) as caught:
        LocalTrainer(model(), data, loss_fn=loss_fn).fit(STRATEGY, **options)
    cause = caught.value.__cause__
    assert isinstance(cause, Exception) and str(cause).splitlines()[0] in str(caught.value)


def test_an_example_that_cannot_be_read_by_a_worker_is_named_too():
    options = {"max_steps": 8, "batch_size": 2, "dataloader_kwargs": {"num_workers": 1}}
    with pytest.raises(
        DataError, match=r"index 13, an example of node \d: KeyError: 'label'; try dataset\[13\]"
    ) as caught:
        LocalTrainer(nn.Linear(6, 2), FailsAt13(), loss_fn=CE).fit(STRATEGY, num_nodes=2, device="cpu", **options)
    assert "in __getitem__" in caught.value.__notes__[0]


def test_an_example_of_the_validation_data_is_of_no_node():
    trainer = LocalTrainer(nn.Linear(6, 2), TensorDataset(X, Y), FailsAt13(), loss_fn=CE)
    with pytest.raises(DataError, match="index 13, an example of the validation data"):
        trainer.fit(STRATEGY, max_steps=1, device="cpu")


def test_targets_that_cannot_be_found_are_described():
    for data, words in (
        ([(x, "class a") for x in X], "the last item of a batch is a .* and no tensor"),
        ([{"input": x, "label": y, "y": y} for x, y in zip(X, Y, strict=True)], r"several targets .*\['label', 'y'\]"),
    ):
        with pytest.raises(DataError, match=words):
            LocalTrainer(linear(), data, loss_fn=CE).fit(STRATEGY, batch_size=4, max_steps=1, device="cpu")


def test_a_single_example_that_nobody_foresaw_is_explained():
    """Such as a device's part of a batch."""
    loss = Loss(nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2)), CE)
    loss([X[:2], Y[:2]])
    with pytest.raises(DataError, match=r"at least 2 examples at once, but got 1: .* \(torch: Expected more than 1"):
        loss([X[:1], Y[:1]])


def test_arguments_of_the_data_loader_have_their_place():
    taken = set(inspect.signature(torch.utils.data.DataLoader.__init__).parameters) - {"self"}
    assert taken - set(_OURS) == set(LOADER_ARGUMENTS)
    model = linear()
    nodes = attach(model, None, STRATEGY)
    data = TensorDataset(X, Y)
    for call in (lambda: train(collate_fn=len), lambda: nodes.loader(data, collate_fn=len)):
        with pytest.raises(ArgumentError, match=r"no argument 'collate_fn': .* dataloader_kwargs={'collate_fn': ...}"):
            call()
    nodes.loader(data, dataloader_kwargs={"collate_fn": torch.utils.data.default_collate})
    with pytest.raises(ArgumentError, match="no argument 'colate_fn': known"):
        nodes.loader(data, colate_fn=len)


def test_a_complex_loss_is_refused_before_training():
    trainer = LocalTrainer(Gives(lambda p: p.sum() * (1 + 1j)), TensorDataset(X, Y))
    with pytest.raises(ModelError, match=r"but is complex \(torch.complex64\).*loss.abs\(\) or loss.real"):
        trainer.fit(STRATEGY, device="cpu")


def test_what_is_no_known_mistake_is_the_error_it_was():
    def fails(p):
        raise RuntimeError("of the model's own")

    with pytest.raises(RuntimeError, match=r"^of the model's own$"):
        LocalTrainer(Gives(fails), TensorDataset(X, Y), loss_fn=CE).fit(STRATEGY, device="cpu")


class Nano(nn.Module):
    """Takes and gives what nanoGPT does: `forward(idx, targets=None)` returns (logits, loss)."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, idx, targets=None):
        b, t = idx.size()
        logits = self.out(self.table(idx))
        if targets is None:
            return logits[:, [-1], :], None
        return logits, F.cross_entropy(logits.view(b * t, 20), targets.view(b * t), ignore_index=-1)


class InOne(Nano):
    """The same as a model of this library."""

    def forward(self, batch):
        logits, loss = super().forward(*batch)
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("compute", ["loop", "vmap"])
def test_a_model_that_takes_inputs_and_targets_and_gives_logits_and_loss_trains_as_it_is(compute):
    tokens = torch.arange(16 * 9).view(16, 9) % 20
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    found = []
    for kind in (Nano, InOne):
        torch.manual_seed(0)
        trainer = LocalTrainer(kind(), data, data)
        trainer.fit(STRATEGY, num_nodes=2, max_steps=4, batch_size=2, device="cpu", compute=compute)
        found.append(
            (fingerprint(trainer.model), trainer.history.last["val_loss"], trainer.history.last["val_accuracy"])
        )
    assert found[0] == found[1] and found[0][2] is not None


def test_two_scalars_in_a_tuple_are_not_guessed_from():
    class Two(Nano):
        def forward(self, idx, targets):
            loss = super().forward(idx, targets)[1]
            return loss, 2 * loss

    tokens = torch.arange(16 * 9).view(16, 9) % 20
    with pytest.raises(
        ModelError, match=r"must return a loss .* or a tuple with one scalar\), but returned a tuple of 2"
    ):
        LocalTrainer(Two(), TensorDataset(tokens, tokens)).fit(STRATEGY, device="cpu")


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
    with pytest.raises(DataError, match=r"impossible length|their order takes|has no length"):
        if how == "factory":
            train(lambda rank, num_nodes, is_train: Says(length))
        else:
            train(Says(length), partitioner="iid" if how == "partitioner" else None)


LOADER = {
    "num_workers": ({"num_workers": -1}, "num_workers=-1 must be a whole number of at least 0"),
    "half a worker": ({"num_workers": 1.5}, "num_workers=1.5 must be"),
    "text": ({"num_workers": "2"}, "num_workers='2' must be"),
    "persistent_workers": ({"persistent_workers": True}, "persistent_workers option needs num_workers > 0"),
    "prefetch": ({"prefetch_factor": 2}, "DataLoader rejects them: prefetch_factor"),
    "no prefetch": ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor=0 must be a whole number of at least 1"),
    "timeout": ({"timeout": 3}, "timeout=3 needs workers: pass num_workers"),
    "less than no timeout": ({"timeout": -1, "num_workers": 1}, "timeout option should be non-negative"),
    "context": ({"multiprocessing_context": "bogus", "num_workers": 1}, "valid start method"),
    "collate_fn": ({"collate_fn": 3}, "collate_fn=3 is not callable"),
    "worker_init_fn": ({"worker_init_fn": 3, "num_workers": 1}, "worker_init_fn=3 is not callable"),
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


# The command line: one line, whatever the system lacks

OUT_OF = {
    "memory": (MemoryError(), "out of memory"),
    "memory for a tensor": (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
    "memory for a process": (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "out of memory"),
    "memory for torch": (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "out of memory"),
    "a GPU's memory": (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory"),
    "files": (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "too many open files (limit: "),
    "files, said as ours": (ArgumentError("x cannot be read (Too many open files): name another"), "too many open"),
    "NUL": (ValueError("embedded null byte"), "the character NUL"),
}


@pytest.mark.parametrize("name", OUT_OF)
def test_what_the_system_lacks_is_one_line_that_says_what_to_do(name, tmp_path, monkeypatch, capsys):
    error, words = OUT_OF[name]

    def fails(*_):
        raise error

    monkeypatch.setattr("exogym.study.runs.list", fails)
    assert main(["runs", "list", "--runs", str(tmp_path)]) == (2 if name == "NUL" else 1)
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and "--debug" not in said


def test_an_error_that_is_no_lack_is_shown_as_it_is(tmp_path, monkeypatch, capsys):
    def fails(*_):
        raise ValueError("of its own")

    monkeypatch.setattr("exogym.study.runs.list", fails)
    assert main(["runs", "list", "--runs", str(tmp_path)]) == 1
    assert "ValueError: of its own (--debug shows where)" in capsys.readouterr().err


def test_a_limit_of_open_files_is_named(tmp_path, capsys):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert main(["runs", "list", "--runs", str(tmp_path)]) == 0
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        status = main(["runs", "list", "--runs", str(tmp_path)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert status == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "exogym: error: too many open files (limit: 3); raise the limit, for example with ulimit -n 4096"


NUL = {
    "runs list": ["--runs", "a\0b"], "runs show": ["a\0b"], "runs compare": ["a\0b", "--out", "x"],
    "runs export": ["a\0b", "--to", "x.csv"], "ui": ["--runs", "a\0b"], "distributed-train": ["x", "--config", "a\0b"],
    "doctor": ["--hosts", "a\0b"], "compare": ["--resume", "--out", "a\0b"], "runs remove": ["--yes", "a\0b"],
    "sweep": ["--sweep", "H=2,3", "--steps", "1", "--resume", "--out", "a\0b"],
}  # fmt: skip


@pytest.mark.parametrize("command", NUL)
def test_a_path_with_nul_is_one_line(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("exogym.ui.serve", lambda *_: pytest.fail("it serves"))
    assert main([*command.split(), *NUL[command]]) == 2
    said = capsys.readouterr().err
    assert said.startswith("exogym: error: ") and said.count("\n") == 1 and "--debug" not in said
    assert not list(tmp_path.iterdir())


def test_the_page_says_that_its_folder_does_not_exist(tmp_path, monkeypatch, capsys):
    served = []
    monkeypatch.setattr("exogym.ui.serve", lambda folder, *_: served.append(folder.name))
    (tmp_path / "file").touch()
    assert main(["ui", "--runs", str(tmp_path)]) == 0 and capsys.readouterr().err == ""
    assert main(["ui", "--runs", str(tmp_path / "nowhere")]) == 0
    assert (
        capsys.readouterr().err
        == f"exogym: --runs {tmp_path / 'nowhere'} does not exist yet, so the page shows no runs\n"
    )
    assert main(["ui", "--runs", str(tmp_path / "file")]) == 2 and "is not a folder" in capsys.readouterr().err
    assert served == [tmp_path.name, "nowhere"]
