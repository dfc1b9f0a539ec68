"""The public names: none goes without a line in the changelog, and none comes unnoticed.

python tests/laws/test_stability.py    writes the list anew
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("public_names.txt")
MAY_CHANGE = ("exogym.contrib", "exogym.home", "exogym.mesh", "exogym.clusters", "exogym.cli", "exogym.ui")

sys.path.append(str(ROOT / "docs" / "site"))

import reference  # noqa: E402

from exogym.core.base.retired import RETIRED  # noqa: E402


def public_names() -> list[str]:
    """Return the stable public names, those on the API's pages outside contrib and the wings."""
    pages = reference.packages_on_pages().items()
    return sorted(
        f"{package}.{name}" for package, names in pages if not package.startswith(MAY_CHANGE) for name in names
    )


def untold(gone: set[str], changelog: str) -> list[str]:
    """Return the names that the changelog does not have."""
    return sorted(name for name in gone if not re.search(rf"\b{re.escape(name.rpartition('.')[2])}\b", changelog))


def test_a_public_name_goes_only_with_a_line_in_the_changelog() -> None:
    listed, now = set(LIST.read_text("utf-8").split()), set(public_names())
    assert untold(listed - now, (ROOT / "CHANGELOG.md").read_text("utf-8")) == []
    assert sorted(now ^ listed) == [], "write the list anew: python tests/laws/test_stability.py"


def test_every_retired_name_is_told() -> None:
    pages = ("CHANGELOG.md", "docs/coming_from_gym.md")
    assert untold(set(RETIRED), "".join((ROOT / page).read_text("utf-8") for page in pages)) == []


def test_a_name_that_went_silently_is_found() -> None:
    assert untold({"exogym.strategy.Gone", "exogym.runs.load"}, "`runs.load` takes sweeps") == ["exogym.strategy.Gone"]


if __name__ == "__main__":
    LIST.write_text("\n".join(public_names()) + "\n", "utf-8")
