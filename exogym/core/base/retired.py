"""Retired names: arguments, options and imports of earlier versions, and what to use instead."""

from __future__ import annotations

import importlib.abc
import re
import sys
from typing import Any

_PILOT = "it cost more than it saved; exogym compare --network trains the candidates"
_MONEY = "multiply the hours and bytes of the table by your prices"
_LIMITS = "compare the table's times and bytes with your limits"
_FAULTS = "Faults(...) simulates nodes that go away"
_SIMULATE = "LocalTrainer.fit(network=..., step_seconds=...) predicts the time, in simulation"
_STEP = "give the time of the whole node's step"
_PLACED = ("reduction", "overlap", "hang_s", "max_restarts", "client_state_memory")
_LAUNCHED = "give nnodes= and node_rank=: the launches join, and their ranks count on"
_ASKED = "a server asks client_fraction of the clients, and Faults(trace=...) says which of them are available"

# "where.name" or, if many functions accepted it, "name" -> what to do instead. Options of commands have the names of
# their arguments: --target-loss is target_loss.
RETIRED: dict[str, str] = {
    **dict.fromkeys(("advise.pilot", "advise.Piloted", "advise.prior", "wizard.pilot"), _PILOT),
    **dict.fromkeys(("advise.price",), _MONEY),
    **dict.fromkeys(("advise.within",), _LIMITS),
    **dict.fromkeys(("advise.simulate", "advise.target_loss"), "exogym compare --network trains on a virtual clock"),
    **dict.fromkeys(("texts.split", "language_task.split"), "name the parts: the folders train and test"),
    "advise.judge": "a clone of the project has python -m research judge",
    **dict.fromkeys(("advise.run", "advise.Run"), "give advise(steps=..., skew=...)"),
    **dict.fromkeys(("advise.spot", "advise.Spot", "advise.failures", "advise.Failures"), _FAULTS),
    **dict.fromkeys(("advise.accelerators", "advise.mtbf", "advise.restart", "advise.checkpoint"), _FAULTS),
    "advise.target_utilisation": "the table has the share of time in which nodes compute",
    **dict.fromkeys(("advise.node", "advise.layers", "advise.activation_bytes"), _STEP),
    **dict.fromkeys(("required_bandwidth", "compute_utilisation"), "a clone has it in research/layerwise.py"),
    "advise.device_utilisation": "in Python, give advise(step_seconds=Work(...)) with it",
    **dict.fromkeys(("advise.bytes_per_element", "advise.algorithm"), "give it to advise(...) in Python"),
    **dict.fromkeys(("compute.compiled", "compute.graphs", "compute.auto"), "use 'loop', or 'vmap' on an accelerator"),
    "NodeMesh.schedule": "pipelines take 1F1B, which needs less memory than GPipe and the same time",
    **dict.fromkeys(("communicator.Inside", "Wire.inside"), "it is called Columns, of a wire .columns"),
    "Clock.algorithms": "an event names its algorithm; Network.cost and Network.cheapest compare them",
    "Clock.outages": "Faults(absent=...) makes nodes absent in a run",
    **dict.fromkeys(
        ("clock.draw_timeline", "clock.save_trace"), "exogym ui draws a run's timeline; save_spans writes it as JSON"
    ),
    "faults.Diurnal": "Devices(...) and Trace(FILE, repeat_s=86400) say when clients are available",
    "callbacks.WeightAverage": "docs/recipes.md shows such a callback",
    "compare.timeline": "train with fit(timeline=True, run_dir=...): exogym ui draws what the nodes did",
    "compare.log_x": "compare(...).plot(x, log=True) draws this axis",
    **dict.fromkeys(
        ("Network.trace", "groups.trace", "matrix.trace"),
        "links stay the same during a run; predict it on the slowest and on the fastest network",
    ),
    "NodeMesh.network": "give fit(step_seconds=) the time of the node's step; Network.pipeline_s has a pipeline's",
    **dict.fromkeys(("over_sampling", "deadline_s", "min_reports"), _ASKED),
    "robust": "in Python, wrap the strategy: exogym.contrib.Robust(strategy, 'median')",
    "secure_aggregation": "in Python, wrap the strategy: exogym.contrib.Secure(strategy)",
    "tuner": "in Python, wrap the strategy: exogym.contrib.ByteBudget(strategy, total_bytes)",
    "transport": "ddp, diloco, fedavg, fedprox, fedopt and scaffold take averaging=Averaging(transport=...)",
    "strategy.NormCap": "exogym.contrib has NormCap, for Robust(strategy, NormCap(...))",
    **dict.fromkeys(
        [f"communicator.{name}" for name in ("Rule", "RULES", "Median", "TrimmedMean", "Krum", "rule_of")],
        "exogym.contrib.rules has it",
    ),
    "communicator.SecureAggregation": "exogym.contrib.secure_sums has it",
    **{
        f"{function}.{name}": f"write placement=Placement({name}=...)"
        for function, names in (
            ("fit", (*_PLACED, "engine", "cpus_per_process", "keep_checkpoints")),
            ("compare", _PLACED),
            ("sweep", _PLACED),
        )
        for name in names
    },
    **dict.fromkeys(
        [
            *(f"robust.{name}" for name in ("bulyan", "geometric_median", "centered_clip")),
            *(f"communicator.{name}" for name in ("Bulyan", "GeometricMedian", "CenteredClip")),
            *(f"rules.{name}" for name in ("Bulyan", "GeometricMedian", "CenteredClip")),
        ],
        "use 'krum', 'median' or 'trimmed_mean'",
    ),
    "compress.mean_in_shards": "the strategy qreduce averages in this way",
    "logger.TrackioLogger": "give a function of a record, logger=lambda record: trackio.log(record)",
    "logger.OpenTelemetryLogger": "give a function of a record that sets your own gauges",
    "processes.auto": "give a number, such as processes=4 on four cores",
    "shard_sampling": "each node draws from its own share of the data",
    "activation": "the momentum acts once in a period",
    "delay_compensation": "rule='discount' weakens old updates",
    **dict.fromkeys(("SPARTAStrategy.rounding", "SPARTADiLoCoStrategy.rounding"), "give more quantization_bits"),
    "SlowMoStrategy.buffers": "inner optimizers keep their states; desloc averages moments",
    "GossipStrategy.order": "nodes mix after the inner step",
    "AsyncDiLoCoStrategy.lookahead": "heloco takes it",
    "outer_restarts": "give outer_momentum=0 or outer_momentum_scheduler=, so that old rounds weigh less",
    **dict.fromkeys(
        ("DeMoStrategy.compression_method", "DeMoStrategy.compression_rate"), "SPARTA averages at random places"
    ),
    **dict.fromkeys(("clusters.submit", "slurm.submit"), "run SLURM's sbatch job.sh"),
    **dict.fromkeys(
        [f"slurm.{name}" for name in ("account", "qos", "before", "port", "restarts")],
        "change the line in job.sh, or give sbatch the option",
    ),
    **dict.fromkeys([f"kubernetes.{name}" for name in ("grace", "restarts", "mount")], "change the line in run.yaml"),
    "kubernetes.namespace": "kubectl apply --namespace NAME",
    **dict.fromkeys(("WhisperModelWrapper.task", "load_pretrained.task"), "the model transcribes: leave it out"),
    "speech.most_labels": "clips with over 448 labels, Whisper's limit, are left out",
    **dict.fromkeys(("clusters.status_of", "cluster.status"), "use SLURM's squeue --job NUMBER"),
    **dict.fromkeys(("clusters.log_of", "cluster.logs"), "read the job's log file, exogym-NUMBER.log"),
    **dict.fromkeys(("clusters.cancel", "cluster.cancel"), "use SLURM's scancel NUMBER"),
    "kubernetes.kind": "the manifest has an indexed Job, which needs no operator",
    **dict.fromkeys(("whisper_task.general", "whisper_task.replay"), "add running speech to the clips in data="),
    **{
        f"{taker}.{name}": _SIMULATE
        for taker in ("attach", "Adapter", "ExoGymCallback")
        for name in ("network", "step_seconds")
    },
    "distributed-train.dry_run": "exogym doctor checks the hosts and starts nothing",
    "launch.dry_run": "SSHLauncher.check() checks the hosts and starts nothing",
    "SSHLauncher.start_timeout_s": "hosts always have 300 s to connect to each other",
    **dict.fromkeys(
        ("SSHLauncher.answer_s", "check_hosts.answer_s", "doctor.timeout"), "a host always has 60 s for each answer"
    ),
    **dict.fromkeys(("launch_distributed_training.first_rank", "LaunchConfig.first_rank"), _LAUNCHED),
    "init_process_group.store": "give init_method=; torch's own init_process_group takes a store",
    "distributed-train.network": "exogym doctor --measure and exogym advise --network predict the time of a step",
    "communicator.FACTORS": "sent_factor(kind, algorithm, members)",
    "capabilities.HasOuterModel": "every communication module may define consensus(fleet)",
    **dict.fromkeys(("capabilities.Tunable", "module.tune"), "a ByteBudget sets H"),
    "module.inner_copies": "keep what copies the inner optimizer's state in row_state",
    "module.only_means": "set right_in_mean = True",
    "module.skipped": "correct() is called for each step that a node takes",
    **dict.fromkeys(("exogym.reproduce", "exogym.benchmark"), "a clone of the project has python -m research"),
    # Of EXO Gym, the project before this one (docs/coming_from_gym.md).
    **dict.fromkeys(("optim_spec", "inner_optim_spec"), "write inner_optim="),
    "DeMoStrategy.optim_spec": "give lr= and weight_decay= to DeMoStrategy itself",
    "outer_optim_spec": "write outer_optim=",
    "SPARTAStrategy.p": "write p_sparta=",
    "async_sparta_delay": "leave it out: nodes average in the step itself",
    "lr_scheduler_kwargs": "write warmup_steps=100, with lr_scheduler='cosine' if it had cosine_anneal",
    **dict.fromkeys(
        ("fit.wandb_project", "fit.run_name"),
        "write logger=WandbLogger(project=..., name=...), or logger=CSVLogger(PATH) (exogym.logger)",
    ),
    "fit.correlation_interval": "leave it out: each record has the nodes' consensus_distance",
    "fit.log_x_axis": "leave it out: records have steps, examples and bytes; choose the axis where you plot",
    "fit.kwargs": "leave it out, or give your logger its own fields",
    **dict.fromkeys(("start_port", "Trainer.start_port"), "leave it out: nodes need no ports"),
    **dict.fromkeys(("Trainer.device", "Trainer.devices"), "give it to fit()"),
    "strategy.SimpleReduceStrategy": "import it from exogym.strategy",
    "module._init_node": "write start(self, fleet, run), and communicate(self, fleet, step) on rows "
    "(docs/coming_from_gym.md has an example)",
}


