"""A run's options: the one definition of all names, types, defaults and descriptions.

A trainer's `fit` gets its signature and descriptions from `FitOptions` (see `takes`). Comparisons and sweeps pass
`RunOptions` on to each run. The command line reads the types, defaults and descriptions of the options that it shares
with `fit` from these classes (see the module `written`).
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
from exogym.core.refusals import NAMES
from exogym.errors import ArgumentError, check_choice, check_count, check_number, check_switch, checked

if TYPE_CHECKING:  # none of this is needed to know the options
    import torch
    from torch import Tensor, nn

    from exogym.core.engine.engines import Engine
    from exogym.core.engine.nodes import Nodes
    from exogym.core.record.metrics import Metric
    from exogym.data.partition import Partitioner
    from exogym.faults import Faults
    from exogym.network import Network
    from exogym.strategy.strategy import Strategy

# What tools use, as `exogym.options`.
__all__ = [
    "FitOptions", "Placement", "RunOptions", "describe", "takes",
]  # fmt: skip

DECISIVE = (
    *("num_nodes", "batch_size", "gradient_accumulation", "minibatch_size", "max_memory_usage", "shuffle", "precision"),
    *("seed", "compute", "reduction", "val_size"),
)  # a resumed run must have the same values as its checkpoint


@dataclass
class Subject:
    """What a run trains: the model, the data sets, the loss function and the metrics."""

    model: nn.Module
    train_dataset: Any
    val_dataset: Any = None
    loss_fn: Callable[..., Tensor] | None = None
    metrics: dict[str, Metric] | None = None


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where and how a run's processes compute, communicate and restart. Only `reduction` affects results, by rounding.

    Args:
        engine: "ray" trains on the Ray cluster in RAY_ADDRESS, or starts one on this machine, in as many processes as
            fit. To set the cluster's address, pass an `exogym.engine.Ray`. By default, the run uses this machine, or
            all machines whose processes run this script together.
        cpus_per_process: CPUs that Ray reserves for each process.
        reduction: How sums are computed: "tree" (bitwise identical on every placement) or "native" (torch's own
            all-reduce and sums).
        overlap: Write checkpoints in the background on hosts and in a single process, and on hosts also send delayed
            averages in the background. If False, nodes wait for each checkpoint, and for each delayed average right
            after sending it, also on a simulation's virtual clock. Results are bitwise identical either way.
        hang_s: Seconds that a step may take before ExoGym considers the process hung and kills it, as if it had crashed
            (see `max_restarts`). The limit applies to forked and launched processes only, and to each micro-batch if
            steps are split. It is six times as long for the start, the first step, each batch of an evaluation, a
            checkpoint, and a callback (between two calls of `loop.beat()`). Use None for no limit, for example while
            debugging.
        max_restarts: Maximum number of restarts after errors and crashes. All processes restart from the newest
            checkpoint. Under torchrun, use torchrun's --max-restarts, and pass resume=True to `fit`.
        client_state_memory: Maximum bytes of memory per process for the saved state (optimizers, control variates) of
            idle sampled clients. State beyond this limit is stored in files under `save_dir`. By default, all state
            stays in memory. While ExoGym writes a checkpoint, all state is in memory.
        keep_checkpoints: Number of checkpoints to keep in `save_dir`.

    Raises:
        ArgumentError: a value has the wrong type or is out of range.

    >>> Placement(reduction="native", max_restarts=3)
    Placement(reduction='native', max_restarts=3)
    """

    engine: str | Engine | None = None
    cpus_per_process: int = 1
    reduction: str = "tree"
    overlap: bool = True
    hang_s: float | None = 600.0
    max_restarts: int = 0
    client_state_memory: float | None = None
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        check_choice("reduction", self.reduction, ("tree", "native"))
        check_switch("overlap", self.overlap)
        check_count("cpus_per_process", self.cpus_per_process)
        check_count("keep_checkpoints", self.keep_checkpoints)
        check_count("max_restarts", self.max_restarts, least=0)
        if self.hang_s is not None:
            check_number("hang_s", self.hang_s, over=0, more=", the limit in seconds, or None for no limit")
        if self.client_state_memory is not None:
            check_number("client_state_memory", self.client_state_memory, least=0, more=", in bytes, for example 2e9")

    def __repr__(self) -> str:
        return f"Placement({', '.join(f'{name}={value!r}' for name, value in changed(self.values()).items())})"

    def values(self) -> dict[str, Any]:
        """Return all options by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


Placement.__init__ = checked(Placement.__init__)  # type: ignore[method-assign]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of `fit` that `compare` and `sweep` also accept and pass on to each of their runs.

    Args:
        node: Split each node's model over several devices (see `exogym.NodeMesh`), with one split for all nodes or a
            list with one per node. Under `python -m exogym.launch` or torchrun, each process is one device, and
            `inside_bytes` in the history counts the traffic between a node's devices. A single process computes each
            node in micro-batches of a device's size. With several processes, only the main process has the final model;
            in the other processes, the model's parameters are on the meta device.
        gradient_accumulation: Batches per optimizer step. The step's gradient is the mean of the batches' gradients,
            for any loss. If the loss ignores some targets, each batch is weighted by the number of targets it counts.
        minibatch_size: Examples per forward and backward pass. Small values save memory and change results only by
            rounding. Before training, ExoGym compares the gradients of a few examples, computed together and in parts,
            and rejects a loss that is not a mean over examples (for example a sum, or a loss with class weights or with
            pairs inside a batch). As `loss_fn`, torch's `CrossEntropyLoss` and `NLLLoss`, and `functools.partial` of
            `cross_entropy` and `nll_loss`, may have `weight` and `ignore_index`: a part is then weighted by the sum of
            its targets' class weights. Other losses are tested again during training, after the first eight tests in
            fewer than 1 % of the steps, and a failed test ends the run with an error. BatchNorm's statistics and
            dropout's random draws are separate for each minibatch.
        max_memory_usage: Maximum share of the memory to use, from 0 to 1. ExoGym finds and prints a minibatch_size that
            fits. If it must split batches, it tests the loss as for `minibatch_size`.
        val_batch_size: Examples per forward pass of an evaluation; results change only by rounding. The default is
            `minibatch_size` if set. Otherwise it is the number of examples of a step, or up to 256 if their
            activations take at most 64 MiB.
        shuffle: Shuffle the training examples.
        precision: Precision of the computation: "fp32", or autocast to "bf16" or "fp16". `autocast=True` means "bf16".
        compute: How the nodes' steps are computed: "loop" (one node after another, exact) or "vmap" (all rows at once;
            for small models on accelerators, since it takes 2.3 times as long on a CPU).
        balance: Balance the load by speed: "nodes" assigns more nodes to fast processes, "batch" assigns larger batches
            to fast nodes, and "steps" assigns more local steps to fast nodes. Pass a `Balance` to set the speeds (see
            `exogym.balance`). By default, all nodes do the same work, divided evenly among the processes.
        faults: Nodes that drop out and return, slow nodes, lost synchronizations (see `exogym.faults`). Each strategy's
            docstring says how it handles them. Absent nodes have no records in the history.
        on_nonfinite: What to do if a gradient or update is not finite: "raise", "skip" or "ignore". ExoGym reacts
            before the values reach other nodes. With "skip", the node sends nothing in that round, as if absent, then
            copies a healthy node's whole state, and has no records for the skipped steps. With "ignore", ExoGym checks
            only losses. Infs that fp16's scaling handles are not errors.
        final_sync: At the end of the run, synchronize steps that have not been synchronized yet, and count the bytes.
        log_interval: Steps between records.
        placement: Where and how the run's processes compute, communicate and restart (see `exogym.Placement`).
        dataloader_kwargs: Arguments for torch's DataLoader (num_workers, collate_fn, ...). With {"drop_last": True},
            training skips the short last batch of each node's epoch, except on nodes with less than one batch.
    """

    node: Any = None
    gradient_accumulation: int = 1
    minibatch_size: int | None = None
    max_memory_usage: float | None = None
    val_batch_size: int | None = None
    shuffle: bool = True
    precision: str = "fp32"
    compute: str = "loop"
    balance: Balance | str | None = None
    faults: Faults | None = None
    on_nonfinite: str = "raise"
    final_sync: bool = True
    log_interval: int = 1
    placement: Placement = Placement()
    dataloader_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.placement, Placement):
            raise ArgumentError(f"placement={self.placement!r} must be a Placement, such as Placement(max_restarts=3)")

    def values(self, of: Any = None) -> dict[str, Any]:
        """Return all options by name, including those in `placement`. `of`: return only this base class's options."""
        own = {field.name: getattr(self, field.name) for field in fields(of or self) if field.name != "placement"}
        return self.placement.values() | own

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults by name, including those in `placement`.

        >>> RunOptions(precision="bf16", shuffle=True, placement=Placement(max_restarts=3)).changed()
        {'max_restarts': 3, 'precision': 'bf16'}
        """
        return changed(self.values(RunOptions))


@dataclass(frozen=True)
class FitOptions(RunOptions):
    """All options of one `fit`.

    Args:
        strategy: The training method (see `exogym.strategy`).
        num_nodes: Number of nodes, N.
        num_epochs, max_steps: Length of the run, by default one epoch. With `max_steps` alone, the run takes as many
            epochs as needed. With both, the run ends at whichever limit comes first. An epoch is ceil(examples /
            (N batch_size gradient_accumulation)) steps.
        batch_size: Examples per node and batch. A node's step consumes `gradient_accumulation` batches. A node with
            fewer examples uses all its examples.
        partitioner: How the examples are divided among the nodes (see `exogym.data`). By default, ExoGym deals the
            examples to the nodes anew each epoch.
        val_size: Maximum number of validation examples per evaluation.
        val_interval: Steps between evaluations, by default one epoch. ExoGym also evaluates at the start and the end.
        seed: Seed of everything random in the run. The run does not change the caller's random state.
        device: Device to compute on: "auto", or a torch device such as cpu, cuda, cuda:1, mps or xpu. "auto" selects
            torch's accelerator if there is one, otherwise the CPU.
        processes: Number of processes that share the nodes, forked from this process (Linux, CPU). Results are bitwise
            identical for every number. Omit this option under `python -m exogym.launch` or torchrun, where the launched
            processes share the nodes.
        network: Network on which to predict the training time. Pass text ("wifi", "100Mbps,20ms") or a `Network` (see
            `exogym.network`). The predicted time is in the history (`time_s`) and in `trainer.clock`.
        step_seconds: Seconds of a node's step, for predicting the time: a number, text ("80ms"), a value per node, or a
            `StepTime`. By default, ExoGym measures the steps on this machine. If a `node` has several devices, pass
            the whole node's time.
        timeline: Record when each node computed, sent and waited, in `trainer.clock.spans` and, with `run_dir`, in that
            folder's timeline.json.
        logger: A logger or a function, or a list of them (see `exogym.logger`).
        progress: Show a progress bar. By default, ExoGym shows it only if stderr is a terminal.
        callbacks: Functions that the training loop calls (see `exogym.callbacks`).
        save_dir, checkpoint_interval: Folder for checkpoints, and steps between two checkpoints. The run also writes a
            checkpoint at its end.
        resume: Resume from the newest valid checkpoint in `save_dir`. A folder without checkpoints starts a new run;
            if it has only unreadable ones, `fit` raises an error. The number of processes may differ.
        run_dir: Write the run's options, records, events and result into this folder (see `core.record.run_folder`).
            The folder must be new or, with `resume`, the resumed run's folder. Unless `save_dir` is set, checkpoints
            also go into this folder if `checkpoint_interval`, `resume` or `Placement(max_restarts=)` is set.
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
    processes: int = 1
    network: Network | str | None = None
    step_seconds: Any = None
    timeline: bool = False
    logger: Any = None
    progress: bool | None = None
    callbacks: Sequence[Callable[..., Any]] = ()
    save_dir: str | Path | None = None
    checkpoint_interval: int | None = None
    resume: bool = False
    run_dir: str | Path | None = None

    def features(self) -> dict[str, str]:
        """Return the features that the run and its strategy use, by their names in `exogym.core.refusals`."""
        values, found = self.values(), self.strategy.features()
        for name, value in changed(values).items():
            texts = {name, f'{name}="{value}"'} if isinstance(value, str) else {name}
            found |= {text: f"{name}={value!r}" for text in texts & NAMES}
        found |= {f"no {name}": f"no {name}" for name, value in values.items() if value is None}
        if self.num_epochs is None and self.max_steps is None:
            found["no num_epochs or max_steps"] = "no max_steps"
        if self.network is not None and self.step_seconds is None:
            found["network without step_seconds"] = "network= and no step_seconds"
        if self.strategy.clients.asks_clients:  # it needs the seconds, also without a network
            found.pop("step_seconds", None)
        if self.nodes is not None:
            found |= self.nodes.features()
        if self.strategy.driven_by == "programs" and (values["engine"] is not None or self.processes != 1):
            found["one node's strategy in processes"] = f"{type(self.strategy).__name__} in several processes"
        if self.sharing is not None:
            what = found["balance"] = f"balance={self.sharing.kind!r}"
            found |= {f'balance="{self.sharing.kind}"': what}
            found |= {} if self.weighing is None else {'balance="batch" or "steps"': what}
            found |= {} if self.sharing.speeds is not None else {"balance without speeds": what}
        if self.faults is not None:
            kinds = {name: getattr(self.faults, name) for name in ("slow", "bad_nodes", "trace")}
            found["faults"] = "faults="
            found |= {name: f"faults with {name}={value!r}" for name, value in kinds.items() if value}
        return found

    @property
    def may_be_away(self) -> bool:
        """Whether `faults` may make nodes absent or late. False for a trace, which only the strategy itself reads."""
        return self.faults is not None and self.faults.trace is None

    @property
    def samples_clients(self) -> bool:
        """Whether each round samples its clients, so that clients may have no data."""
        return not self.strategy.features().keys().isdisjoint({"client_fraction", "privacy"})

    @property
    def nodes(self) -> Nodes | None:
        """The option `node` after its check; None if each node is one device."""
        return self.node if hasattr(self.node, "sizes") else None

    @property
    def step_examples(self) -> int:
        """Examples that a node consumes per step."""
        return self.batch_size * self.gradient_accumulation

    @property
    def micro_batch_size(self) -> int | None:
        """Number of examples to compute at once, or None for all examples of a step."""
        if self.minibatch_size is None and self.gradient_accumulation > 1:
            return self.batch_size
        return self.minibatch_size

    @property
    def sharing(self) -> Balance | None:
        """The option `balance` as a `Balance` object; None without this option."""
        return None if self.balance is None else Balance.of(self.balance)

    @property
    def weighing(self) -> Balance | None:
        """The `Balance`, if its kind is "batch" or "steps". None for "nodes", which changes only the placement."""
        return None if self.sharing is None or self.sharing.kind == "nodes" else self.sharing

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return each node's number of steps."""
        if self.num_epochs is None:
            return self.max_steps or steps_per_epoch
        steps = self.num_epochs * steps_per_epoch
        return min(steps, self.max_steps or steps)

    def description(self) -> dict[str, Any]:
        """Return everything that decides the run's result, as JSON."""
        values = self.values()
        given = {name: values[name] for name in DECISIVE}
        given |= {"strategy": describe(self.strategy), "partitioner": describe(self.partitioner)}
        if self.network is not None:
            network = self.network if isinstance(self.network, str) else self.network.describe()
            given |= {"network": network, "step_seconds": describe(self.step_seconds)}
        elif self.step_seconds is not None:
            given |= {"step_seconds": describe(self.step_seconds)}
        given |= {} if self.nodes is None else {"node": self.nodes.describe()}
        given |= {"balance": self.weighing.kind} if self.weighing is not None else {}
        given |= {} if self.on_nonfinite == "raise" else {"on_nonfinite": self.on_nonfinite}
        return given | ({} if self.faults is None else {"faults": describe(self.faults)})


