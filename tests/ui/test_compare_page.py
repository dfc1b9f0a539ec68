"""A comparison's page in a real browser: the terminal's verdict and table, means with bands, an address to copy."""

import json
import shutil
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
ROWS = "[...document.querySelectorAll('#results tbody tr')]"
LABELS = "[...(document.querySelector('.chart')?.plot?.series ?? [])].map(s => s.label)"


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
    """The table is sorted by the bytes to the target; its swatches have the colors of the curves and points."""
    found = runs.summary(folder / "mine")
    assert found is not None
    to(browser, "#/compare/mine")
    rest = "document.querySelector('#further p')?.textContent ?? ''"
    first = until(browser, "document.getElementById('verdict')?.textContent")
    lowest = browser.execute_script("return document.getElementById('lowest').textContent")
    between = browser.execute_script(f"return {rest}").partition("Not every run of DDP")[0].strip()
    assert " ".join(filter(None, [first, between, lowest])) == found.verdict.replace(";", ".", first.endswith("."))
    assert "loss" in lowest
    assert first.endswith(".") and ". " not in first

    def rank(row: dict[str, Any]) -> tuple[int, float, float]:
        return 0 if row["target_bytes"] else 1 if row["target_runs"] else 2, row["target_bytes"] or 0, row["val_loss"]

    rows = sorted(found.rows, key=rank)
    assert until(browser, f"{ROWS}.map(r => r.cells[0].childNodes[1].textContent)") == [row["title"] for row in rows]
    losses = browser.execute_script(f"return {ROWS}.map(r => r.cells[2].textContent)")
    assert losses == [f"{row['val_loss']:.4f} \u00b1 {row['val_loss_std']:.4f}" for row in rows]
    swatches = browser.execute_script(
        f"return Object.fromEntries({ROWS}.map(r => [r.cells[0].childNodes[1].textContent,"
        " getComputedStyle(r.querySelector('.mark')).backgroundColor]))"
    )
    looks = looks_of([row["strategy"] for row in rows])
    for row in rows:
        hexes = looks[row["strategy"]].color.strip("#")
        assert swatches[row["title"]] == f"rgb({', '.join(str(int(hexes[k : k + 2], 16)) for k in (0, 2, 4))})"
    of = "(c.curves ?? []).map(one => [one.label, one.color, one.lists])"
    drawn = f"[...document.querySelectorAll('.figures .chart')].map(c => {of})"
    curves, points = until(browser, drawn, lambda charts: len(charts) == 2 and all(charts))
    colors = {row["title"]: looks[row["strategy"]].color for row in rows}
    assert {label: color for label, color, _ in curves if not label.startswith("target ")} == colors
    assert {label: color for label, color, _ in points if label != "Pareto front"} == colors
    ends = {label: lists for label, _, lists in points}
    for row in rows:  # a point, with a bar of one standard deviation over the seeds
        mean, std = row["val_loss"], row["val_loss_std"]
        assert ends[row["title"]] == [[row["tx_bytes"]], *([pytest.approx(x)] for x in (mean, mean - std, mean + std))]
    target = next(lists for label, _, lists in curves if label == f"target {found.target_loss:.4f}")
    assert target[1] == [found.target_loss] * 2 and target[0][1] == max(max(lists[0]) for _, _, lists in curves)


def test_seeds_are_one_curve_with_a_band_over_bytes(browser: Any, folder: Path) -> None:
    to(browser, "#/compare/mine")
    labels = until(browser, LABELS, lambda found: len(found) == 8)
    assert labels[0] == "bytes sent per node" and {labels[1], labels[4]} == {"DDP", "DiLoCo (H=5)"}
    scales = "Object.values(document.querySelector('.chart').plot.scales).map(s => s.distr)"
    assert browser.execute_script(f"return {scales}") == [3, 3]
    ends = []
    for seed in range(2):
        rows = [
            json.loads(line)
            for line in (folder / "mine" / f"ddp-seed-{seed}" / "records.jsonl").read_text().splitlines()
        ]
        ends.append(next(row["val_loss"] for row in rows[::-1] if row["val_loss"] is not None))
    shown = "document.querySelector('.chart').curves.find(c => c.label === 'DDP').lists.slice(1).map(l => l.at(-1))"
    assert until(browser, shown) == pytest.approx([sum(ends) / 2, min(ends), max(ends)])


