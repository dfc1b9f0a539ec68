"""Claims: verdicts follow from results, nothing is trained twice, and the page says what the results say."""

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from paths import ROOT
from processes import python

from exogym.errors import ArgumentError, checked
from exogym.strategy import DiLoCoStrategy, Strategy
from research.__main__ import main
from research.reproduce import CLAIMS, Cell, Claim, Page, Reproduction, Run, Seen, Verdict, claims_of
from research.reproduce import checks as c
from research.reproduce.claim import Check, Found, plain_of, run_of
from research.reproduce.training import CellProgress

NAN = math.nan


def runs(losses: Sequence[float], payload: float = 1e6, **curves: Sequence[float]) -> list[Run]:
    """Return a run for each seed that ends at this loss; curves are the same for all."""
    steps = {"step": list(range(0, 100 * len(next(iter(curves.values()), [0])), 100))}
    last = {"payload_bytes": payload, "tx_bytes": payload, "val_accuracy": 0.5, "wall_s": 60.0}
    return [
        Run(seed, {"val_loss": loss, **last}, {"val_loss": [loss], **steps, **curves})
        for seed, loss in enumerate(losses)
    ]


A, B = [1.0, 1.1, 1.2], [1.1, 1.2, 1.3]  # better in each seed, though means lie within the spread
FAILED = [Run(0, {"val_loss": math.inf}, {"step": []}, "not finite")]
RISING, FALLING = [0.0, 1.0, 2.0, 3.0], [0.0, 3.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("check", "found", "holds"),
    [
        (c.lower("a", "b"), {"a": runs(A), "b": runs(B)}, True),
        (c.lower("a", "b"), {"a": runs(B), "b": runs(A)}, False),
        (c.lower("a", "b"), {"a": runs(A), "b": runs([1.1, 1.0, 1.3])}, None),
        (c.lower("a", "b"), {"a": runs(A), "b": runs([math.inf] * 3)}, True),
        (c.lower("a", "b", by=0.2), {"a": runs(A), "b": runs(B)}, False),
        (c.lower("a", "b", by=0.05), {"a": runs(A), "b": runs(B)}, True),
        (c.lower("a", "b", measure="payload_bytes"), {"a": runs(B, 1.0), "b": runs(A, 2.0)}, True),
        (c.no_worse("a", "b", 0.02), {"a": runs([1.01] * 3), "b": runs([1.0] * 3)}, True),
        (c.no_worse("a", "b", 0.02), {"a": runs([1.03] * 3), "b": runs([1.0] * 3)}, False),
        (c.no_worse("a", "b", 0.02), {"a": runs([0.5] * 3), "b": runs([1.0] * 3)}, True),
        (c.no_worse("a", "b", 0.02), {"a": FAILED, "b": FAILED}, False),
        (c.no_worse("a", "b", 0.02), {"a": runs([1.0]), "b": FAILED}, True),
        (c.bytes_are("a", "b", 0.1), {"a": FAILED, "b": runs(A, 1000.0)}, False),
        (c.lower("a", "b", measure="payload_bytes"), {"a": FAILED, "b": runs(A)}, False),
        (c.bytes_are("a", "b", 0.1), {"a": runs(A, 104.0), "b": runs(A, 1000.0)}, True),
        (c.bytes_are("a", "b", 0.1), {"a": runs(A, 106.0), "b": runs(A, 1000.0)}, False),
        (c.ascending(["a", "b"]), {"a": runs(A), "b": runs(B)}, True),
        (c.ascending(["b", "a"]), {"a": runs(A), "b": runs(B)}, False),
        (c.ascending(["a", "b"]), {"a": runs(A), "b": runs([0.9, 1.5, 1.6])}, None),
        (c.best_is(["a", "b"], ["a"], "here"), {"a": runs(A), "b": runs(B)}, True),
        (c.best_is(["a", "b"], ["b"], "here"), {"a": runs(A), "b": runs(B)}, False),
        (c.spread_shrinks("a", 0.5), {"a": runs(A, consensus_distance=FALLING)}, True),
        (c.spread_shrinks("a", 0.5), {"a": runs(A, consensus_distance=RISING)}, False),
        (c.spread_follows_lr("a"), {"a": runs(A, consensus_distance=FALLING, lr=[NAN, 6.0, 4.0, 2.0])}, True),
        (c.spread_follows_lr("a"), {"a": runs(A, consensus_distance=RISING, lr=[NAN, 6.0, 4.0, 2.0])}, False),
        (c.spread_follows_lr("a"), {"a": runs(A, consensus_distance=FALLING, lr=[2.0] * 4)}, False),
        (c.late_order("a", ["x", "y"], 0.5), {"a": runs(A, x=[9, 9, 1, 5], y=[1, 1, 2, 4])}, True),
        (c.late_order("a", ["x", "y"]), {"a": FAILED}, False),
        (c.late_order("a", ["y", "x"], 0.5), {"a": runs(A, x=[9, 9, 1, 5], y=[1, 1, 2, 4])}, False),
    ],
)  # fmt: skip
def test_a_check_sees_what_the_results_say(check: Check, found: Found, holds: bool | None) -> None:
    assert check(found).holds is holds


