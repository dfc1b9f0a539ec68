"""Large runs: 14,000 steps are drawn from few records; 1,000 nodes are a median with a band, and the worst by name."""

import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROMIUM, DRIVER, opened, served, to, until

from exogym.core.base.processes import described
from exogym.ui.lines import some_of
from exogym.ui.views import nodes_of

in_browser = pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromium-driver")


def crowd(steps: int = 12, nodes: int = 1000) -> list[dict[str, Any]]:
    draw = random.Random(1)
    return [
        {"step": step, "node": node, "train_loss": draw.uniform(1.0, 2.0) + (5.0 if node in (7, 977) else 0.0)}
        for step in range(steps) for node in range(nodes)
    ]  # fmt: skip


def written(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    last = rows[-1]["step"]
    status = {"state": "done", "step": last, "total_steps": last, "process": described() | {"started": "1"}}
    (folder / "status.json").write_text(json.dumps(status | {"heartbeat_s": 1e9, "started_s": 1e9}))
    (folder / "run.json").write_text(json.dumps({"description": {"strategy": {"name": "DiLoCoStrategy"}}}))
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_thousand_nodes_are_a_median_a_band_and_the_worst() -> None:
    rows = crowd()
    found = nodes_of(rows, [])
    for step in (0, 11):
        losses = [row["train_loss"] for row in rows if row["step"] == step]
        cuts = statistics.quantiles(losses, n=10, method="inclusive")
        wanted = {"low": cuts[0], "median": cuts[4], "high": cuts[8]}
        assert {name: values[step] for name, values in found["band"].items()} == pytest.approx(wanted, rel=1e-3)
    assert {row["node"] for row in found["worst"][:2]} == {7, 977} and len(found["worst"]) == 10
    assert "band" not in nodes_of(crowd(nodes=64), [])  # each node has a row


def test_a_long_crowd_is_thinned_into_the_same_band() -> None:
    found = nodes_of(crowd(steps=1300, nodes=70), [])
    assert found["band"]["median"] and all(1.0 < x < 2.0 for x in found["band"]["median"] if x is not None)
    assert len([x for x in found["band"]["median"] if x is not None]) > 200


def test_fourteen_thousand_steps_are_thinned_by_the_server(tmp_path: Path) -> None:
    rows = [{"step": k, "node": None, "val_loss": 1 / (1 + k), "train_loss": 1 / (1 + k)} for k in range(14_000)]
    written(tmp_path / "long", rows)
    began = time.process_time()
    found = some_of(tmp_path / "long" / "records.jsonl", -1, True, 2000, None)
    assert time.process_time() - began < 1.0
    assert len(found["records"]) <= 2000 and found["last"] == 13_999 and not found["more"]


@pytest.mark.slow
@in_browser
def test_both_in_the_page(tmp_path: Path) -> None:
    written(tmp_path / "crowd", crowd())
    long = [{"step": k, "node": None, "val_loss": 1 / (1 + k), "train_loss": 1 / (1 + k)} for k in range(14_000)]
    written(tmp_path / "long", long)
    with served(tmp_path) as address, opened(address) as browser:
        to(browser, "#/run/long")
        until(browser, "document.querySelector('.chart').plot?.data[0].at(-1)", lambda last: last == 13_999)
        assert browser.execute_script("return document.querySelector('.chart').plot.data[0].length") <= 2000
        to(browser, "#/run/crowd")
        worst = until(browser, "[...document.querySelectorAll('#worst li')].map(i => i.textContent)")
        assert {text.split(":")[0] for text in worst[:2]} == {"node 7", "node 977"} and len(worst) == 10
        drawn = "[...document.querySelectorAll('section .chart')].find(c => c.plot)?.plot.data.length"
        assert until(browser, drawn) == 4  # steps, median, low, high
        assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
