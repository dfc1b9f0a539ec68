"""Formulas for the traffic inside a node: the bytes that its devices send each other in a step.

**Shards.** k devices share P trained parameters of b bytes (`fully_shard`). P_B of them are in blocks that are gathered
one at a time (`splits.blocks_of`). In one forward and backward pass over its examples each device sends and receives

    all-gather       (k-1)/k b (P + P_B)       a block is gathered again for its backward pass
    reduce-scatter   (k-1)/k b P               once in a step, after the last pass

Each parameter is padded: its first axis counts as the next multiple of k. With zero=2, the traffic is a reduce-scatter
of the gradients, (k-1)/k b P, and an all-gather of the same size for the parameters that the optimizer changed;
gradients are not padded. In a pipeline, each stage's shards are gathered once a step, as with zero=2, for any number of
micro-batches.

**Tensor split.** t devices compute each layer together. A layer has inputs of x and outputs of y bytes. "colwise" sums
the inputs' gradients by an all-reduce of x bytes. "colwise_rep" also gathers its outputs by an all-gather of y/t bytes.
"rowwise" sums its outputs by an all-reduce of y bytes. "rowwise_rep" also gathers the inputs' gradients by an
all-gather of x/t bytes. All t devices hold the parameters that the plan does not cut, such as norms and embeddings. One
device owns such a parameter, and sends it to the t - 1 other devices before a step.

**Pipeline.** At each cut, the stage before sends each micro-batch's activations, and the stage after sends their
gradients back. Each message has the size of the largest micro-batch. If two stages hold the same parameter, the first
stage sends it to the other before a step, and the other sends its gradient back.

The formulas leave out evaluations, and the few numbers that devices exchange in a step (the loss, a gradient's norm).
The formulas also leave out the traffic of strategies and optimizers that need whole tensors
(`exogym.core.fleet.dealing`), because the split alone does not determine which tensors these are. Each device sends and
receives (k-1)/k of these tensors' columns.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from exogym.core.base.batches import tensors_in
from exogym.mesh.splits import blocks_of, stages_holding, stages_of, tensor_plan
from exogym.mesh.value import NodeMesh


class Parameter(NamedTuple):
    """A trained parameter, in the form in which a device of a tensor split holds it.

    Attributes:
        size: its bytes.
        padded: its bytes with the first axis padded to a multiple of the shards.
        gathers: how often the shards gather it in a pass: twice in a block, which they gather one at a time.
        stages: number of pipeline stages that hold the parameter; two if it is tied.
        is_cut: whether a tensor split divides the parameter over the devices.
    """

    size: int
    padded: int
    gathers: int
    stages: int
    is_cut: bool


class InsideTraffic:
    """The bytes that the devices of a node send each other in a step of `model`, which is split as in `mesh`.

    Traffic from a user's function `parallelize` is unknown, so it does not count.
    """

    def __init__(self, model: nn.Module, mesh: NodeMesh):
        self.model, self.mesh = model, mesh
        self._plan = tensor_plan(model) if mesh.tensor > 1 and mesh.parallelize is None else {}
        device_of, self._cuts = stages_of(model, mesh)
        stages, blocks = stages_holding(model, device_of), tuple(f"{name}." for name in blocks_of(model))
        self._parameters = [
            self._parameter(name, p, 2 if name.startswith(blocks) else 1, len(stages[name]))
            for name, p in model.named_parameters()
            if p.requires_grad
        ]
        self._flows: dict[str, tuple[float, float, bool]] = {}  # input and output bytes per example, whether inputs
        self._known: dict[tuple[int, int | None], float] = {}  # have gradients

    def _parameter(self, name: str, p: Tensor, gathers: int, stages: int) -> Parameter:
        style, shape = self._plan.get(name.rpartition(".")[0], "").removesuffix("_rep"), list(p.shape) or [1]
        axis = {"colwise": 0, "rowwise": 1}.get(style, len(shape))
        if is_cut := axis < p.dim():
            shape[axis] = -(-shape[axis] // self.mesh.tensor)
        size = math.prod(shape) * p.element_size()
        shape[0] += -shape[0] % self.mesh.shard
        return Parameter(size, math.prod(shape) * p.element_size(), gathers, stages, is_cut)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Return a context in which a batch that passes through the model tells the sizes of its activations."""

        def note(name: str, given: Any, out: Any) -> None:
            first = next(iter(tensors_in(given)), None)
            examples = len(first) if first is not None and first.dim() else 1
            into, outof = (sum(x.numel() * x.element_size() for x in tensors_in(what)) for what in (given, out))
            self._flows[name] = into / examples, outof / examples, any(x.requires_grad for x in tensors_in(given))

        with contextlib.ExitStack() as undo:
            for name in (*self._plan, *self._cuts):
                hook = self.model.get_submodule(name).register_forward_hook(lambda _, x, y, name=name: note(name, x, y))
                undo.callback(hook.remove)
            yield

    def tx_bytes(self, examples: int, at_once: int | None = None) -> float:
        """Return (cached) the bytes that a node's devices send in a step, with at most `at_once` examples at a time."""
        if (examples, at_once) not in self._known:
            whole = min(examples, at_once or examples)
            passes = [self.mesh.shares(min(whole, examples - start)) for start in range(0, examples, whole)]
            self._known[examples, at_once] = (
                self._of_shards(passes) + self._of_layers(examples) + self._of_mirrors() + self._of_cuts(passes)
            )
        return self._known[examples, at_once]

    def _of_shards(self, passes: list[tuple[int, ...]]) -> float:
        mesh, others = self.mesh, self.mesh.shard - 1
        padded = sum(p.padded * p.stages for p in self._parameters)
        if mesh.zero == 3 and mesh.depth == 1:
            count = sum(len(mesh.micro_batches(max(shares))) for shares in passes)
            return others * mesh.tensor * (count * sum(p.padded * p.gathers for p in self._parameters) + padded)
        summed = sum(p.size * p.stages for p in self._parameters)
        return others * mesh.tensor * (padded + (summed))

    def _of_layers(self, examples: int) -> float:
        total = 0.0
        for name, style in self._plan.items():
            into, outof, has_gradient = self._flows.get(name, (0.0, 0.0, False))
            back = into if has_gradient else 0.0
            total += {
                "colwise": 2 * back,
                "colwise_rep": 2 * back + outof,
                "rowwise": 2 * outof,
                "rowwise_rep": 2 * outof + back,
            }[style]
        return (self.mesh.tensor - 1) * examples * total

    def _of_mirrors(self) -> float:
        if self.mesh.parallelize is not None:
            return 0.0
        return (self.mesh.tensor - 1) * sum(p.size * p.stages for p in self._parameters if not p.is_cut)

    def _of_cuts(self, passes: list[tuple[int, ...]]) -> float:
        mesh, filled_up = self.mesh, 0
        for sizes in (mesh.micro_batches(share) for shares in passes for share in shares):
            filled_up += max(sizes, default=1) * max(len(sizes), mesh.depth)
        activations = mesh.tensor * filled_up * sum(self._flows[name][1] for name in self._cuts)
        tied = sum((p.stages - 1) * p.size * (mesh.tensor if p.is_cut else 1) for p in self._parameters)
        return 2 * (activations + tied)
