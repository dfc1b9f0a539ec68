"""Virtual time: how long each node computes, waits and sends on a given network.

`Clock` keeps every node's time. `StepTime` holds a step's duration. `flops_of` and `Device` turn work into seconds.
`Span` and `save_spans` show when each node computed, sent and waited.

This example computes the seconds of a step of 1e9 operations on a device that you define:

>>> import json, tempfile
>>> from pathlib import Path
>>> from exogym.network import Network
>>> board = Device(flops_per_s=1e12, precision="fp32", source="assumed")
>>> clock = Clock(2, Network("1Gbps", "1ms"), seconds_of(1e9, board), timeline=True)
>>> clock.advance(10)
>>> span: Span = clock.spans[0]
>>> span.node, span.kind, round(span.end_s - span.start_s, 3)
(0, 'compute', 0.025)
>>> with tempfile.TemporaryDirectory() as folder:
...     save_spans(clock, f"{folder}/timeline.json")
...     sorted(json.loads(Path(folder, "timeline.json").read_text()))
['shares', 'spans', 'title']
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = [
    "DEVICES",
    "TIMELINE",
    "Clock",
    "Device",
    "Span",
    "StepTime",
    "flops_of",
    "save_spans",
    "seconds_of",
]

if TYPE_CHECKING:
    from exogym.core.clock.clock import Clock
    from exogym.core.clock.devices import DEVICES, Device, flops_of, seconds_of
    from exogym.core.clock.steps import StepTime
    from exogym.core.clock.timeline import TIMELINE, Span, save_spans
else:
    __getattr__, __dir__ = lazily(__name__)
