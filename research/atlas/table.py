"""The atlas's results: a row for each run, in a JSON file to which others can add theirs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from exogym.core.base.files import write_json
from exogym.core.record.run_folder import versions
from exogym.errors import ArgumentError
from research.atlas.tuning import best_of, without
from research.benchmark.results import short
from research.reproduce.claim import Run

KEY = ("place", "method", "kind", "number", "seed")
SAME = ("options", "loss")  # what two rows of the same run have in common
NUMBERS = ("loss", "accuracy", "tx_bytes", "payload_bytes")
TYPES: dict[str, Any] = {  # of a row's values
    "place": str, "method": str, "strategy": str, "number": int, "seed": int, "options": dict,
    **dict.fromkeys(NUMBERS, float | int | None),
}  # fmt: skip
SETTINGS = ("nodes", "steps", "trials", "batch_size", "parameters")  # of a place; they must agree
DATA = ("task", "skew")  # the same, but an older file may lack them
TRIAL_SEEDS, SEEDS = (0,), (1, 2, 3)
FRESH = (4, 5, 6, 7, 8)  # seeds that chose nothing, to confirm findings
RATES = ("low rate", "high rate")  # kinds: the best trial's settings with one of two given inner rates
SEEDS_OF = {
    "trial": TRIAL_SEEDS, **dict.fromkeys(("tuned", "default", *RATES), SEEDS),
    **dict.fromkeys(("tuned again", "default again"), FRESH),
}  # fmt: skip
Row = dict[str, Any]


class Table:
    """All runs of the atlas.

    A row has the keys place, method, kind, number, seed, options, strategy, loss, accuracy, tx_bytes and wall_s. Its
    kind is "trial" (loss on validation data), or "tuned", "default" or one of `RATES` (loss on test data, with the keys
    steps and losses of its evaluations). A loss that is not finite is None.

    Args:
        path: the JSON file. If it exists, the table has its rows.

    Raises:
        ArgumentError: the file cannot be read, or is no table of the atlas.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.places: dict[str, dict[str, Any]] = {}
        self.left_out: dict[str, str] = {}
        self._rows: dict[tuple[Any, ...], Row] = {}
        if self.path.exists():
            self.add(self.path)

    @property
    def rows(self) -> list[Row]:
        """All rows, sorted by place, method, kind, number and seed."""
        return [self._rows[key] for key in sorted(self._rows)]

    def put(self, place: Mapping[str, Any], rows: Iterable[Row]) -> None:
        """Add the rows of a place.

        Raises:
            ArgumentError: a row of the same run has another loss or other options, or the place has other settings.
        """
        for row in rows:
            self.check(row["place"], place)
            key = tuple(row[name] for name in KEY)
            plain = short(row)
            before = self._rows.get(key)
            if before is not None and any(before[name] != plain[name] for name in SAME):
                raise ArgumentError(
                    f"two results of {row['place']}, {row['method']}, {row['kind']} {row['number']}, seed "
                    f"{row['seed']} differ: {[before[name] for name in SAME]} and {[plain[name] for name in SAME]}. "
                    "Keep one of the two files"
                )
            self._rows.setdefault(key, plain)
            known = self.places.setdefault(row["place"], short(dict(place)))
            known |= {name: value for name, value in short(dict(place)).items() if name not in known}
            self.places = dict(sorted(self.places.items()))
            self.left_out.pop(f"{row['place']}, {row['method']}", None)

    def check(self, name: str, place: Mapping[str, Any]) -> None:
        """Check that results of a place can stand in this table.

        Raises:
            ArgumentError: the table has the place with other settings.
        """
        place = short(dict(place))
        known = self.places.get(name, place)
        both = [name for name in DATA if None not in (known.get(name), place.get(name))]
        for setting in (*SETTINGS, *both):
            if known[setting] != place[setting]:
                raise ArgumentError(
                    f"results of {name} have {setting}={known[setting]} and {setting}={place[setting]}: only results "
                    f"with the same budget and data can be compared. {self.path} has the first"
                )

    def add(self, path: Path | str) -> int:
        """Add the rows of another file. Return how many rows are new.

        Raises:
            ArgumentError: the file cannot be read, is no table of the atlas, or contradicts this table.
        """
        before = len(self._rows)
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            places, rows = dict(found["places"]), [dict(row) for row in found["rows"]]
            for place in places.values():
                whole = all(isinstance(place[name], int) for name in SETTINGS)
                if not whole or not isinstance(place["heading"], str) or not isinstance(place["step_s"], float):
                    raise ValueError(f"the place {place} has a wrong value")
                if sum(map(math.prod, place.get("shapes", [[place["parameters"]]]))) != place["parameters"]:
                    raise ValueError(f"the shapes of a place do not add up to its {place['parameters']} parameters")
            groups = {name: [row for row in rows if row["place"] == name] for name in places}
            if len(rows) != sum(map(len, groups.values())):
                raise ValueError("a row's place is not described")
            for row in rows:
                _check_row(row, places[row["place"]]["trials"])
            _check_choices([*self._rows.values(), *rows], places | self.places)
            left_out = dict(found.get("left_out", {}))
        except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise ArgumentError(f"{path} is no table of research benchmark --trials ({error})") from error
        self.left_out |= left_out
        for name, each in groups.items():
            self.put(places[name], each)
        return len(self._rows) - before

    def write(self) -> None:
        """Write the file. Rows that another process has written there meanwhile remain."""
        if self.path.exists():
            self.add(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        found = {"places": self.places, "left_out": dict(sorted(self.left_out.items()))}
        write_json(self.path, found | {"versions": versions(), "rows": self.rows}, indent=None)


def run_of(row: Row) -> Run:
    """Return a row's run. The loss of a failed run is infinite, and numbers that the row lacks are NaN."""
    loss = math.inf if row["loss"] is None else row["loss"]
    others = {"val_accuracy": "accuracy", "tx_bytes": "tx_bytes", "payload_bytes": "payload_bytes", "wall_s": "wall_s"}
    found = {name: row.get(column) for name, column in others.items()}
    last = {name: math.nan if value is None else value for name, value in found.items()}
    curves = {"step": row.get("steps", []), "val_loss": row.get("losses", []), **row.get("curves", {})}
    return Run(row["seed"], {"val_loss": loss, **last}, curves, row.get("error"))


def _check_row(row: Row, trials: int) -> None:
    """Check a row from a file.

    Args:
        trials: the number of trials at the row's place.

    Raises:
        ValueError, KeyError, TypeError: the row lacks a value, or a value is of the wrong kind or not possible.
    """
    wrong = [name for name, kind in TYPES.items() if not isinstance(row[name], kind)]
    wrong += [name for name in NUMBERS if name not in wrong and not math.isfinite(row[name] or 0)]
    if row["kind"] not in SEEDS_OF or wrong:
        raise ValueError(f"the row {row} has a wrong {', '.join(wrong) or 'kind'}")
    if row["seed"] not in SEEDS_OF[row["kind"]] or not 0 <= row["number"] < (trials if row["kind"] == "trial" else 1):
        raise ValueError(f"the row {row} has a seed or a number that no run of {trials} trials has")
    if not all(isinstance(value, str) for value in row["options"].values()):
        raise ValueError(f"the row {row} has an option that is no text")
    rate = float(row["options"]["lr"] if row["kind"] in RATES else row["options"].get("lr", "1"))
    if not 0 < rate < math.inf:
        raise ValueError(f"the row {row} has a rate that is not above 0, or not finite")
    if row["kind"] != "trial" and not all(isinstance(row[name], list) for name in ("steps", "losses")):
        raise ValueError(f"the row {row} has no evaluations")


def _check_choices(rows: Sequence[Row], places: Mapping[str, Any]) -> None:
    """Check that rows have the best trial's settings, or these with another inner rate, where all trials are there.

    Raises:
        ValueError: a row has other settings.
    """
    trials: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["number"]):
        if row["kind"] == "trial":
            trials.setdefault((row["place"], row["method"]), []).append(row)
    for row in rows:
        tried = trials.get((row["place"], row["method"]), ())
        if (
            row["kind"] in ("tuned", *RATES)
            and len({each["number"] for each in tried}) == places[row["place"]]["trials"]
        ):
            losses = [(each["options"], math.inf if each["loss"] is None else each["loss"]) for each in tried]
            free = {"lr"} if row["kind"] in RATES else set()
            if without(row["options"], free) != without(best_of(losses), free):
                raise ValueError(f"{row['method']} at {row['place']} has other settings than its best trial")
