"""A process's seat at the roll call, and the process group of the epoch that it takes part in."""

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

from exogym.base import pulse
from exogym.engine.sockets import Sockets, shut, sockets
from exogym.engine.world import join_group, leave_group
from exogym.errors import WorkerError
from exogym.launch.door import Refused, knock
from exogym.launch.shelf import LineStore
from exogym.progress import notice
from exogym.remote.onhost.guard import TRY_AGAIN
from exogym.remote.orders import SILENCE_S

ROLL_CALL = "roll call"  # what one comes to its door for
DONE = "done"  # why a run is over that has come to its end
BEAT_S = 2.0
RETRY_S, TRIES = 0.5, 5
MEET_S = 90.0  # for the members of an epoch to connect to each other
NEVER = 2**62
FOREVER = timedelta(days=30)  # who waits too long for another is found out by the roll call


@dataclass(frozen=True)
class Epoch:
    """Those who train together from `step` on (None: from the start).

    Attributes:
        members, newcomers: seats; newcomers are members that know nothing yet.
        source: the seat whose state they take.
    """

    number: int
    members: list[int]
    step: int | None
    newcomers: list[int]
    source: int


class Member:
    """A seat at the roll call at `address` and `port`.

    Attributes:
        fresh: whether no training went on when this process came; again: whether some had been before.
        over: why there is nothing to do any more, or None.
        waiting: whether newcomers wait to be let in.

    Raises:
        WorkerError: nobody answered within `timeout_s`.
    """

    def __init__(
        self, address: str, port: int, seat: int, secret: str, timeout_s: float = 300.0, silence_s: float = SILENCE_S
    ):
        self.seat, self.silence_s = seat, silence_s
        self.waiting = False
        self.cut: str | None = None  # why the roll call is out of reach
        self.group = Group()
        self._epochs: queue.Queue[Epoch | None] = queue.Queue()
        self._sending = threading.Lock()
        try:
            self._socket = knock(address, port, secret, ROLL_CALL, timeout_s)
        except Refused as error:
            raise WorkerError(
                f"the roll call at {address} port {port} refused rank {seat}: {error}; end it, or give another "
                "master_port"
            ) from error
        except OSError as error:
            raise WorkerError(
                f"the roll call at {address} port {port} does not answer within {timeout_s:g} s: {error}"
            ) from error
        self._file = self._socket.makefile("rb")
        self._say({"say": "hello", "seat": seat})
        self._socket.settimeout(silence_s)
        line = self._heard()
        welcome = json.loads(line)
        self.fresh, self.again, self.over = welcome["fresh"], welcome["again"], welcome["over"]
        for work in (self._listen, self._beat):
            threading.Thread(target=work, name="exogym-roll", daemon=True).start()

    @property
    def lost(self) -> bool:
        """Whether the present epoch has ended, because someone is lost."""
        return self.cut is not None or self.group.has_ended

    @pulse.waits
    def ready(self, kind: str, anchors: Sequence[int] = (), planned: bool = False) -> Epoch:
        """Wait for the next epoch and join its process group; return it.

        Args:
            kind: "fresh" (at the start), "alone" (to join others), "member" (of the epoch before).
            anchors: steps that this process can go back to.
            planned: whether all members come here at the same step.

        Raises:
            WorkerError: the run is over, or the roll call is lost, or the same members fail to meet again and again.
            SystemExit: the run has come to its end, without this process.
        """
        failed: list[list[int]] = []
        while True:
            self.group.leave()
            self.waiting = False
            self._say({"say": "ready", "kind": kind, "anchors": list(anchors), "planned": planned})
            epoch = self._epochs.get()
            if self.over == DONE:
                raise SystemExit(0)
            if epoch is None:
                raise WorkerError(self.over or self.cut or "the roll call has ended")
            with contextlib.suppress(RuntimeError):  # torch's own errors of the network are such
                self.group.join(LineStore(functools.partial(self._ask, epoch.number)), epoch, self.seat)
                return epoch
            failed.append(epoch.members)
            if failed.count(epoch.members) >= TRIES:
                raise WorkerError(
                    f"ranks {', '.join(map(str, epoch.members))} did not reach each other, {TRIES} times: see that no "
                    "firewall stands between their hosts (exogym doctor tries all ways)"
                )
            time.sleep(RETRY_S * len(failed))
            planned = False  # a member was lost meanwhile; all stand where they stood

    def training(self) -> None:
        """Say that training begins."""
        self._say({"say": "training"})

    def stopped(self) -> None:
        """Say that the run was asked to stop, and has."""
        self._say({"say": "stopped"})

    def finished(self) -> None:
        """Say that the run has come to its end, of which all members know."""
        self._say({"say": "finished"})

    def _heard(self) -> bytes:
        try:
            if line := self._file.readline():
                return line
            why = "it closed the connection"
        except OSError as error:
            why = str(error)
        raise WorkerError(f"the roll call is lost before it said anything: {why}")

    def _say(self, what: dict[str, Any]) -> None:
        try:
            with self._sending:
                self._socket.sendall(json.dumps(what).encode() + b"\n")
        except OSError as error:
            self._cut(f"the roll call cannot be reached: {error}")

    def _ask(self, number: int, what: dict[str, Any]) -> None:
        self._say(what | {"epoch": number})

    def _beat(self) -> None:
        while self.cut is None:
            time.sleep(BEAT_S)
            self._say({"say": "beat"})

    def _listen(self) -> None:
        try:
            for line in self._file:
                self._hear(json.loads(line))
            self._cut("the roll call has ended this process's part, or is gone")
        except TimeoutError:
            self._cut(f"the roll call has not been heard for {self.silence_s:g} s")
        except (OSError, ValueError) as error:
            self._cut(f"the roll call is lost: {error}")

    def _hear(self, said: dict[str, Any]) -> None:
        kind = said.pop("hear")
        if kind == "lost":
            self.group.sever(said["number"])
        elif kind == "waiting":
            self.waiting = True
        elif kind == "store":
            self.group.hear(said)
        elif kind == "epoch":
            self._epochs.put(Epoch(**said))
        elif kind == "over":
            self.over = said["why"]
            self._epochs.put(None)

    def _cut(self, why: str) -> None:
        if self.cut is None:
            self.cut = why
            self.group.sever(NEVER)
            self._epochs.put(None)


