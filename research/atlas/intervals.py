"""Student's t intervals over a few seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

T_95 = {2: 4.303, 4: 2.776}  # Student's t for 95 %, by degrees of freedom


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of three or five finite values, and the ends of its 95 % interval.

    >>> [round(x, 3) for x in interval([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484]
    """
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = T_95[len(values) - 1] * error
    return mean, mean - half, mean + half
