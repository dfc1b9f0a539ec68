"""Pilots that train: the planned run's own losses, continued after a kill, and the same choice on every layout."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from exogym.cli import main
from exogym.errors import ArgumentError
from exogym.study.advise import Piloted, pilot
from exogym.study.advise.beliefs import known
from exogym.study.compare import compare
from exogym.tasks import load_task

TASK = load_task("digits")
PLAN = {
    "network": "50Mbps,10ms",
    "step_seconds": "10ms",
    "max_steps": 80,
    "strategies": "ddp,demo,diloco:H=10,diloco:H=4",
}


def piloted(**options) -> Piloted:
    return pilot(TASK, **(PLAN | {"share": 0.6} | options))


@pytest.fixture(scope="module")
def whole() -> Piloted:
    return piloted()


def plain(found: Piloted) -> dict:
    return found.to_dict()


def test_the_pilot_trains_the_planned_run(whole):
    """Its losses are the losses of the whole run at these steps, and it keeps to its budget."""
    assert 30 < whole.found.spent <= 48 and whole.found.spent == sum(whole.found.trained.values())
    method = max(whole.found.trained, key=lambda name: whole.found.trained[name])
    run = compare(TASK, method, max_steps=80, seeds=1, val_interval=1, progress=False)
    steps, losses = run.histories[method, 0].column("val_loss")
    expected = dict(zip(steps.tolist(), losses.tolist(), strict=True))
    curve = whole.found.curves[method]
    assert curve[0][0] == 0 and len(curve) > 3
    assert all(loss == expected[step] for step, loss in curve)
    other = compare(TASK, method, max_steps=80, seeds=[1], val_interval=1, progress=False)
    assert other.histories[method, 1].last["val_loss"] != expected[80]  # the control


def test_what_it_says(whole):
    best, found = whole.advice.recommended, whole.found
    assert best.strategy == found.choice.method and best in whole.advice.rows
    assert "ddp" in found.hopeless and "ddp" not in found.trained
    text = str(whole)
    assert text.startswith("run: ") and f"{found.choice.sure:.0%}" in text
    data = json.loads(json.dumps(plain(whole), allow_nan=False))
    assert data["recommended"] == best.strategy and data["pilot"]["steps"] == found.spent
    assert data["pilot"]["candidates"][best.strategy]["probability"] == found.choice.sure
    assert data["pilot"]["failed"] == {}
    costs = [each["steps"] for each in data["pilot"]["larger"]]
    assert costs == sorted(costs) and costs[0] > found.spent


def test_no_pilot_is_named_that_is_as_long_as_the_planned_run(whole):
    def hinted(more: dict[int, float]) -> Piloted:
        choice = replace(whole.found.choice, sure=0.5)
        return replace(whole, found=replace(whole.found, choice=choice, more=more))

    short, long = hinted({56: 0.7, 79: 0.8, 160: 0.99}), hinted({80: 0.95, 160: 0.99})
    assert short.surer() == 79 and "to be about 80% sure: --pilot 0.99," in str(short)
    assert long.surer() is None and "--pilot" not in str(long)
    assert replace(hinted({797: 0.95}), steps=800).surer() is None  # its share would be written as 1


WRONG = "diloco:H=4:inner_optim=sgd:lr=1e12"


def test_a_method_that_fails_is_named_with_the_reason(tmp_path):
    options = {"strategies": f"demo,diloco:H=10,{WRONG}", "share": 0.9}
    found = piloted(out=tmp_path, **options)
    assert list(found.found.failed) == [WRONG]
    reason = plain(found)["pilot"]["failed"][WRONG]
    assert "the loss of node" in reason and "lower the learning rate" in reason
    assert f"- {WRONG} failed in the pilot: {reason}" in str(found).splitlines()
    assert plain(piloted(out=tmp_path, **options)) == plain(found)  # the reason is in the folder
    (error,) = tmp_path.glob("*/error.json")
    error.unlink()
    assert plain(piloted(out=tmp_path, **options))["pilot"]["failed"] == {WRONG: "its validation loss was not finite"}


def test_a_killed_pilot_continues(whole, tmp_path):
    told: list[tuple[str, int]] = []

    def stop(method, step, loss):
        told.append((method, step))
        if len(told) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        piloted(out=tmp_path, watch=stop)
    later: list[tuple[str, int]] = []
    again = piloted(out=tmp_path, watch=lambda method, step, loss: later.append((method, step)))
    assert plain(again) == plain(whole)
    assert not set(told) & set(later) and len(later) > 3  # every evaluation once
    once_more = piloted(out=tmp_path, watch=lambda *_: pytest.fail("trained again"))
    assert plain(once_more) == plain(whole)


def test_a_measured_step_stays_the_same_after_a_kill(tmp_path):
    first, again = (piloted(share=0, step_seconds=None, out=tmp_path) for _ in range(2))
    assert plain(first) == plain(again)
    assert plain(piloted(share=0, step_seconds=None)) != plain(first)  # the control: measured anew


KILLED = """
import os, sys
from exogym.study.advise import pilot
from exogym.tasks import load_task
def watch(method, step, loss, seen=[]):
    seen.append(step)
    if len(seen) == 9:
        os.kill(os.getpid(), 9)
