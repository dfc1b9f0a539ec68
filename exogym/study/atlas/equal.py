"""Ten methods of the atlas at two inner rates that they share, with their other options as tuned.

Methods with different ranges try different inner rates. So a tuned method may be better because of its inner rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from exogym.study.atlas.measures import Ranks, Result, ranks_of
from exogym.study.atlas.places import KINDS, TEN, Place, studies_of
from exogym.study.atlas.table import RATES, Table
from exogym.study.atlas.training import Study
from exogym.study.atlas.tuning import INNER_RATES
from exogym.study.reproduce.problems import problem

METHODS = TEN


def studies_at_rates(table: Table) -> list[Study]:
    """Return the studies of `METHODS` that a table has with tuned settings, at places with DDP, each with two rates.

    A place whose task has an inner optimizer without given rates is left out.
    """
    tuned = {(row["place"], row["method"]) for row in table.rows if row["kind"] == "tuned"}
    found = []
    for name, about in table.places.items():
        kind, _, nodes = name.rpartition("-")
        rates = INNER_RATES.get(problem(KINDS[kind].task)[0].inner_optim)
        methods = [method for method in METHODS if (name, method) in tuned]
        if rates and "ddp" in methods:
            found += [
                replace(each, rates=rates) for each in studies_of([Place(kind, int(nodes))], methods, about["steps"])
            ]
    return found


def places_at_rates(places: Mapping[str, Sequence[Result]]) -> dict[str, list[Result]]:
    """Return the places at which DDP and another method have their runs at both rates, with these methods' results."""
    found = {place: [r for r in results if r.at_rates.keys() == {*RATES}] for place, results in places.items()}
    return {place: each for place, each in found.items() if len(each) > 1 and any(r.method == "ddp" for r in each)}


def ranks_at_rates(places: Mapping[str, Sequence[Result]]) -> dict[str, Ranks]:
    """Return a dict from "low rate" and "high rate" to the ranks over `places_at_rates`, or {} without such places."""
    found = {}
    for kind in RATES:
        ranks = ranks_of({
            place: [replace(result, losses=result.at_rates[kind]) for result in results]
            for place, results in places_at_rates(places).items()
        })  # fmt: skip
        if ranks is not None:
            found[kind] = ranks
    return found
