"""What is released: the wheel and the source distribution have what they must, and work outside of the clone."""

import datetime
import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from environments import TRIED
from paths import ROOT

import exogym
from exogym.clusters import dockerfile

BESIDE = (
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CITATION.cff",
    "constraints.txt",
)
SHORT = ["demo", "--steps", "4", "--seeds", "1", "--batch-size", "4"]
RESULTS = {"run.json", "summary.csv", "metrics.csv", "loss_vs_steps.png", "loss_vs_bytes.png"}

USERS = '''\
"""What a user may write: a model, a loss, a strategy and a callback of one's own, and what comes out."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer, NetworkTrainer, Trainer, load_model, save_model
from exogym.callbacks import EvaluateNodes, Every, Running
from exogym.data import digits
from exogym.faults import Faults
from exogym.logger import CSVLogger
from exogym.network import Network
from exogym.strategy import (
    CommunicateOptimizeStrategy, DiLoCoStrategy, FedAvgStrategy, OptimSpec, SimpleReduceStrategy, SPARTAStrategy,
    Strategy,
)
from exogym.strategy.communicate import all_reduce
from exogym.strategy.sparta import SparseCommunicator
from exogym.testing import check_strategy, fingerprint


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


class Mine(Strategy):
    def __init__(self, H: int = 4, lr: float = 0.01) -> None:
        super().__init__(inner_optim="sgd", lr=lr)
        self.H = H

    def step(self) -> None:
        self.communicate_gradients()
        self.update_parameters()
        super().step()


def tell(loop: Running) -> None:
    print(loop.step)


def train() -> float:
    x = torch.randn(64, 4)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    trainer = LocalTrainer(Line(), data, data, loss_fn=nn.functional.mse_loss)
    spec = OptimSpec(torch.optim.AdamW, lr=1e-3)
    model: nn.Module = trainer.fit(
        DiLoCoStrategy(inner_optim=spec, H=5), num_nodes=4, max_steps=20, batch_size=4, logger=CSVLogger("logs"),
        callbacks=[Every(5, tell), EvaluateNodes()], network="wifi",
    )
    save_model(model, "model.safetensors")
    print(fingerprint(model), load_model(Line(), "model.safetensors"), digits().classes)
    check_strategy(lambda: FedAvgStrategy(H=4, lr=0.1))
    mixed = CommunicateOptimizeStrategy(communication_modules=[SparseCommunicator(sparsification_rate=0.01)], lr=0.1)
    for strategy in (mixed, SPARTAStrategy(p_sparta=0.1), SimpleReduceStrategy(), Mine(H=2)):
        trainer.fit(strategy, num_nodes=2, max_steps=2)
    return float(trainer.history.last["val_loss"])
'''
# What --strict turns on for a file, as its first line can say it.
STRICT = """\
# mypy: disallow-any-generics, disallow-subclassing-any, disallow-untyped-calls, disallow-untyped-defs, strict-equality
# mypy: disallow-incomplete-defs, disallow-untyped-decorators, warn-return-any, warn-unused-ignores, extra-checks
"""
WRONG = 'LocalTrainer(nn.Linear(4, 1), None).fit(DiLoCoStrategy(H="5"), num_nodes=4, max_step=20)\n'


class Built(NamedTuple):
    source: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The source distribution of the clone, and the wheel that is built from it."""
    top = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT / "exogym", top / "clone" / "exogym", ignore=shutil.ignore_patterns("__pycache__"))
    (top / "clone" / "tests").mkdir()  # is not to be taken along
    shutil.copy(__file__, top / "clone" / "tests")
    for name in BESIDE:
        shutil.copy(ROOT / name, top / "clone" / name)
    build = "from setuptools import build_meta; import sys; getattr(build_meta, sys.argv[1])(sys.argv[2])"

    def run(what: str, folder: Path) -> None:
        done = subprocess.run([sys.executable, "-c", build, what, top], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    run("build_sdist", top / "clone")
    (source,) = top.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(top, filter="data")
    run("build_wheel", top / source.name.removesuffix(".tar.gz"))
    (wheel,) = top.glob("*.whl")
    return Built(source, wheel)


def test_the_wheel_has_the_package_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        about = {name.partition(".dist-info/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
        metadata = email.message_from_string(archive.read(about["METADATA"]).decode("utf-8"))
        entries = archive.read(about["entry_points.txt"]).decode()
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "exogym").rglob("*") if path.is_file()}
    assert names == {name for name in there if "__pycache__" not in name}
    assert {"exogym/py.typed", "exogym/ui/static/index.html"} <= names
    assert "licenses/LICENSE" in about and entries.split() == [
        "[console_scripts]",
        "exogym",
        "=",
        "exogym.__main__:main",
    ]
    assert metadata["Description-Content-Type"] == "text/markdown"
    check_readme(str(metadata.get_payload()))
    assert f"COPY dist/{built.wheel.name} " in dockerfile()
    assert metadata["Version"] == exogym.__version__ and metadata["Requires-Python"] == ">=3.11"


def check_readme(shown: str) -> None:
    """See that what an index shows is README.md, its links to this version's files in the repository made absolute."""
    at = f"https://github.com/exo-explore/gym/{{}}/v{exogym.__version__}/"
    links = re.findall(r"\]\(([^)\s]+)\)", shown)
    ours = [to for to in links if to.startswith(at.format("blob")) or to.startswith(at.format("raw"))]
    assert len(ours) > 10 and all("://" in to or to.startswith("#") for to in links)
    for to in ours:
        name = to.partition(f"/v{exogym.__version__}/")[2].partition("#")[0]
        assert (ROOT / name).exists() and ("/raw/" in to) == name.endswith((".png", ".svg")), to
    for kind in ("blob", "raw"):
        shown = shown.replace(at.format(kind), "")
    assert shown.strip().splitlines() == (ROOT / "README.md").read_text("utf-8").strip().splitlines()


