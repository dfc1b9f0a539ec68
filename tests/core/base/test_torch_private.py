"""The private parts of torch, each tried by itself: where another torch has changed one, its test says which.

Tried with the versions in `TRIED_WITH` of `exogym.core.base.torch_private`. With another version each test asks for the
same behavior, so a failure names the part to look at.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from paths import ROOT
from processes import everywhere
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, Dataset

from exogym.core.base import torch_private
from exogym.core.base.torch_private import TRIED_WITH
from exogym.errors import ModelError
from exogym.mesh import torch_private as mesh_private

TRIED: dict[str, str] = {}  # name in torch_private -> the part of torch behind it


@contextlib.contextmanager
def as_it_was(name: str, part: str) -> Iterator[None]:
    """Whatever goes wrong inside is told as a change of `part`."""
    try:
        yield
    except Exception as error:
        place = f"exogym/{'core/base' if hasattr(torch_private, name) else 'mesh'}/torch_private.py"
        raise AssertionError(
            f"{part} of torch {torch.__version__} is not what it was in torch {', '.join(TRIED_WITH)}: mend "
            f"`{name}` in {place} ({type(error).__name__}: {error})"
        ) from error


def tries(name: str, part: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark the test of `name`, which stands for `part` of torch."""
    TRIED[name] = part

    def around(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def told(*args: Any, **kwargs: Any) -> None:
            with as_it_was(name, part):
                test(*args, **kwargs)

        return told

    return around


# Versions


def test_the_floor_is_the_oldest_torch_that_all_parts_were_tried_with() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    (floor,) = (line for line in dependencies if re.match(r"torch\b", line))
    assert floor == f"torch>={TRIED_WITH[0].removesuffix('.0')}"
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.M)
    assert pinned in TRIED_WITH
    numbers = [tuple(map(int, version.split("."))) for version in TRIED_WITH]
    assert numbers == sorted(numbers)


def test_each_part_has_a_test() -> None:
    places = (torch_private, mesh_private)
    named = {n for place in places for n, x in vars(place).items() if getattr(x, "__module__", "") == place.__name__}
    assert {name for name in named if not name.startswith("_")} == TRIED.keys() - {"AGENT_LOGGERS"}


def test_a_part_that_has_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_foreach_mul_", lambda tensors, factor: None)
    with pytest.raises(AssertionError, match=re.escape("torch._foreach_mul_ of torch 2.")) as changed:
        test_a_list_is_scaled()
    assert "mend `scale_` in exogym/core/base/torch_private.py" in str(changed.value)
    monkeypatch.delattr(torch, "_foreach_mul_")
    with pytest.raises(AssertionError, match="no attribute '_foreach_mul_'"):
        test_a_list_is_scaled()


# Tensors


def two() -> list[torch.Tensor]:
    return [torch.arange(3.0), torch.tensor([[-2.0, 0.5]])]


@tries("scale_", "torch._foreach_mul_")
def test_a_list_is_scaled() -> None:
    for factor in (0.3, torch.tensor(0.3)):
        tensors = two()
        torch_private.scale_(tensors, factor)
        for got, x in zip(tensors, two(), strict=True):
            assert torch.equal(got, x * factor)


@tries("copy_", "torch._foreach_copy_")
def test_a_list_is_copied() -> None:
    targets = [torch.zeros_like(x, dtype=torch.float64) for x in two()]
    torch_private.copy_(targets, two())
    for got, x in zip(targets, two(), strict=True):
        assert torch.equal(got, x.double())


@tries("add_", "torch._foreach_add_")
def test_a_list_is_added() -> None:
    tensors = two()
    torch_private.add_(tensors, two(), alpha=0.5)
    torch_private.add_(tensors, two())
    for got, x in zip(tensors, two(), strict=True):
        assert torch.equal(got, x + 0.5 * x + x)


