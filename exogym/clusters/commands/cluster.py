"""`exogym cluster`: job scripts for SLURM, and manifests for Kubernetes."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from exogym.cli.values import Debug
from exogym.clusters import Pods, SlurmJob, dockerfile, job_script, manifests
from exogym.clusters.kubernetes import document
from exogym.errors import ArgumentError
from exogym.progress import notice

app = typer.Typer(help="Write job scripts for SLURM and manifests for Kubernetes.")
WORDS = {"allow_interspersed_args": False}  # words after the script belong to the script
Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="Path of the Python script.")]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[ARGUMENTS]...",
        help="Arguments of the script. Put -- before them if they look like options of the job.",
    ),
]
Nodes = Annotated[int, typer.Option(metavar="N", help="Number of machines.")]
Processes = Annotated[int | None, typer.Option(metavar="P", help="Processes per machine. [default: one per GPU, or 1]")]


class _OfScript(typer.core.TyperCommand):
    """A command with a script and the script's arguments. It refuses its own options after the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        left: list[str] = super().parse_args(ctx, args)
        words = list(ctx.params.get("arguments") or ())
        before = given[: len(given) - len(words)]
        if before[-2:-1] != ["--"]:  # after --, all words are the script's
            end = words.index("--") if "--" in words else len(words)
            theirs = [*words[:end], *words[end + 1 :]]
            known = {name for option in self.get_params(ctx) for name in option.opts if name.startswith("-")}
            if ours := [name for name in (word.partition("=")[0] for word in words[:end]) if name in known]:
                as_theirs = shlex.join([*before, "--", *theirs])
                raise ArgumentError(
                    f"{ours[0]} comes after the script: put the job's options before the script; if {ours[0]} is "
                    f"an option of the script, write -- first: {ctx.command_path} {as_theirs}"
                )
            ctx.params["arguments"] = theirs
        return left


@app.command("slurm", cls=_OfScript, context_settings=WORDS)
def slurm(
    script: Script,
    arguments: Arguments = None,
    nodes: Nodes = 1,
    processes_per_node: Processes = None,
    name: Annotated[str, typer.Option(help="Name of the job and its log.")] = "exogym",
    time: Annotated[
        str | None, typer.Option(metavar="T", help="Time limit, such as 12:00:00 or 1-00:00:00 (days-hours).")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Partition of the cluster to submit to.")] = None,
    cpus: Annotated[int | None, typer.Option(metavar="N", help="CPU cores per machine.")] = None,
    gpus: Annotated[int | None, typer.Option(metavar="N", help="GPUs per machine.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="M", help="Memory per machine, such as 64G.")] = None,
    python: Annotated[str, typer.Option(metavar="PATH", help="Path of Python on the machines.")] = sys.executable,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Folder in which the script runs.")] = Path("."),
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to which the job script is written.")] = Path(
        "job.sh"
    ),
    debug: Debug = False,
) -> None:
    """Write a job script for SLURM.

    SLURM may preempt the job, so your script must call fit(save_dir=..., resume=True). All machines must share the
    folder, Python and save_dir.
    """
    job = SlurmJob(
        script, tuple(arguments or ()), nodes=nodes, processes_per_node=processes_per_node, name=name, time=time,
        partition=partition, cpus=cpus, gpus=gpus, memory=memory, python=python, folder=os.path.abspath(folder),
    )  # fmt: skip
    _write(out, job_script(job))
    notice(f"written: {out}; submit it with sbatch {out}")


@app.command("kubernetes", cls=_OfScript, context_settings=WORDS)
def kubernetes(
    script: Script,
    arguments: Arguments = None,
    image: Annotated[str, typer.Option(help="Container image that the cluster pulls.")] = "exogym:latest",
    nodes: Nodes = 1,
    processes_per_node: Processes = None,
    name: Annotated[str, typer.Option(help="Name of the run.")] = "exogym",
    cpus: Annotated[str, typer.Option(metavar="Q", help="CPU cores per pod, such as 2 or 500m.")] = "2",
    memory: Annotated[str, typer.Option(metavar="Q", help="Memory per pod, such as 4Gi.")] = "4Gi",
    gpus: Annotated[int, typer.Option(metavar="N", help="GPUs per pod.")] = 0,
    claim: Annotated[
        str, typer.Option(help="PersistentVolumeClaim that stores the checkpoints.")
    ] = "exogym-checkpoints",
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder to which run.yaml and Dockerfile are written.")
    ] = Path("kubernetes"),
    debug: Debug = False,
) -> None:
    """Write manifests for Kubernetes and a Dockerfile.

    Kubernetes may preempt the pods, so your script must call fit(save_dir='/checkpoints', resume=True).
    """
    pods = Pods(
        script, tuple(arguments or ()), image=image, nodes=nodes, processes_per_node=processes_per_node, name=name,
        cpus=cpus, memory=memory, gpus=gpus, claim=claim,
    )  # fmt: skip
    objects = manifests(pods)
    _write(out / "run.yaml", document(objects))
    _write(out / "Dockerfile", dockerfile())
    notice(f"written: {out}/run.yaml ({', '.join(one['kind'] for one in objects)}) and {out}/Dockerfile")


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArgumentError(
            f"{str(path)!r} cannot be written: {error.strerror or error}; choose another --out"
        ) from None
