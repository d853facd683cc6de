"""Several engines behind the interface of one: ``ReplicaSet`` implements ``Engine`` over a process for each replica.

Rows go to the replica with the least work (``routing``). One that dies is started again while the others go on, and its
rows are sent again, first to others. A row that was in two replicas as they died may be what kills them: then the
set dies as an engine does, and its owner looks for the row.
"""

import logging
import queue
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace

from pipemax.config import EngineConfig, Policy
from pipemax.domain.errors import EngineDiedError, EngineStartError
from pipemax.domain.step_records import StepLimits, StepRecords, TuningFacts, check_limits
from pipemax.engine import EngineStats
from pipemax.generation import Completion, GenerationRequest
from pipemax.replicas.division import divide, speculating
from pipemax.replicas.hardware import Hardware, read_hardware
from pipemax.replicas.messages import (
    Abort,
    Died,
    Ended,
    Failed,
    InputOpen,
    NothingToMeasure,
    Report,
    Started,
    Steps,
    Stop,
)
from pipemax.replicas.process import Event, Events, Gone, Heard, ReplicaProcess, Silenced
from pipemax.replicas.replica import Replica, ReplicaState, RestartLimits, next_to_change
from pipemax.replicas.routing import Router
from pipemax.replicas.row_book import Row, RowBook
from pipemax.replicas.row_estimates import RowEstimates
from pipemax.replicas.summed_stats import choice_of_all, summed

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "pipemax.replicas")
_CLOSE_S = 80.0
"""How long replicas may take to close, before they are killed."""
_LONGEST_WAIT_S = 0.2
"""Between two looks at whether a replica is to be started or hangs."""


