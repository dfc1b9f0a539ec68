"""The engines: each decides which processes hold a run's rows (this process, its forks, torchrun's, a Ray cluster's).

A new engine is one more file here, with a class like `exogym.core.engine.protocol.Engine`, and an entry in `ENGINES`. A
new engine also needs a wire between its processes. If the processes form a torch process group, use `ProcessWire`.

The run uses the first engine that applies:

>>> import torch
>>> two = EngineOptions(num_nodes=4, processes=2, device=torch.device("cpu"))
>>> [engine.applies(two) for engine in (Group(), Forked(), Alone())]
[False, True, False]
>>> one = EngineOptions(num_nodes=4, processes=1, device=torch.device("cpu"), placement=[range(4)])
>>> chosen: Engine = engine_for(one)
>>> chosen.run(one, lambda wire: len(wire.owner))
4
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily
from exogym.core.engine.here import Alone, Forked, Group
from exogym.core.engine.protocol import Engine, EngineOptions

if TYPE_CHECKING:
    from exogym.core.engine.ray import Ray
else:
    __getattr__, __dir__ = lazily(__name__)

__all__ = ["ENGINES", "Alone", "Engine", "EngineOptions", "Forked", "Group", "Ray", "engine_for"]

ENGINES: list[Engine] = [Group(), Forked(), Alone()]  # the first that applies takes the run


def engine_for(options: EngineOptions) -> Engine | None:
    """Return a run's engine: the engine that its options name, otherwise the first engine that applies.

    Returns None if no engine applies, because the number of processes is not chosen yet.

    >>> import torch
    >>> type(engine_for(EngineOptions(4, 2, torch.device("cpu")))).__name__
    'Forked'
    """
    if options.engine == "ray":
        from exogym.core.engine.ray import Ray

        return Ray()
    return next((engine for engine in ENGINES if engine.applies(options)), None)
