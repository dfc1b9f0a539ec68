"""Pipeline stages that the user chooses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from exogym.errors import ArgumentError, check_count, checked


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
            raise ArgumentError(f"layers={layers!r} must be a list of modules, as [nn.Linear(4, 8), nn.ReLU()]")
        for layer in layers:
            if not isinstance(layer, nn.Module):
                raise ArgumentError(f"layers holds {layer!r}, wanted torch.nn.Module objects")
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
            raise ArgumentError(f"the stages are on devices {given}: give a device to each stage, or to none")
        if given not in (list(range(len(found))), [None] * len(found)):
            raise ArgumentError(
                f"the stages are on devices {given}, wanted {list(range(len(found)))}: one stage on each device, in "
                "order"
            )
        self.stages, self.size, self.micro_batch_size = tuple(found), len(found), micro_batch_size

    def __repr__(self) -> str:
        return f"PipelineParallel({len(self.stages)} stages, micro_batch_size={self.micro_batch_size})"
