"""The pictures of docs/ui.md are of the page as it is: taken anew they are as many, with the same elements on them."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROMIUM, DRIVER
from paths import ROOT

IMAGES = ROOT / "docs" / "images"


def script() -> Any:
    pytest.importorskip("selenium")
    spec = importlib.util.spec_from_file_location("pictures_of_the_page", IMAGES / "ui.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_picture_is_in_the_tour_and_small() -> None:
    shown = set(re.findall(r"\]\(images/(ui_\w+\.png)\)", (IMAGES.parent / "ui.md").read_text()))
    taken = script()
    assert shown == {f"ui_{name}.png" for name in taken.PAGES} == {path.name for path in IMAGES.glob("ui_*.png")}
    for name in shown:
        data = (IMAGES / name).read_bytes()
        assert data[:4] == b"\x89PNG" and len(data) <= taken.MOST_BYTES, name
    assert json.loads((IMAGES / "ui.json").read_text()).keys() == taken.PAGES.keys()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromium-driver")
def test_taken_anew_they_show_the_same_elements(tmp_path: Path) -> None:
    script().take(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in IMAGES.glob("ui_*.png")} | {"ui.json"}
    assert json.loads((tmp_path / "ui.json").read_text()) == json.loads((IMAGES / "ui.json").read_text())
