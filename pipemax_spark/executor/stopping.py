"""Look at this executor's engine servers and stop them, in each task of ``pipemax_spark.stop_engines``."""

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from pipemax.wire import ProcessIdentity, ServerAction
from pipemax_spark.executor.server_process import (
    STREAM_ERRORS,
    Executor,
    ServerFiles,
    ask_server,
    connect,
    files_of_all_servers,
    find_executor,
    kill_server,
)

VISIT_SCHEMA = pa.schema(
    [
        ("executor", pa.string()),
        ("host", pa.string()),
        ("server", pa.string()),
        ("tasks", pa.int32()),
        ("ended", pa.bool_()),
    ]
)
"""One row for each server on the executor, or one row with nulls from ``server`` on if there is none. ``tasks`` is the
number of tasks that use the server, null if it does not answer."""
END_S = 120.0
"""A server that takes longer to end is killed. It gives its engine 90 s to close, and kills that itself then."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """The function of ``mapInArrow``: visit the executor, once for each task."""

    stops: frozenset[str] = frozenset()
    """The servers to stop, which need not be all that run: tasks that still use an engine start its successor at once,
    and stopping that too, at each visit, would end their job."""
    force: bool = False
    """Also stop servers that tasks are using, and those that do not answer."""
    stay_s: float = 0.0
    """The task takes at least this long, so that the next one runs on an executor that has not been visited."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        leave_s = time.monotonic() + self.stay_s
        for _ in batches:
            pass
        executor = find_executor()
        host = socket.gethostname()
        visited = _executor_id(executor, host)
        rows = [
            {"executor": visited, "host": host, **visit}
            for files in files_of_all_servers(executor)
            if (visit := self._visit(files)) is not None
        ]
        time.sleep(max(0.0, leave_s - time.monotonic()))
        yield pa.RecordBatch.from_pylist(rows or [{"executor": visited, "host": host}], schema=VISIT_SCHEMA)

    def _visit(self, files: ServerFiles) -> dict[str, object] | None:
        server = files.recorded()
        if server is None or not server.is_running():
            return None
        name = f"{socket.gethostname()}:{server}"
        tasks = _num_tasks(files)
        ended = name in self.stops and (self.force or tasks == 0)
        if ended:
            _stop(files, server)
        return {"server": name, "tasks": tasks, "ended": ended}


def _num_tasks(files: ServerFiles) -> int | None:
    """Return how many tasks use the server, 0 if it is ending already, None if it does not answer."""
    try:
        with connect(files) as client:
            return ask_server(client, ServerAction.HEALTH).open_sessions
    except STREAM_ERRORS:
        return None if files.socket.exists() else 0  # the socket goes first when a server ends


def _stop(files: ServerFiles, server: ProcessIdentity) -> None:
    """Tell the server to end, and return when it has ended."""
    try:
        with connect(files) as client:
            ask_server(client, ServerAction.SHUTDOWN)
    except STREAM_ERRORS as error:
        if files.socket.exists():
            kill_server(server, f"it should stop and does not answer: {error}")
    deadline_s = time.monotonic() + END_S
    while server.is_running():
        if time.monotonic() > deadline_s:
            kill_server(server, f"it was told to stop {END_S:.0f} s ago")
        time.sleep(_POLL_S)


def _executor_id(executor: Executor, host: str) -> str:
    """Return Spark's id of the executor from its command line, or otherwise a name of our own."""
    process = executor.process
    try:
        arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return arguments[arguments.index("--executor-id") + 1]
    except (OSError, ValueError, IndexError):
        return f"{host}:{process}"


def is_own_name(executor: str) -> bool:
    """Tell whether the executor's name is one of our own: Spark's ids have no colon."""
    return ":" in executor