# Modules for users that moved: their old path -> the new one. (Those of `exogym.core` are internal.)
MOVED: dict[str, str] = {
    **{f"exogym.strategy.{name}": f"exogym.contrib.{name}" for name in (
        "acco", "choco", "cocktail", "decoupled_diloco", "desloc", "dion", "ditto", "edit", "ef21", "fedasync", "fedbn",
        "feddyn", "fednova", "fedper", "fedrep", "gpa", "gradient_push", "halos", "heloco", "onebit_adam", "pier",
        "pulseloco", "qfedavg", "quantized_reduce", "slowmo", "snoo",
    )},
    **{f"exogym.study.{name}": f"research.{name}, in a clone of the project" for name in (
        "atlas", "benchmark", "reproduce",
    )},
    "exogym.strategy.tuning": "exogym.contrib.byte_budget",
    "exogym.strategy.contractions": "exogym.contrib.contractions",
    "exogym.machines.discovery": "exogym.home.discovery",
    "exogym.machines.wizard": "exogym.home.wizard",
    "exogym.machines.cluster": "exogym.clusters",
    "exogym.data.speech": "exogym.home.speech",
    "exogym.attached.shards": "exogym.mesh.attached",
    # Of EXO Gym, the project before this one.
    "exogym.aux": "exogym: fit(device='auto') finds the device",
    "exogym.strategy.communicate_optimize_strategy": "exogym.strategy",
    **{f"exogym.strategy.{name}": "exogym.strategy" for name in ("demo_impl", "sparta_diloco")},
    "exogym.train_node": "exogym.trainer",
    "exogym.common": "exogym",
    "exogym.utils": "exogym",
    "exogym.minibatch_probe": "exogym: fit(max_memory_usage=0.8) finds the minibatch size",
}  # fmt: skip


