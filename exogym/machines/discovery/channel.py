"""What two computers say to each other that share a short code, and what nobody else can read, change or guess.

    caller -> agent  {"exogym": 2, "want": "name" or "pair"}
    agent -> caller  {"name": NAME}, and for "name" that is all
    caller -> agent  SPAKE2's message of side A
    agent -> caller  SPAKE2's message of side B
    caller -> agent  sealed: the request, with a public key, and a signature over the session made with its private key
    agent -> caller  sealed: the answer, or {"refused": WHY} where the seal is not of this code

SPAKE2 (Abdalla and Pointcheval, 2005; the package `spake2`, on Ed25519) turns the code into a key that both have only
if both had the same code. A listener learns nothing. An impostor can try one code for each exchange, and none later.
Side A proves first that it has the key, so an agent says nothing under the key to a caller without it. HKDF-SHA256
makes a key for each direction, and ChaCha20-Poly1305 seals the messages, numbered from 0 (both of `cryptography`).

A public key alone proves nothing, since everybody may know it. So the caller signs a statement that names the session:
a third value of HKDF, which follows from the code and both messages of SPAKE2 and is never sent. A signature that was
made in one session is worth nothing in another.

Each message has its length in four bytes in front, at most `MOST_BYTES`; all of an exchange must be done by a deadline.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import time
from typing import Any

from exogym.errors import ArgumentError, ExoGymError

VERSION = 2
MOST_BYTES = 16384
LENGTH_BYTES = 4
DIGITS = 6
CALLER, AGENT = "caller", "agent"
REFUSALS = {
    "code": "the code differs from the code that it shows now: look again, and type that code",
    "closed": "too many wrong codes were tried: restart exogym agent there",
    "key": "this computer did not prove that it owns the key that it sent: give another key with --key",
    "address": "addresses are changed between the two computers: pair them in one network, without NAT between",
    "login": "its authorized_keys could not be written: its agent prints the reason",
}


class PairingError(ExoGymError):
    """Two computers did not become a pair; the message says why."""


class ProtocolError(PairingError):
    """The other end sent nothing in time, or something that no agent or caller sends."""


def draw_code() -> str:
    """Return a new code, of as many digits as `DIGITS`.

    >>> len(draw_code())
    6
    """
    return f"{secrets.randbelow(10**DIGITS):0{DIGITS}}"


def shown_code(code: str) -> str:
    """Return a code as it is shown.

    >>> shown_code("012345")
    '012-345'
    """
    return f"{code[: DIGITS // 2]}-{code[DIGITS // 2 :]}"


def typed_code(text: str) -> str:
    """Return the code in a typed text.

    Raises:
        ArgumentError: it is no code.

    >>> typed_code(" 012 345")
    '012345'
    """
    code = re.sub(r"[\s-]", "", text)
    if not re.fullmatch(rf"[0-9]{{{DIGITS}}}", code):
        raise ArgumentError(f"{text[:40]!r} is no code: give the {DIGITS} digits that exogym agent shows there")
    return code


class Messages:
    """Messages over a connection, each of a few bytes, all of them within `seconds`.

    Raises (from `send`, `receive`, `tell`, `hear`):
        ProtocolError: the time is over, the other end is gone, or said something that is too long or not JSON.
    """

    def __init__(self, connection: socket.socket, seconds: float):
        self.connection = connection
        self._deadline = time.monotonic() + seconds

    def send(self, message: bytes) -> None:
        assert len(message) <= MOST_BYTES
        self._wait()
        try:
            self.connection.sendall(len(message).to_bytes(LENGTH_BYTES, "big") + message)
        except OSError as error:
            raise ProtocolError(f"the connection was lost ({error})") from None

    def receive(self) -> bytes:
        size = int.from_bytes(self._exactly(LENGTH_BYTES), "big")
        if size > MOST_BYTES:
            raise ProtocolError(f"a message of {size} bytes was announced, and none has more than {MOST_BYTES}")
        return self._exactly(size)

    def tell(self, value: dict[str, Any]) -> None:
        self.send(json.dumps(value).encode())

    def hear(self) -> dict[str, Any]:
        return read(self.receive())

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            self._wait()
            try:
                data = self.connection.recv(size - len(found))
            except OSError as error:
                raise ProtocolError(f"the other end said nothing in time, or is gone ({error})") from None
            if not data:
                raise ProtocolError("the other end closed the connection")
            found += data
        return found

    def _wait(self) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise ProtocolError("the other end took too long")
        self.connection.settimeout(left_s)


def read(message: bytes) -> dict[str, Any]:
    """Return what a message says.

    Raises:
        ProtocolError: it is no JSON object.
    """
    try:
        value = json.loads(message)
    except (ValueError, RecursionError):  # also: no UTF-8, numbers of thousands of digits
        raise ProtocolError("a message is not JSON") from None
    if not isinstance(value, dict):
        raise ProtocolError("a message is no JSON object")
    return value


def refusal(message: bytes) -> str | None:
    """Return the key of `REFUSALS` that an unsealed message names; anybody could have written it.

    >>> refusal(b'{"refused": "closed"}'), refusal(b"Ax")
    ('closed', None)
    """
    try:
        why = read(message).get("refused")
    except ProtocolError:
        return None
    return why if isinstance(why, str) and why in REFUSALS else None


class Exchange:
    """One side of SPAKE2 over a line: `key` after `meet`, and then sealed messages.

    Args:
        side: `CALLER` or `AGENT`.
        code: the digits that this side has.
        name: of the agent, as it was said in the clear: if somebody changed it on the way, the keys differ.
    """

    def __init__(self, line: Messages, side: str, code: str, name: str):
        from spake2 import SPAKE2_A, SPAKE2_B

        kind = SPAKE2_A if side == CALLER else SPAKE2_B
        self.line, self.side = line, side
        self._spake = kind(
            code.encode(), idA=f"exogym {VERSION} caller".encode(), idB=f"exogym {VERSION} agent {name}".encode()
        )
        self._keys: dict[str, bytes] = {}
        self._session = ""
        self._count = {CALLER: 0, AGENT: 0}

    def meet(self) -> None:
        """Exchange SPAKE2's messages. Then both have a key, the same only if both had the same code.

        Raises:
            PairingError: as of a line; or what came is no message of SPAKE2's.
        """
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        own = self._spake.start()
        if self.side == CALLER:
            self.line.send(own)
        theirs = self.line.receive()
        if (why := refusal(theirs)) is not None:
            raise PairingError(REFUSALS[why])
        try:
            shared = self._spake.finish(theirs)
        except Exception:  # the package has no root for: not on the curve, a small subgroup, the wrong side, too short
            raise ProtocolError("a message is none of SPAKE2's") from None
        if self.side == AGENT:
            self.line.send(own)
        made = HKDF(SHA256(), 96, salt=None, info=f"exogym pairing {VERSION}".encode()).derive(shared)
        self._keys, self._session = {CALLER: made[:32], AGENT: made[32:64]}, made[64:].hex()

    def statement(self, public_key: str) -> str:
        """Return what a caller signs to prove that the private key of `public_key` takes part in this very session."""
        return f"exogym pairing {VERSION}\nsession {self._session}\n{public_key}\n"

    def seal(self, value: dict[str, Any]) -> None:
        """Send `value`, readable for the other end only."""
        self.line.send(self._cipher(self.side).encrypt(self._nonce(self.side), json.dumps(value).encode(), None))

    def open(self, message: bytes) -> dict[str, Any] | None:
        """Return what a sealed message of the other end says; None: it has not the same key."""
        from cryptography.exceptions import InvalidTag

        other = AGENT if self.side == CALLER else CALLER
        try:
            return read(self._cipher(other).decrypt(self._nonce(other), message, None))
        except InvalidTag:
            return None

    def _cipher(self, side: str) -> Any:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        return ChaCha20Poly1305(self._keys[side])

    def _nonce(self, side: str) -> bytes:
        """Return the next number of this direction; each key seals each number once."""
        number = self._count[side]
        self._count[side] += 1
        return number.to_bytes(12, "big")
