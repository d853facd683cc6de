"""Send the caller's rows to the server: read them on a separate thread, stay within credit, keep them until completed.

Only the feeder thread reads Spark's iterator, one Arrow batch at a time and only while there is credit, so the rows
that are read ahead are bounded by the server's window plus one batch. Rows that were sent and are not yet completed are
kept: after a server's death they are sent again to its successor. This module knows nothing of how servers start.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import flight

from pipemax.wire import REQUEST_SCHEMA
from pipemax_spark.executor.server_process import STREAM_ERRORS

MAX_ROWS_PER_MESSAGE = 1_024


@dataclass(slots=True, eq=False)
class _Sent:
    """A batch that was sent, with its rows that are not completed."""

    batch: pa.RecordBatch
    open_rows: set[int]


class Feed:
    """The rows of one ``complete`` call. Made and closed on the caller's thread; see the module's docstring."""

    def __init__(self, requests: Iterable[pa.RecordBatch]) -> None:
        self._requests = requests
        self._changed = threading.Condition()
        self._unsent: deque[pa.RecordBatch] = deque()
        self._open: dict[int, _Sent] = {}
        self._ended = False
        self._error: BaseException | None = None
        self._closed = False
        self._writer: flight.FlightStreamWriter | None = None
        self._abort_session: Callable[[], None] = lambda: None
        self._writing = False
        self._half_closed = False
        self._credit_rows = 0
        self._credit_bytes = 0
        self._thread = threading.Thread(target=self._run, name="pipemax-feeder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop reading and join the feeder; the session must have been detached.

        Wait for a read of the caller's iterator that has begun: no other thread may touch the iterator before the read
        ends, and nothing can interrupt it.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def has_rows(self) -> bool:
        """Wait for a row that is not completed; return False when no more rows will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._unsent or self._open or self._ended)
            self.raise_error()
            return bool(self._unsent or self._open)

    def raise_error(self) -> None:
        """Raise what reading the caller's rows raised, if it did."""
        if self._error is not None:
            raise self._error

    def attach(self, writer: flight.FlightStreamWriter, abort_session: Callable[[], None]) -> None:
        """Send to this session from now on, once it grants credit.

        ``abort_session`` ends the session's reading side, from any thread. It is called when the input fails, because
        the caller's thread may be waiting there.
        """
        with self._changed:
            self._writer = writer
            self._abort_session = abort_session
            self._half_closed = False
            self._credit_rows = self._credit_bytes = 0
            if self._error is not None:
                abort_session()
            self._changed.notify_all()

    def detach(self) -> None:
        """Send nothing more to the session, which must already be cancelled; its open rows become unsent."""
        with self._changed:
            self._writer = None
            self._abort_session = lambda: None
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._writing)
            again = {id(sent): sent for sent in self._open.values()}
            self._unsent.extendleft(_open_part(sent) for sent in again.values())
            self._open.clear()

    def add_credit(self, rows: int, size: int) -> None:
        with self._changed:
            self._credit_rows += rows
            self._credit_bytes += size
            self._changed.notify_all()

    def completed(self, row_ids: Iterable[int]) -> None:
        """Mark these rows as done. Raise ``KeyError`` for a row that is not open: the server must answer each once."""
        with self._changed:
            for row_id in row_ids:
                self._open.pop(row_id).open_rows.remove(row_id)

    @property
    def open_rows(self) -> int:
        """The number of rows that were sent and are not completed."""
        with self._changed:
            return len(self._open)

    def is_done(self) -> bool:
        """Tell whether everything was read, sent and completed."""
        with self._changed:
            return self._ended and not self._unsent and not self._open

    # The feeder thread.

    def _run(self) -> None:
        try:
            rows = _checked(self._requests)
            while self._step(rows):
                pass
        except BaseException as error:
            with self._changed:
                self._error = error  # raised again on the caller's thread
                self._ended = True
                self._abort_session()
                self._changed.notify_all()

    def _step(self, rows: Iterator[pa.RecordBatch]) -> bool:
        """Do one action, outside the lock: read a batch, send a piece, or half-close. Return False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._may_read() or self._may_write())
            if self._closed:
                return False
            writer, piece = self._writer, None
            if not self._may_read():
                if self._unsent:
                    piece = self._next_piece()
                else:
                    self._half_closed = True
                self._writing = (
                    True  # last: if it were set when the piece is refused, detach would wait forever
                )
            writes = self._writing
        if writes:
            assert writer is not None
            self._write(writer, piece)
        else:
            self._read(rows)
        return True

    def _may_read(self) -> bool:
        # Read the first batch before there is a session, because without rows there is none.
        if self._ended or self._unsent:
            return False
        return self._has_credit() if self._writer is not None else not self._open

    def _may_write(self) -> bool:
        if self._writer is None:
            return False
        return self._has_credit() if self._unsent else self._ended and not self._half_closed

    def _has_credit(self) -> bool:
        return self._writer is not None and self._credit_rows > 0 and self._credit_bytes > 0

    def _read(self, rows: Iterator[pa.RecordBatch]) -> None:
        batch = next(rows, None)
        with self._changed:
            if batch is None:
                self._ended = True
            else:
                self._unsent.append(batch)
            self._changed.notify_all()

    def _next_piece(self) -> tuple[pa.RecordBatch, int]:
        """Take as many unsent rows as the credit allows and count them as open.

        Return them with their size in bytes.
        """
        batch = self._unsent.popleft()
        piece, rest = _cut(
            batch, max_rows=min(self._credit_rows, MAX_ROWS_PER_MESSAGE), size=self._credit_bytes
        )
        if rest.num_rows:
            self._unsent.appendleft(rest)
        size = piece.nbytes
        row_ids: list[int] = piece.column("row_id").to_pylist()
        sent = _Sent(piece, set(row_ids))
        if len(sent.open_rows) < len(row_ids) or not self._open.keys().isdisjoint(row_ids):
            raise ValueError(f"row ids are not unique: some of {min(row_ids)} to {max(row_ids)} came twice")
        self._open.update((row_id, sent) for row_id in row_ids)
        self._credit_rows -= len(row_ids)
        self._credit_bytes -= size
        return piece, size

    def _write(self, writer: flight.FlightStreamWriter, piece: tuple[pa.RecordBatch, int] | None) -> None:
        try:
            if piece is None:
                writer.done_writing()
            else:
                batch, size = piece
                writer.write_with_metadata(batch, str(size).encode())
        except STREAM_ERRORS:
            # The session is lost. Its reading side sees this too and reports it; the rows are still open.
            with self._changed:
                if self._writer is writer:
                    self._writer = None
                self._abort_session()
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()


def _checked(requests: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the batches that have rows. Raise ``ValueError`` for a batch that is not of REQUEST_SCHEMA."""
    for batch in requests:
        if not batch.schema.equals(REQUEST_SCHEMA, check_metadata=False):
            raise ValueError(f"expected batches of\n{REQUEST_SCHEMA}\nbut got one of\n{batch.schema}")
        if batch.num_rows:
            yield batch


def _cut(batch: pa.RecordBatch, *, max_rows: int, size: int) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """Return as many leading rows as fit, but at least one, and the rest.

    A piece of a larger batch is a copy: a slice that waits for its last slow row would pin the whole batch.
    """
    fits, too_many = 1, min(max_rows, batch.num_rows) + 1
    if too_many == 2 or batch.slice(0, too_many - 1).nbytes <= size:
        fits = too_many - 1
    else:
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            fits, too_many = (middle, too_many) if batch.slice(0, middle).nbytes <= size else (fits, middle)
    piece = batch if fits == batch.num_rows else batch.take(pa.array(range(fits), pa.int64()))
    return piece, batch.slice(fits)


def _open_part(sent: _Sent) -> pa.RecordBatch:
    is_open = pc.is_in(sent.batch.column("row_id"), pa.array(sorted(sent.open_rows), pa.int64()))
    return sent.batch.filter(is_open)