@tries("strided_parts", "Tensor._indices and Tensor._values")
def test_parts_of_a_sparse_tensor_are_its_own_memory() -> None:
    x = torch.eye(3).to_sparse()
    indices, values = torch_private.strided_parts(x)
    values.mul_(2)
    assert torch.equal(x.to_dense(), 2 * torch.eye(3)) and indices.shape == (2, 3)
    assert torch_private.strided_parts(values)[0] is values


@tries("differences", "torch._foreach_sub")
def test_differences_are_of_each() -> None:
    others = [torch.ones_like(x) for x in two()]
    for got, x in zip(torch_private.differences(two(), others), two(), strict=True):
        assert torch.equal(got, x - 1)


@tries("norms", "torch._foreach_norm")
def test_norms_are_of_each() -> None:
    found = torch_private.norms([*two(), torch.tensor([torch.nan])])
    assert [n.shape for n in found] == [torch.Size()] * 3 and torch.isnan(found[2])
    for got, x in zip(found, two(), strict=False):
        torch.testing.assert_close(got, torch.linalg.vector_norm(x))


@tries("version", "Tensor._version")
def test_writing_in_place_counts() -> None:
    x = torch.zeros(3)
    view, before = x[1:], torch_private.version(x)
    torch_private.version(x)
    assert torch_private.version(view) == before
    view.add_(0.0)  # changes no value
    assert torch_private.version(x) == torch_private.version(view) == before + 1
    with torch.no_grad():
        x.mul_(1.0)
    assert torch_private.version(x) == before + 2


# Modules


@tries("own_parameters", "nn.Module._parameters")
def test_a_module_uses_the_parameters_in_its_dict() -> None:
    module = nn.Sequential(nn.Linear(2, 1, bias=False))
    assert not torch_private.own_parameters(module)
    own = torch_private.own_parameters(module[0])
    assert own["weight"] is module[0].weight and own["bias"] is None
    own["weight"] = nn.Parameter(torch.tensor([[2.0, 3.0]]))
    assert module(torch.ones(2)).item() == 5.0


@tries("own_buffers", "nn.Module._buffers")
def test_a_module_uses_the_buffers_in_its_dict() -> None:
    module = nn.BatchNorm1d(2)
    own = torch_private.own_buffers(module)
    assert list(own) == ["running_mean", "running_var", "num_batches_tracked"]
    own["running_mean"] = mean = torch.full((2,), 7.0)
    assert module.running_mean is mean
    module(torch.randn(4, 2))
    assert (mean < 7).all()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, as it imports its compiler
@tries("uncompiled", "the wrapper of torch.compile")
def test_the_module_inside_torch_compile_is_found() -> None:
    model = nn.Linear(2, 1)
    assert torch_private.uncompiled(torch.compile(model)) is model
    assert torch_private.uncompiled(model) is model


# Optimizers


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(2, 3))]


def two_steps(optimizer: torch.optim.Optimizer, ps: list[nn.Parameter]) -> None:
    """The first parameter has a gradient in both steps, the second in the second step only."""
    ps[0].grad = torch.ones_like(ps[0])
    optimizer.step()
    ps[1].grad = torch.ones_like(ps[1])
    optimizer.step()


@tries("FusedSGD", "SGD._init_group")
def test_fused_sgd_may_meet_a_gradient_late() -> None:
    plain, fused = parameters(), parameters()
    two_steps(torch.optim.SGD(plain, lr=0.1, momentum=0.9, fused=False), plain)
    optimizer = torch_private.FusedSGD(fused, lr=0.1, momentum=0.9, fused=True)
    two_steps(optimizer, fused)
    assert all(map(torch.equal, plain, fused)) and optimizer.param_groups[0]["fused"] is False
    optimizer.step()
    assert optimizer.param_groups[0]["fused"] is True


