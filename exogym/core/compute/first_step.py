"""Take a trial step before training, and undo it, to learn which buffers and random numbers the model uses."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from exogym.core.base.batches import slice_batch
from exogym.core.base.modes import evaluation_mode, normalizes, start_training
from exogym.core.base.rng import seed_python, seed_torch
from exogym.core.base.torch_private import own_buffers, strided_parts, version
from exogym.core.compute.attributes import Attributes, refuse_carried
from exogym.core.compute.pointer import owner_of
from exogym.core.compute.worker import Worker
from exogym.errors import ModelError


def look(
    worker: Worker, batch: Any, another: Callable[[], Any] | None = None, alone: Callable[[], None] | None = None
) -> None:
    """Take a training step on `batch`, undo it, and refuse models that cannot be trained.

    Set the worker's `changing`, `draws_torch` and `draws_python` to the buffers that the step changes and the random
    generators that it uses. Buffers that the first step makes or resizes remain. A second step then checks that later
    steps do not change these buffers.

    Args:
        another: returns another batch like `batch`. Without `another`, the second step uses `batch` again.
        alone: called if a step on a single example fails in batch normalization. Without `alone`, this is not tried.

    Raises:
        ModelError: the model returns no loss; the loss depends on no trainable parameter; a gradient is sparse; or the
            step changes a frozen parameter, or an attribute that later steps use.
    """
    start_training(worker.model)
    if alone is not None and _fails_alone(worker, batch):
        worker.fails_alone = True
        alone()
    attributes, at_first = Attributes(worker.model), _buffer_shapes(worker.model)
    _trial_step(worker, batch)
    if (made := _buffer_shapes(worker.model)) != at_first:
        _trial_step(worker, batch)
        late = [name for name in worker.changing if at_first.get(name) != made[name]]
        if late or _buffer_shapes(worker.model) != made:
            raise ModelError(
                f"the model makes or resizes buffers in its first step and changes them later ({late[:3]}), so no "
                "node would start with the right values: make them in __init__ with their final shape"
            )
    other = (lambda: batch) if another is None else another
    exact = worker.device.type == "cpu"
    refuse_carried(
        worker.model, attributes, lambda batch: _trial_step(worker, batch), batch, other, 0.0 if exact else 1e-4
    )


def _fails_alone(worker: Worker, batch: Any) -> bool:
    """Return whether a training step on the batch's first example fails, because batch normalization gets one value."""
    if not normalizes(worker.model):
        return False
    try:
        _trial_step(worker, slice_batch(batch, 0, 1))
    except Exception as error:  # others come again in the first step
        from exogym.core.compute.mistakes import ONE_VALUE

        return ONE_VALUE in str(error)
    return False


def _trial_step(worker: Worker, batch: Any) -> Tensor:
    seed_torch(0, worker.device)
    seed_python(0)
    states = random_states(worker.device)
    frozen = {name: (p, _mark(p)) for name, p in worker.model.named_parameters() if not p.requires_grad}
    before = {name: (b, version(b), b.detach().clone()) for name, b in worker.model.named_buffers()}
    try:
        loss = _trial_gradient(worker, batch)
    finally:
        worker.clear_grads(list(worker.model.parameters()))
        worker.changing = _undo(worker.model, before)
    worker.draws_torch, worker.draws_python = (
        a != b for a, b in zip(states, random_states(worker.device), strict=True)
    )
    for name, (p, mark) in frozen.items():
        if _mark(p) != mark:
            raise ModelError(
                f"a training step changes {name!r}, a parameter without requires_grad. All nodes share such a "
                "parameter: make it a buffer (register_buffer), so that every node has its own"
            )
    return loss


