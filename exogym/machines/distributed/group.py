"""Join, leave and describe the process group."""

from __future__ import annotations

import datetime
import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from exogym.core.base.devices import CPU, Device
from exogym.core.engine.world import join_group, leave_group
from exogym.core.progress import notice
from exogym.errors import ArgumentError, ExoGymError, check_count, check_number, checked
from exogym.machines.launch.config import BACKEND_VARIABLE, available_backends, check_backend


class GroupError(ExoGymError, RuntimeError):
    """The process group is missing, exists already, or has lost a process."""


@checked
def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    *,
    timeout_s: float | None = None,
) -> None:
    """Join the process group. Call this function once in every process, before any collective.

    Under `python -m exogym.launch` or `torchrun`, no argument is needed: rank and world size come from the environment.
    If the script was started without a launcher, the process is alone in its group, and a notice on stderr says so.
    "nccl" makes the local rank's GPU the current device.

    Args:
        backend: "gloo" (CPU), "nccl" (CUDA GPUs) or "mpi" (under mpirun, with a torch built for MPI). None means the
            launcher's backend or, if the launcher has none, "nccl" if every process on this machine has its own GPU,
            otherwise "gloo".
        init_method: address at which the processes find each other, "env://" (MASTER_ADDR and MASTER_PORT, the
            default), "tcp://host:port" or "file:///path".
        world_size: number of processes; default: the environment variable WORLD_SIZE. If it is 1, this process is
            alone.
        rank: this process's rank, 0 to world_size - 1; default: the environment variable RANK.
        timeout_s: a collective fails if not all processes have called it within this many seconds; default: torch's.

    Raises:
        ArgumentError: the backend is unknown or unusable, or a rank or address is missing or wrong.
        GroupError: this process is in a process group already.

    >>> init_process_group("gloo", world_size=1, rank=0)
    >>> get_rank(), get_world_size()
    (0, 1)
    >>> destroy_process_group()
    """
    if is_initialized():
        raise GroupError("this process is in a process group already: call destroy_process_group() first")
    backend = choose_backend(backend)
    options = _timeout(timeout_s)
    if backend == "mpi":
        if (init_method, world_size, rank) != (None, None, None):
            raise ArgumentError("backend='mpi' gets ranks and world size from mpirun: leave out all other arguments")
        join_group("mpi", **options)
        return
    in_environment, store = init_method in (None, "env://"), None
    world_size, rank = _place(world_size, rank, in_environment)
    if in_environment:
        init_method = "env://"
        if world_size == 1:
            store, init_method = dist.HashStore(), None
        elif missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
            raise ArgumentError(
                f"world_size={world_size}, but the environment has no {' and no '.join(missing)}: start the script "
                "with python -m exogym.launch, or pass init_method='tcp://host:port'"
            )
    if backend == "nccl":
        torch.accelerator.set_device_index(_own_gpu())
    join_group(backend, init_method=init_method, store=store, world_size=world_size, rank=rank, **options)


def destroy_process_group() -> None:
    """Leave the process group, if there is one."""
    leave_group()


def is_initialized() -> bool:
    """Return whether this process is in a process group, created by ExoGym or by torch."""
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    """Return the rank of this process, 0 to world size - 1. Raises GroupError without a process group."""
    require_group("get_rank")
    return dist.get_rank()


def get_world_size() -> int:
    """Return the number of processes in the group. Raises GroupError without a process group."""
    require_group("get_world_size")
    return dist.get_world_size()


def require_group(caller: str) -> None:
    """Raise GroupError unless this process is in a process group."""
    if not is_initialized():
        raise GroupError(f"{caller}() was called outside a process group: call init_process_group() first")


