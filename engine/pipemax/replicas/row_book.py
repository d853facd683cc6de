"""Keep which rows wait, which replica has which, and which have been in a replica that died.

Plain bookkeeping: it knows neither processes nor clocks, and the caller must not let calls overlap. Every row is in one
place from ``add`` until ``end``, ``remove`` or the end of everything. Each time that a row is sent it gets a new
name, so that an answer to an earlier sending is never taken for one to a later.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pipemax.generation import GenerationRequest
from pipemax.replicas.routing import PrefixKey, prefix_keys


@dataclass(slots=True, eq=False)
class Row:
    """A row that has not ended."""

    request: GenerationRequest
    expected_tokens: float
    prefixes: tuple[PrefixKey, ...]
    replica: int | None = None
    """The replica that has it; None while it waits."""
    sent_as: str = ""
    lost_by: int | None = None
    """The replica that died with this row, if one has."""
    is_removed: bool = False


@dataclass(slots=True)
class _Sent:
    rows: dict[str, Row] = field(default_factory=dict)
    work_tokens: float = 0.0


class RowBook:
    """All rows between ``submit`` and their completion."""

    def __init__(self, replicas: Sequence[int]) -> None:
        self._by_id: dict[str, Row] = {}
        self._sent = {replica: _Sent() for replica in replicas}
        self._waiting: deque[Row] = deque()  # those that a replica has lost come first
        self._waiting_tokens = 0.0
        self._sendings = itertools.count(1)

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def waiting_tokens(self) -> float:
        """The expected tokens of the waiting rows."""
        return self._waiting_tokens

    def num_waiting(self) -> int:
        return len(self._by_id) - sum(len(sent.rows) for sent in self._sent.values())

    def can_all_speculate(self) -> bool:
        """Tell whether n-gram speculation changes the answer of no row."""
        return all(row.request.sampling.can_speculate for row in self._by_id.values())

    def num_sent(self, replica: int) -> int:
        """Return how many rows a replica has."""
        return len(self._sent[replica].rows)

    def ids_sent(self, replica: int) -> frozenset[str]:
        """Return the request ids of the rows that a replica has."""
        return frozenset(row.request.request_id for row in self._sent[replica].rows.values())

    def work_tokens(self, replica: int) -> float:
        """Return the expected tokens of the rows that a replica has."""
        return self._sent[replica].work_tokens

    def add(self, request: GenerationRequest, expected_tokens: float) -> None:
        """Take a row in; it waits. ``ValueError`` if one of this id has not ended yet."""
        if request.request_id in self._by_id:
            raise ValueError(f"a request of the id {request.request_id!r} is still in flight")
        row = Row(request=request, expected_tokens=expected_tokens, prefixes=prefix_keys(request))
        self._by_id[request.request_id] = row
        self._waiting.append(row)
        self._waiting_tokens += expected_tokens

    def take_waiting(self) -> Iterator[Row]:
        """Yield the waiting rows in order. One that is not sent before the next is asked for waits on."""
        kept: deque[Row] = deque()
        try:
            while self._waiting:
                row = self._waiting.popleft()
                if row.is_removed:
                    continue
                kept.append(row)
                yield row
        finally:
            self._waiting.extendleft(row for row in reversed(kept) if row.replica is None)

    def send(self, row: Row, replica: int) -> str:
        """Note that a waiting row is sent to a replica; return the name under which it goes there."""
        assert row.replica is None, row
        row.replica, row.sent_as = replica, f"{row.request.request_id}.{next(self._sendings)}"
        sent = self._sent[replica]
        sent.rows[row.sent_as] = row
        sent.work_tokens += row.expected_tokens
        self._waiting_tokens -= row.expected_tokens
        return row.sent_as

    def end(self, replica: int, sent_as: str) -> GenerationRequest | None:
        """Note that a row has ended; return its request. None for a row that nobody waits for any more."""
        row = self._sent[replica].rows.get(sent_as)
        if row is None:
            return None
        self._leave(row)
        return row.request

    def remove(self, request_ids: Sequence[str]) -> dict[int, list[str]]:
        """Forget rows wherever they are; return the names of those that were sent, by replica."""
        sent: dict[int, list[str]] = {}
        for row in (self._by_id[name] for name in request_ids if name in self._by_id):
            if row.replica is not None:
                sent.setdefault(row.replica, []).append(row.sent_as)
            else:
                self._waiting_tokens -= row.expected_tokens
            row.is_removed = True
            self._leave(row)
        return sent

    def lose(self, replica: int, *, to_blame: bool = True) -> list[Row]:
        """Have all rows of a replica that died wait again, before the others.

        Return those that an earlier death had sent again: one of them may be what kills replicas. Unless the rows are
        ``to_blame`` for this death, it counts for none of them.
        """
        lost = list(self._sent[replica].rows.values())
        again = [row for row in lost if to_blame and row.lost_by is not None]
        for row in lost:
            row.replica, row.sent_as = None, ""
            row.lost_by = replica if to_blame else row.lost_by
            self._waiting_tokens += row.expected_tokens
        self._waiting.extendleft(reversed(lost))
        self._sent[replica] = _Sent()
        return again

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every row is in exactly one place and the sums are those of the rows."""
        waiting = [row for row in self._waiting if not row.is_removed]
        sent = [row for place in self._sent.values() for row in place.rows.values()]
        assert len(waiting) + len(sent) == len(self._by_id)
        assert {id(row) for row in waiting + sent} == {id(row) for row in self._by_id.values()}
        assert abs(self._waiting_tokens - sum(row.expected_tokens for row in waiting)) < 1e-3
        for replica, place in self._sent.items():
            assert all(row.replica == replica for row in place.rows.values())
            assert abs(place.work_tokens - sum(row.expected_tokens for row in place.rows.values())) < 1e-3

    def _leave(self, row: Row) -> None:
        del self._by_id[row.request.request_id]
        if row.replica is not None:
            sent = self._sent[row.replica]
            del sent.rows[row.sent_as]
            # From zero again: the error of a long sum must not outlive the rows.
            sent.work_tokens = sent.work_tokens - row.expected_tokens if sent.rows else 0.0
