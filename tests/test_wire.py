"""The wire between processes gives the bits of one process, for real gloo processes on loopback."""

import multiprocessing
import os
import tempfile

import pytest
import torch
import torch.distributed as dist

from exogym.communicator import Wire
from exogym.engine.wire import ProcessWire, place

WIDTH = 1001


def matrix(nodes: int) -> torch.Tensor:
    return torch.randn(nodes, WIDTH, generator=torch.Generator().manual_seed(0))


def calls(wire: Wire, x: torch.Tensor, nodes: int) -> list[torch.Tensor]:
    """Every kind of call, as a strategy would make it, on the rows `x` that are here."""
    everyone, some, one = list(range(nodes)), list(range(0, nodes, 2)), [nodes - 1]
    results = []
    for ids in (everyone, some, one):
        results += [wire.reduce(x, ids, op) for op in ("sum", "mean", "max", "min")]
        weights = torch.rand(len(ids), generator=torch.Generator().manual_seed(1))
        results.append(wire.reduce(x, ids, "mean", weights))
        results.append(wire.rows(x, ids))
    results.append(wire.reduce(x[:, :2], everyone, "sum"))  # fewer columns than processes
    results.append(wire.rows((x[:, :4] * 100).int(), some))
    return results


def member(rank: int, processes: int, nodes: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    placement = place(nodes, processes)
    wire = ProcessWire(placement)
    torch.save(calls(wire, matrix(nodes)[placement[rank]], nodes), os.path.join(folder, f"{rank}.pt"))
    dist.destroy_process_group()


@pytest.mark.parametrize(("processes", "nodes"), [(2, 5), (3, 8), (4, 4)])
def test_bits_do_not_depend_on_the_number_of_processes(processes, nodes):
    wanted = calls(Wire(range(nodes)), matrix(nodes), nodes)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        members = [context.Process(target=member, args=(r, processes, nodes, folder)) for r in range(processes)]
        for process in members:
            process.start()
        for process in members:
            process.join(120)
        assert [process.exitcode for process in members] == [0] * processes
        for rank in range(processes):
            got = torch.load(os.path.join(folder, f"{rank}.pt"), weights_only=True)
            assert len(got) == len(wanted)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_a_plain_sum_has_other_bits():
    """The control: the order of a sum matters, so the tree is needed."""
    x = matrix(8)
    assert not torch.equal(Wire(range(8)).reduce(x, list(range(8)), "sum"), x.flip(0).cumsum(0)[-1])
