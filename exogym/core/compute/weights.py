"""What the parts of a batch count in its mean loss: as their examples do, or as those of their targets that count.

A loss is a mean over examples, or, where targets below 0 are left out (torch's `ignore_index`, the -100 of Hugging
Face), over the targets that are not. Which of these it is, is not known from a batch; so the loss is asked, with two
examples that differ in it, once. Torch's own losses over classes are not asked: each target counts as its class weighs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from exogym.core.base.batches import batch_examples, slice_batch, take_examples, targets_of
from exogym.errors import ModelError

Ask = Callable[[Any], float]
Counting = Callable[[Tensor], Tensor]  # of targets: what each counts
Bounds = Sequence[tuple[int, int]]  # (start, stop) of the examples of each part
CLOSE = 1e-5  # relative; what counts as the same loss
MOST_ASKED = 8  # times, where all examples have the same loss, as with a head of zeros
SHIFTED = "targets but the first"  # of models that predict the next one, and shift them
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "targets": lambda counts: counts.sum(1),
    SHIFTED: lambda counts: counts[:, 1:].sum(1),
    "examples": lambda counts: counts.new_ones(len(counts)),
}


def counting(loss_fn: Callable[..., Tensor] | None) -> Counting | None:
    """Return what each target counts in the mean of torch's losses over classes; None: of another loss.

    With class weights w the mean is sum_i w[y_i] l_i / sum_i w[y_i] over the targets y_i that are not `ignore_index`.

    >>> import torch
    >>> counting(nn.CrossEntropyLoss(torch.tensor([1.0, 3.0]), ignore_index=0))(torch.tensor([0, 1, 1]))
    tensor([0., 3., 3.])
    """
    if not isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss) or loss_fn.reduction != "mean":
        return None
    if type(loss_fn) not in (nn.CrossEntropyLoss, nn.NLLLoss):  # a subclass may do as it likes
        return None
    weight, ignored = loss_fn.weight, loss_fn.ignore_index

    def counts(targets: Tensor) -> Tensor:
        there = targets != ignored
        return there.long() if weight is None else weight.detach()[targets.long().clamp(min=0)] * there

    return counts


class Weights:
    """Weighs the parts of batches so that the sum of their losses is the loss of the batch.

    Args:
        close: how far two losses that are the same may be apart, relative to them.
        counting: what each target counts; None: it is found by asking.

    `ask`, which the methods take, finds the loss of a batch, without gradients and in evaluation mode.
    """

    def __init__(self, close: float = CLOSE, counting: Counting | None = None):
        self._close, self._counting = close, counting
        self._left, self._asked = list(KINDS), 0  # kinds that it can be

    def parts(self, ask: Ask, batch: Any, bounds: Bounds) -> list[tuple[Any, float]]:
        """Return each part of a batch with its weight; together they are 1.

        A part of weight 0 is one example of another part, whose loss is a number: where all of a node compute
        together, each has something to do.

        Raises:
            ModelError: the loss of a batch does not follow from those of its parts.
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
        """Return whether any parts of a batch weigh as many examples as they have; raises as `parts`."""
        return self._counts(ask, batch) is None

    def _counts(self, ask: Ask, batch: Any) -> Tensor | None:
        """Return (B,) what each example of a batch counts; None: all the same."""
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
        """Ask the loss of which kind it is, until only one is left; of several that it cannot tell apart, the first."""
        each = valid.sum(1) + valid[:, 1:].sum(1)
        pair = [int(each.argmax()), int(each.argmin())]
        if len(self._left) == 1 or self._asked == MOST_ASKED or each[pair[0]] == each[pair[1]]:
            return self._left[0]
        if not self._asked and isinstance(batch, Mapping):  # as Hugging Face's, whose models shift
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
                f"a batch is computed in parts, and its loss is not their mean: with targets below 0 that of two "
                f"examples is {whole:.6g}, alone they have {alone[0]:.6g} and {alone[1]:.6g}. Wanted a mean over "
                "examples, or over the targets that are not below 0; else compute whole batches (without "
                "minibatch_size, gradient_accumulation and node=)"
            )
        return self._left[0]
