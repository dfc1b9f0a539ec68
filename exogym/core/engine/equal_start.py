"""Equalize the models at the start of a run whose processes have each built their own."""

from __future__ import annotations

import hashlib
import itertools

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from exogym.core.base.torch_private import in_this_process, strided_parts
from exogym.core.communicator import Wire, gather, ship, tell
from exogym.errors import ModelError


def start_equal(model: nn.Module, wire: Wire) -> None:
    """Give every process's model the parameters and buffers of node 0's model.

    Only tensors whose checksums differ are sent, so pretrained weights that each process has read itself are not sent.
    Lazy parameters are not sent either; each process draws them from the seed later. Raise ModelError if the processes
    have built different models, or a sparse buffer differs. All processes raise it.
    """
    if not wire.is_shared:
        return
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    every = [*model.named_parameters(), *model.named_buffers()]
    given = {name: x.detach() for name, x in every if not isinstance(x, UninitializedParameter | UninitializedBuffer)}
    tensors, parts = {name: in_this_process(x) for name, x in given.items()}, wire.devices.parts
    kinds = [[name, list(x.shape), str(x.dtype), trained.get(name)] for name, x in given.items()]
    whole = [x for name, x in tensors.items() if x is given[name]]
    told = gather(wire, [hashlib.sha256(repr(kinds).encode()).hexdigest(), sum_of(*whole)])
    if unlike := next((k for k, (kind, _) in enumerate(told) if kind != told[0][0]), 0):
        models = gather(wire, kinds)
        there, here = next(pair for pair in itertools.zip_longest(models[0], models[unlike]) if pair[0] != pair[1])
        raise ModelError(
            f"the model of node {unlike // parts} has other names, shapes, dtypes or frozen parameters than the model "
            f"of node 0: {here}, not {there}; build the same model in every process, from the same data and arguments"
        )
    if any(values != told[0][1] for _, values in told[:parts]):
        raise ModelError(
            "node 0's processes have different values of buffers or frozen parameters: build the same model in every "
            "process"
        )
    own = [sum_of(x) for x in tensors.values()]
    differs = torch.tensor([[a != b for a, b in zip(own, tell(wire, own, 0), strict=True)]], dtype=torch.uint8)
    anywhere = wire.rows(differs.expand(len(wire.ranks), -1), sorted(wire.owner)).any(0).tolist()
    sent = {name: x for (name, x), far in zip(tensors.items(), anywhere, strict=True) if far}
    if sparse := [name for name, x in sent.items() if x.layout != torch.strided]:
        raise ModelError(
            f"the nodes start with different models, and sparse buffers such as {sparse[0]!r} cannot be sent: build "
            "the same model in every process, for example after torch.manual_seed(0)"
        )
    with torch.no_grad():
        for name, x in ship(wire, sent, source=0).items():
            tensors[name].copy_(x)


def sum_of(*tensors: Tensor) -> str:
    """Return a checksum of the tensors' values."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (part for x in tensors for part in strided_parts(x.detach())):
        digest.update(part.cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
