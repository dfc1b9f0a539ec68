"""The line of a new run in a real browser: completion, errors while typing, and a run again with changes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROMIUM, DRIVER, opened, served, to, until

Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromium-driver"),
]
SCRIPT = """
from exogym import LocalTrainer
from exogym.faults import Faults
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem
import torch
model, data = small_problem()
trainer = LocalTrainer(model, data, data, loss_fn=torch.nn.functional.mse_loss)
trainer.fit(DiLoCoStrategy(lr=0.02, H=4, weighting="examples"), num_nodes=3, max_steps=8, batch_size=8, device="cpu",
            network="10Mbps,20ms", step_seconds=0.01, shuffle=False, faults=Faults(drop_rate=0.1),
            run_dir="runs/script")
"""
COMPARE = ["--strategies", "ddp,diloco:H=5", "--nodes", "2", "--steps", "20", "--seeds", "1", "--no-shuffle"]
SWEEP = [
    "--sweep",
    "H=2,5",
    "--sweep",
    "network=wifi;1Gbps,1ms",
    "--step-seconds",
    "10ms",
    "--steps",
    "10",
    "--nodes",
    "2",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("form")
    exogym = [sys.executable, "-m", "exogym"]
    (top / "train.py").write_text(SCRIPT)
    for words in (
        [sys.executable, "train.py"],
        [*exogym, "compare", *COMPARE, "--out", "compared"],
        [*exogym, "sweep", *SWEEP, "--seeds", "1", "--out", "runs/swept"],
    ):
        subprocess.run(words, cwd=top, check=True, capture_output=True)
    (compared,) = (top / "compared").iterdir()
    compared.rename(top / "runs" / "compared")
    return top / "runs"


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Any]:
    with served(folder) as address, opened(address) as driver:
        yield driver


LINE = "document.getElementById('line').value"
PLAN = "document.getElementById('plan')?.textContent"
WRONG = "document.getElementById('wrong')?.textContent"
OFFERED = "[...document.querySelectorAll('#suggestions:not([hidden]) code')].map((each) => each.textContent)"


def form(browser: Any, way: str = "#/new") -> None:
    """Open the page anew, and wait until the server has checked its line."""
    to(browser, "#/none")
    to(browser, way)
    until(browser, f"{PLAN} || {WRONG}")


def write(browser: Any, text: str) -> None:
    line = browser.find_element("id", "line")
    line.clear()
    line.send_keys(text)


def test_the_line_is_completed_by_keys_and_pointer(browser: Any) -> None:
    form(browser)
    assert "9 runs: DDP, DiLoCo (H=30), SPARTA" in until(browser, PLAN)  # an example stands there
    write(browser, "comp")
    assert until(browser, OFFERED) == ["compare"]
    line = browser.find_element("id", "line")
    line.send_keys(Keys.TAB, " --strat")
    assert until(browser, OFFERED, lambda found: found == ["--strategies"])
    line.send_keys(Keys.TAB, "diloc")
    assert "diloco" in until(browser, OFFERED, lambda found: "diloco" in found)
    line.send_keys(Keys.TAB, ":weight")
    until(browser, OFFERED, lambda found: found == ["weighting="])
    line.send_keys(Keys.TAB)
    until(browser, OFFERED, lambda found: found == ["uniform", "examples"])
    line.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert line.get_attribute("aria-activedescendant") == "suggestion-1"
    line.send_keys(Keys.ENTER)
    until(browser, LINE, lambda text: text == "compare --strategies diloco:weighting=examples")
    browser.find_element("css selector", "[data-strategy=ddp]").click()
    until(browser, LINE, lambda text: text == "compare --strategies diloco:weighting=examples,ddp")
    wanted = "6 runs: DiLoCo (weighting=examples), DDP, 3 seeds each"
    assert wanted in until(browser, PLAN, lambda text: "6 runs" in text)
    line.send_keys(" --network wif")
    until(browser, OFFERED, lambda found: found == ["wifi"])
    browser.find_element("css selector", "#suggestion-0").click()
    assert until(browser, LINE, lambda text: text.endswith("--network wifi"))
    line.send_keys(Keys.ESCAPE)
    assert browser.execute_script("return document.getElementById('suggestions').hidden")


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("compare --strategies diloco:H=0", "strategy 'diloco:H=0': H=0 must be a whole number of at least 1"),
        ("compare --nodes two", "num_nodes='two' must be a whole number of at least 1"),
        ("compare --node 2", "'--node' is no option of compare"),
        ("train --nodes 2", "'train' is no command: begin with compare or sweep"),
        ("compare --nodes", "--nodes needs a value"),
        ("sweep --sweep nodes=2,4 --sweep precisio=fp32", "diloco has no option 'precisio'"),
    ],
)
def test_errors_while_typing_are_those_of_python(browser: Any, line: str, error: str) -> None:
    form(browser)
    write(browser, line)
    assert until(browser, WRONG, lambda text: error in text)
    assert browser.execute_script("return document.getElementById('start').disabled")
    assert browser.find_element("id", "line").get_attribute("aria-invalid") == "true"
    write(browser, "compare --strategies ddp --nodes 2")
    until(browser, WRONG, lambda text: text == "")
    assert "2 nodes" in until(browser, PLAN, lambda text: "2 nodes" in text)


def test_text_of_a_line_is_never_run(browser: Any, folder: Path) -> None:
    form(browser)
    ran = folder.parent / "ran"
    write(browser, f"compare --strategies \"ddp:lr=__import__('os').system('touch {ran}')\"")
    assert until(browser, WRONG, lambda text: "names code or a file" in text)
    write(browser, "compare --strategies '<img src=x onerror=alert(1)>'")
    assert until(browser, WRONG, lambda text: "unknown strategy '<img" in text)
    assert not ran.exists() and browser.title == "ExoGym runs"
    assert browser.execute_script("return document.images.length") == 0


def test_enter_starts_only_the_line_that_was_checked(browser: Any, folder: Path) -> None:
    """Enter right after the last key waits for this text's check. If the text changes meanwhile, nothing starts."""
    form(browser)
    before = "(document.querySelectorAll('main section h3').length)"
    count, answer = browser.execute_script(f"return {before}"), "document.getElementById('answer').textContent"
    line = browser.find_element("id", "line")
    fine, wrong = "sweep --strategy ddp --sweep lr=0.1,0.2 --nodes 2 --steps 5 --seeds 1", " --nodes x"
    line.clear()
    line.send_keys(fine, Keys.ESCAPE, wrong, Keys.ENTER)  # the last check was of another text
    assert until(browser, WRONG, lambda text: "num_nodes='x'" in text)
    assert "started" not in browser.execute_script(f"return {answer}")
    line.send_keys(Keys.BACKSPACE * len(wrong), Keys.ENTER, " --batch-size 4")  # Enter was for a shorter text
    until(browser, PLAN, lambda text: "2 runs" in text)
    until(browser, LINE, lambda text: text.endswith("--batch-size 4"))
    assert "started" not in browser.execute_script(f"return {answer}")
    assert browser.execute_script(f"return {before}") == count
    line.send_keys(Keys.BACKSPACE, "2", Keys.ENTER)
    assert "started as process" in until(browser, answer, lambda text: "started" in text)

    def trained(_: Any) -> bool:
        return any(json.loads(path.read_text())["state"] == "finished" for path in folder.glob("sweep*/sweep.json"))

    until(browser, "1", trained)