def _trial_gradient(worker: Worker, batch: Any) -> Tensor:
    with worker.autocast():
        try:
            loss = worker.loss(worker.to_device(batch))
        except (AttributeError, TypeError) as error:
            if worker.loss.loss_fn is None and isinstance(batch, tuple | list):
                raise ModelError(
                    f"model(batch) failed on a batch that is a {type(batch).__name__} of {len(batch)} ({error}): "
                    "pass loss_fn= if the model takes only the inputs. Without loss_fn= the model gets the whole batch "
                    "and returns the loss; a model with forward(self, x, targets) gets inputs and targets"
                ) from error
            raise
    if not loss.requires_grad:
        raise ModelError(
            "the loss does not depend on any trainable parameter: check for frozen parameters, detach() and no_grad()"
        )
    if loss.is_complex():
        raise ModelError(
            f"the loss is a complex number ({loss.dtype}), wanted a real number: return loss.abs() or loss.real"
        )
    try:
        loss.backward()
    except RuntimeError as error:
        worker.loss.explain(error, batch)
        raise
    check_dense(worker.model.named_parameters())
    return loss.detach()


def check_dense(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ModelError if a gradient is sparse: a row's gradient is dense."""
    for name, p in named:
        if p.grad is not None and p.grad.layout != torch.strided:
            raise ModelError(
                f"the gradient of {name!r} is sparse, wanted a dense one: create the layer without sparse=True"
            )


@torch.no_grad()
def _undo(model: nn.Module, before: dict[str, tuple[Tensor, int, Tensor]]) -> list[str]:
    """Restore the buffers that the trial step changed and return their names. Buffers that it made stay."""
    changing = []
    for name, buffer in model.named_buffers():
        if name not in before or before[name][2].shape != buffer.shape:
            continue
        was, at, value = before[name]
        if not same(value, buffer) or (buffer is was and version(buffer) != at):
            if buffer.layout != torch.strided:
                raise ModelError(
                    f"a training step changes the sparse buffer {name!r}, but a node's own buffers are dense: make it "
                    "dense (x.to_dense()), or keep it constant"
                )
            changing.append(name)
            owner, attribute = owner_of(model, name)
            own_buffers(owner)[attribute] = was
            was.copy_(value)
    return changing


@contextlib.contextmanager
def trying(worker: Worker) -> Iterator[None]:
    """Return a context for trials: evaluation mode with fixed random seeds.

    At the exit, the gradients are cleared, and the buffers and the training mode are restored.
    """
    seed_torch(0, worker.device)
    seed_python(0)
    kept = [(*owner_of(worker.model, name), b, b.detach().clone()) for name, b in worker.model.named_buffers()]
    try:
        with evaluation_mode(worker.model):
            yield
    finally:
        worker.clear_grads(list(worker.model.parameters()))
        with torch.no_grad():
            for owner, attribute, buffer, value in kept:
                own_buffers(owner)[attribute] = buffer
                if not same(buffer, value):
                    buffer.copy_(value)


def _buffer_shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: buffer.shape for name, buffer in model.named_buffers()}


def random_states(device: torch.device) -> tuple[bytes, Any]:
    """Return the random generators' states: torch's, then Python's and numpy's together."""
    states = [torch.default_generator.get_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    numpy_state: Any = np.random.get_state()
    python = (random.getstate(), numpy_state[1].tobytes(), numpy_state[2])
    return b"".join(s.numpy().tobytes() for s in states), python


def _mark(x: Tensor) -> tuple[int, int, float]:
    """Return values that show whether a tensor was changed: its version, its address and a float tensor's sum."""
    summable = x.layout == torch.strided and x.is_floating_point() and x.dtype.itemsize > 1
    return version(x), x.data_ptr(), float(x.detach().sum().nan_to_num()) if summable else 0.0


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, with NaN equal to NaN. Sparse tensors are compared without zeros."""
    if a.shape != b.shape or a.layout != b.layout:
        return False
    pairs = zip(strided_parts(a), strided_parts(b), strict=True)
    return all(torch.equal(*(x.nan_to_num() if x.is_floating_point() else x for x in pair)) for pair in pairs)
