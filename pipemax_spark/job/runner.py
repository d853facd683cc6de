"""Run the chunks of one run: several at a time, each with its own append, and stop all when one fails.

While one chunk's last rows decode, the next chunk's rows fill the engine, so it never drains between commits. For that,
the chunks must not run in parallel but one after the other: Spark serves jobs in the order of their submission, so a
chunk is submitted once the tasks of the chunk before it hold the slots. If it were submitted sooner, the two could
share the slots evenly, end together, and leave the engine empty while both commit. For the same reason a lane runs no
Spark job but the append: between two chunks it would wait for a slot. While a slow task keeps a chunk in flight,
further chunks are submitted, one whenever the slots are about to run out of tasks (``turns``). The size of a chunk is
decided just as late: when the engines have reported how many rows they have room for, or when the first slot is about
to be free.

Each lane commits under its own transaction id: Delta drops an append whose number is not above the last one of its id,
and of chunks that run at once, the later one may well end first.

A commit counts once it is found in the table's history with all its rows (``fence``). This check is a Spark job, which
may wait for a slot, so it runs on a separate thread while the lane goes on.
"""

import logging
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Protocol

from pipemax_spark.errors import CommitRefusedError, JobFailedError, LimitReachedError, TakenOverError
from pipemax_spark.job.job import Job
from pipemax_spark.job.preparing import Prepared
from pipemax_spark.rows.annotated import annotate_requests
from pipemax_spark.rows.chunks import Chunk, ChunkPlan, RowOrder, order_of_last_chunk
from pipemax_spark.rows.turns import may_submit
from pipemax_spark.spark.jobs import jobs_of
from pipemax_spark.spark.slots import Slots
from pipemax_spark.storage.fence import LANES
from pipemax_spark.storage.tables import Transaction

log = logging.getLogger(__name__)

_POLL_S = 0.2


class Surroundings(Protocol):
    """What a runner asks of the run around it, and tells it, on any thread. None stands for what is not known yet."""

    def slots(self) -> Slots:
        """Return the task slots; asked at each chunk, because nodes come and go."""
        ...

    def rows_per_s(self) -> float | None:
        """Return the rate so far."""
        ...

    def engine_rows(self) -> int | None:
        """Return how many rows an engine has room for."""
        ...

    def length_correlation(self) -> float | None:
        """Return the correlation of the lengths of prompts and answers."""
        ...

    def most_rows(self) -> int | None:
        """Return how many rows may still begin by the run's limits; None for any number."""
        ...

    def longest_chunk_s(self) -> float | None:
        """Return how long a chunk may take by the run's limits."""
        ...

    def none_fits(self) -> LimitReachedError:
        """Return the end of a run of which no chunk may begin any more by its limits."""
        ...

    def begun(self, chunk: Chunk) -> None:
        """Note that a chunk begins."""
        ...

    def committed(self, chunk: Chunk) -> None:
        """Note that a chunk is committed."""
        ...

    def every_second(self) -> None:
        """Work about once a second, on the thread that runs the chunks."""
        ...


