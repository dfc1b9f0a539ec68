"""Process groups, collectives, a sampler and torch's data parallel wrapper, for training loops that you write yourself.

To train with a strategy, use `exogym.LocalTrainer`.

An example with one process; under the launcher, every process makes the same calls:

>>> import tempfile
>>> from pathlib import Path
>>> import torch
>>> try:
...     barrier()
... except GroupError as error:
...     is_initialized()
False
>>> init_process_group("gloo", world_size=1)
>>> x = torch.tensor([1.0, 2.0])
>>> all_reduce(x).tolist(), all_reduce(x, "max").tolist()
([1.0, 2.0], [1.0, 2.0])
>>> all_gather(x)[0].tolist(), gather(x)[0].tolist(), scatter([x]).tolist(), reduce_scatter(x).tolist()
([1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [1.0, 2.0])
>>> model = DistributedDataParallel(torch.nn.Linear(2, 1))
>>> with no_sync(model):
...     model(x).sum().backward()  # adds up gradients without sending them
>>> barrier()
>>> destroy_process_group()
>>> with tempfile.TemporaryDirectory() as folder:
...     script = Path(folder, "hello.py")
...     lines = "import torch, exogym.distributed as d; d.init_process_group()", "rank = d.get_rank()"
...     more = "d.send(torch.ones(1), 1) if rank == 0 else d.recv(0)", "d.self_test([64], 1)"
...     _ = script.write_text(chr(10).join([*lines, *more]))
...     launch_distributed_training(script, nproc_per_node=2, log_dir=folder)
0
"""

from exogym.machines.distributed.bare import ReduceOp
from exogym.machines.distributed.collectives import (
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
from exogym.machines.distributed.data_parallel import DistributedDataParallel, DistributedSampler, no_sync
from exogym.machines.distributed.group import (
    GroupError,
    destroy_process_group,
    get_distributed_info,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
)
from exogym.machines.distributed.measure import self_test, table
from exogym.machines.launch import DistributedLauncher, LaunchConfig, launch_distributed_training

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
