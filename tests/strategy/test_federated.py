"""FedProx, FedOpt, SCAFFOLD and FedNova: beside plain loops, what they are equal to, what they are for, and bytes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import (
    BATCH,
    FEATURES,
    Regressor,
    adamw,
    dyadic,
    examples,
    fleet_of,
    plain,
    put,
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

from exogym.errors import ArgumentError
from exogym.strategy import (
    CommunicateOptimizeStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    FedDynStrategy,
    FedNovaStrategy,
    FedOptStrategy,
    FedProxStrategy,
    OptimSpec,
    ScaffoldStrategy,
    SimpleReduceStrategy,
)
from exogym.strategy.federated_averaging import AveragingCommunicator
from exogym.strategy.fedopt import ServerStep
from exogym.strategy.fedprox import ProximalTerm

P = sum(p.numel() for p in Regressor().parameters())
LR, H = 0.05, 4
SGD, ADAMW = OptimSpec("sgd", lr=LR), OptimSpec("adamw", lr=0.02)
Models = list[nn.Module]


def add_to_grads(model: nn.Module, more: Tensor) -> None:
    for p, part in zip(model.parameters(), more.split([p.numel() for p in model.parameters()]), strict=True):
        p.grad += part.view_as(p)


def rounds_of(strategy: CommunicateOptimizeStrategy, num_nodes: int, count: int) -> list[list[int]]:
    """The clients of each round: a pure function of seed and round."""
    average = next(m for m in strategy.communication_modules if hasattr(m, "clients"))
    average.start(fleet_of(torch.zeros(num_nodes, P)), run_of(num_nodes))
    return [average.clients(r) for r in range(count)]


class Server:
    """Rounds in plain torch: what the server makes of theta and of what its clients have come to."""

    def __init__(self, clients: list[list[int]], update: Callable[[Tensor, dict[int, Tensor]], Tensor]):
        self.theta, self.clients, self.update = vector(Regressor()), clients, update

    def after(self, models: Models, step: int) -> None:
        if step % H:
            return
        r = step // H - 1
        self.theta = self.update(self.theta, {i: vector(models[i]) for i in self.clients[r]})
        for i in self.clients[r + 1]:
            put(models[i], self.theta)

    def acts(self, node: int, step: int) -> bool:
        return node in self.clients[(step - 1) // H]


def everyone(num_nodes: int, count: int = 5) -> list[list[int]]:
    return [list(range(num_nodes))] * count


def mean(theta: Tensor, found: dict[int, Tensor]) -> Tensor:
    return torch.stack(list(found.values())).mean(0)


# FedProx


def test_fedprox_without_its_term_is_fedavg_bit_by_bit() -> None:
    for inner in (SGD, ADAMW):
        fedavg = train(FedAvgStrategy(inner, H=H)).rows
        assert torch.equal(train(FedProxStrategy(inner, 0.0, H)).rows, fedavg)
        unlike(train(FedProxStrategy(inner, 0.5, H)).rows, fedavg)
    sampled = train(FedAvgStrategy(SGD, H=H, client_fraction=0.5)).rows
    assert torch.equal(train(FedProxStrategy(SGD, 0.0, H, client_fraction=0.5)).rows, sampled)


def test_fedprox_of_one_step_is_ddp() -> None:
    same(train(FedProxStrategy(SGD, 10.0, 1)).rows, train(SimpleReduceStrategy(SGD)).rows)
    unlike(train(FedProxStrategy(SGD, 10.0, 2)).rows, train(SimpleReduceStrategy(SGD)).rows)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("inner", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_fedprox_is_a_plain_loop(inner: OptimSpec, fraction: float) -> None:
    """The term is in the gradient, so in Adam's moments; each client is held to what it received."""
    strategy = FedProxStrategy(inner, 0.3, H, client_fraction=fraction)
    server = Server(rounds_of(strategy, 4, 5), mean)

    def pull(mu: float) -> Callable[[Models, int], None]:
        def before(models: Models, step: int) -> None:
            for i, m in enumerate(models):
                if server.acts(i, step):
                    add_to_grads(m, mu * (vector(m) - server.theta))

        return before

    build = sgd if inner is SGD else adamw
    rows = plain(shards(4), 14, build, before=pull(0.3), after=server.after, acts=server.acts)
    clients = server.clients[3]  # the others hold what they like
    same(train(strategy, steps=14).rows[clients], rows[clients])
    unlike(train(FedProxStrategy(inner, 0.2, H, client_fraction=fraction), steps=14).rows[clients], rows[clients])


