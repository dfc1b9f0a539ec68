"""The worker: compute losses and gradients of one row at a time, with one copy of the user's module.

A worker has a `Pointer`, which points the module at a row; a `Loss`; the weights of a batch's parts; in fp16 a loss
scale per row; and `devices` if a node is several processes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from exogym.core.base import pulse
from exogym.core.base.batches import batch_examples, map_tensors, slice_batch
from exogym.core.base.devices import CPU, Device
from exogym.core.base.modes import evaluation_mode
from exogym.core.base.rng import seed_python, seed_torch, stream_seed
from exogym.core.base.torch_private import scale_
from exogym.core.compute.outputs import Loss
from exogym.core.compute.pointer import Pointer
from exogym.core.fleet import Fleet, Stateful
from exogym.core.fleet.state import Tensors
from exogym.errors import DataError, ModelError

if TYPE_CHECKING:
    from exogym.core.compute.weights import Weights
    from exogym.core.engine.nodes import Nodes

FIRST_SCALE, SCALE_GROWTH_STEPS = 65536.0, 2000
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Worker:
    """Compute losses and gradients of one row at a time.

    Args:
        model: the user's module, on its device, trained in place.
        loss: finds the loss in the model's output.
        device, precision, seed: the run's options. With "bf16" and "fp16" each step runs in torch's autocast.
        micro_batch_size: examples computed at once. A larger batch is split, and `Weights` weights the losses.

    Attributes:
        nodes: the devices of each node, which limit the examples computed at once; None if each node is one device.
        parameters: the trainable parameters in fleet order, block after block.
        draws_torch: whether a training step draws random numbers from torch.
        draws_python: whether a training step draws random numbers from Python or numpy.
        before_last_backward: called before the backward pass of a step's last micro-batch.
        changing: names of the buffers that a training step changes. Each row has its own values of these buffers.
        fails_alone: whether a training step on a single example is known to fail in batch normalization.
        weighs_classes: whether the loss function's class weights count in the weight of a batch's part.
        devices: divides the model over the node's processes (`Nodes.devices`); None if this process computes whole
            nodes.
        trials: tests during training that parts of a batch give the batch's loss; None if no test is needed.
        at: the node and the step whose random numbers are drawn now.
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
        self.nodes: Nodes | None = None
        self.draws_torch = self.draws_python = True
        self.devices: Any = None
        self._should_stop: Callable[[], bool] = lambda: False
        self.before_last_backward: Callable[[], None] | None = None
        self.changing: list[str] = []
        self.weighs_classes = True
        self.fails_alone = False
        self.trials: Any = None  # a `compute.parts.Trials`
        self.at = (-1, 0)

    def bind(self, fleet: Fleet) -> None:
        """Use the rows of `fleet` from now on. `point` can then point the module at any of these rows."""
        pointer = Pointer(self.model, fleet, self.changing)
        self._frozen = [(name, p) for name, p in self.model.named_parameters() if not p.requires_grad]
        self.fleet, self.names, self._buffers = fleet, pointer.names, pointer
        self.pointer: Pointer = pointer if self.devices is None else self.devices.holding(pointer)
        self.parameters = pointer.parameters
        self.views, self.point, self.check = pointer.views, self.pointer.point, self.pointer.check
        self.set_home, self.go_home = self.pointer.set_home, self.pointer.go_home
        self.scaling = Scaling(len(fleet), self.scaled)
        fleet.state.register("scale", self.scaling)

    def begin(self, batch: Any) -> None:
        """Prepare the model, after all other checks, for batches like `batch`; ModelError if its split is wrong."""
        if self.devices is not None:
            self.devices.begin(self, self.to_device(batch))

    def check_frozen(self) -> None:
        """Raise ModelError if the user's code has unfrozen a parameter during `fit`."""
        for name, p in self._frozen:
            if p.requires_grad:
                raise ModelError(
                    f"training set requires_grad=True for {name!r}, which was frozen when fit began: unfreeze it "
                    "before fit, or between two fits"
                )

    @property
    def should_stop(self) -> Callable[[], bool]:
        """A function that is called after each step. If it returns True, the stretch ends after this step."""
        return self._should_stop if self.devices is None else self.devices.should_stop

    @should_stop.setter
    def should_stop(self, ask: Callable[[], bool]) -> None:
        self._should_stop = ask
        if self.devices is not None:
            self.devices.ask = ask

    # Computing

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def to_device(self, batch: Any) -> Any:
        if self.device == CPU:
            return batch
        return map_tensors(batch, Device(self.device).sent)

    def reseed(self, node: int, step: int) -> None:
        """Seed the generators that the model uses, from (seed, node, step)."""
        self.at = (node, step)
        if self.draws_torch or self.draws_python:
            further = () if self.devices is None else self.devices.stream
            seed = stream_seed(self.seed, "step", node, step, *further)
            seed_torch(seed, self.device)
            if self.draws_python:
                seed_python(seed)

    def gradient(self, batch: Any, row: int) -> Tensor:
        """Compute the current row's gradients into `.grad`; return the detached loss.

        In fp16 the row's own scale multiplies the loss and then divides the gradients.
        """
        batch = self.to_device(batch)
        if self.devices is not None:
            return self.devices.gradient(self, batch, row)
        size = self.micro_batch_size
        if self.nodes is not None:  # the device that computes for this row may take fewer at once
            size = self.nodes.at_once(self.fleet.ranks[row], min(batch_examples(batch), size or batch_examples(batch)))
        if size is None and self.dtype is None:
            loss = self.loss(batch)
            if self.before_last_backward is not None:
                self.before_last_backward()
            loss.backward()
            pulse.step_taken()
            return loss.detach()
        total = None
        scale = self.scaling.of(row)
        examples = batch_examples(batch)
        size = size or max(1, examples)
        bounds = [(start, min(start + size, examples)) for start in range(0, examples, size)] or [(0, 0)]
        parts = [(part, share) for part, share in self.parts(batch, bounds) if share]
        for k, (part, share) in enumerate(parts):
            with self.autocast():
                loss = self.loss(part)
            if self.before_last_backward is not None and k == len(parts) - 1:
                self.before_last_backward()
            (loss * (share * scale)).backward()
            pulse.step_taken()
            total = loss.detach() * share if total is None else total + loss.detach() * share
        if self.scaled:
            self.scaling.unscale(row, self.parameters)
        if total is None:
            raise DataError("a batch is empty: check the data set and collate_fn")
        return total

    @functools.cached_property
    def weights(self) -> Weights:
        """The weights of a batch's parts in its loss."""
        from exogym.core.compute.weights import CLOSE, Weights

        close = CLOSE if self.dtype is None else 2e-3
        return Weights(close, self.loss.counting, self.weighs_classes)

    def parts(self, batch: Any, bounds: Sequence[tuple[int, int]]) -> list[tuple[Any, float]]:
        """Return the parts of a batch with their weights in the loss (`Weights.parts`), given each part's range."""
        if list(bounds) == [(0, batch_examples(batch))]:
            return [(batch, 1.0)]
        if self.trials is not None:
            self.trials.see(batch)
        return self.weights.parts(self.ask, batch, bounds)

    @torch.no_grad()
    def ask(self, batch: Any) -> float:
        """Return a batch's loss in evaluation mode, with the current row's parameters."""
        with evaluation_mode(self.model), self.autocast(), self._gathered():
            return float(self.loss(self.to_device(batch)))

    def counts_examples(self, batch: Any) -> bool:
        """Return whether a micro-batch counts in the batch's loss by its number of examples."""
        return self.micro_batch_size is None or self.weights.counts_examples(self.ask, batch)

    def evaluated(self, batch: Any) -> tuple[Any, float | dict[str, float], int]:
        """Return the part of a batch that this process evaluates, the divisor of its loss, and its number of examples.

        If the divisor is unknown, the result has a total for each kind of mean (`Weights.totals`). A process without a
        share of the batch gets an example of weight 0.
        """
        total = batch_examples(batch)
        start, stop = (0, total) if self.devices is None else self.devices.evaluated(total)
        known = self.loss.divisor(batch, start, stop)
        totals = self.weights.totals(self.ask, batch, start, stop) if known is None else known
        part = batch if stop - start == total else slice_batch(batch, start, max(stop, start + 1))
        return (part if stop > start else slice_batch(batch, 0, 1)), totals, stop - start

    def _gathered(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.devices is None else self.devices.gathered()

    def clear_grads(self, parameters: Sequence[nn.Parameter] | None = None) -> None:
        for p in self.parameters if parameters is None else parameters:
            p.grad = None

    @contextlib.contextmanager
    def evaluating(self, vectors: Sequence[Tensor], buffers: dict[str, Tensor]) -> Iterator[None]:
        """A context for evaluation without gradients, with the parameters `vectors`, (P,) per block, and `buffers`."""
        self.pointer.point_at(vectors, buffers)
        with evaluation_mode(self.model), torch.no_grad(), self.autocast(), self._gathered():
            yield


class Scaling(Stateful):
    """Keep each row's fp16 loss scale (`scales`), as in torch's GradScaler, and the steps since it changed."""

    def __init__(self, rows: int, scaled: bool):
        self.scaled, self.overflowed = scaled, False
        self.scales = np.full(rows, FIRST_SCALE if scaled else 1.0)
        self._good_steps = np.zeros(rows, dtype=np.int64)

    def of(self, row: int) -> float:
        return float(self.scales[row])

    def unscale(self, row: int, parameters: Sequence[Tensor]) -> None:
        """Divide the gradients of `parameters` by the row's scale, and set `overflowed` if one is not finite."""
        grads = [p.grad for p in parameters if p.grad is not None]
        scale_(grads, 1.0 / self.of(row))
        self.overflowed = bool(grads) and not bool(torch.stack([torch.isfinite(g).all() for g in grads]).all())

    def update(self, row: int) -> None:
        """Halve the row's scale after an overflow, double it after 2,000 good steps (torch's GradScaler rule)."""
        if not self.scaled:
            return
        self._good_steps[row] = 0 if self.overflowed else self._good_steps[row] + 1
        if self.overflowed:
            self.scales[row] *= 0.5
        elif self._good_steps[row] == SCALE_GROWTH_STEPS:
            self.scales[row] *= 2.0
            self._good_steps[row] = 0

    def row(self, row: int) -> Tensors:
        return {"scale": torch.tensor([self.of(row), float(self._good_steps[row])], dtype=torch.float64)}

    def load_row(self, row: int, tensors: Tensors) -> None:
        self.scales[row], self._good_steps[row] = tensors["scale"].tolist()
