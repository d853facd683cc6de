"""Get exactly one completion for every row from this executor's engine server, whatever dies.

``complete`` needs only pyarrow and the standard library, so it runs in any Spark runtime's Python. It knows rows and
servers, and nothing of DataFrames. At most three threads serve a call: the caller's thread takes results off the
session, the feeder (``feed``) reads the caller's rows, and a watchdog ends a server that has gone silent while the
caller waits for it.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyarrow import flight

from pipemax.wire import (
    COMPLETION_SCHEMA,
    PACKAGE_VERSION,
    REQUEST_SCHEMA,
    VERSION_METADATA,
    CollectorAddress,
    GenerationSpec,
    MessageKind,
    ProcessIdentity,
    ServerMessage,
    SessionErrorCode,
    SessionHeader,
    secret_variables,
)
from pipemax_spark.errors import EngineSessionError
from pipemax_spark.executor.feed import Feed
from pipemax_spark.executor.server_process import (
    STREAM_ERRORS,
    Executor,
    ServerFiles,
    connect,
    ensure_server,
    find_executor,
    kill_server,
    server_files,
)

log = logging.getLogger(__name__)

SILENCE_TIMEOUT_S = 30.0
"""A server that is silent for this long hangs, because it sends a heartbeat every second."""
LOADING_SILENCE_FACTOR = 10
"""The silence timeout is this many times longer while an engine loads, because importing its libraries from a cold disk
holds up every thread."""
MAX_DEATHS = 3
"""After this many servers in a row that ended without a single completion, the task gives up."""
MAX_SUSPECT_DEATHS = 200
"""The same limit for servers that were searching for the row that kills them. It is a last resort: each such death
narrows the search, at most 18 deaths find one row among 65,536, and the server itself refuses when the search does not
end."""
_ENDING_S = 10.0
"""A lost server may take this long to end; one that still serves after that has only broken the stream."""
_ENDING_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The engine, and the settings for generating its rows."""

    engine: Mapping[str, Any]
    """An EngineConfig, checked by the server."""
    generation: GenerationSpec = field(default_factory=GenerationSpec)
    questions: tuple[GenerationSpec, ...] = ()
    """The settings of each question, if rows have several."""
    job_id: str
    engine_python: str | None = None
    """The interpreter of the engine's environment; ``None`` means this one."""
    collector: CollectorAddress | None = None
    reuses_results: bool = False
    """The server answers rows that it has answered before from its cache."""
    gpu_discovery_script: str | None = None
    """Prints the executor's GPUs if nothing else names them; see ``pipemax_spark.executor.resources``."""
    log_dir: str | None = None
    """For the server's log; ``None`` means the directory of its socket."""
    start_timeout_s: float = 3600.0
    """Maximum time until the engine has loaded; time spent waiting for another job's engine does not count."""
    silence_timeout_s: float = SILENCE_TIMEOUT_S


def complete(
    requests: Iterable[pa.RecordBatch], options: EngineOptions, *, task: str
) -> Generator[pa.RecordBatch, None, None]:
    """Yield completions (COMPLETION_SCHEMA, any order) for requests (REQUEST_SCHEMA), each row exactly once.

    Nothing is started before the first row arrives. ``requests`` is read on another thread, within the server's credit,
    and never again once this generator has ended or been closed. Raise what ``requests`` raises, ``ValueError`` for
    batches of another schema or duplicate row ids, and ``EngineSessionError`` for everything else.
    """
    feed = Feed(requests)
    feed.start()
    try:
        # Without rows no server is needed: an empty partition must not start an engine.
        if feed.has_rows():
            yield from _Completer(feed, options, task).batches()
    finally:
        feed.close()


class _ServerLostError(Exception):
    """The server ended, was killed or broke the stream; its successor gets the open rows."""

    def __init__(self, reason: str, code: SessionErrorCode = SessionErrorCode.ENGINE_DIED) -> None:
        super().__init__(reason)
        self.code = code


