"""Checks and estimates in processes of their own: the page answers meanwhile, and they end with it, however it ends."""

import contextlib
import http.client
import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from exogym.core.base.processes import started
from exogym.errors import ArgumentError
from exogym.ui.apart import Apart, Replaced

PATIENCE_S = 60.0


def wait_until(holds: Any) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)


def test_one_check_waits_and_a_newer_one_takes_its_place() -> None:
    apart, came = Apart(), list[str]()

    def come(name: str) -> None:
        with apart.turn():
            came.append(name)

    with ThreadPoolExecutor(2) as pool:
        with apart.turn():
            second = pool.submit(come, "second")
            wait_until(lambda: apart._newest == 2)
            third = pool.submit(come, "third")
            with pytest.raises(Replaced, match="a newer check"):
                second.result(60)
            assert not came  # one at a time
        third.result(60)
    assert came == ["third"]


ANSWERS = """
import json, sys, time
print(flush=True)
for line in sys.stdin:
    command, given = json.loads(line)
    if given.get("num_nodes") == "dies":
        sys.exit(1)
    time.sleep(3600 * (given.get("num_nodes") == "slow"))
    print(json.dumps({"error": "", "plan": command}), flush=True)
"""


def test_a_check_that_takes_too_long_or_dies_is_said_and_the_next_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exogym.ui.apart.CHECKS", ANSWERS)
    apart = Apart()
    for given, why in (("slow", "took over 0.1 s"), ("dies", "ended its process")):
        monkeypatch.setattr("exogym.ui.apart.CHECK_S", 60.0 if given == "dies" else 0.1)
        assert why in apart.check("compare", {"num_nodes": given})["error"]
        monkeypatch.setattr("exogym.ui.apart.CHECK_S", 60.0)
        assert apart.check("compare", {}) == {"error": "", "plan": "compare"}
    apart.close()
    with pytest.raises(ArgumentError, match="the page is ending"):
        apart.check("compare", {})


PAGE = """
import contextlib, sys
from pathlib import Path
from exogym.ui import apart, serve
top = Path(sys.argv[1])
waits = f"import os, time; from pathlib import Path; Path({str(top)!r}, str(os.getpid())).touch(); time.sleep(3600)"
own = "from exogym.core.base.processes import lines_from_parent; lines_from_parent(); "
apart.CHECK_S = 3600
apart.CHECKS = own + "print(flush=True); " + waits
apart.COMMAND = apart.COMMAND.partition("runpy.run_module")[0] + waits
form = {"name": "lr", "flag": "--lr", "is_flag": False, "multiple": False, "choices": [], "default": None}
with contextlib.suppress(KeyboardInterrupt):
    serve(top, ready=lambda address: print(address, flush=True), forms=lambda: {"compare": [form]})
"""


class Page:
    """A page whose checks and estimates never end. Each makes an empty file named after its process."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]):
        assert process.stdout is not None
        address = urlsplit(process.stdout.readline().strip())
        self.folder, self.process, self.port = folder, process, address.port
        self.headers = {"X-Exogym-Token": parse_qs(address.query)["token"][0], "Content-Type": "application/json"}

    def asked(self, method: str, path: str) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        body = json.dumps({"command": "compare", "options": {"lr": 1}}) if method == "POST" else None
        connection.request(method, path, body, self.headers)
        return connection

    def began(self, count: int) -> list[int]:
        wait_until(lambda: len(list(self.folder.iterdir())) == count)
        return [int(path.name) for path in self.folder.iterdir()]


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    words = [sys.executable, "-c", PAGE, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Page(tmp_path, process)
        finally:
            process.kill()


def test_checks_that_never_end_block_no_other_request(page: Page) -> None:
    with contextlib.ExitStack() as stack:
        checks = []
        for _ in range(60):  # more than the server has threads
            checks.append(page.asked("POST", "/api/check"))
            stack.callback(checks[-1].close)
        page.began(1)
        sockets = [connection.sock for connection in checks]
        wait_until(lambda: len(select.select(sockets, [], [], 1)[0]) == 58)  # one runs, and one waits
        with contextlib.closing(page.asked("GET", "/api/runs")) as other:
            assert other.getresponse().status == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_checks_and_estimates_end_with_the_page(number: signal.Signals, page: Page) -> None:
    with contextlib.closing(page.asked("POST", "/api/check")), contextlib.closing(page.asked("POST", "/api/estimate")):
        pids = page.began(2)
        assert all(started(pid) for pid in pids)
        page.process.send_signal(number)
        page.process.wait(PATIENCE_S)
        wait_until(lambda: not any(started(pid) for pid in pids))
    assert page.process.stderr is not None and "Traceback" not in page.process.stderr.read()
