"""The arguments of a run as one value: checked once, described as JSON."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from exogym.balance import Balance
from exogym.core.combinations import check
from exogym.core.compute.finite import POLICIES
from exogym.core.compute.ways import WAYS
from exogym.core.compute.worker import check_precision
from exogym.core.engine import Ray
from exogym.core.mesh import NodeMesh
from exogym.core.record.run_folder import RESUME
from exogym.data.partition import Partitioner
from exogym.errors import ArgumentError, check_choice, check_count
from exogym.faults import Faults
from exogym.network import Network
from exogym.strategy.strategy import Strategy

COMPUTE = (*WAYS, "auto")
COUNTS = (
    *("num_nodes", "batch_size", "gradient_accumulation", "log_interval", "keep_checkpoints"),
    "cpus_per_process",
)
OPTIONAL_COUNTS = ("num_epochs", "max_steps", "minibatch_size", "val_interval", "val_size", "checkpoint_interval")
DECISIVE = (
    *("num_nodes", "batch_size", "gradient_accumulation", "minibatch_size", "max_memory_usage", "shuffle", "precision"),
    *("seed", "compute", "reduction", "val_size"),
)  # options that a resumed run must share with its checkpoint


@dataclass(frozen=True)
class FitOptions:
    """What `fit` was asked; the fields are its arguments, explained there."""

    strategy: Strategy
    num_nodes: int = 1
    node: NodeMesh | Sequence[NodeMesh] | None = None
    num_epochs: int | None = None
    max_steps: int | None = None
    batch_size: int = 32
    gradient_accumulation: int = 1
    minibatch_size: int | None = None
    max_memory_usage: float | None = None
    shuffle: bool = True
    partitioner: Partitioner | str | None = None
    val_size: int | None = None
    val_interval: int | None = None
    precision: str = "fp32"
    autocast: bool = False
    seed: int = 0
    device: str | torch.device = "auto"
    devices: Sequence[int] | None = None
    compute: str = "loop"
    processes: int | str = 1
    engine: Any = None
    cpus_per_process: int = 1
    reduction: str = "tree"
    balance: Any = None
    faults: Faults | None = None
    on_nonfinite: str = "raise"
    network: Any = None
    step_seconds: Any = None
    timeline: bool = False
    final_sync: bool = True
    logger: Any = None
    log_interval: int = 1
    progress: bool | None = None
    callbacks: Sequence[Callable[..., Any]] = ()
    save_dir: str | Path | None = None
    checkpoint_interval: int | None = None
    keep_checkpoints: int = 2
    resume: bool = False
    max_restarts: int = 0
    hang_s: float | None = 600.0
    run_dir: str | Path | None = None
    client_state_memory: float | None = None
    dataloader_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be known to work.

        Raises:
            ArgumentError: a value is of the wrong kind, out of range, or contradicts another.
        """
        if not isinstance(self.strategy, Strategy):
            raise ArgumentError(
                f"strategy={self.strategy!r} is not a Strategy: give an instance such as "
                "exogym.strategy.DiLoCoStrategy(H=100)"
                + (
                    ", or exogym.strategy.registry.parse_strategy of this text"
                    if isinstance(self.strategy, str)
                    else ""
                )
            )
        for name in COUNTS:
            check_count(name, getattr(self, name))
        for name in OPTIONAL_COUNTS:
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        check_choice("compute", self.compute, COMPUTE)
        check_choice("reduction", self.reduction, ("tree", "native"))
        check_choice("on_nonfinite", self.on_nonfinite, POLICIES)
        if self.processes != "auto":
            check_count("processes", self.processes)
        if isinstance(self.engine, str):
            check_choice("engine", self.engine, ("ray",))
        elif not isinstance(self.engine, Ray | None):
            raise ArgumentError(f"engine={self.engine!r} must be 'ray', or an exogym.engine.Ray with its options")
        if self.engine is None and self.cpus_per_process != 1:
            raise ArgumentError("cpus_per_process is for processes that an engine starts elsewhere: give engine='ray'")
        if isinstance(self.max_restarts, bool) or not isinstance(self.max_restarts, int) or self.max_restarts < 0:
            raise ArgumentError(f"max_restarts={self.max_restarts!r} must be a whole number, 0 or more")
        if self.hang_s is not None and not (is_number(self.hang_s) and 0 < self.hang_s < math.inf):
            raise ArgumentError(f"hang_s={self.hang_s!r} must be seconds, more than 0, or None to let processes hang")
        check_precision(self.precision)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ArgumentError(f"seed={self.seed!r} must be a whole number")
        if self.devices is not None:
            raise ArgumentError(
                f"devices={self.devices!r}: one process trains on one device, named by device=; for several GPUs start "
                "the script with python -m exogym.launch --nproc_per_node, which gives each process its own"
            )
        if self.autocast and self.precision not in ("fp32", "bf16"):
            raise ArgumentError(f"autocast=True means precision='bf16', but precision={self.precision!r} is given too")
        usage = self.max_memory_usage
        if usage is not None and not (is_number(usage) and 0 < usage <= 1):
            raise ArgumentError(f"max_memory_usage={usage!r} must be a fraction over 0 and at most 1")
        for name in ("checkpoint_interval", "resume", "max_restarts"):
            if getattr(self, name) and self.save_dir is None and self.run_dir is None:
                raise ArgumentError(f"{name} needs save_dir, the folder that checkpoints go to, or run_dir")
        if not isinstance(self.callbacks, Sequence):
            raise ArgumentError(f"callbacks={self.callbacks!r} must be a list of functions of the training loop")
        for name in ("save_dir", "run_dir"):
            if not isinstance(getattr(self, name), str | os.PathLike | None) or getattr(self, name) == "":
                raise ArgumentError(f"{name}={getattr(self, name)!r} must be the path of a folder")
        object.__setattr__(self, "save_dir", folder_of_checkpoints(vars(self)))
        for name in ("save_dir", "run_dir"):  # a process elsewhere has another current folder
            if self.engine is not None and getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)).absolute())
        if self.network is not None:
            object.__setattr__(self, "network", Network.of(self.network))
        for name in ("step_seconds", "timeline"):
            if getattr(self, name) and self.network is None and not (name[0] == "s" and self.strategy.asks_clients):
                raise ArgumentError(f"{name} needs network, for example network='1Gbps,0.5ms'")
        if not isinstance(self.faults, Faults | None):
            raise ArgumentError(
                f"faults={self.faults!r} must be an exogym.faults.Faults, such as Faults(drop_rate=0.01)"
            )
        if self.faults is not None and self.faults.trace is not None:
            if not self.strategy.asks_clients:
                raise ArgumentError(
                    f"faults: a trace says whom a server can ask, and {type(self.strategy).__name__} as it is asks "
                    "nobody: take FedAvg or one of its kind with client_fraction under 1, or plan faults with absent= "
                    "or drop_rate="
                )
            self.faults.trace.check(self.num_nodes)
        if self.faults is not None and self.faults.bad_nodes:
            self.faults.bad(self.num_nodes)
            object.__setattr__(self, "strategy", self.strategy.beside(self.faults))
        if self.balance is not None:
            object.__setattr__(self, "balance", Balance.of(self.balance))
            if self.weighs_nodes:
                self.balance.check_speeds(self.num_nodes, "nodes")
        if self.client_state_memory is not None:
            if not (is_number(self.client_state_memory) and 0 <= self.client_state_memory < math.inf):
                raise ArgumentError(
                    f"client_state_memory={self.client_state_memory!r} must be bytes, at least 0, as 2e9"
                )
            if self.save_dir is None:
                raise ArgumentError("client_state_memory needs save_dir, the folder that what is over it goes to")
        for name in ("shuffle", "autocast", "final_sync", "resume", "timeline"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name}={getattr(self, name)!r} must be True or False")
        for callback in self.callbacks:
            if not callable(callback):
                raise ArgumentError(f"callback {callback!r} cannot be called: wanted a function of the training loop")
        if self.node is not None:
            object.__setattr__(self, "node", _one_each(self.node, self.num_nodes))
            for mesh in self.meshes:
                mesh.check_batch(self.batch_size)
        check(self.features())

    def features(self) -> dict[str, str]:
        """Return which of `exogym.core.combinations.FEATURES` this run has, the strategy's among them."""
        found = self.strategy.features()
        given = {
            "compute": self.compute != "loop",
            "processes": self.processes != 1,
            "engine": self.engine is not None,
            "max_memory_usage": self.max_memory_usage is not None,
        }
        found |= {name: f"{name}={getattr(self, name)!r}" for name, is_given in given.items() if is_given}
        if self.chosen_precision == "fp16":
            found['precision="fp16"'] = "precision='fp16'"
        if self.meshes:
            found["node"] = "node="
        if any(mesh.depth > 1 for mesh in self.meshes):
            found["stages"] = "node= with stages"
        if self.weighs_nodes:
            what = f"balance={self.balance.kind!r}"
            found |= {'balance="batch" or "steps"': what} | ({what.replace("'", '"'): what})
        return found

    @property
    def may_be_away(self) -> bool:
        """Whether nodes may be away, or late, whatever a strategy asks; a trace is looked at by the strategy itself."""
        return self.faults is not None and self.faults.trace is None

    @property
    def meshes(self) -> tuple[NodeMesh, ...]:
        """The split of each node; empty where nodes are one device each."""
        return self.node if isinstance(self.node, tuple) else ()

    @property
    def step_examples(self) -> int:
        """Examples a node consumes per step."""
        return self.batch_size * self.gradient_accumulation

    @property
    def chosen_precision(self) -> str:
        return "bf16" if self.autocast else self.precision

    @property
    def micro_batch_size(self) -> int | None:
        """Examples computed at once, or None for a whole step's."""
        if self.minibatch_size is None and self.gradient_accumulation > 1:
            return self.batch_size
        return self.minibatch_size

    @property
    def weighs_nodes(self) -> bool:
        """Whether nodes work and weigh by their speeds. Dealing nodes to processes changes no result."""
        return self.balance is not None and self.balance.kind != "nodes"

    def total_steps(self, steps_per_epoch: int) -> int:
        """Steps each node takes."""
        if self.num_epochs is None:
            return self.max_steps or steps_per_epoch
        steps = self.num_epochs * steps_per_epoch
        return min(steps, self.max_steps or steps)

    def description(self) -> dict[str, Any]:
        """Return what decides the result of a run, as JSON."""
        given = {name: getattr(self, name) for name in DECISIVE} | {"precision": self.chosen_precision}
        given |= {"strategy": describe(self.strategy), "partitioner": describe(self.partitioner)}
        if self.network is not None:
            given |= {"network": self.network.describe(), "step_seconds": describe(self.step_seconds)}
        elif self.step_seconds is not None:
            given |= {"step_seconds": describe(self.step_seconds)}
        given |= {"node": [mesh.describe() for mesh in dict.fromkeys(self.meshes)]} if self.meshes else {}
        given |= {"balance": self.balance.kind} if self.weighs_nodes else {}
        given |= {} if self.on_nonfinite == "raise" else {"on_nonfinite": self.on_nonfinite}
        return given | ({} if self.faults is None else {"faults": describe(self.faults)})


