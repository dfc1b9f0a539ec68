"""Every snippet and every command of the documentation runs."""

import ast
import functools
import json
import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest
from paths import ROOT
from processes import python

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHORT = ["--steps", "4", "--seeds", "1", "--batch-size", "4"]
LONG = (  # a shorter one of the same kind runs among the fast tests
    "exogym compare --dataset shakespeare --strategies single,ddp,diloco,fedavg,sparta:p_sparta=0.05,demo --nodes 4"
    " --network wifi --step-seconds 20ms",
    "python -m exogym.launch --nproc_per_node 4 run/islands.py --steps 20",
    "python -m exogym.launch --nproc_per_node 4 run/sharded.py --steps 20",
    "exogym sweep --dataset digits --sweep H=5,10 --sweep strategy=diloco,fedavg --seeds 2 --nodes 4 --steps 40"
    " --out runs/sweep",
)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


def commands() -> list[str]:
    found = []
    for page in PAGES:
        for block in blocks(page, "bash"):
            found += [line for line in block.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    return sorted(set(found))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's, of transformers
@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)`:FutureWarning")  # Lightning's
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # of DCP, in one process
@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_snippets_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "documentation"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), namespace)


def test_the_first_page_prints_what_it_says(capsys):
    """Twice, so that an output that depends on an unseeded model is found."""
    code = blocks(ROOT / "README.md", "python")[0]
    (said,) = re.findall(r"^# (\d+ steps, .*)$", code, re.M)
    for _ in range(2):
        exec(compile(code, "README.md", "exec"), {"__name__": "documentation"})
        told, wanted = (re.findall(r"[\d.]+", line) for line in (capsys.readouterr().out.splitlines()[-1], said))
        assert (told[0], told[2]) == (wanted[0], wanted[2])
        assert abs(float(told[1]) - float(wanted[1])) < 0.5  # percent: another torch may round otherwise


def test_the_long_ones_are_commands_of_the_pages():
    assert not set(LONG) - set(commands())


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("command", [pytest.param(c, marks=pytest.mark.slow) if c in LONG else c for c in commands()])
def test_commands_run(command, tmp_path):
    words = shlex.split(command)
    if words[0] == "make":
        recipe = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
        assert recipe.returncode == 0 and recipe.stdout, recipe.stderr
        return
    if words[0] in ("git", "pip", "cd"):
        assert command in (
            "pip install -e '.[demo]'",
            "git clone https://github.com/exo-explore/gym.git exogym",
            "cd exogym",
        )
        return
    assert words[0] in ("exogym", "python"), f"no test knows how to run {command!r}"
    if words[1].startswith("benchmarks/"):  # takes minutes: its options are to be known
        told = python(ROOT / words[1], "--help")
        known = set(re.findall(r"--[a-z][a-z-]*", told.stdout))
        assert told.returncode == 0 and {word for word in words[2:] if word.startswith("--")} <= known, told.stderr
        return
    if words[:2] in (["exogym", "runs"], ["exogym", "ui"]):  # works on what is there
        make_runs(tmp_path)
    if words[:2] == ["exogym", "ui"]:  # answers until it is ended
        with subprocess.Popen(
            [sys.executable, *runnable(words)], cwd=tmp_path, stdout=subprocess.PIPE, text=True
        ) as page:
            try:
                assert page.stdout is not None
                address = page.stdout.readline().strip().replace("/?", "/api/runs?")
                assert {run["name"] for run in json.load(urllib.request.urlopen(address))} == {"digits", "other"}
            finally:
                page.terminate()
        return
    done = python(*runnable(words), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


@functools.cache
def trained() -> Path:
    """Return the folder of the run that the page on runs makes first."""
    folder = Path(tempfile.mkdtemp())
    script = blocks(ROOT / "docs" / "runs.md", "python")[0]
    assert python("-c", script, cwd=folder).returncode == 0
    return folder / "runs" / "digits"


def make_runs(folder: Path) -> None:
    for name in ("digits", "other"):
        shutil.copytree(trained(), folder / "runs" / name)


def runnable(words: list[str]) -> list[str]:
    """Return the words after `python` of a command of the documentation, with the repository's files, and short."""
    files = [str(ROOT / word) if word.endswith(".py") else word for word in words[1:]]
    more = {"compare": SHORT, "demo": SHORT, "ui": ["--port", "0"]}
    if words[0] == "exogym":
        return ["-m", "exogym", *words[1:], *more.get(words[1], [])]
    return [*files, *([] if words[1] == "-m" else SHORT[:2])]


def test_what_is_run_is_what_is_written():
    """Only a comparison and a script of run/ are cut short."""
    short = ["--steps", "4", "--seeds", "1", "--batch-size", "4"]
    assert runnable(["exogym", "compare", "--nodes", "4"]) == ["-m", "exogym", "compare", "--nodes", "4", *short]
    assert runnable(["exogym", "advise", "--nodes", "4"]) == ["-m", "exogym", "advise", "--nodes", "4"]
    assert runnable(["python", "run/mnist.py"]) == [str(ROOT / "run" / "mnist.py"), "--steps", "4"]
    launch = ["-m", "exogym.launch", "--nproc_per_node", "2"]
    assert runnable(["python", *launch, "run/x.py"]) == [*launch, str(ROOT / "run" / "x.py")]


LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """Return what a heading of a page may be linked by."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    for page in PAGES:
        for target, anchor in LINK.findall(page.read_text()):
            if "://" not in target:
                other = page.parent / target if target else page
                assert other.exists(), f"{page.name} links to {target}"
                assert not anchor or anchor in anchors(other), f"{page.name} links to {target}#{anchor}"


def levels_skipped(text: str) -> list[str]:
    """Return the headings that lie two levels or more below the one before: the site refuses them."""
    headings = re.findall(r"^#+ .*", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    depths = [len(heading.split()[0]) for heading in headings]
    return [headings[i] for i in range(1, len(depths)) if depths[i] > depths[i - 1] + 1]


def test_headings_skip_no_level():
    assert levels_skipped("# a\n## b\n#### c\n```\n#### d\n```\n") == ["#### c"]
    assert [found for page in PAGES for found in levels_skipped(page.read_text())] == []


