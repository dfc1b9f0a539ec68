"""Gradients and updates that are not finite: named before others see them, or left out as an absent node would be.

The model's last bias gets a NaN gradient from an example whose sixth feature is 0, though its loss is finite.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from battery import each
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.errors import ArgumentError, TrainingError
from exogym.faults import Faults
from exogym.strategy import (
    AsyncDiLoCoStrategy,
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    Strategy,
)
from exogym.strategy.communicate import all_reduce
from exogym.strategy.federated_averaging import AveragingCommunicator
from exogym.strategy.sparta import SparseCommunicator
from exogym.testing import fingerprint

NODES, STEPS, BATCH = 4, 12, 4


class Poisoned(nn.Module):
    """z = 0 gives d/db sqrt(b^2 z) = 0/0 in the last bias, and nothing to the loss."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(7)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 1)
        self.norm = nn.BatchNorm1d(7) if norm else nn.Identity()
        for layer in (self.first, self.second):
            for p in layer.parameters():
                nn.init.normal_(p, std=0.5, generator=g)

    def forward(self, x: Tensor) -> Tensor:
        out = self.second(torch.tanh(self.norm(self.first(x[:, :5]))))
        return out + 0.0 * torch.sqrt(self.second.bias.square() * x[:, 5:])


def node_data(poison: dict[int, Sequence[int]]) -> Any:
    """Data in which the steps (from 1) that `poison` says of each node give a NaN gradient."""

    def factory(rank: int, num_nodes: int, is_train: bool) -> TensorDataset:
        g = torch.Generator().manual_seed(rank)
        x = torch.randn(STEPS * BATCH, 6, generator=g)
        x[:, 5] = 1.0
        for step in poison.get(rank, ()) if is_train else ():
            x[(step - 1) * BATCH, 5] = 0.0
        return TensorDataset(x, torch.sin(x[:, :5].sum(1, keepdim=True)))

    return factory


def train(strategy: Strategy, poison: dict[int, Sequence[int]], **options: Any) -> LocalTrainer:
    model, max_stretch = Poisoned(options.pop("norm", True)), options.pop("max_stretch", None)
    data = node_data(poison)
    trainer = LocalTrainer(model, data, data if options.pop("val", False) else None, loss_fn=nn.functional.mse_loss)
    trainer.max_stretch = max_stretch
    given = {"num_nodes": NODES, "max_steps": STEPS, "batch_size": BATCH, "shuffle": False, "device": "cpu"} | options
    trainer.fit(strategy, **given)
    return trainer


class EveryThird(Strategy):
    """Written for one node: an average every third step."""

    def step(self) -> None:
        self.update_parameters()
        if (self.local_step + 1) % 3 == 0:
            with torch.no_grad():
                for p in self.model.parameters():
                    all_reduce(p, op="mean")
        super().step()


class Rows(Strategy):
    stacked = True

    def step(self) -> None:
        self.communicate_gradients()
        self.update_parameters()
        super().step()


def composition() -> Strategy:
    modules = [SparseCommunicator(sparsification_rate=0.2), AveragingCommunicator(H=4, island_size=2)]
    return CommunicateOptimizeStrategy("adamw", modules, lr=0.02, max_norm=1.0)


LOCKSTEP = {
    "ddp": lambda: SimpleReduceStrategy(lr=0.02, max_norm=1.0),
    "demo": lambda: DeMoStrategy(lr=0.01, compression_topk=4, compression_chunk=8),
    "demo clipped": lambda: DeMoStrategy(lr=0.01, max_norm=0.1, compression_topk=4, compression_chunk=8),
}
LOCAL = {
    "diloco": lambda: DiLoCoStrategy(lr=0.02, H=4),
    "fedavg": lambda: FedAvgStrategy(OptimSpec("sgd", lr=0.1, momentum=0.9), H=4),
    "sparta": lambda: SPARTAStrategy(lr=0.02, p_sparta=0.2),
    "sparta topk 4 bit": lambda: SPARTAStrategy(
        lr=0.02, p_sparta=0.3, compression_method="topk", quantization_bits=4, interval=2
    ),
    "sparta diloco": lambda: SPARTADiLoCoStrategy(lr=0.02, p_sparta=0.2, H=6),
    "composition": composition,
}
ONE_NODE = {"one node": lambda: EveryThird(lr=0.02), "stacked": lambda: Rows(lr=0.02, max_norm=1.0)}
ASYNC = {"async": lambda: AsyncDiLoCoStrategy(H=4, lr=0.02)}
ALL = LOCKSTEP | LOCAL | ONE_NODE | ASYNC


