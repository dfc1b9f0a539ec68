"""How the page reads a run that is long and still grows: on from where it was, in parts, and with little memory."""

import json
import random
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from exogym.study import runs
from exogym.ui import lines
from exogym.ui import shelf as shelf_of_page
from exogym.ui.lines import Position, as_text, newest_events, piece_after, records_after, some_of
from exogym.ui.shelf import RunShelf
from exogym.ui.views import MOST_HELD, nodes_of

Row = dict[str, Any]


def rows_of(steps: range, nodes: int = 3, loss: float = 1.0) -> list[Row]:
    rows: list[Row] = []
    for step in steps:
        evaluated = {"val_loss": 2.0 if step % 50 == 0 else None}
        rows.append({"step": step, "node": None, "train_loss": loss, "wall_s": 0.1 * step} | evaluated)
        rows += [{"step": step, "node": node, "train_loss": loss + node} for node in range(nodes)]
    return rows


def text_of(rows: list[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read and sent at once is small, so that these runs are long."""
    monkeypatch.setattr(lines, "NEAR_BYTES", 2000)
    monkeypatch.setattr(lines, "ANSWER_BYTES", 10_000)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Row]]:
    """A run whose records take many times what is read at once, with steps left out, and a torn end."""
    rng = random.Random(3)
    rows = [row for step in sorted(rng.sample(range(20_000), 1500)) for row in rows_of(range(step, step + 1))]
    path = tmp_path_factory.mktemp("long") / "records.jsonl"
    path.write_text(text_of(rows) + '{"step": 20001, "no')
    return path, rows


def test_records_after_a_step_are_found_by_halving(long: tuple[Path, list[Row]]) -> None:
    path, rows = long
    rng = random.Random(5)
    for step in [-1, 0, rows[0]["step"], rows[-1]["step"] - 1, rows[-1]["step"], 10**9, *rng.sample(range(20_000), 12)]:
        wanted = [row for row in rows if row["step"] > step]
        assert [row for row, _ in records_after(path, step, False)] == wanted
        of_model = [row for row, _ in records_after(path, step, True) if row is not None]
        assert of_model == [row for row in wanted if row["node"] is None]


def test_a_part_at_a_time_comes_to_the_same(long: tuple[Path, list[Row]]) -> None:
    """Whole steps, none twice and none left out, whichever records are asked for."""
    path, rows = long
    for is_model in (False, True):
        found, last, parts = list[Row](), -1, 0
        while True:
            some = some_of(path, last, is_model, 10**6, 25_000)
            found += some["records"]
            assert some["last"] > last or not some["more"]
            last, parts = some["last"], parts + 1
            if not some["more"]:
                break
        assert found == [row for row in rows if row["node"] is None or not is_model] and parts > 5
        assert last == rows[-1]["step"]
    assert some_of(path, last, True, 9, None) | {"file": ""} == {"records": [], "last": last, "more": False, "file": ""}
    assert some_of(path, 10**6, True, 9, None)["last"] == last  # smaller than K: it goes on from an earlier step


def test_all_of_them_take_little_memory(long: tuple[Path, list[Row]]) -> None:
    path, rows = long
    whole = json.loads("".join(as_text(path, -1, False)))
    assert whole == {"records": rows, "last": rows[-1]["step"]}
    size = path.stat().st_size
    few: list[Row] = []
    for read in (lambda: few.extend(some_of(path, -1, True, 20, None)["records"]),
                 lambda: [len(part) for part in as_text(path, -1, False)]):  # fmt: skip
        tracemalloc.start()
        try:
            read()
            assert tracemalloc.get_traced_memory()[1] < size / 2  # as rows they take three times the size
        finally:
            tracemalloc.stop()
    assert len(few) == 20 and few[-1]["step"] == rows[-1]["step"]


def test_a_picture_that_is_read_on_is_that_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "PIECE_BYTES", 5000)
    run, kept = tmp_path / "run", RunShelf(tmp_path)
    run.mkdir()
    rows = rows_of(range(1, 250))
    clocks = [{"kind": "clock", "step": k, "computing": [1.0 * k, 2.0 * k, 0.0], "sending": [0.0, 0.0, 1.0 * k],
               "waiting": [1.0 * k, 0.0, 0.0], "down": [0.0] * 3} for k in range(1, 40)]  # fmt: skip
    text, told = text_of(rows), text_of([{"kind": "start", "step": 0}, *clocks])
    for part in (0.3, 0.7, 1.0):
        (run / "records.jsonl").write_text(text[: int(part * len(text))])
        (run / "events.jsonl").write_text(told[: int(part * len(told))])
        found = kept.nodes(run, 1)
        assert found["more"]
        while (found := kept.nodes(run, 1))["more"]:
            pass
    assert found == nodes_of(rows, clocks) | {"more": False} and found["shares"]["computing"][1][-1] == 1.0
    same_file = rows_of(range(1, 600), 2, loss=5.0)
    with open(run / "records.jsonl", "r+") as file:  # written anew in the same place, and longer
        file.write(text_of(same_file))
    assert kept.nodes(run)["loss"] == nodes_of(same_file, [])["loss"]
    other = tmp_path / "beside"
    other.write_text(text_of(rows_of(range(1, 9), 1)))
    other.replace(run / "records.jsonl")
    assert kept.nodes(run)["nodes"] == [0]
    (run / "records.jsonl").unlink()
    assert kept.nodes(run)["nodes"] == []


def test_a_place_is_known_by_what_is_before_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "a"}\n{"kind": "b"}\n{"ki')
    whole, place, is_anew, is_more = piece_after(path, Position())
    assert (len(whole), is_anew, is_more) == (2, False, True)  # the torn end may become whole
    assert piece_after(path, place)[:1] == ([],)
    with open(path, "a") as file:
        file.write('nd": "c"}\n')
    whole, place, is_anew, is_more = piece_after(path, place)
    assert whole == [b'{"kind": "c"}\n'] and not is_anew and not is_more
    path.write_text(path.read_text().replace("c", "d"))
    assert piece_after(path, place)[2]


def test_columns_become_one_where_there_are_too_many() -> None:
    rows = rows_of(range(10 * MOST_HELD), 70)
    found = nodes_of(rows, [])
    assert found["of"] == 70 and found["nodes"] == list(range(64)) and 250 <= len(found["steps"]) <= 300
    assert found["steps"] == sorted(set(found["steps"])) and found["steps"][0] == 0
    assert all(row == [1.0 + node] * len(found["steps"]) for node, row in enumerate(found["loss"]))


def test_the_newest_events_come_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert newest_events(path, 5) == []
    events = [{"kind": "clock" if k % 2 else "communication", "step": k, "more": "x" * 300} for k in range(2000)]
    path.write_text(text_of(events) + '{"kind": "torn')
    assert newest_events(path, 500) == [event for event in events if event["kind"] != "clock"][-500:]
    assert len(newest_events(path, 5000)) == 1000
    path.write_text('{"kind": "torn')
    assert newest_events(path, 5) == []


def test_pictures_are_kept_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = RunShelf(tmp_path)
    for name in "abcde":
        (tmp_path / name).mkdir()
        (tmp_path / name / "records.jsonl").write_text(text_of(rows_of(range(1, 20))))
        kept.nodes(tmp_path / name)
    assert len(kept._pictures) == 5
    size_bytes = next(iter(kept._pictures.values())).size_bytes
    monkeypatch.setattr(shelf_of_page, "CACHE_BYTES", 2.5 * size_bytes)
    kept.nodes(tmp_path / "a")
    assert [Path(path).name for path in kept._pictures] == ["e", "a"]


def test_nobody_waits_for_who_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one looks through the folder, others have the list of before; after a change, a new one."""
    kept, go_on, began = RunShelf(tmp_path), threading.Event(), threading.Event()
    listed, looks = runs.list, []

    def slow(top: Path) -> Any:
        looks.append(top)
        if len(looks) == 2:
            began.set()
            assert go_on.wait(60)
        return listed(top)

    monkeypatch.setattr(runs, "list", slow)
    assert kept.all() == []
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "run.json").write_text('{"description": {}}')
    kept._due = 0.0
    thread = threading.Thread(target=kept.all)
    thread.start()
    assert began.wait(60)
    assert kept.all() == [] and len(looks) == 2
    kept.forget()
    assert [row["name"] for row in kept.all()] == ["one"] and len(looks) == 3  # what is looked for may be of before
    go_on.set()
    thread.join(60)
    assert [row["name"] for row in kept.all()] == ["one"]
