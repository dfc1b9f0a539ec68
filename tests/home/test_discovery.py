"""Computers that find each other and pair: real mDNS and real sshds between namespaces, and everybody's tricks."""

import contextlib
import dataclasses
import json
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts, Machine, fixtures
from paths import ROOT
from processes import Started, python

from exogym.errors import ArgumentError, ExoGymError
from exogym.home.discovery import agent as room
from exogym.home.discovery import announcing, enrol, find, login, pair
from exogym.home.discovery.agent import TRIES, WRONG_IN_A_ROW, Agent, Codes
from exogym.home.discovery.announcing import Found, announced, name_at, plain_name
from exogym.home.discovery.channel import (
    AGENT,
    CALLER,
    MOST_BYTES,
    VERSION,
    Exchange,
    Messages,
    PairingError,
    typed_code,
)
from exogym.home.discovery.pairing import Paired, write_entry
from exogym.machines.remote import HostsConfig
from exogym.machines.remote.inquiry import ask

hosts = fixtures.hosts  # where pytest looks for it
COUNT = 2
SECONDS = 20.0
PAGE = ROOT / "docs" / "security.md"


@dataclasses.dataclass
class Waiting:
    """An agent in this process, in the namespace of a host; `said` is what it has shown."""

    agent: Agent
    said: list[str]

    @property
    def place(self) -> tuple[str, int]:
        return self.agent.address, self.agent.port

    @property
    def code(self) -> str:
        assert self.agent.codes.now is not None
        return self.agent.codes.now


