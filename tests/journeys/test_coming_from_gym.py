"""Scripts of EXO Gym run after the edits that docs/coming_from_gym.md names, and old names answer with the new ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

from exogym import LocalTrainer, Trainer
from exogym.errors import ArgumentError, StrategyError
from exogym.strategy import (
    CommunicateOptimizeStrategy,
    CommunicationModule,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    Strategy,
    communicate,
)

ADAMW = OptimSpec(torch.optim.AdamW, lr=1e-3)
OUTER = OptimSpec(torch.optim.SGD, lr=0.7, nesterov=True, momentum=0.9)
WARM: dict[str, Any] = {"lr_scheduler": "cosine", "warmup_steps": 1, "max_norm": 1.0}
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": lambda: SimpleReduceStrategy(inner_optim=ADAMW, **WARM),
    "fedavg": lambda: FedAvgStrategy(inner_optim=ADAMW, H=2, island_size=2, **WARM),
    "sparta": lambda: SPARTAStrategy(inner_optim=ADAMW, p_sparta=0.05, **WARM),
    "diloco": lambda: DiLoCoStrategy(inner_optim=ADAMW, outer_optim=OUTER, H=2, **WARM),
    "demo": lambda: DeMoStrategy(lr=1e-3, weight_decay=0.0, compression_decay=0.99, compression_topk=4,
                                 compression_chunk=8, **WARM),
    "diloco_sparta": lambda: SPARTADiLoCoStrategy(inner_optim=ADAMW, outer_optim=OUTER, H=2, p_sparta=0.05,
                                                  sparta_interval=1, **WARM),
}  # fmt: skip


class Classifier(nn.Module):
    """A model that returns its loss, as EXO Gym's examples had them."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.loss_fn = nn.CrossEntropyLoss()

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return self.loss_fn(self.backbone(x).flatten(0, -2), y.flatten())


def images(count: int) -> Dataset[Any]:
    made = torch.Generator().manual_seed(count)
    return TensorDataset(torch.randn(count, 1, 8, 8, generator=made), torch.randint(4, (count,), generator=made))


def share(length: int, rank: int, num_nodes: int, train_dataset: bool) -> Dataset[Any]:
    """A factory with arguments of its own, for `functools.partial`."""
    whole = images(length)
    return Subset(whole, range(rank, length, num_nodes)) if train_dataset and num_nodes > 1 else whole


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.25)]
    return Classifier(nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 4)))


def trained(trainer: LocalTrainer, strategy: Strategy, **options: Any) -> None:
    given = {"num_epochs": 1, "max_steps": 4, "num_nodes": 4, "batch_size": 4, "shuffle": True, "val_size": 8}
    trainer.fit(strategy=strategy, val_interval=2, **given | options)
    assert trainer.history.last["step"] == 4 and trainer.history.last["val_loss"] > 0


@pytest.mark.parametrize("name", ["ddp", "diloco", "sparta"])
def test_mnist(name: str) -> None:
    data = images(64)
    trained(LocalTrainer(convolutions(), data, data), STRATEGIES[name](), device="cpu")


@pytest.mark.parametrize("name", STRATEGIES)
def test_images_from_a_factory_with_loader_options(name: str) -> None:
    factory = partial(share, 64)
    trained(LocalTrainer(convolutions(), factory, factory), STRATEGIES[name](), minibatch_size=2,
            dataloader_kwargs={"num_workers": 0})  # fmt: skip


@pytest.mark.parametrize("name", STRATEGIES)
def test_language_models(name: str) -> None:
    """As nanogpt_train.py and playground.py: tokens, each shifted by one."""
    tokens = torch.randint(16, (64, 9), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    torch.manual_seed(0)
    model = Classifier(nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)))
    trained(LocalTrainer(model, data, data), STRATEGIES[name](), minibatch_size=2)


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_diloco_over_numbers_of_nodes_at_one_global_batch(nodes: int) -> None:
    data = images(64)
    strategy = STRATEGIES["diloco" if nodes > 1 else "ddp"]()
    trained(LocalTrainer(convolutions(), data, data), strategy, num_nodes=nodes, batch_size=16 // nodes)


# Old names


def line() -> nn.Module:
    return Classifier(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)))


