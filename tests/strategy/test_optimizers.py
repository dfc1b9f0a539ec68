"""Every optimizer of torch, and popular ones from PyPI: N nodes are N plain loops, also stopped and resumed elsewhere.

What is found is the table of docs/recipes.md. `PYTHONPATH=tests python tests/strategy/test_optimizers.py` prints it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import tempfile
from collections.abc import Callable
from typing import Any

import lion_pytorch
import prodigyopt
import pytest
import pytorch_optimizer
import schedulefree
import torch
import torch.nn.functional as F
from battery import each
from paths import ROOT
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.core.base.torch_private import bare_step
from exogym.core.fleet.layout import hidden_matrices
from exogym.errors import ExoGymError
from exogym.strategy import CommunicateOptimizeStrategy, DiLoCoStrategy, OptimSpec, Strategy
from exogym.strategy.muon import MuonAdamW

PAGE = ROOT / "docs" / "recipes.md"
NODES, STEPS, BATCH, H = 3, 6, 4, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TORCHS = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer
}
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
P = pytorch_optimizer
OTHERS: dict[str, tuple[str, type[Optimizer], dict[str, Any]]] = {
    "AdamWScheduleFree": ("schedulefree", schedulefree.AdamWScheduleFree, {"warmup_steps": 2}),
    "RAdamScheduleFree": ("schedulefree", schedulefree.RAdamScheduleFree, {"silent_sgd_phase": False}),
    "SGDScheduleFree": ("schedulefree", schedulefree.SGDScheduleFree, {}),
    "AdamWScheduleFreeClosure": ("schedulefree", schedulefree.AdamWScheduleFreeClosure, {}),
    "Prodigy": ("prodigyopt", prodigyopt.Prodigy, {"d0": 1e-2}),
    "Lion": ("lion-pytorch", lion_pytorch.Lion, {}),
    "AdaBelief": ("pytorch-optimizer", P.AdaBelief, {}),
    "ADOPT": ("pytorch-optimizer", P.ADOPT, {}),
    "Lamb": ("pytorch-optimizer", P.Lamb, {}),
    "SOAP": ("pytorch-optimizer", P.SOAP, {"precondition_frequency": 2}),
    "Kron": ("pytorch-optimizer", P.Kron, {}),
    "ScheduleFreeAdamW": ("pytorch-optimizer", P.ScheduleFreeAdamW, {}),
    "AdaHessian": ("pytorch-optimizer", P.AdaHessian, {}),
    "SAM": ("pytorch-optimizer", P.SAM, {"base_optimizer": torch.optim.SGD}),
}
GIVEN: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "Rprop": {}, "Muon": {}}
ENTRIES: dict[str, tuple[str, type[Optimizer], dict[str, Any]]] = {
    **{name: ("torch", cls, GIVEN.get(name, {})) for name, cls in sorted(TORCHS.items())},
    '"muon"': ("here", MuonAdamW, {}),
    **OTHERS,
}
OF_EACH_KIND = (  # fused or not, in parts, with state on the object, rounded, refused for this or that
    *("AdamW", "Rprop", '"muon"', "AdamWScheduleFree", "Prodigy", "SOAP"),
    *("LBFGS", "SparseAdam", "AdaHessian", "SAM"),
)
ROUNDED = ("SOAP", "Kron")  # matrix factorisations, which round differently at another place in memory
REASONS = {  # of refusals: words of the message, and what the page says
    "a closure that evaluates": "the optimizer needs a closure",
    "several times per step": "the optimizer needs a closure",
    "sparse gradients": "the optimizer needs sparse gradients",
    "without a closure or a graph": "the optimizer needs a closure or the gradients' graph",
    "draws random numbers": "the optimizer draws random numbers",
}


class Net(nn.Module):
    """Its matrices hold whole vectors of the CPU's kernels, and rests; the loss is computed in fp32."""

    def __init__(self, dtype: torch.dtype, bias: bool):
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Sequential(
            nn.Linear(8, 20, bias=bias), nn.Tanh(), nn.Linear(20, 6, bias=bias), nn.Tanh(), nn.Linear(6, 3, bias=bias)
        )
        self.to(dtype)
        self.dtype = dtype

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.body(x.to(self.dtype)).float(), y)


@functools.cache
def data(node: int) -> TensorDataset:
    g = torch.Generator().manual_seed(node)
    x = torch.randn(STEPS * BATCH, 8, generator=g)
    return TensorDataset(x, 3 * torch.sin(x[:, :3]) + node)


