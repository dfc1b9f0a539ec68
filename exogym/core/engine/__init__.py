"""The engines. `exogym.core.engine.engines` defines what an engine is, and has the engines of this machine."""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = [
    "ENGINES",
    "Alone",
    "Engine",
    "EngineOptions",
    "Forked",
    "Forks",
    "Group",
    "Nodes",
    "engine_for",
    "named_engine",
    "several_devices",
]

if TYPE_CHECKING:
    from exogym.core.engine.children import Forks
    from exogym.core.engine.engines import DEVICES as DEVICES
    from exogym.core.engine.engines import (
        ENGINES,
        Alone,
        Engine,
        EngineOptions,
        Forked,
        Group,
        engine_for,
        named_engine,
        several_devices,
    )
    from exogym.core.engine.engines import NAMED as NAMED
    from exogym.core.engine.engines import Moved as Moved
    from exogym.core.engine.engines import Result as Result
    from exogym.core.engine.engines import world_size as world_size
    from exogym.core.engine.nodes import Nodes
else:
    __getattr__, __dir__ = lazily(__name__)
