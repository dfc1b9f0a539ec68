"""Studies use the package as users do: by its public names, and by the few others that are listed here."""

import ast
from pathlib import Path

from paths import ROOT

# Modules of the package that docs/api does not list. The set may only shrink.
BORROWED = {
    "exogym.cli.values",
    *("exogym.core.base", "exogym.core.base.rng", "exogym.core.base.files", "exogym.core.base.lazy"),
    *("exogym.core.clock", "exogym.core.compress", "exogym.core.fleet", "exogym.core.progress"),
    *("exogym.core.record.history", "exogym.core.record.run_folder"),
    *("exogym.data.partition", "exogym.home.speech.synthetic"),
    *("exogym.strategy.registry", "exogym.strategy.strategy", "exogym.strategy.traffic", "exogym.strategy.optim"),
    *("exogym.strategy.communicate_optimize", "exogym.strategy.demo"),
    *("exogym.study.advise.beliefs", "exogym.study.advise.plans"),
    *("exogym.study.compare.asked", "exogym.study.compare.colors", "exogym.study.compare.comparison"),
    *("exogym.study.compare.entries", "exogym.study.compare.folder", "exogym.study.compare.forecast"),
    *("exogym.study.compare.run", "exogym.study.compare.session"),
    "exogym.study.compare.summary",
    *("exogym.study.sweep.axes", "exogym.study.sweep.search"),
}
PUBLIC = {
    *("exogym", "exogym.advise", "exogym.callbacks", "exogym.data", "exogym.errors", "exogym.models", "exogym.network"),
    *("exogym.strategy", "exogym.tasks", "exogym.trainer"),
    *("exogym.study.advise", "exogym.study.cells", "exogym.study.tasks"),
}
ALONE = {"advised.py", "claims_by_hand.py"}  # programs that measure the inside


def imported(path: Path) -> set[str]:
    """The modules of the package that a file imports."""
    found = ast.walk(ast.parse(path.read_text()))
    return {n.module for n in found if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("exogym")}


def test_the_studies_borrow_only_what_is_listed(tmp_path: Path) -> None:
    files = [p for p in (ROOT / "research").rglob("*.py") if "tests" not in p.parts and p.name not in ALONE]
    used = set().union(*map(imported, files))
    assert used - PUBLIC - BORROWED == set(), "use a public name"
    assert BORROWED - used == set(), "no longer borrowed: shorten the list"
    (tmp_path / "study.py").write_text("from exogym.core.fleet import Fleet\nfrom exogym import LocalTrainer\n")
    assert imported(tmp_path / "study.py") - PUBLIC == {"exogym.core.fleet"}  # the control
