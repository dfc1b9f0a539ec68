"""What SLURM and Kubernetes are told: quoted, valid, and on a real small SLURM with the bits of the undisturbed run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from slurm import slurm

from exogym.cli import main
from exogym.clusters import Pods, SlurmJob, dockerfile, job_script, manifests
from exogym.clusters.kubernetes import document
from exogym.core.communicator import Wire
from exogym.core.training.loop import ONCE, Interrupt
from exogym.errors import ArgumentError

HOSTILE = [
    "it's",
    'a "b"',
    "$(touch owned)",
    "`touch owned`",
    "two\nlines",
    "%j",
    "$HOME",
    "--nodes",
    "; exit 7",
    "{x}",
]

FAKE_SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
SLURM_PROCID=1 SLURM_LAUNCH_NODE_IPADDR=10.0.0.1 exec "$@"
"""
FAKE_PYTHON = """#!/usr/bin/env python3
import json, os, sys
json.dump([sys.argv[1:], os.getcwd(), os.environ["EXOGYM_SECRET"]], open(os.environ["SEEN"], "w"))
"""


def test_words_reach_the_script_as_they_are(tmp_path: Path) -> None:
    """Through the job script, bash and srun's bash; none of them is read as anything else."""
    folder = tmp_path / "a folder's $(touch owned)"
    folder.mkdir()
    programs = tmp_path / "bin"
    programs.mkdir()
    python = programs / "py'thon $x"
    for path, text in {
        python: FAKE_PYTHON, programs / "srun": FAKE_SRUN, programs / "squeue": "#!/bin/sh\necho RUNNING\n",
    }.items():  # fmt: skip
        path.write_text(text)
        path.chmod(0o755)
    job = SlurmJob("-m.py", tuple(HOSTILE), nodes=2, folder=str(folder), python=str(python))
    path = tmp_path / "job.sh"
    path.write_text(job_script(job))
    given = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "SEEN": str(tmp_path / "seen.json")}
    given |= {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "4"}
    done = subprocess.run(["bash", str(path)], env=given, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words, current, secret = json.loads((tmp_path / "seen.json").read_text())
    at = words.index("--")
    assert words[at + 1 :] == ["./-m.py", *HOSTILE]
    assert " ".join(words[:at]) == (
        "-m exogym.launch --node_rank 1 --master_addr 10.0.0.1 --nnodes 2 --nproc_per_node 1 --master_port 20007"
    )
    assert current == str(folder) and len(secret) == 64
    assert not list(tmp_path.rglob("owned"))


@pytest.mark.parametrize(
    ("code", "state", "restarts", "again"),
    [
        (143, "RUNNING", "99", True), (143, "CANCELLED", "0", False), (143, "RUNNING", "100", False),
        (1, "RUNNING", "0", False),
    ],
)  # fmt: skip
def test_who_is_started_again(tmp_path: Path, code: int, state: str, restarts: str, again: bool) -> None:
    """Who was told to save, but not who was cancelled, has failed, or was started too often."""
    for name, text in {
        "python": f"exit {code}", "srun": FAKE_SRUN, "squeue": f"echo {state}", "scontrol": 'echo "asked: $*"',
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    text = job_script(SlurmJob("a.py", folder=str(tmp_path), python=str(tmp_path / "python")))
    given = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": restarts,
    }
    done = subprocess.run(["bash"], input=text, env=given, capture_output=True, text=True)
    assert ("asked: requeue 7" in done.stdout) == again, done.stdout + done.stderr
    assert done.returncode == (0 if again else code)


def test_sigterm_twice_in_a_job_is_sigterm_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM sends it to launcher and rank, and the launcher to the rank."""
    assert f"{ONCE}=1" in job_script(SlurmJob("a.py"))
    monkeypatch.setenv(ONCE, "1")
    with Interrupt(Wire([0]), [signal.SIGINT, signal.SIGTERM]) as interrupt:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            assert interrupt.received is signal.SIGTERM and interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # Ctrl-C still acts at once
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "a b"}, {"name": "x\n#SBATCH --uid=0"}, {"partition": "p;id"},
        {"time": "1:2:3:4\n"}, {"time": "-1"}, {"memory": "4 G"}, {"nodes": 0}, {"cpus": True},
        {"arguments": ("a\0b",)}, {"script": ""}, {"name": "ä"},
    ],
)  # fmt: skip
def test_words_of_slurm_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"must be|contains a zero byte|no script"):
        SlurmJob(**{"script": "train.py", **wrong})


def test_directives_hold_nothing_but_what_was_asked() -> None:
    job = SlurmJob("train.py", nodes=4, time="1-00:00:00", partition="gpu", gpus=8, memory="64G")
    lines = job_script(job).splitlines()
    directives = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    assert directives == {
        "--job-name=exogym", "--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--mem=64G", "--time=1-00:00:00",
        "--partition=gpu", "--output=exogym-%j.log", "--open-mode=append", "--signal=B:USR1@120", "--requeue",
    }  # fmt: skip
    assert "--nproc_per_node 8" in job_script(job)


def test_nothing_is_written_before_all_words_are_right(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["cluster", "slurm", "--partition", "a b", "--out", "other.sh", "train.py"]) == 2
    assert main(["cluster", "kubernetes", "--name", "A", "--out", "other", "train.py"]) == 2
    assert not list(tmp_path.iterdir())


# Whose words are whose


@pytest.mark.parametrize(
    ("words", "first", "theirs"),
    [
        ("slurm train.py --nodes 4 --gpus 8", "--nodes", "slurm train.py -- --nodes 4 --gpus 8"),
        ("slurm --time 60 train.py a --lr 3 --nodes=4", "--nodes", "slurm --time 60 train.py -- a --lr 3 --nodes=4"),
        ("kubernetes train.py --out k -- --name mine", "--out", "kubernetes train.py -- --out k --name mine"),
        ("kubernetes train.py --help", "--help", "kubernetes train.py -- --help"),
    ],
)
def test_options_of_the_job_behind_the_script_are_refused(
    words: str, first: str, theirs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["cluster", *words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"error: {first} comes after the script" in line and line.endswith(f": exogym cluster {theirs}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "passed_on"),
    [
        ("train.py data --lr 3 -x", "data --lr 3 -x"),
        ("train.py -- --nodes 9", "--nodes 9"),
        ("train.py data -- --nodes 9", "data --nodes 9"),
        ("train.py --lr 3 -- -- --nodes 9", "--lr 3 -- --nodes 9"),
        ("-- train.py --nodes 9", "--nodes 9"),
        ("-- train.py -- --nodes 9", "-- --nodes 9"),
    ],
)
def test_words_of_the_script_are_passed_on(words: str, passed_on: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["cluster", "slurm", "--nodes", "2", *words.split()]) == 0
    assert "--nodes=2" in Path("job.sh").read_text() and f"-- train.py {passed_on} &" in Path("job.sh").read_text()


def test_a_misspelt_option_is_no_script(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["cluster", "slurm", "--node", "4", "train.py"]) == 2
    assert "unknown option --node: did you mean '--nodes'?" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# Kubernetes


def test_manifests_are_valid() -> None:
    """By the published schemas."""
    validate = pytest.importorskip("kubernetes_validate")
    yaml = pytest.importorskip("yaml")
    pods = Pods("train.py", tuple(HOSTILE), nodes=3, gpus=2, image="registry.example:5000/team/x:1.0")
    objects = list(yaml.safe_load_all(document(manifests(pods))))
    assert objects == manifests(pods)
    assert [one["kind"] for one in objects] == ["Service", "NetworkPolicy", "Job"]
    command = objects[-1]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert expanded(command[command.index("--") + 1 :]) == ["train.py", *HOSTILE]
    for one in objects:
        validate.validate(one, "1.37", strict=True)
    broken = manifests(pods)[0]
    broken["spec"]["clusterIPs"] = "none"
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, "1.37", strict=True)


def expanded(words: list[str]) -> list[str]:
    """Return what Kubernetes makes of a command: $$ is $, and $(NAME) what the environment has."""
    found = []
    for word in words:
        at, text = 0, ""
        while at < len(word):
            if word[at : at + 2] == "$$":
                at += 1
            else:
                assert word[at : at + 2] != "$(", word
            text += word[at]
            at += 1
        found.append(text)
    return found


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "A"}, {"name": "a" * 60}, {"name": "-a"}, {"name": "x\ny"}, {"claim": "a.b"}, {"image": "a b"},
        {"image": "$(id)"}, {"memory": "lots"}, {"cpus": "-1"}, {"nodes": 0}, {"gpus": -1},
        {"script": ""}, {"arguments": ("\0",)},
    ],
)  # fmt: skip
def test_words_of_kubernetes_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"must be|is not one of|contains a zero byte|no script"):
        Pods(**{"script": "train.py", **wrong})


def test_the_image_is_built_from_the_wheel(tmp_path: Path) -> None:
    out = tmp_path / "k"
    assert main(["cluster", "kubernetes", "--nodes", "2", "--out", str(out), "train.py", "--lr", "1"]) == 0
    assert (out / "Dockerfile").read_text() == dockerfile()
    assert "COPY dist/exogym-" in dockerfile() and (out / "run.yaml").read_text().count("---\n") == 3


# A real SLURM

TEXT = "\n\n".join(f"ANN:\nThe {i} bells of number {i * i} ring." for i in range(400))
SHORT = "--num_nodes 4 --H 5 --batch_size 4 --block_size 16 --n_layer 1 --n_embd 16 --write 0 --max_steps 800"


@pytest.mark.slow
def test_a_job_is_disturbed_and_ends_in_the_same_bits(tmp_path: Path, monkeypatch: Any) -> None:
    """It is told that its limit is near, and started again; then preempted by a better one, and started again."""
    (tmp_path / "tinyshakespeare.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "slurm").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = [str(ROOT / "run" / "nanogpt_diloco.py"), *SHORT.split(), "--data", str(tmp_path)]
    subprocess.run([sys.executable, *words, "--save", "alone.safetensors"], check=True, capture_output=True)
    with slurm(tmp_path / "slurm") as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        asked = ["cluster", "slurm", "--nodes", "2", "--time", "30", "--partition", "low"]
        assert main([*asked, *words, "--checkpoints", "kept", "--save", "away.safetensors"]) == 0
        job = cluster.run("sbatch", "--parsable", "job.sh").strip()

        def state() -> str:
            return str(cluster.run("squeue", "--noheader", "--states=all", "--job", job, "--format=%T")).strip()

        def log() -> str:
            return Path(f"exogym-{job}.log").read_text() if Path(f"exogym-{job}.log").exists() else ""

        cluster.wait(lambda: bool(list(Path("kept").glob("step_*/run.json"))), "a checkpoint")
        cluster.run("scancel", "--batch", "--signal=USR1", job)  # as SLURM does before the limit
        cluster.wait(lambda: "will start again" in log(), "the job to notice")
        cluster.wait(lambda: "going on from step" in log(), "the job to go on")
        assert cluster.run("sbatch", "--partition=high", "--nodes=2", "--wait", "--wrap", "sleep 1")
        cluster.wait(lambda: state() in ("COMPLETED", "FAILED"), "the job to end")
        assert state() == "COMPLETED", log()
        assert log().count("stopped by SIGTERM after step") == 2, log()  # and saved itself
        assert log().count("going on from step") == 2
    assert Path("away.safetensors").read_bytes() == Path("alone.safetensors").read_bytes()


def test_shell_words_of_the_template_are_bash() -> None:
    done = subprocess.run(["bash", "-n"], input=job_script(SlurmJob("a.py")), text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
