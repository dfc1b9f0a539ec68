"""State that a model carries from batch to batch, such as a hidden state: `own_buffers` stay with each node."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import told_in_groups
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import exogym
from exogym import LocalTrainer
from exogym.callbacks import EvaluateNodes
from exogym.errors import ModelError
from exogym.faults import Faults
from exogym.strategy import (
    AsyncDiLoCoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    GossipStrategy,
    NoLoCoStrategy,
    SimpleReduceStrategy,
    Strategy,
    StreamingDiLoCoStrategy,
)

NODES, STEPS, BATCH = 4, 12, 2
VALUES = torch.arange(1.0, 1 + 2 * NODES * BATCH * STEPS).reshape(-1, 1)
DATA = torch.utils.data.TensorDataset(VALUES)


class Summing(nn.Module):
    """Add the batches up in a buffer, which in evaluation is the loss."""

    own_buffers: Any = ("seen",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, batch: Any) -> Tensor:
        if not self.training:
            return self.seen.sum()
        self.seen = self.seen + batch[0].sum()
        return ((self.weight - 1) ** 2).sum()


class OfPrograms(Strategy):
    def step(self) -> None:
        self.communicate_gradients()
        self.update_parameters()
        super().step()


def sums(strategy: Strategy, model: nn.Module | None = None, **options: Any) -> tuple[list[float], Any]:
    """Train; return each node's sum at the last step, and the trainer."""
    trainer = LocalTrainer(Summing() if model is None else model, DATA, DATA)
    given = {"num_nodes": NODES, "max_steps": STEPS, "batch_size": BATCH, "shuffle": False, "val_interval": STEPS}
    trainer.fit(strategy, callbacks=[EvaluateNodes()], device="cpu", **given | options)
    found = [
        [row["val_loss"] for row in trainer.history.rows(node=i) if row["val_loss"] is not None] for i in range(NODES)
    ]
    return [values[-1] for values in found], trainer


def expected(node: int, steps: int = STEPS) -> float:
    return float(VALUES[node::NODES][: steps * BATCH].sum())


