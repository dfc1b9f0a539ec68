"""The page over run folders: what it answers, and to whom it does not. A real server, on the loopback."""

import http.client
import itertools
import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

import exogym
from exogym.cli import main
from exogym.core.base.processes import described
from exogym.errors import ArgumentError
from exogym.machines.remote import Host
from exogym.machines.remote.health import Board
from exogym.machines.remote.orders import HostOrder
from exogym.study import runs
from exogym.ui import serve
from exogym.ui.guard import Guard
from exogym.ui.lines import thinned
from exogym.ui.shelf import RunShelf
from exogym.ui.starting import Starter


class Enough(Exception):
    """Ends a server before it answers."""


def address_of(folder: Path, port: int) -> str:
    """Return the address that a page at this port would have; it does not begin to answer."""
    found: list[str] = []

    def ready(address: str) -> None:
        found.append(address)
        raise Enough

    with pytest.raises(Enough):
        serve(folder, port, ready=ready)
    return found[0]


def test_a_port_that_is_taken_is_left_for_the_next_free_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        used = urlsplit(address_of(tmp_path, taken)).port
        assert used is not None and taken < used < taken + 20
        assert capsys.readouterr().err == f"exogym: port {taken} is in use: using {used}\n"
        with pytest.raises(ArgumentError, match="port=65536 must be from 0 to 65535"):
            serve(tmp_path, 65536)
    assert urlsplit(address_of(tmp_path, taken)).port == taken  # it is free again
    assert not capsys.readouterr().err


def test_the_page_leaves_log_handlers_of_this_process_alone(tmp_path: Path) -> None:
    class Handler(logging.Handler):
        closed = False

        def close(self) -> None:
            self.closed = True
            super().close()

    mine = Handler()
    address_of(tmp_path, 0)
    assert not mine.closed


WHATS = ("start", "check", "estimate")  # of a form
VIEWS = ("records", "nodes", "timeline", "grid", "hosts")


