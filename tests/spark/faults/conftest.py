"""One disturbed application for all tests here: its start takes longer than most of them."""

from collections.abc import Iterator

import pytest

from tests.spark.faults.cluster import Cluster, assert_as_undisturbed


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("faults")) as cluster:
        assert_as_undisturbed(cluster.answer(cluster.submit()))
        yield cluster
