"""Comparisons: the same model, from the same weights, on the same data, under several strategies.

`compare` trains them and gives a `exogym.comparison.Comparison`; `measured_step_s` says how long a step takes here.
"""

from exogym.compare.entries import split_strategies
from exogym.compare.forecast import measured_step_s
from exogym.compare.run import DEFAULT_STRATEGIES, compare
from exogym.compare.session import Standing
from exogym.comparison import ComparisonInterrupted

__all__ = ["DEFAULT_STRATEGIES", "ComparisonInterrupted", "Standing", "compare", "measured_step_s", "split_strategies"]
