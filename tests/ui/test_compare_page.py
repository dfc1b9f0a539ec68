"""A comparison's page in a real browser: the terminal's verdict and table, means with bands, an address to copy."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROMIUM, DRIVER, opened, served, to, until

from exogym.compare import compare
from exogym.study import runs
from exogym.study.compare.colors import looks_of
from exogym.sweep import sweep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromium-driver"),
]
LABELS = "[...(document.querySelector('.chart').plot?.series ?? [])].map(s => s.label)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("compared") / "runs"
    compare("digits", ["ddp", "diloco:H=5"], seeds=2, max_steps=20, num_nodes=2, device="cpu", val_interval=5, out=top)
    next(top.iterdir()).rename(top / "mine")
    return top


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Any]:
    with served(folder) as address, opened(address) as driver:
        driver.home = address.partition("?")[0]
        yield driver


def test_the_verdict_and_the_table_are_those_of_the_terminal(browser: Any, folder: Path) -> None:
    found = runs.summary(folder / "mine")
    assert found is not None
    to(browser, "#/compare/mine")
    assert until(browser, "document.getElementById('verdict')?.textContent") == found.verdict
    cells = "[...document.querySelectorAll('section tbody tr')].map(r => r.cells[2].textContent)"
    wanted = [f"{row['val_loss']:.4f} ± {row['val_loss_std']:.4f}" for row in found.rows]
    assert until(browser, cells) == wanted


def test_seeds_are_one_curve_with_a_band(browser: Any, folder: Path) -> None:
    to(browser, "#/compare/mine")
    labels = until(browser, LABELS, lambda found: len(found) == 7)
    assert labels[1] == "ddp (2 runs)" and labels[4] == "diloco:H=5 (2 runs)"
    looks = looks_of(["ddp", "diloco:H=5"])
    strokes = "document.querySelector('.chart').curves.map(c => c.color)"
    assert until(browser, strokes) == [looks["ddp"].color, looks["diloco:H=5"].color]
    ends = []
    for seed in range(2):
        rows = [
            json.loads(line)
            for line in (folder / "mine" / f"ddp-seed-{seed}" / "records.jsonl").read_text().splitlines()
        ]
        ends.append(next(row["val_loss"] for row in rows[::-1] if row["val_loss"] is not None))
    shown = "[1, 2, 3].map(k => document.querySelector('.chart').plot.data[k].at(-1))"
    assert until(browser, shown) == pytest.approx([sum(ends) / 2, min(ends), max(ends)])


def test_a_sweep_names_its_cells(browser: Any, folder: Path) -> None:
    sweep("digits", {"H": [2, 5]}, seeds=1, max_steps=10, num_nodes=2, processes=1, out=folder / "swept")
    to(browser, "#/")
    until(browser, "[...document.querySelectorAll('tbody a')].some(a => a.textContent === 'swept')")
    to(browser, "#/compare/swept")
    cells = "[...document.querySelectorAll('section tbody tr')].map(r => r.cells[0].textContent).slice(0, 2)"
    assert until(browser, cells, lambda found: len(found) == 2) == ["H=2", "H=5"]


def test_two_runs_show_first_what_differs(browser: Any) -> None:
    to(browser, "#/compare/mine%2Fddp-seed-0&mine%2Fdiloco-H-5-seed-0")
    cells = "[...document.querySelectorAll('#differences tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    rows = {row[0]: row[1:] for row in until(browser, cells, lambda found: len(found) > 4)}
    assert rows["strategy.name"] in (
        ["SimpleReduceStrategy", "DiLoCoStrategy"],
        ["DiLoCoStrategy", "SimpleReduceStrategy"],
    )
    assert "seed" not in rows and {"strategy.H", "validation loss", "sent per node", "time trained"} <= rows.keys()
    top = browser.execute_script("return document.querySelector('#differences').getBoundingClientRect().bottom")
    assert top < browser.execute_script("return document.querySelector('.chart').getBoundingClientRect().top")
    to(browser, "#/compare/mine")
    assert until(browser, "document.querySelector('#differences')?.hidden")


def test_an_address_shows_the_same_again(browser: Any) -> None:
    to(browser, "#/compare/mine")
    until(browser, "document.querySelector('#group option[value=\"seed\"]') !== null")
    browser.find_element("css selector", "#group option[value=seed]").click()
    browser.find_element("css selector", "#axis option[value=tx_bytes]").click()
    browser.find_element("id", "log-y").click()
    assert until(browser, LABELS, lambda found: len(found) == 7)[1].startswith("0 (2 runs)")
    way = browser.current_url
    assert "group=seed" in way and "axis=tx_bytes" in way and "logy=1" in way
    browser.get("about:blank")
    browser.get(way)
    labels = until(browser, LABELS, lambda found: len(found) == 7)
    assert labels[0] == "bytes sent per node" and labels[1].startswith("0 (2 runs)")
    assert browser.execute_script("return document.querySelector('.chart').plot.scales.y.distr") == 3
    browser.get("about:blank")
    browser.get(f"{browser.home}#/?text=ddp&state=done&inside=1")
    names = "[...document.querySelectorAll('tbody a')].map(a => a.textContent)"
    assert set(until(browser, names)) == {"mine", "mine/ddp-seed-0", "mine/ddp-seed-1"}
    assert browser.execute_script("return document.getElementById('filter').value") == "ddp"


def test_the_browser_has_nothing_to_complain_of(browser: Any) -> None:
    assert [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