class Line(nn.Module):
    """A quadratic loss: least squares without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, FEATURES, dtype=torch.float64)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def quadratic(data: TensorDataset) -> tuple[Tensor, Tensor]:
    """The Hessian A and the minimum of the mean squared error."""
    x, y = data.tensors
    return 2 * x.T @ x / len(x), torch.linalg.lstsq(x, y).solution


def test_fedprox_comes_to_rest_between_theta_and_the_clients_minimum() -> None:
    data, theta = examples(12), Line().w.detach()
    A, best = quadratic(data)
    distances = []
    for mu in (0.0, 0.5, 2.0, 20.0):
        options: dict[str, Any] = {"model": Line(), "batch_size": 12, "steps": 400}
        end = train(FedProxStrategy("sgd", mu, 400, lr=0.06), [data], 1, **options).model[:, None]
        wanted = torch.linalg.solve(A + mu * torch.eye(FEATURES).double(), A @ best + mu * theta)
        if mu:  # without the term it takes longer
            same(end, wanted, 1e-6)
        distances.append(float((end - theta).norm()))
    assert distances == sorted(distances, reverse=True) and distances[-1] < 0.5 * distances[0]


def test_a_client_that_missed_a_round_is_held_near_what_it_received() -> None:
    fleet = fleet_of(torch.zeros(2, P, dtype=torch.float64))
    strategy = FedProxStrategy("sgd", 0.5, 1)
    acting = strategy.on(fleet, run_of(2))
    (block,), (_, term) = fleet.blocks, strategy.communication_modules
    block.params += dyadic(2, P, 1)
    fleet.comm.present = [0]
    acting.communicate(1)

    def pull(row: int) -> Tensor:
        parameters = [view[row] for _, view in block.views(block.params)]
        grads: list[Tensor | None] = [torch.zeros_like(p) for p in parameters]
        grads[1] = None
        term.correct(row, parameters, grads)
        assert grads[1] is None
        return torch.cat([g.flatten() for g in grads if g is not None])

    assert not pull(0).any()
    wanted = torch.cat([view[1].flatten() for k, (_, view) in enumerate(block.views(block.params)) if k != 1])
    assert torch.equal(pull(1), 0.5 * wanted)
    fleet.comm.present = [0, 1]
    acting.bring_back([1], 0, 2)
    assert not pull(1).any()


# FedOpt


def test_the_servers_plain_step_is_fedavg() -> None:
    plain_step: dict[str, Any] = {"server_optim": "momentum", "beta1": 0.0}
    for fraction in (1.0, 0.5):
        fedavg = train(FedAvgStrategy(ADAMW, H=H, client_fraction=fraction))
        ours = train(FedOptStrategy(ADAMW, H=H, client_fraction=fraction, **plain_step))
        same(ours.rows, fedavg.rows)
        same(ours.model, fedavg.model)
        assert ours.tx.tolist() == fedavg.tx.tolist() and ours.payload.tolist() == fedavg.payload.tolist()
        for change in ({"beta1": 0.9}, {"server_lr": 0.5}):
            unlike(
                train(FedOptStrategy(ADAMW, H=H, client_fraction=fraction, **plain_step | change)).model, fedavg.model
            )


def test_fedavgm_is_diloco_with_heavy_ball() -> None:
    diloco = train(DiLoCoStrategy(ADAMW, OptimSpec("sgd", lr=0.7, momentum=0.8), H=H), steps=14)
    ours = train(FedOptStrategy(ADAMW, "momentum", 0.7, H, beta1=0.8), steps=14)
    same(ours.rows, diloco.rows)
    same(ours.model, diloco.model)
    nesterov = OptimSpec("sgd", lr=0.7, momentum=0.8, nesterov=True)
    unlike(ours.model, train(DiLoCoStrategy(ADAMW, nesterov, H=H), steps=14).model)


def test_far_from_adaptive_it_is_fedavg() -> None:
    fedavg = train(FedAvgStrategy(SGD, H=H)).model
    tau = 1e6
    same(train(FedOptStrategy(SGD, "adam", tau, H, beta1=0.0, tau=tau, initial_v=0.0)).model, fedavg, 1e-7)
    same(train(FedOptStrategy(SGD, "adagrad", 2 * tau, H, tau=tau)).model, fedavg, 1e-9)
    # with v = tau^2 at first adam does not come to it, since v decays
    unlike(train(FedOptStrategy(SGD, "adam", 2 * tau, H, beta1=0.0, tau=tau)).model, fedavg)


def test_one_client_and_one_step_is_torchs_adam() -> None:
    data, gamma, eta = shards(1), 0.05, 0.02

    def scaled(models: Models, step: int) -> None:
        for p in models[0].parameters():
            p.grad *= gamma

    def adam(betas: tuple[float, float]) -> Tensor:
        def build(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.Adam(parameters, lr=eta, betas=betas, eps=1e-3, foreach=False)

        return plain(data, 12, build, before=scaled)

    given: dict[str, Any] = {"tau": 1e-3, "initial_v": 0.0, "bias_correction": True, "lr": gamma}
    ours = train(FedOptStrategy("sgd", "adam", eta, 1, **given), data, 1)
    same(ours.rows, adam((0.9, 0.99)))
    unlike(ours.rows, adam((0.9, 0.9)))
    unlike(train(FedOptStrategy("sgd", "adam", eta, 1, **given | {"bias_correction": False}), data, 1).rows, ours.rows)


RULES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "adagrad": lambda v, D: v + D**2,
    "adam": lambda v, D: 0.9 * v + 0.1 * D**2,
    "yogi": lambda v, D: v - 0.1 * D**2 * torch.sign(v - D**2),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_the_server_takes_the_published_step(rule: str, fraction: float) -> None:
    given: dict[str, Any] = {"beta1": 0.7, "beta2": 0.9, "tau": 0.1, "client_fraction": fraction}
    strategy = FedOptStrategy(SGD, rule, 0.1, H, **given)
    state = {"m": torch.zeros(P).double(), "v": torch.full((P,), 0.1**2, dtype=torch.float64)}

    def update(theta: Tensor, found: dict[int, Tensor]) -> Tensor:
        D = mean(theta, found) - theta
        state["m"] = 0.7 * state["m"] + 0.3 * D
        state["v"] = RULES[rule](state["v"], D)
        return theta + 0.1 * state["m"] / (state["v"].sqrt() + 0.1)

    server = Server(rounds_of(strategy, 4, 5), update)
    rows = plain(shards(4), 14, sgd, after=server.after, acts=server.acts)
    ours = train(strategy, steps=14)
    same(ours.rows[server.clients[3]], rows[server.clients[3]])  # others hold what they like
    same(ours.model, server.theta)
    other = {"adam": "yogi", "yogi": "adam", "adagrad": "adam"}[rule]
    unlike(train(FedOptStrategy(SGD, other, 0.1, H, **given), steps=14).model, server.theta)


def test_without_a_client_of_the_round_the_server_does_nothing() -> None:
    fleet = fleet_of(torch.zeros(4, P, dtype=torch.float64))
    strategy = FedOptStrategy("sgd", "momentum", 1.0, 1, client_fraction=0.25)
    acting = strategy.on(fleet, run_of(4))
    _, second, third = rounds_of(copy.deepcopy(strategy), 4, 3)
    (block,) = fleet.blocks
    block.params += 1.0
    acting.communicate(1)
    theta = acting.consensus()[0].clone()
    assert torch.equal(theta, torch.ones(P).double()) and torch.equal(block.params[second[0]], theta)
    fleet.comm.present = [i for i in range(4) if i not in second]
    acting.communicate(2)
    assert torch.equal(acting.consensus()[0], theta)
    if third[0] in fleet.comm.present:
        assert torch.equal(block.params[third[0]], theta)


# SCAFFOLD


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("server_lr", [1.0, 0.6])
def test_scaffold_is_option_two_of_the_paper(fraction: float, server_lr: float) -> None:
    """c_i <- c_i - c + (theta - y_i) / (K eta), in plain torch."""
    strategy = ScaffoldStrategy(SGD, H, server_lr=server_lr, client_fraction=fraction)
    c, own = torch.zeros(P).double(), torch.zeros(4, P).double()

    def update(theta: Tensor, found: dict[int, Tensor]) -> Tensor:
        nonlocal c
        before = own.clone()
        for i, y in found.items():
            own[i] = before[i] - c + (theta - y) / (H * LR)
        c = c + (own - before).sum(0) / 4
        return theta + server_lr * (mean(theta, found) - theta)

    def corrected(models: Models, step: int) -> None:
        for i, m in enumerate(models):
            if server.acts(i, step):
                add_to_grads(m, c - own[i])

    server = Server(rounds_of(strategy, 4, 5), update)
    rows = plain(shards(4), 14, sgd, before=corrected, after=server.after, acts=server.acts)
    clients, ours = server.clients[3], train(strategy, steps=14)
    same(ours.rows[clients], rows[clients], 1e-11)
    same(train(strategy, steps=12).model, server.theta, 1e-11)
    unlike(train(FedAvgStrategy(SGD, H=H, client_fraction=fraction), steps=14).rows[clients], rows[clients])


def test_the_first_round_of_scaffold_is_fedavg_and_the_second_is_not() -> None:
    assert torch.equal(train(ScaffoldStrategy(SGD, H), steps=H).rows, train(FedAvgStrategy(SGD, H=H), steps=H).rows)
    unlike(train(ScaffoldStrategy(SGD, H), steps=2 * H).rows, train(FedAvgStrategy(SGD, H=H), steps=2 * H).rows)


def test_scaffold_of_one_step_is_ddp() -> None:
    same(train(ScaffoldStrategy(SGD, 1)).rows, train(SimpleReduceStrategy(SGD)).rows)
    unlike(train(ScaffoldStrategy(SGD, 2)).rows, train(SimpleReduceStrategy(SGD)).rows)


def test_scaffold_of_equal_data_is_fedavg() -> None:
    equal = shards(3, same=True)
    same(train(ScaffoldStrategy(SGD, H), equal, 3).rows, train(FedAvgStrategy(SGD, H=H), equal, 3).rows)
    unlike(train(ScaffoldStrategy(SGD, H), num_nodes=3).rows, train(FedAvgStrategy(SGD, H=H), num_nodes=3).rows)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_the_servers_variate_is_the_mean_of_all_clients(fraction: float) -> None:
    seen = {}

    def look(loop: Any) -> None:
        (module,) = (part for name, part in loop.fleet.state.parts.items() if name == "ControlVariates")
        seen["c"], seen["own"] = module.c[0][0].clone(), module.own[0].clone()

    train(ScaffoldStrategy(SGD, H, client_fraction=fraction), steps=12, callbacks=[look])
    same(seen["own"].mean(0), seen["c"])
    assert seen["own"].abs().max() > 1e-3 and (seen["own"][0] - seen["own"][1]).abs().max() > 1e-3


# FedDyn


def near_and_server(alpha: float, server_lr: float) -> CommunicateOptimizeStrategy:
    """FedProx, whose server takes a step of another length."""
    average = AveragingCommunicator(H, weighting="uniform")
    server = ServerStep(average, "momentum", server_lr, beta1=0.0)
    return CommunicateOptimizeStrategy(SGD, [average, server, ProximalTerm(average, alpha)])


def test_the_first_round_of_feddyn_is_fedprox_with_a_server_step_of_two() -> None:
    first = train(FedDynStrategy(SGD, 0.4, H), steps=H)
    same(first.model, train(near_and_server(0.4, 2.0), steps=H).model)
    unlike(first.model, train(near_and_server(0.4, 1.0), steps=H).model)
    unlike(train(FedDynStrategy(SGD, 0.4, H), steps=2 * H).model, train(near_and_server(0.4, 2.0), steps=2 * H).model)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("inner", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_feddyn_is_the_papers_loop(inner: OptimSpec, fraction: float) -> None:
    """Algorithm 1, with H steps in place of the exact minimum, and the paper's own h."""
    alpha, m = 0.3, 4
    strategy = FedDynStrategy(inner, alpha, H, client_fraction=fraction)
    gradient = [torch.zeros(P).double() for _ in range(m)]  # of L_k at theta_k
    h = torch.zeros(P).double()

    def update(theta: Tensor, found: dict[int, Tensor]) -> Tensor:
        nonlocal h
        for k, theta_k in found.items():
            gradient[k] = gradient[k] - alpha * (theta_k - theta)
        h = h - alpha / m * sum(theta_k - theta for theta_k in found.values())
        return sum(found.values()) / len(found) - h / alpha

    server = Server(rounds_of(strategy, m, 5), update)

    def terms(models: Models, step: int) -> None:
        for k, model in enumerate(models):
            if server.acts(k, step):
                add_to_grads(model, alpha * (vector(model) - server.theta) - gradient[k])

    build = sgd if inner is SGD else adamw
    rows = plain(shards(m), 14, build, before=terms, after=server.after, acts=server.acts)
    clients = server.clients[3]
    ours = train(strategy, steps=14)
    same(ours.rows[clients], rows[clients])
    same(ours.model, server.theta)
    other = FedDynStrategy(inner, 0.2, H, client_fraction=fraction)
    unlike(train(other, steps=14).rows[clients], rows[clients])


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_feddyns_h_is_the_mean_of_all_clients_terms(fraction: float) -> None:
    seen = {}

    def look(loop: Any) -> None:
        parts = loop.fleet.state.parts
        seen["h"], seen["own"] = (parts[name] for name in ("DynamicServer", "LinearTerm"))
        seen["h"], seen["own"] = seen["h"].shared_state["h.0"][0].clone(), seen["own"].row_state["own.0"].clone()

    train(FedDynStrategy(SGD, 0.3, H, client_fraction=fraction), steps=12, callbacks=[look])
    same(seen["h"], seen["own"].mean(0) / 0.3)
    unlike(seen["own"][:1], seen["own"][1:2])


