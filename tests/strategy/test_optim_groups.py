"""Parameter groups and whose learning rate it is; Muon with AdamW; optimizers that keep state anywhere."""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import Regressor, plain, same, shards, train, unlike
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR

from exogym import LocalTrainer, attach
from exogym.core.communicator import Communicator
from exogym.core.fleet.layout import hidden_matrices
from exogym.core.training.options import describe
from exogym.errors import ArgumentError
from exogym.models import CharGPT, SmallCNN
from exogym.strategy import (
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    FedNovaStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    SPARTAStrategy,
    Strategy,
)
from exogym.testing import check_strategy

QUICK = ("learns", "single node", "placement")  # laws that hang on the strategy, not on its optimizer

# Half precision: torch 2.13's fused SGD on the CPU skips every whole vector of elements


class ByHand(Strategy):
    def step(self) -> None:
        self.update_parameters()
        super().step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "strategy",
    [
        lambda: CommunicateOptimizeStrategy("sgd", lr=0.5),
        lambda: DiLoCoStrategy("adamw", lr=0.1, H=1),
        lambda: DeMoStrategy(lr=0.05),
        lambda: ByHand("sgd", lr=0.5),
    ],
    ids=["inner", "outer", "demo", "one node"],
)
def test_every_element_of_a_half_precision_matrix_is_trained(
    strategy: Callable[[], Strategy], dtype: torch.dtype
) -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((64,), 0.25, dtype=dtype))

        def forward(self, batch: Any) -> torch.Tensor:
            return (self.weight.float() * batch[0]).sum()

    data = torch.utils.data.TensorDataset(torch.ones(8, 64))
    final = LocalTrainer(Linear(), data).fit(strategy(), num_nodes=2, max_steps=2, batch_size=2, device="cpu")
    assert bool((final.weight != 0.25).all())


# Groups


def no_bias(name: str, p: nn.Parameter) -> bool:
    return p.ndim < 2


GROUPS = [("first.*", {"lr": 0.01, "weight_decay": 0.5}), (no_bias, {"weight_decay": 0.0})]


def by_hand(parameters: Any, **scheduled: Any) -> Optimizer:
    w1, b1, w2, b2 = parameters
    first = {"params": [w1, b1], "lr": 0.01, "weight_decay": 0.5}
    groups = [first, {"params": [w2]}, {"params": [b2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.05, weight_decay=0.2, fused=True)


class Scheduled:
    """An optimizer and torch's scheduler, stepped together."""

    def __init__(self, optimizer: Optimizer, scheduler: Callable[[Optimizer], Any]):
        self.optimizer, self.scheduler = optimizer, scheduler(optimizer)
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()


SPEC = OptimSpec("adamw", groups=GROUPS, lr=0.05, weight_decay=0.2)


def decay(step: int) -> float:
    return 0.8**step


def test_the_first_pattern_that_matches_gives_the_options() -> None:
    groups = SPEC.build(dict(Regressor().named_parameters())).param_groups
    found = [(g["lr"], g["weight_decay"], len(g["params"])) for g in groups]
    assert found == [(0.01, 0.5, 2), (0.05, 0.2, 1), (0.05, 0.0, 1)]
    assert repr(SPEC) == (
        "OptimSpec(AdamW, groups=[('first.*', {'lr': 0.01, 'weight_decay': 0.5}), (no_bias, {'weight_decay': 0.0})], "
        "lr=0.05, weight_decay=0.2)"
    )


def test_a_schedule_scales_each_groups_own_rate() -> None:
    expected = plain(shards(2), 12, lambda p: Scheduled(by_hand(p), lambda o: LambdaLR(o, decay)))  # type: ignore[arg-type, return-value]
    for strategy in (SPARTAStrategy(SPEC, 0.0, lr_scheduler=decay), ByHand(SPEC, lr_scheduler=decay)):
        assert torch.equal(train(strategy, num_nodes=2).rows, expected)
    unlike(train(SPARTAStrategy(SPEC, 0.0), num_nodes=2).rows, expected)


def test_torchs_schedulers_treat_groups_as_torch_does() -> None:
    """A lower bound that is no factor: CosineAnnealingLR's eta_min is the same for all groups."""
    cosine = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=12, eta_min=0.008)
    expected = plain(shards(2), 12, lambda p: Scheduled(by_hand(p), cosine))  # type: ignore[arg-type, return-value]
    same(train(SPARTAStrategy(SPEC, 0.0, lr_scheduler=cosine), num_nodes=2).rows, expected, 1e-15)


def test_an_outer_optimizer_may_have_groups() -> None:
    outer = OptimSpec("sgd", groups=[("second.*", {"lr": 0.0})], lr=1.0)
    inner = OptimSpec("sgd", lr=0.05)
    frozen = train(DiLoCoStrategy(inner, outer, H=3), num_nodes=2)
    whole = train(DiLoCoStrategy(inner, OptimSpec("sgd", lr=1.0), H=3), num_nodes=2)
    start = Regressor()
    model = frozen.trainer.model
    assert torch.equal(model.second.weight, start.second.weight)
    unlike(model.first.weight.detach(), start.first.weight.detach())
    unlike(whole.trainer.model.second.weight.detach(), start.second.weight.detach())


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([("frist.*", {"lr": 0.1})], r"'frist.\*' matches no parameter; near: first.weight, first.bias"),
        ([("*", {"lr": 0.1}), ("*.bias", {"lr": 0.2})], r"'\*.bias' comes too late"),
        ([("*.bias", {"weight_deacy": 0.0})], "'weight_deacy' is not an option.*did you mean 'weight_decay'"),
        ([(lambda name, p: p.ndim > 2, {"lr": 0.1})], "lambda> matches no parameter; there are: first.weight"),
    ],
)
def test_groups_that_cannot_be_are_refused_before_training(groups: Any, message: str) -> None:
    for strategy in (
        FedAvgStrategy(OptimSpec("adamw", groups=groups)),
        ByHand(OptimSpec("adamw", groups=groups)),
        DiLoCoStrategy("sgd", OptimSpec("adamw", groups=groups)),
    ):
        with pytest.raises(ArgumentError, match=message):
            train(strategy, num_nodes=2)


