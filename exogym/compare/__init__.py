"""Comparisons: the same model, from the same weights, on the same data, under several strategies.

`compare` trains them and gives a `Comparison` (`exogym.compare.comparison`); `measured_step_s` says how long a step
takes here.
"""

from exogym.compare.comparison import ComparisonInterrupted
from exogym.compare.entries import split_strategies
from exogym.compare.forecast import measured_step_s
from exogym.compare.run import DEFAULT_STRATEGIES, compare
from exogym.compare.session import Standing

__all__ = ["DEFAULT_STRATEGIES", "ComparisonInterrupted", "Standing", "compare", "measured_step_s", "split_strategies"]
