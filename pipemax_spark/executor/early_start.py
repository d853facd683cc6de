"""Have this executor's server load its engine before there are rows for it.

Loading takes minutes, and so may recording the rows that are left; this module lets both happen at once. The caller
holds its task slot for the second or two in which the server process starts, and not while the engine loads, unless it
asks to wait for that. A failure is only logged here: the first rows' session meets it again, and ends the job with its
cause.
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import flight

from pipemax.wire import REQUEST_SCHEMA, MessageKind, ServerAction, ServerMessage
from pipemax_spark.errors import EngineSessionError
from pipemax_spark.executor.client import EngineOptions, session_header
from pipemax_spark.executor.server_process import (
    STREAM_ERRORS,
    ask_server,
    connect,
    ensure_server,
    find_executor,
    server_files,
)
from pipemax_spark.executor.task import task_label

log = logging.getLogger(__name__)

_SERVER_TIMEOUT_S = 60.0
"""Maximum time until the server listens. A task that waits no longer frees its slot; the server goes on."""
_LOADING_TIMEOUT_S = 10.0
"""Maximum time until the server has begun to load the engine."""
_LOOK_PERIOD_S = 0.1


@dataclass(frozen=True, slots=True)
class BeginLoading:
    """The function of ``mapInArrow``: each task has its executor's engine started, and passes its rows on."""

    options: EngineOptions
    waits: bool = False
    """Pass the rows on only when the engine has loaded, or has failed to."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            begin_loading(self.options, task=task_label())
            if self.waits:
                _wait_for_engine(self.options)
            yield batch


def begin_loading(options: EngineOptions, *, task: str) -> None:
    """Start this executor's server if there is none, have it load the engine, and return while it loads."""
    executor = find_executor()
    files = server_files(executor, options.engine_python, options.log_dir)
    try:
        ensure_server(
            files,
            executor,
            options.engine_python,
            deadline_s=time.monotonic() + _SERVER_TIMEOUT_S,
            gpu_discovery_script=options.gpu_discovery_script,
        )
        header = session_header(options, task, executor)
        with connect(files) as client:
            if not _is_loading(client):
                _open_session(client, header.to_bytes())
    except (EngineSessionError, *STREAM_ERRORS) as error:
        log.warning("the engine was not started before the first rows: %s", error)


def _wait_for_engine(options: EngineOptions) -> None:
    """Wait until the server no longer loads its engine, or has ended."""
    deadline_s = time.monotonic() + options.start_timeout_s
    files = server_files(find_executor(), options.engine_python, options.log_dir)
    while files.socket.exists() and time.monotonic() < deadline_s:
        # A server that imports its engine's libraries may take long to answer.
        with contextlib.suppress(*STREAM_ERRORS), connect(files) as client:
            if not _is_loading(client):
                return
        time.sleep(_LOOK_PERIOD_S)


def _open_session(client: flight.FlightClient, header: bytes) -> None:
    """Hold a session without rows until the server has begun to load the session's engine, or has loaded it."""
    deadline_s = time.monotonic() + _LOADING_TIMEOUT_S
    options = flight.FlightCallOptions(timeout=_LOADING_TIMEOUT_S)
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(header), options)
    try:
        writer.begin(REQUEST_SCHEMA)
        while time.monotonic() < deadline_s:
            chunk = reader.read_chunk()
            if chunk.app_metadata is None:
                continue
            message = ServerMessage.from_bytes(chunk.app_metadata.to_pybytes())
            if message.kind is not MessageKind.STATUS or _is_loading(client):
                return
    except StopIteration:
        return
    finally:
        reader.cancel()
        with contextlib.suppress(*STREAM_ERRORS):  # cancelled above, which closing reports again
            writer.close()


def _is_loading(client: flight.FlightClient) -> bool:
    return ask_server(client, ServerAction.HEALTH, timeout_s=_LOADING_TIMEOUT_S).state == "loading"
