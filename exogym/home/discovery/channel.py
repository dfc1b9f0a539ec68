"""The pairing protocol: two computers that share a short code exchange messages that nobody else can read or change.

    caller -> agent  {"exogym": 2, "want": "name" or "pair"}
    agent -> caller  {"name": NAME}; after "name" the exchange ends here
    caller -> agent  SPAKE2's message of side A
    agent -> caller  SPAKE2's message of side B
    caller -> agent  sealed: the request, a public key, and the session signed with the private key
    agent -> caller  sealed: the answer, or {"refused": WHY} if the seal is from another code

SPAKE2 (Abdalla and Pointcheval, 2005; the package `spake2`, on Ed25519) turns the code into a key. Both sides get the
same key only if both had the same code. A computer that only listens learns nothing. An impostor can try only one code
per exchange. The exchange gives the impostor no data with which to test other codes later. The caller (side A) proves
first that it has the key, so the agent sends no secret to a caller without the key. HKDF-SHA256 derives one key for
each direction from SPAKE2's key. ChaCha20-Poly1305 seals (encrypts and authenticates) the messages, which are numbered
from 0. The package `cryptography` has HKDF and ChaCha20-Poly1305.

The caller also sends its public SSH key. Anybody may know this key, so the caller must prove that it owns the private
key. The caller signs a statement that contains the public key and the session's name. The session's name is a third
value from HKDF. This name depends on the code and both SPAKE2 messages, and is never sent. So the signature is useless
in any other session.

Four bytes before each message give its length, at most `MOST_BYTES`. The whole exchange has a deadline.
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
    "code": "the code is wrong: type the code that the agent shows now",
    "closed": "there were too many wrong codes: restart exogym agent on the other computer",
    "key": "this computer did not prove that it owns the key that it sent: choose another key with --key",
    "address": "the network between the two computers translates addresses (NAT): pair them on a network without NAT",
    "login": "the agent could not write authorized_keys: the other computer prints the reason",
}


class PairingError(ExoGymError):
    """Raised when pairing fails. The message says why."""


class ProtocolError(PairingError):
    """Raised when the other computer sent nothing in time, or sent an invalid message."""


def draw_code() -> str:
    """Return a new random code of six digits.

    >>> len(draw_code())
    6
    """
    return f"{secrets.randbelow(10**DIGITS):0{DIGITS}}"


def shown_code(code: str) -> str:
    """Return a code in the form in which people see it.

    >>> shown_code("012345")
    '012-345'
    """
    return f"{code[: DIGITS // 2]}-{code[DIGITS // 2 :]}"


def typed_code(text: str) -> str:
    """Return the digits of a code that somebody has typed, without spaces and hyphens.

    Raises:
        ArgumentError: `text` does not have the right number of digits, or has other characters.

    >>> typed_code(" 012 345")
    '012345'
    """
    code = re.sub(r"[\s-]", "", text)
    if not re.fullmatch(rf"[0-9]{{{DIGITS}}}", code):
        raise ArgumentError(
            f"code={text[:40]!r} must be the {DIGITS} digits that exogym agent shows on the other computer"
        )
    return code


class Messages:
    """Sends and receives short messages over a connection. The whole exchange may take `seconds` seconds.

    Raises (from `send`, `receive`, `tell`, `hear`):
        ProtocolError: the time is over, the other computer is gone, or a message is too long or not JSON.
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
            raise ProtocolError(
                f"the other computer announced a message of {size} bytes, but at most {MOST_BYTES} are allowed"
            )
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
                raise ProtocolError(f"the other computer sent nothing in time, or is gone ({error})") from None
            if not data:
                raise ProtocolError("the other computer closed the connection")
            found += data
        return found

    def _wait(self) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise ProtocolError("the other computer took too long")
        self.connection.settimeout(left_s)


def read(message: bytes) -> dict[str, Any]:
    """Return the JSON object in a message.

    Raises:
        ProtocolError: the message is not a JSON object.
    """
    try:
        value = json.loads(message)
    except (ValueError, RecursionError):  # also invalid UTF-8, and numbers with thousands of digits
        raise ProtocolError("a message is not JSON") from None
    if not isinstance(value, dict):
        raise ProtocolError("a message is not a JSON object")
    return value


def refusal(message: bytes) -> str | None:
    """Return the reason if an unsealed message refuses the pairing: a key of `REFUSALS`. Return None otherwise.

    Any computer could have sent this message.

    >>> refusal(b'{"refused": "closed"}'), refusal(b"Ax")
    ('closed', None)
    """
    try:
        why = read(message).get("refused")
    except ProtocolError:
        return None
    return why if isinstance(why, str) and why in REFUSALS else None


class Exchange:
    """One side of the pairing protocol. `meet` derives the keys by SPAKE2; then the sides exchange sealed messages.

    Args:
        line: sends messages to the other side, and receives messages from it.
        side: this side, `CALLER` or `AGENT`.
        code: the code's digits, as this side knows them.
        name: the agent's name, which was sent without a seal. If somebody changed it on the way, the sides get
            different keys.
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
        """Exchange the SPAKE2 messages. Afterward both sides have the same key only if both had the same code.

        Raises:
            PairingError: the agent refused, the connection failed, or a message is not from SPAKE2.
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
        except Exception:  # spake2 has no common error: not on the curve, small subgroup, wrong side, too short
            raise ProtocolError("a message is not from SPAKE2") from None
        if self.side == AGENT:
            self.line.send(own)
        made = HKDF(SHA256(), 96, salt=None, info=f"exogym pairing {VERSION}".encode()).derive(shared)
        self._keys, self._session = {CALLER: made[:32], AGENT: made[32:64]}, made[64:].hex()

    def statement(self, public_key: str) -> str:
        """Return the text that a caller signs in this session to prove that it owns the private key of `public_key`."""
        return f"exogym pairing {VERSION}\nsession {self._session}\n{public_key}\n"

    def seal(self, value: dict[str, Any]) -> None:
        """Encrypt `value` and send it, so that only the other side can read it."""
        self.line.send(self._cipher(self.side).encrypt(self._nonce(self.side), json.dumps(value).encode(), None))

    def open(self, message: bytes) -> dict[str, Any] | None:
        """Return the value in the other side's sealed message. Return None if the other side has another key."""
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
        """Return the direction's next number. Each key uses each number once."""
        number = self._count[side]
        self._count[side] += 1
        return number.to_bytes(12, "big")
