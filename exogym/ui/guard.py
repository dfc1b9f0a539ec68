"""Check each request to the page: its host name, its origin and its token.

A page of another site can make a browser send requests to this server, and such a site can point its own host name to
127.0.0.1. So a request that names another machine, or comes from a page of another origin, gets status 403, and a
request without the token gets status 401. The address that you open first contains the token. Later requests send it in
a cookie, which scripts cannot read, and which browsers do not send with requests from other sites.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from exogym.machines.remote.hosts import is_loopback

COOKIE = "exogym_token"
READS = ("GET", "HEAD")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}  # fmt: skip
Message = MutableMapping[str, Any]
App = Callable[[Any, Any, Callable[[Message], Awaitable[None]]], Awaitable[None]]


class Guard:
    """Checks each request, and passes valid requests to the ASGI application `app`.

    If `host`, on which the server listens, is a loopback address, only the loopback's host names are accepted. `know`
    is called with the client (address and port) of each request that has the token.
    """

    def __init__(self, app: App, host: str, token: str, know: Callable[[Any], object] = lambda client: None):
        self.app, self.host, self.token, self.know = app, host, token, know

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *extra]
            await send(message)

        answer = self.refusal(request)
        await (answer or self.app)(scope, receive, send_with_headers)

    def refusal(self, request: Request) -> Response | None:
        """Return an error response if the request is refused, or None if the request may pass.

        When the page is opened with the token in its address, the response is a redirect that sets the cookie.
        """
        if len(request.headers.getlist("host")) != 1 or not self.is_here(request.headers["host"]):
            return _error(403, "unknown host name: open the address that exogym ui printed")
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != request.headers["host"]:
            return _error(403, "requests from other sites are refused")
        if request.headers.get("sec-fetch-site") == "cross-site" and request.url.path != "/":
            return _error(403, "requests from other sites are refused")
        if request.method not in READS and origin is None and request.headers.get("x-exogym-token") is None:
            return _error(403, "a change needs the header Origin or X-Exogym-Token: send one of them")
        asked = request.query_params.get("token")
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = [asked, request.cookies.get(_cookie(request)), bearer, request.headers.get("x-exogym-token")]
        if not any(text and hmac.compare_digest(text.encode(), self.token.encode()) for text in given):
            return _error(401, "the token is missing or wrong: open the address that exogym ui printed")
        self.know(request.scope.get("client"))
        if asked is not None and request.method in READS and not request.url.path.startswith("/api/"):
            others = [(name, x) for name, x in parse_qsl(request.url.query) if name != "token"]
            path = "/" + request.url.path.lstrip("/\\")  # "//other.site" would lead to another site
            answer = RedirectResponse(path + (f"?{urlencode(others)}" if others else ""), 303)
            answer.set_cookie(_cookie(request), self.token, httponly=True, samesite="strict", path="/")
            return answer
        return None

    def is_here(self, host: str) -> bool:
        """Return whether the Host header `host` is a name of this machine at the address on which the server listens.

        >>> Guard(None, "127.0.0.1", "x").is_here("localhost:80"), Guard(None, "127.0.0.1", "x").is_here("site.org")
        (True, False)
        """
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            names = {"localhost"} if is_loopback(self.host) else {"localhost", self.host, socket.gethostname()}
            return name in {known.lower() for known in names}
        return address.is_loopback or not is_loopback(self.host)  # unlike a name, an address cannot be redirected


def _cookie(request: Request) -> str:
    """Return the cookie's name. It contains the port, because browsers share cookies among a host's ports."""
    port = request.headers["host"].rpartition(":")[2]
    return f"{COOKIE}_{port if port.isascii() and port.isdigit() else 80}"


def _error(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status)
