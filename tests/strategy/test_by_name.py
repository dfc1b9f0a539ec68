"""Every strategy goes by its name: in comparisons, in advice, and where an option is wrong."""

import importlib
import inspect
import math
import pkgutil
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from problems import dyadic, fleet_of, run_of
from strategies import OURS, OWN
from wrapped import parsed

from exogym import contrib, strategy
from exogym.cli import main
from exogym.errors import ArgumentError
from exogym.strategy import DiLoCoStrategy, PeriodicModule
from exogym.strategy.names import Home, homes, short_names
from exogym.strategy.registry import _ELSEWHERE as ELSEWHERE
from exogym.strategy.registry import STRATEGIES, averages_of, parse_strategy, written_options
from exogym.study import compare
from exogym.study.advise import advise
from exogym.testing import check_strategy


def test_a_comparison_takes_every_one() -> None:
    names = ["ddp", *(name for name in OURS if name != "ddp")]
    told = [f"{name}:H=2" if "H" in inspect.signature(OURS[name]).parameters else name for name in names]
    result = compare.compare("digits", ",".join(told), num_nodes=2, max_steps=2, seeds=1, batch_size=4, device="cpu")
    assert [row["title"].split(" (")[0] for row in result.rows] == [OURS[name].title for name in names]
    assert all(math.isfinite(row["val_loss"]) for row in result.rows)


@pytest.mark.parametrize("name", OURS)
def test_advice_takes_every_one(name: str) -> None:
    (row,) = advise(parameters=1e6, num_nodes=8, network="lan-1g", step_seconds=0.2, strategies=[name]).rows
    hides = name == "acco"  # behind each step
    assert row.strategy == name and row.tx_bytes_per_step > 0
    assert (row.seconds_per_step == 0.2) if hides else (row.seconds_per_step > 0.2)


def test_names_are_found_without_loading_strategies() -> None:
    """The table read from the files' text, and what Python defines when it imports all of them."""
    for package in (strategy, contrib):
        for file in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(file.name)
    ours = {name: kind for name, kind in STRATEGIES.loaded.items() if kind.__module__.startswith("exogym.")}
    assert homes() == {name: Home(kind.__module__, kind.__name__) for name, kind in ours.items()}
    assert short_names() == {kind.__name__: name for name, kind in ours.items()}


def new_python(code: str) -> list[str]:
    """Return the lines that a Python prints which has loaded nothing yet."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.splitlines()


LOADED = """
import sys
from typing import Any
from exogym.strategy.registry import STRATEGIES, parse_strategy
def files(): return sorted(m for m in sys.modules if m in {home.module for home in homes().values()})
from exogym.strategy.names import homes
print(type(parse_strategy("topk")).__name__, "edit" in STRATEGIES, len(STRATEGIES) == len(homes()), files())
before = files()
print(type(parse_strategy("pier")).__name__, [name for name in files() if name not in before])
from exogym.strategy import EDiTStrategy
print(EDiTStrategy is STRATEGIES["edit"])
class Mine(EDiTStrategy):
    name = "mine"
print(STRATEGIES["mine"] is Mine, "mine" in [*STRATEGIES], STRATEGIES.get("nobody"))
try:
    type("Other", (EDiTStrategy,), {"name": "acco"})  # whose file is not loaded yet
except Exception as error:
    print(error)
