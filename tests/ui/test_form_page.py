"""The form of a new run in a real browser: chips, fields, errors while typing, and a run again with changes."""

import json
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


TEXT = "document.getElementById('option-strategies')?.value"
PLAN = "document.getElementById('plan')?.textContent"
WRONG = (
    "Object.fromEntries([...document.querySelectorAll('form .wrong')].filter((e) => e.textContent && e.id !== 'plan')"
    ".map((e) => [e.dataset.of ?? e.closest('.card').dataset.text, e.textContent]))"
)
SHUT = "document.getElementById('start').disabled"


def form(browser: Any, way: str = "#/new") -> None:
    """Open a form anew, and wait until the server has checked it."""
    to(browser, "#/none")
    to(browser, way)
    until(browser, PLAN)


def write(browser: Any, name: str, text: str) -> None:
    field = browser.find_element("id", name)
    field.clear()
    field.send_keys(text)


def shown(browser: Any) -> dict[str, Any]:
    """Return the options that the fields hold."""
    return browser.execute_script(
        "return Object.fromEntries([...document.querySelectorAll('form [name]')].map((f) => [f.name,"
        " f.type === 'checkbox' ? f.checked : f.value]).filter(([, value]) => value))"
    )


def test_a_click_adds_a_strategy_and_its_options_are_fields(browser: Any) -> None:
    form(browser)
    assert "18 runs: 6 strategies" in until(browser, PLAN)  # nothing is chosen: the default
    for name in ("diloco", "ddp", "diloco"):
        browser.find_element("css selector", f"[data-strategy={name}]").click()
    until(browser, TEXT, lambda text: text == "diloco,ddp,diloco")
    assert "names 'diloco' twice" in until(browser, WRONG, lambda found: "strategies" in found)["strategies"]
    write(browser, "strategy-2-H", "20")
    select = browser.find_element("id", "strategy-2-weighting")
    assert select.tag_name == "select"
    assert [option.text for option in select.find_elements("tag name", "option")] == [
        "default: uniform", "uniform", "examples",
    ]  # fmt: skip
    select.find_element("css selector", "[value=examples]").click()
    until(browser, TEXT, lambda text: text == "diloco,ddp,diloco:H=20:weighting=examples")
    assert "9 runs: 3 strategies, 3 seeds" in until(browser, PLAN, lambda text: text.startswith("Start trains"))
    browser.find_element("css selector", "[aria-label='Remove ddp']").click()
    until(browser, TEXT, lambda text: text == "diloco,diloco:H=20:weighting=examples")
    write(browser, "option-strategies", "single,gossip:H=2")  # the other way: text becomes cards
    names = "[...document.querySelectorAll('.card > details > summary')].map((e) => e.textContent)"
    assert until(browser, names) == ["single", "gossip:H=2"]
    assert browser.execute_script("return document.getElementById('strategy-1-H').value") == "2"


def test_errors_while_typing_are_those_of_python(browser: Any) -> None:
    form(browser)
    browser.find_element("css selector", "[data-strategy=diloco]").click()
    write(browser, "strategy-0-H", "0")
    write(browser, "option-num_nodes", "two")
    found = until(browser, WRONG, lambda found: len(found) == 2)
    assert found == {
        "diloco:H=0": "strategy 'diloco:H=0': H=0 must be a whole number of at least 1",
        "num_nodes": "num_nodes='two' must be a whole number of at least 1",
    }
    assert browser.find_element("id", "strategy-0-H").get_attribute("aria-invalid") == "true"
    assert browser.find_element("id", "option-num_nodes").get_attribute("aria-invalid") == "true"
    assert until(browser, SHUT) and "2 options need another value" in until(browser, PLAN)
    write(browser, "option-num_nodes", "2")
    write(browser, "strategy-0-H", "5")
    until(browser, WRONG, lambda found: found == {})
    assert not browser.execute_script(f"return {SHUT}")
    assert "diloco" not in until(browser, PLAN) and "2 nodes" in until(browser, PLAN)
    browser.find_element("css selector", "#command [value=sweep]").click()
    until(browser, "document.getElementById('option-axes') !== null")
    write(browser, "option-axes", "nodes=2,4\nprecisio=fp32")
    found = until(browser, WRONG, lambda found: "axes" in found)
    assert "diloco has no option 'precisio'" in found["axes"]