_DEFAULTS = {field.name: field.default for kind in (Placement, FitOptions) for field in fields(kind)}


def changed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ from the defaults of `FitOptions` and `Placement`."""
    return {
        name: value
        for name, value in options.items()
        if (value is not None if _DEFAULTS[name] is None else value != _DEFAULTS[name])  # a value may be an array
    }


P = ParamSpec("P")
V = TypeVar("V")
R = TypeVar("R")
T = TypeVar("T")


class takes(Generic[P, V]):
    """Decorate a function of one options object, so that callers pass the options as keyword arguments.

    Type checkers, editors and Python read names, types and defaults from the options class. If the function's docstring
    has no section "Args:", the decorator adds the sections of the options class and its base classes.

    Args:
        options: the options class.
        defaults: default values that replace the options class's own.

    Raises:
        ArgumentError: an unknown option was passed. The message names the most similar option.

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
            text = re.sub(r"(?=\nRaises:|\Z)", f"\nArgs:\n{args_of(self.options)}\n", text, count=1)
        call.__doc__ = text
        call.not_taken = getattr(self.options, "not_taken", {})  # type: ignore[attr-defined]
        return checked(call)

    def _argument(self, option: inspect.Parameter) -> inspect.Parameter:
        default = self.defaults.get(option.name, option.default)
        is_none = default is None and option.default is not None
        return option.replace(default=default, annotation=option.annotation + " | None" * is_none)


