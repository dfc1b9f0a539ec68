"""Tables of the atlas, made by hand."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from research.atlas import Table

PLACE = {"nodes": 4, "steps": 20, "trials": 2, "batch_size": 8, "parameters": 1000, "step_s": 0.01, "heading": "made"}


def made_table(path: Path, places: Mapping[str, Mapping[str, Sequence[Sequence[float | None]]]]) -> Table:
    """A table with each method's losses at steps 0, 10 and 20: a list for each seed."""
    table = Table(path)
    for place, methods in places.items():
        for method, seeds in methods.items():
            rows = [
                {
                    "place": place, "method": method, "kind": "tuned", "number": 0, "seed": seed, "options": {},
                    "strategy": method + (":H=10" if method == "diloco" else ""), "loss": losses[-1], "accuracy": None,
                    "tx_bytes": 10, "payload_bytes": 10, "steps": [0, 10, 20][: len(losses)], "losses": losses,
                }
                for seed, losses in enumerate(seeds, 1)
            ]  # fmt: skip
            table.put(PLACE, rows)
    return table


ABOUT = {"steps": 20, "trials": 1, "batch_size": 8, "parameters": 10, "heading": "a place", "step_s": 0.01}


def atlas_row(place: str, method: str, kind: str, seed: int, loss: float | None, sent: float = 100.0) -> dict[str, Any]:
    """A row of a table for a place that `ABOUT` describes, with the number of nodes beside it."""
    return {
        "place": place, "method": method, "kind": kind, "number": 0, "seed": seed, "options": {}, "strategy": method,
        "loss": loss, "accuracy": None, "tx_bytes": sent, "payload_bytes": sent, "wall_s": 1.0, "steps": [20],
        "losses": [loss],
    }  # fmt: skip
