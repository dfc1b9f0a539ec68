"""Which cells `research/advised.py` draws, and the lines of its hosts. How far predictions are off is not judged."""

import json
import os
from collections import Counter

import pytest
from paths import ROOT
from processes import python

from exogym.network import Network
from research import advised
from research.atlas.steps import Curve, named
from research.atlas.table import Table

METHODS = ("ddp", "sparta", "diloco", "streaming_diloco")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Four methods of the atlas."""
    found = json.loads((ROOT / "research" / "results" / "atlas.json").read_text())
    found["rows"] = [row for row in found["rows"] if row["method"] in METHODS]
    file = tmp_path_factory.mktemp("atlas") / "atlas.json"
    file.write_text(json.dumps(found))
    return Table(file)


def test_the_rule_takes_tasks_in_turn_and_rare_networks_first(table):
    jobs = advised.drawn(table, 12)
    assert jobs == advised.drawn(table, 12)
    pool = advised.candidates(table)
    tasks = sorted({job.task for job in pool})
    assert len(tasks) >= 2 and [job.task for job in jobs] == [tasks[k % len(tasks)] for k in range(12)]
    for k, job in enumerate(jobs):
        times = Counter(other.network for other in jobs[:k])
        others = [other for other in pool if other.task == job.task and other not in jobs[:k]]
        assert times[job.network] == min(times[other.network] for other in others)
    assert len({job.network for job in jobs}) > 6 and {job.method for job in jobs} == {job.method for job in pool}


def test_a_candidate_reaches_its_target_within_the_time(table):
    rows = {(row["place"], named(row), row["seed"]): row for row in table.rows if row["kind"] == "tuned"}
    jobs = advised.candidates(table)
    for job in jobs:
        row = rows[job.place, job.method, job.seed]
        losses = dict(zip(row["steps"], row["losses"], strict=True))
        assert losses[job.last] <= job.target and all(loss > job.target for s, loss in losses.items() if s < job.last)
        assert Curve(tuple(row["steps"]), tuple(row["losses"])).until(job.target) == job.steps <= job.last
    slow = {job for job in jobs if job.method == "ddp" and "80 ms" in job.network}
    assert all(job.steps < 100 for job in slow)  # 480 ms of latencies in a step


def test_a_frame_waits_for_each_line_on_its_way():
    from switched import PAYLOAD_SHARE, ways_of

    def lines(network, i, j):
        rates, ways = ways_of(network, 4)
        way, latency_s = ways[i][j]
        return [round(rates[line] * PAYLOAD_SHARE / 1e6) for line in way], latency_s

    assert lines(Network(up="20Mbps", down="100Mbps", latency="10ms", jitter="2ms"), 2, 0) == ([20, 100], 0.012)
    slow = Network(["1Gbps", "1Gbps", "1Gbps", "50Mbps"], "1ms")
    assert lines(slow, 0, 3) == ([1000, 50], 0.001) and lines(slow, 0, 1) == ([1000, 1000], 0.001)
    islands = Network.groups([2, 2], inside="10Gbps,50us", between="100Mbps,20ms")
    assert lines(islands, 0, 1) == ([10000, 10000], 5e-5) and lines(islands, 1, 2) == ([10000, 100, 10000], 0.02)
    _, ways = ways_of(islands, 4)
    assert ways[0][2][0][1] == ways[1][3][0][1] != ways[2][0][0][1]  # shared, and another line on the way back


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/net/tun") or os.geteuid() != 0, reason="needs root and /dev/net/tun")
def test_a_cell_on_hosts_has_the_losses_of_the_table(tmp_path):
    file = tmp_path / "cells.json"
    words = ["research/results/atlas.json", "--json", str(file), "--only", "digits", "--turn", "1", "--limit", "9"]
    done = python("-m", "research.advised", *words)
    assert "cells are left" in done.stderr, done.stdout + done.stderr
    (row,) = [row for row in json.loads(file.read_text()).values() if "differ" in row]
    assert row["differ"] < 1e-5 and row["arrived"] == pytest.approx(row["steps"], rel=1e-3)
    assert row["measured_s"] > 0.05 * row["steps"]
