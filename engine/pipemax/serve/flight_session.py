"""Serve one session: one Flight ``DoExchange``, from its header to its last completion.

Two threads serve it. The *session's* thread, which Flight provides, writes completions, credit and a heartbeat every
second, and notices cancellation. The *reading* thread takes request batches and submits them. The engine's thread
puts completions into the outbox and never waits for a client.

Hazard: Flight frees the stream when ``run`` returns, so the reading thread is joined before that on every path.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyarrow import flight

from pipemax.api import Completion, Engine, Sampling
from pipemax.domain.errors import EngineDiedError
from pipemax.endpoint_config import AnyConfig
from pipemax.serve.engine_host import EngineHost
from pipemax.serve.flow.credit import StreamCredit
from pipemax.serve.job_stats import StatsBook
from pipemax.serve.membership import Member, Ready, Refused
from pipemax.serve.rows.arrow_rows import FinishedRow, completion_batch, requests_of
from pipemax.serve.rows.equal_requests import EqualRequests
from pipemax.serve.rows.result_cache import cache_key
from pipemax.serve.rows.turns import Turns
from pipemax.serve.sessions import EngineSessions
from pipemax.wire import HEARTBEAT_PERIOD_S, MessageKind, ServerMessage, SessionErrorCode, SessionHeader

log = logging.getLogger(__name__)

_TICK_S = 0.2
"""Period at which a session that has nothing to send checks for cancellation and for its engine's death."""
_LINGER_S = 0.005
"""A first completion waits this long for others, because a message for each row would cost more than the row."""
_LONGEST_LINGER_S = 0.25
_LINGER_SHARE = 1 / 4
"""With a slow engine it waits up to ``_LONGEST_LINGER_S``, but only until the finished rows are this share of the
running rows, or there is credit to grant. That wait and a tick together must be shorter than the time for which a
stream that asks for credit counts as asking."""
_MAX_ROWS_PER_MESSAGE = 1_024
# Exceptions that the stream raises when the client is gone.
STREAM_ERRORS = (flight.FlightError, pa.ArrowException, OSError)


