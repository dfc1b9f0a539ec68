"""Train with a strategy inside Hugging Face's `Trainer`: a callback makes each process a node.

    callback = ExoGymCallback(DiLoCoStrategy(H=50, outer_lr=1.0, outer_momentum=0.0))  # before TrainingArguments
    args = TrainingArguments(
        output_dir=f"out/node-{callback.rank}", train_sampling_strategy="sequential", max_grad_norm=0.0, ...
    )
    Trainer(model, args, train_dataset=callback.deal(dataset), callbacks=[callback]).train()

The callback hides the launch from the `Trainer`, so that it doesn't wrap the model in DDP or distribute the data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from exogym.core.base.devices import CPU
from exogym.errors import ArgumentError, CheckpointError, checked
from exogym.integrations.dealing import Dealt
from exogym.integrations.joining import Adapter, StrategyOptimizer, has_schedule, refuse

__all__ = ["ExoGymCallback"]
STATE = "nodes.pt"  # in each checkpoint of the Trainer


class ExoGymCallback(Adapter, TrainerCallback):
    """A callback for Hugging Face's `Trainer` that trains with a strategy. Each process is a node.

    Create the callback before `TrainingArguments`. The `Trainer` keeps its loop, optimizer, schedule, logs and
    checkpoints, and torch's hooks do the strategy's part before and after each optimizer step. Each step's random
    numbers are seeded as in `fit`. After training, the model holds the averaged parameters. Until then, each `Trainer`
    evaluates and saves its own node's model, so its best checkpoint is not the best averaged model. To get a copy of
    the averaged model, call `callback.nodes.model_of(None)` on all nodes together, for example in `on_evaluate`.

    Args:
        strategy: as for `exogym.attach`. If the `Trainer` has its own optimizer, don't describe an inner optimizer in
            the strategy.
        total_steps, seed: as for `exogym.attach`.

    Attributes:
        rank, num_nodes: the node's number, and the number of nodes.
        nodes: the attached `Nodes`, once training has started.

    Refused options of the `Trainer`: `fsdp`, `deepspeed`, `fp16`, `load_best_model_at_end`, `auto_find_batch_size`,
    `EarlyStoppingCallback`, `dataloader_persistent_workers`, a schedule if the strategy has `lr_scheduler` or
    `warmup_steps` or its own optimizer takes the steps, and `max_grad_norm` if the strategy averages gradients.

    Raises:
        ArgumentError: the `Trainer`'s options contradict the strategy, or would wrap the model.
        CheckpointError: the `Trainer` resumed from a checkpoint without the node's state.
    """

    @checked
    def __init__(self, strategy: Any, *, total_steps: int | None = None, seed: int = 0):
        super().__init__(strategy, total_steps=total_steps, seed=seed)
        self._sizes: list[int] = []  # the batch sizes of an epoch's last step, if the last batch is shorter
        self._batch = 0  # the batch's position in its step
        self._steps_of_epoch = 0
        self._hook: Any = None

    def deal(self, dataset: Any) -> Dealt:
        """Return this node's examples of `dataset`, for `Trainer(train_dataset=)`.

        Each epoch distributes the examples anew and without overlap, as `fit` does.

        Raises:
            DataError: `dataset` is an iterable without positions, or not a usable data set.
        """
        return Dealt(dataset, self.num_nodes, self.rank, self.seed)

    # The Trainer's hooks

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.world_size > 1 or args.n_gpu > 1:
            raise ArgumentError(
                f"the Trainer sees {max(args.world_size, args.n_gpu)} devices and would wrap the model in DDP or "
                "DataParallel: create the ExoGymCallback before TrainingArguments and before any Accelerator"
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer, loader = kwargs["model"], kwargs["optimizer"], kwargs["train_dataloader"]
        optimizer = optimizer.optimizer
        self._check(args, state, loader, isinstance(optimizer, StrategyOptimizer))
        self._check_own([("output_dir", str(Path(args.output_dir)))])
        self._follow(model, optimizer)
        if not state.global_step:
            self._look_at_length(state.max_steps)
        else:
            self._resume(Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE, state.global_step)
        self._look_at_last_step(model, args, loader)
        if hasattr(model, "should_save_on_this_rank"):  # otherwise only torch's rank 0 would write a checkpoint's model
            model.should_save_on_this_rank = lambda is_main_process: is_main_process

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.nodes is not None
        self.nodes.reseed()
        self._batch = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._batch += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._weight(1.0)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.nodes is not None and not self.nodes.is_over:
            torch.save(self.nodes.state_dict(), Path(args.output_dir) / f"checkpoint-{state.global_step}" / STATE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.nodes is not None and not self.nodes.is_over:
            vars(self.nodes.finish()).pop("should_save_on_this_rank", None)
        if self._hook is not None:
            self._hook.remove()

    def _look_at_last_step(self, model: nn.Module, args: Any, loader: Any) -> None:
        """Weight an epoch's last step by examples if its last batch is shorter than the others.

        The Trainer weights batches equally, unless it passes the step's number of targets to the model.
        """
        count, size, parts = len(loader.dataset), args.train_batch_size, args.gradient_accumulation_steps
        rest, self._steps_of_epoch = count % (size * parts), -(-count // (size * parts))
        if rest <= size or rest % size == 0 or args.dataloader_drop_last or not isinstance(loader.dataset, Dealt):
            return
        self._sizes = [size] * (rest // size) + [rest % size]
        self._hook = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def _before_forward(self, model: nn.Module, given: Any, named: dict[str, Any]) -> None:
        assert self.nodes is not None
        if not model.training or named.get("num_items_in_batch") is not None:
            return
        if "labels" not in named:
            raise ArgumentError(
                f"the last step of an epoch has batches of {self._sizes} examples, and the loss is computed outside "
                "the model, so the callback cannot know how the Trainer weights them: set dataloader_drop_last=True, "
                "or use a data set that gives each node a multiple of per_device_train_batch_size examples"
            )
        if self.nodes.step_count % self._steps_of_epoch == self._steps_of_epoch - 1:
            self._weight(self._sizes[self._batch] * len(self._sizes) / sum(self._sizes), model.parameters())

    def _resume(self, file: Path, step: int) -> None:
        assert self.nodes is not None
        if not file.exists():
            raise CheckpointError(
                f"the Trainer resumed at step {step}, but {file} does not exist: resume from a checkpoint in this "
                "node's own output_dir"
            )
        self.nodes.load_state_dict(torch.load(file, map_location=CPU))

    def _check(self, args: Any, state: Any, loader: Any, is_strategys: bool) -> None:
        """Raise ArgumentError if one of the Trainer's options contradicts the strategy."""
        dataset = getattr(loader, "dataset", None)
        refuse(args, [
            (bool(args.fsdp), "fsdp", "each process is a whole node", "leave it out"),
            (args.deepspeed is not None, "deepspeed", "each process is a whole node", "leave it out"),
            (args.fp16, "fp16", "its loss scaling would skip steps on single nodes", "set bf16=True"),
            (args.load_best_model_at_end, "load_best_model_at_end", "each node would load its own best model",
             "leave it out"),
            (args.auto_find_batch_size, "auto_find_batch_size", "it starts training again", "leave it out"),
            (isinstance(dataset, Dealt) and args.train_sampling_strategy != "sequential", "train_sampling_strategy",
             "callback.deal(...) has already distributed and shuffled the examples",
             "set train_sampling_strategy='sequential'"),
            (not isinstance(dataset, Dealt) and self.num_nodes > 1, "train_dataset",
             "every node would train on all examples", "pass train_dataset=callback.deal(dataset)"),
            (self.strategy.needs_gradients and args.max_grad_norm > 0, "max_grad_norm",
             "the Trainer clips each node's gradients before the strategy averages them",
             "set max_grad_norm=0.0, and pass max_norm to the strategy"),
            ("EarlyStoppingCallback" in state.stateful_callbacks, "EarlyStoppingCallback",
             "it would stop one node before the others", "leave it out"),
            (has_schedule(self.strategy) and not is_strategys, "lr_scheduler_type",
             "the strategy describes a schedule as well, and the Trainer sets the rate at every step",
             "leave lr_scheduler and warmup_steps out of the strategy"),
            (args.dataloader_persistent_workers and isinstance(dataset, Dealt), "dataloader_persistent_workers",
             "the workers would keep the examples of epoch 0", "leave it out"),
            (is_strategys and args.lr_scheduler_type != "constant", "lr_scheduler_type",
             "the strategy's own optimizer takes the steps",
             "set lr_scheduler_type='constant', and pass lr_scheduler to the strategy"),
        ])  # fmt: skip
