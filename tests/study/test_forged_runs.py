"""Run folders that no run has written: each is a line that says so, and changes no other line and no other answer."""

import asyncio
import copy
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from paths import TESTS
from processes import python

from exogym.cli import main
from exogym.core.base.processes import described
from exogym.core.record import schema
from exogym.errors import ArgumentError
from exogym.study import runs
from exogym.ui.server import MOST_WATCHED, application
from exogym.ui.shelf import RunShelf
from exogym.ui.views import SHARES

TOKEN = "x" * 20
VIEWS = ("", "/records", "/records?node=none&most=9", "/nodes", "/timeline", "/grid", "/hosts")
GONE = described() | {"started": "1"}
DEEP: Any = "end"
for _ in range(300):
    DEEP = [DEEP]
NASTY: list[Any] = [
    *("x", "", [], {}, None, True, -1, -1.5, 1e308, 10**400, 1 << 70, "\ud800", "x" * 30_000, "NaN", "\x00\x1b[2J"),
    *(float("nan"), float("inf"), float("-inf"), DEEP, [[]], {"pid": -1}, {"pid": "1"}, {"name": DEEP}, [1, "x", None]),
    *({"\udcff": 1}, {"problem": 7, "seeds": 10**9}, {"seeds": ["x"]}, 0, [{}], [[0, "x", "y", None, 3]]),
]
FILES: dict[str, dict[str, Any]] = {
    "run": {
        "run.json": {
            "description": {"strategy": {"name": "DiLoCoStrategy", "H": 5}, "num_nodes": 2}, "command": ["train.py"],
            "started_s": 1e9, "process": GONE, "folder": "/", "versions": {"torch": "2"},
        },
        "status.json": {
            "state": "running", "step": 3, "total_steps": 9, "process": GONE, "heartbeat_s": 1e9, "started_s": 1e9,
        },
        "summary.json": {"state": "done", "step": 3, "val_loss": 1.0, "val_accuracy": 0.5, "tx_bytes": 8.0,
                         "wall_s": 2.0, "time_s": 3.0},
        "records.jsonl": [
            {"step": k, "node": node, "train_loss": 1.0, "val_loss": None if k else 2.0, "wall_s": 1.0, "tx_bytes": 8.0}
            for k in range(4) for node in (None, 0, 1)
        ],
        "events.jsonl": [
            {"at_s": 1.0, "kind": "start", "step": 0},
            *({"at_s": 1.0, "kind": "clock", "step": k} | {part: [k, k] for part in SHARES} for k in range(3)),
        ],
        "notes.json": {"tags": ["slow"], "note": "why"},
        "hosts.json": {
            "process": GONE, "ended": False, "written_s": 1e9,
            "events": [{"at_s": 1.0, "kind": "started", "host": "a"}],
            "hosts": [{"address": "a", "device": "cpu", "state": "running", "ranks": [0], "restarts": 0, "heard_s": 1e9,
                       "gpus": [{"name": "g", "use": 0.5}], "cpu_use": 0.5,
                       "processes": [{"rank": 0, "step": 3, "restarts": 0, "quiet_s": 1.0}]}],
        },
        "timeline.json": {"spans": [[0, "compute", 0.0, 1.0, ""], [1, "wait", 0.5, 1.0, ""]],
                          "shares": {"compute": 0.5}},
    },
    "comparison": {
        "run.json": {"task": "digits", "description": "ten classes", "strategies": {"ddp": {}, "diloco:H=5": {}},
                     "state": "running", "process": GONE, "runs_wanted": 2,
                     "arguments": {"problem": "digits", "seeds": 1, "nodes": 2}},
    },
    "sweep": {
        "sweep.json": {"task": "digits", "state": "finished", "axes": {"H": ["2", "5"]}, "best": "H=2",
                       "cells": {"H=2": {"H": "2"}, "H=5": {"H": "5"}}, "runs_wanted": 2, "process": GONE,
                       "arguments": {"problem": "digits", "seeds": 1, "strategy": "diloco", "axes": {"H": ["2", "5"]}}},
    },
}  # fmt: skip
CHILDREN = {"run": (), "comparison": ("ddp-seed-0",), "sweep": ("H-2-seed-0",)}


