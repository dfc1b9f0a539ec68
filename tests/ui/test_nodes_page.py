"""A run's nodes in a real browser: absent nodes have their own color, and the timeline zooms."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROMIUM, DRIVER, opened, served, to, until

from exogym.ui.views import nodes_of, timeline_of

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
trainer.fit(DiLoCoStrategy(lr=0.02, H=5), num_nodes=3, max_steps=100, batch_size=8, val_interval=10, device="cpu",
            network="10Mbps,20ms", step_seconds=[0.01, 0.01, 0.02], timeline=True,
            faults=Faults(absent={2: [(40, 60)]}), run_dir="runs/away")
"""
PURPLE = [0x7A, 0x3E, 0x9D]
# The color in the middle of a node's cell, at a share of the picture's width; names take 64 pixels, a row 28.
COLOR = (
    "(() => { const c = document.querySelectorAll('canvas.heat')[0], s = devicePixelRatio || 1,"
    " wide = c.clientWidth - 64; return [...c.getContext('2d').getImageData(s * (64 + wide * %s),"
    " s * (%s * 28 + 7), 1, 1).data].slice(0, 3); })()"
)


def is_purple(found: list[int]) -> bool:
    return all(abs(one - other) < 12 for one, other in zip(found, PURPLE, strict=True))  # edges are blended


SAID = "document.getElementById('timeline')?.closest('section').lastElementChild.textContent"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("nodes")
    (top / "train.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "train.py"], cwd=top, check=True, capture_output=True)
    return top / "runs"


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Any]:
    with served(folder) as address, opened(address) as driver:
        yield driver


def test_absent_nodes_have_their_own_color(browser: Any) -> None:
    to(browser, "#/run/away")
    until(
        browser,
        "[...document.querySelectorAll('canvas.heat')].filter((c) => !c.closest('section').hidden).length === 2",
    )
    until(browser, COLOR % (0.5, 2), is_purple)
    for share, node in ((0.5, 1), (0.2, 2), (0.8, 2)):  # another node then, this node before and after
        assert not is_purple(browser.execute_script(f"return {COLOR % (share, node)}"))
    text = "document.querySelectorAll('canvas.heat')[0].closest('section').lastElementChild.textContent"
    assert "Purple: absent" in until(browser, text)


def test_an_absent_node_has_this_color_in_the_timeline_too(browser: Any) -> None:
    """Also in a window that begins inside the absence. Other nodes, which only wait, stay gray."""
    to(browser, "#/none")
    to(browser, "#/run/away")
    text = until(browser, SAID, lambda text: text and "Waiting includes absent" in text)
    assert "Predicted time" in text
    found = browser.execute_async_script(
        "const done = arguments[0]; (async () => { const ask = async (words) => (await (await fetch("
        "'/api/runs/away/timeline' + words)).json()); const all = await ask('');"
        " const away = all.spans.filter((s) => s[1] === 'absent'), middle = (away[0][2] + away[0][3]) / 2;"
        " done([all.spans, away, await ask(`?from_s=${middle}&to_s=${all.whole_s}`)]); })()"
    )
    spans, away, late = found
    assert [span[0] for span in away] == [2] and away[0][3] - away[0][2] > 0.1
    assert [span[0] for span in late["spans"] if span[1] == "absent"] == [2]
    assert {span[0] for span in spans if span[1] == "wait"} >= {0, 1}
    share = (away[0][2] + away[0][3]) / 2 / max(span[3] for span in spans)
    color = COLOR.replace("[0]", "[1]", 1).replace("- 64", "- 64 - 150")  # the shares of time stand at the right
    until(browser, color % (share, 2), is_purple)
    assert not is_purple(browser.execute_script(f"return {color % (share, 1)}"))


def test_absences_are_strips_of_the_loss_chart(browser: Any) -> None:
    """Over steps, and over predicted time at the same records."""
    to(browser, "#/none")
    to(browser, "#/run/away")
    spans = "document.querySelector('.charts.one .chart').spans?.map((s) => [s.from, s.to, s.label])"
    until(browser, spans, lambda found: found == [[40, 60, "node 2 absent"]])
    middle = (
        "(() => { const p = document.querySelector('.charts.one .chart').plot, at = p.valToPos(%s, 'x', true); return"
    )
    middle += " [...p.ctx.getImageData(at, p.bbox.top + 2, 1, 1).data].slice(0, 3); })()"
    inside, outside = (browser.execute_script(f"return {middle % step}") for step in (52.5, 72.5))
    assert inside != outside
    browser.find_element("css selector", ".tabs [value=time_s]").click()
    (area,) = until(browser, spans, lambda found: found and found[0][1] < 40)
    assert 0 < area[0] < area[1]


