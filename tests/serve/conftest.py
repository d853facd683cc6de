"""Each test has an executor of its own; the run fails if a server outlives one."""

from collections.abc import Iterator

import pytest

from pipemax_spark.executor.server_process import EXECUTOR_VARIABLE
from tests.fakes.engine_python import write_engine_python
from tests.fakes.fixtures import fake_engine_python, gpus  # noqa: F401
from tests.serve.support import FakeJvm
from tests.waiting import wait_until


@pytest.fixture(scope="session")
def _ended_executors() -> Iterator[list[tuple[str, FakeJvm]]]:
    """At the end of all tests, and not of each, for a server's end takes a moment."""
    executors: list[tuple[str, FakeJvm]] = []
    yield executors
    for test, fake in executors:
        wait_until(lambda fake=fake: fake.servers() == [], what=f"the server of {test} has ended")


@pytest.fixture(autouse=True)
def jvm(
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    _ended_executors: list[tuple[str, FakeJvm]],
) -> Iterator[FakeJvm]:
    fake = FakeJvm()
    _ended_executors.append((request.node.name, fake))
    monkeypatch.setenv(EXECUTOR_VARIABLE, str(fake.pid))
    yield fake
    fake.kill()


@pytest.fixture(scope="session")
def _shared_executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeJvm, str]]:
    fake = FakeJvm()
    script = tmp_path_factory.mktemp("shared") / "engine-python"
    yield fake, write_engine_python(script, "--replace-grace-s=0", "--stats-push-s=0.2")
    fake.kill()


@pytest.fixture
def shared_engine_python(
    _shared_executor: tuple[FakeJvm, str], jvm: FakeJvm, monkeypatch: pytest.MonkeyPatch
) -> str:
    """An engine's Python whose server serves many tests: for those that ask nothing of its life."""
    executor, engine_python = _shared_executor
    monkeypatch.setenv(EXECUTOR_VARIABLE, str(executor.pid))
    return engine_python