def test_a_sweep_names_its_cells(browser: Any, folder: Path) -> None:
    axes = {"H": [2, 5], "lr": [1e-3, 1e-2]}
    sweep("digits", axes, seeds=1, max_steps=10, num_nodes=2, processes=1, out=folder / "swept")
    to(browser, "#/")
    until(browser, "[...document.querySelectorAll('tbody a')].some(a => a.textContent === 'digits, sweep of 4 runs')")
    to(browser, "#/compare/swept")
    names = until(browser, f"{ROWS}.map(r => r.cells[0].childNodes[1].textContent)", lambda found: len(found) == 4)
    assert set(names) == {f"H={H}, lr={lr}" for H in (2, 5) for lr in ("0.001", "0.01")}
    best = until(browser, "[...document.querySelectorAll('td.cell.best')].map(c => c.textContent)")
    assert len(best) == 1 and " best, " in best[0]
    verdict = until(browser, "document.getElementById('verdict')?.textContent")
    lowest = min((row for row in runs.load(folder / "swept").rows), key=lambda row: row["val_loss"])
    assert verdict == f"Best cell: {lowest['cell']}, with a validation loss of {lowest['val_loss']:.4f}."
    scale = browser.execute_script("return document.querySelector('.scale').parentElement.textContent")
    assert scale.split(": ")[1].startswith(f"{lowest['val_loss']:.4f}")
    hues = "[...document.querySelectorAll('td.filled')].map(c => getComputedStyle(c).backgroundColor)"
    assert all(int(b) >= int(r) for r, _, b in (x[4:-1].split(",") for x in browser.execute_script(f"return {hues}")))
    browser.execute_script("document.querySelector('td.cell.best').focus()")  # the other curves fade
    assert browser.execute_script("return document.querySelector('.chart').plot.series.some(s => s._focus)")


def test_of_many_cells_the_best_have_colors_and_numbers_are_in_order(browser: Any, folder: Path) -> None:
    axes = {"H": [10, 5, 3, 2, 4], "lr": [1e-3, 1e-2]}
    sweep("digits", axes, seeds=1, max_steps=20, num_nodes=2, processes=1, out=folder / "many")
    to(browser, "#/")
    until(browser, "[...document.querySelectorAll('tbody a')].some(a => a.textContent === 'digits, sweep of 10 runs')")
    winner = "[...document.querySelectorAll('td.name small')].map(s => s.textContent).filter(t => t.startsWith('Best'))"
    ranked = sorted(runs.load(folder / "many").rows, key=lambda row: row["val_loss"])
    until(browser, winner, lambda found: f"Best cell: {ranked[0]['cell']}" in found)
    to(browser, "#/compare/many")
    curves = "(document.querySelector('.chart').curves ?? []).map(c => [c.label, c.faint ?? false])"
    found = until(browser, curves, lambda found: len(found) == 11)
    strong = [label for label, is_faint in found if not is_faint][:-1]  # the last is the target
    assert set(strong) == {row["cell"] for row in ranked[:5]} and all(is_faint for _, is_faint in found[:5])
    spans = browser.find_elements("css selector", ".figures > .chart .legend span:not(.mark)")
    legend = [span.text for span in spans]
    assert legend[:5] == strong and legend[-1] == "gray: 5 more"
    table = browser.execute_script(f"return {ROWS}.map(r => r.cells[0].childNodes[1].textContent)")
    assert strong == [cell for cell in table if cell in strong]


