"""Cells of a long benchmark: what is kept, what is measured again, and what other programs did meanwhile."""

import subprocess
import sys
import time

import pytest
from paths import ROOT

BURN = """
import time
end = time.process_time() + 0.5
while time.process_time() < end:
    pass
print("done", flush=True)
time.sleep(600)
"""


@pytest.fixture
def cells(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import cells

    return cells


def test_a_run_goes_on_where_it_stood(cells, tmp_path):
    file = str(tmp_path / "rows.json")
    first = cells.Cells(file)
    rows = {
        "quiet": {"is_disturbed": False, "off": {"run": 0.02}},
        "disturbed": {"is_disturbed": True, "off": {"run": 0.02}},
        "off": {"is_disturbed": False, "off": {"run": 0.02, "comm": -0.2}},
    }
    for key, row in rows.items():
        assert first.wants(key)
        first.put(key, row)
    again = cells.Cells(file)
    assert again.rows == rows and not any(map(again.wants, rows)) and again.wants("new")
    for which, wanted in {"disturbed": ["disturbed"], "off": ["off"], "all": list(rows)}.items():
        again = cells.Cells(file, again=which)
        assert [key for key in rows if again.wants(key)] == wanted
        again.put(wanted[0], rows["quiet"])
        assert not again.wants(wanted[0])
        cells.Cells(file).put(wanted[0], rows[wanted[0]])


def test_a_turn_ends_and_says_what_is_left(cells):
    over = cells.Cells(None, turn_s=-1.0)
    over.put("known", {"is_disturbed": False})
    assert not any(map(over.wants, ("known", "a", "b"))) and over.left == 2 and over.is_over
    assert not cells.Cells(None, turn_s=1000.0).is_over and not cells.Cells(None).is_over


def test_what_others_compute_is_told_from_what_the_hosts_do(cells):
    """The same half second, once as a host's and once as a stranger's."""
    here = cells.Cells(None)
    with subprocess.Popen([sys.executable, "-c", BURN], stdout=subprocess.PIPE) as burner:
        with here.watched([]) as stranger, here.watched([burner.pid]) as own:
            burner.stdout.readline()
            time.sleep(0.05)
        burner.kill()
    found = stranger["others_cores"] * stranger["wall_s"] - own["others_cores"] * own["wall_s"]
    assert found == pytest.approx(0.5, abs=0.15)
    assert stranger["is_disturbed"] == (stranger["others_cores"] > cells.LIMIT_CORES)
