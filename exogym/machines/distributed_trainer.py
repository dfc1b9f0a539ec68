"""Train one model on several devices, from the objects of an ordinary PyTorch script: model, optimizer, data loader."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from exogym.core.base.devices import Device
from exogym.core.engine.engines import several_devices, world_size
from exogym.core.progress import notice
from exogym.core.record.history import History
from exogym.errors import ArgumentError, check_choice, check_count, checked
from exogym.strategy import OptimSpec, SimpleReduceStrategy
from exogym.trainer import LocalTrainer


class DistributedTrainer:
    """Train one model on `num_gpus` devices, like a `LocalTrainer` with one node of several devices.

    Under `python -m exogym.launch --nproc_per_node K` or torchrun, each of the K processes is one device. A single
    process computes the same result (up to rounding) on one device and prints a notice. Each batch of the loader is
    divided over the devices, and a step is one step on the whole batch, as on one device.

    Args:
        model: as for `LocalTrainer`.
        optimizer: a torch optimizer of this model's parameters (only its class and arguments are used), or an
            optimizer's name or an `OptimSpec`, as for strategies.
        num_gpus: number of devices; default: the number of devices of `node` or, if `node` is None, the number of
            processes that run this script.
        backend: "nccl", "gloo", or "auto" for NCCL if each process has a GPU and gloo otherwise. A single process
            ignores `backend`.
        node: a `NodeMesh` or a `PipelineParallel` that says how to split the model. None: data-parallel training with
            sharded parameters, gradients and optimizer state.
        loss_fn: as for `LocalTrainer`.

    Attributes:
        history: the records of the last call of `train`.

    Raises:
        ArgumentError: the optimizer has other parameters or several groups, or has already taken steps; the number of
            devices differs from the number of processes or from `node`; or the backend is not available.

    >>> import torch
    >>> x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    >>> loader = DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    >>> model = nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    >>> trainer = DistributedTrainer(model, optimizer, num_gpus=2, backend="gloo", loss_fn=nn.functional.mse_loss)
    >>> model = trainer.train(loader, epochs=4)
    >>> trainer.history.last["step"], trainer.history.last["train_loss"] < 0.1
    (32, True)
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | OptimSpec | str,
        num_gpus: int | None = None,
        backend: str = "auto",
        *,
        node: Any = None,
        loss_fn: Callable[..., Tensor] | None = None,
    ):
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        check_choice("backend", backend, ("auto", "nccl", "gloo"))
        if num_gpus is not None:
            check_count("num_gpus", num_gpus)
        self.model, self.loss_fn, self.history = model, loss_fn, History()
        self.optim = spec_of(optimizer, model) if isinstance(optimizer, Optimizer) else OptimSpec.of(optimizer)
        world, kind = world_size(), several_devices("fit")
        self.node = kind.sharing([num_gpus or world]) if node is None else kind.single(node)
        if num_gpus is not None and num_gpus != self.node.size:
            raise ArgumentError(f"num_gpus={num_gpus}, but node= has {self.node.size} devices: leave num_gpus out")
        if world > 1:
            kind.of(self.node, 1).processes(world)
            own = Device.named("auto").backend
            if backend not in ("auto", own):
                raise ArgumentError(f"backend={backend!r}, but the processes here use {own}: pass 'auto' or {own!r}")

    @checked
    def train(
        self,
        train_loader: DataLoader[Any],
        epochs: int = 1,
        val_loader: DataLoader[Any] | None = None,
        *,
        accumulation_steps: int = 1,
        seed: int = 0,
    ) -> nn.Module:
        """Train for `epochs` epochs and return the model; only the main process has the result.

        Args:
            train_loader: a DataLoader. The trainer uses its data set, batch size, shuffling and number of workers, but
                doesn't iterate over it. Unless it has `drop_last`, an epoch's last, shorter batch is a step as well.
            epochs: number of passes over the training data.
            val_loader: a DataLoader whose data set is evaluated after each epoch.
            accumulation_steps: number of batches per step.
            seed: seed of the data order and of the model's random numbers.

        Raises:
            ArgumentError: a loader has its own sampler, or has no batch size; or an error of `LocalTrainer.fit`.
        """
        options = _options_of(train_loader, "train_loader")
        validation = None
        if val_loader is not None:
            _options_of(val_loader, "val_loader")
            validation = val_loader.dataset
        if world_size() == 1 and self.node.size > 1:
            notice(
                f"one process simulates {self.node.size} devices: equal up to rounding, not faster. To use real "
                f"devices, start this script with python -m exogym.launch --nproc_per_node {self.node.size}"
            )
        trainer = LocalTrainer(self.model, train_loader.dataset, validation, loss_fn=self.loss_fn)
        try:
            return trainer.fit(
                SimpleReduceStrategy(self.optim), node=self.node, num_epochs=epochs,
                gradient_accumulation=accumulation_steps, seed=seed, **options,
            )  # fmt: skip
        finally:
            self.history = trainer.history


