"""The roll call: decides who takes part in a run whose hosts may be lost and come back.

`python -m exogym.remote.elastic.rollcall` runs on the master beside the training processes. Each process (a seat) keeps
one connection to it, which came through a `Door`, so that both know that the other belongs to this run. On it both
sides send lines of JSON:

    seat -> {"say": "hello", "seat"}    {"say": "beat"}
            {"say": "training"}    {"say": "finished"}    {"say": "stopped"}
            {"say": "ready", "kind": "fresh" | "alone" | "member", "anchors": [steps], "planned": bool}
    roll -> {"hear": "welcome", "fresh", "again", "over"}    {"hear": "beat"}    {"hear": "waiting"}
            {"hear": "epoch", "number", "members", "step", "newcomers", "source"}
            {"hear": "lost", "number": of the epoch that has ended}    {"hear": "over", "why"}

and, while the members of an epoch connect to each other, what a `Shelf` is asked and answers, with the epoch's number.

An epoch is the time in which the same seats train together. It ends when a host is lost: its connections close, or are
silent for `silence_s`. Then all others are told, say "ready" with the steps to which they can go back, and the next
epoch begins at the last step that all of them know. A host that comes back waits until the members are ready by plan,
at a moment when they all stand at the same step. Only this process decides, so no two groups ever go on apart from
each other.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from exogym.launch.door import SECRET, Door, listen
from exogym.launch.shelf import SENSELESS, Shelf
from exogym.remote.elastic.member import DONE, ROLL_CALL
from exogym.remote.orders import SILENCE_S

GATHER_S = 60.0  # after a total loss, how long those who are back wait for the others
LOOK_S = 0.2
NAME_S, SEND_S = 10.0, 10.0
LONGEST_LINE = 1 << 20  # bytes


@dataclass(eq=False)
class Line:
    """A connection of one of ours, which has yet to say who it is where `seat` is None."""

    connection: socket.socket
    heard: float
    seat: int | None = None
    rest: bytes = b""


@dataclass
class Roll:
    """Who is there, who trains, and what is to be told to whom; knows no sockets.

    Args:
        slots: seats of each host, numbered through.
        min_hosts: with fewer hosts the run is over.
        gather_s: how long the first epoch waits for all seats.

    >>> roll = Roll([1, 1], min_hosts=1, gather_s=300)
    >>> for seat in (0, 1):
    ...     _ = roll.hello(seat), roll.ready(seat, {"kind": "fresh"}, now=0.0)
    >>> {k: roll.told[0][1][k] for k in ("number", "members", "newcomers", "source")}
    {'number': 0, 'members': [0, 1], 'newcomers': [0, 1], 'source': 0}
    """

    slots: Sequence[int]
    min_hosts: int
    gather_s: float
    members: set[int] = field(default_factory=set)
    there: set[int] = field(default_factory=set)
    lost: bool = False  # whether a member was lost since the epoch began
    epoch: int = -1
    over: str | None = None
    told: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    _ready: dict[int, dict[str, Any]] = field(default_factory=dict)
    _begun: set[int] = field(default_factory=set)  # the seats with which the epoch began
    _trained: bool = False
    _gathering: float | None = None  # since when the first seat of a fresh epoch waits

    def __post_init__(self) -> None:
        self.host_of = [host for host, count in enumerate(self.slots) for _ in range(count)]

    @property
    def seats(self) -> int:
        return len(self.host_of)

    def hello(self, seat: int) -> dict[str, Any]:
        """A process has come to `seat`; return what it is told."""
        self.there.add(seat)
        return {"hear": "welcome", "fresh": not self.members, "again": self._trained, "over": self.over}

    def leave(self, seat: int) -> list[int]:
        """The process at `seat` is gone, or has not been heard; return the seats of its host, which are lost with it.

        A host is lost as a whole: its launcher ends all its processes when one has failed.
        """
        gone = [other for other in self.there if self.host_of[other] == self.host_of[seat]]
        was_member = bool(self.members & set(gone))
        for other in gone:
            self.there.discard(other)
            self.members.discard(other)
            self._ready.pop(other, None)
        if was_member and self.over is None:
            self._end_epoch()
        return gone

    def ready(self, seat: int, said: dict[str, Any], now: float) -> None:
        """The process at `seat` waits for the next epoch."""
        if seat not in self.there:
            return
        if self.over is not None:
            self._tell([seat], {"hear": "over", "why": self.over})
            return
        self._ready[seat] = said
        if seat in self.members:
            if said["kind"] != "member":  # it got nothing of what the others have
                self.members.discard(seat)
            if not self.lost and not (said["kind"] == "member" and said["planned"]):
                self._end_epoch()  # it could not reach another one
        if said["kind"] == "fresh" and self._gathering is None:
            self._gathering = now
        self.look(now)
        if seat in self._ready and said["kind"] == "alone":
            self._tell(self.members, {"hear": "waiting"})

    def training(self) -> None:
        """The members train; should all be lost, those who come then are not the first."""
        self._trained = True

    def finished(self) -> None:
        """A member has trained to the end, so all have; who comes now, or waits to be let in, has nothing to do."""
        if self.over is None:
            self._end(DONE)

    def stopped(self) -> None:
        """A member was asked to stop, so all have stopped where they stood."""
        if self.over is None:
            self._end("it was stopped")

    def look(self, now: float) -> None:
        """Begin the next epoch, if all is there that it needs."""
        if self.over is not None:
            return
        if not self.members:
            self._look_for_a_start(now)
            return
        underway = any(self._ready.get(seat, {}).get("kind") == "member" for seat in self.members)
        late = {seat for seat, said in self._ready.items() if said["kind"] == "fresh"}
        self._refuse(late if underway else late - self._begun, "the run has begun without this process")
        if all(seat in self._ready for seat in self.members):
            kept = sorted(self.members)
            if len(self._hosts(kept)) < self.min_hosts:
                self._end(
                    f"{len(self._hosts(kept))} hosts are left, and min_hosts={self.min_hosts}: lower it, or give "
                    "save_dir and retries"
                )
                return
            step = min(max(self._ready[seat]["anchors"]) for seat in kept)
            newcomers = [] if self.lost else self._whole({s for s in self._ready if self._ready[s]["kind"] == "alone"})
            self._begin(sorted([*kept, *newcomers]), newcomers, step, kept[0])

    def _look_for_a_start(self, now: float) -> None:
        alone = {seat for seat, said in self._ready.items() if said["kind"] == "alone"}
        self._refuse(alone, "the run that this process was to join has ended")
        if not self._ready:
            self._gathering = None
            return
        waited = now - self._gathering if self._gathering is not None else 0.0
        limit = self.gather_s if self.epoch < 0 else GATHER_S
        whole = self._whole(set(self._ready))
        if len(whole) == self.seats or (waited > limit and len(self._hosts(whole)) >= self.min_hosts):
            self._begin(whole, whole, None, whole[0])
        elif waited > limit:
            self._end(f"{len(self._hosts(whole))} hosts came within {limit:g} s, and min_hosts={self.min_hosts}")

    def _begin(self, members: list[int], newcomers: list[int], step: int | None, source: int) -> None:
        self.epoch += 1
        self.members, self._begun, self.lost, self._gathering = set(members), set(members), False, None
        self._tell(
            members,
            {
                "hear": "epoch", "number": self.epoch, "members": members, "step": step, "newcomers": newcomers,
                "source": source,
            },
        )  # fmt: skip
        for seat in members:
            del self._ready[seat]
        if any(said["kind"] == "alone" for said in self._ready.values()):
            self._tell(members, {"hear": "waiting"})

    def _end_epoch(self) -> None:
        self.lost = True
        self._tell(self.members, {"hear": "lost", "number": self.epoch})

    def _refuse(self, seats: set[int], why: str) -> None:
        """Have the processes at `seats`, which wait, end; they are started again."""
        for seat in sorted(seats):
            del self._ready[seat]
            self._tell([seat], {"hear": "over", "why": why})

    def _end(self, why: str) -> None:
        self.over = why
        self._tell(self.there, {"hear": "over", "why": why})

    def _whole(self, seats: set[int]) -> list[int]:
        """Return those of `seats` whose host is there with all its seats, ascending."""
        return sorted(
            s for s in seats if all(o in seats for o in range(self.seats) if self.host_of[o] == self.host_of[s])
        )

    def _hosts(self, seats: Sequence[int]) -> set[int]:
        return {self.host_of[seat] for seat in seats}

    def _tell(self, seats: Sequence[int] | set[int], what: dict[str, Any]) -> None:
        self.told += [(seat, what) for seat in sorted(seats)]


class Server:
    """Carries what `roll` says to the seats and what they say to it, on `address` and `port` (0: a free one).

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, roll: Roll, address: str, port: int, secret: str, silence_s: float = SILENCE_S):
        self.roll, self.silence_s = roll, silence_s
        listener = listen(address, port)
        self.selector = selectors.DefaultSelector()
        self.door = Door(self.selector, listener, secret, {ROLL_CALL: self._welcome})
        self.port = self.door.port
        self.stopping = False
        self.lines: dict[int, Line] = {}
        self.unnamed: set[Line] = set()  # those of ours that have not said who they are
        self._shelf, self._shelf_of = Shelf[Line](), -1  # where the members of that epoch meet

    def serve(self) -> None:
        """Serve until the run has come to its end, or `stopping` is set, and all have left."""
        try:
            while self.lines or not (self.stopping or self.roll.over == DONE):
                for key, _ in self.selector.select(LOOK_S):
                    key.data()
                now = time.monotonic()
                self.door.tidy()
                for line in [line for line in self.lines.values() if now - line.heard > self.silence_s]:
                    self._lose(line, f"has not been heard for {self.silence_s:g} s")
                for line in [line for line in self.unnamed if now - line.heard > NAME_S]:
                    self._close(line)
                self.roll.look(now)
                self._tell()
        finally:
            for line in [*self.lines.values(), *self.unnamed]:
                self._close(line)
            self.door.close()
            self.selector.close()

    def _welcome(self, connection: socket.socket) -> None:
        connection.settimeout(SEND_S)
        line = Line(connection, time.monotonic())
        self.unnamed.add(line)
        self.selector.register(connection, selectors.EVENT_READ, functools.partial(self._hear, line))

    def _hear(self, line: Line) -> None:
        if line not in self.unnamed and (line.seat is None or self.lines.get(line.seat) is not line):
            return  # it was closed by what another one said
        try:
            data = line.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data or len(line.rest) + len(data) > LONGEST_LINE:
            self._lose(line, "is gone")
            return
        if line.seat is not None:
            line.heard = time.monotonic()
        *whole, line.rest = (line.rest + data).split(b"\n")
        for text in whole:
            try:
                self._take(line, json.loads(text))
            except SENSELESS:
                self._lose(line, "says what nobody understands")
            if line.seat is None or self.lines.get(line.seat) is not line:
                return  # it was lost, or refused

    def _take(self, line: Line, said: dict[str, Any]) -> None:
        if line.seat is None:
            seat = said["seat"]
            if seat not in range(self.roll.seats):
                self._close(line)
                return
            if seat in self.lines:
                self._lose(self.lines[seat], "has been started again")
            line.seat, line.heard = seat, time.monotonic()
            self.unnamed.discard(line)
            self.lines[seat] = line
            self._send(line, self.roll.hello(seat))
        elif said["say"] == "beat":
            self._send(line, {"hear": "beat"})
        elif said["say"] == "store":
            self._ask_shelf(line, said)
        elif said["say"] == "ready":
            self.roll.ready(line.seat, said, time.monotonic())
        elif said["say"] == "training":
            self.roll.training()
        elif said["say"] == "stopped":
            self.roll.stopped()
        elif said["say"] == "finished":
            self.roll.finished()

    def _ask_shelf(self, line: Line, said: dict[str, Any]) -> None:
        if said["epoch"] != self.roll.epoch or line.seat not in self.roll.members:
            return  # it is told, or was, that its epoch has ended
        if self._shelf_of != self.roll.epoch:
            self._shelf, self._shelf_of = Shelf(), self.roll.epoch
        for other, what in self._shelf.take(line, said):
            if other in self.lines.values():  # and has not gone meanwhile
                self._send(other, what)

    def _lose(self, line: Line, why: str) -> None:
        self._close(line)
        if line.seat is None or self.lines.get(line.seat) is not line:
            return
        if self.roll.over is None:
            _say(f"rank {line.seat} {why}")
        for seat in self.roll.leave(line.seat):
            self._close(self.lines.pop(seat))
        if self.roll.over is None and self.roll.lost:
            _say(f"going on without it: {len(self.roll.members)} of {self.roll.seats} ranks are left")

    def _close(self, line: Line) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(line.connection)
        self.unnamed.discard(line)
        line.connection.close()

    def _tell(self) -> None:
        while self.roll.told:
            seat, what = self.roll.told.pop(0)
            if what["hear"] == "epoch" and seat == what["members"][0] and what["step"] is not None:
                back = f"; back is rank {', '.join(map(str, what['newcomers']))}" if what["newcomers"] else ""
                _say(f"{len(what['members'])} of {self.roll.seats} ranks go on from step {what['step']}{back}")
            if seat in self.lines:
                self._send(self.lines[seat], what)

    def _send(self, line: Line, what: dict[str, Any]) -> None:
        try:
            line.connection.sendall(json.dumps(what).encode() + b"\n")
        except OSError:
            self._lose(line, "cannot be reached")


def _say(text: str) -> None:
    print(f"exogym: {text}", file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m exogym.remote.elastic.rollcall", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--address", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", required=True, help="seats of each host, as in 1,2,1")
    parser.add_argument("--min_hosts", type=int, required=True)
    parser.add_argument("--start_timeout", type=float, required=True)
    given = parser.parse_args(words)
    roll = Roll([int(count) for count in given.slots.split(",")], given.min_hosts, given.start_timeout)
    try:
        server = Server(roll, given.address, given.port, os.environ[SECRET])
    except OSError as error:
        sys.exit(f"the roll call cannot listen at {given.address} port {given.port}: {error}; give another master_port")

    def stop(number: int, frame: FrameType | None) -> None:
        server.stopping = True  # the seats, which are asked to end too, may still have to save the run

    signal.signal(signal.SIGTERM, stop)
    server.serve()


if __name__ == "__main__":
    main()
