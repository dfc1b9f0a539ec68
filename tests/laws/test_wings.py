"""A wing imports public names and seams: what the pages of docs/api list, and what "Seams" of docs/design.md names.

What a wing still imports beyond them stands in `BEYOND`, which may only shrink. Imports and identifiers count.
"""

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

import exogym

PACKAGE = Path(exogym.__path__[0])
DOCS = ROOT / "docs"
WINGS = ("home", "mesh", "clusters", "ui", "study", "cli")
MARK = re.compile(r"^<!-- generated: api ([\w.:, ]*) -->$", re.M)
Found = dict[str, set[str]]  # module -> names

BEYOND: dict[str, str] = {
    "home": """
        exogym.cli.asking: Asker console_on count pairs say
        exogym.cli.distributed: train
        exogym.cli.doctor: print_checks
        exogym.cli.values: At DATASETS Debug KEY_FILE KeyFile SSHConfig
        exogym.core.base.modes: evaluation_mode
        exogym.data.stream: length_of
        exogym.errors: check_choice check_count check_number checked nearest needs
        exogym.machines.launch.door: listen
        exogym.machines.remote: ssh
        exogym.machines.remote.inquiry: ask
        exogym.machines.remote.measuring: measure_hosts
        exogym.machines.remote.profile: PREFIX RunProfile evaluations_of load_profile options_of
        exogym.models.pretrained: SMALL Weights byte_tokenizer checkpointed fill from_pretrained merged
            model_from_pretrained rank_of read_trained usual_weights with_adapters
        exogym.study.tasks: Data
    """,
    "mesh": """
        exogym.core.base: pulse
        exogym.core.base.batches: batch_examples map_tensors take_examples tensors_in
        exogym.core.base.modes: evaluation_mode
        exogym.core.compute.parts: unlike
        exogym.core.compute.pointer: Pointer
        exogym.core.compute.worker: Worker
        exogym.core.engine.sockets: ports_closed_afterwards
        exogym.core.engine.wire: as_bytes
        exogym.core.engine: world_size
        exogym.core.engine.world: join_world new_group
        exogym.core.fleet.dealing: Route
        exogym.errors: check_count check_switch checked
    """,
    "clusters": """
        exogym.cli.values: Debug
        exogym.core.base.lazy: lazily
        exogym.core.base.shelf: LineStore Shelf
        exogym.core.engine.hangs: watched
        exogym.core.engine.reports: packed unpacked
        exogym.core.engine.world: join_group leave_group
        exogym.errors: check_choice check_count checked
        exogym.machines.remote.onhost: probe
        exogym.machines.remote.onhost.interfaces: interface_of
        exogym.study.compare.folder: OUTCOME
    """,
    "ui": """
        exogym.core.base.files: opened_plain
        exogym.core.base.processes: is_alive lines_from_parent
        exogym.core.record.run_folder: RESUME
        exogym.core.record.schema: LINE_BYTES check_length is_finite
        exogym.errors: check_choice nearest retired
        exogym.machines.remote.health: read_hosts
        exogym.machines.remote.hosts: is_loopback
        exogym.strategy.names: short_names titles
        exogym.study.compare.asked: PASSED_AS_TEXT ComparisonOptions
        exogym.study.compare.catalog: catalog
        exogym.study.compare.colors: looks_of
        exogym.study.compare.entries: split_strategies
        exogym.study.compare.folder: Folder
        exogym.study.compare.run: session_of
        exogym.study.compare.session: Session
        exogym.study.compare.summary: SINGLE
        exogym.study.notes: Notes read_notes write_notes
        exogym.study.sweep.axes: Axes arguments_of as_text axes_of check_few grid label_of
        exogym.strategy.registry: written_options
    """,
    "study": """
        exogym.core.base: rng
        exogym.core.base.lazy: lazily
        exogym.core.base.locks: LOCK Lock acquire
        exogym.core.base.processes: described is_alive
        exogym.core.clock.devices: DEFAULT_UTILISATION
        exogym.core.record.run_folder: standing
        exogym.core.record.views: picture
        exogym.core.saving.checkpoint: differences
        exogym.data.partition: partitioner_of
        exogym.data.reading: COMPARED FirstShare Reader described sum_of
        exogym.data.stream: check_dataset is_factory is_iterable length_of
        exogym.errors: ALIASES check_choice check_count check_number checked nearest needs
        exogym.network.pricing: AGREEMENTS LATE Members
        exogym.strategy.averaging: spread
        exogym.strategy.names: short_names
        exogym.strategy.registry: DEFAULTS averages_of unknown written_options
        exogym.strategy.strategy: Inner
        exogym.strategy.traffic: ModelSize Plan Traffic
    """,
    "cli": """
        exogym.core.base.streams: BROKEN_PIPE fill_in is_stdout_gone replace_letters
        exogym.data.partition: FORMS
        exogym.errors: check_choice nearest retired
        exogym.machines.remote.measuring: MEASURED_FILE measure_hosts
        exogym.machines.remote.orders: RUNS
        exogym.machines.remote.profile: RunProfile load_profile options_of
        exogym.machines.remote.results: FitResults carry_out facts_of names
        exogym.study.advise.advice: beside_ddp command
        exogym.study.advise.prediction: DEFAULT_STRATEGIES STEPS
        exogym.study.compare.asked: PASSED_AS_TEXT
        exogym.study.compare.catalog: choices_of
        exogym.study.compare.comparison: Comparison
        exogym.study.compare.estimate: estimate
        exogym.study.compare.folder: OPTION named_again resume_command saved_in
        exogym.study.compare.forecast: MEASURED
        exogym.study.notes: Notes read_notes write_notes
        exogym.study.sweep.run: estimate
    """,
}
MOST = {"home": 43, "mesh": 18, "clusters": 15, "ui": 34, "study": 41, "cli": 35}  # names of each wing in `BEYOND`


