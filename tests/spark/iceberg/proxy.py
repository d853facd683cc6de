"""A proxy before a catalog or a store, which may answer in its place or change what it says."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Self
from urllib.parse import urlsplit

_HOP_BY_HOP = {"transfer-encoding", "connection", "content-length", "content-encoding"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request."""

    method: str
    path: str
    headers: dict[str, str]
    """By names in lower case."""
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A response."""

    status: int
    body: bytes = b""
    kind: str = "application/json"


class Proxy(ThreadingHTTPServer):
    """Passes requests on, unless a rule answers in place of the server behind it."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(target).netloc
        self.instead: Callable[[Asked, Callable[[], Answer]], Answer | None] = lambda _asked, _pass_on: None
        """Called with a request and a function that passes it on; what it returns is answered."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @classmethod
    @contextmanager
    def before(cls, target: str) -> Iterator[Self]:
        """Yield a proxy that serves."""
        with cls(target) as made:
            Thread(target=made.serve_forever, daemon=True).start()
            try:
                yield made
            finally:
                made.shutdown()


class _Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(method=self.command, path=self.path, headers=headers, body=body)
        passed: dict[str, str] = {}

        def pass_on() -> Answer:
            sent = {name: value for name, value in headers.items() if name != "accept-encoding"}
            connection = HTTPConnection(self.server.target)
            try:
                connection.request(self.command, self.path, body, sent)
                response = connection.getresponse()
                passed.update(response.getheaders())
                return Answer(status=response.status, body=response.read())
            finally:
                connection.close()

        answer = self.server.instead(asked, pass_on)
        if answer is None:
            answer = pass_on()
        else:
            passed = {"content-type": answer.kind}
        self.send_response(answer.status)
        for name, value in passed.items():
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        length = passed.get("Content-Length", "0") if self.command == "HEAD" else str(len(answer.body))
        self.send_header("content-length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_GET = do_POST = do_HEAD = do_DELETE = do_PUT = _answer  # noqa: N815 # names of the library

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""
