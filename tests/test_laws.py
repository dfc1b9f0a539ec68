"""The laws, over every strategy; and for each law a strategy that breaks it and must be caught."""

import math
import time

import numpy as np
import pytest
import torch

from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.errors import StrategyError
from exogym.strategy import (
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    PeriodicModule,
    SimpleReduceStrategy,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    Strategy,
)
from exogym.strategy.communicate import all_reduce
from exogym.strategy.federated_averaging import AveragingCommunicator
from exogym.strategy.sparta import SparseCommunicator
from exogym.testing import LAWS, check_strategy, fingerprint, small_problem

NODES, STEPS, P = 4, 24, 178
QUANTISED = 6 * (math.ceil(18 * 8 / 8) + 4)


class OneNode(Strategy):
    """A user's strategy with state of its own: an average of the parameters every third step, and a momentum."""

    def _init_node(self, model, rank, num_nodes):
        super()._init_node(model, rank, num_nodes)
        self.momentum = [torch.zeros_like(p) for p in self._parameters()]
        self.seen = 0

    def step(self):
        self.update_parameters()
        self.seen += 1
        with torch.no_grad():
            for p, m in zip(self._parameters(), self.momentum, strict=True):
                if self.seen % 3 == 0:
                    all_reduce(p, op="mean")
                m.mul_(0.5).add_(p, alpha=1e-3 * (self.rank + 1))
                p.sub_(m, alpha=1e-2)
        super().step()


class Stacked(OneNode):
    stacked = True

    def step(self):
        self.communicate_gradients()
        self.update_parameters()
        Strategy.step(self)


def composition():
    modules = [SparseCommunicator(sparsification_rate=0.1), AveragingCommunicator(H=4, island_size=2)]
    return CommunicateOptimizeStrategy("adamw", modules, lr=0.02, max_norm=1.0)


