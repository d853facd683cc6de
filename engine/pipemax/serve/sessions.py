"""Keep the open sessions, and pass on to them what the engine's thread reports.

Finished rows go to the sessions that sent them. The engine's thread also sizes the credit window here, tells the engine
whether more rows may come, and begins the next turn. This module knows nothing of Flight, and only knows how to hand
rows to a session and how to wake it.
"""

import threading
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Protocol

from pipemax.api import Completion, Engine, GenerationRequest
from pipemax.endpoint_config import AnyConfig
from pipemax.serve.flow.credit import CreditWindow
from pipemax.serve.flow.live_tuning import LiveTuning
from pipemax.serve.flow.open_input import InputWatch
from pipemax.serve.flow.pacing import Pacer
from pipemax.serve.job_stats import StatsBook
from pipemax.serve.lifecycle import EXIT_ENGINE_DIED, HURRIED_CLOSE_S, Exit, Lifecycle
from pipemax.serve.rows.equal_requests import EqualRequests
from pipemax.serve.rows.turns import Turns

_KNOWN_SESSIONS = 10_000
"""Sessions whose job is known, the open ones and those that were opened last."""


class OpenSession(Protocol):
    """The part of a session that is used here. Both methods are called on any thread and must not block."""

    def deliver(self, completions: Sequence[Completion]) -> None:
        """Take completions of this session's rows."""

    def wake(self) -> None:
        """Check the engine and the credit again."""


class EngineSessions:
    """The open sessions, as the engine's thread sees them. The methods that other threads call are thread-safe."""

    def __init__(
        self,
        *,
        window: CreditWindow,
        turns: Turns,
        equals: EqualRequests,
        inputs: InputWatch,
        stats: StatsBook,
        lifecycle: Lifecycle,
    ) -> None:
        """Let ``lifecycle`` end the server when the engine has died."""
        self._stats = stats
        self._window = window
        self._turns = turns
        self._equals = equals
        self._inputs = inputs
        self.tuning = LiveTuning(inputs)
        """The tuning of the engine's limits."""
        self._lifecycle = lifecycle
        self._lock = threading.Lock()
        self._open: dict[int, OpenSession] = {}  # by the session's number
        self._jobs: dict[int, str] = {}  # by the session's number, closed ones too: their rows may still end
        # The engine's thread only:
        self._pacer = Pacer(window)
        self._known_input: tuple[Engine, bool] | None = None  # what the last engine was told

    # Called on the sessions' threads and the server's.

    @property
    def num_open(self) -> int:
        with self._lock:
            return len(self._open)

    def open(self, number: int, job_id: str, session: OpenSession) -> None:
        """Hand the session its completions from now on, until ``close``."""
        with self._lock:
            self._open[number] = session
            self._jobs[number] = job_id
            if len(self._jobs) > _KNOWN_SESSIONS:
                del self._jobs[next(iter(self._jobs))]
        self._inputs.open(number, job_id)

    def end_input(self, number: int) -> None:
        """Note that the session's client has sent its last row; its rows may still run."""
        self._inputs.end(number)
        self.wake_all()  # the stream's unused credit and its turn pass to the next stream

    def close(self, number: int, job_id: str) -> None:
        """Forget the session. Completions of its rows are dropped from now on."""
        self._inputs.close(number, job_id)
        with self._lock:
            del self._open[number]
        self.wake_all()  # its credit is free for others

    def wake_all(self) -> None:
        with self._lock:
            sessions = list(self._open.values())
        for session in sessions:
            session.wake()

    def running_rows(self) -> int:
        """Return how many rows the engine holds. Asked under the host's lock: do not call the host from here."""
        # A request may run on for rows that wait for it, after its own session has gone.
        return max(self._window.running_rows, self._equals.num_computing)

    def rows_sent(self, job_id: str, requests: Sequence[GenerationRequest]) -> None:
        """Note rows that are about to go to the engine."""
        self._inputs.note_sent(job_id, requests)

    def deliver(self, completions: Sequence[Completion]) -> None:
        """Hand rows that have ended to their sessions, and their outcome to the rows that wait for it."""
        by_session: dict[int, list[Completion]] = defaultdict(list)
        for completion in (*completions, *self._equals.record_ends(completions)):
            by_session[int(completion.request_id.partition(":")[0])].append(completion)
        for number, of_session in by_session.items():
            with self._lock:
                session = self._open.get(number)
            if session is not None:  # otherwise it ended meanwhile, and no client waits for its rows
                session.deliver(of_session)

    # Called on the engine's thread, which polls no rows until they return: none may block for long.

    def feed(self, engine: Engine, config: AnyConfig) -> None:
        """Set the window by what the engine can take, tell it whether input is open, and begin the next turn.

        Called with an engine that has just been loaded, and after each poll.
        """
        if self._pacer.resize(engine, config, rows_left=self._inputs.rows_left()):
            self.wake_all()  # there is credit to grant
        input_state = (engine, self._inputs.is_open())
        if input_state != self._known_input:
            engine.set_input_open(input_state[1])
            self._known_input = input_state
        self._turns.release(engine)
        self.tuning.see(engine, config)

    def rows_ended(self, completions: Sequence[Completion]) -> None:
        """Take rows that have ended, in the order of ``Engine.poll``."""
        self._turns.record_ends(completions)
        self._pacer.learn(completions)
        self.tuning.learn(completions)
        self._count_spent(completions)
        self.deliver(completions)

    def _count_spent(self, completions: Sequence[Completion]) -> None:
        """Count what rows cost at an endpoint, by job: also of rows whose session has gone, which are billed too."""
        for completion in completions:
            if completion.spent is not None:
                with self._lock:
                    job_id = self._jobs.get(int(completion.request_id.partition(":")[0]))
                if job_id is not None:
                    self._stats.count_spent(job_id, completion.spent)

    def engine_died(self, suspects: Collection[str] | None = None) -> None:
        """Note that the engine is gone; no session has heard of it yet.

        ``suspects`` are the request ids of the rows of which one may have killed it; None for all that it ran.
        """
        self._turns.freeze(suspects)

    def death_announced(self, reason: str) -> None:
        """End the server: every session is refused for this reason from now on."""
        self.wake_all()
        self._lifecycle.stop(Exit(reason=reason, status=EXIT_ENGINE_DIED, close_within_s=HURRIED_CLOSE_S))
