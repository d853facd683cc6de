"""What ``make faults`` writes down."""

import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from tests.spark.faults.table import NO_DAMAGE, Damage
from tests.spark.faults.table_strikes import KINDS, LONGEST_PAUSE_S, SHARE_OF_PAIRS, History


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What an endpoint was asked, and what it answered."""

    requests: int
    faults: Mapping[str, int]
    answers: int
    """Those that left it whole."""
    answered_again: int
    """Among them, those to rows that it had answered: their answers were lost with a process that was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of the tables and of the foreign folders."""

    histories: Sequence[History]
    damage: Mapping[str, Damage]
    """By the table's name."""
    num_foreign_files: int
    touched_files: Sequence[str]
    """Foreign files that are gone or changed."""
    served: Mapping[str, Served] = field(default_factory=dict)
    """By the table's name; empty with the fake engine."""

    @property
    def failures(self) -> list[str]:
        return [failure for history in self.histories for failure in history.failures]

    @property
    def is_good(self) -> bool:
        is_undamaged = all(damage == NO_DAMAGE for damage in self.damage.values())
        return is_undamaged and not self.touched_files and not self.failures

    def recoveries_s(self, kind: str) -> list[float | None]:
        """Of both tables."""
        return [time_s for history in self.histories for time_s in history.recoveries_s[kind]]


_FAKE = "the real server around a fake engine, which has a worker process of its own and takes 1 s to load"
_ENDPOINT = "an engine over a faulty endpoint (`tests/endpoints/faulty_server.py`), one for each table"


def report(outcome: Outcome, *, seed: int, rows: int, seconds: float, load: float) -> str:
    """Return a page in Markdown; each table had so many rows, and the load was that at the start."""
    strikes = {kind: outcome.recoveries_s(kind) for kind in KINDS}
    engine = _FAKE if not outcome.served else _ENDPOINT
    flag = " ENDPOINT=1" if outcome.served else ""
    kinds = "\n".join(
        f"| {kind} | {len(times)} | {_spread(times)} |" for kind, times in strikes.items() if times
    )
    names = list(outcome.damage)
    damage = list(outcome.damage.values())
    bad = "".join(f"\n- {line}" for line in (*outcome.failures, *outcome.touched_files))
    return f"""# Kills at random

`make faults SEED={seed}{flag}` on {time.strftime("%Y-%m-%d")}: {os.cpu_count()} cores, \
{platform.system()}, load {load:.1f} at the start, seed {seed}, \
{seconds:.0f} s in all.

Two tables of {rows:,} rows are annotated at the same time, and their jobs share one work directory.
They run on a standalone cluster of two nodes on one machine. Each job has one executor of two task slots on each node.
Each executor has {engine}.
Jobs commit every 5 s. The two tables are struck independently. A table's next strike comes up to \
{LONGEST_PAUSE_S:.0f} s after the recovery
from the one before, and {SHARE_OF_PAIRS:.0%} of the strikes at a node's processes fall on both nodes at once.

| what was done | times | recovered after, s: median (longest) |
|---|---:|---|
{kinds}

A node has recovered when rows are done on it again, and from a full disk, a lost spool, a slow or a cut network both
nodes together. A killed driver has recovered when the same command, run again,
does rows on both nodes. A second job with another work directory takes over, and the first one must end with exit code
1 and name the run that took over. The time is from the second one's start, or from the moment when the stopped driver
continues, to the first one's end. Meanwhile strikes hit both jobs. A second job with the same work directory must end
with exit code 2 and leave the first one undisturbed. The time is from its start to its end.

| {sum(map(len, strikes.values()))} strikes | {" | ".join(names)} |
|---|{"---:|" * len(names)}
| rows lost | {_cells(each.lost for each in damage)} |
| rows duplicated | {_cells(each.doubled for each in damage)} |
| rows whose answer differs from an undisturbed run's | {_cells(each.changed for each in damage)} |
| rows condemned | {_cells(len(each.condemned) for each in damage)} |
| runs that ended by themselves and were run again | {_cells(each.failed_runs for each in outcome.histories)} |
| jobs that ended in another way than they should | {_cells(len(each.failures) for each in outcome.histories)} |

Foreign files in the work directories, some of them next to another program's `owner.json`: \
{outcome.num_foreign_files}, touched: {len(outcome.touched_files)}.
{_served(outcome.served)}{bad}
A stopped server is noticed after 30 s of silence. A decommissioned executor ends its tasks before it goes. The recovery
from a killed driver includes the start of Spark and of the engines.
"""


def _served(served: Mapping[str, Served]) -> str:
    """Return a table of what the endpoints were asked, or nothing without any."""
    if not served:
        return ""
    columns = served.values()
    kinds = sorted({kind for each in columns for kind in each.faults})
    faults = "".join(
        f"| {kind} | {_cells(each.faults.get(kind, 0) for each in columns)} |\n" for kind in kinds
    )
    return f"""
| what the endpoint was asked | {" | ".join(served)} |
|---|{"---:|" * len(served)}
| requests for rows | {_cells(each.requests for each in columns)} |
| whole answers | {_cells(each.answers for each in columns)} |
| of these, again to a row whose answer was lost with a killed process | \
{_cells(each.answered_again for each in columns)} |
{faults}"""


def _spread(times_s: Sequence[float | None]) -> str:
    known = [time_s for time_s in times_s if time_s is not None]
    return f"{median(known):.1f} ({max(known):.1f})" if known else ""


def _cells(values: Iterable[int]) -> str:
    return " | ".join(map(str, values))