def test_two_runs_show_first_what_differs(browser: Any) -> None:
    to(browser, "#/compare/mine%2Fddp-seed-0&mine%2Fdiloco-H-5-seed-0")
    cells = "[...document.querySelectorAll('#differences tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    rows = {row[0]: row[1:] for row in until(browser, cells, lambda found: len(found) > 4)}
    assert rows["strategy"] == ["ddp", "diloco", ""] and rows["H"] == ["\u2013", "5", ""]
    assert "seed" not in rows and {"validation loss", "sent per node", "time trained"} <= rows.keys()
    assert browser.execute_script("return document.querySelector('#main h2').textContent") == "DDP and DiLoCo (H=5)"
    verdict = until(browser, "document.getElementById('verdict').textContent")
    assert verdict.startswith("DiLoCo (H=5) needs ") and "x fewer bytes for the same loss (" in verdict
    ends = {name: float(rows["validation loss"][k]) for k, name in enumerate(("DDP", "DiLoCo (H=5)"))}
    low, high = min(ends.values()), max(ends.values())
    assert f"({high:.4f})" in verdict
    assert "alike" in verdict if high - low < 0.01 * high else f"ends {100 * (1 - low / high):.0f} % lower" in verdict
    assert not any("SimpleReduce" in text for text in rows["strategy"])
    top = browser.execute_script("return document.querySelector('#differences').getBoundingClientRect().bottom")
    assert top < browser.execute_script("return document.querySelector('.chart').getBoundingClientRect().top")
    to(browser, "#/compare/mine")
    assert until(browser, "document.querySelector('#differences')?.hidden")


def test_an_address_shows_the_same_again(browser: Any, folder: Path) -> None:
    to(browser, "#/compare/mine")
    until(browser, "document.querySelector('#group option[value=\"seed\"]') !== null")
    browser.find_element("css selector", "#group option[value=seed]").click()
    browser.find_element("css selector", ".tabs [value=step]").click()
    browser.find_element("id", "linear").click()
    assert until(browser, LABELS, lambda found: len(found) == 7)[1] == "0"
    way = browser.current_url
    assert "group=seed" in way and "over=step" in way and "linear=1" in way
    browser.get("about:blank")
    browser.get(way)
    labels = until(browser, LABELS, lambda found: len(found) == 7)
    assert labels[:2] == ["steps", "0"]
    assert browser.execute_script("return document.querySelector('.chart').plot.scales.y.distr") == 1
    browser.get("about:blank")
    browser.get(f"{browser.home}#/?text=ddp&state=done&inside=1")
    names = "[...document.querySelectorAll('tbody a')].map(a => a.textContent)"
    assert set(until(browser, names)) == {"digits, 2 strategies", "ddp-seed-0", "ddp-seed-1"}
    winner = until(browser, "[...document.querySelectorAll('td.name small.later')].map(s => s.textContent)[0]")
    assert winner.startswith("Fewest bytes: DiLoCo (H=5), ") and "of DDP's" in winner
    best = min(runs.load(folder / "mine").rows, key=lambda row: row["val_loss"])
    loss = "document.querySelector('td[data-head=loss] .later').textContent"
    assert browser.execute_script(f"return {loss}") == f"{best['val_loss']:.3f} \u00b1 {best['val_loss_std']:.3f}"
    assert browser.execute_script("return document.getElementById('filter').value") == "ddp"


