"""The judge: regrets by hand, times that a clock confirms, and advisers that never see the judged task."""

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paths import ROOT
from torch.utils.data import TensorDataset

from exogym import LocalTrainer
from exogym.core.clock import StepTime
from exogym.errors import ArgumentError
from exogym.models import MLP
from exogym.network import Network
from exogym.strategy.registry import parse_strategy
from exogym.study.advise.beliefs import Belief
from exogym.study.advise.prediction import advise
from research.__main__ import main
from research.atlas import Table
from research.judge import judging
from research.judge.halving import safely_chosen
from research.judge.judging import (
    Advised,
    Case,
    Question,
    Site,
    cases_of,
    judge,
    resampled,
    seconds_until,
    shares,
    sites,
)
from research.tests.tables import made_table

ADVICE = ROOT / "research" / "results" / "advice.md"
FAST = Site(Network("1Gbps", "1ms"))
CURVES = {  # losses at steps 0, 10 and 20: DDP's target is 2, and DiLoCo reaches it at step 15
    "ddp": [[3.0, 2.0, 1.0]], "diloco:H=10": [[3.0, 2.5, 1.5]], "demo": [[3.0, 2.9, 2.8]],
}  # fmt: skip
SLOWER = CURVES | {"diloco:H=10": [[3.0, 2.5, 2.4]], "demo": [[3.0, 2.2, 1.6]]}


@pytest.fixture
def one_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "sites", lambda nodes: {"lan": FAST})
    monkeypatch.setattr(judging, "SIZES", {"own": None})
    monkeypatch.setattr(judging, "LEVELS", (1.0,))


def asked(cases: list[Case], advisers: Any) -> Any:
    return judge(cases, advisers).answers


def knowing(cases: list[Case], choose: Any) -> Any:
    """An adviser that knows the answers."""
    by_question = {id(case.question): choose(case) for case in cases}
    return lambda question: Advised(by_question[id(question)])


@pytest.mark.usefixtures("one_network")
def test_regrets_are_those_computed_by_hand(tmp_path: Path) -> None:
    table = made_table(tmp_path / "table.json", {"digits-4": CURVES, "cars-4": CURVES, "words-4": SLOWER})
    cases = cases_of(table)
    ring_s = 6 * (1e-3 + 1000 * 8 / 1e9)  # 1,000 parameters of 4 bytes among 4 nodes
    ddp_s, diloco_s = 10 * (0.01 + ring_s), 15 * (0.01 + ring_s / 10)
    first, _, last = cases
    assert first.seconds == {"ddp": pytest.approx(ddp_s), "diloco:H=10": pytest.approx(diloco_s), "demo": math.inf}
    assert first.best == "diloco:H=10" and last.best == "ddp" and first.is_tied == (ddp_s <= 1.02 * diloco_s)
    alone_s = 4 * 0.01 * 10  # DDP's steps, each with the examples of 4 nodes
    assert not first.is_slow and replace(first, seconds={"ddp": 1.01 * alone_s, "demo": math.inf}).is_slow
    result = judge(cases, {
        "oracle": knowing(cases, lambda case: case.best), "wrong": judging.always("ddp"),
        "never": judging.always("demo"), "silent": lambda question: None,
    })  # fmt: skip
    oracle, wrong, never = (result.scores[name] for name in ("oracle", "wrong", "never"))
    assert (oracle.median, oracle.high, oracle.best, oracle.never) == (0.0, 0.0, 1.0, 0.0)
    assert oracle.median_range == oracle.high_range == (0.0, 0.0)
    assert wrong.high == pytest.approx(ddp_s / diloco_s - 1) and wrong.best == pytest.approx(1 / 3)
    assert never.never == pytest.approx(2 / 3) and never.median == math.inf and result.scores["silent"] is None
    assert result.hindsight == "ddp" and result.scores["best single method"] == wrong
    costly = cases[0].regret(Advised("ddp", cost_s=diloco_s), with_cost=True)
    assert costly == pytest.approx(ddp_s / diloco_s) and cases[0].regret(Advised("diloco:H=10")) == 0


@pytest.mark.usefixtures("one_network")
def test_a_place_never_judges_itself(tmp_path: Path) -> None:
    places = {"digits-4": CURVES, "digits-iid-16": CURVES, "characters-4": SLOWER, "speakers-4": SLOWER}
    table = made_table(tmp_path / "table.json", places)
    prior = made_table(tmp_path / "prior.json", {"digits-4": CURVES, "words-4": CURVES})

    def seen(cases: list[Case]) -> dict[str, set[str]]:
        return {case.place: set(case.question.earlier) for case in cases}

    texts, digits = {"characters-4", "speakers-4"}, {"digits-4", "digits-iid-16"}
    assert seen(cases_of(table)) == dict.fromkeys(texts, digits) | dict.fromkeys(digits, texts)
    both, one = {"digits-4", "words-4"}, {"words-4"}
    assert seen(cases_of(table, prior)) == dict.fromkeys(texts, both) | dict.fromkeys(digits, one)

    other = made_table(tmp_path / "other.json", places | dict.fromkeys(digits, SLOWER))
    before, after = ({c.place: judging.by_table(c.question) for c in cases_of(t)} for t in (table, other))
    assert all(before[place] == after[place] for place in digits)  # their own runs do not count
    assert all(before[place] != after[place] for place in texts)  # the control: others' runs do