def test_every_page_is_reached_from_the_readme():
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in reached:
            reached.add(page)
            targets = [page.parent / target for target, _ in LINK.findall(page.read_text()) if target.endswith(".md")]
            ahead += [target.resolve() for target in targets if "://" not in str(target)]
    assert reached >= {*PAGES, ROOT / "benchmarks" / "RESULTS.md"}


def test_llms_txt_is_the_list_of_the_pages():
    """As `make docs` writes it; its links lead to files of the clone."""
    made = runpy.run_path(str(ROOT / "docs" / "site" / "llms.py"))
    text = (ROOT / "llms.txt").read_text("utf-8")
    assert text == made["llms"](made["in_the_clone"]), "llms.txt is not that of docs/index.md: python docs/site/llms.py"
    listed = {ROOT / target for target, _ in LINK.findall(text)}
    records = {*(ROOT / "docs" / "decisions").glob("0*.md")}  # docs/decisions/index.md lists them
    assert listed >= {*PAGES} - {ROOT / "README.md", ROOT / "docs" / "index.md"} - records
    assert all(page.is_file() for page in listed) and text.startswith("# ExoGym\n\n> Simulate ")


REPORTED = {"exogym.run", "exogym.step", "exogym.train_loss"}  # names in MLflow


def unknown_names(text: str) -> set[str]:
    """Return the files and the modules, functions and classes of ours that a text names and that are not there."""
    files = set(re.findall(r"(?<![\w./])(?:exogym|tests|benchmarks|docs)/[\w/]+\.(?:py|md|png)", text))
    unknown = {file for file in files if not (ROOT / file).exists()}
    for name in set(re.findall(r"(?<![\w./-])exogym(?:\.[A-Za-z_]\w*)+", text)):
        if name in REPORTED:
            continue
        module, rest, folder = "exogym", name.split(".")[1:], ROOT / "exogym"
        while rest and ((folder / rest[0] / "__init__.py").exists() or (folder / f"{rest[0]}.py").exists()):
            module, folder = f"{module}.{rest[0]}", folder / rest.pop(0)
        try:
            pkgutil.resolve_name(f"{module}:{'.'.join(rest)}")
        except (AttributeError, ImportError):
            unknown.add(name)
    return unknown


