"""The list of runs in a real browser: a skeleton at once, 500 runs soon, and the columns that a reader chooses."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROMIUM, DRIVER, opened, served, to, until

from exogym.core.base.processes import described

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromium-driver"),
]
MANY = 500
HEADS = (
    "[...document.querySelectorAll('thead th')].map((e) => e.textContent.replace(/ [\\u2191\\u2193]$/, '')).slice(1)"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("list") / "runs"
    for number in range(MANY):
        path = top / f"run-{number:03}"
        path.mkdir(parents=True)
        status = {"state": "done", "step": 9, "total_steps": 9, "process": described() | {"started": "1"}}
        (path / "status.json").write_text(json.dumps(status | {"heartbeat_s": 1e9, "started_s": 1e9 + number}))
        (path / "run.json").write_text(json.dumps({"description": {"strategy": {"name": "DiLoCoStrategy"}}}))
        (path / "summary.json").write_text(json.dumps({"val_loss": 1 / (1 + number), "val_accuracy": 0.25}))
        (path / "notes.json").write_text(json.dumps({"tags": [], "note": f"note <b>{number}</b>"}))
    return top


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Any]:
    with served(folder) as address, opened(address) as driver:
        yield driver


def test_five_hundred_runs_are_there_within_a_second(browser: Any) -> None:
    """The first paint, and on a machine without other work the list. Both are counted from the request for the page."""
    until(browser, "document.querySelectorAll('tbody a').length", lambda count: count == 300)
    listed = []
    for _ in range(3):
        browser.refresh()
        until(browser, "document.querySelectorAll('tbody a').length", lambda count: count == 300)
        painted = until(browser, "performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
        assert painted < 1000
        listed.append(until(browser, "performance.getEntriesByName('listed')[0].startTime"))
    assert min(listed) < 3000, listed  # other tests may run beside this one; alone it takes about 0.5 s
    assert f"{MANY} of {MANY} runs" in until(browser, "document.querySelector('main [role=status]').textContent")


def test_before_the_list_there_is_a_skeleton(browser: Any) -> None:
    """With a server that does not answer: first the page's own bars, then the bars of the list."""
    browser.execute_cdp_cmd("Network.enable", {})
    browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*/api/*", "*/static/app.js"]})
    try:
        browser.refresh()
        assert until(browser, "document.querySelectorAll('#main > .skeleton .bone').length") == 5
        browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*/api/*"]})
        browser.refresh()
        assert until(browser, "document.querySelectorAll('tbody .bone').length") == 5
        assert not browser.execute_script("return document.querySelector('.bar').checkVisibility()")  # no flash
        to(browser, "#/run/run-001")
    finally:
        browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
        browser.execute_cdp_cmd("Network.disable", {})
    to(browser, "#/")
    browser.refresh()
    until(browser, "document.querySelectorAll('tbody a').length")
    assert browser.execute_script("return document.querySelector('.bar').checkVisibility()")
    assert browser.execute_script("return document.querySelectorAll('.bone').length") == 0


def test_columns_are_chosen_and_the_address_keeps_them(browser: Any) -> None:
    to(browser, "#/none")
    to(browser, "#/")
    usual = ["run", "state", "strategy", "progress", "loss", "sent/node", "time", "seen"]
    until(browser, "document.querySelectorAll('tbody a').length")
    assert until(browser, HEADS, lambda found: len(found) == 8) == usual
    browser.find_element("css selector", "#columns > summary").click()
    for name in ("task", "tx_bytes", "accuracy", "note"):
        browser.find_element("id", f"column-{name}").click()
    wanted = ["run", "state", "strategy", "progress", "loss", "time", "seen", "task", "accuracy", "note"]
    assert browser.execute_script(f"return {HEADS}") == wanted
    row = "[...document.querySelectorAll('tbody tr')[0].children].map((e) => e.textContent)"
    assert until(browser, row)[-2:] == ["25 %", f"note <b>{MANY - 1}</b>"]
    browser.find_element("css selector", "[data-key=accuracy]").click()
    way = browser.execute_script("return location.hash")
    assert "columns=" in way and "sort=accuracy" in way
    to(browser, "#/hosts")
    browser.get(browser.current_url.partition("#")[0] + way)
    browser.refresh()
    until(browser, "document.querySelectorAll('tbody a').length")
    assert until(browser, HEADS, lambda found: len(found) == 10) == wanted
    for name in ("task", "tx_bytes", "accuracy", "note"):
        browser.find_element("css selector", "#columns > summary").click() if name == "task" else None
        browser.find_element("id", f"column-{name}").click()
    assert browser.execute_script(f"return {HEADS}") == usual
    assert "columns" not in browser.execute_script("return location.hash")


def test_the_page_is_small_and_loads_nothing_from_elsewhere(browser: Any) -> None:
    """Files of the page, the form's options included, at most 300 kB. All requests go to the page's own address."""
    to(browser, "#/new")
    until(browser, "document.getElementById('plan')?.textContent")
    entries = "performance.getEntriesByType('resource').map((e) => [new URL(e.name).origin, e.name, e.decodedBodySize])"
    found = browser.execute_script(f"return {entries}")
    own = browser.execute_script("return location.origin")
    assert {origin for origin, _, _ in found} == {own} and len(found) > 10
    sizes = {name: size for _, name, size in found if "/static/" in name or name.endswith(("/forms", "/strategies"))}
    assert sum(1 for name in sizes if "/api/" in name) == 2 and sum(sizes.values()) < 300_000
    assert [entry for entry in browser.get_log("browser") if "run-001" not in str(entry) and entry["level"] == "SEVERE"
            and "ERR_BLOCKED" not in entry["message"]] == []  # fmt: skip
