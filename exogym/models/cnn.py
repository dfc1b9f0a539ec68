"""A small convolutional network."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from exogym.errors import ArgumentError, check_count, checked


class SmallCNN(nn.Module):
    """A classifier of small pictures: two 3x3 convolutions (each with ReLU and 2x2 max-pooling) and a hidden layer.

    Args:
        channels: channels of a picture, such as 1 for MNIST and 3 for CIFAR-10.
        size: height and width in pixels, at least 4.
        classes: number of labels.
        width: channels of the first convolution. The second convolution has twice as many.
        hidden: units of the hidden layer.

    >>> import torch
    >>> model = SmallCNN(channels=1, size=28)
    >>> model((torch.zeros(2, 1, 28, 28), torch.tensor([3, 7])))["logits"].shape
    torch.Size([2, 10])
    """

    @checked
    def __init__(self, channels: int = 1, size: int = 28, classes: int = 10, width: int = 8, hidden: int = 64) -> None:
        super().__init__()
        for name, given in (("channels", channels), ("classes", classes), ("width", width), ("hidden", hidden)):
            check_count(name, given)
        check_count("size", size, 4)
        self.picture = (channels, size, size)
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.hidden = nn.Linear(2 * width * (size // 4) ** 2, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return {"loss": the mean cross-entropy, "logits": (batch, classes)} for a batch (x, y).

        x is (batch, channels, size, size), and y (batch,) contains class numbers.
        """
        x, y = batch
        if tuple(x.shape[1:]) != self.picture:
            raise ArgumentError(
                f"the pictures have shape {tuple(x.shape[1:])}, but this SmallCNN expects shape {self.picture}: "
                "make it with the pictures' channels= and size="
            )
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        logits = self.head(F.relu(self.hidden(x.flatten(1))))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}
