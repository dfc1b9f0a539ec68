"""Small models for examples, tests and comparisons. Each model takes a batch (x, y) and returns its loss and logits."""

from exogym.models.cnn import SmallCNN
from exogym.models.gpt import CharGPT
from exogym.models.mlp import MLP

__all__ = ["MLP", "CharGPT", "SmallCNN"]
