"""Retired names: arguments, options and imports of earlier versions, and what to use instead."""

from __future__ import annotations

import importlib.abc
import re
import sys
from typing import Any

_PILOT = "use exogym compare --network, which trains the candidates"
_MONEY = "multiply the hours and bytes of the table by your prices"
_LIMITS = "compare the table's times and bytes with your limits"
_FAULTS = "use Faults(...) to simulate nodes that fail"
_SIMULATE = "use LocalTrainer.fit(network=..., step_seconds=...), which predicts the time in simulation"
_STEP = "pass the time of the whole node's step"
_PLACED = ("reduction", "overlap", "hang_s", "max_restarts", "client_state_memory")
_LAUNCHED = "pass nnodes= and node_rank=, so that the launches join one group"
_ASKED = "a server samples client_fraction of the clients; set which are available with Faults(trace=...)"

# "where.name" or, if many functions accepted it, "name" -> what to do instead. Options of commands have the names of
# their arguments: --target-loss is target_loss.
RETIRED: dict[str, str] = {
    **dict.fromkeys(("advise.pilot", "advise.Piloted", "advise.prior", "wizard.pilot"), _PILOT),
    **dict.fromkeys(("advise.price",), _MONEY),
    **dict.fromkeys(("advise.within",), _LIMITS),
    **dict.fromkeys(
        ("advise.simulate", "advise.target_loss"), "use exogym compare --network, which trains on a virtual clock"
    ),
    **dict.fromkeys(("texts.split", "language_task.split"), "name the parts by folders: train, and validation or test"),
    "advise.judge": "use python -m research judge in a clone of the project",
    **dict.fromkeys(("advise.run", "advise.Run"), "pass advise(steps=..., skew=...)"),
    **dict.fromkeys(("advise.spot", "advise.Spot", "advise.failures", "advise.Failures"), _FAULTS),
    **dict.fromkeys(("advise.accelerators", "advise.mtbf", "advise.restart", "advise.checkpoint"), _FAULTS),
    "advise.target_utilisation": "the table shows the share of time that nodes compute",
    **dict.fromkeys(("advise.node", "advise.layers", "advise.activation_bytes"), _STEP),
    **dict.fromkeys(
        ("required_bandwidth", "compute_utilisation"), "use research/layerwise.py in a clone of the project"
    ),
    "advise.device_utilisation": "in Python, set it in advise(step_seconds=Work(...))",
    **dict.fromkeys(("advise.bytes_per_element", "advise.algorithm"), "pass it to advise(...) in Python"),
    **dict.fromkeys(("compute.compiled", "compute.graphs", "compute.auto"), "use 'loop', or 'vmap' on an accelerator"),
    "NodeMesh.schedule": "pipelines always use 1F1B, which takes as long as GPipe in less memory",
    **dict.fromkeys(("communicator.Inside", "Wire.inside"), "use Columns, a wire's .columns"),
    "Clock.algorithms": "read an event's algorithm; compare algorithms with Network.cost and Network.cheapest",
    "Clock.outages": "use Faults(absent=...), which makes nodes absent in a run",
    **dict.fromkeys(
        ("clock.draw_timeline", "clock.save_trace"),
        "use exogym ui, which draws a run's timeline, or save_spans, which writes it as JSON",
    ),
    "faults.Diurnal": "set when clients are available with Devices(...) or Trace(FILE, repeat_s=86400)",
    "callbacks.WeightAverage": "write such a callback, as in docs/recipes.md",
    "compare.timeline": "train with fit(timeline=True, run_dir=...), and open the run in exogym ui",
    "compare.log_x": "use compare(...).plot(x, log=True)",
    **dict.fromkeys(
        ("Network.trace", "groups.trace", "matrix.trace"),
        "links do not change during a run; predict it on the slowest and the fastest network",
    ),
    "NodeMesh.network": "pass the time of the node's step to fit(step_seconds=); Network.pipeline_s predicts it",
    **dict.fromkeys(("over_sampling", "deadline_s", "min_reports"), _ASKED),
    "robust": "in Python, wrap the strategy: exogym.contrib.Robust(strategy, 'median')",
    "secure_aggregation": "in Python, wrap the strategy: exogym.contrib.Secure(strategy)",
    "tuner": "in Python, wrap the strategy: exogym.contrib.ByteBudget(strategy, total_bytes)",
    "transport": "pass averaging=Averaging(transport=...) to ddp, diloco, fedavg, fedprox, fedopt or scaffold",
    "strategy.NormCap": "use Robust(strategy, NormCap(...)) from exogym.contrib",
    **dict.fromkeys(
        [f"communicator.{name}" for name in ("Rule", "RULES", "Median", "TrimmedMean", "Krum", "rule_of")],
        "import it from exogym.contrib.rules",
    ),
    "communicator.SecureAggregation": "import it from exogym.contrib.secure_sums",
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
    "compress.mean_in_shards": "use the strategy qreduce, which averages in this way",
    "logger.TrackioLogger": "pass a function, logger=lambda record: trackio.log(record)",
    "logger.OpenTelemetryLogger": "pass a function of a record that sets your own gauges",
    "processes.auto": "pass a number, such as processes=4 on four cores",
    "shard_sampling": "omit it: each node draws from its own share of the data",
    "activation": "omit it: the momentum acts once per period",
    "delay_compensation": "use rule='discount', which weakens old updates",
    **dict.fromkeys(("SPARTAStrategy.rounding", "SPARTADiLoCoStrategy.rounding"), "use more quantization_bits"),
    "SlowMoStrategy.buffers": "omit it: inner optimizers keep their states; desloc averages moments",
    "GossipStrategy.order": "omit it: nodes mix after the inner step",
    "AsyncDiLoCoStrategy.lookahead": "use the strategy heloco, which accepts it",
    "outer_restarts": "set outer_momentum=0 or outer_momentum_scheduler=, so that old rounds weigh less",
    **dict.fromkeys(
        ("DeMoStrategy.compression_method", "DeMoStrategy.compression_rate"),
        "use SPARTA, which averages randomly chosen parameters",
    ),
    **dict.fromkeys(("clusters.submit", "slurm.submit"), "run SLURM's sbatch job.sh"),
    **dict.fromkeys(
        [f"slurm.{name}" for name in ("account", "qos", "before", "port", "restarts")],
        "change the line in job.sh, or pass the option to sbatch",
    ),
    **dict.fromkeys([f"kubernetes.{name}" for name in ("grace", "restarts", "mount")], "change the line in run.yaml"),
    "kubernetes.namespace": "use kubectl apply --namespace NAME",
    **dict.fromkeys(("WhisperModelWrapper.task", "load_pretrained.task"), "omit it: the model always transcribes"),
    "speech.most_labels": "omit it: clips with over 448 labels, Whisper's limit, are skipped",
    **dict.fromkeys(("clusters.status_of", "cluster.status"), "use SLURM's squeue --job NUMBER"),
    **dict.fromkeys(("clusters.log_of", "cluster.logs"), "read the job's log file, exogym-NUMBER.log"),
    **dict.fromkeys(("clusters.cancel", "cluster.cancel"), "use SLURM's scancel NUMBER"),
    "kubernetes.kind": "omit it: the manifest has an indexed Job, which needs no operator",
    **dict.fromkeys(("whisper_task.general", "whisper_task.replay"), "add running speech to the clips in data="),
    **{
        f"{taker}.{name}": _SIMULATE
        for taker in ("attach", "Adapter", "ExoGymCallback")
        for name in ("network", "step_seconds")
    },
    "distributed-train.dry_run": "use exogym doctor, which checks the hosts and starts nothing",
    "launch.dry_run": "use SSHLauncher.check(), which checks the hosts and starts nothing",
    "SSHLauncher.start_timeout_s": "omit it: hosts always have 300 s to connect to each other",
    **dict.fromkeys(
        ("SSHLauncher.answer_s", "check_hosts.answer_s", "doctor.timeout"),
        "omit it: a host always has 60 s for each answer",
    ),
    **dict.fromkeys(("launch_distributed_training.first_rank", "LaunchConfig.first_rank"), _LAUNCHED),
    "init_process_group.store": "pass init_method=, or call torch's own init_process_group, which accepts a store",
    "distributed-train.network": "predict a step's time with exogym doctor --measure and exogym advise --network",
    "communicator.FACTORS": "use sent_factor(kind, algorithm, members)",
    "capabilities.HasOuterModel": "define consensus(fleet) in your communication module",
    **dict.fromkeys(("capabilities.Tunable", "module.tune"), "use a ByteBudget, which sets H"),
    "module.inner_copies": "store copies of the inner optimizer's state in row_state",
    "module.only_means": "set right_in_mean = True",
    "module.skipped": "count in correct(), which is called for each step that a node takes",
    **dict.fromkeys(("exogym.reproduce", "exogym.benchmark"), "use python -m research in a clone of the project"),
    # Of EXO Gym, the project before this one (docs/coming_from_gym.md).
    **dict.fromkeys(("optim_spec", "inner_optim_spec"), "write inner_optim="),
    "DeMoStrategy.optim_spec": "pass lr= and weight_decay= to DeMoStrategy itself",
    "outer_optim_spec": "write outer_optim=",
    "SPARTAStrategy.p": "write p_sparta=",
    "async_sparta_delay": "omit it: nodes average in the step itself",
    "lr_scheduler_kwargs": "write warmup_steps=100, with lr_scheduler='cosine' if it had cosine_anneal",
    **dict.fromkeys(
        ("fit.wandb_project", "fit.run_name"),
        "write logger=WandbLogger(project=..., name=...), or logger=CSVLogger(PATH) (exogym.logger)",
    ),
    "fit.correlation_interval": "omit it: each record has the nodes' consensus_distance",
    "fit.log_x_axis": "omit it: records have steps, examples and bytes, and plots choose the axis",
    "fit.kwargs": "omit it, or add fields in your own logger",
    **dict.fromkeys(("start_port", "Trainer.start_port"), "omit it: nodes need no ports"),
    **dict.fromkeys(("Trainer.device", "Trainer.devices"), "pass it to fit()"),
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
    ('it is retired: use python -m research judge in a clone of the project', None)
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
