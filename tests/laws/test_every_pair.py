"""Every pair of options on a small run: it trains, or a row of the table of combinations refuses it before training.

Where one of the two must not change the result, the pair has the bits of a run without it. `happens` says what else
happens, which is an error of ours.
"""

import functools
import inspect
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import wrapped
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import IterableDataset, TensorDataset
from wrapped import WRAPPERS

from exogym import LocalTrainer, NodeMesh
from exogym.balance import Balance
from exogym.core import combinations
from exogym.core.refusals import PAIRS, REFUSED, Refused
from exogym.core.training.checking import checked_options
from exogym.core.training.options import FitOptions
from exogym.core.training.written import placed
from exogym.data import IterableData, Partitioner
from exogym.errors import ArgumentError
from exogym.faults import Devices, Faults, Profile
from exogym.machines.remote.elastic.recovery import check as check_hosts
from exogym.strategy import (
    AsyncDiLoCoStrategy,
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    GossipStrategy,
    OptimSpec,
    PowerSGDStrategy,
    ScaffoldStrategy,
    SimpleReduceStrategy,
    SPARTAStrategy,
    Strategy,
    StreamingDiLoCoStrategy,
)
from exogym.strategy.privacy import DifferentialPrivacy
from exogym.testing import fingerprint

NODES, EACH, STEPS = 4, 16, 4
SGD = OptimSpec("sgd", lr=0.1)


class Uneven(Partitioner):
    """Node i has i + 1 parts of the examples."""

    def split(self, dataset: Any, num_nodes: int, seed: int) -> list[np.ndarray]:
        parts = np.arange(1, num_nodes + 1) / sum(range(1, num_nodes + 1))
        return np.split(np.arange(len(dataset)), (np.cumsum(parts)[:-1] * len(dataset)).astype(int))


class ByHand(Strategy):
    """DDP for one node."""

    def step(self) -> None:
        self.communicate_gradients()
        self.update_parameters()
        super().step()


class Stacked(ByHand):
    stacked = True


class Stop(Exception):
    pass


class Option(NamedTuple):
    """A value of an option.

    Attributes:
        kind: of two options of one kind a run has one.
        fit, strategy: what `fit` and the strategy's constructor are given.
        of: the strategy, if that is the option, or the one that the option is of.
        model: makes the model.
        changes: "nothing": no bit of the result; "rounding": bits that depend on how rows are computed together;
            "all": whatever else.
    """

    kind: str
    fit: Callable[[Path], dict[str, Any]] = lambda folder: {}
    strategy: Mapping[str, Any] = MappingProxyType({})
    of: Callable[..., Strategy] | None = None
    model: Callable[[], nn.Module] | None = None
    data: Any = None
    changes: str = "all"


def given(kind: str, changes: str = "all", **options: Any) -> Option:
    return Option(kind, lambda folder: options, changes=changes)


def averaged(kind: str, **options: Any) -> Option:
    return Option(kind, strategy=options)


def strategy(of: Callable[..., Strategy], **options: Any) -> Option:
    return Option("strategy", of=of, strategy=options)


def examples(seed: int, count: int = NODES * EACH) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=draw)
    return TensorDataset(x, x[:, :2] + 0.1 * torch.randn(count, 2, generator=draw))


def factory(rank: int, num_nodes: int, is_train: bool) -> TensorDataset:
    return examples(rank, EACH)


class Endless(IterableDataset[Any]):
    """Examples in order, so many times."""

    def __init__(self, of: TensorDataset, times: int = 1 << 60):
        self.of, self.times = of, times

    def __iter__(self) -> Iterator[Any]:
        return (self.of[k % len(self.of)] for k in range(self.times * len(self.of)))


def endless(rank: int, num_nodes: int, is_train: bool) -> IterableData:
    return IterableData(Endless(examples(rank, EACH), 1), length=EACH)


def linear(*further: nn.Module) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), *further, nn.Linear(4, 2))


