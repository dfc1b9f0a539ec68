"""A process's membership in a run whose hosts may be lost, and its process group with the other members."""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from exogym.core.base import pulse
from exogym.core.base.shelf import LineStore
from exogym.core.engine.sockets import Sockets, shut, sockets
from exogym.core.engine.world import join_group, leave_group
from exogym.core.progress import notice
from exogym.errors import WorkerError
from exogym.machines.launch.door import WrongSecret, knock
from exogym.machines.remote.onhost.guard import TRY_AGAIN
from exogym.machines.remote.orders import SILENCE_S

MEMBERSHIP = "membership"  # the door's service for members
DONE = "done"  # reason: the run has finished
HEARTBEAT_S = 2.0
RETRY_S, TRIES = 0.5, 5
MEET_S = 90.0  # seconds for a generation's members to connect
NEVER = 2**62
FOREVER = timedelta(days=30)  # the membership server detects members that wait too long


@dataclass(frozen=True)
class Generation:
    """A period of a run in which the same processes, the members, train together.

    Attributes:
        number: the generation's number, from 0.
        members: the members' ranks in the run.
        step: the step at which the generation begins, or None at the start of the run.
        newcomers: ranks of the members that don't have the run's state yet.
        source: rank of the member whose state the newcomers copy.
    """

    number: int
    members: list[int]
    step: int | None
    newcomers: list[int]
    source: int


class Member:
    """This process's connection to the membership server, which decides which processes train together.

    Args:
        address, port: where the membership server listens.
        rank: this process's rank in the run.
        secret: the run's secret.

    Attributes:
        fresh: True if no process was training when this process connected.
        again: True if some processes had trained in this run before this process connected.
        over: the reason why the run is over, or None if the run continues.
        waiting: True while other processes wait to join the run.

    Raises:
        WorkerError: the server did not answer within `timeout_s` seconds.
    """

    def __init__(self, address: str, port: int, rank: int, secret: str, timeout_s: float = 300.0):
        self.rank = rank
        self.waiting = False
        self.cut: str | None = None  # why the membership server can't be reached
        self.group = GenerationGroup()
        self._generations: queue.Queue[Generation | None] = queue.Queue()
        self._sending = threading.Lock()
        try:
            self._socket = knock(address, port, secret, MEMBERSHIP, timeout_s)
        except WrongSecret as error:
            raise WorkerError(
                f"the membership server at {address} port {port} rejected rank {rank}: {error}; end that run, or use "
                "another master_port"
            ) from error
        except OSError as error:
            raise WorkerError(
                f"the membership server at {address} port {port} does not answer within {timeout_s:g} s: {error}"
            ) from error
        self._file = self._socket.makefile("rb")
        self._say({"say": "hello", "rank": rank})
        self._socket.settimeout(SILENCE_S)
        line = self._heard()
        welcome = json.loads(line)
        self.fresh, self.again, self.over = welcome["fresh"], welcome["again"], welcome["over"]
        for work in (self._listen, self._heartbeat):
            threading.Thread(target=work, name="exogym-membership", daemon=True).start()

    @property
    def lost(self) -> bool:
        """Whether another process of the generation is lost, or this process has lost the membership server."""
        return self.cut is not None or self.group.has_ended

    @pulse.at(pulse.WAITING)
    def ready(self, kind: str, anchors: Sequence[int] = (), planned: bool = False) -> Generation:
        """Wait for the next generation, connect to its other members, and return the generation.

        Args:
            kind: "fresh" if this process starts the run with others, "alone" if it joins a run that has begun, "member"
                if it was in the previous generation.
            anchors: steps whose state this process has saved, to which it can return.
            planned: True if no member was lost, so that all members call this method at the same step.

        Raises:
            WorkerError: the run is over, the membership server is lost, or the same members failed repeatedly to
                connect to each other.
            SystemExit: the run has finished without this process.
        """
        failed: list[list[int]] = []
        while True:
            self.group.leave()
            self.waiting = False
            self._say({"say": "ready", "kind": kind, "anchors": list(anchors), "planned": planned})
            generation = self._generations.get()
            if self.over == DONE:
                raise SystemExit(0)
            if generation is None:
                raise WorkerError(self.over or self.cut or "the membership server has ended")
            with contextlib.suppress(RuntimeError):  # torch's network errors are RuntimeErrors
                self.group.join(LineStore(functools.partial(self._ask, generation.number)), generation, self.rank)
                return generation
            failed.append(generation.members)
            if failed.count(generation.members) >= TRIES:
                ranks = ", ".join(map(str, generation.members))
                raise WorkerError(
                    f"ranks {ranks} could not reach each other in {TRIES} attempts: check the firewalls between "
                    "their hosts (exogym doctor tests all connections)"
                )
            time.sleep(RETRY_S * len(failed))
            planned = False  # a member was lost in the meantime; all are at the same step as before

    def tell(self, what: str) -> None:
        """Tell the membership server that "training" begins, or that the run was "stopped" or has "finished"."""
        self._say({"say": what})

    def _heard(self) -> bytes:
        try:
            if line := self._file.readline():
                return line
            why = "it closed the connection"
        except OSError as error:
            why = str(error)
        raise WorkerError(f"the connection to the membership server was lost before it answered: {why}")

    def _say(self, what: dict[str, Any]) -> None:
        try:
            with self._sending:
                self._socket.sendall(json.dumps(what).encode() + b"\n")
        except OSError as error:
            self._cut(f"the membership server cannot be reached: {error}")

    def _ask(self, number: int, what: dict[str, Any]) -> None:
        self._say(what | {"generation": number})

    def _heartbeat(self) -> None:
        while self.cut is None:
            time.sleep(HEARTBEAT_S)
            self._say({"say": "heartbeat"})

    def _listen(self) -> None:
        try:
            for line in self._file:
                self._hear(json.loads(line))
            self._cut("the membership server has ended this process's part, or is lost")
        except TimeoutError:
            self._cut(f"the membership server was silent for {SILENCE_S:g} s")
        except (OSError, ValueError) as error:
            self._cut(f"the membership server is lost: {error}")

    def _hear(self, said: dict[str, Any]) -> None:
        kind = said.pop("hear")
        if kind == "lost":
            self.group.sever(said["number"])
        elif kind == "waiting":
            self.waiting = True
        elif kind == "store":
            self.group.hear(said)
        elif kind == "generation":
            self._generations.put(Generation(**said))
        elif kind == "over":
            self.over = said["why"]
            self._generations.put(None)

    def _cut(self, why: str) -> None:
        if self.cut is None:
            self.cut = why
            self.group.sever(NEVER)
            self._generations.put(None)


