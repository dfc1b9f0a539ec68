"""The lower level against real gloo processes: one battery on 2, under torch's own launcher, and on 3, under ours.

`battery` runs in each process; a check that fails leaves its traceback in a file, which the test of that name shows.
"""

import copy
import datetime
import json
import math
import os
import re
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from battery import asked
from paths import TESTS
from processes import python, world
from torch import nn

from exogym import distributed as ed
from exogym.errors import ArgumentError
from exogym.machines.distributed import ReduceOp, bare, group, measure
from exogym.machines.distributed.__main__ import main as self_test_command
from exogym.machines.distributed.collectives import DTYPES, KINDS

LAUNCHERS = {
    "2 by torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    "3 by ours": ["-m", "exogym.launch", "--nproc_per_node=3", "--backend=gloo"],
}
WORLDS = ["3 forks", *(pytest.param(name, marks=pytest.mark.slow) for name in LAUNCHERS)]
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
from machines.distributed.test_distributed import battery
battery(".")
"""
CHECKS = {}


def check(function):
    """Make `function(rank, n)` a part of the battery."""
    CHECKS[function.__name__] = function
    return function


def mine(rank: int, *shape: int, dtype=torch.float64) -> torch.Tensor:
    """Return random numbers that every process can tell of every other."""
    generator = torch.Generator().manual_seed(100 + rank)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 4 + 1).to(dtype)


def together(n: int, *shape: int) -> torch.Tensor:
    return torch.stack([mine(rank, *shape) for rank in range(n)])


REFERENCE = {
    ReduceOp.SUM: lambda x: x.sum(0),
    ReduceOp.AVERAGE: lambda x: x.sum(0) / len(x),
    ReduceOp.MIN: lambda x: x.amin(0),
    ReduceOp.MAX: lambda x: x.amax(0),
    ReduceOp.PRODUCT: lambda x: x.prod(0),
}


@check
def every_operation(rank, n):
    x = mine(rank, 2 * n, 3)
    kept = x.clone()
    for op, reference in REFERENCE.items():
        wanted = reference(together(n, 2 * n, 3))
        torch.testing.assert_close(ed.all_reduce(x, op), wanted)
        torch.testing.assert_close(ed.all_reduce(x, op.value), wanted)
        torch.testing.assert_close(ed.reduce_scatter(x, op), wanted[2 * rank : 2 * rank + 2])
        for dst in range(n):
            got = ed.reduce(x, dst, op)
            assert (got is None) == (rank != dst)
            if got is not None:
                torch.testing.assert_close(got, wanted)
    assert torch.equal(x, kept)  # the argument is left alone
    assert ed.all_reduce(x).data_ptr() != x.data_ptr()
    assert torch.equal(ed.all_reduce(x), ed.all_reduce(x, "sum"))


@check
def moving_data(rank, n):
    x, everyone = mine(rank, 3, 2), [mine(r, 3, 2) for r in range(n)]
    for root in range(n):
        assert torch.equal(ed.broadcast(x, src=root), everyone[root])
        gathered = ed.gather(x, dst=root)
        assert (gathered is None) == (rank != root)
        assert gathered is None or all(torch.equal(a, b) for a, b in zip(gathered, everyone, strict=True))
        parts = [mine(10 * root + r, 4) for r in range(n)] if rank == root else None
        assert torch.equal(ed.scatter(parts, src=root), mine(10 * root + rank, 4))
    assert all(torch.equal(a, b) for a, b in zip(ed.all_gather(x), everyone, strict=True))
    assert torch.equal(x, everyone[rank])


@check
def every_dtype_travels(rank, n):
    for dtype in DTYPES:
        x = (torch.arange(4) + rank).to(dtype)
        assert all(
            a.dtype == dtype and torch.equal(a.view(torch.uint8), (torch.arange(4) + r).to(dtype).view(torch.uint8))
            for r, a in enumerate(ed.all_gather(x))
        )
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.int64, torch.int8, torch.uint8):
        x = torch.full((n,), 2).to(dtype)
        assert torch.equal(ed.all_reduce(x), torch.full((n,), 2 * n).to(dtype))
        assert torch.equal(ed.reduce_scatter(x), torch.full((1,), 2 * n).to(dtype))


@check
def odd_shapes(rank, n):
    for shape in [(), (0,), (3, 0), (1, 2, 3, 1)]:
        x = mine(rank, *shape)
        assert torch.equal(ed.broadcast(x, 1), mine(1, *shape))
        assert ed.all_reduce(x).shape == shape
        assert [part.shape for part in ed.all_gather(x)] == [shape] * n
    assert ed.reduce_scatter(torch.ones(0, 2)).shape == (0, 2)
    assert ed.scatter([torch.ones(0)] * n if rank == 0 else None).shape == (0,)
    assert rank != 0 or len(ed.gather(torch.ones(0), 0)) == n
    if rank > 0:
        ed.gather(torch.ones(0), 0)
    strided = mine(rank, 4, 3).t()[:, ::2]
    assert torch.equal(ed.broadcast(strided, 1), mine(1, 4, 3).t()[:, ::2])
    learnt = mine(rank, 3).requires_grad_()
    assert not ed.all_reduce(learnt).requires_grad


@check
def round_the_ring(rank, n):
    for x in (mine(rank, 5, 2), torch.tensor(rank), torch.tensor([rank % 2 == 0]), torch.ones(0, rank + 1)):
        if rank == 0:
            ed.send(x, 1)
        got = ed.recv((rank - 1) % n)
        if rank > 0:
            ed.send(x, (rank + 1) % n)
        before = (rank - 1) % n
        if x.numel() == 10:
            assert torch.equal(got, mine(before, 5, 2))
        elif x.numel() == 0:
            assert got.shape == (0, before + 1)
        else:
            assert got.item() == (before if x.dtype == torch.int64 else before % 2 == 0) and got.dtype == x.dtype


def refused(call, *words):
    with pytest.raises(ArgumentError) as error:
        call()
    assert all(word in str(error.value) for word in words), error.value


@check
def calls_that_do_not_fit(rank, n):
    """Every process gets the error, and the group can go on."""
    odd = rank == n - 1
    refused(
        lambda: ed.all_reduce(torch.ones(4 if odd else 3)),
        "float32 (3,)",
        f"rank {n - 1} called all_reduce(float32 (4,)",
    )
    refused(
        lambda: ed.all_gather(torch.ones(2).to(torch.int32 if odd else torch.float32)), "int32 (2,)", "float32 (2,)"
    )
    refused(lambda: ed.broadcast(torch.ones(2), src=int(odd)), "src=0", "src=1")
    refused(lambda: ed.reduce(torch.ones(2), 0, "max" if odd else "min"), "op='max'", "op='min'")
    refused(lambda: ed.barrier() if odd else ed.all_reduce(torch.ones(2)), f"rank {n - 1} called barrier()")
    refused(lambda: ed.scatter([torch.ones(1)] * n if rank == int(odd) else None, src=int(odd)), "src=0", "src=1")
    assert ed.all_reduce(torch.tensor(1)).item() == n


@check
def arguments_that_cannot_be(rank, n):
    x = torch.ones(n + 1, 2)
    refused(
        lambda: ed.reduce_scatter(x), f"first dimension of ({n + 1}, 2) cannot be divided among {n} processes", "pad it"
    )
    refused(lambda: ed.reduce_scatter(torch.tensor(1.0)), "cannot be divided")
    refused(lambda: ed.all_reduce(x, "sums"), "op='sums'", "did you mean 'sum'")
    refused(lambda: ed.all_reduce(x.int(), ReduceOp.AVERAGE), "average of torch.int32", ".float()")
    refused(lambda: ed.all_reduce(x > 0), "torch.bool", ".int()")
    refused(lambda: ed.all_reduce(x.to(torch.complex64), "max"), "not defined for complex")
    refused(lambda: ed.all_reduce(x.numpy()), "got a ndarray", "torch.as_tensor")
    refused(lambda: ed.all_gather([x]), "got a list")
    refused(lambda: ed.all_gather(x.to_sparse()), "sparse")
    refused(lambda: ed.all_gather(torch.ones([1] * 16)), "got 16")
    refused(lambda: ed.broadcast(x, src=n), f"rank {n} is too large for {n} processes")
    refused(lambda: ed.gather(x, dst=-1), "-1", "at least 0")
    refused(lambda: ed.send(x, dst=rank), "is this process: pass another")
    refused(lambda: ed.recv(src=rank), "is this process: pass another")
    if rank == 0:
        refused(lambda: ed.scatter([x] * (n + 1)), f"one tensor per process, {n}, but got {n + 1}")
        refused(lambda: ed.scatter([x] * (n - 1) + [x[0]]), "must have the same dtype and shape")
    else:
        refused(lambda: ed.scatter([x] * n), "only rank 0 (src) may pass tensors")


@check
def who_is_where(rank, n):
    info = ed.get_distributed_info()
    assert (info["rank"], info["world_size"], info["local_rank"], info["local_world_size"]) == (rank, n, rank, n)
    assert (ed.get_rank(), ed.get_world_size(), ed.is_initialized()) == (rank, n, True)
    assert (info["backend"], info["device"], info["initialized"], info["available"]) == ("gloo", "cpu", True, True)
    assert info["master_addr"] == os.environ["MASTER_ADDR"] and info["master_port"] == int(os.environ["MASTER_PORT"])
    assert info["pid"] == os.getpid() and info["restart_count"] == 0 and info["node_rank"] == 0
    with pytest.raises(ed.GroupError, match="already"):
        ed.init_process_group()


@check
def a_sampler_of_the_group(rank, n):
    ours, torchs = ed.DistributedSampler(dataset_size=10), torch.utils.data.DistributedSampler(range(10))
    assert (ours.num_replicas, ours.rank) == (n, rank) and list(ours) == list(torchs)
    seen = sorted(i for part in ed.all_gather(torch.tensor(list(ours))) for i in part.tolist())
    assert set(seen) == set(range(10)) and len(seen) == math.ceil(10 / n) * n


def model_and_batch(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    return model, mine(rank, 6, 4, dtype=torch.float32)


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@check
def gradients_are_averaged(rank, n):
    model, batch = model_and_batch(rank)
    alone = copy.deepcopy(model)
    wrapped = ed.DistributedDataParallel(model)
    assert isinstance(wrapped, nn.parallel.DistributedDataParallel)
    wrapped(batch).square().mean().backward()
    alone(batch).square().mean().backward()
    torch.testing.assert_close(gradient(model), ed.all_reduce(gradient(alone), "average"))
    assert not torch.allclose(gradient(model), gradient(alone))


@check
def no_sync_leaves_gradients_alone(rank, n):
    model, batch = model_and_batch(rank)
    alone = copy.deepcopy(model)
    wrapped = ed.DistributedDataParallel(model)
    first, second = batch.split(3)
    with ed.no_sync(wrapped):
        wrapped(first).square().mean().backward()
    alone(first).square().mean().backward()
    torch.testing.assert_close(gradient(model), gradient(alone))  # its own
    of_rank_0 = ed.broadcast(gradient(model), 0)
    assert rank == 0 or not torch.allclose(gradient(model), of_rank_0)
    wrapped(second).square().mean().backward()
    alone(second).square().mean().backward()
    torch.testing.assert_close(gradient(model), ed.all_reduce(gradient(alone), "average"))  # of the sum
    assert torch.equal(gradient(model), ed.broadcast(gradient(model), 0))  # the same everywhere


class TwoWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x, right):
        return (self.right if right else self.left)(x)


@check
def unused_parameters(rank, n):
    """With the option each process may use another part of the model; without it torch says what to do."""
    torch.manual_seed(0)
    model = ed.DistributedDataParallel(TwoWays(), find_unused_parameters=True)
    for _ in range(2):
        model(torch.ones(1, 4), right=rank == 0).sum().backward()
    torch.testing.assert_close(model.module.right.weight.grad, torch.full((1, 4), 2 / n))
    torch.testing.assert_close(model.module.left.weight.grad, torch.full((1, 4), 2 * (n - 1) / n))
    strict = ed.DistributedDataParallel(TwoWays())
    strict(torch.ones(1, 4), right=True).sum().backward()
    with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
        strict(torch.ones(1, 4), right=True).sum().backward()
    ed.barrier()


@check
def buckets(rank, n):
    """A small bucket size makes several buckets, and the first is sent before backward is over."""

    def sent(**options):
        torch.manual_seed(0)
        events = []
        layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
        model = ed.DistributedDataParallel(layers, **options)

        def hook(state, bucket):
            events.append("bucket")
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0] / n)

        model.register_comm_hook(None, hook)
        for _ in range(2):  # torch lays out the buckets anew after the first backward
            events.clear()
            layers[0].weight.register_hook(lambda g: events.append("last gradient"))
            model(torch.ones(1, 64)).sum().backward()
        return events

    small, large = sent(bucket_size_mb=0.02), sent(bucket_size_mb=25)
    assert small.count("bucket") > 2 and large.count("bucket") == 1
    assert small.index("bucket") < small.index("last gradient")
    assert large.index("bucket") > large.index("last gradient")
    assert sent(bucket_cap_mb=0.02) == small


@check
def the_self_test(rank, n):
    rows = ed.self_test(sizes_bytes=[5, 4000], repeats=1)
    assert {row["collective"] for row in rows} == set(KINDS) - {"barrier"} and len(rows) == 2 * len(measure.SHARES)
    for row in rows:
        assert row["size_bytes"] % (4 * n) == 0 and row["world_size"] == n
        assert row["time_s"] > 0 and row["latency_s"] > 0
        assert math.isclose(row["bytes_per_s"], row["size_bytes"] / row["time_s"])
        share = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1, "reduce": 1, "send": 1}.get(
            row["collective"], (n - 1) / n
        )
        assert math.isclose(row["bus_bytes_per_s"], share * row["bytes_per_s"])
    assert json.loads(json.dumps(rows)) == rows
    assert len({tuple(ed.broadcast(torch.tensor([r["time_s"] for r in rows]), 0).tolist())}) == 1
    assert len(ed.table(rows).splitlines()) == len(rows) + 1


@check
def the_self_test_finds_a_wrong_number(rank, n):
    """The control: one wrong element on one process."""
    real = {name: getattr(bare, name) for name in ("all_reduce_", "receive_", "all_gather_", "reduce_scatter_")}

    def spoilt(name):
        def call(x, *arguments):
            result = real[name](x, *arguments)
            target = result[0] if isinstance(result, list) else result
            if rank == 1 and target.is_floating_point():
                target.view(-1)[2] += 1
            return result

        return call

    for name in real:
        public = {"receive_": "send"}.get(name, name.rstrip("_"))
        setattr(bare, name, spoilt(name))
        try:
            if rank == 1:
                with pytest.raises(ed.GroupError, match=rf"{public}.* is wrong on rank 1 of {n}: element 2 is"):
                    measure._check(public, 12 * n, range(1))
            else:
                first_call_of_the_check(public, 12 * n, rank, n)
        finally:
            setattr(bare, name, real[name])
        ed.barrier()


def first_call_of_the_check(public, count, rank, n):
    """Do what rank 1 has done when it stops."""
    x = measure._values(rank, count)
    if public == "all_gather":
        ed.all_gather(x[: count // n])
    elif public == "send":
        if rank == 0:
            ed.send(x, 1)
    else:
        getattr(ed, public)(x, ReduceOp.SUM)


@check
def a_lost_member(rank, n):
    """The last check: the last process leaves while the others wait for it."""
    if rank == n - 1:
        ed.destroy_process_group()
        return
    with pytest.raises(
        ed.GroupError, match=rf"all_reduce failed on rank {rank} of {n}: another process may have ended"
    ):
        ed.all_reduce(torch.ones(3))


def battery(folder: str) -> None:
    torch.set_num_threads(1)
    ed.init_process_group(timeout_s=60)
    rank, n = ed.get_rank(), ed.get_world_size()
    for name, function in CHECKS.items():
        try:
            function(rank, n)
            text = "passed"
        except BaseException:
            text = traceback.format_exc()
        Path(folder, f"{n}-{name}-{rank}").write_text(text)
        if text != "passed":
            raise SystemExit(f"{name} failed on rank {rank}")
    ed.destroy_process_group()


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Run the battery in all worlds that are asked for; return name to folder, status and what was said."""
    found = {}
    for name in dict.fromkeys(params["world_of"] for params in asked(request, "test_battery")):
        folder = tmp_path_factory.mktemp("battery")
        if name in LAUNCHERS:
            (folder / "script.py").write_text(SCRIPT)
            done = python(*LAUNCHERS[name], "script.py", ".", TESTS, cwd=folder)
            found[name] = folder, done.returncode, done.stdout + done.stderr
        else:
            found[name] = folder, *world(3, folder, SCRIPT)
    return found


