"""What the devices of a node say to each other in a step, by formula: collectives, bytes and seconds.

For k devices that share out P trained parameters of b bytes (`fully_shard`), of which P_B are in blocks that are
gathered one at a time (`splits.blocks_of`), each device sends and gets in one pass over its examples, there and back,

    all-gather       (k-1)/k b (P + P_B)       a block is gathered again for its backward pass
    reduce-scatter   (k-1)/k b P               once in a step, after the last pass

where a parameter's first axis counts as the next multiple of k, to which it is padded. With n blocks these are 2 n + 1
and n + 1 messages, the one being what is in no block; each has its latency. With zero=2 that is
(k-1)/k b P for the reduce-scatter and as much for the all-gather of what the optimizer has changed; with zero=1 an
all-reduce, 2 (k-1)/k b P, and that all-gather. Gradients are not padded there. Shards of a stage gather it once a step,
as with zero=2, however many micro-batches go through it.

For t devices that compute each layer together, and a layer with inputs of x and outputs of y bytes: "colwise" sums the
gradients of its inputs, an all-reduce of x; "colwise_rep" puts its outputs together too, an all-gather of y/t;
"rowwise" sums its outputs, an all-reduce of y; "rowwise_rep" also gathers the gradients of its inputs, x/t. What no
layer's plan cuts, as norms and embeddings, all t hold and one owns: before a step it goes from there to the others,
t - 1 times.

For a pipeline: each micro-batch's activations go on, and their gradients come back, over each cut, in the size of the
largest micro-batch; and a parameter that two stages hold goes from the first to the other one before a step, and its
gradient back.

Not counted: an evaluation, as it is not between nodes; the few numbers that devices agree on in a step, as the loss and
the norm of a gradient; and what strategies and optimizers that act on whole tensors are dealt, (k-1)/k of the columns
each way (`fleet.dealing`), which no model says and no formula of a split knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from exogym.core.base.batches import tensors_in
from exogym.core.communicator.ledger import FACTORS
from exogym.core.mesh.splits import blocks_of, cuts, tensor_plan
from exogym.core.mesh.value import NodeMesh
from exogym.errors import ModelError
from exogym.network import Network


@dataclass(frozen=True)
class Call:
    """What devices of one stage say in a step: `groups` groups of `members` do the same at once, `times` in a row.

    Attributes:
        kind: a collective, or "send" to the stage after or before.
        payload_bytes: what each member gives; of a broadcast, one of them.
        groups: one that gives less than that counts for less than one.
    """

    kind: str
    members: int
    payload_bytes: float
    times: int
    stage: int
    groups: float

    @property
    def tx_bytes(self) -> float:
        """What all these devices send in a step."""
        n = self.members
        alone = {"send": 1 / n, "broadcast": (n - 1) / n}  # one of them sends, to another one or to all
        factor = alone[self.kind] if self.kind in alone else FACTORS[self.kind, "ring"](n)
        return factor * self.payload_bytes * self.members * self.groups * self.times

    def seconds(self, network: Network) -> float:
        return self.times * network.cost(self.kind, self.payload_bytes, self.members).seconds


@dataclass(frozen=True)
class Parameter:
    """A parameter that is trained, as devices see it.

    Attributes:
        shape: of what one of the devices has that compute its layer together.
        stages: of the pipeline that hold it; two of them where it is tied.
        block: the one it is in, which is gathered by itself, and so twice in a pass; "": none.
        is_cut: whether each device that computes its layer has a part of it; otherwise all of them have all of it.
    """

    shape: tuple[int, ...]
    item_bytes: int
    block: str
    stages: tuple[int, ...]
    is_cut: bool = False

    def padded_bytes(self, shard: int = 1) -> int:
        """Return its bytes with the first axis filled up to a multiple of `shard`."""
        rows, *others = self.shape or (1,)
        size = -(-rows // shard) * shard * self.item_bytes
        for side in others:
            size *= side
        return size


@dataclass
class Facts:
    """What a model is to the devices of a node.

    Attributes:
        parameters: each once.
        layers: name to style and stage, of the layers that several devices compute together.
        cuts: names of the modules after which the model is cut, the stage before and the one after.
        flows: bytes for an example that go into and out of each of these, and whether what goes in has a gradient.
    """

    parameters: list[Parameter]
    layers: dict[str, tuple[str, int]]
    cuts: dict[str, tuple[int, int]]
    flows: dict[str, tuple[float, float, bool]] = field(default_factory=dict)


@contextlib.contextmanager
def watched(model: nn.Module, mesh: NodeMesh) -> Iterator[Facts]:
    """Yield the facts of a model; its flows are those of the last batch that goes through it inside.

    What a `parallelize` of the user's does to the layers is not known, and so not counted.
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


class Talk:
    """Calls of the devices of a node in a step, and what they cost on its `network`."""

    def __init__(self, mesh: NodeMesh, calls: Sequence[Call]):
        self.mesh, self.calls = mesh, calls

    @property
    def tx_bytes(self) -> float:
        """What all devices of the node together send."""
        return sum(call.tx_bytes for call in self.calls)

    @property
    def seconds(self) -> float:
        """Of the slowest stage; 0 where the mesh has no network."""
        if self.mesh.network is None:
            return 0.0
        by_stage = [0.0] * self.mesh.depth
        for call in self.calls:
            by_stage[call.stage] += call.seconds(self.mesh.network)
        return max(by_stage)