def arrivals(drift: float) -> Found:
    """Return results in which H costs a share `drift` of the speed for each doubling of H."""
    steps = list(range(0, 2001, 100))
    found = {}
    for H in (1, 10, 100):
        losses = [1 + math.exp(-t / 300 / (1 + drift) ** math.log2(H)) for t in steps]
        last = {"val_loss": losses[-1], "payload_bytes": 1e6 * 2000 / H}
        found[str(H)] = [Run(0, last, {"step": steps, "val_loss": losses})]
    return found


def test_the_best_H_follows_from_steps_and_bytes() -> None:
    """1 MB among 2 nodes takes 8 s at 1 Mbit/s and 80 ms at 100 Mbit/s; a step 10 ms."""
    check = c.best_H_grows({H: str(H) for H in (1, 10, 100)}, ["100Gbps", "100Mbps", "1Mbps"], 0.0, 0.01, 2)
    seen = check(arrivals(0.2))
    assert seen.holds and "is 1 at 100Gbps, 10 at 100Mbps, 100 at 1Mbps" in seen.says
    assert not check(arrivals(0.0)).holds  # with nothing lost to H, the largest is best everywhere
    back = c.best_H_grows({H: str(H) for H in (1, 10, 100)}, ["1Mbps", "100Mbps", "100Gbps"], 0.0, 0.01, 2)
    assert not back(arrivals(0.2)).holds


def test_a_verdict_needs_every_check() -> None:
    yes, no, open_ = Seen("", True), Seen("", False), Seen("", None)
    assert [Verdict.of(x) for x in ([yes, yes], [yes, no], [yes, open_], [no, no], [no, open_], [open_])] == [
        Verdict.YES, Verdict.PART, Verdict.PART, Verdict.NO, Verdict.UNCLEAR, Verdict.UNCLEAR,
    ]  # fmt: skip


def world(claim: Claim, draw: np.random.Generator) -> Found:
    """Return results of a claim by chance: ties, orders and bytes of all kinds."""
    found = {}
    for label in claim.cells:
        loss = draw.choice([1.0, 1.001, 1.1, 2.0]) + draw.uniform(0, 1e-4, 3)
        payload = 1e6 * draw.choice([1.0, 0.1, 1 / 8, 64 / 4096 * 14 / 32, 1e-3])
        falling = np.linspace(3, draw.choice([0.5, 2.0]), 12)
        pace = draw.uniform(100, 400)
        curves = {
            "consensus_distance": draw.permutation(falling) if draw.random() < 0.5 else falling,
            "lr": np.linspace(2, 0, 12),
            "mean_val_loss": np.full(12, draw.choice([0.9, 2.0])),
            "node_val_loss": np.full(12, draw.choice([0.8, 3.0])),
        }
        plain = {name: [float(x) for x in line] for name, line in curves.items()}
        found[label] = [
            Run(
                run.seed,
                run.last,
                {**run.curves, "val_loss": [float(1 + math.exp(-t / pace)) for t in run.curves["step"]]},
            )
            for run in runs([float(x) for x in loss], float(payload), **plain)
        ]
    return found


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda claim: claim.name)
def test_each_check_of_each_claim_can_come_out_either_way(claim: Claim) -> None:
    draw, seen = np.random.default_rng(0), [set[bool | None]() for _ in claim.checks]
    for _ in range(2000):
        for kinds, each in zip(seen, claim.seen(world(claim, draw)), strict=True):
            kinds.add(each.holds)
        if all({True, False} <= kinds for kinds in seen):
            return
    pytest.fail(f"only {seen} came out")