@pytest.mark.parametrize("wide", [420, 1100])
def test_nothing_is_wider_than_the_screen(browser: Any, wide: int) -> None:
    size = {"width": wide, "height": 900, "deviceScaleFactor": 1, "mobile": wide == 420}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    for way in ("#/compare/mine", "#/compare/swept", "#/"):
        to(browser, way)
        until(browser, "document.querySelectorAll('#results tbody tr, td.name').length > 1")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= wide, way
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_browser_has_nothing_to_complain_of(browser: Any) -> None:
    assert [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


SAID = "import('/static/verdict.js').then((it) => arguments[2](it[arguments[0]](...arguments[1])))"


def said_of(browser: Any, *runs: tuple[str, list[tuple[float | str, float]]]) -> str:
    """Return the page's sentence on runs, of which each evaluation's loss and bytes are given."""
    rows = [
        {"title": title, "rows": [{"step": k, "val_loss": y, "tx_bytes": x} for k, (y, x) in enumerate(points)]}
        for title, points in runs
    ]
    return str(browser.execute_async_script(SAID, "verdictOf", [rows, ""]))


def test_a_sentence_on_runs_holds_with_ties_divergence_and_losses_below_zero(browser: Any) -> None:
    three = said_of(browser, ("A", [(2, 0), (1, 100)]), ("B", [(2, 0), (1, 100)]), ("C", [(2, 0), (1.4, 2000)]))
    assert three.startswith("A and B need the fewest bytes for the same loss (1.4000), 1/33.3 of C's, and end with ")
    assert said_of(browser, ("A", [(1, 1000)]), ("B", [(1, 1030)])).startswith("A needs 1.03x fewer bytes")
    lost = said_of(browser, ("A", [(1.2, 500), ("NaN", 900)]), ("B", [(1.5, 500)]), ("C", [(1.4, 500)]))
    assert lost.startswith("B and C need about 500 B")
    assert "C ends 7 % lower" in lost and "A ends without a finite loss." in lost
    for highest in (0, 0.001):
        below = said_of(browser, ("A", [(2, 10), (-3, 1000)]), ("B", [(2, 10), (highest, 1030)]))
        assert "and ends lower, at -3.0000." in below


def test_the_winner_has_a_finite_loss_and_sends_bytes(browser: Any) -> None:
    def winner(kind: str, *rows: dict[str, Any]) -> str:
        return str(browser.execute_async_script(SAID, "winnerOf", [{"rows": rows}, kind]))

    losses = {"a": 1.0, "b": "NaN", "c": 0.5}
    rows = [{"strategy": name, "val_loss": loss} for name, loss in losses.items()]
    assert winner("comparison", *rows) == "Lowest loss: c, 0.5000"
    assert winner("sweep", *rows) == "Best cell: c"
    silent = {"strategy": "alone", "val_loss": 1.0, "target_bytes": 0, "tx_bytes": 0}
    ours = {"strategy": "diloco", "val_loss": 0.9, "target_bytes": 500, "tx_bytes": 900}
    base = {"strategy": "ddp", "val_loss": 0.8, "target_bytes": 2000, "tx_bytes": 5000}
    assert winner("comparison", silent, base, ours) == "Fewest bytes: diloco, 500 B, 1/4 of DDP's"


def test_a_hint_beyond_the_grid(browser: Any) -> None:
    def hint(**best: str) -> str:
        axes = {"p": ["0.5", "1"], "H": ["1", "5"], "lr": ["0.1", "0.2"]}
        found = {"axes": axes, "cells": [{"cell": "best", "options": best}], "best": "best"}
        return str(browser.execute_async_script(SAID, "beyond", [found]))

    assert hint(p="1", H="1", lr="0.1").endswith("try lower lr.")  # no p is over 1, and no H is below 1
    assert hint(p="0.5", H="5", lr="0.2").endswith("try higher H and higher lr and lower p.")


def test_runs_of_different_tasks_and_running_runs_are_called_so(browser: Any, folder: Path) -> None:
    """The list of runs says the tasks and states, so that it is enough to change what the page has of it."""
    names = [f"mine/{name}" for name in ("ddp-seed-0", "diloco-H-5-seed-0")]
    change = "import('/static/base.js').then(({ store }) => { Object.assign(store.list.find(r => r.name === arguments[0]), arguments[1]); arguments[2](); })"  # noqa: E501
    for to_be, first in (({"state": "running"}, "So far, "), ({"task": "shakespeare"}, "These runs train different")):
        to(browser, "#/compare/mine%2Fddp-seed-0&mine%2Fdiloco-H-5-seed-0")
        until(browser, "document.getElementById('verdict')?.textContent")
        browser.execute_async_script(change, names[0], to_be)
        until(
            browser, "document.getElementById('verdict').textContent", lambda text, first=first: text.startswith(first)
        )
        to(browser, "#/")
        browser.refresh()
        until(browser, "document.querySelectorAll('tbody a').length")


def test_runs_of_one_name_in_two_comparisons_have_different_names(browser: Any, folder: Path) -> None:
    shutil.copytree(folder / "mine", folder / "twin")
    to(browser, "#/compare/mine%2Fddp-seed-0&twin%2Fddp-seed-0")
    title = "document.querySelector('#main h2').textContent"
    until(browser, title, lambda text: text == "DDP (mine/ddp-seed-0) and DDP (twin/ddp-seed-0)")
