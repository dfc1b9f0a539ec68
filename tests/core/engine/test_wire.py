"""The wires between processes give the bits of one process: over shared memory, and over gloo on loopback."""

import mmap
import os
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from processes import children, descriptors, matrix, over_gloo, over_memory

from exogym.core.communicator import Communicator, Wire, barrier, gather, ship, tell
from exogym.core.communicator.ledger import Ledger
from exogym.core.communicator.messages import rows_of_givers
from exogym.core.engine import shared, world
from exogym.core.engine.engines import place
from exogym.core.engine.forks import run_forked
from exogym.core.engine.shared import Lost, SharedWire
from exogym.core.engine.wire import AT_ONCE_BYTES, PACKET_BYTES
from exogym.errors import ArgumentError, WorkerError

LAYOUTS = [(2, 5), (3, 8), (4, 4)]
DTYPES = [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]


def calls(wire, x, nodes):
    """Every kind of call, as a strategy would make it, on the rows `x` that are here."""
    everyone, some, one = list(range(nodes)), list(range(0, nodes, 2)), [nodes - 1]
    results = []
    for ids in (everyone, some, one):
        results += [wire.reduce(x, ids, op) for op in ("sum", "mean", "max", "min")]
        weights = torch.rand(len(ids), generator=torch.Generator().manual_seed(1))
        results.append(wire.reduce(x, ids, "mean", weights))
        results.append(wire.rows(x, ids))
    results.append(wire.reduce(x[:, :2], everyone, "sum"))  # fewer columns than processes
    results.append(wire.reduce(x.t().contiguous().t(), some, "sum"))  # columns first
    results.append(wire.reduce(x[:, :0], everyone, "mean"))
    results.append(wire.rows(x[:, :0], some))
    results.append(wire.rows(x[:, 0], everyone))
    results.append(wire.rows(x[:, :6].view(-1, 2, 3), everyone[::-1]))
    for dtype in DTYPES:
        odd = (x[:, :37] * 100).to(dtype)
        results += [wire.rows(odd, ids) for ids in (everyone, some, one)]
        results += [wire.reduce(odd, some, op) for op in ("max", "min")]
        if dtype.is_floating_point or dtype == torch.int64:
            results.append(wire.reduce(odd, everyone, "sum"))
    return results


def same(got, wanted):
    """Assert that two lists hold the same tensors, bit by bit."""
    assert len(got) == len(wanted)
    for k, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b), k


WIRES = {"memory": over_memory, "gloo": over_gloo}


@pytest.fixture(params=WIRES)
def over(request):
    return WIRES[request.param]


@pytest.mark.parametrize(("processes", "nodes"), LAYOUTS)
def test_bits_do_not_depend_on_the_number_of_processes(over, processes, nodes, tmp_path):
    wanted = calls(Wire(range(nodes)), matrix(nodes), nodes)
    over(processes, nodes, tmp_path, lambda wire, x: same(calls(wire, x, nodes), wanted))


