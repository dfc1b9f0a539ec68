"""Networks by name, as text on a command line, or from a file.

`source` names the source of each number; "assumed" marks round figures that we chose. Latencies are one way.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exogym.core.base.files import short_text
from exogym.errors import ArgumentError
from exogym.network.units import value_of


@dataclass(frozen=True)
class Preset:
    """A named network: its settings for `Network` and their source."""

    settings: dict[str, Any]
    source: str


PRESETS: dict[str, Preset] = {  # by name, with sources
    "nvlink": Preset(
        {"bandwidth": "450GB/s", "latency": "2us"},
        "NVIDIA H100 data sheet: NVLink 900 GB/s per GPU, both directions together; latency assumed",
    ),
    "pcie": Preset(
        {"bandwidth": "31.5GB/s", "latency": "5us"},
        "PCI Express 4.0, 16 lanes at 16 GT/s in 128b/130b code (PCI-SIG): 31.5 GB/s each way; latency assumed",
    ),
    "infiniband": Preset(
        {"bandwidth": "400Gbps", "latency": "5us"},
        "InfiniBand NDR, one 400 Gbit/s port per node (NVIDIA ConnectX-7 data sheet); latency assumed",
    ),
    "lan-10g": Preset(
        {"bandwidth": "9.41Gbps", "latency": "50us"},
        "10 Gbit/s Ethernet less framing (1448 bytes of TCP payload in 1538 on the wire, 94.1 %); latency assumed",
    ),
    "lan-1g": Preset(
        {"bandwidth": "941Mbps", "latency": "100us"},
        "1 Gbit/s Ethernet less framing (1448 bytes of TCP payload in 1538 on the wire, 94.1 %); latency assumed",
    ),
    "wifi": Preset(
        {"bandwidth": "150Mbps", "latency": "3ms", "jitter": "2ms"},
        "assumed: 300 Mbit/s of Wi-Fi 5 in one room, half duplex, so 150 Mbit/s each way",
    ),
    "home": Preset(
        {"up": "20Mbps", "down": "100Mbps", "latency": "15ms", "jitter": "2ms", "server": "10Gbps"},
        "US FCC benchmark for fixed broadband (FCC 24-27, 2024): 100 Mbit/s down, 20 up; the rest assumed",
    ),
    "wan": Preset(
        {"bandwidth": "500Mbps", "latency": "75ms", "jitter": "5ms"},
        "assumed: 10,000 km of fiber at 200,000 km/s is 50 ms, and half as much again for detours",
    ),
    "archetype-high": Preset({"bandwidth": "400Gbps", "latency": "0.1ms"}, "arXiv:2503.09799, appendix on time"),
    "archetype-medium": Preset({"bandwidth": "100Gbps", "latency": "1ms"}, "arXiv:2503.09799, appendix on time"),
    "archetype-low": Preset({"bandwidth": "10Gbps", "latency": "10ms"}, "arXiv:2503.09799, appendix on time"),
}


def settings_of(text: str) -> dict[str, Any]:
    """Return the settings in a text: a preset, one or more bandwidths with a latency, name=value, or a .json file.

    Raises:
        ArgumentError: the text has another form or contains a setting twice, or the file is missing or not JSON.

    >>> settings_of("100Mbps,20ms,loss=0.01")
    {'bandwidth': '100Mbps', 'latency': '20ms', 'loss': 0.01}
    >>> settings_of("wifi")
    {'preset': 'wifi'}
    >>> settings_of("1Gbps,50Mbps:10ms")
    {'bandwidth': ['1Gbps', '50Mbps'], 'latency': '10ms'}
    """
    if text.endswith(".json"):
        return _read(Path(text))
    named: dict[str, Any] = {}
    bare: list[str] = []
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            bare.append(name)
        elif name in named:
            raise ArgumentError(f"network {text!r} sets {name} twice: set it once")
        else:
            named[name] = value_of(value) if name in ("loss", "seed", "tcp", "efficiency") else value
    if len(bare) > 1 and _is_bandwidth(bare[1]):
        last, colon, latency = bare[-1].partition(":")
        lines = [*bare[:-1], last.strip()]
        if any(":" in line for line in lines):
            raise ArgumentError(
                f"network {text!r}: all lines share one latency: write it after the last line, as in 1Gbps,50Mbps:10ms"
            )
        if "bandwidth" in named or (colon and "latency" in named):
            raise ArgumentError(f"network {text!r} gives {'bandwidth' if 'bandwidth' in named else 'latency'} twice")
        return {"bandwidth": lines} | ({"latency": latency.strip()} if colon else {}) | named
    places: tuple[str, ...] = ("bandwidth", "latency")
    if bare and not bare[0].startswith((*"0123456789.+-",)):
        places = ("preset",)
    if len(bare) > len(places) or any(name in named for name in places[: len(bare)]):
        raise ArgumentError(
            f"network {text!r} must be a preset ({', '.join(PRESETS)}), a bandwidth and a latency such as "
            "'100Mbps,20ms', each node's line such as '1Gbps,1Gbps,50Mbps:10ms', or a .json file"
        )
    return dict(zip(places, bare, strict=False)) | named


def _is_bandwidth(text: str) -> bool:
    return text.partition(":")[0].strip().lower().endswith(("bps", "b/s", "bit/s", "byte/s"))


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(short_text(path))
    except ArgumentError as error:
        raise ArgumentError(f"the network file {error}") from None
    except OSError as error:
        raise ArgumentError(f"the network file {str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ArgumentError(f"the network file {str(path)!r} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ArgumentError(f'the network file {str(path)!r} must hold one object, such as {{"bandwidth": "1Gbps"}}')
    return settings
