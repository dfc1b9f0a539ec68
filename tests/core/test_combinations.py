"""One table of what cannot be combined."""

from pathlib import Path

import pytest

from exogym.core import refusals
from exogym.core.combinations import check, refuse
from exogym.core.refusals import NAMES, REFUSED
from exogym.core.training.options import FitOptions
from exogym.errors import ArgumentError
from exogym.strategy import DiLoCoStrategy


def test_the_table_names_each_pair_once_and_known_features_only() -> None:
    pairs = [frozenset(pair) for row in REFUSED for pair in row.pairs]
    assert len(set(pairs)) == len(pairs) and all(len(pair) == 2 for pair in pairs)
    assert all(row.reason and row.instead for row in REFUSED)
    assert len(REFUSED) <= 53, "a new row retires one: docs/promises.md"


def test_each_feature_in_the_table_is_one_that_a_run_can_have() -> None:
    """A name is an option of `fit`, missing or with a text, or stands in the code that finds it out."""
    values = FitOptions(DiLoCoStrategy()).values()
    table = Path(refusals.__file__)
    code = "".join(path.read_text("utf-8") for path in table.parents[1].rglob("*.py") if path != table)
    for name in NAMES:
        option = name.removeprefix("no ").partition("=")[0]
        assert option in values or repr(name) in code or f'"{name}"' in code or f"{name}=" in code, name


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row.one} with {row.other}")
def test_a_pair_says_what_was_given_why_and_what_to_do(row) -> None:
    for one, other in row.pairs:
        for alone in (one, other):
            check({alone: "first"})
        with pytest.raises(ArgumentError) as raised:
            check({other: "second", "other": "third", one: "first"})
        assert str(raised.value) == f"first with second: {row.reason}; {row.instead}"


def test_a_feature_that_is_left_out_is_needed() -> None:
    with pytest.raises(ArgumentError, match=r"^timeline=True needs network: .*; pass network"):
        check({"timeline": "timeline=True", "no network": "no network"})
    with pytest.raises(AssertionError, match="no row refuses"):
        refuse({"timeline": "timeline=True"})
