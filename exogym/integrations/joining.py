"""Join a launcher's processes as nodes, and hide the launch from a trainer that would wrap the model or deal the data.

Trainers read the launcher's environment variables. If the variables are hidden, the trainer in each process behaves as
in a single process: it doesn't wrap the model in DDP or divide the data.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from exogym.attached.node import wire_of_world
from exogym.attached.nodes import Nodes, attach
from exogym.core.base.devices import Device, is_accelerator_used
from exogym.core.communicator import gather
from exogym.core.progress import notice
from exogym.errors import ArgumentError, checked
from exogym.integrations.dealing import GradientWeight
from exogym.strategy.outer import few_rounds

RATE = 1.0  # the learning rate of a `StrategyOptimizer` that a trainer sees, without effect
LAUNCHED = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK",  # torchrun
    "TORCHELASTIC_RUN_ID", "SLURM_NTASKS",  # how Lightning sees a launch
    "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE",  # how Accelerate sees MPI
)  # fmt: skip


class StrategyOptimizer(Optimizer):
    """An optimizer whose `step()` takes the node's step with the strategy's own optimizer.

    Give a trainer this object as its optimizer. The strategy's `lr` and `lr_scheduler` determine the learning rate, and
    this object's rate has no effect, so it is an error if a trainer's scheduler changes this rate.

    Args:
        model: the model with the trained parameters.

    Attributes:
        nodes: the attached `Nodes`, from the start of training on.
    """

    def __init__(self, model: nn.Module):
        super().__init__([p for p in model.parameters() if p.requires_grad], {"lr": RATE})
        self.nodes: Nodes | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Tensor | float | None:  # type: ignore[override]
        """Compute the gradients with `closure`, if there is one, and take the node's step.

        Raises:
            ArgumentError: no run is attached, or a scheduler changed the learning rate.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.nodes is None:
            raise ArgumentError(
                "the strategy's optimizer was stepped before training began: pass the callback to the trainer"
            )
        if any(group["lr"] != RATE for group in self.param_groups):
            raise ArgumentError(
                "a scheduler changed the learning rate of the trainer's optimizer, but the strategy's own optimizer "
                "takes the steps: remove the trainer's scheduler, and pass lr_scheduler to the strategy"
            )
        self.nodes.step()
        return loss


class Adapter:
    """Base class of all adapters, which make this process a node in another library's trainer.

    Args:
        strategy, total_steps, seed: as for `exogym.attach`.

    Attributes:
        rank, num_nodes: the node's number, and the number of nodes.
        nodes: the attached `Nodes`, from the start of training on.

    Raises:
        ArgumentError: the process sees several GPUs, and CUDA is already initialized.
    """

    @checked
    def __init__(self, strategy: Any, *, total_steps: int | None = None, seed: int = 0):
        super().__init__()  # the library's own base class
        self.strategy, self.total_steps, self.seed = strategy, total_steps, seed
        self.nodes: Nodes | None = None
        self._weight = GradientWeight()
        gpus = _see_own_gpu()  # first: CUDA reads CUDA_VISIBLE_DEVICES when it starts, and is_available() starts CUDA
        device = Device.named("auto").place
        self._wire = wire_of_world(device, gpus)
        self.rank, self.num_nodes = self._wire.ranks[0], len(self._wire.placement)
        for name in LAUNCHED:
            os.environ.pop(name, None)

    def optimizer(self, model: Any) -> StrategyOptimizer:
        """Return an optimizer for the trainer that lets the strategy's own optimizer take the steps.

        Strategies with their own update rule, such as DeMo, need it.
        """
        return StrategyOptimizer(model)

    def _follow(self, model: nn.Module, optimizer: Optimizer) -> Nodes:
        """Attach the strategy to a trainer that calls `optimizer.step()`; see `Nodes.follow_optimizer`."""
        own = None if isinstance(optimizer, StrategyOptimizer) else optimizer
        self.nodes = nodes = attach(model, own, self.strategy, total_steps=self.total_steps, seed=self.seed)
        if isinstance(optimizer, StrategyOptimizer):
            optimizer.nodes = nodes
        else:
            nodes.follow_optimizer()
        return nodes

    def _look_at_length(self, total_steps: int) -> None:
        """Print a notice if a run of `total_steps` steps is too short for the strategy's default outer momentum."""
        if self._wire.is_main and (text := few_rounds(self.strategy, total_steps)) is not None:
            notice(text, about="few outer rounds", once=True)

    def _check_own(self, own: list[tuple[str, str]]) -> None:
        """Raise ArgumentError if another node has the same path. All nodes call this method together.

        Args:
            own: (option, path) pairs: the option that determines the path, and the path.
        """
        others = [told for rank, told in enumerate(gather(self._wire, [path for _, path in own])) if rank != self.rank]
        for option, path in own:
            if any(path in told for told in others):
                raise ArgumentError(
                    f"{option}={path!r} is the same for several nodes, which would overwrite each other's files: use "
                    f"one folder per node, such as {option}=f'{path}/node-{{callback.rank}}'"
                )


def has_schedule(strategy: Any) -> bool:
    """Return whether the strategy describes a learning-rate schedule."""
    return bool({"lr_scheduler", "warmup_steps"} & vars(strategy).get("given_arguments", {}).keys())


def refuse(options: Any, wrong: list[tuple[bool, str, str, str]]) -> None:
    """Raise ArgumentError for the first wrong option of a trainer.

    Args:
        options: the object whose attributes are the options.
        wrong: for each option (whether it is wrong, its name, the reason, what to do instead).
    """
    for is_wrong, name, why, instead in wrong:
        if is_wrong:
            given = f"={getattr(options, name)!r}" if hasattr(options, name) else ""
            raise ArgumentError(f"{name}{given} with ExoGymCallback: {why}; {instead}")


def _see_own_gpu() -> int:
    """Hide all GPUs except the one with this process's local rank, so that a trainer uses no other.

    Returns:
        The number of GPUs that this process saw before.
    """
    count = torch.accelerator.device_count()  # the driver's count, without CUDA
    if "LOCAL_RANK" not in os.environ or count <= 1:
        return count
    if is_accelerator_used():
        raise ArgumentError(
            f"this process sees {count} GPUs and has initialized CUDA: create the callback before anything uses a "
            "GPU, or start each process with its own CUDA_VISIBLE_DEVICES"
        )
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = seen[int(os.environ["LOCAL_RANK"]) % count]
    return count
