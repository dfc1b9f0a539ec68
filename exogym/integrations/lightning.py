"""Train with a strategy inside Lightning's `Trainer`: a callback makes each process a node.

    callback = ExoGymCallback(DiLoCoStrategy(H=50, outer_lr=1.0, outer_momentum=0.0))  # before the Trainer
    trainer = Trainer(default_root_dir=f"out/node-{callback.rank}", callbacks=[callback], ...)
    trainer.fit(module, callback.loader(dataset, batch_size=32))

The callback hides the launch from the `Trainer`, so that it doesn't wrap the model in DDP or distribute the data.
"""

from __future__ import annotations

import importlib
import math
import os
from pathlib import Path
from typing import Any

from exogym.attached.loading import NodeLoader, stream_of_node
from exogym.data.stream import Stream
from exogym.errors import ArgumentError, CheckpointError, checked
from exogym.integrations.dealing import MicroBatches
from exogym.integrations.joining import Adapter, has_schedule, refuse

__all__ = ["ExoGymCallback"]
PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # one library under two names, each with its own classes
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")
ALONE = "it would stop one node before the others"
AVERAGES = "it averages the model itself"
TRIES = "it trains for a trial"
CALLBACKS = {
    "EarlyStopping": ALONE,
    "Timer": ALONE,
    "StochasticWeightAveraging": AVERAGES,
    "WeightAveraging": AVERAGES,
    "BatchSizeFinder": TRIES,
    "LearningRateFinder": TRIES,
    "BaseFinetuning": "no node would share the parameters that it unfreezes",
    "GradientAccumulationScheduler": "the batches of a step are distributed before training",
}


def _installed() -> list[Any]:
    """Return the `rank_zero` module and the `Callback` class of each installed package."""
    found = []
    for package in PACKAGES:
        try:
            found.append(importlib.import_module(package))
        except ModuleNotFoundError as error:
            if error.name not in (package, package.partition(".")[0]):
                raise
    if not found:
        raise ModuleNotFoundError("ExoGymCallback needs Lightning: pip install 'exogym[lightning]'", name="lightning")
    return found


_LIGHTNING = _installed()


