"""Parse and print bandwidths and times as people write them: "1Gbps", "10 MB/s", "0.5ms"."""

from __future__ import annotations

import math
import re
from typing import Any

from exogym.errors import ArgumentError

PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
BITS, BYTES = ("bps", "bit/s", "b/s"), ("Bps", "B/s", "byte/s")
SECONDS = {"d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
PER_SECOND = {"ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}  # dividing by these powers rounds like the decimal text
_WORDS = {"none": None, "true": True, "false": False}
_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?inf|nan)\s*([^\s\d]*)\s*")


def parse_bandwidth(given: Any, name: str = "bandwidth") -> float:
    """Return bits per second, over 0, from a number or from text.

    Units are powers of 1000: bps, kbps, Mbps, Gbps, Tbps (also bit/s and b/s) are bits; B/s, KB/s, MB/s, GB/s, TB/s
    (also Bps) are bytes. A lowercase b is a bit and an uppercase B a byte. The case of the prefix doesn't matter.

    Raises:
        ArgumentError: the value is not a number, has no unit or an unknown one, or is not over 0.

    >>> parse_bandwidth("1Gbps"), parse_bandwidth("12.5 MB/s"), parse_bandwidth(1e6)
    (1000000000.0, 100000000.0, 1000000.0)
    >>> parse_bandwidth("100")
    Traceback (most recent call last):
    ...
    exogym.errors.ArgumentError: bandwidth='100' has no unit: write '100Mbps' (megabits per second), '100MB/s' (megabytes) or '100bps'
    >>> parse_bandwidth("1Gb")
    Traceback (most recent call last):
    ...
    exogym.errors.ArgumentError: bandwidth='1Gb' has no known unit: use kbps, Mbps, Gbps, Tbps (bits) or KB/s, MB/s, GB/s (bytes), as in '1Gbps'
    """  # noqa: E501
    value, unit = _split(given, name, "'1Gbps' or '100MB/s'")
    scale = 1.0
    if unit:
        prefix = unit[0].lower() if unit[0] in "kKmMgGtT" else ""
        base = unit[1:] if prefix else unit
        if base not in BITS + BYTES:
            raise ArgumentError(
                f"{name}={given!r} has no known unit: use kbps, Mbps, Gbps, Tbps (bits) or KB/s, MB/s, GB/s (bytes), "
                "as in '1Gbps'"
            )
        scale = PREFIXES[prefix] * (8 if base in BYTES else 1)
    elif isinstance(given, str) and 0 < value < math.inf:
        n = given.strip()
        raise ArgumentError(
            f"{name}={given!r} has no unit: write '{n}Mbps' (megabits per second), '{n}MB/s' (megabytes) or '{n}bps'"
        )
    bps = value * scale
    if not 0 < bps < math.inf:
        raise ArgumentError(
            f"{name}={given!r} must be over 0 and finite, in bits per second or as text such as '1Gbps'"
        )
    return bps


def parse_bytes(given: Any, name: str) -> float:
    """Return bytes, at least 1, from a number or from text such as "25MB" or "3 MiB".

    Raises:
        ArgumentError: the value is not a number, has no unit of bytes, or is under 1 byte.

    >>> parse_bytes("25MB", "bucket"), parse_bytes("3MiB", "stream"), parse_bytes(1e6, "bucket")
    (25000000.0, 3145728.0, 1000000.0)
    """
    value, unit = _split(given, name, "'25MB'")
    prefix, base = unit.removesuffix("B").removesuffix("i").lower(), 1024 if unit.endswith("iB") else 1000
    powers = ("", "k", "m", "g")
    if (isinstance(given, str) and not unit.endswith("B")) or prefix not in powers:
        raise ArgumentError(f"{name}={given!r} must be a number of bytes, such as '25MB' or '3MiB'")
    size = float(value * base ** powers.index(prefix))
    if not 1 <= size < math.inf:
        raise ArgumentError(f"{name}={given!r} must be at least 1 byte and finite, such as '25MB' or '3MiB'")
    return size


def parse_seconds(given: Any, name: str = "latency") -> float:
    """Return seconds, at least 0, from a number or from text in ns, us, ms, s, min, h or d (days).

    Text needs a unit, except for 0 or if `name` ends in "_s" or "seconds".

    Raises:
        ArgumentError: the value is not a number, has no unit or an unknown one, is negative or not finite.

    >>> parse_seconds("0.5ms"), parse_seconds(2), parse_seconds("50 us")
    (0.0005, 2.0, 5e-05)
    >>> parse_seconds("20")
    Traceback (most recent call last):
    ...
    exogym.errors.ArgumentError: latency='20' has no unit: write '20us', '20ms', '20s', '20min' or '20h'
    """
    value, unit = _split(given, name, "'0.5ms'")
    if isinstance(given, str) and not unit and 0 < value < math.inf and not name.endswith(("_s", "seconds")):
        n = given.strip()
        raise ArgumentError(f"{name}={given!r} has no unit: write '{n}us', '{n}ms', '{n}s', '{n}min' or '{n}h'")
    if unit and unit not in SECONDS:
        raise ArgumentError(f"{name}={given!r} has no known unit: use ns, us, ms, s, min, h or d, as in '0.5ms'")
    seconds = value / PER_SECOND[unit] if unit in PER_SECOND else value * SECONDS.get(unit, 1.0)
    if not 0 <= seconds < math.inf:
        raise ArgumentError(f"{name}={given!r} must be at least 0 and finite, in seconds or as text such as '0.5ms'")
    return seconds


def _split(given: Any, name: str, example: str) -> tuple[float, str]:
    """Return a text's number and unit, or a number and no unit."""
    if isinstance(given, str):
        match = _QUANTITY.fullmatch(given)
        if match is None:
            raise ArgumentError(f"{name}={given!r} is not a number with a unit: pass a value such as {example}")
        return float(match[1]), match[2]
    if isinstance(given, bool) or (not isinstance(given, int | float) and not hasattr(given, "__float__")):
        raise ArgumentError(f"{name}={given!r} must be a number or text such as {example}")
    return float(given), ""


def readable_bandwidth(bps: float) -> str:
    """Return a rate in bits per second as text, in a suitable unit.

    >>> readable_bandwidth(941e6), readable_bandwidth(2e4)
    ('941 Mbps', '20 kbps')
    """
    power = 0 if bps < 1000 else min(int(math.log10(bps) // 3), 4)
    return f"{bps / 1000**power:.3g} {('', 'k', 'M', 'G', 'T')[power]}bps"


def readable_seconds(seconds: float) -> str:
    """Return a time in seconds as text, in a suitable unit.

    >>> readable_seconds(0.0005), readable_seconds(90), readable_seconds(0)
    ('500 us', '1.5 min', '0 s')
    """
    if seconds == 0:
        return "0 s"
    unit = next((unit for unit in ("h", "min", "s", "ms", "us") if seconds >= SECONDS[unit]), "ns")
    return f"{seconds / SECONDS[unit]:.3g} {unit}"


def value_of(text: str) -> Any:
    """Return the value of a text such as "3", "0.5", "true", "false" or "none". Other texts are returned unchanged."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text