ASIDE: dict[str, tuple[CommunicateOptimizeStrategy, float, CommunicateOptimizeStrategy, float]] = {
    "scaffold": (ScaffoldStrategy("sgd", 10, lr=0.03), 1e-6, FedAvgStrategy("sgd", H=10, lr=0.03), 0.1),
    "feddyn": (FedDynStrategy("sgd", 1.0, 20, lr=0.03), 1e-4, FedProxStrategy("sgd", 1.0, 20, lr=0.03), 0.05),
}


@pytest.mark.parametrize("name", ASIDE)
def test_the_minimum_of_all_is_found_where_others_are_drawn_aside(name: str) -> None:
    """Two quadratic clients whose curvatures and minima differ."""
    x = torch.randn(12, FEATURES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    steep, flat = 2 * x, 0.5 * x.roll(1, 1) + 0.5 * x
    data = [TensorDataset(steep, steep.sum(1, keepdim=True)), TensorDataset(flat, -flat.sum(1, keepdim=True))]
    (A, a), (B, b) = map(quadratic, data)
    best = torch.linalg.solve(A + B, A @ a + B @ b)[:, 0]

    def off(strategy: CommunicateOptimizeStrategy) -> float:
        return float((train(strategy, data, 2, model=Line(), steps=1200, batch_size=12).model - best).norm())

    strategy, near, control, far = ASIDE[name]
    assert off(strategy) < near and off(control) > far


# FedNova


def test_fednova_of_equal_work_is_fedavg() -> None:
    for options in ({}, {"client_fraction": 0.5}, {"local_steps": [3, 3, 3, 3]}):
        given: dict[str, Any] = options
        same(train(FedNovaStrategy(SGD, H, **given)).rows, train(FedAvgStrategy(SGD, H=H, **given)).rows)
    work: dict[str, Any] = {"local_steps": [1, 4, 2, 3]}
    unlike(train(FedNovaStrategy(SGD, H, **work)).rows, train(FedAvgStrategy(SGD, H=H, **work)).rows)


WORK = [1, 4, 2, 3]
RHO = 0.9
CLIENTS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[int], float]]] = {
    # what SGD is given, what FedNova is given, and the paper's a_i of t steps
    "plain": ({}, {}, lambda t: t),
    "momentum": (
        {"momentum": RHO}, {"keep_inner_state": False}, lambda t: (t - RHO * (1 - RHO**t) / (1 - RHO)) / (1 - RHO),
    ),
    "nesterov": (
        {"momentum": RHO, "nesterov": True},
        {"keep_inner_state": False},
        lambda t: sum(sum(RHO**k for k in range(j + 1)) for j in range(1, t + 1)),  # 1 + rho + ... + rho^j at step j
    ),
    "proximal": ({}, {"mu": 8.0}, lambda t: (1 - (1 - LR * 8.0) ** t) / (LR * 8.0)),
    "decay": ({"weight_decay": 0.1}, {}, lambda t: t),
    "schedule": ({}, {"lr_scheduler": "linear"}, lambda t: 0.0),  # below
}  # fmt: skip