@pytest.fixture
def waiting(hosts: Hosts, tmp_path: Path) -> Iterator[Waiting]:
    said: list[str] = []
    host = hosts[0]
    file = tmp_path / "there" / "authorized_keys"
    with host.inside():
        agent = Agent("studio", host.address, 0, user="root", authorized_keys=str(file), show=said.append)
        serving = threading.Thread(target=agent.serve, daemon=True)
        serving.start()
    yield Waiting(agent, said)
    agent.close()
    serving.join(SECONDS)
    assert not serving.is_alive()


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A private key that nobody has let in yet."""
    file = str(tmp_path_factory.mktemp("keys") / "own" / "key")
    assert login.own_key(file) == login.own_key(file)  # made once
    return file


@contextlib.contextmanager
def calling(machine: Machine, place: tuple[str, int]) -> Iterator[Messages]:
    with machine.inside():
        connection = socket.create_connection(place, timeout=SECONDS)
    with connection:
        yield Messages(connection, SECONDS)


def attempt(machine: Machine, waiting: Waiting, code: str) -> Exchange:
    """Begin to pair, up to the proof."""
    with machine.inside():
        connection = socket.create_connection(waiting.place, timeout=SECONDS)
    line = Messages(connection, SECONDS)
    line.tell({"exogym": VERSION, "want": "pair"})
    exchange = Exchange(line, CALLER, code, line.hear()["name"])
    exchange.meet()
    return exchange


def other(code: str, by: int = 1) -> str:
    return f"{(int(code) + by) % 10**6:06}"


# With the commands


def code_of(process: Started) -> str:
    """Return the code that an `exogym agent` shows, once it can be found."""
    said = [next(process.stdout) for _ in range(2)]
    assert "can be found" in said[1]
    found = re.fullmatch(r"code for pairing: (\d{3}-\d{3})\n", said[0])
    assert found
    return found[1]


def test_two_computers_are_found_paired_and_then_known(hosts: Hosts, tmp_path: Path) -> None:
    config, known = tmp_path / "ssh_config", tmp_path / "known_hosts"
    config.write_text(f"UserKnownHostsFile {known}\nGlobalKnownHostsFile /dev/null\nIdentitiesOnly yes\n")
    for host in hosts.machines:
        host.authorized_keys.write_text("# nobody\n")

    def discover(*more: str) -> Any:
        with hosts.controller.inside():
            words = ["-m", "exogym", "discover", "--seconds", "1", "--hosts", "hosts.json"]
            return python(*words, *more, cwd=tmp_path)

    agents = []
    for name, host in zip(("studio", "den"), hosts.machines, strict=True):
        with host.inside():
            agents.append(Started("-m", "exogym", "agent", "--name", name, "--authorized-keys", host.authorized_keys))
    try:
        studio, den = map(code_of, agents)
        found = json.loads(discover("--json").stdout)
        assert [(one["name"], one["address"]) for one in found] == [("den", "10.77.0.11"), ("studio", "10.77.0.10")]
        assert all(one["answers"] and not one["paired"] for one in found)
        wrong = discover("--pair", "den", "--code", other(typed_code(den)), "--key", "key")
        assert wrong.returncode == 1 and "den at 10.77.0.11 did not pair: the code is wrong" in wrong.stderr
        assert not (tmp_path / "hosts.json").exists() and not known.exists()
        for name, code in (("studio", studio), ("den", den)):
            at = ["--at", "10.77.0.11:8422"] if name == "den" else []
            done = discover("--pair", name, "--code", code, "--key", "key", "--ssh-config", str(config), *at)
            assert done.returncode == 0 and f"paired with {name}" in done.stdout, done.stderr
        hosts_file = HostsConfig.load(tmp_path / "hosts.json")
        assert [host.address for host in hosts_file.hosts] == ["10.77.0.10", "10.77.0.11"]
        found = json.loads(discover("--json").stdout)
        assert all(one["paired"] for one in found), found
        agents[1].terminate()
        said = agents[1].stdout.read()
        assert "10.77.0.2 tried to pair with a wrong code" in said and "paired with" in said
    finally:
        for process in agents:
            process.kill()
            process.communicate()


# What is said to whom


def test_without_the_code_an_agent_tells_its_name_and_nothing_more(hosts: Hosts, waiting: Waiting) -> None:
    with calling(hosts.controller, waiting.place) as line:
        line.tell({"exogym": VERSION, "want": "name", "code": waiting.code})
        assert line.hear() == {"name": "studio"}
        with pytest.raises(PairingError, match="closed"):
            line.receive()
    for said in (b"GET / HTTP/1.0\r\n\r\n", b"\0\0\0\4abcd", b"\0\0\0\2[]", b"\0\0\0\2{}", b"\0\0\0\0"):
        with calling(hosts.controller, waiting.place) as line:
            line.connection.sendall(said)
            with contextlib.suppress(OSError):  # it has hung up already
                line.connection.shutdown(socket.SHUT_WR)
                assert line.connection.recv(100) == b""
    assert len(waiting.said) == 1  # the code, to whoever sits there


def test_what_is_announced_is_name_address_and_port(hosts: Hosts) -> None:
    import zeroconf

    with hosts[1].inside(), announced("studio", hosts[1].address, 9000), hosts.controller.inside():
        listener = zeroconf.Zeroconf(interfaces=[hosts.controller.address])
        info = listener.get_service_info(announcing.SERVICE, f"studio.{announcing.SERVICE}", 3000)
        listener.close()
    assert info is not None and info.properties == {} and re.fullmatch(r"exogym-[0-9a-f]{12}\.local\.", info.server)
    assert info.port == 9000 and info.parsed_addresses() == [hosts[1].address]


def listening(machine: Machine) -> set[tuple[str, str, int]]:
    """Return (protocol, address, port) of all that listens on a machine, its sshd left out."""
    found = set()
    for protocol, state in (("tcp", "0A"), ("udp", "07")):
        with machine.inside():
            lines = [line.split() for line in Path(f"/proc/thread-self/net/{protocol}").read_text().splitlines()[1:]]
        for _, place, _, now, *_ in lines:
            address, port = place.split(":")
            if now == state and int(port, 16) != 22:
                found.add((protocol, socket.inet_ntoa(struct.pack("<I", int(address, 16))), int(port, 16)))
    return found


def test_an_agent_listens_at_its_address_only(hosts: Hosts, waiting: Waiting) -> None:
    """But for mDNS, which is heard by all who want to hear it; the page says so."""
    assert listening(hosts[0]) == {("tcp", *waiting.place)}
    with hosts[0].inside(), announced("studio", *waiting.place):
        heard = listening(hosts[0])
    assert heard == {("tcp", *waiting.place), ("udp", "0.0.0.0", 5353), ("udp", hosts[0].address, 5353)}
    rows = re.findall(r"^\| agent \| (.+?) \| (.+?) \| (.+?) \|", PAGE.read_text(), re.M)
    assert rows == [
        ("`exogym agent`", "its address", "8422, or `--port`"), ("`exogym agent`", "all addresses, UDP", "5353"),
    ]  # fmt: skip


# Pairing, and what does not pair


def test_the_code_pairs(hosts: Hosts, waiting: Waiting, key: str) -> None:
    with hosts.controller.inside():
        paired = pair(*waiting.place, f" {waiting.code[:3]} {waiting.code[3:]}", key)
    own = plain_name(socket.gethostname())
    (line,) = Path(waiting.agent._authorized_keys).read_text().splitlines()
    assert line == f'restrict,from="{hosts.controller.address}" {login.own_key(key)} exogym:{own}'
    assert paired.entry == {
        "address": hosts[0].address, "user": "root", "python": sys.executable,
    }  # fmt: skip
    assert paired.host_keys == (login.public_key(hosts[0].key.with_suffix(".pub").read_text().strip()),)
    first, done, second = waiting.said
    assert f"paired with {own} at 10.77.0.2" in second and first != done


def test_a_wrong_code_does_not_and_codes_run_out(hosts: Hosts, waiting: Waiting, key: str) -> None:
    seen = [waiting.code]
    for number in range(1, WRONG_IN_A_ROW + 1):
        with hosts.controller.inside(), pytest.raises(PairingError, match="the code is wrong"):
            pair(*waiting.place, other(waiting.code), key)
        if waiting.agent.codes.now != seen[-1]:
            seen.append(waiting.agent.codes.now)
            assert number % TRIES == 0
    assert len(seen) == WRONG_IN_A_ROW // TRIES + 1 and seen[-1] is None
    with hosts.controller.inside(), pytest.raises(PairingError, match="too many wrong codes"):
        pair(*waiting.place, seen[-2], key)
    assert "too many wrong codes: to pair again" in " ".join(waiting.said)
    assert not Path(waiting.agent._authorized_keys).exists()


def test_a_success_makes_a_new_code_and_forgets_what_was_wrong() -> None:
    shown: list[str | None] = []
    codes = Codes(shown.append)
    for _ in range(4):
        for _ in range(WRONG_IN_A_ROW - 1):
            assert not codes.redeem(str(codes.now), lambda: False)
        used = str(codes.now)
        assert codes.redeem(used, lambda: True)
        assert codes.now != used or shown[-1] == codes.now
        assert codes.now is None or used != codes.now
        assert not codes.redeem(used, lambda: True)


def test_guessing_in_parallel_gets_no_more_attempts(hosts: Hosts, waiting: Waiting) -> None:
    """All exchanges are begun with the same code of the agent; a proof for a code that is no more is not looked at."""
    begun = waiting.code
    guesses = [attempt(hosts.controller, waiting, other(begun, i + 1)) for i in range(room.MOST_OF_ONE_ADDRESS - 1)]
    right = attempt(hosts.controller, waiting, begun)
    for guess in guesses:
        guess.seal({"name": "stranger"})
        assert guess.line.hear() == {"refused": "code"}
    assert waiting.code != begun and not right.line.connection._closed
    right.seal({"name": "stranger"})
    assert right.line.hear() == {"refused": "code"}
    assert sum("wrong code" in line for line in waiting.said) == len(guesses) + 1
    for exchange in [*guesses, right]:
        exchange.line.connection.close()


class Relay:
    """Stands between a caller and an agent, on a host: passes messages on, as `change(number, message)` has them.

    Attributes:
        passed: (who said it, message), in order.
    """

    def __init__(self, machine: Machine, place: tuple[str, int], change: Callable[[int, bytes], bytes] | None = None):
        self.machine, self.target = machine, place
        self.change = change or (lambda number, message: message)
        self.passed: list[tuple[str, bytes]] = []
        with machine.inside():
            self.listener = socket.create_server((machine.address, 0))
        self.place = machine.address, self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with (
            self.machine.inside(),
            self.listener,
            self.listener.accept()[0] as caller,
            socket.create_connection(self.target, timeout=SECONDS) as agent,
            contextlib.suppress(PairingError),
        ):
            lines = {CALLER: Messages(caller, SECONDS), AGENT: Messages(agent, SECONDS)}
            for number, who in enumerate((CALLER, AGENT) * 3):
                message = self.change(number, lines[who].receive())
                self.passed.append((who, message))
                lines[AGENT if who == CALLER else CALLER].send(message)


def test_who_passes_all_on_reads_nothing_and_is_noticed(hosts: Hosts, waiting: Waiting, key: str) -> None:
    relay = Relay(hosts[1], waiting.place)
    with (
        hosts.controller.inside(),
        pytest.raises(PairingError, match="the network between the two computers translates addresses"),
    ):
        pair(*relay.place, waiting.code, key)
    relay.thread.join(SECONDS)
    text = b"".join(message for _, message in relay.passed[2:])
    secret = [login.own_key(key).split()[1].encode(), b"root", b"python", hosts.controller.address.encode()]
    assert len(relay.passed) == 6 and not [word for word in secret if word in text]
    assert not Path(waiting.agent._authorized_keys).exists()


@pytest.mark.parametrize("number", range(1, 6))
def test_a_changed_message_pairs_nobody(hosts: Hosts, waiting: Waiting, key: str, number: int) -> None:
    """Each message after the first, with one letter or bit of it changed on its way."""

    def change(at: int, message: bytes) -> bytes:
        if at != number:
            return message
        return message.replace(b"studio", b"studia") if number == 1 else message[:-1] + bytes([message[-1] ^ 1])

    relay = Relay(hosts[1], waiting.place, change)
    with hosts.controller.inside(), pytest.raises(PairingError):
        pair(*relay.place, waiting.code, key)
    relay.thread.join(SECONDS)
    assert not Path(waiting.agent._authorized_keys).exists()


def test_what_was_overheard_pairs_nobody_again(hosts: Hosts, waiting: Waiting, key: str) -> None:
    """To the agent the caller's messages again, with the very same code; to a caller the agent's."""
    code = waiting.code
    relay = Relay(hosts[1], waiting.place)
    with hosts.controller.inside(), pytest.raises(PairingError):
        pair(*relay.place, code, key)
    relay.thread.join(SECONDS)
    waiting.agent.codes.now = code
    with calling(hosts[1], waiting.place) as line:
        for message in [message for who, message in relay.passed if who == CALLER]:
            line.send(message)
            answer = line.receive()
        assert json.loads(answer) == {"refused": "code"}
    again = iter([message for who, message in relay.passed if who == AGENT])
    with hosts[1].inside():
        forger = socket.create_server((hosts[1].address, 0))

    def answer_again() -> None:
        with forger, forger.accept()[0] as connection, contextlib.suppress(PairingError):
            line = Messages(connection, SECONDS)
            for message in again:
                line.receive()
                line.send(message)

    thread = threading.Thread(target=answer_again, daemon=True)
    thread.start()
    with hosts.controller.inside(), pytest.raises(PairingError, match="the code is wrong"):
        pair(hosts[1].address, forger.getsockname()[1], code, key)
    thread.join(SECONDS)


@pytest.mark.parametrize("knows", [False, True], ids=["guesses", "control"])
def test_a_stranger_in_the_middle_needs_the_code(hosts: Hosts, waiting: Waiting, key: str, knows: bool) -> None:
    """It takes part twice, as agent to the caller and as caller to the agent, with one code for both."""
    code = waiting.code if knows else other(waiting.code)
    with hosts[1].inside():
        listener = socket.create_server((hosts[1].address, 0))
    stolen: list[Any] = []

    def middle() -> None:
        with listener, listener.accept()[0] as connection, contextlib.suppress(PairingError):
            line = Messages(connection, SECONDS)
            line.hear()
            line.tell({"name": "studio"})
            exchange = Exchange(line, AGENT, code, "studio")
            exchange.meet()
            stolen.append(exchange.open(line.receive()))
            line.tell({"refused": "login"})

    thread = threading.Thread(target=middle, daemon=True)
    thread.start()
    with hosts.controller.inside(), pytest.raises(PairingError):
        pair(hosts[1].address, listener.getsockname()[1], waiting.code, key)
    thread.join(SECONDS)
    assert (stolen == [None]) == (not knows)
    exchange = attempt(hosts[1], waiting, code)
    own = login.own_key(key)
    exchange.seal({
        "name": "x", "public_key": own, "signature": login.sign(key, exchange.statement(own)),
        "address": hosts[1].address, "agent_address": hosts[0].address,
    })  # fmt: skip
    answer = exchange.line.receive()
    exchange.line.connection.close()
    assert Path(waiting.agent._authorized_keys).exists() == knows
    assert (exchange.open(answer) is not None) == knows


@pytest.mark.parametrize("proof", ["none", "a word", "another key", "another session", "control"])
def test_a_public_key_is_let_in_by_who_holds_it_only(
    hosts: Hosts, waiting: Waiting, key: str, tmp_path: Path, proof: str
) -> None:
    """Somebody who has the code sends a key that everybody may know, and cannot sign this session with it."""
    public, other_key = login.own_key(key), str(tmp_path / "other")
    file = Path(waiting.agent._authorized_keys)
    exchange = attempt(hosts.controller, waiting, waiting.code)
    request = {
        "name": "x",
        "public_key": public,
        "address": hosts.controller.address,
        "agent_address": hosts[0].address,
    }
    if proof == "a word":
        request["signature"] = "trust me"
    elif proof == "another key":
        login.own_key(other_key)
        request["signature"] = login.sign(other_key, exchange.statement(public))
    elif proof == "another session":
        elsewhere = attempt(hosts.controller, waiting, waiting.code)
        request["signature"] = login.sign(key, elsewhere.statement(public))
        elsewhere.line.connection.close()
    elif proof == "control":
        request["signature"] = login.sign(key, exchange.statement(public))
    exchange.seal(request)
    answer = exchange.open(exchange.line.receive())
    exchange.line.connection.close()
    assert answer is not None
    if proof == "control":
        assert "user" in answer and public in file.read_text()
    else:
        assert answer == {"refused": "key"} and not file.exists()
        assert "did not prove" in waiting.said[-1]


@pytest.mark.parametrize(
    "answer",
    [
        {"user": "-oProxyCommand=x", "ssh_port": 22, "python": "/p", "host_keys": ["KEY"]},
        {"user": "root\nx", "ssh_port": 22, "python": "/p", "host_keys": ["KEY"]},
        {"user": "root", "ssh_port": 0, "python": "/p", "host_keys": ["KEY"]},
        {"user": "root", "ssh_port": 22, "python": "-c x", "host_keys": ["KEY"]},
        {"user": "root", "ssh_port": 22, "python": "/p", "host_keys": []},
        {"user": "root", "ssh_port": 22, "python": "/p", "host_keys": ["KEY\n* KEY"]},
        {"user": "root", "ssh_port": 22, "python": "/p", "host_keys": ["KEY"] * 99},
        {},
    ],
)
def test_what_a_pair_tells_is_held_against_the_hosts_file(hosts: Hosts, key: str, answer: dict[str, Any]) -> None:
    """An agent that has the code may still be somebody's who wants more than to be trained on."""
    own = login.own_key(key)
    told = json.loads(json.dumps(answer).replace("KEY", own))
    with hosts[1].inside():
        listener = socket.create_server((hosts[1].address, 0))

    def forger() -> None:
        with listener, listener.accept()[0] as connection, contextlib.suppress(PairingError):
            line = Messages(connection, SECONDS)
            line.hear()
            line.tell({"name": "studio"})
            exchange = Exchange(line, AGENT, "123456", "studio")
            exchange.meet()
            line.receive()
            exchange.seal(told)

    thread = threading.Thread(target=forger, daemon=True)
    thread.start()
    with hosts.controller.inside(), pytest.raises(PairingError, match="sent invalid data"):
        pair(hosts[1].address, listener.getsockname()[1], "123456", key)
    thread.join(SECONDS)


