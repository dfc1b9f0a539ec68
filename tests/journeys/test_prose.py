"""The check of prose finds each vice, and is silent about plain words and about code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from paths import ROOT

sys.path.append(str(ROOT / "docs" / "site"))  # no package: scripts of the pages

import prose


def vices(folder: Path, text: str, name: str = "page.md") -> list[tuple[int, str]]:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, "utf-8")
    return [(one.line, one.vice) for one in prose.complaints(file) if not one.is_note]


@pytest.mark.parametrize(
    ("text", "vice"),
    [
        ("Its bytes are those of the ring.", "pronoun without a noun"),
        ("Among the processes one that hangs is killed.", "pronoun without a noun"),
        ("The server averages what is sent.", "relative without a noun"),
        ("Steps begin once more. Who has no GPU takes the CPU.", "relative without a noun"),
        ("A page for who reads it.", "relative without a noun"),
        ("Each row has an optimizer of its own.", "possessive by 'of'"),
        ("A process of ours.", "possessive by 'of'"),
        ("The line is told.", "passive riddle"),
        ("The step is to be taken.", "passive riddle"),
        ("It costs nothing but its name.", "riddle"),
        ("Smaller differences are none.", "riddle"),
        ("It takes a PyTorch that is there.", "riddle"),
        ("The run can be gone on with.", "idiom"),
        ("The nodes\nfall behind, else they wait.", "idiom"),
        ("Nor does a checkpoint hold it.", "inverted"),
        ("Of a run on Ray no row stays here.", "inverted"),
        ("It lies therein.", "archaic"),
        ("The nodes' synchronisation.", "British spelling"),
        ("Neighbours have colours.", "British spelling"),
        ("It waits for ever.", "archaism"),  # proselint's
    ],
)
def test_a_vice_is_found(tmp_path: Path, text: str, vice: str) -> None:
    found = vices(tmp_path, f"# Title\n\n{text}\n")
    assert found and {name for _, name in found} == {vice}
    assert {line for line, _ in found} <= {3, 4}


@pytest.mark.parametrize(
    "text",
    [
        "The server averages. Each row has its own optimizer.",
        "What is a node?",
        "Who is absent? There are three nodes.",
        "If a node is absent, the others continue, or else they wait.",
        "Use `that of`, `synchronisation` and `what is`.",
        "```python\nwhat is = that of\n```",
        "$what is$ [text](that of)",
        "<!-- what is -->",
        "An option [as the paper's](strategies.md) is off.",
        "See [Decentralized methods](understand/decentralised.md).",
        "Precise behavior is synchronized otherwise; an exercise is advised.",
    ],
)
def test_plain_words_and_code_are_left_alone(tmp_path: Path, text: str) -> None:
    assert vices(tmp_path, text) == []


def test_lines_are_the_files(tmp_path: Path) -> None:
    page = "# What is new\n\n```\nwhat is\n```\n\n| a | b |\n| --- | --- |\n| x | what was |\n\n- one\n  what\n  is\n"
    assert vices(tmp_path, page) == [(n, "relative without a noun") for n in (1, 9, 12)]


SOURCE = '''"""Those of a module."""

import os  # those of a comment


def public(x: int) -> None:
    """Take those of the nodes.

    Args:
        x: what is sent

    >>> public("those of")
    """
    raise ValueError(
        f"no {x}: "
        "that of a node"
    )


def _private() -> None:
    """Those of nobody."""
    print("those of")
    print(f"{1} of two, " f"those of node {2}")


OPTION = dict(help="Take those of all.", other="those of")
'''


def test_python_shows_docstrings_messages_and_help(tmp_path: Path) -> None:
    assert sorted({line for line, _ in vices(tmp_path, SOURCE, "module.py")}) == [1, 7, 10, 15, 23, 26]


def test_a_tutorial_shows_cells_and_comments(tmp_path: Path) -> None:
    script = "# %% [markdown]\n# That of a node.\n\n# %%\nx = 'that of'\n# what is sent\n"
    assert [line for line, _ in vices(tmp_path, script, "tutorials/x.py")] == [2, 6]


def test_the_browser_shows_strings_and_texts(tmp_path: Path) -> None:
    script = (
        '// "those of a comment here"\nx = `those of ${node} and more`; y = "those of";\n<p>all those of a node</p>\n'
    )
    assert [line for line, _ in vices(tmp_path, script, "page.js")] == [2, 3]


def test_a_long_sentence_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("Short words. One " + "word " * 35 + "end.\n", "utf-8")
    assert [(one.is_note, one.line) for one in prose.complaints(page)] == [(True, 1)]
    assert prose.main([str(page)]) == 0 and "37 words" in capsys.readouterr().out
    page.write_text("word " * 34 + "end.\n", "utf-8")
    assert [*prose.complaints(page)] == []


def test_listed_files_are_left_out_until_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good, listing = tmp_path / "bad.md", tmp_path / "good.md", tmp_path / "unread.txt"
    bad.write_text("That of a node.\n", "utf-8")
    good.write_text("A node's bytes.\n", "utf-8")
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "UNREAD", listing)
    listing.write_text("# why\nbad.md\ngood.md\n", "utf-8")
    assert prose.main([]) == 0
    assert prose.main([str(bad)]) == 1 and 'bad.md:1: pronoun without a noun: "That of"' in capsys.readouterr().out
    assert prose.main(["--prune"]) == 0 and listing.read_text("utf-8") == "# why\nbad.md\n"
    listing.write_text("# why\n", "utf-8")
    assert prose.main([]) == 1


def test_the_list_names_files_of_ours() -> None:
    assert {ROOT / line for line in prose.unread()} <= {*prose.files()}


def test_measuring_prints_a_line_for_each_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main(["--measure", str(ROOT / "docs" / "glossary.md")]) == 0
    assert "docs/glossary.md" in capsys.readouterr().out
