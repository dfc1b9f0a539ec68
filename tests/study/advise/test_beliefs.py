"""Beliefs about steps to a loss, by hand, and the choice that they advise."""

import math

import pytest

from exogym.errors import ArgumentError
from exogym.study.advise.beliefs import SAME, Belief, beliefs_of, chosen, likeness


def close(belief: Belief, mean: float, sd: float, never: float) -> bool:
    return (belief.mean, belief.sd, belief.never) == pytest.approx((mean, sd, never))


TWO = {  # places, with steps to a target
    "a-4": {"ddp": 100.0, "diloco:H=10": 110.0, "diloco:H=40": 200.0, "demo": math.inf},
    "b-4": {"ddp": 50.0, "diloco:H=10": 60.0, "diloco:H=40": 100.0, "demo": 50.0},
}


def test_places_of_one_task_count_together_as_one():
    a, b = {"ddp": 100.0, "demo": 150.0}, {"ddp": 100.0, "demo": math.inf}
    once = beliefs_of({"demo": 1}, 100, {"digits-4": a, "words-4": b})["demo"]
    again = beliefs_of({"demo": 1}, 100, {"digits-4": a, "digits-iid-16": a, "words-4": b, "words-16": b})["demo"]
    assert (again.mean, again.sd, again.never) == pytest.approx((once.mean, once.sd, once.never))
    other = beliefs_of({"demo": 1}, 100, {"digits-4": a, "pictures-4": a, "words-4": b})["demo"]
    assert other.mean > once.mean  # two tasks count twice


def test_beliefs_from_two_places_are_those_computed_by_hand() -> None:
    """Both places have as many steps to the target as the new run, or half as many."""
    found = beliefs_of({"ddp": 1, "diloco:H=10": 10, "demo": 1, "sparta": 1}, 100, TWO)
    thumb, first, second = 0.1 + 0.12 * math.log(10), math.log(1.1), math.log(1.2)
    mean = (2 * thumb + first + second) / 4
    sd = math.sqrt((2 * 0.25 + (first - mean) ** 2 + (second - mean) ** 2) / 4 * (1 + 1 / 4))
    assert close(found["diloco:H=10"], mean, sd, 2 * 0.3 / 4)
    assert close(found["demo"], 0.2 / 3, math.sqrt((0.5 + (0.2 / 3) ** 2) / 3 * 4 / 3), (2 * 0.12 + 1) / 4)
    assert found["ddp"] == SAME and close(found["sparta"], 0.1, 0.5 * math.sqrt(1.5), 0.12)


def test_beliefs_follow_h() -> None:
    periods = {f"diloco:H={H}": H for H in (40, 400)} | {"diloco:H=400:bits=8": 400, "diloco:bits=8": 40}
    found = beliefs_of(periods, 100, {"a-4": TWO["a-4"]})
    near, far = found["diloco:H=40"], found["diloco:H=400"]
    assert far.mean == pytest.approx(near.mean + 0.12 * math.log(10))
    assert far.never == pytest.approx(2 * 0.9 / 2.1) and near.never == pytest.approx(2 * 0.9 / 3)
    assert found["diloco:H=400:bits=8"] == far and found["diloco:bits=8"].never == near.never  # the same name


def test_runs_of_the_same_method_count_as_they_are() -> None:
    """Also if the steps until the whole model has been exchanged are not the H of its text."""
    place = {
        "a-4": {"ddp": 100.0, "noloco:H=30": 100.0, "snoo:H=10": 100.0, "diloco:H=10": 300.0, "diloco:H=100": 100.0}
    }
    asked = {"noloco:H=30": 60, "snoo": 1, "diloco": 100}
    for method, period in asked.items():
        (found,), (alone,) = (beliefs_of({method: period}, 100, known).values() for known in (place, {}))
        assert found.mean == pytest.approx(2 / 3 * alone.mean)


