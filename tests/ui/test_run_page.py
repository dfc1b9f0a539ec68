"""A run's page in a real browser: tiles, an error first, buttons only where they apply, events folded."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROMIUM, DRIVER, opened, served, to, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromium-driver"),
]
TRAIN = """
import sys, time
from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem
import torch

def act(loop):
    time.sleep(0.05)
    if loop.step == int(sys.argv[2]):
        raise ValueError("the loss is <b>not</b> finite")

model, data = small_problem()
trainer = LocalTrainer(model, data, data, loss_fn=torch.nn.functional.mse_loss)
trainer.fit(DiLoCoStrategy(lr=0.02, H=4), num_nodes=2, max_steps=int(sys.argv[3]), batch_size=8, val_interval=4,
            device="cpu", run_dir=sys.argv[1], callbacks=[Every(4, act)],
            save_dir=sys.argv[4] if sys.argv[4:] else None)
"""


def train(*words: Any) -> subprocess.Popen[bytes]:
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    return subprocess.Popen([sys.executable, "-c", TRAIN, *map(str, words)], env=environment, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("page") / "runs"
    for name, fails in (("failed", 12), ("done", -1)):
        train(top / name, fails, 40).communicate()
    return top


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Any]:
    with served(folder) as address, opened(address) as driver:
        yield driver


def tiles(browser: Any) -> dict[str, list[str]]:
    found = "[...document.querySelectorAll('.tiles div')].map(d => [...d.children].map(c => c.textContent))"
    rows = until(browser, found, lambda rows: len(rows) == 6 and "none yet" not in rows[2])
    return {title: values for title, *values in rows}


BUTTONS = "[...document.querySelectorAll('.actions button')].map(b => b.id)"


def test_a_line_says_how_the_nodes_are(browser: Any) -> None:
    to(browser, "#/run/done")
    assert until(browser, "document.getElementById('health')?.textContent") == "All 2 nodes are healthy."


def test_a_failed_run_says_why_first(browser: Any, folder: Path) -> None:
    to(browser, "#/run/failed")
    text = until(browser, "document.querySelector('.trouble').textContent")
    assert text.startswith("Failed at step 12: ValueError: the loss is <b>not</b> finite")
    assert "raise ValueError" in text or "in act" in text  # the last lines
    place = "(s) => document.querySelector(s).getBoundingClientRect().top"
    assert browser.execute_script(f"const top = {place}; return top('.trouble') < Math.min(top('.tiles'), 300)")
    red, green, blue = until(
        browser, "getComputedStyle(document.querySelector('.trouble')).color.match(/\\d+/g).map(Number)"
    )
    assert red > 2 * max(green, blue)
    assert browser.execute_script(f"return {BUTTONS}") == []  # no Stop: it has ended; no Resume: nothing was saved
    to(browser, "#/run/done")
    until(browser, "document.querySelector('.tiles dd')?.textContent", lambda text: text == "done")
    assert browser.execute_script("return document.querySelector('.trouble').hidden")


def test_tiles_sum_a_run_up_and_events_are_folded(browser: Any, folder: Path) -> None:
    to(browser, "#/run/done")
    rows = [json.loads(line) for line in (folder / "done" / "records.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["val_loss"] for row in rows if row["val_loss"] is not None}
    best = min(losses, key=lambda step: losses[step])
    found = tiles(browser)
    assert found["Step"] == ["40 of 40", "100 %"] and found["State"][0] == "done"
    assert found["Validation loss"] == [f"{losses[40]:.4f}", "at step 40"]
    assert found["Best loss"] == [f"{losses[best]:.4f}", f"at step {best}"]
    assert "Time trained" in found and found["Sent per node"][0].endswith("B")
    assert browser.execute_script(f"return {BUTTONS}") == []
    folded = "document.querySelector('#events')"
    assert browser.execute_script(f"return [{folded}.open, {folded}.querySelector('summary').textContent]") == [
        False,
        f"Events ({len((folder / 'done' / 'events.jsonl').read_text().splitlines())})",
    ]


@pytest.mark.parametrize("saved", [False, True])
def test_stop_says_what_stays_and_loses_no_run(browser: Any, folder: Path, saved: bool) -> None:
    name = f"live-{saved}"
    place = [folder.parent / "saved"] if saved else []
    with train(folder / name, -1, 2000, *place) as process:
        try:
            until(browser, "1", lambda _: (folder / name / "records.jsonl").exists())
            to(browser, f"#/run/{name}")
            until(browser, "document.querySelectorAll('.tiles div')[5]?.textContent", lambda t: t and "so far" in t)
            until(browser, "document.querySelectorAll('.tiles div')[5].textContent", lambda t: "done at about" in t)
            share = until(browser, "document.getElementById('progress').position", lambda share: share > 0)
            assert share < 1
            assert until(browser, BUTTONS) == ["stop"]
            browser.find_element("id", "stop").click()
            said = until(browser, "document.querySelector('.actions p').textContent")
            assert "records and curves stay" in said
            assert ("you can resume it" if saved else "cannot resume") in said
            assert process.poll() is None
            browser.find_element("id", "keep-running").click()
            browser.find_element("id", "stop").click()
            browser.find_element("id", "stop-now").click()
            until(browser, "document.querySelector('.tiles dd').textContent", lambda text: text == "stopped")
            process.wait(60)
        finally:
            process.kill()
    assert until(browser, BUTTONS, lambda found: found == []) == []
    rows = (folder / name / "records.jsonl").read_text().splitlines()
    assert int(tiles(browser)["Step"][0].split()[0]) <= json.loads(rows[-1])["step"] + 4
    assert bool(list((folder.parent / "saved").glob("step_*"))) == saved


def test_a_run_whose_process_is_gone_has_no_stop(browser: Any, folder: Path) -> None:
    with train(folder / "gone", -1, 2000) as process:
        until(browser, "1", lambda _: (folder / "gone" / "records.jsonl").exists())
        to(browser, "#/run/gone")
        assert until(browser, BUTTONS) == ["stop"]
        process.kill()
    assert until(browser, "document.querySelector('.trouble').textContent").startswith("Lost at step")
    assert browser.execute_script(f"return {BUTTONS}") == []


def test_the_browser_has_nothing_to_complain_of(browser: Any) -> None:
    assert [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
