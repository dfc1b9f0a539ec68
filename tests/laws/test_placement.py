"""Law 1: placement changes nothing. One process or several forked ones: the same bits, history and bytes."""

import gc
import os
import random
import signal
import sys
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from battery import (
    AVERAGES,
    STEPS,
    TIMED,
    Trouble,
    battery,
    in_turn,
    kill_itself,
    outcome,
    plain_model,
    same_everywhere,
    train,
)
from paths import TESTS
from processes import children, descriptors, family, python
from strategies import OF_EACH_KIND, STRATEGIES, Broken
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from exogym import LocalTrainer, Placement
from exogym.callbacks import EvaluateNodes, Every
from exogym.core.communicator import Wire
from exogym.core.engine import engines
from exogym.errors import ArgumentError, ModelError, TrainingError, WorkerError
from exogym.faults import Faults
from exogym.logger import CSVLogger
from exogym.strategy import (
    CommunicateOptimizeStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    SPARTAStrategy,
)
from exogym.testing import fingerprint, small_problem


@pytest.mark.parametrize(("name", "count"), in_turn(STRATEGIES, (2, 3, 4), fast=OF_EACH_KIND))
def test_placement_changes_nothing(name, count):
    one, before = battery(name), children()
    if count == 3 and STRATEGIES[name].any_size:  # five nodes on three processes: two, two and one
        five = {"num_nodes": 5, "max_steps": 9}
        assert one.outcome(**five, processes=3) == one.outcome(**five)
    else:
        one.ends_as_wanted(processes=count)
    assert children() == before


def test_a_strategy_that_crosses_rows_is_not_placed_alike():
    """The control: a norm over the rows that are here."""
    one, two = (
        train(CommunicateOptimizeStrategy("adamw", [Broken("placement")], lr=0.02), processes=p) for p in (1, 2)
    )
    assert fingerprint(one.model) != fingerprint(two.model)


# Models, data, options


class Tokens(Dataset):
    """A data set that cannot be pickled, and reads one example at a time, with noise.

    Forked processes share the place where a file is read on, as DataLoader's workers do: `pread` names it.
    """

    def __init__(self):
        self.file, self.lock = open(__file__), threading.Lock()  # noqa: SIM115

    def __del__(self):
        self.file.close()

    def __len__(self):
        return 48

    def __getitem__(self, i):
        with self.lock:
            x = torch.tensor([letter / 100 for letter in os.pread(self.file.fileno(), 6, i)])
        return x + 0.01 * torch.randn(6), x[:2] * random.random() + float(np.random.rand())


def local_model():
    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.inner = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 2))
            self.act = lambda x: x * 1.5
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            if self.training:
                self.seen += 1
            return self.act(self.inner(x))

    return Local()


def lazy_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyBatchNorm1d(), nn.Linear(8, 2))


def classes():
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
    return {"model": plain_model(), "data": TensorDataset(x, (x.sum(1) > 0).long()), "loss_fn": F.cross_entropy}


def of_node(rank, num_nodes, is_train):
    g = torch.Generator().manual_seed(10 * rank + is_train)
    x = torch.randn(20 + 3 * rank, 6, generator=g)
    return TensorDataset(x, x[:, :2] * (1 + rank))


