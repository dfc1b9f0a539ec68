"""A new algorithm with state is one file: everything that lists, teaches, trains or times strategies finds it there."""

import ast
import inspect
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from paths import TESTS
from processes import python
from strategies import OURS, PAGE, identities_of_the_page, table, table_of_identities, table_of_the_page

import exogym
from exogym.errors import StrategyError
from exogym.strategy import DiLoCoStrategy, PeriodicModule, Strategy
from exogym.strategy.registry import STRATEGIES

HERE, PACKAGE = TESTS, Path(exogym.__path__[0])

ALGORITHM = '''
"""Averaging with a momentum of the averages: v <- beta v + mean - theta, theta <- theta + v, every H steps."""

from exogym.errors import checked
from exogym.strategy.communicate_optimize import CommunicateOptimizeStrategy, PeriodicModule
from exogym.strategy.traffic import Traffic


class MomentumAverage(PeriodicModule):
    weighted_means = True

    def __init__(self, H, beta):
        super().__init__()
        self.take_rounds(H)
        self.beta = beta

    def start(self, fleet, run):
        super().start(fleet, run)
        self.row_state = {f"v.{b}": block.zeros() for b, block in enumerate(fleet.blocks)}

    def traffic(self, P, N, b):
        return [Traffic("all_reduce", P * b, self.interval_steps)]

    def communicate(self, fleet, step):
        for b, block in enumerate(fleet.blocks):
            v = self.row_state[f"v.{b}"]
            v.mul_(self.beta).add_(fleet.comm.all_reduce(block.params, "mean")).sub_(block.params)
            block.params.add_(v)


class MomentumAverageStrategy(CommunicateOptimizeStrategy):
    name, title, paper, payload = "momentum_average", "Averaging with momentum", "none", "P b / H"
    equation, needs = "v <- beta v + mean_j theta_j - theta_i; theta_i <- theta_i + v", "all nodes every H steps"
    identities = ("beta=0 = fedavg",)

    @checked
    def __init__(self, inner_optim="adamw", H=4, *, beta=0.3, lr=None, max_norm=None):
        super().__init__(inner_optim, [MomentumAverage(H, beta)], lr=lr, max_norm=max_norm)
'''

# In a fork of this process, which has torch; what it has of the package is forgotten there.
AFRESH = """
import sys
for name in [*sys.modules]:
    if name.partition(".")[0] in ("exogym", "battery", "strategies"):
        del sys.modules[name]
sys.path[:0] = sys.argv[1:]
"""
EVERYTHING = """
import exogym
from battery import battery
from strategies import STRATEGIES, table, table_of_identities

from exogym import advise, compare
from exogym.cli import main
from exogym.testing import LAWS

print(exogym.__file__)
name = "momentum_average"
from exogym.strategy import MomentumAverageStrategy
for law in LAWS:
    print("law", law, getattr(battery(name), law.replace(" ", "_"))())
battery(name).ends_as_wanted(processes=2)
print(table(), table_of_identities())
for command in ("compare", "advise"):
    main([command, "--help"])
result = compare.compare("digits", f"ddp,{name}:H=2", num_nodes=2, max_steps=4, seeds=1, batch_size=8, device="cpu")
print(result.rows[1]["title"], "sent", round(result.rows[0]["tx_bytes"] / result.rows[1]["tx_bytes"], 6))
advice = advise.advise(parameters=1e8, num_nodes=8, network="lan-1g", step_seconds=0.2, strategies=[f"{name}:H=100", "diloco:H=100"])
status = main("compare --dataset theirs:task --strategies ddp,theirs:H=2 --nodes 2 --steps 4 --seeds 1 --out out".split())
print("theirs", status)
print("advice", len({row.seconds_per_step for row in advice.rows}), advice.recommended.strategy)
"""  # noqa: E501

THEIRS = """
from exogym.strategy import DiLoCoStrategy
from exogym.study.tasks import load_task

class Theirs(DiLoCoStrategy):
    name = "theirs"

def task():
    return load_task("digits")
"""


def told(folder: Path, algorithm: str) -> subprocess.CompletedProcess[str]:
    """Run everything over a copy of the package with `algorithm` as one more file."""
    root = folder / "root"
    shutil.copytree(PACKAGE, root / "exogym")  # what is compiled, too
    (root / "exogym" / "strategy" / "momentum_average.py").write_text(algorithm)
    (folder / "theirs.py").write_text(THEIRS)
    return python("-c", AFRESH + EVERYTHING, root, HERE, cwd=folder)


def test_a_new_algorithm_is_one_file(tmp_path):
    done = told(tmp_path, ALGORITHM)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert Path(lines[0]).is_relative_to(tmp_path)
    assert sum(line.startswith("law ") for line in lines) == 7
    assert "| `momentum_average` | P b / H | all_reduce | all nodes every H steps |" in lines
    head = "| `momentum_average` (none), `MomentumAverageStrategy` | `v <- "
    (row,) = [line for line in lines if line.startswith(head)]
    assert row.endswith(" | beta=0 = fedavg |")
    helped = re.findall(r"Names: (.*?)\.", " ".join(done.stdout.split()))
    assert len(helped) == 2 and all("momentum_average" in names.split(", ") for names in helped)
    assert "Averaging with momentum (H=2) sent 2.0" in lines  # half of what DDP sends
    assert "theirs 0" in lines
    assert lines[-1].startswith("advice 1 ")  # it costs what DiLoCo costs


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (ALGORITHM.replace('name, title, paper, payload = "momentum_average", ', "title, paper, payload = "),
         "cannot import name 'MomentumAverageStrategy'"),
        (ALGORITHM.replace("self.row_state = {", "self.kept = {").replace("self.row_state[", "self.kept["),
         "law 'stopping'"),
    ],
    ids=["no name", "hidden state"],
)  # fmt: skip
def test_what_is_not_said_is_not_found(algorithm, words, tmp_path):
    done = told(tmp_path, algorithm)
    assert done.returncode != 0 and re.search(words, done.stderr), done.stderr