def get_distributed_info() -> dict[str, Any]:
    """Describe this process and its process group, if any.

    Returns:
        available: True if a backend works on this machine.
        initialized: True if this process is in a process group.
        backend: the group's backend, or None without a group.
        backends: the backends that work on this machine.
        world_size, rank, local_rank, local_world_size, node_rank: this process's numbers in the group, or the
            launcher's values, or a single process's.
        device: the backend's device.
        hostname, pid: this machine's name and this process's id.
        master_addr, master_port: the environment's values, or None.
        restart_count: how often the launcher has restarted the processes.

    >>> info = get_distributed_info()
    >>> info["initialized"], info["world_size"], info["rank"]
    (False, 1, 0)
    """
    initialized = is_initialized()
    backend = dist.get_backend() if initialized else None
    usable = available_backends()
    port = _number("MASTER_PORT")
    return {
        "available": bool(usable),
        "initialized": initialized,
        "backend": backend,
        "backends": usable,
        "world_size": dist.get_world_size() if initialized else (_number("WORLD_SIZE") or 1),
        "rank": dist.get_rank() if initialized else (_number("RANK") or 0),
        "local_rank": _number("LOCAL_RANK") or 0,
        "local_world_size": _number("LOCAL_WORLD_SIZE") or 1,
        "node_rank": _number("GROUP_RANK") or 0,
        "device": str(Device.of_group().place if initialized else CPU),
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "master_addr": os.environ.get("MASTER_ADDR"),
        "master_port": port,
        "restart_count": _number("TORCHELASTIC_RESTART_COUNT") or 0,
    }


def choose_backend(backend: str | None) -> str:
    """Return the backend that `init_process_group` uses for its argument `backend`, which may be None."""
    if backend is None:
        backend = os.environ.get(BACKEND_VARIABLE)
    if backend is None:
        has_own = torch.accelerator.device_count() >= (_number("LOCAL_WORLD_SIZE") or 1)
        backend = Device.named("auto").backend if has_own else "gloo"
    check_backend(backend)
    return backend


def _number(name: str) -> int | None:
    """Return the whole number in environment variable `name`, or None if it is not set."""
    text = os.environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ArgumentError(f"the environment variable {name}={text!r} must be a whole number") from None


def _place(world_size: int | None, rank: int | None, through_environment: bool) -> tuple[int, int]:
    """Return (world size, rank) from the arguments and the launcher's environment."""
    for name, given, least in (("world_size", world_size, 1), ("rank", rank, 0)):
        if given is not None:
            check_count(name, given, least)
    said_size, said_rank = _number("WORLD_SIZE"), _number("RANK")
    if through_environment and world_size != 1:
        for name, given, said in (("world_size", world_size, said_size), ("rank", rank, said_rank)):
            if given is not None and said is not None and given != said:
                raise ArgumentError(
                    f"{name}={given}, but the launcher has set {said}: leave {name}= out (or, to join another group, "
                    "pass init_method=)"
                )
    if world_size == 1 and rank is None:
        rank = 0
    if world_size is None and rank is None and said_size is None and said_rank is None:
        if not through_environment:
            raise ArgumentError("world_size= and rank= are needed with init_method=")
        notice("RANK and WORLD_SIZE are not set, so this process is alone in its group")
        return 1, 0
    world_size = said_size if world_size is None else world_size
    rank = said_rank if rank is None else rank
    if world_size is None or rank is None:
        name = "world_size" if world_size is None else "rank"
        raise ArgumentError(
            f"{name}= is missing, and {name.upper()} is not set in the environment: pass both world_size= and rank=, "
            "or neither"
        )
    if rank >= world_size:
        raise ArgumentError(f"rank={rank} is too large for world_size={world_size}: ranks start at 0")
    return world_size, rank


def _timeout(timeout_s: float | None) -> dict[str, Any]:
    if timeout_s is None:
        return {}
    check_number("timeout_s", timeout_s, over=0, more=" seconds")
    return {"timeout": datetime.timedelta(seconds=timeout_s)}


def _own_gpu() -> int:
    """Return this process's GPU: the GPU of its local rank, or the only visible GPU."""
    local_rank, gpus = _number("LOCAL_RANK") or 0, torch.accelerator.device_count()
    if local_rank < gpus:
        return local_rank
    if gpus == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        return 0
    raise ArgumentError(
        f"backend='nccl' needs a GPU for each process, but local rank {local_rank} sees {gpus} GPUs: "
        f"start at most {gpus} processes on this machine, or use backend='gloo'"
    )