class MovedModules(importlib.abc.MetaPathFinder):
    """The last module finder, which reports the new path of a moved module."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Find nothing.

        Raises:
            ModuleNotFoundError: the module moved; the message has its new path.
        """
        if fullname in MOVED:
            raise ModuleNotFoundError(f"{fullname} moved to {MOVED[fullname]}", name=fullname)


sys.meta_path.append(MovedModules())


def retired(name: str, where: str = "") -> str | None:
    """Return what to use instead of a name that `where` accepted, or None if the name is not retired.

    >>> retired("judge", "advise"), retired("judge", "compare")
    ('it is retired: a clone of the project has python -m research judge', None)
    """
    found = RETIRED.get(f"{where.rpartition('.')[2]}.{name}", RETIRED.get(name))
    return None if found is None else f"it is retired: {found}"


DEFAULTS = {"min_reports": 1, "buffers": "maintain"}  # defaults of retired options that are neither None, 0 nor False


def is_default(name: str, value: Any) -> bool:
    """Return whether a value is the default of a retired option of strategies.

    >>> is_default("secure_aggregation", False), is_default("over_sampling", 0.3), is_default("lr", None)
    (True, False, False)
    >>> is_default("buffers", "maintain"), is_default("buffers", "reset")
    (True, False)
    """
    is_retired = any(key.rpartition(".")[2] == name for key in RETIRED)
    return is_retired and (value == DEFAULTS[name] if name in DEFAULTS else not value)


def is_same(name: str, before: Any, now: Any) -> bool:
    """Return whether the option `name` of a saved run has its current value. Whole step times used to have no unit.

    >>> is_same("step_seconds", ["80", 0.5], ["80s", 0.5]), is_same("step_seconds", 20, "20ms"), is_same("H", 5, 5)
    (True, False, True)
    """
    if before == now or name != "step_seconds":
        return bool(before == now)
    if isinstance(before, dict) and isinstance(now, dict):  # a `StepTime`
        rest = before | {"seconds": 0} == now | {"seconds": 0}
        return rest and is_same(name, before.get("seconds"), now.get("seconds"))
    if isinstance(before, list):
        return [_with_unit(each) for each in before] == now
    return bool(_with_unit(before) == now)


def _with_unit(seconds: Any) -> Any:
    return f"{seconds}s" if isinstance(seconds, int | str) and re.fullmatch("[1-9][0-9]+", str(seconds)) else seconds