def test_the_pointer_reads_nodes_and_timeline(browser: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    to(browser, "#/none")
    to(browser, "#/run/away")
    tips = "[...document.querySelectorAll('section .plot > .tip:not([hidden])')].map((t) => t.textContent)"
    shown = "[...document.querySelectorAll('canvas.heat')].every((one) => one.clientWidth > 64)"
    until(browser, f"{shown} && document.querySelectorAll('canvas.heat').length === 2")
    for number, wanted in ((0, "node 2, step "), (1, "node 2, ")):
        canvas = browser.find_elements("css selector", "canvas.heat")[number]
        browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
        ActionChains(browser).move_to_element_with_offset(
            canvas, 32 - 75 * number, 2 * 28 + 10 - canvas.size["height"] // 2
        ).perform()
        (said,) = until(browser, tips)
        assert said.startswith(wanted) and said.partition(": ")[2].partition(",")[0] in ("absent", "computing")


def test_the_timeline_zooms(browser: Any, folder: Path) -> None:
    whole_s = timeline_of(folder / "away")["whole_s"]
    to(browser, "#/run/away")
    assert "Drag over the picture" in until(browser, SAID)

    def window() -> list[float]:
        asked = "performance.getEntriesByType('resource').map(e => e.name).findLast(n => n.includes('/timeline?'))"
        words = until(browser, asked).partition("?")[2].split("&")
        return [float(word.partition("=")[2]) for word in words]

    def press(text: str) -> str:
        script = (
            "[...document.querySelectorAll('section .tools button')].find(b => b.textContent === arguments[0]).click()"
        )
        browser.execute_script(script, text)
        return until(browser, SAID)

    press("Zoom in")
    assert "Shown:" in until(browser, SAID, lambda text: "Shown:" in text)
    assert window() == pytest.approx([whole_s / 4, 3 * whole_s / 4], rel=1e-3)
    press("Later")
    until(browser, "1", lambda _: window()[1] > 0.8 * whole_s)
    assert window() == pytest.approx([whole_s / 2, whole_s], rel=1e-3)  # at the end it stays as long
    press("Show all")
    until(browser, SAID, lambda text: "Drag over the picture" in text)
    canvas = browser.find_element("id", "timeline")
    from selenium.webdriver.common.action_chains import ActionChains

    wide = canvas.size["width"]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    begin = 64 + (wide - 64 - 150) // 4 - wide // 2
    hand = ActionChains(browser).move_to_element_with_offset(canvas, begin, 0).click_and_hold()
    hand.move_by_offset((wide - 64 - 150) // 4, 0).release().perform()
    until(browser, SAID, lambda text: "Shown:" in text)
    assert window() == pytest.approx([whole_s / 4, whole_s / 2], rel=0.03)


def test_a_clock_that_stands_still_is_found() -> None:
    """Only while other nodes compute; at the start, and where all have ended, nobody is absent."""

    def event(step: int, *computing: float) -> dict[str, Any]:
        return {"kind": "clock", "step": step, "computing": list(computing)} | {
            part: [0.5] * len(computing) for part in ("sending", "waiting")
        }

    records = [{"step": 1, "node": node, "train_loss": 1.0} for node in range(3)]
    events = [event(0, 0, 0, 0), event(1, 1, 1, 1), event(2, 2, 1, 2), event(3, 3, 1, 3), event(4, 3, 1, 3)]
    assert "stood" not in nodes_of(records, events)  # a client that is not sampled is not absent
    events.append({"kind": "away", "step": 2, "nodes": [1]})
    assert nodes_of(records, events)["stood"] == [[1, 2.0]]
    assert "stood" not in nodes_of(records, events[:2])


def test_the_server_cuts_the_timeline(folder: Path, tmp_path: Path) -> None:
    many = [[0, "compute", float(k), k + 1.0, "x"] for k in range(9000)]
    (tmp_path / "timeline.json").write_text(json.dumps({"spans": many, "shares": {}}))
    first, late = timeline_of(tmp_path), timeline_of(tmp_path, 8000.5, 8010.25)
    assert first["until_s"] == 4000.0 and len(first["spans"]) == 4000 and first["from_s"] == 0.0
    assert late["spans"][0][2:4] == [8000.5, 8001.0] and late["spans"][-1][2:4] == [8010.0, 8010.25]
    assert (late["from_s"], late["until_s"], late["whole_s"]) == (8000.5, 8010.25, 9000.0)
    assert timeline_of(tmp_path, -5.0, 1e9)["from_s"] == 0.0


def test_the_browser_has_nothing_to_complain_of(browser: Any) -> None:
    assert [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
