"""`benchmarks/published.py` on a file of its form that follows a known law, and on files that it must refuse."""

import csv
import json
import subprocess
import sys

import pytest
from paths import ROOT

from exogym.errors import DataError

BENCHMARKS = ROOT / "benchmarks"
RATES = (1e7, 1e8, 1e9, 1e10)
SIZE, NODES, STEP_S, SET_UP_S, EFFICIENCY = 1e7, 8, 0.05, 0.4, 0.75


@pytest.fixture
def published(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import published

    return published


def rows(set_up_s=SET_UP_S, algorithm="diloco"):
    """A ring at three quarters of the rate, whose first all-reduce takes `set_up_s` longer."""
    out = []
    for rate in RATES:
        warm_s = 2 * (NODES - 1) / NODES * SIZE * 4 * 8 / (EFFICIENCY * rate)
        for H, syncs in ((1, 50), (16, 5), (64, 1)):
            blocked_s = warm_s + (set_up_s if syncs == 1 else 0.0)
            computing_s = H * syncs * STEP_S
            out.append(
                {
                    "algorithm": algorithm, "H": H, "nodes": NODES, "parameters": int(SIZE), "bytes_per_element": 4,
                    "requested_bps": rate, "measured_bps": rate, "compute_ms_per_step": 1e3 * STEP_S,
                    "blocked_ms_per_sync": 1e3 * blocked_s, "syncs": syncs, "steps": H * syncs,
                    "compute_utilisation": computing_s / (computing_s + syncs * blocked_s),
                }
            )  # fmt: skip
    return out


def write(path, given):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, given[0].keys())
        writer.writeheader()
        writer.writerows(given)
    return path


def test_probes_give_what_the_rate_does_not(published, tmp_path):
    predictions = published.predict(published.read(write(tmp_path / "a.csv", rows())))
    by_rate = [p.off("rate") for p in predictions if not p.cell.is_cold]
    assert by_rate == pytest.approx([EFFICIENCY - 1] * len(by_rate))
    for p in predictions:
        assert p.is_probe == (p.cell.H == 1)
        assert p.off("cold") == pytest.approx(0, abs=1e-9) == p.utilisation_off("cold")
        assert (abs(p.off("probe")) < 1e-9) == (not p.cell.is_cold)
    assert published.counts(predictions)["blocked by cold"] == (8, 8)
    assert published.counts(predictions)["blocked by probe"] == (6, 8)  # the set-up shows on the two fast links
    assert published.counts(predictions)["blocked by rate"] == (0, 12)


def test_no_cell_is_predicted_from_itself(published, tmp_path):
    """The control: where one link alone has a slow first synchronisation, it is not foreseen there."""
    given = rows(set_up_s=0.0)
    given[-1]["blocked_ms_per_sync"] += 1e3 * SET_UP_S
    predictions = published.predict(published.read(write(tmp_path / "a.csv", given)))
    cold = [p for p in predictions if p.cell.is_cold]
    assert cold[-1].off("cold") < -0.5
    assert cold[-2].off("cold") > 0.5  # which has its set-up from the fastest other link


def test_tables_of_other_algorithms_stay_apart_and_a_link_may_lack_its_probe(published, tmp_path):
    given = rows() + rows(set_up_s=2.0, algorithm="local")
    given = [row for row in given if not (row["algorithm"] == "local" and row["H"] == 1 and row["requested_bps"] < 1e8)]
    file, out = write(tmp_path / "a.csv", given), tmp_path / "rows.json"
    words = [sys.executable, str(BENCHMARKS / "published.py"), str(file), "--json", str(out)]
    done = subprocess.run([*words, "--figure", str(tmp_path / "a.png")], capture_output=True, text=True, check=True)
    assert "blocked by cold: 8 of 8 within 10%" in done.stdout
    assert "blocked by cold: 6 of 6 within 10%" in done.stdout  # two cells of that link have nothing to go by
    assert (tmp_path / "a.png").stat().st_size > 10_000
    tables = json.loads(out.read_text())
    assert [len(table) for table in tables.values()] == [12, 11]
    assert set(tables["local, 8 nodes, 40 MB"][0]["blocked_s"]) == {"rate"}


@pytest.mark.parametrize(
    ("change", "message"),
    [({"H": "many"}, "line 2: H='many'"), ({"measured_bps": -1}, "measured_bps='-1'"), ({"steps": ""}, "steps=''")],
)
def test_a_wrong_file_is_refused(published, tmp_path, change, message):
    given = rows()
    with pytest.raises(DataError, match=message):
        published.read(write(tmp_path / "a.csv", [given[0] | change, *given[1:]]))
    with pytest.raises(DataError, match="has no column compute_utilisation"):
        published.read(write(tmp_path / "b.csv", [{k: v for k, v in r.items() if k[:9] != "compute_u"} for r in given]))
    with pytest.raises(DataError, match="cannot be read"):
        published.read(tmp_path / "c.csv")


# Cells of many sources


def test_the_committed_cells_are_what_is_predicted_now(published, tmp_path):
    file = ROOT / "benchmarks" / "published_cells.csv"
    cells = published.published_cells.read(file)
    published.published_cells.write(cells, tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text() == file.read_text()


def test_predictions_of_libraries_hold_beside_other_peoples_measurements(published):
    """Of NCCL's all-reduces and sends 95 % within 10 %; of gloo's and NCCL's other collectives 80 % within 25 %."""
    cells = published.published_cells.read(ROOT / "benchmarks" / "published_cells.csv")
    share = published.published_cells.share

    def ratios(*sources: str) -> list[float]:
        return [c.ratio for c in cells if c.source.startswith(tuple(f"tc_cluster_setting {s}" for s in sources))]

    sends = [c.ratio for c in cells if c.source in ("tc_cluster_setting allreduce NCCL", "tc_cluster_setting p2p NCCL")]
    assert share(sends, 1.1) >= 0.95
    assert share(ratios("allreduce Gloo", "broadcast", "reduce"), 1.25) >= 0.8
    assert share([c.ratio for c in cells if "pipeline only" in c.source], 1.25) >= 0.8
    stated = [c.ratio for c in cells if c.is_stated]
    assert share(stated, 1.25) >= 0.75 and share(stated, 2.0) >= 0.95
