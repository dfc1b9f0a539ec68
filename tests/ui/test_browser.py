"""The page in a real browser: Chromium without a window, driven by selenium; runs are trained by other processes."""

import json
import os
import subprocess
import sys
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
NASTY = "<img src=x onerror=\"document.title='owned'\">"
TRAIN = """
import sys, time
from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem
import torch
model, data = small_problem()
trainer = LocalTrainer(model, data, data, loss_fn=torch.nn.functional.mse_loss)
trainer.fit(DiLoCoStrategy(lr=0.02, H=4), num_nodes=2, max_steps=100000, batch_size=8, val_interval=4, device="cpu",
            run_dir=sys.argv[1], callbacks=[Every(4, lambda loop: time.sleep(0.05))])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("pages") / "runs"
    for name in ("first", "second", NASTY.replace("/", "")):
        (top / name).mkdir(parents=True)
        status = {"state": "done", "step": 9, "total_steps": 9, "process": described() | {"started": "1"}}
        (top / name / "status.json").write_text(json.dumps(status | {"heartbeat_s": 1e9, "started_s": 1e9}))
        strategy = {"name": NASTY, "H": NASTY}
        (top / name / "run.json").write_text(json.dumps({"description": {"strategy": strategy}, "command": [NASTY]}))
        rows = [{"step": k, "node": None, "val_loss": 9.0 - k, "tx_bytes": 10.0 * k} for k in range(10)]
        (top / name / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (top / name / "notes.json").write_text(json.dumps({"tags": [NASTY[:40], "old"], "note": NASTY}))
        (top / name / "hosts.json").write_text(
            json.dumps(
                {
                    "hosts": [
                        {"address": NASTY, "device": NASTY, "state": NASTY, "restarts": 0, "gpus": [{"name": NASTY}]}
                    ],
                    "events": [{"at_s": 1, "kind": NASTY, "why": NASTY}],
                }
            )
        )
        (top / name / "timeline.json").write_text(json.dumps({"spans": [[0, NASTY, 0.0, 1.0, NASTY]], "shares": {}}))
        (top / name / "events.jsonl").write_text(json.dumps({"at_s": 1, "kind": NASTY, "step": 0, "why": NASTY}) + "\n")
    (top / "both" / "ddp-seed-0").mkdir(parents=True)
    about = {"task": "digits", "strategies": {"ddp": {}}, "state": "finished"}
    (top / "both" / "run.json").write_text(json.dumps(about))
    for name in ("run.json", "status.json", "records.jsonl"):
        (top / "both" / "ddp-seed-0" / name).write_text((top / "first" / name).read_text())
    return top


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Any]:
    with served(folder) as address, opened(address) as driver:
        yield driver


NAMES = "[...document.querySelectorAll('tbody a')].map(a => a.textContent)"
STATES = (
    "(() => { const asked = new XMLHttpRequest(); asked.open('GET', '/api/runs', false); asked.send();"
    " return Object.fromEntries(JSON.parse(asked.response).map((run) => [run.name, run.state])); })()"
)
POINTS = "(document.querySelector('.chart:not([hidden])')?.plot?.data[0].length ?? 0)"


def test_all_runs_are_listed_and_found(browser: Any) -> None:
    assert set(until(browser, NAMES, lambda names: len(names) >= 3)) >= {"first", "second"}
    assert "token" not in browser.current_url
    box = browser.find_element("id", "filter")
    box.send_keys("sec")
    assert until(browser, NAMES, lambda names: len(names) == 1) == ["second"]
    box.clear()
    box.send_keys(" ")
    until(browser, NAMES, lambda names: len(names) >= 3)


def test_a_run_of_another_process_appears_and_its_curve_grows(browser: Any, folder: Path) -> None:
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    with subprocess.Popen([sys.executable, "-c", TRAIN, folder / "live"], env=environment) as process:
        try:
            until(browser, NAMES, lambda names: "live" in names)
            to(browser, "#/run/live")
            first = until(browser, POINTS, lambda count: count > 1)
            until(browser, POINTS, lambda count: count > first + 4)
            assert "running" in until(browser, "document.querySelector('.tiles dd').textContent")
            until(browser, "!document.querySelector('canvas.heat').closest('section').hidden")
        finally:
            process.kill()
    until(browser, "document.querySelector('.tiles dd').textContent", lambda text: text == "lost")


def test_two_are_compared(browser: Any) -> None:
    to(browser, "#/")
    until(browser, NAMES, lambda names: "second" in names)
    for name in ("first", "second"):
        browser.find_element("css selector", f"input[aria-label='select {name}']").click()
    browser.find_element("id", "compare").click()
    labels = "[...(document.querySelector('.chart')?.plot?.series ?? [])].map(s => s.label)"
    assert until(browser, labels, lambda found: len(found) == 3)[1:] == ["first", "second"]
    assert until(browser, labels, lambda found: found[:1] == ["bytes sent per node"])
    verdict = until(browser, "document.getElementById('verdict').textContent")
    assert verdict.startswith("Both need about 90 B for the same loss (0.0000), and they end alike. One seed each")
    browser.find_element("css selector", ".tabs [value=step]").click()
    assert until(browser, labels, lambda found: found[:1] == ["steps"])
    browser.find_element("css selector", ".tabs [value=tx_bytes]").click()
    assert until(browser, labels, lambda found: found[:1] == ["bytes sent per node"])
    assert until(browser, "document.querySelector('.chart').plot.data[0].at(-1)") == 80  # the last loss is 0


def test_one_is_started_from_the_form(browser: Any, folder: Path) -> None:
    to(browser, "#/new")
    until(browser, "document.getElementById('line')?.value")
    line = browser.find_element("id", "line")
    line.clear()
    line.send_keys("compare --strategies ddp --seeds 1 --steps 3000 --nodes 2 --device cpu")
    until(browser, "document.getElementById('plan').textContent", lambda text: "1 run: DDP, 1 seed" in text)
    browser.find_element("id", "start").click()
    assert "started as process" in until(browser, "document.getElementById('answer').textContent")
    to(browser, "#/")
    found = "[...document.querySelectorAll('td.name small')].map(e => e.textContent).find(t => t.startsWith('digits-'))"
    name = until(browser, found)  # its title is "digits, 1 strategies"
    to(browser, f"#/compare/{name}")
    until(browser, POINTS, lambda count: count > 2)
    for button, state in (("stop", "stopped"), ("resume", "done")):
        until(browser, f"document.getElementById('{button}') !== null")
        browser.find_element("id", button).click()
        if button == "stop":
            browser.find_element("id", "stop-now").click()
        until(browser, STATES, lambda found, state=state: found.get(name) == state)


def test_what_a_run_says_of_itself_is_text(browser: Any, folder: Path) -> None:
    to(browser, "#/")
    until(browser, NAMES, lambda names: any(name.startswith("<img") for name in names))
    to(browser, "#/run/first")
    until(browser, "document.querySelector('pre')?.textContent ?? ''", lambda text: "onerror" in text)
    until(browser, "document.querySelector('.hosts')?.textContent ?? ''", lambda text: "onerror" in text)
    to(browser, "#/hosts")
    until(browser, "document.querySelector('.hosts')?.textContent ?? ''", lambda text: "onerror" in text)
    assert browser.execute_script("return document.images.length") == 0 and browser.title == "ExoGym runs"


def test_tags_and_notes_are_given_and_found(browser: Any, folder: Path) -> None:
    to(browser, "#/run/second")
    until(browser, "document.getElementById('tags')?.value ?? ''", lambda text: "old" in text)
    for name, text in (("tags", "mine, <b>x</b>"), ("note", "why <i>so</i>")):
        field = browser.find_element("id", name)
        field.clear()
        field.send_keys(text)
    browser.find_element("id", "keep").click()
    until(browser, "document.querySelector('.notes .soft').textContent", lambda text: text == "saved")
    assert json.loads((folder / "second" / "notes.json").read_text())["tags"] == ["<b>x</b>", "mine"]
    to(browser, "#/")
    box = browser.find_element("id", "filter")
    box.send_keys("mine")
    assert until(browser, NAMES, lambda names: len(names) == 1) == ["second"]
    assert browser.execute_script("return document.querySelector('.tag').textContent") == "<b>x</b>"
    box.clear()
    box.send_keys(" ")
    until(browser, NAMES, lambda names: len(names) >= 3)


def test_a_title_is_given_by_keys_and_kept(browser: Any, folder: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    title = "document.getElementById('title').textContent"
    before = json.loads((folder / "second" / "notes.json").read_text())
    to(browser, "#/run/second")
    until(browser, title, lambda text: text == "second")
    for key, wanted in ((Keys.ESCAPE, "second"), (Keys.ENTER, "My <b>run</b>")):
        browser.execute_script("document.getElementById('rename').focus()")
        browser.switch_to.active_element.send_keys(Keys.ENTER)
        assert browser.switch_to.active_element.get_attribute("aria-label") == "title"
        browser.switch_to.active_element.send_keys("My <b>run</b>", key)
        until(browser, title, lambda text, wanted=wanted: text == wanted)
        assert browser.switch_to.active_element.get_attribute("id") == "rename"
    kept = json.loads((folder / "second" / "notes.json").read_text())
    assert kept == before | {"title": "My <b>run</b>"}
    to(browser, "#/")
    until(browser, NAMES, lambda names: "My <b>run</b>" in names)
    assert browser.execute_script(
        "return [...document.querySelectorAll('td.name small')].some(e => e.innerText === 'second')"
    )
    (folder / "second" / "notes.json").unlink()
    until(browser, NAMES, lambda names: "second" in names)


def test_a_comparison_opens_in_place_and_keeps_the_focus(browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    to(browser, "#/")
    fold = "document.querySelector('[aria-label=\"runs of both\"]')"
    until(browser, f"{fold} !== null")
    browser.execute_script(f"{fold}.focus()")
    for is_open in (True, False):
        browser.switch_to.active_element.send_keys(Keys.ENTER)
        until(browser, NAMES, lambda names, is_open=is_open: ("ddp-seed-0" in names) == is_open)
        held = browser.switch_to.active_element
        assert held.get_attribute("aria-label") == "runs of both"
        assert held.get_attribute("aria-expanded") == str(is_open).lower()


def test_a_row_has_a_curve_of_its_loss(browser: Any) -> None:
    """Each row, also if there are more than are asked for at a time."""
    to(browser, "#/")
    browser.find_element("id", "inside").click()
    drawn = (
        "[...document.querySelectorAll('span.later canvas')].map(c =>"
        " c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(x => x))"
    )
    assert all(until(browser, drawn, lambda found: len(found) >= 4))
    browser.find_element("id", "inside").click()


def test_without_a_mouse(browser: Any) -> None:
    """Sorted, filtered and opened by keys alone, with what has the focus to be seen."""
    from selenium.webdriver.common.keys import Keys

    to(browser, "#/none")
    to(browser, "#/")
    until(browser, NAMES, lambda names: len(names) >= 3)
    browser.execute_script("document.querySelector('h1 a').focus()")
    seen: list[str] = []
    while "run" not in seen and len(seen) < 40:
        browser.switch_to.active_element.send_keys(Keys.TAB)
        seen.append(browser.switch_to.active_element.text.strip(" \u2193\u2191"))
    assert seen[:3] == ["Runs", "Hosts", "New run"] and "run" in seen
    head = browser.switch_to.active_element
    head.send_keys(Keys.ENTER)
    until(browser, "document.activeElement.closest('th')?.getAttribute('aria-sort')", lambda way: way == "descending")
    assert browser.execute_script("return getComputedStyle(document.activeElement).outlineStyle") != "none"
    names = until(browser, NAMES)
    while browser.switch_to.active_element.tag_name != "a" and len(seen) < 80:
        browser.switch_to.active_element.send_keys(Keys.TAB)
        seen.append("")
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    until(browser, "document.querySelector('#main h2')?.textContent ?? ''", lambda text: text == names[0])


def test_a_hundred_thousand_records(browser: Any, folder: Path) -> None:
    """The page takes as many points as it draws."""
    path = folder / "long"
    path.mkdir()
    for name in ("status.json", "run.json"):
        (path / name).write_text((folder / "first" / name).read_text())
    with open(path / "records.jsonl", "w") as file:
        for step in range(10_000):
            row = {
                "step": step,
                "val_loss": 1.0 / (1 + step) if step % 10 == 0 else None,
                "train_loss": 1.0 / (1 + step),
            }
            for node in (None, *range(9)):
                file.write(json.dumps(row | {"node": node, "tx_bytes": 1.0 * step}) + "\n")
    to(browser, "#/run/long")
    count = until(browser, POINTS, lambda count: count > 500)
    assert count <= 2000
    until(browser, "document.querySelector('.chart').plot.data[0].at(-1)", lambda last: last == 9999)
    early = "document.querySelector('.chart').plot.data[0].filter(step => step < 1000).length"
    assert until(browser, early, lambda count: count > 50) <= 400  # as dense as what came last
    until(browser, "!document.querySelector('canvas.heat').closest('section').hidden")
    sizes = "performance.getEntriesByType('resource').filter(e => e.name.includes('/run')).map(e => e.decodedBodySize)"
    assert max(browser.execute_script(f"return {sizes}")) < 2_000_000


@pytest.mark.parametrize("wide", [375, 1100])
def test_nothing_is_wider_than_the_screen(browser: Any, wide: int) -> None:
    size = {"width": wide, "height": 700, "deviceScaleFactor": 2, "mobile": wide == 375}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    for way in ("#/", "#/run/first", "#/hosts", "#/new", "#/compare/first&second"):
        to(browser, way)
        until(browser, "document.querySelector('table, form') !== null")
        until(browser, "document.querySelector('#main').textContent.length > 100")
        # Charts follow the screen's width a moment later.
        until(browser, "document.documentElement.scrollWidth", lambda now: now <= wide)
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_browser_has_nothing_to_complain_of(browser: Any) -> None:
    assert [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


TEXT = "document.getElementById('main').innerText"
ODD = {  # addresses that somebody may type, and what the page then shows
    "#/run/first": "Validation loss",  # the control
    "#/run/both": "done, 1 runs",
    "#/compare/first": "done, 1 runs",
    "#/compare/both/ddp-seed-0": "done, 1 runs",
    "#/compare/first&nothing": "found no nothing",
    **{f"#/run/{name}": "not found" for name in ("", "nothing", "%", "%ff", "%00", "\u00fc", "a/b/c", "x" * 5000)},
    **{f"#/run/{name}": "not found" for name in ("..", "../hosts", "..%2fforms", "../events", "first/hosts")},
    **{f"#/compare/{name}": "not found" for name in ("", "%zz", "../one", "constructor")},
    "#/run/first?axis=__proto__&smooth=Infinity&toString=1": "Validation loss",
    "#/hosts/../one": "heartbeat",
    "#/new?again=../first": "not found",
    "#/new?line=toString": "'toString' is no command",
    "#/compare/first?over=__proto__": "Validation loss over bytes",
    "#/%/..": "Show runs inside",
}


def test_odd_addresses_are_answered_in_words(browser: Any) -> None:
    browser.get_log("browser")
    for way, wanted in ODD.items():
        to(browser, "#/hosts")
        until(browser, TEXT, lambda text: "Hosts" in text)
        to(browser, way)
        until(browser, TEXT, lambda text, wanted=wanted: wanted in text)
    complaints = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert [one for one in complaints if "Failed to load resource" not in one] == []


def test_many_pages_in_one_browser_are_all_answered(browser: Any) -> None:
    """A browser opens at most six connections to a server."""
    address, own = browser.current_url.partition("#")[0], browser.current_window_handle
    for _ in range(8):
        browser.switch_to.new_window("tab")
        browser.get(address)
        until(browser, NAMES, lambda names: "first" in names)
    for handle in browser.window_handles:
        if handle != own:
            browser.switch_to.window(handle)
            browser.close()
    browser.switch_to.window(own)
