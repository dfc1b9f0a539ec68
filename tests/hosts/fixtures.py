"""Fixtures and small things that tests with hosts share."""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hosts import Hosts, hosts_or_skip

# A task of the user's own, slow enough to be disturbed, and a profile that trains it.
TASK = """
import os, torch
from exogym.tasks import Task
from exogym.testing import small_problem

class Slow(torch.utils.data.Dataset):
    def __init__(self, data): self.data = data
    def __len__(self): return len(self.data)
    def __getitem__(self, i):
        import time; time.sleep(0.004)
        return self.data[i]

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = small_problem()[0]
    def forward(self, batch):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

def problem():
    data = small_problem()[1]
    return Task("small", "a small problem", "here", Slow(data), data, Model, 2, 8, 80, lr=0.01, H=10)
"""
CONFIG = """
[small]
task = mytask:problem
steps = 80
batch_size = 8
lr = 0.01
unknown_to_us = 7

[distributed:small]
base_profile = small
strategy = diloco
communication_interval = 10
hosts_config = hosts.json
save_dir = checkpoints
checkpoint_interval = 10
max_restarts = 1
"""


@pytest.fixture(scope="module")
def hosts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """As many hosts as the module's COUNT says."""
    hosts_or_skip()
    with Hosts(request.module.COUNT, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture
def tidy(hosts: Hosts) -> Iterator[None]:
    """Every test begins and ends with nothing running on any host."""
    yield
    assert hosts.left_over() == {}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def said(done: subprocess.CompletedProcess[str]) -> str:
    return f"{done.stdout}\n{done.stderr}"


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[Any] | None = None, within_s: float = 300) -> Any:
    """Return the first true value of `condition`; fail where the process ends before, or after `within_s`."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert process is None or process.poll() is None, "it ended too early"
        assert time.monotonic() < deadline, f"it did not come within {within_s} s"
        time.sleep(0.05)
    return found
