"""Write a job script for SLURM.

On each machine, the script starts a launcher (`python -m exogym.launch`), which starts the machine's processes. The job
draws the secret with which processes join the run at random, and keeps it only in environment variables.

SLURM restarts a preempted job. The run then resumes if the script calls `fit(save_dir=..., resume=True)`. Shortly
before the time limit, the job tells its processes to save a checkpoint, and asks SLURM for a restart. Texts are quoted
for the shell, and invalid texts are refused.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, field

from exogym.clusters.words import MEMORY, NAME, TIME, check_arguments, check_word
from exogym.errors import ArgumentError, check_count

NAME_WORDS = "at most 63 letters, digits, '.', '_' and '-'"
BEFORE_S = 120  # the run saves a checkpoint so long before the time limit
RESTARTS = 100  # that the job may ask for
TEMPLATE = """\
#!/bin/bash
{directives}

# Written by exogym cluster slurm: read it, change it, and submit it with sbatch.
set -u
cd -- {folder} || exit 1

EXOGYM_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')  # processes must know it to join the run
export EXOGYM_SECRET EXOGYM_SIGTERM_ONCE=1

# SLURM sends TERM to all processes when the job is preempted or canceled. Shortly before the time limit it sends USR1
# to this shell, which then sends TERM. At TERM the processes save each node's state (fit with save_dir) and end.
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' USR1
trap : TERM

# This shell runs on the job's first machine, where all others connect. SLURM gives its address.
launch='exec "$0" -m exogym.launch --node_rank "$SLURM_PROCID" --master_addr "$SLURM_LAUNCH_NODE_IPADDR" "$@"'
srun --kill-on-bad-exit=1 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}} bash -c "$launch" {python} \\
    --nnodes {nodes} --nproc_per_node {processes} --master_port $((20000 + SLURM_JOB_ID % 10000)) -- {command} &
step=$!
while wait "$step"; code=$?; kill -0 "$step" 2>/dev/null; do :; done

# 143: ended by TERM. A canceled job is no longer RUNNING.
state=$(squeue --noheader --job "$SLURM_JOB_ID" --format=%T)
if [ "$code" -eq 143 ] && [ "$state" = RUNNING ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then
    echo "the run has saved itself and will start again" >&2
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@dataclass(frozen=True)
class SlurmJob:
    """A script and the resources that it needs on a SLURM cluster.

    Args:
        script: path of a Python file that all machines can read.
        arguments: the script's arguments.
        nodes: number of machines.
        processes_per_node: processes on each machine. If `processes_per_node` is None, a machine has one process per
            GPU, or one process without GPUs.
        name: the job's name.
        folder: the folder in which the script runs.
        python: path of the Python interpreter on the machines.
        cpus, gpus, memory, time, partition: SLURM's options. An option that is None keeps SLURM's default.

    Raises:
        ArgumentError: a value is not valid in a job script.

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

    def __post_init__(self) -> None:
        check_count("nodes", self.nodes)
        for name in ("processes_per_node", "cpus", "gpus"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_word("name", self.name, NAME, NAME_WORDS)
        if self.partition is not None:
            check_word("partition", self.partition, NAME, NAME_WORDS)
        if self.time is not None:
            check_word("time", self.time, TIME, "minutes, or [days-]hours:minutes[:seconds]")
        if self.memory is not None:
            check_word("memory", self.memory, MEMORY, "a whole number with K, M, G or T, such as 16G")
        check_arguments((self.script, self.folder, self.python, *self.arguments))
        if not self.script:
            raise ArgumentError("no script: pass the path of a Python file")

    @property
    def processes(self) -> int:
        return self.processes_per_node or self.gpus or 1


def job_script(job: SlurmJob) -> str:
    """Return the text of the job script."""
    given = {
        "job-name": job.name, "nodes": job.nodes, "ntasks-per-node": 1, "cpus-per-task": job.cpus,
        "gpus-per-node": job.gpus, "mem": job.memory, "time": job.time, "partition": job.partition,
        "output": f"{job.name}-%j.log", "open-mode": "append", "signal": f"B:USR1@{BEFORE_S}",
    }  # fmt: skip
    directives = [f"#SBATCH --{name}={value}" for name, value in given.items() if value is not None]
    script = job.script if not job.script.startswith("-") else f"./{job.script}"
    return TEMPLATE.format(
        directives="\n".join([*directives, "#SBATCH --requeue"]), folder=shlex.quote(job.folder),
        python=shlex.quote(job.python), nodes=job.nodes, processes=job.processes, restarts=RESTARTS,
        command=shlex.join([script, *job.arguments]),
    )  # fmt: skip
