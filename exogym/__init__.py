"""ExoGym: simulate distributed training on one machine, and compare methods by bytes, time and quality."""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__version__ = "0.1.0"
__all__ = [
    "DistributedTrainer",
    "LocalTrainer",
    "NetworkTrainer",
    "NodeMesh",
    "PipelineParallel",
    "Placement",
    "Stage",
    "TrainNode",
    "Trainer",
    "__version__",
    "attach",
    "export_dcp",
    "import_dcp",
    "load_model",
    "save_model",
]

if TYPE_CHECKING:
    from exogym.attached.nodes import attach
    from exogym.core.compute.loop import TrainNode
    from exogym.core.saving.dcp import export_dcp, import_dcp
    from exogym.core.saving.export import load_model, save_model
    from exogym.core.training.options import Placement
    from exogym.machines.distributed_trainer import DistributedTrainer
    from exogym.machines.remote.network_trainer import NetworkTrainer
    from exogym.mesh import NodeMesh, PipelineParallel, Stage
    from exogym.trainer import LocalTrainer, Trainer
else:
    __getattr__, __dir__ = lazily(__name__)