def test_runs_with_more_synchronizations_may_arrive_all_the_same() -> None:
    """A place where DeMo never arrived counts less for a longer run, and a place where it arrived counts wholly."""
    never = {"a-4": {"ddp": 100.0, "demo": math.inf}}
    short, same, long = (beliefs_of({"demo": 1}, steps, never)["demo"].never for steps in (10, 100, 10_000))
    assert short == pytest.approx((2 * 0.3 + 1) / 3) and same == pytest.approx((2 * 0.12 + 1) / 3)
    assert long == pytest.approx((2 * 0.1002 + 0.01) / 2.01)
    arrived = {"a-4": {"ddp": 100.0, "demo": 100.0}}
    short, same, long = (beliefs_of({"demo": 1}, steps, arrived)["demo"].never for steps in (10, 100, 10_000))
    assert short == pytest.approx(2 * 0.3 / 2.1) and same == pytest.approx(2 * 0.12 / 3)
    assert long == pytest.approx(2 * 0.1002 / 3)


def test_places_that_cannot_say_do_not_count() -> None:
    steps = TWO | {"c-4": {"ddp": math.inf, "demo": 7.0}, "d-4": {"demo": 7.0}}
    assert beliefs_of({"demo": 1}, 100, steps) == beliefs_of({"demo": 1}, 100, TWO)
    assert beliefs_of({"demo": 1}, 100) == beliefs_of({"demo": 1}, 100, {"d-4": {"demo": 7.0}})
    with pytest.raises(ArgumentError, match="steps=0"):
        beliefs_of({"demo": 1}, 0)


def test_places_with_like_data_count_more() -> None:
    alike = likeness(0.6, {"a-4": 0.6, "b-4": 0.0})
    assert alike == {"a-4": 1.0, "b-4": pytest.approx(math.exp(-2))}
    found = beliefs_of({"diloco:H=10": 10, "demo": 1}, 100, TWO, alike)
    thumb, first, second, w = 0.1 + 0.12 * math.log(10), math.log(1.1), math.log(1.2), math.exp(-2)
    mean = (2 * thumb + first + w * second) / (3 + w)
    sd = math.sqrt((2 * 0.25 + (first - mean) ** 2 + w * (second - mean) ** 2) / (3 + w) * (1 + 1 / (3 + w)))
    assert close(found["diloco:H=10"], mean, sd, 2 * 0.3 / (3 + w))
    assert found["demo"].never == pytest.approx((2 * 0.12 + 1) / (3 + w))  # it never arrived where the data are alike
    assert likeness(0.0, {"a-4": 0.6, "b-4": 0.0, "c-4": None}) == pytest.approx({"a-4": w, "b-4": 1.0, "c-4": 0.5})
    assert likeness(None, {"a-4": 0.6, "c-4": None}) == {"a-4": 1.0, "c-4": 1.0}
    ones = dict.fromkeys(TWO, 1.0)
    assert beliefs_of({"demo": 1}, 100, TWO, ones) == beliefs_of({"demo": 1}, 100, TWO)


def test_the_choice_weighs_steps_and_seconds() -> None:
    beliefs = {"ddp": SAME, "diloco:H=10": Belief(math.log(1.5), 0.1, 0.0)}
    fast, slow = (chosen({"ddp": s, "diloco:H=10": 1.0}, beliefs) for s in (1.0, 3.0))
    assert fast.method == "ddp" and fast.sure > 0.99
    assert slow.method == "diloco:H=10" and list(slow.odds) == ["diloco:H=10", "ddp"]
    assert chosen({"diloco:H=10": 1.0, "ddp": 3.0}, beliefs).odds == slow.odds  # in any order


def test_a_method_that_may_never_arrive_is_not_advised_for_a_little_speed() -> None:
    beliefs = {"ddp": SAME, "demo": Belief(0.0, 0.0, 0.5)}
    assert chosen({"ddp": 1.0, "demo": 0.8}, beliefs).method == "ddp"
    assert chosen({"ddp": 100.0, "demo": 0.8}, beliefs).method == "demo"
    hopeless = chosen({"demo": 1.0}, {"demo": Belief(0.0, 0.0, 1.0)})
    assert (hopeless.method, hopeless.sure) == ("demo", 0.0)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ArgumentError, match="pass at least one candidate"):
        chosen({}, {})
    with pytest.raises(ArgumentError, match="beliefs has no entry for 'demo': pass one belief per candidate"):
        chosen({"demo": 1.0}, {"ddp": SAME})
    with pytest.raises(ArgumentError, match="must be a number over 0"):
        chosen({"ddp": 0.0}, {"ddp": SAME})
    with pytest.raises(ArgumentError, match=r"never=1\.5 must be a number of at least 0 and at most 1"):
        Belief(0.0, 0.1, 1.5)
