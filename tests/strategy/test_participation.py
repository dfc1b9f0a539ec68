"""Rounds that a server asks for: who is there, who reports in time, and what becomes of a round with too few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clients import ALL_ROWS, CLIENTS, SAMPLED, WITH_A_SERVER, client, same, trained, trainer

from exogym import LocalTrainer
from exogym.callbacks import EvaluateClients
from exogym.errors import ArgumentError, DataError
from exogym.faults import Devices, Faults, Profile, Trace
from exogym.strategy import (
    Averaging,
    DifferentialPrivacy,
    DiLoCoStrategy,
    FedAvgStrategy,
    FedPerStrategy,
    ScaffoldStrategy,
)
from exogym.strategy.participation import Participation

HEAD = "client,from,to,speed\n"


def trace(folder: Path, text: str, **options: Any) -> Trace:
    file = folder / "trace.csv"
    file.write_text(HEAD + text)
    return Trace(file, **options)


def test_a_trace_says_who_is_there(tmp_path: Path) -> None:
    found = trace(tmp_path, "3,0,10,1\n1,5,20,0.5\n3,12,20,2\n")
    assert [found.at(t, 4).ids.tolist() for t in (0, 5, 10, 12, 20)] == [[3], [1, 3], [1], [1, 3], []]
    there = found.at(13, 4)
    assert there.until_s.tolist() == [20, 20] and there.speed.tolist() == [0.5, 2]
    again = trace(tmp_path, "3,0,10,1\n1,5,20,0.5\n", repeat_s=30)
    assert again.at(35, 4).ids.tolist() == [1, 3] and again.at(35, 4).until_s.tolist() == [50, 40]


def test_a_file_of_a_spreadsheet(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(HEAD + "3,0,10,1\n", encoding="utf-8-sig")
    assert Trace(tmp_path / "trace.csv").at(5, 4).ids.tolist() == [3]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "0,0,10,1\n0,5,20,1\n",
            r"row 3: client 0 is available from 5, but also from row 2, until 10: use times that do not",
        ),
        ("0,10,10,1\n", "row 2: from=10, to=10: expected a .from. of at least 0"),
        ("0,0,10,0\n", "row 2: speed 0 must be over 0"),
        ("-1,0,10,1\n", "row 2: client -1 is not a whole number"),
        ("0,x,10,1\n", "row 2: from is 'x': expected a number"),
        ("0,0\n", "row 2: to is None"),
        ("inf,0,10,1\n", "row 2: client inf is not a whole number"),
        ("1e30,0,10,1\n", "row 2: client 1e.30 is not a whole number"),
    ],
)
def test_a_trace_that_cannot_be(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=why):
        trace(tmp_path, text)


def test_what_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no trace"):
        Faults(trace=tmp_path / "nothing.csv")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="no column client, from, to"):
        Faults(trace=tmp_path / "other.csv")
    with pytest.raises(ArgumentError, match=r"trace=.* with drop_rate=0.1: both decide which nodes are absent"):
        Faults(trace=Devices(), drop_rate=0.1)
    unknown = trace(tmp_path, f"{CLIENTS},0,10,1\n")
    with pytest.raises(DataError, match=f"row 2: client {CLIENTS} does not exist with num_nodes={CLIENTS}"):
        trained(WITH_A_SERVER["fedavg"](), faults=Faults(trace=unknown), step_seconds=1)
    with pytest.raises(ArgumentError, match="DiLoCoStrategy, which does not sample clients"):
        trained(DiLoCoStrategy(H=4), faults=Faults(trace=Devices()))
    with pytest.raises(ArgumentError, match="pass the step time"):
        trained(FedAvgStrategy("sgd", **SAMPLED), faults=Faults(trace=Devices()))


def test_devices_are_there_for_their_share() -> None:
    kinds = {"phone": Profile(3, 0.2, 0.1, 7200), "board": Profile(1, 0.05, 0.9, 86400)}
    fleet = Devices(kinds)
    speeds = np.concatenate([fleet.at(t, 20_000).speed for t in np.linspace(0, 1e6, 20)])
    assert (speeds == 0.2).mean() * len(speeds) / 20 == pytest.approx(20_000 * 0.75 * 0.1, rel=0.05)
    assert (speeds == 0.05).mean() * len(speeds) / 20 == pytest.approx(20_000 * 0.25 * 0.9, rel=0.05)


def test_rounds_by_hand(tmp_path: Path) -> None:
    """Steps of 1 s at speed 1, 4 a round: the server waits for who is slow, and who leaves does not report."""
    there = trace(tmp_path, "0,0,9,1\n1,0,100,0.5\n3,0,3,1\n4,5,100,1\n")
    rounds = Participation(0, 5, 3, lambda r: 4, 1.0, there)
    first = rounds.of(0)
    assert first.asked == [0, 1, 3] and first.reported == [0, 1]  # 3 leaves after 3 s
    assert (first.begin_s, first.end_s) == (0.0, 8.0)
    second = rounds.of(1)
    assert second.asked == [0, 1, 4]
    assert second.reported == [1, 4] and second.end_s == 16.0  # 0 leaves after 1 s
    gone = Participation(0, 5, 3, lambda r: 4, 1.0, trace(tmp_path, "3,0,3,1\n"))
    assert gone.of(0).reported == [] and gone.failed(1) == 1 and gone.of(0).end_s == 4.0


def test_who_is_there_is_asked_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, at = [], Devices.at
    monkeypatch.setattr(Devices, "at", lambda self, time_s, n: asked.append(time_s) or at(self, time_s, n))
    rounds = Participation(0, 100, 3, lambda r: 5, 1.0, Devices())
    for number in range(6):  # as a run does: this round and the next
        rounds.of(number), rounds.of(number + 1)
    assert len(asked) == 7


def test_if_all_are_there_the_draws_are_those_without_a_trace(tmp_path: Path) -> None:
    everybody = trace(tmp_path, "".join(f"{i},0,1000,1\n" for i in range(CLIENTS)))
    plain = trained(WITH_A_SERVER["fedavg"]())
    asked = trained(FedAvgStrategy("sgd", **SAMPLED), faults=Faults(trace=everybody), step_seconds=0.01)
    assert same(plain, asked)
    assert asked.history.last["server_time_s"] == pytest.approx(23 // 4 * 0.04 + 0.04)
    assert asked.history.last["failed_rounds"] == 0 and asked.history.last["reports"] == 4


@pytest.mark.parametrize("make", [FedAvgStrategy, ScaffoldStrategy], ids=lambda cls: cls.name)
def test_layouts_and_stops_change_nothing(make: Any, tmp_path: Path) -> None:
    fleet = Faults(trace=Devices({"fast": Profile(1, 1.0, 0.5, 1.0), "slow": Profile(1, 0.3, 0.9, 5.0)}))
    how = {"faults": fleet, "step_seconds": 0.1}
    strategy = lambda: make("sgd", **SAMPLED)  # noqa: E731
    wanted = trained(strategy(), **how)
    last = wanted.history.last
    assert last["failed_rounds"] < 6 and last["asked"] == 4
    assert same(trained(strategy(), processes=2, **how), wanted)
    trained(strategy(), save_dir=tmp_path, max_steps=10, final_sync=False, **how)
    assert same(trained(strategy(), save_dir=tmp_path, resume=True, processes=3, **how), wanted)


def test_a_round_to_which_nobody_reports(tmp_path: Path) -> None:
    """The server's parameters stay, and the history says so; what was sent in vain is counted."""
    nobody = trace(tmp_path, "0,0,1,1\n")  # leaves before its four steps of a second are done
    found = trained(FedAvgStrategy("sgd", **SAMPLED), faults=Faults(trace=nobody), step_seconds=1.0)
    losses = found.history.column("val_loss")[1]
    assert len(set(losses.tolist())) == 1 and found.history.last["failed_rounds"] == 6
    assert found.history.last["reports"] == 0
    pulled = found.traffic["server pull"]
    size = sum(p.numel() * p.element_size() for p in found.model.parameters())
    assert pulled["rx_bytes"] == size and "server all_reduce" not in found.traffic  # client 0, in the first round


