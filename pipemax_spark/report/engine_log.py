"""Write all reports of the engine servers to one Parquet file, with a row per report.

Progress and MLflow keep a selection of the figures; this file has all of them. At first each report is written as it
arrives, about one per second and engine. After ``ROWS_AT_FULL_RATE`` rows the interval between an engine's written
reports grows in proportion to the run's age, so the file grows with the logarithm of the time. Each report of 8 engines
is written for 7 hours, each of 200 engines for 2 hours; after a week, those of 200 engines are 10 minutes apart, and
the file has 1.5 million rows.
"""

import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from pipemax.wire import JobStats, ServerStats

log = logging.getLogger(__name__)

ENGINE_METRICS = "engine_metrics.parquet"
"""The file's name in a run's directory."""
SCHEMA = pa.schema(
    [
        pa.field("at", pa.timestamp("us", tz="UTC")),  # the server's clock
        pa.field("server_id", pa.string()),
        pa.field("state", pa.string()),
        pa.field("phase", pa.string()),
        pa.field("running_requests", pa.int64()),
        pa.field("waiting_requests", pa.int64()),
        pa.field("kv_usage", pa.float64()),
        pa.field("rows_done", pa.int64()),  # of this job on this server
        pa.field("completion_tokens", pa.int64()),
        pa.field("metrics", pa.map_(pa.string(), pa.float64())),  # docs/guide/slow-run.md lists them
    ]
)
ROWS_AT_FULL_RATE = 200_000
_ROWS_PER_WRITE = 600
_GONE_S = 60.0
"""An engine that has been silent for this long no longer counts when its successors' reports are thinned."""


class ReportThinner:
    """Chooses the reports to write, by the servers' clocks. Not thread-safe."""

    def __init__(self, *, rows_at_full_rate: int = ROWS_AT_FULL_RATE) -> None:
        self._rows_at_full_rate = rows_at_full_rate
        self._began_unix_s: float | None = None
        self._heard: dict[str, float] = {}
        self._written: dict[str, tuple[float, str]] = {}
        """Server → when the last report was written, and the server's state then."""

    def choose(self, stats: ServerStats) -> bool:
        """Tell whether to write this report: it is far enough from the server's last one, or its state is new."""
        now_s, server_id = stats.at_unix_s, stats.server_id
        if self._began_unix_s is None:
            self._began_unix_s = now_s
        if server_id not in self._heard:
            self._forget_gone(now_s)
        self._heard[server_id] = now_s
        gap_s = (now_s - self._began_unix_s) * len(self._heard) / self._rows_at_full_rate
        written_s, state = self._written.get(server_id, (-math.inf, ""))
        if state == stats.state and gap_s > 1.0 and now_s < written_s + gap_s:
            return False
        self._written[server_id] = (now_s, stats.state)
        return True

    def _forget_gone(self, now_s: float) -> None:
        for server_id in [name for name, heard_s in self._heard.items() if heard_s < now_s - _GONE_S]:
            del self._heard[server_id], self._written[server_id]


class EngineLog:
    """The file, open from entry to exit. ``add`` may be called on any thread; after the exit it does nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._rows: list[dict[str, Any]] = []
        self._writer: pq.ParquetWriter | None = None
        self._thinner = ReportThinner()

    def __enter__(self) -> Self:
        with self._errors_logged():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self.path, SCHEMA)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock, self._errors_logged():
            if self._writer is not None:
                self._write(self._writer)
                self._writer.close()
                self._writer = None

    def add(self, stats: ServerStats, job: JobStats) -> None:
        with self._lock:
            if self._writer is None or not self._thinner.choose(stats):
                return
            self._rows.append(_row(stats, job))
            if len(self._rows) >= _ROWS_PER_WRITE:
                with self._errors_logged():
                    self._write(self._writer)

    @contextmanager
    def _errors_logged(self) -> Iterator[None]:
        """Log that the file cannot be written, and write no more of it: the rows do not depend on it."""
        try:
            yield
        except (OSError, pa.ArrowException):
            log.warning("%s cannot be written any more", self.path, exc_info=True)
            self._writer = None

    def _write(self, writer: pq.ParquetWriter) -> None:
        writer.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA))
        self._rows.clear()


def _row(stats: ServerStats, job: JobStats) -> dict[str, Any]:
    """Return the values of ``SCHEMA``."""
    return {
        "at": round(stats.at_unix_s * 1e6),
        "server_id": stats.server_id,
        "state": stats.state,
        "phase": stats.phase,
        "running_requests": stats.running_requests,
        "waiting_requests": stats.waiting_requests,
        "kv_usage": stats.kv_usage,
        "rows_done": job.rows_done,
        "completion_tokens": job.completion_tokens,
        "metrics": list(stats.engine_metrics.items()),
    }