@pytest.mark.parametrize("world_of", WORLDS)
@pytest.mark.parametrize("name", CHECKS)
def test_battery(results, name, world_of):
    folder, _, said = results[world_of]
    n = int(world_of[0])
    for rank in range(n):
        path = folder / f"{n}-{name}-{rank}"
        assert path.exists(), said[-3000:]
        assert path.read_text() == "passed", path.read_text()


@pytest.mark.parametrize("world_of", WORLDS)
def test_the_launch_of_the_battery_ends_well(results, world_of):
    _, status, said = results[world_of]
    assert status == 0, said[-3000:]


# In one process


@pytest.fixture
def alone():
    """A world of one process."""
    ed.init_process_group("gloo", world_size=1, rank=0)
    yield
    ed.destroy_process_group()


@pytest.fixture(autouse=True)
def no_group_before_or_after(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "EXOGYM_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    assert not ed.is_initialized()
    yield
    assert not ed.is_initialized()


def test_a_world_of_one(alone):
    x = torch.tensor([1.0, 2.0])
    for op in ReduceOp:
        assert torch.equal(ed.all_reduce(x, op), x)
    assert torch.equal(ed.reduce(x), x) and torch.equal(ed.broadcast(x), x) and torch.equal(ed.reduce_scatter(x), x)
    assert torch.equal(ed.scatter([x]), x) and torch.equal(ed.gather(x)[0], x) and torch.equal(ed.all_gather(x)[0], x)
    assert ed.scatter([x]).data_ptr() != x.data_ptr()
    ed.barrier()
    with pytest.raises(ArgumentError, match="at least two processes"):
        ed.self_test()


def test_without_a_launcher_the_world_is_this_process_and_says_so(capsys):
    ed.init_process_group()
    assert (ed.get_rank(), ed.get_world_size()) == (0, 1)
    assert "alone in its group" in capsys.readouterr().err
    ed.destroy_process_group()
    ed.destroy_process_group()  # nothing to leave


@pytest.mark.parametrize(
    "call",
    [
        *(ed.get_rank, ed.get_world_size, ed.barrier, ed.scatter, ed.self_test, lambda: ed.recv(0)),
        *(lambda f=f: f(torch.ones(1)) for f in (ed.all_reduce, ed.broadcast, ed.reduce_scatter, ed.gather)),
        lambda: ed.DistributedSampler(dataset_size=3),
    ],
)
def test_outside_a_group(call):
    with pytest.raises(ed.GroupError, match=re.escape("call init_process_group() first")):
        call()


def test_info_without_a_group(monkeypatch):
    info = ed.get_distributed_info()
    assert (info["initialized"], info["backend"], info["rank"], info["world_size"]) == (False, None, 0, 1)
    assert "gloo" in info["backends"] and info["master_addr"] is None and info["master_port"] is None
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "5")
    assert (ed.get_distributed_info()["rank"], ed.get_distributed_info()["world_size"]) == (5, 8)
    monkeypatch.setenv("RANK", "five")
    with pytest.raises(ArgumentError, match="RANK='five' must be a whole number"):
        ed.get_distributed_info()


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ({"backend": "glou"}, {}, "did you mean 'gloo'"),
        ({"backend": "nccl"}, {}, "backend='nccl' cannot be used"),
        ({"backend": "mpi"}, {}, "backend='mpi' cannot be used: this build of torch has no mpi"),
        ({}, {"EXOGYM_BACKEND": "mist"}, "backend='mist' is not one of"),
        ({"world": 2}, {}, "did you mean 'world_size'"),
        ({"world_size": 0}, {}, "world_size=0"),
        ({"world_size": 2}, {}, "rank= is missing"),
        ({"rank": 1}, {}, "world_size= is missing"),
        ({"world_size": 2, "rank": 2}, {}, "rank=2 is too large for world_size=2"),
        ({"world_size": 2, "rank": 0}, {}, "no MASTER_ADDR and no MASTER_PORT"),
        ({"world_size": 2, "rank": 0}, {"MASTER_ADDR": "localhost"}, "no MASTER_PORT: start the script with"),
        ({"world_size": 2, "rank": 0}, {"RANK": "1", "WORLD_SIZE": "2"}, "rank=0, but the launcher has set 1"),
        ({"init_method": "tcp://localhost:1"}, {}, "world_size= and rank= are needed"),
        ({"timeout_s": 0}, {}, "timeout_s=0 must be a number over 0 seconds"),
    ],
)
def test_a_group_that_cannot_be(monkeypatch, arguments, environment, message):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        ed.init_process_group(**arguments)


