"""Write llms.txt, the list of the pages for a reader that is a program, from docs/index.md.

    python docs/site/llms.py

llmstxt.org defines the format: a title, a summary, and lists of links. `make docs` writes it, into the site too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = ROOT / "docs" / "index.md"
ENTRY = re.compile(r"^ *- \[([^\]]+)\]\(([^)\s#]+)\)(.*)$", re.M)
SCOPE = (
    "You write a strategy once, for one node or for rows of the matrix of all nodes. ExoGym downloads nothing while"
    " it runs. With the same seed, results are bitwise identical in one process, in several, after a resume, and on"
    " real machines."
)


def llms(address: Callable[[Path], str]) -> str:
    """Return the text of llms.txt, with the pages at those addresses."""
    top, *sections = re.split(r"^## ", HOME.read_text("utf-8"), flags=re.M)
    title, summary, _, lead, code = top.split("\n\n", 4)
    code = code[: code.rindex("```") + 3]
    parts = [title, f"> {' '.join(summary.split())}", SCOPE, lead, code]
    for section in sections:
        caption, _, body = section.partition("\n")
        entries = [
            f"- [{name}]({address((HOME.parent / to).resolve())}){said}" for name, to, said in ENTRY.findall(body)
        ]
        parts += ["\n".join([f"## {caption}", "", *entries])] if entries else []
    return "\n\n".join(parts) + "\n"


def in_the_clone(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


if __name__ == "__main__":
    (ROOT / "llms.txt").write_text(llms(in_the_clone), "utf-8")
