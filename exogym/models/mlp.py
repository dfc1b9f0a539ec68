"""A multilayer perceptron."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from exogym.errors import ArgumentError, check_count, checked


class MLP(nn.Module):
    """A classifier of L linear layers with ReLU between them: x -> W_L relu(... relu(W_1 x + b_1) ...) + b_L.

    x is an example, and layer l has the weights W_l and the biases b_l.

    Args:
        sizes: the number of features, the widths of the hidden layers if any, and the number of classes. `MLP([784,
            200, 200, 10])` is the "2NN" of McMahan et al. 2017 (arXiv 1602.05629), with 199,210 parameters.

    >>> import torch
    >>> out = MLP([4, 8, 3])((torch.zeros(5, 2, 2), torch.zeros(5, dtype=torch.long)))
    >>> out["logits"].shape, out["loss"].shape
    (torch.Size([5, 3]), torch.Size([]))
    """

    cut_points: ClassVar = "layers.*"

    @property
    def tensor_plan(self) -> dict[str, str]:
        """The tensor split, which divides the first layer's outputs and the second layer's inputs in each pair of
        layers.
        """
        linear = [f"layers.{k}" for k, layer in enumerate(self.layers) if isinstance(layer, nn.Linear)]
        return {name: ("colwise", "rowwise")[k % 2] for k, name in enumerate(linear[: len(linear) // 2 * 2])}

    @checked
    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        if len(sizes) < 2:
            raise ArgumentError(
                f"sizes={list(sizes)} has {len(sizes)} numbers: expected at least the numbers of features and classes"
            )
        for size in sizes:
            check_count("sizes", size)
        layers: list[nn.Module] = []
        for wide, narrow in itertools.pairwise(sizes):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return {"loss": the mean cross-entropy, "logits": (batch, classes)} for a batch (x, y).

        x is (batch, ...) and is flattened; y (batch,) int64 contains class numbers.
        """
        x, y = batch
        logits = self.layers(x.flatten(1))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}
