"""What goes wrong in a run: nodes that drop out, lag or lie, and clients that are there only now and then."""

from exogym.faults.availability import Availability, Devices, Diurnal, Profile, Trace
from exogym.faults.planned import ATTACKS, NEVER, Attendance, Faults, Outages

__all__ = [
    "ATTACKS",
    "NEVER",
    "Attendance",
    "Availability",
    "Devices",
    "Diurnal",
    "Faults",
    "Outages",
    "Profile",
    "Trace",
]  # fmt: skip