@pytest.mark.parametrize("site", [
    FAST, Site(Network(["1Gbps", "1Gbps", "1Gbps", "5Mbps"], "2ms")),
    Site(Network("10Mbps", "20ms"), speeds=(1.0, 1.0, 1.0, 0.25)),
])  # fmt: skip
@pytest.mark.parametrize("method", ["ddp", "diloco:H=10", "sparseloco:H=5", "powersgd", "demo"])
def test_replayed_seconds_are_those_of_a_run_on_the_clock(method: str, site: Site) -> None:
    """After whole rounds."""
    rng = np.random.default_rng(0)
    data = TensorDataset(torch.tensor(rng.normal(size=(64, 8)), dtype=torch.float32), torch.arange(64) % 3)
    model = MLP([8, 16, 3])
    trainer = LocalTrainer(model, data)
    trainer.fit(
        parse_strategy(method), num_nodes=4, max_steps=20, batch_size=4, network=site.network, device="cpu",
        step_seconds=StepTime("10ms", speeds=site.speeds), progress=False,
    )  # fmt: skip
    parameters = judging._own_size({"shapes": [list(p.shape) for p in model.parameters()]})
    each_s = tuple(0.01 / speed for speed in site.speeds or (1.0,) * 4)
    pace = judging._seconds_per_step(parameters, each_s, site, [method])[method]
    assert seconds_until(20, pace) == pytest.approx(trainer.history.last["time_s"], rel=1e-6)
    assert seconds_until(10, pace) == pytest.approx(trainer.history.last["time_s"] / 2, rel=1e-6)


def test_seconds_follow_a_trace() -> None:
    """Against the clock: steps on the first network until its time is over, the others on the second one."""
    first, second = Network("100Mbps", "1ms"), Network("1Mbps", "1ms")
    step_s = [_seconds_of_ddp(network) for network in (first, second)]
    parameters = sum(p.numel() for p in MLP([8, 16, 3]).parameters())
    site = Site(first, later=((0.3, second),))
    pace = judging._seconds_per_step(parameters, (0.01,) * 4, site, ["ddp"])["ddp"]
    assert pace[1][1] > 1.2 * pace[0][1]
    assert seconds_until(40, pace) == pytest.approx(0.3 + (40 - 0.3 / step_s[0]) * step_s[1], rel=0.01)
    assert seconds_until(math.inf, pace) == math.inf


def _seconds_of_ddp(network: Network) -> float:
    """Return a step's seconds by the clock of a run."""
    trainer = LocalTrainer(MLP([8, 16, 3]), TensorDataset(torch.zeros(64, 8), torch.arange(64) % 3))
    trainer.fit(
        parse_strategy("ddp"), num_nodes=4, max_steps=10, batch_size=4, step_seconds="10ms", device="cpu",
        network=network, progress=False,
    )  # fmt: skip
    return float(trainer.history.last["time_s"]) / 10


def test_there_are_twelve_networks_for_any_number_of_nodes() -> None:
    for nodes in (2, 5, 16):
        found = sites(nodes)
        assert len(found) == 12
        for site in found.values():
            step_s = [0.01 / speed for speed in site.speeds or [1.0] * nodes]
            rows = advise(
                parameters=1e6, num_nodes=nodes, network=site.network, step_seconds=step_s, strategies=["ddp"]
            ).rows
            assert rows[0].seconds_per_step > max(step_s)
    assert len(sites(4)["4-hour trace"].later) == 23 and sites(4)["4-hour trace"] is not sites(4)["Wi-Fi"]


@pytest.mark.usefixtures("one_network")
def test_after_training_everything_only_the_seeds_can_mislead(tmp_path: Path) -> None:
    """In the first seed DiLoCo is late, in the mean of both seeds it is not."""
    alike = CURVES | {"diloco:H=10": [[3.0, 2.5, 1.5], [3.0, 2.5, 1.5]]}
    unlike = CURVES | {"diloco:H=10": [[3.0, 2.9, 2.8], [3.0, 0.1, 0.1]]}
    table = made_table(tmp_path / "table.json", {"digits-4": alike, "cars-4": unlike})
    first, second = (case.question for case in cases_of(table))
    found = judging.by_one_seed(first)
    assert (found.method, judging.by_one_seed(second).method) == ("ddp", "diloco:H=10")  # sorted: cars, digits
    assert found.cost_s == pytest.approx(3 * 20 * 4 * 0.01)


