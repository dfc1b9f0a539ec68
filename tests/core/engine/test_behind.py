"""Transfers behind computing: the bits of a run that waits, saved and resumed in mid-flight, and errors at the wait."""

import inspect
import json
import re
import subprocess
import sys
import threading
import time

import pytest
import torch
from processes import over_gloo, world
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.core.communicator import Communicator
from exogym.core.engine.wire import ProcessWire
from exogym.strategy.registry import parse_strategy
from exogym.testing import fingerprint, small_problem

LATE = (
    "diloco:H=4:delay=2", "diloco:H=4:delay=4", "diloco:H=4:eager=true",
    "streaming_diloco:H=4:num_fragments=2:fragment_sync_delay=3",
    "streaming_diloco:H=4:num_fragments=2:fragment_sync_delay=2:fragment_update_alpha=0.5:bits=4",
)  # fmt: skip
QUICK = LATE[1:3] + LATE[4:]  # an average that arrives with the next round, one that is used at once, one of fragments
OPTIONS = {"num_nodes": 4, "batch_size": 8, "val_interval": 3, "device": "cpu"}


def data_of(rank, num_nodes, is_train):
    """Return a node's data. Node 1 has an example that is not finite."""
    x, y = (tensor[rank::num_nodes].clone() for tensor in small_problem()[1].tensors)
    if rank == 1:
        x[7] = float("inf")
    return TensorDataset(x, y)


def skipped(text, **options):
    """Train with a node that is absent in some rounds, because its numbers are not finite; return the fingerprint."""
    model, _ = small_problem()
    trainer = LocalTrainer(model, data_of, loss_fn=torch.nn.functional.mse_loss)
    given = {"num_nodes": 4, "batch_size": 4, "max_steps": 26, "device": "cpu", "on_nonfinite": "skip"}
    trainer.fit(parse_strategy(text, lr=0.02), progress=False, **given | options)
    assert len(trainer.history.column("train_loss", 1)[0]) < 26  # the control
    return fingerprint(trainer.model)


def trained(text, max_steps=18, **options):
    """Train; return the fingerprint, the evaluations' losses and the bytes."""
    model, data = small_problem()
    trainer = LocalTrainer(model, data, data, loss_fn=torch.nn.functional.mse_loss)
    trainer.fit(parse_strategy(text, lr=0.02), max_steps=max_steps, progress=False, **OPTIONS, **options)
    losses = trainer.history.column("val_loss")[1].tolist()
    return [fingerprint(trainer.model), losses, trainer.history.last["tx_bytes"]]


SCRIPT = f"""
import json, os, signal
from exogym.core.engine import behind
import torch
from exogym import LocalTrainer, Placement
from exogym.callbacks import Every
from exogym.strategy.registry import parse_strategy
from exogym.testing import fingerprint, small_problem
from torch.utils.data import TensorDataset

OPTIONS = {OPTIONS}
{inspect.getsource(data_of)}
{inspect.getsource(skipped)}
{inspect.getsource(trained)}
def interrupt(loop):
    signal.raise_signal(signal.SIGINT)

carried = []
start = behind.Behind.start
behind.Behind.start = lambda self, call, like, around: carried.append(like.numel()) or start(self, call, like, around)
found = {{}}
for text in TEXTS:
    plain = trained(text)
    assert carried, text
    started = len(carried)
    assert trained(text, placement=Placement(overlap=False)) == plain and len(carried) == started
    try:
        trained(text, save_dir=text, callbacks=[Every(13, interrupt)])  # saves while an average is in flight
        raise AssertionError("it went on")
    except KeyboardInterrupt:
        pass
    assert trained(text, save_dir=text, resume=True) == plain, text
    found[text] = [*plain, skipped(text)]
    assert skipped(text, placement=Placement(overlap=False)) == found[text][-1], text
if os.environ["RANK"] == "0":
    open("found.json", "w").write(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("processes", "texts"), [(2, QUICK), *(pytest.param(n, LATE, marks=pytest.mark.slow) for n in (2, 4))]
)
def test_late_averages_give_the_bits_of_one_process(processes, texts, tmp_path):
    status, log = world(processes, tmp_path, SCRIPT.replace("TEXTS", repr(texts)))
    assert status == 0, log
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == {text: [*trained(text), skipped(text)] for text in texts}


FAILS = """
import torch
from exogym import LocalTrainer
from exogym.strategy import DiLoCoStrategy

