"""A batch in micro-batches held against the batch whole, by the gradients of a few examples, before training.

A loss that is a mean over examples has the same gradient in any micro-batches. A sum, a mean with class weights or a
contrastive loss has another one in each, and no error shows it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from exogym.core.base.batches import batch_examples, map_tensors, take_examples, targets_of, tensors_in
from exogym.core.compute.first_step import random_states, trying
from exogym.core.compute.worker import Worker
from exogym.core.mesh.probe import unlike
from exogym.core.progress import notice
from exogym.errors import ModelError

SIZES = {1: (1, 1), 2: (2, 2), 3: (3, 2), 4: (4, 3)}  # of two parts that are tried, by the micro-batch
MOST_SIZES = (5, 3)
MOST_TRIED = 16  # examples
GPU_EPS = 1e-3  # TF32 keeps 10 bits


def check_parts(worker: Worker, batches: Iterable[Any], size: int, option: str) -> None:
    """Refuse micro-batches of `size` examples whose gradients do not make up the whole batch's.

    The model is in evaluation mode meanwhile, so dropout and batch statistics change nothing. At most 8 examples, or
    two micro-batches, are in memory at once, and at most one more pass over the batch is computed. What the examples do
    not show is not found: with class weights, for example, all of them may be of one class.

    Args:
        batches: to choose examples from; those after the first are asked for where all its targets are one.
        option: that asks for micro-batches, for messages.

    Raises:
        ModelError: the gradients differ by more than rounding; the message names the worst parameter.
    """
    batch, keys = _telling(batches)
    turns = _turns(keys)
    order = sorted(range(len(keys)), key=lambda k: (turns[k], k))  # of each kind of target one, and one more, ...
    first, second = SIZES.get(size, MOST_SIZES)
    most = first + second
    tries = max(1, min(len(order) // (2 * most), MOST_TRIED // most))
    for k in range(tries):
        few = sorted(order[k * most : (k + 1) * most], key=lambda example: keys[example])  # of a kind in one part
        if len(few) <= first or not _compare(worker, worker.to_device(take_examples(batch, few)), first, option):
            return


def _compare(worker: Worker, few: Any, first: int, option: str) -> bool:
    """Compare the gradient of `few` examples with that of the first ones and the others; False: it cannot be done."""
    named = {name: p for name, p in worker.model.named_parameters() if p.requires_grad}
    sums = torch.zeros(len(named), 2, dtype=torch.float64)
    weights = copy.deepcopy(worker.weights)  # what it learns here is not to change what it asks in training

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
        except Exception as error:  # of the user's model, which may give its loss in training mode only
            return _untried(option, f"{type(error).__name__}: {error}")
        drawn = random_states(worker.device) != before
    if drawn:
        return _untried(option, "the model draws random numbers in evaluation mode too")
    if not bool(sums[:, 1].isfinite().all()):
        return True  # training says which number it is
    eps = max(torch.finfo(p.dtype).eps for p in named.values())
    if found := unlike(list(named), sums, eps if worker.device.type == "cpu" else max(eps, GPU_EPS)):
        raise ModelError(
            f"{option}: batches are computed in parts, and their gradients do not make up the whole batch's: {found}. "
            f"Wanted a loss that is a mean over examples, tried with {batch_examples(few)} of them; a sum, class "
            "weights or pairs inside a batch make another loss of each part. Return a mean (reduction='mean'); or "
            f"leave {option.partition('=')[0]} out; or, for class weights without gradient_accumulation, give torch's "
            "CrossEntropyLoss(weight=...) itself as loss_fn: its parts are weighed as it weighs"
        )
    return True


def _untried(option: str, why: str) -> bool:
    notice(
        f"{option}: whether batches in parts have the gradient of the whole could not be tried ({why}). They have it "
        "where the loss is a mean over examples"
    )
    return False


def _telling(batches: Iterable[Any]) -> tuple[Any, list[float]]:
    """Return the first batch, or all joined where its targets are all one; and a number for each target."""
    found = []
    for batch in batches:
        found.append(batch)
        keys = _keys(batch)
        if len(found) == 1 and (keys is None or len(set(keys)) > 1):
            return batch, keys or [0.0] * batch_examples(batch)
    whole = _joined(found)
    return whole, _keys(whole) or [0.0] * batch_examples(whole)


def _joined(batches: Sequence[Any]) -> Any:
    """Return the examples of all batches whose tensors are like those of the first, but for their number."""
    leaves = [tensors_in(batch) for batch in batches]
    kinds = [[x.shape[1:] for x in each] for each in leaves]
    columns = zip(*(each for each, kind in zip(leaves, kinds, strict=True) if kind == kinds[0]), strict=True)
    total = batch_examples(batches[0])
    return map_tensors(
        batches[0], lambda x: torch.cat(next(columns)) if x.dim() and len(x) == total else next(columns)[0]
    )


def _keys(batch: Any) -> list[float] | None:
    """Return a number for each example, which equal targets have in common; None: the targets are not known."""
    targets = targets_of(batch)
    if targets is None or targets.is_complex() or not targets.dim() or len(targets) != batch_examples(batch):
        return None
    flat = targets.detach().cpu().reshape(len(targets), -1).double()
    return (flat @ torch.linspace(1, 2, flat.shape[1], dtype=torch.float64)).tolist()


def _turns(keys: Sequence[float]) -> list[int]:
    """Return how many before it have the same key.

    >>> _turns([1.0, 1.0, 3.0, 1.0])
    [0, 1, 0, 2]
    """
    seen: Counter[float] = Counter()
    turns = []
    for key in keys:
        turns.append(seen[key])
        seen[key] += 1
    return turns
