"""Compare some examples in micro-batches with the same examples in one batch: gradients before training, losses in it.

If the loss is a mean over examples, micro-batches do not change the gradient. With a sum, a mean with class weights or
a contrastive loss, they change it without an error. torch's own losses are known to be means (`outputs.counting`).
Other losses can only be tested: before training on a few examples of as many classes as possible (`check_parts`), and
again during training (`Trials`).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from exogym.core.base.batches import batch_examples, beside_tensors, map_tensors, take_examples, targets_of, tensors_in
from exogym.core.base.devices import Device
from exogym.core.base.rng import preserved_state
from exogym.core.compute.first_step import random_states, trying
from exogym.core.compute.worker import Worker
from exogym.core.progress import notice
from exogym.errors import ModelError

TOLERANCE = 0.01  # largest error of a parameter's gradient, relative to its norm; rounding makes 1e-6, in bf16 1e-3
ROUNDING = 1e-5  # largest error of a gradient that should be 0, relative to the norm of all gradients
SIZES = {1: (1, 1), 2: (2, 2), 3: (3, 2), 4: (4, 3)}  # micro-batch size -> examples in the two parts of a trial
MOST_SIZES = (5, 3)
MOST_TRIED = 16  # examples
GPU_EPS = 1e-3  # TF32 keeps 10 bits
OFF = 1e-3  # relative difference of a batch's loss and its parts' mean, at most
FIRST_TRIAL, NEXT_TRIAL = 64, 4  # trials during training: after 64, 256, 1024, ... steps
DRAWS = "the model draws random numbers in evaluation mode too"


def check_parts(worker: Worker, batches: Iterable[Any], size: int, option: str) -> bool:
    """Raise ModelError if gradients of micro-batches of `size` don't add up to the batch's; return False if untestable.

    The test runs in evaluation mode, so that dropout and batch statistics change nothing. It uses at most 16 examples
    and computes each twice. At most 8 examples are in memory at once, or two micro-batches if these have fewer
    examples. The test can miss a wrong loss, for example class weights of a class that no tested example has.

    Args:
        batches: the examples come from the first batch, or from all batches if all its targets are equal.
        option: the option that asks for micro-batches, for messages.
    """
    batch, keys = _telling(batches)
    first, second = SIZES.get(size, MOST_SIZES)
    most = first + second
    for k in range(max(1, min(len(keys) // (2 * most), MOST_TRIED // most))):
        few = _varied(keys, k * most, (k + 1) * most)
        if len(few) <= first:
            break
        if not _compare(worker, worker.to_device(take_examples(batch, few)), first, option):
            return False
    return True


def _compare(worker: Worker, few: Any, first: int, option: str) -> bool:
    """Compare the gradient of `few` examples with the sum of the `first` and the others; False if impossible."""
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
        return _untried(option, DRAWS)
    if not bool(sums[:, 1].isfinite().all()):
        return True  # training reports such numbers
    if found := unlike(list(named), sums, rounding(worker)):
        raise ModelError(
            f"{option}: the gradients of a batch's parts do not add up to the whole batch's gradient: {found}. The "
            f"loss must be a mean over examples (tested on {batch_examples(few)} examples): sums, class weights and "
            f"pairs inside a batch give other gradients in parts. {_instead(option)}"
        )
    return True


def _instead(option: str) -> str:
    return (
        f"Return a mean (reduction='mean'), or leave {option.partition('=')[0]} out. For class weights without "
        "gradient_accumulation, pass torch's CrossEntropyLoss(weight=...) itself as loss_fn, or "
        "functools.partial(torch.nn.functional.cross_entropy, weight=...): ExoGym then weights the parts as torch "
        "weights the batch"
    )


class Trials:
    """Test during training that the parts of a batch give the batch's loss, with the current row's parameters.

    A trial takes up to 8 examples of as many targets as possible, in evaluation mode and without gradients, together
    and in two parts. Trials come after 64, 256, 1024, ... steps, and at the end of training (`end`). Steps count over
    the rows of the process. If a node is several processes, each gathers the model for a trial, as for an evaluation,
    and there is no trial at the end.

    Args:
        worker: its loss must not be one of torch's, which need no trial.
        size: examples of a micro-batch.
        option: the option that asks for micro-batches, for messages.
    """

    def __init__(self, worker: Worker, size: int, option: str):
        self.worker, self.option = worker, option
        self.first, second = SIZES.get(size, MOST_SIZES)
        self.most = self.first + second
        self.steps, self.next = 0, FIRST_TRIAL
        self._last: Any = None
        self._is_possible = True

    def see(self, batch: Any) -> None:
        """Count a step, and try examples of its batch if due. Raise ModelError if its loss is no mean."""
        if self.worker.at[0] < 0:  # `check_split` compares the gradients of this batch
            return
        self.steps += 1
        self._last = batch
        if self.steps >= self.next:
            self.next *= NEXT_TRIAL
            self._try(batch)

    def end(self) -> None:
        """Try the last batch once more, with row 0's parameters. A loss may have changed since the last trial."""
        if self._last is not None and self.worker.devices is None:
            self.worker.point(0)
            self._try(self._last)
        self._last = None

    def _try(self, batch: Any) -> None:
        few = _varied(_keys(batch) or [0.0] * batch_examples(batch), 0, self.most)
        if self._is_possible and len(few) > self.first:
            self._compare(take_examples(batch, few), len(few))

    def _compare(self, few: Any, count: int) -> None:
        worker = self.worker
        with preserved_state(worker.device), trying(worker):
            before = random_states(worker.device)
            try:
                whole = worker.ask(few)
                parts = worker.weights.parts(worker.ask, few, [(0, self.first), (self.first, count)])
                each = [(worker.ask(part), share) for part, share in parts if share]
            except Exception as error:  # the user's model may return its loss in training mode only
                self._is_possible = _untried(self.option, f"{type(error).__name__}: {error}")
                return
            if random_states(worker.device) != before:
                self._is_possible = _untried(self.option, DRAWS)
                return
        mean = sum(loss * share for loss, share in each)
        eps = rounding(worker) if worker.dtype is None else torch.finfo(worker.dtype).eps
        if abs(whole - mean) > max(OFF, 16 * eps) * max(abs(whole), *(abs(loss) for loss, _ in each)):
            node, step = worker.at
            raise ModelError(
                f"{self.option}: the loss of {count} examples is not the mean of its parts at step {step + 1} of node "
                f"{node}: expected {mean:.6g}, got {whole:.6g}. Sums, class weights and pairs inside a batch give "
                f"other gradients in parts. {_instead(self.option)}"
            )