@dataclass
class Page:
    """A running server over the runs in `folder`."""

    address: str
    folder: Path

    @property
    def port(self) -> int:
        port = urlsplit(self.address).port
        assert port is not None
        return port

    @property
    def token(self) -> str:
        return parse_qs(urlsplit(self.address).query)["token"][0]

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Return status, headers and body; `path` goes out as it is."""
        given = {"Host": f"127.0.0.1:{self.port}", "Cookie": f"exogym_token_{self.port}={self.token}"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in given.items():
            if value:
                connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        try:
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        status, _, body = self.ask(path)
        assert status == 200, body
        return json.loads(body)


def rows_of(steps: range) -> str:
    rows = []
    for step in steps:
        loss = 2.0 / (1 + step) if step % 5 == 0 else None
        rows.append({"step": step, "node": None, "val_loss": loss, "train_loss": 1.0, "tx_bytes": 8.0 * step})
        rows += [{"step": step, "node": node, "train_loss": 1.0} for node in (0, 1)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def written(folder: Path, steps: int = 20, state: str = "done", **about: Any) -> Path:
    """Write the folder of a run by hand."""
    folder.mkdir(parents=True)
    process = described() if state == "running" else described() | {"started": "1"}
    status = {"state": state, "step": steps, "total_steps": steps, "process": process, "heartbeat_s": time.time()}
    (folder / "status.json").write_text(json.dumps(status | {"started_s": 1e9}))
    description = {"strategy": {"name": "DiLoCoStrategy"}, "num_nodes": 2} | about
    (folder / "run.json").write_text(
        json.dumps({"description": description, "command": ["train.py"], "started_s": 1e9})
    )
    (folder / "records.jsonl").write_text(rows_of(range(steps + 1)))
    (folder / "events.jsonl").write_text('{"at_s": 1, "kind": "start", "step": 0}\n')
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    top = tmp_path_factory.mktemp("served")
    folder = top / "runs"
    written(folder / "one", losses="<script>bad()</script>")
    written(folder / "lost", state="running").joinpath("status.json").write_text(
        json.dumps({"state": "running", "step": 3, "process": described() | {"started": "1"}, "heartbeat_s": 2e9})
    )
    for seed in (0, 1):
        written(folder / "both" / f"ddp-seed-{seed}")
    (folder / "both" / "run.json").write_text(
        json.dumps({"task": "digits", "strategies": {"ddp": {}}, "state": "finished"})
    )
    written(top / "outside")
    (folder / "link").symlink_to(top / "outside")
    words = [sys.executable, "-m", "exogym", "ui", "--runs", str(folder), "--port", "0", "--no-open"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:"), process.communicate()[1]
            yield Page(address, folder)
        finally:
            process.terminate()
            _, errors = process.communicate(timeout=20)
        assert "Traceback" not in errors


def test_the_list_is_that_of_the_folders(served: Page) -> None:
    found = {run["name"]: run for run in served.json("/api/runs")}
    assert set(found) == {"one", "lost", "both", "both/ddp-seed-0", "both/ddp-seed-1"}
    assert (found["one"]["state"], found["lost"]["state"], found["both"]["kind"]) == ("done", "lost", "comparison")
    assert found["one"]["summary"]["loss"] == pytest.approx(2 / 21) and found["one"]["summary"]["tx_bytes"] == 160.0
    listed = {run.name: run.to_json() for run in runs.list(served.folder)}
    assert found["one"]["strategies"] == ["DiLoCo"]
    assert {k: v for k, v in found["one"].items() if k not in ("summary", "strategies")} == {
        k: v for k, v in listed["one"].items() if k != "path"
    }


def test_one_run_and_its_records(served: Page) -> None:
    run = served.json("/api/runs/both/ddp-seed-1")
    assert run["description"]["num_nodes"] == 2 and run["status"]["step"] == 20 and run["state"] == "done"
    assert run["command"] == "python train.py" and run["strategy"] == "diloco" and run["events"][0]["kind"] == "start"
    assert served.json("/api/runs/both")["runs"] == ["both/ddp-seed-0", "both/ddp-seed-1"]
    answer = served.json("/api/runs/one/records")
    assert len(answer["records"]) == 63 and answer["last"] == 20
    assert answer["records"] == [json.loads(line) for line in rows_of(range(21)).splitlines()]
    late = served.json("/api/runs/one/records?after=18&node=none")["records"]
    assert [(row["step"], row["node"]) for row in late] == [(19, None), (20, None)]
    few = served.json("/api/runs/one/records?node=none&most=8")["records"]
    assert len(few) == 8 and {0, 5, 15, 20} <= {row["step"] for row in few}
    assert served.ask("/api/runs/one/records?after=soon")[0] == 400


def test_what_is_added_comes_and_what_is_dropped_goes(served: Page) -> None:
    path = written(served.folder / "grows", 4, state="running") / "records.jsonl"
    assert served.json("/api/runs/grows/records")["last"] == 4
    with open(path, "a") as file:
        file.write(rows_of(range(5, 6)) + '{"step": 6, "no')
    assert [row["step"] for row in served.json("/api/runs/grows/records?after=4")["records"]] == [5, 5, 5]
    with open(path, "a") as file:
        file.write('de": null}\n')
    assert served.json("/api/runs/grows/records?after=5")["records"] == [{"step": 6, "node": None}]
    beside = path.with_name("beside")
    beside.write_text(rows_of(range(3)))
    beside.replace(path)  # as a run does that goes on from an earlier step
    assert served.json("/api/runs/grows/records")["last"] == 2


def test_changes_are_sent(served: Page) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    connection.request("GET", "/api/events", headers={"Cookie": f"exogym_token_{served.port}={served.token}"})
    answer = connection.getresponse()
    assert answer.headers["Content-Type"].startswith("text/event-stream")

    def next_names() -> set[str]:
        while not (line := answer.readline()).startswith(b"data: "):
            assert line
        return {run["name"] for run in json.loads(line[6:])}

    assert "appears" not in next_names()
    written(served.folder / "appears", state="running")
    while "appears" not in next_names():
        pass
    answer.close()
    connection.close()


def test_the_token_is_asked_for_everywhere(served: Page) -> None:
    views = [f"/api/runs/one/{view}" for view in VIEWS]
    for path in ("/", "/api/runs", "/api/runs/one", *views, "/api/hosts", "/api/events", "/static/app.js", "/none"):
        name = f"exogym_token_{served.port}"
        for cookie in ("", f"{name}=", f"{name}=wrong", f"{name}={served.token}x", f"{name}0={served.token}"):
            assert served.ask(path, Cookie=cookie)[0] == 401, (path, cookie)
        assert served.ask(f"{path}?token=wrong", Cookie="")[0] == 401
    assert served.ask("/api/runs", Cookie="", Authorization=f"Bearer {served.token}")[0] == 200
    assert served.ask(f"/api/runs?token={served.token}", Cookie="")[0] == 200


def test_the_printed_address_leads_to_the_page_and_leaves_no_token_in_it(served: Page) -> None:
    status, headers, _ = served.ask(f"/?token={served.token}", Cookie="")
    assert (status, headers["Location"]) == (303, "/")
    cookie = headers["Set-Cookie"]
    assert (
        cookie.startswith(f"exogym_token_{served.port}={served.token};")
        and "HttpOnly" in cookie
        and "SameSite=strict" in cookie
    )
    status, headers, body = served.ask("/", Cookie=cookie.partition(";")[0])
    assert status == 200 and b"<script src=" in body and served.token.encode() not in body
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
    assert served.ask(f"//evil.example/x?token={served.token}", Cookie="")[1]["Location"] == "/evil.example/x"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "localhost.evil.example", "[", ""]
)
def test_a_foreign_host_is_refused(host: str, served: Page) -> None:
    assert served.ask("/api/runs", Host=host)[0] in (400, 403)


def test_names_of_this_machine_are_answered(served: Page) -> None:
    for host in (f"127.0.0.1:{served.port}", f"localhost:{served.port}", f"[::1]:{served.port}"):
        assert served.ask("/api/runs", Host=host)[0] == 200


def test_another_site_is_refused(served: Page) -> None:
    for origin in ("https://evil.example", "null", f"http://127.0.0.1:{served.port + 1}", "http://127.0.0.1"):
        assert served.ask("/api/runs", Origin=origin)[0] == 403
    assert served.ask("/api/runs", Sec_Fetch_Site="cross-site")[0] == 403
    assert served.ask("/api/runs", Origin=f"http://127.0.0.1:{served.port}", Sec_Fetch_Site="same-origin")[0] == 200


@pytest.mark.parametrize(
    "name",
    [
        *("..", "../outside", "%2e%2e/outside", "..%2foutside", "one/../../outside", "one%2f..%2f..%2foutside"),
        *(
            "/etc",
            "%2fetc",
            "link",
            "one/records.jsonl",
            ".",
            "",
            "one/",
            "%00",
            "one%00",
            "..%5coutside",
            "both/../one",
        ),
        *("a/b/c", ".hidden", "%252e%252e/outside", "none", "%ff", "x" * 5000),
    ],
)
def test_no_name_leads_out_of_the_folder(name: str, served: Page) -> None:
    for path in (f"/api/runs/{name}", *(f"/api/runs/{name}/{view}" for view in VIEWS)):
        status, _, body = served.ask(path)
        if path == "/api/runs/":
            assert status in (307, 404)
        else:
            assert status == 404 and b"DiLoCo" not in body, path
    assert served.ask(f"/static/{name}")[0] in (404, 405)


def test_a_change_needs_to_come_from_the_page(served: Page) -> None:
    own = f"http://127.0.0.1:{served.port}"
    forms = ("/api/start", "/api/check", "/api/estimate")
    for path in (*forms, "/api/runs/one/stop", "/api/runs/one/resume", "/api/runs/one/notes"):
        assert served.ask(path, "POST")[0] == 403  # nothing tells that the page sends it
        assert served.ask(path, "POST", Origin="https://evil.example")[0] == 403
        assert served.ask(path, "POST", Origin=own, Cookie="")[0] == 401
        assert served.ask(path, Origin=own)[0] in (404, 405)
    for path in forms:
        assert served.ask(path, "POST", Origin=own)[0] == 415  # what a form of another site could send
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert served.ask("/api/runs/one", method, Origin=own)[0] == 405
    assert served.ask("/api/runs/one/stop", "POST", Origin=own)[0] == 400  # nothing of it runs
    for what in ("stop", "resume", "notes"):
        status, answer = post(served, f"/api/runs/..%2foutside/{what}", {"tags": ["x"]})
        assert status == 404, answer


def post(page: Page, path: str, body: Any) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
    given = {"Content-Type": "application/json", "X-Exogym-Token": page.token}
    connection.request("POST", path, body if isinstance(body, str) else json.dumps(body), given)
    try:
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_notes_are_kept_as_they_are_and_nowhere_else(served: Page) -> None:
    """Script text in tags, notes and what hosts say is handed on as text of JSON, never as a page."""
    nasty = "<script>bad()</script>"
    status, answer = post(served, "/api/runs/one/notes", {"tags": [nasty, "slow"], "note": f"{nasty}\nmore"})
    assert (status, answer) == (200, {"tags": [nasty, "slow"], "note": f"{nasty}\nmore", "title": ""})
    assert post(served, "/api/runs/one/notes", {"title": nasty})[1]["title"] == nasty
    answer = post(served, "/api/runs/one/notes", {"tags": ["slow", nasty]})[1]
    assert answer == {"tags": [nasty, "slow"], "note": f"{nasty}\nmore", "title": nasty}  # kept, if it is not given
    row = next(run for run in served.json("/api/runs") if run["name"] == "one")
    assert row["tags"] == [nasty, "slow"] and served.json("/api/runs/one")["note"].startswith(nasty)
    board = Board(served.folder / "one")
    board.started(HostOrder(Host(nasty, "h"), range(1), [], "."))
    assert served.json("/api/runs/one/hosts")["hosts"][0]["address"] == nasty
    assert [run["name"] for run in served.json("/api/hosts")] == ["one"]
    for path in ("/api/runs", "/api/runs/one", "/api/runs/one/hosts", "/api/hosts"):
        assert served.ask(path)[1]["Content-Type"] == "application/json"
    for wrong in (
        {"tags": "x"},
        {"tags": ["a,b"]},
        {"tags": 7},
        {"note": 7},
        {"note": "\x00"},
        {"title": "a\nb"},
        {"tags": [["x"]]},
        [],
    ):
        assert post(served, "/api/runs/one/notes", wrong)[0] == 400, wrong
    assert post(served, "/api/runs/link/notes", {"tags": ["x"]})[0] == 404
    (served.folder / "empty").mkdir(exist_ok=True)
    assert post(served, "/api/runs/empty/notes", {"tags": ["x"]})[0] == 404  # a folder, but no run
    assert post(served, "/api/runs/one/notes", {"tags": [], "note": "", "title": ""})[0] == 200
    assert not list(served.folder.parent.rglob("notes.json"))
    (served.folder / "one" / "hosts.json").unlink()


def test_a_script_is_not_gone_on_with_unasked(served: Page) -> None:
    path = written(served.folder / "script", state="stopped")
    (path.parent / "train.py").write_text("open('ran', 'w')")
    about = json.loads((path / "run.json").read_text()) | {"folder": str(path.parent)}
    (path / "run.json").write_text(json.dumps(about))
    status, answer = post(served, "/api/runs/script/resume", {})
    assert status == 403 and "--allow-code" in answer["error"] and not (path.parent / "ran").exists()
    assert post(served, "/api/runs/both/ddp-seed-0/resume", {})[0] == 400  # goes on with its comparison


def test_what_a_form_must_not_ask_for(served: Page) -> None:
    def ask(command: Any, options: Any) -> tuple[int, Any]:
        started, checked, tried = (
            post(served, f"/api/{what}", {"command": command, "options": options}) for what in WHATS
        )
        assert tried == started and checked[1]["error"] == started[1]["error"]  # each says the same, and none does it
        return started

    code = ({"dataset": "os:system"}, {"data": "x"}, {"network": "/etc/x.json"}, {"strategies": "a/b"})
    for options in code:
        status, answer = ask("compare", options)
        assert status == 403 and "--allow-code" in answer["error"], options
    for options in (
        {"out": "x"},
        {"debug": True},
        {"strategy": "ddp"},
        {"max_steps": "1\n2"},
        {"max_steps": {}},
        {"max_steps": ""},
        [],
    ):
        assert ask("compare", options)[0] == 400, options
    assert ask("doctor", {})[0] == 400 and ask(["compare"], {})[0] == 400
    assert served.json("/api/started") == []


DEEP, LONG = "[" * 500 + "]" * 500, f'"{"x" * 50_000}"'
NO_TEXT = ("1.5", "true", "null", "{}", '{"a": 1}', "[[1]]", DEEP, LONG)
OPTION = '{"command": "compare", "options": {"%s": ?}}'
WRONG: dict[str, Sequence[str]] = {  # JSON as it goes out, and the values in place of "?" that are of a wrong kind
    OPTION % "partitioner": NO_TEXT,
    OPTION % "strategies": (*NO_TEXT, '["ddp"]'),
    OPTION % "num_nodes": ("true", "null", "[2]", "{}", DEEP, LONG, "NaN", "Infinity", "1e999", "1" * 4000, "1" * 5000),
    OPTION % "shuffle": ("1", "null", '"yes"', DEEP),
    '{"command": "sweep", "options": {"axes": [?]}}': NO_TEXT,
    '{"command": "compare", "options": ?}': ("1", "null", '"x"', "[]", DEEP, json.dumps(dict.fromkeys(range(99)))),
    '{"command": ?, "options": {}}': (*NO_TEXT, '["compare"]'),
    '{"tags": ?}': ("1", "null", '"x"', '{"a": 1}', "[1]", "[null]", f"[{LONG}]", DEEP),
    '{"note": ?}': NO_TEXT,
    "?": ("1", "null", '"x"', "[]", DEEP, LONG, '{"more": 1}'),
}  # fmt: skip


@pytest.mark.parametrize("body", WRONG)
def test_a_value_of_a_wrong_kind_is_one_line_of_an_error(body: str, served: Page) -> None:
    paths = [f"/api/{what}" for what in WHATS if "tags" not in body and "note" not in body]
    paths += ["/api/runs/one/notes"] if "command" not in body else []
    for path, value in itertools.product(paths, WRONG[body]):
        status, answer = post(served, path, body.replace("?", value))
        assert status == 400 and 5 < len(answer["error"]) < 200 and answer["error"].isprintable(), (path, value[:99])
    assert served.json("/api/started") == [] and not (served.folder / "one" / "notes.json").exists()


def test_half_a_body_is_not_logged_as_an_error(served: Page) -> None:
    """`served` looks at what the server logged."""
    for path in (*(f"/api/{what}" for what in WHATS), "/api/runs/one/notes"):
        with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
            head = (
                f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Exogym-Token: {served.token}\r\nContent-Length: 99\r\n"
            )
            connection.sendall(f'{head}Content-Type: application/json\r\n\r\n{{"command": '.encode())
            served.json("/api/started")  # the server has read it
    served.json("/api/started")


def test_a_value_is_never_an_option_of_its_own() -> None:
    form = [{"name": "strategies", "flag": "--strategies", "is_flag": False, "multiple": False, "choices": []}]
    words = Starter(Path("runs"), lambda: {"compare": form}).arguments(
        "compare", {"strategies": "--debug; rm -rf x $(x)"}
    )
    assert words == ["--strategies=--debug; rm -rf x $(x)"]


def test_a_list_of_strategies_is_one_option_when_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"problem": "digits", "strategies": ["ddp", "diloco:H=5"], "seeds": 1}
    (tmp_path / "both").mkdir()
    about = {"task": "digits", "strategies": {"ddp": {}, "diloco:H=5": {}}, "state": "stopped", "arguments": asked}
    (tmp_path / "both" / "run.json").write_text(json.dumps(about))
    plain = {"is_flag": False, "multiple": False, "choices": [], "default": None}
    form = [{"name": name, "flag": f"--{name}", **plain} for name in ("dataset", "strategies", "seeds")]
    monkeypatch.setattr(Starter, "_begin", lambda self, command, words: words[2:])
    words = Starter(tmp_path, lambda: {"compare": form}).resume(tmp_path / "both")
    wanted = {"--strategies=ddp,diloco:H=5", "--seeds=1", "--dataset=digits", f"--out={tmp_path / 'both'}", "--resume"}
    assert set(words) == {"compare", *wanted}  # type: ignore[call-overload]


def wait_for(look: Any) -> Any:
    until = time.monotonic() + 60
    while not (found := look()):
        assert time.monotonic() < until
        time.sleep(0.1)
    return found


@pytest.mark.slow
def test_a_comparison_is_started_stopped_and_gone_on_with(served: Page) -> None:
    options = {"strategies": "ddp", "seeds": 1, "max_steps": 4000, "num_nodes": 2, "device": "cpu", "batch_size": 2}
    status, answer = post(served, "/api/start", {"command": "compare", "options": options})
    assert status == 202, answer

    def named(state: str) -> Any:
        """Return the name of the comparison, as soon as it is in that state and its run has begun."""
        rows = [run for run in served.json("/api/runs") if run["name"].startswith("digits-")]
        has_begun = any(run["step"] for run in rows if run["kind"] == "run")
        return has_begun and next((run["name"] for run in rows if run["state"] == state and "/" not in run["name"]), "")

    name = wait_for(lambda: named("running"))
    assert post(served, f"/api/runs/{name}/resume", {})[0] == 400  # it runs
    assert post(served, f"/api/runs/{name}/stop", {}) == (202, {"pid": answer["pid"]})
    wait_for(lambda: named("stopped"))
    wait_for(lambda: served.json("/api/started")[0]["status"] is not None)
    assert "exogym compare --resume --out" in served.json("/api/started")[0]["output"]
    assert post(served, f"/api/runs/{name}/resume", {})[0] == 202
    wait_for(lambda: named("done"))


def test_read_only_it_starts_nothing(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "exogym", "ui", "--runs", str(tmp_path), "--port", "0", "--no-open", "--read-only"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            page = Page(process.stdout.readline().strip(), tmp_path)
            assert page.json("/api/forms") == {}
            for what in WHATS:
                status, answer = post(page, f"/api/{what}", {"command": "compare", "options": {}})
                assert status == 403 and "--read-only" in answer["error"]
            written(tmp_path / "one")
            assert page.ask("/api/strategies")[0] == 403 and page.ask("/api/runs/one/again")[0] == 403
            assert not page.json("/api/runs/one")["may_start"]
            assert post(page, "/api/runs/one/notes", {"tags": ["x"]})[0] == 403
            assert not (tmp_path / "one" / "notes.json").exists()
        finally:
            process.terminate()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_looking_at_runs_loads_no_torch(tmp_path: Path) -> None:
    name = "both/ddp-seed-0"
    written(tmp_path / name)
    about = {"task": "digits", "strategies": {"ddp": {}}, "state": "finished"}
    (tmp_path / "both" / "run.json").write_text(json.dumps(about | {"arguments": {"problem": "digits", "seeds": 1}}))
    words = [sys.executable, "-m", "exogym", "ui", "--runs", str(tmp_path), "--port", "0", "--no-open"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            page = Page(process.stdout.readline().strip(), tmp_path)
            assert "compare(" in page.json(f"/api/runs/{name}")["snippet"]
            for path in ("/api/runs", "/api/hosts", "/api/started", *(f"/api/runs/{name}/{view}" for view in VIEWS)):
                page.json(path)
            loaded = Path(f"/proc/{process.pid}/maps")
            assert "torch" not in loaded.read_text()
            assert page.json("/api/forms") and "torch" in loaded.read_text()  # the control
        finally:
            process.terminate()


def test_its_files_name_no_other_place(served: Page) -> None:
    static = Path(exogym.__path__[0]) / "ui" / "static"
    for path in static.iterdir():
        if path.suffix in (".html", ".css", ".js"):
            text = path.read_text().partition("*/")[2] if path.name.startswith("uPlot") else path.read_text()
            assert "://" not in text and "innerHTML" not in text.replace(".innerHTML=", "") and "eval(" not in text, (
                path
            )
            assert served.ask(f"/static/{path.name}")[2] == path.read_bytes()
    assert "Leon Sorokin" in (static / "uPlot.LICENSE").read_text()


def test_an_address_that_others_reach_needs_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["ui", "--runs", str(tmp_path), "--port", "0", "--no-open"]
    assert main([*words, "--host", "0.0.0.0"]) == 2 and "pass your own token" in capsys.readouterr().err
    assert main([*words, "--host", "0.0.0.0", "--token", "short"]) == 2
    assert main([*words, "--host", "203.0.113.7", "--token", "x" * 20]) == 2
    there = Guard(lambda *_: None, "0.0.0.0", "x" * 20)  # type: ignore[arg-type, return-value]
    assert there.is_here("192.0.2.4:80") and not there.is_here("evil.example")


def test_ten_times_more_records_than_a_screen_has_points() -> None:
    rows = [{"step": k, "val_loss": 1.0 if k % 100 == 0 else None} for k in range(100_000)]
    few = thinned(rows, 2000)
    assert (
        len(few) == 2000
        and few[-1]["step"] == 99_999
        and [row["step"] for row in few] == sorted({row["step"] for row in few})
    )
    assert {row["step"] for row in rows if row["val_loss"]} <= {row["step"] for row in few}


def test_the_list_is_written_once_for_all_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, rows = RunShelf(tmp_path), [{"name": "one"}]
    assert shelf.text() == "[]"
    monkeypatch.setattr(shelf, "all", lambda: rows)
    assert shelf.text() == '[{"name": "one"}]' and shelf.text() is shelf.text()
    rows = [{"name": "other"}]
    assert shelf.text() == '[{"name": "other"}]'


def test_a_folder_that_is_not_there_has_no_runs(tmp_path: Path) -> None:
    assert RunShelf(tmp_path / "later").all() == []
