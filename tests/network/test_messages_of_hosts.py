"""The latencies of `tcp=True`, held against the wire: real collectives over a fake gloo with virtual time.

A message of the fake gloo leaves when both sides have begun it and the receiver's word has crossed the line. It arrives
at max(sender's time, receiver's time + alpha) + alpha. Bytes take no time. Each process is a thread with its own time.
"""

import threading
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exogym.core.communicator import Communicator
from exogym.core.engine import wire as module
from exogym.core.engine.wire import ProcessWire
from exogym.network import Network
from exogym.strategy.graphs import edges_of

ALPHA = 1.0
NETWORK = Network("1000Tbps", ALPHA, tcp=True)


class Gloo:
    """Stands for `torch.distributed` between threads. `time_s` has each thread's virtual time."""

    P2POp = SimpleNamespace
    ReduceOp = SimpleNamespace(SUM=0, MAX=1, MIN=2)

    def __init__(self, processes: int):
        self.time_s = [0.0] * processes
        self.me, self.here = threading.local(), threading.Condition()
        self.sent: dict[Any, list[Any]] = defaultdict(list)  # (sender, receiver, tag) to [begun, tensor]
        self.taken: dict[Any, list[Any]] = defaultdict(list)
        self.counts: dict[Any, int] = defaultdict(int)

    def get_rank(self, group: Any = None) -> int:
        return int(self.me.rank)

    def get_backend(self, group: Any = None) -> str:
        return "gloo"

    def isend(self) -> None: ...
    def irecv(self) -> None: ...

    def batch_isend_irecv(self, operations: list[Any]) -> list[Any]:
        with self.here:
            works = [self._begin(op) for op in operations]
            self.here.notify_all()
        return works

    def _begin(self, op: Any) -> Any:
        me = self.get_rank()
        sends = op.op == self.isend
        line = (me, op.peer, op.tag) if sends else (op.peer, me, op.tag)
        number = self.counts[sends, line]
        self.counts[sends, line] += 1
        (self.sent if sends else self.taken)[line].append((self.time_s[me], op.tensor))

        def wait() -> None:
            with self.here:
                ready = self.here.wait_for(lambda: len(self.sent[line]) > number < len(self.taken[line]), 20)
                assert ready, f"no partner for {line}"
                (begun, data), (told, room) = self.sent[line][number], self.taken[line][number]
                leaves = max(begun, told + ALPHA)
                room.copy_(data)
                self.time_s[me] = max(self.time_s[me], leaves if sends else leaves + ALPHA)

        return SimpleNamespace(wait=wait)


def operation(op: Any, tensor: Any, peer: int, group: Any = None, tag: int = 0) -> Any:
    return SimpleNamespace(op=op, tensor=tensor, peer=peer, tag=tag)


def waited(call: Any, n: int, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """Run a collective in n threads. Return its virtual seconds, and the predicted seconds of its events."""
    gloo, failed, events = Gloo(n), list[BaseException](), list[Any]()
    gloo.P2POp = operation  # type: ignore[misc,assignment]
    monkeypatch.setattr(module, "dist", gloo)
    monkeypatch.setattr(module.Device, "of_group", lambda group: SimpleNamespace(place=module.CPU))

    def run(rank: int) -> None:
        try:
            gloo.me.rank = rank
            comm = Communicator([rank], n, ProcessWire([[k] for k in range(n)]))
            if rank == 0:
                comm.ledger.listeners.append(events.append)
            call(comm)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    return max(gloo.time_s), max((told_s(event) for event in events), default=NETWORK.message_s)


def told_s(event: Any) -> float:
    """The predicted seconds, on connections that were just used. Runs on hosts have the exact reduction."""
    way = "exact" if event.kind == "all_reduce" else event.algorithm
    return NETWORK.seconds(replace(event, algorithm=way), idle_s=0.0)


def rows(elements: int) -> torch.Tensor:
    return torch.ones(1, elements)


def slices(n: int, elements: int) -> torch.Tensor:
    return torch.ones(1, n, elements // n)


SMALL, LARGE = 280, 140_000  # elements of 4 bytes: a packet, and more than TCP's first window for each of 8 nodes


@pytest.mark.parametrize("n", [2, 4, 5, 8])
@pytest.mark.parametrize("size", [SMALL, 2800, LARGE])
@pytest.mark.parametrize(
    "kind", ["all_reduce", "all_gather", "gather", "reduce_scatter", "all_to_all", "exchange", "reduce", "scatter"]
)
def test_collectives_wait_as_predicted(kind: str, size: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    partner = [k ^ 1 if k ^ 1 < n else k for k in range(n)]
    calls: dict[str, Any] = {
        "all_reduce": lambda comm: comm.all_reduce(rows(size)), "all_gather": lambda comm: comm.all_gather(rows(size)),
        "gather": lambda comm: comm.gather(rows(size)), "all_to_all": lambda comm: comm.all_to_all(slices(n, size)),
        "reduce_scatter": lambda comm: comm.reduce_scatter(slices(n, size)),
        "exchange": lambda comm: comm.exchange(rows(size), partner), "reduce": lambda comm: comm.reduce(rows(size)),
        "scatter": lambda comm: comm.scatter(slices(n, size)),
    }  # fmt: skip
    took, told = waited(calls[kind], n, monkeypatch)
    assert told == pytest.approx(took, abs=1e-3)
    assert took >= 2 * ALPHA


@pytest.mark.parametrize("n", [2, 4, 8])
def test_agreements_take_two_latencies_and_a_broadcast_one_more_than_its_tree(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    took, told = waited(lambda comm: comm.wire.agree(False), n, monkeypatch)
    assert took == told == 2 * ALPHA
    took, told = waited(lambda comm: comm.broadcast(rows(SMALL), 0), n, monkeypatch)
    assert told == pytest.approx(took, abs=1e-3) and took == ((n - 1).bit_length() + 1) * ALPHA


@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.parametrize("graph", ["ring", "matching", "torus", "complete"])
def test_mixing_neighbors_wait_for_their_turns(graph: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.eye(n)
    for i, j in edges_of(graph, n, 0, 0):
        matrix[i, j] = matrix[j, i] = 1
    took, told = waited(lambda comm: comm.mix(rows(SMALL), matrix), n, monkeypatch)
    assert took <= told + 1e-3 <= took + 2 * ALPHA  # hosts that are early in one turn are early in the next