@tries("bare_step", "FusedSGD's plain step, which calls torch's kernel itself,")
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "maximize": True}, {"momentum": 0.9}])
def test_a_plain_step_of_fused_sgd_is_its_step(options: Any) -> None:
    wrapped, bare = parameters(), parameters()
    two_steps(torch_private.FusedSGD(wrapped, lr=0.1, fused=True, **options), wrapped)
    optimizer = torch_private.FusedSGD(bare, lr=0.1, fused=True, **options)
    optimizer.step = torch_private.bare_step(optimizer)
    assert optimizer.step.args[0] is torch_private.FusedSGD.plain_step
    two_steps(optimizer, bare)
    assert torch.is_grad_enabled() and all(map(torch.equal, wrapped, bare))
    mixed = torch_private.FusedSGD(
        [*parameters(), nn.Parameter(torch.ones(2, dtype=torch.float64))], lr=0.1, fused=True
    )
    assert torch_private.bare_step(mixed).args[0] is not torch_private.FusedSGD.plain_step


@tries("FusedSGD", "torch's fused SGD, which needs FusedSGD in its stead:")
def test_torchs_own_fused_sgd_fails_there() -> None:
    """The control: where torch has mended it, FusedSGD can go."""
    ps = parameters()
    with pytest.raises(TypeError, match="got NoneType"):
        two_steps(torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True), ps)


@tries("can_fuse", "which numbers fused kernels on the CPU compute")
def test_fused_kernels_on_the_cpu_need_wide_numbers() -> None:
    wide, half = torch.ones(9), torch.ones(9, dtype=torch.bfloat16)
    assert torch_private.can_fuse([wide, wide.double()]) and not torch_private.can_fuse([wide, half])


@tries("is_torchs", "where optimizers are defined")
def test_torchs_own_optimizers_are_known() -> None:
    own = type("Own", (torch.optim.SGD,), {"__module__": "theirs"})
    assert torch_private.is_torchs(torch.optim.SGD) and not torch_private.is_torchs(own)


@tries("bare_step", "what is wrapped around Optimizer.step")
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_bare_step_is_the_same_step(cls: Any) -> None:
    wrapped, bare = parameters(), parameters()
    two_steps(cls(wrapped, lr=0.1), wrapped)
    optimizer = cls(bare, lr=0.1)
    step = torch_private.bare_step(optimizer)
    assert isinstance(step, functools.partial) and step.args[0].__code__.co_name == "step"
    optimizer.step = step
    two_steps(optimizer, bare)
    assert torch.is_grad_enabled() and all(map(torch.equal, wrapped, bare))


@tries("bare_step", "the step of LBFGS")
def test_what_else_is_wrapped_around_a_step_stays() -> None:
    cls = torch.optim.LBFGS  # its step switches gradients off by a wrapper that any function may have
    step = torch_private.bare_step(cls(parameters()))
    assert isinstance(step, functools.partial) and step.func is cls.step.__wrapped__
    assert step.func.__code__.co_name != "step"