@pytest.mark.parametrize(
    "groups", [[("*.bias",)], ["*.bias"], [(3, {"lr": 0.1})], [("*.bias", 0.1)], [("*.bias", {"lr": -1.0})]]
)
def test_groups_are_pairs(groups: Any) -> None:
    with pytest.raises(ArgumentError, match="groups: "):
        OptimSpec("adamw", groups=groups)


# What a user assigns stays


class OwnOptimizer(Strategy):
    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self.optim = by_hand(model.parameters())

    def step(self) -> None:
        self.update_parameters()
        super().step()


class OwnScheduler(OwnOptimizer):
    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self.scheduler = StepLR(self.optim, step_size=4, gamma=0.3)

    def step(self) -> None:
        self.update_parameters()
        self.scheduler.step()
        Strategy.step(self)


class OwnRate(OwnOptimizer):
    def step(self) -> None:
        if self.local_step == 5:
            self.optim.param_groups[1]["lr"] = 0.2
        super().step()


def rate_at_five(optimizer: Optimizer) -> Any:
    class Assign:
        done = 0

        def step(self) -> None:
            self.done += 1
            if self.done == 5:
                optimizer.param_groups[1]["lr"] = 0.2

    return Assign()


def climb(step: int) -> float:
    return min(1, (step + 1) / 4)


ASSIGNED: dict[str, tuple[Callable[[], Strategy], Callable[[Optimizer], Any]]] = {
    "own optimizer": (OwnOptimizer, lambda o: LambdaLR(o, lambda step: 1.0)),
    "own optimizer, our schedule": (lambda: OwnOptimizer(lr_scheduler=decay), lambda o: LambdaLR(o, decay)),
    "own optimizer, warm-up": (lambda: OwnOptimizer(warmup_steps=4), lambda o: LambdaLR(o, climb)),
    "own scheduler": (OwnScheduler, lambda o: StepLR(o, step_size=4, gamma=0.3)),
    "own rate": (OwnRate, rate_at_five),
}  # fmt: skip