def test_ways_to_meet(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")  # a script may make a world of its own under a launcher
    monkeypatch.setenv("RANK", "3")
    for arguments in (
        {"world_size": 1},
        {"init_method": f"file://{tmp_path / 'meet'}", "world_size": 1, "rank": 0},
        {"world_size": 1, "rank": 0, "timeout_s": 5},
    ):
        ed.init_process_group("gloo", **arguments)
        assert ed.get_world_size() == 1
        ed.destroy_process_group()


def test_the_backend_that_suits_the_machine(monkeypatch):
    known = []
    monkeypatch.setattr(group, "check_backend", known.append)
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert group.choose_backend(None) == "nccl" and group.choose_backend("gloo") == "gloo"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")  # more processes than GPUs
    assert group.choose_backend(None) == "gloo"
    monkeypatch.setenv("EXOGYM_BACKEND", "nccl")
    assert group.choose_backend(None) == "nccl"
    assert known == ["nccl", "gloo", "gloo", "nccl"]


def test_every_process_gets_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert group._own_gpu() == 1
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ArgumentError, match="local rank 2 sees 2 GPUs"):
        group._own_gpu()
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert group._own_gpu() == 0


def test_mpi_takes_its_ranks_from_mpirun(monkeypatch):
    made = []
    monkeypatch.setattr(group, "check_backend", lambda backend: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: made.append((args, options)))
    ed.init_process_group("mpi", timeout_s=2)
    assert made == [(("mpi",), {"timeout": datetime.timedelta(seconds=2)})]
    with pytest.raises(ArgumentError, match="gets ranks and world size from mpirun"):
        ed.init_process_group("mpi", world_size=2)


