"""How many examples Hypothesis tries, however long it takes: no test here is about time. The order of `make test`."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.running_order import in_order, make_scheduler, unit_of

_WITHOUT_CLOCKS: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("pipemax", max_examples=10, **_WITHOUT_CLOCKS)
settings.register_profile("night", max_examples=300, **_WITHOUT_CLOCKS)
settings.load_profile("night" if os.environ.get("PIPEMAX_NIGHT") else "pipemax")

# Also where a test has a cache of its own for what engines measure: without what vLLM knows of a model's class, it
# starts a process that imports torch to find it out.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("VLLM_CACHE_ROOT", str(_CACHE / "vllm"))

# Threads of OpenMP spin while they wait for each other. With other tests on the same cores that made what takes torch
# 6 seconds take 149.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.hookimpl(trylast=True)  # pytest itself and tests/parity order the tests within units
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    week = int(os.environ.get("PIPEMAX_NIGHT") or 0) // 7
    items[:] = [items[index] for index in in_order([item.nodeid for item in items], week)]


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup() -> None:
    if time.time() > float(os.environ.get("PIPEMAX_NIGHT_ENDS") or "inf"):
        pytest.skip("the night's time is over: this comes early in one of the next two weeks")


_UNIT_END = pytest.StashKey[ExitStack]()


@pytest.fixture(scope="session")
def unit_end(pytestconfig: pytest.Config) -> Iterator[ExitStack]:
    """What ends with the last test of a unit, and not with the session: idle engines keep memory and cores."""
    with ExitStack() as stack:
        pytestconfig.stash[_UNIT_END] = stack
        yield stack


@pytest.hookimpl(trylast=True)  # when the last test's own fixtures are gone
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    is_last = nextitem is not None and unit_of(nextitem.nodeid) != unit_of(item.nodeid)
    if is_last and (stack := item.config.stash.get(_UNIT_END, None)) is not None:
        stack.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Only for ``--dist loadscope``: other distributions are pytest-xdist's own."""
    return make_scheduler(config, log) if config.getoption("dist") == "loadscope" else None
