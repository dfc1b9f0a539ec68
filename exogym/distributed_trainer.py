"""`DistributedTrainer`: train one model over several devices.

The names are defined in `exogym.machines.distributed_trainer`.
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

if TYPE_CHECKING:
    from exogym.machines.distributed_trainer import *  # noqa: F403
else:
    __getattr__, __dir__ = lazily(__name__)
