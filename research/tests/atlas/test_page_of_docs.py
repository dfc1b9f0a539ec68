"""The atlas in the documentation: the page is what its results say, and its commands train its results."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from exogym.strategy import DiLoCoStrategy
from exogym.strategy.registry import STRATEGIES
from research.__main__ import main
from research.atlas import Atlas, Table
from research.atlas.page import text_of
from research.atlas.training import TimeIsUp

PAGE = ROOT / "research" / "results" / "atlas.md"


@pytest.fixture(scope="module")
def table() -> Table:
    return Table(PAGE.with_suffix(".json"))


def test_the_page_is_what_its_results_say(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the user has a strategy of their own."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(STRATEGIES, "mine", type("Mine", (DiLoCoStrategy,), {"__module__": "mine"}))
    assert PAGE.read_text() == text_of(table, Path("research/results/atlas.md")), (
        "write it anew: python -m research benchmark --trials 8 --only-page --page ..."
    )
    for name in re.findall(r"\]\((images/\S+)\)", PAGE.read_text()):
        assert (PAGE.parent / name).stat().st_size < 60_000


def test_the_page_of_claims_is_what_its_results_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And `--only-page` writes it."""
    page, copy = ROOT / "research" / "results" / "claims.md", tmp_path / "research" / "results" / "claims.md"
    shutil.copytree(page.parent, copy.parent, ignore=lambda _, names: {name for name in names if "claims" not in name})
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "--trials", "4", "--only-page", "--page", "research/results/claims.md"]) == 0
    assert page.read_text() == copy.read_text()
    said = capsys.readouterr().out
    summary = page.read_text().partition("## How to read")[0]
    lines = re.findall(r"^\| (\S+) +\|[^|]+\| +([^|]+?) \|", summary, re.MULTILINE)[2:]  # not the heads and the rule
    verdicts = {name: verdict.partition(" (")[0] for name, verdict in lines}
    assert verdicts and re.findall(r"^(\S+) ([^:]+): ", said, re.MULTILINE) == [
        *verdicts.items(), ("written", "research/results/claims.md"),
    ][: len(verdicts)]  # fmt: skip
    assert (
        "13 of 13 claims are complete" in summary and "--trials 4 --page research/results/claims.md" in page.read_text()
    )


@pytest.mark.parametrize("page, results", [("atlas.md", "atlas.json"), ("advice.md", "judge.json")])
def test_the_commands_of_the_page_train_its_results(
    page: str, results: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(PAGE.with_name(results))
    asked: set[tuple[str, str]] = set()

    def train(atlas: Atlas, ended: Any) -> None:
        asked.update((study.place, study.method) for study in atlas.studies)
        raise TimeIsUp

    monkeypatch.setattr(Atlas, "train", train)
    monkeypatch.setattr(Atlas, "seconds_left", lambda atlas: 0.0)  # measures steps
    lines = re.findall(r"^python -m research benchmark --trials .*$", PAGE.with_name(page).read_text(), re.MULTILINE)
    for number, line in enumerate(lines):
        words = shlex.split(line)[3:]
        where = ["--out", str(tmp_path), "--page", str(tmp_path / f"{number}.md")]  # instead of the page's own
        assert main([*words, *where]) == 0
    assert asked == {(row["place"], row["method"]) for row in table.rows} != set()