# What may be imported


def file_of(module: str) -> Path | None:
    """Return the file of a module of the package."""
    folder = PACKAGE.joinpath(*module.split(".")[1:])
    return next((path for path in (folder / "__init__.py", folder.with_suffix(".py")) if path.exists()), None)


def rooms_behind(module: str) -> list[str]:
    """Return the modules whose names a door hands on; none if the module is no door."""
    file = file_of(module)
    return [] if file is None else re.findall(r"^ +from ([\w.]+) import \*", file.read_text("utf-8"), re.M)


@functools.cache
def public_names(module: str) -> frozenset[str]:
    """Return the public names of a module: those that it lists, or else the classes and functions that it defines.

    A door has those of its rooms.
    """
    file = file_of(module)
    if file is None:
        return frozenset()
    if rooms := rooms_behind(module):
        return frozenset().union(*map(public_names, rooms))
    body = ast.parse(file.read_text("utf-8")).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(importlib.import_module(module).__all__)
    made = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return frozenset(name for name in made if not name.startswith("_"))


def on_pages(pages: str) -> Found:
    """Return the public names that pages describe, by module. A room outside the core is as public as its door."""
    found: Found = {}
    for mark in MARK.findall(pages):
        for asked in mark.split():
            module, _, names = asked.partition(":")
            for home in (module, *(room for room in rooms_behind(module) if not room.startswith("exogym.core."))):
                found.setdefault(home, set()).update(names.split(",") if names else public_names(module))
    return found


def in_seams(page: str) -> set[str]:
    """Return the dotted names in the section "Seams" of a page."""
    section = page.partition("\n## Seams\n")[2].partition("\n## ")[0]
    return set(re.findall(r"`(exogym(?:\.\w+)+)`", section))


# What is imported


def imported(source: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of each name of the package that a source imports or reaches by its dots."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "exogym":
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name.rpartition(".")[::2] for alias in node.names if alias.name.startswith("exogym."))
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"exogym(\.\w+)+", ast.unparse(node)):
            yield ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            texts = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from (text.rpartition(".")[::2] for text in texts if text.startswith("exogym."))


def beyond(wing: str, sources: dict[str, str], public: Found, seams: set[str]) -> Found:
    """Return what the sources of a wing import beyond public names, seams and the wing itself, by module."""
    found: Found = {}
    for source in sources.values():
        for module, name in imported(source):
            full = f"{module}.{name}"
            own = f"{full}.".startswith(f"exogym.{wing}.")
            if not own and name not in public.get(module, ()) and full not in public and full not in seams:
                found.setdefault(module, set()).add(name)
    return found


def sources_of(wing: str) -> dict[str, str]:
    return {str(path): path.read_text("utf-8") for path in sorted((PACKAGE / wing).rglob("*.py"))}


@functools.cache
def allowed() -> tuple[Found, set[str]]:
    pages = [*(DOCS / "api").glob("*.md"), DOCS / "troubleshooting.md"]
    texts = [page.read_text("utf-8") for page in pages]
    return on_pages("\n".join(texts)), in_seams((DOCS / "design.md").read_text("utf-8"))


def told(table: str) -> Found:
    """Return a wing's part of `BEYOND`, by module."""
    lines = " ".join(table.split())
    return {module: set(names.split()) for module, names in re.findall(r"(exogym[\w.]*): ((?:\w+(?: |$))+)", lines)}


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_imports_public_names_and_seams(wing: str) -> None:
    found = beyond(wing, sources_of(wing), *allowed())
    assert found == told(BEYOND[wing])
    assert sum(map(len, found.values())) == MOST[wing]


def test_the_exceptions_become_fewer() -> None:
    assert sum(MOST.values()) <= 186


def test_seams_are_there() -> None:
    seams = allowed()[1]
    assert len(seams) > 15
    for seam in seams:
        module, _, name = seam.rpartition(".")
        assert hasattr(importlib.import_module(module), name), seam


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from exogym.a import seen", {}),
        ("from exogym import a\nimport exogym.a", {}),
        ("from exogym.b.c import Seam\nfrom exogym.ui.views import x", {}),
        ("'from exogym.a import hidden'  # from exogym.a import hidden", {}),
        ("from exogym.a import hidden", {"exogym.a": {"hidden"}}),
        ("def f():\n    from exogym.b import c as d", {"exogym.b": {"c"}}),
        ("if TYPE_CHECKING:\n    from exogym.b.c import Other", {"exogym.b.c": {"Other"}}),
        ("import exogym.b.c as d", {"exogym.b": {"c"}}),
        ("exogym.a.hidden(1)", {"exogym.a": {"hidden"}}),
        ("importlib.import_module('exogym.b.c')", {"exogym.b": {"c"}}),
    ],
)
def test_an_import_beyond_is_seen(source: str, found: Found) -> None:
    assert beyond("ui", {"": source}, {"exogym.a": {"seen"}}, {"exogym.b.c.Seam"}) == found


def test_public_names_are_those_of_the_pages() -> None:
    public = on_pages("<!-- generated: api exogym.files exogym.runs exogym.errors:Stopped -->")
    assert "write_json" in public["exogym.files"] and "is_plain" not in public["exogym.files"]
    assert public["exogym.runs"] == public["exogym.study.runs"] >= {"load", "what_is"}
    assert public["exogym.errors"] == {"Stopped"} and not on_pages("exogym.files")
    assert in_seams("`exogym.x`\n## Seams\n`exogym.a.B` `a.c`\n## Words\n`exogym.d`") == {"exogym.a.B"}