@pytest.mark.parametrize(("processes", "nodes"), [(3, 3), (3, 5)])
def test_bits_do_not_depend_on_how_many_bytes_move_at_once(processes, nodes, tmp_path):
    """Rows of up to a packet are not cut. Larger ones move at once, or in rounds."""
    edges = [PACKET_BYTES // 4, AT_ONCE_BYTES // 4, 3 * AT_ONCE_BYTES // 4]
    widths = [edge + more for edge in edges for more in (-1, 0, 1)]

    def body(wire, x):
        for width in widths:
            whole = torch.randn(nodes, width, generator=torch.Generator().manual_seed(width))
            alone, mine = Wire(range(nodes)), whole[wire.ranks]
            for ids in (list(range(nodes)), [0, nodes - 1]):
                got = [wire.reduce(mine, ids, "mean"), wire.reduce(mine, ids, "sum", everywhere=False)]
                got.append(wire.rows(mine, ids))
                wanted = [alone.reduce(whole, ids, "mean"), alone.reduce(whole, ids, "sum"), alone.rows(whole, ids)]
                same([x for x in got if x.numel()], [x for x, own in zip(wanted, got, strict=True) if own.numel()])
        assert wire.agree(wire.process == 1) and not wire.agree(False)

    over_gloo(processes, nodes, tmp_path, body)


def test_all_receives_of_a_swap_begin_before_its_sends(tmp_path, monkeypatch):
    """Otherwise a peer's ready signal, and so its data, would take a latency in each round."""

    def body(wire, x):
        begun, begin = [], dist.batch_isend_irecv

        def noted(operations):
            begun.append(["receive" if op.op is dist.irecv else "send" for op in operations])
            return begin(operations)

        monkeypatch.setattr(dist, "batch_isend_irecv", noted)
        small, large = torch.zeros(1, PACKET_BYTES // 4), torch.zeros(1, AT_ONCE_BYTES)
        wire.reduce(small, range(3), "sum")
        assert begun == [["receive"] * 2, ["send"] * 2]  # one swap, at once
        begun.clear()
        wire.reduce(torch.zeros(1, PACKET_BYTES), range(3), "sum")
        assert begun == [["receive"] * 2, ["send"] * 2] * 2  # slices there, sums back
        begun.clear()
        wire.rows(large, range(3))
        assert begun == [["receive"]] * 2 + [["send"]] * 2  # in rounds

    over_gloo(3, 3, tmp_path, body)


def calls_of_a_strategy(nodes):
    """What a strategy calls: the name of each call, and the call with the communicator and its rows."""
    pairs = [[i, i + 1] for i in range(0, nodes - 1, 2)]
    partner = [i ^ 1 if i | 1 < nodes else i for i in range(nodes)]
    ring = torch.eye(nodes).roll(1, 0) / 2 + torch.eye(nodes) / 2

    def sliced(x):
        return x.view(len(x), nodes, -1)

    return {
        "all_reduce": lambda comm, x: comm.all_reduce(x),
        "pairs": lambda comm, x: comm.all_reduce(x, groups=pairs),
        "all_gather": lambda comm, x: comm.all_gather(x),
        "all_to_all": lambda comm, x: comm.all_to_all(sliced(x)),
        **{f"broadcast {k}": lambda comm, x, k=k: comm.broadcast(x, k) for k in range(nodes)},
        "some": lambda comm, x: comm.broadcast(x, nodes - 1, members=[0, nodes - 2, nodes - 1]),
        "scatter": lambda comm, x: comm.scatter(sliced(x), 1),
        "reduce_scatter": lambda comm, x: comm.reduce_scatter(sliced(x)),
        "exchange": lambda comm, x: comm.exchange(x, partner),
        "mix": lambda comm, x: comm.mix(x, ring),
        "packed mix": lambda comm, x: comm.mix_decoded([x.half()], lambda x: x.float(), ring),
        "packed": lambda comm, x: comm.sum_decoded([x.half()], lambda x: x.float(), "mean"),
        "reduce": lambda comm, x: comm.reduce(x, 1),
    }


@pytest.mark.parametrize("nodes", [4, 5])
def test_only_what_is_recorded_travels(nodes, tmp_path, monkeypatch):
    """A process sends and receives the bytes that the ledger has for its node."""
    moved, batch = {"tx": 0, "rx": 0}, dist.batch_isend_irecv

    def counted(calls):
        for call in calls:
            moved["tx" if call.op is dist.isend else "rx"] += call.tensor.nbytes
        return batch(calls)

    monkeypatch.setattr(dist, "batch_isend_irecv", counted)
    monkeypatch.delattr(dist, "broadcast")  # it has another tree, and sends to all processes

    def body(wire, x):
        comm, (node,) = Communicator(wire.ranks, nodes, wire), wire.ranks
        for name, call in calls_of_a_strategy(nodes).items():
            comm.ledger, before = Ledger(nodes), dict(moved)
            call(comm, x[:, :960])
            assert comm.ledger.tx_bytes.sum() >= 960, name
            for way in moved if name != "reduce" else ():
                assert moved[way] - before[way] == getattr(comm.ledger, f"{way}_bytes")[node], (name, way)
        assert moved["tx"] - before["tx"] == (node != 1) * x[0, :960].nbytes  # the root adds all rows in the fixed tree

    over_gloo(nodes, nodes, tmp_path, body)


def test_values_are_gathered_in_the_order_of_the_processes(over, tmp_path):
    values = ["", {"longer": ["ä", None, 1.5]}, 7]
    over(3, 5, tmp_path, lambda wire, x: check(gather(wire, values[wire.placement.index(wire.ranks)]) == values))
    assert gather(Wire([0]), "alone") == ["alone"]


def named(process):
    """Tensors of every kind, other ones in every process."""
    numbers = torch.arange(24.0).view(2, 3, 4) + 100 * process
    kinds = {str(dtype): numbers.to(dtype) for dtype in DTYPES}
    odd = {"columns first": numbers.transpose(0, 2), "one": torch.tensor(process), "none": torch.empty(0, 3)}
    return kinds | odd if process == 1 else {"something else": numbers}


def test_named_tensors_are_shipped_to_all_or_to_some(over, tmp_path):
    """From a process in the middle; only the takers get them where there are some, one after the other."""

    def body(wire, x):
        source = wire.placement[1][0]
        for takers in (None, [0], [0, 4], []):
            found = ship(wire, named(wire.process), source, takers)
            gets = takers is None or wire.process == 1 or any(node in wire.ranks for node in takers)
            assert list(found) == (list(named(1)) if gets else [])
            same(list(found.values()), list(named(1).values()) if gets else [])

    over(3, 5, tmp_path, body)
    same(list(ship(Wire(range(5)), named(1), 2).values()), list(named(1).values()))


def test_a_value_is_told_by_any_process(over, tmp_path):
    over(3, 5, tmp_path, lambda wire, x: check(tell(wire, ["ä" * wire.process, None], 2) == ["ää", None]))


def check(is_true):
    assert is_true


def test_a_plain_sum_has_other_bits():
    """The control: the order of a sum matters, so the tree is needed."""
    x = matrix(8)
    assert not torch.equal(Wire(range(8)).reduce(x, list(range(8)), "sum"), x.flip(0).cumsum(0)[-1])


@pytest.mark.parametrize("half_bytes", [256, 4096])
def test_what_does_not_fit_the_memory_goes_in_pieces(half_bytes, monkeypatch):
    monkeypatch.setattr(shared, "HALF_BYTES", half_bytes)
    wanted = calls(Wire(range(5)), matrix(5), 5)
    over_memory(3, 5, None, lambda wire, x: same(calls(wire, x, 5), wanted))


def test_native_is_the_tree_up_to_rounding(over, tmp_path):
    nodes = 7
    x = matrix(nodes)
    here = Wire(range(nodes))

    def body(wire, mine):
        for op in ("sum", "mean", "max", "min"):
            for ids in (list(range(nodes)), [0, 6], [2, 3]):
                assert torch.allclose(wire.reduce(mine, ids, op), here.reduce(x, ids, op), rtol=1e-5, atol=1e-5)
        weights = torch.rand(nodes)
        wanted = here.reduce(x, range(nodes), "mean", weights)
        assert torch.allclose(wire.reduce(mine, range(nodes), "mean", weights), wanted, rtol=1e-5, atol=1e-5)
        numbers = (mine * 100).long()
        assert torch.equal(wire.reduce(numbers, [1, 5], "max"), here.reduce((x * 100).long(), [1, 5], "max"))
        # and it really is another order of adding
        assert not torch.equal(wire.reduce(mine, range(nodes), "sum"), here.reduce(x, range(nodes), "sum"))

    over(3, nodes, tmp_path, body, native=True)


def test_of_a_group_apart_only_its_processes_need_the_result(over, tmp_path):
    """Groups that lie in one process, over two, and over all; each process makes all the calls."""
    nodes = 8
    groups = [[0, 1], [2, 3, 4], [5], [6, 7], [0, 3, 7]]
    wanted = [Wire(range(nodes)).reduce(matrix(nodes), group, "mean") for group in groups]

    def body(wire, x):
        for group, result in zip(groups, wanted, strict=True):
            got = wire.reduce(x, group, "mean", everywhere=False)
            if set(group) & set(wire.ranks):
                assert torch.equal(got, result)

    over(3, nodes, tmp_path, body)


def collectives(comm, x):
    """What a communication module may ask for, on rows (rows, 12)."""
    n, rows = comm.num_nodes, len(comm.ranks)
    partner = [i ^ 1 if i ^ 1 < n else i for i in range(n)]
    ring = torch.zeros(n, n)
    for i in range(n):
        ring[i, i] = ring[i, (i + 1) % n] = 0.5
    parts = x[:, :n].contiguous()
    results = [
        comm.all_reduce(x, "mean"),
        comm.all_reduce(x, "mean", groups=[[0, 2], [1, 4]]),
        comm.all_reduce(x, "mean", weights=torch.arange(1.0, n + 1)),
        comm.reduce(x, dst=3),
        comm.reduce_scatter(parts),
        comm.all_to_all(x[:, : 2 * n].reshape(rows, n, 2)),
        comm.broadcast(x, src=n - 1),
        comm.broadcast(x, src=1, members=[0, 1, 4]),
        comm.all_gather(x)[:rows],
        comm.scatter(parts, src=2),
        comm.exchange(x, partner),
        comm.mix(x, ring),
        comm.mix_decoded(
            [(x[:, :7] * 100).to(torch.int8), x[:, 7:8].half()], lambda codes, scale: codes * scale.float(), ring
        ),
        comm.sum_decoded([x[:, :5].contiguous(), x[:, 5:].to(torch.bfloat16)], lambda a, b: torch.cat([a, b.to(a)], 1)),
    ]
    comm.present = [0, 1, 3]
    results.append(comm.sum_decoded([x[:, :3].to(torch.uint8), x], lambda a, b: b * 2))
    comm.present = list(range(n))
    return [result.clone() for result in results] + [comm.gather(x, dst=1).expand(rows, -1, -1)]


def test_every_collective_gives_each_row_what_one_process_gives_it(over, tmp_path):
    nodes = 5
    alone = Communicator(range(nodes), nodes)
    wanted = collectives(alone, matrix(nodes)[:, :12])

    def body(wire, x):
        comm = Communicator(wire.ranks, nodes, wire)
        same(collectives(comm, x[:, :12].contiguous()), [result[wire.ranks] for result in wanted])
        assert comm.ledger.tx_bytes.tolist() == alone.ledger.tx_bytes.tolist()

    over(3, nodes, tmp_path, body)


def test_agreeing_telling_waiting(over, tmp_path):
    value = {"text": "π and — more", "numbers": [1, 2.5, None, True, float("inf")], "long": "x" * 100_000, "": ""}

    def body(wire, x):
        assert not wire.agree(False) and wire.agree(True)
        for process in range(3):
            assert wire.agree(wire.process == process)
        assert tell(wire, value if wire.is_main else "not this") == value
        assert tell(wire, None) is None
        assert wire.is_shared and wire.placement == place(5, 3)
        time.sleep(0.02 * wire.ranks[0])
        barrier(wire)

    over(3, 5, tmp_path, body)


def test_nobody_passes_a_barrier_before_all_are_there():
    board = mmap.mmap(-1, 3)

    def body(wire):
        for k in range(1, 200):
            board[wire.process] = k
            barrier(wire)
            assert min(board[:]) >= k
            barrier(wire)

    run_forked(place(3, 3), body)


def test_asking_to_stop_needs_no_meeting():
    def body(wire):
        assert not wire.asked_to_stop()
        barrier(wire)
        if wire.process == 2:
            wire.ask_to_stop()
        barrier(wire)
        assert wire.asked_to_stop()

    run_forked(place(3, 3), body)


# When a process is gone


@pytest.mark.parametrize("gone", ["the other", "main"])
def test_a_closed_line_is_a_lost_process(gone):
    """Whether it is noticed while reading or while writing."""
    placement, memory, lines = place(4, 2), mmap.mmap(-1, shared.memory_bytes(2)), socket.socketpair()
    wires = [SharedWire(placement, process, memory, [line]) for process, line in enumerate(lines)]
    wire, number = (wires[0], 1) if gone == "the other" else (wires[1], 0)
    wires[number].close()
    for meet in (
        lambda: barrier(wire),
        lambda: wire.rows(torch.ones(2, 3), [0]),
        lambda: wire.reduce(torch.ones(2, 3), [0, 3], "sum"),
    ):
        with pytest.raises(Lost) as lost:
            meet()
        assert lost.value.args == (number,)
    wire.close()


def ends(wire):
    if wire.process == 1:
        os._exit(7)
    barrier(wire)


def is_killed(wire):
    if wire.process == 1:
        os.kill(os.getpid(), signal.SIGUSR2)
    barrier(wire)


def fails(wire):
    if wire.process == 1:
        raise LookupError("long ago " + "é" * 200_000)  # more than a pipe holds
    barrier(wire)


def fails_last(wire):
    barrier(wire)
    if wire.process == 1:
        raise LookupError("long ago, and late")


FAILURES = {
    "exit": (ends, WorkerError, r"worker process 1 \(nodes 2 to 3\) ended with exit code 7"),
    "signal": (is_killed, WorkerError, r"worker process 1 \(nodes 2 to 3\) was killed by SIGUSR2"),
    "error": (fails, LookupError, "long ago"),
    "error after the last meeting": (fails_last, LookupError, "long ago"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_how_a_process_ended_is_said_and_none_is_left(name):
    body, kind, text = FAILURES[name]
    before, files = children(), descriptors()
    with pytest.raises(kind, match=text):
        run_forked(place(6, 3), body)
    assert children() == before and descriptors() <= files


def test_other_processes_come_to_their_end(tmp_path):
    """What they do after the last meeting is done when `run_forked` returns."""

    def body(wire):
        barrier(wire)
        if not wire.is_main:
            time.sleep(0.1)
            (tmp_path / str(wire.process)).touch()
        return wire.process

    assert run_forked(place(3, 3), body) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_an_error_in_the_main_process_ends_the_others(tmp_path):
    def body(wire):
        if wire.is_main:
            raise LookupError("here")
        time.sleep(60)

    before = children()
    with pytest.raises(LookupError, match="here"):
        run_forked(place(3, 3), body)
    assert children() == before


def test_more_processes_than_nodes_are_refused():
    with pytest.raises(ArgumentError, match=r"4 processes for num_nodes=3: .* start at most 3"):
        place(3, 4)


@pytest.mark.parametrize("mine", ["nccl", "gloo"])
@pytest.mark.parametrize("other", [b"nccl", b"gloo", b"xccl"])
def test_hosts_ask_each_other_which_backend_every_process_has(mine, other, monkeypatch):
    """In the launcher's store; on one host, or where there is none, each process knows for all."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("exogym/backend/3/1", other)
    told = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    told |= {"TORCHELASTIC_RESTART_COUNT": 3, "TORCHELASTIC_USE_AGENT_STORE": True}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    assert world.agreed(mine) == ("nccl" if mine == "nccl" and other == b"nccl" else "gloo")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert world.agreed(mine) == mine
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert world.agreed(mine) == mine


def test_a_second_line_carries_calls_of_another_thread(tmp_path):
    """Both threads talk at the same time; with one line their messages would mix."""

    def body(wire, x):
        line, heard = wire.aside(), []
        assert line is not None and line is wire.aside() and line.placement == wire.placement
        talk = threading.Thread(target=lambda: heard.extend(gather(line, [wire.process, k]) for k in range(100)))
        talk.start()
        for _ in range(100):
            assert torch.equal(wire.reduce(x, range(4), "sum"), wire.reduce(x, range(4), "sum"))
            assert wire.agree(wire.is_main)
        talk.join()
        assert heard == [[[process, k] for process in range(3)] for k in range(100)]
        wire.leave()

    over_gloo(3, 4, tmp_path, body)


def test_processes_receive_before_they_send(tmp_path):
    """Where a process sent first, its peer's data waited for its own: gossip between two hosts took 18 % longer."""

    def body(wire, rows):
        posted, post = [], dist.batch_isend_irecv
        dist.batch_isend_irecv = lambda calls: posted.extend(call.op for call in calls) or post(calls)
        got = rows_of_givers(wire, rows, [(0, 1), (1, 0)])
        assert posted == [dist.irecv, dist.isend]
        assert torch.equal(got[wire.ranks[0]][1 - wire.ranks[0]], matrix(2)[1 - wire.ranks[0]])

    over_gloo(2, 2, tmp_path, body)
