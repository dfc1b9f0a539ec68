"""Who takes part in a run whose hosts come and go: the membership, the watch over hosts, the outages written down."""

import contextlib
import json
import random
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from exogym.errors import ArgumentError, WorkerError
from exogym.faults import Faults, Outages
from exogym.machines.launch.door import knock
from exogym.machines.remote import Host, NetworkTrainer, SSHLauncher, watch
from exogym.machines.remote.channel import Logs
from exogym.machines.remote.elastic.member import DONE, MEMBERSHIP, Member
from exogym.machines.remote.elastic.membership import LOOK_S, Membership, MembershipServer
from exogym.machines.remote.health import Board, read_hosts
from exogym.machines.remote.orders import HostOrder
from exogym.machines.remote.watch import pause_s
from exogym.strategy import AsyncDiLoCoStrategy, DiLoCoStrategy
from exogym.strategy.strategy import Strategy
from exogym.testing import small_problem


def begun(slots: list[int], quorum: int = 1) -> Membership:
    """A run in its first generation, with every process."""
    membership = Membership(slots, quorum, gather_s=100)
    for rank in range(sum(slots)):
        assert membership.hello(rank) == {"hear": "welcome", "fresh": True, "again": False, "over": None}
    for rank in range(sum(slots)):
        assert membership.told == []
        membership.ready(rank, {"kind": "fresh"}, now=0.0)
    assert {rank for rank, what in membership.told if what["hear"] == "generation"} == set(range(sum(slots)))
    membership.told.clear()
    return membership


def member(*anchors: int, planned: bool = False) -> dict[str, Any]:
    return {"kind": "member", "anchors": list(anchors), "planned": planned}


def generation_of(membership: Membership) -> dict[str, Any]:
    """The generation that was told last; all its members were told the same."""
    generations = [(rank, what) for rank, what in membership.told if what["hear"] == "generation"]
    last = generations[-1][1]
    assert sorted(rank for rank, what in generations if what["number"] == last["number"]) == last["members"]
    assert all(what == last for _, what in generations if what["number"] == last["number"])
    return last


def test_after_a_loss_all_go_back_to_what_everyone_knows() -> None:
    membership = begun([1, 1, 1])
    assert membership.leave(1) == [1]
    assert membership.told == [(0, {"hear": "lost", "number": 0}), (2, {"hear": "lost", "number": 0})]
    membership.ready(0, member(20, 30), now=1.0)
    assert all(what["hear"] == "lost" for _, what in membership.told), "the generation waits for everyone"
    membership.ready(2, member(10, 20), now=2.0)
    found = generation_of(membership)
    assert (found["number"], found["members"], found["step"], found["newcomers"]) == (1, [0, 2], 20, [])


def test_who_comes_back_waits_for_a_planned_moment() -> None:
    membership = begun([1, 1, 1])
    membership.leave(1)
    assert membership.hello(1)["fresh"] is False
    membership.ready(1, {"kind": "alone"}, now=0.0)
    membership.ready(0, member(20), now=1.0)
    membership.ready(2, member(20), now=1.0)
    assert generation_of(membership)["members"] == [0, 2], (
        "not in the generation after a loss: its nodes were not away yet"
    )
    assert [what["hear"] for rank, what in membership.told if rank == 0][-1] == "waiting"
    membership.ready(0, member(20, 30, planned=True), now=2.0)
    assert membership.lost is False, "a planned meeting cuts nobody off"
    membership.ready(2, member(20, 30, planned=True), now=2.0)
    found = generation_of(membership)
    assert (found["members"], found["newcomers"], found["step"], found["source"]) == ([0, 1, 2], [1], 30, 0)


def test_a_member_that_cannot_reach_another_ends_the_epoch_for_all() -> None:
    membership = begun([1, 1])
    membership.ready(0, member(10), now=0.0)
    assert membership.lost and (1, {"hear": "lost", "number": 0}) in membership.told
    membership.ready(1, member(10), now=0.0)
    assert generation_of(membership)["members"] == [0, 1]