class ExoGymCallback(Adapter, *(package.Callback for package in _LIGHTNING)):  # type: ignore[misc]
    """A Lightning callback that trains with a strategy. Each process is a node.

    Create the callback before the `Trainer`, which keeps its loop, optimizer, schedule, logs and checkpoints. Through
    torch's hooks, each `optimizer.step()` takes the node's step, and each step's random numbers are seeded as in `fit`.
    After training, the module holds the averaged parameters. Until then, each `Trainer` evaluates and saves its own
    node's model, so its "best" checkpoint is not the best averaged model. To get a copy of the averaged model, call
    `callback.nodes.model_of(None)` on all nodes together, for example in `on_validation_end`.

    Args:
        strategy: as for `exogym.attach`. If the module returns an optimizer, don't describe an inner optimizer in the
            strategy.
        total_steps, seed: as for `exogym.attach`.

    Attributes:
        rank, num_nodes: the node's number, and the number of nodes.
        nodes: the attached `Nodes`, once training has started.

    Refused: several devices or optimizers, `strategy="ddp"` and others, fp16, `overfit_batches`, validation or the end
    of an epoch between the batches of a step, a schedule if the strategy has `lr_scheduler` or `warmup_steps`,
    `gradient_clip_val` with "bf16-mixed" or if the strategy averages gradients, and callbacks that stop, average,
    unfreeze or tune a single node, such as `EarlyStopping`, `Timer` (`max_time`), `WeightAveraging` and
    `LearningRateFinder`.

    Raises:
        ArgumentError: the `Trainer`'s options contradict the strategy, or would wrap the model.
        CheckpointError: the `Trainer` resumed from a checkpoint without the node's state.
    """

    @checked
    def __init__(self, strategy: Any, *, total_steps: int | None = None, seed: int = 0):
        if "LOCAL_RANK" in os.environ and "RANK" not in os.environ:  # so Lightning starts its own processes
            raise ArgumentError(
                "Lightning's Trainer has started this process, because it has more than one device: pass devices=1 "
                "to the Trainer, and start one process per node with torchrun or python -m exogym.launch"
            )
        super().__init__(strategy, total_steps=total_steps, seed=seed)
        for package in _LIGHTNING:  # it read the launch when it was imported
            package.utilities.rank_zero_only.rank = 0
        self._state: dict[str, Any] = {}
        self._stream: Stream | None = None
        self._begun = -1  # the last step that was seeded

    @checked
    def loader(
        self, dataset: Any, batch_size: int = 32, *, gradient_accumulation: int = 1, shuffle: bool = True,
        partitioner: Any = None, dataloader_kwargs: dict[str, Any] | None = None,
    ) -> MicroBatches:  # fmt: skip
        """Return this node's batches of `dataset`, for `Trainer.fit` or the module's `train_dataloader`.

        The arguments are the same as in `Nodes.loader`. `gradient_accumulation` must equal the `Trainer`'s
        `accumulate_grad_batches`.

        Raises:
            ArgumentError: an argument is wrong.
            DataError: `dataset` cannot be used.
        """
        stream = stream_of_node(
            dataset, self.strategy, self.num_nodes, self.seed, batch_size=batch_size,
            gradient_accumulation=gradient_accumulation, shuffle=shuffle, partitioner=partitioner,
            dataloader_kwargs=dataloader_kwargs,
        )  # fmt: skip
        self._stream = stream
        if self.nodes is not None:
            self.nodes._node.take_stream(stream)
        return MicroBatches(NodeLoader(stream, self.rank, gradient_accumulation, self._step))

    def _step(self) -> int:
        if self.nodes is None:
            raise ArgumentError(
                "callback.loader was read, but no training with the callback has begun: pass callbacks=[callback] to "
                "the Trainer"
            )
        return self.nodes.step_count

    # The Trainer's hooks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        kinds = {cls.__name__ for cls in type(trainer.strategy).__mro__}
        if stage == "fit" and (trainer.world_size > 1 or "SingleDeviceStrategy" not in kinds):
            raise ArgumentError(
                f"the Trainer has strategy={type(trainer.strategy).__name__} with {trainer.world_size} processes, and "
                "would wrap or split the model: create the ExoGymCallback before the Trainer, and pass devices=1 and "
                "strategy='auto' to the Trainer"
            )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._check(trainer)
        self._check_own(_paths(trainer))
        nodes = self._follow(pl_module, trainer.optimizers[0])
        if self._stream is not None:
            nodes._node.take_stream(self._stream)
        for module in pl_module.modules():
            if hasattr(module, "distributed_available_fn"):  # torchmetrics would combine the nodes' values
                module.distributed_available_fn = _never
        if self._state:
            nodes.load_state_dict(self._state)
            self._state = {}
        self._begun = -1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._check_loader(trainer, trainer.train_dataloader, pl_module.automatic_optimization)
        assert self.nodes is not None
        if trainer.global_step != self.nodes.step_count:
            raise CheckpointError(
                f"the Trainer is at step {trainer.global_step}, but the node is at step {self.nodes.step_count}: "
                "resume from a checkpoint that a Trainer with this callback saved after a training step, or create a "
                "new Trainer and a new callback"
            )
        steps = trainer.estimated_stepping_batches
        if not trainer.global_step and pl_module.automatic_optimization and math.isfinite(steps):
            self._look_at_length(int(steps))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert self.nodes is not None
        if self._begun != self.nodes.step_count:  # otherwise this is another micro-batch of a step
            self._begun = self.nodes.step_count
            self.nodes.reseed()
        loader = trainer.train_dataloader
        if isinstance(loader, MicroBatches):  # the Trainer prefetches batches
            self._weight(loader.weights.popleft(), pl_module.parameters())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._weight(1.0)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.nodes is not None and not self.nodes.is_over:
            self.nodes.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the node's state for the `Trainer`'s checkpoint; {} between micro-batches and after training."""
        if self.nodes is None or self.nodes.is_over or self._begun == self.nodes.step_count:
            return {}
        return self.nodes.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until training starts."""
        self._state = state_dict

    # What is refused

    def _check(self, trainer: Any) -> None:
        """Raise ArgumentError if one of the Trainer's options contradicts the strategy."""
        for callback in trainer.callbacks:
            for name in CALLBACKS.keys() & {cls.__name__ for cls in type(callback).__mro__}:
                raise ArgumentError(f"{name} with ExoGymCallback: {CALLBACKS[name]}; leave it out")
        clips = trainer.gradient_clip_val is not None and trainer.gradient_clip_val > 0
        refuse(trainer, [
            (trainer.precision not in PRECISIONS, "precision",
             "loss scaling would skip steps on single nodes, and other settings are not tested", "use 'bf16-mixed'"),
            (len(trainer.optimizers) != 1, "configure_optimizers",
             f"it returns {len(trainer.optimizers)} optimizers, but a node has only one",
             "return one optimizer with parameter groups"),
            (bool(trainer.lr_scheduler_configs) and has_schedule(self.strategy), "lr_scheduler",
             "the strategy and the module both describe a schedule", "leave one out"),
            (clips and self.strategy.needs_gradients, "gradient_clip_val",
             "the Trainer clips each node's gradients before the strategy averages them",
             "leave it out, and pass max_norm to the strategy"),
            (clips and trainer.precision == "bf16-mixed", "gradient_clip_val",
             "Lightning's mixed precision does not clip gradients if the optimizer has hooks",
             "leave it out, and pass max_norm to the strategy"),
            (bool(trainer.overfit_batches), "overfit_batches", "each epoch would take other batches",
             "pass a small data set to callback.loader"),
        ])  # fmt: skip

    def _check_loader(self, trainer: Any, loader: Any, counts: bool) -> None:
        """Raise ArgumentError if the batches are not the node's, or, if it `counts`, don't match the steps."""
        ours = isinstance(loader, MicroBatches)
        parts = trainer.accumulate_grad_batches if counts or not ours else loader.loader.batches_per_step
        refuse(trainer, [
            (not ours and self.num_nodes > 1, "train_dataloaders", "every node would train on all examples",
             "pass callback.loader(dataset, batch_size) to fit"),
            (ours and loader.loader.batches_per_step != parts, "accumulate_grad_batches",
             "callback.loader yields another number of batches per step",
             f"pass gradient_accumulation={parts} to callback.loader"),
            (ours and _cuts(trainer.num_training_batches, parts), "limit_train_batches",
             "an epoch would end between the batches of a step", f"use an integer multiple of {parts}"),
            (ours and _cuts(trainer.val_check_batch or 0, parts), "val_check_interval",
             "it falls between the batches of a step", f"use an integer multiple of {parts}"),
        ])  # fmt: skip


def _never() -> bool:
    return False


def _cuts(batches: float, parts: int) -> bool:
    """Return whether this number of batches ends within a step."""
    return math.isfinite(batches) and batches % parts != 0


def _paths(trainer: Any) -> list[tuple[str, str]]:
    """Return (option, folder) for each folder that the Trainer writes to and the option that determines it."""
    root, found = Path(trainer.default_root_dir), []
    for logger in trainer.loggers:
        if (folder := getattr(logger, "log_dir", None) and logger.save_dir) is not None:
            found.append(("default_root_dir" if Path(folder) == root else "save_dir", str(folder)))
    logged = [Path(folder) for _, folder in found]
    for callback in trainer.checkpoint_callbacks:
        folder = getattr(callback, "dirpath", None)
        if folder is None or any(parent in logged for parent in Path(folder).parents):
            continue
        is_usual = Path(folder) == root / "checkpoints"
        found.append(("default_root_dir", str(root)) if is_usual else ("dirpath", str(folder)))
    return found
