"""A run's charts in a real browser: zoom, log axes, smoothing, values by pointer and keys, files."""

import csv
import json
import time
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
CHART = "document.querySelector('.chart:not([hidden])')"
PLOT = f"{CHART}.plot"
RANGE = f"(() => {{ const {{ min, max }} = {PLOT}.scales.x; return [min, max]; }})()"


def rows_of(steps: range) -> str:
    rows = (
        {
            "step": k,
            "node": None,
            "val_loss": 8.0 / (1 + k) + (-1) ** k * 0.01,
            "tx_bytes": 1000.0 * k,
            "wall_s": 0.1 * k,
        }
        for k in steps
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("charts") / "runs"
    (top / "live").mkdir(parents=True)
    status = {"state": "running", "step": 99, "total_steps": 999, "process": described(), "heartbeat_s": time.time()}
    (top / "live" / "status.json").write_text(json.dumps(status | {"started_s": 1e9}))
    (top / "live" / "run.json").write_text(json.dumps({"description": {"strategy": {"name": "DiLoCoStrategy"}}}))
    (top / "live" / "records.jsonl").write_text(rows_of(range(100)))
    return top


@pytest.fixture(scope="module")
def browser(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with served(folder) as address, opened(address) as driver:
        there = str(tmp_path_factory.mktemp("saved"))
        driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": there})
        driver.saved = Path(there)
        yield driver


def shown(browser: Any) -> None:
    to(browser, "#/none")
    to(browser, "#/run/live")
    until(browser, f"{CHART}?.plot?.data[0].length > 50")


def test_live_data_do_not_reset_the_zoom(browser: Any, folder: Path) -> None:
    from selenium.webdriver import ActionChains

    shown(browser)
    assert until(browser, RANGE) == [0, 99]
    over = browser.find_element("css selector", ".chart:not([hidden]) .u-over")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", over)
    ActionChains(browser).move_to_element(over).click_and_hold().move_by_offset(60, 0).release().perform()
    zoomed = until(browser, RANGE, lambda found: found != [0, 99])
    assert 40 < zoomed[0] < 55 and zoomed[1] < 90
    before = browser.execute_script(f"return {PLOT}.data[0].length")
    with open(folder / "live" / "records.jsonl", "a") as file:
        file.write(rows_of(range(100, 140)))
    until(browser, f"{PLOT}.data[0].length", lambda count: count > before + 20)
    assert until(browser, RANGE) == zoomed
    browser.find_element("css selector", ".chart:not([hidden]) .reset").click()
    assert until(browser, RANGE, lambda found: found != zoomed) == [0, 139]


def test_log_axes_leave_out_what_they_cannot_show(browser: Any) -> None:
    shown(browser)
    browser.find_element("id", "logx").click()
    assert until(browser, f"[{PLOT}.scales.x.distr, {PLOT}.data[0][0]]") == [3, 1]
    browser.find_element("id", "logy").click()
    assert until(browser, f"{PLOT}.scales.y.distr") == 3
    for name in ("logx", "logy"):
        browser.find_element("id", name).click()
    assert until(browser, f"[{PLOT}.scales.x.distr, {PLOT}.scales.y.distr, {PLOT}.data[0][0]]") == [1, 1, 0]


def test_smoothing_is_the_moving_mean(browser: Any) -> None:
    shown(browser)
    rough = browser.execute_script(f"return {PLOT}.data[1].slice(0, 3)")
    browser.execute_script(
        "const range = document.getElementById('smoothing'); range.value = 0.5; range.dispatchEvent(new Event('input'))"
    )
    smooth = browser.execute_script(f"return {PLOT}.data[1].slice(0, 3)")
    assert smooth[0] == rough[0]
    assert smooth[1] == pytest.approx((rough[0] + 2 * rough[1]) / 3)
    assert smooth[2] == pytest.approx((rough[0] + 2 * rough[1] + 4 * rough[2]) / 7)
    browser.execute_script(
        "const range = document.getElementById('smoothing'); range.value = 0; range.dispatchEvent(new Event('input'))"
    )


def test_values_by_pointer_and_by_keys(browser: Any) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    shown(browser)
    over = browser.find_element("css selector", ".chart:not([hidden]) .u-over")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", over)
    ActionChains(browser).move_to_element(over).perform()
    tip = f"{CHART}.querySelector('.tip').hidden ? '' : {CHART}.querySelector('.tip').textContent"
    assert "val_loss" in until(browser, tip)
    chart = browser.find_element("css selector", ".chart:not([hidden]) .plot")
    chart.send_keys(Keys.HOME, Keys.ARROW_RIGHT)
    said = f"{CHART}.querySelector('.unseen').textContent"
    assert until(browser, said) == "steps 1: val_loss 3.99"
    chart.send_keys("+")
    zoomed = until(browser, RANGE, lambda found: found[0] > 0)
    chart.send_keys("0")
    until(browser, RANGE, lambda found: found != zoomed)


def test_a_chart_is_saved_as_values_and_as_a_picture(browser: Any) -> None:
    shown(browser)
    browser.find_element("css selector", ".chart:not([hidden]) .tools summary").click()
    buttons = browser.find_elements("css selector", ".chart:not([hidden]) .tools button")
    for button in buttons[:2]:
        button.click()
    until(browser, "1", lambda _: all((browser.saved / f"loss.{x}").exists() for x in ("csv", "png")))
    rows = list(csv.reader((browser.saved / "loss.csv").read_text().splitlines()))
    assert rows[0] == ["steps", "val_loss"] and rows[1] == ["0", "8.01"] and len(rows) > 100
    assert (browser.saved / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_browser_has_nothing_to_complain_of(browser: Any) -> None:
    assert [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