def test_a_newcomer_that_got_nothing_is_a_newcomer_still() -> None:
    membership = begun([1, 1])
    membership.leave(1)
    membership.ready(0, member(10), now=0.0)
    membership.hello(1)
    membership.ready(1, {"kind": "alone"}, now=0.0)
    membership.ready(0, member(20, planned=True), now=0.0)
    assert generation_of(membership)["newcomers"] == [1]
    membership.ready(1, {"kind": "alone"}, now=0.0)  # the sending failed
    membership.ready(0, member(20), now=0.0)
    assert generation_of(membership)["members"] == [0]
    membership.ready(0, member(30, planned=True), now=0.0)
    assert generation_of(membership)["newcomers"] == [1]


def test_a_host_is_lost_and_comes_back_as_a_whole() -> None:
    membership = begun([1, 2])
    assert sorted(membership.leave(2)) == [1, 2] and membership.members == {0}
    membership.ready(0, member(10), now=0.0)
    membership.hello(1)
    membership.ready(1, {"kind": "alone"}, now=0.0)
    membership.ready(0, member(20, planned=True), now=0.0)
    assert generation_of(membership)["members"] == [0], "its other process is not there yet"
    membership.hello(2)
    membership.ready(2, {"kind": "alone"}, now=0.0)
    membership.ready(0, member(30, planned=True), now=0.0)
    assert generation_of(membership)["newcomers"] == [1, 2]


def test_with_too_few_hosts_the_run_is_over() -> None:
    membership = begun([1, 1, 1], quorum=2)
    membership.leave(0)
    membership.ready(1, member(10), now=0.0)
    membership.ready(2, member(10), now=0.0)
    assert generation_of(membership)["members"] == [1, 2]
    membership.leave(1)
    membership.ready(2, member(10), now=0.0)
    assert membership.told[-1] == (
        2,
        {"hear": "over", "why": "1 hosts are left, but min_hosts=2: lower it, or pass save_dir and retries"},
    )
    assert membership.hello(1)["over"] is not None


def test_the_start_waits_for_all_and_then_for_enough() -> None:
    membership = Membership([1, 1, 1], 2, gather_s=100)
    for rank in (0, 2):
        membership.hello(rank)
        membership.ready(rank, {"kind": "fresh"}, now=0.0)
    membership.look(99)
    assert membership.told == []
    membership.look(101)
    assert generation_of(membership)["members"] == [0, 2]
    membership.told.clear()
    membership.hello(1)
    membership.ready(1, {"kind": "fresh"}, now=102.0)  # it had said hello too early to know
    assert membership.told == [(1, {"hear": "over", "why": "the run has begun without this process"})]
    alone = Membership([1, 1, 1], 2, gather_s=100)
    alone.hello(0)
    alone.ready(0, {"kind": "fresh"}, now=0.0)
    alone.look(101)
    assert alone.told[-1][1]["hear"] == "over"


def test_when_all_are_lost_the_next_ones_start_afresh() -> None:
    membership = begun([1, 1])
    membership.training()
    membership.leave(0)
    membership.leave(1)
    assert membership.hello(0) == {"hear": "welcome", "fresh": True, "again": True, "over": None}
    membership.hello(1)
    membership.ready(1, {"kind": "alone"}, now=0.0)  # it had come while others still trained
    assert membership.told[-1][1]["hear"] == "over"


def test_when_one_has_finished_nobody_is_lost_any_more_and_who_waits_is_told() -> None:
    membership = begun([1, 1, 1])
    membership.leave(2)
    membership.ready(0, member(10), now=0.0)
    membership.ready(1, member(10), now=0.0)
    membership.hello(2)
    membership.ready(2, {"kind": "alone"}, now=0.0)
    membership.told.clear()
    membership.finished()
    assert (2, {"hear": "over", "why": "done"}) in membership.told
    membership.told.clear()
    membership.leave(1)
    assert membership.told == [] and not membership.lost and membership.hello(1)["over"] == "done"
    membership.ready(0, member(10), now=0.0)
    assert membership.told == [(0, {"hear": "over", "why": "done"})]


def test_a_run_that_was_stopped_loses_nobody_and_takes_nobody_in() -> None:
    membership = begun([1, 1])
    membership.stopped()
    membership.told.clear()
    membership.leave(1)
    assert membership.told == [] and membership.hello(1)["over"] == "it was stopped"


