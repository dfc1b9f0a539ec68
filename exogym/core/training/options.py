"""The options of a run: names, types, defaults and words, written here once.

`FitOptions` is the definition. The trainers' `fit` take their signature and their words from it (`takes`). Comparisons
and sweeps pass the options of `RunOptions` on to each of their runs. The command line takes types, defaults and words
of the options that it shares with `fit` (`written_as`, `words_of`).
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from exogym.balance import Balance
from exogym.errors import checked

if TYPE_CHECKING:  # none of this is needed to know the options
    import torch

    from exogym.core.engine import Engine
    from exogym.core.mesh import NodeMesh
    from exogym.data.partition import Partitioner
    from exogym.faults import Faults
    from exogym.network import Network
    from exogym.strategy.strategy import Strategy

DECISIVE = (
    *("num_nodes", "batch_size", "gradient_accumulation", "minibatch_size", "max_memory_usage", "shuffle", "precision"),
    *("seed", "compute", "reduction", "val_size"),
)  # options that a resumed run must share with its checkpoint
SAID = (
    *("compute", "precision", "processes", "engine", "cpus_per_process", "minibatch_size", "gradient_accumulation"),
    *("max_memory_usage", "network", "timeline", "checkpoint_interval", "resume", "max_restarts"),
    "client_state_memory",
)  # options that some others do not go with, whatever their value: features under their own names
LEFT_OUT = ("save_dir", "network", "engine", "step_seconds")  # without which some others say nothing
# The command line has a shorter word for these: --nodes, --steps, --partition.
LONG = {"nodes": "num_nodes", "steps": "max_steps", "partition": "partitioner"}


def in_full(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options under their names in Python, whether they have these or those of the command line.

    >>> in_full({"nodes": 4, "H": 5})
    {'num_nodes': 4, 'H': 5}
    """
    return {LONG.get(name, name): value for name, value in options.items()}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options that `fit`, `compare` and `sweep` take alike: the last two pass them on to each of their runs.

    Args:
        node: Each node is several devices, its model split over them (see `exogym.NodeMesh`); a list: each node has its
            own split. Under `python -m exogym.launch` or torchrun each process is one device. In one process the result
            is that of one device per node, computed in the micro-batches of its devices; `inside_bytes` in the history
            counts what the devices of a node would send each other. In several processes only the main one has the
            final model; in the others its parameters are on the meta device.
        gradient_accumulation: Batches whose gradients make a step. The step's gradient is their mean, whatever the
            loss. Where targets are below 0, a batch counts as many as it has of the others.
        minibatch_size: Examples computed at once. This changes memory, not results beyond rounding: before training a
            few examples are computed together and in parts, and a loss that is not a mean over examples (a sum, class
            weights, pairs inside a batch) is refused where these show it. Torch's `CrossEntropyLoss` and `NLLLoss` as
            `loss_fn` are taken with `weight` and `ignore_index`: a part counts what its classes weigh. BatchNorm takes
            its statistics, and dropout its draws, in each minibatch.
        max_memory_usage: Fraction of the memory (0 to 1) to stay in. A minibatch_size that fits is found and said.
            Where batches must be split, losses are refused as for `minibatch_size`.
        shuffle: Deal the examples in a random order.
        precision: "fp32", or autocast in "bf16" or "fp16". `autocast=True` is bf16.
        compute: "loop" (one node after another, exact), "vmap" (rows at once), "compiled" (steps as one graph by
            torch.compile, for long runs), "graphs" (such steps of many rows as CUDA graphs), "auto" (tries the first
            three and says which ends this run soonest).
        reduction: "tree" (exact: the same bits on every layout) or "native" (torch's own all-reduce and sums).
        balance: Share the load out by speed (see `exogym.balance`): "nodes" to processes, "batch" sizes or local
            "steps" to nodes, or a `Balance` with speeds. None: all nodes do the same, as evenly placed as can be.
        faults: Nodes that drop out and come back, slow nodes, lost synchronisations (see `exogym.faults`). The
            docstring of each strategy says what it does then. A node that is away has no row in the history.
        on_nonfinite: "raise", "skip" or "ignore" a gradient or an update that is not finite, before others see it.
            "skip": the node gives nothing to the round, as one that is away, then takes all that another holds, and has
            no row in the history for such steps. "ignore": only losses are looked at. Infs that fp16's scaling handles
            are no errors.
        final_sync: Synchronise steps left over at the end, and count it.
        log_interval: Steps between records.
        max_restarts: So often, where training fails or one of several processes dies, all start again from the last
            checkpoint. Under torchrun its own --max-restarts counts, with resume=True here.
        hang_s: Seconds that a step of a node may take (of a micro-batch, where steps are split) with several processes.
            A process that takes longer counts as hung: it is killed, and handled like one that died (`max_restarts`).
            The start, the first step, each batch of an evaluation, a checkpoint and a callback (between two
            `loop.beat()`) may take six times as long. None: never, as when a debugger holds a process.
        client_state_memory: Bytes that each process may hold of the state that sampled clients keep while they do not
            act (optimizers, control variates). The rest lies in files under `save_dir`. None: all in memory. While a
            checkpoint is written all of it is in memory.
        dataloader_kwargs: For torch's DataLoader (num_workers, collate_fn, ...).
    """

    node: NodeMesh | Sequence[NodeMesh] | None = None
    gradient_accumulation: int = 1
    minibatch_size: int | None = None
    max_memory_usage: float | None = None
    shuffle: bool = True
    precision: str = "fp32"
    compute: str = "loop"
    reduction: str = "tree"
    balance: Balance | str | None = None
    faults: Faults | None = None
    on_nonfinite: str = "raise"
    final_sync: bool = True
    log_interval: int = 1
    max_restarts: int = 0
    hang_s: float | None = 600.0
    client_state_memory: float | None = None
    dataloader_kwargs: dict[str, Any] | None = None

    def changed(self) -> dict[str, Any]:
        """Return those that have not their defaults.

        >>> RunOptions(precision="bf16", shuffle=True).changed()
        {'precision': 'bf16'}
        """
        given = {field.name: getattr(self, field.name) for field in fields(RunOptions)}
        return {name: value for name, value in given.items() if value != getattr(RunOptions, name)}


@dataclass(frozen=True)
class FitOptions(RunOptions):
    """What `fit` was asked.

    Args:
        strategy: What nodes do and tell each other.
        num_nodes: Nodes of the fleet, N.
        num_epochs, max_steps: Length of the run. Neither: one epoch; `max_steps` alone: as many epochs as it takes;
            both: whichever ends first. An epoch is ceil(examples / (N batch_size gradient_accumulation)) steps.
        batch_size: Examples of a batch. A step of a node consumes `gradient_accumulation` batches; a node that has
            fewer examples takes all it has.
        partitioner: Who gets which examples. None (see `exogym.data`): they are dealt anew each epoch.
        val_size: Evaluate on at most so many examples.
        val_interval: Steps between evaluations; None: after each epoch. Also at the start and the end.
        seed: It fixes everything; the caller's random state is left as it was.
        device: "auto", or a torch device: cpu, cuda, cuda:1, mps. "auto" takes a GPU where there is one (CUDA, then
            Apple's MPS).
        processes: Processes that share the nodes, or "auto". They are forked from this one (Linux, CPU); the result has
            the same bits. "auto" takes the cores there are where a short trial says that it pays, and says so. Under
            torchrun or `python -m exogym.launch` the processes there are share the nodes: leave it out.
        engine: "ray": on a cluster of Ray's, or one that is started here, in as many processes as there is room for
            (see `exogym.engine.Ray`, which may be given instead, with an address). None: on this machine, or where the
            processes are that run this script together.
        cpus_per_process: Processors that Ray gives to each process.
        network: Predict the time on this network. Text ("wifi", "100Mbps,20ms") or a `Network` (see `exogym.network`).
            `time_s` in the history and `trainer.clock` say how long the run would take there.
        step_seconds: Seconds of a node's step there. A number, text ("80ms"), one per node or a `StepTime`; None: as
            measured here. Of a `node` of several devices: what one of them takes alone; they share it out.
        timeline: Keep what each node did when, in `trainer.clock.spans`, and with `run_dir` in its timeline.json.
        logger: A logger, several, or callables (see `exogym.logger`).
        progress: Show a progress bar; None: if stderr is a terminal.
        callbacks: Functions of the training loop (see `exogym.callbacks`).
        save_dir, checkpoint_interval, keep_checkpoints: Where and how often to checkpoint (also at the end), and how
            many are kept.
        resume: Go on from the newest good checkpoint of `save_dir`, or start where there is none. Another number of
            processes will do.
        run_dir: Write what the run is, does and comes to into this folder (see `core.record.run_folder`). It is a new
            folder, or with `resume` the folder of the run that goes on. Without `save_dir` checkpoints go there too,
            where `checkpoint_interval` or `resume` asks for them.
    """

    strategy: Strategy
    _: KW_ONLY
    num_nodes: int = 1
    num_epochs: int | None = None
    max_steps: int | None = None
    batch_size: int = 32
    partitioner: Partitioner | str | None = None
    val_size: int | None = None
    val_interval: int | None = None
    seed: int = 0
    device: str | torch.device = "auto"
    processes: int | str = 1
    engine: str | Engine | None = None
    cpus_per_process: int = 1
    network: Network | str | None = None
    step_seconds: Any = None
    timeline: bool = False
    logger: Any = None
    progress: bool | None = None
    callbacks: Sequence[Callable[..., Any]] = ()
    save_dir: str | Path | None = None
    checkpoint_interval: int | None = None
    keep_checkpoints: int = 2
    resume: bool = False
    run_dir: str | Path | None = None

    def features(self) -> dict[str, str]:
        """Return which of `exogym.core.combinations.FEATURES` this run has, the strategy's among them."""
        given = {name: getattr(self, name) for name in SAID if getattr(self, name) != getattr(FitOptions, name)}
        found = self.strategy.features() | {name: f"{name}={value!r}" for name, value in given.items()}
        found |= {f"no {name}": f"no {name}" for name in LEFT_OUT if getattr(self, name) is None}
        found |= {f'{name}="{given[name]}"': found[name] for name in ("compute", "precision") if name in given}
        if self.compute in ("compiled", "graphs"):
            found['compute="compiled" or "graphs"'] = found["compute"]
        if self.network is not None and self.step_seconds is None:
            found["network without step_seconds"] = "network= and no step_seconds"
        if self.step_seconds is not None and not self.strategy.asks_clients:
            found["step_seconds"] = f"step_seconds={self.step_seconds!r}"
        if self.meshes:
            found["node"] = "node="
        if any(mesh.depth > 1 for mesh in self.meshes):
            found["stages"] = "node= with stages"
        if self.strategy.driven_by == "programs" and (self.engine is not None or self.processes not in (1, "auto")):
            found["one node's strategy in processes"] = f"{type(self.strategy).__name__} in several processes"
        if self.shares is not None:
            what = found["balance"] = f"balance={self.shares.kind!r}"
            found |= {f'balance="{self.shares.kind}"': what}
            found |= {} if self.weighing is None else {'balance="batch" or "steps"': what}
            found |= {} if self.shares.speeds is not None else {"balance without speeds": what}
        if self.faults is not None:
            kinds = {name: getattr(self.faults, name) for name in ("slow", "bad_nodes", "trace")}
            found["faults"] = "faults="
            found |= {name: f"faults with {name}={value!r}" for name, value in kinds.items() if value}
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
    def micro_batch_size(self) -> int | None:
        """Examples computed at once, or None for a whole step's."""
        if self.minibatch_size is None and self.gradient_accumulation > 1:
            return self.batch_size
        return self.minibatch_size

    @property
    def shares(self) -> Balance | None:
        """How the load is shared out, as a value."""
        return None if self.balance is None else Balance.of(self.balance)

    @property
    def weighing(self) -> Balance | None:
        """How nodes work and weigh by their speeds. Dealing nodes to processes changes no result."""
        return None if self.shares is None or self.shares.kind == "nodes" else self.shares

    def total_steps(self, steps_per_epoch: int) -> int:
        """Steps each node takes."""
        if self.num_epochs is None:
            return self.max_steps or steps_per_epoch
        steps = self.num_epochs * steps_per_epoch
        return min(steps, self.max_steps or steps)

    def description(self) -> dict[str, Any]:
        """Return what decides the result of a run, as JSON."""
        given = {name: getattr(self, name) for name in DECISIVE}
        given |= {"strategy": describe(self.strategy), "partitioner": describe(self.partitioner)}
        if self.network is not None:
            network = self.network if isinstance(self.network, str) else self.network.describe()
            given |= {"network": network, "step_seconds": describe(self.step_seconds)}
        elif self.step_seconds is not None:
            given |= {"step_seconds": describe(self.step_seconds)}
        given |= {"node": [mesh.describe() for mesh in dict.fromkeys(self.meshes)]} if self.meshes else {}
        given |= {"balance": self.weighing.kind} if self.weighing is not None else {}
        given |= {} if self.on_nonfinite == "raise" else {"on_nonfinite": self.on_nonfinite}
        return given | ({} if self.faults is None else {"faults": describe(self.faults)})


P = ParamSpec("P")
V = TypeVar("V")
R = TypeVar("R")
T = TypeVar("T")


class takes(Generic[P, V]):
    """Give a function that is handed one value of a class of options these options as its arguments.

    Type checkers and editors read names, types and defaults from the class, as Python does: there is no second list. A
    docstring without "Args:" gets the section of the class, and of those above it.

    Args:
        options: the class.
        defaults: in place of the class's.

    Raises:
        ArgumentError: by the function: an argument that is no option; the message names the nearest.

    >>> @dataclass(frozen=True)
    ... class Options:
    ...     times: int = 1
    >>> @takes(Options)
    ... def ring(asked):
    ...     return "ding " * asked.times
    >>> ring(times=2), str(inspect.signature(ring))
    ('ding ding ', "(times: 'int' = 1)")
    """

    def __init__(self, options: Callable[P, V], **defaults: Any):
        self.options, self.defaults = options, defaults

    @overload
    def __call__(self, function: Callable[[V], R]) -> Callable[P, R]: ...
    @overload
    def __call__(self, function: Callable[[T, V], R]) -> Callable[Concatenate[T, P], R]: ...
    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        plain = inspect.signature(function)
        *before, _ = plain.parameters.values()
        own = [self._argument(p) for p in inspect.signature(self.options).parameters.values()]
        signature = plain.replace(parameters=[*before, *own])

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            first = [given.arguments.pop(p.name) for p in before]
            return function(*first, self.options(**given.arguments))  # type: ignore[call-arg]

        call.__signature__ = signature  # type: ignore[attr-defined]
        text = inspect.cleandoc(function.__doc__ or "")
        if "\nArgs:" not in text:
            text = re.sub(r"(?=\nRaises:|\Z)", f"\nArgs:\n{_told(self.options)}\n", text, count=1)
        call.__doc__ = text
        call.not_taken = getattr(self.options, "not_taken", {})  # type: ignore[attr-defined]
        return checked(call)

    def _argument(self, option: inspect.Parameter) -> inspect.Parameter:
        default = self.defaults.get(option.name, option.default)
        is_none = default is None and option.default is not None
        return option.replace(default=default, annotation=option.annotation + " | None" * is_none)


def _told(options: Any) -> str:
    """Return what the docstrings of a class and of those above it say under "Args:"."""
    docs = [inspect.cleandoc(vars(kind).get("__doc__") or "") for kind in options.__mro__]
    found = [re.search(r"^Args:\n((?:    .*\n?|\n(?=    ))*)", doc, re.M) for doc in docs]
    return "\n".join(section[1].rstrip() for section in found if section is not None)


@functools.cache
def words_of(name: str) -> str:
    """Return the first sentence of the words of an option.

    >>> words_of("num_nodes")
    'Nodes of the fleet, N.'
    """
    text = " " + " ".join(_told(FitOptions).split())
    found = re.search(rf"(?<=[ ,]){name}(?:, \w+)*: (.*?\.)(?= |$)", text)
    assert found is not None, name
    return found[1]


@functools.cache
def written_as(name: str) -> type | None:
    """Return the type of an option that can be written as text: int, float, bool or str; None: no text says it.

    >>> written_as("max_restarts"), written_as("hang_s"), written_as("balance"), written_as("faults")
    (<class 'int'>, <class 'float'>, <class 'str'>, None)
    """
    (annotation,) = (field.type for field in fields(FitOptions) if field.name == name)
    parts = str(annotation).split(" | ")
    return next((kind for kind in (int, float, bool, str) if kind.__name__ in parts), None)


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