@contextlib.contextmanager
def seat(address: str, port: int, number: int, secret: str) -> Iterator[Member]:
    """Take the seat `number`, and leave it at the end; end the process where nothing is to be done.

    Raises:
        WorkerError: the run is over, without having come to its end.
        SystemExit: 0 where it has come to its end; `TRY_AGAIN` where the roll call is out of reach.
    """
    member = None
    try:
        member = Member(address, port, number, secret)
        if member.over == DONE:
            notice("nothing is left to do here: the run has come to its end")
            raise SystemExit(0)
        if member.over is not None:
            raise WorkerError(f"the run is over: {member.over}")
        yield member
    except WorkerError as error:
        if member is not None and member.cut is None:
            raise
        notice(f"rank {number} is cut off from the others: {error}")
        raise SystemExit(TRY_AGAIN) from error
    except (KeyboardInterrupt, SystemExit):
        if member is not None and member.over is None:
            member.stopped()
        raise
    finally:
        if member is not None:
            member.group.leave()


class Group:
    """The process group of an epoch: torch's default one, over gloo, which can be cut off from another thread.

    Neither gloo's operations nor its meeting can be ended by torch (`abort` does not wake who waits), so `sever` shuts
    down the connections that were opened since the meeting began; whoever waits on one gets an error at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = -1  # of the epoch that this process takes part in, or is about to
        self._ended = -1  # the last epoch that is known to have ended
        self._before: Sockets = set()
        self._own: Sockets | None = None
        self._store: LineStore | None = None  # in which the members meet

    def join(self, store: LineStore, epoch: Epoch, seat: int) -> None:
        """Meet the other members of the epoch.

        Raises:
            RuntimeError: one of them is lost, or out of reach for `MEET_S`.
        """
        limit = threading.Timer(MEET_S, self.sever, [epoch.number])
        limit.start()
        try:
            self._meet(store, epoch, seat)
        finally:
            limit.cancel()

    def _meet(self, store: LineStore, epoch: Epoch, seat: int) -> None:
        with self._lock:
            self._before, self._own, self._number, self._store = sockets(), None, epoch.number, store
            if self._ended >= epoch.number:
                raise RuntimeError("a member was lost")
        rank = epoch.members.index(seat)
        join_group(
            "gloo", store=dist.PrefixStore(f"epoch/{epoch.number}", store), rank=rank,
            world_size=len(epoch.members), timeout=FOREVER,
        )  # fmt: skip
        dist.barrier()
        with self._lock:
            self._own = sockets() - self._before

    def hear(self, said: dict[str, Any]) -> None:
        """Take what the roll call answers to what the members ask of each other."""
        if self._store is not None:
            self._store.hear(said)

    def leave(self) -> None:
        """End the group."""
        with self._lock:
            self._number = -1
        with contextlib.suppress(RuntimeError):
            leave_group()

    @property
    def has_ended(self) -> bool:
        """Whether this group is of an epoch that has ended."""
        return 0 <= self._number <= self._ended

    def sever(self, number: int) -> None:
        """The epochs up to `number` have ended: cut the connections if this group is of one."""
        with self._lock:
            self._ended = max(self._ended, number)
            if not self.has_ended:
                return
            if self._store is not None:
                self._store.fail("a member was lost")
            theirs = sockets() - self._before
            for descriptor, inode in theirs if self._own is None else theirs & self._own:
                shut(descriptor, inode)