@tries("bare_step", "where an optimizer keeps its hooks,")
def test_a_step_with_hooks_keeps_its_wrapper() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    own = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
    for register in (*own, register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        assert torch_private.bare_step(optimizer) != optimizer.step
        handle = register(lambda *a: None)
        assert torch_private.bare_step(optimizer) == optimizer.step
        handle.remove()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # counts the steps
    assert torch_private.bare_step(optimizer) == optimizer.step


APART = """
import sys, torch
from exogym.core.base import torch_private
from exogym.strategy.registry import parse_strategy
p = torch.nn.Parameter(torch.ones(3))
p.grad = torch.ones(3)
for cls in (torch.optim.SGD, torch.optim.AdamW):
    with torch_private.without_compiler():
        optimizer = cls([p], lr=0.1)
    torch_private.bare_step(optimizer)()
parse_strategy("desloc")  # takes a step of its optimizer, to see its moments
print("torch._dynamo" in sys.modules)
torch.optim.SGD([p], lr=0.1)
print("torch._dynamo" in sys.modules)
with torch_private.without_compiler():
    torch.optim.SGD([p], lr=0.1)
"""


@tries("without_compiler", "how an optimizer imports torch's compiler")
def test_the_compiler_is_not_imported_for_an_optimizer() -> None:
    """And is as soon as torch alone makes one: the control."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:`torch.jit", "-c", APART], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("False\nTrue\n", "")


@tries("is_of_every_optimizer", "what an Optimizer keeps in its attributes")
def test_what_every_optimizer_keeps_is_known() -> None:
    ours = 0
    for cls in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop):
        kinds = [{}, {"fused": True}] if "fused" in inspect.signature(cls).parameters else [{}]
        for kwargs in kinds:
            ps = parameters()
            optimizer = cls(ps, lr=0.1, **kwargs)
            optimizer.own = ours
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
            ps[0].grad = torch.ones_like(ps[0])
            optimizer.step()
            kept = {n for n in vars(optimizer) if not torch_private.is_of_every_optimizer(n)}
            assert kept - {"step"} == {"own"}, cls  # a scheduler puts a `step` of its own there


# Loading data


class Sleeper(Dataset[int]):
    """The third example takes a minute."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        time.sleep(60 if index == 2 else 0)
        return index


@tries("end_workers", "the iterator of a DataLoader with workers")
def test_a_worker_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)  # so long torch waits for a worker
    batches = iter(DataLoader(Sleeper(), batch_size=1, num_workers=1, multiprocessing_context="fork"))
    assert next(batches) == torch.tensor([0])
    (worker,) = batches._workers  # type: ignore[attr-defined]
    assert worker.is_alive()
    torch_private.end_workers(batches)
    worker.join(30)
    assert not worker.is_alive()


# The elastic agent


@tries("failure_of", "the line in which the elastic agent says that a process failed")
def test_the_agents_line_on_a_failure_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")  # or it would keep them
    found: list[logging.LogRecord] = []
    logger = logging.getLogger(torch_private.FAILURE_LOGGER)
    assert logger.name.startswith(torch_private.AGENT_LOGGERS)

    class Listens(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            found.append(record)
            return False

    listens = Listens()
    logger.addFilter(listens)
    try:
        running = start_processes(
            "two", "/bin/sh", {0: ("-c", "exit 0"), 1: ("-c", "exit 3")}, {0: {}, 1: {}}, DefaultLogsSpecs(tmp_path)
        )  # fmt: skip
        pids = running.pids()
        result = running.wait(timeout=300, period=0.01)
    finally:
        logger.removeFilter(listens)
    assert result is not None and result.failures[1].exitcode == 3
    failures = [said for record in found if (said := torch_private.failure_of(record)) is not None]
    assert failures == [(1, pids[1], 3)]
    assert torch_private.failure_of(logging.makeLogRecord({"msg": "all is well (%s)", "args": (1, 2, 3)})) is None


# Fully sharded modules


def sharded(tmp_path: Path, body: Callable[[nn.Module, list[Any], int], None]) -> None:
    """Run `body(model, handles, rank)` in two processes, with a model of 3 x 2 weights that they share out."""

    def member(rank: int) -> None:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        model = nn.Sequential(nn.Linear(2, 3, bias=False))
        with torch.no_grad():
            model[0].weight.copy_(torch.arange(6.0).view(3, 2))
        fully_shard(model, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))
        body(model, mesh_private.sharded_parameters(model), rank)
        dist.destroy_process_group()

    everywhere(2, member)


@tries("sharded_parameters", "FSDPModule._get_fsdp_state and FSDPParam._module_info")
def test_sharded_parameters_are_found(tmp_path: Path) -> None:
    def body(model: nn.Module, found: list[Any], rank: int) -> None:
        ((owner, attribute, handle),) = found
        assert owner is model[0] and attribute == "weight" and handle.sharded_param.shape == (3, 2)  # type: ignore[index]

    sharded(tmp_path, body)