def test_all_rows_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with a row for every client."""
    how = {"faults": Faults(trace=Devices(seed=1)), "step_seconds": 0.1}
    strategy = lambda: ScaffoldStrategy("sgd", **SAMPLED)  # noqa: E731
    seated = trained(strategy(), **how)
    monkeypatch.setattr("exogym.core.training.placement.rows_of_run", lambda options, *more: options.num_nodes)
    assert same(trained(strategy(), **how), seated)
    assert ALL_ROWS.trace is None and len(client(0, 1, True)) == 12


def test_clients_without_examples_are_left_out_and_counted(tmp_path: Path) -> None:
    """A factory says so by None, or by a data set without examples."""

    def some(rank: int, num_nodes: int, is_train: bool) -> Any:
        return None if rank % 3 == 1 else client(rank, num_nodes, is_train)

    wanted = trained(WITH_A_SERVER["scaffold"](), data=some)
    assert same(trained(WITH_A_SERVER["scaffold"](), data=some, faults=ALL_ROWS), wanted)
    assert same(trained(WITH_A_SERVER["scaffold"](), data=some, processes=2), wanted)
    left_out = wanted.history.last["empty_clients"]
    assert 1 <= left_out <= CLIENTS // 3
    assert all(node % 3 != 1 for row in wanted.history if (node := row["node"]) is not None)
    trained(WITH_A_SERVER["scaffold"](), data=some, save_dir=tmp_path, max_steps=10, final_sync=False)
    resumed = trained(WITH_A_SERVER["scaffold"](), data=some, save_dir=tmp_path, resume=True)
    assert same(resumed, wanted) and resumed.history.last["empty_clients"] == left_out
    empty = trained(WITH_A_SERVER["scaffold"](), data=lambda *given: some(*given) or [])
    assert same(empty, wanted) and empty.history.last["empty_clients"] == left_out
    with pytest.raises(DataError, match=r"node 1 is None: .* let fit sample clients"):
        trained(DiLoCoStrategy(H=4), data=some)
    with pytest.raises(DataError, match=r"node 1 .list. is empty: .* let fit sample clients"):
        trained(DiLoCoStrategy(H=4), data=lambda *given: some(*given) or [])
    with pytest.raises(DataError, match="no examples for any of 40 nodes"):
        trained(WITH_A_SERVER["fedavg"](), data=lambda *given: None)


@pytest.mark.parametrize("private", [False, True])
def test_any_client_may_have_no_examples(private: bool) -> None:
    """Client 0, too, of any strategy that samples clients."""

    def strategy() -> FedAvgStrategy:
        noise = (
            {"averaging": Averaging(privacy=DifferentialPrivacy(1.0, 1.0)), "weighting": "uniform"} if private else {}
        )
        return FedAvgStrategy("sgd", **SAMPLED, **noise)

    def without(client_0: Any) -> Any:
        return lambda rank, *more: client_0 if rank in (0, 5) else client(rank, *more)

    wanted = trained(strategy(), data=without(None))
    assert wanted.history.last["empty_clients"] > 0
    assert same(trained(strategy(), data=without(None), faults=ALL_ROWS), wanted)
    assert same(trained(strategy(), data=without(None), processes=2), wanted)
    assert not same(trained(strategy(), data=client), wanted)


def test_a_client_without_examples_is_as_if_it_were_not_there() -> None:
    def run(last: Any, num_nodes: int, fraction: float) -> Any:
        strategy = FedAvgStrategy("sgd", H=4, lr=0.02, client_fraction=fraction)
        data = lambda rank, *more: last if rank == 9 else client(rank, *more)  # noqa: E731
        return trained(strategy, data=data, num_nodes=num_nodes, val_interval=4).history.column("val_loss")[1]

    wanted = run(None, 9, 1.0)
    assert run(None, 10, 0.999) == pytest.approx(wanted, rel=1e-5)  # draws all ten
    assert run(client(9, 10, True), 10, 0.999) != pytest.approx(wanted, rel=1e-5)


def own_values(strategy: FedAvgStrategy, skip: int = 99, **options: Any) -> tuple[Any, np.ndarray]:
    """Evaluate clients on their own data: the run, and each client's loss under the final model."""

    def data(rank: int, num_nodes: int, is_train: bool) -> Any:
        return None if rank == skip and not is_train else client(rank, num_nodes, is_train)

    found = LocalTrainer(trainer().model, client, data, loss_fn=torch.nn.functional.mse_loss)
    given = {"num_nodes": CLIENTS, "max_steps": 8, "val_interval": 4, "batch_size": 4, "progress": False}
    found.fit(strategy, **given | options, callbacks=[EvaluateClients()])
    with torch.no_grad():
        pairs = [client(i, CLIENTS, False).tensors for i in range(CLIENTS)]
        losses = [float(torch.nn.functional.mse_loss(found.model(x), y)) for x, y in pairs]
    return found, np.delete(losses, [skip] if skip < CLIENTS else [])