def talk_of_layers(mesh: NodeMesh, parameters: float, layers: int, activation_bytes: float, examples: int) -> Talk:
    """Return what is said for a transformer of which nobody has the modules: all parameters of 4 bytes, in its layers.

    Args:
        activation_bytes: that go from a layer to the next for the node's `examples`.

    >>> talk = talk_of_layers(NodeMesh(shard=4), 1e6, 12, 0.0, 32)
    >>> talk.tx_bytes / 4 == 0.75 * 4 * (2e6 + 1e6)
    True
    """
    k, t, S = mesh.shard, mesh.tensor, mesh.depth
    count = len(mesh.micro_batches(max(mesh.shares(examples))))
    own, part = 4 * parameters / t / S, activation_bytes / k / count
    calls: list[Call] = []
    for stage in range(S):
        if k > 1 and mesh.zero == 3 and S == 1:
            calls.append(Call("all_gather", k, own / k / layers, 2 * layers * count, stage, t))
            calls.append(Call("reduce_scatter", k, own / layers, layers, stage, t))
        elif k > 1:
            calls.append(Call("all_gather", k, own / k, 1, stage, t))
            calls.append(Call("all_reduce" if mesh.zero == 1 else "reduce_scatter", k, own, 1, stage, t))
        if t > 1:
            calls.append(Call("all_reduce", t, part, 4 * -(-layers // S) * count, stage, k))
        sends = (stage > 0) + (stage < S - 1)
        if sends:
            calls.append(Call("send", 2, part, sends * count, stage, k * t))
    return Talk(mesh, calls)


class InsideCost:
    """What a step of a node costs inside it.

    Args:
        mesh: of the node; facts: of the model.
        at_once: examples that the node computes at once, at most; None: a whole step's.
    """

    def __init__(self, mesh: NodeMesh, facts: Facts, at_once: int | None = None):
        self.mesh, self.facts, self.at_once = mesh, facts, at_once
        self._known: dict[int, float] = {}

    def talk(self, examples: int) -> Talk:
        """Return what the devices say in a step of `examples`."""
        return Talk(self.mesh, [*self._of_shards(examples), *self._of_layers(examples), *self._of_cuts(examples)])

    def tx_bytes(self, examples: int) -> float:
        """Return the bytes that all devices of the node together send in a step of `examples`; kept for the next."""
        if examples not in self._known:
            self._known[examples] = self.talk(examples).tx_bytes
        return self._known[examples]

    def _passes(self, examples: int) -> list[tuple[float, int]]:
        """Return the mean size of a device's micro-batches and their number, in each pass over some of the examples."""
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
            if size:  # the t devices own about as much each
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
        """Yield of each pass the size in which micro-batches travel, their number, and how many devices do so."""
        whole = min(examples, self.at_once or examples)
        for start in range(0, examples, whole):
            shares = self.mesh.shares(min(whole, examples - start))
            found = []
            for sizes in map(self.mesh.micro_batches, shares):
                found.append((max(sizes, default=1), max(len(sizes), self.mesh.depth)))
            most = max(found, key=lambda one: one[0] * one[1])
            yield *most, sum(a * b for a, b in found) / (most[0] * most[1]) * self.mesh.tensor


def stages_of(model: nn.Module, mesh: NodeMesh) -> tuple[Callable[[str], int], dict[str, tuple[int, int]]]:
    """Return what says on which device of a pipeline a parameter or buffer is, and the cuts, in order, with the devices
    around."""
    if mesh.depth == 1:
        return lambda name: 0, {}
    count = mesh.depth * mesh.stages_per_device
    if mesh.pipeline is None:
        found = cuts(model, count)
        order = {name: k for k, (name, _) in enumerate(model.named_modules())}
        last = [max(k for name, k in order.items() if f"{name}.".startswith(f"{cut}.")) for cut in found]
        ends = {cut: (k % mesh.depth, (k + 1) % mesh.depth) for k, cut in enumerate(found)}
        return lambda name: sum(order[name.rpartition(".")[0]] > end for end in last) % mesh.depth, ends
    devices, modules = mesh.pipeline.devices, {id(module): name for name, module in model.named_modules()}
    owner = {
        id(p): device
        for stage, device in zip(mesh.pipeline.stages, devices, strict=True)
        for p in (*stage.module.parameters(), *stage.module.buffers())
    }
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    by_name = {name: owner[id(x)] for name, x in named if id(x) in owner}
    ends = {}
    for stage, before, after in zip(mesh.pipeline.stages[:-1], devices[:-1], devices[1:], strict=True):
        end = stage.layers[-1]
        while id(end) not in modules and isinstance(end, nn.Sequential) and len(end):
            end = end[-1]
        if id(end) not in modules:
            raise ModelError(
                f"the last layer of a stage is a {type(end).__name__} that is no module of the model, so what goes on "
                "to the next stage is not seen in one process: end the stage with a module of the model"
            )
        ends[modules[id(end)]] = before, after
    return lambda name: by_name.get(name, 0), ends


def _cut_axis(shape: tuple[int, ...], name: str, plan: Mapping[str, str]) -> int | None:
    """Return the axis of a parameter that is shared out by the devices that compute its layer together."""
    axis = {"colwise": 0, "rowwise": 1}.get(plan.get(name.rpartition(".")[0], "").removesuffix("_rep"))
    return None if axis is None or axis >= len(shape) else axis


def _local_shape(shape: tuple[int, ...], name: str, plan: Mapping[str, str], devices: int) -> tuple[int, ...]:
    """Return the largest part of a parameter that one of the `devices` that compute its layer together holds."""
    axis = _cut_axis(shape, name, plan)
    if axis is None:
        return shape
    return (*shape[:axis], -(-shape[axis] // devices), *shape[axis + 1 :])
