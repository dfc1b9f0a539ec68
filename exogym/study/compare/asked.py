"""A comparison's options; sweeps accept some of them as well. A run's options are named as in `fit`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from exogym.errors import ArgumentError
from exogym.options import FitOptions, RunOptions, written_as
from exogym.study.compare.summary import SINGLE

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from exogym.data import Partitioner
    from exogym.network import Network
    from exogym.strategy import Strategy
    from exogym.study.cells import Standing
    from exogym.study.tasks import Task

DEFAULT_STRATEGIES = (SINGLE, "ddp", "diloco", "sparta", "fedavg", "demo")  # the default of `compare`


FLAGS = ("reduction", "overlap", "hang_s", "max_restarts", "client_state_memory")  # commands' options of a `Placement`
# Options, and their types, that text can express and that go to each run.
PASSED_AS_TEXT = {
    name: kind for name in (*(f.name for f in fields(RunOptions)), *FLAGS) if (kind := written_as(name)) is not None
}
OF_A_STEP = ("gradient_accumulation", "minibatch_size", "max_memory_usage", "precision", "dataloader_kwargs")
# These don't change a result: a comparison or sweep may resume with other values.
OF_NO_RESULT = ("log_interval", "max_restarts", "hang_s", "client_state_memory", "keep_checkpoints", "val_batch_size")
IN_A_FOLDER = ("max_restarts", "client_state_memory")  # these need a folder
_SAVED = "pass out: each run has a folder there and is saved once a minute; resume=True continues"
_HERE = "the nodes of a run are on this machine; sweep(engine='ray') has its runs on a Ray cluster"
_ONE_CPU = "a run on Ray, sweep(engine='ray'), has one processor"
NOT_TAKEN = {
    "num_epochs": "all runs take the same number of steps: pass max_steps",
    "seed": "pass seeds, a number or a list",
    "logger": "pass out: each run's records are in its folder there, and exogym.runs reads them",
    "callbacks": "one object would see all runs: pass metrics, or train with LocalTrainer.fit",
    **dict.fromkeys(("save_dir", "run_dir", "checkpoint_interval", "keep_checkpoints"), _SAVED),
    "timeline": "train with fit(timeline=True, run_dir=...): exogym ui draws what the nodes did",
    "cpus_per_process": _ONE_CPU,
}


@dataclass(frozen=True)
class StudyOptions(RunOptions):
    """Options that comparisons and sweeps share, in addition to the options of each run (`RunOptions`).

    Args:
        problem: A `Task`; a task's name ("digits"); your own "module:function" (see `load_task`); or a tuple
            (make_model, train, val), where `make_model()` returns a model whose weights are drawn from torch's
            generator (which ExoGym seeds), and `train` and `val` are data sets.
        data: File or folder with the data of a named task.
        num_nodes, max_steps, batch_size, lr: Number of nodes, steps per node, examples per node and step, and inner
            learning rate. The defaults are the task's values, or 4, 300, 32 and 0.001 without a task.
        seeds: Number of seeds (3 means the seeds 0, 1 and 2), or a sequence of seeds. A seed determines weights,
            shards, order and all other random choices.
        partitioner: How to divide the data: text or a `Partitioner`. The default is the task's partitioner, or "iid".
            With an iterable, omit it: example k goes to node k mod N.
        val_size: Evaluate on at most this many validation examples (by default 500), spread evenly over the set, or the
            first ones of an iterable.
        val_interval: Steps between evaluations. By default, each run evaluates 10 to 30 times.
        device: As in `LocalTrainer.fit`.
        network: Predict the time on this network: a `Network`, or text such as "wifi" or "100Mbps,20ms".
        step_seconds: Seconds of a node's step, for the predicted time: a number, text such as "80ms", a value per node,
            or a `StepTime`. By default, or with "measured", `measured_step_s` measures a step once, for all strategies.
        loss_fn, metrics: As in `LocalTrainer`.
    """

    not_taken: ClassVar = NOT_TAKEN

    problem: Task | str | tuple[Callable[[], nn.Module], Any, Any]
    _: KW_ONLY
    data: str | os.PathLike[str] | None = None
    num_nodes: int | None = None
    max_steps: int | None = None
    batch_size: int | None = None
    seeds: int | Sequence[int] = 3
    lr: float | None = None
    partitioner: Partitioner | str | None = None
    val_size: int | None = None
    val_interval: int | None = None
    device: str | torch.device = FitOptions.device
    network: Network | str | None = None
    step_seconds: Any = None
    out: str | os.PathLike[str] | None = None
    resume: bool = FitOptions.resume
    loss_fn: Callable[..., Tensor] | None = None
    metrics: dict[str, Callable[[Tensor, Tensor], Any]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, why in (("engine", _HERE), ("cpus_per_process", _ONE_CPU)):
            if name in self.changed():
                raise ArgumentError(f"placement={self.placement}: {why}; leave {name} out")


@dataclass(frozen=True)
class ComparisonOptions(StudyOptions):
    """Options of `compare`.

    Args:
        strategies: Strategies to compare: texts for `parse_strategy` or "single", in a sequence or separated by commas,
            or a dict from your own labels to such texts or `Strategy` objects.
        processes: As in `LocalTrainer.fit`. The run `single` always has one process, no `faults` and no `balance`.
        speeds: Each node's relative speed, above 0. At speed 0.5, a step takes twice step_seconds. The run `single` has
            node 0's speed.
        target_loss: The validation loss to reach. The rows show the bytes that a node sends until then and, if you pass
            a network, the seconds. The default is DDP's final validation loss / 0.95 (95 % of DDP's quality) or, if DDP
            is not compared, the highest final loss of any run.
        out: Folder in which to create `<task>-<time>` with run.json, summary.csv, metrics.csv (each evaluation),
            loss_vs_steps and loss_vs_bytes (.png, .svg), loss_vs_time if you pass a `network`, and a folder for each
            run. By default, no files are written.
        resume: Resume an interrupted comparison with the same arguments, where `out` is the comparison's own folder.
            The result is the same as without the interruption. An unfinished run continues from its checkpoint, if
            there is one; built-in strategies write one every minute and at Ctrl-C.
        progress: Show progress and the time left. By default, only in a terminal or a notebook.
        watch: Function that receives a `Standing` after each evaluation.
    """

    not_taken: ClassVar = NOT_TAKEN | {
        "strategy": "give strategies",
        "engine": _HERE,
    }

    strategies: str | Sequence[str] | Mapping[str, str | Strategy] = DEFAULT_STRATEGIES
    _: KW_ONLY
    processes: int = FitOptions.processes
    speeds: Sequence[float] | None = None
    target_loss: float | None = None
    progress: bool | None = FitOptions.progress
    watch: Callable[[Standing], object] | None = None