def batches(node: int) -> list[tuple[Tensor, ...]]:
    return [tuple(t[k * BATCH : (k + 1) * BATCH] for t in data(node).tensors) for k in range(STEPS)]


def spec_of(name: str, dtype: torch.dtype) -> OptimSpec:
    _, cls, kwargs = ENTRIES[name]
    if dtype == torch.float16 and "eps" in inspect.signature(cls).parameters:
        kwargs = {**kwargs, "eps": (1e-5, 1e-3) if name == "Adafactor" else 1e-3}  # the defaults are 0 in fp16
    return OptimSpec(cls, **kwargs)


def plain_optimizer(spec: OptimSpec, model: nn.Module, dtype: torch.dtype) -> Optimizer:
    """As one would build it by hand, with torch's fused kernel where it is right."""
    if spec.cls is MuonAdamW:
        mine = hidden_matrices(model)
        parts = [[p for n, p in model.named_parameters() if (n in mine) is muon] for muon in (True, False)]
        muon = {k: v for k, v in spec.kwargs.items() if k != "eps"}
        return Both(
            torch.optim.Muon(parts[0], adjust_lr_fn="match_rms_adamw", **muon),
            torch.optim.AdamW(parts[1], weight_decay=0.1, fused=dtype == torch.float32, **spec.kwargs),
        )
    fused = {"fused": True} if spec.cls in FUSED and dtype == torch.float32 else {}
    optimizer = spec.cls(model.parameters(), **spec.kwargs, **fused)
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    return optimizer


class Both:
    def __init__(self, *optimizers: Optimizer):
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def plain(spec: OptimSpec, dtype: torch.dtype, bias: bool, seed: Callable[[int, int], None] | None) -> list[Tensor]:
    """The rows after training each node by a loop of its own."""
    rows = []
    for node in range(NODES):
        model = Net(dtype, bias)
        optimizer = plain_optimizer(spec, model, dtype)
        for step, batch in enumerate(batches(node)):
            if seed is not None:
                seed(node, step)
            for p in model.parameters():
                p.grad = None
            model(batch).backward()
            optimizer.step()
        rows.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    return rows


def plain_outer(spec: OptimSpec, dtype: torch.dtype, bias: bool) -> list[Tensor]:
    """DiLoCo by hand: H steps of SGD on each node, and the outer optimizer on the mean difference."""
    theta = Net(dtype, bias)
    outer = plain_optimizer(spec, theta, dtype)
    models = [copy.deepcopy(theta) for _ in range(NODES)]
    for step in range(STEPS):
        for node, model in enumerate(models):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
            optimizer.zero_grad()
            model(batches(node)[step]).backward()
            optimizer.step()
        if (step + 1) % H == 0:
            for t, *ps in zip(theta.parameters(), *(m.parameters() for m in models), strict=True):
                deltas = [t.detach() - p.detach() for p in ps]
                t.grad = ((deltas[0] + deltas[1]) + deltas[2]).div_(NODES)  # the tree over three nodes
            outer.step()
            for model in models:
                model.load_state_dict(theta.state_dict())
    return [nn.utils.parameters_to_vector(theta.parameters()).detach()] * NODES


def fleet(strategy: Strategy, dtype: torch.dtype, bias: bool) -> list[Tensor]:
    """The rows after training in two processes to the middle, and in one to the end."""
    rows: list[Tensor] = []

    def look(loop: Any) -> bool:
        if loop.step == STEPS:
            rows.extend(loop.fleet.blocks[0].params.clone())
        return True

    with tempfile.TemporaryDirectory() as folder:
        for processes in (2, 1):
            trainer = LocalTrainer(Net(dtype, bias), lambda rank, num_nodes, is_train: data(rank))
            trainer.fit(
                strategy, num_nodes=NODES, batch_size=BATCH, max_steps=STEPS, shuffle=False, final_sync=False,
                device="cpu", processes=processes, save_dir=folder, checkpoint_interval=3, resume=processes == 1,
                callbacks=[Every(3, look)],
            )  # fmt: skip
    return rows


