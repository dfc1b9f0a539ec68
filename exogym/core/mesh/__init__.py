"""A node that is several devices: how its model is split over them, and what that costs inside the node.

`NodeMesh` says the split, `PipelineParallel` and `Stage` the stages of a pipeline by hand. Between nodes nothing
changes: a strategy trains as if every node were one device.
"""

from exogym.core.mesh.pipeline import PipelineParallel, Stage
from exogym.core.mesh.value import SCHEDULES, NodeMesh

__all__ = ["SCHEDULES", "NodeMesh", "PipelineParallel", "Stage"]
