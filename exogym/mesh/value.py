"""The split of one node over its devices and its pipeline's stages, as checked values with a JSON description."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from exogym.errors import ArgumentError, check_count, check_switch, checked

BUSY = 4  # default micro-batches per stage


class Stage:
    """One stage of a pipeline: layers of a model that run in order on one device of a node.

    Args:
        layers: modules of the model (the same objects, not copies).
        device: number of the pipeline's device that holds the stage. Stage k is on device k.

    Attributes:
        module: the layers as one module, with the same parameters.

    Raises:
        ArgumentError: no layers, a layer that is not a module, or a negative device.

    >>> Stage(layers=[nn.Linear(4, 8), nn.ReLU()], device=0)
    Stage(2 layers, device=0)
    """

    @checked
    def __init__(self, layers: Sequence[nn.Module], device: int | None = None):
        if not isinstance(layers, Sequence | nn.ModuleList | nn.Sequential) or not len(layers):
            raise ArgumentError(f"layers={layers!r} must be a list of modules, such as [nn.Linear(4, 8), nn.ReLU()]")
        for layer in layers:
            if not isinstance(layer, nn.Module):
                raise ArgumentError(f"layers contains {layer!r}, expected torch.nn.Module objects")
        if device is not None:
            check_count("device", device, least=0)
        self.layers, self.device = tuple(layers), device
        self.module = self.layers[0] if len(self.layers) == 1 else nn.Sequential(*self.layers)

    def __repr__(self) -> str:
        return f"Stage({len(self.layers)} layer{'s' * (len(self.layers) > 1)}, device={self.device})"


class PipelineParallel:
    """The stages of a pipeline. Running the stages one after the other must compute the same as the model.

    Each stage is on one device of the node. A batch passes through the stages in micro-batches, so that the devices
    work at the same time.

    Args:
        stages: `Stage`s or modules of the trained model, which together hold all its parameters. A stage's output is
            the next stage's input.
        micro_batch_size: examples per micro-batch. If it is None, `NodeMesh(microbatches=)` sets the number of
            micro-batches.

    Attributes:
        size: number of devices in the pipeline, one for each stage.

    Raises:
        ArgumentError: fewer than two stages; devices for some stages only, or not 0, 1, 2, ... in order.

    >>> body, head = nn.Linear(4, 8), nn.Linear(8, 2)
    >>> PipelineParallel([Stage([body, nn.ReLU()], device=0), Stage([head], device=1)], micro_batch_size=8).size
    2
    """

    @checked
    def __init__(self, stages: Sequence[Stage | nn.Module], micro_batch_size: int | None = None):
        if not isinstance(stages, Sequence | nn.ModuleList) or len(stages) < 2:
            raise ArgumentError(f"stages={stages!r} must be a list of two or more stages: a Stage or a module each")
        found = [stage if isinstance(stage, Stage) else Stage([stage]) for stage in stages]
        given = [stage.device for stage in found]
        if micro_batch_size is not None:
            check_count("micro_batch_size", micro_batch_size)
        if any(device is None for device in given) and any(device is not None for device in given):
            raise ArgumentError(f"the stages are on devices {given}: set the device of every stage, or of no stage")
        if given not in (list(range(len(found))), [None] * len(found)):
            raise ArgumentError(
                f"the stages are on devices {given}, expected {list(range(len(found)))}: one stage per device, in order"
            )
        self.stages, self.size, self.micro_batch_size = tuple(found), len(found), micro_batch_size

    def __repr__(self) -> str:
        return f"PipelineParallel({len(self.stages)} stages, micro_batch_size={self.micro_batch_size})"


@dataclass(frozen=True)
class NodeMesh:
    """Split each node's model over `size` = stages x shard x tensor devices.

    Nothing changes between nodes: a node of several devices is still one row of the fleet, and sends the same bytes.
    Under `python -m exogym.launch` or torchrun each process is one device of a node. A run in one process computes as
    one device would, in micro-batches of a device's size.

    Args:
        shard: devices that share the row's columns, each with its own part of the batch (see `shares`). `zero` decides
            what else they share.
        tensor: devices that each compute a part of every layer, on the same examples.
        stages: devices of a pipeline, each with some layers; or a `PipelineParallel` with your own stages.
        microbatches: parts of a device's batch in a pipeline, at least as many as stages. None means 4 per stage, or
            one per example if there are fewer examples. This option needs `stages`.
        parallelize: called as `parallelize(model, mesh)` with torch's `DeviceMesh`, whose axes have the names and sizes
            of `axes`. It splits the model in place, by `fully_shard` or `parallelize_module`. A run in one process does
            not call it. If it is None, ExoGym splits the model by the model's known plan.
        zero: 3 shards parameters, gradients and optimizer state over the `shard` devices (`fully_shard`); 2 shards only
            gradients and optimizer state. In a pipeline, 3 gathers the parameters once a step and frees them
            after the step.
        probe: True compares the first batch's gradients with the whole model's gradients, and refuses a split with
            other gradients. False trusts the split, for a model that is too large to compare: train a smaller one of
            the same kind first.

    Attributes:
        size: devices of a node.
        axes: sizes by name, outermost first: stages, shard, tensor. The devices of a node are numbered like the
            elements of an array of that shape (see `coordinates`).
        depth: how many devices the pipeline has: `stages`, if `stages` is a number.
        pipeline: the `PipelineParallel` with your own stages, or None.

    Raises:
        ArgumentError: a size is not a whole number of at least 1; zero is unknown; pipeline options
            without stages; fewer micro-batches than stages.

    >>> mesh = NodeMesh(shard=2, stages=2, microbatches=4)
    >>> mesh.size, mesh.axes, mesh.coordinates(1)
    (4, {'stages': 2, 'shard': 2, 'tensor': 1}, {'stages': 0, 'shard': 1, 'tensor': 0})
    >>> mesh.shares(17), mesh.micro_batches(9), round(mesh.bubble(17), 3)
    ((9, 8), (3, 2, 2, 2), 0.2)
    """

    shard: int = 1
    tensor: int = 1
    stages: int | PipelineParallel = 1
    microbatches: int | None = None
    parallelize: Callable[[nn.Module, Any], Any] | None = None
    zero: int = 3
    probe: bool = True

    def __post_init__(self) -> None:
        for name in ("shard", "tensor"):
            check_count(name, getattr(self, name))
        if not isinstance(self.stages, PipelineParallel):
            if isinstance(self.stages, list | tuple):
                raise ArgumentError("stages is a list: pass a number, or PipelineParallel(stages=[...])")
            check_count("stages", self.stages)
        if isinstance(self.zero, bool) or self.zero not in (2, 3):
            raise ArgumentError(f"zero={self.zero!r} must be 2 or 3; use 2 instead of 1: it shards more and sends less")
        if self.zero != 3 and self.shard == 1:
            raise ArgumentError(f"zero={self.zero} has no effect with shard=1: set shard above 1, or omit zero")
        if self.parallelize is not None and not callable(self.parallelize):
            raise ArgumentError(f"parallelize={self.parallelize!r} must be a function of (model, mesh)")
        check_switch("probe", self.probe)
        self._check_pipeline()

    def _check_pipeline(self) -> None:
        if self.microbatches is not None:
            check_count("microbatches", self.microbatches)
        if self.depth == 1:
            if self.microbatches is not None:
                raise ArgumentError(f"microbatches={self.microbatches} needs a pipeline: set stages above 1 as well")
            return
        if self.microbatches is not None and self.pipeline is not None and self.pipeline.micro_batch_size is not None:
            raise ArgumentError(
                f"microbatches={self.microbatches} and micro_batch_size={self.pipeline.micro_batch_size} both set how "
                "a batch is cut: omit one of them"
            )
        if self.microbatches is not None and self.microbatches < self.depth:
            raise ArgumentError(
                f"microbatches={self.microbatches} are fewer than the {self.depth} stages, so some stages would be "
                f"idle: use at least {self.depth}"
            )

    @property
    def pipeline(self) -> PipelineParallel | None:
        return self.stages if isinstance(self.stages, PipelineParallel) else None

    @property
    def depth(self) -> int:
        return self.stages.size if isinstance(self.stages, PipelineParallel) else self.stages

    @property
    def axes(self) -> dict[str, int]:
        return {"stages": self.depth, "shard": self.shard, "tensor": self.tensor}

    @property
    def size(self) -> int:
        return self.depth * self.shard * self.tensor

    def coordinates(self, device: int) -> dict[str, int]:
        """Return the position of device number `device` on each axis.

        A node's devices have the numbers 0 to size - 1.
        """
        return {
            "stages": device // (self.shard * self.tensor),
            "shard": device // self.tensor % self.shard,
            "tensor": device % self.tensor,
        }

    def shares(self, examples: int) -> tuple[int, ...]:
        """Return how many of a node's `examples` examples each shard computes, as a list of `shard` numbers.

        If `examples` is not a multiple of `shard`, the first shards get one example more. A mean over the batch weights
        the shards by these numbers.
        """
        return even(examples, self.shard)

    def micro_batches(self, share: int) -> tuple[int, ...]:
        """Return the sizes of a pipeline's micro-batches, if a shard computes `share` examples."""
        if self.depth == 1:
            return (share,)
        if self.pipeline is not None and self.pipeline.micro_batch_size is not None:
            return even(share, -(-share // self.pipeline.micro_batch_size))
        return even(share, min(self.microbatches or BUSY * self.depth, share))

    def at_once(self, examples: int) -> int:
        """Return the largest number of examples that a device computes at once, for a batch of `examples` examples."""
        return max(self.micro_batches(max(self.shares(examples))))

    def bubble(self, examples: int) -> float:
        """Return the share of a step in which a device waits for the pipeline to fill and drain.

        GPipe and 1F1B have the share (S-1)/(M+S-1), for S stages and M micro-batches of equal length (Huang et al.,
        arXiv:1811.06965).
        """
        parts = len(self.micro_batches(max(self.shares(examples))))
        return (self.depth - 1) / (parts + self.depth - 1)

    def check_batch(self, batch_size: int) -> None:
        """Raise ArgumentError if some device would have no example in a batch of `batch_size`."""
        if batch_size < self.shard:
            raise ArgumentError(
                f"batch_size={batch_size} is smaller than shard={self.shard}, so some devices would have no example: "
                f"use at least {self.shard * self.depth}, or a smaller shard"
            )
        share = min(self.shares(batch_size))
        if len(self.micro_batches(share)) < self.depth:
            raise ArgumentError(
                f"a device's share of {share} examples goes through the pipeline in {len(self.micro_batches(share))} "
                f"micro-batches, fewer than the {self.depth} stages: use a batch_size of {self.shard * self.depth} or "
                "more, or a smaller micro_batch_size"
            )

    def describe(self) -> dict[str, Any]:
        """Return the options that decide a run's result, as a JSON object.

        Options that change only the run's time are left out.
        """
        told: dict[str, Any] = {**self.axes}
        if self.shard > 1:
            told["zero"] = self.zero
        if self.depth > 1:
            told["schedule"] = "1f1b"
            told["microbatches"] = self.microbatches
            told["micro_batch_size"] = None if self.pipeline is None else self.pipeline.micro_batch_size
        return told

    def __str__(self) -> str:
        """Return the split as text, for example "shard=2 x tensor=2"."""
        return " x ".join(f"{name}={size}" for name, size in self.axes.items() if size > 1) or "one device"


NodeMesh.__init__ = checked(NodeMesh.__init__)  # type: ignore[method-assign]


def even(total: int, parts: int) -> tuple[int, ...]:
    """Split `total` into `parts` whole numbers that differ by at most one, the larger ones first.

    >>> even(8, 3)
    (3, 3, 2)
    """
    return tuple(total // parts + (k < total % parts) for k in range(parts))