def test_an_unsure_pilot_falls_back_to_the_safe_choice() -> None:
    """One of `a` and `b` is often the best, but `safe` is never far from it."""
    beliefs = {"a": Belief(0.0, 0.4, 0.0), "b": Belief(0.0, 0.4, 0.0), "safe": Belief(0.01, 0.0, 0.0)}
    unsure = safely_chosen(dict.fromkeys(beliefs, 1.0), beliefs)
    assert unsure.method == "safe" and unsure.sure == unsure.odds["safe"] < 0.5
    assert safely_chosen({"a": 1.0, "safe": 9.0}, beliefs).method == "a"


@pytest.mark.usefixtures("one_network")
def test_a_pilot_costs_the_seconds_of_its_steps(tmp_path: Path) -> None:
    table = made_table(tmp_path / "table.json", {"digits-4": CURVES, "cars-4": CURVES})
    table.places["digits-4"]["steps"] = table.places["cars-4"]["steps"] = 400  # half of them are DDP's
    (question, _) = [case.question for case in cases_of(table)]
    assert isinstance(question, Question) and question.steps == 200
    advised = judging.by_pilot(question)
    assert 0 < advised.cost_s <= 0.1 * 200 * 4 * 0.01 and 0 < advised.sure < 1
    assert judging.by_advise(question).cost_s == 0


@pytest.mark.slow
def test_the_page_of_the_documentation_is_what_its_command_writes(tmp_path: Path) -> None:
    """Its twelve networks, about two minutes."""
    (line,) = re.findall(r"^python -m research (judge .*)$", ADVICE.read_text(), re.MULTILINE)
    words = shlex.split(line)
    words[-1] = str(tmp_path / "advice.md")
    for number in (1, 3):
        words[number] = str(ROOT / words[number])
    assert main(words) == 0

    def results(text: str) -> str:
        return text[text.index("## Advisers") :]

    assert results((tmp_path / "advice.md").read_text()) == results(ADVICE.read_text())


@pytest.mark.usefixtures("one_network")
def test_shares_and_their_ranges_over_tasks(tmp_path: Path) -> None:
    """With one task all resamples are alike; with a good and a bad one, a share may be 0 or 1."""
    assert shares(np.array([0.0, 0.02, 0.2, 0.21, math.inf])) == (0.4, 0.4, 0.2)
    table = made_table(tmp_path / "table.json", {"digits-4": CURVES, "digits-iid-4": CURVES, "words-4": SLOWER})
    chosen = [(case, Advised("demo")) for case in cases_of(table)]  # never arrives in digits
    assert shares(np.array([case.regret(answer) for case, answer in chosen]))[2] == pytest.approx(2 / 3)
    assert resampled(chosen[:2], shares) == [(0.0, 1.0, 1.0)] * 2
    (low, *_), (high, *_) = resampled([(case, Advised(case.best)) for case, _ in chosen], shares)
    assert low == high == 1.0
    assert [end[2] for end in resampled(chosen, shares)] == [0.0, 1.0]


@pytest.mark.usefixtures("one_network")
def test_the_command_judges_a_table(tmp_path: Path, capfd: Any) -> None:
    table = made_table(tmp_path / "table.json", {"digits-4": CURVES, "cars-4": CURVES, "words-4": SLOWER})
    table.write()
    page = tmp_path / "advice.md"
    asked = ["judge", str(table.path)]
    assert main([*asked, "--page", str(page)]) == 0
    said = capfd.readouterr().out
    assert said.startswith("3 cases of 3 tasks") and "best single method, in hindsight: ddp" in said
    text = page.read_text()
    assert f"python -m research judge {table.path} --page {page}" in text and "In 3 cases" in text
    assert (
        "--tasks cars,digits,words --nodes 4 --strategies ddp,demo,diloco:H=10 --steps 20 --page runs/table.md" in text
    )
    for part in ("## The trainings", "## By place", "## By network", "## Where it is wrong", "| advise"):
        assert part in text
    assert main([*asked, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert len(found["cases"]) == 3
    assert found["cases"][0]["seconds"]["demo"] is None and found["scores"]["advise"]["cases"] == 3

    def refused(words: list[str], why: str) -> None:
        assert main(["judge", *words]) == 2
        assert why in capfd.readouterr().err

    refused([str(table.path), "--page", str(tmp_path / "page.txt")], "should end in .md")
    refused([str(tmp_path / "none.json")], "does not exist")
    claims = made_table(tmp_path / "claims.json", {"characters, nodes=4": CURVES})
    claims.write()
    refused([str(claims.path)], "wanted results of python -m research benchmark --trials")
    single = made_table(tmp_path / "single.json", {"digits-4": CURVES})
    single.write()
    assert main(["judge", str(single.path)]) == 0
    assert "no earlier runs of other tasks for digits-4" in capfd.readouterr().err
    alone = made_table(tmp_path / "alone.json", {"digits-4": {"ddp": CURVES["ddp"]}})
    with pytest.raises(ArgumentError, match="has no place with ddp and another method"):
        cases_of(alone)
    assert cases_of(Table(table.path)) == cases_of(table)  # the same from the file
