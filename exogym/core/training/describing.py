"""A run's description: everything that decides the run's result. Checkpoints and the run folder store it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from exogym.core.base.torch_private import in_this_process, strided_parts
from exogym.core.fleet import Fleet
from exogym.core.training.options import FitOptions
from exogym.data.stream import Stream


def description_of(
    options: FitOptions, fleet: Fleet, stream: Stream, total_steps: int, device: torch.device
) -> dict[str, Any]:
    lengths = options.strategy.round_lengths(total_steps)  # of rounds, by module, if H is a function of the round
    rounds = {"rounds": lengths} if lengths else {}
    layouts = [block.layout.whole or block.layout for block in fleet.blocks]
    model = [[slot.name, list(slot.shape), str(layout.dtype)] for layout in layouts for slot in layout]
    shards = hashlib.sha256(np.ascontiguousarray(stream.examples).tobytes()).hexdigest()[:16] if stream.total else ""
    data = {"examples": stream.total, "shards": shards}
    data |= {} if stream.iterated is None else {"window": stream.iterated.window}
    data |= {"drop_last": True} if stream.drops_last else {}
    by_process = options.sharing is not None and options.sharing.kind == "nodes" and options.sharing.speeds
    dealt = {"speeds": by_process} if by_process else {}
    limits = {"num_epochs": options.num_epochs, "max_steps": options.max_steps, "total_steps": total_steps}
    return options.description() | rounds | {
        "device": device.type, "model": model, "data": data, "limits": limits,
        "placement": {"processes": len(fleet.comm.wire.placement), "nodes": fleet.comm.wire.placement} | dealt,
    }  # fmt: skip


def constants(model: nn.Module, changing: Collection[str]) -> dict[str, Tensor]:
    """Return the tensors that all nodes share and no row holds, by name: frozen parameters and constant buffers.

    Rows hold the buffers `changing`, which training changes.
    """
    frozen = {name: in_this_process(p.detach()) for name, p in model.named_parameters() if not p.requires_grad}
    return frozen | {name: x for name, x in model.named_buffers() if name not in changing}


def sum_of_shared(model: nn.Module, changing: Collection[str]) -> str:
    """Return a checksum of frozen parameters and constant buffers, which checkpoints do not hold."""
    digest = hashlib.sha256()
    for name, x in constants(model, changing).items():
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        for part in () if x.is_meta else strided_parts(x):
            digest.update(part.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()[:16]