print(len(dict(STRATEGIES)) - len(homes()), len(files()) >= 40)
"""


def test_a_name_loads_its_file_only() -> None:
    said = new_python(LOADED)
    assert said == [
        "TopKStrategy True True ['exogym.strategy.simple_reduce', 'exogym.strategy.topk']",  # top-k is a kind of DDP
        "PierStrategy ['exogym.contrib.pier']",
        "True",
        "True True None",
        "__main__.Other and exogym.contrib.acco.ACCOStrategy both have name='acco': rename one of them",
        "1 True",
    ]


TABLE = """
import sys
from typing import Any
from exogym.advise import advise
advise(parameters=1e8, num_nodes=4, network="wifi", step_seconds="1", strategies=["ddp", "diloco:H=30"])
print(sum(name.split(".")[0] == "exogym" for name in sys.modules))
"""


def test_a_table_of_advice_loads_what_it_needs() -> None:
    assert int(new_python(TABLE)[0]) <= 100


def test_a_class_keeps_its_inner_optimizer_where_the_default_is_not_for_it() -> None:
    assert parse_strategy("fednova", inner_optim="adamw", lr=0.1).inner.spec.cls is torch.optim.SGD
    assert parse_strategy("fedavg", inner_optim="adamw", lr=0.1).inner.spec.cls is torch.optim.AdamW
    with pytest.raises(ArgumentError, match="no a_i is known for AdamW"):
        parse_strategy("fednova:inner_optim=adamw")


def misspelt(option: str) -> str:
    """Return `option` with two letters the other way round."""
    half = len(option) // 2
    at = next(k for k in (*range(half, len(option) - 1), *range(half)) if option[k] != option[k + 1])
    return option[:at] + option[at + 1] + option[at] + option[at + 2 :]


@pytest.mark.parametrize("name", OURS)
def test_a_wrong_option_names_the_right_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = [option for option in written_options(STRATEGIES[name]) if len(option) > 3]
    for option in options:
        with pytest.raises(ArgumentError, match=f"{name} has no option '{misspelt(option)}': did you mean '{option}'"):
            parse_strategy(f"{name}:{misspelt(option)}=1")
        if option in averages_of(STRATEGIES[name]):  # which is an argument of Averaging in Python
            continue
        with pytest.raises(ArgumentError, match=f"has no argument '{misspelt(option)}': did you mean '{option}'"):
            STRATEGIES[name](**{misspelt(option): 1})
    wrong = f"{name}:{misspelt(options[-1])}=1"
    for command in (
        ["compare", "--dataset", "digits"],
        ["advise", "--parameters", "1e6", "--step-seconds", "0.1", "--network", "wifi"],
    ):
        assert main([*command, "--strategies", wrong, "--nodes", "2"]) != 0
        assert f"did you mean '{options[-1]}'" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", OURS)
def test_a_wrong_name_names_the_right_one(name: str) -> None:
    wrong = f"{name}{name[-1]}"  # two swapped letters may make another name: fedper, fedrep
    with pytest.raises(ArgumentError, match=rf"unknown strategy '{wrong}': did you mean '{name}'"):
        parse_strategy(wrong)


def test_what_papers_call_otherwise_is_said_to_be_here() -> None:
    """Each of these names leads to a strategy that exists, and is none itself."""
    for name, here in ELSEWHERE.items():
        assert name not in STRATEGIES and parse_strategy(here)
        for said in (name, name.replace("_", "-"), name.replace("_", "")):
            with pytest.raises(ArgumentError, match=f"unknown strategy '{said}': it is '{here}' here"):
                parse_strategy(f"{said}:H=10")
    with pytest.raises(ArgumentError, match="unknown strategy 'fedadam': it is 'fedopt:server_optim=adam' here"):
        compare.compare("digits", "ddp,fedadam", num_nodes=2, max_steps=2)


# The example of the page


@pytest.fixture(scope="module")
def example():
    """Return the names that the page's example of an algorithm defines, and its lines."""
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", OWN.read_text("utf-8"), re.S) if "ElasticAverage(" in b)
    known = {"PeriodicModule": PeriodicModule, "__name__": "documentation"}
    exec("from exogym.strategy import CommunicateOptimizeStrategy", known)
    exec(compile(block, str(OWN), "exec"), known)
    return known, [line for line in block.splitlines() if line.strip()]


def test_an_algorithm_takes_ten_to_thirty_lines(example) -> None:
    known, lines = example
    assert 10 <= len(lines) <= 30
    make = known["ElasticAverageStrategy"]
    check_strategy(lambda: make(lr=0.02), payload_bytes=lambda row, steps: row * steps / 4)
    assert parsed("easgd:beta=0.5:robust=median").plan(1e6, 4, 4).traffic[0].algorithm == "exact"


def test_the_example_is_its_paper(example) -> None:
    """theta_i <- theta_i - alpha (theta_i - c), c <- c + sum_i alpha (theta_i - c), alpha = beta / N."""
    strategy = example[0]["ElasticAverageStrategy"](H=1, beta=0.9)
    start, moved = dyadic(1, 6), dyadic(3, 6, seed=1)
    model = torch.nn.Linear(5, 1).double()
    fleet = fleet_of(start.expand(3, -1), model=model)
    acting = strategy.on(fleet, run_of(3))
    fleet.blocks[0].params += moved
    acting.communicate(1)
    alpha = 0.3
    torch.testing.assert_close(fleet.blocks[0].params, start + (1 - alpha) * moved, rtol=0, atol=1e-12)
    center = strategy.communication_modules[0].shared_state["center.0"]
    torch.testing.assert_close(center, start + alpha * moved.sum(0, keepdim=True), rtol=0, atol=1e-12)


def test_a_constructor_with_untyped_options_says_how_to_declare_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Untyped(DiLoCoStrategy):
        def __init__(self, k: int = 1, **options: Any):
            super().__init__(H=k, **options)

    monkeypatch.setitem(STRATEGIES, "untyped", Untyped)
    assert parse_strategy("untyped:k=3").given_arguments["k"] == 3
    with pytest.raises(ArgumentError, match=r"declare lr as an argument, or write \*\*options: Unpack\[InnerOptions\]"):
        parse_strategy("untyped:lr=0.1")
