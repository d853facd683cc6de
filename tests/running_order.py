"""What `make test` runs side by side, and in which order: units of tests, those that take the longest first.

A unit is run by one worker of pytest-xdist. As a rule it is a file; a folder whose files share engines, which take
longer to start than their tests, is one unit.
"""

from collections.abc import Sequence
from typing import Any

_FOLDERS = ("tests/parity/", "tests/engine/")
_WAITING = (
    "tests/spark/faults/test_disturbed_jobs.py",
    "tests/engine/test_failed_start.py",
    "tests/spark/test_annotate_table.py",
    "tests/spark/test_two_environments.py",
    "tests/spark/test_killed_job.py",
    "tests/spark/test_cluster.py",
    "tests/engine/test_killed_server.py",
    "tests/serve/",
)
"""Units that mostly wait, for processes to start or silence to be noticed: a third worker on two cores does them."""
LONGEST = (
    *_FOLDERS,
    "tests/spark/faults/test_disturbed_jobs.py",
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
    if path.startswith(_WAITING):
        return path
    return next((folder for folder in _FOLDERS if path.startswith(folder)), path)


def in_order(node_ids: Sequence[str]) -> list[int]:
    """Return the tests' indices: by unit, the longest first, and within a unit in the order given."""
    return sorted(range(len(node_ids)), key=lambda index: _rank(unit_of(node_ids[index])))


def _rank(unit: str) -> tuple[int, str]:
    place = next((place for place, start in enumerate(LONGEST) if unit.startswith(start)), len(LONGEST))
    return place, unit


def choose_unit(units: Sequence[str], *, waits: bool) -> str:
    """Return which of the units left a worker takes: the one that ``waits`` those that wait, the others the rest.

    One that has none of its kind left takes what is there, the shortest first if it waits.
    """
    own = [unit for unit in units if unit.startswith(_WAITING) is waits]
    return own[0] if own else units[-1 if waits else 0]


def make_scheduler(config: Any, log: Any) -> Any:
    """Return pytest-xdist's scheduler of files, for units."""
    from xdist.scheduler import LoadScopeScheduling  # not there where tests run in a thin environment

    class UnitScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            waits = len(self.nodes) > 2 and node is self.nodes[-1]
            if len(self.nodes) > 2:
                self.workqueue.move_to_end(choose_unit([*self.workqueue], waits=waits), last=False)
            super()._assign_work_unit(node)

    return UnitScheduling(config, log)
