"""Trainers: one call trains a model on a fleet of nodes and gives back the averaged model."""

from __future__ import annotations

import copy
import hashlib
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from exogym.checkpoint import check_folder, differences, list_checkpoints, load_newest
from exogym.data.partition import Partitioner
from exogym.data.stream import Stream, is_factory
from exogym.errors import ArgumentError, CheckpointError, ModelError, check_choice, check_count, checked
from exogym.fleet import Fleet
from exogym.gradients import VmapGradients
from exogym.history import History
from exogym.logger import Logger, combine
from exogym.loop import Driver, Plan, TrainingLoop
from exogym.memory import fitting_micro_batch
from exogym.metrics import Evaluator, Metric, total_memory_bytes
from exogym.node_driver import NodeDriver
from exogym.outputs import Loss
from exogym.progress import Progress, notice
from exogym.rng import preserved_state
from exogym.stacked_driver import StackedDriver
from exogym.strategy.communicate_optimize import NEVER, CommunicateOptimizeStrategy
from exogym.strategy.strategy import Run, Strategy
from exogym.worker import Worker, check_precision

EVALUATION_BATCH = 256
COMPUTE = ("loop", "vmap", "auto")


class Trainer:
    """What all trainers share: the model, the data, and what the last `fit` left.

    Args:
        model: a module whose `model(batch)` gives its loss (see `exogym.outputs`), or predictions with `loss_fn`.
        train_dataset: a data set, or a factory called as `factory(rank, num_nodes, is_train)`.
        val_dataset: likewise, or None.
        loss_fn: `loss_fn(predictions, targets)` for models that return predictions.
        metrics: name to `function(predictions, targets)`, reported as val_<name>.

    Attributes:
        history: a `History` of the last fit; a sequence of dicts.
        description: the last run as one JSON-able value, enough to repeat it.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        train_dataset: Any,
        val_dataset: Any = None,
        *,
        loss_fn: Callable[..., Tensor] | None = None,
        metrics: dict[str, Metric] | None = None,
    ):
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"model is a {type(model).__name__}, wanted a torch.nn.Module")
        self.model, self.train_dataset, self.val_dataset = model, train_dataset, val_dataset
        self.loss_fn, self.metrics = loss_fn, dict(metrics or {})
        self.history = History()
        self.description: dict[str, Any] = {}

    def fit(self, strategy: Strategy, **options: Any) -> nn.Module:
        """Train the model under `strategy`; each trainer says where."""
        raise ArgumentError("Trainer is the common base: use LocalTrainer, which trains on this machine")


class LocalTrainer(Trainer):
    """Trains on this machine: N simulated nodes, a row each, in one process.

    >>> import torch
    >>> from exogym import LocalTrainer
    >>> from exogym.strategy import DiLoCoStrategy
    >>> x = torch.randn(64, 4); data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    >>> trainer = LocalTrainer(torch.nn.Linear(4, 1), data, data, loss_fn=torch.nn.functional.mse_loss)
    >>> model = trainer.fit(DiLoCoStrategy(H=4, lr=0.1), num_nodes=4, num_epochs=20, batch_size=4)
    >>> trainer.history[-1]["val_loss"] < trainer.history[0]["val_loss"]
    True
    """

    max_stretch: int | None = None

    @checked
    def fit(  # type: ignore[override]
        self,
        strategy: Strategy,
        *,
        num_nodes: int = 1,
        num_epochs: int | None = None,
        max_steps: int | None = None,
        batch_size: int = 32,
        gradient_accumulation: int = 1,
        minibatch_size: int | None = None,
        max_memory_usage: float | None = None,
        shuffle: bool = True,
        partitioner: Partitioner | str | None = None,
        val_size: int | None = None,
        val_interval: int | None = None,
        precision: str = "fp32",
        autocast: bool = False,
        seed: int = 0,
        device: str | torch.device = "auto",
        devices: Sequence[int] | None = None,
        compute: str = "loop",
        processes: int = 1,
        reduction: str = "tree",
        final_sync: bool = True,
        logger: Any = None,
        log_interval: int = 1,
        progress: bool | None = None,
        callbacks: Sequence[Callable[..., Any]] = (),
        save_dir: str | Path | None = None,
        checkpoint_interval: int | None = None,
        keep_checkpoints: int = 2,
        resume: bool = False,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> nn.Module:
        """Train and return the final (averaged or outer) model, which is the model that was passed in, updated.

        Args:
            strategy: what nodes do and tell each other.
            num_nodes: N.
            num_epochs, max_steps: neither: one epoch; `max_steps` alone: as many epochs as it takes; both:
                whichever ends first. An epoch is ceil(examples / (N batch_size gradient_accumulation)) steps.
            batch_size, gradient_accumulation: a step of a node consumes their product in examples.
            minibatch_size: examples computed at once; changes memory, not results beyond rounding.
            max_memory_usage: fraction of the memory (0 to 1) to stay in; finds a minibatch_size that fits and says it.
            shuffle, partitioner: which examples a node gets (see `exogym.data`); None deals them anew each epoch.
            val_size: evaluate on at most so many examples.
            val_interval: steps between evaluations; None: after each epoch. Also at start and end.
            precision: "fp32", or "bf16", "fp16" autocast; `autocast=True` is bf16.
            seed: fixes everything; the caller's random state is left as it was.
            device: "auto" takes a GPU where there is one (CUDA, then Apple's MPS), or a torch device.
            compute: "loop" (one node after another, exact), "vmap" (rows at once), "auto" (times both and says).
            processes, devices, reduction: placement; this version trains in one process on one device.
            final_sync: synchronise steps left over at the end, and count it.
            logger: a logger, several, or callables (see `exogym.logger`); log_interval: steps between records.
            progress: show a progress bar; None: if stderr is a terminal.
            callbacks: see `exogym.callbacks`.
            save_dir, checkpoint_interval, keep_checkpoints: where and how often to checkpoint; also at the end.
            resume: go on from the newest good checkpoint of `save_dir`, or start where there is none.
            dataloader_kwargs: for torch's DataLoader (num_workers, collate_fn, ...).

        Raises:
            ArgumentError, DataError, ModelError, StrategyError: before training.
            TrainingError: a loss that is not a number; node and step are named.
            CheckpointError: `resume` on a checkpoint of another run, or without a readable one.
        """
        if not isinstance(strategy, Strategy):
            raise ArgumentError(
                f"strategy={strategy!r} is not a Strategy: give an instance such as exogym.strategy.DiLoCoStrategy(H=100)"
            )
        for name, value, least in (
            ("num_nodes", num_nodes, 1), ("batch_size", batch_size, 1), ("gradient_accumulation", gradient_accumulation, 1),
            ("log_interval", log_interval, 1), ("keep_checkpoints", keep_checkpoints, 1),
        ):  # fmt: skip
            check_count(name, value, least)
        for name, value in (
            ("num_epochs", num_epochs), ("max_steps", max_steps), ("minibatch_size", minibatch_size),
            ("val_interval", val_interval), ("val_size", val_size), ("checkpoint_interval", checkpoint_interval),
        ):  # fmt: skip
            if value is not None:
                check_count(name, value)
        check_choice("compute", compute, COMPUTE)
        check_choice("reduction", reduction, ("tree",))
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ArgumentError(f"seed={seed!r} must be a whole number")
        if processes != 1 or devices is not None:
            raise ArgumentError(
                f"processes={processes!r}, devices={devices!r}: this version trains in one process on one device; leave them out"
            )
        if autocast and precision not in ("fp32", "bf16"):
            raise ArgumentError(f"autocast=True means precision='bf16', but precision={precision!r} is given too")
        precision = check_precision("bf16" if autocast else precision)
        if max_memory_usage is not None and not 0 < max_memory_usage <= 1:
            raise ArgumentError(f"max_memory_usage={max_memory_usage!r} must be a fraction over 0 and at most 1")
        if checkpoint_interval is not None and save_dir is None:
            raise ArgumentError("checkpoint_interval needs save_dir, the folder that checkpoints go to")
        if resume and save_dir is None:
            raise ArgumentError("resume=True needs save_dir, the folder that holds the checkpoints")
        if val_size is not None and self.val_dataset is None:
            raise ArgumentError("val_size needs a val_dataset: give the trainer one")
        place = resolve_device(device)
        sinks = combine(logger)
        folder = None if save_dir is None else check_folder(save_dir)
        if folder is not None and not resume and list_checkpoints(folder):
            raise ArgumentError(
                f"save_dir={str(save_dir)!r} already holds checkpoints: pass resume=True to go on, or choose another folder"
            )

        step_examples = batch_size * gradient_accumulation
        stream = Stream(
            self.train_dataset, num_nodes, batch_size=step_examples, seed=seed, shuffle=shuffle, partitioner=partitioner,
            dataloader_kwargs=dataloader_kwargs,
        )  # fmt: skip
        total_steps = _total_steps(num_epochs, max_steps, stream.steps_per_epoch)
        if gradient_accumulation > 1 and minibatch_size is None:
            minibatch_size = batch_size
        run = Run(num_nodes, seed, total_steps, stream.examples, step_examples)
        given = {
            "strategy": describe(strategy), "num_nodes": num_nodes, "batch_size": batch_size,
            "gradient_accumulation": gradient_accumulation, "minibatch_size": minibatch_size, "shuffle": shuffle,
            "partitioner": repr(partitioner), "precision": precision, "seed": seed, "device": place.type, "compute": compute,
            "reduction": reduction, "max_memory_usage": max_memory_usage, "val_size": val_size,
        }  # fmt: skip
        with preserved_state(place), _one_thread(place):
            was_training = self.model.training
            self.model.to(place)
            worker = Worker(self.model, Loss(self.model, self.loss_fn), place, precision, seed, minibatch_size)
            first_batch = next(iter(stream.batches(0, 0, 1)))
            _initialise_lazy(worker, first_batch)
            worker.probe(first_batch)
            if max_memory_usage is not None and minibatch_size is None:
                worker.micro_batch_size = self._fit_memory(worker, first_batch, max_memory_usage, num_nodes)
            fleet = Fleet(self.model, range(num_nodes), num_nodes, place)
            worker.bind(fleet)
            chosen = _choose_compute(worker, stream, num_nodes) if compute == "auto" else compute
            self.description = given | {
                "chosen": {"compute": chosen, "micro_batch_size": worker.micro_batch_size},
                "model": [
                    [slot.name, list(slot.shape), str(b.layout.dtype)] for b in fleet.blocks for slot in b.layout
                ],
                "data": {"examples": stream.total, "shards": _digest(stream.examples)},
                "limits": {"num_epochs": num_epochs, "max_steps": max_steps, "total_steps": total_steps},
            }
            snapshot = self._snapshot(folder) if resume else None
            if snapshot is not None:
                chosen = self.description["chosen"]["compute"]
                worker.micro_batch_size = self.description["chosen"]["micro_batch_size"]
            self.history = History()
            driver: Driver | None = None
            bar = Progress(total_steps, progress)
            try:
                driver = make_driver(strategy, fleet, worker, stream, run, chosen)
                _warn_if_never(driver, total_steps, strategy)
                evaluator = self._evaluator(worker, num_nodes, step_examples, minibatch_size, val_size)
                plan = Plan(
                    total_steps, stream.steps_per_epoch, step_examples, val_interval, log_interval, checkpoint_interval, folder,
                    keep_checkpoints, final_sync, self.max_stretch, self.description,
                )  # fmt: skip
                loop = TrainingLoop(plan, driver, fleet, worker, evaluator, self.history, sinks, bar, list(callbacks))
                if snapshot is not None:
                    loop.load(snapshot)
                    self.history = loop.history
                sinks.start(self.description | ({"resumed_step": loop.step} if snapshot is not None else {}))
                with bar:
                    loop.run()
                sinks.finish(_summary(self.history))
                self.fleet = fleet
            finally:
                with torch.no_grad():
                    vectors = driver.consensus() if driver is not None else fleet.average()
                    worker.set_home(vectors, fleet.average_buffers())
                if driver is not None:
                    driver.close()
                stream.close()
                self.model.train(was_training)
        return self.model

    def _evaluator(
        self, worker: Worker, num_nodes: int, step_examples: int, minibatch_size: int | None, val_size: int | None
    ) -> Evaluator | None:
        if self.val_dataset is None:
            return None
        size = minibatch_size or max(EVALUATION_BATCH, step_examples)
        nodes = num_nodes if is_factory(self.val_dataset) else 1
        stream = Stream(self.val_dataset, nodes, batch_size=size, shuffle=False, is_train=False)
        if val_size is not None:
            stream.examples = np.minimum(stream.examples, -(-val_size // nodes))
            stream.batch_size = min(size, val_size)
        return Evaluator(worker, stream, self.metrics)

    def _fit_memory(self, worker: Worker, batch: Any, fraction: float, num_nodes: int) -> int:
        row = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        limit = fraction * total_memory_bytes(worker.device)
        size = fitting_micro_batch(worker, batch, limit, resident_bytes=4.0 * num_nodes * row)
        notice(f"max_memory_usage={fraction}: micro-batches of {size} examples fit")
        return size

    def _snapshot(self, folder: Path | None) -> Any:
        assert folder is not None
        snapshot, complaints = load_newest(folder)
        for complaint in complaints:
            notice(f"{complaint}; using an older checkpoint")
        if snapshot is None:
            return None
        saved = snapshot.meta["description"]
        self.description["chosen"] = saved["chosen"]
        unlike = differences(
            {k: v for k, v in saved.items() if k != "limits"},
            {k: v for k, v in self.description.items() if k != "limits"},
        )
        if unlike:
            raise CheckpointError(
                f"the checkpoint in {folder} is of another run; only max_steps and num_epochs may differ:\n  "
                + "\n  ".join(unlike)
            )
        if snapshot.meta["step"] > self.description["limits"]["total_steps"]:
            raise CheckpointError(
                f"the checkpoint in {folder} stands at step {snapshot.meta['step']}, past the {self.description['limits']['total_steps']} "
                "steps asked for: raise max_steps or num_epochs"
            )
        return snapshot


def make_driver(strategy: Strategy, fleet: Fleet, worker: Worker, stream: Stream, run: Run, compute: str) -> Driver:
    """Return what takes `strategy`, copied so that it starts fresh, through training."""
    if isinstance(strategy, CommunicateOptimizeStrategy):
        return StackedDriver(copy.deepcopy(strategy), fleet, worker, stream, run, compute)
    return NodeDriver(strategy, fleet, worker, stream, run, compute)


def describe(value: Any) -> Any:
    """Return an object as JSON: its class name and the arguments it was made with."""
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, dict):
        return {str(key): describe(item) for key, item in value.items()}
    given = getattr(value, "given_arguments", None)
    if given is not None:
        return {"name": type(value).__name__} | {key: describe(item) for key, item in given.items()}
    if isinstance(value, type) or callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return repr(value)


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the torch device named, or the best one for "auto".

    Raises:
        ArgumentError: an unknown device, or one that is not there.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ArgumentError(f"device={device!r} is unknown: wanted 'auto', 'cpu', 'cuda', 'cuda:0', 'mps'") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(f"device={device!r}: torch sees no CUDA GPU here; use device='cpu' or 'auto'")
    if place.type == "mps" and not torch.backends.mps.is_available():
        raise ArgumentError(f"device={device!r}: no Apple GPU here; use device='cpu' or 'auto'")
    if place.type not in ("cpu", "cuda", "mps"):
        raise ArgumentError(f"device={device!r} is not supported: wanted 'cpu', 'cuda' or 'mps'")
    return torch.device("cuda", place.index or 0) if place.type == "cuda" else place


def _total_steps(num_epochs: int | None, max_steps: int | None, steps_per_epoch: int) -> int:
    if num_epochs is None:
        return steps_per_epoch if max_steps is None else max_steps
    return min(num_epochs * steps_per_epoch, max_steps or num_epochs * steps_per_epoch)


class _one_thread:
    """One intra-op thread on the CPU while training (equal bits, and no collapse under load); restored after."""

    def __init__(self, device: torch.device):
        self.wanted = 1 if device.type == "cpu" else torch.get_num_threads()

    def __enter__(self) -> None:
        self.before = torch.get_num_threads()
        torch.set_num_threads(self.wanted)

    def __exit__(self, *exc: object) -> None:
        torch.set_num_threads(self.before)


def _initialise_lazy(worker: Worker, batch: Any) -> None:
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in worker.model.parameters()):
        with torch.no_grad():
            worker.loss(worker.to_device(batch))


def _choose_compute(worker: Worker, stream: Stream, num_nodes: int) -> str:
    """Time one gradient of up to ten rows each way; return "loop" or "vmap" and say which."""
    try:
        vmap = VmapGradients(worker)
        rows = list(range(min(num_nodes, vmap.chunk_rows)))
        batches = [next(iter(stream.batches(node, 0, 1))) for node in rows]
        times = {"loop": np.inf, "vmap": np.inf}
        for _ in range(4):
            start = time.perf_counter()
            for row, batch in zip(rows, batches, strict=True):
                worker.point(row)
                worker.gradient(batch, row)
            middle = time.perf_counter()
            vmap(rows, batches)
            times["loop"] = min(times["loop"], middle - start)
            times["vmap"] = min(times["vmap"], time.perf_counter() - middle)
        worker.clear_grads()
    except ModelError as error:
        notice(f"compute='auto' chose 'loop': {error}")
        return "loop"
    chosen = min(times, key=lambda name: times[name])
    per_row = {name: 1e3 * seconds / len(rows) for name, seconds in times.items()}
    notice(
        f"compute='auto' chose {chosen!r} (loop {per_row['loop']:.2f} ms, vmap {per_row['vmap']:.2f} ms per node-step)"
    )
    return chosen


def _warn_if_never(driver: Driver, total_steps: int, strategy: Strategy) -> None:
    first = driver.next_event(0)
    if total_steps < first < NEVER:
        warnings.warn(
            f"{type(strategy).__name__} first communicates after step {first}, but the run has {total_steps} steps: nodes meet only "
            "in the final synchronisation; lower H or train longer",
            stacklevel=4,
        )


def _summary(history: History) -> dict[str, Any]:
    return (
        dict(history[-1])
        if len(history) and history[-1]["node"] is None
        else next((dict(r) for r in reversed(list(history.rows(node=None)))), {})
    )


def _digest(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]
