"""Virtual time: how long each node computes, waits and sends, on a given network.

`Clock` keeps the time of every node, `StepTime` says how long a step takes, `flops_of` and `Device` turn work into
seconds, `Span`, `save_trace` and `draw_timeline` show what happened when.
"""

from exogym.clock.clock import Clock
from exogym.clock.devices import DEVICES, Device, flops_of, seconds_of
from exogym.clock.steps import StepTime
from exogym.clock.timeline import TIMELINE, Span, draw_timeline, save_spans, save_trace

__all__ = [
    "DEVICES",
    "TIMELINE",
    "Clock",
    "Device",
    "Span",
    "StepTime",
    "draw_timeline",
    "flops_of",
    "save_spans",
    "save_trace",
    "seconds_of",
]
