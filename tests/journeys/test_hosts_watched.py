"""A run on three hosts, watched in the real page while a worker and then a whole host are lost and come back."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROMIUM, DRIVER, opened, served, to, until
from hosts import Hosts, fixtures
from hosts.fixtures import wait_for

from exogym.core.record.run_folder import read_status
from exogym.machines.remote.health import read_hosts

hosts, project, tidy = fixtures.hosts, fixtures.project, fixtures.tidy  # where pytest looks for them
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("tidy"),
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromium-driver"),
]
COUNT = 3
TRAIN = """
import os, time, torch
from exogym import NetworkTrainer, Placement
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem

class Slow(torch.utils.data.Dataset):
    def __init__(self, data): self.data = data
    def __len__(self): return len(self.data)
    def __getitem__(self, i):
        while os.path.exists("wait"): time.sleep(0.01)
        time.sleep(0.002)
        return self.data[i]

model, data = small_problem()
trainer = NetworkTrainer("hosts.json", model, Slow(data), data, loss_fn=torch.nn.functional.mse_loss, min_hosts=2)
placement = Placement(max_restarts=2)
trainer.fit(DiLoCoStrategy(H=5, lr=0.01), max_steps=100_000, batch_size=8, placement=placement, val_interval=50)
"""
ROWS = """(() => {
  return [...document.querySelectorAll("dl.host")].map((card) => {
    const [host, state, ...rest] = [...card.children].map((one) => one.textContent);
    return { host, state, ...Object.fromEntries(rest.flatMap((title, k) => (k % 2 ? [] : [[title, rest[k + 1]]]))) };
  });
})()"""


def kill(hosts: Hosts, number: int, what: str) -> None:
    pids = [pid for pid, line in hosts[number].processes().items() if what in line]
    assert pids, hosts[number].processes()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_who_is_lost_is_seen_and_who_comes_back(hosts: Hosts, project: Path) -> None:
    (project / "train.py").write_text(TRAIN)
    hosts.file(project / "hosts.json")
    with open(project / "said", "w") as file:
        run = hosts.controller.start([sys.executable, "train.py"], cwd=project, stdout=file, stderr=file)
    try:
        with served(project / "runs") as address, opened(address) as browser:
            watch(hosts, project, run, browser)
    finally:
        run.send_signal(signal.SIGINT)
        run.wait(120)
    (folder,) = (project / "runs").iterdir()
    assert read_status(folder)["state"] in ("stopped", "lost")  # without save_dir it may have no time to say so
    assert {host["state"] for host in read_hosts(folder)["hosts"]} <= {"stopped", "failed", "done"}


def watch(hosts: Hosts, project: Path, run: Any, browser: Any) -> None:
    wait_for(lambda: list((project / "runs").glob("*/status.json")), run)
    to(browser, "#/hosts")

    def seen(number: int, **wanted: str) -> dict[str, str]:
        """Return a host's line, once its cells are as wanted."""

        def is_so(rows: Any) -> bool:
            return len(rows) == COUNT and all(rows[number][name] == text for name, text in wanted.items())

        return until(browser, ROWS, is_so)[number]

    for number in range(COUNT):
        row = seen(number, state="running", restarts="0")
        assert row["host"] == hosts[number].address and row["device"] == "cpu" and row["memory"] and "GPU" not in row
    until(
        browser, ROWS, lambda rows: all(row.get("received", "").endswith("bit/s") and "%" in row["CPU"] for row in rows)
    )
    before = int(until(browser, ROWS, lambda rows: all(row.get("last step") for row in rows))[0]["last step"])
    until(browser, ROWS, lambda rows: int(rows[0]["last step"]) > before)  # it goes on while one looks

    text = "document.querySelector('.health')?.textContent"
    assert f"All {COUNT} hosts report" in until(browser, text)
    until(browser, "document.getElementById('main').textContent", lambda text: " left" in text)

    kill(hosts, 1, "runner.py")  # a worker; the host's launcher starts it again
    seen(1, state="running", restarts="1")
    assert seen(0, state="running")["restarts"] == "0"

    kill(hosts, 2, "exec(d[0])")  # what watches over the run there, as if the host had gone
    seen(2, state="lost")
    assert until(browser, text) == f"{hosts[2].address}: lost."
    until(browser, "document.getElementById('main').textContent", lambda text: "lost" in text)
    to(browser, "#/")
    until(browser, "[...document.querySelectorAll('.state')].map(s => s.textContent)", lambda all: "running" in all)
    name = browser.execute_script("return document.querySelector('tbody a').textContent")
    to(browser, f"#/run/{name}")  # the run's own page has its hosts too, and who was away
    until(browser, "document.getElementById('main').textContent", lambda text: "away" in text)
    seen(2, state="running", restarts="1")
    until(browser, "[...document.querySelectorAll('.hosts + *, details td')].map(c => c.textContent)",
          lambda cells: "started again" in cells)  # fmt: skip
