"""The strategies: each algorithm one short file that reads like its paper.

Every file of this folder is imported, so that a class with a `name` is known by it, and can be imported from here.
"""

import importlib
import pkgutil

from exogym.strategy.async_diloco import AsyncDiLoCoStrategy
from exogym.strategy.averaging import NormCap
from exogym.strategy.communicate_optimize import (
    CommunicateOptimizeStrategy,
    CommunicationModule,
    GradientModule,
    PeriodicModule,
)
from exogym.strategy.demo import DeMoStrategy
from exogym.strategy.diloco import DiLoCoStrategy
from exogym.strategy.federated_averaging import FedAvgStrategy
from exogym.strategy.optim import OptimSpec
from exogym.strategy.privacy import DifferentialPrivacy
from exogym.strategy.simple_reduce import SimpleReduceStrategy
from exogym.strategy.sparta import SPARTADiLoCoStrategy, SPARTAStrategy
from exogym.strategy.strategy import STRATEGIES, Run, Strategy

__all__ = [
    "AsyncDiLoCoStrategy",
    "CommunicateOptimizeStrategy",
    "CommunicationModule",
    "DeMoStrategy",
    "DiLoCoStrategy",
    "DifferentialPrivacy",
    "FedAvgStrategy",
    "GradientModule",
    "NormCap",
    "OptimSpec",
    "PeriodicModule",
    "Run",
    "SPARTADiLoCoStrategy",
    "SPARTAStrategy",
    "SimpleReduceStrategy",
    "Strategy",
]

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
_named = {kind.__name__: kind for kind in STRATEGIES.values() if kind.__module__.startswith(f"{__name__}.")}
globals().update(_named)
__all__ += [name for name in sorted(_named) if name not in __all__]