SAMPLED = {"H": 2, "client_fraction": 0.25}
THERE = Devices({"kind": Profile(1.0, speed=1.0, online=1.0, session_s=3600)})  # all clients, always
OPTIONS: dict[str, Option] = {
    # strategies of each kind; without one it is DiLoCo
    "ddp": strategy(SimpleReduceStrategy),
    "fedavg": strategy(FedAvgStrategy, H=2),
    "sampled clients": strategy(FedAvgStrategy, **SAMPLED),
    "scaffold": strategy(ScaffoldStrategy, H=2),
    "sparta": strategy(SPARTAStrategy, p_sparta=0.5),
    "demo": strategy(DeMoStrategy),
    "powersgd": strategy(PowerSGDStrategy),
    "gossip": strategy(GossipStrategy, H=2),
    "streaming": strategy(StreamingDiLoCoStrategy, H=2, num_fragments=2),
    "nobody waits": strategy(AsyncDiLoCoStrategy, H=2),
    "by hand": strategy(ByHand),
    "stacked": strategy(Stacked),
    # options of strategies
    "median": averaged("robust", robust="median"),
    "norm cap": averaged("robust", robust="norm_cap"),
    "secure": averaged("secure_aggregation", secure_aggregation=True),
    "server": averaged("transport", transport="server"),
    "ring": averaged("transport", transport="ring"),
    "budget": averaged("tuner", tuner=1e6),
    "H of the round": averaged("H", H=lambda r: r + 1),
    "privacy": Option("strategy", strategy={"H": 2, "privacy": DifferentialPrivacy(1.0, 0.5)}, of=FedAvgStrategy),
    "local_steps": averaged("local_steps", local_steps=[1, 2, 2, 1]),
    "local_epochs": averaged("local_epochs", local_epochs=1),
    "personal": averaged("personal", personal="*.bias"),
    "delay": averaged("delay", delay=1),
    "eager": averaged("eager", eager=True),
    "islands": averaged("islands", island_size=4, island_H=1),
    "outer_lr_scheduler": averaged("outer_lr_scheduler", outer_lr_scheduler="cosine"),
    "max_norm": averaged("max_norm", max_norm=0.5),
    "lr_scheduler": averaged("lr_scheduler", lr_scheduler="cosine"),
    "weighting": Option("data", lambda folder: {"partitioner": Uneven()}, {"weighting": "examples"}),
    # options of fit
    "vmap": given("compute", "rounding", compute="vmap"),
    "two processes": given("processes", "nothing", processes=2),
    "shards": given("node", node=NodeMesh(shard=2)),
    "stages": given("node", node=NodeMesh(stages=2, microbatches=2)),
    "micro-batches": given("minibatch_size", minibatch_size=3),
    "accumulation": given("gradient_accumulation", gradient_accumulation=2),
    "memory": given("max_memory_usage", max_memory_usage=0.9),
    "bf16": given("precision", precision="bf16"),
    "fp16": given("precision", precision="fp16"),
    "native": given("reduction", "rounding", reduction="native"),
    "nodes": given("balance", "nothing", balance="nodes"),
    "batch": given("balance", balance=Balance("batch", speeds=[1, 2, 2, 1])),
    "steps": given("balance", balance=Balance("steps", speeds=[1, 2, 2, 1])),
    "absent": given("faults", faults=Faults(absent={1: [(2, 3)]})),
    "lost": given("faults", faults=Faults(lost={1: [2]})),
    "slow": given("faults", faults=Faults(slow={1: 0.5})),
    "bad nodes": given("faults", faults=Faults(bad_nodes=[1])),
    "trace": Option(
        "strategy", lambda folder: {"faults": Faults(trace=THERE), "step_seconds": 1}, SAMPLED, FedAvgStrategy
    ),
    "skip": given("on_nonfinite", "nothing", on_nonfinite="skip"),
    "ignore": given("on_nonfinite", "nothing", on_nonfinite="ignore"),
    "network": given("network", "nothing", network="1Gbps,1ms", step_seconds=0.1),
    "measured": given("network", "nothing", network="1Gbps,1ms"),
    "timeline": given("network", "nothing", network="1Gbps,1ms", step_seconds=0.1, timeline=True),
    "no final_sync": given("final_sync", final_sync=False),
    "no overlap": given("overlap", "nothing", overlap=False),
    "val_interval": given("val_interval", "nothing", val_interval=3),
    "val_size": given("val_size", "nothing", val_size=5),
    "logger": given("logger", "nothing", logger=lambda record: None, log_interval=2),
    "checkpoints": Option("save_dir", lambda at: {"save_dir": at / "a", "checkpoint_interval": 3}, changes="nothing"),
    "resume": Option("save_dir", lambda at: {"save_dir": at / "b", "resume": True}, changes="nothing"),
    "restarts": Option("save_dir", lambda at: {"save_dir": at / "c", "max_restarts": 1}, changes="nothing"),
    "files of clients": Option(
        "save_dir", lambda at: {"save_dir": at / "d", "client_state_memory": 0}, changes="nothing"
    ),
    "run folder": Option("run_dir", lambda at: {"run_dir": at / "e"}, changes="nothing"),
    "hangs": given("hang_s", "nothing", hang_s=None),
    "in order": given("shuffle", shuffle=False),
    "factory": Option("data", data=factory),
    "stream": Option("data", data=Endless(examples(0))),
    "streams": Option("data", data=endless),
    "loader": given("dataloader_kwargs", "nothing", dataloader_kwargs={"pin_memory": False}),
    "seed": given("seed", seed=7),
    # models
    "BatchNorm": Option("model", model=lambda: linear(nn.BatchNorm1d(4))),
    "dropout": Option("model", model=lambda: linear(nn.Dropout(0.2))),
    "lazy": Option("model", model=lambda: linear(nn.LazyLinear(4))),
}
Chosen = tuple[str, ...]