def fit(strategy: Strategy | None = None, **options: Any) -> None:
    LocalTrainer(line(), images(16)).fit(strategy or STRATEGIES["ddp"](), num_nodes=2, max_steps=1, **options)


class OwnSpec(Strategy):
    def __init__(self) -> None:
        super().__init__()
        self.optim_spec = OptimSpec(torch.optim.SGD, lr=0.1)

    def step(self) -> None:
        self.update_parameters()
        super().step()


class TorchSums(Strategy):
    def step(self) -> None:
        communicate.all_reduce(torch.ones(1), op=torch.distributed.ReduceOp.SUM)  # type: ignore[arg-type]


def old_module() -> None:
    class Old(CommunicationModule):
        def communicate(self, model: Any, rank: int, num_nodes: int, local_step: int) -> None: ...  # type: ignore[override]

        def _init_node(self, model: Any, rank: int, num_nodes: int) -> None: ...


@pytest.mark.parametrize(
    "old, error, new",
    [
        (lambda: Trainer(line(), []), ArgumentError, r"LocalTrainer\("),
        (lambda: LocalTrainer(line(), [], start_port=1), ArgumentError, "no ports"),
        (lambda: LocalTrainer(line(), [], device="cpu"), ArgumentError, r"fit\(\)"),
        (lambda: LocalTrainer(line(), [], devices=[0]), ArgumentError, r"fit\(\)"),
        (lambda: SimpleReduceStrategy(optim_spec=ADAMW), ArgumentError, "inner_optim="),
        (lambda: FedAvgStrategy(inner_optim_spec=ADAMW), ArgumentError, "inner_optim="),
        (lambda: CommunicateOptimizeStrategy(communication_modules=[], optim_spec=ADAMW), ArgumentError, "inner_optim"),
        (lambda: DeMoStrategy(optim_spec=ADAMW), ArgumentError, "lr= and weight_decay="),
        (lambda: DiLoCoStrategy(outer_optim_spec=OUTER), ArgumentError, "outer_optim="),
        (lambda: SPARTAStrategy(p=0.1), ArgumentError, "p_sparta="),
        (lambda: SPARTAStrategy(async_sparta_delay=1), ArgumentError, "omit it"),
        (lambda: DiLoCoStrategy(lr_scheduler="lambda_cosine"), ArgumentError, "'cosine'"),
        (lambda: DiLoCoStrategy(lr_scheduler_kwargs={"warmup_steps": 1}), ArgumentError, "warmup_steps="),
        (lambda: fit(wandb_project="x"), ArgumentError, r"WandbLogger\(project="),
        (lambda: fit(run_name="x"), ArgumentError, r"WandbLogger\(project="),
        (lambda: fit(correlation_interval=1), ArgumentError, "consensus_distance"),
        (lambda: fit(log_x_axis="examples"), ArgumentError, "examples"),
        (lambda: fit(kwargs={}), ArgumentError, "omit it"),
        (lambda: fit(OwnSpec()), StrategyError, r"super\(\).__init__\("),
        (lambda: fit(TorchSums()), ArgumentError, "op='sum'"),
        (old_module, StrategyError, r"communicate\(self, fleet, step\)"),
    ],
)  # fmt: skip
def test_an_old_name_answers_with_the_new_one(old: Callable[[], Any], error: type[Exception], new: str) -> None:
    with pytest.raises(error, match=new):
        old()


@pytest.mark.parametrize(
    "line, new",
    [
        ("import exogym.aux.utils", "device='auto'"),
        ("from exogym.strategy.strategy import SimpleReduceStrategy", "from exogym.strategy"),
        ("from exogym.strategy.communicate_optimize_strategy import CommunicationModule", "exogym.strategy$"),
        ("from exogym.strategy.sparta_diloco import SPARTADiLoCoStrategy", "exogym.strategy$"),
        ("import exogym.train_node", "exogym.trainer"),
    ],
)
def test_an_old_import_answers_with_the_new_one(line: str, new: str) -> None:
    with pytest.raises(ImportError, match=new):
        exec(line)


@pytest.mark.parametrize("module", ["diloco", "sparta", "federated_averaging", "demo", "optim", "communicate"])
def test_modules_that_the_page_calls_unchanged_are_there(module: str) -> None:
    exec(f"import exogym.strategy.{module}")