def text_of(value: Any) -> bytes:
    lines = value if isinstance(value, list) else [value]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def written(folder: Path, kind: str) -> Path:
    """Write a run, comparison or sweep that is as it should be."""
    folder.mkdir(parents=True)
    for name, value in FILES[kind].items():
        (folder / name).write_bytes(text_of(value))
    for child in CHILDREN[kind]:
        written(folder / child, "run")
    return folder


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all values in a value of JSON."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(place for key in keys for place in places(value[key], (*path, key)))]


def mutated(rng: random.Random, value: Any) -> bytes:
    """Return a file that is not as it was: a field or some bytes."""
    if rng.random() < 0.3:
        data = bytearray(text_of(value))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            what = rng.choice(["flip", "cut", "insert", "end", "latin"])
            if what == "flip":
                data[at] ^= 1 << rng.randrange(8)
            elif what == "cut":
                del data[at : at + rng.randint(1, 40)]
            elif what == "end":
                del data[max(at, 1) :]
            else:
                data[at:at] = (
                    b"\xe9" if what == "latin" else rng.choice([b"\n", b"\\ud800", b"1e999", b"[", b"\x00", b'"'])
                )
            data = data or bytearray(b"7")
        return bytes(data)
    value = copy.deepcopy(value)
    path = rng.choice([place for place in places(value) if place])
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    if rng.random() < 0.2:
        del holder[path[-1]]
    else:
        holder[path[-1]] = rng.choice(NASTY)
    return text_of(value).replace(b"NaN", rng.choice([b"NaN", b"1e999"]))


class Asked:
    """The page's application, asked without a network."""

    def __init__(self, top: Path):
        self.app = application(RunShelf(top), "127.0.0.1", TOKEN)

    async def ask(self, path: str) -> tuple[int, bytes]:
        path, _, query = path.partition("?")
        headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {TOKEN}".encode())]
        scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "headers": headers,
                 "query_string": query.encode(), "http_version": "1.1", "scheme": "http", "root_path": "",
                 "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}  # fmt: skip
        said: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(3600)
            return {}

        async def send(message: dict[str, Any]) -> None:
            said.append(message)

        try:
            await self.app(scope, receive, send)
        except Exception as error:
            pytest.fail(f"{path}: {error!r}")
        return said[0]["status"], b"".join(message.get("body", b"") for message in said)


def strict(body: bytes) -> Any:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    return json.loads(body.decode("utf-8"), parse_constant=refuse)


