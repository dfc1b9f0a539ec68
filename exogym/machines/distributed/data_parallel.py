"""Data parallel training in your own loop: torch's wrapper for models and its sampler, with more checks."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from exogym.errors import ArgumentError, check_count, check_number, checked, nearest
from exogym.machines.distributed.group import get_rank, get_world_size

_DDP = nn.parallel.DistributedDataParallel


class DistributedDataParallel(_DDP):
    """Torch's DistributedDataParallel, which averages gradients while the backward pass is running.

    Args:
        module: the model, on its device.
        bucket_size_mb: MiB of gradients per message, by default 25. In torch, this option is `bucket_cap_mb`.
        options: torch's options, such as `find_unused_parameters`, `gradient_as_bucket_view` or `static_graph`.

    Raises:
        ArgumentError: an option is unknown, or both `bucket_size_mb` and `bucket_cap_mb` are given.
    """

    def __init__(self, module: nn.Module, *args: Any, bucket_size_mb: float | None = None, **options: Any):
        known = [n for n in inspect.signature(_DDP.__init__).parameters if n != "self"]
        for name in options:
            if name not in known:
                raise ArgumentError(
                    f"DistributedDataParallel() has no argument {name!r}: {nearest(name, [*known, 'bucket_size_mb'])}"
                )
        if bucket_size_mb is not None:
            if "bucket_cap_mb" in options:
                raise ArgumentError("bucket_size_mb= and bucket_cap_mb= are the same option: pass only one")
            check_number("bucket_size_mb", bucket_size_mb, over=0, more=" mebibytes")
            options["bucket_cap_mb"] = bucket_size_mb
        super().__init__(module, *args, **options)


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Inside `with no_sync(model):`, each process adds up its gradients without averaging them over the processes.

    The first backward pass after the block averages the sum of all these gradients.

    Raises:
        ArgumentError: `model` is not wrapped in DistributedDataParallel.
    """
    if not isinstance(model, _DDP):
        raise ArgumentError(
            f"no_sync() needs a model wrapped in DistributedDataParallel, but got a {type(model).__name__}"
        )
    return model.no_sync()


class DistributedSampler(torch.utils.data.DistributedSampler[Any]):
    """Torch's DistributedSampler. It also accepts a data set's size instead of the data set.

    The sampler yields the same indices as torch's sampler. If `shuffle`, their order is drawn from `seed` and the
    epoch's number; call `set_epoch` before each epoch. The processes take indices in turn. So that all processes get
    the same number, the first indices are repeated at the end or, if `drop_last`, the last indices are left out.

    Args:
        dataset: the data set. You can pass `dataset_size` instead.
        dataset_size: number of examples in the data set.
        num_replicas, rank: number of processes, and this process's rank. If they are None, the process group's values
            are used.

    Raises:
        ArgumentError: both `dataset` and `dataset_size` are passed, or neither is; or `rank` is too large.
        GroupError: `num_replicas` or `rank` is missing, and there is no process group.

    >>> list(DistributedSampler(dataset_size=5, num_replicas=2, rank=1, shuffle=False))
    [1, 3, 0]
    """

    @checked
    def __init__(
        self,
        dataset: Dataset[Any] | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        dataset_size: int | None = None,
    ):
        if (dataset is None) == (dataset_size is None):
            raise ArgumentError("pass either a data set, or dataset_size=, the number of its examples")
        if isinstance(dataset, int):
            raise ArgumentError(f"dataset={dataset} is a number: pass a size as dataset_size={dataset}")
        if dataset_size is not None:
            check_count("dataset_size", dataset_size)
        num_replicas = get_world_size() if num_replicas is None else num_replicas
        rank = get_rank() if rank is None else rank
        check_count("num_replicas", num_replicas)
        check_count("rank", rank, least=0)
        if rank >= num_replicas:
            raise ArgumentError(f"rank={rank} is too large for num_replicas={num_replicas}: ranks start at 0")
        examples: Any = range(dataset_size) if dataset_size is not None else dataset
        super().__init__(examples, num_replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
