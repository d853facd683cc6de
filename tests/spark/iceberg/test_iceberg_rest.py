"""A REST catalog that denies, whose tokens end, or that commits and does not say so."""

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from py4j.protocol import Py4JJavaError

from pipemax_spark.cli import failure_text
from pipemax_spark.errors import JobFailedError
from tests.spark.iceberg.conftest import IcebergJobs, rest_server
from tests.spark.iceberg.proxy import Answer, Asked, Proxy

pytestmark = pytest.mark.iceberg

_Rule = Callable[[int, bool], tuple[int, str, bool] | None]
"""A commit's number, and whether it adds rows → status and kind of an error, and whether it is passed on anyway."""


class Denials:
    """Answers commits to tables in the catalog's place, by a rule."""

    def __init__(self) -> None:
        self.rule: _Rule = lambda _number, _adds_rows: None
        self.commits = 0

    def instead(self, asked: Asked, pass_on: Callable[[], Answer]) -> Answer | None:
        if asked.method != "POST" or "/tables/" not in asked.path or asked.path.endswith("/metrics"):
            return None
        denied = self.rule(self.commits, b'"added-records"' in asked.body)
        self.commits += 1
        if denied is None:
            return None
        status, kind, is_passed_on = denied
        if is_passed_on:
            pass_on()
        error = {"message": f"the catalog says {kind}", "type": kind, "code": status}
        return Answer(status=status, body=json.dumps({"error": error}).encode())


@pytest.fixture(scope="module")
def denials(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Denials]:
    directory = tmp_path_factory.mktemp("denying")
    with rest_server(directory) as address, Proxy.before(address) as made:
        denials = Denials()
        made.instead = denials.instead
        settings = {
            "": "org.apache.iceberg.spark.SparkCatalog",
            ".type": "rest",
            ".uri": made.address,
            ".cache-enabled": "false",
        }
        for key, value in settings.items():
            spark.conf.set(f"spark.sql.catalog.ice_denying{key}", value)
        spark.sql("CREATE NAMESPACE IF NOT EXISTS ice_denying.db")
        yield denials


@pytest.fixture(scope="module")
def catalog(denials: Denials) -> str:
    return "ice_denying"


@pytest.fixture
def jobs(run: IcebergJobs, denials: Denials) -> Iterator[IcebergJobs]:
    run.defaults = replace(run.defaults, id_columns=("id",))
    run.write_input([(number, f"word {number}") for number in range(200)])
    yield run
    denials.rule = lambda _number, _adds_rows: None


def finished(jobs: IcebergJobs) -> None:
    assert Counter(row["id"] for row in jobs.rows()) == dict.fromkeys(range(200), 1)
    assert all(row["annotation"]["error"] is None for row in jobs.rows())


@pytest.mark.parametrize(("status", "kind"), [(403, "ForbiddenException"), (401, "NotAuthorizedException")])
def test_a_commit_that_the_catalog_denies_ends_the_job_by_name_and_the_next_run_does_the_rest(
    jobs: IcebergJobs, denials: Denials, status: int, kind: str
) -> None:
    jobs.run(limit=50)
    denials.rule = lambda _number, adds_rows: (status, kind, False) if adds_rows else None
    with pytest.raises(Exception, match=kind) as raised:
        jobs.run()
    assert f"the catalog says {kind}" in failure_text(raised.value)
    assert "\n" not in failure_text(raised.value)
    assert len(jobs.rows()) == 50
    denials.rule = lambda _number, _adds_rows: None
    assert jobs.run().complete
    finished(jobs)


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_commit_that_landed_though_the_catalog_says_nothing_of_it_counts_once(
    jobs: IcebergJobs, denials: Denials, status: int
) -> None:
    jobs.run(limit=50)
    # Of each two answers one is lost: of the claim and of chunks.
    denials.rule = lambda number, _adds_rows: (status, "ServerErrorException", True) if number % 2 else None
    with contextlib.suppress(JobFailedError, Py4JJavaError):
        jobs.run()
    denials.rule = lambda _number, _adds_rows: None
    assert jobs.run().complete
    finished(jobs)