FAULTS = Faults({1: [(3, 8)], 3: [(6, None)]}, lost={2: [5]}, slow={0: 0.5})
KINDS = {
    "nothing can be pickled": lambda: {
        "strategy": AVERAGES["strategy"], "model": local_model(), "data": Tokens(),
        "loss_fn": lambda output, target: (output - target).square().mean(),
    },
    "bf16": lambda: {"strategy": SPARTAStrategy(lr=0.02, p_sparta=0.3), "precision": "bf16"},
    "micro-batches": lambda: AVERAGES | {"model": plain_model(), "minibatch_size": 3, "gradient_accumulation": 2},
    "vmap": lambda: AVERAGES | {"model": plain_model(), "compute": "vmap"},
    "vmap of gradients": lambda: {"strategy": SimpleReduceStrategy(lr=0.02), "model": plain_model(), "compute": "vmap"},
    "dirichlet": lambda: AVERAGES | classes() | {"partitioner": "dirichlet:0.3"},
    "shards": lambda: AVERAGES | classes() | {"partitioner": "shards:2", "num_epochs": 3, "max_steps": None},
    "factories": lambda: AVERAGES | {"data": of_node, "val_data": of_node},
    "DataLoader workers": lambda: AVERAGES | {
        "data": list(zip(*small_problem()[1].tensors, strict=True)), "dataloader_kwargs": {"num_workers": 1},
        "max_steps": 6,
    },
    "epochs": lambda: AVERAGES | {"num_epochs": 2, "max_steps": None, "val_interval": None, "final_sync": False},
    "schedule": lambda: {"strategy": DiLoCoStrategy(lr=0.02, H=5, lr_scheduler="cosine", warmup_steps=3)},
    "lazy modules": lambda: AVERAGES | {"model": lazy_model()},
    "nodes that drop out": lambda: AVERAGES | {"faults": FAULTS},
    "gradients of nodes that drop out": lambda: {
        "strategy": SimpleReduceStrategy(lr=0.02), "faults": Faults({1: [(3, 8)], 3: [(6, None)]}),
    },
    "a network": lambda: AVERAGES | {"network": "100Mbps,20ms", "step_seconds": "10ms"},
    "log interval": lambda: AVERAGES | {"log_interval": 3, "val_size": 20},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_runs(kind):
    before = family()
    same_everywhere(KINDS[kind])
    assert family() == before  # the DataLoaders' processes too


def test_nodes_skip_an_overflow_together():
    """Node 3 alone has examples that overflow in fp16; under DDP all skip the step, with FedAvg it alone."""

    def huge(rank, num_nodes, is_train):
        data = of_node(rank, num_nodes, is_train)
        return TensorDataset(data.tensors[0] * (100 if rank == 3 else 1e-3), data.tensors[1])

    for strategy, wanted in (
        (SimpleReduceStrategy(OptimSpec("sgd", lr=1e-5)), lambda scales: scales[0] == scales[3] < 65536),
        (FedAvgStrategy(OptimSpec("sgd", lr=1e-5), H=5), lambda scales: scales[0] > scales[3]),
    ):
        scales = []

        def look(loop, scales=scales):
            here = torch.from_numpy(loop.worker.scaling.scales)[:, None]
            scales.append(here[[0, -1], 0].tolist() if len(here) == 4 else None)

        same_everywhere(
            lambda strategy=strategy, look=look: {
                "strategy": strategy, "model": plain_model(), "data": huge, "precision": "fp16", "callbacks": [look],
            }, (2, 4),
        )  # fmt: skip
        first, last = scales[4]  # at the end of the run in one process
        assert wanted([first, None, None, last])


# The caller


def test_the_caller_keeps_its_random_state_and_threads():
    def draws():
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    model, data = small_problem()
    torch.set_num_threads(2)
    try:
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
        trainer = LocalTrainer(model, data, loss_fn=F.mse_loss)
        trainer.fit(AVERAGES["strategy"], num_nodes=4, max_steps=STEPS, device="cpu", processes=2)
        assert torch.get_num_threads() == 2
        got = draws()
    finally:
        torch.set_num_threads(1)
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    assert got == draws()


def test_many_fits_leave_nothing_behind():
    def standing():
        with open("/proc/self/maps") as maps:
            memory = {line.split()[0] for line in maps if "/dev/zero" in line}
        return set(children()), descriptors(), set(threading.enumerate()), memory

    wanted = None
    for k in range(15):
        train(**AVERAGES, processes=2 + k % 3, max_steps=5, val_interval=None)
        if k == 2:
            wanted = standing()
    for now, before in zip(standing(), wanted, strict=True):
        assert now <= before


def test_in_a_thread():
    done = []
    thread = threading.Thread(target=lambda: done.append(outcome(train(**AVERAGES, processes=2))))
    thread.start()
    thread.join(300)
    assert done == [outcome(train(**AVERAGES))]


TWO_THREADS = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(2)
a = torch.randn(600, 600, requires_grad=True)
(a @ a).square().sum().backward()
conv = torch.nn.Conv2d(8, 16, 3)
conv(torch.randn(16, 8, 32, 32)).square().sum().backward()
from battery import AVERAGES, fingerprint, train
model = lambda: torch.nn.Sequential(torch.nn.Unflatten(1, (1, 2, 3)), torch.nn.Conv2d(1, 64, 2), torch.nn.Flatten(),
                                    torch.nn.Linear(128, 512), torch.nn.ReLU(), torch.nn.Linear(512, 2))
torch.manual_seed(0)
one = fingerprint(train(**AVERAGES, model=model(), processes=1).model)
torch.manual_seed(0)
two = fingerprint(train(**AVERAGES, model=model(), processes=2).model)
assert one == two and torch.get_num_threads() == 2
(a @ a).square().sum().backward()
print("done")
"""


def test_a_caller_that_computed_in_two_threads_does_not_hang():
    done = python("-c", TWO_THREADS, TESTS)
    assert done.stdout == "done\n", done.stderr


# Callbacks


def test_callbacks_see_the_run_from_the_caller(tmp_path):
    """They run in the caller's process, may ask all to evaluate and to save, and may end the run."""

    def run(processes, folder):
        seen, events = [], []

        def look(loop):
            seen.append([loop.step, loop.epoch, loop.evaluate(3), loop.evaluate(), loop.save().name, os.getpid()])
            return loop.step == 9

        trainer = train(
            **AVERAGES, processes=processes, save_dir=folder, placement=Placement(keep_checkpoints=9),
            callbacks=[Every(3, look), lambda loop: events.append(loop.step), EvaluateNodes()],
            logger=lambda record: events.append(record["step"]),
        )  # fmt: skip
        return outcome(trainer), seen, events, sorted(path.name for path in folder.iterdir())

    one, three = run(1, tmp_path / "1"), run(3, tmp_path / "3")
    assert one == three
    assert one[1][-1][0] == 9 and one[1][0][2] != one[1][0][3]
    assert one[3] == [f"step_000000000{k}" for k in (3, 6, 9)] + ["step_0000000009_1"]


def average(loop):
    loop.fleet.average()


def own_row(loop):
    loop.fleet.comm.wire.rows(loop.fleet.blocks[0].params, [0])


@pytest.mark.parametrize("callback", [average, own_row])
def test_a_callback_that_would_need_the_others_is_told_so(callback):
    before = children()
    train(**AVERAGES, callbacks=[callback])
    with pytest.raises(TrainingError, match=r"use the loop in it \(loop.evaluate\(node\), loop.save\(\)\)"):
        train(**AVERAGES, processes=3, callbacks=[callback])
    assert children() == before


def test_loggers_and_what_is_printed(tmp_path, capfd):
    for processes in (1, 3):
        train(**AVERAGES, processes=processes, logger=CSVLogger(tmp_path / f"{processes}.csv"), progress=True)
    one, three = ((tmp_path / f"{p}.csv").read_text().splitlines() for p in (1, 3))
    timed = [k for k, name in enumerate(one[0].split(",")) if name in TIMED]

    def timeless(lines):
        return [[value for k, value in enumerate(line.split(",")) if k not in timed] for line in lines]

    assert timeless(one) == timeless(three)
    out, err = capfd.readouterr()
    assert not out and err.count(f"step {STEPS}/{STEPS}") == 2


# What goes wrong


def fail():
    raise LookupError("a rare word")


def fail_unpicklably():
    class Own(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")

    raise Own("this", "that")


TROUBLES = {
    "error": (fail, True, LookupError, "a rare word"),
    "error that cannot be pickled": (fail_unpicklably, True, TrainingError, "Own: this and that"),
    "killed": (
        kill_itself, True, WorkerError,
        r"worker process 1 \(nodes 2 to 3\) was killed by SIGKILL; the system does so when memory runs out",
    ),
    "exit": (lambda: os._exit(3), True, WorkerError, r"worker process 1 \(nodes 2 to 3\) ended with exit code 3"),
    "sys.exit": (lambda: sys.exit(3), True, SystemExit, "3"),
    "error in the caller's process": (fail, False, LookupError, "a rare word"),
}  # fmt: skip


@pytest.mark.parametrize("name", TROUBLES)
def test_trouble_in_a_process_is_named_and_no_process_is_left(name):
    act, elsewhere, kind, text = TROUBLES[name]
    before, pipes, handlers = family(), descriptors(), signal.getsignal(signal.SIGINT)
    model = Trouble(act, elsewhere)
    start = fingerprint(model)
    with pytest.raises(kind, match=text) as caught:
        train(**AVERAGES, model=model, processes=2)
    if elsewhere and kind is not WorkerError:
        (note,) = caught.value.__notes__
        assert note.startswith("raised in worker process 1 (nodes 2 to 3):\nTraceback") and "in forward" in note
    assert family() == before and descriptors() <= pipes
    assert signal.getsignal(signal.SIGINT) is handlers
    assert fingerprint(model) != start and all(bool(p.isfinite().all()) for p in model.parameters())
    assert {p.untyped_storage().nbytes() for p in model.parameters()} == {4 * p.numel() for p in model.parameters()}
    model.act = lambda: None
    train(**AVERAGES, model=model, processes=2)  # and it goes on


@pytest.mark.parametrize("elsewhere", [False, True])
def test_trouble_leaves_no_worker_of_a_data_loader(elsewhere):
    """At once, although the error's traceback still holds the iterator."""
    before, data = family(), list(zip(*small_problem()[1].tensors, strict=True))
    options = AVERAGES | {"data": data, "dataloader_kwargs": {"num_workers": 1}}
    with pytest.raises(LookupError, match="a rare word"):
        train(**options, model=Trouble(fail, elsewhere), processes=1 + elsewhere)
    assert family() == before


def test_a_loss_that_is_no_number_names_the_node():
    def data(rank, num_nodes, is_train):
        x, y = of_node(rank, num_nodes, is_train).tensors
        return TensorDataset(x, y.log() if rank == 3 else y)

    for strategy in (AVERAGES["strategy"], SimpleReduceStrategy(lr=0.02)):
        with pytest.raises(TrainingError, match="the loss of node 3 became nan at its step 1"):
            train(strategy, plain_model(), data, of_node, processes=3)


def test_what_is_known_before_training_is_said_by_the_caller():
    """An error that every process runs into comes once, as it would from one process."""
    model = plain_model().requires_grad_(False)
    with pytest.raises(ModelError, match="does not depend on any trainable parameter") as caught:
        train(**AVERAGES, model=model, processes=3)
    assert not getattr(caught.value, "__notes__", [])


WRONG = {
    "none": ({"processes": 0}, "processes=0 must be a whole number of at least 1"),
    "a word": ({"processes": "two"}, "processes='two' must be a whole number"),
    "yes": ({"processes": True}, "processes=True must be a whole number"),
    "a half": ({"processes": 1.5}, "processes=1.5 must be a whole number"),
    "too many": ({"processes": 5}, "5 processes for num_nodes=4: every process needs a node, so start at most 4"),
    "restarts": ({"placement": {"max_restarts": 1}}, "placement=.* must be a Placement, such as"),
    "restarts, but no folder": (
        {"placement": Placement(max_restarts=2), "processes": 2},
        "max_restarts=2 needs save_dir",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_layouts_that_cannot_be(name):
    options, text = WRONG[name]
    with pytest.raises(ArgumentError, match=text):
        train(**AVERAGES, **options)


def test_where_forking_is_not_safe_it_is_said(monkeypatch):
    monkeypatch.setattr("exogym.core.engine.children.Forks.are_possible", lambda: False)
    with pytest.raises(ArgumentError, match=r"processes are forked .* start the script with python -m exogym.launch"):
        train(**AVERAGES, processes=2)


# Starting again

ONCE = Placement(max_restarts=1)


@pytest.mark.parametrize("checkpoint_interval", [None, 3])
def test_a_run_whose_process_dies_starts_again_from_the_last_checkpoint(checkpoint_interval, tmp_path, capfd):
    options = {"num_nodes": 4, "processes": 2, "checkpoint_interval": checkpoint_interval}

    def act():
        if not (tmp_path / "once").exists():
            (tmp_path / "once").touch()
            kill_itself()

    steps = []
    trainer = train(
        **AVERAGES, model=Trouble(act), save_dir=tmp_path / "run", placement=ONCE, logger=CSVLogger(tmp_path / "log"),
        callbacks=[Every(1, lambda loop: steps.append(loop.step))], **options,
    )  # fmt: skip
    quiet = train(
        **AVERAGES, model=Trouble(lambda: None), callbacks=[Every(1, lambda loop: None)], save_dir=tmp_path / "quiet",
        **options,
    )  # fmt: skip
    assert outcome(trainer) == outcome(quiet)
    err = capfd.readouterr().err
    assert "was killed by SIGKILL" in err and "starting again from the last checkpoint, if any (1 of 1)" in err
    assert steps == [1, *range(1, STEPS + 1)]
    logged = [int(line.split(",")[0]) for line in (tmp_path / "log").read_text().splitlines()[1:]]
    assert logged == [0, *(step for step in range(1, STEPS + 1) for _ in range(5))]


def test_one_process_starts_again_from_the_last_checkpoint_too(tmp_path, capfd):
    calls = []

    def act():
        calls.append(0)
        if len(calls) == 20:
            raise OSError("the drive is gone")

    options = {"save_dir": tmp_path / "run", "checkpoint_interval": 1, "placement": ONCE}
    trainer = train(**AVERAGES, model=Trouble(act, elsewhere=False), **options)
    assert fingerprint(trainer.model) == fingerprint(train(**AVERAGES, model=Trouble(lambda: None)).model)
    said = capfd.readouterr().err
    assert "OSError: the drive is gone; starting again from the last checkpoint, if any (1 of 1)" in said
    assert "going on from step 5 " in said


def test_restarts_come_to_an_end(tmp_path):
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        train(
            **AVERAGES, model=Trouble(kill_itself), processes=2, save_dir=tmp_path, placement=Placement(max_restarts=2)
        )


def test_a_model_without_numbers_cannot_be_started_again_from(tmp_path):
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 2))
    with pytest.raises(ArgumentError, match=r"'0.weight', which is lazy: .* one batch before fit"):
        train(**AVERAGES, model=model, processes=2, save_dir=tmp_path, placement=ONCE)


def test_what_a_new_start_cannot_cure_is_not_tried_again(tmp_path, capfd):
    def act():
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        train(**AVERAGES, model=Trouble(act), processes=2, save_dir=tmp_path, placement=Placement(max_restarts=2))
    assert "starting again" not in capfd.readouterr().err


class Trap:
    """Garbage in a cycle that only its own process may collect, as torch's process groups are."""

    def __init__(self, mark):
        self.mark, self.home, self.me = mark, os.getpid(), self

    def __del__(self):
        if os.getpid() != self.home:
            self.mark.write_text("collected elsewhere")


class Collecting(torch.nn.Linear):
    def forward(self, x):
        gc.collect()
        return super().forward(x)


@pytest.mark.parametrize("made_in_the_fork", [False, True])
def test_a_fork_leaves_the_callers_garbage_alone(tmp_path, made_in_the_fork):
    model, mark = Collecting(6, 2), tmp_path / "mark"
    gc.disable()  # the garbage is still there when the processes fork
    try:
        Trap(mark)
        if made_in_the_fork:  # the control: a trap that a fork itself did not inherit as garbage does go off
            holder = [Trap(mark)]
            model.register_forward_pre_hook(lambda *_: holder.clear())
            holder[0].me = None
        trainer = LocalTrainer(model, small_problem()[1], loss_fn=torch.nn.functional.mse_loss)
        trainer.fit(SimpleReduceStrategy(lr=0.01), num_nodes=2, max_steps=2, batch_size=8, device="cpu", processes=2)
    finally:
        gc.enable()
        gc.collect()
    assert mark.exists() == made_in_the_fork


class InAThread:
    """An engine of one's own: all rows in a thread of this process. It is this class, and an entry in the list."""

    shares_memory, runs_again, keeps_rows, is_here = True, True, False, True

    def __init__(self):
        self.ran = 0

    def applies(self, options):
        return options.num_nodes == 4

    def processes(self, options):
        return 1

    def run(self, options, body):
        (rows,), found = options.placement, []
        thread = threading.Thread(target=lambda: found.append(body(Wire(rows, options.native))))
        thread.start()
        thread.join()
        self.ran += 1
        return found[0]


def test_an_engine_is_one_class_and_one_entry(monkeypatch):
    """It takes the runs that are its own, whatever was asked else, and they have the same bits."""
    wanted = outcome(train(**AVERAGES))
    toy = InAThread()
    monkeypatch.setattr(engines, "ENGINES", [toy, *engines.ENGINES])
    assert outcome(train(**AVERAGES)) == wanted and toy.ran == 1
    train(**AVERAGES | {"num_nodes": 3})  # the control: not its own
    assert toy.ran == 1