def nova(name: str, a_of: Callable[[int, int], float], work: list[int] = WORK, steps: int = 12) -> Tensor:
    """Rounds in plain torch, in fp64: clients that begin each round afresh, and the paper's step of the server.

    `a_of(r, t)` is a_i of t steps in round r.
    """
    sgd_options, options, _ = CLIENTS[name]
    data = [examples(BATCH * (2 + i), i, 0.3 * i) for i in range(4)]
    weights = torch.tensor([len(d) for d in data]).double()
    weights /= weights.sum()
    made: list[torch.optim.Optimizer] = []
    rounds = 0

    def build(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, lr=LR, foreach=False, **sgd_options))
        return made[-1]

    def update(theta: Tensor, found: dict[int, Tensor]) -> Tensor:
        nonlocal rounds
        a = [a_of(rounds, t) for t in work]
        tau = sum(w * x for w, x in zip(weights, a, strict=True))
        rounds += 1
        return theta - tau * sum(weights[i] * (theta - y) / a[i] for i, y in found.items())

    server = Server(everyone(4), update)

    def before(models: Models, step: int) -> None:
        for i, m in enumerate(models):
            if "mu" in options and (step - 1) % H < work[i]:
                add_to_grads(m, options["mu"] * (vector(m) - server.theta))
            if "lr_scheduler" in options:
                own = (step - 1) // H * work[i] + (step - 1) % H
                made[i].param_groups[0]["lr"] = LR * (1 - own / steps)

    def after(models: Models, step: int) -> None:
        server.after(models, step)
        if step % H == 0:
            for optimizer in made:
                optimizer.state.clear()

    return plain(data, steps, build, before=before, after=after, acts=lambda i, step: (step - 1) % H < work[i])


