"""The membership server decides which processes take part in a run whose hosts may be lost and come back.

`python -m exogym.machines.remote.elastic.membership` runs on the master beside the training processes. Each training
process keeps one connection to the server and identifies itself by its rank. The connection is made through a `Door`,
so both ends know the run's secret. Both ends send lines of JSON:

    rank -> {"say": "hello", "rank"}    {"say": "heartbeat"}
            {"say": "training"}    {"say": "finished"}    {"say": "stopped"}
            {"say": "ready", "kind": "fresh" | "alone" | "member", "anchors": [steps], "planned": bool}
    server -> {"hear": "welcome", "fresh", "again", "over"}    {"hear": "heartbeat"}    {"hear": "waiting"}
            {"hear": "generation", "number", "members", "step", "newcomers", "source"}
            {"hear": "lost", "number": of the generation that has ended}    {"hear": "over", "why"}

A generation is a period in which the same ranks, its members, train together. While the members connect to each other,
they also send requests to a store of the server, with the generation's number.

A generation ends when a host is lost: the host's connections close, or are silent for `SILENCE_S` seconds. The server
then tells all other members. They answer "ready", with the steps whose state they have saved (`anchors`). The next
generation begins at the last step that all members have saved.

A host that comes back waits until all members say "ready" with `planned` true at the same step. Only this server
decides who takes part, so two groups can never continue separately. The run ends if fewer than `min_hosts` hosts are
left. After the run, the server stays to tell late hosts that the run is over, until the controller ends it (SIGTERM)
when all hosts have ended.
"""

from __future__ import annotations

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

from exogym.core.base.shelf import Shelf
from exogym.core.base.streams import STDERR
from exogym.machines.launch.door import SECRET, Door, listen
from exogym.machines.launch.lines import Line
from exogym.machines.remote.elastic.member import DONE, MEMBERSHIP
from exogym.machines.remote.orders import SILENCE_S

GATHER_S = 60.0  # after a total loss, returned hosts wait this long for the others
LOOK_S = 0.2
NAME_S = 10.0


