"""Law 2 for signals: stopped anywhere, on any layout, and gone on with on another, a run ends in the same bits."""

import functools
import itertools
import mmap
import os
import random
import re
import signal
import time

import pytest
from battery import AVERAGES, STEPS, battery, fingerprint, in_turn, outcome, plain_model, train
from paths import ROOT
from processes import apart, children, ended, family, python
from safetensors.torch import save_file
from strategies import OF_EACH_KIND, STRATEGIES
from torch import nn

import exogym.core.saving.checkpoint
from exogym import LocalTrainer, Placement
from exogym.callbacks import Every
from exogym.core.communicator import Wire
from exogym.core.saving.checkpoint import list_checkpoints, load
from exogym.core.training.loop import Interrupt
from exogym.errors import CheckpointError, Stopped
from exogym.faults import Faults
from exogym.strategy import FedAvgStrategy, OptimSpec, SimpleReduceStrategy
from exogym.testing import small_problem

STOPPED = (KeyboardInterrupt, SystemExit)
DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@pytest.fixture(autouse=True)
def handlers():
    """The usual handlers in each test, which it must leave as they were."""
    before = {number: signal.signal(number, default) for number, default in DEFAULTS.items()}
    yield
    after = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert after == DEFAULTS


class Place:
    """Calls `act()` the n-th time it is called; `begin` as a callback starts the count at the first evaluation."""

    def __init__(self, at, act):
        self.left, self.act = at, act
        self.at = at

    def begin(self, loop):
        if loop.step == 0:
            self.left = self.at

    def __call__(self, *args):
        self.left -= 1
        if self.left == 0:
            self.act()
        return 0.0


class Calling(nn.Module):
    """The plain model, which calls something in each forward pass in training, in the first process only."""

    def __init__(self, call=lambda: None):
        super().__init__()
        self.inner, self.call, self.home = plain_model(), call, os.getpid()

    def forward(self, x):
        if self.training and os.getpid() == self.home:
            self.call()
        return self.inner(x)


def interrupt_here():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def send(monkeypatch):
    """`send(n, ...)`: at the n-th chance to stop (after each step of a node), signals come to the caller's process."""
    ask, home = Interrupt.__call__, os.getpid()

    def prepare(at, *signals, process=0):
        asked = itertools.count(1)

        def call(interrupt):
            if next(asked) == at and getattr(interrupt.wire, "process", 0) == process:
                for number in signals or (signal.SIGINT,):
                    os.kill(home, number)
            return ask(interrupt)

        monkeypatch.setattr(Interrupt, "__call__", call)

    yield prepare


def stopped(run):
    """Run; return what ended it, None where it came to its end."""
    try:
        run()
    except STOPPED as reason:
        return reason
    return None


