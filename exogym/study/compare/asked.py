"""What a comparison is asked, and what it shares with a sweep: runs' options under the names of `fit`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from exogym.core.training.options import FitOptions, RunOptions, written_as
from exogym.study.compare.summary import SINGLE

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from exogym.core.record.metrics import Metric
    from exogym.data.partition import Partitioner
    from exogym.network import Network
    from exogym.strategy.strategy import Strategy
    from exogym.study.compare.session import Standing
    from exogym.study.tasks import Task

DEFAULT_STRATEGIES = (SINGLE, "ddp", "diloco", "sparta", "fedavg", "demo")  # what `compare` trains if nothing is said


# The options that are passed on to each run and can be written as text, with their types.
PASSED_AS_TEXT = {f.name: kind for f in fields(RunOptions) if (kind := written_as(f.name)) is not None}
OF_A_STEP = ("gradient_accumulation", "minibatch_size", "max_memory_usage", "precision", "dataloader_kwargs")
# These change no result: with others of them a comparison or sweep goes on.
OF_NO_RESULT = ("log_interval", "max_restarts", "hang_s", "client_state_memory")
IN_A_FOLDER = ("max_restarts", "client_state_memory")  # these need a folder
_SAVED = "give out: each run has a folder there, is saved in it once a minute, and resume=True goes on"
NOT_TAKEN = {
    "num_epochs": "all runs take as many steps: give max_steps",
    "seed": "give seeds, how many or which",
    "logger": "give out: the records of each run are in its folder there, and exogym.runs reads them",
    "progress": "give watch, a function that is told how far it is",
    "callbacks": "one object would see all runs: give metrics, or train with LocalTrainer.fit",
    **dict.fromkeys(("save_dir", "run_dir", "checkpoint_interval", "keep_checkpoints"), _SAVED),
    "cpus_per_process": "a run on Ray, sweep(engine='ray'), has one processor",
}


@dataclass(frozen=True)
class StudyOptions(RunOptions):
    """What comparisons and sweeps are asked alike: what they pass on to each run, and these.

    Args:
        problem: A `Task`; the name of one ("digits"), or "module:function" of one's own, as for `load_task`; or
            (make_model, train, val), where `make_model()` draws from torch's generator, which is seeded.
        data: Of a task that is named: file or folder of its data.
        num_nodes, max_steps, batch_size, lr: Nodes, steps of each node, examples of a node's step, inner learning rate.
            None: the task's (without one 4, 300, 32, 0.001).
        seeds: How many, from 0, or which. A seed fixes weights, shards, order and every other choice.
        partitioner: Who gets which examples, as text or `Partitioner`. None: the task's, or "iid".
        val_size: Evaluate on at most so many validation examples, evenly spread. None: 500.
        val_interval: Steps between evaluations. None: 10 to 30 evaluations a run.
        device: As `LocalTrainer.fit`.
        network: Predict the time on this network, a `Network` or text as "wifi" or "100Mbps,20ms".
        step_seconds: Seconds of a node's step there: a number, text as "80ms", one per node, or a `StepTime`.
            "measured" or None: what `measured_step_s` finds here, once, for all strategies alike.
        loss_fn, metrics: As `LocalTrainer`.
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
    metrics: dict[str, Metric] | None = None


@dataclass(frozen=True)
class ComparisonOptions(StudyOptions):
    """What `compare` is asked.

    Args:
        strategies: Texts for `parse_strategy` or "single", in a sequence or with commas between; or name to text or
            `Strategy`.
        processes: As `LocalTrainer.fit`; `single` always has one process, no `faults` and no `balance`.
        speeds: Speeds of the nodes, over 0; a node of speed 0.5 takes twice the step_seconds. `single` is node 0, with
            its speed.
        target_loss: The validation loss to reach: the bytes until then, and with a network the time, are in the rows.
            None: DDP's final validation loss / 0.95, which is 95 % of its quality; without DDP the highest final loss
            of any run.
        timeline: Also draw what each node does when in the first rounds of each strategy, and write it as traces.
        out: Folder in which to make the folder `<task>-<time>` with run.json, summary.csv, metrics.csv (each
            evaluation), loss_vs_steps.png and loss_vs_bytes.png, with a network also loss_vs_time.png, with `timeline`
            timeline.png and for each strategy a trace-<strategy>.json (for ui.perfetto.dev); and in it a folder for
            each run, written when that has ended. None writes nothing.
        resume: Go on in the folder `out` itself, where an interrupted comparison with the same arguments has left
            what it had; the result is that of one that was never interrupted. A run that was under way goes on from
            its own checkpoint, if it has one: of a built-in strategy, without a timeline, written where Ctrl-C came
            and once a minute. Else it starts again.
        watch: Called with a `Standing` after each evaluation.
    """

    not_taken: ClassVar = NOT_TAKEN | {
        "strategy": "give strategies",
        "engine": "the nodes of a comparison are on this machine; sweep(engine='ray') has its runs on a Ray cluster",
    }

    strategies: str | Sequence[str] | Mapping[str, str | Strategy] = DEFAULT_STRATEGIES
    _: KW_ONLY
    processes: int | str = FitOptions.processes
    speeds: Sequence[float] | None = None
    target_loss: float | None = None
    timeline: bool = FitOptions.timeline
    watch: Callable[[Standing], object] | None = None
