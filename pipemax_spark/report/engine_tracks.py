"""Keep what each engine did over the whole run, in bounded memory, for the curves of the run's charts.

A track holds columns of numbers, 42 bytes a report, and at most ``MAX_REPORTS_PER_ENGINE`` reports; with many engines
fewer, so that all tracks together hold about ``MAX_REPORTS``. Beyond that, every other report of the older half is
dropped: weeks stay as readable as minutes.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import nan
from typing import Any

from pipemax.wire import JobStats, ServerStats

MAX_REPORTS = 200_000
MAX_REPORTS_PER_ENGINE = 4_000
_MIN_REPORTS_PER_ENGINE = 32


def phase_of(server: ServerStats) -> str:
    """Return the engine's phase, or the server's state while there is no engine."""
    return server.phase if server.state == "ready" else server.state


@dataclass(slots=True)
class EngineTrack:
    """One engine server's reports, a value of each column for each report. Counts are since the job began."""

    reported_s: "array[float]" = field(default_factory=lambda: array("d"))
    """Since the job's first chunk was started, by the server's clock; ascending."""
    rows_done: "array[int]" = field(default_factory=lambda: array("q"))
    completion_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    kv_usage: "array[float]" = field(default_factory=lambda: array("f"))
    host_kv_usage: "array[float]" = field(default_factory=lambda: array("f"))
    """NaN where the engine does not report it, as in the two below."""
    predicted_step_s: "array[float]" = field(default_factory=lambda: array("f"))
    """NaN until the engine is calibrated: a first guess predicts nothing."""
    measured_step_s: "array[float]" = field(default_factory=lambda: array("f"))
    phase_number: "array[int]" = field(default_factory=lambda: array("H"))
    phase_names: list[str] = field(default_factory=list)
    """The phases that ``phase_number`` counts from 0."""

    def __len__(self) -> int:
        return len(self.reported_s)

    @property
    def phases(self) -> list[str]:
        return [self.phase_names[number] for number in self.phase_number]

    def add(self, server: ServerStats, job: JobStats, *, reported_s: float) -> None:
        """Append a report that is newer than the last one; a server may report less often than samples are taken."""
        if self.reported_s and reported_s <= self.reported_s[-1]:
            return
        phase = phase_of(server)
        if phase not in self.phase_names:
            self.phase_names.append(phase)
        metrics = server.engine_metrics
        self.reported_s.append(reported_s)
        self.rows_done.append(job.rows_done)
        self.completion_tokens.append(job.completion_tokens)
        self.kv_usage.append(server.kv_usage)
        self.host_kv_usage.append(metrics.get("host_kv_usage", nan))
        is_calibrated = metrics.get("is_calibrated", 0.0) > 0
        self.predicted_step_s.append(metrics.get("predicted_step_s", nan) if is_calibrated else nan)
        self.measured_step_s.append(metrics.get("measured_step_s", nan))
        self.phase_number.append(self.phase_names.index(phase))

    def thin(self, max_reports: int) -> None:
        """Drop every other report of the older half until there are no more than ``max_reports``."""
        while len(self) > max_reports:
            half = len(self) // 2
            for column in self._columns():
                column[:half] = column[:half:2]

    def rows_per_s(self, *, over_s: float) -> list[float]:
        """Return the rate at each report, over the ``over_s`` before it, or since the last report if that is longer."""
        return self._rates(self.rows_done, over_s)

    def tokens_per_s(self, *, over_s: float) -> list[float]:
        """Return the rate of generated tokens, as ``rows_per_s`` does for rows."""
        return self._rates(self.completion_tokens, over_s)

    def _rates(self, counts: "array[int]", over_s: float) -> list[float]:
        rates, first = [0.0] * len(self), 0
        for i in range(1, len(self)):
            at_s = self.reported_s[i]
            while first + 1 < i and self.reported_s[first] < at_s - over_s:
                first += 1
            rates[i] = (counts[i] - counts[first]) / (at_s - self.reported_s[first])
        return rates

    def _columns(self) -> "Sequence[array[Any]]":
        return [getattr(self, column.name) for column in fields(self) if column.name != "phase_names"]


class EngineTracks:
    """The tracks of all engine servers that a run has had. Not thread-safe."""

    def __init__(self) -> None:
        self._tracks: dict[str, EngineTrack] = {}

    @property
    def by_server(self) -> Mapping[str, EngineTrack]:
        """Server id → track, in the order in which the servers were first heard of."""
        return self._tracks

    def add(self, server: ServerStats, job: JobStats, *, reported_s: float) -> None:
        track = self._tracks.get(server.server_id)
        if track is None:
            track = self._tracks[server.server_id] = EngineTrack()
            for other in self._tracks.values():
                other.thin(self._max_reports())
        track.add(server, job, reported_s=reported_s)
        track.thin(self._max_reports())

    def _max_reports(self) -> int:
        fair_share = MAX_REPORTS // len(self._tracks)
        return max(_MIN_REPORTS_PER_ENGINE, min(MAX_REPORTS_PER_ENGINE, fair_share))
