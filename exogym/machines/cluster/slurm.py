"""SLURM: a job script, and what SLURM says of a job.

The script starts one launcher a machine (`python -m exogym.launch`, torch's elastic agent behind a door that asks for a
secret), which starts the processes there. The secret is drawn in the job and is in its environment only. A job that is
preempted is started again by SLURM, and goes on where the script calls `fit(save_dir=..., resume=True)`. Some time
before its limit the job tells its processes to save, and has itself started again. Every word that somebody gave is
quoted for the shell, or refused.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from exogym.errors import ArgumentError, ExoGymError, check_count, check_port
from exogym.machines.cluster.words import MEMORY, NAME, TIME, check_arguments, check_word

NAME_WORDS = "letters, digits, '.', '_' and '-', at most 63"
TEMPLATE = """\
#!/bin/bash
{directives}

# Written by exogym cluster slurm: read it, change it, and submit it with sbatch.
set -u
cd -- {folder} || exit 1

EXOGYM_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')  # processes must know it to join the run
export EXOGYM_SECRET EXOGYM_SIGTERM_ONCE=1

# SLURM sends TERM to all processes when the job is preempted or cancelled, and some time before the limit USR1 to this
# shell, which then sends TERM. At that the processes save where each node stands (fit with save_dir), and end.
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' USR1
trap : TERM

# This shell runs on the first machine of the job, where the others find the first launcher: SLURM tells its address.
launch='exec "$0" -m exogym.launch --node_rank "$SLURM_PROCID" --master_addr "$SLURM_LAUNCH_NODE_IPADDR" "$@"'
srun --kill-on-bad-exit=1 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}} bash -c "$launch" {python} \\
    --nnodes {nodes} --nproc_per_node {processes} --master_port {port} -- {command} &
step=$!
while wait "$step"; code=$?; kill -0 "$step" 2>/dev/null; do :; done

