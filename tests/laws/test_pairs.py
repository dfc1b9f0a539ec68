"""Every pair of the options of averaging strategies: what a run comes to is what is written out here, or it is refused.

`by_hand` is the reference: each node by itself in plain torch and fp64, and what they come to put together as the
page of each option says. What an option may not change (transport, secure aggregation, micro-batches, the split of a
node) is not in it. What is drawn or chosen with the run's seed, the clients of a round and the noise, is asked for.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset
from wrapped import made

from exogym import LocalTrainer, NodeMesh
from exogym.core.compress import ChunkTopK
from exogym.core.refusals import REFUSED
from exogym.data import Partitioner
from exogym.errors import ArgumentError
from exogym.strategy import (
    CommunicateOptimizeStrategy,
    OptimSpec,
    SignSGDStrategy,
    SparseLoCoStrategy,
    TopKStrategy,
)
from exogym.strategy.averaging import Averaging
from exogym.strategy.federated_averaging import AveragingCommunicator
from exogym.strategy.privacy import DifferentialPrivacy

NODES, EACH, STEPS, H, LR, MOMENTUM = 9, 8, 9, 2, 0.2, 0.6
DENSITY, CLIP = 0.3, 0.05
ROUNDS = 3.3  # of a budget


class Contiguous(Partitioner):
    def split(self, dataset: Any, num_nodes: int, seed: int) -> list[np.ndarray]:
        return np.split(np.arange(len(dataset)), num_nodes)


class Everything(CommunicateOptimizeStrategy):
    """Averages parameters, beside gradients with error feedback if it is given some."""

    averages = ("transport",)

    def __init__(
        self,
        inner_optim: Any = "sgd",
        H: Any = H,
        *,
        client_fraction: float = 1.0,
        privacy: DifferentialPrivacy | None = None,
        error_feedback: Any = None,
        averaging: Averaging | None = None,
    ):
        average = AveragingCommunicator(H, client_fraction=client_fraction, privacy=privacy)
        feedback = [] if error_feedback is None else error_feedback.gradient_modules
        super().__init__(inner_optim, [average], gradient_modules=feedback)
        self.average_by(averaging or Averaging())


# option: {name of a value: what the constructor or `fit` is given}
OPTIONS: dict[str, dict[str, Any]] = {
    "robust": {name: name for name in ("median", "trimmed_mean", "krum", "norm_cap")},
    "privacy": {"privacy": DifferentialPrivacy(CLIP, 0.5)},
    "secure_aggregation": {"secure": True},
    "transport": {name: name for name in ("server", "ring", "tree")},
    "tuner": {"budget": ROUNDS},
    "client_fraction": {"sampled": 0.5},
    "error_feedback": {
        "topk": lambda: TopKStrategy(density=DENSITY),
        "sign": lambda: SignSGDStrategy(error_feedback=True),
        "sparseloco": None,  # is a strategy of its own
    },
    "momentum": {"momentum": MOMENTUM},
    "minibatch_size": {"micro": 3},
    "node": {"shard": NodeMesh(shard=2)},
}
OF_FIT = ("minibatch_size", "node")
Chosen = dict[str, str]  # option to the name of its value


def pairs() -> list[Any]:
    """Return a parameter for each pair; a fast one for each two options, the others as slow."""
    found = []
    for one, other in itertools.combinations(OPTIONS, 2):
        for k, (a, b) in enumerate(itertools.product(OPTIONS[one], OPTIONS[other])):
            marks = [pytest.mark.slow] if k else []
            found.append(pytest.param({one: a, other: b}, id=f"{a} with {b}", marks=marks))
    return found


def examples() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(NODES * EACH, 3, generator=draw, dtype=torch.float64)
    return x, torch.tanh(x[:, :2]) + 0.3 * torch.randn(NODES * EACH, 2, generator=draw, dtype=torch.float64)


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def strategy_of(chosen: Chosen) -> CommunicateOptimizeStrategy:
    given = {option: OPTIONS[option][name] for option, name in chosen.items() if option not in OF_FIT}
    if chosen.get("tuner") == "budget":
        others = {option: name for option, name in chosen.items() if option != "tuner"}
        one_round = run(others, strategy_of(others), max_steps=H).history.last["tx_bytes"]
        given["tuner"] = ROUNDS * one_round
    momentum = {"momentum": given.pop("momentum")} if "momentum" in given else {}
    inner = OptimSpec("sgd", lr=LR, **momentum)
    if chosen.get("error_feedback") == "sparseloco":
        del given["error_feedback"]
        return made(SparseLoCoStrategy, inner, H=H, topk=1, chunk=4, bits=32, **given)
    if "error_feedback" in given:
        given["error_feedback"] = given["error_feedback"]()
    return made(Everything, inner, **given)


def run(chosen: Chosen, strategy: CommunicateOptimizeStrategy, **options: Any) -> LocalTrainer:
    data = TensorDataset(*examples())
    trainer = LocalTrainer(network(), data, loss_fn=mse_loss)
    given = {name: OPTIONS[name][chosen[name]] for name in OF_FIT if name in chosen}
    wanted = {"num_nodes": NODES, "max_steps": STEPS, "batch_size": EACH, "shuffle": False, "device": "cpu"}
    trainer.fit(strategy, partitioner=Contiguous(), **wanted | given | options)
    return trainer


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# By hand


def gradient(theta: Tensor, node: int) -> Tensor:
    x, y = (part[node * EACH : (node + 1) * EACH] for part in examples())
    theta = theta.clone().requires_grad_()
    W, b, V, c = (part.view(shape) for part, shape in zip(theta.split([12, 4, 8, 2]), [(4, 3), 4, (2, 4), 2]))  # noqa: B905
    loss = ((torch.tanh(x @ W.T + b) @ V.T + c) - y).square().mean()
    return torch.autograd.grad(loss, theta)[0]


def middle(rule: str, x: Tensor) -> Tensor:
    """What takes the place of the mean of the rows of `x`."""
    n = len(x)
    if rule == "median":
        ordered = x.sort(0).values
        return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    if rule == "trimmed_mean":
        f = max(1, n // 4)
        return x.sort(0).values[f : n - f].mean(0)
    if rule == "krum":
        f = min(max(1, n // 4), (n - 3) // 2)
        scores = [sorted(float((x[i] - x[j]).square().sum()) for j in range(n) if j != i) for i in range(n)]
        return x[min(range(n), key=lambda i: sum(scores[i][: n - f - 2]))]
    return x.mean(0)


def capped(u: dict[int, Tensor]) -> dict[int, Tensor]:
    """Shorten updates to the lower median of the lengths of those that are not 0."""
    lengths = sorted(float(x.norm()) for x in u.values() if x.any())
    cap = lengths[(len(lengths) - 1) // 2] if lengths else 0.0
    return {i: x * (cap / x.norm()) if x.norm() > cap else x for i, x in u.items()}


def sent_of(name: str, p: Tensor) -> Tensor:
    """What a node sends of `p`, compressed."""
    if name == "sign":
        return torch.cat([x.abs().mean() * torch.where(x >= 0, 1.0, -1.0) for x in p.split([12, 4, 8, 2])])
    best = sorted(range(26), key=lambda c: -abs(float(p[c])))[: round(DENSITY * 26)]
    sent = torch.zeros_like(p)
    sent[best] = p[best]
    return sent


def by_hand(
    chosen: Chosen, ends: list[int], average: Any, privacy: DifferentialPrivacy | None, by_chunks: Any
) -> Tensor:
    """Return the model at the end.

    Args:
        ends: the steps that rounds end after, as a budget chose them; else they are reckoned here.
        average: who takes part in a round, where clients are drawn; else None.
        privacy: whose noise there is.
        by_chunks: SparseLoCo's compressor.
    """
    rule, feedback = (chosen.get(name, "") for name in ("robust", "error_feedback"))
    q = OPTIONS["client_fraction"][chosen["client_fraction"]] if "client_fraction" in chosen else 1.0
    theta, round_, begin = flat(network()), 0, 0
    momenta: dict[int, Tensor] = {}
    errors = {i: torch.zeros(26, dtype=torch.float64) for i in range(NODES)}
    x = {i: theta.clone() for i in range(NODES)}
    while begin < STEPS:
        end = min(ends[round_] if ends else begin + H, STEPS)
        clients = average.clients(round_) if average is not None else list(range(NODES))
        for _ in range(begin, end):
            g = {i: gradient(x[i], i) for i in clients}
            if feedback in ("topk", "sign"):
                g = capped(g) if rule == "norm_cap" else g
                sent = {i: sent_of(feedback, errors[i] + LR * g[i]) for i in clients}
                errors = {i: errors[i] + LR * g[i] - sent[i] for i in clients}
                mean = middle(rule, torch.stack(list(sent.values()))) / LR
                g = dict.fromkeys(clients, mean)
            for i in clients:
                if "momentum" in chosen:
                    momenta[i] = MOMENTUM * momenta[i] + g[i] if i in momenta else g[i]
                x[i] = x[i] - LR * (momenta[i] if "momentum" in chosen else g[i])
        u = {i: x[i] - theta for i in clients}
        u = capped(u) if rule == "norm_cap" else u
        if feedback == "sparseloco":
            kept = {i: 0.95 * errors[i] - u[i] for i in clients}
            sent = {i: by_chunks.decode(*by_chunks.encode(kept[i][None]))[0].double() for i in clients}
            errors = {i: kept[i] - sent[i] for i in clients}
            move = -middle(rule, torch.stack(list(sent.values())))
        elif privacy is not None:
            u = {i: d * min(1.0, CLIP / float(d.norm())) for i, d in u.items()}
            noise = privacy.noise(theta[None], q * NODES, 0, 0, round_)[0]
            move = sum(u.values(), torch.zeros(26, dtype=torch.float64)) / (q * NODES) + noise
        else:
            move = middle(rule, torch.stack(list(u.values())))
        theta = theta + move
        x = {i: theta.clone() for i in range(NODES)}
        round_, begin = round_ + 1, end
    return theta


def said_by_the_table(error: ArgumentError) -> bool:
    twice = "wrap it once" in str(error)
    return twice or any(row.reason in str(error) and row.instead in str(error) for row in REFUSED)


@pytest.mark.parametrize("chosen", [pytest.param({}, id="none"), *pairs()])
def test_a_pair_equals_its_reference_or_is_refused(chosen: Chosen) -> None:
    steps: list[Any] = []
    if "sparseloco" in chosen.values() and {"client_fraction", "privacy", "transport"} & {*chosen}:  # which it lacks
        with pytest.raises(ArgumentError, match="has no argument"):
            strategy_of(chosen)
        return
    try:
        strategy = strategy_of(chosen)
        trainer = run(chosen, strategy, callbacks=[steps.append])
    except ArgumentError as error:
        assert said_by_the_table(error) and not steps, error
        return
    strategy = steps[-1].driver.algorithm.strategy  # the one that trained
    average = strategy.communication_modules[0]
    privacy = getattr(average, "privacy", None)
    ends = []
    if chosen.get("tuner") == "budget":
        assert trainer.history.last["tx_bytes"] <= strategy.tuning.budget.total_bytes
        ends = [*strategy.tuning.rounds._ends[1:], STEPS, STEPS]
    drawn = average if privacy is not None or "client_fraction" in chosen else None
    by_chunks = ChunkTopK(steps[-1].fleet.blocks[0].layout, 1, 4, None)
    wanted = by_hand(chosen, ends, drawn, privacy, by_chunks)
    torch.testing.assert_close(flat(trainer.model), wanted, rtol=0, atol=1e-6 if "error_feedback" in chosen else 1e-9)