@pytest.mark.parametrize("name", ASSIGNED)
def test_rates_that_a_user_assigns_stay(name: str, tmp_path: Any) -> None:
    strategy, scheduler = ASSIGNED[name]
    expected = plain(shards(2), 12, lambda p: Scheduled(by_hand(p), scheduler))  # type: ignore[arg-type, return-value]
    assert torch.equal(train(strategy(), num_nodes=2).rows, expected)
    train(strategy(), num_nodes=2, steps=7, save_dir=tmp_path, checkpoint_interval=7)
    resumed = train(strategy(), num_nodes=2, steps=12, save_dir=tmp_path, resume=True)
    if not name.endswith("schedule"):  # whose length would have been another
        assert torch.equal(resumed.rows, expected)


def test_an_assigned_rate_outlasts_a_schedule() -> None:
    rates: list[tuple[float, float]] = []

    class Assigning(ByHand):
        def step(self) -> None:
            if self.local_step == 3:
                self.optim.param_groups[0]["lr"] = 0.123
            rates.append(tuple(group["lr"] for group in self.optim.param_groups))  # type: ignore[arg-type]
            super().step()

    train(Assigning(SPEC, lr_scheduler=decay), num_nodes=1, steps=6)
    assert [first for first, _, _ in rates] == [0.01 * decay(t) for t in range(3)] + [0.123] * 3
    assert [second for _, second, _ in rates] == [0.05 * decay(t) for t in range(6)]


# Muon for hidden matrices, AdamW for the rest


def gpt() -> nn.Module:
    torch.manual_seed(1)
    return CharGPT(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=8)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def stack(*widths: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths)))


def llama(tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
            bos_token_id=0, eos_token_id=0, tie_word_embeddings=tied,
        )
    )  # fmt: skip