def spec_of(optimizer: Optimizer, model: nn.Module) -> OptimSpec:
    """Return an `OptimSpec` with the class and arguments of an optimizer over all trained parameters of `model`.

    Raises:
        ArgumentError: the optimizer has other parameters, several groups, or state.

    >>> model = nn.Linear(2, 1)
    >>> import torch
    >>> spec_of(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    OptimSpec(SGD, lr=0.1, momentum=0.9)
    """
    name = type(optimizer).__name__
    if len(optimizer.param_groups) > 1:
        raise ArgumentError(
            f"the {name} has {len(optimizer.param_groups)} parameter groups: pass OptimSpec({name}, groups=[(pattern, "
            "options), ...]) instead"
        )
    (group,) = optimizer.param_groups
    given, trained = {id(p) for p in group["params"]}, {id(p) for p in model.parameters() if p.requires_grad}
    if not trained <= given <= {id(p) for p in model.parameters()}:
        raise ArgumentError(
            f"the {name} does not hold the model's trained parameters: create it from model.parameters()"
        )
    if optimizer.state:
        raise ArgumentError(f"the {name} has already taken steps, and its state would be lost: pass a new optimizer")
    signature = inspect.signature(type(optimizer)).parameters
    options = {key: value for key, value in group.items() if key in signature and key != "params"}
    return OptimSpec(type(optimizer), **{k: v for k, v in options.items() if v != signature[k].default})


def _options_of(loader: DataLoader[Any], name: str) -> dict[str, Any]:
    """Return the options of `fit` that reproduce a loader's batches.

    Raises:
        ArgumentError: `loader` is not a DataLoader, or `fit` can't reproduce its batches.
    """
    if not isinstance(loader, DataLoader):
        raise ArgumentError(f"{name} must be a torch.utils.data.DataLoader, not {type(loader).__name__}")
    sampler = loader.sampler
    if loader.batch_size is None or isinstance(loader.dataset, IterableDataset):
        raise ArgumentError(
            f"{name} has no batch_size, or its data set has no length: pass a DataLoader with a batch_size and a data "
            "set with a length"
        )
    if type(sampler) not in (RandomSampler, SequentialSampler) or getattr(sampler, "replacement", False):
        raise ArgumentError(
            f"{name} has its own {type(sampler).__name__}, but the trainer itself chooses each device's examples: set "
            "shuffle=True or False instead"
        )
    plain = {"collate_fn": default_collate, "num_workers": 0, "worker_init_fn": None, "drop_last": False}
    kwargs = {option: getattr(loader, option) for option in plain if getattr(loader, option) != plain[option]}
    return {
        "batch_size": loader.batch_size, "shuffle": type(sampler) is RandomSampler,
        "dataloader_kwargs": kwargs or None,
    }  # fmt: skip
