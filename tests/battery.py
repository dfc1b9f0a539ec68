"""Runs of the small problem of `exogym.testing` in one setting, and the battery that holds the strategies to it.

The tests of the laws, of placement, stopping and faults share `battery(name)`: each process that runs tests trains the
reference run of a strategy once, whichever of them asks first.
"""

import functools
import json
import os
import signal
import time

import pytest
import torch
import torch.nn.functional as F
from strategies import CONTRIB, NODES, STRATEGIES
from torch import nn

from exogym import LocalTrainer
from exogym.callbacks import EvaluateNodes
from exogym.strategy import FedAvgStrategy
from exogym.testing import _Battery, fingerprint, small_problem

TIMED = ("wall_s", "memory_bytes", "device_use", "examples_per_s")
STEPS = 14
AVERAGES = {"strategy": FedAvgStrategy("adamw", lr=0.02, H=5)}


def train(strategy, model=None, data=None, val_data=None, loss_fn=F.mse_loss, max_stretch=None, **options):
    """Train the small problem, or another; return the trainer."""
    problem = small_problem()
    data = problem[1] if data is None else data
    trainer = LocalTrainer(problem[0] if model is None else model, data, val_data or data, loss_fn=loss_fn)
    trainer.max_stretch = max_stretch
    wanted = {"num_nodes": NODES, "max_steps": STEPS, "batch_size": 8, "device": "cpu", "val_interval": 4}
    trainer.fit(strategy, **wanted | options)
    return trainer


def rows_of(trainer):
    """The history without what is measured by the clock."""
    return [{name: value for name, value in row.items() if name not in TIMED} for row in trainer.history]


def outcome(trainer):
    """What must be alike: the model's bits, the history, and who has sent how much."""
    return fingerprint(trainer.model), rows_of(trainer), trainer.traffic


def as_json(trainer):
    """The outcome as another process writes it."""
    return json.loads(json.dumps(outcome(trainer)))


class Battery(_Battery):
    """The laws of one strategy of the table, over a reference run that is trained when it is first asked for."""

    def __init__(self, name):
        entry = (STRATEGIES | CONTRIB)[name]
        self.factory, self.payload, self.nodes, self.learning = entry.make, entry.payload, NODES, 0.7
        self.learning_steps = 48  # the slowest is at 0.45 of its first loss then
        self.steps = 24  # all meet a few times, and the formulas of bytes come out whole
        self.stops = (13,)  # `test_stopping` and `test_own_folders` have more

    def train(self, **options):
        """Train the strategy in the setting of the reference run, but for `options`; return the trainer."""
        options = {"max_steps": self.steps, "val_interval": 7, "callbacks": [EvaluateNodes()]} | options
        return train(self.factory(), **options)

    def outcome(self, **options):
        return outcome(self.train(**options))

    def ends_as_wanted(self, **options):
        """Assert that a run under `options` ends as the reference run."""
        for got, want in zip(self.outcome(**options), self.wanted, strict=True):
            assert got == want, options

    @functools.cached_property
    def first(self):
        """The trainer of the reference run."""
        return self.train()

    @functools.cached_property
    def wanted(self):
        """The outcome of the reference run."""
        return outcome(self.first)

    # What the laws of `exogym.testing` ask for

    @property
    def reference(self):
        return self.first.model

    @property
    def history(self):
        return self.first.history

    def run(self, nodes=None, **options):
        quick = {"val_interval": None, "callbacks": ()}  # weights, bytes and the loss at the end are looked at
        trainer = self.train(num_nodes=nodes or self.nodes, **quick | options)
        return trainer.model, trainer.history

    def learns(self):
        """Whoever has learned within the reference run needs no longer one."""
        losses = self.history.column("val_loss")[1]
        return losses[-1] < self.learning * losses[0] or super().learns()


battery = functools.cache(Battery)


def untraced(k):
    """Marks of the k-th case of a test that trains: --cov doubles its time, and all cases run much the same lines."""
    return [pytest.mark.no_cover] if k else []


def each(names, fast=None):
    """Parameters, one for each name; slow where `fast` leaves it out."""
    fast = list(names if fast is None else fast)
    slow = [pytest.mark.slow]
    return [pytest.param(name, marks=untraced(name != fast[0]) if name in fast else slow) for name in names]


def in_turn(names, ways, slow=None, fast=None):
    """Parameters (name, way): each name with one of the ways, in turn; with the others, or those of `slow`, as slow.

    Where `fast` leaves a name out, all of its ways are slow.
    """
    cases, k = [], 0
    for name in names:
        short = None
        if fast is None or name in fast:
            short = ways[k % len(ways)]
            cases.append(pytest.param(name, short, marks=untraced(k)))
            k += 1
        cases += [pytest.param(name, way, marks=pytest.mark.slow) for way in slow or ways if way != short]
    return cases


def asked(request, test):
    """The parameters of the cases of a test that this session runs: what a fixture need not train, it leaves out."""
    return [item.callspec.params for item in request.session.items if getattr(item, "originalname", "") == test]


def same_everywhere(make, processes=(2,), **options):
    """Assert that `make()`, a dict for `train`, ends alike in one process and in `processes`."""
    wanted = outcome(train(**make(), **options))
    for count in processes:
        several = train(**make(), processes=count, **options)
        for got, want in zip(outcome(several), wanted, strict=True):
            assert got == want, count
        assert len(several.description["placement"]["nodes"]) == count


# Models to be disturbed


def plain_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 2))


def slow(step_s):
    """The plain model, but a training step takes so long."""

    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = plain_model()

        def forward(self, x):
            time.sleep(step_s if self.training else 0)
            return self.inner(x)

    return Slow()


class Trouble(nn.Module):
    """The plain model, but from the third training step on `act()` is called in the process chosen."""

    shared_attributes = ("calls",)

    def __init__(self, act, elsewhere=True):
        super().__init__()
        self.inner, self.act = plain_model(), act
        self.home, self.elsewhere, self.calls = os.getpid(), elsewhere, 0

    def forward(self, x):
        self.calls += self.training
        if self.calls >= 4 and (os.getpid() != self.home) == self.elsewhere:
            self.act()
        return self.inner(x)


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)
