"""The site of `make docs`: public names have entries with examples, no page is lost, nothing comes from elsewhere."""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import threading
import typing
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest
from browsing import CHROMIUM, DRIVER, opened, until
from codespell_lib import main as codespell
from paths import ROOT
from processes import python

import exogym
from exogym import LocalTrainer, Placement

sys.path.append(str(ROOT / "docs" / "site"))  # no package: scripts of the pages

import build
import commands
import reference

WORDS = "loner,nd"  # one of our names, and a part of one, which codespell takes for slips
LOADS = {
    "script": "src",
    "link": "href",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "embed": "src",
    "object": "data",
}


# What is public


def packages() -> list[str]:
    """Return the packages that list public names, but for the command line."""
    names = [found.name for found in pkgutil.walk_packages(exogym.__path__, "exogym.") if found.ispkg]
    public = [name for name in names if hasattr(importlib.import_module(name), "__all__")]
    behind = {reference.opened(name).__name__ for name in reference.packages_on_pages()}  # doors
    return ["exogym", *(name for name in public if not name.startswith("exogym.cli") and name not in behind)]


def test_every_package_is_on_a_page() -> None:
    assert {*packages()} <= {*reference.packages_on_pages()}


@pytest.mark.parametrize("package", reference.packages_on_pages())
def test_every_public_name_has_a_docstring_and_an_example_that_runs(package: str) -> None:
    """The example is its own, one of its package, or one on a page; all of these run in other tests."""
    module = importlib.import_module(package)
    lacking = []
    for name in reference.packages_on_pages()[package]:
        thing = getattr(module, name)
        if callable(thing) and typing.get_origin(thing) is None:
            told = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
            home = reference.first_home(package, name)
            lacking += [] if told and reference.example_for(home, name) is not None else [name]
    assert lacking == []


def test_every_public_value_says_what_it_is() -> None:
    pages = reference.packages_on_pages().items()
    values = [
        (p, name) for p, names in pages for name in names if not callable(getattr(importlib.import_module(p), name))
    ]
    assert len(values) > 10 and [at for at in values if not reference.comment(*at)] == []


def test_an_example_is_shown_once() -> None:
    page = reference.api("exogym.compare")
    assert page.count('split_strategies("single,ddp")') == 1
    assert "Example: see {py:obj}`exogym.compare`, above." in page


def test_a_name_without_an_example_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from exogym import data

    monkeypatch.setattr(data, "never_shown", lambda: None, raising=False)
    monkeypatch.setattr(data, "__all__", [*data.__all__, "never_shown"])
    reference.package_examples.cache_clear()
    assert reference.example_for("exogym.data", "never_shown") is None
    assert reference.example_for("exogym.data", "digits") is not None


def test_every_option_of_fit_is_told() -> None:
    names = {*inspect.signature(LocalTrainer.fit).parameters, *inspect.signature(Placement).parameters} - {"self"}
    told = {word for head in re.findall(r"^(`.*)$", reference.options(), re.M) for word in re.findall(r"`(\w+)", head)}
    assert told == names


def test_every_command_is_told() -> None:
    page = commands.command_line()
    for line in ("## exogym compare", "## exogym runs list", "`--step-seconds S`", "exogym runs show [OPTIONS] {NAME}"):
        assert line in page


def test_a_page_that_is_written_by_the_build_says_so_to_who_reads_it_without() -> None:
    pages = [page.read_text() for page in build.DOCS.rglob("*.md")]
    marked = [page for page in pages if "<!-- generated" in page]
    assert len(marked) > 10
    for page in marked:
        assert (
            len(reference.MARK.findall(page)) == page.count("\n> `make docs` writes ") == page.count("<!-- generated")
        )
        assert "`make docs` writes the" not in reference.MARK.sub("", page)  # not said on the site itself


