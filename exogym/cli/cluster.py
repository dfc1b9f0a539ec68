"""`exogym cluster`: job scripts for SLURM, manifests for Kubernetes, and what SLURM says of a job."""

from __future__ import annotations

import os
import shlex
import sys
from collections import deque
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from exogym.cli.runs import plain
from exogym.cli.values import Debug
from exogym.core.progress import notice
from exogym.errors import ArgumentError
from exogym.machines.cluster import Pods, SlurmJob, cancel, dockerfile, job_script, log_of, manifests, status_of, submit
from exogym.machines.cluster.kubernetes import document

app = typer.Typer(help="Write job scripts for SLURM and manifests for Kubernetes; look after jobs of SLURM.")
WORDS = {"allow_interspersed_args": False}  # behind the script all words are its own
Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="Path of a Python file.")]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ARGUMENTS]...", help="The script's own; behind -- if they look like options of the job."),
]
JobNumber = Annotated[int, typer.Argument(metavar="JOB", help="Number of the job, as submitted.")]
Nodes = Annotated[int, typer.Option(metavar="N", help="Machines.")]
Processes = Annotated[int | None, typer.Option(metavar="P", help="On each. [default: one a GPU, else 1]")]


class _OfScript(typer.core.TyperCommand):
    """A command that takes a script and the script's arguments, and refuses its own options among these."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        left: list[str] = super().parse_args(ctx, args)
        words = list(ctx.params.get("arguments") or ())
        before = given[: len(given) - len(words)]
        if before[-2:-1] != ["--"]:  # else all that follows is the script's
            ctx.params["arguments"] = self._script_words(ctx, before, words)
        return left

    def _script_words(self, ctx: Any, before: list[str], words: list[str]) -> list[str]:
        """Return the script's words, without the -- among them.

        Raises:
            ArgumentError: an option of this command stands among them, and no -- before it.
        """
        end = words.index("--") if "--" in words else len(words)
        known: dict[str, Any] = {
            name: option for option in self.get_params(ctx) for name in option.opts if name.startswith("-")
        }
        ours: list[str] = []
        theirs: list[str] = []
        rest = words[:end]
        while rest:
            word = rest.pop(0)
            option = known.get(word.partition("=")[0])
            (theirs if option is None else ours).append(word)
            if option is not None and not option.is_flag and "=" not in word and rest:
                ours.append(rest.pop(0))
        if ours:
            right = shlex.join([*before[:-1], *ours, before[-1], *theirs, *words[end:]])
            as_theirs = shlex.join([*before, "--", *words[:end], *words[end + 1 :]])
            raise ArgumentError(
                f"{ours[0].partition('=')[0]} stands after the script, where words are the script's own. Options of "
                f"the job stand before it: {ctx.command_path} {right}. If it is the script's: {ctx.command_path} "
                f"{as_theirs}"
            )
        return [*words[:end], *words[end + 1 :]]


@app.command("slurm", cls=_OfScript, context_settings=WORDS)
def slurm(
    script: Script,
    arguments: Arguments = None,
    nodes: Nodes = 1,
    processes_per_node: Processes = None,
    name: Annotated[str, typer.Option(help="Of the job, and of its log.")] = "exogym",
    time: Annotated[str | None, typer.Option(metavar="T", help="Limit, as 12:00:00 or 1-00:00:00.")] = None,
    partition: Annotated[str | None, typer.Option(help="Of the cluster.")] = None,
    account: Annotated[str | None, typer.Option(help="Who pays.")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    cpus: Annotated[int | None, typer.Option(metavar="N", help="Processors on each machine.")] = None,
    gpus: Annotated[int | None, typer.Option(metavar="N", help="GPUs on each machine.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="M", help="Of each machine, as 64G.")] = None,
    before: Annotated[int, typer.Option(metavar="SECONDS", help="Save so long before the limit.")] = 120,
    port: Annotated[int | None, typer.Option(metavar="PORT", help="Where they meet. [by the job's number]")] = None,
    restarts: Annotated[int, typer.Option(metavar="N", help="Starts at most that the job asks for itself.")] = 100,
    python: Annotated[str, typer.Option(metavar="PATH", help="The interpreter there.")] = sys.executable,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="The script's current folder there.")] = Path("."),
    out: Annotated[Path, typer.Option(metavar="FILE", help="For the job script.")] = Path("job.sh"),
    submit_it: Annotated[bool, typer.Option("--submit", help="Submit it, once SLURM finds it right.")] = False,
    debug: Debug = False,
) -> None:
    """Write the script of a job that SLURM can preempt, and submit it with --submit.

    The script that it runs calls fit(save_dir=..., resume=True). All machines see the folder, Python and save_dir.
    """
    job = SlurmJob(
        script, tuple(arguments or ()), nodes=nodes, processes_per_node=processes_per_node, name=name, time=time,
        partition=partition, account=account, qos=qos, cpus=cpus, gpus=gpus, memory=memory, before_s=before, port=port,
        restarts=restarts,
        python=python, folder=os.path.abspath(folder),
    )  # fmt: skip
    _write(out, job_script(job))
    if submit_it:
        number = submit(out, job)
        print(number)
        notice(f"submitted; exogym cluster status {number}, logs {number}, cancel {number}")
    else:
        notice(f"written: {out}; sbatch {out} submits it")


@app.command("kubernetes", cls=_OfScript, context_settings=WORDS)
def kubernetes(
    script: Script,
    arguments: Arguments = None,
    image: Annotated[str, typer.Option(help="As the cluster pulls it.")] = "exogym:latest",
    nodes: Nodes = 1,
    processes_per_node: Processes = None,
    name: Annotated[str, typer.Option(help="Of the run.")] = "exogym",
    namespace: Annotated[str, typer.Option(help="Where it is made.")] = "default",
    cpus: Annotated[str, typer.Option(metavar="Q", help="Of a pod, as 2 or 500m.")] = "2",
    memory: Annotated[str, typer.Option(metavar="Q", help="Of a pod, as 4Gi.")] = "4Gi",
    gpus: Annotated[int, typer.Option(metavar="N", help="Of a pod.")] = 0,
    claim: Annotated[str, typer.Option(help="PersistentVolumeClaim for checkpoints.")] = "exogym-checkpoints",
    mount: Annotated[str, typer.Option(metavar="DIR", help="Where it is in the pods.")] = "/checkpoints",
    grace: Annotated[int, typer.Option(metavar="SECONDS", help="To save in, when a pod is to end.")] = 120,
    restarts: Annotated[int, typer.Option(metavar="N", help="Failures of the run; preemptions do not count.")] = 10,
    kind: Annotated[str, typer.Option(help="job, or pytorchjob where the training operator is.")] = "job",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for run.yaml and Dockerfile.")] = Path("kubernetes"),
    debug: Debug = False,
) -> None:
    """Write the manifests of a run whose pods may be preempted, and a Dockerfile for its image.

    The script that it runs calls fit(save_dir=MOUNT, resume=True).
    """
    pods = Pods(
        script, tuple(arguments or ()), image=image, nodes=nodes, processes_per_node=processes_per_node, name=name,
        namespace=namespace, cpus=cpus, memory=memory, gpus=gpus, claim=claim, mount=mount, grace_s=grace,
        restarts=restarts, kind=kind,
    )  # fmt: skip
    objects = manifests(pods)
    _write(out / "run.yaml", document(objects))
    _write(out / "Dockerfile", dockerfile())
    notice(f"written: {out}/run.yaml ({', '.join(one['kind'] for one in objects)}) and {out}/Dockerfile")


@app.command("status")
def status(job: JobNumber, debug: Debug = False) -> None:
    """Say what SLURM says of a job."""
    for name, value in status_of(job).items():
        print(f"{name.replace('_', ' ')}: {plain(value)}")


@app.command("logs")
def logs(
    job: JobNumber,
    lines: Annotated[int, typer.Option(metavar="N", min=1, help="The last so many.")] = 100,
    debug: Debug = False,
) -> None:
    """Print what a job of SLURM's has written last."""
    with log_of(job).open(encoding="utf-8", errors="replace") as file:
        for line in deque(file, maxlen=lines):
            print(plain(line.rstrip("\n").expandtabs()))


@app.command("cancel")
def end(job: JobNumber, debug: Debug = False) -> None:
    """End a job of SLURM's; its processes save first, where the script has a save_dir."""
    cancel(job)
    notice(f"job {job} is cancelled")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"{str(path)!r} cannot be written: {error.strerror or error}; give another --out") from None