pilot(load_task("digits"), out=sys.argv[1], watch=watch, share=0.6, **eval(sys.argv[2]))
"""


@pytest.mark.slow
def test_a_pilot_that_was_killed_hard_continues(whole, tmp_path):
    ended = subprocess.run([sys.executable, "-c", KILLED, os.fspath(tmp_path), repr(PLAN)], capture_output=True)
    assert ended.returncode == -9
    assert plain(piloted(out=tmp_path)) == plain(whole)


def test_the_same_choice_on_any_number_of_processes(whole):
    assert plain(piloted(processes=2)) == plain(whole)


def test_a_larger_share_continues_a_smaller_one(whole, tmp_path):
    small = piloted(share=0.3, out=tmp_path)
    told: list[tuple[str, int]] = []
    large = piloted(out=tmp_path, watch=lambda method, step, loss: told.append((method, step)))
    assert small.found.spent <= 24 < large.found.spent <= 48
    for method, steps in small.found.trained.items():
        assert not [step for name, step in told if name == method and step <= steps]


def test_without_a_share_nothing_is_trained():
    known = {"digits": {"ddp": 10.0, "diloco:H=10": 11.0, "diloco:H=4": 40.0, "demo": 40.0}}
    found = piloted(share=0, earlier=known, watch=lambda *_: pytest.fail("trained"))
    assert found.found.choice == found.found.before and found.found.choice.method == "diloco:H=10"
    assert found.found.spent == 0 and "without training" in found.advice.because


def test_earlier_runs_decide_what_a_short_pilot_cannot():
    slow = {"a": {"ddp": 10.0, "diloco:H=10": 400.0, "diloco:H=4": 11.0, "demo": 400.0}}
    assert piloted(share=0.05, earlier=slow).found.choice.likely == "diloco:H=4"


def test_without_earlier_runs_given_those_that_exogym_ships_count():
    """Those on data with a like skew count most."""
    shipped, none, alike = piloted(share=0), piloted(share=0, earlier={}), piloted(share=0, earlier=known())
    assert shipped.found.beliefs["demo"].places == alike.found.beliefs["demo"].places == len(known())
    assert shipped.found.beliefs["demo"] != alike.found.beliefs["demo"]
    assert shipped.found.beliefs["demo"].places > none.found.beliefs["demo"].places == 0


def test_a_pilot_speaks_of_its_own_beliefs():
    """Not of the formula's: its notes name no shipped runs, and its rows have the pilot's steps."""
    found = piloted(earlier={})
    assert "small tasks" not in str(found) and "not recommended by formula" not in str(found)
    rows = {row.strategy: row for row in found.advice.rows}
    for name, belief in found.found.beliefs.items():
        assert rows[name].ddp_steps == belief.steps
        assert rows[name].cost.steps == math.ceil(80 * belief.steps)


def test_a_target_loss_changes_the_time_and_says_when_it_is_unknown():
    near, far = piloted(target_loss=2.0), piloted(target_loss=1e-6)
    assert near.advice.recommended.cost.steps < 80 and "a validation loss of 2:" in str(near)
    assert far.to_dict()["pilot"]["seconds"] is None and "unknown" in str(far)
    assert far.advice.recommended.cost.steps == 80  # the planned run's
    assert piloted(target_loss=50.0).advice.recommended.cost.steps == 1  # reached before the first step


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"share": -0.1}, "share"),
        ({"strategies": "single,ddp"}, "sends nothing"),
        ({"max_steps": 10, "strategies": "diloco:H=10,diloco:H=8"}, "communicates twice"),
        ({"network": "50Mbps,10ms", "speeds": [1, 1]}, "2 nodes"),
    ],
)
def test_wrong_arguments_are_refused_before_training(options, words):
    with pytest.raises(ArgumentError, match=words):
        piloted(**options, watch=lambda *_: pytest.fail("trained"))


def test_another_pilots_folder_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ArgumentError, match="other files"):
        piloted(out=tmp_path)
    for file in (tmp_path / "notes.txt", tmp_path / "notes.txt" / "pilot"):
        with pytest.raises(ArgumentError, match=r"cannot be written .*: give another folder"):
            piloted(out=file)
    piloted(out=tmp_path / "pilot", share=0)
    with pytest.raises(ArgumentError, match=r"max_steps|steps"):
        piloted(out=tmp_path / "pilot", max_steps=90)
    with pytest.raises(ArgumentError, match="pilot"):
        compare(TASK, "ddp", max_steps=4, seeds=1, out=tmp_path / "pilot", resume=True, progress=False)


# ------------------------------------------------------------------- the command

ASKED = ["advise", "--dataset", "digits", "--network", "50Mbps,10ms", "--step-seconds", "10ms"]


def test_the_command_says_the_same_as_python(whole, capsys):
    words = ["--steps", "80", "--pilot", "0.6", "--strategies", PLAN["strategies"], "--json"]
    assert main([*ASKED, *words]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["pilot"] == plain(whole)["pilot"] and told["recommended"] == plain(whole)["recommended"]
    steps = round(whole.advice.recommended.cost.steps)
    assert told["run"].startswith("exogym compare --dataset digits") and f"--steps {steps}" in told["run"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pilot", "0.1", "--simulate"], "both train"),
        (["--pilot", "0", "--within", "12h"], "does not limit"),
        (["--pilot", "0.1", "--price", "1USD/h"], "does not limit"),
        (["--pilot", "0.1", "--target-utilisation", "0.5"], "chooses by formula"),
        (["--simulate", "--target-utilisation", "0.5"], "chooses by formula"),
        (["--pilot", "0", "--prior", "missing.json"], "--prior='missing.json' does not exist"),
        (["--pilot", "0.1", "--node", "shard=2"], "only for formulas"),
        (["--pilot", "0.1", "--seeds", "2"], "--seeds needs --simulate"),
        (["--out", "pilot"], "--out needs --pilot"),
        (["--prior", "table.json"], "--prior needs --judge or --pilot"),
    ],
)
def test_options_that_a_pilot_does_not_take(words, message, capsys):
    assert main([*ASKED, *words]) == 2
    assert message in capsys.readouterr().err
