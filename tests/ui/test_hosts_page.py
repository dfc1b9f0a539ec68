"""The page of hosts in a real browser: a sentence on who needs attention, the time left, and a card per host."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROMIUM, DRIVER, opened, served, to, until

from exogym.core.base.files import write_json
from exogym.core.base.processes import described

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromium-driver"),
]
SENTENCE = "document.querySelector('.health')?.textContent"
PLACE = "document.getElementById('main').textContent"


class Hosts:
    """Writes the reports of two hosts, twice a second: `a` trains 20 steps a second; `b` as far as the test says."""

    def __init__(self, folder: Path):
        self.folder, self.quiet, self.began, self.over = folder, False, time.time(), False
        self.stuck_at: int | None = None

    def write(self) -> None:
        now = time.time()
        step = int(20 * (now - self.began))
        for_b = step if self.stuck_at is None else self.stuck_at
        hosts = [
            {"address": name, "device": "cpu", "ranks": [k], "state": "running", "restarts": k, "rx_bps": 1e6,
             "heard_s": now - (60 if self.quiet and name == "b" else 0),
             "processes": [{"rank": k, "step": at, "restarts": 0, "quiet_s": 0.0}]}
            for k, (name, at) in enumerate({"a": step, "b": for_b}.items())
        ]  # fmt: skip
        write_json(self.folder / "hosts.json", {"process": described(), "ended": False, "hosts": hosts, "events": []})

    def run(self) -> None:
        while not self.over:
            self.write()
            time.sleep(0.5)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts") / "runs" / "far"
    folder.mkdir(parents=True)
    status = {"state": "running", "step": 0, "total_steps": 100_000, "process": described(), "heartbeat_s": time.time()}
    (folder / "status.json").write_text(json.dumps(status | {"started_s": time.time()}))
    (folder / "run.json").write_text(json.dumps({"description": {"strategy": {"name": "DiLoCoStrategy"}}}))
    found = Hosts(folder)
    found.write()
    thread = threading.Thread(target=found.run)
    thread.start()
    yield found
    found.over = True
    thread.join()


@pytest.fixture(scope="module")
def browser(hosts: Hosts) -> Iterator[Any]:
    with served(hosts.folder.parent) as address, opened(address) as driver:
        yield driver


def test_a_sentence_names_the_host_that_needs_attention(browser: Any, hosts: Hosts) -> None:
    to(browser, "#/hosts")
    assert "All 2 hosts report" in until(browser, SENTENCE)
    cards = "[...document.querySelectorAll('dl.host')].map(c => c.firstChild.textContent)"
    assert browser.execute_script(f"return {cards}") == ["a", "b"]
    left = until(browser, PLACE, lambda text: " left" in text)
    assert "of 100000, about 8" in left and " min left" in left  # 83 minutes at 20 steps a second
    hosts.stuck_at = 40
    said = until(browser, SENTENCE, lambda text: "behind" in text)
    assert said.startswith("b: ") and said.endswith(" steps behind.")
    assert int(said.split()[1]) >= 120  # six seconds of training
    assert browser.execute_script("return document.querySelector('.health').classList.contains('warn')")
    hosts.quiet = True
    assert until(browser, SENTENCE, lambda text: "silent" in text).startswith("b: silent for ")
    stale = "[...document.querySelectorAll('dl.host.stale')].map(c => c.firstChild.textContent)"
    assert browser.execute_script(f"return {stale}") == ["b"]  # its values are the last known ones
    state = "document.querySelector('.state.ill')?.textContent"
    assert until(browser, state) == "running, b\u00a0silent"
    to(browser, "#/")
    assert until(browser, state) == "running, b\u00a0silent"  # the list says so, too
    to(browser, "#/hosts")
    until(browser, SENTENCE)
    hosts.quiet, hosts.stuck_at = False, None
    until(browser, SENTENCE, lambda text: text.startswith("All 2 hosts report"))


def test_no_host_reports_before_its_first_report(browser: Any) -> None:
    starting = {"address": "a", "state": "starting", "restarts": 0, "quiet_s": None}
    running = {"address": "b", "state": "running", "restarts": 0, "quiet_s": 1.0, "processes": [{"step": 5}]}
    said = (
        "import('/static/hosts.js').then((it) => arguments[1](it.hostsOf('x', {hosts: arguments[0]})[0].textContent))"
    )
    assert browser.execute_async_script(said, [starting, running]) == "a: starting."
    assert "Infinity" not in browser.execute_async_script(said, [])


def test_the_browser_has_nothing_to_complain_of(browser: Any) -> None:
    assert [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
