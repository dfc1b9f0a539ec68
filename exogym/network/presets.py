"""Networks by name. `source` says where each number is from. "Assumed" marks round figures that we chose.

A latency is for one message in one direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A network with a name: its settings for `Network`, and the settings' source."""

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