# 143: ended by TERM. A job that was cancelled is not running any more.
state=$(squeue --noheader --job "$SLURM_JOB_ID" --format=%T)
if [ "$code" -eq 143 ] && [ "$state" = RUNNING ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
    echo "the run has saved itself and will start again" >&2
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@dataclass(frozen=True)
class SlurmJob:
    """A script and its needs on the cluster.

    Args:
        script: path of a Python file, seen by all machines; `arguments`: its own.
        nodes: machines; processes_per_node: on each (None: one per GPU, or one).
        folder: in which the script runs; `python`: the interpreter there.
        cpus, gpus, memory, time, partition, account, qos: as SLURM's options; None: its defaults.
        before_s: seconds before the time limit at which the run saves.
        port: at which the machines meet; None: computed from the job's number.
        restarts: how often the job may restart itself.

    Raises:
        ArgumentError: a word that is not of the form it must have.

    >>> SlurmJob("train.py", ("--lr", "0.1"), nodes=2, time="01:00:00").processes
    1
    """

    script: str
    arguments: tuple[str, ...] = ()
    nodes: int = 1
    processes_per_node: int | None = None
    name: str = "exogym"
    folder: str = field(default_factory=os.getcwd)
    python: str = sys.executable
    cpus: int | None = None
    gpus: int | None = None
    memory: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    before_s: int = 120
    port: int | None = None
    restarts: int = 100

    def __post_init__(self) -> None:
        for name in ("nodes", "before_s"):
            check_count(name, getattr(self, name))
        check_count("restarts", self.restarts, least=0)
        for name in ("processes_per_node", "cpus", "gpus"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.port is not None:
            check_port("port", self.port, least=1024)
        for name in ("name", "partition", "account", "qos"):
            if getattr(self, name) is not None:
                check_word(name, getattr(self, name), NAME, NAME_WORDS)
        if self.time is not None:
            check_word("time", self.time, TIME, "minutes, or [days-]hours:minutes[:seconds]")
        if self.memory is not None:
            check_word("memory", self.memory, MEMORY, "a whole number with K, M, G or T, as 16G")
        check_arguments((self.script, self.folder, self.python, *self.arguments))
        if not self.script:
            raise ArgumentError("no script: give the path of a Python file")

    @property
    def processes(self) -> int:
        return self.processes_per_node or self.gpus or 1


def job_script(job: SlurmJob) -> str:
    """Return the text of the job script."""
    given = {
        "job-name": job.name, "nodes": job.nodes, "ntasks-per-node": 1, "cpus-per-task": job.cpus,
        "gpus-per-node": job.gpus, "mem": job.memory, "time": job.time, "partition": job.partition,
        "account": job.account, "qos": job.qos, "output": f"{job.name}-%j.log", "open-mode": "append",
        "signal": f"B:USR1@{job.before_s}",
    }  # fmt: skip
    directives = [f"#SBATCH --{name}={value}" for name, value in given.items() if value is not None]
    script = job.script if not job.script.startswith("-") else f"./{job.script}"
    return TEMPLATE.format(
        directives="\n".join([*directives, "#SBATCH --requeue"]), folder=shlex.quote(job.folder),
        python=shlex.quote(job.python), nodes=job.nodes, processes=job.processes, restarts=job.restarts,
        port=job.port or "$((20000 + SLURM_JOB_ID % 10000))", command=shlex.join([script, *job.arguments]),
    )  # fmt: skip


def submit(script: Path, job: SlurmJob) -> int:
    """Submit a job script; return the number of the job.

    Raises:
        ArgumentError: SLURM rejects it, for example for an unknown partition.
        ExoGymError: there is no SLURM here, or it does not answer.
    """
    if not Path(job.folder, job.script).is_file():
        raise ArgumentError(f"there is no script {job.script!r} in {job.folder!r}: give the path of a Python file")
    for more in (["--test-only"], ["--parsable"]):
        done = _slurm("sbatch", f"--chdir={job.folder}", *more, "--", str(script))
        if done.returncode:
            raise ArgumentError(f"SLURM rejects the job: {_said(done)}")
    return int(done.stdout.strip().partition(";")[0])


def status_of(job: int) -> dict[str, str]:
    """Return what SLURM says of a job: state, reason, run_time, time_limit, nodes, restarts, exit_code, log."""
    facts = _facts(job)
    names = {
        "state": "JobState", "reason": "Reason", "run_time": "RunTime", "time_limit": "TimeLimit", "nodes": "NodeList",
        "restarts": "Restarts", "exit_code": "ExitCode", "log": "StdOut",
    }  # fmt: skip
    return {name: facts.get(theirs, "") for name, theirs in names.items()}


def log_of(job: int) -> Path:
    """Return the file that a job writes.

    Raises:
        ExoGymError: it does not exist yet, or not on this machine.
    """
    path = Path(_facts(job).get("StdOut", ""))
    if not path.is_file():
        raise ExoGymError(f"job {job} has no log yet on this machine: {str(path)!r} does not exist")
    return path


def cancel(job: int) -> None:
    """End a job; SLURM sends its processes SIGTERM first, at which they save."""
    _facts(job)
    done = _slurm("scancel", str(job))
    if done.returncode:
        raise ExoGymError(f"SLURM does not cancel job {job}: {_said(done)}")


def _facts(job: int) -> dict[str, str]:
    check_count("job", job)
    done = _slurm("scontrol", "--oneliner", "show", "job", str(job))
    if done.returncode:
        raise ArgumentError(f"SLURM knows no job {job} (any more): {_said(done)}")
    return dict(re.findall(r"(?:^| )([A-Za-z]\w*)=(.*?)(?= [A-Za-z][\w/:]*=|$)", done.stdout.strip()))


def _slurm(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        raise ExoGymError(f"there is no {words[0]} here: submit from a machine of the SLURM cluster") from None
    except subprocess.TimeoutExpired:
        raise ExoGymError(f"SLURM does not answer {words[0]} within 60 s") from None


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