@tries("hold_shard", "FSDPParam._sharded_param_data and DTensor._local_tensor")
def test_a_shard_is_memory_of_our_own(tmp_path: Path) -> None:
    def body(model: nn.Module, found: list[Any], rank: int) -> None:
        for room in (8, 0):  # behind the smaller shard, which is sent as large as the other
            row = torch.full((9 + room,), 100.0)
            shard = row[3:7].view(2, 2) if rank == 0 else row[len(row) - room - 2 :][:2].view(1, 2)
            shard.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0]]) if rank == 0 else torch.tensor([[3.0, 3.0]]))
            mesh_private.hold_shard(found[0][2], shard)
            assert model(torch.ones(1, 2)).tolist() == [[1.0, 2.0, 6.0]]
            model.reshard()  # type: ignore[operator]
            shard.mul_(2)  # it sees what is done to the row
            if room or rank == 0:
                mesh_private.hold_shard(found[0][2], shard)
            assert model(torch.ones(1, 2))[0, :2].tolist() == [2.0, 4.0]
            model.reshard()  # type: ignore[operator]

    sharded(tmp_path, body)


@tries("take_gradient", "FSDPParam.sharded_param")
def test_the_gradient_of_a_shard_is_taken(tmp_path: Path) -> None:
    def body(model: nn.Module, found: list[Any], rank: int) -> None:
        assert mesh_private.take_gradient(found[0][2].sharded_param) is None
        (model(torch.full((1, 2), 1.0 + rank)).sum() * 2).backward()
        grad = mesh_private.take_gradient(found[0][2].sharded_param)
        assert type(grad) is torch.Tensor and grad.tolist() == [[3.0, 3.0]] * (2 - rank)
        assert mesh_private.take_gradient(found[0][2].sharded_param) is None

    sharded(tmp_path, body)


@tries("Plain", "what fully_shard leaves on modules")
def test_sharded_modules_are_made_plain_again(tmp_path: Path) -> None:
    def member(rank: int) -> None:
        dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 2), rank=rank, world_size=2)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        calls: list[int] = []
        model.register_forward_hook(lambda *_: calls.append(1))
        weight, kept = model[0].weight, set(vars(model))
        for _ in range(2):  # and can be sharded again
            plain = mesh_private.Plain(model)
            fully_shard(model[0], mesh=(mesh := DeviceMesh.from_group(dist.group.WORLD, "cpu")))
            fully_shard(model, mesh=mesh)
            model(torch.ones(1, 2)).sum().backward()
            assert model[0].weight is not weight
            plain.restore()
            assert type(model) is nn.Sequential and type(model[0]) is nn.Linear and model[0].weight is weight
            assert set(vars(model)) == kept and weight.grad is None
            model(torch.ones(1, 2)).sum().backward()
            assert weight.grad is not None
            weight.grad = None
        assert len(calls) == 4
        assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        copy.deepcopy(model)  # which torch refuses of a sharded one
        dist.destroy_process_group()

    everywhere(2, member)


def with_layers(tmp_path: Path, body: Callable[[nn.Module, int], None]) -> None:
    """Run `body(model, rank)` in two processes that compute the layers of a model together."""

    def member(rank: int) -> None:
        dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 2), rank=rank, world_size=2)
        model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 1, bias=False), nn.Linear(1, 1, bias=False))
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        body(model, rank)
        dist.destroy_process_group()

    everywhere(2, member)


@tries("hold_local", "DTensor._local_tensor of a parameter")
def test_what_is_here_of_a_parameter_is_memory_of_our_own(tmp_path: Path) -> None:
    def body(model: nn.Module, rank: int) -> None:
        shapes = [(2, 2), (1, 2), (1, 1)]
        held = [torch.full(shape, 1.0 + rank if k < 2 else 2.0) for k, shape in enumerate(shapes)]
        for p, local in zip(model.parameters(), held, strict=True):
            mesh_private.hold_local(p, local)
        assert model(torch.ones(1, 2)).item() == 2 * (2 * 2 * 1 * 1 + 2 * 2 * 2 * 2)
        held[2] *= 2  # it sees what is done to the memory
        assert model(torch.ones(1, 2)).item() == 80

    with_layers(tmp_path, body)