def in_turns(fit, folder, send, layouts, ats):
    """Start in the first layout, stop, go on in the next, ...; return the finished trainer and the number of stops."""
    done = []
    for stops, (processes, at) in enumerate(zip(layouts, [*ats, 0], strict=True)):
        number = (signal.SIGINT, signal.SIGTERM)[stops % 2]
        send(at, number, process=(stops + 1) // 2 % 2 if processes > 1 else 0)
        run = functools.partial(fit, processes=processes, save_dir=folder, resume=True)
        reason = stopped(lambda run=run: done.append(run()))
        if done:
            return done[0], stops
        assert isinstance(reason, KeyboardInterrupt if number == signal.SIGINT else SystemExit)
    raise AssertionError("stopped although nobody asked")


@pytest.mark.parametrize(
    ("name", "layouts"),
    in_turn(
        STRATEGIES,
        ((1, 3), (3, 2), (2, 4), (4, 1)),
        slow=((1, 3, 2, 4, 1), (4, 2, 3, 1, 2)),
        fast=OF_EACH_KIND,
    ),
)
def test_stopped_and_gone_on_with_in_other_layouts(name, layouts, tmp_path, send):
    """In so many processes in turn, stopped at odd places, often twice in one stretch."""
    draw, wanted = random.Random(name), battery(name).wanted
    ats = [draw.randint(2, 6), *(draw.randint(2, 4) for _ in layouts[2:])]
    before = children()
    trainer, stops = in_turns(battery(name).train, tmp_path, send, layouts, ats)
    assert stops >= min(3, len(ats))
    for got, want in zip(outcome(trainer), wanted, strict=True):
        assert got == want
    assert children() == before


EVERYWHERE = {
    "average": lambda: AVERAGES,
    "unequal work": lambda: {"strategy": FedAvgStrategy("adamw", lr=0.02, H=5, local_steps=[1, 5, 3])},
    "fp16": lambda: {"strategy": FedAvgStrategy(OptimSpec("sgd", lr=0.1), H=4), "precision": "fp16", "log_interval": 3},
    "vmap": lambda: AVERAGES | {"compute": "vmap"},
    "faults": lambda: (
        AVERAGES | {"faults": Faults({1: [(3, 8)]}, slow={0: 0.5}), "network": "1Gbps", "step_seconds": 1}
    ),
    "gradients, faults": lambda: {"strategy": SimpleReduceStrategy(lr=0.02), "faults": Faults({1: [(3, 8)]})},
}


@pytest.mark.parametrize("name", EVERYWHERE)
def test_stopped_at_every_chance(name, tmp_path, send):
    def fit(**options):
        return train(**EVERYWHERE[name](), model=plain_model(), num_nodes=3, max_steps=7, **options)

    wanted = outcome(fit())
    for at in itertools.count(1, {"average": 1, "gradients, faults": 2}.get(name, 5)):
        trainer, stops = in_turns(fit, tmp_path / str(at), send, (1 + at % 3, 1 + (at + 1) % 3), [at])
        assert outcome(trainer) == wanted, at
        if not stops:
            break
    assert at > 7


# What is said, and how the process ends


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_says_what_it_saved_and_what_resumes(number, processes, tmp_path, send, capfd):
    send(6, number)
    with pytest.raises(STOPPED) as reason:
        train(**AVERAGES, processes=processes, save_dir=tmp_path)
    if number == signal.SIGTERM:
        assert reason.type is SystemExit and reason.value.code == 143
    else:
        assert reason.type is Stopped and str(reason.value).startswith("SIGINT after step ")
    (folder,) = list_checkpoints(tmp_path)
    text = capfd.readouterr().err
    assert re.search(rf"exogym: stopped by {number.name} after step \d+ plus \d to \d local steps per node; ", text)
    assert f"saved in {folder}. To resume, call the same fit with save_dir={str(tmp_path)!r}, resume=True\n" in text


def test_how_far_nodes_are_is_said_and_no_further_node_begins(tmp_path, capfd):
    """Node 0 has taken its 5 steps to the average, node 1 is at its second when the signal comes."""
    place = Place(7, interrupt_here)
    with pytest.raises(KeyboardInterrupt, match="SIGINT after step 0"):
        train(**AVERAGES | {"val_interval": 99}, model=Calling(place), save_dir=tmp_path, callbacks=[place.begin])
    assert "after step 0 plus 0 to 5 local steps per node" in capfd.readouterr().err
    (folder,) = list_checkpoints(tmp_path)
    snapshot = load(folder)
    assert [int(snapshot.rows[node]["losses.counts"].sum()) for node in range(4)] == [5, 2, 0, 0]
    assert snapshot.meta["step"] == 0 and snapshot.meta["begun_end"] == 5


class Behind(nn.Module):
    """The plain model, whose first process waits in its first step until the others have taken `ahead`, and stops."""

    def __init__(self, ahead):
        super().__init__()
        self.inner, self.ahead, self.home, self.waits = plain_model(), ahead, os.getpid(), False
        self.taken = mmap.mmap(-1, 1)  # of all processes

    def __deepcopy__(self, memo):
        return self

    def begin(self, loop):
        self.waits = loop.step == 0

    def forward(self, x):
        if self.training and os.getpid() != self.home:
            self.taken[0] += 1
        elif self.training and self.waits:
            self.waits = False
            deadline = time.monotonic() + 30
            while self.taken[0] < self.ahead and time.monotonic() < deadline:
                time.sleep(0.01)
            interrupt_here()
        return self.inner(x)


def test_how_far_nodes_of_other_processes_are_is_said_too(tmp_path, capfd):
    """Nodes 0 and 1, of the main process, have taken 1 step and none; nodes 2 and 3, of the other one, all 5 steps."""
    model = Behind(10)
    with pytest.raises(KeyboardInterrupt, match="SIGINT after step 0"):
        train(**AVERAGES | {"val_interval": 99}, model=model, processes=2, save_dir=tmp_path, callbacks=[model.begin])
    assert "after step 0 plus 0 to 5 local steps per node" in capfd.readouterr().err


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_without_a_folder_the_model_and_the_history_are_kept(number, processes, send, capfd):
    seen, before = [], children()
    model, data = small_problem()
    trainer = LocalTrainer(model, data, data, loss_fn=nn.functional.mse_loss)
    start = fingerprint(model)
    send(12, number)
    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
        trainer.fit(**AVERAGES, num_nodes=4, batch_size=8, max_steps=STEPS, device="cpu", processes=processes,
                    val_interval=2, callbacks=[Every(1, lambda loop: seen.append(loop.step))])  # fmt: skip
    assert 0 < trainer.history[-1]["step"] == seen[-1] < STEPS and fingerprint(model) != start
    assert children() == before
    said = capfd.readouterr().err
    assert ("nothing is saved: the run has no save_dir" in said) == (number == signal.SIGTERM)


# Where a signal may come


def places(at):
    """Options under which SIGINT comes to the caller's process elsewhere than in a node's step."""
    return {
        "evaluation": {"metrics": {"odd": Place(at, interrupt_here)}},
        "callback": {"callbacks": [Every(2, Place(at, interrupt_here))]},
        "logger": {"logger": Place(at, interrupt_here)},
    }


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("place", places(1))
def test_a_signal_between_stretches(place, processes, tmp_path):
    def fit(options, **more):
        options = dict(options)
        model, data = small_problem()
        trainer = LocalTrainer(model, data, data, loss_fn=nn.functional.mse_loss, metrics=options.pop("metrics", None))
        trainer.fit(**AVERAGES | options, num_nodes=4, batch_size=8, max_steps=STEPS, device="cpu", val_interval=4,
                    **more)  # fmt: skip
        return trainer

    wanted = outcome(fit(places(10**6)[place]))
    for at in (1, 2, 3):
        folder = tmp_path / str(at)
        with pytest.raises(KeyboardInterrupt, match="SIGINT after step"):
            fit(places(at)[place], save_dir=folder, processes=processes)
        assert outcome(fit(places(10**6)[place], save_dir=folder, resume=True)) == wanted


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_too_late_to_stop_the_run_is_not_lost(number, processes, tmp_path):
    """It comes in the last evaluation: the run is done and saved, and then the caller is told to end."""

    def last(loop):
        if loop.step == STEPS:
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
        train(**AVERAGES, processes=processes, save_dir=tmp_path, callbacks=[last])
    resumed = train(**AVERAGES, save_dir=tmp_path, resume=True, callbacks=[lambda loop: None])
    assert outcome(resumed) == outcome(train(**AVERAGES))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_while_a_checkpoint_is_written(processes, tmp_path, monkeypatch):
    home = os.getpid()

    def slowly(*args):
        if os.getpid() == home and not (tmp_path / "sent").exists():
            (tmp_path / "sent").touch()
            interrupt_here()
        save_file(*args)

    monkeypatch.setattr(exogym.core.saving.checkpoint, "save_file", slowly)
    with pytest.raises(KeyboardInterrupt, match="SIGINT after step 3"):
        train(
            **AVERAGES,
            processes=processes,
            save_dir=tmp_path / "run",
            checkpoint_interval=3,
            placement=Placement(overlap=False),
        )
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step_0000000003", "step_0000000003_1"]
    resumed = train(**AVERAGES, save_dir=tmp_path / "run", checkpoint_interval=3, resume=True)
    assert outcome(resumed)[:2] == outcome(train(**AVERAGES))[:2]


def test_a_signal_to_this_process_while_all_save_since_another_was_asked(tmp_path, monkeypatch):
    """Under torchrun signals come to each process when they come: one that comes in the saving does not cut it off."""

    def body():
        place = Place(1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        agreed = itertools.count()
        monkeypatch.setattr(Wire, "agree", lambda self, flag: flag or next(agreed) == 2)
        monkeypatch.setattr(exogym.core.saving.checkpoint, "save_file", lambda *given: [place(), save_file(*given)])
        train(**AVERAGES, save_dir=tmp_path)

    assert ended(apart(body)) in (130, 143)
    assert len(list_checkpoints(tmp_path)) == 1
    assert outcome(train(**AVERAGES, save_dir=tmp_path, resume=True)) == outcome(train(**AVERAGES))


# More or fewer steps


@pytest.mark.parametrize(("processes", "at"), [(1, 3), (1, 12), (1, 30), (3, 4), (3, 14)])
def test_more_steps_may_be_asked_for_after_a_stop(processes, at, tmp_path, send):
    """Also where the stretch that was stopped had been cut short by the end."""
    options = {"strategy": FedAvgStrategy(OptimSpec("sgd", lr=0.1), H=6), "val_interval": 5}
    send(at, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(**options, max_steps=8, save_dir=tmp_path, processes=processes)
    longer = train(**options, max_steps=17, save_dir=tmp_path, resume=True)
    assert outcome(longer) == outcome(train(**options, max_steps=17))


def test_fewer_steps_than_nodes_have_taken_are_refused(tmp_path, send):
    send(7, signal.SIGINT)
    options = AVERAGES | {"val_interval": None, "save_dir": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        train(**options)
    with pytest.raises(CheckpointError, match=r"past the 4 steps of this run: raise max_steps or num_epochs"):
        train(**options, resume=True, max_steps=4)
    train(**options, resume=True, max_steps=5)


# Two signals, and handlers


@pytest.mark.parametrize("processes", [1, 3])
def test_a_second_signal_acts_at_once(processes, tmp_path, send):
    """Then a checkpoint under way may not be complete, but the one before is."""
    before = family()
    send(45, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as reason:
        train(**AVERAGES, processes=processes, save_dir=tmp_path, checkpoint_interval=3)
    assert str(reason.value) == ""  # Python's own, not the one after saving
    assert family() == before
    steps = [path.name for path in list_checkpoints(tmp_path)]
    assert steps and all(len(name.split("_")) == 2 for name in steps)
    send(0)
    resumed = train(**AVERAGES, save_dir=tmp_path, resume=True, checkpoint_interval=3)
    assert outcome(resumed)[:2] == outcome(train(**AVERAGES))[:2]


@pytest.mark.parametrize("handler", ["own", "ignored"])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_handler_of_the_user_is_left_alone(handler, processes, tmp_path, send):
    heard = []
    own = (lambda *args: heard.append(args[0])) if handler == "own" else signal.SIG_IGN
    for number in DEFAULTS:
        signal.signal(number, own)
    try:
        send(9, signal.SIGINT, signal.SIGTERM)
        trainer = train(**AVERAGES, processes=processes, save_dir=tmp_path)
        assert {signal.getsignal(number) for number in DEFAULTS} == {own}
    finally:
        for number, default in DEFAULTS.items():
            signal.signal(number, default)
    assert heard == ([signal.SIGINT, signal.SIGTERM] if handler == "own" else [])
    assert outcome(trainer) == outcome(train(**AVERAGES))


def test_a_callback_may_set_a_handler_of_its_own(tmp_path):
    """It stands until the fit ends; then the one before is back."""
    heard = []

    def take(loop):
        signal.signal(signal.SIGTERM, lambda *args: heard.append(loop.step))
        os.kill(os.getpid(), signal.SIGTERM)

    train(**AVERAGES, save_dir=tmp_path, callbacks=[Every(13, take)])
    assert heard == [13]


# Whole process groups, as a terminal or a scheduler signals them


def from_outside(number):
    """Let another process send a signal to all of this one's group."""
    group, pid = os.getpgid(0), os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.killpg(group, number)
        os._exit(0)
    os.waitpid(pid, 0)


def examples():
    return list(zip(*small_problem()[1].tensors, strict=True))


@pytest.mark.parametrize(
    ("number", "processes", "workers"),
    [(signal.SIGINT, 1, 1), (signal.SIGTERM, 1, 0), (signal.SIGINT, 2, 0), (signal.SIGTERM, 2, 1)],
)
def test_a_signal_to_the_whole_group_saves_too(number, processes, workers, tmp_path):
    """Ctrl-C in a terminal, a scheduler's SIGTERM: forked processes and the DataLoaders' workers get it as well."""
    options = {"strategy": FedAvgStrategy(lr=0.02, H=20), "data": examples(), "val_interval": 99, "max_steps": 50}
    options |= {"dataloader_kwargs": {"num_workers": workers}} if workers else {}

    def body():
        place = Place(30, lambda: from_outside(number))
        train(**options, model=Calling(place), callbacks=[place.begin], processes=processes, save_dir=tmp_path / "run")

    assert ended(apart(body)) == (130 if number == signal.SIGINT else 143)
    (folder,) = list_checkpoints(tmp_path / "run")
    assert load(folder).meta["begun_end"] == 20
    options |= {"dataloader_kwargs": None}
    resumed = train(**options, model=Calling(), save_dir=tmp_path / "run", resume=True)
    assert fingerprint(resumed.model) == fingerprint(train(**options, model=Calling()).model)


def test_a_second_sigterm_ends_the_process_and_its_family(tmp_path):
    def body():
        twice = Place(9, lambda: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)])
        train(**AVERAGES, model=Calling(twice), processes=3, save_dir=tmp_path)

    assert ended(apart(body)) == -signal.SIGTERM
    assert list_checkpoints(tmp_path) == []


@pytest.mark.parametrize(("signals", "code"), [(1, 143), (2, -signal.SIGTERM)])
def test_sigterm_without_a_folder_ends_the_process_and_its_family(signals, code):
    def body():
        terminate = Place(9, lambda: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(signals)])
        train(**AVERAGES, model=Calling(terminate), processes=3)

    assert ended(apart(body)) == code


def test_kill_9_of_the_caller_ends_its_family():
    def body():
        train(**AVERAGES, model=Calling(Place(9, lambda: os.kill(os.getpid(), signal.SIGKILL))), processes=3)

    assert ended(apart(body)) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, 8])
def test_runs_killed_at_random_moments_end_in_the_same_bits(kills):
    """The short version of what `benchmarks/kills.py` does 200 times."""
    done = python(ROOT / "benchmarks" / "kills.py", "--kills", kills, "--seed", "3")
    assert done.returncode == 0 and re.search(rf"^kills: {kills}\b", done.stdout, re.M), done.stdout + done.stderr
    assert "wrong bits: 0, orphans: 0, lost runs: 0, hung runs: 0, torn checkpoints: 0" in done.stdout