@pytest.mark.parametrize("name", ["", "a\x1b[2Jb", "a\nb", "x" * 64, "-x", 7, None, "\u202eabc"])
def test_an_agent_has_a_plain_name(hosts: Hosts, name: Any) -> None:
    with hosts[1].inside():
        listener = socket.create_server((hosts[1].address, 0))

    def forger() -> None:
        with listener, listener.accept()[0] as connection, contextlib.suppress(PairingError):
            line = Messages(connection, SECONDS)
            line.hear()
            line.tell({"name": name})

    thread = threading.Thread(target=forger, daemon=True)
    thread.start()
    with hosts.controller.inside(), pytest.raises(PairingError, match="does not run this version of exogym agent"):
        name_at(hosts[1].address, listener.getsockname()[1])
    thread.join(SECONDS)


# Strangers who only want to disturb


def test_who_says_too_much_or_too_slowly_is_sent_away(
    hosts: Hosts, waiting: Waiting, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with calling(hosts.controller, waiting.place) as line:
        line.connection.sendall((MOST_BYTES + 1).to_bytes(4, "big"))
        assert line.connection.recv(1) == b""
    monkeypatch.setattr(room, "CALL_S", 0.3)
    with calling(hosts.controller, waiting.place) as line:  # a letter now and then would keep a limit for each alive
        line.connection.settimeout(0.05)
        begun, gone = time.monotonic(), False
        while not gone and time.monotonic() < begun + SECONDS:
            with contextlib.suppress(TimeoutError):
                line.connection.send(b"\0")
                gone = line.connection.recv(1) == b""
        assert gone


def test_crowds_of_silent_callers_keep_nobody_out(hosts: Hosts, waiting: Waiting, key: str) -> None:
    idle = []
    with hosts[1].inside():
        for _ in range(room.MOST_CALLS + 10):
            idle.append(socket.create_connection(waiting.place, timeout=SECONDS))
    with hosts.controller.inside():
        assert pair(*waiting.place, waiting.code, key).name == "studio"
    fixtures.wait_for(lambda: len(waiting.agent._calls) <= room.MOST_OF_ONE_ADDRESS)
    for connection in idle:
        connection.close()


def forged(name: str, address: str, port: int) -> bytes:
    """Return an mDNS answer that announces a service, made by hand: libraries refuse some names."""

    def labels(*words: str) -> bytes:
        return b"".join(bytes([len(word.encode())]) + word.encode() for word in words) + b"\0"

    def record(owner: bytes, kind: int, data: bytes) -> bytes:
        return owner + struct.pack("!HHIH", kind, 1, 120, len(data)) + data

    service, server = labels("_exogym", "_tcp", "local"), labels(f"forged-{len(name)}-{port}", "local")
    own = labels(name)[:-1] + service
    records = [
        record(service, 12, own), record(own, 33, struct.pack("!HHH", 0, 0, port) + server), record(own, 16, b"\0"),
        record(server, 1, socket.inet_aton(address)),
    ]  # fmt: skip
    return struct.pack("!6H", 0, 0x8400, 0, len(records), 0, 0) + b"".join(records)


@contextlib.contextmanager
def shouting(machine: Machine, packets: list[bytes]) -> Iterator[None]:
    """Send these by mDNS, again and again."""
    stop = threading.Event()
    with machine.inside():
        stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with stranger:
        stranger.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(machine.address))
        stranger.bind((machine.address, 5353))

        def shout() -> None:
            while not stop.wait(0.05):
                for packet in packets:
                    stranger.sendto(packet, ("224.0.0.251", 5353))

        thread = threading.Thread(target=shout, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(SECONDS)


def test_forged_announcements_lead_nowhere(hosts: Hosts, waiting: Waiting) -> None:
    """To other networks, to this computer's loopback, to an SSH port, with a name that draws on terminals, with that of
    somebody else's agent, and of one that is not there."""
    address, port = waiting.place
    given = (
        ("outside", "192.0.2.7", 9000), ("loopback", "127.0.0.1", port), ("ssh", address, 22),
        ("a\x1b[2Jb", address, port), ("a" * 63, address, port), ("den", address, port),
        ("gone", hosts[1].address, 9001),
    )  # fmt: skip
    with (
        shouting(hosts[1], [forged(*one) for one in given]),
        hosts[0].inside(),
        announced("studio", address, port),
        hosts.controller.inside(),
    ):
        found = find(1.0)
    assert found == [
        Found("a" * 63, address, port, False), Found("den", address, port, False),
        Found("gone", hosts[1].address, 9001, False), Found("studio", address, port, True),
    ]  # fmt: skip


def test_a_flood_of_names_ends_somewhere(hosts: Hosts) -> None:
    packets = [forged(f"n{number}", hosts[1].address, 9100) for number in range(3 * announcing.MOST_FOUND)]
    with shouting(hosts[1], packets), hosts.controller.inside():
        assert len(find(0.5)) == announcing.MOST_FOUND


# The login


@pytest.mark.parametrize(
    "text",
    [
        "ssh-ed25519 AAAA", 'command="x" KEY', "KEY\nssh-rsa AAAA", "KEY\r", " KEY", "", None, "KEY" * 99,
        "ssh-rsa BLOB", "ssh-ed25519 BLOB;x", "none BLOB",
    ],
)  # fmt: skip
def test_what_is_no_public_key_is_refused(key: str, text: Any) -> None:
    own = login.own_key(key)
    with pytest.raises(ArgumentError, match="is not a public SSH key"):
        login.public_key(text and text.replace("KEY", own).replace("BLOB", own.split()[1]))
    assert login.public_key(f"{own} somebody\n") == own


def test_the_login_is_for_that_address_and_for_commands_only(hosts: Hosts, key: str, tmp_path: Path) -> None:
    file = hosts[0].authorized_keys
    file.write_text("# kept\nssh-ed25519 AAAAother somebody\n")
    for name in ("first", "again\n* forged"):
        login.authorize(str(file), login.own_key(key), hosts.controller.address, name)
    own = login.own_key(key)
    assert file.read_text().splitlines() == [
        "# kept", "ssh-ed25519 AAAAother somebody", f'restrict,from="10.77.0.2" {own} exogym:again---forged',
    ]  # fmt: skip
    assert file.stat().st_mode & 0o777 == 0o600
    known = tmp_path / "known_hosts"
    known.write_text(hosts[0].known_as())
    words = ["ssh", "-F", "/dev/null", "-i", key, "-o", "BatchMode=yes", "-o", f"UserKnownHostsFile={known}"]
    words += ["-o", "IdentitiesOnly=yes", "-o", "ExitOnForwardFailure=yes"]
    assert hosts.controller.run([*words, hosts[0].address, "echo", "in"]).stdout == "in\n"
    assert "Permission denied" in hosts[1].run([*words, hosts[0].address, "echo", "in"]).stderr
    forwards = hosts.controller.run([*words, "-R", "0:127.0.0.1:1", hosts[0].address, "echo", "in"])
    assert forwards.returncode == 255 and forwards.stdout == ""


def test_who_is_let_in_already_still_is_after_pairing(hosts: Hosts, key: str, tmp_path: Path) -> None:
    """From any address, as before: pairing leaves the user's own line, the only way to a computer without a screen."""
    file, own, known = hosts[0].authorized_keys, login.own_key(key), tmp_path / "known_hosts"
    before = f"# mine\n{own} ann@laptop\n"
    file.write_text(before)
    known.write_text(hosts[0].known_as())
    login.authorize(str(file), own, hosts.controller.address, "laptop")
    words = ["ssh", "-F", "/dev/null", "-i", key, "-o", "BatchMode=yes", "-o", f"UserKnownHostsFile={known}"]
    words += ["-o", "IdentitiesOnly=yes", hosts[0].address, "echo", "in"]
    for machine in (hosts[1], hosts.controller):
        assert (done := machine.run(words)).stdout == "in\n", done.stderr
    assert file.read_text() == before


def test_pairing_touches_its_own_lines_only(key: str, tmp_path: Path) -> None:
    """Each byte of the others stays: options with keys in quotes, other encodings and line ends, no last line end."""
    file, own = tmp_path / "authorized_keys", login.own_key(key)
    blob = own.split()[1]
    others = [
        b"# " + own.encode() + b" exogym:off", b"", f'command="echo {own}" ssh-ed25519 AAAAother exogym:den'.encode(),
        b"ssh-rsa AAAA J\xf6rg\r", b"ssh-rsa BBBB form\x0cfeed", "ssh-rsa CCCC one\u2028line".encode(), b"torn \"line",
    ]  # fmt: skip
    ours = [f'restrict,from="10.0.0.{n}" {own} exogym:laptop'.encode() for n in (1, 2, 3)]
    file.write_bytes(b"\n".join([ours[0], *others[:3], ours[1], *others[3:]]))
    assert login.authorize(str(file), own, "10.0.0.3", "laptop")
    assert file.read_bytes() == b"\n".join([*others, ours[2], b""])
    for mine in (
        own, f"{own} ann@laptop", f"ssh-ed25519\t{blob}",
        f'from="10.0.0.9",environment="A=\\"b c" {own} not-exogym:x y', f"  {own} ann exogym: ",
        f"{own} exogym:laptop and more",
    ):  # fmt: skip
        for text in (f"{mine}\n", f"{ours[0].decode()}\n{mine}\r\n# end"):
            file.write_bytes(text.encode())
            assert not login.authorize(str(file), own, "10.0.0.3", "laptop")
            assert file.read_bytes() == text.encode()


def test_a_host_key_comes_with_the_code_and_is_asked_for_ever_after(hosts: Hosts, key: str, tmp_path: Path) -> None:
    """Another key that stood there is replaced; a host with another key than the code's is not spoken to."""
    config, known, file = tmp_path / "config", tmp_path / "known", tmp_path / "hosts.json"
    config.write_text(f"UserKnownHostsFile {known}\nGlobalKnownHostsFile /dev/null\nIdentitiesOnly yes\n")
    own, host = login.own_key(key), hosts[0]
    login.authorize(str(host.authorized_keys), own, hosts.controller.address, "laptop")
    known.write_text(f"elsewhere {own}\n{host.address} {own}")
    entry = {"address": host.address, "user": "root", "python": sys.executable}
    there = login.public_key(host.key.with_suffix(".pub").read_text().strip())
    with hosts.controller.inside():
        with pytest.raises(ExoGymError, match="host key"):
            enrol(Paired("studio", entry, (own,)), file, key, str(config))
        assert not file.exists()
        (found,) = [enrol(Paired("studio", entry, (there,)), file, key, str(config)) for _ in range(1)]
        assert known.read_text().splitlines() == [f"elsewhere {own}", f"{host.address} {there}"]
        assert ask(found, "python")["executable"] == sys.executable
    assert json.loads(file.read_text()) == {
        "master": entry | {"key": key}, "ssh_config_path": str(config), "workers": [],
    }  # fmt: skip


def test_a_hosts_file_keeps_what_stood_in_it(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    file.write_text('{"master": "10.0.0.1", "workers": ["10.0.0.2"], "master_port": 4000}')
    write_entry(file, {"address": "10.0.0.2", "user": "ann"})
    write_entry(file, {"address": "10.0.0.3"})
    assert json.loads(file.read_text()) == {
        "master": "10.0.0.1", "workers": [{"address": "10.0.0.2", "user": "ann"}, {"address": "10.0.0.3"}],
        "master_port": 4000,
    }  # fmt: skip
    before = file.read_text()
    with pytest.raises(ArgumentError, match="ssh_config_path"):
        write_entry(file, {"address": "10.0.0.4"}, "/elsewhere")
    file.write_text("{}")
    with pytest.raises(ArgumentError, match="master"):
        write_entry(file, {"address": "10.0.0.4"})
    assert before != "{}" and file.read_text() == "{}"