class Ran(NamedTuple):
    """What a run came to: its bits, or why it was refused."""

    bits: str = ""
    refused: str = ""


def made(chosen: Chosen) -> Strategy | None:
    """Return the strategy; None: it has no such argument, so there is no such pair."""
    options = [OPTIONS[name] for name in chosen]
    of = next((option.of for option in options if option.of), DiLoCoStrategy)
    arguments: dict[str, Any] = {} if any(option.of for option in options) else {"H": 2}
    for option in options:
        arguments |= option.strategy
    known = {*inspect.signature(of).parameters, *getattr(of, "averages", ())}
    known |= {*WRAPPERS} if issubclass(of, CommunicateOptimizeStrategy) else set()
    arguments |= {"inner_optim": SGD} if "inner_optim" in known else {"lr": 0.1}
    twice = {"robust", "secure_aggregation"} <= arguments.keys()  # a strategy has one way of averaging
    return wrapped.made(of, **arguments) if arguments.keys() <= known and not twice else None


def trained(chosen: Chosen, folder: Path) -> Ran:
    """Train; tell of an error of ours by its class, and of one of the table by its words."""
    steps: list[int] = []
    options = [OPTIONS[name] for name in chosen]
    model = next((option.model for option in options if option.model), linear)()
    data = next((option.data for option in options if option.data), None) or examples(0)
    arguments: dict[str, Any] = {"num_nodes": NODES, "max_steps": STEPS, "batch_size": 8, "device": "cpu"}
    for option in options:
        arguments |= option.fit(folder)

    def look(loop: Any) -> None:
        steps.append(loop.step)
        if arguments.get("resume") and loop.step == 3 and 3 not in steps[:-1]:
            raise Stop

    def fit(**more: Any) -> None:
        trainer.fit(strategy, **placed(arguments) | {"callbacks": [look]} | more)

    try:
        strategy = made(chosen)
        if strategy is None:
            return Ran(refused="no such argument")
        trainer = LocalTrainer(model, data, examples(1), loss_fn=mse_loss)
        if arguments.get("resume"):
            try:
                fit(resume=False, checkpoint_interval=2)
            except Stop:
                assert list(arguments["save_dir"].iterdir())
        fit()
    except Exception as error:
        row = any(row.reason in str(error) and row.instead in str(error) for row in REFUSED)
        told = "before training" if not steps else f"after step {steps[-1]}"
        return Ran(refused=f"{told}, {'by the table' if row else type(error).__name__}: {error}")
    return Ran(fingerprint(trainer.model))


@functools.cache
def alone(*chosen: str) -> Ran:
    with tempfile.TemporaryDirectory() as folder:
        return trained(chosen, Path(folder))


