"""A node of several devices: how its model is split over the devices, and what they send each other.

`NodeMesh` describes the split. With `PipelineParallel` and `Stage` you choose a pipeline's stages yourself. Between
nodes nothing changes: a strategy trains as if every node were one device.
"""

from exogym.mesh.value import NodeMesh, PipelineParallel, Stage

__all__ = ["NodeMesh", "PipelineParallel", "Stage"]
