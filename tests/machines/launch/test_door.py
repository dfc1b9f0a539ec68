"""Who gets in: the check of the secret, crowds at the door, the store behind it, and the ports that are closed."""

import contextlib
import functools
import hmac
import json
import os
import secrets
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousError

from exogym.core.base.shelf import SENSELESS, LineStore, Shelf, unpacked
from exogym.core.engine.sockets import ports_closed_afterwards, sockets
from exogym.machines.launch.door import MOST_OF_ONE_ADDRESS, MOST_UNNAMED, SIZE, Door, WrongSecret, knock, listen, proof
from exogym.machines.launch.meeting import LEFT, NODE, Link, MeetingPlace, Relay
from exogym.machines.launch.rendezvous import Machine, OrderedRendezvous
from exogym.machines.remote.elastic.member import Member
from exogym.machines.remote.elastic.membership import Membership, MembershipServer

PLACE_S = 60.0


class Porter:
    """A door in a thread, which echoes lines to whoever has got in."""

    def __init__(self, secret: str = "secret"):
        self.selector = selectors.DefaultSelector()
        self.inside: list[socket.socket] = []
        self.door = Door(self.selector, listen("127.0.0.1"), secret, {"echo": self.welcome})
        self.done = False
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def welcome(self, connection: socket.socket) -> None:
        self.inside.append(connection)
        self.selector.register(connection, selectors.EVENT_READ, functools.partial(self.echo, connection))

    def echo(self, connection: socket.socket) -> None:
        if data := connection.recv(1000):
            connection.sendall(data)
        else:
            self.selector.unregister(connection)

    def serve(self) -> None:
        while not self.done:
            for key, _ in self.selector.select(0.02):
                key.data()
            self.door.tidy()
        for connection in self.inside:
            connection.close()
        self.door.close()
        self.selector.close()


@pytest.fixture
def porter() -> Iterator[Porter]:
    made = Porter()
    yield made
    made.done = True
    made.thread.join()


def idle(port: int, count: int, source: str = "127.0.0.1") -> list[socket.socket]:
    """Connect `count` times from an address of the loopback, and say nothing."""
    return [socket.create_connection(("127.0.0.1", port), PLACE_S, (source, 0)) for _ in range(count)]


def is_open(connection: socket.socket) -> bool:
    """Take what came, and say whether the other end still holds the connection."""
    connection.setblocking(False)
    try:
        while connection.recv(100):
            pass
    except BlockingIOError:
        return True
    except ConnectionResetError:
        pass
    return False


def heard(connection: socket.socket) -> bytes:
    """Return all that comes until the other end closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(4096):
            found += data
    return found


# The secret


def test_both_ends_must_know_the_secret_and_neither_says_it(porter: Porter) -> None:
    with knock("127.0.0.1", porter.door.port, "secret", "echo", PLACE_S) as friend:
        friend.sendall(b"hello")
        assert friend.recv(100) == b"hello"
    for secret, service in (("another", "echo"), ("", "echo"), ("secret", "another service")):
        with pytest.raises(WrongSecret, match="another secret"):
            knock("127.0.0.1", porter.door.port, secret, service, PLACE_S)
    assert len(porter.inside) == 1


def test_what_was_heard_once_opens_nothing(porter: Porter) -> None:
    """A stranger who has listened to a friend says the same again; and one who sends the door's own words back."""
    with socket.create_connection(("127.0.0.1", porter.door.port), PLACE_S) as first:
        drawn = first.recv(SIZE) + bytes(SIZE)
        answer = bytes(SIZE) + proof("secret", "guest", "echo", drawn)
        first.sendall(answer)
        assert first.recv(SIZE) == proof("secret", "door", "echo", drawn)
    with socket.create_connection(("127.0.0.1", porter.door.port), PLACE_S) as again:
        assert again.recv(SIZE) != drawn[:SIZE]
        again.sendall(answer)
        assert heard(again) == bytes(SIZE)
    with socket.create_connection(("127.0.0.1", porter.door.port), PLACE_S) as mirror:
        said = mirror.recv(SIZE)
        mirror.sendall(said + said)
        assert heard(mirror) == bytes(SIZE)
    assert len(porter.inside) == 1