def test_a_claim_without_its_results_is_refused() -> None:
    with pytest.raises(ArgumentError, match="R1: no results of DDP, DiLoCo"):
        CLAIMS["R1"].seen({"one node": runs(A)})


def test_claims_say_what_they_are() -> None:
    names = [claim.name for claim in CLAIMS.values()]
    assert {f"R{k}" for k in range(1, 16)} <= {*names} and len(names) == len(set(names))
    for claim in CLAIMS.values():
        assert claim.paper and claim.found and claim.asks and claim.checks
        assert claim.picture in ("dots", "curves", "spread") and all(claim.cells)


def test_a_wrong_name_names_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ArgumentError, match="no claim 'R99': did you mean 'R9'"):
        claims_of(["R1", "R99"])
    assert main(["reproduce", "moment"]) == 2
    assert "there is no claim 'moment': did you mean 'momentum'" in capsys.readouterr().err


# ---------------------------------------------------------------- training

SMALL: dict[str, Any] = {"task": "digits", "nodes": 2, "steps": 20, "batch_size": 4}


def claim_of(*strategies: str, checks: Sequence[Check] = ()) -> Claim:
    cells = {text: Cell(text, **SMALL) for text in strategies}
    return Claim("toy", "a toy", "none", "nothing", "nothing?", cells, checks or [c.lower(*strategies[:2])])


def same(a: Mapping[str, Sequence[Run]], b: Mapping[str, Sequence[Run]]) -> bool:
    """Whether all but the seconds is the same."""

    def timeless(found: Mapping[str, Sequence[Run]]) -> str:
        plain = {label: [plain_of(run) for run in each] for label, each in found.items()}
        for run in itertools.chain(*plain.values()):
            run["last"].pop("wall_s")
        return json.dumps(plain)

    return timeless(a) == timeless(b)


def results(work: Reproduction, claim: Claim) -> dict[str, list[Run]]:
    return {label: work.results(cell) for label, cell in claim.cells.items()}


KILLED = """
import os, signal, sys
from research.reproduce import Cell, Claim, Reproduction
cells = {{text: Cell(text, **{small!r}) for text in ("ddp", "fedavg:H=5")}}
def watch(at):
    if at.cell.says == "fedavg:H=5" and at.standing.step:
        os.kill(os.getpid(), signal.SIGKILL)
Reproduction(sys.argv[1], seeds=(0,), watch=watch, device="cpu").train([Claim("toy", "", "", "", "", cells, [])])
"""


def of_default(H: int) -> Callable[..., Strategy]:
    """Return a function that makes a strategy whose H is `H` by default, and gives no H."""

    class Changed(DiLoCoStrategy):
        @checked
        def __init__(self, H: int = H, alpha: float = 0.5) -> None:
            super().__init__("sgd", H=H)

    def changed(setting: Any) -> Strategy:
        return Changed()

    return changed


def test_a_run_with_an_earlier_default_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    cells = [Cell(of_default(H), task="digits", nodes=2, steps=20) for H in (5, 10, 5)]
    works = [Reproduction(tmp_path, seeds=(0,), device="cpu") for _ in cells]
    works[0].results(cells[0])
    assert [work.missing(cell) for work, cell in zip(works, cells, strict=True)] == [[], [0], []]
    (named,) = {str(work.asked(cell)["strategies"]) for work, cell in zip(works, cells, strict=True)}
    assert "Changed" in named  # the given arguments are the same
    works[1].results(cells[1])
    first, second = sorted(tmp_path.iterdir())
    assert second.name == f"{first.name}-2"
    assert [Reproduction(tmp_path, seeds=(0,)).missing(cell) for cell in cells] == [[]] * 3
    saved = json.loads((first / "run.json").read_text("utf-8"))
    for change in (lambda: saved["all_arguments"]["changed"].pop("alpha"), lambda: saved.pop("all_arguments")):
        change()  # as an earlier ExoGym wrote it, before this option existed
        (first / "run.json").write_text(json.dumps(saved), "utf-8")
        assert Reproduction(tmp_path, seeds=(0,)).missing(cells[0]) == []