def fuzz(top: Path, seed: int, count: int, capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    """Hold so many mutations beside a healthy run, comparison and sweep; return how often each state was listed."""
    rng, states = random.Random(seed), dict[str, int]()
    healthy = {kind: written(top / f"healthy-{kind}", kind) for kind in FILES}
    before = {run.name: run for run in runs.list(top)}
    assert len(before) == 5 and not any(run.reason for run in before.values())

    async def look(names: dict[str, Path]) -> None:
        asked = Asked(top)
        for path in ("/api/runs", "/api/hosts"):
            status, body = await asked.ask(path)
            assert status == 200, (path, body)
            rows = {row["name"]: row for row in strict(body)}
            assert set(rows) >= ({"healthy-run"} if path == "/api/hosts" else set(before)), path
        for name, folder in [*names.items(), *((path.name, path) for path in healthy.values())]:
            for view in VIEWS:
                status, body = await asked.ask(f"/api/runs/{name}{view}")
                found = strict(body)
                kept = folder / "..." if folder.name.startswith("healthy") else folder
                assert status in (200, 404, 409), (folder, view, body)
                assert status == 200 or "error" in found, (folder, view, body)
                assert folder == kept or status == 200, (folder, view, body)

    at_once = MOST_WATCHED - len(before)  # so that none is only crowded out of the hosts
    for first in range(0, count, at_once):
        names = {}
        for k in range(first, min(first + at_once, count)):
            kind = rng.choice(["run"] * 4 + ["comparison", "sweep"])
            folder = written(top / f"forged-{k}", kind)
            name = rng.choice(sorted(FILES[kind]))
            (folder / name).write_bytes(mutated(rng, FILES[kind][name]))
            names[folder.name] = folder
        found = {run.name: run for run in runs.list(top)}
        assert {name: found.get(name) for name in before} == before
        for name in names:
            if name in found:  # of a file with nothing of a run left in it there is no line
                states[found[name].state] = states.get(found[name].state, 0) + 1
                assert (found[name].state == "unreadable") == (found[name].reason is not None)
        assert main(["runs", "list", "--runs", str(top)]) == 0 and "healthy-run" in capsys.readouterr().out
        asyncio.run(look(names))
        for folder in names.values():
            shutil.rmtree(folder)
    return states


def test_a_forged_folder_breaks_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = fuzz(tmp_path, 7, 45, capsys)
    assert states["unreadable"] > 5 and states["lost"] > 5


@pytest.mark.slow
def test_two_thousand_five_hundred_forged_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = fuzz(tmp_path, 1, 2500, capsys)
    assert states["unreadable"] > 500 and states["lost"] > 500


@pytest.mark.parametrize(
    ("name", "field", "value", "says"),
    [
        ("run.json", "started_s", "x", "started_s='x': expected a finite number"),
        ("summary.json", "wall_s", [], r"wall_s=\[\]: expected a number"),
        ("status.json", "heartbeat_s", 10**400, "heartbeat_s=1000.*: expected a finite number"),
        ("status.json", "step", -1, "step=-1: expected a whole number from 0"),
        ("run.json", "description", {"name": "\ud800"}, "half a character"),
        ("run.json", "description", {"deep": DEEP}, "more than 64 deep"),
        ("status.json", "process", {"pid": "1"}, "expected an object with pid"),
        ("status.json", "trouble", "x" * 30_000, "at most 20000 characters"),
        ("hosts.json", "hosts", [{"heard_s": "x"}], None),
    ],
    ids=range(9),
)
def test_a_bad_field_is_named(
    name: str, field: str, value: Any, says: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "good", "run")
    bad = written(tmp_path / "bad", "run")
    (bad / name).write_bytes(text_of(FILES["run"][name] | {field: value}))
    found = {run.name: run for run in runs.list(tmp_path)}
    assert set(found) == {"good", "bad"} and found["good"].reason is None
    if says is None:  # no part of the run itself
        assert found["bad"].state == "lost"
        with pytest.raises(ArgumentError, match="hosts="):
            schema.read_file(bad / name)
        return
    assert found["bad"].state == "unreadable" and found["bad"].started_s is None
    with pytest.raises(ArgumentError, match=says):
        runs.load(bad)
    assert main(["runs", "list", "--runs", str(tmp_path), "--state", "unreadable"]) == 0
    assert f"{name}" in (out := capsys.readouterr().out) and "good" not in out
    status, body = asyncio.run(Asked(tmp_path).ask("/api/runs/bad"))
    assert status == 200 and name in strict(body)["reason"]


def test_a_name_that_is_no_utf_8_is_a_line_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "good", "run")
    odd = os.fsencode(tmp_path) + b"/caf\xe9"
    try:
        shutil.copytree(os.fsencode(tmp_path / "good"), odd)
    except OSError:
        pytest.skip("this file system wants names in UTF-8")
    found = {run.name: run for run in runs.list(tmp_path)}
    assert set(found) == {"good", "caf\\udce9"} and "rename it" in str(found["caf\\udce9"].reason)
    assert main(["runs", "list", "--runs", str(tmp_path)]) == 0 and "caf" in capsys.readouterr().out
    for path in ("/api/runs", "/api/hosts"):
        status, body = asyncio.run(Asked(tmp_path).ask(path))
        assert status == 200 and "good" in {row["name"] for row in strict(body)}
    shutil.copytree(tmp_path / "good", tmp_path / "both" / "good")
    shutil.copytree(odd, os.fsencode(tmp_path / "both") + b"/\xff")
    (tmp_path / "both" / "run.json").write_bytes(text_of(FILES["comparison"]["run.json"]))
    assert {run.name for run in runs.list(tmp_path)} >= {"both", "both/good", "both/\\udcff"}