def test_a_guest_says_nothing_to_a_door_that_does_not_know_the_secret() -> None:
    """It has sent a draw and a proof that fits this door's draw only; and no secret."""
    with listen("127.0.0.1") as listener:
        got: list[bytes] = []

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"x" * SIZE)
                said = connection.recv(2 * SIZE)
                connection.sendall(secrets.token_bytes(SIZE))
                got.append(said + heard(connection))

        thread = threading.Thread(target=pretend, daemon=True)
        thread.start()
        with pytest.raises(WrongSecret):
            knock("127.0.0.1", listener.getsockname()[1], "secret", "echo", PLACE_S)
        thread.join()
    (said,) = got
    assert len(said) == 2 * SIZE and b"secret" not in said
    assert hmac.compare_digest(said[SIZE:], proof("secret", "guest", "echo", b"x" * SIZE + said[:SIZE]))


def test_garbage_gets_nobody_in(porter: Porter) -> None:
    for words in (b"\0" * 8, b"\0" * 64, secrets.token_bytes(64), b"GET / HTTP/1.0\r\n\r\n" * 9, b"x" * 100_000):
        with socket.create_connection(("127.0.0.1", porter.door.port), PLACE_S) as stranger:
            with contextlib.suppress(OSError):
                stranger.sendall(words)
                stranger.shutdown(socket.SHUT_WR)
            assert heard(stranger)[SIZE:] in (b"", bytes(SIZE)), words[:20]
    assert porter.inside == []


# Crowds


def test_friends_get_in_past_a_crowd_that_says_nothing(porter: Porter) -> None:
    """The one that came first leaves first: of one address, and of all."""
    crowd = idle(porter.door.port, 300)
    for number in range(10):
        crowd += idle(porter.door.port, 50, f"127.0.1.{number + 1}")
    friends = [knock("127.0.0.1", porter.door.port, "secret", "echo", PLACE_S) for _ in range(20)]
    for friend in friends:
        friend.sendall(b"still here")
        assert friend.recv(100) == b"still here"
    crowd += idle(porter.door.port, 300)
    friends[0].sendall(b"and now")
    assert friends[0].recv(100) == b"and now"
    with contextlib.ExitStack() as ends:
        for connection in [*crowd, *friends]:
            ends.enter_context(connection)
        kept = crowd
        patience = time.monotonic() + 60
        while len(kept) > MOST_UNNAMED + MOST_OF_ONE_ADDRESS and time.monotonic() < patience:
            kept = [stranger for stranger in kept if is_open(stranger)]
        assert MOST_OF_ONE_ADDRESS <= len(kept) <= MOST_UNNAMED + MOST_OF_ONE_ADDRESS


def test_who_was_sent_away_by_a_crowd_knocks_again() -> None:
    """The first two connections end before anything is said; the third is let in."""
    with listen("127.0.0.1") as listener:

        def answer() -> None:
            for _ in range(2):
                listener.accept()[0].close()
            connection, _ = listener.accept()
            with connection:
                drawn = secrets.token_bytes(SIZE)
                connection.sendall(drawn)
                drawn += connection.recv(2 * SIZE)[:SIZE]
                connection.sendall(proof("secret", "door", "echo", drawn))
                heard(connection)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        knock("127.0.0.1", listener.getsockname()[1], "secret", "echo", PLACE_S).close()
        thread.join()
    with pytest.raises(ConnectionError, match="refused"):
        knock("127.0.0.1", listener.getsockname()[1] if listener.fileno() >= 0 else 1, "secret", "echo", 0.3)


def test_a_rank_finds_its_way_in_while_300_connections_stand_there() -> None:
    server = MembershipServer(Membership([1, 1], 1, gather_s=100), "127.0.0.1", 0, "secret")
    done = threading.Thread(target=server.serve, daemon=True)
    done.start()
    crowd = idle(server.port, 300)
    first = Member("127.0.0.1", server.port, 0, "secret", timeout_s=PLACE_S)
    crowd += idle(server.port, 300)
    second = Member("127.0.0.1", server.port, 1, "secret", timeout_s=PLACE_S)
    first.tell("finished")
    deadline = time.monotonic() + PLACE_S
    while second.over is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (first.cut, second.over) == (None, "done")
    server.stopping = True  # as the controller does once all hosts have ended
    for connection in [*crowd, first._socket, second._socket]:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()
    done.join(PLACE_S)
    assert not done.is_alive()


