"""Pytest fixtures around the fake engine. In a conftest:

    from tests.fakes.fixtures import fake_engine_python  # noqa: F401

``fake_engine_python("--idle-exit-s=2")`` makes an executable to be passed as ``engine_python``; with
``tests.fakes.engine.fake_config(latency_s=0.1)`` as the engine config. Each executable has its own server in each
executor; a server ends with its executor, or 5 s after its last daemon.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.engine_python import write_engine_python


@pytest.fixture
def fake_engine_python(tmp_path: Path) -> Callable[..., str]:
    """Makes executables that stand in for the engine's Python; arguments are further flags of the server."""
    numbers = itertools.count(1)

    def make(*server_flags: str) -> str:
        return write_engine_python(tmp_path / f"engine-python-{next(numbers)}", *server_flags)

    return make
