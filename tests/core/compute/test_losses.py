"""Losses of a stretch under way: in the order they came, and without doubles where a device may have none."""

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from exogym.core.compute.spans import Losses


class NoDoubles(TorchDispatchMode):
    """Fails where an operation gives a tensor of doubles, which Apple's GPU does not have."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        assert not (isinstance(result, torch.Tensor) and result.dtype == torch.float64), function
        return result


def test_a_stretch_of_one_loss_a_step_needs_no_doubles():
    losses = Losses(2, torch.device("cpu"))
    losses.begin(0, 3)
    with NoDoubles():
        losses.add(0, range(3), torch.tensor([1.0, 2.0, 3.0]))
        losses.add(1, range(1, 2), torch.tensor([5.0]))  # the node was away for two steps
        found = losses.end()
    torch.testing.assert_close(found, torch.tensor([[1.0, 2.0, 3.0], [torch.nan, 5.0, torch.nan]]), equal_nan=True)


def test_several_losses_of_a_step_are_added_in_order():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e4
    losses = Losses(1, torch.device("cpu"))
    losses.begin(5, 6)
    for part in values.split([300, 1, 699]):
        losses.add(0, np.zeros(len(part), dtype=np.int64), part)
    by_hand = np.float32(0)
    for value in values.numpy():
        by_hand += value
    assert losses.done(0) == 1000
    assert losses.end().item() == np.float32(np.float64(by_hand) / 1000)