class _Completer:
    """Opens one session after another, until all rows are done."""

    def __init__(self, feed: Feed, options: EngineOptions, task: str) -> None:
        self._feed = feed
        self._options = options
        self._executor = find_executor()
        self._files = server_files(self._executor, options.engine_python, options.log_dir)
        self._header = session_header(options, task, self._executor)
        self._server: ProcessIdentity | None = None
        """The latest session's server."""
        self._deaths = 0
        self._suspect_deaths = 0
        self._has_suspects = False

    def batches(self) -> Iterator[pa.RecordBatch]:
        while self._feed.has_rows():
            try:
                for batch in self._one_session():
                    self._deaths = self._suspect_deaths = 0
                    yield batch
            except _ServerLostError as lost:
                self._feed.raise_error()
                self._count_death(lost)
                if self._deaths >= MAX_DEATHS or self._suspect_deaths >= MAX_SUSPECT_DEATHS:
                    raise self._give_up(lost) from lost
                self._wait_for_end()

    def _wait_for_end(self) -> None:
        """Wait until the lost server has ended.

        A dying server still accepts sessions for a moment; each would fail and count as one more death.
        """
        given_up_s = time.monotonic() + _ENDING_S
        while self._server is not None and self._server.is_running() and time.monotonic() < given_up_s:
            time.sleep(_ENDING_POLL_S)

    def _count_death(self, lost: _ServerLostError) -> None:
        # A fault of the machine narrows no search.
        if self._has_suspects and lost.code is not SessionErrorCode.MACHINE_FAULT:
            self._suspect_deaths += 1
        else:
            self._deaths += 1
        in_a_row = self._deaths + self._suspect_deaths
        log.warning("the engine server was lost (%d in a row): %s", in_a_row, lost)

    def _give_up(self, lost: _ServerLostError) -> EngineSessionError:
        in_a_row = self._deaths + self._suspect_deaths
        return EngineSessionError(
            lost.code,
            f"the engine server was lost {in_a_row} times in a row without completing a row: {lost}. "
            + self._files.log_tail(),
        )

    def _one_session(self) -> Iterator[pa.RecordBatch]:
        options = self._options
        deadline_s = time.monotonic() + options.start_timeout_s
        server = self._server = ensure_server(
            self._files,
            self._executor,
            options.engine_python,
            deadline_s=deadline_s,
            gpu_discovery_script=options.gpu_discovery_script,
        )
        suspects = self._files.recorded_suspects()
        if suspects is not None:  # None: it has ended already, and the last known value holds
            self._has_suspects = suspects > 0
        with connect(self._files) as client:
            descriptor = flight.FlightDescriptor.for_command(self._header.to_bytes())
            try:
                writer, reader = client.do_exchange(descriptor)
                writer.begin(REQUEST_SCHEMA)
            except STREAM_ERRORS as error:
                raise _ServerLostError(_first_line(error)) from error
            session = _Session(self._feed, reader, options, self._files, server)
            with _Watchdog(session) as watchdog:
                self._feed.attach(writer, reader.cancel)
                try:
                    yield from session.batches(watchdog)
                finally:
                    reader.cancel()
                    self._feed.detach()
                    with contextlib.suppress(*STREAM_ERRORS):  # cancelled above, which closing reports again
                        writer.close()