@contextlib.contextmanager
def membership(address: str, port: int, rank: int, secret: str) -> Iterator[Member]:
    """A context that yields this process's `Member` of the run, and leaves the process group at its end.

    Raises:
        WorkerError: the run ended before its last step.
        SystemExit: with status 0 if the run has already finished, and with status `TRY_AGAIN` if the membership server
            can't be reached.
    """
    member = None
    try:
        member = Member(address, port, rank, secret)
        if member.over == DONE:
            notice("the run has already finished: this process has nothing to do")
            raise SystemExit(0)
        if member.over is not None:
            raise WorkerError(f"the run is over: {member.over}")
        yield member
    except WorkerError as error:
        if member is not None and member.cut is None:
            raise
        notice(f"rank {rank} is cut off from the other ranks: {error}")
        raise SystemExit(TRY_AGAIN) from error
    except (KeyboardInterrupt, SystemExit):
        if member is not None and member.over is None:
            member.tell("stopped")
        raise
    finally:
        if member is not None:
            member.group.leave()


class GenerationGroup:
    """The process group of the members that train together: torch's default group over gloo.

    Another thread can end waiting calls with `sever`. Torch's `abort` doesn't wake waiting calls, so `sever` shuts down
    all connections that were opened since the members began to connect, and waiting calls fail immediately.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = -1  # this process's current or next generation
        self._ended = -1  # the last generation known to have ended
        self._before: Sockets = set()
        self._own: Sockets | None = None
        self._store: LineStore | None = None  # the store where the members meet

    def join(self, store: LineStore, generation: Generation, rank: int) -> None:
        """Connect this process to the generation's other members.

        Raises:
            RuntimeError: a member is lost, or cannot be reached within `MEET_S` seconds.
        """
        limit = threading.Timer(MEET_S, self.sever, [generation.number])
        limit.start()
        try:
            self._meet(store, generation, rank)
        finally:
            limit.cancel()

    def _meet(self, store: LineStore, generation: Generation, rank: int) -> None:
        with self._lock:
            self._before, self._own, self._number, self._store = sockets(), None, generation.number, store
            if self._ended >= generation.number:
                raise RuntimeError("a member was lost")
        join_group(
            "gloo", store=dist.PrefixStore(f"generation/{generation.number}", store),
            rank=generation.members.index(rank), world_size=len(generation.members), timeout=FOREVER,
        )  # fmt: skip
        dist.barrier()
        with self._lock:
            self._own = sockets() - self._before

    def hear(self, said: dict[str, Any]) -> None:
        """Handle the membership server's answer to a request of the members' store."""
        if self._store is not None:
            self._store.hear(said)

    def leave(self) -> None:
        """Leave the process group and close its connections."""
        with self._lock:
            self._number = -1
        with contextlib.suppress(RuntimeError):
            leave_group()

    @property
    def has_ended(self) -> bool:
        """Whether the membership server has ended this group, because a member was lost."""
        return 0 <= self._number <= self._ended

    def sever(self, number: int) -> None:
        """Record that generations up to `number` have ended. If this process's group is one of them, disconnect it."""
        with self._lock:
            self._ended = max(self._ended, number)
            if not self.has_ended:
                return
            if self._store is not None:
                self._store.fail("a member was lost")
            theirs = sockets() - self._before
            for descriptor, inode in theirs if self._own is None else theirs & self._own:
                shut(descriptor, inode)