def test_text_of_a_form_is_never_run(browser: Any, folder: Path) -> None:
    form(browser)
    ran = folder.parent / "ran"
    write(browser, "option-strategies", f"ddp:lr=__import__('os').system('touch {ran}')")
    assert "names code or a file" in until(browser, WRONG, lambda found: "strategies" in found)["strategies"]
    write(browser, "option-strategies", "ddp:lr=__import__('os'),<img src=x onerror=alert(1)>")
    found = until(browser, WRONG, lambda found: len(found) == 2)
    assert any("must be a number" in text for text in found.values()), found
    assert any("unknown strategy '<img" in text for text in found.values())
    assert not ran.exists() and browser.title == "ExoGym runs"
    assert browser.execute_script("return document.images.length") == 0


def test_the_address_keeps_the_form(browser: Any) -> None:
    form(browser)
    browser.find_element("css selector", "[data-strategy=fedavg]").click()
    write(browser, "strategy-0-H", "3")
    write(browser, "option-max_steps", "40")
    browser.find_element("css selector", "#more > summary").click()
    browser.find_element("css selector", "#option-precision [value=bf16]").click()
    browser.find_element("id", "option-shuffle").click()
    way = until(browser, "location.hash", lambda text: "shuffle" in text)
    before = shown(browser)
    assert before == {"strategies": "fedavg:H=3", "max_steps": "40", "precision": "bf16", "shuffle": True}
    form(browser, way)
    assert shown(browser) == before and browser.execute_script("return location.hash") == way
    assert browser.execute_script("return document.getElementById('more').open")


def test_an_estimate_is_of_the_options_that_are_shown(browser: Any, folder: Path) -> None:
    form(browser, "#/new?command=compare&strategies=ddp,diloco:H=5&num_nodes=2&max_steps=30&seeds=2&device=cpu")
    before, said = set(folder.iterdir()), "document.getElementById('estimated').textContent"
    browser.find_element("id", "estimate").click()
    text = until(browser, said, lambda text: text.startswith("Time: about"))
    assert "for 4 runs" in text and "diloco:H=5" in text and "Memory: about" in text
    write(browser, "option-max_steps", "40")
    until(browser, said, lambda text: text == "")  # it was of other options
    write(browser, "option-device", "abacus")
    until(browser, WRONG, lambda found: "device" in found)
    assert until(browser, SHUT) and browser.execute_script("return document.getElementById('estimate').disabled")
    assert {path for path in folder.iterdir() if path.name != ".started"} == before - {folder / ".started"}


def test_again_with_changes(browser: Any, folder: Path) -> None:
    def again(name: str, kind: str = "run") -> dict[str, Any]:
        to(browser, f"#/{kind}/{name}")
        until(browser, "document.getElementById('again')?.hidden === false")
        browser.execute_script("document.getElementById('again').click()")  # tiles above it may still come
        until(browser, PLAN)
        until(browser, "location.hash.includes('command=')")  # the address keeps the options, not the name
        return shown(browser)

    note = "document.getElementById('note').textContent"
    assert again("compared", "compare") == {
        "strategies": "ddp,diloco:H=5", "num_nodes": "2", "max_steps": "20", "seeds": "1",
        "shuffle": True,
    }  # fmt: skip
    assert again("compared/diloco-H-5-seed-0")["strategies"] == "diloco:H=5"
    swept = again("swept", "compare")
    assert swept["axes"] == "H=2,5\nnetwork=wifi;1Gbps,1ms" and swept["step_seconds"] == "10ms"
    name = next(
        path.name for path in (folder / "swept").iterdir() if path.name.startswith("H-5") and "1Gbps" in path.name
    )
    assert again(f"swept/{name}")["strategies"] == "diloco:H=5" and shown(browser)["network"] == "1Gbps,1ms"
    assert again("script") == {
        "strategies": "diloco:H=4:weighting=examples:lr=0.02", "num_nodes": "3", "max_steps": "8", "batch_size": "8",
        "network": "10Mbps,20ms", "step_seconds": "0.01", "seeds": "1", "shuffle": True,
    }  # fmt: skip
    said = until(browser, note)
    assert "options of script" in said and "Choose a task" in said and said.endswith("these options: faults.")
    write(browser, "option-max_steps", "12")
    until(browser, PLAN, lambda text: "12 steps" in text)
    browser.find_element("id", "start").click()
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
    for name in ("diloco", "sparta_diloco"):
        browser.find_element("css selector", f"[data-strategy={name}]").click()
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_browser_has_nothing_to_complain_of(browser: Any) -> None:
    assert [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
