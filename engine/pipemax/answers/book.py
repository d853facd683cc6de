"""Keep the rows that the engine has, by their asks.

Rows are opened and aborted on any thread. The reply to an ask is taken in on the engine's own thread.
"""

import threading
from collections.abc import Iterable

from pipemax.answers.asks import Ask, Reply
from pipemax.answers.pooled import PooledRow
from pipemax.answers.row import Row
from pipemax.generation import Completion, RequestError
from pipemax.wire import ErrorCode


class RowBook:
    """The open rows and their asks. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, Row | PooledRow] = {}
        self._row_of: dict[str, tuple[str, Row | PooledRow]] = {}  # ask → its row, with the row's id

    def open(self, request_id: str, row: Row | PooledRow) -> list[Ask] | Completion:
        """Return the first asks of a row, or its error."""
        try:
            asks = row.begin()
        except ValueError as error:  # its choices cannot be told apart
            refused = RequestError(code=ErrorCode.INVALID_PARAMETER, message=str(error))
            return Completion(request_id=request_id, error=refused)
        with self._lock:
            self._rows[request_id] = row
            self._note(request_id, row, asks)
        return asks

    def take(self, ask_id: str, reply: Reply) -> tuple[list[Ask], Completion | None]:
        """Take in the reply to an ask. Return the row's next asks, or its completion once it has no more.

        Both are empty while other asks of the row are open, and if the row was aborted.
        """
        with self._lock:
            if ask_id not in self._row_of:
                return [], None
            request_id, row = self._row_of.pop(ask_id)
            asks = row.take(ask_id, reply)
            self._note(request_id, row, asks)
            if row.completion is not None:
                del self._rows[request_id]
            return asks, row.completion

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Forget rows. Return their open asks; unknown ids are ignored."""
        with self._lock:
            rows = [self._rows.pop(request_id) for request_id in request_ids if request_id in self._rows]
            open_asks = [ask_id for row in rows for ask_id in row.open_asks]
            for ask_id in open_asks:
                del self._row_of[ask_id]
            return open_asks

    def _note(self, request_id: str, row: Row | PooledRow, asks: Iterable[Ask]) -> None:
        for ask in asks:
            self._row_of[ask.ask_id] = request_id, row