# The store


def told(shelf: Shelf[str], who: str, **said: Any) -> list[Any]:
    return [(other, what["is"]) for other, what in shelf.take(who, {"id": 1, **said})]


def test_a_shelf_answers_as_torchs_store_does() -> None:
    """A `LineStore` whose line is a function call, beside torch's `HashStore`."""
    shelf: Shelf[str] = Shelf()
    store = LineStore(lambda said: [store.hear(what) for _, what in shelf.take("a", json.loads(json.dumps(said)))])
    for one in (store, dist.PrefixStore("x", store), dist.HashStore()):
        one.set("a", "1")
        assert one.get("a") == b"1" and one.add("n", 5) == 5 and one.add("n", -2) == 3 and one.get("n") == b"3"
        assert one.check(["a", "n"]) and not one.check(["a", "none"])
        assert one.compare_set("a", "1", "2") == b"2" and one.compare_set("a", "1", "3") == b"2"
        assert one.delete_key("a") and not one.delete_key("a")
        one.wait(["n"], timedelta(seconds=1))
        with pytest.raises(dist.DistStoreError):
            one.wait(["none"], timedelta(seconds=0.05))
    store.multi_set(["p", "q"], [b"\0\xff", "z"])
    assert store.multi_get(["q", "p"]) == [b"z", b"\0\xff"] and store.num_keys() == 4
    store.fail("gone")
    for call in (lambda: store.get("p"), lambda: dist.PrefixStore("x", store).add("n", 1)):
        with pytest.raises(RuntimeError, match="gone"):
            call()


def test_a_shelf_keeps_who_waits_until_all_is_there() -> None:
    shelf: Shelf[str] = Shelf()
    assert told(shelf, "a", do="get", keys=["x", "y"]) == told(shelf, "b", do="get", keys=["x"]) == []
    assert told(shelf, "c", do="get", keys=["x"]) == []
    shelf.leave("c")
    assert told(shelf, "d", do="set", keys=["x"], values=["eA=="]) == [("d", None), ("b", ["eA=="])]
    assert told(shelf, "d", do="set", keys=["y"], values=["eQ=="]) == [("d", None), ("a", ["eA==", "eQ=="])]
    for wrong in ({"do": "explode", "keys": ["x"]}, {"do": "set", "keys": ["x"], "values": []}, {"do": "add"}):
        with pytest.raises((ValueError, KeyError, TypeError)):
            told(shelf, "d", **wrong)


def test_a_waiting_process_is_woken_by_the_end_of_the_line() -> None:
    store = LineStore(lambda said: None)
    threading.Timer(0.1, store.fail, ["a member was lost"]).start()
    with pytest.raises(RuntimeError, match="a member was lost"):
        dist.PrefixStore("epoch/0", store).get("never")


# The meeting