@dataclass
class Membership:
    """Decide which processes train together, and collect the messages to them. This class uses no sockets.

    Args:
        slots: number of processes on each host. The first host has the first ranks, then the second, and so on.
        quorum: the minimum number of hosts (`min_hosts`), below which the run ends.
        gather_s: seconds to wait for all processes at the start, after which the run starts if at least `quorum` hosts
            are waiting.

    >>> membership = Membership([1, 1], quorum=1, gather_s=300)
    >>> for rank in (0, 1):
    ...     _ = membership.hello(rank), membership.ready(rank, {"kind": "fresh"}, now=0.0)
    >>> {k: membership.told[0][1][k] for k in ("number", "members", "newcomers", "source")}
    {'number': 0, 'members': [0, 1], 'newcomers': [0, 1], 'source': 0}
    """

    slots: Sequence[int]
    quorum: int
    gather_s: float
    members: set[int] = field(default_factory=set)
    there: set[int] = field(default_factory=set)
    lost: bool = False  # whether a member was lost since the generation began
    generation: int = -1
    over: str | None = None
    told: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    _ready: dict[int, dict[str, Any]] = field(default_factory=dict)
    _begun: set[int] = field(default_factory=set)  # the ranks with which the generation began
    _trained: bool = False
    _gathering: float | None = None  # the time since which the first process of a fresh generation has been waiting

    def __post_init__(self) -> None:
        self.host_of = [host for host, count in enumerate(self.slots) for _ in range(count)]

    @property
    def size(self) -> int:
        return len(self.host_of)

    def hello(self, rank: int) -> dict[str, Any]:
        """Record that the process with this rank has connected, and return its welcome message."""
        self.there.add(rank)
        return {"hear": "welcome", "fresh": not self.members, "again": self._trained, "over": self.over}

    def leave(self, rank: int) -> list[int]:
        """Remove all processes on the host of `rank`, because this process is gone or silent. Return their ranks.

        A host is lost as a whole, because its launcher ends all processes when one fails.
        """
        gone = [other for other in self.there if self.host_of[other] == self.host_of[rank]]
        was_member = bool(self.members & set(gone))
        for other in gone:
            self.there.discard(other)
            self.members.discard(other)
            self._ready.pop(other, None)
        if was_member and self.over is None:
            self._end_generation()
        return gone

    def ready(self, rank: int, said: dict[str, Any], now: float) -> None:
        """Record that the process with this rank waits for the next generation."""
        if rank not in self.there:
            return
        if self.over is not None:
            self._tell([rank], {"hear": "over", "why": self.over})
            return
        self._ready[rank] = said
        if rank in self.members:
            if said["kind"] != "member":  # it doesn't have the others' state
                self.members.discard(rank)
            if not self.lost and not (said["kind"] == "member" and said["planned"]):
                self._end_generation()  # it could not reach another member
        if said["kind"] == "fresh" and self._gathering is None:
            self._gathering = now
        self.look(now)
        if rank in self._ready and said["kind"] == "alone":
            self._tell(self.members, {"hear": "waiting"})

    def training(self) -> None:
        """Record that training has begun, so that new processes know it if all members are lost later."""
        self._trained = True

    def finished(self) -> None:
        """Record that the run has finished, and tell all processes, including those waiting to join."""
        if self.over is None:
            self._end(DONE)

    def stopped(self) -> None:
        """Record that a user or a signal has stopped the run, and tell all processes."""
        if self.over is None:
            self._end("it was stopped")

    def look(self, now: float) -> None:
        """Begin the next generation if all its members are ready. End the run if too few hosts are left."""
        if self.over is not None:
            return
        if not self.members:
            self._look_for_a_start(now)
            return
        underway = any(self._ready.get(rank, {}).get("kind") == "member" for rank in self.members)
        late = {rank for rank, said in self._ready.items() if said["kind"] == "fresh"}
        self._refuse(late if underway else late - self._begun, "the run has begun without this process")
        if all(rank in self._ready for rank in self.members):
            kept = sorted(self.members)
            if len(self._hosts(kept)) < self.quorum:
                self._end(
                    f"{len(self._hosts(kept))} hosts are left, but min_hosts={self.quorum}: lower it, or pass "
                    "save_dir and retries"
                )
                return
            step = min(max(self._ready[rank]["anchors"]) for rank in kept)
            newcomers = [] if self.lost else self._whole({s for s in self._ready if self._ready[s]["kind"] == "alone"})
            self._begin(sorted([*kept, *newcomers]), newcomers, step, kept[0])

    def _look_for_a_start(self, now: float) -> None:
        alone = {rank for rank, said in self._ready.items() if said["kind"] == "alone"}
        self._refuse(alone, "the run that this process wanted to join has ended")
        if not self._ready:
            self._gathering = None
            return
        waited = now - self._gathering if self._gathering is not None else 0.0
        limit = self.gather_s if self.generation < 0 else GATHER_S
        whole = self._whole(set(self._ready))
        if len(whole) == self.size or (waited > limit and len(self._hosts(whole)) >= self.quorum):
            self._begin(whole, whole, None, whole[0])
        elif waited > limit:
            self._end(f"{len(self._hosts(whole))} hosts arrived within {limit:g} s, but min_hosts={self.quorum}")

    def _begin(self, members: list[int], newcomers: list[int], step: int | None, source: int) -> None:
        self.generation += 1
        self.members, self._begun, self.lost, self._gathering = set(members), set(members), False, None
        self._tell(
            members,
            {
                "hear": "generation", "number": self.generation, "members": members, "step": step,
                "newcomers": newcomers, "source": source,
            },
        )  # fmt: skip
        for rank in members:
            del self._ready[rank]
        if any(said["kind"] == "alone" for said in self._ready.values()):
            self._tell(members, {"hear": "waiting"})

    def _end_generation(self) -> None:
        self.lost = True
        self._tell(self.members, {"hear": "lost", "number": self.generation})

    def _refuse(self, ranks: set[int], why: str) -> None:
        """End these waiting processes, which their hosts start again."""
        for rank in sorted(ranks):
            del self._ready[rank]
            self._tell([rank], {"hear": "over", "why": why})

    def _end(self, why: str) -> None:
        self.over = why
        self._tell(self.there, {"hear": "over", "why": why})

    def _whole(self, ranks: set[int]) -> list[int]:
        """Return the `ranks` whose whole host is present, in ascending order."""
        return sorted(
            s for s in ranks if all(o in ranks for o in range(self.size) if self.host_of[o] == self.host_of[s])
        )

    def _hosts(self, ranks: Sequence[int]) -> set[int]:
        return {self.host_of[rank] for rank in ranks}

    def _tell(self, ranks: Sequence[int] | set[int], what: dict[str, Any]) -> None:
        self.told += [(rank, what) for rank in sorted(ranks)]


