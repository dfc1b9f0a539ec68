"""What a run trains, as one object: the model, the data sets, the loss function and the metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from exogym.core.record.metrics import Metric


@dataclass
class Subject:
    """Holds what a run trains: the model, the data sets, the loss function and the metrics."""

    model: nn.Module
    train_dataset: Any
    val_dataset: Any = None
    loss_fn: Callable[..., Tensor] | None = None
    metrics: dict[str, Metric] | None = None
