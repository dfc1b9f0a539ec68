"""Tags, a note and a title that a user gives a run, in a file of the run folder. They do not change the run.

notes.json   tags, note, title
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from exogym.errors import ArgumentError
from exogym.files import write_json
from exogym.record import read_object

NAME = "notes.json"
MOST_TAGS, LONGEST_TAG, LONGEST_NOTE, LONGEST_TITLE = 20, 40, 4000, 120


@dataclass(frozen=True)
class Notes:
    """A user's tags, note and title for a run.

    Args:
        tags: up to 20 tags, each up to 40 characters, without commas. They are sorted, and duplicates are removed.
        note: a text of up to 4,000 characters. It may have several lines.
        title: a line of up to 120 characters, which the page in the browser shows instead of the folder's name.

    Raises:
        ArgumentError: too many tags, too many characters, or characters that cannot be printed.

    >>> Notes(["slow", " baseline ", "slow"]).tags
    ('baseline', 'slow')
    """

    tags: Sequence[str] = ()
    note: str = ""
    title: str = ""

    def __post_init__(self) -> None:
        are_texts = isinstance(self.tags, list | tuple) and all(isinstance(tag, str) for tag in self.tags)
        if not are_texts:
            raise ArgumentError(f"tags={reprlib.repr(self.tags)} must be a list of texts")
        object.__setattr__(self, "tags", tuple(sorted({tag.strip() for tag in self.tags})))
        for tag in self.tags:
            if not tag or len(tag) > LONGEST_TAG or "," in tag or not tag.isprintable():
                raise ArgumentError(f"tag {tag[:60]!r} must be 1 to {LONGEST_TAG} printable characters without a comma")
        if len(self.tags) > MOST_TAGS:
            raise ArgumentError(f"tags has {len(self.tags)} tags: pass at most {MOST_TAGS}")
        text = self.note
        if not isinstance(text, str) or len(text) > LONGEST_NOTE or not text.replace("\n", "").isprintable():
            raise ArgumentError(f"note must be a text of printable lines, at most {LONGEST_NOTE} characters")
        line = self.title
        if not isinstance(line, str) or len(line) > LONGEST_TITLE or not line.isprintable():
            raise ArgumentError(f"title must be one printable line, at most {LONGEST_TITLE} characters")


def write_notes(folder: str | os.PathLike[str], notes: Notes) -> None:
    """Write a run's tags, note and title into the run folder. If all are empty, remove the file."""
    path = Path(folder) / NAME
    if notes == Notes():
        path.unlink(missing_ok=True)
        return
    write_json(path, asdict(notes))


def read_notes(folder: str | os.PathLike[str]) -> Notes:
    """Return a run's tags, note and title. All are empty if the file is missing or has invalid contents."""
    found: dict[str, Any] = read_object(Path(folder) / NAME)
    try:
        return Notes(found.get("tags", ()), found.get("note", ""), found.get("title", ""))
    except ArgumentError:
        return Notes()
