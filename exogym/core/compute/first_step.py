"""Take and undo a trial step before training, to find out which buffers and random numbers the model uses.

The trial also finds state that a model stores in plain attributes, which all nodes of a process would share. ExoGym
compares the attributes of all submodules before and after a trial step: numbers, text, tensors, arrays, containers of
these, and objects of the user's own classes. It ignores functions, modules and torch's own objects.

A trial pass also measures the memory of activations, for the sizes of micro-batches and evaluations.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from exogym.core.base.batches import batch_examples, map_tensors, slice_batch, tensors_in
from exogym.core.base.devices import Device
from exogym.core.base.modes import evaluation_mode, normalizes, start_training
from exogym.core.base.rng import preserved_state, seed_python, seed_torch
from exogym.core.base.torch_private import own_buffers, strided_parts, uncompiled, version
from exogym.core.compute.pointer import owner_of
from exogym.core.compute.worker import Worker
from exogym.errors import ModelError

ALLOWED = "shared_attributes"
_OWN = frozenset(vars(nn.Module())) | {ALLOWED}  # every module's own attributes
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_DEEPEST = 4
MEASURED = 8  # examples of a trial pass for activations


def look(
    worker: Worker, batch: Any, another: Callable[[], Any] | None = None, alone: Callable[[], None] | None = None
) -> None:
    """Take a training step on `batch`, undo it, and raise ModelError for a model that can't be trained.

    Set the worker's `changing`, `draws_torch` and `draws_python` to the buffers that the step changes and the random
    generators that it uses. Buffers that the first step makes or resizes remain. A second step then checks that later
    steps do not change these buffers.

    Args:
        another: returns another batch like `batch`. Without `another`, the second step uses `batch` again.
        alone: called if a step on a single example fails in batch normalization. Without `alone`, this is not tried.
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
                f"the model creates or resizes buffers in its first step and changes them later ({late[:3]}), so no "
                "node would start with the right values: create them in __init__ with their final shape"
            )
    allowed = attributes.allowed()
    if changed := [path for path in attributes.differing(attributes.now(), 0.0) if path not in allowed]:
        from exogym.core.compute.carried import refuse_carried

        other = (lambda: batch) if another is None else another
        exact = Device(worker.device).is_cpu
        refuse_carried(
            attributes, changed, lambda batch: _trial_step(worker, batch), batch, other, 0.0 if exact else 1e-4
        )
    attributes.put_back(path for path in allowed if path in attributes.kept)


def _fails_alone(worker: Worker, batch: Any) -> bool:
    """Return whether a training step on the batch's first example fails, because batch normalization gets one value."""
    if not normalizes(worker.model):
        return False
    try:
        _trial_step(worker, slice_batch(batch, 0, 1))
    except Exception as error:  # other errors recur in the first step
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
                f"a training step changes {name!r}, a parameter without requires_grad, which all nodes would share: "
                "make it a buffer (register_buffer), so that every node has its own"
            )
    return loss


def _trial_gradient(worker: Worker, batch: Any) -> Tensor:
    with worker.autocast():
        try:
            loss = worker.loss(worker.to_device(batch))
        except (AttributeError, TypeError) as error:
            if worker.loss.loss_fn is None and isinstance(batch, tuple | list):
                raise ModelError(
                    f"model(batch) failed on a batch that is a {type(batch).__name__} of {len(batch)} ({error}): pass "
                    "loss_fn= if the model takes only the inputs. Otherwise the model gets the whole batch and must "
                    "return the loss; a model with forward(self, x, targets) gets inputs and targets"
                ) from error
            raise
    if not loss.requires_grad:
        raise ModelError(
            "the loss does not depend on any trainable parameter: check for frozen parameters, detach() and no_grad()"
        )
    if loss.is_complex():
        raise ModelError(
            f"the loss must be a real number, but is complex ({loss.dtype}): return loss.abs() or loss.real"
        )
    try:
        loss.backward()
    except RuntimeError as error:
        worker.loss.explain(error, batch)
        raise
    check_dense(worker.model.named_parameters())
    return loss.detach()