def test_a_store_is_reached_through_the_door_by_those_who_know_the_secret() -> None:
    host = MeetingPlace("127.0.0.1", 0, "secret")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    host.store_port = server.port
    relay, wrong = (Relay("127.0.0.1", host.port, secret, PLACE_S) for secret in ("secret", "another"))
    code = (  # another process, as a rank is one: torch does not let go of Python while it connects
        "import sys, torch.distributed as dist\n"
        "dist.TCPStore('127.0.0.1', int(sys.argv[1]), is_master=False, wait_for_workers=False).set('key', 'value')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(relay.port)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and server.get("key") == b"value", done.stderr
    with socket.create_connection(("127.0.0.1", wrong.port), PLACE_S) as stranger:
        stranger.sendall(b"\0")
        assert heard(stranger) == b""
    del server
    for end in (relay, wrong, host):
        end.close()


SENSELESS_LINES = {
    "infinite id": b'{"say": "store", "id": Infinity, "do": "set", "keys": []}\n',
    "infinite sum": b'{"say": "store", "id": 1, "do": "add", "keys": ["x"], "by": 1e999}\n',
    "deep": b"[" * 100_000 + b"\n",
    "no end": b"x" * (1 << 21),
    "named by an object": b'{"name": {"a": 1}}\n',
    "named by a number": b'{"name": 5}\n',
    "named by half a letter": b'{"name": "\\ud800"}\n',
}


@pytest.mark.parametrize("name", SENSELESS_LINES)
def test_a_member_that_talks_nonsense_ends_its_own_line_only(name: str) -> None:
    """The membership server, too, whose members meet on such a shelf."""
    host = MeetingPlace("127.0.0.1", 0, "secret")
    mad = knock("127.0.0.1", host.port, "secret", NODE, PLACE_S)
    with contextlib.suppress(OSError):
        mad.sendall(SENSELESS_LINES[name])
        mad.shutdown(socket.SHUT_WR)
    assert heard(mad) == b""
    mad.close()
    link = Link("127.0.0.1", host.port, "secret", 1, PLACE_S)
    assert unpacked(link.store.later("get", [LEFT]).result(PLACE_S)[0])  # those who are there are told
    link.close()
    host.close()
    shelf = Shelf[str]()
    if "infinite" in name:
        with pytest.raises(SENSELESS):
            shelf.take("a", json.loads(SENSELESS_LINES[name]))


@pytest.mark.parametrize("lost", [0, 1])
def test_nodes_learn_that_another_one_is_gone(lost: int) -> None:
    nodes = [OrderedRendezvous(Machine(0, "127.0.0.1", 0, 20), 2)]
    assert nodes[0].host is not None
    nodes.append(OrderedRendezvous(Machine(1, "127.0.0.1", nodes[0].host.port, 20), 2))
    meet = [threading.Thread(target=node.next_rendezvous, daemon=True) for node in nodes]
    for thread in meet:
        thread.start()
    for thread in meet:
        thread.join(PLACE_S)
    assert [node.num_nodes_waiting() for node in nodes] == [0, 0]
    nodes[lost].shutdown()
    other = nodes[1 - lost]
    with pytest.raises(RendezvousError, match=f"node {lost} has ended|the launcher of machine {lost} "):
        other.next_rendezvous()
    other.shutdown()


# Ports


def test_a_port_is_closed_once_a_group_has_met() -> None:
    """What listened before, and what listens on all addresses, is left alone; what listens is not disturbed."""
    before = listen("127.0.0.1")
    count = len(sockets())
    with ports_closed_afterwards("gloo"):
        made, wide = listen("127.0.0.1"), socket.create_server(("", 0))
        inside = socket.create_connection(made.getsockname(), PLACE_S)
        known, _ = made.accept()
    assert len(sockets()) == count + 4
    for listener in (before, wide):
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), PLACE_S).close()
    inside.sendall(b"on it goes")
    assert known.recv(100) == b"on it goes"
    if sys.platform == "linux":
        with pytest.raises(TimeoutError):
            socket.create_connection(made.getsockname(), 0.3)
    for one in (before, made, wide, inside, known):
        one.close()


def test_the_processes_of_one_machine_open_nothing() -> None:
    """`processes=P` forks; the control finds a listener."""
    code = """
import os, socket, sys, torch
from exogym import LocalTrainer
from exogym.callbacks import Every
from exogym.strategy import DiLoCoStrategy
from exogym.testing import small_problem

def note(loop):
    for line in open("/proc/self/net/tcp").readlines()[1:] + open("/proc/self/net/tcp6").readlines()[1:]:
        inodes.append((line.split()[3], line.split()[9]))
    for pid in [os.getpid(), *children()]:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try: own.append(os.readlink(f"/proc/{pid}/fd/{name}"))
            except OSError: pass

def children():
    found = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    assert len(found) >= 1, "no process was forked"
    return found

for control in (0, 1):
    inodes, own = [], []
    if control: server = socket.create_server(("127.0.0.1", 0))
    model, data = small_problem()
    LocalTrainer(model, data, loss_fn=torch.nn.functional.mse_loss).fit(
        DiLoCoStrategy(H=2, lr=0.01), num_nodes=2, max_steps=4, batch_size=8, processes=2, callbacks=[Every(2, note)])
    print(len({inode for state, inode in inodes if state == "0A" and f"socket:[{inode}]" in own}))
"""
    if sys.platform != "linux":
        pytest.skip("reads Linux's /proc")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.stdout.split() == ["0", "1"], done.stdout + done.stderr
