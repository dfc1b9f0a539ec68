"""One node's part of a data set, in the formats that other trainers read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from exogym.attached.loading import NodeLoader
from exogym.core.base.batches import batch_examples, slice_batch
from exogym.data.stream import Stream, check_dataset


class Dealt(Dataset[Any]):
    """One node's examples of a data set, in the order in which `LocalTrainer.fit` distributes them in each epoch.

    The trainer must read the examples in order and call `set_epoch` before each epoch.

    >>> examples = Dealt(list(range(8)), num_nodes=2, node=1)
    >>> len(examples), [examples[k] for k in range(4)] != (examples.set_epoch(1) or [examples[k] for k in range(4)])
    (4, True)
    """

    def __init__(self, dataset: Any, num_nodes: int, node: int, seed: int = 0):
        self.dataset, self.node = check_dataset(dataset), node
        whole_epoch = -(-len(dataset) // num_nodes)
        self._stream = Stream(dataset, num_nodes, batch_size=whole_epoch, seed=seed)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Distribute the examples for `epoch`."""
        self.epoch = epoch
        self._order = self._stream.indices(self.node, epoch)[0]

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(self._order[index])]


class GradientWeight:
    """Multiply the gradients of all backward passes by the factor of the last call.

    >>> import torch
    >>> weight, p = GradientWeight(), torch.nn.Parameter(torch.ones(1))
    >>> weight(0.5, [p])
    >>> (3 * p).sum().backward()
    >>> p.grad
    tensor([1.5000])
    """

    def __init__(self) -> None:
        self._hooks: list[Any] = []

    def __call__(self, factor: float, parameters: Iterable[nn.Parameter] = ()) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        if factor != 1:  # the factor 1 needs no hooks
            self._hooks = [p.register_hook(lambda g: g * factor) for p in parameters if p.requires_grad]


class MicroBatches:
    """Yield a node's batches of one epoch, one micro-batch after another, with the same number in each step.

    An epoch's short last step therefore has smaller batches. If its examples fit into one usual batch, all batches of
    the step are that batch; otherwise they may differ in size. Because a trainer divides each loss by the number of
    batches, `weights` holds the factors for the batches' gradients that give every example of the step the same weight,
    as in `fit`.

    An iteration begins at the node's current step, which is read when the first batch is requested, so a trainer may
    create the iterator before it loads a checkpoint.

    Args:
        loader: the batches of each step.
        before_step: called before the first micro-batch of each step.
        before_batch: called with a micro-batch's weight before the micro-batch is yielded.

    Attributes:
        weights: the weights of the micro-batches that were yielded. Unless `before_batch` is given, the trainer's
            callback removes a weight when the trainer trains on its micro-batch.

    >>> loader = NodeLoader(Stream(list(range(8)), 2, batch_size=2, shuffle=False), node=1, batches_per_step=2)
    >>> batches = MicroBatches(loader)
    >>> len(batches), [batch.tolist() for batch in batches]
    (4, [[1], [3], [5], [7]])
    """

    def __init__(
        self, loader: NodeLoader, before_step: Callable[[], None] = lambda: None,
        before_batch: Callable[[float], None] | None = None,
    ):  # fmt: skip
        self.loader, self.before_step = loader, before_step
        self.weights: deque[float] = deque()
        self.before_batch = before_batch or self.weights.append

    def __len__(self) -> int:
        return len(self.loader) * self.loader.batches_per_step

    def __iter__(self) -> Iterator[Any]:
        parts = self.loader.batches_per_step
        self.weights.clear()
        try:
            for batch in self.loader.steps():
                self.before_step()
                if parts == 1 or (total := batch_examples(batch)) <= self.loader.stream.batch_size // parts:
                    for _ in range(parts):
                        self.before_batch(1.0)
                        yield batch
                    continue
                for k in range(parts):
                    start, stop = k * total // parts, (k + 1) * total // parts
                    self.before_batch((stop - start) * parts / total)
                    yield slice_batch(batch, start, stop)
        finally:
            self.before_batch(1.0)  # for what the loop does after this epoch

    def state_dict(self) -> dict[str, Any]:
        """Return {}: the position is the node's step, which the node's own state holds."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""