class SessionFailedError(Exception):
    """The session cannot continue, and its client is told why."""

    def __init__(self, code: SessionErrorCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail

    def message(self) -> ServerMessage:
        return ServerMessage(kind=MessageKind.FAILED, code=self.code, detail=self.detail)


class ClientGoneError(Exception):
    """The client has cancelled or is gone, so no one is listening any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTerms:
    """A session's header, with every part of it checked."""

    number: int
    header: SessionHeader
    config: AnyConfig
    sampling: Sampling
    questions: tuple[Sampling, ...] = ()


class Session:
    """One session. Call ``run`` on the session's thread, ``deliver`` and ``wake`` on any."""

    def __init__(
        self,
        terms: SessionTerms,
        *,
        host: EngineHost,
        credit: StreamCredit,
        stats: StatsBook,
        turns: Turns,
        equals: EqualRequests | None,
        sessions: EngineSessions,
        context: flight.ServerCallContext,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """``equals`` is given if the session's requests take the answers of equal ones."""
        self._terms = terms
        self._host = host
        self._credit = credit
        self._stats = stats
        self._turns = turns
        self._equals = equals
        self._sessions = sessions
        self._engine_id = terms.config.engine_id()
        self._context = context
        self._reader = reader
        self._writer = writer
        self._job_id = terms.header.job_id
        self._id_prefix = f"{terms.number}:"
        self._changed = threading.Condition()
        # Guarded by the condition:
        self._running: dict[int, int | None] = {}  # row id -> its bytes of credit; None if set aside
        self._outbox: deque[FinishedRow] = deque()
        self._input_ended = False
        self._input_error: Exception | None = None
        self._closed = False
        # The session's thread only:
        self._sent_at_s = float("-inf")

    def run(self) -> None:
        """Serve the session to its end.

        Raise ``SessionFailedError`` if it failed, after telling the client; ``ClientGoneError`` if the client is gone.
        """
        header = self._terms.header
        member = self._host.join(
            self._terms.config, job_id=self._job_id, task=header.task, daemon=header.daemon
        )
        try:
            ready = self._wait_for_engine(member)
            self._serve(ready, member)
        finally:
            self._host.leave(member)
            self._credit.close()

    def deliver(self, completions: Sequence[Completion]) -> None:
        """Take completions of this session's rows, to be sent on the session's thread."""
        now_us = time.time_ns() // 1_000
        with self._changed:
            if self._closed:
                return
            was_empty = not self._outbox
            for completion in completions:
                row_id = int(completion.request_id.removeprefix(self._id_prefix))
                if row_id not in self._running:
                    log.warning("a completion of row %d, which is not running, was dropped", row_id)
                    continue
                size = self._running.pop(row_id)
                row = FinishedRow(row_id=row_id, completion=completion, completed_at_us=now_us)
                if size is None:
                    self._credit.finish_waiting(output_size=row.output_size())
                else:
                    self._credit.finish(rows=1, size=size, output_size=row.output_size())
                self._outbox.append(row)
            # Do not do this after every engine step: the session's thread would wake up only to wait again.
            if was_empty or self._has_much_to_send():
                self._changed.notify_all()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wait_for_engine(self, member: Member) -> Ready:
        while True:
            match self._host.readiness(member):
                case Ready() as ready:
                    return ready
                case Refused(code=code, detail=detail):
                    failure = SessionFailedError(code, detail)
                    refuse(failure, self._reader, self._writer)
                    raise failure
                case waiting:
                    waits_for_other = SessionErrorCode.ENGINE_CONFLICT if waiting.other_config else None
                    self._heartbeat(waiting.detail, code=waits_for_other)
            self._look_for_cancellation()
            with self._changed:
                self._changed.wait(_TICK_S)

    def _serve(self, ready: Ready, member: Member) -> None:
        self._send(message=ServerMessage(kind=MessageKind.READY))
        reading = threading.Thread(
            target=self._read, args=(ready,), name=f"read-{self._terms.number}", daemon=True
        )
        reading.start()
        try:
            self._write_until_done(member)
        except SessionFailedError as failure:
            # Send this before the join below: the client then cancels, which ends the reading.
            self._send(message=failure.message())
            raise
        finally:
            try:
                self._abandon(ready.engine)
            finally:
                reading.join()
            self._abandon(ready.engine)  # again: the reading thread may have submitted a last batch meanwhile

    def _write_until_done(self, member: Member) -> None:
        while True:
            self._look_for_cancellation()
            match self._host.readiness(member):
                case Refused(code=code, detail=detail):
                    if code is SessionErrorCode.ENDPOINT_REFUSED:
                        while self._write_finished():  # rows that ended before it are paid for
                            pass
                    raise SessionFailedError(code, detail)
            if self._write_finished():
                continue
            with self._changed:
                if self._input_error is not None:
                    raise self._input_error
                if self._input_ended and not self._running and not self._outbox:
                    return
                running = len(self._running)
                if not self._outbox:
                    self._changed.wait(_TICK_S)
                if self._outbox:
                    self._changed.wait_for(self._has_much_to_send, _LONGEST_LINGER_S)
                has_finished = bool(self._outbox)
            if has_finished:
                time.sleep(_LINGER_S)
            self._heartbeat(self._turns.describe() or f"{running} rows of this task in the engine")

    def _has_much_to_send(self) -> bool:
        if len(self._outbox) >= _LINGER_SHARE * len(self._running):
            return True
        return not self._input_ended and self._credit.would_grant()

    def _write_finished(self) -> bool:
        """Send finished rows and any credit. Return ``True`` if a full message went out."""
        with self._changed:
            rows = [self._outbox.popleft() for _ in range(min(len(self._outbox), _MAX_ROWS_PER_MESSAGE))]
            wants_credit = not self._input_ended
        # Do this before the grant: outgoing rows make room for the credit that goes with them.
        self._credit.deliver(rows=len(rows), output_size=sum(row.output_size() for row in rows))
        grant = self._credit.grant() if wants_credit else None
        credit = (
            ServerMessage(kind=MessageKind.CREDIT, credit_rows=grant.rows, credit_bytes=grant.bytes)
            if grant
            else None
        )
        if rows:
            self._send(batch=completion_batch(rows), message=credit)
            self._host.note_movement()
            self._stats.count_done(self._job_id, [row.completion for row in rows])
        elif credit is not None:
            self._send(message=credit)
        return len(rows) == _MAX_ROWS_PER_MESSAGE

    def _heartbeat(self, detail: str, *, code: SessionErrorCode | None = None) -> None:
        """Send a STATUS if nothing else was sent lately.

        A server whose engine hangs falls silent instead: the silence makes the client end the server.
        """
        if time.monotonic() - self._sent_at_s >= HEARTBEAT_PERIOD_S - _TICK_S and self._host.responds():
            self._send(message=ServerMessage(kind=MessageKind.STATUS, detail=detail, code=code))

    def _send(self, *, batch: pa.RecordBatch | None = None, message: ServerMessage | None = None) -> None:
        try:
            if batch is None:
                assert message is not None
                self._writer.write_metadata(message.to_bytes())
            elif message is None:
                self._writer.write_batch(batch)
            else:
                self._writer.write_with_metadata(batch, message.to_bytes())
        except STREAM_ERRORS as error:
            raise ClientGoneError(str(error)) from error
        self._sent_at_s = time.monotonic()

    def _look_for_cancellation(self) -> None:
        if self._context.is_cancelled():
            raise ClientGoneError("cancelled")

    # The reading thread.

    def _read(self, ready: Ready) -> None:
        error: Exception | None = None
        try:
            while (chunk := self._next_chunk()) is not None:
                if chunk.data is not None and chunk.data.num_rows:
                    self._accept(chunk.data, int(chunk.app_metadata.to_pybytes()), ready)
        except ClientGoneError as gone:
            error = gone
        except EngineDiedError as died:
            log.info(
                "rows came too late: %s", died
            )  # the engine's thread reports the death, which ends this session
        except Exception as bug:
            log.exception("reading the requests of %s failed", self._terms.header.task)
            error = SessionFailedError(
                SessionErrorCode.INVALID_HEADER, f"the server cannot take a batch: {bug!r}"
            )
        self._credit.end_input()
        self._sessions.end_input(self._terms.number)
        with self._changed:
            self._input_ended = True
            self._input_error = error
            self._changed.notify_all()

    def _next_chunk(self) -> flight.FlightStreamChunk | None:
        """Return the next chunk, or ``None`` at the end.

        A cancelled call may end like that too; the session's thread finds that out.
        """
        try:
            return self._reader.read_chunk()
        except StopIteration:
            return None
        except STREAM_ERRORS as error:
            raise ClientGoneError(str(error)) from error

    def _accept(self, batch: pa.RecordBatch, charged: int, ready: Ready) -> None:
        requests, faults = requests_of(
            batch,
            job=self._terms.sampling,
            questions=self._terms.questions,
            system=self._terms.header.generation.system,
            id_prefix=self._id_prefix,
        )
        row_ids: list[int] = batch.column("row_id").to_pylist()
        sizes = _split(charged, len(row_ids))
        with self._changed:
            if self._closed:
                return
            doubled = [row_id for row_id in row_ids if row_id in self._running]
            if doubled or len(set(row_ids)) < len(row_ids):
                raise ValueError(f"row ids are not unique: {doubled or row_ids}")
            self._credit.receive(rows=len(row_ids), size=charged)
            # Do this before the submission: a completion may arrive before submit returns.
            self._running.update(zip(row_ids, sizes, strict=True))
            if self._credit.is_low:
                self._changed.notify_all()  # the session's thread grants more
        self._stats.count_received(self._job_id, len(row_ids))
        self._host.note_movement()
        self.deliver([Completion(request_id=f"{self._id_prefix}{row}", error=fault) for row, fault in faults])
        keys = [cache_key(self._engine_id, request) for request in requests]
        if self._equals is not None:
            admission = self._equals.admit(requests, keys, ready.content)
            requests = [request for request, _ in admission.computed]
            keys = [key for _, key in admission.computed]
            self._set_aside(admission.waiting)
            self.deliver(admission.answered)
        self._sessions.rows_sent(self._job_id, requests)
        if requests:
            condemned = self._turns.submit(ready.engine, requests, keys)
            if condemned:
                self._sessions.deliver(condemned)

    def _set_aside(self, request_ids: Sequence[str]) -> None:
        """Take rows out of the window that wait for equal ones; some may have ended meanwhile."""
        with self._changed:
            for row_id in (int(request_id.removeprefix(self._id_prefix)) for request_id in request_ids):
                if (size := self._running.get(row_id)) is not None:
                    self._running[row_id] = None
                    self._credit.set_aside(rows=1, size=size)
            if request_ids and self._credit.is_low:
                self._changed.notify_all()  # there is room to grant more

    # The end.

    def _abandon(self, engine: Engine) -> None:
        """Drop the running rows, also in the engine. Aborting twice is harmless."""
        with self._changed:
            self._closed = True
            left = [f"{self._id_prefix}{row_id}" for row_id in self._running]
        if self._equals is not None:
            left = self._equals.leave(left)
        if left:
            log.info("aborting %d rows of %s", len(left), self._terms.header.task)
            try:
                self._turns.abort(engine, left)
            except EngineDiedError as error:
                log.info("nothing is left to abort: %s", error)  # the engine's thread reports the death


def refuse(
    failure: SessionFailedError,
    reader: flight.MetadataRecordBatchReader,
    writer: flight.MetadataRecordBatchWriter,
) -> None:
    """Tell a client that has no credit yet why it gets none, and wait until it has heard.

    Hazard: if the call ended before the client has begun to write, the client's library would drop the message.
    """
    try:
        writer.write_metadata(failure.message().to_bytes())
        for _ in reader:  # ends when the client cancels
            pass
    except STREAM_ERRORS as error:
        log.info("the client that was refused is gone: %s", str(error).partition(".")[0])


def _split(total: int, parts: int) -> list[int]:
    """Split ``total`` into ``parts`` whole numbers that differ by at most one."""
    share, rest = divmod(total, parts)
    return [share + 1] * rest + [share] * (parts - rest)