@pytest.mark.parametrize(
    ("docstring", "page"),
    [
        ("One * two_three <b>.", r"One \* two\_three \<b\>."),
        ("Of `a_b`:\n\n    x <- y\n\nEnd.", "Of `a_b`:\n\n```text\nx <- y\n```\n\nEnd."),
        ("Do.\n\nArgs:\n    a, b: one\n        more.", "Do.\n\n**Arguments**\n\n- `a`, `b`: one more."),
        (">>> f(1)\n2", "```pycon\n>>> f(1)\n2\n```"),
    ],
)  # fmt: skip
def test_docstrings_become_markdown(docstring: str, page: str) -> None:
    assert reference.markdown(docstring) == page


def test_a_tutorial_becomes_a_page() -> None:
    script = "# ---\n# a: b\n# ---\n\n# %% [markdown]\n# # Title\n#\n# Text.\n\n# %%\nprint(1)\n# > 1\n"
    assert build.tutorial(script) == "# Title\n\nText.\n\n```python\nprint(1)\n# > 1\n```\n"


def test_links_lead_to_the_site_where_it_has_the_page() -> None:
    page = ROOT / "docs" / "understand" / "matrix.md"
    text = (
        "[a](../strategies.md#x) [b](../../README.md) [c](../../README.md#read-on) [d](../../LICENSE)\n```\n[e](x)\n```"
    )
    assert build.linked(text, page) == (
        "[a](../strategies.md#x) [b](../index.md) "
        f"[c]({build.SOURCES}README.md#read-on) [d]({build.SOURCES}LICENSE)\n```\n[e](x)\n```"
    )


def test_links_from_the_top_of_the_site_stay() -> None:
    """As entries of the reference have them, which do not know on which page they are."""
    text = "Example: on the page [a](/other_trainers.md)."
    assert build.linked(text, ROOT / "docs" / "api" / "training.md") == text


# As with `[docs]` alone: none of the optional packages that entries' classes derive from.
WITHOUT = """
import importlib.abc, sys
ABSENT = ("accelerate", "lightning", "peft", "pytorch_lightning", "ray", "transformers")
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
for name in [*sys.modules]:
    if name.partition(".")[0] in ABSENT or name.startswith("exogym.integrations"):
        del sys.modules[name]
sys.meta_path.insert(0, Absent())
sys.path.append("docs/site")
import reference
print(reference.api(*sys.argv[1:]), end="")
try:
    reference.imported("exogym.nowhere")
except ModuleNotFoundError as error:
    assert error.name == "exogym.nowhere"
else:
    raise AssertionError("imported what is not there")
"""


def test_entries_over_packages_that_are_not_installed_are_the_same() -> None:
    names = [f"exogym.integrations.{name}" for name in ("accelerate", "lightning", "transformers")]
    done = python("-c", WITHOUT, *names, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == reference.api(*names)


def test_what_is_called_otherwise_elsewhere_is_in_the_index() -> None:
    page = "# Title\n\n## Stop early\n\n```\n## Stop early\n```\n"
    assert build.indexed(page, {"": ["a"], "stop-early": ["early stopping", "patience"]}) == (
        "# Title\n\n```{index} !a\n```\n\n## Stop early\n\n```{index} !early stopping, !patience\n```"
        "\n\n```\n## Stop early\n```\n"
    )
    with pytest.raises(ValueError, match="leads to"):
        build.indexed(page, {"stop": ["early stopping"]})
    assert build.indexed("# T\n", {"": ["a", "1,000 b"]}) == (
        "# T\n\n```{index} !a\n```\n\n```{index} !single: 1,000 b\n```\n"
    )
    assert build.called()[ROOT / "docs" / "recipes.md", "stop-early"] == ["early stopping", "patience"]
    assert build.called()[ROOT / "docs" / "strategies.md", "diloco-dilocostrategy"] == ["DiLoCo"]


# The pages


def test_no_two_pages_have_one_title() -> None:
    pages = [page for lists in build.navigation().values() for _, below in lists for page in below]
    texts = [page.read_text("utf-8") for page in pages]
    texts = [build.tutorial(text) if page.suffix == ".py" else text for page, text in zip(pages, texts, strict=True)]
    titles = [text.partition("\n")[0] for text in texts]
    assert sorted(titles) == sorted({*titles})


def test_every_page_is_in_the_navigation_once() -> None:
    listed = [page for lists in build.navigation().values() for _, pages in lists for page in pages]
    pages = {*(ROOT / "docs").rglob("*.md"), *(ROOT / "tutorials").glob("*.py"), ROOT / "CONTRIBUTING.md"}
    assert sorted(listed) == sorted({*listed}) and {*listed} >= pages - {ROOT / "docs" / "index.md"}


class Page(HTMLParser):
    """The links of a page, its anchors, and what it loads."""

    def __init__(self, text: str):
        super().__init__()
        self.links, self.anchors, self.loads = list[str](), {""}, list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, given: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in given}
        self.anchors.add(attributes.get("id", ""))
        if tag == "a":
            self.links.append(attributes.get("href", ""))
        if tag in LOADS and attributes.get("rel") != "canonical":
            self.loads.append(attributes.get(LOADS[tag], ""))