class MembershipServer:
    """Send and receive the messages between `membership` and the processes of the run.

    Args:
        membership: decides which processes train together.
        address, port: where the server listens. With `port=0` it chooses a free port.
        secret: the run's secret. Processes without the secret cannot connect.

    Raises:
        OSError: the server cannot listen at this address and port.
    """

    def __init__(self, membership: Membership, address: str, port: int, secret: str):
        self.membership = membership
        listener = listen(address, port)
        self.selector = selectors.DefaultSelector()
        self.door = Door(self.selector, listener, secret, {MEMBERSHIP: self._welcome})
        self.port = self.door.port
        self.stopping = False
        self.lines: dict[int, Line] = {}
        self.unnamed: set[Line] = set()  # connections that have not identified themselves
        self._shelf, self._shelf_of = Shelf[Line](), -1  # the store of that generation

    def serve(self) -> None:
        """Serve until `stopping` is True and all processes have disconnected.

        The server outlives the run, so that a process that comes back later learns that the run is over.
        """
        try:
            while self.lines or not self.stopping:
                for key, _ in self.selector.select(LOOK_S):
                    key.data()
                now = time.monotonic()
                self.door.tidy()
                for line in [line for line in self.lines.values() if now - line.heard > SILENCE_S]:
                    line.lost(f"was silent for {SILENCE_S:g} s")
                for line in [line for line in self.unnamed if now - line.heard > NAME_S]:
                    line.lost("did not identify itself")
                self.membership.look(now)
                self._tell()
        finally:
            for line in [*self.lines.values(), *self.unnamed]:
                line.close()
            self.door.close()
            self.selector.close()

    def _welcome(self, connection: socket.socket) -> None:
        self.unnamed.add(Line(self.selector, connection, self._take, self._lose))

    def _take(self, line: Line, said: dict[str, Any]) -> None:
        if line.rank is None:
            rank = said["rank"]
            if rank not in range(self.membership.size):
                return line.lost("belongs to another run")
            if rank in self.lines:
                self.lines[rank].lost("has been started again")
            line.rank = rank
            self.unnamed.discard(line)
            self.lines[rank] = line
            line.say(self.membership.hello(rank))
        elif said["say"] == "heartbeat":
            line.say({"hear": "heartbeat"})
        elif said["say"] == "store":
            self._ask_shelf(line, said)
        elif said["say"] == "ready":
            self.membership.ready(line.rank, said, time.monotonic())
        elif said["say"] == "training":
            self.membership.training()
        elif said["say"] == "stopped":
            self.membership.stopped()
        elif said["say"] == "finished":
            self.membership.finished()

    def _ask_shelf(self, line: Line, said: dict[str, Any]) -> None:
        if said["generation"] != self.membership.generation or line.rank not in self.membership.members:
            return  # it learns, or knows, that its generation has ended
        if self._shelf_of != self.membership.generation:
            self._shelf, self._shelf_of = Shelf(), self.membership.generation
        for other, what in self._shelf.take(line, said):
            if other.is_open:  # it may be gone by now
                other.say(what)

    def _lose(self, line: Line, why: str) -> None:
        self.unnamed.discard(line)
        if line.rank is None:
            return
        if self.membership.over is None:
            _say(f"rank {line.rank} {why}")
        for rank in self.membership.leave(line.rank):
            self.lines.pop(rank).close()
        if self.membership.over is None and self.membership.lost:
            _say(f"continuing without it: {len(self.membership.members)} of {self.membership.size} ranks are left")

    def _tell(self) -> None:
        while self.membership.told:
            rank, what = self.membership.told.pop(0)
            if what["hear"] == "generation" and rank == what["members"][0] and what["step"] is not None:
                back = f"; back: rank {', '.join(map(str, what['newcomers']))}" if what["newcomers"] else ""
                _say(f"{len(what['members'])} of {self.membership.size} ranks continue from step {what['step']}{back}")
            if rank in self.lines:
                self.lines[rank].say(what)


def _say(text: str) -> None:
    print(f"exogym: {text}", file=STDERR, flush=True)


def main(given: str) -> None:
    """Serve as `given` says: a JSON object with the fields of `orders`."""
    asked = json.loads(given)
    address, port = asked["address"], asked["port"]
    membership = Membership(asked["slots"], asked["min_hosts"], asked["start_timeout_s"])
    try:
        server = MembershipServer(membership, address, port, os.environ[SECRET])
    except OSError as error:
        sys.exit(f"the membership server cannot listen at {address} port {port}: {error}; use another master_port")

    def stop(number: int, frame: FrameType | None) -> None:
        server.stopping = True  # running processes must end as well, and may still save the run

    signal.signal(signal.SIGTERM, stop)
    server.serve()


if __name__ == "__main__":
    main(sys.argv[1])