def test_those_whose_first_meeting_failed_begin_again() -> None:
    membership = begun([1, 1, 1])
    membership.leave(2)
    membership.ready(0, {"kind": "fresh"}, now=1.0)
    assert [what["hear"] for rank, what in membership.told if rank == 0] == ["lost"], "not refused"
    membership.ready(1, {"kind": "fresh"}, now=1.0)
    membership.hello(2)
    membership.ready(2, {"kind": "fresh"}, now=2.0)
    assert generation_of(membership)["number"] == 1 and generation_of(membership)["members"] == [0, 1, 2]


def test_who_waits_and_goes_leaves_the_patience_of_the_others_whole() -> None:
    membership = Membership([1, 1], 1, gather_s=100)
    membership.hello(0)
    membership.ready(0, {"kind": "fresh"}, now=0.0)
    membership.leave(0)
    membership.look(101)
    assert membership.over is None
    membership.hello(1)
    membership.ready(1, {"kind": "fresh"}, now=200.0)
    membership.look(299)
    assert membership.told == []
    membership.look(301)
    assert generation_of(membership)["members"] == [1]


@pytest.mark.parametrize("seed", range(200))
def test_whatever_happens_all_are_told_the_same_and_nobody_waits_for_ever(seed: int) -> None:
    """Processes come, go, get ready, fail to meet at random; then all that live get ready, and go on or are told."""
    g = random.Random(seed)
    slots = [g.randint(1, 2) for _ in range(g.randint(2, 4))]
    membership = Membership(slots, g.randint(1, len(slots)), gather_s=10)
    model = [Process(number) for number in range(sum(slots))]
    now = 0.0
    for _ in range(60):
        now += 1
        process = g.choice(model)
        if g.random() < 0.25:
            for gone in membership.leave(process.number) if process.alive else []:
                model[gone].alive = False
        elif not process.alive:
            process.come(membership)
        elif process.waits is None:
            process.get_ready(membership, now, planned=g.random() < 0.5)
        deliver(membership, model, meets=g.random() < 0.8)
    for _ in range(40):
        now += 20
        for process in model:
            if not process.alive:
                process.come(membership)
            elif process.waits is None and (membership.lost or not process.trains):
                process.get_ready(membership, now, planned=False)
        membership.look(now)
        deliver(membership, model, meets=True)
    assert membership.over is not None or (
        membership.members and all(model[number].trains for number in membership.members)
    )


class Process:
    """A process as the server sees it."""

    def __init__(self, number: int):
        self.number, self.alive, self.trains = number, False, False
        self.waits: str | None = None
        self.anchors: list[int] = []

    def come(self, membership: Membership) -> None:
        welcome = membership.hello(self.number)
        self.alive, self.trains, self.waits, self.anchors = True, False, None, []
        self.kind = "fresh" if welcome["fresh"] else "alone"

    def get_ready(self, membership: Membership, now: float, planned: bool) -> None:
        self.waits = "member" if self.anchors else self.kind
        said = {"kind": self.waits, "anchors": list(self.anchors), "planned": planned and self.waits == "member"}
        membership.ready(self.number, said, now)


def deliver(membership: Membership, model: list[Process], meets: bool) -> None:
    """Give every process what it is told; hold each generation against what its members know."""
    while membership.told:
        number, what = membership.told.pop(0)
        process = model[number]
        if what["hear"] == "over":
            process.alive = process.alive and membership.over is not None
            if not process.alive:
                membership.leave(number)
        if what["hear"] != "generation" or number != what["members"][0]:
            continue
        assert all(model[other].alive and model[other].waits for other in what["members"])
        kept = [other for other in what["members"] if other not in what["newcomers"]]
        assert (what["step"] is None) == (not kept) and what["source"] in (kept or what["members"])
        assert all(what["step"] in model[other].anchors for other in kept)
        assert all(model[other].waits in ("alone", "fresh") for other in what["newcomers"])
        for other in what["members"]:
            model[other].waits = None
            if meets:
                step = what["step"] or 0
                model[other].trains, model[other].anchors = True, [step, step + 10]


