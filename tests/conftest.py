"""Hypothesis without deadlines: machines are shared, and no test here is about time. The order of `make test`."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.running_order import in_order, make_scheduler

settings.register_profile("pipemax", deadline=None)
settings.load_profile("pipemax")

# Also where a test has a cache of its own for what engines measure: without what vLLM knows of a model's class, it
# starts a process that imports torch to find it out.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("VLLM_CACHE_ROOT", str(_CACHE / "vllm"))


@pytest.hookimpl(trylast=True)  # pytest itself and tests/parity order the tests within units
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [items[index] for index in in_order([item.nodeid for item in items])]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Only for ``--dist loadscope``: other distributions are pytest-xdist's own."""
    return make_scheduler(config, log) if config.getoption("dist") == "loadscope" else None
