"""Comparisons: the same model, from the same weights, on the same data, with several strategies.

`compare` trains the model with each strategy and returns a `Comparison` (`exogym.study.compare.comparison`).
`measured_step_s` and `measured_evaluation_s` measure a step and an evaluation on this machine.

>>> seen = []
>>> def watch(standing: Standing):
...     seen.append((standing.label, standing.step, standing.steps))
...     if standing.label == "ddp":
...         raise KeyboardInterrupt
>>> list(split_strategies("single,ddp"))
['single', 'ddp']
>>> try:
...     compare("digits", "single,ddp", max_steps=10, seeds=1, watch=watch)
... except ComparisonInterrupted as stopped:
...     [(row["strategy"], row["seeds"]) for row in stopped.result.rows]  # runs that ended before
[('single', 1), ('ddp', 0)]
"""

from typing import TYPE_CHECKING

from exogym.core.base.lazy import lazily

__all__ = [
    "DEFAULT_STRATEGIES",
    "ComparisonInterrupted",
    "Standing",
    "compare",
    "measured_evaluation_s",
    "measured_step_s",
    "split_strategies",
]

if TYPE_CHECKING:
    from exogym.study.cells import Standing
    from exogym.study.compare.asked import DEFAULT_STRATEGIES
    from exogym.study.compare.comparison import ComparisonInterrupted
    from exogym.study.compare.entries import split_strategies
    from exogym.study.compare.forecast import measured_evaluation_s, measured_step_s
    from exogym.study.compare.run import compare
else:
    __getattr__, __dir__ = lazily(__name__)
