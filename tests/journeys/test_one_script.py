"""One script in simulation, under torchrun and on hosts, by the commands of the documentation: the same weights."""

import hashlib
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from hosts import Hosts, fixtures
from hosts.fixtures import said
from paths import ROOT

hosts, project, tidy = fixtures.hosts, fixtures.project, fixtures.tidy  # where pytest looks for them
pytestmark = pytest.mark.usefixtures("tidy")
COUNT = 2
PROGRAMS = Path(sys.executable).parent  # python, torchrun, exogym
SHORT = "--max_steps 12 --num_nodes 2 --H 5 --batch_size 4 --block_size 16 --n_layer 1 --n_embd 16 --write 0"
TEXT = "\n\n".join(f"ANN:\nThe {i} bells of number {i * i} ring." for i in range(400))


def documented() -> list[str]:
    """Return the commands of docs/real_machines.md."""
    page = (ROOT / "docs" / "real_machines.md").read_text()
    section = page.split("### One script, three places\n")[1]
    return re.findall(r"```text\n(.*?)```", section, re.S)[0].splitlines()


def run(hosts: Hosts, project: Path, command: str, *more: str) -> tuple[str, list[str]]:
    """Run a command in the project's folder, cut short; return the SHA-256 of what it saved, and the losses it said."""
    words = [*shlex.split(command), *shlex.split(SHORT), "--data", str(project), *more]
    path = {"PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
    done = hosts.controller.run(words, cwd=project, env=os.environ | path)
    assert done.returncode == 0, said(done)
    saved = project / words[words.index("--save") + 1]
    return hashlib.sha256(saved.read_bytes()).hexdigest(), re.findall(r"step +\d+  validation loss .*", done.stdout)


@pytest.mark.slow
def test_the_documented_commands_save_the_same_bytes(hosts: Hosts, project: Path) -> None:
    """And each says its losses once, the same ones: after `fit` one process speaks."""
    (project / "run").mkdir()
    (project / "run" / "nanogpt_diloco.py").write_text((ROOT / "run" / "nanogpt_diloco.py").read_text())
    (project / "tinyshakespeare.txt").write_text(TEXT, encoding="utf-8")
    hosts.file(project / "distributed_hosts.json")
    commands = documented()
    assert [command.split()[0] for command in commands] == ["python", "torchrun", "python"]
    assert ["--hosts" in command for command in commands] == [False, False, True]
    simulated, *others = [*commands, commands[1].replace("torchrun", "python -m exogym.launch", 1)]
    saved, losses = run(hosts, project, simulated)
    assert len(losses) == 13
    for command in others:
        assert run(hosts, project, command) == (saved, losses), command
    assert run(hosts, project, simulated, "--H", "6")[0] != saved  # the control
