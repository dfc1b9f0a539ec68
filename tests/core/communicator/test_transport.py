"""How all-reduces travel is a choice: it changes bytes and predicted time, and no bit of the result."""

import math

import pytest
import torch
from battery import outcome, train
from strategies import OURS
from wrapped import made

from exogym.core.communicator import TRANSPORTS, Communicator
from exogym.errors import ArgumentError
from exogym.faults import Faults
from exogym.network import Network
from exogym.strategy import Averaging, DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy, SPARTAStrategy
from exogym.strategy.registry import parse_strategy
from exogym.study.advise import advise

ALPHA, BITS = 0.01, 1e6
NETWORK = Network.of("1Mbps,10ms")
RUN = {"max_steps": 6, "val_interval": None, "batch_size": 4}


def choices() -> list[str]:
    """The strategies that let one choose."""
    found = []
    for name in OURS:
        try:
            parse_strategy(f"{name}:transport=tree", H=3)
        except ArgumentError:
            continue
        found.append(name)
    return found


def children(k: int, n: int) -> int:
    """Children of node `k` of a binomial tree: k + hop for each hop = 1, 2, 4, ... under k's lowest set bit."""
    hops = [2**i for i in range(10)]
    return sum(k + hop < n and (k == 0 or k & -k > hop) for hop in hops)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("width", [1, 7])
def test_bytes_and_seconds_of_each(n: int, width: int) -> None:
    S, L = 8.0 * width, math.ceil(math.log2(n))
    wanted = {
        "ring": ([2 * (n - 1) / n * S] * n, 2 * (n - 1) * (ALPHA + 8 * S / n / BITS)),
        "tree": ([(children(k, n) + (k > 0)) * S for k in range(n)], 2 * L * (ALPHA + 8 * S / BITS)),
        "server": ([S] * n, 2 * ALPHA + 2 * n * 8 * S / BITS),
    }
    x = torch.randn(n, width, dtype=torch.float64)
    results = []
    for way, (sent, seconds) in wanted.items():
        comm, events = Communicator(range(n), n), []
        comm.transport = way
        comm.ledger.listeners.append(events.append)
        results.append(comm.all_reduce(x).clone())
        alone = n == 1
        assert comm.ledger.tx_bytes.tolist() == comm.ledger.rx_bytes.tolist() == ([0.0] if alone else sent)
        assert comm.ledger.payload_bytes.tolist() == [0.0 if alone else S] * n
        assert NETWORK.seconds(events[0]) == pytest.approx(0.0 if alone else seconds)
        assert list(comm.ledger.traffic) == [f"{way} all_reduce"]
    assert all(torch.equal(result, results[0]) for result in results)
    if n > 2:  # each differs from the others
        assert len({round(seconds, 9) for _, seconds in wanted.values()}) == 3


def test_what_was_chosen_stands_over_what_a_call_says_and_holds_for_groups() -> None:
    comm = Communicator(range(5), 5)
    comm.transport = "tree"
    comm.all_reduce(torch.ones(5, 2), "sum", groups=[[0, 3, 4], [1]], algorithm="server")
    assert comm.ledger.tx_bytes.tolist() == [16.0, 0.0, 0.0, 8.0, 8.0]
    with pytest.raises(ArgumentError, match="algorithm='bus'"):
        Communicator(range(2), 2).all_reduce(torch.ones(2, 2), algorithm="bus")


def test_the_strategies_that_average_let_one_choose() -> None:
    assert {*choices()} == {"ddp", "diloco", "fedavg", "fedopt", "fedprox", "scaffold"}


@pytest.mark.parametrize("name", choices())
def test_no_bit_depends_on_it(name: str) -> None:
    def run(way: str):
        strategy = parse_strategy(f"{name}:transport={way}", lr=0.02, H=3)
        return train(strategy, num_nodes=3, network=NETWORK, step_seconds=0.01, **RUN)

    runs = {way: run(way) for way in TRANSPORTS}
    (first, rows, _), *others = (outcome(trainer) for trainer in runs.values())
    for bits, theirs, _ in others:
        assert bits == first and [r["train_loss"] for r in theirs] == [r["train_loss"] for r in rows]
    assert len({trainer.history.last["time_s"] for trainer in runs.values()}) == 3
    for way, trainer in runs.items():
        assert f"{way} all_reduce" in trainer.traffic and not {f"{w} all_reduce" for w in TRANSPORTS} - {
            f"{way} all_reduce"
        } & set(trainer.traffic)


@pytest.mark.parametrize("processes", [1, 2])
def test_with_faults_a_stop_and_two_processes(processes: int, tmp_path) -> None:
    options = RUN | {"faults": Faults({2: [(3, 5)]}, lost={1: [6]}), "processes": processes}
    wanted = train(parse_strategy("diloco:transport=tree:H=3"), **options)
    assert outcome(wanted)[0] == outcome(train(parse_strategy("diloco:H=3"), **options))[0]
    train(parse_strategy("diloco:transport=tree:H=3"), **options | {"max_steps": 3, "save_dir": tmp_path})
    again = train(parse_strategy("diloco:transport=tree:H=3"), **options, save_dir=tmp_path, resume=True)
    assert outcome(again)[0] == outcome(wanted)[0] and again.traffic == wanted.traffic


def test_it_is_in_the_prediction() -> None:
    setting = {"parameters": 1e6, "num_nodes": 4, "network": NETWORK, "step_seconds": 1.0}
    rows = advise(**setting, strategies=[f"diloco:H=10:transport={way}" for way in TRANSPORTS]).rows
    S = 8 * 4e6 / BITS
    wanted = {"ring": 6 * (ALPHA + S / 4), "tree": 4 * (ALPHA + S), "server": 2 * ALPHA + 8 * S}
    for row in rows:
        way = row.strategy.rpartition("=")[2]
        assert row.seconds_per_step == pytest.approx(1 + wanted[way] / 10) and row.algorithms == (f"{way} all_reduce",)


def test_sampled_clients_go_through_a_server_anyway() -> None:
    runs = [
        train(made(FedAvgStrategy, H=2, lr=0.02, client_fraction=0.5, **way), **RUN)
        for way in ({}, {"transport": "server"})
    ]
    assert outcome(runs[0])[0] == outcome(runs[1])[0]
    sent = [run.traffic["server all_reduce"] for run in runs]
    assert sent[0] == sent[1] and "server all_reduce of buffers" in {*runs[1].traffic} - {*runs[0].traffic}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: made(SimpleReduceStrategy, transport="rign"), "transport='rign' is not one of .* did you mean 'ring'"),
        (
            lambda: made(FedAvgStrategy, client_fraction=0.5, transport="tree"),
            "leave transport out, or use",
        ),
        (
            lambda: parse_strategy("demo:transport=ring"),
            "demo has no option 'transport': it is retired: pass averaging=Averaging",
        ),
        (
            lambda: SPARTAStrategy(transport="ring"),
            "has no argument 'transport': it is retired: pass averaging=Averaging",
        ),
        (
            lambda: FedAvgStrategy(transport="ring"),
            r"'transport': give averaging=Averaging\(transport=",
        ),
        (lambda: parse_strategy("fedavg:transprot=ring"), "has no option 'transprot': did you mean 'transport'"),
        (lambda: DiLoCoStrategy(averaging="ring"), "averaging='ring' must be an Averaging"),
        (
            lambda: DiLoCoStrategy(averaging=Averaging(personal=1)),
            "no averages with personal: it takes transport",
        ),
    ],
)
def test_what_cannot_be_chosen_is_refused(make, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make()