def test_who_does_not_belong_cannot_end_the_membership_server() -> None:
    server = MembershipServer(Membership([1], 1, gather_s=100), "127.0.0.1", 0, "secret")
    done = threading.Thread(target=server.serve, daemon=True)
    done.start()
    place = ("127.0.0.1", server.port)
    for words in (b"[" * 900 + b"\n", b"x" * 5000, b'{"say": "hello", "rank": 0}\n' * 3):
        with socket.create_connection(place, timeout=60) as stranger:
            stranger.sendall(words)
            heard = b""
            with contextlib.suppress(ConnectionResetError):
                while data := stranger.recv(1000):
                    heard += data
            assert heard[32:] in (b"", bytes(32)), words[:40]
    with pytest.raises(WorkerError, match=r"rejected rank 0: .* with another secret"):
        Member(*place, 0, "another secret")
    with knock(*place, "secret", MEMBERSHIP, 60) as odd:  # one of ours, but of no rank
        odd.sendall(b'{"say": "hello", "rank": 7}\n')
        assert odd.recv(100) == b""
    with knock(*place, "secret", MEMBERSHIP, 10) as one:  # the control
        one.sendall(b'{"say": "hello", "rank": 0}\n')
        assert json.loads(one.recv(1000))["hear"] == "welcome"
        one.sendall(b'{"say": "finished"}\n')
        assert json.loads(one.recv(1000)) == {"hear": "over", "why": "done"}
    server.stopping = True
    done.join(60)
    assert not done.is_alive()


def test_who_comes_back_when_the_others_have_finished_and_gone_is_told() -> None:
    server = MembershipServer(Membership([1, 1], 1, gather_s=100), "127.0.0.1", 0, "secret")
    serving = threading.Thread(target=server.serve, daemon=True)
    serving.start()
    place = ("127.0.0.1", server.port)
    with knock(*place, "secret", MEMBERSHIP, 10) as one:
        one.sendall(b'{"say": "hello", "rank": 0}\n{"say": "finished"}\n')
        assert json.loads(one.recv(1000).splitlines()[0])["over"] is None
    serving.join(5 * LOOK_S)  # rank 0 was the only one
    with knock(*place, "secret", MEMBERSHIP, 10) as late:
        late.sendall(b'{"say": "hello", "rank": 1}\n')
        assert json.loads(late.recv(1000))["over"] == DONE
    server.stopping = True
    serving.join(60)
    assert not serving.is_alive()


# What is refused, and what is written down


def test_what_cannot_go_on_without_hosts_is_refused() -> None:
    model, data = small_problem()
    loss_fn = torch.nn.functional.mse_loss
    trainer = NetworkTrainer({"master": "localhost"}, model, data, loss_fn=loss_fn, min_hosts=1)
    wrong: list[tuple[Strategy, dict[str, Any], str]] = [
        (AsyncDiLoCoStrategy(H=5, lr=0.01), {}, "AsyncDiLoCoStrategy"),
        (DiLoCoStrategy(H=5), {"faults": Faults(drop_rate=0.1)}, "faults"),
        (DiLoCoStrategy(H=5), {"network": "wifi"}, "network"),
        (DiLoCoStrategy(H=5), {"compute": "auto"}, "compute"),
    ]
    for strategy, given, named in wrong:
        with pytest.raises(ArgumentError, match=named):
            trainer.fit(strategy, max_steps=2, **given)
    with pytest.raises(ArgumentError, match="min_hosts=2, but the hosts file has 1"):
        SSHLauncher({"master": "localhost"}, min_hosts=2)


def test_pauses_between_tries_grow_to_a_minute() -> None:
    assert [pause_s(n) for n in (0, 1, 3, 4, 1000)] == [5, 10, 40, 60, 60]


def part(folder: Path, program: str, rank: int | None) -> HostOrder:
    """A host's part of a run: `program`, on this machine; the membership server's without a rank."""
    ranks = range(0) if rank is None else range(rank, rank + 1)
    return HostOrder(Host("localhost", "localhost"), ranks, ["-c", program], str(folder))