def holds_only_finite(model: nn.Module) -> bool:
    return all(bool(x.isfinite().all()) for x in [*model.parameters(), *model.buffers()])


def words(name: str, step: int) -> str:
    """What an error says of node 2 and its step."""
    if name in LOCKSTEP or name in ONE_NODE:
        return rf"the gradient of node 2 was not finite at its step {step}: 'second.bias' has nan"
    return rf"the update of node 2 was not finite at its step {step}: 'second.bias' contains nan"


# "raise"


@pytest.mark.parametrize("step", [1, 6, STEPS])
@pytest.mark.parametrize("name", ALL)
def test_node_step_and_tensor_are_named(name: str, step: int) -> None:
    with pytest.raises(TrainingError, match=words(name, step)):
        train(ALL[name](), {2: [step]})


def fit_and_look(strategy: Strategy, **options: Any) -> nn.Module:
    data, model = node_data({2: [STEPS]}), Poisoned()
    trainer = LocalTrainer(model, data, loss_fn=nn.functional.mse_loss)
    given = {"num_nodes": NODES, "max_steps": STEPS, "batch_size": BATCH, "shuffle": False, "device": "cpu"} | options
    if options.get("on_nonfinite") == "ignore":
        trainer.fit(strategy, **given)
    else:
        with pytest.raises(TrainingError):
            trainer.fit(strategy, **given)
    return model


@pytest.mark.parametrize("name", [*LOCKSTEP, *LOCAL, *ONE_NODE, *ASYNC])
def test_a_nan_of_the_last_step_is_in_no_model_but_where_it_is_ignored(name: str) -> None:
    assert holds_only_finite(fit_and_look(ALL[name]()))
    if name not in ("demo", "demo clipped"):
        assert not holds_only_finite(fit_and_look(ALL[name](), on_nonfinite="ignore"))


@pytest.mark.parametrize("name", ["ddp", "demo", "diloco", "one node", "stacked"])
def test_rows_computed_together(name: str) -> None:
    with pytest.raises(TrainingError, match=words(name, 7)):
        train(ALL[name](), {2: [7]}, compute="vmap", norm=False)


@pytest.mark.parametrize("name", ["ddp", "diloco", "sparta", "one node", "async"])
def test_in_another_process(name: str) -> None:
    with pytest.raises(TrainingError, match=words(name, 7)):
        train(ALL[name](), {2: [7]}, processes=2)


def test_where_losses_come_later_the_loss_is_named() -> None:
    """As on a GPU, where looking at each loss would wait for it: one look per stretch."""
    from unittest import mock

    from exogym.core.compute import finite

    class Later(finite.Watch):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.at_once = False

    with mock.patch("exogym.core.training.assembly.Watch", Later):
        with pytest.raises(TrainingError, match="the loss of node 2 became nan at its step 7"):
            train(DiLoCoStrategy(lr=0.02, H=4), {2: [6]})
        with pytest.raises(TrainingError, match=words("diloco", 8)):
            train(DiLoCoStrategy(lr=0.02, H=4), {2: [8]})
        later = train(DiLoCoStrategy(lr=0.02, H=4), {2: [6]}, on_nonfinite="skip")
    assert fingerprint(later.model) == fingerprint(
        train(DiLoCoStrategy(lr=0.02, H=4), {2: [6]}, on_nonfinite="skip").model
    )


def test_outer_parameters_that_run_away_are_told_apart() -> None:
    with pytest.raises(TrainingError, match=r"the outer parameters held -?inf in 'first.weight' after step 4"):
        train(DiLoCoStrategy(lr=20.0, H=4, outer_optim=OptimSpec("sgd", lr=1e38, momentum=0.9)), {})
    with pytest.raises(TrainingError, match="the server's parameters held"):
        train(AsyncDiLoCoStrategy(lr=20.0, H=4, outer_lr=3e38), {})


def test_a_model_that_comes_with_a_nan() -> None:
    model = Poisoned()
    with torch.no_grad():
        model.second.weight[0, 0] = math.nan
    trainer = LocalTrainer(model, node_data({}), loss_fn=nn.functional.mse_loss)
    with pytest.raises(TrainingError, match=r"'second.weight' contains nan before the first step of node 0"):
        trainer.fit(DiLoCoStrategy(H=2), num_nodes=2, max_steps=4, batch_size=BATCH, device="cpu")