@pytest.mark.parametrize("name", [name for name in CLIENTS if name != "schedule"])
def test_fednova_divides_by_the_papers_a_i(name: str) -> None:
    sgd_options, options, paper = CLIENTS[name]
    data = [examples(BATCH * (2 + i), i, 0.3 * i) for i in range(4)]
    strategy = FedNovaStrategy(OptimSpec("sgd", lr=LR, **sgd_options), H, local_steps=WORK, **options)
    ours = train(strategy, data).rows
    same(ours, nova(name, lambda r, t: paper(t)))
    unlike(ours, nova(name, lambda r, t: t if name not in ("plain", "decay") else t + 1))  # not by steps


def test_fednova_counts_a_step_as_its_rate() -> None:
    data = [examples(BATCH * (2 + i), i, 0.3 * i) for i in range(4)]
    ours = train(FedNovaStrategy(SGD, H, local_steps=WORK, lr_scheduler="linear"), data).rows
    same(ours, nova("schedule", lambda r, t: sum(1 - (r * t + k) / 12 for k in range(t))))
    unlike(ours, nova("schedule", lambda r, t: t))


def test_fednova_with_momentum_comes_to_rest_near_the_optimum_that_fedavg_misses() -> None:
    """Two quadratic clients with exact gradients; a count of steps as a_i (2 to 10; right is 1 to 14) ends 0.1 off."""
    data = [examples(12, k) for k in range(2)]
    (A, a), (B, b) = map(quadratic, data)
    best = torch.linalg.solve(A + B, A @ a + B @ b)[:, 0]
    momentum = OptimSpec("sgd", lr=0.005, momentum=RHO)
    given: dict[str, Any] = {"local_steps": [2, 10], "keep_inner_state": False}

    def off(strategy: CommunicateOptimizeStrategy) -> float:
        model = train(strategy, data, 2, model=Line(), steps=600, batch_size=12).model
        return float((model - best).norm())

    assert off(FedNovaStrategy(momentum, 10, **given)) < 0.03 and off(FedAvgStrategy(momentum, H=10, **given)) > 0.2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FedNovaStrategy("adamw"), "no a_i is known for AdamW: use inner_optim='sgd'"),
        (lambda: FedNovaStrategy(OptimSpec("sgd", momentum=0.9)), "pass keep_inner_state=False"),
        (
            lambda: FedNovaStrategy(OptimSpec("sgd", momentum=0.9), mu=0.1, keep_inner_state=False),
            "leave mu or momentum out",
        ),
        (lambda: FedNovaStrategy(OptimSpec("sgd", momentum=0.9, dampening=0.1)), "with dampening=0.1: leave it out"),
        (lambda: FedNovaStrategy(mu=0.1, max_norm=1.0), "leave mu or max_norm out"),
        (
            lambda: FedNovaStrategy(OptimSpec("sgd", groups=[("*.bias", {"momentum": 0.5})])),
            r"groups give several a_i \(momentum\)",
        ),
        (
            lambda: FedNovaStrategy(OptimSpec("sgd", groups=[("*.bias", {"lr": 0.5})]), mu=0.1),
            r"groups give several a_i \(lr with mu\)",
        ),
        (lambda: FedNovaStrategy(mu=-1), "mu=-1 must be a number of at least 0"),
    ],
)
def test_fednova_refuses_clients_without_a_known_a_i(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make()
    FedNovaStrategy(OptimSpec("sgd", groups=[("*.bias", {"lr": 0.5, "weight_decay": 0.0})], weight_decay=0.1))


AT_ONCE: dict[str, Callable[[], CommunicateOptimizeStrategy]] = {
    "fedprox": lambda: FedProxStrategy(SGD, 0.5, H),
    "feddyn": lambda: FedDynStrategy(SGD, 0.5, H),
    "scaffold": lambda: ScaffoldStrategy(SGD, H),
    "fednova": lambda: FedNovaStrategy(SGD, H, local_steps=[1, 4, 2, 3]),
}


@pytest.mark.parametrize("make", AT_ONCE.values(), ids=AT_ONCE)
def test_gradients_computed_at_once_are_corrected_alike(make: Callable[[], CommunicateOptimizeStrategy]) -> None:
    same(train(make(), compute="vmap").rows, train(make()).rows)


# Bytes, and what is refused


MAKE: dict[str, Callable[..., CommunicateOptimizeStrategy]] = {
    "fedprox": FedProxStrategy,
    "feddyn": FedDynStrategy,
    "fedopt": FedOptStrategy,
    "scaffold": ScaffoldStrategy,
    "fednova": FedNovaStrategy,
}


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    class Unused(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

    for make in MAKE.values():
        result = train(make("sgd", H=2, lr=0.05), num_nodes=2, steps=6, model=Unused())
        assert result.model.isfinite().all() and math.isclose(float(result.model[:3].sum()), 3.0, abs_tol=1e-12)


def test_all_take_options_of_fedavg_and_say_what_is_wrong() -> None:
    for name, make in MAKE.items():
        with pytest.raises(ArgumentError, match="client_fraction=0"):
            make(client_fraction=0)
        with pytest.raises(ArgumentError, match="did you mean 'local_epochs'"):
            make(local_epoch=1)
        with pytest.raises(ArgumentError, match="depends on the data: give H instead"):
            make(local_epochs=1).plan(1e6, 4, 4)
        data = [examples(BATCH * (1 + i), i) for i in range(3)]
        result = train(make("sgd", lr=0.05, local_epochs=2), data, 3, steps=6)
        assert len(set(result.tx.tolist())) == 1 and result.tx[0] > 0, name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedProxStrategy(mu=-1.0), "mu=-1.0 must be a number of at least 0"),
        (lambda: FedProxStrategy(mu="1"), "mu='1'"),
        (lambda: FedDynStrategy(alpha=0.0), "alpha=0.0 must be a number over 0"),
        (lambda: FedDynStrategy(weighting="examples"), "h is a plain sum over clients"),
        (lambda: FedOptStrategy(server_optim="adamm"), "did you mean 'adam'"),
        (lambda: FedOptStrategy(beta1=1.0), "beta1=1.0 must be a number of at least 0 and under 1"),
        (lambda: FedOptStrategy(server_lr=-1.0), "server_lr=-1.0"),
        (lambda: FedOptStrategy(tau=-1.0), "tau=-1.0"),
        (lambda: ScaffoldStrategy(server_lr=-1.0), "server_lr=-1.0"),
    ],
)
def test_errors(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()