@pytest.mark.parametrize("where", ["README.md", "CONTRIBUTING.md", "docs", "exogym", "run", "benchmarks"])
def test_names_of_ours_in_prose_and_messages_are_there(where):
    top = ROOT / where
    files = [top] if top.is_file() else [p for p in sorted(top.rglob("*")) if p.suffix in (".py", ".md")]
    files = [file for file in files if file.name not in ("retired.py", "coming_from_gym.md")]  # names that were
    found = {str(file.relative_to(ROOT)): names for file in files if (names := unknown_names(file.read_text()))}
    assert files and not found


def test_a_name_of_a_room_that_was_left_is_found():
    assert unknown_names("exogym.core.training.loop and exogym/core/training/loop.py, exogym.LocalTrainer.fit") == set()
    assert unknown_names("see `exogym.loop`") == {"exogym.loop"}
    assert unknown_names("in exogym/loop.py: exogym.core.training.loop.Loop") == {
        "exogym/loop.py",
        "exogym.core.training.loop.Loop",
    }


ONLY = """
import re, sys
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions, requires
from packaging.requirements import Requirement

def plain(name):
    return re.sub("[-_.]+", "-", name).lower()

wanted, ahead = set(), [("exogym", extra) for extra in ["", *sys.argv[1].split(",")]]
while ahead:
    name, extra = ahead.pop()
    if (name, extra) not in wanted:
        wanted.add((name, extra))
        for needed in map(Requirement, requires(name) or []):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                ahead += [(plain(needed.name), more) for more in ["", *needed.extras]]
names = {name for name, _ in wanted}
missing = {top for top, owners in packages_distributions().items() if not names & set(map(plain, owners))}

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in missing else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
exec(compile(sys.stdin.read(), "page", "exec"))
"""


@pytest.mark.parametrize("extras", ["page", ""])
def test_what_the_first_page_installs_is_enough_for_its_first_run(extras, tmp_path):
    page = ROOT / "docs" / "getting_started.md"
    (named,) = re.findall(r"^pip install -e '\.\[([\w,]+)\]'$", page.read_text(), re.M)
    words = [sys.executable, "-c", ONLY, named if extras == "page" else extras]
    done = subprocess.run(words, input=blocks(page, "python")[0], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode == 0) == (extras == "page"), done.stderr
    assert extras or "the data set digits was not found" in done.stderr  # the control


def texts_of_the_package() -> list[str]:
    """Return every text in the package's code, with a gap for each value of an f-string."""
    found = (ROOT / "Makefile").read_text().splitlines()
    for file in sorted((ROOT / "exogym").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(x.value) if isinstance(x, ast.Constant) else "\0" for x in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return [text for text in found if len(text) < 600]


def lacks(message: str, texts: list[str]) -> bool:
    """Return whether no text has the message's words, except numbers, quoted names and one word in five."""
    words = [w for w in re.findall(r"[\w()]+", re.sub(r"'[^']*'|\b[NM]\b", "", message)) if not re.search(r"\d", w)]
    return all(sum(word not in text for word in words) > len(words) // 5 for text in texts)


def test_messages_to_look_up_are_those_that_are_raised():
    texts, of_others = texts_of_the_package(), ("No matching distribution found for exogym", "ModuleNotFoundError")
    for page in ("troubleshooting", "real_machines"):
        table = (ROOT / "docs" / f"{page}.md").read_text().partition("\n| message |")[2].partition("\n\n")[0]
        messages = [m for row in table.splitlines()[2:] for m in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
        assert messages and [m for m in messages if m not in of_others and lacks(m, texts)] == []
    assert lacks("the loss of node 2 turned nan at its step 31", texts)