def happens(one: str, other: str, folder: Path) -> str:
    """Return what is wrong with a pair of options; nothing where it trains as it must, or is refused as it must."""
    ran = trained((one, other), folder)
    if ran.refused:
        good = ["before training, by the table", "no such argument"]
        if {OPTIONS[one].kind, OPTIONS[other].kind} == {"model", "compute"}:  # a model is no option
            good.append("before training, ModelError: compute='vmap' cannot train this model")
        return "" if ran.refused.startswith(tuple(good)) else ran.refused
    changes = {name: OPTIONS[name].changes for name in (one, other)}
    for name, without in ((one, other), (other, one)):
        is_same = changes[name] == "nothing" and changes[without] != "rounding"
        if is_same and (bits := alone(without).bits) and bits != ran.bits:
            return f"{name} changes the result"
    return ""


def partners(one: str) -> Iterator[str]:
    """Yield the options after `one` that a run can have beside it."""
    names = list(OPTIONS)
    for other in names[names.index(one) + 1 :]:
        if OPTIONS[other].kind != OPTIONS[one].kind:
            yield other


def covering() -> list[tuple[str, str]]:
    """Return one pair for each two kinds, such that the options of a kind take turns."""
    by_kind: dict[str, list[str]] = {}
    for name, option in OPTIONS.items():
        by_kind.setdefault(option.kind, []).append(name)
    kinds = list(by_kind.values())
    return [(one[j % len(one)], other[i % len(other)]) for (i, one), (j, other) in itertools.combinations(
        enumerate(kinds), 2
    )]  # fmt: skip


def look_at(pairs: list[tuple[str, str]], folder: Path) -> dict[str, str]:
    found = {}
    for number, (one, other) in enumerate(pairs):
        (own := folder / str(number)).mkdir()
        if wrong := happens(one, other, own):
            found[f"{one} with {other}"] = wrong
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_trains_alone(name: str) -> None:
    needs = {"files of clients", "local_epochs", "local_steps", "personal"}  # of FedAvg and its kind
    ran = alone(name) if name not in needs else alone("fedavg", name)
    assert ran.bits, ran.refused
    if OPTIONS[name].changes == "nothing" and name not in needs:
        assert ran.bits == alone().bits


@pytest.mark.parametrize("part", range(8))
def test_a_pair_of_each_two_kinds_trains_or_is_refused_by_the_table(part: int, tmp_path: Path) -> None:
    assert not look_at(covering()[part::8], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("one", OPTIONS)
def test_every_pair_trains_or_is_refused_by_the_table(one: str, tmp_path: Path) -> None:
    assert not look_at([(one, other) for other in partners(one)], tmp_path)


def without(*pair: str) -> tuple[tuple[str, str, Refused], ...]:
    """Return the table without a pair's row."""
    row = next(row for one, other, row in PAIRS if {one, other} == set(pair))
    return tuple(entry for entry in PAIRS if entry[2] is not row)


def test_a_pair_that_is_missing_in_the_table_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = {"stacked", "faults"}
    assert not look_at([("stacked", "absent")], tmp_path)
    monkeypatch.setattr(combinations, "PAIRS", without(*pair))
    (tmp_path / "again").mkdir()
    assert look_at([("stacked", "absent")], tmp_path / "again")


def test_an_option_that_changes_the_result_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIONS, "seed", OPTIONS["seed"]._replace(changes="nothing"))
    assert look_at([("ddp", "seed")], tmp_path) == {"ddp with seed": "seed changes the result"}


def test_an_error_of_another_kind_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = {'compute="vmap"', "minibatch_size"}
    monkeypatch.setattr(combinations, "PAIRS", without(*pair))
    (found,) = look_at([("vmap", "micro-batches")], tmp_path).values()
    assert found.startswith("before training, ModelError: ")


def test_what_does_not_go_with_hosts_that_come_and_go(tmp_path: Path) -> None:
    """Of the options that train alone, those of these kinds are refused with `min_hosts`, and no others."""
    refused = set()
    for name in OPTIONS:
        if (strategy := made((name,))) is None or OPTIONS[name].model or OPTIONS[name].data:
            continue
        given = placed(OPTIONS[name].fit(tmp_path))
        options = checked_options(FitOptions(strategy, num_nodes=NODES, batch_size=8, **given))
        try:
            check_hosts(options)
        except ArgumentError as error:
            assert any(row.reason in str(error) and "min_hosts" in row.one for row in REFUSED)
            refused.add(name)
    kinds = {"node", "faults", "balance", "network", "max_memory_usage"}
    wanted = {name for name, option in OPTIONS.items() if option.kind in kinds}
    assert refused == wanted | {"trace", "by hand", "stacked", "nobody waits"}
