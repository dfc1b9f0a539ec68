"""The processes that torchrun or `python -m exogym.launch` started together, and their process group."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from exogym.core.base import pulse
from exogym.core.base.devices import Device
from exogym.core.engine.sockets import ports_closed_afterwards
from exogym.errors import ArgumentError


def join_group(backend: str, **where: Any) -> None:
    """Make torch's default process group, close gloo's port, and leave the group before the process ends.

    Torch aborts a process that ends while a thread of its group runs.
    """
    with ports_closed_afterwards(backend):
        dist.init_process_group(backend, **where)
    atexit.unregister(leave_group)
    atexit.register(leave_group)


def new_group(ranks: Sequence[int] | None = None) -> Any:
    """Make torch's `new_group` of all processes or of `ranks`, in all processes together, then close gloo's port."""
    with pulse.at(pulse.WAITING), ports_closed_afterwards(dist.get_backend()):
        return dist.new_group(None if ranks is None else list(ranks))


def leave_group() -> None:
    """Leave the default process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def join_world(device: torch.device, gpus: int | None = None) -> None:
    """Join the process group, or use an existing one. A group made here ends with the process.

    The backend is gloo, unless every process of every host has its own accelerator of one kind whose backend this build
    of torch has (NCCL for CUDA). `gpus` is the number of accelerators that this host's processes share, by default as
    many as this process sees. Raise ArgumentError if some of torchrun's environment variables are missing.
    """
    if dist.is_initialized():
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ArgumentError(
            f"the environment has WORLD_SIZE={os.environ.get('WORLD_SIZE')}, but not {', '.join(missing)}: start the "
            "script with torchrun or python -m exogym.launch"
        )
    own = Device(device)
    own.make_current()
    gpus = torch.accelerator.device_count() if gpus is None else gpus
    join_group(agreed(own.backend if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus else "gloo"))


def agreed(own: str) -> str:
    """Return the backend for all processes: `own` if it is the backend of every process's device, otherwise gloo.

    Hosts may have different devices, so processes on several hosts exchange their backends through the launcher's
    store. If there is no such store, or all processes are on one host, return `own`.
    """
    world = int(os.environ["WORLD_SIZE"])
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return own
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
    start = f"exogym/backend/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store.set(f"{start}/{os.environ['RANK']}", own)
    return own if all(store.get(f"{start}/{rank}") == own.encode() for rank in range(world)) else "gloo"
