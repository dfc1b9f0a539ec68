"""Draw a history's curves."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from exogym.errors import ArgumentError, needs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

History = Any  # it shows itself by what is here, so it cannot be known here

FEW = 18  # points of a curve: each gets a marker
LOSSES = ("train_loss", "val_loss")
WIDTH_INCHES, PANEL_INCHES = 6.4, 2.6


def picture(**options: Any) -> Figure:
    """Return a new matplotlib figure, which a notebook shows even without pyplot; ExoGymError without matplotlib."""
    needs("matplotlib", "demo")
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A matplotlib figure that notebooks show as an image."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    return Picture(**options)


def figure_of(history: History, columns: Sequence[str], against: str) -> Figure:
    """Return a figure that plots the averaged model's `columns` against another column (see `History.plot`)."""
    panels = _panels(history, columns)
    bottom = dict(zip(*(x.tolist() for x in _numbers(history, against)), strict=True))
    figure = picture(figsize=(WIDTH_INCHES, PANEL_INCHES * len(panels) + 0.4), layout="constrained")
    for names, axes in zip(panels, figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0], strict=True):
        for name in names:
            steps, values = _numbers(history, name)
            places = [bottom.get(step, np.nan) for step in steps.tolist()]
            axes.plot(places, values, label=name, marker="." if len(steps) < FEW else None)
        axes.set_ylabel(names[0] if len(names) == 1 else "loss")
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend()
    figure.axes[-1].set_xlabel(against)
    return figure


def _panels(history: History, columns: Sequence[str]) -> list[list[str]]:
    """Return the columns of each panel."""
    if not columns:
        columns = [name for name in (*LOSSES, "val_accuracy") if len(history.column(name)[0])]
    if not columns:
        raise ArgumentError("the history has no loss to draw yet: call fit first, or pass the columns to draw")
    losses = [name for name in columns if name in LOSSES]
    return [*([losses] if losses else []), *([name] for name in columns if name not in LOSSES)]


def _numbers(history: History, name: str) -> tuple[np.ndarray, np.ndarray]:
    steps, values = history.column(name)
    if values.dtype == object or not len(values):
        what = "text" if len(values) else "no value of the averaged model"
        raise ArgumentError(f"column {name!r} contains {what} and cannot be drawn: pass a column of numbers")
    return steps, values
