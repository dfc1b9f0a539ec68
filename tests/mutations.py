"""Seeded mutations of small files from strangers: of their bytes, and of the values in their JSON.

for data in mutations(text.encode(), seed=1, count=2000):
    path.write_bytes(data)
"""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

DEEP: Any = "end"
for _ in range(300):
    DEEP = [DEEP]
BOTTOMLESS = b"[" * 100_000  # deeper than the parser's stack
PATHS = (
    "../../../../etc/passwd",
    "/etc/passwd",
    "/dev/zero",
    "..",
    "/",
    "~/.ssh/id_rsa",
    "a\0b",
    "x" * 5000,
    "y/" * 3000,
)
COMMANDS = ("subprocess:getoutput", "os:system", "trap:make", "-oProxyCommand=id", "$(id)", "; id", "`id`", "x\nid")
VALUES: tuple[Any, ...] = (
    *("x", "", [], {}, None, True, False, 0, -1, 2, -1.5, 1e308, 10**400, 1 << 70, "\ud800", "x" * 30_000, "NaN"),
    *(float("nan"), float("inf"), float("-inf"), DEEP, [[]], [{}], {"x": DEEP}, ["x", 1, None], "\x00\x1b[2J", 1 << 31),
    *PATHS,
    *COMMANDS,
)
INSERTED = (
    b"\n",
    b"\\ud800",
    b"1e999",
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b"\x00",
    b"\xe9",
    b"\xff\xfe",
    b",",
    b":",
    b"9" * 5000,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all values in a value of JSON."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(place for key in keys for place in places(value[key], (*path, key)))]


def of_json(rng: random.Random, value: Any) -> Any:
    """Return a copy of a value of JSON with one to three fields removed, renamed, repeated, or of another kind."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        path = rng.choice(places(value))
        if not path:
            if rng.random() < 0.05:
                return copy.deepcopy(rng.choice(VALUES))
            continue
        holder = value
        for key in path[:-1]:
            holder = holder[key]
        key, what = path[-1], rng.random()
        if what < 0.15:
            del holder[key]
        elif what < 0.25 and isinstance(holder, dict):
            name = rng.choice([one for one in VALUES if isinstance(one, str)])
            holder[name] = holder.pop(key) if rng.random() < 0.5 else holder[key]
        elif what < 0.3:
            holder[key] = [holder[key]] * rng.choice((1, 2, 70, 5000))
        elif what < 0.35:
            holder[key] = {"x": holder[key]}
        elif what < 0.4 and isinstance(holder[key], str):
            holder[key] += rng.choice((*PATHS, *COMMANDS))
        else:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
    return value


def of_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return the bytes with one to four flipped, cut, repeated, inserted or truncated. They may be none."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if not found:
            break
        at, what = rng.randrange(len(found)), rng.choice(("flip", "cut", "repeat", "insert", "insert", "end", "swap"))
        if what == "flip":
            found[at] ^= 1 << rng.randrange(8)
        elif what == "cut":
            del found[at : at + rng.randint(1, 40)]
        elif what == "repeat":
            found[at:at] = found[at : at + 40] * rng.choice((1, 3, 500))
        elif what == "insert":
            found[at:at] = rng.choice(INSERTED)
        elif what == "end":
            del found[at:]
        else:
            other = rng.randrange(len(found))
            found[at], found[other] = found[other], found[at]
    if rng.random() < 0.01:
        return rng.choice((b"", b"\x00" * 4096, BOTTOMLESS, b'{"x":' * 100_000, b"7", b"null", b"\xef\xbb\xbf" + data))
    return bytes(found)


def mutations(data: bytes, seed: int, count: int) -> Iterator[bytes]:
    """Yield mutations of a file. If the file is JSON, two of three change its values, the others its bytes."""
    rng = random.Random(seed)
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    for _ in range(count):
        if value is None or rng.random() < 1 / 3:
            yield of_bytes(rng, data)
        else:
            yield json.dumps(of_json(rng, value)).encode().replace(b"NaN", rng.choice((b"NaN", b"1e999")))
