"""A run's records, stored as columns, so that 1,000 nodes x 10,000 steps fit in 40 MB.

A step's first row is the averaged model's (`node=None`), followed by the rows of the nodes that trained in this step,
by id. Nodes' losses are stored in float32 blocks (nodes, steps), and values that are equal for all nodes of a step are
stored once. A row becomes a dict only when it is read.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import numpy as np

from exogym.errors import ArgumentError

Row = dict[str, Any]
COLUMNS = (
    *("step", "epoch", "node", "train_loss", "val_loss", "val_accuracy", "payload_bytes", "tx_bytes", "rx_bytes"),
    *("consensus_distance", "lr", "wall_s"),
)
BYTES = ("payload_bytes", "tx_bytes", "rx_bytes")
# the same in every row of a step, unless an evaluation gives another value
OF_THE_STEP = ("epoch", *BYTES, "lr", "wall_s", "time_s")
# A line for each step. `block`, `position`: place of its losses (-1: an evaluation only). `rows`: its number of dicts.
WHOLE, REAL = ("step", "epoch", "block", "position", "rows"), ("train_loss", *BYTES, "lr", "wall_s", "time_s")
LINE = np.dtype([*((name, np.int64) for name in WHOLE), *((name, np.float64) for name in REAL)])
NAMES = LINE.names or ()


def plain(value: Any) -> Any:
    """Return a number, text or None as a Python value: a tensor or numpy scalar becomes an int, float or bool.

    Lone surrogates (half characters, from file names that are not UTF-8) are escaped, because a UTF-8 file cannot hold
    them.

    Raises:
        ArgumentError: the value is not a single number, a text or None.
    """
    if getattr(value, "size", None) == 1 or getattr(value, "ndim", None) == 0:
        value = value.item()  # numpy scalars and arrays of one value; tensors of no dimension
    if value is not None and not isinstance(value, str | int | float):
        raise ArgumentError(
            f"a metric must be a single number, a text or None, not {value!r}: reduce it first, or call .item()"
        )
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return value


class Rows(Sequence[Row]):
    """The records of a `History`, which describes their keys: added stretch by stretch, read as rows."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, LINE)  # grows by doubling; the first `_size` records count
        self._size = 0
        self._blocks: list[tuple[np.ndarray, np.ndarray]] = []  # (ids of the nodes, losses (nodes, steps))
        self._evaluations: dict[int, dict[int | None, Row]] = {}
        self._extra: list[str] = []
        self._last = 0  # the last step of the last stretch
        self._totals = [0.0, 0.0, 0.0, 0.0, math.nan]  # BYTES, wall_s and time_s after it

    @property
    def columns(self) -> tuple[str, ...]:
        """The keys of every row: the fixed keys, then further metrics in the order of their first report."""
        return (*COLUMNS, *self._extra)

    # Writing

    def add_stretch(
        self,
        steps: Any,
        epochs: Any,
        losses: Any,
        lr: Any,
        nodes: Sequence[int],
        payload_bytes: float,
        tx_bytes: float,
        rx_bytes: float,
        final_bytes: tuple[float, float, float],
        wall_s: tuple[float, float],
        span: tuple[int, int] | None = None,
        time_s: tuple[float, float] | None = None,
    ) -> None:
        """Add the records of a stretch: the steps between two communications.

        Args:
            steps: (S,) the logged steps, ascending; S may be 0.
            epochs: (S,) the epochs of these steps.
            losses: (N, S) float32, NaN where a node did not train. The history copies the array.
            lr: (S,) learning rates.
            nodes: the ids of the N nodes in `losses`.
            payload_bytes, tx_bytes, rx_bytes: mean bytes per node from the run's start to this stretch's start.
            final_bytes: the same three numbers after the stretch's last step, at which nodes communicate.
            wall_s: two times in seconds since the run's start: before and after the stretch. Steps between get
                interpolated times.
            time_s: predicted seconds, also before and after the stretch. None if the run has no virtual clock.
            span: first and last step of the stretch. None means the first and last of `steps`.

        Raises:
            ArgumentError: the arrays' shapes differ, or the steps do not come after the previous stretch's steps.
        """
        steps, epochs, lr = np.asarray(steps, np.int64), np.asarray(epochs), np.asarray(lr, np.float64)
        losses, ids = np.array(losses, np.float32, order="C"), np.array(nodes, np.int64)
        if losses.shape != (len(ids), len(steps)) or epochs.shape != steps.shape or lr.shape != steps.shape:
            raise ArgumentError(
                f"losses {losses.shape}, epochs {epochs.shape} and lr {lr.shape} do not fit {len(ids)} nodes and "
                f"{len(steps)} steps: pass losses (nodes, steps), and one epoch and lr per step"
            )
        if span is None:
            if not len(steps):
                return
            span = int(steps[0]), int(steps[-1])
        if span[0] <= self._last or np.any(np.diff([span[0] - 1, *steps, span[1] + 1]) <= 0):
            raise ArgumentError(
                f"steps {steps[:5].tolist()}... of the interval {span} must ascend and come after step "
                f"{self._last}, the last recorded step: pass each step once, in order"
            )

        new = self._blank(len(steps))
        new["step"], new["epoch"], new["lr"] = steps, epochs, lr
        new["block"], new["position"] = len(self._blocks), np.arange(len(steps))
        acted = ~np.isnan(losses)
        counts = acted.sum(0)
        new["rows"] = 1 + counts
        sums = np.where(acted, losses, 0).sum(0, dtype=np.float64)
        new["train_loss"] = np.divide(sums, counts, out=np.full(len(steps), np.nan), where=counts > 0)
        if len(steps):
            if self._blocks and np.array_equal(self._blocks[-1][0], ids):
                ids = self._blocks[-1][0]  # the same nodes as before: keep their ids once
            self._blocks.append((ids, losses))
        # Evaluations may precede the losses of their steps.
        start = self._line(span[0])
        tail = self._buffer[start : self._size].copy()
        kept = new
        if len(tail):
            kept = np.concatenate([new, tail[~np.isin(tail["step"], steps)]])
            kept = kept[np.argsort(kept["step"])]
        for name, before, after in zip(BYTES, (payload_bytes, tx_bytes, rx_bytes), final_bytes, strict=True):
            kept[name] = np.where(kept["step"] < span[1], before, after)
        done = np.minimum((kept["step"] - span[0] + 1) / (span[1] - span[0] + 1), 1.0)
        for name, (before, after) in {"wall_s": wall_s, "time_s": time_s or (math.nan, math.nan)}.items():
            kept[name] = before * (1 - done) + after * done
        if time_s is not None and "time_s" not in self._extra:
            self._extra.append("time_s")
        self._write(start, kept)
        self._last = span[1]
        self._totals = [*map(float, final_bytes), float(wall_s[1]), math.nan if time_s is None else float(time_s[1])]
        for line in map(self._line, tail["step"].tolist()):
            self._buffer["rows"][line] = len(self._nodes(line, self._losses(line)))

    def add_evaluation(self, step: int, epoch: int, values: Mapping[str, Any], node: int | None = None) -> None:
        """Add metrics of the averaged model (or of `node`) after `step`, to an existing row or as a new row.

        A value in `values` replaces the stretch's value for the same key. The averaged model's bytes and seconds appear
        in all rows of the step. A step without losses gets the newest bytes and seconds. Raise ArgumentError if a value
        is not a single number, a text or None, or `values` has the key `step`, `epoch` or `node`.
        """
        if wrong := {"step", "epoch", "node"} & values.keys():
            raise ArgumentError(f"values has the keys {sorted(wrong)}: pass them as arguments instead")
        step, node = int(step), None if node is None else int(node)
        clean = {plain(str(name)): plain(value) for name, value in values.items()}
        line = self._line(step)
        if line == self._size or self._buffer["step"][line] != step:
            new = self._blank(1)
            new["step"], new["epoch"], new["lr"] = step, epoch, np.nan
            for name, total in zip((*BYTES, "wall_s", "time_s"), self._totals, strict=True):
                new[name] = total
            self._write(line, np.concatenate([new, self._buffer[line : self._size]]))
        self._extra += [name for name in clean if name not in COLUMNS and name not in self._extra]
        evaluated = self._evaluations.setdefault(step, {})
        acted = self._buffer["block"][line] >= 0 if node is None else node in self._losses(line, node)
        self._buffer["rows"][line] += node not in evaluated and not acted
        if node is None:  # values of the whole step are in all its rows
            for name in (*BYTES, "wall_s", "time_s"):
                if clean.get(name) is not None:
                    self._buffer[name][line] = clean.pop(name)
        evaluated.setdefault(node, {}).update(clean)

    @staticmethod
    def _blank(count: int) -> np.ndarray:
        lines = np.zeros(count, LINE)
        lines["block"], lines["train_loss"], lines["time_s"] = -1, np.nan, np.nan
        return lines

    def _write(self, start: int, lines: np.ndarray) -> None:
        """Replace all lines from index `start` on by `lines`."""
        self._size = start + len(lines)
        if self._size > len(self._buffer):
            larger = np.empty(max(64, 2 * self._size), LINE)
            larger[:start] = self._buffer[:start]
            self._buffer = larger
        self._buffer[start : self._size] = lines

    # Reading

    def _line(self, step: int) -> int:
        return bisect_left(self._buffer["step"], step, 0, self._size)

    def _losses(self, line: int, node: int | None = None) -> dict[int, float]:
        """Return the losses by node, for nodes that acted, or only for `node`."""
        block, position = int(self._buffer["block"][line]), int(self._buffer["position"][line])
        if block < 0:
            return {}
        ids, losses = self._blocks[block]
        here = losses[:, position]
        acted = ~np.isnan(here) if node is None else (ids == node) & ~np.isnan(here)
        return dict(zip(ids[acted].tolist(), here[acted].tolist(), strict=True))

    def _nodes(self, line: int, losses: Mapping[int, float]) -> list[int | None]:
        """Return the nodes with a row at this line: None first, then by id."""
        evaluated = self._evaluations.get(int(self._buffer["step"][line]), {})
        averaged = self._buffer["block"][line] >= 0 or None in evaluated
        nodes: list[int | None] = [None] if averaged else []
        return nodes + sorted(losses.keys() | {node for node in evaluated if node is not None})

    def _rows(self, line: int, nodes: slice | int | None) -> Iterator[Row]:
        """Yield a line's rows: a slice of them, or one node's row."""
        record = dict(zip(NAMES, self._buffer[line].item(), strict=True))
        given = {name: None if math.isnan(value) else value for name, value in record.items()}
        shared = dict.fromkeys(self.columns)
        shared |= {name: given[name] for name in ("step", *OF_THE_STEP) if name in shared}
        losses: dict[Any, Any] = {} if nodes is None else self._losses(line, nodes if isinstance(nodes, int) else None)
        evaluated = self._evaluations.get(record["step"], {})
        here = self._nodes(line, losses)
        for node in here[nodes] if isinstance(nodes, slice) else [nodes] if nodes in here else []:
            own = {"node": node, "train_loss": given["train_loss"] if node is None else losses.get(node)}
            yield shared | own | evaluated.get(node, {})

    def rows_after(self, step: int, node: int | Literal["all"] | None = "all") -> Iterator[Row]:
        """Yield the rows after `step`, one at a time. `node` chooses rows as in `rows`."""
        for line in range(self._line(step + 1), self._size):
            yield from self._rows(line, slice(None) if node == "all" else node)

    def __iter__(self) -> Iterator[Row]:
        return self.rows_after(-1)

    def __len__(self) -> int:
        return int(self._buffer["rows"][: self._size].sum())

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        ends = np.cumsum(self._buffer["rows"][: self._size])  # once, also for many rows
        found = range(len(self))[index]  # a range has a sequence's index rules, and raises IndexError
        return self._row(found, ends) if isinstance(found, int) else [self._row(at, ends) for at in found]

    def _row(self, at: int, ends: np.ndarray) -> Row:
        """Return the row with the number `at`, given the number of rows up to each line's end."""
        line = int(np.searchsorted(ends, at, side="right"))
        place = at - int(ends[line])  # counted from the end of the line's rows
        return next(self._rows(line, slice(place, place + 1 or None)))