def check_dense(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ModelError if a gradient is sparse, because a row's gradient is dense."""
    for name, p in named:
        if p.grad is not None and p.grad.layout != torch.strided:
            raise ModelError(
                f"the gradient of {name!r} must be dense, but is sparse: create the layer without sparse=True"
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
    """A context for trials: evaluation mode, fixed seeds, and at the exit cleared gradients, and buffers as before."""
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
    states = Device(device).random_states()
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


class Attributes:
    """Copy the current attributes of `model` and its submodules.

    A module's `shared_attributes` may name harmless attributes of this module, and of its submodules by their paths.
    """

    def __init__(self, model: nn.Module):
        self.model, self.modules = model, dict(model.named_modules())
        self.kept = {
            f"{name}.{key}" if name else key: _Value(value, set(), 0)
            for name, module in self.modules.items()
            for key, value in vars(module).items()
            if key not in _OWN
        }

    def now(self) -> Attributes:
        """Return another copy, of the attributes as they are now."""
        return Attributes(self.model)

    def allowed(self) -> set[str]:
        """Return the paths in modules' `shared_attributes`. Raise ModelError if one is not a list of names."""
        named = [(name, getattr(module, ALLOWED, ())) for name, module in self.modules.items()]
        for name, keys in named:
            if not isinstance(keys, list | tuple | set | frozenset) or not all(isinstance(key, str) for key in keys):
                raise ModelError(
                    f"{ALLOWED} of {type(self.modules[name]).__name__} must be a tuple of names, such as {ALLOWED} = "
                    f"('cache',), not {keys!r}"
                )
        return {f"{name}.{key}" if name else key for name, keys in named for key in keys}

    def differing(self, other: Attributes, tolerance: float) -> list[str]:
        """Return the paths whose values differ from the copy `other`, floats by more than `tolerance` (relative)."""
        paths = dict.fromkeys([*self.kept, *other.kept])
        pairs = {path: (self.kept.get(path), other.kept.get(path)) for path in paths}
        return [path for path, (a, b) in pairs.items() if a is None or b is None or not a.same(b, tolerance)]

    @torch.no_grad()
    def put_back(self, paths: Iterable[str]) -> None:
        """Set the attributes at `paths` back to their copied values, in place if they changed in place."""
        for path in paths:
            name, _, key = path.rpartition(".")
            if path in self.kept:
                self.modules[name].__dict__[key] = self.kept[path].restored()
            else:
                self.modules[name].__dict__.pop(key, None)


class _Value:
    """A value and a copy of its contents, `held`; None if the contents are ignored."""

    def __init__(self, value: Any, seen: set[int], depth: int):
        self.value, self.held = value, None  # type: Any, Any
        if isinstance(value, _PLAIN):
            self.held = (value,)
        elif isinstance(value, nn.Parameter | nn.Module) or id(value) in seen or depth > _DEEPEST:
            return
        elif isinstance(value, Tensor):
            self.held = value.detach().clone() if value.layout == torch.strided and not value.is_meta else None
        elif isinstance(value, np.ndarray):
            self.held = value.copy()
        elif isinstance(value, set | frozenset):
            self.held = (set(value),)
        else:
            seen.add(id(value))
            if isinstance(value, list | tuple | deque):
                self.held = [_Value(item, seen, depth + 1) for item in value]
            elif isinstance(value, dict) or _is_users_own(value):
                items = value if isinstance(value, dict) else vars(value)
                self.held = {key: _Value(item, seen, depth + 1) for key, item in items.items()}

    def same(self, other: _Value, tolerance: float) -> bool:
        a, b = self.held, other.held
        if type(a) is not type(b):
            return False
        if isinstance(a, Tensor):
            if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
                return False
            exact = not (a.is_floating_point() or a.is_complex())
            return torch.equal(a, b) if exact else torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
        if isinstance(a, np.ndarray):
            return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        if isinstance(a, list):
            return len(a) == len(b) and all(x.same(y, tolerance) for x, y in zip(a, b, strict=True))
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(x.same(b[key], tolerance) for key, x in a.items())
        if isinstance(a, tuple) and isinstance(a[0], float) and isinstance(b[0], float):
            (x,), (y,) = a, b
            return x == y or (x != x and y != y) or abs(x - y) <= tolerance * abs(x)
        return bool(a == b)

    def restored(self) -> Any:
        """Set the value's contents back to the copy, in place, and return the value."""
        value, held = self.value, self.held
        if isinstance(held, Tensor):
            if value.is_leaf and not torch.equal(value.detach(), held):
                value.detach().copy_(held)
        elif isinstance(held, np.ndarray):
            value[...] = held
        elif isinstance(held, list):
            items = [kept.restored() for kept in held]
            if not isinstance(value, tuple):
                value.clear()
                value.extend(items)
        elif isinstance(held, dict):
            items_by_key = {key: kept.restored() for key, kept in held.items()}
            now = value if isinstance(value, dict) else vars(value)
            now.clear()
            now.update(items_by_key)
        elif isinstance(value, set):
            value.clear()
            value.update(held[0])
        return value


def _is_users_own(value: Any) -> bool:
    """Return whether `value` is an object with attributes, of a class outside torch and builtins."""
    package = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and not callable(value) and package not in ("torch", "builtins", "functools")


# The memory of a pass


def activation_bytes(worker: Worker, batch: Any) -> int:
    """Return the bytes that autograd keeps between forward and backward on `batch`, without parameters and batch."""
    batch = worker.to_device(batch)
    own = {p.untyped_storage().data_ptr() for p in worker.model.parameters()}
    map_tensors(batch, lambda x: own.add(x.untyped_storage().data_ptr()))
    seen: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        for part in strided_parts(x):
            storage = part.untyped_storage()
            if storage.data_ptr() not in own:
                seen[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), worker.autocast():
        worker.loss(batch)
    return sum(seen.values())


def forward_bytes(worker: Worker, batch: Any) -> float:
    """Return the bytes of activations per example in a forward pass; 0 if they can't be measured.

    These are the larger of two numbers: what autograd keeps, and the outputs of the innermost modules, which count if
    a part of the model is frozen.
    """
    few = slice_batch(batch, 0, MEASURED)
    if uncompiled(worker.model) is not worker.model:  # each other size would be compiled
        return 0.0
    made = 0

    def note(module: nn.Module, given: Any, out: Any) -> None:
        nonlocal made
        made += 0 if next(module.children(), None) else sum(x.nbytes for x in tensors_in(out))

    with preserved_state(worker.device), trying(worker):
        handle = nn.modules.module.register_module_forward_hook(note)
        try:
            kept = activation_bytes(worker, few)
        except Exception:  # a model may have no loss in evaluation mode; the evaluation says so
            return 0.0
        finally:
            handle.remove()
    return max(made, kept) / batch_examples(few)
