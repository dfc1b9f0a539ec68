"""The project's own fixtures, for the tests of its studies; and no picture is drawn where it takes longest."""

import pytest
from conftest import same_random_state, short_trials

__all__ = ["same_random_state", "short_trials"]


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are empty files: drawing takes as long as training."""
    for room in ("atlas", "benchmark"):
        monkeypatch.setattr(f"research.{room}.plots.save_small", lambda figure, path, *rest: path.touch())