def from_elsewhere(name: str, text: str) -> list[str]:
    """Return what a file of the site would load from other machines."""
    if name.endswith(".html"):
        loads = [load for load in Page(text).loads if load.startswith(("http:", "https:", "//"))]
        return loads + re.findall(r"url\(['\"]?(?:https?:)?//[^)]*", text)
    if name.endswith(".css"):
        return re.findall(r"(?:url\(|@import )['\"]?(?:https?:)?//[^)]*", text)
    code = re.sub(r"/\*.*?\*/|(?<!:)//[^\n]*", "", text, flags=re.S)
    return [found for found in re.findall(r"['\"`]((?:https?:)?//[^'\"`]+)", code) if "www.w3.org/" not in found]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<script src="https://cdn.example/x.js"></script>'),
        ("a.html", '<link rel="stylesheet" href="//fonts.example/x.css">'),
        ("a.css", "@import url(https://fonts.example/x.css);"),
        ("a.css", "a { background: url('//x.example/y.png') }"),
        ("a.js", 'import("https://cdn.example/mermaid.mjs")'),
    ],
)
def test_what_comes_from_elsewhere_is_seen(name: str, text: str) -> None:
    assert len(from_elsewhere(name, text)) == 1


def dead_links(site: Path) -> list[str]:
    """Return the links that lead to no page of the site, or to no anchor of one."""
    pages = {file: Page(file.read_text("utf-8")) for file in site.rglob("*.html")}
    dead = []
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if not target.exists() or (target in pages and unquote(parts.fragment) not in pages[target].anchors):
                dead.append(f"{file.name}: {link}")
    return dead


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<p id="here"><a href="#here"></a><a href="#there"></a><a href="b.html"></a>')
    assert dead_links(tmp_path) == ["a.html: #there", "a.html: b.html"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The whole site, built once, and how the build ended."""
    folder = tmp_path_factory.mktemp("site")
    return folder, subprocess.run([sys.executable, build.__file__, str(folder)], capture_output=True, text=True)


@pytest.mark.slow
def test_the_whole_site(built: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """One test, since it is built once: no warning, no dead link, nothing from elsewhere, an index, mathematics."""
    site, done = built
    assert (done.returncode, done.stderr) == (0, "")
    assert dead_links(site) == []
    kinds = (".html", ".css", ".js")
    files = [file for file in site.rglob("*") if file.suffix in kinds and file.name != "searchindex.js"]
    assert len(files) > 50
    pages = [file for file in files if file.suffix == ".html" and file.name != "glossary.html"]
    assert [file.name for file in pages if 'glossary.html">Glossary' not in file.read_text("utf-8")] == []
    assert {file.name: seen for file in files if (seen := from_elsewhere(file.name, file.read_text("utf-8")))} == {}
    assert "DiLoCoStrategy" in (site / "searchindex.js").read_text("utf-8")
    assert "api/training.html#exogym.LocalTrainer" in (site / "processes.html").read_text("utf-8")  # by its name
    custom = (site / "tutorials" / "tutorial_custom.html").read_text("utf-8")
    assert "exogym.strategy.Strategy" in custom and "exogym.compress.TopK" not in custom  # its own class of that name
    assert len(list((site / "_downloads").rglob("tutorial_*.py"))) == len(list((ROOT / "tutorials").glob("*.py")))
    assert '"early stopping":[[' in (site / "searchindex.js").read_text("utf-8")
    assert "<math" in (site / "understand" / "choosing.html").read_text("utf-8")


# Search: what readers type, and the pages that answer it

QUESTIONS = {
    "How do I install it on three Macs": {"getting_started", "real_machines", "wizard"},
    "resume after a crash": {"processes"},
    "gradient accumulation": {"understand/choosing", "recipes"},
    "mixed precision bf16": {"recipes"},
    "my own model": {"getting_started"},
    "Hugging Face model with LoRA": {"fine_tuning"},
    "language model on my texts": {"fine_tuning"},
    "own strategy": {"tutorials/tutorial_custom", "strategies/own"},
    "consensus distance": {"getting_started", "glossary"},
    "log to W&B": {"getting_started"},
    "TensorBoard": {"getting_started"},
    "which method for 50 Mbit/s": {"understand/choosing", "network"},
    "1,000 clients non-IID": {"federated"},
    "what does payload mean": {"glossary"},
    "run on a GPU": {"understand/matrix"},
    "own outer optimizer": {"recipes", "strategies"},
    "non-IID text": {"getting_started"},
    "plot loss against bytes": {"recipes"},
    "reload a comparison as a DataFrame": {"runs"},
    "differential privacy": {"federated"},
    "coming from gym": {"coming_from_gym"},
    "host dies": {"real_machines"},
    "how good are predictions": {"evidence", "predictions"},
    "DiLoCo": {"strategies"},
    "bf16": {"recipes"},
    "payload": {"glossary"},
    "resume training": {"processes"},
}
HITS = "[...document.querySelectorAll('#search-results ul.search > li > a')].map((one) => one.getAttribute('href'))"
SUMMARY = "document.querySelector('#search-results .search-summary')?.textContent"


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of a folder; the search loads pages, which a browser does from no file."""

    class Silent(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

    handler = functools.partial(Silent, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs Chromium and its driver")
def test_the_search_answers_what_readers_type(built: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """One of the right pages is among the first three hits; a word on no page has none."""
    hits: dict[str, list[str]] = {}
    with served(built[0]) as address, opened("about:blank") as browser:
        for question in [*QUESTIONS, "xyzzyplugh"]:
            browser.get(f"{address}/search.html?q={quote(question)}")
            until(browser, SUMMARY, lambda said: bool(said) and "Searching" not in said and "Preparing" not in said)
            hits[question] = [link.partition(".html")[0] for link in browser.execute_script(f"return {HITS}")]
    assert hits["xyzzyplugh"] == [] and "glossary" not in hits["TensorBoard"][:3]
    assert {
        question: hits[question][:3] for question, pages in QUESTIONS.items() if not pages & {*hits[question][:3]}
    } == {}


# Words


def misspelt(*files: Path) -> int:
    """Return 0 where codespell knows no slip in the files; it prints those it knows."""
    return codespell("--ignore-words-list", WORDS, *map(str, files))


def test_spelling() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tutorials").glob("*.py")]
    assert misspelt(*pages, *(ROOT / "exogym").rglob("*.py"), *(ROOT / "run").glob("*.py")) == 0


def test_a_slip_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("to recieve")  # codespell:ignore
    assert misspelt(tmp_path / "page.md") != 0