COMES_BACK = """
import pathlib, sys
tries = pathlib.Path("tries")
tries.write_text(tries.read_text() + "." if tries.exists() else ".")
sys.exit(75 if len(tries.read_text()) < 3 else 0)
"""


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_host_that_was_cut_off_is_started_again_where_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    monkeypatch.setattr(watch, "FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(watch, "FOLLOW_S", 1.0)
    logs = Logs(tmp_path, echo=False)
    wait = "import time; time.sleep(60)"
    orders = [
        part(tmp_path, wait, None),
        part(tmp_path, COMES_BACK, 0),
        part(tmp_path, "import sys, time; time.sleep(2); sys.exit(3)", 1),
    ]
    board = Board(tmp_path)
    run = watch.RunWatch(orders, logs, board, goes_on=goes_on)
    status = run.run()
    logs.close()
    tries = len((tmp_path / "tries").read_text())
    if goes_on:
        assert (status, tries, len(run.finished)) == (0, 3, 1)
        told = [(event["kind"], event["host"]) for event in read_hosts(tmp_path)["events"]]
        assert [kind for kind, _ in told if "start" in kind] == ["started", "started", "started again", "started again"]
        first, second = read_hosts(tmp_path)["hosts"]
        assert (first["ranks"], first["state"], first["restarts"]) == ([0], "done", 2)
        assert (second["ranks"], second["state"], second["restarts"]) == ([1], "failed", 0)
    else:
        assert (status, tries, run.finished) == (75, 1, []) and run.lost


def test_the_run_ends_with_its_membership_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "FOLLOW_S", 0.5)
    logs = Logs(tmp_path, echo=False)
    wait = "import time; time.sleep(60)"
    orders = [part(tmp_path, "import sys; sys.exit(4)", None), part(tmp_path, wait, 0)]
    run = watch.RunWatch(orders, logs, Board(tmp_path), goes_on=True)
    assert run.run() == 4 and run.finished == []
    logs.close()


SERVER = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path("stopped").touch()))
pathlib.Path("serves").touch()
time.sleep(60)
"""
WORKS = """
import pathlib, time
while not pathlib.Path("serves").exists() or {waits} and not pathlib.Path("finished").exists():
    time.sleep(0.01)
time.sleep(0.5 * {waits})
assert not pathlib.Path("stopped").exists()
pathlib.Path("finished").touch()
"""


def test_the_membership_server_stays_until_no_host_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = Logs(tmp_path)
    programs = [(SERVER, None), (WORKS.format(waits=0), 0), (WORKS.format(waits=1), 1)]
    run = watch.RunWatch([part(tmp_path, *one) for one in programs], logs, Board(tmp_path), goes_on=True)
    assert run.run() == 0 and len(run.finished) == 2 and (tmp_path / "stopped").exists()
    logs.close()
    assert capsys.readouterr().err == "", "a server that is no longer needed ends without a message"


def test_outages_are_what_faults_would_say() -> None:
    outages = Outages()
    there = outages.bind(4)
    outages.note(10, [0, 1, 3])
    outages.note(20, [0, 1])
    saved = outages.state()
    outages.note(30, [0, 1, 2])
    planned = Faults(absent=outages.as_absent(), forget=True).bind(4)
    for step in range(1, 50):
        assert there.up(step) == planned.up(step) and there.returning(step) == planned.returning(step)
    outages.load(saved)
    assert there.up(40) == [0, 1] and outages.as_absent() == {2: [(11, None)], 3: [(21, None)]}


def test_outages_noted_again_at_the_same_step_say_what_was_noted_last() -> None:
    outages = Outages()
    there = outages.bind(3)
    outages.note(0, [0, 2])
    outages.note(0, [0])  # one more was lost before a step was taken
    assert outages.as_absent() == {1: [(1, None)], 2: [(1, None)]}
    outages.note(40, [0, 1])
    assert there.up(41) == [0, 1] and outages.as_absent() == {1: [(1, 41)], 2: [(1, None)]}
    outages.note(40, [0])  # it came and was lost again
    assert there.up(41) == [0] and outages.as_absent() == {1: [(1, None)], 2: [(1, None)]}
    fresh = Outages()
    fresh.bind(2)
    fresh.note(5, [0])
    fresh.note(5, [0, 1])
    assert fresh.as_absent() == {}
