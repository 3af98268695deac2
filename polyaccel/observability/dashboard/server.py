"""The page on this machine: a server on the loopback address that answers requests with its token."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from hmac import compare_digest
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from polyaccel.errors import PolyaccelError
from polyaccel.observability.dashboard.document import as_json, live_page
from polyaccel.observability.dashboard.run import WatchedRun

_ADDRESS = "127.0.0.1"
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageServer:
    """Serves the page of `runs` at `url`, which holds a new token. All other paths, methods and hosts are refused: no
    path ever names a file."""

    def __init__(self, runs: Sequence[WatchedRun], port: int = 0) -> None:
        """`port` 0: any that is free. Raises PolyaccelError where it is not free."""
        self._runs = tuple(runs)
        self._lock = Lock()
        self._news = ("", "")
        """The runs at the last request, as revision and JSON."""
        self._token = secrets.token_urlsafe(24)
        try:
            self._server = _Server((_ADDRESS, port), _Handler)
        except OSError as error:
            hint = "name another --port, or none"
            raise PolyaccelError(f"port {port} cannot be had: {error.strerror}", hint=hint, value=port) from error
        self._server.page = self
        self.port: int = self._server.server_address[1]

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{_ADDRESS}:{self.port}/{self._token}/"

    def serve(self) -> None:
        """Answer until `stop` is called from another thread."""
        self._server.serve_forever(poll_interval=0.1)

    def stop(self) -> None:
        """End `serve`."""
        self._server.shutdown()

    def close(self) -> None:
        """Give the port back."""
        self._server.server_close()

    def answer(self, host: str, target: str) -> tuple[HTTPStatus, str, str]:
        """Status, content type and content for a GET of `target` by the `Host` that the browser names."""
        try:
            parts = urlsplit(target)
        except ValueError:
            return HTTPStatus.FORBIDDEN, "text/plain", "no\n"
        _, token, *rest = [*parts.path.split("/"), ""]
        is_known = compare_digest(token.encode(), self._token.encode())
        if not is_known or host not in (f"{name}:{self.port}" for name in (_ADDRESS, "localhost")):
            return HTTPStatus.FORBIDDEN, "text/plain", "no\n"
        if rest == ["", ""]:
            return HTTPStatus.OK, "text/html", live_page()
        if rest == ["news", ""]:
            have = parse_qs(parts.query).get("have", [""])[-1]
            return HTTPStatus.OK, "application/json", self._news_since(have)
        return HTTPStatus.FORBIDDEN, "text/plain", "no\n"

    def _news_since(self, have: str) -> str:
        with self._lock:
            for run in self._runs:
                run.look()
            revision = ".".join(str(run.revision) for run in self._runs)
            if revision == have:
                return "{}"
            if revision != self._news[0]:
                self._news = revision, as_json({"revision": revision, "runs": [run.shown() for run in self._runs]})
            return self._news[1]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    page: PageServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is not an error."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "polyaccel"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        status, kind, content = self.server.page.answer(self.headers.get("Host", ""), self.path)
        data = content.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing: the token is in every line."""
