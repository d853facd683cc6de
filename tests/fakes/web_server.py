"""A server on this machine that takes posts, and answers as it is told."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[BaseHTTPRequestHandler], None]


class Posts:
    """What the server got, in order; the list grows as posts come."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/secret-path"
        self.bodies: list[dict[str, Any]] = []
        self.texts: list[bytes] = []


def ok(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()


@contextmanager
def web_server(answer: Answer = ok) -> Iterator[Posts]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the name that the standard library calls
            text = self.rfile.read(int(self.headers["Content-Length"]))
            posts.texts.append(text)
            posts.bodies.append(json.loads(text))
            answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    posts = Posts(server.server_port)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield posts
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
