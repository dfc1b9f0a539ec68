"""Call a model on a batch and find the loss in its output.

Without `loss_fn`, the model computes its own loss. `model(batch)` returns a scalar, a mapping with "loss", an object
with `.loss` (Hugging Face), or a tuple with exactly one scalar tensor, such as (logits, loss). With `loss_fn`, the
model returns predictions: for a batch (inputs..., targets) the loss is `loss_fn(model(*inputs), targets)`.

A batch that is a mapping becomes keyword arguments if `forward` has a parameter with the name of one of its keys.
Without `loss_fn`, a batch (inputs..., targets) becomes `model(*batch)` in two cases: `forward` has a parameter named
like one of `TARGET_KEYS` in the place of the targets, or `forward` needs exactly as many arguments as the batch has.

A batch's loss is sum_i w_i l_i / sum_i w_i over its targets i. This is the one definition of a "mean over targets":
training in parts (`weights`), evaluations and accuracies use it. For torch's own losses, the w_i are known
(`counting`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exogym.core.base.batches import MISSING, RAISED, TARGET_KEYS, batch_examples, described, targets_of
from exogym.core.base.torch_private import uncompiled
from exogym.errors import DataError, ModelError

Counting = Callable[[Tensor], Tensor]  # targets -> each target's weight
OF_CLASSES = {nn.CrossEntropyLoss: F.cross_entropy, nn.NLLLoss: F.nll_loss}
OF_ELEMENTS: dict[type[nn.Module], Callable[..., Tensor]] = {  # means over all elements, or over the examples
    nn.MSELoss: F.mse_loss,
    nn.L1Loss: F.l1_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.HuberLoss: F.huber_loss,
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.SoftMarginLoss: F.soft_margin_loss,
    nn.MultiLabelSoftMarginLoss: F.multilabel_soft_margin_loss,
}
SETTINGS = ("weight", "ignore_index", "reduction", "size_average", "reduce")


@dataclass
class Output:
    """The results of one batch: the scalar `loss` and, if known, predictions, targets and further scalars by name."""

    loss: Tensor
    predictions: Tensor | None = None
    targets: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)


class Loss:
    """Call the model on a batch and find the loss in the model's output. Without a scalar loss, raise ModelError.

    `loss_fn(predictions, targets)` computes the loss. Without `loss_fn`, the model returns its own loss.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Tensor] | None):
        self.model, self.loss_fn = model, loss_fn
        forward: Any = uncompiled(model).forward
        parameters = inspect.signature(forward).parameters
        self._names = {n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        self._takes_any_name = not self._names and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        needed = sum(p.default is p.empty for p in positional)
        self._spread = {k for k, p in enumerate(positional, 1) if k > 1 and (k == needed or p.name in TARGET_KEYS)}
        self._plain: Any = None  # the type of batches that are (inputs..., targets) and give tensor predictions

    def __call__(self, batch: Any) -> Tensor:
        """Return the loss of `batch`, a scalar."""
        if self.loss_fn is not None and type(batch) is self._plain:
            out: Any = MISSING
            try:
                out = self.model(*batch[:-1])
                return self.loss_fn(out, batch[-1])
            except RAISED as error:
                self.explain(error, batch, out)
                raise
        return self.of(self.model, batch).loss

    def of(self, call: Callable[..., Any], batch: Any) -> Output:
        """Return the `Output` of `call` (the model, or the model with other parameters) on `batch`."""
        if self.loss_fn is not None:
            return self._with_loss_fn(call, batch)
        spread = bool(self._spread) and isinstance(batch, tuple | list) and len(batch) in self._spread
        try:
            if isinstance(batch, Mapping) and (self._takes_any_name or self._names & set(batch)):
                out = call(**batch)
            else:
                out = call(*batch) if spread else call(batch)
        except RAISED as error:
            self.explain(error, batch)
            raise
        if isinstance(out, Tensor) and out.dim() == 0:
            return Output(out)
        if isinstance(out, tuple | list) and not hasattr(out, "_fields"):
            scalars = [x for x in out if isinstance(x, Tensor) and x.dim() == 0]
            if len(scalars) == 1:  # a model that got the targets returns predictions for them beside the loss
                others = [x for x in out if isinstance(x, Tensor) and x.dim()] if spread else []
                return Output(scalars[0], others[0] if len(others) == 1 else None, targets_of(batch))
        if isinstance(out, Mapping):
            loss, fields = out.get("loss"), dict(out)
        else:
            loss, fields = getattr(out, "loss", None), vars(out) if hasattr(out, "__dict__") else {}
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ModelError(
                "model(batch) must return a loss (a scalar tensor, a mapping with 'loss', an object with .loss or a "
                f"tuple with one scalar), but returned {described(out)}. If it returns predictions, pass loss_fn= to "
                "the trainer, for example torch.nn.functional.cross_entropy"
            )
        logits = fields.get("logits")
        metrics = {k: v for k, v in fields.items() if k != "loss" and isinstance(v, Tensor) and v.numel() == 1}
        logits, targets = logits if isinstance(logits, Tensor) else None, targets_of(batch)
        if "CausalLM" in type(out).__name__:
            logits, targets = _facing(logits, batch)
        return Output(loss.reshape(()), logits, targets, metrics)

    def _with_loss_fn(self, call: Callable[..., Any], batch: Any) -> Output:
        assert self.loss_fn is not None
        targets = targets_of(batch)
        if targets is None:
            given = f"a batch is {described(batch)}"
            if isinstance(batch, tuple | list) and len(batch) > 1:
                given = f"the last item of a batch is {described(batch[-1])} and no tensor"
            raise DataError(
                f"loss_fn needs targets, but {given}: use (inputs, targets), or a mapping with one of "
                + ", ".join(TARGET_KEYS)
            )
        if isinstance(batch, Mapping) and len(both := [key for key in TARGET_KEYS if key in batch]) > 1:
            raise DataError(
                f"a batch has several targets for loss_fn, {both}: keep one of these keys and rename the others"
            )
        out = predictions = MISSING
        try:
            if isinstance(batch, Mapping):
                out = call(**{k: v for k, v in batch.items() if k not in TARGET_KEYS})
            else:
                out = call(*batch[:-1])
            predictions = out if isinstance(out, Tensor) else getattr(out, "logits", out)
            loss = self.loss_fn(predictions, targets)
        except RAISED as error:
            self.explain(error, batch, predictions)
            raise
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ModelError(f"loss_fn must return a scalar tensor (reduction='mean'), but returned {described(loss)}")
        if call is self.model and isinstance(out, Tensor) and isinstance(batch, tuple | list) and loss.dim() == 0:
            self._plain = type(batch)
        return Output(loss.reshape(()), predictions if isinstance(predictions, Tensor) else None, targets)

    @functools.cached_property
    def counting(self) -> Counting | None:
        """A function from targets to their weights, if `loss_fn` is one of torch's mean losses; otherwise None."""
        return counting(self.loss_fn)

    def divisor(self, batch: Any, start: int, stop: int) -> float | None:
        """Return the divisor of the loss of a batch's examples from `start` to `stop`, or None if unknown."""
        targets = whole_targets(batch)
        if targets is None:
            return float(stop - start)
        if targets.is_floating_point() or targets.is_complex():
            return float(targets[start:stop].numel())
        return None if self.counting is None else float(self.counting(targets[start:stop]).cpu().double().sum())

    def explain(self, error: Exception, batch: Any, out: Any = MISSING) -> None:
        """Raise an error that explains `error`, which the model or `loss_fn` raised for `batch`, if the cause is known.

        `out` is the model's output, or `MISSING` if the model raised `error`.
        """
        from exogym.core.compute.mistakes import explain

        known = explain(error, self.model, self.loss_fn, batch, out)
        if known is not None:
            raise known from error


def accuracy(output: Output, counting: Counting | None = None) -> tuple[int, int] | None:
    """Return the number of correct class predictions and the number of predictions compared.

    Return None if the output has no class predictions. With B examples and C classes, predictions have the shape
    (B, ..., C) or (B, C, ...), and integer targets have the shape (B, ...). Predictions for targets that the mean loss
    leaves out (`counted`), such as Hugging Face's -100, are not compared.
    """
    p, y = output.predictions, output.targets
    if p is None or y is None or y.is_floating_point() or y.dtype == torch.bool or p.dim() != y.dim() + 1:
        return None
    last, second = p.shape[:-1] == y.shape, p.shape[:1] + p.shape[2:] == y.shape
    if second and (p.dim() > 3 or not last):  # images have the classes second, even if all axes are equally long
        classes = 1
    elif last:
        classes = -1
    else:
        return None
    if p.shape[classes] < 2:  # one number per example is not a choice among classes
        return None
    guess = p.argmax(classes)
    counts = counted(y, counting)
    right, compared = torch.stack([((guess == y) & counts).sum(), counts.sum()]).tolist()  # one wait for the device
    return right, compared


def _facing(logits: Tensor | None, batch: Any) -> tuple[Tensor | None, Tensor | None]:
    """Align a Hugging Face causal language model's logits with its labels: (B, S-1, V) and (B, S-1).

    With B examples of S tokens and V words, the model compares the logits at position s with the label at s + 1. This
    holds only if the batch has a key `labels`. Otherwise somebody may have shifted the labels, so return (None, None).
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if logits is None or not isinstance(labels, Tensor) or logits.shape[:-1] != labels.shape:
        return None, None
    return logits[..., :-1, :], labels[..., 1:]


# What a mean loss divides by


def counting(loss_fn: Callable[..., Tensor] | None) -> Counting | None:
    """Return a function from targets to their weights if `loss_fn` is one of torch's mean losses; otherwise None.

    torch's losses are modules such as `CrossEntropyLoss`, functions such as `torch.nn.functional.cross_entropy`, and a
    `functools.partial` of such a function with keywords. With class weights w, targets y_i and their losses l_i, the
    batch's loss is sum_i w[y_i] l_i / sum_i w[y_i]. The sums leave out targets equal to `ignore_index`. In losses that
    compare numbers all targets weigh the same.

    >>> import torch
    >>> counting(nn.CrossEntropyLoss(torch.tensor([1.0, 3.0]), ignore_index=0))(torch.tensor([0, 1, 1]))
    tensor([0., 3., 3.])
    >>> counting(functools.partial(F.cross_entropy, ignore_index=0))(torch.tensor([0, 1, 1]))
    tensor([0, 1, 1])
    >>> counting(functools.partial(F.cross_entropy, reduction="sum"))
    """
    function: Any = loss_fn
    given: dict[str, Any] = {}
    while isinstance(function, functools.partial) and not function.args:
        function, given = function.func, {**function.keywords, **given}
    of_classes, of_elements = OF_CLASSES.values(), OF_ELEMENTS.values()
    if type(function) in OF_CLASSES | OF_ELEMENTS and not given:  # a subclass may compute something else
        given = {name: getattr(function, name) for name in SETTINGS if hasattr(function, name)}
        function = (OF_CLASSES | OF_ELEMENTS)[type(function)]
    if any(function is known for known in of_classes):
        known = given.get("reduction", "mean") == "mean" and not {"size_average", "reduce"} & given.keys()
        return _of_classes(given.get("weight"), given.get("ignore_index", -100)) if known else None
    if any(function is known for known in of_elements):
        plain = {name: x for name, x in given.items() if name in SETTINGS and x is not None}
        return torch.ones_like if plain in ({}, {"reduction": "mean"}) else None
    return None


def _of_classes(weight: Tensor | None, ignored: int) -> Counting:
    def counts(targets: Tensor) -> Tensor:
        counted = targets != ignored
        return counted.long() if weight is None else weight.detach()[targets.long().clamp(min=0)] * counted

    return counts


def counted(targets: Tensor, known: Counting | None) -> Tensor:
    """Return which targets count in the mean loss, as a bool tensor. `known` is the loss's `counting`."""
    return targets >= 0 if known is None else known(targets) != 0


def whole_targets(batch: Any) -> Tensor | None:
    """Return a batch's targets if there is at least one for each example; otherwise None."""
    targets = targets_of(batch)
    return targets if targets is not None and targets.dim() and len(targets) == batch_examples(batch) else None
