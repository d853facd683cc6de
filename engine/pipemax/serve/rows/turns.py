"""Decide which rows of the sessions may run together, so that a row that kills the engine is found.

Without suspects every row goes to the engine at once. With suspects, rows run in turns: a turn is one group of
suspects, or the rows that are not suspect, and the next turn begins when the engine is empty. Suspects that are here
go first, so the other rows wait; those run between the groups when no suspect is here (its task has not come back yet,
or other rows hold its credit), which keeps every session moving, chained ones too. Condemned rows are answered here.
A row is in the journal before the engine has it. This module knows nothing of Flight, and of engines only ``submit``
and ``abort``.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence

from pipemax.api import Completion, Engine, GenerationRequest, RequestError
from pipemax.domain.errors import EngineDiedError
from pipemax.serve.rows.journal import Journal
from pipemax.serve.rows.suspects import CONDEMNED_IN_A_ROW, DEATHS_ALONE, Suspects
from pipemax.wire import ErrorCode

log = logging.getLogger(__name__)

ABSENT_SUSPECTS_S = 60.0
"""Suspects that no task has sent again for this long, since the last that came or ended, are let go."""

_CONDEMNED = RequestError(
    code=ErrorCode.ENGINE_DIED,
    message=f"the engine died {DEATHS_ALONE} times while it ran this row by itself: the row is not run again in this "
    "application, and the engine's log says how it died",
)
_ENGINE_TO_BLAME = (
    f"the engine dies whatever row it runs: {CONDEMNED_IN_A_ROW} different rows, each by itself, killed it "
    f"{DEATHS_ALONE} times without a good completion between them. Its log says how; mend the engine's config or "
    "environment and start the job again."
)


class Turns:
    """Gives rows to the engine in turns. Thread-safe.

    Call ``submit`` and ``abort`` on the sessions' threads, ``record_ends`` and ``release`` on the engine's.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        absent_suspects_s: float = ABSENT_SUSPECTS_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal = journal
        self._absent_suspects_s = absent_suspects_s
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: dict[str, bytes] = {}  # request id -> key, of the rows in the engine
        self._held_suspects: dict[str, tuple[GenerationRequest, bytes]] = {}
        self._held_others: dict[str, tuple[GenerationRequest, bytes]] = {}
        self._group: set[bytes] | None = None  # whose turn it is; None for the rows that are not suspect
        self._seen_at_s: float | None = (
            None  # when a suspect last came or ended; None until the engine is there
        )
        self._frozen = False
        if self._suspects.groups:
            log.warning("looking for the row that kills the engine: %s", self.describe())

    def describe(self) -> str:
        """Describe the suspects for people; empty without suspects."""
        with self._lock:
            sizes = [len(group) for group in self._suspects.groups]
        if not sizes:
            return ""
        return f"{sum(sizes)} rows that may have killed the engine run apart, in groups of {sizes}"

    def join(self, job_id: str) -> str | None:
        """Record that a job opens a session. Return why it is refused, if its engine dies whatever it runs."""
        with self._lock:
            if job_id in self._suspects.refused_jobs:
                return _ENGINE_TO_BLAME
            self._journal.join(job_id)
            return None

    def submit(
        self, engine: Engine, requests: Sequence[GenerationRequest], keys: Sequence[bytes]
    ) -> list[Completion]:
        """Give rows to the engine, at once or in their turn. Return the error rows of those that never run.

        ``keys`` holds one key for each request (``result_cache.cache_key``). Raises what ``Engine.submit`` raises.
        """
        with self._lock:
            if self._frozen:
                return []
            condemned = self._suspects.condemned
            rows = [row for row in zip(requests, keys, strict=True) if row[1] not in condemned]
            if self._suspects.groups or self._held_others:
                self._hold(rows)
                rows = self._due_rows()
            self._start(rows)
        self._pass_on(engine, rows)
        return [
            Completion(request_id=request.request_id, error=_CONDEMNED)
            for request, key in zip(requests, keys, strict=True)
            if key in condemned
        ]

    def record_ends(self, completions: Sequence[Completion]) -> None:
        """Record that the engine has delivered these."""
        with self._lock:
            if self._frozen:
                return
            keys = [self._keys.pop(c.request_id) for c in completions if c.request_id in self._keys]
            if keys:
                self._journal.end(keys, good=any(c.error is None for c in completions))
                if self._group is not None:
                    self._seen_at_s = self._clock()

    def release(self, engine: Engine) -> None:
        """Begin the next turn if the last has ended; called after each poll."""
        with self._lock:
            if self._frozen:
                return
            if self._suspects.groups:
                self._let_absent_go()
            if self._journal.running and self._suspects.groups:
                return
            rows = self._due_rows()
            self._start(rows)
        self._pass_on(engine, rows)

    def abort(self, engine: Engine, request_ids: Sequence[str]) -> None:
        """Stop rows wherever they are. Nobody waits for them any more, so they are no longer suspect."""
        try:
            engine.abort(request_ids)
        except EngineDiedError as died:
            self.freeze(died.suspects)
            raise
        with self._lock:
            if not self._frozen:
                self._forget(request_ids)

    def freeze(self, suspects: Collection[str] | None = None) -> None:
        """Stop recording: the engine is gone or will be, so what becomes of its rows says nothing about them.

        Where the engine names the requests of which one may have killed it, the others do not count as having run.

        Hazard: must be called before a session hears of the death, because the rows that it then aborts did run.
        """
        with self._lock:
            if suspects is not None and not self._frozen:
                self._journal.withdraw([key for name, key in self._keys.items() if name not in suspects])
            self._frozen = True

    def close(self, *, in_order: bool) -> None:
        """End with the server. Unless ``in_order``, what runs stays in the journal for the successor to suspect."""
        self.freeze()
        if in_order:
            self._journal.close()

    # Under the lock.

    @property
    def _suspects(self) -> Suspects:
        return self._journal.suspects

    def _hold(self, rows: Sequence[tuple[GenerationRequest, bytes]]) -> None:
        for request, key in rows:
            if self._suspects.group_of(key) is None:
                self._held_others[request.request_id] = request, key
            else:
                self._held_suspects[request.request_id] = request, key
                self._seen_at_s = self._clock()

    def _due_rows(self) -> list[tuple[GenerationRequest, bytes]]:
        """Take the held rows that may run now."""
        if not self._suspects.groups:
            return self._take_all()
        if not self._journal.running:
            self._group = self._suspects.choose_group({key for _, key in self._held_suspects.values()})
            if self._group is None:
                return self._take_all()  # none of them is suspect, or not any more
            log.info("a group of %d suspects runs", len(self._group))
        if self._group is None:
            # Once a suspect waits, the turn of the others takes in no more and ends.
            return [] if self._held_suspects else self._take_all()
        due = [name for name, (_, key) in self._held_suspects.items() if key in self._group]
        return [self._held_suspects.pop(name) for name in due]

    def _take_all(self) -> list[tuple[GenerationRequest, bytes]]:
        rows = [*self._held_suspects.values(), *self._held_others.values()]
        self._held_suspects.clear()
        self._held_others.clear()
        return rows

    def _start(self, rows: Sequence[tuple[GenerationRequest, bytes]]) -> None:
        if rows:
            self._keys.update((request.request_id, key) for request, key in rows)
            self._journal.start([key for _, key in rows])

    def _forget(self, request_ids: Sequence[str]) -> None:
        running = [self._keys.pop(name) for name in request_ids if name in self._keys]
        if running:
            self._journal.withdraw(running)
        if not self._suspects.groups:
            return
        held = [
            rows.pop(name)[1]
            for rows in (self._held_suspects, self._held_others)
            for name in request_ids
            if name in rows
        ]
        elsewhere = {key for _, key in self._held_suspects.values()} | self._journal.running.keys()
        self._journal.clear({*running, *held} - elsewhere)

    def _let_absent_go(self) -> None:
        now_s = self._clock()
        if (
            self._seen_at_s is None
            or self._held_suspects
            or (self._group is not None and self._journal.running)
        ):
            self._seen_at_s = now_s
        elif now_s - self._seen_at_s > self._absent_suspects_s:
            log.warning("%d suspects have not come back and are let go", self._suspects.count)
            self._journal.clear(set().union(*self._suspects.groups))

    # Not under the lock: an engine may take its time.

    def _pass_on(self, engine: Engine, rows: Sequence[tuple[GenerationRequest, bytes]]) -> None:
        if not rows:
            return
        try:
            engine.submit([request for request, _ in rows])
        except EngineDiedError as died:
            with self._lock:
                if not self._frozen:  # it was dead before it could take them
                    names = [request.request_id for request, _ in rows]
                    self._journal.withdraw([self._keys.pop(name) for name in names if name in self._keys])
            self.freeze(died.suspects)
            raise