def test_nccl_carries_cuda_tensors(alone, monkeypatch):
    monkeypatch.setattr(bare, "device", lambda: torch.device("cuda", 0))
    with pytest.raises(ArgumentError, match="gloo sends cuda tensors, but got one on cpu"):
        ed.all_reduce(torch.ones(2))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("size", "replicas"), [(10, 1), (10, 3), (2, 5), (7, 7)])
def test_the_sampler_is_torchs(size, replicas, shuffle, drop_last):
    options = {"num_replicas": replicas, "shuffle": shuffle, "seed": 3, "drop_last": drop_last}
    for rank in range(replicas):
        by_size = ed.DistributedSampler(dataset_size=size, rank=rank, **options)
        by_data = ed.DistributedSampler(torch.utils.data.TensorDataset(torch.zeros(size)), rank=rank, **options)
        torchs = torch.utils.data.DistributedSampler(range(size), rank=rank, **options)
        for epoch in range(3):
            for sampler in (by_size, by_data, torchs):
                sampler.set_epoch(epoch)
            assert list(by_size) == list(by_data) == list(torchs) and len(by_size) == len(torchs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "pass either a data set, or dataset_size="),
        ({"dataset": [1], "dataset_size": 1}, "pass either"),
        ({"dataset": 10}, "dataset_size=10"),
        ({"dataset_size": 0}, "dataset_size=0"),
        ({"dataset_size": 4, "rank": 2}, "rank=2 is too large for num_replicas=2"),
        ({"dataset_size": 4, "suffle": True}, "did you mean 'shuffle'"),
    ],
)
def test_a_sampler_that_cannot_be(arguments, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        ed.DistributedSampler(**({"num_replicas": 2, "rank": 0} | arguments))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"find_unused_parameter": True}, "did you mean 'find_unused_parameters'"),
        ({"bucket_size": 1}, "did you mean 'bucket_size_mb'"),
        ({"bucket_size_mb": 1, "bucket_cap_mb": 1}, "are the same option"),
        ({"bucket_size_mb": 0}, "bucket_size_mb=0 must be"),
    ],
)
def test_a_wrapper_that_cannot_be(alone, options, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        ed.DistributedDataParallel(nn.Linear(1, 1), **options)


def test_no_sync_wants_a_wrapped_model():
    with pytest.raises(ArgumentError, match="but got a Linear"):
        ed.no_sync(nn.Linear(1, 1))


def test_the_self_test_wants_company(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["self-test", "--repeats", "1"])
    assert self_test_command() == 2
    assert "python -m exogym.launch --nproc_per_node 2 -m exogym.distributed" in capsys.readouterr().err


def test_the_table_keeps_its_columns():
    row = {"collective": "reduce_scatter", "size_bytes": 16_777_216, "world_size": 2, "time_s": 1.5, "latency_s": 2e-5}
    head, line = ed.table([row | {"bytes_per_s": 1.12e7, "bus_bytes_per_s": 5.59e6}]).splitlines()
    assert line.split() == ["reduce_scatter", "16.8", "MB", "1.5", "s", "11.2", "MB/s", "5.59", "MB/s", "20", "us"]
    assert len(head) == len(line)
