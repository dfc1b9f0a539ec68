"""A run's history: a sequence of dicts to read, plot and save. `rows` stores them as columns."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from exogym.core.base.files import beside, check_regular, replacing
from exogym.core.record.rows import COLUMNS, LINE, NAMES, OF_THE_STEP, WHOLE, Row, Rows
from exogym.core.record.views import figure_of
from exogym.errors import ArgumentError, nearest, needs

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


class History(Rows):
    """A run's records: a sequence of rows in step order, in which each step's first row is the averaged model's.

    Each row is a dict with the keys

    - `step`, `epoch`, `node` (None: the averaged model), `lr`, `consensus_distance`;
    - `train_loss` (averaged model: the mean over the nodes that trained in this step, in float64), `val_loss`,
      `val_accuracy`;
    - `payload_bytes`, `tx_bytes`, `rx_bytes`: the mean over the nodes, since the run's start; the same in all rows of a
      step;
    - `wall_s` (seconds since the start), `time_s` (predicted seconds, with a virtual clock);
    - any other metric, such as `memory_bytes` or a function that you passed as a metric.

    Missing values are `None`. A node that did not train in a step has no row for this step.

    >>> history = History()
    >>> history.add_evaluation(0, 0, {"val_loss": 2.5})
    >>> history.add_stretch([1, 2], [0, 0], [[2.0, 1.0], [4.0, float("nan")]], lr=[0.1, 0.1], nodes=[0, 1],
    ...                     payload_bytes=0.0, tx_bytes=0.0, rx_bytes=0.0, final_bytes=(8.0, 12.0, 12.0),
    ...                     wall_s=(0.0, 1.0))
    >>> [(row["step"], row["node"], row["train_loss"]) for row in history]
    [(0, None, None), (1, None, 3.0), (1, 0, 2.0), (1, 1, 4.0), (2, None, 1.0), (2, 0, 1.0)]
    >>> history[-1]["tx_bytes"], history[1]["tx_bytes"], history[1]["wall_s"]
    (12.0, 0.0, 0.5)
    >>> history.last["step"], history.last["train_loss"], len(history.rows(node=1))
    (2, 1.0, 1)
    >>> steps, losses = history.column("train_loss", node=1)
    >>> steps.tolist(), losses.tolist()
    ([1], [4.0])
    """

    @property
    def last(self) -> Row:
        """The averaged model's newest row, with `None` for unknown values.

        All values are from one step. If it was evaluated but not logged, the row has no `train_loss`.

        Raises:
            ArgumentError: the history has no row of the averaged model yet.
        """
        for line in reversed(range(self._size)):
            for row in self._rows(line, None):
                return row
        raise ArgumentError("the history has no row of the averaged model yet: call fit first")

    def rows(self, node: int | Literal["all"] | None = "all") -> list[Row]:
        """Return a list of rows: all rows ("all"), the averaged model's rows (None), or one node's rows (its id)."""
        return list(self.rows_after(-1, node))

    def column(self, name: str, node: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return a column of the averaged model or of `node`, without missing values: K steps (int64) and K values.

        Raises:
            ArgumentError: the history has no such column.
        """
        if name == "node" or name not in self.columns:
            known = [column for column in self.columns if column != "node"]
            raise ArgumentError(f"column {name!r} is not in the history: {nearest(name, known)}")
        lines, losses = self._buffer[: self._size], self._losses_of(node)
        there = lines["block"] >= 0 if node is None else ~np.isnan(losses)
        own = losses if name == "train_loss" else lines[name] if name in ("step", *OF_THE_STEP) else losses * np.nan
        there &= ~np.isnan(own)
        found = dict(zip(lines["step"][there].tolist(), own[there].tolist(), strict=True))
        for step, evaluated in self._evaluations.items():
            if node in evaluated:
                value = own[self._line(step)].item()
                found[step] = evaluated[node].get(name, None if math.isnan(value) else value)
        given = {step: found[step] for step in sorted(found) if found[step] is not None}
        is_text = any(isinstance(value, str) for value in given.values())
        kind = object if is_text else LINE[name] if name in WHOLE else float
        return np.array([*given], np.int64), np.array([*given.values()], kind)

    def _losses_of(self, node: int | None) -> np.ndarray:
        """Return a node's loss at each line, or the mean of all nodes' losses; NaN: there is none."""
        lines = self._buffer[: self._size]
        if node is None:
            return lines["train_loss"]
        found = np.full(len(lines), np.nan)
        pieces = [losses[ids == node] for ids, losses in self._blocks]
        each = [x[0] if len(x) else np.full(x.shape[1], np.nan) for x in pieces]
        found[lines["block"] >= 0] = np.concatenate([np.empty(0), *each])
        return found

    # Seeing

    def plot(self, *columns: str, against: str = "step") -> Figure:
        """Plot the averaged model's records as a matplotlib figure with a panel per column; all losses share one panel.

        A notebook shows the figure; `figure.savefig("loss.png")` writes it.

        Args:
            columns: columns to draw. Default: the history's losses and accuracy.
            against: the column on the horizontal axis: "step", "tx_bytes", "time_s", ...

        Raises:
            ArgumentError: a column does not exist, or holds no numbers.
            ExoGymError: matplotlib is not installed.
        """
        return figure_of(self, columns, against)

    def __repr__(self) -> str:
        rows = self.rows(None)
        step = rows[-1]["step"] if rows else 0
        return f"<History: the averaged model: {len(rows)} rows of {len(self)}, up to step {step}>"

    # Files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the history to the safetensors file `path`, atomically.

        Raises:
            OSError: the file cannot be written.

        >>> import tempfile
        >>> history = History()
        >>> history.add_evaluation(3, 0, {"val_loss": 2.5})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     history.save(f"{folder}/history.safetensors")
        ...     [(row["step"], row["val_loss"]) for row in History.load(f"{folder}/history.safetensors")]
        [(3, 2.5)]
        """
        state = self.state()
        arrays = {name: np.ascontiguousarray(x) for name, x in state.items() if isinstance(x, np.ndarray)}
        others = {name: x for name, x in state.items() if name not in arrays}
        with beside(path) as made:
            save_file(arrays, made, metadata={"history": json.dumps(others)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> History:
        """Return the history from a file that `save` wrote.

        Raises:
            ArgumentError: the file is missing or incomplete, or holds no history.
        """
        try:
            check_regular(path)
            with safe_open(str(path), framework="np") as file:
                state = json.loads(file.metadata()["history"])
                state |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return cls.from_state(state)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ArgumentError(f"{str(path)!r} contains no history: {error!r}; train again") from error

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write every row to a CSV file with a header. Missing values are empty.

        The file is written atomically.

        Raises:
            ArgumentError: the path cannot be written.
        """
        try:
            with replacing(path) as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(self.columns)
                writer.writerows(row.values() for row in self)
        except (OSError, ValueError, RecursionError) as error:
            raise ArgumentError(f"path={os.fspath(path)!r} cannot be written ({error}): pass another path") from error

    def to_pandas(self) -> pandas.DataFrame:
        """Return every row as a pandas DataFrame. `node` is <NA> for the averaged model.

        Raises:
            ExoGymError: pandas is not installed.
        """
        frame = needs("pandas").DataFrame.from_records([tuple(row.values()) for row in self], columns=self.columns)
        kinds = {name: "Int64" if name == "node" else float for name in COLUMNS if name not in ("step", "epoch")}
        return frame.astype({"step": int, "epoch": int, **kinds})

    def state(self) -> dict[str, Any]:
        """Return the whole history as a flat dict of copied arrays and JSON values, which `from_state` reads."""
        blocks = self._blocks
        return {
            **{f"line_{name}": self._buffer[: self._size][name].copy() for name in NAMES},
            "block_shapes": np.array([losses.shape for _, losses in blocks], np.int64).reshape(-1, 2),
            "block_nodes": np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in blocks)]),
            "block_losses": np.concatenate([np.empty(0, np.float32), *(losses.ravel() for _, losses in blocks)]),
            "evaluations": [[s, n, dict(v)] for s, nodes in self._evaluations.items() for n, v in nodes.items()],
            "extra_columns": list(self._extra),
            "last_step": self._last,
            "totals": list(self._totals),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> History:
        """Return the history from a dict that `state` returned.

        Raises:
            ValueError: the dict's values do not fit together as a history's state.
        """
        history = cls()
        lines = np.empty(len(state["line_step"]), LINE)
        for name in NAMES:
            lines[name] = state[f"line_{name}"]
        history._write(0, lines)
        shapes = np.asarray(state["block_shapes"], np.int64).reshape(-1, 2)
        all_ids, all_losses = np.asarray(state["block_nodes"], np.int64), np.asarray(state["block_losses"], np.float32)
        _check_blocks(lines, shapes, len(all_ids), len(all_losses))
        ids_end, losses_end = np.cumsum(shapes[:, 0])[:-1], np.cumsum(shapes.prod(1))[:-1]
        last = np.empty(0, np.int64)
        each = zip(shapes, np.split(all_ids, ids_end), np.split(all_losses, losses_end), strict=False)
        for shape, ids, losses in each:
            last = last if np.array_equal(last, ids) else ids.copy()
            history._blocks.append((last, losses.reshape(shape).copy()))
        there = set(lines["step"].tolist())
        for step, node, values in state["evaluations"]:
            fits = all(isinstance(x, str | int | float | None) for x in values.values())
            if step not in there or type(node) not in (int, type(None)) or not fits:
                raise ValueError(f"the evaluation step={step!r}, node={node!r}, {str(values)[:80]} fits no step")
            history._evaluations.setdefault(step, {})[node] = dict(values)
        extra, totals = state["extra_columns"], state["totals"]
        if type(extra) is not list or set(map(type, extra)) - {str} or [*map(type, totals)] != [float] * 5:
            raise ValueError(f"extra_columns={extra!r} must be texts, and totals={totals!r} must be five floats")
        history._extra, history._last, history._totals = [*extra], int(state["last_step"]), [*totals]
        return history


def _check_blocks(lines: np.ndarray, shapes: np.ndarray, ids: int, losses: int) -> None:
    """Raise ValueError unless the numbers of ids and losses fit these block shapes, and the lines refer into them."""
    inside = lines["block"] >= 0
    if np.any(shapes < 0) or shapes[:, 0].sum() != ids or shapes.prod(1).sum() != losses:
        raise ValueError(f"the history has {ids} nodes and {losses} losses, which do not fit the sizes of its blocks")
    blocks = np.repeat(np.arange(len(shapes)), shapes[:, 1])
    positions = np.concatenate([np.empty(0, np.int64), *map(np.arange, shapes[:, 1])])
    fits = np.array_equal(lines["block"][inside], blocks) and np.array_equal(lines["position"][inside], positions)
    if not fits or np.any(np.diff(lines["step"]) <= 0):
        raise ValueError("the history's steps do not ascend, or its records do not fit its losses")
