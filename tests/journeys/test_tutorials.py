"""The tutorials run as scripts, print what they say they print, and are notebooks."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from battery import each
from paths import ROOT
from processes import python

TUTORIALS = sorted((ROOT / "tutorials").glob("*.py"))
SHORTENED = {"tutorial_custom", "tutorial_federated", "tutorial_strategies"}  # where EXOGYM_SHORT is set
IN_JUPYTER = """
import json, sys
import jupytext
from nbclient import NotebookClient

notebook = jupytext.read(sys.argv[1])
NotebookClient(notebook, timeout=600).execute()
outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
print(json.dumps(sorted({kind for out in outputs for kind in out.get("data", {})})))
"""
LONG = SHORTENED | {
    "tutorial_real_machines",
    "tutorial_whisper",
    "tutorial_language",
    "tutorial_streams",
    "tutorial_attach",
    "tutorial_production",
}  # what these show has tests of its own
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
WITHIN = 0.15  # of a number: other processors round otherwise


def promised(source: str) -> list[str]:
    """Return the lines that a tutorial says it prints, which stand in comments behind `# >`."""
    return re.findall(r"^ *# > (.*)$", source, re.M)


def is_as_promised(line: str, promise: str) -> bool:
    """Say whether a line has the words of the promise, and its numbers within a tolerance.

    >>> is_as_promised("loss 0.29, 90%", "loss 0.30, 91%"), is_as_promised("loss 0.2", "loss 0.3")
    (True, False)
    """
    numbers = [[float(x.replace(",", "")) for x in NUMBER.findall(text)] for text in (line, promise)]
    return NUMBER.sub("#", line) == NUMBER.sub("#", promise) and all(
        abs(a - b) <= WITHIN * abs(b) for a, b in zip(*numbers, strict=True)
    )


def missing(printed: str, source: str) -> list[str]:
    """Return the promises that were not kept, in their order."""
    lines, broken = iter(printed.splitlines()), []
    for promise in promised(source):
        if not any(is_as_promised(line, promise) for line in lines):
            broken.append(promise)
            lines = iter([])
    return broken


def test_a_broken_promise_is_found() -> None:
    source = "print(1)\n# > a 1\nprint(2)\n# > b 200 c\n"
    assert not missing("a 1\nelse\nb 210 c", source)
    assert missing("b 200 c\na 1", source) == ["b 200 c"]
    assert missing("a 1\nb 300 c", source) == ["b 200 c"] == missing("a 1\nb 200", source)


def run(tutorial: Path, folder: Path, **more: str) -> str:
    """Run a tutorial as a script in `folder`; return what it printed."""
    environment = {**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}
    done = python("-W", "error", tutorial, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in re.findall(r"\]\(\.\./docs/images/(\w+\.png)\)", tutorial.read_text()):
        assert (folder / name).exists(), f"{name} is shown and not drawn"
    (removed,) = re.findall(r"^tutorials:(?:.*\n\t)+.*rm -rf (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.M)
    left = [path for path in folder.iterdir() if not any(path.match(name) for name in ["*.png", *removed.split()])]
    assert left == [], "make tutorials does not remove it"
    return done.stdout


@pytest.mark.parametrize(
    "tutorial", [pytest.param(p, marks=[pytest.mark.slow] * (p.stem in LONG), id=p.stem) for p in TUTORIALS]
)
def test_it_runs_and_prints_what_it_says(tutorial: Path, tmp_path: Path) -> None:
    assert not missing(run(tutorial, tmp_path), tutorial.read_text())


@pytest.mark.parametrize("name", each(sorted(SHORTENED), fast=["tutorial_strategies"]))
def test_a_long_one_runs_with_fewer_steps(name: str, tmp_path: Path) -> None:
    run(ROOT / "tutorials" / f"{name}.py", tmp_path, EXOGYM_SHORT="1")


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda p: p.stem)
def test_it_is_a_notebook_with_a_question_and_its_answer(tutorial: Path) -> None:
    import jupytext

    source = tutorial.read_text()
    notebook = jupytext.reads(source, fmt="py:percent")
    cells = [cell.cell_type for cell in notebook.cells]
    assert cells[0] == "markdown" and cells.count("code") >= 4 and notebook.metadata["kernelspec"]["name"] == "python3"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            compile(cell.source, str(tutorial), "exec")
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for heading in ("## Change something", "## A question", "**Answer.**"):
        assert text.count(heading) == 1, heading
    assert text.startswith("# ") and "![" in text
    assert jupytext.reads(jupytext.writes(notebook, fmt="ipynb"), fmt="ipynb").cells == notebook.cells


@pytest.mark.parametrize(
    "name", each(["tutorial_basic", "tutorial_strategies", "tutorial_custom"], fast=["tutorial_basic"])
)
def test_it_runs_in_jupyter(name: str, tmp_path: Path) -> None:
    environment = os.environ | {"EXOGYM_SHORT": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("MPLBACKEND", None)  # the kernel chooses its own
    # A process of its own, because threads of the client would stay here and be missing in forks.
    words = [sys.executable, "-c", IN_JUPYTER, str(ROOT / "tutorials" / f"{name}.py")]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "image/png" in json.loads(done.stdout), "no picture is shown"


def test_pictures_and_links_of_tutorials_are_there() -> None:
    for tutorial in TUTORIALS:
        for target in re.findall(r"\]\(([^)#\s]+)", tutorial.read_text()):
            assert "://" in target or (tutorial.parent / target).exists(), f"{tutorial.name} links to {target}"