class ReplicaSet:
    """Implements ``pipemax.api.Engine``. Thread-safe, except that ``poll`` has one caller, which also closes it."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        hardware: Hardware | None = None,
        command: Sequence[str] = COMMAND,
        limits: RestartLimits | None = None,
    ) -> None:
        """Start all replicas, and block until they can take rows. ``EngineStartError`` says why one could not start.

        ``command`` runs a replica's process (``pipemax.replicas.child``), given a descriptor.
        """
        try:
            shares = divide(config, hardware or read_hardware())
        except ValueError as error:
            raise EngineStartError(f"model {config.model!r} cannot have its replicas: {error}") from None
        self._command, self._limits = command, limits or RestartLimits()
        self._replicas = {
            number: Replica(number=number, share=share) for number, share in enumerate(shares, 1)
        }
        self._events: Events = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._rows = RowBook(list(self._replicas))
        self._router = Router()
        self._estimates = RowEstimates()
        self._input_open = False
        self._died: EngineDiedError | None = None
        self._level_tokens: float | None = None
        """Most work of a live replica while another is away: the rest waits for the one that comes back."""
        self._speculating: frozenset[int] = frozenset()
        """The replicas that are to run with n-gram speculation."""
        self._start_all(measures=config.policy is not Policy.VLLM and not config.is_pooling)
        self.policy_choice = choice_of_all(self._replicas[1].policy, len(self._replicas))

    # -- any thread -------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """See ``Engine.submit``."""
        with self._lock:
            if self._died is not None:
                raise self._died
            for request in requests:
                self._rows.add(request, self._estimates.estimate(request))
            if self._speculating and not all(request.sampling.can_speculate for request in requests):
                log.info("a row has come that n-gram speculation may change: no replica keeps it")
                self._speculating = frozenset()
            self._dispatch()

    def abort(self, request_ids: Sequence[str]) -> None:
        """See ``Engine.abort``."""
        with self._lock:
            for number, sent_as in self._rows.remove(request_ids).items():
                self._replicas[number].send(Abort(request_ids=tuple(sent_as)))

    def set_input_open(self, is_open: bool) -> None:
        """See ``Engine.set_input_open``."""
        with self._lock:
            self._input_open = is_open
            for replica in self._up():
                replica.send(InputOpen(is_open=is_open))

    def most_limits(self) -> list[StepLimits]:
        """See ``Engine.most_limits``; empty if the limits of any replica are fixed."""
        with self._lock:
            ceilings = [r.most_limits for r in self._replicas.values() if r.most_limits is not None]
            return ceilings if len(ceilings) == len(self._replicas) else []

    def limits(self) -> list[StepLimits]:
        """See ``Engine.limits``."""
        with self._lock:
            return [r.limits for r in self._replicas.values() if r.limits is not None]

    def set_limits(self, limits: Sequence[StepLimits]) -> None:
        """See ``Engine.set_limits``."""
        check_limits(limits, self.most_limits())
        with self._lock:
            for replica, wanted in zip(self._replicas.values(), limits, strict=True):
                replica.set_limits(wanted)

    def take_step_records(self) -> list[StepRecords]:
        """See ``Engine.take_step_records``."""
        is_live = bool(self.most_limits())
        with self._lock:
            return [replica.take_step_records() for replica in self._replicas.values()] if is_live else []

    def tuning_facts(self) -> TuningFacts | None:
        """See ``Engine.tuning_facts``."""
        with self._lock:
            return next(
                (replica.tuning for replica in self._replicas.values() if replica.tuning is not None), None
            )

    def speculate(self, replicas: Collection[int]) -> None:
        """See ``Engine.speculate``."""
        if unknown := set(replicas) - self._replicas.keys():
            raise ValueError(f"replicas {sorted(unknown)}: the engine has 1 to {len(self._replicas)}")
        with self._lock:
            self._speculating = frozenset(replicas if self._rows.can_all_speculate() else ())

    def admission_credit_tokens(self) -> int:
        """Return what all replicas that are up can take together; see ``Engine.admission_credit_tokens``."""
        with self._lock:
            credit = sum(replica.credit_tokens() for replica in self._replicas.values())
            return int(credit - self._rows.waiting_tokens)

    def stats(self) -> EngineStats:
        """Return the statistics of all replicas together and of each."""
        with self._lock:
            of_replicas = [
                stats for replica in self._replicas.values() if (stats := replica.stats()) is not None
            ]
            together = summed(of_replicas)
            return replace(
                together,
                waiting_requests=together.waiting_requests + self._rows.num_waiting(),
                policy=asdict(self.policy_choice),
                replicas=tuple(
                    replica.figures(rows=self._rows.num_sent(number))
                    for number, replica in self._replicas.items()
                ),
            )

    # -- the one caller of poll -------------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> list[Completion]:
        """See ``Engine.poll``. Also starts replicas again."""
        ended: list[Completion] = []
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._tend()
            if self._died is not None and not ended:
                raise self._died
            left_s = 0.0 if ended else min(_LONGEST_WAIT_S, deadline_s - time.monotonic())
            event = self._next_event(left_s)
            if event is not None:
                with self._lock:
                    ended += self._take(event)
                    self._dispatch()
            elif ended or time.monotonic() >= deadline_s:
                return ended

    def close(self) -> None:
        """See ``Engine.close``."""
        with self._lock:
            processes = [r.process for r in self._replicas.values() if r.process is not None]
            for replica in self._replicas.values():
                if replica.is_up:
                    replica.send(Stop())
                elif replica.process is not None:
                    replica.process.kill()
                replica.state = ReplicaState.GIVEN_UP
        deadline_s = time.monotonic() + _CLOSE_S
        for process in processes:
            if not process.wait(max(0.0, deadline_s - time.monotonic())):
                log.error("replica %d does not close and is killed", process.number)
                process.kill()
                process.wait(_CLOSE_S)

    def _start_all(self, *, measures: bool) -> None:
        """Start all, but the first replica before the others if it measures: they then find what it has measured."""
        first, *waiting = self._replicas.values()
        try:
            self._start(first, others_wait=measures)
            while waiting or any(not replica.is_up for replica in self._replicas.values()):
                if waiting and (first.is_up or first.measures_nothing or not measures):
                    for replica in waiting:
                        self._start(replica)
                    waiting = []
                self._take(self._events.get())
                for replica in self._replicas.values():
                    if replica.state is ReplicaState.ENDING:
                        raise EngineStartError(f"replica {replica.number}: {replica.last_words}")
        except BaseException:
            for replica in self._replicas.values():
                replica.state = ReplicaState.GIVEN_UP  # killed, not asked to close
            self.close()
            raise

    def _next_event(self, timeout_s: float) -> Event | None:
        try:
            return self._events.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    # -- under the lock ---------------------------------------------------------------------------------------

    def _up(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.is_up]

    def _staying(self) -> list[Replica]:
        return [r for r in self._replicas.values() if r.state is not ReplicaState.GIVEN_UP]

    def _take(self, event: Event) -> list[Completion]:
        """Take an event in; return the rows that it ends."""
        replica = self._replicas[event.process.number]
        match event:
            case Heard(message=message):
                replica.heard_s = time.monotonic()
                match message:
                    case Ended(completions=completions):
                        return self._end_rows(replica, completions)
                    case Report():
                        replica.note_report(message)
                    case NothingToMeasure():
                        replica.measures_nothing = True
                    case Steps(records=records):
                        replica.note_steps(StepRecords.from_plain(records))
                    case Started():
                        replica.note_started(message, input_open=self._input_open)
                        log.info("replica %d is up (start %d)", replica.number, replica.starts)
                    case Failed(reason=reason):
                        replica.last_words = reason
                    case Died(reason=reason, is_machine_fault=is_machine_fault):
                        replica.last_words, replica.has_machine_fault = reason, is_machine_fault
            case Silenced(reason=reason):
                self._bury(replica, replica.last_words or reason)
            case Gone() if replica.state is ReplicaState.ENDING:
                replica.state = ReplicaState.RESTING
        return []

    def _end_rows(self, replica: Replica, completions: Sequence[Completion]) -> list[Completion]:
        ended = []
        for completion in completions:
            request = self._rows.end(replica.number, completion.request_id)
            if request is None:  # it was aborted
                continue
            self._estimates.learn(request, completion)
            replica.fruitless = 0
            replica.rows_done += 1
            replica.prompt_tokens += completion.prompt_tokens
            replica.completion_tokens += completion.completion_tokens
            ended.append(replace(completion, request_id=request.request_id))
        return ended

    def _bury(self, replica: Replica, reason: str) -> None:
        """Have the rows of a replica that has ended sent again, unless one of them may be what killed it."""
        replica.last_words = reason
        level = max(self._rows.work_tokens(number) for number in self._replicas)
        self._level_tokens = max(level, self._level_tokens or 0.0)
        lost_ids = self._rows.ids_sent(replica.number)
        is_fault, replica.has_machine_fault = replica.has_machine_fault, False
        is_crash = not replica.is_replaced and not replica.speculates
        again = self._rows.lose(replica.number, to_blame=is_crash and not is_fault)
        self._router.forget(replica.number)
        if replica.state is ReplicaState.GIVEN_UP:  # the set closes
            return
        replica.end_life()
        if not is_crash:
            self._note_change(replica, reason, num_rows=len(lost_ids))
            return
        replica.fruitless += 1
        rest_s = self._limits.first_rest_s * 2 ** (replica.fruitless - 1)
        replica.due_s = time.monotonic() + min(rest_s, self._limits.longest_rest_s)
        if is_fault and replica.share.gpus:
            reason = f"{reason}; the fault is that of GPU {', '.join(replica.share.gpus)}"
        log.error("replica %d died with %d rows: %s", replica.number, len(lost_ids), reason)
        if again:
            self._died = EngineDiedError(
                f"the engine died: replica {replica.number} with {len(again)} rows that were in another replica "
                f"as that died, too ({reason})",
                suspects=lost_ids,  # not only those: another may be the first to kill a replica
            )
        elif replica.fruitless >= self._limits.max_fruitless:
            log.error(
                "replica %d has died %d times in a row and is given up", replica.number, replica.fruitless
            )
            replica.state = ReplicaState.GIVEN_UP
            if all(other.state is ReplicaState.GIVEN_UP for other in self._replicas.values()):
                message = f"the engine died: no replica is left ({reason})"
                self._died = EngineDiedError(message, is_machine_fault=is_fault)

    def _note_change(self, replica: Replica, reason: str, *, num_rows: int) -> None:
        """Have a replica start again that was to change, or that speculation has ended: that is no crash."""
        replica.due_s = 0.0
        if replica.is_replaced:
            how = "with" if replica.number in self._speculating else "without"
            message = "replica %d starts again %s n-gram speculation; others get its %d rows"
            log.info(message, replica.number, how, num_rows)
        else:
            self._speculating -= {replica.number}
            message = "replica %d has ended with n-gram speculation, and starts again without: %s"
            log.warning(message, replica.number, reason)

    def _tend(self) -> None:
        """Start replicas whose rest is over, and end those that hang or are to change."""
        now_s = time.monotonic()
        changing = next_to_change(self._staying(), self._speculating) if self._died is None else None
        if changing is not None:
            changing.is_replaced = True
            changing.kill()
        for replica in self._replicas.values():
            if replica.state is ReplicaState.RESTING and now_s >= replica.due_s and self._died is None:
                self._start(replica)
            elif replica.is_up and now_s - replica.heard_s > self._limits.silence_s:
                replica.last_words = f"it said nothing for {self._limits.silence_s:.0f} s"
                replica.heard_s = now_s
                replica.kill()

    def _start(self, replica: Replica, *, others_wait: bool = False) -> None:
        speculates = replica.number in self._speculating
        share = speculating(replica.share) if speculates else replica.share
        process = ReplicaProcess(replica.number, share, self._command, self._events, others_wait=others_wait)
        replica.begin_life(process, now_s=time.monotonic(), speculates=speculates)

    def _dispatch(self) -> None:
        """Send waiting rows to the replicas that are up."""
        up = self._up()
        if self._died is not None or not up:
            return
        staying = self._staying()
        if len(up) == len(staying):
            self._level_tokens = None
        rows: dict[int, list[Row]] = {}
        for row in self._rows.take_waiting():
            work = {r.number: self._rows.work_tokens(r.number) for r in up if self._has_room(r, row)}
            if not work:
                break
            if len(staying) > 1 and row.lost_by is not None:
                # Not to the same again: if it is the row, another dies of it; if it is the replica, none does.
                work.pop(row.lost_by, None)
            if not row.request.sampling.can_speculate:
                work = {n: tokens for n, tokens in work.items() if not self._replicas[n].speculates}
            if work:
                number = self._router.choose(row.prefixes, work)
                self._rows.send(row, number)
                rows.setdefault(number, []).append(row)
        for number, rows_of_replica in rows.items():
            requests = [replace(row.request, request_id=row.sent_as) for row in rows_of_replica]
            self._replicas[number].submit(
                requests, expected_tokens=sum(row.expected_tokens for row in rows_of_replica)
            )

    def _has_room(self, replica: Replica, row: Row) -> bool:
        work = self._rows.work_tokens(replica.number)
        return self._level_tokens is None or work == 0 or work + row.expected_tokens <= self._level_tokens
