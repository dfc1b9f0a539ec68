"""Start a script in several processes, on one machine or many: `python -m exogym.launch`, or from Python.

>>> from exogym.launch import launch_distributed_training
>>> launch_distributed_training("train.py", "--epochs", "3", nproc_per_node=4)  # doctest: +SKIP
0
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = [
    "BACKEND_VARIABLE",
    "DistributedLauncher",
    "LaunchConfig",
    "available_backends",
    "check_backend",
    "launch_distributed_training",
]

if TYPE_CHECKING:
    from exogym.machines.launch.config import BACKEND_VARIABLE, LaunchConfig, available_backends, check_backend
    from exogym.machines.launch.launcher import DistributedLauncher, launch_distributed_training
else:
    __getattr__, __dir__ = lazily(__name__)