def test_what_is_foreseen_for_a_task_is_corrected_by_that_task_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("research.reproduce.training.LEAST_SPENT_S", 0.0)
    work = Reproduction(tmp_path, seeds=(0,), device="cpu")
    trained, same, other = (
        Cell("ddp", task=t, nodes=2, steps=n) for t, n in (("digits", 20), ("digits", 40), ("pictures", 20))
    )
    before = [work.seconds_left([cell]) for cell in (same, other)]
    work.results(trained)
    after = [work.seconds_left([cell]) for cell in (same, other)]
    assert after[0] != before[0] and after[1] == before[1]


def test_after_a_kill_only_what_is_missing_is_trained(tmp_path: Path) -> None:
    claim = claim_of("ddp", "fedavg:H=5")
    done = python("-c", KILLED.format(small=SMALL), tmp_path)
    assert done.returncode == -9, done.stderr
    (kept,) = tmp_path.glob("*/*/outcome.json")
    before, told = kept.stat().st_mtime_ns, list[CellProgress]()
    work = Reproduction(tmp_path, seeds=(0,), watch=told.append, device="cpu")
    assert [work.missing(cell) for cell in claim.cells.values()] == [[], [0]]
    assert work.seconds_left(claim.cells.values()) > 0
    found = results(work, claim)
    assert kept.stat().st_mtime_ns == before
    assert {at.cell.says for at in told} == {"fedavg:H=5"} and told[-1].run_ended and told[-1].runs_left == 0
    assert work.seconds_left(claim.cells.values()) == 0
    assert same(found, results(Reproduction(tmp_path / "undisturbed", seeds=(0,), device="cpu"), claim))
    told.clear()
    assert same(found, results(work, claim)) and not told


def test_claims_share_what_they_have_in_common_and_nothing_else(tmp_path: Path) -> None:
    told: list[CellProgress] = []
    work = Reproduction(tmp_path, seeds=(0,), watch=told.append, device="cpu")
    work.train([claim_of("ddp", "single"), claim_of("single", "ddp:lr=0.1")])
    assert [at.cell.says for at in told if at.run_ended] == ["ddp", "single", "ddp:lr=0.1"]
    other = Cell("ddp", **(SMALL | {"batch_size": 5}))
    assert Reproduction(tmp_path, seeds=(0,), device="cpu").missing(other) == [0]
    assert Reproduction(tmp_path, seeds=(0, 1), device="cpu").missing(Cell("ddp", **SMALL)) == [1]
    assert (
        Reproduction(tmp_path, seeds=(0,), share=0.5, device="cpu").missing(Cell("ddp", **SMALL)) == []
    )  # 20 at least


def test_a_run_that_diverges_is_a_result(tmp_path: Path) -> None:
    claim = claim_of("ddp", "ddp:inner_optim=sgd:lr=1e30")
    found = results(Reproduction(tmp_path, seeds=(0,), device="cpu"), claim)
    (failed,) = found["ddp:inner_optim=sgd:lr=1e30"]
    assert failed.last["val_loss"] == math.inf and failed.error
    assert claim.verdict(found) is Verdict.YES
    plain = json.loads(json.dumps(plain_of(failed)))
    assert plain["last"]["val_loss"] is None and plain_of(run_of(plain)) == plain


def test_nodes_of_unequal_speed_and_replicas(tmp_path: Path) -> None:
    work = Reproduction(tmp_path, seeds=(0,), device="cpu")
    (slow,) = work.results(Cell("async_diloco:H=5", **SMALL, speeds=(1.0, 0.5)))
    assert slow.last["time_s"] > 0
    (run,) = work.results(Cell("fedavg:H=5", **SMALL, replicas=True))
    single, mean, outer = (run.curves[name] for name in ("node_val_loss", "mean_val_loss", "val_loss"))
    assert len(single) == len(mean) == len(outer) and mean == pytest.approx(outer, rel=1e-4)
    assert single != pytest.approx(mean, rel=1e-4)


