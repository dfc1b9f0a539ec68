"""The bytes that the communicator records are those that the network interface counts, one node per process."""

import json
import subprocess
import sys

import pytest
from paths import ROOT
from strategies import OF_EACH_KIND, STRATEGIES

SCRIPT = ROOT / "benchmarks" / "wire_bytes.py"


SHORT = [name for name in OF_EACH_KIND if STRATEGIES[name].any_size and not STRATEGIES[name].is_stacked]


@pytest.fixture(scope="module", params=[",".join(SHORT), pytest.param("", marks=pytest.mark.slow)], ids=["each", "all"])
def rows(request, tmp_path_factory):
    """One run for all tests. Its own limit is one that headers of greetings alone exceed, and the script says so."""
    file = tmp_path_factory.mktemp("wire") / "rows.json"
    words = [sys.executable, str(SCRIPT), "--nodes", "2", "--limit", "1e-5", "--json", str(file)]
    words += ["--strategies", request.param]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1 and "off, more than" in done.stderr, done.stdout + done.stderr
    return json.loads(file.read_text())


def test_every_strategy_sends_what_is_recorded(rows):
    assert len(rows) >= len(SHORT) > 10
    for name, _, off in rows:
        assert abs(off) < 0.03, name


def test_half_or_twice_the_bytes_would_be_noticed(rows):
    """The control: every strategy really sends something, and what holds of it does not hold of another count."""
    for name, expected, off in rows:
        assert expected > 10_000, name
        for factor in (0.5, 1.05, 2.0):
            assert abs((1 + off) / factor - 1) > 0.015, name
