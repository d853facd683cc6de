"""Write everything that the engine servers report to one Parquet file: a row per report, about one a second.

Progress and MLflow keep a selection; this file has everything. Reports are written as they come, so hours of them take
no memory.
"""

import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from pipemax.wire import JobStats, ServerStats

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
        pa.field("metrics", pa.map_(pa.string(), pa.float64())),  # docs/slow-run.md lists them
    ]
)
_ROWS_PER_WRITE = 600


class EngineLog:
    """The file, open from entry to exit. ``add`` may be called on any thread; after the exit it does nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._rows: list[dict[str, Any]] = []
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = pq.ParquetWriter(self.path, SCHEMA)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            assert self._writer is not None
            self._write(self._writer)
            self._writer.close()
            self._writer = None

    def add(self, stats: ServerStats, job: JobStats) -> None:
        row = {
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
        with self._lock:
            if self._writer is None:
                return
            self._rows.append(row)
            if len(self._rows) >= _ROWS_PER_WRITE:
                self._write(self._writer)

    def _write(self, writer: pq.ParquetWriter) -> None:
        writer.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA))
        self._rows.clear()