GPT2S = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
ATTENTION = {f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkvo"}
LLAMAS = ATTENTION | {f"model.layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
HIDDEN: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "CharGPT, tied": (gpt, {f"blocks.0.{x}.weight" for x in ("attend.qkv", "attend.out", "mlp.0", "mlp.2")}),
    "GPT-2, tied": (gpt2, {f"transformer.h.0.{x}.weight" for x in GPT2S}),
    "Llama": (llama, LLAMAS),
    "Llama, tied": (lambda: llama(True), LLAMAS),
    "Llama, wrapped": (lambda: nn.ModuleDict({"inside": llama()}), {f"inside.{name}" for name in LLAMAS}),
    "no head by name": (lambda: stack(3, 4, 4, 2), {"0.weight", "1.weight"}),
    "one row": (lambda: stack(3, 1, 3, 3), set()),
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_matrices(name: str) -> None:
    model, expected = HIDDEN[name]
    assert hidden_matrices(model()) == expected


def test_convolutions_go_to_adamw() -> None:
    model = SmallCNN()
    names = dict(model.named_parameters())
    assert any(p.ndim == 4 for p in names.values())
    assert all(names[name].ndim == 2 for name in hidden_matrices(model))


class ByHandDDP(Strategy):
    def step(self) -> None:
        self.communicate_gradients()
        self.update_parameters()
        super().step()


def test_groups_say_what_muon_takes() -> None:
    named = dict(gpt().named_parameters())
    spec = OptimSpec("muon", groups=[("*.qkv.*", {"use_muon": False, "lr": 0.5}), ("tokens.*", {"weight_decay": 0.0})])
    groups = spec.build(named, hidden=hidden_matrices(gpt())).param_groups
    found = {name: group for group in groups for name, p in named.items() if any(p is q for q in group["params"])}
    assert not found["blocks.0.attend.qkv.weight"]["use_muon"] and found["blocks.0.attend.qkv.weight"]["lr"] == 0.5
    assert found["blocks.0.mlp.0.weight"]["use_muon"] and found["blocks.0.mlp.0.weight"]["momentum"] == 0.95
    assert found["tokens.weight"]["weight_decay"] == 0.0 and found["norm.weight"]["weight_decay"] == 0.1


def test_muon_without_a_hidden_matrix_is_refused() -> None:
    class Stacked(ByHand):
        stacked = True

    for strategy, model in ((FedAvgStrategy("muon"), nn.Linear(6, 1)), (Stacked("muon"), Regressor())):
        with pytest.raises(ArgumentError, match=r"muon finds no hidden matrix.*adamw"):
            train(strategy, model=model.double(), num_nodes=2)


# State in places of its own


class Everywhere(Optimizer):
    """SGD whose rate hangs on numbers kept in a group, on the object, and in its state; it draws random numbers."""

    def __init__(self, params: Any, lr: float = 1.0):
        super().__init__(params, {"lr": lr, "k": 0})
        self.total, self.recent, self.scale = 0.0, deque([1.0], maxlen=3), torch.ones(1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(count=0, history=[torch.zeros_like(p)], start=None, sums={0.5: 0.0})
                state["count"] += 1
                state["sums"][0.5] += float(p.grad.abs().sum())
                state["history"].append(p.grad.clone())
                mean = sum(state["history"][-2:]) / 2
                self.total += float(mean.abs().mean())
                factor = 1 / (1 + math.sqrt(group["k"]) + self.total + state["sums"][0.5] / state["count"])
                p.add_(
                    mean * (1 + 0.1 * torch.rand(())),
                    alpha=-group["lr"] * factor * sum(self.recent) * float(self.scale),
                )
            self.recent.append(factor)
            self.scale.mul_(0.99)


class Forgetful(Everywhere):
    """The negative control: a counter that no instance keeps."""

    counts: list[int] = []  # noqa: RUF012

    def step(self, closure: Any = None) -> None:
        self.counts.append(1)
        for group in self.param_groups:
            group["lr"] = 0.05 / len(self.counts)
        super().step()


@pytest.mark.parametrize("strategy", [FedAvgStrategy, DiLoCoStrategy, SimpleReduceStrategy, ByHandDDP])
def test_the_laws_hold_for_state_in_groups_and_on_the_object(strategy: type[Strategy]) -> None:
    rounds = {"H": 3} if strategy in (FedAvgStrategy, DiLoCoStrategy) else {}
    check_strategy(lambda: strategy(Everywhere, **rounds), num_nodes=2, steps=8, skip=QUICK)  # type: ignore[arg-type]


def test_state_that_nodes_share_is_caught_by_the_laws() -> None:
    from exogym.errors import StrategyError

    with pytest.raises(StrategyError, match="law 'repeatable'"):
        check_strategy(lambda: FedAvgStrategy(Forgetful, H=5), num_nodes=2, steps=8)


class NeedsClosure(Everywhere):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class AsksForClosure(Everywhere):
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "wanted a closure"


class SubLBFGS(torch.optim.LBFGS):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Curious(Everywhere):
    def __init__(self, params: Any, lr: float = 0.05):
        super().__init__(params, lr)
        self.seen: set[int] = set()


class Moving(Everywhere):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


class NoRate(Optimizer):
    def __init__(self, params: Any):
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        pass


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (NeedsClosure, r"NeedsClosure cannot be used here: its step\(\) needs a closure"),
        (AsksForClosure, r"AsksForClosure cannot be used here: a step on given gradients.*wanted a closure"),
        (SubLBFGS, "SubLBFGS cannot be used here: it evaluates the loss several times"),
        (Curious, "Curious cannot be used here: its attribute 'attribute.seen' is a set, which cannot be saved"),
        (Moving, "Moving cannot be used here: its step replaces parameters by new tensors"),
    ],
)
def test_optimizers_are_refused_by_what_they_need(cls: type[Optimizer], message: str) -> None:
    for build in (lambda: FedAvgStrategy(cls), lambda: ByHand(cls), lambda: DiLoCoStrategy("sgd", cls)):
        with pytest.raises(ArgumentError, match=message):
            train(build(), num_nodes=2)


def test_an_optimizer_has_a_learning_rate() -> None:
    with pytest.raises(ArgumentError, match="has no learning rate"):
        FedAvgStrategy(NoRate)
    with pytest.raises(ArgumentError, match="has no learning rate"):
        train(DiLoCoStrategy("sgd", NoRate, H=3), num_nodes=2)


# The mean of whole numbers


@pytest.mark.parametrize("call", ["all_reduce", "reduce", "reduce_scatter"])
def test_the_mean_of_whole_numbers_is_refused(call: str) -> None:
    comm = Communicator(range(2), 2)
    x = torch.arange(4).view(2, 2)
    with pytest.raises(ArgumentError, match=r"op='mean' of torch.int64 numbers may be a fraction.*op='sum'"):
        getattr(comm, call)(x, op="mean")
    with pytest.raises(ArgumentError, match=r"op='mean' of torch.int64"):
        comm.sum_decoded([x], lambda part: part, "mean")
    assert getattr(comm, call)(x, op="sum")[0].flatten()[0] == 2


# Functions of the parameters


def adamw_of(params: Any, lr: float = 0.02) -> Optimizer:
    """No weight decay for biases, as a script would write it."""
    decayed, others = ([p for p in params if (p.ndim < 2) == is_bias] for is_bias in (False, True))
    return torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": lr / 2}],
        lr=lr,
        weight_decay=0.3,
        fused=True,
    )


