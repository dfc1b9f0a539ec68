"""The benchmark: it trains what it says, once; and its page says what its results say."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

from exogym.strategy.registry import STRATEGIES, is_ours
from research.__main__ import main
from research.benchmark import FULL, SHORT, Results, Scope, parts_of, speed
from research.benchmark.page import text_of
from research.benchmark.results import SHARED, hardware, scaling
from research.reproduce import Reproduction


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Throughput is measured over a few steps: no test looks at how much it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "LEAST_S", 0.0)
        patch.setattr(speed, "ROUND", 2)
        yield


@pytest.fixture(scope="module")
def trained(quick: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a short benchmark."""
    out = tmp_path_factory.mktemp("benchmark")
    assert main(command(out)) == 0
    return out


def command(out: Path) -> list[str]:
    return ["benchmark", "--short", "--tasks", "digits", "--nodes", "2", "--device", "cpu", "--out", str(out)]


def test_the_page_has_every_method_and_measure(trained: Path) -> None:
    text = (trained / "short.md").read_text()
    for method in SHORT.methods:
        lines = [line for line in text.splitlines() if line.startswith(f"| `{method}`")]
        assert len(lines) >= 5, method  # of all tasks, quality, loss, bytes and examples per second
    for name in re.findall(r"\]\((images/\S+)\)", text):
        assert 1000 < (trained / name).stat().st_size < 40_000
    assert "one seed" in text and "`python -m research benchmark --short --tasks digits --nodes 2`" in text


def test_bytes_are_those_of_the_formulas(trained: Path) -> None:
    """In 50 steps of two nodes, 2,410 parameters: DDP's ring sends S a step, DiLoCo S a round."""
    (part,) = Results(trained / "short.json").parts.values()
    rows = {row["strategy"]: row for row in part["rows"]}
    assert (part["steps"], part["batch_size"], part["parameters"]) == (50, 8, 2410)
    assert rows["ddp"]["tx_bytes"] == 50 * 2410 * 4 and rows["single"]["tx_bytes"] == 0
    assert [rows[m]["reduction"] for m in SHORT.methods[2:4]] == [10, 25] and rows["ddp"]["quality"] == 1
    rates = part["predicted"]
    assert rates["single"]["wifi"] == pytest.approx(rows["single"]["examples_per_s"], rel=1e-5)
    assert rates["ddp"]["home"] < rates["diloco:H=10"]["home"] < 2 * rates["single"]["home"]


def test_throughput_is_measured_apart_from_the_training(trained: Path) -> None:
    """Again where that is asked for; what was trained stays. Without it the page has no such figures."""
    results = Results(trained / "short.json")
    before = results.parts["digits-2"]
    assert all(row["examples_per_s"] > 0 and row["examples_per_s_std"] is None for row in before["rows"])  # one turn
    assert main([*command(trained), "--throughput"]) == 0
    after = Results(trained / "short.json").parts["digits-2"]
    for one, other in zip(before["rows"], after["rows"], strict=True):
        differ = {name for name in one if one[name] != other[name]}
        assert differ <= {"examples_per_s", "examples_per_s_std"} and "examples_per_s" in differ
    for row in before["rows"]:
        row["examples_per_s"] = None
    results.found["parts"]["digits-2"] = before | {"predicted": {}}
    assert "predicted | infiniband" not in text_of(results.found, trained / "short.md")


def test_nothing_is_trained_twice(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (trained / "short.md").read_text()
    assert main(command(trained)) == 0
    said = capsys.readouterr()
    assert "left to train" not in said.err and (trained / "short.md").read_text() == before


def test_the_page_is_made_from_the_results_only(trained: Path) -> None:
    results = Results(trained / "short.json")
    page = trained / "short.md"
    assert text_of(results.found, page) == page.read_text()
    (part,) = results.found["parts"].values()
    part["rows"][1]["val_loss"] = 7.5
    assert "7.5000" in text_of(results.found, page) and "7.5000" not in page.read_text()


def test_hours_are_said_first_and_ctrl_c_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(self: object, at: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("research.commands.benchmark.Teller.__call__", stop)
    assert main(command(tmp_path)) == 130
    first, *others = capsys.readouterr().err.splitlines()
    assert re.search(r"7 of 7 runs left to train, about .* in one process", first)
    again = f"to continue: python -m research benchmark --short --tasks digits --nodes 2 --out {tmp_path} --device cpu"
    assert again in "\n".join(others).splitlines()[-2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--nodes", "1,2"], "whole numbers from 2 on"),
        (["--tasks", "digit"], "did you mean 'digits'"),
        (["--page", "page.html"], "should end in .md"),
        (["--short", "--page", "page.md"], "leave out --short or --page"),
        (["--only-page"], "train first"),
        (["--strategies", "ddpp"], "did you mean 'ddp'"),
        (["--tasks", "cifar10", "--data", "nowhere.npz"], "does not exist"),
    ],
)
def test_bad_input_is_refused(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["benchmark", "--out", str(tmp_path / "out"), *options]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_full_one_has_every_strategy_and_an_equal_share_of_examples(tmp_path: Path) -> None:
    why: list[str] = []
    work = Reproduction(tmp_path, seeds=(0,), device="cpu")
    two, many = parts_of(Scope(("digits",), (2, 64), FULL.methods), work, {}, why.append)
    ours = {name for name, kind in STRATEGIES.items() if is_ours(kind)}
    assert {method.partition(":")[0] for method in two.cells} == ours | {"single"} and not why
    assert two.cells.keys() == many.cells.keys()
    assert {cell.batch_size for cell in two.cells.values()} == {8}
    assert {cell.batch_size for cell in many.cells.values()} == {1}  # no less


def test_strategies_that_are_named_are_trained_beside_one_node_and_ddp(tmp_path: Path) -> None:
    assert main([*command(tmp_path), "--strategies", "sparta:p_sparta=0.1, ddp"]) == 0
    (part,) = Results(tmp_path / "short.json").parts.values()
    assert [row["strategy"] for row in part["rows"]] == ["single", "ddp", "sparta:p_sparta=0.1"]
    assert "--strategies" in (tmp_path / "short.md").read_text()


def test_what_is_predicted_of_devices_and_of_many_nodes() -> None:
    """No fleet is faster than its nodes together, a wider network never slower, and DDP is the first to suffer."""
    for each in hardware().values():
        for narrow, wide in zip(each["wifi"], each["infiniband"], strict=True):
            assert 0 < narrow <= wide <= 4
        assert each["wifi"][0] == min(each["wifi"])
    for nodes, line in scaling().items():
        assert len(line) == len(SHARED) and all(0 < x <= int(nodes) for x in line)


def test_the_page_of_the_documentation_is_what_its_results_say() -> None:
    page = ROOT / "research" / "results" / "benchmark.md"
    results = Results(page.with_suffix(".json"))
    assert page.read_text() == text_of(results.found, page), "make it anew: benchmark --only-page --page ..."
    wanted = [f"{task}-{nodes}" for task in SHORT.tasks for nodes in SHORT.nodes]
    assert [*results.parts] == wanted, "not whole"
    for part in results.parts.values():
        assert tuple(row["strategy"] for row in part["rows"]) == SHORT.methods and part["seeds"] == 3
        assert part["steps"] == SHORT.steps.get(part["task"], part["steps"])
    for name in re.findall(r"\]\((images/\S+)\)", page.read_text()):
        assert (page.parent / name).stat().st_size < 40_000
