"""Ten methods of the atlas at two inner rates that they share, with their other options as tuned.

Methods with different ranges try different inner rates. So a tuned method may be better because of its inner rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from research.atlas.measures import Ranks, Result, comparable, ranks_of
from research.atlas.places import KINDS, TEN, Place, studies_of
from research.atlas.table import RATES, Table
from research.atlas.training import Study
from research.atlas.tuning import INNER_RATES
from research.reproduce.problems import problem

METHODS = TEN


def studies_at_rates(table: Table, place: str) -> list[Study]:
    """Return the studies of `METHODS` that a table has with all trials at a place, each with two rates.

    There are none if DDP or all others are missing, or if no rates are given for the task's inner optimizer.

    Raises:
        DataError: the place's data were not found.
    """
    about, (kind, _, _) = table.places[place], place.rpartition("-")
    tried = [row["method"] for row in table.rows if (row["place"], row["kind"]) == (place, "trial")]
    methods = [method for method in METHODS if tried.count(method) == about["trials"]]
    rates = INNER_RATES.get(problem(KINDS[kind].task)[0].inner_optim)
    if rates is None or "ddp" not in methods or len(methods) < 2:
        return []
    return [replace(each, rates=rates) for each in studies_of([Place(kind, about["nodes"])], methods, about["steps"])]


def places_at_rates(places: Mapping[str, Sequence[Result]]) -> dict[str, list[Result]]:
    """Return the places at which `METHODS` are trained at both rates, with their results.

    A place counts if it has DDP and another of these methods, and if none of them lacks a run.
    """
    found = {place: [r for r in each if r.method in METHODS] for place, each in comparable(places).items()}
    whole = {place: all(r.at_rates.keys() == {*RATES} for r in each) for place, each in found.items()}
    return {place: each for place, each in found.items() if whole[place] and len(each) > 1}


def ranks_at_rates(places: Mapping[str, Sequence[Result]]) -> dict[str, Ranks]:
    """Return a dict from "low rate" and "high rate" to the ranks over `places_at_rates`.

    It is empty if these places have fewer than two methods in common.
    """
    shown = places_at_rates(places)
    found = {
        kind: ranks_of({place: [replace(r, losses=r.at_rates[kind]) for r in each] for place, each in shown.items()})
        for kind in RATES
    }
    return {kind: ranks for kind, ranks in found.items() if ranks is not None}