def spec_of_adamw(lr: float) -> OptimSpec:
    return OptimSpec("adamw", groups=[(no_bias, {"weight_decay": 0.0, "lr": lr / 2})], lr=lr, weight_decay=0.3)


@pytest.mark.parametrize("schedule", [None, "cosine"])
def test_a_function_trains_as_its_description(schedule: str | None) -> None:
    """The groups of a function are its own; the schedule scales their rates."""

    def trained(inner: Any) -> torch.Tensor:
        return train(DiLoCoStrategy(inner, H=2, lr_scheduler=schedule), num_nodes=3).rows

    assert torch.equal(trained(adamw_of), trained(spec_of_adamw(0.02)))
    given = OptimSpec(adamw_of, lr=0.05)
    assert torch.equal(trained(given), trained(spec_of_adamw(0.05)))
    assert (
        repr(given) == "OptimSpec(adamw_of, lr=0.05)"
        and describe(DiLoCoStrategy(adamw_of))["inner_optim"] == "adamw_of"
    )
    assert torch.equal(trained(functools.partial(adamw_of, lr=0.05)), trained(given))


def test_a_function_gets_the_groups_of_its_description() -> None:
    def sgd_of(params: Any) -> Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    groups = [(no_bias, {"lr": 0.01})]
    ends = [train(DiLoCoStrategy(OptimSpec(made, groups=groups, **more), H=2), num_nodes=2).rows for made, more in
            ((sgd_of, {}), ("sgd", {"lr": 0.1, "fused": False}))]  # fmt: skip
    assert torch.equal(*ends)


def test_a_function_may_make_the_outer_optimizer() -> None:
    ends = [
        train(DiLoCoStrategy("sgd", H=2, lr=0.1, outer_optim=outer, outer_lr=lr), num_nodes=2).rows
        for outer, lr in ((lambda params: torch.optim.Adam(params, lr=0.1, fused=True), None), ("adam", 0.1))
    ]
    assert torch.equal(*ends)


KEPT = nn.Linear(2, 2)
WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (
        lambda params: None,
        "returned None: expected a torch.optim.Optimizer of the parameters that it received",
    ),
    "others": (
        lambda params: torch.optim.SGD(KEPT.parameters(), 0.1),
        "instead of the 2 that it received: build it from all of them",
    ),
    "some": (lambda params: torch.optim.SGD(params[:1], 0.1), "an optimizer of 1 parameters instead of the 2"),
    "an error": (lambda params: torch.optim.SGD(params, lr=-1), "cannot be built: Invalid learning rate"),
    "closure": (lambda params: torch.optim.LBFGS(params), "LBFGS cannot be used here"),
    "no argument": (lambda: None, "cannot be built"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_function_that_makes_no_optimizer_of_its_parameters_is_refused(name: str) -> None:
    make, said = WRONG[name]
    with pytest.raises(ArgumentError, match=said):
        DiLoCoStrategy(make)


def test_a_function_has_no_rate_beside_its_arguments() -> None:
    with pytest.raises(ArgumentError, match="has no argument 'lr'"):
        DiLoCoStrategy(lambda params: torch.optim.SGD(params, lr=0.1), lr=0.2)


def test_functions_are_refused_where_the_optimizer_s_arguments_count() -> None:
    with pytest.raises(ArgumentError, match=r"no a_i is known for .*<lambda>"):
        FedNovaStrategy(lambda params: torch.optim.SGD(params, lr=0.1))
    model = Regressor()
    with pytest.raises(ArgumentError, match="leave inner_optim out of the strategy"):
        attach(model, torch.optim.AdamW(model.parameters()), DiLoCoStrategy(adamw_of))
    for strategy in (DiLoCoStrategy(adamw_of), DiLoCoStrategy(outer_optim=adamw_of)):
        assert "an optimizer from a function" in strategy.features_in_parts()
