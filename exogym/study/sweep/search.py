"""Cells of a sweep that optuna proposes, instead of all combinations of values.

Cells come in batches of four. A proposal depends only on the earlier batches' cells and results. So a search that was
killed and resumed proposes the same cells.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from exogym.study.sweep.axes import Axes, Range, as_text

BATCH = 4


def propose(
    axes: Axes, tried: Sequence[tuple[Mapping[str, str], float | None]], count: int, startup: int = BATCH
) -> list[dict[str, str]]:
    """Return the next `count` cells of a search over `axes` ({option: its values or range}).

    Args:
        tried: the earlier cells in order, each with its loss (None if the cell's run failed).
        startup: number of earlier cells before losses count. Until then, cells are drawn at random.
    """
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
    from optuna.trial import TrialState, create_trial

    distributions: dict[str, Any] = {}
    for name, values in axes.items():
        if isinstance(values, Range):
            kind = IntDistribution if values.is_whole else FloatDistribution
            distributions[name] = kind(values.low, values.high, log=values.is_logarithmic)
        else:
            distributions[name] = CategoricalDistribution(values)

    def value_of(name: str, text: str) -> Any:
        values = axes[name]
        return text if not isinstance(values, Range) else int(text) if values.is_whole else float(text)

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=len(tried), n_startup_trials=startup))
            for cell, loss in tried:
                params = {name: value_of(name, text) for name, text in cell.items()}
                state = TrialState.FAIL if loss is None else TrialState.COMPLETE
                study.add_trial(create_trial(params=params, distributions=distributions, value=loss, state=state))
            trials = [study.ask(distributions) for _ in range(count)]
    finally:
        optuna.logging.set_verbosity(before)
    return [{name: as_text(_rounded(trial.params[name], axes[name])) for name in axes} for trial in trials]


def _rounded(value: Any, values: Any) -> Any:
    """Return a number with four digits within its range, because cells are text."""
    return min(max(float(f"{value:.4g}"), values.low), values.high) if isinstance(value, float) else value