def compared(name: str, precision: str, build: Callable[[OptimSpec], Strategy], by_hand: Callable[..., Any]) -> str:
    """Return what happens with an optimizer, in a word or two."""
    dtype, bias = DTYPES[precision], name != "Muon"
    try:
        spec = spec_of(name, dtype)
        found = fleet(build(spec), dtype, bias)
    except ExoGymError as error:
        return "refused: " + next(short for words, short in REASONS.items() if words in str(error))
    except (RuntimeError, TypeError, ValueError) as error:
        with pytest.raises(type(error)):
            by_hand(spec, dtype, bias)
        return "fails in torch too"
    expected = by_hand(spec, dtype, bias)
    assert all(
        x.isfinite().all() and not torch.equal(x, y) for x, y in zip(expected, plain_start(dtype, bias), strict=True)
    )
    for a, b in zip(found, expected, strict=True):
        if name in ROUNDED:
            torch.testing.assert_close(a, b, rtol=3e-2 if dtype != torch.float32 else 1e-5, atol=1e-3)
        else:
            assert torch.equal(a, b), f"{name} differs in {precision} by {float((a - b).abs().max()):.3g}"
    return "equal up to rounding" if name in ROUNDED else "bitwise identical"


@functools.cache
def plain_start(dtype: torch.dtype, bias: bool) -> list[Tensor]:
    return [nn.utils.parameters_to_vector(Net(dtype, bias).parameters()).detach()] * NODES


def seeds(node: int, step: int) -> None:
    from exogym.core.base.rng import stream_seed

    torch.manual_seed(stream_seed(0, "step", node, step))


def found(name: str) -> str:
    """Return the result of the optimizer, as the table says it."""

    def inside(spec: OptimSpec) -> Strategy:
        return CommunicateOptimizeStrategy(spec)

    def outside(spec: OptimSpec) -> Strategy:
        return DiLoCoStrategy(OptimSpec("sgd", lr=0.05), spec, H=H)

    inner = {compared(name, precision, inside, functools.partial(plain, seed=seeds)) for precision in DTYPES}
    result = ", ".join(sorted(inner))
    if result.startswith("refused"):
        return result
    outer = compared(name, "fp32", outside, plain_outer)
    return result if outer == result else f"{result}; as outer optimizer {outer}"


HEADER = ["| result | optimizers |", "| --- | --- |"]


def table() -> dict[str, list[tuple[str, str]]]:
    """Return (package, result) of each optimizer on the page, by name."""
    lines = PAGE.read_text().splitlines()
    start = lines.index(HEADER[0])
    stop = next(k for k in range(start, len(lines)) if not lines[k].startswith("|"))
    rows: dict[str, list[tuple[str, str]]] = {}
    for row in lines[start + 2 : stop]:
        result, packages = row.strip("| ").split(" | ")
        for package, names in (given.split(": ") for given in packages.split("; ")):
            for name in names.split(", "):
                rows.setdefault(name, []).append((package, result))
    return rows


@pytest.mark.parametrize("name", each(ENTRIES, fast=OF_EACH_KIND))
def test_the_page_says_what_is_found(name: str) -> None:
    assert table()[name] == [(ENTRIES[name][0], found(name))]


def test_the_page_lists_what_is_tried() -> None:
    assert sorted(table()) == sorted(ENTRIES)


if __name__ == "__main__":
    for entry in ENTRIES:
        print(f"{ENTRIES[entry][0]}: {entry}: {found(entry)}", flush=True)


@pytest.mark.parametrize("of_all", [False, True])
def test_hooks_of_a_step_run(of_all: bool) -> None:
    """Those of one optimizer, and those of all; without, the step is torch's bare one."""
    seen: list[str] = []
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    register = register_optimizer_step_post_hook if of_all else optimizer.register_step_post_hook
    hook = register(lambda *_: seen.append("after"))
    bare_step(optimizer)()
    hook.remove()
    assert seen == ["after"]
    bare_step(optimizer)()
    assert seen == ["after"] and isinstance(bare_step(optimizer), functools.partial)


def test_hooks_of_all_optimizers_run_in_training() -> None:
    steps: list[str] = []
    hook = register_optimizer_step_pre_hook(lambda *_: steps.append("before"))
    try:
        x = torch.randn(24, 3)
        data = TensorDataset(x, x.sum(1, keepdim=True))
        trainer = LocalTrainer(nn.Linear(3, 1), data, loss_fn=F.mse_loss)
        trainer.fit(DiLoCoStrategy("sgd", H=2, lr=0.01), num_nodes=2, max_steps=4, batch_size=3)
    finally:
        hook.remove()
    assert len(steps) >= 2 * 4