@tries("in_this_process", "DTensor._local_tensor")
def test_what_is_here_of_a_tensor_is_found(tmp_path: Path) -> None:
    def body(model: nn.Module, rank: int) -> None:
        for p in model.parameters():
            local = p.to_local() if isinstance(p, DTensor) else p
            assert torch_private.in_this_process(p).data_ptr() == local.data_ptr()
            mesh_private.hold_local(p, own := torch.ones(1, 1))
            assert torch_private.in_this_process(p).detach().data_ptr() == own.data_ptr()

    with_layers(tmp_path, body)


@tries("take_gradient", "DTensor._local_tensor of its gradient")
def test_what_is_here_of_a_gradient_is_taken(tmp_path: Path) -> None:
    def body(model: nn.Module, rank: int) -> None:
        for p in model.parameters():
            local = p.to_local() if isinstance(p, DTensor) else p
            mesh_private.hold_local(p, torch.ones_like(local.detach()))
        assert mesh_private.take_gradient(next(model.parameters())) is None
        model(torch.ones(1, 2)).sum().backward()
        found = [mesh_private.take_gradient(p) for p in model.parameters()]
        assert [x.tolist() for x in found if type(x) is torch.Tensor] == [[[1.0, 1.0]] * 2, [[2.0, 2.0]], [[8.0]]]
        assert all(p.grad is None for p in model.parameters())

    with_layers(tmp_path, body)


@tries("forget_groups", "torch.distributed.tensor.debug._clear_sharding_prop_cache")
def test_a_mesh_is_not_taken_for_an_earlier_one_whose_processes_have_parted(tmp_path: Path) -> None:
    def member(rank: int) -> None:
        dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 2), rank=rank, world_size=2)
        for _ in range(2):
            mesh_private.forget_groups(torch.device("cpu"))
            model = nn.Linear(2, 4, bias=False)
            nn.init.ones_(model.weight)
            mesh = DeviceMesh.from_group(group := dist.new_group([0, 1]), "cpu", mesh_dim_names=("tensor",))
            parallelize_module(model, mesh, ColwiseParallel(output_layouts=Replicate()))
            model(x := torch.ones(1, 2, requires_grad=True)).sum().backward()
            assert x.grad is not None and x.grad.tolist() == [[4.0, 4.0]]
            dist.destroy_process_group(group)
        dist.destroy_process_group()

    everywhere(2, member)


# Passes without numbers


def test_a_pass_without_numbers_goes_through_layers_that_others_compute_too(tmp_path: Path) -> None:
    """Of which the others know nothing; and through a parameter that is one number in the place of all."""

    def body(model: nn.Module, rank: int) -> None:
        model[2].weight.data = torch.zeros(()).expand(1, 1)
        if rank == 0:
            with torch.no_grad(), mesh_private.Hollow(model):
                out = model(torch.ones(5, 2))
                assert out.is_meta and out.shape == (5, 1) and not isinstance(out, DTensor)

    with_layers(tmp_path, body)


@tries("Hollow", "torch.utils._python_dispatch.TorchDispatchMode")
def test_a_pass_without_numbers_has_shapes() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.Dropout(0.5))
    x, state = torch.tensor([[0, 4], [1, 2]]), torch.get_rng_state()
    with torch.no_grad(), mesh_private.Hollow(model):
        out, real = model(x), x + 1
        assert out.is_meta and out.shape == (2, 2, 3) and real.tolist() == [[1, 5], [2, 3]]
        with pytest.raises(ModelError, match="reads values computed in an earlier stage"):
            bool(out.sum() > 0)
    assert torch.equal(torch.get_rng_state(), state) and not model(x).is_meta
    with torch.no_grad(), mesh_private.Hollow(model, watches=True) as hollow:
        first = model[0](x)
        then = hollow.cut(first, "0")
        assert model[1](then).shape == (2, 2, 3)
        with pytest.raises(ModelError, match="cut after '0', but later code uses other tensors from before the cut"):
            then + first
