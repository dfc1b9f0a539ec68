"""Compute a training step's seconds from its floating-point operations and a device's operations per second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from exogym.core.base.devices import CPU
from exogym.core.base.rng import preserved_state
from exogym.errors import ModelError, check_choice, check_number

# Default fraction of its peak that a device reaches in training: arXiv:2501.18512 assumes 40 % to 60 %, INTELLECT-1
# (arXiv:2412.01152) reports 36 % to 41 % on H100. Small models reach far less: measure yours.
DEFAULT_UTILISATION = 0.4


@dataclass(frozen=True)
class Device:
    """A device's peak number of operations per second in dense matrix products.

    Attributes:
        precision: the precision of these operations, such as "bf16".
        source: where the number comes from.
    """

    flops_per_s: float
    precision: str
    source: str


DEVICES: dict[str, Device] = {  # by name: peak operations per second, and the source
    "h100": Device(989e12, "bf16", "NVIDIA H100 SXM data sheet, without sparsity"),
    "a100": Device(312e12, "bf16", "NVIDIA A100 data sheet, without sparsity"),
    "rtx4090": Device(165e12, "bf16", "NVIDIA Ada architecture paper, 32-bit accumulation, without sparsity"),
    "m1": Device(2.6e12, "fp32", "Apple, November 2020: 8-core GPU"),
    "m1-max": Device(10.4e12, "fp32", "Apple, October 2021: 32-core GPU"),
    "m2": Device(3.6e12, "fp32", "Apple, June 2022: 10-core GPU"),
    "m2-max": Device(13.6e12, "fp32", "Apple, January 2023: 38-core GPU"),
    "m2-ultra": Device(27.2e12, "fp32", "Apple, June 2023: 76-core GPU"),
    "cpu-core": Device(96e9, "fp32", "computed: 3 GHz, two 256-bit FMA instructions a cycle, 8 numbers each"),
}


def seconds_of(flops: float, device: str | Device = "h100", utilisation: float = DEFAULT_UTILISATION) -> float:
    """Return the seconds that a device takes for `flops` operations.

    Args:
        flops: floating-point operations. A transformer's training step takes about 6 operations per parameter and
            token (Kaplan et al., arXiv:2001.08361).
        device: a name in `DEVICES`, or a `Device`.
        utilisation: the fraction of its peak that the device reaches, over 0 and up to 1.

    Raises:
        ArgumentError: the device is unknown, or a number is out of range.

    >>> round(seconds_of(6 * 1e9 * 8192, "a100"), 3)  # 1B parameters, 8192 tokens
    0.394
    """
    if not isinstance(device, Device):
        check_choice("device", device, DEVICES)
        device = DEVICES[device]
    check_number("flops", flops, least=0)
    check_number("utilisation", utilisation, over=0, most=1)
    return flops / (device.flops_per_s * utilisation)


def flops_of(model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor] | None = None) -> int:
    """Count the floating-point operations of one training step, forward and backward.

    Counts matrix products, convolutions and attention. The function runs the step once, and then restores gradients,
    buffers and random state.

    Args:
        model: a module. Unless you pass `loss`, `model(batch)` must return the loss.
        batch: the batch of the step.
        loss: a function that is called as `loss(model, batch)` and returns a scalar.

    Raises:
        ModelError: the loss is not a scalar with a gradient.

    >>> model = nn.Linear(8, 4)
    >>> flops_of(model, torch.randn(2, 8), lambda m, x: m(x).sum())  # 2*2*8*4, and again for the weights' gradient
    256
    """
    grads = {name: p.grad for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    counter = FlopCounterMode(display=False)
    for p in model.parameters():
        p.grad = None  # otherwise backward would add to it in place
    try:
        with preserved_state(next(iter(devices), CPU)), torch.enable_grad(), counter:
            value = model(batch) if loss is None else loss(model, batch)
            if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
                what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ModelError(
                    f"counting operations needs a scalar loss with a gradient, got {what}: pass loss=, called as "
                    "loss(model, batch)"
                )
            value.reshape(()).backward()
    finally:
        for name, p in model.named_parameters():
            p.grad = grads[name]
        with torch.no_grad():
            for name, b in model.named_buffers():
                b.copy_(buffers[name])
    return counter.get_total_flops()
