"""A REST catalog that hands out credentials of S3 for a table, which end while the job runs."""

import json
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipemax_spark.cli import failure_text
from pipemax_spark.errors import JobError
from tests.spark.iceberg.conftest import REST_SERVER, IcebergJobs, free_port, rest_server, serving
from tests.spark.iceberg.proxy import Answer, Asked, Proxy

pytestmark = pytest.mark.iceberg

_MOTO = REST_SERVER.parent / "moto"
_EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"


class Issuer:
    """Gives tokens, and knows how many of the newest are valid."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.refreshes = False
        """Whether the catalog says where new ones are to be had."""
        self.reset()

    def reset(self) -> None:
        self.issued, self.first_valid = 0, 0
        self.used: Counter[int] = Counter()
        self.denied = 0
        self.ends_at_put = 0
        """Which file of rows from now on is the first that no token may write; 0 for none."""

    def new(self) -> int:
        with self._lock:
            self.issued += 1
            return self.issued

    def end_all(self) -> None:
        """No token that was issued so far is valid any more."""
        self.first_valid = self.issued + 1

    def config(self, table: str) -> dict[str, str]:
        """Return what a catalog answers for a table beside its metadata."""
        access = {
            "s3.access-key-id": "vended",
            "s3.secret-access-key": "vended",
            "s3.session-token": f"token-{self.new()}",
        }
        if self.refreshes:
            # Iceberg asks again as soon as a token's last five minutes begin: so at every use.
            access |= {
                "s3.session-token-expires-at-ms": "1000",
                "client.refresh-credentials-endpoint": f"{table}/credentials",
            }
        return access

    def catalog(self, asked: Asked, pass_on: Any) -> Answer | None:
        """Answer for the catalog: give credentials with a table."""
        path = asked.path.partition("?")[0]
        if path.endswith("/credentials"):
            config = self.config(path.removesuffix("/credentials"))
            return Answer(
                status=200,
                body=json.dumps({"storage-credentials": [{"prefix": "s3", "config": config}]}).encode(),
            )
        is_load = asked.method == "GET" and "/tables/" in path
        if not is_load and not (asked.method == "POST" and path.endswith("/tables")):
            return None
        answer = pass_on()
        if answer.status != 200:
            return answer
        said = json.loads(answer.body)
        name = said["metadata"].get("location", "").rpartition("/")[2]
        table = path if is_load else f"{path}/{name}"
        said["config"] = {**said.get("config", {}), **self.config(table.removeprefix("/"))}
        return replace(answer, body=json.dumps(said).encode())

    def store(self, asked: Asked, _pass_on: Any) -> Answer | None:
        """Answer for S3: refuse a token that has ended, in S3's words."""
        token = asked.headers.get("x-amz-security-token", "")
        number = int(token.removeprefix("token-") or 0)
        self.used[number] += 1
        if self.ends_at_put and asked.method == "PUT" and "/data/" in asked.path:
            self.ends_at_put -= 1
            if not self.ends_at_put:
                self.end_all()
        if number and number >= self.first_valid:
            return None
        self.denied += 1
        return Answer(status=400, body=_EXPIRED, kind="application/xml")


@contextmanager
def moto(directory: Path) -> Iterator[str]:
    """Start moto's S3, and make the bucket ``lake``; yield its address."""
    if not (_MOTO / "bin" / "moto_server").exists():
        pytest.skip(f"{_MOTO} is made by make test-versions")
    port = free_port()
    with serving([_MOTO / "bin" / "moto_server", "-p", str(port)], port, directory / "moto.log") as address:
        yield address


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture(scope="module")
def catalog(spark: Any, issuer: Issuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("vended")
    with moto(directory) as s3, Proxy.before(s3) as store:
        urllib.request.urlopen(urllib.request.Request(f"{s3}/lake", method="PUT")).close()
        of_server = {
            "CATALOG_WAREHOUSE": "s3://lake/warehouse",
            "CATALOG_IO__IMPL": "org.apache.iceberg.aws.s3.S3FileIO",
            "CATALOG_S3_ENDPOINT": s3,
            "CATALOG_S3_PATH__STYLE__ACCESS": "true",
            "CATALOG_S3_ACCESS__KEY__ID": "server",
            "CATALOG_S3_SECRET__ACCESS__KEY": "server",
            "CATALOG_CLIENT_REGION": "us-east-1",
        }
        with rest_server(directory, of_server) as address, Proxy.before(address) as rest:
            rest.instead, store.instead = issuer.catalog, issuer.store
            settings = {
                "": "org.apache.iceberg.spark.SparkCatalog",
                ".type": "rest",
                ".uri": rest.address,
                ".io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
                ".s3.endpoint": store.address,
                ".s3.path-style-access": "true",
                ".client.region": "us-east-1",
                ".header.X-Iceberg-Access-Delegation": "vended-credentials",
            }
            for key, value in settings.items():
                spark.conf.set(f"spark.sql.catalog.ice_vended{key}", value)
            spark.sql("CREATE NAMESPACE IF NOT EXISTS ice_vended.db")
            yield "ice_vended"


@pytest.fixture
def jobs(run: IcebergJobs, issuer: Issuer) -> Iterator[IcebergJobs]:
    run.defaults = replace(run.defaults, id_columns=("id",), work_dir=str(run.directory / "work"))
    run.write_input([(number, f"word {number}") for number in range(200)])
    issuer.reset()
    yield run
    issuer.first_valid, issuer.refreshes = 0, False


def finished(jobs: IcebergJobs) -> None:
    assert Counter(row["id"] for row in jobs.rows()) == dict.fromkeys(range(200), 1)
    assert all(row["annotation"]["error"] is None for row in jobs.rows())


def test_a_job_asks_the_catalog_for_new_credentials_before_its_old_ones_end(
    jobs: IcebergJobs, issuer: Issuer
) -> None:
    issuer.refreshes = True
    assert jobs.run().complete
    finished(jobs)
    assert issuer.denied == 0
    assert len(issuer.used) > 10


def test_a_session_whose_credentials_ended_between_two_runs_goes_on_with_new_ones(
    jobs: IcebergJobs, issuer: Issuer
) -> None:
    jobs.run(limit=50)
    issuer.end_all()
    assert jobs.run().complete
    finished(jobs)


def test_credentials_that_end_while_rows_are_written_end_the_job_by_name_and_the_next_run_does_the_rest(
    jobs: IcebergJobs, issuer: Issuer
) -> None:
    jobs.run(limit=50)
    issuer.ends_at_put = 2
    with pytest.raises(Exception, match="The provided token has expired") as raised:
        jobs.run()
    assert "\n" not in failure_text(raised.value)
    assert len(jobs.rows()) >= 50
    issuer.denied = 0
    assert jobs.run().complete
    finished(jobs)
    assert issuer.denied == 0


def test_a_work_directory_where_only_the_catalog_can_write_is_refused_with_what_to_do(
    jobs: IcebergJobs,
) -> None:
    with pytest.raises(JobError, match=r'No FileSystem for scheme "s3"; .*name another by --work-dir'):
        jobs.run(work_dir=None)
