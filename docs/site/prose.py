"""Check the words that users read: pages, tutorials, public docstrings, messages, help, the page in the browser.

    python docs/site/prose.py                  # all files but those in unread.txt; `make lint` runs this
    python docs/site/prose.py docs/runs.md     # these files, with notes on long sentences
    python docs/site/prose.py --measure        # words, sentence length and readability of each page; never fails
    python docs/site/prose.py --prune          # take files without complaints off unread.txt

A complaint is one line, `file:line: vice: "words": suggestion`. Complaints make the exit status 1; notes do not.

Files that nobody has rewritten yet stand in `docs/site/unread.txt`. Take your file off that list when you land it
(`--prune` does it). Never add a file. If a complaint is wrong, put the words into backticks (code), reword, or narrow
the pattern in `VICES` here.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
UNREAD = Path(__file__).with_name("unread.txt")
LONG = 35  # words in a sentence
SKIPPED = ("CHANGELOG.md",)  # a history
UNCOUNTED = (  # not in the total of `--measure`
    *SKIPPED, "benchmarks/", "docs/decisions", "docs/reference/strategies.md",
)  # fmt: skip

# (vice, pattern, suggestion). Patterns see a paragraph as one line, with every piece of code replaced by "code".
VICES = [
    ("pronoun without a noun", r"\b(?:that|those) of\b(?! (?:these|those)\b)", "repeat the noun, or use an apostrophe"),
    ("pronoun without a noun", r"\bones? (?:that|which|who)\b", "name the thing"),
    ("pronoun without a noun", r"\b(?:which|who|whose) is that\b", "name the thing"),
    ("relative without a noun", r"\bwhat (?:is|are|was|were|has|have|had|lies|stands|remains)\b(?!.*\?)",
     "name the thing: 'the files that ...'"),
    ("relative without a noun", r"(?:^|[.;:] )Who (?:has|is|wants|needs|knows|reads|runs|trains|asks)\b(?!.*\?)",
     "'If you ...', or name the person"),
    ("relative without a noun", r"\b(?:for|by|from|tells?|asks?|and) who (?:has|is|are|wants?|needs?|reads?|runs?)\b",
     "'for readers who ...', or 'you'"),
    ("relative without a noun", r"\b(?:by|from|of|to|with) what\b(?! (?:order|extent|degree)\b)(?!.*\?)",
     "name the thing"),
    ("relative without a noun", r"\bwhoever\b", "'anybody who', or name the actor"),
    ("possessive by 'of'", r"\bof (?:its|their|your|his|her|one's) own\b", "'its own X' instead of 'an X of its own'"),
    ("possessive by 'of'", r"\bof (?:ours|theirs|hers|yours)\b", "'our X', 'their X'"),
    ("passive riddle", r"\b(?:is|are|was|were|be|been|being) told\b", "say who tells whom: 'the log shows ...'"),
    ("passive riddle", r"\b(?:is|are|was|were) to be\b", "'must be', 'will be', or an active verb"),
    ("riddle", r"\b(?:costs?|is|are|has|have|needs?) nothing but\b", "say what it costs or is: 'only'"),
    ("riddle", r"(?<!there )\b(?:is|are) (?-i:none)\b(?! of\b)", "say it positively: 'ignore ...', 'no ...'"),
    ("riddle", r"\b(?:is|are|was|were) (?:not )?there\b(?! (?:a|an|any|no|is|are|was|were)\b)(?!.*\?)",
     "'exists', 'is installed', 'takes part'"),
    ("riddle", r"\bleft a word\b", "say it plainly"),
    ("inverted", r"^(?:So|Nor|Neither) (?:is|are|was|were|do|does|did|has|have|can|may) ", "start with the actor"),
    ("inverted", r"^(?-i:Of) (?!course\b)", "start with the actor, or 'Among'"),
    ("idiom", r"\b(?:go|goes|going|gone|went) on with\b", "'continue', 'resume'"),
    ("idiom", r"\bin silence\b", "'silently', 'without a message'"),
    ("idiom", r"\band the like\b", "name the others, or 'and similar'"),
    ("idiom", r"\bbut for\b", "'except'"),
    ("idiom", r"(?:^|[.,;:] )[Ee]lse,? (?!if\b)", "'otherwise'"),
    ("idiom", r"\b(?:the former|the latter|respectively)\b", "repeat the nouns"),
    ("archaic", r"\b(?:shall|hence|thereby|therein|thereof|whereby|wherein|whilst|amongst|lest|upon)\b",
     "'must', 'so', 'in it', 'while', 'on'"),
]  # fmt: skip

STEMS = (
    "central|character|decentral|final|general|initial|local|material|maxim|minim|modular|normal|optim|organ|parallel"
    "|personal|priorit|quant|random|real|recogn|regular|serial|special|stabil|standard|summar|synchron|util|vector|visual"
)
BRITISH = {
    rf"(?:un|de|re|non-?)?(?:{STEMS})is(?:e|es|ed|ing|er|ers|ation|ations|able)": "-ize",
    r"(?:analys|catalys|paralys)(?:e|ed|ing|er|ers)": "-yze",
    r"(?:behavi|col|fav|hon|lab|neighb|harb|hum|arm|rum|vap|flav)our\w*": "-or",
    r"(?:cent|met|fib|theat|lit)res?": "-er",
    r"(?:cancell|label{2}|model{2}|signal{2}|travel{2}|channell|tunnell)(?:ed|ing|er|ers)": "one l",
    r"licences?": "license",
    r"grey(?:ed|s)?": "gray",
    r"artefacts?": "artifact",
    r"(?:cata|ana|dia)logues?(?!\w)": "-log",
    r"programmes?": "program",
    r"(?:defence|offence|pretence)s?": "-se",
    r"(?:judgement|ageing|sceptic\w*|mould|towards|afterwards|learnt|spelt|burnt)": "judgment, aging, skeptic, toward",
}

Lines = list[tuple[int, str]]  # (number, text) of the lines of one paragraph


class Complaint(NamedTuple):
    file: str
    line: int
    vice: str
    words: str
    suggestion: str
    is_note: bool = False

    def __str__(self) -> str:
        note = "note: " if self.is_note else ""
        return f'{self.file}:{self.line}: {note}{self.vice}: "{self.words}": {self.suggestion}'


# Where the prose is


def plain(text: str) -> str:
    """Return Markdown without code, mathematics, addresses and marks; lines stay where they are."""
    hidden = re.sub(r"<!--.*?-->", lambda found: "\n" * found[0].count("\n"), text, flags=re.S)
    for pattern, word in ((r"(`+)(?!`).+?(?<!`)\1(?!`)", "code"), (r"\$\$?[^$\n]+\$\$?", "math")):
        hidden = re.sub(pattern, lambda found, word=word: word + "\n" * found[0].count("\n"), hidden, flags=re.S)
    hidden = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", hidden)
    hidden = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", hidden)
    return re.sub(r"<?https?://\S+|\*\*|(?<![\w*])[*_](?=\w)|(?<=[\w.])[*_](?![\w*])|</?\w+[^>]*>", "", hidden)


def paragraphs(text: str, first: int = 1) -> Iterator[Lines]:
    """Yield the paragraphs, headings, list items and table cells of a Markdown text."""
    text = re.sub(r"^( *)(```|~~~).*?^\1\2", lambda found: "\n" * found[0].count("\n"), text, flags=re.M | re.S)
    found: Lines = []
    for number, line in enumerate(plain(text).splitlines(), first):
        bare = re.sub(r"^[>\s]+", "", line)
        is_cell = bare.startswith("|")
        starts = is_cell or not bare or re.match(r"(?:[-*+]|\d+[.)]|: ?) |#+ ", bare)
        if starts and found:
            yield found
            found = []
        if is_cell:
            yield from ([(number, cell.strip())] for cell in bare.strip("| ").split("|") if re.search(r"\w", cell))
        elif re.match(r"#+ ", bare):
            yield [(number, bare.lstrip("# "))]
        elif bare:
            found.append((number, re.sub(r"^(?:[-*+]|\d+[.)]|:) +", "", bare)))
    if found:
        yield found


def docstring(text: str, first: int) -> Iterator[Lines]:
    """Yield the paragraphs of a docstring without its examples and equations."""
    lines: list[str] = []
    is_code, is_section = False, False
    for line in text.splitlines():
        bare, indent = line.strip(), len(line) - len(line.lstrip())
        is_section = (is_section and (not bare or indent > 0)) or bare in (
            "Args:",
            "Attributes:",
            "Raises:",
            "Returns:",
        )
        is_code = bool(bare) and (bare.startswith((">>>", "...")) or is_code)
        item = re.match(r"[\w*][\w*., ]*: (.*)", bare) if is_section else None
        lines.append("" if is_code else f"- {item[1]}" if item else bare)
    yield from paragraphs("\n".join(lines), first)


def strings(node: ast.AST) -> Iterator[Lines]:
    """Yield the words of a string; what a formatted string puts in is "code"."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from paragraphs(" ".join(node.value.split()), node.lineno)
    elif isinstance(node, ast.JoinedStr):
        parts = [str(part.value) if isinstance(part, ast.Constant) else "code" for part in node.values]
        yield from paragraphs(" ".join("".join(parts).split()), node.lineno)


