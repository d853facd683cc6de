"""Find the row that kills the engine: rows that ran when it died are suspects, and run again in halving groups.

A death splits the rows that ran into two groups of half their number; groups run one at a time, with no other rows in
the engine. A row that completes is cleared. So after log2(n) deaths a poison row among n runs by itself. It is
condemned once the engine has died ``DEATHS_ALONE`` times with only that row: a kill from outside hits whatever runs,
and would have to hit the same single row that often. An engine that dies whatever it runs would condemn every row; it
is detected after ``CONDEMNED_IN_A_ROW`` condemned rows without a good completion between them.

This is pure state: it knows keys (what decides a row's answer, so equal rows are one suspect), no engine, file or
clock.
"""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Self

DEATHS_ALONE = 2
"""A row is condemned once the engine has died this many times while it ran only that row."""
CONDEMNED_IN_A_ROW = 3
"""If so many different rows are condemned without a good completion between them, the engine is to blame."""


@dataclass(slots=True)
class Suspects:
    """One application's suspects on one executor; they outlive the server."""

    groups: list[set[bytes]] = field(default_factory=list)
    """Disjoint and not empty; the next to run comes first."""
    deaths_alone: dict[bytes, int] = field(default_factory=dict)
    condemned: set[bytes] = field(default_factory=set)
    condemned_in_a_row: list[bytes] = field(default_factory=list)
    """Rows condemned since the last good completion."""
    jobs: set[str] = field(default_factory=set)
    """Jobs that have opened a session since there have been suspects."""
    refused_jobs: set[str] = field(default_factory=set)
    """Jobs whose engine died whatever it ran."""

    @property
    def count(self) -> int:
        return sum(len(group) for group in self.groups)

    def group_of(self, key: bytes) -> set[bytes] | None:
        """Return the group that the row must run in; ``None`` for a row that is not suspect."""
        return next((group for group in self.groups if key in group), None)

    def choose_group(self, present: Collection[bytes]) -> set[bytes] | None:
        """Return the next group with a row in ``present``; groups that wait for their rows hold up no others."""
        return next((group for group in self.groups if not group.isdisjoint(present)), None)

    def record_death(self, running: Collection[bytes]) -> None:
        """Record that the engine died while it ran these rows."""
        self.clear(running)
        if len(running) == 1:
            self._record_death_alone(*running)
        elif running:
            # Keys are hashes: their order has nothing to do with that of the rows, and is the same in every process.
            keys = sorted(running)
            middle = len(keys) // 2
            self.groups[:0] = [set(keys[:middle]), set(keys[middle:])]

    def record_end(self, keys: Iterable[bytes]) -> None:
        """Record that the engine has survived these rows, whether they ended well or as errors."""
        if self.groups or self.deaths_alone:
            keys = list(keys)
            self.clear(keys)
            for key in keys:
                self.deaths_alone.pop(key, None)
            if not self.groups:
                self.jobs.clear()

    def record_good(self) -> None:
        """Record that the engine has completed a row well."""
        self.condemned_in_a_row.clear()

    def clear(self, keys: Iterable[bytes]) -> None:
        """Clear these rows of suspicion; the deaths that are known of them are kept."""
        keys = list(keys)
        for group in self.groups:
            group.difference_update(keys)
        self._drop_empty_groups()

    def record_job(self, job_id: str) -> None:
        self.jobs.add(job_id)

    def to_json(self) -> bytes:
        return json.dumps(
            {
                "groups": [_hex(group) for group in self.groups],
                "deaths_alone": {key.hex(): deaths for key, deaths in self.deaths_alone.items()},
                "condemned": _hex(self.condemned),
                "condemned_in_a_row": _hex(self.condemned_in_a_row),
                "jobs": sorted(self.jobs),
                "refused_jobs": sorted(self.refused_jobs),
            }
        ).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Read what ``to_json`` wrote. ``ValueError``, ``KeyError`` or ``TypeError`` for any other text."""
        values = json.loads(text)
        return cls(
            groups=[set(_keys(group)) for group in values["groups"]],
            deaths_alone={bytes.fromhex(key): deaths for key, deaths in values["deaths_alone"].items()},
            condemned=set(_keys(values["condemned"])),
            condemned_in_a_row=_keys(values["condemned_in_a_row"]),
            jobs=set(values["jobs"]),
            refused_jobs=set(values["refused_jobs"]),
        )

    def _record_death_alone(self, key: bytes) -> None:
        self.deaths_alone[key] = self.deaths_alone.get(key, 0) + 1
        if self.deaths_alone[key] < DEATHS_ALONE:
            self.groups.insert(0, {key})
            return
        del self.deaths_alone[key]
        self.condemned.add(key)
        self.condemned_in_a_row.append(key)
        if len(self.condemned_in_a_row) >= CONDEMNED_IN_A_ROW:
            self._blame_engine()

    def _blame_engine(self) -> None:
        """Refuse the jobs that took part and acquit the rows: another job is a new attempt."""
        self.refused_jobs |= self.jobs
        self.condemned.difference_update(self.condemned_in_a_row)
        self.condemned_in_a_row.clear()
        self.jobs.clear()
        self.groups.clear()
        self.deaths_alone.clear()

    def _drop_empty_groups(self) -> None:
        self.groups[:] = [group for group in self.groups if group]


def _hex(keys: Iterable[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def _keys(texts: Iterable[str]) -> list[bytes]:
    return [bytes.fromhex(text) for text in texts]
