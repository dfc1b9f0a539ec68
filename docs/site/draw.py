"""Draw pages, docstrings and messages by lot, for a person who reads them and marks what must be read twice.

python docs/site/draw.py SEED                   # ten pages' names, then fifty docstrings and messages
python docs/site/draw.py SEED --root CHECKOUT   # of another checkout
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

GENERATED = ("docs/api/", "docs/decisions/", "docs/reference/strategies.md")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of the public docstrings, without their examples."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node)
            if text and not getattr(node, "name", "").startswith("_"):
                yield node.body[0].lineno, text.partition("\n>>>")[0]


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of the exceptions' messages; what they put in stands in braces."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = ast.unparse(node.exc.args[0])
            if len(re.findall(r"[a-z]{2,}", text)) > 4 and isinstance(node.exc.args[0], ast.Constant | ast.JoinedStr):
                yield node.lineno, text


def draw(seed: int, root: Path) -> Iterator[str]:
    """Yield ten pages, then forty docstrings and ten messages: the same for the same seed and checkout."""
    lot = random.Random(seed)
    pages = [file.relative_to(root).as_posix() for file in [root / "README.md", *(root / "docs").rglob("*.md")]]
    yield from lot.sample(sorted(page for page in pages if not page.startswith(GENERATED)), 10)
    trees = {file: ast.parse(file.read_text("utf-8")) for file in sorted((root / "exogym").rglob("*.py"))}
    for kind, count in ((docstrings, 40), (messages, 10)):
        found = [(file, line, text) for file, tree in trees.items() for line, text in kind(tree)]
        for file, line, text in lot.sample(found, count):
            yield f"\n--- {file.relative_to(root).as_posix()}:{line}\n{text}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw texts by lot for a reader.")
    parser.add_argument("seed", type=int)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[2])
    given = parser.parse_args()
    print("\n".join(draw(given.seed, given.root.resolve())))
