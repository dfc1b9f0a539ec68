"""Sums on a long line: the short version of `benchmarks/distant.py`. How far predictions are off is not judged."""

import json
import os

import pytest
from paths import ROOT
from processes import python

SCRIPT = ROOT / "benchmarks" / "distant.py"
RUN = [
    *(str(SCRIPT), "--rates", "20mbit", "--latencies", "5ms", "--sizes", "100000", "--pauses", "0"),
    *("--repeat", "1"),
]


@pytest.mark.skipif(not os.path.exists("/dev/net/tun") or os.geteuid() != 0, reason="needs root and /dev/net/tun")
@pytest.mark.parametrize("flows", [1, 2])
def test_no_sum_is_faster_than_the_line(tmp_path, flows):
    """100 kB among two cross the line once each way, half of it after the other half: two latencies at least."""
    file = tmp_path / "rows.json"
    words = [*RUN, "--json", str(file), "--flows", str(flows)]
    done = python(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())
    assert [row["reduction"] for row in rows] == ["native", "tree"]
    for row in rows:
        assert row["measured_s"] > 8 * row["size"] / 20e6 + 2 * 0.005
        assert row["tcp_s"] >= row["plain_s"] > 8 * row["size"] / 20e6