def test_what_fp16_scaling_handles_is_no_error() -> None:
    """The first scale, 65536, is too large for this loss, so steps overflow until it has been halved often enough."""

    def loud(predictions: Tensor, targets: Tensor) -> Tensor:
        return 100 * nn.functional.mse_loss(predictions, targets)

    for strategy in (DiLoCoStrategy(lr=0.02, H=4), SimpleReduceStrategy(lr=0.02), EveryThird(lr=0.02)):
        for policy in ("raise", "skip"):
            model = Poisoned()
            scales: list[float] = []
            trainer = LocalTrainer(model, node_data({}), loss_fn=loud)
            trainer.fit(
                strategy, num_nodes=2, max_steps=STEPS, batch_size=BATCH, precision="fp16", device="cpu",
                on_nonfinite=policy, callbacks=[lambda loop, scales=scales: scales.extend(loop.worker.scaling.scales)],
            )  # fmt: skip
            assert min(scales) < 65536 and holds_only_finite(model)


# "skip"


@pytest.mark.parametrize("name", LOCKSTEP)
def test_skipped_in_lockstep_is_a_missed_step(name: str) -> None:
    skipped = train(ALL[name](), {2: [6]}, on_nonfinite="skip")
    missed = train(ALL[name](), {}, faults=Faults(lost={2: [6]}))
    assert fingerprint(skipped.model) == fingerprint(missed.model)
    assert fingerprint(skipped.model) != fingerprint(train(ALL[name](), {}).model)


@pytest.mark.parametrize("step", [5, 6, 8])
@pytest.mark.parametrize("name", ["diloco", "fedavg"])
def test_skipped_after_local_steps_is_an_absent_round(name: str, step: int) -> None:
    skipped = train(ALL[name](), {2: [step]}, on_nonfinite="skip")
    absent = train(ALL[name](), {}, faults=Faults(absent={2: [(5, 9)]}, forget=True))
    assert fingerprint(skipped.model) == fingerprint(absent.model) and skipped.traffic == absent.traffic
    assert fingerprint(skipped.model) != fingerprint(train(ALL[name](), {}).model)


@pytest.mark.parametrize("name", each([*ALL], fast=("ddp", "diloco", "one node", "async")))
def test_the_laws_hold_with_a_planted_nan(name: str, tmp_path: Any) -> None:
    """Placement, stopping and stretches change no bit, whoever is left out when."""
    poison = {2: [3, 6], 1: [8], 0: [STEPS]}
    options = {"on_nonfinite": "skip"}
    reference = train(ALL[name](), poison, **options)
    assert holds_only_finite(reference.model)
    expected = fingerprint(reference.model)
    assert fingerprint(train(ALL[name](), poison, max_stretch=1, **options).model) == expected
    assert fingerprint(train(ALL[name](), poison, processes=2, **options).model) == expected
    for stop in (3, 7, 8):
        at = {"save_dir": tmp_path / str(stop), "checkpoint_interval": stop} | options
        train(ALL[name](), poison, callbacks=[Every(stop, lambda loop: True)], **at)
        assert fingerprint(train(ALL[name](), poison, resume=True, **(at | {"processes": 2})).model) == expected


def test_rows_computed_together_are_left_out_alike() -> None:
    for name in ("ddp", "diloco"):
        together, alone = (
            train(ALL[name](), {2: [6]}, on_nonfinite="skip", norm=False, compute=compute).model
            for compute in ("vmap", "loop")
        )
        for a, b in zip(together.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_evaluations_leave_the_node_out_and_history_has_no_row_of_its_lost_steps() -> None:
    trainer = train(DiLoCoStrategy(lr=0.02, H=6), {2: [2]}, on_nonfinite="skip", val=True, val_interval=1)
    steps, losses = trainer.history.column("val_loss")
    assert len(steps) == STEPS + 1 and np.isfinite(losses).all()
    assert trainer.history.column("train_loss", 2)[0].tolist() == [1, 2, 7, 8, 9, 10, 11, 12]
    assert trainer.history.column("train_loss", 1)[0].tolist() == list(range(1, STEPS + 1))


def test_nobody_is_left() -> None:
    everyone = {node: [6] for node in range(NODES)}
    for name in ("ddp", "demo", "diloco", "sparta"):
        with pytest.raises(TrainingError, match="no node has finite numbers"):
            train(ALL[name](), everyone, on_nonfinite="skip")


def test_a_wrong_policy_is_refused() -> None:
    with pytest.raises(ArgumentError, match="on_nonfinite='Skip' is not one of 'raise', 'skip', 'ignore'"):
        train(DiLoCoStrategy(), {}, on_nonfinite="Skip")