# What each says of itself


def test_the_pages_have_the_tables():
    assert table_of_the_page()[1] == table(), "run: make table"
    assert identities_of_the_page()[1] == table_of_identities(), "run: make table"
    assert len(OURS) >= 25 and all(f"`{name}`" in table() for name in OURS)


@pytest.mark.parametrize("name", OURS)
def test_the_page_has_a_section_for_each(name):
    kind = OURS[name]
    (section,) = re.findall(rf"^##+ [^\n]*: `{kind.__name__}`\n(.*?)(?=^##|\Z)", PAGE.read_text("utf-8"), re.M | re.S)
    words = " ".join(section.split())
    assert kind.paper in words
    assert f"[`{name}`](#" in PAGE.read_text("utf-8")


@pytest.mark.parametrize("name", OURS)
def test_a_row_of_the_table_is_whole(name):
    kind = OURS[name]
    said = (kind.title, kind.paper, kind.equation, kind.payload, kind.needs, *kind.identities)
    assert kind.identities and all(text and not set("|`\n") & set(text) for text in said)


def value(formula: str, strategy: type[Strategy], **symbols: float) -> float:
    """Return a formula as `payload` writes it: a space is a product, the names are arguments of the constructor."""
    arguments = inspect.signature(strategy).parameters
    defaults = {"density": 0.01, "accumulation": 16}  # instead of None: see their Args
    given = {name: parameter.default for name, parameter in arguments.items()}
    given |= {name: default for name, default in defaults.items() if given.get(name, 0) is None}
    names = given | symbols | {"ceil": math.ceil, "log2": math.log2}
    python = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula).replace("^", "**")
    return float(eval(python, {"__builtins__": {}}, names))


@pytest.mark.parametrize("name", OURS)
def test_the_payload_is_that_of_the_plan(name):
    kind = OURS[name]
    plan = kind().plan(1e6, 4, 4)
    sent = sum(t.payload_bytes / t.every_steps for t in plan.traffic if t.kind != "pull")
    assert kind.title and kind.paper and value(kind.payload, kind, P=1e6, P_s=1e6, N=4, b=4) == pytest.approx(sent)
    assert value(f"2 ({kind.payload})", kind, P=1e6, P_s=1e6, N=4, b=4) != pytest.approx(sent)


def test_a_name_is_of_one_class_and_not_of_its_children():
    assert not type("Child", (DiLoCoStrategy,), {}).registered and DiLoCoStrategy.registered
    with pytest.raises(StrategyError, match="both have name='diloco': rename one of them"):
        type("Other", (Strategy,), {"name": "diloco"})
    assert STRATEGIES["diloco"] is DiLoCoStrategy


# Who asks


def questions_of_class(source: str, classes: set[str]) -> list[str]:
    """Return what a source asks for its class, where the answer is one of `classes`."""
    asked = []
    for node in ast.walk(ast.parse(source)):
        is_call = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass")
        compared = isinstance(node, ast.Compare) and re.search(r"\btype\(|__class__", ast.unparse(node))
        if (is_call or compared) and set(re.findall(r"\w+", ast.unparse(node))) & classes:
            asked.append(ast.unparse(node))
    return asked


def families() -> set[str]:
    """Return the names of all strategies and modules of the package, but the base of all strategies."""
    from exogym.strategy.communicate_optimize import Module

    found, left = set(), [Strategy, Module]
    while left:
        kinds = [kind for kind in left.pop().__subclasses__() if kind.__module__.startswith("exogym.")]
        left += kinds
        found |= {kind.__name__ for kind in kinds}
    return found | {"STRATEGIES"}


def test_nobody_outside_asks_a_strategy_for_its_class():
    outside = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "strategy"]
    assert {str(p): q for p in outside if (q := questions_of_class(p.read_text("utf-8"), families()))} == {}


@pytest.mark.parametrize(
    "source",
    ["isinstance(s, DiLoCoStrategy)", "x = isinstance(m, (int, SparseCommunicator))", "issubclass(k, DeMoStrategy)",
     "type(s) is CommunicateOptimizeStrategy", "type(s) in STRATEGIES.values()"],
)  # fmt: skip
def test_a_question_of_class_is_seen(source):
    assert questions_of_class(source, families()) and not questions_of_class("isinstance(s, Strategy)", families())


@pytest.mark.parametrize(
    ("name", "said"),
    [("correct", "let the class also inherit exogym.strategy.capabilities.Corrects"), ("local_steps", "ChoosesClients"),
     ("tune", "which is retired: use a ByteBudget, which sets H"), ("only_means", "set right_in_mean = True")],
)  # fmt: skip
def test_a_capability_is_declared_by_name(name, said):
    with pytest.raises(StrategyError, match=f"Mine has {name}, .*{said}"):
        type("Mine", (PeriodicModule,), {name: lambda self: None})


def test_a_retired_capability_says_what_to_do():
    with pytest.raises(ImportError, match=r"define consensus\(fleet\) in your communication module"):
        exec("from exogym.strategy.capabilities import HasOuterModel")
