"""Strategies: each algorithm is one short file that reads like its paper.

Import every strategy from here, including the methods of `exogym.contrib`, by its class name or its `name`. Python
loads a strategy's file when you first use its class.

To build your own strategy, combine modules: a `GradientModule` changes the gradients at every step, and a
`CommunicationModule` changes the parameters at the steps that it chooses. Every module receives a `Run` with the run's
seed, nodes and steps.

Notation in this package: N nodes train a model of P parameters of b bytes each (4 in fp32). Node i has the parameters
theta_i and the gradient g_i; theta are the shared (outer) parameters. H is the number of local steps between two
synchronizations. The payload is the bytes that a node hands to a collective; tx and rx are the bytes that it sends and
receives.

>>> class Halved(GradientModule):
...     def transform(self, fleet, step, lr):
...         for block in fleet.blocks:
...             block.grads.mul_(0.5)
>>> class Start(CommunicationModule):  # all take node 0's parameters after the first step
...     def start(self, fleet, run: Run):
...         super().start(fleet, run)
...         assert run.num_nodes == 3
...     def next_event(self, step):
...         return 1 if step < 1 else 2**62
...     def communicate(self, fleet, step):
...         for block in fleet.blocks:
...             block.params.copy_(fleet.comm.broadcast(block.params, 0))
>>> strategy = CommunicateOptimizeStrategy("sgd", [Start()], gradient_modules=[Halved()], lr=0.1)
>>> personal = FedAvgStrategy(H=5, lr=0.1, averaging=Averaging(personal="head.*"))  # each client keeps its own head
>>> import torch
>>> from exogym import LocalTrainer
>>> from exogym.testing import small_problem
>>> model, data = small_problem()
>>> trainer = LocalTrainer(model, data, loss_fn=torch.nn.functional.mse_loss)
>>> _ = trainer.fit(strategy, num_nodes=3, max_steps=4, batch_size=8)
>>> list(trainer.traffic)
['tree broadcast']
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = [
    "AsyncDiLoCoStrategy",
    "Averaging",
    "CommunicateOptimizeStrategy",
    "CommunicationModule",
    "DeMoStrategy",
    "DiLoCoStrategy",
    "DifferentialPrivacy",
    "FedAvgStrategy",
    "FedOptStrategy",
    "FedProxStrategy",
    "GossipStrategy",
    "GradientModule",
    "MuLoCoStrategy",
    "NoLoCoStrategy",
    "OptimSpec",
    "PeriodicModule",
    "PostLocalSGDStrategy",
    "PowerSGDStrategy",
    "QSGDStrategy",
    "Run",
    "SPARTADiLoCoStrategy",
    "SPARTAStrategy",
    "ScaffoldStrategy",
    "SignSGDStrategy",
    "SimpleReduceStrategy",
    "SparseLoCoStrategy",
    "Strategy",
    "StreamingDiLoCoStrategy",
    "TopKStrategy",
]

if TYPE_CHECKING:
    from exogym.strategy.async_diloco import AsyncDiLoCoStrategy
    from exogym.strategy.averaging import Averaging
    from exogym.strategy.communicate_optimize import (
        CommunicateOptimizeStrategy,
        CommunicationModule,
        GradientModule,
        PeriodicModule,
    )
    from exogym.strategy.demo import DeMoStrategy
    from exogym.strategy.diloco import DiLoCoStrategy
    from exogym.strategy.federated_averaging import FedAvgStrategy
    from exogym.strategy.fedopt import FedOptStrategy
    from exogym.strategy.fedprox import FedProxStrategy
    from exogym.strategy.gossip import GossipStrategy
    from exogym.strategy.muloco import MuLoCoStrategy
    from exogym.strategy.noloco import NoLoCoStrategy
    from exogym.strategy.optim import OptimSpec
    from exogym.strategy.post_local_sgd import PostLocalSGDStrategy
    from exogym.strategy.powersgd import PowerSGDStrategy
    from exogym.strategy.privacy import DifferentialPrivacy
    from exogym.strategy.qsgd import QSGDStrategy
    from exogym.strategy.scaffold import ScaffoldStrategy
    from exogym.strategy.signsgd import SignSGDStrategy
    from exogym.strategy.simple_reduce import SimpleReduceStrategy
    from exogym.strategy.sparseloco import SparseLoCoStrategy
    from exogym.strategy.sparta import SPARTADiLoCoStrategy, SPARTAStrategy
    from exogym.strategy.strategy import Run, Strategy
    from exogym.strategy.streaming_diloco import StreamingDiLoCoStrategy
    from exogym.strategy.topk import TopKStrategy
else:
    _listed, __dir__ = lazily(__name__)

    def __getattr__(name):
        try:
            return _listed(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            from exogym.strategy.registry import class_named

            found = class_named(name)
            if found is None:
                raise
            return found
