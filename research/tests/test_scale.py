"""The tables of docs/predictions.md and research/results/measured.md that come from formulas."""

from exogym.strategy.registry import STRATEGIES
from research.scale import CORE, SHOWN, pages, sizes_table


def test_the_pages_have_the_tables():
    for page, text in pages().items():
        assert page.read_text("utf-8") == text, "rerun python -m research.scale"
        assert sizes_table(SHOWN)[0] in text  # the control: the page has a table


def test_the_table_has_every_strategy_of_the_core():
    assert set(CORE) == {name for name, kind in STRATEGIES.items() if kind.__module__.startswith("exogym.strategy.")}
    assert set(SHOWN) <= set(CORE)
