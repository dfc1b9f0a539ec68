"""Formulas for the traffic inside a node: the collectives and bytes of its devices in a step.

**Shards.** k devices share P trained parameters of b bytes (`fully_shard`). P_B of them are in blocks that are gathered
one at a time (`splits.blocks_of`). In one forward and backward pass over its examples each device sends and receives

    all-gather       (k-1)/k b (P + P_B)       a block is gathered again for its backward pass
    reduce-scatter   (k-1)/k b P               once in a step, after the last pass

Each parameter is padded: its first axis counts as the next multiple of k. With n blocks, the all-gather takes 2 n + 1
messages and the reduce-scatter n + 1 messages, each with its latency; the 1 is for all parameters outside the blocks.
With zero=2, the traffic is a reduce-scatter of the gradients, (k-1)/k b P, and an all-gather of the same size for the
parameters that the optimizer changed. With zero=1, it is an all-reduce, 2 (k-1)/k b P, and the same all-gather. With
zero=1 and zero=2, gradients are not padded. In a pipeline, each stage's shards are gathered once a step, as with
zero=2, for any number of micro-batches.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from exogym.communicator import FACTORS
from exogym.core.base.batches import tensors_in
from exogym.errors import ModelError
from exogym.mesh.splits import blocks_of, cuts, tensor_plan
from exogym.mesh.value import NodeMesh


@dataclass(frozen=True)
class Call:
    """A collective of one stage in a step: `groups` groups of `members` devices run it at the same time, `times` times.

    Attributes:
        kind: a collective, or "send" to the next or previous stage.
        payload_bytes: each member's payload; in a broadcast, the sender's.
        groups: number of groups. A group with a smaller payload counts as less than one group, so it may be a fraction.
    """

    kind: str
    members: int
    payload_bytes: float
    times: int
    stage: int
    groups: float

    @property
    def tx_bytes(self) -> float:
        """Bytes that all devices of these groups send in a step."""
        n = self.members
        alone = {"send": 1 / n, "broadcast": (n - 1) / n}  # one member sends, to one other or to all others
        factor = alone[self.kind] if self.kind in alone else FACTORS[self.kind, "ring"](n)
        return factor * self.payload_bytes * self.members * self.groups * self.times


@dataclass(frozen=True)
class Parameter:
    """A trained parameter, in the form in which a device holds it.

    Attributes:
        shape: shape of the part on one device of a tensor split.
        stages: pipeline stages that hold the parameter; two stages if it is tied.
        block: name of the parameter's block, or "" if it is in no block. Blocks are gathered one at a time, twice in a
            pass.
        is_cut: whether a tensor split gives each device a part of the parameter. Otherwise each device has the whole
            parameter.
    """

    shape: tuple[int, ...]
    item_bytes: int
    block: str
    stages: tuple[int, ...]
    is_cut: bool = False

    def padded_bytes(self, shard: int = 1) -> int:
        """Return the parameter's bytes, with the first axis padded to a multiple of `shard`."""
        rows, *others = self.shape or (1,)
        size = -(-rows // shard) * shard * self.item_bytes
        for side in others:
            size *= side
        return size


@dataclass
class Facts:
    """A model's properties that decide a node's inside traffic.

    Attributes:
        parameters: all trained parameters; a tied parameter comes once.
        layers: by name, the layers that a tensor split divides, each with its style and its pipeline stage.
        cuts: by name, the modules after which the model is cut, each with the stages before and after the cut.
        flows: for each name in `layers` and `cuts`: the module's input bytes and output bytes per example, and whether
            the input has a gradient.
    """

    parameters: list[Parameter]
    layers: dict[str, tuple[str, int]]
    cuts: dict[str, tuple[int, int]]
    flows: dict[str, tuple[float, float, bool]] = field(default_factory=dict)


@contextlib.contextmanager
def watched(model: nn.Module, mesh: NodeMesh) -> Iterator[Facts]:
    """A context that yields the `Facts` of `model`.

    In the context, each batch that passes through the model sets the facts' `flows`.

    Traffic from a user's function `parallelize` is unknown, so it does not count.
    """
    plan = tensor_plan(model) if mesh.tensor > 1 and mesh.parallelize is None else {}
    stage_of, ends = stages_of(model, mesh)
    blocks = [f"{name}." for name in blocks_of(model)]
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    parameters = [
        Parameter(
            _local_shape(tuple(p.shape), name, plan, mesh.tensor), p.element_size(),
            next(filter(name.startswith, blocks), ""), tuple(sorted({stage_of(other) for other in names[id(p)]})),
            _cut_axis(tuple(p.shape), name, plan) is not None,
        )
        for name, p in model.named_parameters()
        if p.requires_grad
    ]  # fmt: skip
    facts = Facts(parameters, {name: (style, stage_of(name)) for name, style in plan.items()}, ends)

    def note(name: str, given: Any, out: Any) -> None:
        first = next(iter(tensors_in(given)), None)
        examples = len(first) if first is not None and first.dim() else 1
        into, outof = (sum(x.numel() * x.element_size() for x in tensors_in(what)) for what in (given, out))
        has_gradient = any(x.requires_grad for x in tensors_in(given))
        facts.flows[name] = into / examples, outof / examples, has_gradient

    with contextlib.ExitStack() as undo:
        for name in (*plan, *ends):
            hook = model.get_submodule(name).register_forward_hook(lambda _, x, y, name=name: note(name, x, y))
            undo.callback(hook.remove)
        yield facts


class InsideCost:
    """Computes the traffic between a node's devices in a step.

    Args:
        mesh: the node's split.
        facts: the model's facts.
        at_once: the largest number of examples that the node computes at once. None means all examples of a step.
    """

    def __init__(self, mesh: NodeMesh, facts: Facts, at_once: int | None = None):
        self.mesh, self.facts, self.at_once = mesh, facts, at_once
        self._known: dict[int, float] = {}

    def calls(self, examples: int) -> list[Call]:
        """Return the collectives of the node's devices in a step of `examples` examples."""
        return [*self._of_shards(examples), *self._of_layers(examples), *self._of_cuts(examples)]

    def tx_bytes(self, examples: int) -> float:
        """Return the bytes that all devices of the node send in a step of `examples` examples. The result is cached."""
        if examples not in self._known:
            self._known[examples] = sum(call.tx_bytes for call in self.calls(examples))
        return self._known[examples]

    def _passes(self, examples: int) -> list[tuple[float, int]]:
        """Return, for each pass, the mean size of a device's micro-batches and their number."""
        whole = min(examples, self.at_once or examples)
        parts = [min(whole, examples - start) for start in range(0, examples, whole)]
        counts = [len(self.mesh.micro_batches(max(self.mesh.shares(part)))) for part in parts]
        return [(part / self.mesh.shard / count, count) for part, count in zip(parts, counts, strict=True)]

    def _of_shards(self, examples: int) -> Iterator[Call]:
        mesh, k = self.mesh, self.mesh.shard
        passes = sum(count for _, count in self._passes(examples))
        for stage in range(mesh.depth if k > 1 else 0):
            here = [p for p in self.facts.parameters if stage in p.stages]
            if not here:
                continue
            trained = sum(p.padded_bytes(k) for p in here)
            if mesh.zero == 3 and mesh.depth == 1:
                gathered = sum(p.padded_bytes(k) * (2 if p.block else 1) for p in here)
                messages = len({p.block for p in here})
                twice = messages + len({p.block for p in here if p.block})
                yield Call("all_gather", k, gathered / k / twice, twice * passes, stage, mesh.tensor)
                yield Call("reduce_scatter", k, trained / messages, messages, stage, mesh.tensor)
            else:
                summed = sum(p.padded_bytes() for p in here)
                yield Call("all_gather", k, trained / k, 1, stage, mesh.tensor)
                yield Call("all_reduce" if mesh.zero == 1 else "reduce_scatter", k, summed, 1, stage, mesh.tensor)

    def _of_layers(self, examples: int) -> Iterator[Call]:
        t = self.mesh.tensor
        yield from self._of_mirrors()
        for size, count in self._passes(examples):
            for name, (style, stage) in self.facts.layers.items():
                into, outof, has_gradient = self.facts.flows.get(name, (0.0, 0.0, False))
                said = {
                    "colwise": [("all_reduce", into, has_gradient)],
                    "colwise_rep": [("all_reduce", into, has_gradient), ("all_gather", outof / t, True)],
                    "rowwise": [("all_reduce", outof, True)],
                    "rowwise_rep": [("all_reduce", outof, True), ("all_gather", into / t, has_gradient)],
                }[style]
                yield from (
                    Call(kind, t, each * size, count, stage, self.mesh.shard) for kind, each, is_said in said if is_said
                )

    def _of_mirrors(self) -> Iterator[Call]:
        t, k = self.mesh.tensor, self.mesh.shard
        for stage in range(self.mesh.depth if t > 1 and self.mesh.parallelize is None else 0):
            here = [p for p in self.facts.parameters if stage in p.stages and not p.is_cut]
            size = sum(p.padded_bytes(k) for p in here) / k
            if size:  # each of the t devices owns about the same share
                groups = sum(p.padded_bytes() for p in here) / size
                yield Call("broadcast", t, size / t, t, stage, groups)

    def _of_cuts(self, examples: int) -> Iterator[Call]:
        mesh = self.mesh
        for size, count, groups in self._filled_up(examples) if self.facts.cuts else ():
            for name, (before, after) in self.facts.cuts.items():
                given = self.facts.flows[name][1] * size
                if before != after:
                    yield Call("send", 2, given, count, before, groups)
                    yield Call("send", 2, given, count, after, groups)
        for p in self.facts.parameters:
            first, *others = p.stages
            piece = p.padded_bytes(mesh.shard) / mesh.shard
            teams = p.padded_bytes() / piece * (mesh.tensor if p.is_cut else 1)
            for other in others:
                yield Call("send", 2, piece, 1, first, teams)
                yield Call("send", 2, piece, 1, other, teams)

    def _filled_up(self, examples: int) -> Iterator[tuple[int, int, float]]:
        """Yield, for each pass, the size in which micro-batches are sent, their number, and the number of devices."""
        whole = min(examples, self.at_once or examples)
        for start in range(0, examples, whole):
            shares = self.mesh.shares(min(whole, examples - start))
            found = []
            for sizes in map(self.mesh.micro_batches, shares):
                found.append((max(sizes, default=1), max(len(sizes), self.mesh.depth)))
            most = max(found, key=lambda one: one[0] * one[1])
            yield *most, sum(a * b for a, b in found) / (most[0] * most[1]) * self.mesh.tensor


def stages_of(model: nn.Module, mesh: NodeMesh) -> tuple[Callable[[str], int], dict[str, tuple[int, int]]]:
    """Return (device_of, cuts). `device_of(name)` is the pipeline device of a parameter or buffer.

    `cuts` has the names of the modules after which the model is cut, in order, each with the devices before and after
    the cut.
    """
    if mesh.depth == 1:
        return lambda name: 0, {}
    if mesh.pipeline is None:
        found = cuts(model, mesh.depth)
        order = {name: k for k, (name, _) in enumerate(model.named_modules())}
        last = [max(k for name, k in order.items() if f"{name}.".startswith(f"{cut}.")) for cut in found]
        ends = {cut: (k, k + 1) for k, cut in enumerate(found)}
        return lambda name: sum(order[name.rpartition(".")[0]] > end for end in last), ends
    modules = {id(module): name for name, module in model.named_modules()}
    owner = {
        id(p): device
        for device, stage in enumerate(mesh.pipeline.stages)
        for p in (*stage.module.parameters(), *stage.module.buffers())
    }
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    by_name = {name: owner[id(x)] for name, x in named if id(x) in owner}
    ends = {}
    for device, stage in enumerate(mesh.pipeline.stages[:-1]):
        end = stage.layers[-1]
        while id(end) not in modules and isinstance(end, nn.Sequential) and len(end):
            end = end[-1]
        if id(end) not in modules:
            raise ModelError(
                f"the last layer of a stage is a {type(end).__name__} that is not in the model, so one process cannot "
                "measure the bytes to the next stage: end the stage with a module of the model"
            )
        ends[modules[id(end)]] = device, device + 1
    return lambda name: by_name.get(name, 0), ends


def _cut_axis(shape: tuple[int, ...], name: str, plan: Mapping[str, str]) -> int | None:
    """Return the axis along which a tensor split cuts a parameter; None: it is not cut."""
    axis = {"colwise": 0, "rowwise": 1}.get(plan.get(name.rpartition(".")[0], "").removesuffix("_rep"))
    return None if axis is None or axis >= len(shape) else axis


def _local_shape(shape: tuple[int, ...], name: str, plan: Mapping[str, str], devices: int) -> tuple[int, ...]:
    """Return the shape of the largest part of a parameter that one of the `devices` of a tensor split holds."""
    axis = _cut_axis(shape, name, plan)
    if axis is None:
        return shape
    return (*shape[:axis], -(-shape[axis] // devices), *shape[axis + 1 :])
