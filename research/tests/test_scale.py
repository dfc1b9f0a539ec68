"""The tables of docs/predictions.md that come from formulas."""

from exogym.strategy.registry import STRATEGIES
from research.scale import CORE, PAGE, with_tables


def test_the_page_has_the_tables():
    page = PAGE.read_text("utf-8")
    assert with_tables(page) == page, "rerun python -m research.scale"


def test_the_page_has_every_strategy_of_the_core():
    assert set(CORE) == {name for name, kind in STRATEGIES.items() if kind.__module__.startswith("exogym.strategy.")}
