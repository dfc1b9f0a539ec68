"""Build the site: gather the pages, write the reference from the program, and run Sphinx over all of it.

    python docs/site/build.py [FOLDER]

The pages lie in docs/ as Markdown that GitHub shows too. The navigation is docs/index.md: each of its sections is one,
each link of a section's lists is a page in it, and pages listed under another page lie below it. If a listed page is
an index.md, the pages of its own lists lie below it.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

from commands import command_line
from llms import llms
from reference import DOCS, MARK, api, options

ROOT = DOCS.parent
SOURCES = "https://github.com/exo-explore/gym/blob/main/"
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
           "benchmarks/RESULTS.md": "benchmarks.md"}  # fmt: skip
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
ENTRY = re.compile(r"^( *)- \[[^\]]+\]\(([^)\s#]+)\)", re.M)
WRITERS = {"api": api, "commands": command_line, "options": options}


def place(file: Path) -> str | None:
    """Return where a file of the repository lies on the site, from its top; None: it is no page of it."""
    inside = file.relative_to(ROOT).as_posix()
    if file.parent == ROOT / "tutorials" and file.suffix == ".py":
        return f"tutorials/{file.stem}.md"
    if inside in OUTSIDE:
        return OUTSIDE[inside]
    is_part = file.is_relative_to(DOCS) and file.suffix in (".md", ".png", ".svg")
    return file.relative_to(DOCS).as_posix() if is_part else None


def linked(text: str, file: Path) -> str:
    """Return a page with its links as they are on the site: pages to their places, other files to the repository."""
    here = Path(place(file) or "").parent

    def to(found: re.Match[str]) -> str:
        target = found[2]
        if "://" in target or target.startswith(("mailto:", "/")):  # "/": from the top of the site, as entries have it
            return found[0]
        other = (file.parent / target).resolve()
        there = place(other)
        if there is None or (
            found[3] != ")" and other == ROOT / "README.md"
        ):  # whose sections are not those of the first page
            return f"{found[1]}{SOURCES}{other.relative_to(ROOT).as_posix()}{found[3]}"
        ups = [".."] * len(here.parts)
        return f"{found[1]}{'/'.join([*ups, there])}{found[3]}"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)  # code stays as it is
    return "".join(part if index % 2 else LINK.sub(to, part) for index, part in enumerate(parts))


def written(text: str) -> str:
    """Return a page with the parts that are written from the program in the places of their marks."""
    return MARK.sub(lambda mark: WRITERS[mark[1]](*mark[2].split()), text)


def navigation() -> dict[Path, list[tuple[str, list[Path]]]]:
    """Return the pages below each page, in lists with a caption: of docs/index.md one for each section."""
    home = DOCS / "index.md"
    tree: dict[Path, list[tuple[str, list[Path]]]] = {home: []}
    for section in re.split(r"^## ", home.read_text("utf-8"), flags=re.M)[1:]:
        caption, _, body = section.partition("\n")
        if not ENTRY.search(body):
            continue
        tree[home].append((caption, []))
        above = home
        for indent, target in ENTRY.findall(body):
            page = (DOCS / target).resolve()
            if indent:
                tree.setdefault(above, [("", [])])[0][1].append(page)
            else:
                tree[home][-1][1].append(page)
                above = page
                if page.name == "index.md":  # a folder with its own list
                    below = [(page.parent / found).resolve() for _, found in ENTRY.findall(page.read_text("utf-8"))]
                    tree.update({page: [("", below)]} if below else {})
    return tree


def contents(lists: list[tuple[str, list[Path]]]) -> str:
    """Return the lists as Sphinx's hidden tables of contents."""
    blocks = []
    for caption, pages in lists:
        names = "".join(f"/{str(place(page)).removesuffix('.md')}\n" for page in pages)
        head = f":hidden:\n:caption: {caption}" if caption else ":hidden:"
        blocks.append(f"\n```{{toctree}}\n{head}\n\n{names}```\n")
    return "".join(blocks)


