"""The strategies: each algorithm one short file that reads like its paper."""

from exogym.strategy.async_diloco import AsyncDiLoCoStrategy
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
from exogym.strategy.simple_reduce import SimpleReduceStrategy
from exogym.strategy.sparta import SPARTADiLoCoStrategy, SPARTAStrategy
from exogym.strategy.strategy import Run, Strategy

__all__ = [
    "AsyncDiLoCoStrategy",
    "CommunicateOptimizeStrategy",
    "CommunicationModule",
    "DeMoStrategy",
    "DiLoCoStrategy",
    "FedAvgStrategy",
    "GradientModule",
    "OptimSpec",
    "PeriodicModule",
    "Run",
    "SPARTADiLoCoStrategy",
    "SPARTAStrategy",
    "SimpleReduceStrategy",
    "Strategy",
]
