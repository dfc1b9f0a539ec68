"""founding.md, beside this file, has each chapter of the founding documents and names the page that answers it."""

import hashlib
import re
from pathlib import Path

import pytest
from paths import ROOT

PAGE = Path(__file__).with_name("founding.md")
# Of each document, in the page's order: how many chapters it has, and the SHA-256 of their headings below the title,
# sorted, without what is not ASCII and without marks of emphasis. None has been left out or made to fit.
DOCUMENTS = {
    "The framework": (62, "5d712d2db302c774"),
    "The plan for several Macs": (34, "d1b6471e145b1006"),
    "The technical documentation": (21, "13ae8ff85d4e6919"),
    "What was planned elsewhere": (20, "12947d74a470d8c0"),
    "The guide to distributed training": (46, "3b2dc2cf62921264"),
}


def rows(document: str) -> list[list[str]]:
    """Return the cells of the rows of a document's table."""
    section = PAGE.read_text("utf-8").split(f"\n## {document}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines[2:]]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_chapter_has_its_place(document: str) -> None:
    chapters = sorted(heading for row in rows(document) for heading in row[0].split(" · "))
    digest = hashlib.sha256("\n".join(chapters).encode()).hexdigest()
    assert (len(chapters), digest[:16]) == DOCUMENTS[document]
    assert all(len(row) == 3 and re.match(r"\[[^\]]+\]\([^)]+\)", row[1]) for row in rows(document))


def test_every_link_leads_to_a_page() -> None:
    targets = {target for target in re.findall(r"\]\(([^)\s#]+)", PAGE.read_text("utf-8")) if "://" not in target}
    assert len(targets) > 20 and [target for target in targets if not (PAGE.parent / target).exists()] == []


def test_what_is_not_planned_is_said() -> None:
    said = (ROOT / "docs" / "decisions" / "025-not-planned.md").read_text("utf-8")
    assert {"New accelerators", "Work for one architecture", "MPI without a library"} <= {
        *re.findall(r"^- \*\*(.+?)\.\*\*", said, re.M)
    }