STRATEGIES = {
    "ddp": lambda: SimpleReduceStrategy("sgd", lr=0.1),
    "diloco": lambda: DiLoCoStrategy("sgd", H=3, lr=0.1),
    "streaming": lambda: StreamingDiLoCoStrategy("sgd", H=4, num_fragments=1, fragment_sync_delay=1, lr=0.1),
    "gossip": lambda: GossipStrategy("sgd", lr=0.1),
    "noloco": lambda: NoLoCoStrategy("sgd", H=3, lr=0.1),
    "fedavg": lambda: FedAvgStrategy("sgd", H=3, lr=0.1),
    "async": lambda: AsyncDiLoCoStrategy("sgd", H=3, lr=0.1),
    "one node": lambda: OfPrograms("sgd", lr=0.1),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_node_carries_its_own_state(name: str) -> None:
    found, trainer = sums(STRATEGIES[name]())
    assert found == [expected(i) for i in range(NODES)]
    assert trainer.history.last.get("buffer_bytes", 0.0) == 0.0
    assert float(trainer.model.seen) == 0.0  # the averaged model has it as it was before training


def test_without_the_list_nodes_share_it() -> None:
    """The control: as torch's DDP, which sends node 0's buffers to all nodes."""

    class Shared(Summing):
        own_buffers = ()

    assert sums(STRATEGIES["ddp"](), Shared())[0] != [expected(i) for i in range(NODES)]


def test_it_stays_in_several_processes() -> None:
    assert sums(STRATEGIES["diloco"](), processes=2)[0] == [expected(i) for i in range(NODES)]


def test_a_resumed_run_carries_it_on(tmp_path: Path) -> None:
    kept = {"save_dir": tmp_path, "checkpoint_interval": 4}
    sums(STRATEGIES["diloco"](), max_steps=STEPS // 2, val_interval=2, **kept)
    found, _ = sums(STRATEGIES["diloco"](), max_steps=STEPS, resume=True, **kept)
    assert found == [expected(i) for i in range(NODES)]


@pytest.mark.parametrize("forget", [False, True])
def test_a_node_that_was_away_keeps_its_own(forget: bool) -> None:
    found, _ = sums(STRATEGIES["diloco"](), faults=Faults({1: [(3, 6)]}, forget=forget))
    later = expected(1) - expected(1, 5) if forget else expected(1, STEPS - 3)  # a restarted node begins again
    assert found == [expected(0), later, expected(2), expected(3)]


@pytest.mark.parametrize("name", ["diloco", "one node", "async"])
def test_a_node_whose_numbers_are_not_finite_begins_again(name: str) -> None:
    class Spoilt(Summing):
        def forward(self, batch: Any) -> Tensor:
            loss = super().forward(batch)
            if self.training and 19.0 in batch[0]:  # node 2's third batch
                self.seen = self.seen * float("nan")
            return loss * (1 + 0 * self.seen.sum())

    found, _ = sums(STRATEGIES[name](), Spoilt(), on_nonfinite="skip")
    assert [*found[:2], found[3]] == [expected(i) for i in (0, 1, 3)] and found[2] < expected(2)


class Returning(Summing):
    """Assert at each step of 64 clients that the sum is the sum of the client's own earlier batches."""

    def __init__(self, back: set[int]) -> None:
        super().__init__()
        self.back = back

    def forward(self, batch: Any) -> Tensor:
        place, node = divmod(int(batch[0][0, 0]) - 1, 64)
        if self.training:
            assert self.seen.tolist() == [sum(1 + node + 64 * k for k in range(place))]
            self.back |= {node} if place > 4 else set()  # it was sampled before
        return super().forward(batch)


@pytest.mark.parametrize("fraction", [0.05, 0.6], ids=["fewer rows than clients", "a row for each"])
def test_a_sampled_client_finds_its_own_again(fraction: float) -> None:
    back: set[int] = set()
    data = torch.utils.data.TensorDataset(torch.arange(1.0, 1 + 64 * 200).reshape(-1, 1))
    strategy = FedAvgStrategy("sgd", H=2, lr=0.1, client_fraction=fraction)
    model = Returning(back)
    LocalTrainer(model, data).fit(strategy, num_nodes=64, max_steps=80, batch_size=2, shuffle=False, device="cpu")
    assert len(back) > 10


class Recurrent(nn.Module):
    """Truncated back-propagation: the hidden state of each batch begins as the last batch's."""

    own_buffers = ("hidden",)

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(1, 3), nn.Linear(3, 1)
        self.register_buffer("hidden", torch.zeros(BATCH, 3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.cell(x, self.hidden)
        self.hidden = hidden.detach()
        return self.out(hidden)


def test_truncated_backpropagation_is_local_sgd_by_hand() -> None:
    x = torch.sin(VALUES)
    data = torch.utils.data.TensorDataset(x, x.roll(-1, 0))
    torch.manual_seed(0)
    model = Recurrent()
    nodes = [copy.deepcopy(model) for _ in range(2)]
    strategy = DiLoCoStrategy(torch.optim.SGD, H=3, lr=0.1, outer_lr=1.0, outer_momentum=0.0)
    trained = LocalTrainer(model, data, loss_fn=mse_loss).fit(
        strategy, num_nodes=2, max_steps=STEPS, batch_size=BATCH, shuffle=False, device="cpu"
    )
    for step in range(STEPS):
        for i, node in enumerate(nodes):
            mine = [t[i::2][step * BATCH : (step + 1) * BATCH] for t in data.tensors]
            grads = torch.autograd.grad(mse_loss(node(mine[0]), mine[1]), list(node.parameters()))
            with torch.no_grad():
                for p, g in zip(node.parameters(), grads, strict=True):
                    p -= 0.1 * g
        if step % 3 == 2:
            with torch.no_grad():
                for pair in zip(*(node.parameters() for node in nodes), strict=True):
                    mean = (pair[0] + pair[1]) / 2
                    for p in pair:
                        p.copy_(mean)
    for name, p in trained.named_parameters():
        torch.testing.assert_close(p, dict(nodes[0].named_parameters())[name])
    assert not torch.allclose(nodes[0].hidden, nodes[1].hidden)


def test_an_attached_node_keeps_and_saves_its_own() -> None:
    def steps(nodes: Any, model: nn.Module, count: int) -> None:
        for batch in itertools.islice(nodes.loader(DATA, BATCH, shuffle=False), count):
            model(batch).backward()
            nodes.step()

    model = Summing()
    nodes = exogym.attach(model, None, STRATEGIES["diloco"]())
    steps(nodes, model, 5)
    state = copy.deepcopy(nodes.state_dict())
    again = Summing()
    resumed = exogym.attach(again, None, STRATEGIES["diloco"]())
    resumed.load_state_dict(state)
    steps(resumed, again, 3)
    assert float(again.seen) == float(VALUES[: 8 * BATCH].sum())
    assert float(resumed.model_of(None).seen) == 0.0


@pytest.mark.parametrize("listed", ["seen", ("weight",), (3,), None])
def test_a_list_that_names_no_buffers_is_refused(listed: Any) -> None:
    model = Summing()
    model.own_buffers = listed
    with pytest.raises(ModelError, match=r"own_buffers of Summing must be a tuple of names .* \['seen'\]"):
        sums(STRATEGIES["diloco"](), model)


def test_a_state_of_another_shape_is_refused_with_a_remedy() -> None:
    x = torch.arange(14.0).reshape(-1, 1)
    with pytest.raises(ModelError, match=r"changed the shape of the buffer 'hidden' from \(2, 3\) to \(1, 3\)"):
        LocalTrainer(Resized(), torch.utils.data.TensorDataset(x, x), loss_fn=mse_loss).fit(
            DiLoCoStrategy("sgd", H=4, lr=0.1), num_nodes=2, max_steps=8, batch_size=BATCH, shuffle=False, device="cpu"
        )


class Resized(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.hidden[: len(x)]
        return super().forward(x)


def test_processes_of_one_node_would_share_it(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        model = Summing()
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("node", "shard"))["shard"]
        fully_shard(model, mesh=mesh)
        with pytest.raises(ModelError) as caught:
            exogym.attach(model, None, STRATEGIES["diloco"](), node=mesh)
        return str(caught.value)

    for said in told_in_groups(2, tmp_path, body):
        assert said.startswith("own_buffers (seen) with nodes of several processes")
