"""Predictions of published losses from the other publications."""

from pathlib import Path

from research.left_out import errors, table

PAGE = Path(__file__).parents[2] / "docs" / "predictions.md"


def test_the_page_has_the_table():
    assert table(errors()) in PAGE.read_text("utf-8")


def test_left_out_means_left_out(monkeypatch):
    """With a wrong number in one publication, the predictions of that publication's cells stay."""
    import dataclasses

    import research.left_out as module
    from exogym.study.advise import published

    before = {cell: error for cell, error in errors() if cell.source == "2501.18512"}
    changed = tuple(
        dataclasses.replace(c, loss_ratio=2.0) if c.source == "2501.18512" else c for c in published.cells()
    )
    monkeypatch.setattr(published, "cells", lambda: changed)
    monkeypatch.setattr(module, "cells", lambda: tuple(before))
    assert {cell: error for cell, error in errors()} == before