def test_the_source_distribution_has_what_it_is_built_from(built: Built) -> None:
    with tarfile.open(built.source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {*BESIDE, "exogym/__init__.py", "exogym/ui/static/index.html"}
    assert not [name for name in names if name.startswith("tests")]


def test_what_is_built_depends_on_the_files_alone(built: Built) -> None:
    """Not on times, on who builds, or on the umask: two clones give the same bytes."""
    (day,) = re.findall(r"^date-released: (.+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.M)
    at = datetime.datetime.fromisoformat(f"{day}T00:00Z")
    with tarfile.open(built.source) as archive:
        members = archive.getmembers()
    assert [each.name for each in members] == [str(path) for path in sorted(Path(each.name) for each in members)]
    assert {(each.mtime, each.uid, each.gid, each.uname, each.gname) for each in members} == {
        (at.timestamp(), 0, 0, "", "")
    }
    assert {each.mode for each in members if each.isfile()} == {0o644}
    assert int.from_bytes(built.source.read_bytes()[4:8], "little") == at.timestamp()  # in the header of gzip
    with zipfile.ZipFile(built.wheel) as wheel:
        assert {each.date_time for each in wheel.infolist()} == {at.timetuple()[:6]}


def test_make_matrix_tries_every_extra() -> None:
    """all, docs and dev are of other extras, or for a clone."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert {"", *extras} == {*TRIED, "all", "docs", "dev"}


def test_the_version_stands_in_one_place() -> None:
    """The changelog begins with it, and tells of no other as the newest."""
    number = re.compile(rf"(?:exogym-|==|\bv|[\"']|version:? ?){re.escape(exogym.__version__)}(?![\w.])")
    files = [ROOT / name for name in ("pyproject.toml", "CITATION.cff", "Makefile", "README.md", "llms.txt")]
    files += [*(ROOT / "exogym").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    holders = [str(path.relative_to(ROOT)) for path in files if number.search(path.read_text("utf-8"))]
    assert holders == ["exogym/__init__.py"]
    newest, day = re.findall(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)[0]
    assert newest == exogym.__version__
    assert f"\ndate-released: {day}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


def test_the_citation_is_of_the_format() -> None:
    """The keys that version 1.2.0 of the Citation File Format asks for, and no others than it knows."""
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= found.keys()
    assert found.keys() <= {
        "abstract", "authors", "cff-version", "date-released", "keywords", "license", "message", "repository-code",
        "title", "type", "url", "version",
    }  # fmt: skip
    assert found["cff-version"] == "1.2.0" and found["type"] == "software" and found["license"] == "MIT"
    assert all(author.keys() in ({"family-names", "given-names"}, {"name"}) for author in found["authors"])


@pytest.mark.slow
def test_installed_it_runs_outside_of_the_clone(built: Built, tmp_path: Path) -> None:
    """In an environment that sees the packages of this one, but its own exogym first."""
    import torch

    bin = environment(tmp_path)
    pip = [sys.executable, "-m", "pip", "--python", str(bin / "python"), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(built.wheel)], check=True)
    (packages,) = tmp_path.glob("env/lib/python*/site-packages")
    (packages / "others.pth").write_text(str(Path(torch.__file__).parent.parent))
    runs_here(bin, tmp_path)


def environment(folder: Path, python: str = sys.executable) -> Path:
    """Make an environment, without pip; return the folder of its commands."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    return folder / "env" / "bin"


def runs_here(bin: Path, folder: Path) -> None:
    """See that the exogym of an environment answers, and takes the demonstration to its results."""
    (folder / "elsewhere").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_", "VIRTUAL_ENV"))}

    def run(*words: str) -> str:
        done = subprocess.run(
            [str(bin / words[0]), *words[1:]], cwd=folder / "elsewhere", env=kept, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run("python", "-c", "import exogym; print(exogym.__file__)")
    assert Path(where.strip()).is_relative_to(folder / "env")
    assert run("exogym", "--version") == f"exogym {exogym.__version__}\n"
    assert "of DDP's quality" in run("exogym", *SHORT)
    (results,) = (folder / "elsewhere" / "runs").iterdir()
    assert {path.name for path in results.iterdir()} >= RESULTS


def test_the_demonstration_is_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    """What it says that it starts can be started so, and options that are wrong are named."""
    from exogym.cli import main

    monkeypatch.chdir(tmp_path)
    assert isinstance(capsys, pytest.CaptureFixture)
    assert main(["demo", "--strategies", "ddp", *SHORT[1:], "--out", "one"]) == 0
    printed = capsys.readouterr()
    said = printed.err.splitlines()[0].removeprefix("exogym: ").split()
    assert said[:2] == ["exogym", "compare"]
    assert main([*said[1:-1], "two"]) == 0
    figures = [
        [line.split("|")[1:7] for line in out.splitlines() if line.startswith("|")]
        for out in (printed.out, capsys.readouterr().out)
    ]
    assert figures[0] == figures[1] and figures[0][2][0].strip() == "ddp"
    assert main(["demo", "--stepz", "4"]) == 2
    assert "did you mean '--steps'" in capsys.readouterr().err


def test_a_users_script_is_checked_strictly(tmp_path: Path) -> None:
    """With the cache that `make types` has filled: pyproject.toml says for exogym what --strict asks of others.

    Only the last line of the script is wrong.
    """
    (tmp_path / "users.py").write_text(script := STRICT + USERS + WRONG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", str(tmp_path / "users.py")], cwd=ROOT, capture_output=True, text=True
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert done.returncode == 1 and len(errors) == 2, done.stdout
    assert all(f"users.py:{len(script.splitlines())}: " in line for line in errors), errors
    assert 'incompatible type "str"' in done.stdout and "max_step" in done.stdout


# Fresh environments: everything is fetched, so these are slow.


@pytest.fixture(scope="module", params=["python3.11", "python3.12", "python3.13", "python3.14"])
def wheelhouse(request: pytest.FixtureRequest, built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all wheels that a Python of that version needs; beside it, `python` leads to it."""
    found = subprocess.run([shutil.which(request.param) or "false", "-c", "import sys; print(sys.executable)"],
                           capture_output=True, text=True)  # fmt: skip
    if found.returncode:
        pytest.skip(f"there is no {request.param} here")
    folder = tmp_path_factory.mktemp(request.param)
    python, house = found.stdout.strip(), folder / "house"
    wanted = [f"{built.wheel}[demo]", "setuptools>=77", "-c", str(ROOT / "constraints.txt")]
    pip = [sys.executable, "-m", "pip", "--python", str(environment(folder, python) / "python")]
    asked = [*pip, "install", "-q", "--dry-run", "--ignore-installed", "--report", "-", *wanted]
    report = subprocess.run(asked, capture_output=True, text=True)
    assert report.returncode == 0, report.stderr
    names = [item["metadata"]["name"] for item in json.loads(report.stdout)["install"]]
    if any(name.startswith(("nvidia-", "cuda-")) for name in names):
        pytest.skip(f"the torch for {request.param} comes with gigabytes of CUDA; all else of it resolves")
    subprocess.run([*pip, "download", "-q", "-d", str(house), *wanted], check=True)
    (folder / "python").symlink_to(python)
    return house


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["pip", "uv"])
@pytest.mark.parametrize("what", ["wheel", "source"])
def test_a_fresh_environment(built: Built, wheelhouse: Path, tmp_path: Path, tool: str, what: str) -> None:
    given = f"{getattr(built, what)}[demo]"
    bin = environment(tmp_path, str(wheelhouse.parent / "python"))
    install = {
        "pip": [sys.executable, "-m", "pip", "--python", str(bin / "python"), "install", "-q"],
        "uv": [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", str(bin / "python"), "--offline"],
    }[tool]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    constraints = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([*install, "--no-index", "--find-links", str(wheelhouse), *constraints, given], check=True, env=kept)
    runs_here(bin, tmp_path)
    if (tool, what) == ("pip", "wheel"):  # mypy sees it as a package with types, whose own errors it does not tell
        (tmp_path / "users.py").write_text(USERS)
        words = ["-m", "mypy", "--strict", "--config-file=", "--python-executable", str(bin / "python"), "users.py"]
        subprocess.run([sys.executable, *words], cwd=tmp_path, check=True)