STRATEGIES = {
    "ddp": (lambda: SimpleReduceStrategy(lr=0.02, max_norm=1.0), lambda row, steps: row * steps),
    "ddp momentum": (lambda: SimpleReduceStrategy("sgd", lr=0.1), lambda row, steps: row * steps),
    "diloco": (
        lambda: DiLoCoStrategy(lr=0.02, H=5, lr_scheduler="cosine", warmup_steps=3),
        lambda row, steps: row * math.ceil(steps / 5),
    ),
    "diloco adam": (
        lambda: DiLoCoStrategy(lr=0.02, H=5, outer_optim="adam", outer_lr=0.01),
        lambda row, steps: row * math.ceil(steps / 5),
    ),
    "sparta": (lambda: SPARTAStrategy(lr=0.02, p_sparta=0.1), None),
    "sparta sequential": (
        lambda: SPARTAStrategy(lr=0.02, p_sparta=0.5, compression_method="sequential"),
        lambda row, steps: row * 0.5 * steps + row,
    ),
    "sparta partitioned 4 bit": (
        lambda: SPARTAStrategy(lr=0.02, p_sparta=0.5, compression_method="partitioned", quantization_bits=4),
        lambda row, steps: steps * (math.ceil(row / 4 / 2 * 4 / 8) + 4) + row,
    ),
    "sparta topk 8 bit": (
        lambda: SPARTAStrategy(lr=0.02, p_sparta=0.1, compression_method="topk", quantization_bits=8, interval=4),
        lambda row, steps: QUANTISED + 6 * 18 * 4 / NODES + row,  # one node in turn announces the indices
    ),
    "sparta 4 bit stochastic": (
        lambda: SPARTAStrategy(lr=0.02, p_sparta=0.3, quantization_bits=4, rounding="stochastic"),
        None,
    ),
    "sparta diloco": (lambda: SPARTADiLoCoStrategy(lr=0.02, p_sparta=0.1, H=6), None),
    "fedavg": (lambda: FedAvgStrategy("adamw", lr=0.02, H=5), lambda row, steps: row * math.ceil(steps / 5)),
    "fedavg islands": (
        lambda: FedAvgStrategy(lr=0.1, H=4, island_size=2, keep_inner_state=False),
        lambda row, steps: row * steps / 4,
    ),
    "fedavg sampling": (lambda: FedAvgStrategy(lr=0.1, H=4, client_fraction=0.5), lambda row, steps: row * steps / 8),
    "fedavg unequal work": (lambda: FedAvgStrategy("adamw", lr=0.02, H=5, local_steps=[1, 5, 3, 2]), None),
    "fedavg epochs": (lambda: FedAvgStrategy("adamw", lr=0.02, local_epochs=1), None),
    "demo": (
        lambda: DeMoStrategy(lr=0.01, compression_topk=4, compression_chunk=8, weight_decay=1e-3),
        # chunks of weight (16, 6), bias, BatchNorm's two, weight (2, 16), bias; at most 4 of each, 4 + 1 bytes
        lambda row, steps: steps * 5 * (4 * 2 + 4 * 2 + 4 * 2 + 4 * 2 + 4 * 2 + 2),
    ),
    "demo clipped": (lambda: DeMoStrategy(lr=0.01, max_norm=0.1, compression_topk=4, compression_chunk=8), None),
    "composition": (composition, None),
    "one node": (lambda: OneNode(lr=0.02, max_norm=1.0), lambda row, steps: row * steps / 3),
    "stacked": (lambda: Stacked(lr=0.02, max_norm=1.0), lambda row, steps: row * steps),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_laws_hold(name):
    factory, payload = STRATEGIES[name]
    # steps per node are given for four nodes; and an epoch of one node alone is longer than the run
    skip = ("single node",) if name in ("fedavg unequal work", "fedavg epochs") else ()
    seen = check_strategy(factory, num_nodes=NODES, steps=STEPS, payload_bytes=payload, skip=skip)
    assert set(seen) == set(LAWS) - set(skip)


class Broken(PeriodicModule):
    """An average every third step, with one law broken on purpose."""

    interval_steps = 3

    def __init__(self, law=None):
        super().__init__()
        self.law = law

    def start(self, fleet, run):
        super().start(fleet, run)
        self.secret = torch.zeros(len(fleet), fleet.blocks[0].layout.numel)
        self.first = fleet.blocks[0].params.clone()

    def local_steps(self, first, last):
        return np.full(NODES, (last - first + 1) // 2) if self.law == "stretches" else None

    def communicate(self, fleet, step):
        for block in fleet.blocks:
            x = block.params
            if self.law == "repeatable":
                x += 1e-6 * (time.perf_counter_ns() % 1009)
            if self.law == "stopping":
                self.secret.mul_(0.9).add_(x, alpha=1e-3)
                x += self.secret
            if self.law == "placement":
                x /= 1 + 1e-3 * x.norm()
            fleet.comm.all_reduce(x, "mean", out=x)
            if self.law == "single node":
                fleet.comm.ledger.tx_bytes += 1
            if self.law == "bytes":
                fleet.comm.all_reduce(x, "mean")
            if self.law == "learns":
                x.copy_(self.first)


class Counting(PeriodicModule):
    """Averages every second time it is asked, by a plain counter."""

    interval_steps = 5

    def __init__(self):
        super().__init__()
        self.asked = 0

    def communicate(self, fleet, step):
        self.asked += 1
        if self.asked % 2:
            for block in fleet.blocks:
                fleet.comm.all_reduce(block.params, "mean", out=block.params)


def test_a_counter_of_a_module_survives_a_stop(tmp_path):
    def train(*callbacks, **options):
        model, data = small_problem()
        trainer = LocalTrainer(model, data, loss_fn=torch.nn.functional.mse_loss)
        strategy = CommunicateOptimizeStrategy("adamw", [Counting()], lr=0.02)
        trainer.fit(strategy, num_nodes=4, max_steps=20, batch_size=8, device="cpu", callbacks=callbacks, **options)
        return fingerprint(model)

    train(Every(5, lambda loop: True), save_dir=tmp_path)
    assert train(save_dir=tmp_path, resume=True) == train()


def test_the_sound_version_passes():
    check_strategy(
        lambda: CommunicateOptimizeStrategy("adamw", [Broken()], lr=0.02),
        payload_bytes=lambda row, steps: row * steps / 3,
    )


@pytest.mark.parametrize("law", LAWS)
def test_a_broken_law_is_caught(law):
    with pytest.raises(StrategyError, match=f"law '{law}'"):
        check_strategy(
            lambda: CommunicateOptimizeStrategy("adamw", [Broken(law)], lr=0.02),
            payload_bytes=lambda row, steps: row * steps / 3,
        )