def test_the_address_keeps_the_line(browser: Any) -> None:
    form(browser)
    text = "compare --strategies fedavg:H=3 --steps 40 --precision bf16 --no-shuffle --network '10Mbps,20ms'"
    write(browser, text)
    way = until(browser, "location.hash", lambda found: "20ms" in found)
    form(browser, way)
    assert browser.execute_script(f"return {LINE}") == text and "40 steps" in until(browser, PLAN)


def test_an_estimate_is_of_the_line_that_is_shown(browser: Any, folder: Path) -> None:
    form(browser)
    write(browser, "compare --strategies ddp,diloco:H=5 --nodes 2 --steps 30 --seeds 2 --device cpu")
    until(browser, PLAN, lambda text: "4 runs" in text)
    before, said = set(folder.iterdir()), "document.getElementById('estimated').textContent"
    browser.execute_script("document.getElementById('estimate').click()")
    text = until(browser, said, lambda text: text.startswith("Time: about"))
    assert "for 4 runs" in text and "diloco:H=5" in text and "Memory: about" in text
    browser.find_element("id", "line").send_keys(" --device abacus")
    until(browser, said, lambda text: text == "")  # it was of another line
    until(browser, WRONG, lambda text: "abacus" in text)
    assert browser.execute_script("return document.getElementById('estimate').disabled")
    assert {path for path in folder.iterdir() if path.name != ".started"} == before - {folder / ".started"}


