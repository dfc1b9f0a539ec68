"""The world that torchrun (or `python -m exogym.launch`) started this process in."""

from __future__ import annotations

import atexit
import contextlib
import os

import torch
import torch.distributed as dist

from exogym.engine.sockets import ports_closed_afterwards
from exogym.errors import ArgumentError


def world_size() -> int:
    """Return how many processes run this script together: of the process group, else as torchrun says, else 1."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def local_device(device: str | torch.device) -> str | torch.device:
    """Return the device of this process: for "auto" and "cuda" the GPU of its number on this machine."""
    count = torch.cuda.device_count()
    if world_size() == 1 or not count or str(device) not in ("auto", "cuda"):
        return device
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % count}"


def join_world(device: torch.device) -> None:
    """Join the process group, with NCCL where every process has a GPU of its own and gloo else.

    A group that is there already is used as it is. One made here ends with the process.

    Raises:
        ArgumentError: torchrun's variables are not all there.
    """
    if dist.is_initialized():
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ArgumentError(
            f"the environment says that {os.environ.get('WORLD_SIZE')} processes run together, but not "
            f"{', '.join(missing)}: start the script with torchrun or python -m exogym.launch"
        )
    own_gpu = device.type == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with contextlib.nullcontext() if own_gpu else ports_closed_afterwards():
        dist.init_process_group("nccl" if own_gpu else "gloo")
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
