"""Advice from what publications measured at scale."""

import csv
import math
import re

import pytest

from exogym.cli import main
from exogym.strategy.registry import parse_strategy
from exogym.study.advise import advise
from exogym.study.advise.beliefs import Belief, known
from exogym.study.advise.published import TABLE, at_scale, cells, slope

pytestmark = pytest.mark.usefixtures("no_pictures")

OURS = Belief(math.log(3), 0.5, 0.3)


def steps_of(method, parameters, num_nodes, period=30, **options):
    belief, source = at_scale(OURS, method, period, 10**5, parameters, num_nodes, **options)
    return belief.steps, source


def test_each_row_says_what_was_measured_and_how_it_was_read():
    rows = list(csv.DictReader(TABLE.read_text().splitlines()))
    assert len(rows) == len(cells()) == len({tuple(row.items()) for row in rows}) + 1  # one cell is printed twice alike
    for row, cell in zip(rows, cells(), strict=True):
        assert re.fullmatch(r"2[35]\d\d\.\d{5}|24\d\d\.\d{5}", cell.source) and row["where"]
        assert row["read"] in ("text", "html", "repository") and cell.but in ("", "untuned", "pretrained")
        parse_strategy(cell.strategy)
        assert row["measure"] in ("loss", "perplexity") and 0.98 < cell.loss_ratio < 1.1
        assert 1e7 < cell.parameters <= 1e10 and 1 <= cell.nodes <= 16 and cell.tokens > 7 * cell.parameters


def test_a_question_at_a_cell_gets_this_cell():
    """DiLoCo with H = 30 on two nodes: 2.464 against 2.460 at 1.3B parameters, table 4 of arXiv:2503.09799."""
    found, source = steps_of("diloco:H=30", 1.3e9, 2)
    assert found == pytest.approx((2.464 / 2.460) ** (1 / slope(1.3e9, 26e9)), abs=0.05)
    assert "arXiv:2503.09799" in source and "nearest 1.3B on 2" in source


def test_a_loss_that_is_reached_later_needs_more_steps():
    """With m times the tokens, the scaling law's loss is m^-s times as large."""
    law = [1.69 + 406.4 / 1e9**0.34 + 410.7 / tokens**0.28 for tokens in (20e9, 20.2e9)]
    assert math.log(law[0] / law[1]) / math.log(1.01) == pytest.approx(slope(1e9, 20e9), rel=0.01)


def test_more_nodes_and_larger_H_need_more_steps_and_larger_models_fewer():
    nodes = [steps_of("diloco:H=30", 180e6, n)[0] for n in (1, 2, 4, 8)]
    sizes = [steps_of("diloco:H=30", p, 8)[0] for p in (35e6, 335e6, 2.4e9)]
    periods = [steps_of(f"diloco:H={H}", 180e6, 4, H)[0] for H in (30, 100, 500)]
    assert nodes == sorted(nodes) and nodes[0] < 1 and sizes == sorted(sizes, reverse=True)
    assert periods[1] / periods[0] == pytest.approx((100 / 30) ** 0.12, rel=0.01) and periods[2] > periods[1]


def test_small_tasks_count_for_small_models_and_publications_for_large_ones():
    small, large = (steps_of("diloco:H=30", p, 4) for p in (1e4, 1e9))
    assert small[0] == pytest.approx(3, rel=0.05) and small[1].startswith(f"our {len(known())} tasks of at most 0.1M")
    assert large[0] < 1.3 and large[1].startswith("arXiv:")
    between, source = steps_of("diloco:H=30", 2e6, 4)
    assert large[0] < between < small[0] and "arXiv:" in source and "our " in source


def test_what_nobody_published_is_said():
    small, large = (at_scale(OURS, "powersgd", 1, 1000, parameters, 4)[0] for parameters in (1e5, 1e9))
    assert small == OURS and large.mean == OURS.mean and large.sd == pytest.approx(math.hypot(0.5, 0.5))
    assert steps_of("powersgd", 1e9, 4)[1].endswith("; we could read no publication about it")
    assert at_scale(Belief(0.0, 0.0, 0.0), "ddp", 1, 1000, 1e9, 4) == (Belief(0.0, 0.0, 0.0), "")


def test_the_same_options_count_before_others():
    eager, plain, unknown = (steps_of(f"diloco:{o}", 1e9, 2)[1] for o in ("H=100:eager=true", "H=100", "bits=8:H=100"))
    assert "2502.12996" in eager and "2502.12996" not in plain and "2502.12996" in unknown


def test_far_questions_are_less_sure_and_say_how_far_they_are():
    near, far = (at_scale(OURS, "diloco:H=30", 30, 10**5, 1e9, n) for n in (4, 1024))
    assert far[0].sd > near[0].sd and far[0].never > near[0].never
    assert "times fewer nodes" in far[1] and "times" not in near[1]
    skewed, _ = at_scale(OURS, "diloco:H=30", 30, 10**5, 1e9, 4, skew=0.6)
    assert skewed.sd > near[0].sd


def test_the_answer_names_its_source_and_what_it_assumed(capsys):
    assert main(["advise", "--parameters", "124M", "--nodes", "4", "--network", "wifi", "--library", "any"]) == 0
    printed = capsys.readouterr().out
    run, takes, because = printed.splitlines()[:3]
    assert "streaming_diloco" in run and "times as soon as the fastest node alone" in takes
    assert "need 1.4 times DDP's steps" in takes and "(arXiv:2501.18512, 35M to 1B parameters" in because
    assert "- a node's step is 65536 tokens" in printed and "after 9461 steps" in because
    assert "- powersgd" in printed.replace(
        "- sparseloco:H=100, sparseloco:H=30, sparseloco:H=10, powersgd", "- powersgd"
    )
    assert main(["advise", "--parameters", "124M", "--nodes", "4", "--network", "wifi", "--steps", "50"]) == 0
    assert "after 50 steps" in capsys.readouterr().out


def test_a_row_has_its_source():
    advice = advise(parameters=1e9, num_nodes=4, network="1Gbps", step_seconds=1.0, strategies=["ddp", "diloco:H=30"])
    assert {row["strategy"]: row["source"] != "" for row in advice.to_dict()["rows"]} == {
        "ddp": False,
        "diloco:H=30": True,
    }
