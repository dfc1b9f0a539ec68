"""Personal parameters: `personal=`, FedPer and FedBN beside plain loops, what they are equal to, bytes, refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from problems import (
    BATCH,
    FEATURES,
    Regressor,
    adamw,
    examples,
    fleet_of,
    loss_of,
    run_of,
    same,
    sgd,
    shards,
    train,
    unlike,
    vector,
)
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from wrapped import made

from exogym import LocalTrainer
from exogym.callbacks import EvaluateClients, Every
from exogym.errors import ArgumentError
from exogym.strategy import (
    DittoStrategy,
    FedAvgStrategy,
    FedBNStrategy,
    FedDynStrategy,
    FedNovaStrategy,
    FedOptStrategy,
    FedPerStrategy,
    FedProxStrategy,
    FedRepStrategy,
    OptimSpec,
    ScaffoldStrategy,
)

H, LR = 4, 0.05
SGD, ADAMW = OptimSpec("sgd", lr=LR), OptimSpec("adamw", lr=0.02)
P = sum(p.numel() for p in Regressor().parameters())
HEAD = sum(p.numel() for p in Regressor().second.parameters())
UNEQUAL = [examples(BATCH * (2 + i), i, 0.3 * i) for i in range(4)]


class Normed(nn.Module):
    """Regression with batch normalization in the middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.second = nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))


def clients_of(strategy: Any, count: int = 6, which: int = 0) -> list[list[int]]:
    average = copy.deepcopy(strategy).communication_modules[which]
    average.start(fleet_of(torch.zeros(4, P)), run_of(4))
    return [average.clients(r) for r in range(count)]