def rounding(worker: Worker) -> float:
    """Return the relative rounding error of one operation of the model."""
    eps = max(torch.finfo(p.dtype).eps for p in worker.model.parameters() if p.requires_grad)
    return eps if Device(worker.device).is_cpu else max(eps, GPU_EPS)


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
    """Join all batches shaped like the first, apart from the number of examples; only the first if not all tensors."""
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


def _varied(keys: Sequence[float], start: int, stop: int) -> list[int]:
    """Return the numbers of few examples with many targets, equal targets side by side.

    The examples are those from `start` to `stop` of an order in which one example of each target comes first, then a
    second one of each, and so on.

    >>> _varied([1.0, 1.0, 3.0, 1.0], 0, 3)
    [0, 1, 2]
    """
    seen: Counter[float] = Counter()
    turns = []
    for key in keys:
        turns.append(seen[key])
        seen[key] += 1
    order = sorted(range(len(keys)), key=lambda k: (turns[k], k))
    return sorted(order[start:stop], key=lambda k: keys[k])


def unlike(names: list[str], sums: Tensor, eps: float = 0.0) -> str:
    """Return a text about the gradient furthest over its limit; "" if all gradients are within their limits.

    `sums` (parameters, 2) has each gradient's |split - dense|^2 and |dense|^2. With `eps`, the relative rounding error
    of one operation, a gradient passes within max(1 %, 16 eps) of its norm, or max(1e-5, eps) of the norm of all.
    """
    off, norms = sums.sqrt().unbind(1)
    limits = (max(TOLERANCE, 16 * eps) * norms).clamp(min=max(ROUNDING, eps) * float(norms.square().sum().sqrt()))
    if bool((off <= limits).all()):
        return ""
    excess = off / limits.clamp(min=1e-300)
    worst = int(excess.nan_to_num(nan=float("inf")).argmax())
    return (
        f"the gradient of {names[worst]!r} is off by {float(off[worst]):.2g} of {float(norms[worst]):.2g}, more than "
        f"{float(limits[worst]):.2g}"
    )
