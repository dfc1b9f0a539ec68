"""Every snippet and every command of the documentation runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHORT = ["--steps", "4", "--seeds", "1", "--batch-size", "4"]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


def commands() -> list[str]:
    found = []
    for page in PAGES:
        for block in blocks(page, "bash"):
            found += [line for line in block.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    return sorted(set(found))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "documentation"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("command", commands())
def test_commands_run(command, tmp_path):
    words = shlex.split(command)
    if words[0] == "make":
        recipe = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
        assert recipe.returncode == 0 and recipe.stdout, recipe.stderr
        return
    if words[0] in ("git", "pip", "cd"):
        assert command in ("pip install -e .", "git clone https://github.com/exo-explore/gym.git exogym", "cd exogym")
        return
    assert words[0] in ("exogym", "python"), f"no test knows how to run {command!r}"
    if words[1].startswith("benchmarks/"):  # takes minutes, and some need root: its options are to be known
        told = subprocess.run([sys.executable, str(ROOT / words[1]), "--help"], capture_output=True, text=True)
        known = set(re.findall(r"--[a-z][a-z-]*", told.stdout))
        assert told.returncode == 0 and {word for word in words[2:] if word.startswith("--")} <= known, told.stderr
        return
    done = subprocess.run(runnable(words), cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def runnable(words: list[str]) -> list[str]:
    """Return a command of the documentation with this Python and the repository's files, and short."""
    files = [str(ROOT / word) if word.endswith(".py") else word for word in words[1:]]
    if words[0] == "exogym":
        return [sys.executable, "-m", "exogym", *words[1:], *(SHORT if words[1] == "compare" else [])]
    return [sys.executable, *files, *([] if words[1] == "-m" else SHORT[:2])]


def test_what_is_run_is_what_is_written():
    """Only a comparison and a script of run/ are cut short."""
    short = ["--steps", "4", "--seeds", "1", "--batch-size", "4"]
    assert runnable(["exogym", "compare", "--nodes", "4"]) == [
        sys.executable, "-m", "exogym", "compare", "--nodes", "4", *short
    ]  # fmt: skip
    assert runnable(["exogym", "advise", "--nodes", "4"]) == [sys.executable, "-m", "exogym", "advise", "--nodes", "4"]
    assert runnable(["python", "run/mnist.py"]) == [sys.executable, str(ROOT / "run" / "mnist.py"), "--steps", "4"]
    launch = ["-m", "exogym.launch", "--nproc_per_node", "2"]
    assert runnable(["python", *launch, "run/x.py"]) == [sys.executable, *launch, str(ROOT / "run" / "x.py")]


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
