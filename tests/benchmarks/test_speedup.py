"""Speed-ups on links of limited rate: the short version of `benchmarks/speedup.py`. Times themselves are not judged."""

import json

import pytest
from paths import ROOT
from processes import python

BENCHMARKS = ROOT / "benchmarks"
H, SLOW_BPS = 4, 20e6
RUN = [
    *(str(BENCHMARKS / "speedup.py"), "--quick", "--hosts", "2", "--links", "20mbit,1gbit"),
    *("--strategies", f"ddp,diloco:H={H}", "--reductions", "tree", "--steps", "2", "--repeats", "1"),
]


@pytest.fixture
def speedup(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import speedup

    return speedup


def test_a_short_run_gives_sane_rows(tmp_path, speedup):
    """No step is faster than its bytes on the link, and the prediction has them."""
    files = {name: tmp_path / name for name in ("rows.json", "speedup.png")}
    words = [*RUN, "--json", str(files["rows.json"]), "--figure", str(files["speedup.png"])]
    done = python(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert files["speedup.png"].stat().st_size > 1000
    rows = json.loads(files["rows.json"].read_text())
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert table[2:] == [speedup.line(speedup.cells(row)) for row in rows]
    alone, together = rows[:2], rows[2:]
    assert [(row["job"]["hosts"], row["speedup"], row["own_cores"], row["met"]) for row in alone] == [
        (1, 1, 1, None)
    ] * 2
    assert [(row["job"]["strategy"], row["link"]) for row in together] == [
        (strategy, link) for strategy in ("ddp", f"diloco:H={H}") for link in ("20mbit", "1gbit")
    ]
    model = speedup.make_model(speedup.QUICK)
    bits = 8 * sum(4 * p.numel() for p in model.parameters())  # of two hosts each sends one model
    for row, every in zip(together, (1, 1, H, H), strict=True):
        adds = row["predicted_s"] - row["computing_s"]
        least_s = bits / SLOW_BPS / every
        if row["link"] == "20mbit":
            assert least_s < adds < 1.25 * least_s, row
            assert row["measured_s"] > 0.45 * least_s, row  # half of them may come before rank 0 notes the time
        else:  # the control
            assert 0 < adds < 0.2 * least_s, row


def test_a_speed_up_of_own_cores_takes_only_communicating_into_account(speedup):
    def found(hosts, computing_s, measured_s):
        row = {"job": {"hosts": hosts}, "computing_s": computing_s, "measured_s": measured_s}
        return speedup.speedups(row, 0.2)

    perfect = {"speedup": 4.0, "own_cores": 4.0, "target": 3.2, "met": True}
    assert found(4, 0.2, 0.2) == perfect
    assert found(4, 0.4, 0.4) == perfect | {"speedup": 2.0}  # four hosts on two cores that say nothing to each other
    assert found(4, 0.4, 0.39) == perfect | {"speedup": pytest.approx(0.8 / 0.39)}
    assert found(4, 0.4, 0.35)["met"] is None  # less than computing alone: the machine had other work to do
    assert found(4, 0.4, 0.6) == {
        "speedup": pytest.approx(4 / 3),
        "own_cores": pytest.approx(2.0),
        "target": 3.2,
        "met": False,
    }
    assert found(2, 0.2, 0.222)["met"] and not found(2, 0.2, 0.223)["met"]
