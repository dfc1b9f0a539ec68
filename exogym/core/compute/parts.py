"""Before training, compare the gradient of some examples in micro-batches with their gradient in one batch.

If the loss is a mean over examples, micro-batches do not change the gradient. With a sum, a mean with class weights or
a contrastive loss, micro-batches change the gradient, and no error shows this change.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from exogym.core.base.batches import batch_examples, beside_tensors, map_tensors, take_examples, targets_of, tensors_in
from exogym.core.compute.first_step import random_states, trying
from exogym.core.compute.worker import Worker
from exogym.core.mesh.probe import unlike
from exogym.core.progress import notice
from exogym.errors import ModelError

SIZES = {1: (1, 1), 2: (2, 2), 3: (3, 2), 4: (4, 3)}  # micro-batch size -> examples in the two parts of a trial
MOST_SIZES = (5, 3)
MOST_TRIED = 16  # examples
GPU_EPS = 1e-3  # TF32 keeps 10 bits


def check_parts(worker: Worker, batches: Iterable[Any], size: int, option: str) -> None:
    """Refuse micro-batches of `size` examples if their gradients do not add up to the whole batch's gradient.

    The test runs in evaluation mode, so that dropout and batch statistics change nothing. It uses at most 16 examples
    and computes each twice. At most 8 examples are in memory at once, or two micro-batches if these have fewer
    examples. The test can miss a wrong loss. For example, it misses class weights if all its examples have the same
    class.

    Args:
        batches: the examples come from the first batch. If all its targets are equal, they come from all batches.
        option: the option that asks for micro-batches, for messages.

    Raises:
        ModelError: the gradients differ by more than rounding. The message names the worst parameter.
    """
    batch, keys = _telling(batches)
    turns = _turns(keys)
    order = sorted(
        range(len(keys)), key=lambda k: (turns[k], k)
    )  # first one example of each target, then a second one, ...
    first, second = SIZES.get(size, MOST_SIZES)
    most = first + second
    tries = max(1, min(len(order) // (2 * most), MOST_TRIED // most))
    for k in range(tries):
        few = sorted(order[k * most : (k + 1) * most], key=lambda example: keys[example])  # equal targets side by side
        if len(few) <= first or not _compare(worker, worker.to_device(take_examples(batch, few)), first, option):
            return


def _compare(worker: Worker, few: Any, first: int, option: str) -> bool:
    """Compare the gradient of `few` examples with the sum over two parts: the `first` examples, and the others.

    Return False if the model cannot be tested in this way.
    """
    named = {name: p for name, p in worker.model.named_parameters() if p.requires_grad}
    sums = torch.zeros(len(named), 2, dtype=torch.float64)
    weights = copy.deepcopy(worker.weights)  # a copy, so that this test does not change the tests during training

    def squares() -> torch.Tensor:
        found = [0.0 if p.grad is None else float(torch.linalg.vector_norm(p.grad)) ** 2 for p in named.values()]
        return torch.tensor(found, dtype=torch.float64)

    with trying(worker):
        before = random_states(worker.device)
        parts = weights.parts(worker.ask, few, [(0, first), (first, batch_examples(few))])
        try:
            worker.loss(few).backward()
            sums[:, 1] = squares()
            for part, share in parts:
                if share:
                    (worker.loss(part) * -share).backward()
            sums[:, 0] = squares()
        except Exception as error:  # the user's model may return its loss in training mode only
            return _untried(option, f"{type(error).__name__}: {error}")
        drawn = random_states(worker.device) != before
    if drawn:
        return _untried(option, "the model draws random numbers in evaluation mode too")
    if not bool(sums[:, 1].isfinite().all()):
        return True  # training reports such numbers
    eps = max(torch.finfo(p.dtype).eps for p in named.values())
    if found := unlike(list(named), sums, eps if worker.device.type == "cpu" else max(eps, GPU_EPS)):
        raise ModelError(
            f"{option}: the gradients of a batch's parts do not add up to the whole batch's gradient: {found}. Wanted "
            f"a loss that is a mean over examples (tested on {batch_examples(few)} examples). A sum, class "
            "weights or pairs inside a batch give other gradients in parts. Return a mean (reduction='mean'), or leave "
            f"{option.partition('=')[0]} out. For class weights without gradient_accumulation, pass torch's "
            "CrossEntropyLoss(weight=...) itself as loss_fn: ExoGym then weights the parts as torch weights the batch"
        )
    return True


def _untried(option: str, why: str) -> bool:
    notice(
        f"{option}: could not test whether the gradients of a batch's parts add up to the whole batch's gradient "
        f"({why}). They do if the loss is a mean over examples"
    )
    return False


def _telling(batches: Iterable[Any]) -> tuple[Any, list[float]]:
    """Return the first batch, or all batches joined if the first batch's targets are equal; and each target's key."""
    found = []
    for batch in batches:
        found.append(batch)
        keys = _keys(batch)
        if len(found) == 1 and (keys is None or len(set(keys)) > 1):
            return batch, keys or [0.0] * batch_examples(batch)
    whole = _joined(found)
    return whole, _keys(whole) or [0.0] * batch_examples(whole)


def _joined(batches: Sequence[Any]) -> Any:
    """Join all batches whose tensors have the same shapes as the first batch's, apart from the number of examples.

    If batches hold more than tensors, such as texts, return the first batch.
    """
    if beside_tensors(batches[0]):
        return batches[0]
    leaves = [tensors_in(batch) for batch in batches]
    kinds = [[x.shape[1:] for x in each] for each in leaves]
    columns = zip(*(each for each, kind in zip(leaves, kinds, strict=True) if kind == kinds[0]), strict=True)
    total = batch_examples(batches[0])
    return map_tensors(
        batches[0], lambda x: torch.cat(next(columns)) if x.dim() and len(x) == total else next(columns)[0]
    )


def _keys(batch: Any) -> list[float] | None:
    """Return a number for each example: equal targets give equal numbers. Return None if the targets are unknown."""
    targets = targets_of(batch)
    if targets is None or targets.is_complex() or not targets.dim() or len(targets) != batch_examples(batch):
        return None
    flat = targets.detach().cpu().reshape(len(targets), -1).double()
    return (flat @ torch.linspace(1, 2, flat.shape[1], dtype=torch.float64)).tolist()


def _turns(keys: Sequence[float]) -> list[int]:
    """Return, for each key, how many equal keys come before it.

    >>> _turns([1.0, 1.0, 3.0, 1.0])
    [0, 1, 0, 2]
    """
    seen: Counter[float] = Counter()
    turns = []
    for key in keys:
        turns.append(seen[key])
        seen[key] += 1
    return turns
