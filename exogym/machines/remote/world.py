"""A process that `SSHLauncher` has started: its settings from the environment, and equal weights at the start."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from exogym.core import communicator
from exogym.core.base.files import replacing
from exogym.core.base.torch_private import strided_parts
from exogym.core.communicator import Wire, ship
from exogym.core.engine.protocol import place
from exogym.core.engine.wire import ProcessWire
from exogym.core.engine.world import world_size
from exogym.core.saving.checkpoint_files import list_checkpoints
from exogym.errors import ModelError
from exogym.machines.remote.orders import (
    DEVICE,
    FIRST_RANK,
    FIT,
    LAUNCH,
    MEMBERSHIP,
    NETWORK,
    PROGRESS,
    PROJECT,
    RETRY,
    RUN,
    RUNS,
    SLOTS,
)  # fmt: skip


@dataclass(frozen=True)
class LaunchedPart:
    """The settings that `SSHLauncher` has given this process in environment variables.

    Attributes:
        rank: this process's rank.
        fit: number (from 1) of the `NetworkTrainer.fit` call in the script for whose results the controller waits, or
            None if no controller waits.
        folder: folder in which rank 0 writes the results, or None.
        device: this host's device in the hosts file.
        progress: True to show progress.
        restarts: number of restarts so far.
        membership: (address, port) of the membership server, or None if the run needs all hosts.
        slots: number of processes on each host.
        local_rank: this process's number on its host.
        launch: a random name of this launch, the same after restarts.
    """

    rank: int
    fit: int | None
    folder: Path | None
    device: str
    progress: bool
    restarts: int
    membership: tuple[str, int] | None = None
    slots: tuple[int, ...] = ()
    local_rank: int = 0
    launch: str = ""

    @classmethod
    def of_this_process(cls) -> LaunchedPart | None:
        """Read this process's settings. Return None if `SSHLauncher` did not start this process.

        >>> LaunchedPart.of_this_process() is None
        True
        """
        given = os.environ
        if given.get(NETWORK) != "1" or "RANK" not in given:
            return None
        folder = Path(given[PROJECT]) / RUNS / given[RUN] if RUN in given else None
        address, _, port = given.get(MEMBERSHIP, "").rpartition(" ")
        return cls(
            rank=int(given["RANK"]) + int(given.get(FIRST_RANK, "0")),
            fit=int(given[FIT]) if FIT in given else None,
            folder=folder,
            device=given.get(DEVICE, "auto"),
            progress=given.get(PROGRESS) == "1",
            restarts=int(given.get("TORCHELASTIC_RESTART_COUNT", "0")) + int(given.get(RETRY, "0")),
            membership=(address, int(port)) if port else None,
            slots=tuple(map(int, given[SLOTS].split(","))) if SLOTS in given else (),
            local_rank=int(given.get("LOCAL_RANK", "0")),
            launch=given.get(LAUNCH, ""),
        )

    def owns(self, save_dir: str | os.PathLike[str]) -> bool:
        """Return whether the checkpoints in `save_dir` belong to this launch.

        The launch's first start writes the launch's name into a file in `save_dir`, unless the folder has checkpoints
        already. So a restart after a failure never continues from an earlier run's checkpoints.
        """
        mark = Path(save_dir) / ".launch"
        with contextlib.suppress(OSError):  # a later check refuses unwritable folders, with a remedy
            if not self.restarts and not list_checkpoints(mark.parent):
                with replacing(mark) as file:
                    file.write(self.launch)
            return mark.read_text("utf-8") == self.launch
        return False


def same_start(model: nn.Module) -> None:
    """Give every process's model the weights of rank 0's model.

    Only tensors whose checksums differ are sent, so pretrained weights that each host has read itself are not sent.
    Lazy parameters are not sent either; each process draws them from the seed later.

    Raises:
        ModelError: the script has built another model in this process than on rank 0.
    """
    lazy = (UninitializedParameter, UninitializedBuffer)
    tensors = {name: x for name, x in _tensors(model) if not isinstance(x, lazy)}
    if world_size() == 1:
        return
    here = [[name, list(x.shape), str(x.dtype)] for name, x in tensors.items()]
    there = tell(here)
    if here != there:
        unlike = next((a, b) for a, b in zip([*here, None], [*there, None], strict=False) if a != b)
        raise ModelError(
            f"the script builds another model here than on rank 0: {unlike[0]} here, {unlike[1]} there; give all "
            "hosts the same data and arguments"
        )
    own = [sum_of(x) for x in tensors.values()]
    differs = torch.tensor([[a != b for a, b in zip(own, tell(own), strict=True)]], dtype=torch.uint8)
    anywhere = _wire().rows(differs, range(world_size())).any(0).tolist()
    sent = {name: x for (name, x), far in zip(tensors.items(), anywhere, strict=True) if far}
    if sparse := [name for name, x in sent.items() if x.layout != torch.strided]:
        raise ModelError(f"the sparse buffer {sparse[0]!r} differs between hosts: make the same values on every host")
    with torch.no_grad():
        for name, x in send(sent).items():
            tensors[name].copy_(x)


def sum_of(x: Tensor) -> str:
    """Return a checksum of the tensor's values."""
    digest = hashlib.blake2b(digest_size=16)
    for part in strided_parts(x.detach()):
        digest.update(part.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def send(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Send rank 0's named `tensors` to all processes, and return them in every process."""
    return ship(_wire(), {name: x.detach() for name, x in tensors.items()}, 0)


def tell(value: Any) -> Any:
    """Send rank 0's `value`, which JSON can represent, to all processes, and return it in every process."""
    return communicator.tell(_wire(), value)


def _wire() -> Wire:
    """Return a wire between all processes, each with one row."""
    world = world_size()
    return ProcessWire(place(world, world)) if world > 1 else Wire([0])
