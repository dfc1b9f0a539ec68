"""The engines. An engine decides which processes hold a run's rows: for example, this process and its forks.

A new engine is one more file here, with a class like `exogym.core.engine.protocol.Engine`, and an entry in `ENGINES`.
If users choose it with `Placement(engine=)`, its entry is in `NAMED` instead. A new engine also needs a wire between
its processes. If the processes form a torch process group, use `ProcessWire`.

The run uses the engine that the user names, otherwise the first engine that applies:

>>> import torch
>>> two = EngineOptions(num_nodes=4, processes=2, device=torch.device("cpu"))
>>> [engine.applies(two) for engine in (Group(), Forked(), Alone())]
[False, True, False]
>>> one = EngineOptions(num_nodes=4, processes=1, device=torch.device("cpu"), placement=[range(4)])
>>> chosen: Engine = engine_for(one)
>>> chosen.run(one, lambda wire: len(wire.owner))
4
>>> kind: type[Nodes] = several_devices("fit")  # what makes nodes of several devices of the option `node`
"""

import importlib
from typing import Any

from exogym.core.engine.here import Alone, Forked, Group
from exogym.core.engine.protocol import Engine, EngineOptions, Nodes

__all__ = [
    "ENGINES",
    "Alone",
    "Engine",
    "EngineOptions",
    "Forked",
    "Group",
    "Nodes",
    "engine_for",
    "named_engine",
    "several_devices",
]

ENGINES: list[Engine] = [Group(), Forked(), Alone()]  # the first that applies takes the run
# The names for `Placement(engine=)` -> an engine's module and class, imported when a run needs them.
NAMED = {"ray": ("exogym.clusters.ray", "Ray")}
# Who takes an option `node` -> the module and class that make nodes of several devices of it.
DEVICES = {"fit": ("exogym.mesh.nodes", "MeshNodes"), "attach": ("exogym.mesh.attached", "Shards")}


def named_engine(name: str) -> type[Engine]:
    """Return the class of the engine that `Placement(engine=name)` runs on.

    >>> named_engine("ray").__name__
    'Ray'
    """
    home, kind = NAMED[name]
    found: type[Engine] = getattr(importlib.import_module(home), kind)
    return found


def several_devices(where: str) -> Any:
    """Return the class that makes nodes of several devices of the option `node` of `where`, "fit" or "attach".

    >>> several_devices("fit").sharing([2, 2])
    NodeMesh(shard=2, tensor=1, stages=1, microbatches=None, parallelize=None, zero=3, schedule='1f1b', probe=True)
    """
    home, kind = DEVICES[where]
    return getattr(importlib.import_module(home), kind)


def engine_for(options: EngineOptions) -> Engine:
    """Return a run's engine: the engine that its options name, otherwise the first engine that applies.

    >>> import torch
    >>> type(engine_for(EngineOptions(4, 2, torch.device("cpu")))).__name__
    'Forked'
    """
    if options.engine is not None:
        return named_engine(options.engine)()
    return next(engine for engine in ENGINES if engine.applies(options))