def test_again_with_changes(browser: Any, folder: Path) -> None:
    def again(name: str, kind: str = "run") -> str:
        to(browser, f"#/{kind}/{name}")
        until(browser, "document.getElementById('again')?.hidden === false")
        browser.execute_script("document.getElementById('again').click()")  # tiles above it may still come
        until(browser, f"{PLAN} || {WRONG}")
        return str(browser.execute_script(f"return {LINE}"))

    note = "document.getElementById('note').textContent"
    compared = again("compared", "compare")
    for words in ("compare ", "--strategies ddp,diloco:H=5", "--nodes 2", "--steps 20", "--seeds 1", "--no-shuffle"):
        assert words in compared
    assert "--strategies diloco:H=5" in again("compared/diloco-H-5-seed-0")
    swept = again("swept", "compare")
    assert "--sweep H=2,5 --sweep network=wifi;1Gbps,1ms" in swept and "--step-seconds 10ms" in swept
    name = next(
        path.name for path in (folder / "swept").iterdir() if path.name.startswith("H-5") and "1Gbps" in path.name
    )
    one = again(f"swept/{name}")
    assert "--strategies diloco:H=5" in one and "--network 1Gbps,1ms" in one
    script = again("script")
    for words in ("--strategies diloco:H=4:weighting=examples:lr=0.02", "--nodes 3", "--steps 8", "--batch-size 8",
                  "--network 10Mbps,20ms", "--step-seconds 0.01", "--seeds 1", "--no-shuffle"):  # fmt: skip
        assert words in script
    said = until(browser, note)
    assert "options of script" in said and "Choose a task" in said and said.endswith("these options: faults.")
    write(browser, script.replace("--steps 8", "--steps 12"))
    until(browser, PLAN, lambda text: "12 steps" in text)
    browser.execute_script("document.getElementById('start').click()")
    assert "started as process" in until(browser, "document.getElementById('answer').textContent")

    def trained(_: Any) -> bool:
        return any(json.loads(path.read_text()).get("state") == "finished" for path in folder.glob("digits-*/run.json"))

    until(browser, "1", trained)
    (started,) = folder.glob("digits-*/run.json")
    about = json.loads(started.read_text())
    assert about["setting"]["steps"] == 12 and about["setting"]["nodes"] == 3 and about["options"] == {"shuffle": False}


def test_on_a_phone_the_form_fits(browser: Any) -> None:
    form(browser)
    size = {"width": 360, "height": 700, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    write(browser, "compare --")
    until(browser, OFFERED)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_browser_has_nothing_to_complain_of(browser: Any) -> None:
    assert [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_a_held_or_repeated_enter_starts_one_command(browser: Any) -> None:
    form(browser)
    until(browser, PLAN)
    browser.execute_script(
        "window.sent = 0; const fetched = window.fetch;"
        "window.fetch = (path, ...more) => path !== '/api/start' ? fetched(path, ...more)"
        " : (window.sent += 1, new Promise((done) => setTimeout(() => done(Response.json({pid: 1})), 300)));"
        "for (const repeat of [false, true, true, false]) document.getElementById('line').dispatchEvent("
        "new KeyboardEvent('keydown', {key: 'Enter', repeat, bubbles: true, cancelable: true}));"
    )
    until(browser, "document.getElementById('answer').textContent", lambda text: "started as process 1;" in text)
    assert browser.execute_script("return window.sent") == 1
    browser.refresh()
