"""What `make test` runs side by side, and in which order: units of tests, those that take the longest first.

A unit is run by one worker of pytest-xdist. As a rule it is a file; a folder whose files share engines, which take
longer to start than their tests, is one unit.

A slice of `make nightly` begins each week a third further on, and ends by the clock (`tools/nightly.sh`): what had no
time in one week comes early in one of the next two.
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


def in_order(node_ids: Sequence[str], week: int = 0) -> list[int]:
    """Return the tests' indices: by unit, the longest first, and within a unit in the order given.

    Folders that are one unit come first in every week, and begin at another of their tests.
    """
    indices: dict[str, list[int]] = {}
    for index, node_id in enumerate(node_ids):
        indices.setdefault(unit_of(node_id), []).append(index)
    units = sorted(indices, key=_rank)
    folders = [unit for unit in units if unit in _FOLDERS]
    files = [unit for unit in units if unit not in _FOLDERS]
    in_units = [_rotated(indices[folder], week) for folder in folders]
    in_units += [indices[file] for file in _rotated(files, week)]
    return [index for unit in in_units for index in unit]


def _rotated(items: list[Any], week: int) -> list[Any]:
    """Return the items with the third of this week first."""
    start = week % 3 * len(items) // 3
    return items[start:] + items[:start]


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