def source(text: str) -> Iterator[Lines]:
    """Yield the prose of a Python file that users read: public docstrings, and strings of more than three words."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):  # parents first
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            told = ast.get_docstring(node, clean=False)
            if told:
                skipped.add(id(node.body[0].value))
            if told and not getattr(node, "name", "").startswith("_"):
                first = node.body[0].lineno
                cleaned = [line[node.body[0].col_offset :] if i else line for i, line in enumerate(told.splitlines())]
                yield from docstring("\n".join(cleaned), first)
        elif isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in skipped:
            skipped |= {id(part) for part in ast.walk(node)}
            yield from (lines for lines in strings(node) if len(lines[0][1].split()) > 3)


def tutorial(text: str) -> Iterator[Lines]:
    """Yield the Markdown cells of a script, and its comments."""
    kept = [re.sub(r"^\s*# ?", "", line) if re.match(r"\s*#(?! ?%%)", line) else "" for line in text.splitlines()]
    yield from paragraphs("\n".join(kept))


def browser(text: str) -> Iterator[Lines]:
    """Yield the strings of more than three words, and the texts between tags, of a file for the browser."""
    for number, line in enumerate(text.splitlines(), 1):
        for found in re.findall(r'"([^"]*)"|`([^`]*)`|>([^<>{}]+)<', re.sub(r"^\s*//.*", "", line)):
            if len("".join(found).split()) > 3:
                yield [(number, re.sub(r"\$\{[^}]*\}", "code", "".join(found)))]


def prose(file: Path) -> list[Lines]:
    text = file.read_text("utf-8")
    if file.suffix in (".js", ".html"):
        return list(browser(text))
    if file.suffix == ".md":
        return list(paragraphs(text))
    return list(tutorial(text) if file.parent.name == "tutorials" else source(text))


def files() -> list[Path]:
    """Return all files with words for users."""
    found = [*ROOT.glob("*.md"), ROOT / "benchmarks" / "RESULTS.md", *(ROOT / "run").glob("*.py")]
    found += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "tutorials").glob("*.py")]
    found += (ROOT / "exogym").rglob("*.py")
    found += [
        file for kind in ("js", "html") for file in (ROOT / "exogym").rglob(f"*.{kind}") if "min" not in file.name
    ]
    return [file for file in sorted(found) if file.exists() and name(file) not in SKIPPED]


def name(file: Path) -> str:
    file = file.resolve()
    return file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else str(file)


# What is wrong with it


def sentences(text: str) -> list[str]:
    text = re.sub(r"\b(e\.g|i\.e|et al|vs|Fig|Sec|No)\.", r"\1", text)
    return [one for one in re.split(r"(?<=[.!?])[)\"']?\s+(?=[A-Z(\"'\d]|code\b)", text) if re.search(r"\w", one)]


def words(text: str) -> int:
    return len(re.findall(r"[\w'’.,/+-]*\w[\w'’.,/+%-]*", text))


def complaints(file: Path) -> Iterator[Complaint]:
    """Yield the complaints and notes on a file, by line."""
    found, where = [], name(file)
    pieces = prose(file)
    for lines in pieces:
        text = " ".join(line for _, line in lines)
        starts = [sum(len(line) + 1 for _, line in lines[:index]) for index in range(len(lines))]

        def at(offset: int, lines: Lines = lines, starts: list[int] = starts) -> int:
            return lines[bisect_right(starts, offset) - 1][0]

        offset = 0
        for sentence in sentences(text):
            offset = max(text.find(sentence[:20], offset), offset)
            for vice, pattern, suggestion in VICES:
                for hit in re.finditer(pattern, sentence, re.I):
                    found.append(Complaint(where, at(offset + hit.start()), vice, hit[0].strip(" .,;:"), suggestion))
            for pattern, suggestion in BRITISH.items():
                for hit in re.finditer(rf"\b{pattern}\b", sentence, re.I):
                    found.append(Complaint(where, at(offset + hit.start()), "British spelling", hit[0], suggestion))
            if words(sentence) > LONG:
                start = " ".join(sentence.split()[:6]) + " ..."
                message = f"{words(sentence)} words; cut it in two"
                found.append(Complaint(where, at(offset), "long sentence", start, message, True))
    yield from sorted([*found, *proselint(where, pieces)], key=lambda one: one.line)


# Checks of proselint that judge taste, need its typography, or take our terms for slips.
OFF = (
    "annotations", "dates_times", "hedging", "lexical_illusions", "needless_variants", "psychology", "restricted",
    "typography", "uncomparables", "weasel_words",
)  # fmt: skip


def proselint(where: str, pieces: Iterable[Lines]) -> Iterator[Complaint]:
    """Yield what proselint says; nothing where it is not installed."""
    try:
        from proselint.checks import __register__
        from proselint.config import DEFAULT
        from proselint.registry import CheckRegistry
        from proselint.tools import LintFile
    except ImportError:
        return
    registry = CheckRegistry()
    if not registry.checks:
        registry.register_many(__register__)
    config = {**DEFAULT, "checks": {**DEFAULT["checks"], **dict.fromkeys(OFF, False)}}
    numbered = {number: "" for lines in pieces for number, _ in lines}
    for lines in pieces:
        for number, line in lines:
            numbered[number] = f"{numbered[number]} {line}".strip()
    text = "\n".join(numbered.get(number, "") for number in range(1, max(numbered, default=0) + 1))
    if text.strip():
        for result in LintFile(where, text).lint(config):
            start, end = result.check_result.span
            hit = " ".join(f"\n{text}\n"[start:end].split())
            yield Complaint(where, result.pos[0], result.check_result.check_path, hit, result.check_result.message)


# What it comes to in numbers


def measure(pages: Iterable[Path]) -> None:
    """Print words (as `wc -w`), mean and greatest sentence length, and Flesch reading ease (higher: easier)."""
    import textstat

    total = 0
    print(f"{'page':44} {'words':>6} {'mean':>5} {'max':>4} {'ease':>5}")
    for page in pages:
        counted = len(page.read_text("utf-8").split())
        total += 0 if name(page).startswith(UNCOUNTED) else counted
        texts = [" ".join(line for _, line in lines) for lines in prose(page)]
        found = [one for text in texts for one in sentences(text) if words(one) > 3]
        lengths = [words(one) for one in found] or [0]
        spelled = re.sub(r"[^\W\d_]*\d\S*", "one", " ".join(one.rstrip(".") + "." for one in found))
        ease = textstat.flesch_reading_ease(spelled) if found else 0
        print(f"{name(page):44} {counted:6} {sum(lengths) / len(lengths):5.1f} {max(lengths):4} {ease:5.0f}")
    print(f"{'total without generated pages and decisions':44} {total:6}")


def unread() -> list[str]:
    return [line for line in UNREAD.read_text("utf-8").splitlines() if line and not line.startswith("#")]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check the words that a user reads.")
    parser.add_argument("files", nargs="*", type=Path, help="check these files, also where they are on the list")
    parser.add_argument("--measure", action="store_true", help="print words and readability per page")
    parser.add_argument("--prune", action="store_true", help="take files without complaints off unread.txt")
    given = parser.parse_args(arguments)
    if given.measure:
        measure(given.files or [file for file in files() if file.suffix == ".md" or file.parent.name == "tutorials"])
        return 0
    listed = unread()
    if given.prune:
        bad = {one for one in listed if any(not c.is_note for c in complaints(ROOT / one))} if listed else set()
        lines = dict.fromkeys(UNREAD.read_text("utf-8").splitlines())  # a merge may have doubled some
        kept = [line for line in lines if line.startswith("#") or line in bad]
        UNREAD.write_text("\n".join(kept) + "\n", "utf-8")
        print(f"{len({*listed}) - len(bad)} files taken off the list, {len(bad)} left")
        return 0
    checked = given.files or [file for file in files() if name(file) not in listed]
    found = [one for file in checked for one in complaints(file) if given.files or not one.is_note]
    for one in found:
        print(one)
    return int(any(not one.is_note for one in found))


if __name__ == "__main__":
    sys.exit(main())