class ChunkRunner:
    """Runs all chunks: ``run`` returns when every chunk is committed, and raises when that is impossible."""

    def __init__(self, job: Job, prepared: Prepared, surroundings: Surroundings) -> None:
        """Prepare to run the chunks.

        Without a spool in the job's plan, completions that are not committed are lost with their task.
        """
        self._job = job
        self._jobs = jobs_of(job.spark)
        self._rows = prepared.rows
        self._claim = prepared.claim
        self._outcomes = prepared.outcomes
        self._origin = prepared.origin
        self._surroundings = surroundings
        self._request_columns = job.options.request_columns
        commit_every_s = job.options.commit_every.total_seconds()
        self._chunks = ChunkPlan(
            slice_rows=prepared.rows.slice_rows,
            slots=surroundings.slots().total,
            commit_every_s=min(commit_every_s, surroundings.longest_chunk_s() or commit_every_s),
            first_number=prepared.first_chunk,
        )
        self._turn = threading.Lock()  # the lane that holds it takes the next chunk
        self._lock = threading.Lock()
        self._committed_rows = 0
        self._ended_chunks: set[int] = set()
        self._checks: list[Future[None]] = []
        self._started_s = time.monotonic()
        self._failure: JobFailedError | None = None

    @property
    def next_chunk(self) -> int:
        """The number of the run's first chunk of other rows."""
        return self._chunks.first_number + len(self._chunks.chunks)

    @property
    def committed_rows(self) -> int:
        """The number of this runner's rows that it has found in the table's history."""
        with self._lock:
            return self._committed_rows

    def cancel(self, reason: JobFailedError) -> None:
        """Stop the running chunks; ``run`` then raises this error. Call it from any thread."""
        with self._lock:
            self._failure = self._failure or reason
        self._cancel_jobs()

    def run(self) -> None:
        """Run and commit all chunks. Raise ``LimitReachedError`` if the run's limits leave some undone."""
        with (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="pipemax-commits") as checker,
            ThreadPoolExecutor(max_workers=LANES, thread_name_prefix="pipemax-lane") as pool,
        ):
            lanes = [pool.submit(self._run_lane, lane, checker) for lane in range(LANES)]
            try:
                self._wait(lanes)
            except BaseException as error:
                # Also on Ctrl-C: otherwise the other lanes' jobs would go on for as long as their chunks take.
                with self._lock:
                    reason = self._failure
                    self._failure = reason or JobFailedError("another chunk failed")
                self._cancel_until_ended(lanes)
                if isinstance(reason, LimitReachedError):  # an end in order, of which each commit is checked
                    self._wait_for_checks()
                if reason is not None:
                    raise reason from error
                if isinstance(error, CommitRefusedError):
                    raise TakenOverError(self._claim.taken_over()) from error
                raise
        if self._committed_rows != self._rows.rows:
            if self._failure is not None:  # between two chunks, when no Spark job ran that could be cancelled
                raise self._failure
            if not self._chunks.is_used_up:
                raise self._surroundings.none_fits()
            raise JobFailedError(
                f"{self._rows.rows:,} rows were to be committed and {self._committed_rows:,} were "
                f"({self._committed_rows - self._rows.rows:+,}). Run the job again to annotate the rows that are left"
            )

    def _wait(self, lanes: list[Future[None]]) -> None:
        running: set[Future[None]] = set(lanes)
        num_checks = 0
        while running:
            # With a time limit, so that Ctrl-C reaches this thread.
            done, running = wait(running, timeout=1.0, return_when=FIRST_EXCEPTION)
            with self._lock:
                running.update(self._checks[num_checks:])
                num_checks = len(self._checks)
            for future in done:
                future.result()
            self._surroundings.every_second()

    def _wait_for_checks(self) -> None:
        """Raise what a check of a commit raised."""
        with self._lock:
            checks = [*self._checks]
        for check in checks:
            check.result()

    def _run_lane(self, lane: int, checker: ThreadPoolExecutor) -> None:
        # The tag applies only to this thread, as does the group below.
        self._jobs.tag(self._job.run_id)
        while (chunk := self._take_chunk()) is not None:
            description = f"pipemax run {self._job.run_id}, chunk {chunk.number}"
            self._jobs.describe(description, group=self._group(chunk.number))
            origin = f"{chunk.slices_note}{self._origin}"
            transaction = self._claim.chunk(chunk.number, lane=lane, origin=origin)
            rows_kept = self._run_chunk(chunk, transaction)
            with self._lock:
                self._ended_chunks.add(chunk.number)
                self._checks.append(checker.submit(self._check_commit, chunk, transaction, rows_kept))

    def _check_commit(self, chunk: Chunk, transaction: Transaction, rows_kept: int) -> None:
        """Count the chunk as committed. Raise ``JobFailedError`` unless all of its rows are in the table."""
        commit = self._claim.landed(transaction, expected_rows=chunk.rows + rows_kept)
        log.info("chunk %d is committed as version %d: %d rows", chunk.number, commit.version, chunk.rows)
        with self._lock:
            self._committed_rows += chunk.rows
        if self._job.checked.plan.spool is not None:
            self._job.work.delete_chunk_spool(chunk.number)
        self._surroundings.committed(chunk)

    def _take_chunk(self) -> Chunk | None:
        """Wait for this lane's turn and return the next chunk.

        Return None if none is left, if the job is being stopped, or if the run's limits let none begin; while chunks
        are in flight, whether one may begin can still change.
        """
        with self._turn:
            while self._wait_for_turn():
                chunk = self._next(self._surroundings.rows_per_s())
                if chunk is not None or self._chunks.is_used_up or not self._in_flight():
                    return chunk
                time.sleep(_POLL_S)
            return None

    def _wait_for_turn(self) -> bool:
        """Wait until the next chunk may be submitted; return False if the job is being stopped."""
        while True:
            with self._lock:
                if self._failure is not None:
                    return False
                ended = set(self._ended_chunks)
            in_flight = self._in_flight()
            tasks = [self._jobs.tasks_of(self._group(number)) for number in in_flight]
            # Once a chunk has ended, there is no engine left to wait for.
            is_room_known = bool(ended) or self._surroundings.engine_rows() is not None
            if may_submit(tasks, is_room_known=is_room_known):
                return True
            time.sleep(_POLL_S)

    def _in_flight(self) -> list[int]:
        """Return the numbers of the chunks that have begun and not ended."""
        with self._lock:
            return [c.number for c in self._chunks.chunks if c.number not in self._ended_chunks]

    def _group(self, number: int) -> str:
        return f"{self._job.run_id}-chunk-{number}"

    def _next(self, rows_per_s: float | None) -> Chunk | None:
        with self._lock:
            if self._failure is not None:
                return None
            if rows_per_s is None and self._committed_rows:
                # No server's report reaches the collector, so the commits give the rate.
                rows_per_s = self._committed_rows / (time.monotonic() - self._started_s)
            engine_rows = self._room()
            slots = self._surroundings.slots()
            fed_rows = slots.fed_partition_rows(engine_rows) or 0
            most_rows = self._surroundings.most_rows()
            chunk = self._chunks.next(rows_per_s, at_least=slots.total * fed_rows, at_most=most_rows)
        if chunk is not None:
            log.info("%s, at %s rows/s so far, engines take %s rows", chunk, rows_per_s, engine_rows)
            self._surroundings.begun(chunk)
            self._job.work.note_chunk(chunk)
        return chunk

    def _room(self) -> int | None:
        """Return how many rows an engine has room for, as far as that is known."""
        return self._surroundings.engine_rows() or self._job.checked.reply.expected_rows

    def _run_chunk(self, chunk: Chunk, transaction: Transaction) -> int:
        is_last = chunk.end_slice == len(self._rows.slice_rows)
        slots = self._surroundings.slots()
        partitions = slots.partitions_for(chunk.rows, engine_rows=self._room(), is_last=is_last)
        order = self._order_of_last_chunk() if is_last else RowOrder.AS_DEALT
        executors = max(1, slots.total // slots.per_executor)
        rows = self._rows.read(chunk, partitions=partitions, order=order, executors=executors)
        plan = self._job.checked.plan
        if plan.spool is not None:
            plan = replace(plan, spool=self._job.work.chunk_spool_path(chunk.number))
        requests = self._request_columns.for_output(self._request_columns.add(rows, have_keys=True))
        return self._outcomes.commit(annotate_requests(requests, plan), transaction)

    def _order_of_last_chunk(self) -> RowOrder:
        has_own = self._request_columns.has_own_max_tokens(self._rows.schema)
        correlation = self._surroundings.length_correlation()
        order = order_of_last_chunk(has_own_max_tokens=has_own, length_correlation=correlation)
        log.info(
            "the last chunk's rows go %s; prompts and answers correlate by %s, rows say their own max_tokens: %s",
            order,
            correlation,
            has_own,
        )
        return order

    def _cancel_until_ended(self, lanes: list[Future[None]]) -> None:
        """Cancel the lanes' jobs, also those that a lane was about to submit."""
        running = set(lanes)
        while running:
            self._cancel_jobs()
            _, running = wait(running, timeout=1.0)

    def _cancel_jobs(self) -> None:
        self._jobs.cancel(self._job.run_id)