wide = torch.nn.Sequential(torch.nn.Linear(3, 1500), torch.nn.Linear(1500, 1500), torch.nn.Linear(1500, 2))
data, calls = torch.utils.data.TensorDataset(torch.zeros(64, 3), torch.zeros(64, 2)), []
def loss(x, y):
    calls.append(0)
    if len(calls) == 11:  # right after the second average was sent, 9 MB
        raise ValueError("here it fails")
    return torch.nn.functional.mse_loss(x, y)

LocalTrainer(wide, data, loss_fn=loss).fit(
    DiLoCoStrategy(H=4, delay=3), num_nodes=2, batch_size=4, max_steps=40, device="cpu", progress=False
)
"""


@pytest.mark.slow
def test_a_process_that_fails_in_mid_flight_ends_with_its_own_error(tmp_path):
    """Python ended the thread in the middle of a transfer, and with it the process, by SIGABRT."""
    words = ["-m", "exogym.launch", "--nproc_per_node", "2", str(tmp_path / "script.py")]
    (tmp_path / "script.py").write_text(FAILS)
    for _ in range(3):
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
        said = done.stdout + done.stderr
        assert done.returncode == 1 and "ValueError: here it fails" in said and "terminate" not in said, said


STOPS = """
import os, signal
from exogym import LocalTrainer, Placement
from exogym.core.engine import behind
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem

start, begun = behind.Behind.start, []

def stopping(self, call, like, around):
    def stop(line):
        begun.append(0)
        if os.environ["RANK"] == "1" and len(begun) == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return call(line)
    return start(self, stop, like, around)

behind.Behind.start = stopping
model, data = small_problem()
LocalTrainer(model, data, loss_fn=lambda x, y: (x - y).square().mean()).fit(
    DiLoCoStrategy(H=4, delay=3), num_nodes=2, batch_size=4, max_steps=40, device="cpu", progress=False,
    placement=Placement(hang_s=1.5),
)
"""


def test_a_process_that_is_stopped_in_mid_flight_is_killed(tmp_path):
    """Also if its main thread waits for others, which is no hang otherwise."""
    status, log = world(2, tmp_path, STOPS)
    assert status and re.search(r"rank 1 hangs: no progress for [\d.]+ s .*, stopped by a signal \(SIGSTOP\)", log), log


def test_transfers_keep_their_order_and_leave_the_caller_free(tmp_path):
    def body(wire, x):
        comm = Communicator(wire.ranks, 4, wire)
        comm.overlap = True
        flights = [comm.new_flight() for _ in range(3)]
        means = []
        for k, flight in enumerate(flights):
            with comm.on_its_way(flight):
                means.append(comm.all_reduce(x * k))
            assert comm.are_under_way(flight)
        main = wire.rows(x, range(4))  # meanwhile, over other connections
        assert wire.agree(wire.process == 0)
        for k, flight in reversed(list(enumerate(flights))):
            comm.arrive(flight)
            assert not comm.are_under_way(flight)
            assert torch.equal(means[k], comm.all_reduce(x * k)) and len(main) == 4
        assert comm.ledger.tx_bytes[0] == 2 * 3 * 2 * 3 / 4 * x[0].nbytes  # recorded once each
        wire.leave()
        assert not [thread for thread in threading.enumerate() if thread.name == "exogym transfers"]

    over_gloo(2, 4, tmp_path, body)


def test_the_thread_ends_with_its_wire(tmp_path):
    """As after a failed run, which does not leave the wire."""

    def body(wire, x):
        line = ProcessWire(wire.placement)
        transfer = line.start(lambda line: line.reduce(x, range(2), "sum"), x[0])
        line.launch()
        transfer.wait()
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "exogym transfers"]
        del line
        thread.join(60)
        assert not thread.is_alive()

    over_gloo(2, 2, tmp_path, body)


def test_a_transfer_begins_at_the_launch(tmp_path):
    """The losses of a stretch waited behind the transfer that began at its end."""

    def body(wire, x):
        calls = []
        transfer = wire.start(lambda line: calls.append(0) or line.reduce(x, range(2), "sum"), x[0])
        time.sleep(0.05)
        assert not calls
        wire.launch()
        transfer.wait()
        assert calls
        wire.leave()

    over_gloo(2, 2, tmp_path, body)


def test_an_error_is_raised_where_the_result_is_needed(tmp_path):
    def body(wire, x):
        def fail(line):
            raise ValueError("no such row")

        first = wire.start(fail, x[0])
        second = wire.start(lambda line: line.reduce(x, range(2), "sum"), x[0])
        wire.launch()
        time.sleep(0.05)
        for transfer in (first, second):  # a later transfer would be another process's earlier one
            with pytest.raises(ValueError, match="no such row"):
                transfer.wait()
        wire.leave()

    over_gloo(2, 2, tmp_path, body)