class _Session:
    """The reading side of one session."""

    def __init__(
        self,
        feed: Feed,
        reader: flight.FlightStreamReader,
        options: EngineOptions,
        files: ServerFiles,
        server: ProcessIdentity,
    ) -> None:
        self._feed = feed
        self._reader = reader
        self._options = options
        self._files = files
        self._server = server
        self._is_ready = False
        self._load_wait_s = 0.0
        self._heard_at_s = time.monotonic()
        self._lost_because = ""

    def batches(self, watchdog: "_Watchdog") -> Iterator[pa.RecordBatch]:
        """Yield completions until the server ends the session, which it does when all rows are done."""
        with self._stream_errors(watchdog):
            self._check_versions(self._reader.schema)
        while True:
            try:
                with self._stream_errors(watchdog):
                    chunk = self._reader.read_chunk()
            except StopIteration:
                if self._feed.is_done():
                    return
                raise _ServerLostError("the server ended the session early") from None
            if chunk.app_metadata is not None:
                self._take(ServerMessage.from_bytes(chunk.app_metadata.to_pybytes()))
            if chunk.data is not None and chunk.data.num_rows:
                self._feed.completed(chunk.data.column("row_id").to_pylist())
                yield pa.RecordBatch.from_arrays(chunk.data.columns, schema=COMPLETION_SCHEMA)

    @property
    def silence_timeout_s(self) -> float:
        return self._options.silence_timeout_s * (1 if self._is_ready else LOADING_SILENCE_FACTOR)

    def end_silent_server(self, silent_s: float) -> None:
        """Kill a server that hangs while the caller waits for it. Called on the watchdog's thread."""
        self._lost_because = f"it said nothing for {silent_s:.0f} s"
        kill_server(self._server, self._lost_because)
        self._reader.cancel()  # in case it could not be killed

    @contextlib.contextmanager
    def _stream_errors(self, watchdog: "_Watchdog") -> Iterator[None]:
        with watchdog.waiting():
            try:
                yield
            except STREAM_ERRORS as error:
                self._feed.raise_error()  # the feeder cancels the session if the caller's input fails
                raise _ServerLostError(self._lost_because or _first_line(error)) from error

    def _check_versions(self, schema: pa.Schema) -> None:
        metadata = schema.metadata or {}
        if all(metadata.get(name) == value for name, value in VERSION_METADATA.items()):
            return
        theirs = {name: metadata.get(name, b"unknown").decode() for name in VERSION_METADATA}
        wire_version, package_version = theirs.values()
        raise EngineSessionError(
            SessionErrorCode.VERSION_MISMATCH,
            f"the engine's environment has pipemax-spark {package_version} (wire {wire_version}), this side has "
            f"{PACKAGE_VERSION} (wire {VERSION_METADATA[b'pipemax_wire_version'].decode()}): install the same "
            "version in both, then start a new Spark application.",
        )

    def _take(self, message: ServerMessage) -> None:
        now_s = time.monotonic()
        since_last_s, self._heard_at_s = now_s - self._heard_at_s, now_s
        match message.kind:
            case MessageKind.READY:
                self._is_ready = True
            case MessageKind.CREDIT:
                self._feed.add_credit(message.credit_rows, message.credit_bytes)
            case MessageKind.FAILED:
                self._fail(message)
            case MessageKind.STATUS if not self._is_ready and message.code is None:
                self._load_wait_s += since_last_s
                if self._load_wait_s > self._options.start_timeout_s:
                    raise EngineSessionError(
                        SessionErrorCode.ENGINE_START_FAILED,
                        f"no engine after {self._load_wait_s:.0f} s ({message.detail}). {self._files.log_tail()}",
                    )

    def _fail(self, message: ServerMessage) -> None:
        code = message.code or SessionErrorCode.ENGINE_DIED
        if code in (SessionErrorCode.ENGINE_DIED, SessionErrorCode.SHUTTING_DOWN):
            raise _ServerLostError(message.detail)
        if code is SessionErrorCode.MACHINE_FAULT:
            raise _ServerLostError(message.detail, code)
        hint = ""
        if code is SessionErrorCode.ENGINE_START_FAILED:
            hint = f" The engine's log: {self._files.log}"
        elif code is SessionErrorCode.ENGINE_UNUSABLE:
            hint = f" {self._files.log_tail()}"
        raise EngineSessionError(code, message.detail + hint)


class _Watchdog:
    """Ends the session's server when the caller has waited too long to hear from it.

    Only waiting counts: a caller that is busy elsewhere may read nothing for as long as it likes.
    """

    def __init__(self, session: _Session) -> None:
        self._session = session
        self._waiting_since_s: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pipemax-watchdog", daemon=True)

    def __enter__(self) -> "_Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        self._waiting_since_s = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since_s = None

    def _run(self) -> None:
        while not self._stopped.wait(min(1.0, self._session.silence_timeout_s / 4)):
            since_s, timeout_s = self._waiting_since_s, self._session.silence_timeout_s
            if since_s is not None and time.monotonic() - since_s > timeout_s:
                self._session.end_silent_server(timeout_s)
                return


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def session_header(options: EngineOptions, task: str, executor: Executor) -> SessionHeader:
    """Return the first message of a session of this task."""
    return SessionHeader(
        job_id=options.job_id,
        task=task,
        daemon=executor.daemon,
        engine=dict(options.engine),
        generation=options.generation,
        questions=options.questions,
        collector=options.collector,
        reuses_results=options.reuses_results,
        keys={name: os.environ[name] for name in secret_variables(options.engine) if name in os.environ},
    )
