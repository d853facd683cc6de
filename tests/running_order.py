"""What `make test` runs side by side, and in which order: units of tests, those that take the longest first.

A unit is run by one worker of pytest-xdist. As a rule it is a file; a folder whose files share engines, which take
longer to start than their tests, is one unit.
"""

from collections.abc import Sequence
from typing import Any

_FOLDERS = ("tests/parity/", "tests/engine/")
LONGEST = (
    *_FOLDERS,
    "tests/spark/test_two_environments.py",
    "tests/spark/test_killed_job.py",
    "tests/spark/test_cluster.py",
    "tests/spark/test_connect.py",
    "tests/spark/",
    "tests/serve/",
    "tests/unit/policy/",
    "tests/unit/vllm_ext/",
)
"""How units begin, the longest first. A long one that began last would run while nothing else is left."""


def unit_of(node_id: str) -> str:
    path = node_id.partition("::")[0]
    return next((folder for folder in _FOLDERS if path.startswith(folder)), path)


def in_order(node_ids: Sequence[str]) -> list[int]:
    """Return the tests' indices: by unit, the longest first, and within a unit in the order given."""
    return sorted(range(len(node_ids)), key=lambda index: _rank(unit_of(node_ids[index])))


def _rank(unit: str) -> tuple[int, str]:
    place = next((place for place, start in enumerate(LONGEST) if unit.startswith(start)), len(LONGEST))
    return place, unit


def make_scheduler(config: Any, log: Any) -> Any:
    """Return pytest-xdist's scheduler of files, for units."""
    from xdist.scheduler import LoadScopeScheduling  # not there where tests run in a thin environment

    class UnitScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    return UnitScheduling(config, log)
