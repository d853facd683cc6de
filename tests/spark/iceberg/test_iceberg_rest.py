"""A REST catalog that denies, whose tokens end, or that commits and does not say so."""

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import pytest
from py4j.protocol import Py4JJavaError

from pipemax_spark.cli import failure_text
from pipemax_spark.errors import JobFailedError
from tests.spark.iceberg.conftest import IcebergJobs, rest_server

pytestmark = pytest.mark.iceberg

_HOP_BY_HOP = {"transfer-encoding", "connection", "content-length", "content-encoding"}


_Rule = Callable[[int, bool], tuple[int, str, bool] | None]
"""A commit's number, and whether it adds rows → status and kind of an error, and whether it is passed on anyway."""


class Proxy(ThreadingHTTPServer):
    """Passes requests on to the catalog, unless a rule answers a commit to a table in its place."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(target).netloc
        self.rule: _Rule = lambda _number, _adds_rows: None
        self.commits = 0


class _Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        answer = None
        if self.command == "POST" and "/tables/" in self.path and not self.path.endswith("/metrics"):
            answer = self.server.rule(self.server.commits, b'"added-records"' in body)
            self.server.commits += 1
        status, headers, content = 0, {}, b""
        if answer is None or answer[2]:
            connection = HTTPConnection(self.server.target)
            sent = {name: value for name, value in self.headers.items() if name.lower() != "accept-encoding"}
            connection.request(self.command, self.path, body, sent)
            response = connection.getresponse()
            status, content = response.status, response.read()
            headers = {
                name: value for name, value in response.getheaders() if name.lower() not in _HOP_BY_HOP
            }
            connection.close()
        if answer is not None:
            status, kind, _ = answer
            error = {"message": f"the catalog says {kind}", "type": kind, "code": status}
            headers, content = {"content-type": "application/json"}, json.dumps({"error": error}).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_POST = do_HEAD = do_DELETE = _pass_on  # noqa: N815 # names of the library

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@pytest.fixture(scope="module")
def proxy(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    directory = tmp_path_factory.mktemp("denying")
    with rest_server(directory) as address, _serving(Proxy(address)) as made:
        settings = {
            "": "org.apache.iceberg.spark.SparkCatalog",
            ".type": "rest",
            ".uri": f"http://127.0.0.1:{made.server_port}",
            ".cache-enabled": "false",
        }
        for key, value in settings.items():
            spark.conf.set(f"spark.sql.catalog.ice_denying{key}", value)
        spark.sql("CREATE NAMESPACE IF NOT EXISTS ice_denying.db")
        yield made


@contextmanager
def _serving(proxy: Proxy) -> Iterator[Proxy]:
    Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()


@pytest.fixture(scope="module")
def catalog(proxy: Proxy) -> str:
    return "ice_denying"


@pytest.fixture
def jobs(run: IcebergJobs, proxy: Proxy) -> Iterator[IcebergJobs]:
    run.defaults = replace(run.defaults, id_columns=("id",))
    run.write_input([(number, f"word {number}") for number in range(200)])
    yield run
    proxy.rule = lambda _number, _adds_rows: None


def finished(jobs: IcebergJobs) -> None:
    assert Counter(row["id"] for row in jobs.rows()) == dict.fromkeys(range(200), 1)
    assert all(row["annotation"]["error"] is None for row in jobs.rows())


@pytest.mark.parametrize(("status", "kind"), [(403, "ForbiddenException"), (401, "NotAuthorizedException")])
def test_a_commit_that_the_catalog_denies_ends_the_job_by_name_and_the_next_run_does_the_rest(
    jobs: IcebergJobs, proxy: Proxy, status: int, kind: str
) -> None:
    jobs.run(limit=50)
    proxy.rule = lambda _number, adds_rows: (status, kind, False) if adds_rows else None
    with pytest.raises(Exception, match=kind) as raised:
        jobs.run()
    assert f"the catalog says {kind}" in failure_text(raised.value)
    assert "\n" not in failure_text(raised.value)
    assert len(jobs.rows()) == 50
    proxy.rule = lambda _number, _adds_rows: None
    assert jobs.run().complete
    finished(jobs)


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_commit_that_landed_though_the_catalog_says_nothing_of_it_counts_once(
    jobs: IcebergJobs, proxy: Proxy, status: int
) -> None:
    jobs.run(limit=50)
    # Of each two answers one is lost: of the claim and of chunks.
    proxy.rule = lambda number, _adds_rows: (status, "ServerErrorException", True) if number % 2 else None
    with contextlib.suppress(JobFailedError, Py4JJavaError):
        jobs.run()
    proxy.rule = lambda _number, _adds_rows: None
    assert jobs.run().complete
    finished(jobs)