def args_of(options: Any) -> str:
    """Return the "Args:" sections of a class and its base classes.

    >>> args_of(FitOptions).splitlines()[0]
    '    strategy: The training method (see `exogym.strategy`).'
    """
    docs = [inspect.cleandoc(vars(kind).get("__doc__") or "") for kind in options.__mro__]
    found = [re.search(r"^Args:\n((?:    .*\n?|\n(?=    ))*)", doc, re.M) for doc in docs]
    return "\n".join(section[1].rstrip() for section in found if section is not None)


def describe(value: Any) -> Any:
    """Return a value as JSON. Plain values stay unchanged; other objects become their class name and arguments.

    >>> from exogym.strategy import DiLoCoStrategy
    >>> describe({"seeds": (0, 1), "strategy": DiLoCoStrategy(H=10)})
    {'seeds': [0, 1], 'strategy': {'name': 'DiLoCoStrategy', 'H': 10}}
    """
    from exogym.strategy.averaging import spread  # loads torch, which a tool over folders does not need

    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, dict):
        return {str(key): describe(item) for key, item in value.items()}
    attributes = getattr(value, "__dict__", {})
    plain = {key: item for key, item in attributes.items() if isinstance(item, bool | int | float | str)}
    given = getattr(value, "given_arguments", None)
    if given is not None:  # attributes too: the base class does not know a subclass's own arguments
        return {"name": type(value).__name__} | plain | {key: describe(item) for key, item in spread(given).items()}
    if isinstance(value, functools.partial):
        return {"name": describe(value.func), "args": describe(value.args)} | describe(value.keywords)
    if isinstance(value, type) or callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    if " at 0x" not in repr(value):
        return repr(value)
    return {"name": type(value).__name__} | plain
