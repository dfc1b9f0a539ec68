"""The worker: one copy of the user's module, pointed at one row after another.

The module's parameters keep their identity (closures, hooks and optimizers that hold them stay right); only
their data is set to views of a row. After a stretch the pointers are compared: a buffer the module
re-assigned is copied back, a parameter that moved is an error.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from exogym.core.base import pulse
from exogym.core.base.draws import stream_seed
from exogym.core.base.rng import seed_python, seed_torch
from exogym.core.base.torch_private import own_buffers, own_parameters, scale_, version
from exogym.core.compute.attributes import Attributes, refuse_carried
from exogym.core.compute.outputs import Loss, batch_examples, map_tensors
from exogym.core.compute.weights import CLOSE, Weights
from exogym.core.fleet import Fleet, Stateful
from exogym.core.fleet.state import Tensors
from exogym.errors import ArgumentError, DataError, ModelError

if TYPE_CHECKING:
    from exogym.core.compute.insides import Insides

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_SCALE, SCALE_GROWTH_STEPS = 65536.0, 2000
MAX_CACHED_VIEWS = 50_000


class Worker:
    """Computes losses and gradients of one row at a time.

    Args:
        model: the user's module, on its device, trained in place.
        loss: finds the loss in the model's output.
        device, precision, seed: of the run; "bf16" and "fp16" are autocast, entered per step.
        micro_batch_size: examples computed at once; a step's larger batch is split and the losses weighted by
            the number of examples.

    Attributes:
        insides: of nodes that are several devices: of a batch no more is computed at once than one of them would.
        parameters: the trainable parameters in fleet order, block after block.
        draws_torch, draws_python: whether a training step draws from torch's, or Python's and numpy's, generators.
        before_last_backward: called before the backward pass of a step's last micro-batch.
        should_stop: asked after each step; True ends the stretch there.
        changing: names of the buffers that a training step changes; these have rows.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        device: torch.device,
        precision: str,
        seed: int,
        micro_batch_size: int | None,
    ):
        self.model, self.loss, self.device, self.seed = model, loss, device, seed
        self.dtype, self.micro_batch_size = AUTOCAST[precision], micro_batch_size
        self.scaled = precision == "fp16"
        self.insides: Insides | None = None
        self.draws_torch = self.draws_python = True
        self.should_stop: Callable[[], bool] = lambda: False
        self.before_last_backward: Callable[[], None] | None = None
        self.changing: list[str] = []
        self.stream: tuple[int, ...] = ()  # further names of its random numbers
        self.weights = Weights(CLOSE if self.dtype is None else 2e-3)

    # Looking at the model before training

    def probe(self, batch: Any, another: Callable[[], Any] | None = None) -> None:
        """Run a training step and undo it, to learn what the model does.

        Buffers that the model makes, or brings to their size, in its first step are kept, and looked at in a second.

        Args:
            another: gives another batch of the kind; `batch` again if None.

        Raises:
            ModelError: no loss comes back, it depends on no trainable parameter, gradients are sparse, or the step
                changes what cannot be a row, or an attribute that goes into later steps.
        """
        self.model.train()
        attributes, at_first = Attributes(self.model), self._buffer_shapes()
        self._trial_step(batch)
        if (made := self._buffer_shapes()) != at_first:
            self._trial_step(batch)
            late = [name for name in self.changing if at_first.get(name) != made[name]]
            if late or self._buffer_shapes() != made:
                raise ModelError(
                    f"the model makes or resizes buffers in its first step and goes on changing them ({late[:3]}), so "
                    "no node's own could start at the right value: make them in __init__, with their size"
                )
        other = (lambda: batch) if another is None else another
        exact = self.device.type == "cpu"
        refuse_carried(self.model, attributes, self._trial_step, batch, other, 0.0 if exact else 1e-4)

    def _trial_step(self, batch: Any) -> Tensor:
        seed_torch(0, self.device)
        seed_python(0)
        states = self.random_states()
        frozen = {name: (p, _mark(p)) for name, p in self.model.named_parameters() if not p.requires_grad}
        before = {name: (b, version(b), b.detach().clone()) for name, b in self.model.named_buffers()}
        try:
            loss = self._trial_gradient(batch)
        finally:
            self.clear_grads(list(self.model.parameters()))
            self._undo(before)
        self.draws_torch, self.draws_python = (a != b for a, b in zip(states, self.random_states(), strict=True))
        for name, (p, mark) in frozen.items():
            if _mark(p) != mark:
                raise ModelError(
                    f"a training step changes {name!r}, a parameter without requires_grad, which all nodes share: "
                    "make it a buffer (register_buffer), of which every node has its own"
                )
        return loss

    def _trial_gradient(self, batch: Any) -> Tensor:
        with self.autocast():
            try:
                loss = self.loss(self.to_device(batch))
            except (AttributeError, TypeError) as error:
                if self.loss.loss_fn is None and isinstance(batch, tuple | list):
                    raise ModelError(
                        f"model(batch) failed on a batch that is a {type(batch).__name__} of {len(batch)} ({error}): "
                        "without loss_fn= the model gets the whole batch and returns the loss; with loss_fn= it gets "
                        "the inputs; with forward(self, x, targets) it gets both and returns the loss"
                    ) from error
                raise
        if not loss.requires_grad:
            raise ModelError("the loss does not depend on any trainable parameter; is everything frozen or detached?")
        if loss.is_complex():
            raise ModelError(
                f"the loss is a complex number ({loss.dtype}), and only a real one has a smallest value: return a real "
                "part or a size, such as loss.abs() or loss.real"
            )
        try:
            loss.backward()
        except RuntimeError as error:
            self.loss.explain(error, batch)
            raise
        for name, p in self.model.named_parameters():
            if p.grad is not None and p.grad.layout != torch.strided:
                raise ModelError(
                    f"the gradient of {name!r} is sparse, and a row of the fleet is dense: leave out sparse=True"
                )
        return loss.detach()

    @torch.no_grad()
    def _undo(self, before: dict[str, tuple[Tensor, int, Tensor]]) -> None:
        """Find the buffers that the trial changed, and give them their values back; those it made are kept."""
        self.changing = []
        for name, buffer in self.model.named_buffers():
            if name not in before or before[name][2].shape != buffer.shape:
                continue
            was, at, value = before[name]
            if not _same(value, buffer) or (buffer is was and version(buffer) != at):
                self.changing.append(name)
                owner, attribute = self._owner(name)
                own_buffers(owner)[attribute] = was
                was.copy_(value)

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        """Be in evaluation mode, with generators at a fixed place; drop gradients and undo what buffers took after."""
        seed_torch(0, self.device)
        seed_python(0)
        kept = [(*self._owner(name), b, b.detach().clone()) for name, b in self.model.named_buffers()]
        mode = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(mode)
            self.clear_grads(list(self.model.parameters()))
            with torch.no_grad():
                for owner, attribute, buffer, value in kept:
                    own_buffers(owner)[attribute] = buffer
                    if not _same(buffer, value):
                        buffer.copy_(value)

    def _buffer_shapes(self) -> dict[str, torch.Size]:
        return {name: buffer.shape for name, buffer in self.model.named_buffers()}

    def random_states(self) -> tuple[bytes, Any]:
        """Return where the generators stand: torch's, and Python's and numpy's."""
        states = [torch.default_generator.get_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        numpy_state: Any = np.random.get_state()
        python = (random.getstate(), numpy_state[1].tobytes(), numpy_state[2])
        return b"".join(s.numpy().tobytes() for s in states), python

    # Binding to a fleet

    def bind(self, fleet: Fleet) -> None:
        """Take the fleet's rows as the places the module will be pointed at."""
        named = dict(self.model.named_parameters())
        self.fleet = fleet
        self.names = [slot.name for block in fleet.blocks for slot in block.layout]
        self.parameters = [named[name] for name in self.names]
        self._homes = [p.data for p in self.parameters]
        self._places = [(p, *self._owner(name)) for name, p in named.items()]
        self._buffer_owners = {name: self._owner(name) for name in self.changing}
        buffers = dict(self.model.named_buffers())
        self._buffer_homes = {name: buffers[name] for name in self.changing}
        self._buffers_at_first = {name: buffers[name].clone() for name in self.changing}
        for name in self.changing:
            fleet.buffers[name] = buffers[name].detach()[None].repeat(len(fleet), *[1] * buffers[name].dim())
        self._views: dict[int, list[Tensor]] = {}
        self._at: Sequence[Tensor] = self._homes
        self.scales = np.full(len(fleet), FIRST_SCALE if self.scaled else 1.0)
        self.good_steps = np.zeros(len(fleet), dtype=np.int64)
        self.overflowed = False
        fleet.state.register("scale", _Scale(self))

    def views(self, row: int) -> list[Tensor]:
        """Return the parameters of `row` as views, in fleet order."""
        found = self._views.get(row)
        if found is None:
            found = [slot.of(block.params[row]) for block in self.fleet.blocks for slot in block.layout]
            if len(self._views) * len(found) < MAX_CACHED_VIEWS:
                self._views[row] = found
        return found

    def point(self, row: int) -> None:
        """Point the module's parameters and changing buffers at `row`."""
        self._set(self.views(row), {name: rows[row] for name, rows in self.fleet.buffers.items()})

    def point_at(self, vectors: Sequence[Tensor], buffers: dict[str, Tensor]) -> None:
        """Point the module at any parameter `vectors`, (P,) per block, and `buffers`."""
        views = [slot.of(v) for block, v in zip(self.fleet.blocks, vectors, strict=True) for slot in block.layout]
        self._set(views, buffers)

    def begin(self, batch: Any) -> None:
        """Make the model ready for training, of which `batch` is one; called last, once all else is known to be well.

        Raises:
            ModelError: it is split over processes, and gives other gradients so.
        """

    def check(self, row: int) -> None:
        """Compare pointers after a stretch on `row`.

        Raises:
            ModelError: the module replaced or moved a parameter.
        """
        for p, owner, attribute in self._places:
            if own_parameters(owner).get(attribute) is not p:
                raise ModelError(
                    f"training replaced parameter {attribute!r} of {type(owner).__name__} by another object; change "
                    "it in place (under torch.no_grad()) so that the row keeps it"
                )
        for name, p, view in zip(self.names, self.parameters, self._at, strict=True):
            if p.data_ptr() != view.data_ptr():
                raise ModelError(
                    f"training moved parameter {name!r} to other memory (p.data = ...); change it in place"
                )
        self._keep_buffers(row)

    def _keep_buffers(self, row: int) -> None:
        """Copy buffers back that the module has re-assigned."""
        for name, (owner, attribute) in self._buffer_owners.items():
            current, home = own_buffers(owner)[attribute], self.fleet.buffers[name][row]
            if current is not None and current.data_ptr() != home.data_ptr():
                home.copy_(current.detach())

    def set_home(self, vectors: Sequence[Tensor], buffers: dict[str, Tensor], together: bool = True) -> None:
        """Give the module its own memory again, holding `vectors` and `buffers`; `together`: all processes do so."""
        self.point_at(vectors, buffers)
        with torch.no_grad():
            for home, view in zip(self._homes, self._at, strict=True):
                home.copy_(view)
            for name, home in self._buffer_homes.items():
                home.copy_(buffers[name])
        self._set(self._homes, self._buffer_homes)

    def go_home(self) -> None:
        """Give the module its own memory again, as it was when it was bound."""
        with torch.no_grad():
            for name, home in self._buffer_homes.items():
                home.copy_(self._buffers_at_first[name])
        self._set(self._homes, self._buffer_homes)

    def _set(self, views: Sequence[Tensor], buffers: dict[str, Tensor]) -> None:
        for p, view in zip(self.parameters, views, strict=True):
            p.data = view
            p.grad = None
        self._set_buffers(buffers)
        self._at = views

    def _set_buffers(self, buffers: dict[str, Tensor]) -> None:
        for name, (owner, attribute) in self._buffer_owners.items():
            own_buffers(owner)[attribute] = buffers[name]

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, attribute = name.rpartition(".")
        return self.model.get_submodule(path), attribute

    # Computing

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def to_device(self, batch: Any) -> Any:
        if self.device.type == "cpu":
            return batch
        return map_tensors(batch, lambda x: x.to(self.device, non_blocking=True))

    def reseed(self, node: int, step: int) -> None:
        """Put the generators that the model draws from at (seed, node, step)."""
        if self.draws_torch or self.draws_python:
            seed = stream_seed(self.seed, "step", node, step, *self.stream)
            seed_torch(seed, self.device)
            if self.draws_python:
                seed_python(seed)

    def gradient(self, batch: Any, row: int) -> Tensor:
        """Compute loss and gradients (into `.grad`) of the row the module points at; return the detached loss.

        In fp16 the loss is scaled by the row's own scale and the gradients are unscaled; `overflowed` tells
        whether they were not finite.
        """
        batch = self.to_device(batch)
        size = self.micro_batch_size if self.insides is None else self._at_once(self.insides, batch, row)
        if size is None and self.dtype is None:
            loss = self.loss(batch)
            if self.before_last_backward is not None:
                self.before_last_backward()
            loss.backward()
            pulse.step_taken()
            return loss.detach()
        total = None
        scale = float(self.scales[row])
        examples = batch_examples(batch)
        size = size or max(1, examples)
        bounds = [(start, min(start + size, examples)) for start in range(0, examples, size)] or [(0, 0)]
        parts = [(part, share) for part, share in self.weights.parts(self.ask, batch, bounds) if share]
        for k, (part, share) in enumerate(parts):
            with self.autocast():
                loss = self.loss(part)
            if self.before_last_backward is not None and k == len(parts) - 1:
                self.before_last_backward()
            (loss * (share * scale)).backward()
            pulse.step_taken()
            total = loss.detach() * share if total is None else total + loss.detach() * share
        if self.scaled:
            self._unscale(row)
        if total is None:
            raise DataError("a batch held no examples")
        return total

    def _at_once(self, insides: Insides, batch: Any, row: int) -> int:
        """Return how many examples of a batch a device of the node computes at once, at most."""
        node, examples = self.fleet.ranks[row], batch_examples(batch)
        insides.took(node, examples)
        return insides.meshes[node].at_once(min(examples, self.micro_batch_size or examples))

    def _unscale(self, row: int) -> None:
        grads = [p.grad for p in self.parameters if p.grad is not None]
        scale_(grads, 1.0 / float(self.scales[row]))
        self.overflowed = not all(bool(torch.isfinite(g).all()) for g in grads)

    def update_scale(self, row: int) -> None:
        """Halve the row's scale after an overflow, double it after 2,000 good steps (torch's GradScaler rule)."""
        if not self.scaled:
            return
        if self.overflowed:
            self.scales[row] *= 0.5
            self.good_steps[row] = 0
            return
        self.good_steps[row] += 1
        if self.good_steps[row] == SCALE_GROWTH_STEPS:
            self.scales[row] *= 2.0
            self.good_steps[row] = 0

    @torch.no_grad()
    def ask(self, batch: Any) -> float:
        """Return the loss of a batch, as of an evaluation, with the parameters that the module points at."""
        mode = self.model.training
        self.model.eval()
        try:
            with self.autocast():
                return float(self.loss(self.to_device(batch)))
        finally:
            self.model.train(mode)

    def counts_examples(self, batch: Any) -> bool:
        """Return whether each micro-batch of a batch weighs as many examples as it has."""
        return self.micro_batch_size is None or self.weights.counts_examples(self.ask, batch)

    def own_shares(self, batch: Any) -> list[tuple[Any, float]]:
        """Return what of a batch is evaluated in this process, one part after the other, and for how many examples the
        loss of each counts."""
        total = batch_examples(batch)
        size = self.micro_batch_size or max(1, total)
        bounds = [(start, min(start + size, total)) for start in range(0, total, size)]
        return [(part, share * total) for part, share in self.weights.parts(self.ask, batch, bounds)]

    def clear_grads(self, parameters: Sequence[nn.Parameter] | None = None) -> None:
        for p in self.parameters if parameters is None else parameters:
            p.grad = None

    @contextlib.contextmanager
    def evaluating(self, vectors: Sequence[Tensor], buffers: dict[str, Tensor]) -> Iterator[None]:
        """Point the module at `vectors` and `buffers` in evaluation mode, without gradients."""
        self.point_at(vectors, buffers)
        self.model.eval()
        try:
            with torch.no_grad(), self.autocast():
                yield
        finally:
            self.model.train()


class _Scale(Stateful):
    """A row's loss scale in fp16, and the steps since it last changed."""

    def __init__(self, worker: Worker):
        self.worker = worker

    def row(self, row: int) -> Tensors:
        scale = [float(self.worker.scales[row]), float(self.worker.good_steps[row])]
        return {"scale": torch.tensor(scale, dtype=torch.float64)}

    def load_row(self, row: int, tensors: Tensors) -> None:
        self.worker.scales[row], self.worker.good_steps[row] = tensors["scale"].tolist()


def check_precision(precision: str) -> str:
    """Return `precision`, or raise ArgumentError for one that is unknown."""
    if precision not in AUTOCAST:
        raise ArgumentError(f"precision={precision!r} is unknown: wanted one of {', '.join(AUTOCAST)}")
    return precision


def _mark(x: Tensor) -> tuple[int, int, float]:
    """Return what tells whether a tensor was changed, without a copy of it: version, place and, of floats, the sum."""
    summable = x.layout == torch.strided and x.is_floating_point() and x.dtype.itemsize > 1
    return version(x), x.data_ptr(), float(x.detach().sum().nan_to_num()) if summable else 0.0


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.nan_to_num() if a.is_floating_point() else a, b.nan_to_num() if b.is_floating_point() else b
    )
