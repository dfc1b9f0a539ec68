"""The lower level: one process among several, with its collectives, its sampler and torch's data parallel wrapper.

For training with a strategy use `exogym.LocalTrainer`; this is what a training loop written by hand needs.
"""

from exogym.distributed.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from exogym.distributed.data_parallel import DistributedDataParallel, DistributedSampler, no_sync
from exogym.distributed.group import (
    GroupError,
    destroy_process_group,
    get_distributed_info,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
)
from exogym.distributed.measure import self_test, table
from exogym.distributed.operation import ReduceOp
from exogym.launch import DistributedLauncher, LaunchConfig, launch_distributed_training

__all__ = [
    "DistributedDataParallel",
    "DistributedLauncher",
    "DistributedSampler",
    "GroupError",
    "LaunchConfig",
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "destroy_process_group",
    "gather",
    "get_distributed_info",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "launch_distributed_training",
    "no_sync",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "self_test",
    "send",
    "table",
]
