"""The web server of the page that shows runs: `serve`. docs/ui.md lists the addresses that others may use.

The page itself also asks for /api/forms, /api/strategies, /api/started, /api/estimate and /api/runs/NAME/again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import reprlib
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from exogym.errors import ArgumentError
from exogym.logger import in_json
from exogym.machines.remote.health import read_hosts
from exogym.machines.remote.hosts import is_loopback
from exogym.progress import notice
from exogym.study import runs
from exogym.study.notes import Notes, read_notes, write_notes
from exogym.ui.apart import Replaced
from exogym.ui.door import ASYNCIO, AT_ONCE, LOG, QUEUE, Gate, Seldom, filtered
from exogym.ui.guard import Guard
from exogym.ui.health import health_of, silence_of, trouble_of
from exogym.ui.lines import as_text, newest_events, some_of
from exogym.ui.repeat import command_of, snippet_of, usual_of
from exogym.ui.shelf import RunShelf
from exogym.ui.starting import CannotStart, Form, Starter
from exogym.ui.views import grid_of, timeline_of, verdict_of

STATIC = Path(__file__).parent / "static"
PAUSE_S = 1.0  # seconds between two checks for a changed list
MOST_EVENTS = 500  # newest events of a run
MOST_POINTS = 20_000  # records in an answer to ?most=
MOST_VERDICTS = 32  # kept
MOST_WATCHED = 20  # newest runs on hosts
LEAST_TOKEN = 16  # characters
PORTS_TRIED = 20  # the asked port and those after it
MOST_BODY = 1 << 16  # bytes of a form


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens at a port, or at the next free port. Print a notice in the second case."""
    if not 0 <= port < 65536:
        raise ArgumentError(f"port={port} must be from 0 to 65535: use another --port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for place in range(port, min(port + PORTS_TRIED, 65536)):
        try:
            sock = socket.create_server((host, place), family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ArgumentError(
                    f"{host} port {place} cannot be used ({error.strerror or error}): use another --host or --port"
                ) from error
            continue
        if place != port:
            notice(f"port {port} is in use: using {place}")
        return sock
    raise ArgumentError(f"{host}: port {port} and the {PORTS_TRIED - 1} ports after it are in use: use another --port")


def serve(
    folder: Path, port: int = 0, host: str = "127.0.0.1", token: str | None = None,
    ready: Callable[[str], object] = print, forms: Callable[[], Mapping[str, Form]] | None = None,
    allow_code: bool = False,
) -> None:  # fmt: skip
    """Serve the page that shows runs, until a signal such as Ctrl-C ends the server.

    Args:
        folder: the folder with the runs, which may be missing.
        port: the port, or 0 for any free port. If the port is in use, the server uses the first free port of the next
            19, and prints a notice.
        host: the address on which to listen. If other computers can reach this address, pass a `token`.
        token: the secret that every request must have, of at least 16 characters; random by default.
        ready: called with the address to open in a browser.
        forms: function that returns the commands that the page may start, with their options. The function loads torch,
            so it is called only when a form is first needed. If `forms` is None, the page cannot start anything.
        allow_code: whether the values that users type on the page may name files and Python functions.

    Raises:
        ArgumentError: other computers can reach `host` and there is no token; the token is too short; or the address
            cannot be used.
    """
    if token is None and not is_loopback(host):
        raise ArgumentError(f"host={host!r} can be reached by other computers: pass your own token, or leave host out")
    if token is not None and len(token) < LEAST_TOKEN:
        raise ArgumentError(f"token has {len(token)} characters, which can be guessed: use at least {LEAST_TOKEN}")
    token = token or secrets.token_urlsafe(24)
    with _listening(host, port) as sock:
        name = f"[{host}]" if ":" in host else host
        starter = None if forms is None else Starter(folder, forms, allow_code)
        over, door = threading.Event(), Gate()
        config = uvicorn.Config(
            application(RunShelf(folder), host, token, starter, over, door.know), log_level="warning",
            log_config=None,  # uvicorn's own configuration would close this process's handlers
            server_header=False, lifespan="off", timeout_graceful_shutdown=1, ws="none", loop="asyncio",
            http=door.protocol(), backlog=AT_ONCE, proxy_headers=False,  # fixed: other packages change nothing
        )  # fmt: skip
        ready(f"http://{name}:{sock.getsockname()[1]}/?token={token}")
        # Once the server is over, uvicorn cuts open answers off and would log tracebacks.
        with filtered(LOG, Seldom(), lambda record: not over.is_set()), filtered(ASYNCIO, Seldom()):
            _PageServer(config, over, starter).run(sockets=[sock])


class _PageServer(uvicorn.Server):
    """Sets `over` at the first signal to end, and ends the starter's checks and estimates.

    It accepts `AT_ONCE` connections at a time; the system queues `QUEUE`.
    """

    def __init__(self, config: uvicorn.Config, over: threading.Event, starter: Starter | None):
        super().__init__(config)
        self.over, self.starter = over, starter

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(QUEUE)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.starter is not None:  # before uvicorn waits for the answers that wait for these processes
            self.starter.close()
        await super().shutdown(sockets)

    def handle_exit(self, number: int, frame: FrameType | None) -> None:
        self.over.set()
        super().handle_exit(number, frame)


def application(
    shelf: RunShelf, host: str, token: str, starter: Starter | None = None, over: threading.Event | None = None,
    know: Callable[[Any], object] = lambda client: None,
) -> Any:  # fmt: skip
    """Return the page as an ASGI application. A `Guard` checks each request, with `host`, `token` and `know`.

    Without a `starter`, the page cannot start anything. When `over` is set, server-sent events end.
    """
    is_over = threading.Event() if over is None else over

    def index(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    def all_runs(request: Request) -> Response:
        return JSONResponse(shelf.all())

    def choices(path: Path) -> dict[str, str]:
        return {} if starter is None else starter.choices(path)

    def one_run(request: Request) -> Response:
        name = request.path_params["name"]
        listed = {row["name"]: row for row in shelf.all()}
        if (row := listed.get(name)) is not None and row["state"] == runs.UNREADABLE:
            return JSONResponse(row | {"description": {}, "status": {}, "summary": {}, "events": []})
        path = _folder(shelf, request)
        if row is not None and row["kind"] != "run":
            inside = [other for other in listed if other.startswith(f"{name}/")]
            return JSONResponse(row | {"runs": inside, "actions": choices(path), "may_start": starter is not None})
        try:
            run = runs.stand(path)
        except ArgumentError as error:
            raise HTTPException(404, f"run {name!r} not found") from error
        pid = (run.status.get("process") or {}).get("pid")
        found = {
            "name": name, "state": run.state, "kind": "run", "description": run.description, "status": run.status,
            "summary": run.summary, "command": command_of(run.about), "versions": run.about.get("versions"),
            "snippet": snippet_of(path, run.about), "strategy": runs.short_name(run.description.get("strategy")),
            "events": newest_events(path / "events.jsonl", MOST_EVENTS),
            "actions": choices(path), "may_start": starter is not None, "usual": usual_of(run.description),
            "output": "" if starter is None else starter.output_of(pid), **asdict(read_notes(path)),
        }  # fmt: skip
        return JSONResponse(in_json(found))

    def records(request: Request) -> Response:
        path = _folder(shelf, request) / "records.jsonl"
        after, most, most_bytes = (_whole(request, name) for name in ("after", "most", "most_bytes"))
        after, is_model = -1 if after is None else after, request.query_params.get("node") == "none"
        if most is None:
            return StreamingResponse(as_text(path, after, is_model), media_type="application/json")
        return JSONResponse(some_of(path, after, is_model, min(max(most, 2), MOST_POINTS), most_bytes))

    def nodes(request: Request) -> Response:
        path = _folder(shelf, request)
        found = shelf.nodes(path, _whole(request, "most_bytes"))
        trouble = silence_of(read_hosts(path).get("hosts", [])) or trouble_of(found)
        health = {"health": health_of(found), "trouble": trouble}
        return JSONResponse(in_json(found | health))

    def timeline(request: Request) -> Response:
        window = {name: _seconds(request, name) for name in ("from_s", "to_s") if name in request.query_params}
        path = _folder(shelf, request)
        stood = shelf.nodes(path, 0).get("stood", ())  # as far as the nodes' picture has been read
        return JSONResponse(in_json(timeline_of(path, **window, stood=stood)))

    verdicts: dict[str, tuple[Any, Response]] = {}  # name to the states of its runs, and the answer of then

    def verdict(request: Request) -> Response:
        path, name = _folder(shelf, request), request.path_params["name"]
        states = [(r["name"], r["state"]) for r in shelf.all() if r["name"] == name or r["name"].startswith(f"{name}/")]
        if name not in verdicts or verdicts[name][0] != states:
            while len(verdicts) >= MOST_VERDICTS:
                verdicts.pop(next(iter(verdicts)), None)
            verdicts[name] = states, JSONResponse(in_json(verdict_of(path)))
        return verdicts[name][1]

    async def events(request: Request) -> Response:
        return StreamingResponse(_changes(shelf, is_over), media_type="text/event-stream")

    def saying(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
        """Return a view that answers with the result of `answer`."""
        return lambda request: JSONResponse(in_json(answer(request)))

    plain: dict[str, Callable[[Request], Any]] = {
        "hosts": lambda _: list(_watched(shelf)), "forms": lambda _: {} if starter is None else starter.forms,
        "strategies": lambda _: _own(starter).strategies,
        "started": lambda _: [] if starter is None else starter.started(),
        "runs/{name:path}/again": lambda request: _own(starter).again(_folder(shelf, request)),
        "runs/{name:path}/hosts": lambda request: read_hosts(_folder(shelf, request)),
        "runs/{name:path}/grid": lambda request: grid_of(
            _folder(shelf, request), {row["name"]: row for row in shelf.all()}
        ),
    }  # fmt: skip

    async def told(request: Request, *names: str) -> dict[str, Any]:
        """Return the JSON object in a request's body. It may have only these fields."""
        if not request.headers.get("content-type", "").startswith("application/json"):
            raise HTTPException(415, "the body must be JSON: send Content-Type application/json")
        text = b""
        try:
            async for part in request.stream():
                text += part
                if len(text) > MOST_BODY:
                    raise HTTPException(413, f"the body is too long: send at most {MOST_BODY} bytes")
        except ClientDisconnect:  # nobody reads the answer
            raise HTTPException(400, "the body is not complete") from None
        try:
            asked = json.loads(text, parse_constant=int)  # int("NaN") is an error: JSON has no NaN
        except (ValueError, RecursionError):
            raise HTTPException(400, "the body is not valid JSON") from None
        if not isinstance(asked, dict):
            raise HTTPException(400, "the body must be a JSON object")
        if others := asked.keys() - set(names):
            shown = reprlib.repr(min(others))
            raise HTTPException(400, f"the body has an unknown field {shown}: send {', '.join(names)}")
        return asked

    def commanded(answer: Callable[..., Any], status: int = 200) -> Callable[[Request], Awaitable[Response]]:
        """Return a view that calls `answer` with the starter, and with a command and its options from the body."""

        async def act(request: Request) -> Response:
            asked = await told(request, "command", "options")
            words = asked.get("command"), asked.get("options")
            return await run_in_threadpool(change, lambda: answer(_own(starter), *words), status)

        return act

    async def notes(request: Request) -> Response:
        asked = await told(request, "tags", "note", "title")
        path = await run_in_threadpool(_folder, shelf, request)
        _own(starter)
        try:
            now = Notes(**(asdict(read_notes(path)) | asked))
            if request.path_params["name"] not in {row["name"] for row in await run_in_threadpool(shelf.all)}:
                raise HTTPException(404, f"run {request.path_params['name']!r} not found")
            await run_in_threadpool(write_notes, path, now)
        except ArgumentError as error:
            raise HTTPException(400, str(error)) from None
        except OSError as error:
            raise HTTPException(409, f"the notes cannot be written: {error.strerror}") from None
        shelf.forget()
        return JSONResponse(asdict(now))

    def acts(what: str) -> Callable[[Request], Response]:
        def act(request: Request) -> Response:
            path, own = _folder(shelf, request), _own(starter)
            return change(lambda: {"pid": getattr(own, what)(path)}, 202)

        return act

    def change(action: Callable[[], Any], status: int) -> Response:
        try:
            return JSONResponse(in_json(action()), status)
        except CannotStart as error:
            raise HTTPException(403, str(error)) from None
        except Replaced as error:
            raise HTTPException(409, str(error)) from None
        except ArgumentError as error:
            raise HTTPException(400, str(error)) from None

    def failed(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return JSONResponse({"error": error.detail}, error.status_code)
        return JSONResponse({"error": in_json(str(error))}, 409)  # the files are not a run's

    routes = [
        Route("/", index), Route("/api/runs", all_runs), Route("/api/events", events),
        *(Route(f"/api/{where}", saying(answer)) for where, answer in plain.items()),
        Route("/api/start", commanded(lambda *asked: {"pid": Starter.start(*asked)}, 202), methods=["POST"]),
        Route("/api/check", commanded(Starter.check), methods=["POST"]),
        Route("/api/estimate", commanded(Starter.estimate), methods=["POST"]),
        *(Route(f"/api/runs/{{name:path}}/{what}", acts(what), methods=["POST"]) for what in ("stop", "resume")),
        Route("/api/runs/{name:path}/notes", notes, methods=["POST"]),
        *(Route(f"/api/runs/{{name:path}}/{view.__name__}", view) for view in (records, nodes, timeline, verdict)),
        Route("/api/runs/{name:path}", one_run),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]  # fmt: skip
    return Guard(
        Starlette(routes=routes, exception_handlers={HTTPException: failed, ArgumentError: failed}), host, token, know
    )


def _folder(shelf: RunShelf, request: Request) -> Path:
    path = shelf.folder(request.path_params["name"])
    if path is None:
        raise HTTPException(404, f"run {request.path_params['name']!r} not found")
    return path


def _own(starter: Starter | None) -> Starter:
    if starter is None:
        raise HTTPException(403, "this page is read-only: start exogym ui without --read-only")
    return starter


def _watched(shelf: RunShelf) -> Iterator[dict[str, Any]]:
    """Yield the newest runs on hosts, with their hosts' states."""
    left = MOST_WATCHED
    for row in shelf.all():
        path = shelf.folder(row["name"]) if "/" not in row["name"] else None
        if path is not None and left and (found := read_hosts(path)):
            left -= 1
            yield {"name": row["name"], "state": row["state"], "step": row["step"], "total_steps": row["total_steps"],
                   "trouble": silence_of(found["hosts"]), **found}  # fmt: skip


def _whole(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise HTTPException(400, f"{name}={text!r} must be a whole number") from None


def _seconds(request: Request, name: str) -> float:
    text = request.query_params[name]
    with contextlib.suppress(ValueError):
        if math.isfinite(seconds := float(text)):
            return seconds
    raise HTTPException(400, f"{name}={text!r} must be a number of seconds")


async def _changes(shelf: RunShelf, over: threading.Event) -> AsyncIterator[str]:
    """Yield the list of runs as a server-sent event when it changes. Otherwise a comment, to detect closed browsers."""
    before = None
    while not over.is_set():
        now = await run_in_threadpool(shelf.text)
        yield f"event: runs\ndata: {now}\n\n" if now != before else ": \n\n"
        before = now
        until = anyio.current_time() + PAUSE_S
        while anyio.current_time() < until and not over.is_set():
            await anyio.sleep(PAUSE_S / 10)
