"""Facts about a computer: device, memory, speed and versions. Only paired computers learn them."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from typing import Any

import torch

from exogym.core.base.devices import Device
from exogym.core.base.streams import printable

SIZE = 512  # rows and columns of the multiplied matrices
MEASURED_S, LEAST = 0.2, 3
TEXTS, NUMBERS = ("device", "exogym", "torch", "python", "system"), ("cores", "memory_bytes", "speed_flops")
SHOWN, MOST = 120, 1e20  # limits for another computer's facts: characters of a text, and a number


def facts() -> dict[str, Any]:
    """Return facts about this computer as JSON values. The measurement takes about half a second.

    `speed_flops` is the number of float32 operations per second in products of 512 x 512 matrices on `device`. A
    multiplication and the addition of its result count as two operations. Use this number to compare computers;
    training is much slower.

    >>> sorted(facts())
    ['cores', 'device', 'exogym', 'memory_bytes', 'python', 'speed_flops', 'system', 'torch']
    """
    device = Device.named("auto")
    return {
        "device": f"{device.place.type} {device.model}".strip(),
        "cores": os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "speed_flops": speed_flops(device.place.type),
        "exogym": version("exogym"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def speed_flops(device: str) -> float:
    """Return the number of operations per second in matrix products on `device`; see `facts`."""
    x = torch.ones(SIZE, SIZE, device=device)
    best_s, begun = float("inf"), time.perf_counter()
    count = 0
    while count < LEAST or time.perf_counter() - begun < MEASURED_S:
        start = time.perf_counter()
        float((x @ x)[0, 0])  # waits for the device
        count, best_s = count + 1, min(best_s, time.perf_counter() - start)
    return 2 * SIZE**3 / best_s


def cleaned(told: Any) -> dict[str, Any]:
    """Return the valid facts in another computer's message: known names with numbers or short printable texts.

    >>> cleaned({"cores": 8, "device": "cpu\\x1b[2J", "memory_bytes": [1], "torch": 3})
    {'device': 'cpu?[2J', 'cores': 8}
    """
    given = told if isinstance(told, dict) else {}
    found: dict[str, Any] = {}
    for name in TEXTS:
        if isinstance(value := given.get(name), str):
            found[name] = printable(value[:SHOWN])
    for name in NUMBERS:
        value = given.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MOST:
            found[name] = value
    return found
