"""One thread, one random state and the usual signals for every test."""

import gc
import importlib
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, and for the processes that tests start
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of those would compile the package anew

import numpy as np
import pytest
import torch

pytest.register_assert_rewrite("battery", "checkpoints", "problems", "processes")
os.fsync = lambda descriptor: None  # a checkpoint that survives a power cut is for users: no test waits for the disk
sys.dont_write_bytecode = False  # or every worker of every run would rewrite all asserts
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where a shell starts tests in the background


def pytest_collection_finish() -> None:
    """What is there before the first test (a million objects of torch) is no garbage: no test looks through it."""
    gc.freeze()


@pytest.fixture(autouse=True)
def same_random_state() -> None:
    """Start every test from the same random numbers, whichever tests ran before."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


# What is measured for a while, for people to read: here each is measured for as short as it can be.
TRIALS_S = {
    "exogym.study.compare.forecast": ("TRIAL_S", 0.0),
    "exogym.study.compare.estimate": ("TRIAL_S", 0.05),
}


@pytest.fixture(scope="session", autouse=True)
def short_trials() -> Iterator[None]:
    """No test looks at how long a step takes: a trial takes its least steps, also in forked processes."""
    with pytest.MonkeyPatch.context() as patch:
        for module, (name, seconds) in TRIALS_S.items():
            patch.setattr(importlib.import_module(module), name, seconds)
        yield


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison's curves are empty files: drawing takes as long as its training. `test_compare` has them drawn."""

    def touch(paths: list[Path], *rest: object) -> None:
        for path in paths:
            path.touch()

    monkeypatch.setattr("exogym.study.compare.comparison.draw", touch)
