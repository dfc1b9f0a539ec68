"""One table of what cannot be combined."""

import re

import pytest

from exogym.core.combinations import check, refuse
from exogym.core.refusals import PROPERTIES, REFUSED, UNTRIED
from exogym.errors import ArgumentError

LIKE_AN_OPTION = re.compile(r'(no )?\w+|\w+="\w+"')


def test_the_table_names_each_pair_once_and_known_features_only() -> None:
    pairs = [frozenset(pair) for row in REFUSED for pair in row.pairs]
    assert len(set(pairs)) == len(pairs) and all(len(pair) == 2 for pair in pairs)
    others = {name for name in set().union(*pairs, UNTRIED) if not LIKE_AN_OPTION.fullmatch(name)}
    assert others <= PROPERTIES.keys() <= set().union(*pairs)
    assert all(row.reason and row.instead for row in REFUSED)
    assert len(REFUSED) <= 63, "a new row retires one: docs/promises.md"


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: f"{row.one} with {row.other}")
def test_a_pair_says_what_was_given_why_and_what_to_do(row) -> None:
    for one, other in row.pairs:
        for alone in (one, other):
            check({alone: "first"})
        with pytest.raises(ArgumentError) as raised:
            check({other: "second", "other": "third", one: "first"})
        assert str(raised.value) == f"first with second: {row.reason}; {row.instead}"


def test_a_feature_that_is_left_out_is_needed() -> None:
    with pytest.raises(ArgumentError, match=r"^timeline=True needs network: .*; give network"):
        check({"timeline": "timeline=True", "no network": "no network"})
    with pytest.raises(AssertionError, match="no row refuses"):
        refuse({"timeline": "timeline=True"})
