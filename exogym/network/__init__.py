"""Predict the time of communication from links with bandwidth and latency.

`Network` holds the links and predicts times, `costs` lists the algorithms and their sources, and `presets` names some
networks.

>>> PRESETS["wifi"].source != "", Preset({"bandwidth": "1Gbps", "latency": "1ms"}, "assumed").settings["latency"]
(True, '1ms')
>>> cost: Cost = Network("100Mbps", "20ms").cost("all_reduce", 1e6, 4)
>>> cost.hops, round(cost.latency_s, 3), round(cost.transfer_s, 3), round(cost.seconds, 3)
(6, 0.12, 0.12, 0.24)
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = [
    "NAMES",
    "PRESETS",
    "Cost",
    "Network",
    "Preset",
    "algorithms_of",
    "parse_bandwidth",
    "parse_seconds",
    "readable_bandwidth",
    "readable_seconds",
]

if TYPE_CHECKING:
    from exogym.network.costs import NAMES, Cost, algorithms_of
    from exogym.network.network import Network
    from exogym.network.presets import PRESETS, Preset
    from exogym.network.units import parse_bandwidth, parse_seconds, readable_bandwidth, readable_seconds
else:
    __getattr__, __dir__ = lazily(__name__)
