"""The page in a real browser: Chromium without a window, driven by selenium; runs are trained by other processes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exogym.base.processes import described

webdriver = pytest.importorskip("selenium.webdriver")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
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
        (top / name / "events.jsonl").write_text(json.dumps({"at_s": 1, "kind": NASTY, "step": 0, "why": NASTY}) + "\n")
    return top


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    words = [sys.executable, "-m", "exogym", "ui", "--runs", str(folder), "--port", "0", "--no-open"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


@pytest.fixture(scope="module")
def browser(address: str) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1100,900"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        driver.get(address)
        yield driver
    finally:
        driver.quit()


def until(browser: Any, script: str, wanted: Callable[[Any], bool] = bool) -> Any:
    """Return what a script gives, as soon as it is what is wanted."""
    from selenium.webdriver.support.ui import WebDriverWait

    def look(driver: Any) -> Any:
        found = driver.execute_script(f"return {script}")
        return [found] if wanted(found) else None

    return WebDriverWait(browser, 40).until(look)[0]


def to(browser: Any, way: str) -> None:
    browser.execute_script("location.hash = arguments[0]", way)


NAMES = "[...document.querySelectorAll('tbody a')].map(a => a.textContent)"
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
            assert "running" in until(browser, "document.getElementById('standing').textContent")
            until(browser, "!document.querySelector('canvas.heat').parentElement.hidden")
        finally:
            process.kill()
    until(browser, "document.getElementById('standing').textContent", lambda text: text.startswith("lost"))


def test_two_are_compared(browser: Any) -> None:
    to(browser, "#/")
    until(browser, NAMES, lambda names: "second" in names)
    for name in ("first", "second"):
        browser.find_element("css selector", f"input[aria-label='select {name}']").click()
    browser.find_element("id", "compare").click()
    labels = "[...(document.querySelector('.chart').plot?.series ?? [])].map(s => s.label)"
    assert until(browser, labels, lambda found: len(found) == 3)[1:] == ["first", "second"]
    browser.find_element("css selector", "#axis option[value=tx_bytes]").click()
    assert until(browser, labels, lambda found: found[:1] == ["bytes sent per node"])
    assert until(browser, "document.querySelector('.chart').plot.data[0].at(-1)") == 90


def test_one_is_started_from_the_form(browser: Any, folder: Path) -> None:
    to(browser, "#/new")
    until(browser, "document.getElementById('option-strategies') !== null")
    for name, text in {"strategies": "ddp", "seeds": "1", "steps": "3000", "nodes": "2", "device": "cpu"}.items():
        browser.find_element("id", f"option-{name}").send_keys(text)
    browser.find_element("id", "start").click()
    assert "started as process" in until(browser, "document.getElementById('answer').textContent")
    to(browser, "#/")
    names = until(browser, NAMES, lambda names: any(name.startswith("digits") for name in names))
    name = next(name for name in names if name.startswith("digits")).partition("/")[0]
    to(browser, f"#/compare/{name}")
    until(browser, POINTS, lambda count: count > 2)
    for button, state in (("stop", "stopped"), ("resume", "done")):
        browser.find_element("id", button).click()
        until(browser, f"list.find((run) => run.name === '{name}').state", lambda found, state=state: found == state)


def test_what_a_run_says_of_itself_is_text(browser: Any, folder: Path) -> None:
    to(browser, "#/")
    until(browser, NAMES, lambda names: any(name.startswith("<img") for name in names))
    to(browser, "#/run/first")
    until(browser, "document.querySelector('pre')?.textContent ?? ''", lambda text: "onerror" in text)
    assert browser.execute_script("return document.images.length") == 0 and browser.title == "ExoGym runs"


def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Any) -> None:
    browser.set_window_size(500, 800)
    wide = browser.execute_cdp_cmd
    wide("Emulation.setDeviceMetricsOverride", {"width": 375, "height": 700, "deviceScaleFactor": 2, "mobile": True})
    for way in ("#/", "#/run/first"):
        to(browser, way)
        until(browser, "document.querySelector('table') !== null")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 375
    wide("Emulation.clearDeviceMetricsOverride", {})


def test_the_browser_has_nothing_to_complain_of(browser: Any) -> None:
    assert [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
