"""The steps of earlier runs that ExoGym ships. Run this file to write them anew from the tables in docs."""

import json
import math
from pathlib import Path

from exogym.study.advise.beliefs import KNOWN
from research.atlas.steps import steps_of
from research.atlas.table import Table

TABLES = [Path(__file__).with_name("results") / name for name in ("atlas.json", "judge.json")]


def text() -> str:
    """Return the file's text: a place per line, with its skew and each method's steps to DDP's loss halfway."""
    lines, tables = [], [Table(file) for file in TABLES]
    about = {place: each for table in tables for place, each in table.places.items()}
    places = {place: steps for table in tables for place, steps in steps_of(table).items()}
    for place, each in sorted(places.items()):
        steps = {method: round(s, 1) if math.isfinite(s) else None for method, s in sorted(each.items())}
        skew = about[place].get("skew")
        line = {"skew": None if skew is None else round(skew, 3), "steps": steps}
        lines.append(f"{json.dumps(place)}: {json.dumps(line)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    KNOWN.write_text(text(), "utf-8")
