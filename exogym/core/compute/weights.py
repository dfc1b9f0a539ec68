"""The weights of a batch's parts in its loss, for training in parts and for evaluations with losses other than torch's.

A batch's loss is sum_i w_i l_i / sum_i w_i over its targets i, so the weight of a part is the sum of its w_i. They are
known for torch's own losses (`outputs.counting`). For any other loss, w_i is 1 for each example, or 1 for each target
that is not below 0 (torch's `ignore_index` and Hugging Face's -100 exclude targets below 0). To find out which of these
means the loss is, a test computes the loss of two examples together and separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from exogym.core.base.batches import batch_examples, slice_batch, take_examples
from exogym.core.compute.outputs import Counting, counted, whole_targets
from exogym.errors import ModelError

Ask = Callable[[Any], float]
Bounds = Sequence[tuple[int, int]]  # (start, stop) of the examples of each part
CLOSE = 1e-5  # relative difference of two equal losses, at most
MOST_ASKED = 8  # tests, at most: with a head of zeros all examples have the same loss
SHIFTED = "targets but the first"  # for models that predict the next token and shift the targets
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "targets": lambda counts: counts.sum(1),
    SHIFTED: lambda counts: counts[:, 1:].sum(1),
    "examples": lambda counts: counts.new_ones(len(counts)),
}


class Weights:
    """Weight a batch's parts so that their weighted losses add up to the batch's loss.

    Args:
        close: two losses count as equal up to this relative difference.
        counting: a function from targets to their weights. Without `counting`, tests find the kind of mean.
        weighs: whether class weights count in the weight of a part of a training step. They don't if a step is the mean
            over several batches, which are weighted by their number of counted targets.

    The methods' argument `ask` is a function that computes a batch's loss, without gradients and in evaluation mode.
    """

    def __init__(self, close: float = CLOSE, counting: Counting | None = None, weighs: bool = True):
        self._close, self.counting, self._weighs = close, counting, weighs
        self._left = list(KINDS)  # the kinds of mean that are still possible
        self._asked = {True: 0, False: 0}  # tests so far: of training, of evaluations

    @property
    def kind(self) -> str:
        """The kind of mean, one of `KINDS`, as far as tests have shown."""
        return self._left[0]

    def parts(self, ask: Ask, batch: Any, bounds: Bounds) -> list[tuple[Any, float]]:
        """Return each part of a batch with its weight, together 1, or raise ModelError if the loss is no such mean.

        A part of weight 0 is replaced by one example of another part, so that each process of a node has work and no
        part's loss is NaN. `bounds` has the range (start, stop) of each part's examples.
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

    def totals(self, ask: Ask, batch: Any, start: int, stop: int) -> dict[str, float]:
        """Return the divisor of the loss of a batch's examples from `start` to `stop`, for each kind of mean.

        The batch has whole numbers as targets, and the loss does not say their weights (`Loss.divisor`). Means of
        several batches take the total of `kind`, once all batches are known. Nothing is refused here.
        """
        targets = whole_targets(batch)
        assert targets is not None
        those = counted(targets, None)
        if bool(those.all()):
            examples, total = float(stop - start), float(targets[start:stop].numel())
            return {"targets": total, SHIFTED: total - examples, "examples": examples}
        valid = those.reshape(len(targets), -1).long()
        self._find(ask, batch, valid, strict=False)
        return {name: float(count(valid[start:stop]).sum()) for name, count in KINDS.items()}

    def _counts(self, ask: Ask, batch: Any) -> Tensor | None:
        """Return each example's weight, (B,); None if all are equal."""
        targets = whole_targets(batch)
        if targets is None or targets.is_floating_point() or targets.is_complex():
            return None
        if self.counting is not None:
            each = self.counting(targets) if self._weighs else counted(targets, self.counting)
            counts = each.cpu().double().reshape(len(targets), -1).sum(1)
        elif bool((targets < 0).any()):
            valid = counted(targets, None).reshape(len(targets), -1).long()
            self._find(ask, batch, valid)
            counts = KINDS[self.kind](valid).cpu()
        else:
            return None
        return counts if bool(counts.any()) and bool(counts.min() < counts.max()) else None

    def _find(self, ask: Ask, batch: Any, valid: Tensor, strict: bool = True) -> None:
        """Test the kind of mean until one is left.

        `strict`: batches whose examples have equally many targets are not tested, and a loss that is none of the kinds
        is an error. Otherwise the kind that is closest is taken.
        """
        each = valid.sum(1) + valid[:, 1:].sum(1)
        pair = [int(each.argmax()), int(each.argmin())]
        alike = bool(each[pair[0]] == each[pair[1]])
        if len(self._left) == 1 or self._asked[strict] == MOST_ASKED or not bool(each[pair[0]]) or (alike and strict):
            return
        if not any(self._asked.values()) and isinstance(
            batch, Mapping
        ):  # Hugging Face's batches, whose models shift the targets
            self._left.sort(key=lambda name: name != SHIFTED)
        self._asked[strict] += 1
        both, pair_valid = take_examples(batch, pair), valid[pair]
        if alike:  # the same example twice, the second time without its last targets
            pair_valid = valid[[pair[0]] * 2]
            both = take_examples(batch, [pair[0]] * 2)
            left_out = pair_valid[1].nonzero()[:, 0][int(pair_valid[1].sum()) // 2 :]
            targets = whole_targets(batch)
            assert targets is not None
            found = whole_targets(both)
            assert found is not None
            found.view(2, -1)[1, left_out] = targets[targets < 0][0]
            pair_valid[1, left_out] = 0
        whole = ask(both)
        alone = [ask(take_examples(both, [k])) for k in (0, 1)]
        limit = self._close * max((abs(x) for x in [whole, *alone] if math.isfinite(x)), default=0.0)

        def off(name: str) -> float:
            counts = KINDS[name](pair_valid).tolist()
            mean = sum(count * x for count, x in zip(counts, alone, strict=True) if count) / max(1, sum(counts))
            return abs(mean - whole) if any(counts) and math.isfinite(mean - whole) else math.inf

        left = [name for name in self._left if off(name) <= limit]
        if not left and strict:
            raise ModelError(
                f"the loss of a batch is not the mean of its parts' losses: two examples with targets below 0 have "
                f"loss {whole:.6g} together, {alone[0]:.6g} and {alone[1]:.6g} alone. Return a mean over examples, or "
                "over the targets that are not below 0, or compute whole batches (without minibatch_size, "
                "gradient_accumulation and node=)"
            )
        self._left = left or sorted(self._left, key=off)
