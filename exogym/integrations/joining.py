"""Join a launcher's processes as nodes, and hide the launch from a trainer that would wrap the model or deal the data.

Trainers read the launcher's environment variables. Without these variables, a trainer in each process believes that it
is alone: it does not wrap the model in DDP, and does not divide the data.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from exogym.attached.node import wire_of_world
from exogym.attached.nodes import Nodes, attach
from exogym.core.communicator import gather
from exogym.core.progress import notice
from exogym.errors import ArgumentError
from exogym.integrations.optimizer import StrategyOptimizer
from exogym.strategy.outer import few_rounds

LAUNCHED = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK",  # torchrun
    "TORCHELASTIC_RUN_ID", "SLURM_NTASKS",  # how Lightning sees a launch
    "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE",  # how Accelerate sees MPI
)  # fmt: skip


class Joined:
    """This process among the nodes of a launch.

    Args:
        options: `seed` and the other options for `exogym.attach`.

    Attributes:
        rank: the node's number.
        num_nodes: N, the number of nodes.

    Raises:
        ArgumentError: the process sees several GPUs, and CUDA has begun to use them.
    """

    def __init__(self, strategy: Any, **options: Any) -> None:
        self.strategy, self.options = strategy, options
        gpus = _see_own_gpu()  # first: CUDA reads CUDA_VISIBLE_DEVICES when it starts, and is_available() starts CUDA
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.wire = wire_of_world(device, gpus)
        self.rank, self.num_nodes = self.wire.ranks[0], len(self.wire.placement)
        for name in LAUNCHED:
            os.environ.pop(name, None)

    def follow(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Nodes:
        """Attach the strategy to a trainer that calls `optimizer.step()`; see `Nodes.follow_optimizer`."""
        if isinstance(optimizer, StrategyOptimizer):
            nodes = attach(model, None, self.strategy, **self.options)
            optimizer.nodes = nodes
        else:
            nodes = attach(model, optimizer, self.strategy, **self.options)
            nodes.follow_optimizer()
        return nodes

    def look_at_length(self, total_steps: int) -> None:
        """Say if a run of `total_steps` steps is too short for the strategy's default outer momentum."""
        if self.wire.is_main and (text := few_rounds(self.strategy, total_steps)) is not None:
            notice(text, about="few outer rounds", once=True)

    def check_own(self, own: list[tuple[str, str]]) -> None:
        """Raise ArgumentError if another node has an equal path. All nodes make this call together.

        Args:
            own: (option, path) pairs. The option decides the path.
        """
        others = [told for rank, told in enumerate(gather(self.wire, [path for _, path in own])) if rank != self.rank]
        for option, path in own:
            if any(path in told for told in others):
                raise ArgumentError(
                    f"{option}={path!r} is the same for several nodes, which would overwrite each other's files: give "
                    f"each node its own, such as {option}=f'{path}/node-{{callback.rank}}'"
                )


def _see_own_gpu() -> int:
    """Leave this process only the GPU with its local rank's number, so that a trainer uses no other.

    Returns:
        The number of GPUs that this process saw before.
    """
    count = torch.cuda.device_count()  # the driver's count, without CUDA
    if "LOCAL_RANK" not in os.environ or count <= 1:
        return count
    if torch.cuda.is_initialized():
        raise ArgumentError(
            f"this process sees {count} GPUs and has begun to use CUDA: make the callback before anything uses a GPU, "
            "or start each process with its own CUDA_VISIBLE_DEVICES"
        )
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = seen[int(os.environ["LOCAL_RANK"]) % count]
    return count