def test_a_record_that_no_run_writes_is_named(tmp_path: Path) -> None:
    """A line that is no whole object is of a kill and left out; one that is whole and wrong is not."""
    path = written(tmp_path / "one", "run") / "records.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "val\n[]\n{"step": 3, "val_loss": NaN}\n{"step": 4')
    assert [row["step"] for row in runs.load(tmp_path / "one").records] == [1, 3]
    for bad, says in ((b'{"step": "x"}', r"step='x'.*line 2"), (b'{"node": 1}', "has no step"),
                      (b'{"step": 1, "mine": [1]}', r"mine=\[1\]"), (b'{"step": 1, "lr": 1e999}', "lr=inf"),
                      (b'{"x":"' + b"x" * schema.LINE_BYTES, "a line of more than")):  # fmt: skip
        path.write_bytes(b'{"step": 1}\n' + bad + b"\n")
        with pytest.raises(ArgumentError, match=says):
            runs.load(tmp_path / "one")
        for view in ("/records?most=5", "/nodes"):
            asked = asyncio.run(Asked(tmp_path).ask(f"/api/runs/one{view}"))
            assert asked[0] == (409 if view != "/nodes" or b'"node"' in bad else 200), (bad[:99], view)
        body = strict(asyncio.run(Asked(tmp_path).ask("/api/runs/one/records"))[1])
        assert body["records"] == [{"step": 1}] and body["error"], bad


def test_what_a_run_writes_is_what_the_schema_has(tmp_path: Path) -> None:
    """All files of a run, with numbers that JSON lacks and a command that is no UTF-8, can be read again."""
    from exogym.core.record.run_folder import RunFolder

    folder = RunFolder(tmp_path / "run", 3, False, {"script": os.fsdecode(b"caf\xe9.py")})
    folder.start({"strategy": {"name": "X", "lr": float("inf")}})
    for step in range(3):
        folder.log({"step": step, "node": None, "val_loss": float("nan"), "mine": "a text"})
    folder.event({"kind": "done", "step": 3})
    folder.finish({"step": 3, "val_loss": float("inf"), "wall_s": 1.0})
    run = runs.load(tmp_path / "run")
    assert run.state == "done" and run.about["script"] == "caf\\udce9.py" and len(run.records) == 3
    (listed,) = runs.list(tmp_path)
    assert listed.state == "done" and listed.loss == float("inf")
    with pytest.raises(ArgumentError, match=r"run\.json: description"):
        RunFolder(tmp_path / "other", 3, False, {"description": 7}).start({})
    with pytest.raises(ArgumentError, match="state=7"):
        schema.check_file("run.json", {"strategies": {}, "state": 7})


# Every file of a stranger that a command reads: nothing runs, nothing outside its folder is opened, none takes long

READERS = ("run.json", "sweep.json", "hosts", "config")


def read_by_a_child(reader: str, count: int, folder: Path) -> dict[str, Any]:
    done = python(str(TESTS / "strangers.py"), reader, "1", str(count), str(folder))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("reader", READERS)
def test_a_file_of_a_stranger_runs_nothing_and_leads_nowhere(reader: str, tmp_path: Path) -> None:
    found = read_by_a_child(reader, 100 if reader in ("hosts", "config") else 25, tmp_path)
    assert found["faults"] == [] and found["refused"] > 5 and found["read"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_two_thousand_files_of_strangers(reader: str, tmp_path: Path) -> None:
    found = read_by_a_child(reader, 2000, tmp_path)
    assert found["faults"] == [] and found["refused"] + found["read"] == 2000 and found["read"] > 50


def test_the_watch_sees_what_it_is_there_to_see(tmp_path: Path) -> None:
    """The control of the tests above: what starts, connects, leads outside or is imported is noted."""
    script = (
        "import importlib, os, socket, subprocess, sys\nfrom pathlib import Path\nsys.path.insert(0, sys.argv[2])\n"
        "from strangers import Watch\n"
        "watch = Watch(Path(sys.argv[1]))\nwatch.on = True\n"
        "open(sys.argv[1] + '/inside', 'w').close()\nimportlib.import_module('subprocess')\nos.system('true')\n"
        "subprocess.run(['true'])\nopen('/etc/passwd').close()\n"
        "try:\n    os.remove('/no/such/file')\nexcept OSError:\n    pass\n"
        "try:\n    socket.create_connection(('127.0.0.1', 9))\nexcept OSError:\n    pass\n"
        "watch.on = False\nprint([seen.split()[0] for seen in watch.seen])\n"
    )
    done = python("-c", script, str(tmp_path), str(TESTS))
    assert done.returncode == 0, done.stderr
    kinds = ["import", "os.system", "subprocess.Popen", "open", "os.remove", "socket.connect"]
    assert [kind for kind in kinds if repr(kind) not in done.stdout] == []