def by_hand(
    model: nn.Module, data: list[TensorDataset], stays: Callable[[str], bool], steps: int, clients: list[list[int]],
    build: Callable[[Any], torch.optim.Optimizer], weighs: bool = True, mu: float = 0.0,
) -> list[dict[str, Tensor]]:  # fmt: skip
    """The papers' rounds over state dicts: what does not stay is averaged; return each client's model."""
    models = [copy.deepcopy(model) for _ in data]
    optimizers = [build(m.parameters()) for m in models]
    server = {name: x.clone() for name, x in model.state_dict().items()}
    taken = [0] * len(data)
    for step in range(1, steps + 1):
        chosen = clients[(step - 1) // H]
        for i in chosen:
            x, y = data[i].tensors
            at = taken[i] % (len(x) // BATCH) * BATCH
            taken[i] += 1
            optimizers[i].zero_grad()
            loss_of(models[i], x[at : at + BATCH], y[at : at + BATCH]).backward()
            for name, p in models[i].named_parameters():
                if mu and not stays(name):
                    p.grad += mu * (p.detach() - server[name])
            optimizers[i].step()
        if step % H == 0:
            shares = torch.tensor([float(len(data[i])) if weighs else 1.0 for i in chosen]).double()
            for name, x in server.items():
                if not stays(name) and x.is_floating_point():
                    stack = torch.stack([models[i].state_dict()[name] for i in chosen])
                    server[name] = torch.tensordot(shares / shares.sum(), stack, 1)
            for i in clients[step // H]:
                models[i].load_state_dict(models[i].state_dict() | {n: x for n, x in server.items() if not stays(n)})
    return [m.state_dict() for m in models]


def as_row(found: dict[str, Tensor], model: nn.Module) -> Tensor:
    return torch.cat([found[name].flatten() for name, _ in model.named_parameters()])


class Mixed(nn.Module):
    """Layers in fp64 around a norm in fp32, so that the order of the blocks is not that of the layers."""

    def __init__(self, inner: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm = nn.Linear(FEATURES, 5).double(), nn.LayerNorm(5).to(inner)
        self.second = nn.Linear(5, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(self.first(x).to(self.norm.weight.dtype))
        return self.second(torch.tanh(normed).double())


@pytest.mark.parametrize("inner", [torch.float32, torch.float64])
@pytest.mark.parametrize("strategy", [FedPerStrategy, FedRepStrategy, FedAvgStrategy])
def test_last_layers_are_last_in_the_module_whatever_the_dtypes(strategy: Any, inner: torch.dtype) -> None:
    for count, own in ((1, ["second"]), (2, ["norm", "second"])):
        model, apart = Mixed(inner), set()

        def look(loop: Any, apart: set[str] = apart) -> None:
            for rows, block in zip(loop.rows(), loop.fleet.blocks, strict=True):
                slots = [s for s in block.layout if not torch.equal(s.of(rows[:1]), s.of(rows[1:2]))]
                apart.update(slot.name.partition(".")[0] for slot in slots)

        trainer = LocalTrainer(model, lambda rank, n, is_train: UNEQUAL[rank], loss_fn=nn.functional.mse_loss)
        trainer.fit(
            made(strategy, SGD, personal=count, H=H), num_nodes=2, max_steps=2 * H, batch_size=BATCH, progress=False,
            callbacks=[Every(H, look, may_end=False)],
        )  # fmt: skip
        assert sorted(apart) == own


# Beside plain loops


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("inner", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_fedper_is_a_plain_loop(inner: OptimSpec, fraction: float) -> None:
    strategy = FedPerStrategy(inner, 1, H, client_fraction=fraction)
    clients = clients_of(strategy)
    build = sgd if inner is SGD else adamw
    wanted = by_hand(Regressor(), UNEQUAL, lambda name: "second" in name, 14, clients, build)
    ours = train(strategy, UNEQUAL, steps=14)
    for i in clients[3]:
        same(ours.rows[i], as_row(wanted[i], Regressor()))
    other = train(FedPerStrategy(inner, "first.*", H, client_fraction=fraction), UNEQUAL, steps=14)
    unlike(other.rows[clients[3]], ours.rows[clients[3]])


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_fedbn_is_a_plain_loop_with_its_own_statistics(fraction: float) -> None:
    strategy = FedBNStrategy(SGD, H, client_fraction=fraction)
    clients = clients_of(strategy)
    wanted = by_hand(Normed(), UNEQUAL, lambda name: "norm" in name, 14, clients, sgd, weighs=False)
    ours = train(strategy, UNEQUAL, steps=14, model=Normed())
    for i in clients[3]:
        same(ours.rows[i], as_row(wanted[i], Normed()))
        for name in ("norm.running_mean", "norm.running_var"):
            same(ours.buffers[name][i], wanted[i][name])
        assert ours.buffers["norm.num_batches_tracked"][i] == wanted[i]["norm.num_batches_tracked"]
    plain = train(FedAvgStrategy(SGD, H=H, client_fraction=fraction, weighting="uniform"), UNEQUAL, 4, 14, Normed())
    unlike(plain.rows[clients[3]], ours.rows[clients[3]])


def test_fedproxs_term_leaves_personal_parameters_alone() -> None:
    strategy = made(FedProxStrategy, SGD, 0.5, H, personal="second.*")
    wanted = by_hand(Regressor(), UNEQUAL, lambda name: "second" in name, 14, [[0, 1, 2, 3]] * 5, sgd, mu=0.5)
    ours = train(strategy, UNEQUAL, steps=14).rows
    same(ours, torch.stack([as_row(one, Regressor()) for one in wanted]))
    unlike(train(made(FedProxStrategy, SGD, 0.0, H, personal="second.*"), UNEQUAL, steps=14).rows, ours)


# What they are equal to


def test_fedper_of_nothing_is_fedavg() -> None:
    for fraction in (1.0, 0.5):
        fedavg = train(FedAvgStrategy(ADAMW, H=H, client_fraction=fraction), UNEQUAL)
        ours = train(FedPerStrategy(ADAMW, None, H, client_fraction=fraction), UNEQUAL)
        assert torch.equal(ours.rows, fedavg.rows) and ours.tx.tolist() == fedavg.tx.tolist()
        unlike(train(FedPerStrategy(ADAMW, 1, H, client_fraction=fraction), UNEQUAL).rows, fedavg.rows)


def test_without_batch_normalization_fedbn_is_fedavg(capsys: pytest.CaptureFixture[str]) -> None:
    fedavg = train(FedAvgStrategy(ADAMW, H=H, weighting="uniform"), UNEQUAL).rows
    assert torch.equal(train(FedBNStrategy(ADAMW, H), UNEQUAL).rows, fedavg)
    assert "the model has no batch normalization, so this run is FedAvg" in "".join(capsys.readouterr())
    normed = train(FedAvgStrategy(ADAMW, H=H, weighting="uniform"), UNEQUAL, model=Normed()).rows
    unlike(train(FedBNStrategy(ADAMW, H), UNEQUAL, model=Normed()).rows, normed)


def test_of_equal_data_all_is_shared_anyway() -> None:
    equal = shards(3, same=True)
    for make, model in ((lambda: FedPerStrategy(SGD, 1, H), Regressor()), (lambda: FedBNStrategy(SGD, H), Normed())):
        same(train(make(), equal, 3, model=model).rows, train(FedAvgStrategy(SGD, H=H), equal, 3, model=model).rows)
        unlike(
            train(make(), num_nodes=3, model=model).rows, train(FedAvgStrategy(SGD, H=H), num_nodes=3, model=model).rows
        )


def test_the_servers_plain_step_leaves_personal_parameters_alone_too() -> None:
    for fraction in (1.0, 0.5):
        given: dict[str, Any] = {"personal": "second.*", "client_fraction": fraction}
        fedavg = train(made(FedAvgStrategy, SGD, H=H, **given), UNEQUAL)
        fedopt = train(made(FedOptStrategy, SGD, "momentum", 1.0, H, beta1=0.0, **given), UNEQUAL)
        same(fedopt.rows, fedavg.rows)
        assert fedopt.tx.tolist() == fedavg.tx.tolist()
        unlike(train(made(FedOptStrategy, SGD, "momentum", 0.5, H, beta1=0.0, **given), UNEQUAL).rows, fedavg.rows)
        first = vector(Regressor())[-HEAD:]
        assert torch.equal(fedopt.model[-HEAD:], first)  # a server knows no personal parameters
        if fraction < 1:
            assert torch.equal(fedavg.model[-HEAD:], first)


# Patterns


@pytest.mark.parametrize(
    ("personal", "sent"),
    [
        (1, P - HEAD),
        ("second.*", P - HEAD),
        ("*.bias", P - 8),
        (["first.bias", "second.bias"], P - 8),
        ("*d.weight", P - 7),
    ],
)
def test_what_stays_is_not_sent(personal: Any, sent: int) -> None:
    for fraction, times in ((1.0, 3), (0.25, None)):
        result = train(made(FedAvgStrategy, SGD, H=H, personal=personal, client_fraction=fraction))
        turns = times or sum(0 in clients for clients in clients_of(FedAvgStrategy(H=H, client_fraction=fraction), 3))
        assert result.payload[0] == pytest.approx(turns * sent * 8)


def test_a_buffer_alone_can_stay() -> None:
    stays = train(made(FedAvgStrategy, SGD, H=H, personal="norm.running_*"), model=Normed())
    shared = train(FedAvgStrategy(SGD, H=H), model=Normed())
    assert torch.equal(stays.rows, shared.rows)  # training does not read them
    unlike(stays.buffers["norm.running_mean"][:1], stays.buffers["norm.running_mean"][1:2])
    assert torch.equal(shared.buffers["norm.running_mean"][0], shared.buffers["norm.running_mean"][1])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: train(made(FedAvgStrategy, personal="haed.*")),
            "matches no parameter and no buffer: the model has first.weight",
        ),
        (lambda: train(made(FedAvgStrategy, personal=["*"])), "leaves no parameter to average"),
        (lambda: train(FedPerStrategy(personal=2)), "personal=2 leaves no parameter to average"),
        (lambda: made(FedAvgStrategy, personal=0), "personal=0"),
        (lambda: made(FedAvgStrategy, personal=[]), "must be a pattern of names such as 'head"),
        (lambda: made(FedAvgStrategy, personal=1.5), "or the number of the model's last layers"),
        (lambda: made(FedAvgStrategy, personal="second.*", robust="norm_cap"), "use another rule, such as 'median'"),
        (lambda: made(FedPerStrategy, privacy=None), "never sent: use fedavg"),
        (lambda: made(DittoStrategy, personal="second.*"), "each client has a whole personal model"),
        (lambda: DittoStrategy(lam=-1), "lam=-1 must be a number of at least 0"),
        (lambda: DittoStrategy(H=1), "personal_steps=1 leaves none of the H=1 steps"),
        (lambda: DittoStrategy(local_epochs=1), "leave it out, and pass H"),
        (lambda: made(DittoStrategy, tuner=1e6), "was not tested with a wrapper"),
        (lambda: made(DittoStrategy, robust="norm_cap"), "was not tested with a wrapper"),
        (lambda: FedRepStrategy(personal=None), "leaves no head to train: name the head, or use fedavg"),
        (lambda: FedRepStrategy(H=3, body_steps=4), "body_steps=4 exceeds the H=3 steps"),
        (lambda: FedRepStrategy(H=3, body_steps=0), "body_steps=0"),
        (lambda: FedRepStrategy(H=lambda r: 4), "rounds of different lengths"),
        (lambda: FedRepStrategy(local_steps=[1, 2]), "leave it out, and pass H"),
        (lambda: made(FedRepStrategy, robust="norm_cap"), "was not tested with a wrapper"),
        (lambda: made(ScaffoldStrategy, personal="second.*"), "a client's control variate covers all parameters"),
        (lambda: made(FedNovaStrategy, personal="second.*"), "the change of all parameters is scaled"),
        (lambda: made(FedDynStrategy, personal="second.*"), "a_i and the server's h cover all parameters"),
    ],
)
def test_errors(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make()


# Ditto


def ditto_by_hand(
    data: list[TensorDataset], lam: float, s: int, steps: int, clients: list[list[int]], build: Callable[[Any], Any]
) -> tuple[Tensor, Tensor]:
    """Algorithm 1 over vectors, with v_i's steps first in a round; return theta and the (N, P) models v_i."""
    theta, n = vector(Regressor()), len(data)
    v, taken = [theta.clone() for _ in data], [0] * n
    for begin in range(0, steps, H):
        sent = {}
        for i in clients[begin // H]:
            for start, count, is_personal in ((v[i], s, True), (theta, H - s, False)):
                model = Regressor()
                nn.utils.vector_to_parameters(start.clone(), model.parameters())
                optimizer = build(model.parameters())
                for _ in range(min(count, max(0, steps - begin - (0 if is_personal else s)))):
                    x, y = data[i].tensors
                    at = taken[i] % (len(x) // BATCH) * BATCH
                    taken[i] += 1
                    optimizer.zero_grad()
                    loss_of(model, x[at : at + BATCH], y[at : at + BATCH]).backward()
                    if is_personal:
                        away = Regressor()
                        nn.utils.vector_to_parameters(vector(model) - theta, away.parameters())
                        for p, pull in zip(model.parameters(), away.parameters(), strict=True):
                            p.grad += lam * pull.detach()
                    optimizer.step()
                if is_personal:
                    v[i] = vector(model)
                else:
                    sent[i] = vector(model)
        weights = {i: len(data[i]) / sum(len(data[j]) for j in sent) for i in sent}
        theta = sum(weights[i] * x for i, x in sent.items())
    return theta, torch.stack(v)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(("inner", "s"), [(SGD, 2), (ADAMW, 1)], ids=["sgd", "adamw"])
def test_ditto_is_the_papers_loop(inner: OptimSpec, s: int, fraction: float) -> None:
    strategy = DittoStrategy(inner, 0.7, H, personal_steps=s, client_fraction=fraction)
    build = sgd if inner is SGD else adamw
    theta, v = ditto_by_hand(UNEQUAL, 0.7, s, 12, clients_of(strategy, 4, 1), build)
    ours = train(strategy, UNEQUAL)
    same(ours.model, theta)
    same(ours.rows, v)
    other = train(DittoStrategy(inner, 0.2, H, personal_steps=s, client_fraction=fraction), UNEQUAL)
    unlike(other.rows, v)


def test_ditto_without_its_term_trains_clients_alone() -> None:
    ours = train(DittoStrategy(SGD, 0.0, H, personal_steps=3), UNEQUAL)
    for i in range(4):
        alone = Regressor()
        optimizer = sgd(alone.parameters())
        x, y = UNEQUAL[i].tensors
        for step in (k for k in range(12) if k % H < 3):  # the other steps' batches are theta's
            at = step % (len(x) // BATCH) * BATCH
            optimizer.zero_grad()
            loss_of(alone, x[at : at + BATCH], y[at : at + BATCH]).backward()
            optimizer.step()
        same(ours.rows[i], vector(alone))
    unlike(train(DittoStrategy(SGD, 0.7, H, personal_steps=3), UNEQUAL).rows, ours.rows)


def test_dittos_theta_does_not_know_lambda() -> None:
    some, more = (train(DittoStrategy(SGD, lam, H), UNEQUAL) for lam in (0.1, 3.0))
    assert torch.equal(some.model, more.model) and some.tx.tolist() == more.tx.tolist()
    unlike(some.rows, more.rows)
    assert (more.rows - more.model).norm() < (some.rows - some.model).norm()  # it holds v_i nearer


def test_ditto_at_its_end_keeps_models_apart() -> None:
    """theta is the same whatever lambda is, so no v_i has come into it."""
    for steps in (12, 13, 15):
        same(*(train(DittoStrategy(SGD, lam, H), UNEQUAL, steps=steps, final_sync=True).model for lam in (0.0, 2.0)))


# FedRep


def fedrep_by_hand(
    data: list[TensorDataset], s: int, steps: int, clients: list[list[int]], build: Callable[[Any], Any]
) -> list[Tensor]:
    """The authors' rounds: a client's net is the shared body and its own head, and each part is frozen in turn."""
    server, heads, taken = Regressor(), [Regressor().second for _ in data], [0] * len(data)
    rows = [vector(server) for _ in data]
    for begin in range(0, steps, H):
        nets = {}
        for i in clients[begin // H]:
            net = nets[i] = copy.deepcopy(server)
            net.second.load_state_dict(heads[i].state_dict())
            optimizer = build(net.parameters())
            for step in range(begin, min(begin + H, steps)):
                is_body = step - begin >= H - s
                for name, p in net.named_parameters():
                    p.requires_grad = name.startswith("first") == is_body
                x, y = data[i].tensors
                at = taken[i] % (len(x) // BATCH) * BATCH
                taken[i] += 1
                optimizer.zero_grad()
                loss_of(net, x[at : at + BATCH], y[at : at + BATCH]).backward()
                optimizer.step()
            heads[i] = net.second
        total = sum(len(data[i]) for i in nets)
        if begin + H <= steps:
            with torch.no_grad():
                for name, p in server.first.named_parameters():
                    p.copy_(sum(len(data[i]) / total * net.first.get_parameter(name) for i, net in nets.items()))
        for i in nets if begin + H > steps else clients[begin // H + 1]:
            body = server if begin + H <= steps else nets[i]
            rows[i] = torch.cat([vector(body.first), vector(heads[i])])
    return rows


def sgd_with_momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.5, weight_decay=0.01, foreach=False)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("steps", [12, 14, 15])
def test_fedrep_is_the_authors_loop(fraction: float, steps: int) -> None:
    inner = OptimSpec("sgd", lr=LR, momentum=0.5, weight_decay=0.01)
    for s in (1, 3):
        given: dict[str, Any] = {"H": H, "body_steps": s, "client_fraction": fraction, "keep_inner_state": False}
        strategy = FedRepStrategy(inner, 1, **given)
        clients = clients_of(strategy)
        wanted = fedrep_by_hand(UNEQUAL, s, steps, clients, sgd_with_momentum)
        ours = train(strategy, UNEQUAL, steps=steps)
        for i in clients[steps // H]:
            same(ours.rows[i], wanted[i])
            unlike(train(FedRepStrategy(inner, 1, **given | {"body_steps": 2}), UNEQUAL).rows[i], wanted[i])


def test_fedrep_without_head_steps_is_fedavg_of_a_frozen_head() -> None:
    frozen = Regressor()
    frozen.second.requires_grad_(False)
    for inner in (SGD, ADAMW):
        fedavg = train(FedAvgStrategy(inner, H=H), UNEQUAL, model=frozen)
        ours = train(FedRepStrategy(inner, 1, H, body_steps=H), UNEQUAL)
        assert torch.equal(ours.rows[:, :-HEAD], fedavg.rows) and ours.tx.tolist() == fedavg.tx.tolist()
        assert torch.equal(ours.rows[:, -HEAD:], vector(Regressor())[-HEAD:].expand(4, HEAD))
        unlike(train(FedRepStrategy(inner, 1, H, body_steps=H - 1), UNEQUAL).rows[:, :-HEAD], fedavg.rows)


# Evaluation of each client


def test_clients_are_evaluated_on_their_own_data() -> None:
    data = [examples(BATCH * 3, i, 0.3 * i) for i in range(12)]
    own = [examples(8, 100 + i, 0.3 * i) for i in range(12)]

    def run(**more: Any) -> Any:
        trainer = LocalTrainer(
            Regressor(), lambda i, n, is_train: data[i], lambda i, n, is_train: own[i], loss_fn=nn.functional.mse_loss
        )
        trainer.fit(
            FedPerStrategy(SGD, 1, H), num_nodes=12, max_steps=2 * H, batch_size=BATCH, val_interval=H,
            callbacks=[EvaluateClients(), look], **more,
        )  # fmt: skip
        return trainer.history

    rows: list[Tensor] = []

    def look(loop: Any) -> None:
        rows.append(loop.rows()[0].clone())

    history = run()
    losses = []
    for i, row in enumerate(rows[-1]):
        model = Regressor()
        nn.utils.vector_to_parameters(row, model.parameters())
        losses.append(float(loss_of(model, *own[i].tensors).detach()))
    last = history.last
    assert history.rows(node=5)[-1]["val_loss"] == pytest.approx(losses[5], rel=1e-9)
    assert last["clients_val_loss"] == pytest.approx(np.mean(losses), rel=1e-9)
    assert last["clients_val_loss_worst"] == pytest.approx(np.mean(sorted(losses)[-2:]), rel=1e-9)  # 2 of 12
    assert last["clients_val_loss_spread"] == pytest.approx(np.std(losses), rel=1e-9)
    other = Regressor()
    nn.utils.vector_to_parameters(rows[-1][5], other.parameters())
    assert float(loss_of(other, *own[6].tensors).detach()) != pytest.approx(
        losses[5], rel=1e-3
    )  # the control: others' data
    names = [name for name in last if name.startswith("clients_")]
    assert len(names) == 3 and {n: run(processes=2).last[n] for n in names} == {n: last[n] for n in names}


def test_the_worst_clients_have_the_largest_errors_or_the_smallest_scores() -> None:
    data = [examples(BATCH, i, 0.3 * i) for i in range(11)]
    metrics = dict.fromkeys(("wer", "perplexity", "mae", "hits"), lambda out, y: (out - y).abs().mean())
    trainer = LocalTrainer(
        Regressor(), lambda i, n, is_train: data[i], lambda i, n, is_train: data[i], metrics=metrics,
        loss_fn=nn.functional.mse_loss,
    )  # fmt: skip
    for given, largest in (((), {"loss", "wer", "perplexity"}), ((["mae"],), {"loss", "mae"})):
        callbacks = [EvaluateClients(*given)]
        trainer.fit(FedPerStrategy(SGD, 1, 1), num_nodes=11, max_steps=1, batch_size=BATCH, callbacks=callbacks)
        for name in ("loss", *metrics):
            values = sorted(trainer.history.rows(node=i)[-1][f"val_{name}"] for i in range(11))
            worst = values[-2:] if name in largest else values[:2]
            assert trainer.history.last[f"clients_val_{name}_worst"] == pytest.approx(np.mean(worst), rel=1e-12)
    with pytest.raises(ArgumentError, match="must be a list of names: pass"):
        EvaluateClients("mae")


def test_clients_without_data_of_their_own_are_refused() -> None:
    trainer = LocalTrainer(Regressor(), examples(20), examples(8), loss_fn=nn.functional.mse_loss)
    with pytest.raises(ArgumentError, match="there are no validation sets per node: pass a function"):
        trainer.fit(
            FedPerStrategy(SGD, 1, H), num_nodes=2, max_steps=H, batch_size=BATCH, callbacks=[EvaluateClients()]
        )


# Beside other options


def test_rules_and_secure_means_see_what_is_shared_only() -> None:
    """A head that is far away makes a client no outlier."""
    far = copy.deepcopy(UNEQUAL[1:2] * 5)
    far[4] = TensorDataset(far[4].tensors[0], far[4].tensors[1] + 50.0)
    for options in ({"robust": "krum"}, {"secure_aggregation": True}):
        given: dict[str, Any] = {"weighting": "uniform", "personal": "second.*"} | options
        result = train(made(FedAvgStrategy, SGD, H=H, **given), far, 5)
        assert torch.equal(result.rows[0, :-HEAD], result.rows[4, :-HEAD])
        unlike(result.rows[:1, -HEAD:], result.rows[4:, -HEAD:])


def test_a_client_that_comes_back_has_its_own_head() -> None:
    fleet = fleet_of(torch.zeros(3, P, dtype=torch.float64))
    strategy = made(FedAvgStrategy, "sgd", H=1, personal="second.*")
    acting = strategy.on(fleet, run_of(3))
    (block,) = fleet.blocks
    own = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    block.params[:] = own
    acting.communicate(1)
    assert block.params[:, 0].tolist() == [2.0, 2.0, 2.0] and torch.equal(block.params[:, -HEAD:], own.expand(3, HEAD))
    fleet.comm.present = [0, 1]
    block.params += 1.0
    acting.communicate(2)
    fleet.comm.present = [0, 1, 2]
    acting.bring_back([2], 0, 3)
    assert block.params[2, 0] == 3.0 and block.params[2, -1] == 3.0  # theta, and the head of its last round
    acting.bring_back([2], 0, 3, forget=True)
    assert block.params[2, -1] == 2.0  # the control: it has lost everything, and takes all from node 0