def test_demo_without_its_transform_sends_as_much_and_does_something_else(tmp_path: Path) -> None:
    work = Reproduction(tmp_path, seeds=(0,), device="cpu")
    (with_it,) = work.results(Cell("demo:compression_topk=4", **SMALL))
    (without,) = work.results(Cell(CLAIMS["R12"].cells["no transform, k=4"].strategy, **SMALL))
    assert with_it.last["payload_bytes"] == without.last["payload_bytes"]
    assert with_it.last["val_loss"] != pytest.approx(without.last["val_loss"], rel=1e-3)
    assert Cell(CLAIMS["R12"].cells["no transform, k=4"].strategy).says == "demo_without_transform"


def test_a_strategy_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = Reproduction(tmp_path, device="cpu")
    with pytest.raises(ArgumentError, match="claim toy, nosuch: unknown strategy 'nosuch'"):
        work.check([claim_of("ddp", "nosuch")])
    with pytest.raises(ArgumentError, match=r"claim toy, ddp:lrr=1: .*no option 'lrr': did you mean 'lr'"):
        work.check([claim_of("ddp", "ddp:lrr=1")])
    with pytest.raises(ArgumentError, match="share=0 must be a number over 0"):
        Reproduction(tmp_path, share=0)


def test_the_command_leaves_out_what_it_was_not_asked_for_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = claim_of("streaming_diloco:num_fragments=9", "ddp")  # found out where training starts
    toys = {"gone": claim_of("ddp", "nosuch"), "broken": broken, "toy": claim_of("single", "ddp")}
    monkeypatch.setattr("research.commands.reproduce.claims_of", lambda names: [toys[name] for name in names or toys])
    monkeypatch.setattr("research.reproduce.Page", lambda path, judges: Page(path, toys, judges))
    command = ["reproduce", "--short", "--out", str(tmp_path), "--device", "cpu"]
    assert main([*command, "gone"]) == main([*command, "broken"]) == 2
    assert main(command) == 0
    said = capsys.readouterr()
    assert "left out: claim toy, nosuch" in said.err and "3 of 3 runs left to train, about" in said.err
    assert "left out: claim toy: num_fragments=9" in said.err
    assert "toy has run, too short for a verdict: a toy" in said.out and "confirmed" not in said.out
    page = (tmp_path / "short.md").read_text()
    assert "**toy: too short for a verdict.**" in page and "| too short for a verdict |" in page
    assert "**Verdict" not in page and "in 0 of 1 seeds" not in page and "in 1 of 1 seeds" not in page
    assert main([*command, "toy"]) == 0 and "left to train" not in capsys.readouterr().err
    assert (tmp_path / "short.md").exists() and main([*command, "--page", "x.md"]) == 2


def test_ctrl_c_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(self: object, at: CellProgress) -> None:
        raise KeyboardInterrupt

    toy = claim_of("single", "ddp")
    monkeypatch.setattr("research.commands.reproduce.claims_of", lambda names: [toy])
    monkeypatch.setattr("research.commands.reproduce.Teller.__call__", stop)
    assert main(["reproduce", "toy", "--short", "--out", str(tmp_path), "--device", "cpu"]) == 130
    assert f"to continue: python -m research reproduce toy --short --out {tmp_path}" in capsys.readouterr().err


# ---------------------------------------------------------------- the page


@pytest.fixture
def toy() -> dict[str, Claim]:
    return {"toy": claim_of("ddp", "single"), "later": replace(claim_of("ddp", "demo"), name="later")}


def filled(path: Path, claims: Mapping[str, Claim], first: Sequence[float], second: Sequence[float]) -> Page:
    page = Page(path, claims)
    setting = {"setting": {"nodes": 2, "steps": 20, "batch_size": 4}, "partition": "IID()"}
    for cell, losses in zip(claims["toy"].cells.values(), (first, second), strict=True):
        page.add(cell, runs(losses), setting)
    return page