def called() -> dict[tuple[Path, str], list[str]]:
    """Return (page, anchor) to the words that readers search for: the search puts these words' places first.

    They are docs/index.md's column `also called`, at its first link, and the methods' names in docs/strategies.md.
    """
    words: dict[tuple[Path, str], list[str]] = {}
    for line in (DOCS / "index.md").read_text("utf-8").splitlines():
        row = re.fullmatch(r"\| [^|]+ \| ([^|]+) \| .*?\]\(([^)\s#]+)#?([^)\s]*)\).*", line)
        if row:
            words.setdefault(((DOCS / row[2]).resolve(), row[3]), []).extend(row[1].split(", "))
    methods = DOCS / "strategies.md"
    for heading in re.findall(r"^##+ ([^:\n]+: `\w+`)$", methods.read_text("utf-8"), re.M):
        words.setdefault((methods, anchor(heading)), []).append(re.split(r" \(|:", heading)[0])
    return words


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def indexed(text: str, words: dict[str, list[str]]) -> str:
    """Return a page with entries of the index below the headings that have these anchors; "" is the title."""

    def below(head: re.Match[str]) -> str:
        found = words.pop(anchor(head[2]) if len(head[1]) > 1 else "", [])
        lines = [", ".join(f"!{word}" for word in found if "," not in word)]
        lines += [f"!single: {word}" for word in found if "," in word]  # else a comma would end the entry
        return head[0] + "".join(f"\n\n```{{index}} {line}\n```" for line in lines if line)

    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)  # code stays as it is
    page = "".join(
        part if index % 2 else re.sub(r"^(#+) (.*)$", below, part, flags=re.M) for index, part in enumerate(parts)
    )
    if words:
        raise ValueError(f"docs/index.md leads to {[*words]}, which the page has not")
    return page


def gather(folder: Path) -> None:
    """Write all pages and pictures into `folder`, as Sphinx is to read them."""
    tree, words = navigation(), called()
    pages = {*DOCS.rglob("*.md"), *(page for lists in tree.values() for _, below in lists for page in below)}
    for page in sorted(pages):
        target = folder / str(place(page))
        target.parent.mkdir(parents=True, exist_ok=True)
        text = page.read_text("utf-8")
        if page.suffix == ".py":
            shutil.copy(page, target.parent)
            title, _, rest = tutorial(text).partition("\n")
            text = f"{title}\n\nThe whole script: {{download}}`{page.name}`.\n{rest}"
        text = indexed(text, {anchor: found for (there, anchor), found in words.items() if there == page})
        target.write_text(linked(written(text), page) + contents(tree.get(page, [])), "utf-8")
    shutil.copytree(DOCS / "images", folder / "images", ignore=shutil.ignore_patterns("*.py", "*.json"))
    for name in ("conf.py", "scorer.js", "_static", "_templates"):
        part = DOCS / "site" / name
        (shutil.copytree if part.is_dir() else shutil.copy)(part, folder / name)


def tutorial(source: str) -> str:
    """Return a script in jupytext's percent format as a page: its Markdown cells, and its code."""
    source = re.sub(r"\A# ---\n.*?^# ---\n", "", source, flags=re.M | re.S)
    parts = []
    for cell in re.split(r"^# %%", source, flags=re.M)[1:]:
        head, _, body = cell.partition("\n")
        if "[markdown]" in head:
            parts.append(re.sub(r"^# ?", "", body, flags=re.M).strip())
        elif body.strip():
            parts.append(f"```python\n{body.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def build(out: Path, *more: str) -> int:
    """Build the site into `out`; return Sphinx's status, which is not 0 if there was a warning."""
    from sphinx.cmd.build import build_main

    with tempfile.TemporaryDirectory() as folder:
        gather(Path(folder))
        shutil.rmtree(out, ignore_errors=True)
        words = ["-q", "-W", "--keep-going", "-b", "html", "-d", f"{folder}/.trees", *more, folder, str(out)]
        status = build_main(words)
    (out / "llms.txt").write_text(llms(lambda page: f"{str(place(page)).removesuffix('.md')}.html"), "utf-8")
    return status


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site")))