def test_all_sampled_clients_are_evaluated() -> None:
    """Those that do not train have the server's model. So the worst tenth is one of all clients."""
    found, losses = own_values(FedAvgStrategy("sgd", **SAMPLED))
    last = found.history.last
    assert last["clients_val_loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert last["clients_val_loss_worst"] == pytest.approx(np.sort(losses)[-4:].mean(), rel=1e-5)
    assert last["clients_val_loss_spread"] == pytest.approx(losses.std(), rel=1e-5)
    assert found.history.rows(node=7)[-1]["val_loss"] == pytest.approx(losses[7], rel=1e-5)
    assert "clients_counted" not in last
    names = [name for name in last if name.startswith("clients_")]
    for options in ({"faults": ALL_ROWS}, {"processes": 2}):
        other = own_values(FedAvgStrategy("sgd", **SAMPLED), **options)[0].history.last
        assert {name: other[name] for name in names} == {name: last[name] for name in names}


def test_how_many_clients_count_is_said() -> None:
    """If some have no validation data, or personal parameters that are not in a row."""
    found, losses = own_values(FedAvgStrategy("sgd", **SAMPLED), skip=3)
    assert found.history.last["clients_counted"] == CLIENTS - 1
    assert found.history.last["clients_val_loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert not any("val_loss" in row for row in found.history.rows(node=3))
    personal, _ = own_values(FedPerStrategy("sgd", **SAMPLED))
    assert 1 <= personal.history.last["clients_counted"] < CLIENTS


def test_clients_without_validation_examples() -> None:
    """They do not count in the evaluation, whoever they are."""
    part = client(3, CLIENTS, False)

    def loss(val: Any) -> float:
        found = LocalTrainer(trainer().model, client, val, loss_fn=torch.nn.functional.mse_loss)
        found.fit(FedAvgStrategy("sgd", **SAMPLED), num_nodes=CLIENTS, max_steps=4, batch_size=4, progress=False)
        return found.history.last["val_loss"]

    wanted = loss(part)
    assert loss(lambda rank, *more: part if rank == 3 else None) == wanted
    assert loss(lambda rank, *more: part if rank == 3 else []) == wanted
    assert loss(lambda rank, *more: part if rank in (3, 4) else None) == pytest.approx(wanted)
    with pytest.raises(DataError, match="give at least one validation example"):
        loss(lambda *given: None)
