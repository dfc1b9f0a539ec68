"""Faults in a run: nodes that drop out, are slow or send wrong values, and clients with limited availability.

>>> import numpy as np
>>> from exogym.faults.availability import There
>>> attendance: Attendance = Faults(absent={2: [(10, 20)]}).bind(num_nodes=3)
>>> attendance.up(9), attendance.up(10), attendance.up(20)
([0, 1, 2], [0, 1], [0, 1, 2])
>>> class Nights(Availability):  # all clients, in the first half of each minute
...     def at(self, time_s, num_nodes):
...         minute, ids = time_s // 60 * 60, np.arange(num_nodes if time_s % 60 < 30 else 0)
...         return There(ids, np.full(len(ids), minute + 30), np.ones(len(ids)))
>>> len(Nights().at(10, 5).ids), len(Nights().at(40, 5).ids)
(5, 0)
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = [
    "ATTACKS",
    "NEVER",
    "Attendance",
    "Availability",
    "Devices",
    "Faults",
    "Outages",
    "Profile",
    "Trace",
]  # fmt: skip

if TYPE_CHECKING:
    from exogym.faults.availability import Availability, Devices, Profile, Trace
    from exogym.faults.planned import ATTACKS, NEVER, Attendance, Faults, Outages
else:
    __getattr__, __dir__ = lazily(__name__)
