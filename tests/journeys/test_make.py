"""The targets of the Makefile, in a copy of the clone, with nothing installed but what the target itself installs."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from paths import ROOT

# Target -> the extra that it installs, and what it leaves
ALONE = {"demo": ("demo", "runs"), "docs": ("docs", "site/index.html")}
# Those that need [dev] share an environment, in this order -> what each leaves
DEV = {"lint": "", "prose": "", "format": "", "notebooks": "notebooks", "dist": "dist", "clean": "", "types": ""}
LEFT_OUT = {
    "help": "runs without an environment, in a test of its own",
    "test": "this is one of its tests",
    "device-test": "a part of `test`",
    "test-all": "hours, and this is one of its tests",
    "slow": "this is one of its tests",
    "ui-demo": "answers until it is ended; tests/ui tries the page",
    "pictures": "needs Chromium; tests/ui takes such pictures",
    "tutorials": "minutes; tests/journeys/test_tutorials.py runs the same scripts",
    "gallery": "many minutes of training",
    "benchmark": "an hour of training",
    "reproductions": "hours of training",
    "atlas": "days of training",
    "research-test": "minutes; its tests need no environment of their own",
    "matrix": "half an hour of fresh environments; test_wheel.py has some of them",
    "bench": "measures this machine, minutes",
    "table": "tests/laws/test_every_strategy.py compares what it writes",
}


def targets() -> list[str]:
    return re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text("utf-8"), re.M)


def make(clone: Path, target: str) -> str:
    """Run `make TARGET`, as who has no other ExoGym; return what it prints."""
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "OMP_NUM_THREADS")
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    done = subprocess.run(["make", target], cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """The files of the clone as they are, those not yet committed among them."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return {name: (ROOT / name).read_bytes() for name in names if name and (ROOT / name).is_file()}


def copied(files: dict[str, bytes], folder: Path) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
        shutil.copymode(ROOT / name, folder / name)
    return folder


def test_every_target_is_run_here_or_says_why_not() -> None:
    assert sorted(targets()) == sorted([*ALONE, *DEV, *LEFT_OUT])
    recipes = (ROOT / "Makefile").read_text("utf-8")
    for target, (extra, _) in ALONE.items():
        assert re.search(rf"^{target}: \$\(VENV\)/\.stamp-{extra} ", recipes, re.M)


def test_help_lists_them(files: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_bytes(files["Makefile"])
    assert [line.split()[0] for line in make(tmp_path, "help").splitlines()] == targets()
    assert [path.name for path in tmp_path.iterdir()] == ["Makefile"]


@pytest.mark.slow  # installs PyTorch
@pytest.mark.parametrize("target", ALONE)
def test_with_its_extra_alone(target: str, files: dict[str, bytes], tmp_path: Path) -> None:
    make(copied(files, tmp_path), target)
    assert (tmp_path / ALONE[target][1]).exists()
    assert [path.name for path in (tmp_path / ".venv").glob(".stamp-*")] == [f".stamp-{ALONE[target][0]}"]


@pytest.mark.slow  # installs all packages
def test_for_developers(files: dict[str, bytes], tmp_path: Path) -> None:
    """None of these changes a file of a clone that is in order."""
    clone = copied(files, tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=clone, check=True)
    for target, left in DEV.items():
        make(clone, target)
        assert (clone / left).exists()
        assert {name: (clone / name).read_bytes() for name in files} == files, target