def test_the_page_is_made_from_the_results_only(tmp_path: Path, toy: dict[str, Claim]) -> None:
    page = filled(tmp_path / "page.md", toy, A, B)
    page.write()
    text = (tmp_path / "page.md").read_text()
    assert "Verdict on toy: confirmed" in text and "1.1000 ± 0.1000" in text and "- later: a toy" in text
    assert (tmp_path / "images" / "page" / "toy.png").stat().st_size < 20_000
    assert Page(tmp_path / "page.md", toy).text() == text
    changed = json.loads((tmp_path / "page.json").read_text())
    cells = list(toy["toy"].cells.values())
    for run in changed["cells"][cells[0].key]["runs"]:
        run["last"]["val_loss"] = 2.0
    (tmp_path / "page.json").write_text(json.dumps(changed))
    assert "Verdict on toy: not confirmed" in Page(tmp_path / "page.md", toy).text()


def test_results_are_added_to_those_that_are_there(tmp_path: Path, toy: dict[str, Claim]) -> None:
    filled(tmp_path / "page.md", toy, A, B).write(draw=[])
    more = Page(tmp_path / "page.md", toy)
    more.add(toy["later"].cells["demo"], runs([math.inf, 1.0, 1.0]), more.cells[toy["toy"].cells["ddp"].key]["setting"])
    more.write(draw=[])
    text = (tmp_path / "page.md").read_text()
    assert "failed in 1 of 3 runs" in text and "Not run yet" not in text
    assert not (tmp_path / "images").exists()


def test_a_page_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"should end in \.md"):
        Page(tmp_path / "page.html")
    (tmp_path / "page.json").write_text("{")
    with pytest.raises(ArgumentError, match=r"page\.json holds no results"):
        Page(tmp_path / "page.md")


def test_the_page_of_the_documentation_is_what_its_results_say() -> None:
    page = Page(ROOT / "research" / "results" / "reproductions.md")
    assert page.cells and page.path.read_text() == page.text(), "make it anew: reproduce --only-page --page ..."
    for name in re.findall(r"\]\((images/\S+)\)", page.text()):
        assert (page.path.parent / name).stat().st_size < 40_000


# ---------------------------------------------------------------- short versions: do they run, and which way


def short(name: str, tmp_path: Path, share: float = 0.05) -> tuple[Claim, dict[str, list[Run]]]:
    claim, work = CLAIMS[name], Reproduction(tmp_path, seeds=(0,), share=share, device="cpu")
    return claim, results(work, claim)


@pytest.mark.slow
def test_bandwidth_in_short(tmp_path: Path) -> None:
    claim, found = short("bandwidth", tmp_path)
    sent = {label: each[0].last["payload_bytes"] for label, each in found.items()}
    assert sent["H=5"] / sent["H=50"] == pytest.approx(75 / 5 / math.ceil(75 / 50))
    assert claim.verdict(found) is Verdict.YES


def test_scaffold_in_short(tmp_path: Path) -> None:
    """Which is ahead after three rounds says nothing; that both train, and that control variates are paid for, does."""
    claim, found = short("scaffold", tmp_path)
    first, last = ({x: run.curves["val_loss"][k] for x, (run,) in found.items()} for k in (0, -1))
    assert all(last[label] < first[label] for label in first) and len(claim.seen(found)) == 1
    sent = {label: run.last["payload_bytes"] for label, (run,) in found.items()}
    assert sent["SCAFFOLD"] > 1.5 * sent["FedAvg"]


@pytest.mark.slow
def test_pictures_in_short(tmp_path: Path) -> None:
    claim, found = short("momentum-pays-pictures", tmp_path, 0.1)  # no run shorter than its H
    assert not [run.error for each in found.values() for run in each if run.error] and claim.verdict(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["R1", "R7", "R14", "R12"])
def test_characters_in_short(name: str, tmp_path: Path) -> None:
    claim, found = short(name, tmp_path)
    claim.verdict(found)
    if "one node" in found:  # DDP sees four times the data
        assert found["DDP"][0].last["val_loss"] < found["one node"][0].last["val_loss"]


def test_what_claims_ask_for_is_there(tmp_path: Path) -> None:
    """No strategy and no option of a claim is misspelt."""
    Reproduction(tmp_path, seeds=(0,), device="cpu").check(CLAIMS.values())
