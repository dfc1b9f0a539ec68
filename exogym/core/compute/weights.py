"""Weight the parts of a batch in its mean loss, by their examples or by their counted targets.

A loss is a mean over examples, or over the targets that are not below 0. Losses ignore targets below 0 with torch's
`ignore_index` or Hugging Face's -100. A batch does not show which mean its loss is. So a test computes the loss of two
examples together, and of each alone. torch's own class losses need no test: each target counts with its class weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from exogym.core.base.batches import batch_examples, slice_batch, take_examples, targets_of
from exogym.errors import ModelError

Ask = Callable[[Any], float]
Counting = Callable[[Tensor], Tensor]  # targets -> each target's weight
Bounds = Sequence[tuple[int, int]]  # (start, stop) of the examples of each part
CLOSE = 1e-5  # relative difference of two equal losses, at most
MOST_ASKED = 8  # tests, at most: with a head of zeros all examples have the same loss
SHIFTED = "targets but the first"  # for models that predict the next token and shift the targets
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "targets": lambda counts: counts.sum(1),
    SHIFTED: lambda counts: counts[:, 1:].sum(1),
    "examples": lambda counts: counts.new_ones(len(counts)),
}


def counting(loss_fn: Callable[..., Tensor] | None) -> Counting | None:
    """Return a function from targets to their weights, if `loss_fn` is one of torch's class losses; otherwise None.

    With class weights w, targets y_i and their losses l_i, the batch's loss is sum_i w[y_i] l_i / sum_i w[y_i]. The
    sums leave out targets equal to `ignore_index`.

    >>> import torch
    >>> counting(nn.CrossEntropyLoss(torch.tensor([1.0, 3.0]), ignore_index=0))(torch.tensor([0, 1, 1]))
    tensor([0., 3., 3.])
    """
    if not isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss) or loss_fn.reduction != "mean":
        return None
    if type(loss_fn) not in (nn.CrossEntropyLoss, nn.NLLLoss):  # a subclass may compute something else
        return None
    weight, ignored = loss_fn.weight, loss_fn.ignore_index

    def counts(targets: Tensor) -> Tensor:
        counted = targets != ignored
        return counted.long() if weight is None else weight.detach()[targets.long().clamp(min=0)] * counted

    return counts


class Weights:
    """Weight a batch's parts so that their weighted losses add up to the batch's loss.

    Args:
        close: two losses count as equal up to this relative difference.
        counting: a function from targets to their weights. Without `counting`, tests find the kind of mean.

    The methods' argument `ask` is a function that computes a batch's loss, without gradients and in evaluation mode.
    """

    def __init__(self, close: float = CLOSE, counting: Counting | None = None):
        self._close, self._counting = close, counting
        self._left, self._asked = list(KINDS), 0  # the kinds of mean that are still possible

    def parts(self, ask: Ask, batch: Any, bounds: Bounds) -> list[tuple[Any, float]]:
        """Return each part of a batch with its weight; the weights add up to 1.

        A part of weight 0 is replaced by one example of another part. So each process of a node has something to
        compute, and no part's loss is NaN.

        Args:
            bounds: the range (start, stop) of each part's examples.

        Raises:
            ModelError: the batch's loss is not a weighted mean of its parts' losses.
        """
        counts = self._counts(ask, batch)
        if counts is None:
            stands_in = 0
            weights = [(stop - start) / batch_examples(batch) for start, stop in bounds]
        else:
            stands_in, sums = int(counts.argmax()), [float(counts[start:stop].sum()) for start, stop in bounds]
            weights = [one / float(counts.sum()) for one in sums]
        return [
            (slice_batch(batch, start, stop) if weight else slice_batch(batch, stands_in, stands_in + 1), weight)
            for (start, stop), weight in zip(bounds, weights, strict=True)
        ]

    def counts_examples(self, ask: Ask, batch: Any) -> bool:
        """Return whether each part's weight is its share of the examples. The errors are the same as in `parts`."""
        return self._counts(ask, batch) is None

    def _counts(self, ask: Ask, batch: Any) -> Tensor | None:
        """Return each example's weight, (B,); None if all are equal."""
        targets = targets_of(batch)
        if targets is None or targets.is_floating_point() or targets.is_complex() or not targets.dim():
            return None
        if len(targets) != batch_examples(batch):
            return None
        if self._counting is not None:
            counts = self._counting(targets).cpu().double().reshape(len(targets), -1).sum(1)
        elif bool((targets < 0).any()):
            valid = (targets >= 0).reshape(len(targets), -1).long()
            counts = KINDS[self._found(ask, batch, valid)](valid).cpu()
        else:
            return None
        return counts if bool(counts.any()) and bool(counts.min() < counts.max()) else None

    def _found(self, ask: Ask, batch: Any, valid: Tensor) -> str:
        """Test the kind of mean until one is left. Return the first of those that are still possible."""
        each = valid.sum(1) + valid[:, 1:].sum(1)
        pair = [int(each.argmax()), int(each.argmin())]
        if len(self._left) == 1 or self._asked == MOST_ASKED or each[pair[0]] == each[pair[1]]:
            return self._left[0]
        if not self._asked and isinstance(batch, Mapping):  # Hugging Face's batches, whose models shift the targets
            self._left.sort(key=lambda name: name != SHIFTED)
        self._asked += 1
        whole = ask(take_examples(batch, pair))
        alone = [ask(take_examples(batch, [k])) for k in pair]
        limit = self._close * max((abs(x) for x in [whole, *alone] if math.isfinite(x)), default=0.0)

        def off(name: str) -> float:
            counts = KINDS[name](valid[pair]).tolist()
            mean = sum(count * x for count, x in zip(counts, alone, strict=True) if count) / max(1, sum(counts))
            return abs(mean - whole) if any(counts) and math.isfinite(mean - whole) else math.inf

        self._left = [name for name in self._left if off(name) <= limit]
        if not self._left:
            raise ModelError(
                f"the loss of a batch is not the mean of its parts' losses: two examples with targets below 0 have "
                f"loss {whole:.6g} together, {alone[0]:.6g} and {alone[1]:.6g} alone. Return a mean over examples, or "
                "over the targets that are not below 0, or compute whole batches (without minibatch_size, "
                "gradient_accumulation and node=)"
            )
        return self._left[0]