def _one_each(node: Any, num_nodes: int) -> tuple[NodeMesh, ...]:
    """Return the split of each node, from one for all or one for each."""
    found = (node,) * num_nodes if isinstance(node, NodeMesh) else node
    if not isinstance(found, list | tuple) or not all(isinstance(mesh, NodeMesh) for mesh in found):
        raise ArgumentError(f"node={node!r} must be a NodeMesh, as NodeMesh(shard=2), or a list of one for each node")
    if len(found) != num_nodes:
        raise ArgumentError(f"node has {len(found)} meshes for {num_nodes} nodes: give one, or one for each node")
    return tuple(found)


def folder_of_checkpoints(given: Mapping[str, Any]) -> Any:
    """Return `save_dir` of the options `given`, or where they ask for checkpoints the place for them in `run_dir`."""
    asked = given["checkpoint_interval"] or given["resume"] or given["max_restarts"]
    if given["save_dir"] is None and asked and isinstance(given["run_dir"], str | os.PathLike):
        return Path(given["run_dir"]) / "checkpoints"
    return given["save_dir"]


def asked_to_go_on(given: Mapping[str, Any]) -> bool:
    """Say whether the fit of these options goes on: they say so, or EXOGYM_RESUME names its run_dir.

    So a script that was stopped can be started again, as it is, to go on.
    """
    wanted, run_dir = os.environ.get(RESUME), given["run_dir"]
    if wanted is None or not isinstance(run_dir, str | os.PathLike):
        return given["resume"]
    return given["resume"] or os.path.realpath(wanted) == os.path.realpath(run_dir)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def option_names() -> list[str]:
    return [field.name for field in fields(FitOptions)]


def describe(value: Any) -> Any:
    """Return an object as JSON: plain values as they are, others by class name and constructor arguments."""
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, dict):
        return {str(key): describe(item) for key, item in value.items()}
    attributes = getattr(value, "__dict__", {})
    plain = {key: item for key, item in attributes.items() if isinstance(item, bool | int | float | str)}
    given = getattr(value, "given_arguments", None)
    if given is not None:  # attributes too: a subclass's own arguments are not among those of the base
        return {"name": type(value).__name__} | plain | {key: describe(item) for key, item in given.items()}
    if isinstance(value, functools.partial):
        return {"name": describe(value.func), "args": describe(value.args)} | describe(value.keywords)
    if isinstance(value, type) or callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    if " at 0x" not in repr(value):
        return repr(value)
    return {"name": type(value).__name__} | plain
