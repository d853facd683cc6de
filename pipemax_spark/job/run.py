"""What runs beside the chunks of one run, from its first batch to its last: reports, progress, tracking, limits.

A run has one batch, the whole input, or as many as a stream hands out. Nothing starts before there are rows.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from pipemax_spark.errors import JobFailedError
from pipemax_spark.executor.spool import spool_fault
from pipemax_spark.executor.task import TaskPlan
from pipemax_spark.job.chunks import ChunkPlan, SlicedRows
from pipemax_spark.job.options import JobOptions
from pipemax_spark.job.outcomes import Outcomes
from pipemax_spark.job.prefix import hit_rate
from pipemax_spark.job.runner import ChunkRunner
from pipemax_spark.job.workdir import ChunkSpools, WorkDirectory
from pipemax_spark.monitor.collector import SILENT_S, Collector
from pipemax_spark.monitor.engine_log import EngineLog
from pipemax_spark.monitor.findings import totals_of_run
from pipemax_spark.monitor.policy import PolicyNotes
from pipemax_spark.monitor.progress import Progress, Sample, SilenceWatch
from pipemax_spark.monitor.terminal import Terminal
from pipemax_spark.monitor.time_accounts import whole_account
from pipemax_spark.monitor.tracking import Tracker
from pipemax_spark.slots import slots_of
from pipemax_spark.storage.fence import Claim
from pipemax_spark.storage.tables import DeltaTable

_TRACKING_PERIOD_S = 30.0


class Run:
    """``with`` it; ``do`` each batch."""

    def __init__(
        self,
        spark: Any,
        options: JobOptions,
        terminal: Terminal,
        *,
        table: DeltaTable,
        plan: TaskPlan,
        work: WorkDirectory,
        params: Mapping[str, Any],
        manifest: Mapping[str, Any],
        expected_rows: int | None = None,
    ) -> None:
        """``params`` are for MLflow, ``manifest`` is what the next run must know of this one, should it die.
        ``expected_rows``: see ``ChunkRunner``."""
        self._spark = spark
        self._options = options
        self._terminal = terminal
        self._table = table
        self._plan = plan
        self._work = work
        self._params = params
        self._manifest = manifest
        self._expected_rows = expected_rows
        self._stack = ExitStack()
        self._collector: Collector | None = None
        self._policies: PolicyNotes | None = None
        self._progress: Progress | None = None
        self._lock = threading.Lock()
        self._runner: ChunkRunner | None = None
        self._stop_reason: str | None = None
        self._next_chunk = 0
        self._spools: ChunkSpools | None = None
        self._started_s = time.monotonic()
        self._next_logged_s = 0.0
        self._silence: SilenceWatch | None = None
        self.seconds = 0.0
        """From the first chunk's start to the last one's commit."""
        self.tracker = Tracker(
            options.mlflow_experiment, local_store=options.driver_dir / "mlflow", warn=terminal.warn
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stack.close()
        if kind is not None and self.has_begun:
            status = "KILLED" if issubclass(kind, KeyboardInterrupt) else "FAILED"
            self.tracker.finish(status, self.samples)

    @property
    def has_begun(self) -> bool:
        """There was something to do."""
        return self._collector is not None

    @property
    def samples(self) -> Sequence[Sample]:
        return [] if self._progress is None else self._progress.samples

    @property
    def engines(self) -> int:
        """Engine servers that have done rows."""
        return 0 if self._collector is None else self._collector.engines()

    @property
    def prefix_cache_hit_rate(self) -> float | None:
        return None if self._collector is None else hit_rate(self._collector.servers())

    @property
    def policies(self) -> list[dict[str, Any]]:
        """What the engines ran by, and why."""
        return [] if self._policies is None else self._policies.choices

    @property
    def directory(self) -> Path:
        """Where the driver keeps what it knows of this run."""
        return self._options.driver_dir / "runs" / self._plan.run_id

    def time_account(self) -> dict[str, float]:
        """Where the engines' time went: seconds by part, together ``seconds`` for each engine."""
        if self._collector is None:
            return {}
        return whole_account(self._collector.time_account(), engines=self.engines, seconds=self.seconds)

    def take_number(self) -> int:
        """A chunk's number, for a commit that is not one of ``do``."""
        self._next_chunk += 1
        return self._next_chunk - 1

    def do(
        self,
        rows: SlicedRows,
        claim: Claim,
        outcomes: Outcomes,
        *,
        origin: str = "",
    ) -> None:
        """Annotate and commit these rows, chunk by chunk; see ``ChunkRunner``."""
        collector, progress = self._begin(rows.rows)
        collector.expect(rows.rows)
        chunks = ChunkPlan(
            slice_rows=rows.slice_rows,
            slots=slots_of(self._spark).total,
            commit_every_s=self._options.commit_every_s,
            first_number=self._next_chunk,
        )
        reporting = replace(self._plan.options, collector=collector.address)
        runner = ChunkRunner(
            self._spark,
            rows=rows,
            chunks=chunks,
            source=self._options.source,
            overrides_column=self._options.overrides_column,
            plan=replace(self._plan, options=reporting),
            slots=lambda: slots_of(self._spark),
            note_chunk=self._work.note_chunk,
            spool=self._spools,
            claim=claim,
            outcomes=outcomes,
            origin=origin,
            after_commit=self._check_committed,
            expected_rows=self._expected_rows,
        )
        with self._lock:
            self._runner = runner
            if self._stop_reason is not None:
                raise JobFailedError(self._stop_reason)
        runner.run(progress.rows_per_s, collector.engine_rows, every_second=self._track)
        self._look_at_policies()  # a short batch may end before anyone looks
        self._next_chunk += len(chunks.chunks)
        self.seconds = time.monotonic() - self._started_s

    def _begin(self, rows: int) -> tuple[Collector, Progress]:
        """Once; after that only the number of rows grows."""
        if self._collector is not None and self._progress is not None:
            self._progress.expect(rows)
            return self._collector, self._progress
        context, slots = self._spark.sparkContext, slots_of(self._spark)
        self._terminal.say("Spark", f"{self._spark.version}, {context.master}, {slots.total} task slots")
        if slots.per_executor == 1:
            self._terminal.warn(
                "each executor runs one task at a time, so its engine runs dry at the end of every partition; give it "
                "more task slots (spark.executor.cores, or local[4] as the master), for tasks mostly wait"
            )
        self.tracker.start(self._plan.run_id, self._params)
        self._spools = self._make_spools()
        self._work.write_manifest(self._manifest)
        self._started_s = time.monotonic()
        engine_log = self._stack.enter_context(EngineLog(self.directory / "engine_metrics.parquet"))
        self._collector = self._stack.enter_context(
            Collector.for_session(
                self._spark, self._plan.run_id, port=self._options.collector_port, on_report=engine_log.add
            )
        )
        self._silence = SilenceWatch(
            self._collector,
            running_tasks=lambda: _running_tasks(self._spark),
            warn=self._terminal.warn,
            now_s=time.monotonic(),
        )
        self._policies = PolicyNotes(self._collector, self._terminal, self.tracker)
        show, period_s = self._stack.enter_context(self._terminal.progress_line())
        self._progress = self._stack.enter_context(
            Progress(
                self._collector,
                rows_total=rows,
                limits=self._options.error_limits,
                stop_job=self._stop,
                show=show,
                show_period_s=period_s,
                price_per_hour=self._options.price_per_hour,
            )
        )
        return self._collector, self._progress

    def _stop(self, reason: str) -> None:
        with self._lock:
            self._stop_reason = reason
            runner = self._runner
        if runner is not None:
            runner.cancel(reason)

    def _check_committed(self) -> None:
        """Stop where too many committed rows are error rows, for when no engine's report says so."""
        if self._collector is None or self._collector.silent_s() < SILENT_S:
            return
        totals = totals_of_run(self._table, self._plan.run_id)
        if reason := self._options.error_limits.reason_to_stop(totals.rows, totals.errors):
            self._stop(reason)

    def _look_at_policies(self) -> None:
        if self._policies is not None:
            self._policies.look()

    def _track(self) -> None:
        self._look_at_policies()
        if self._silence is not None:
            self._silence.look(time.monotonic())
        if time.monotonic() >= self._next_logged_s:
            self._next_logged_s = time.monotonic() + _TRACKING_PERIOD_S
            self.tracker.log_samples(self.samples)

    def _make_spools(self) -> ChunkSpools | None:
        path = self._work.spool_path
        if fault := spool_fault(path):
            self._terminal.warn(
                f"tasks cannot keep their completions in {path} ({fault}), so a failure costs those of the chunks that "
                "are not committed; give --work-dir a path that all executors see"
            )
            return None
        return self._work.chunk_spools()


def _running_tasks(spark: Any) -> int:
    tracker = spark.sparkContext.statusTracker()
    stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    return sum(stage.numActiveTasks for stage in stages if stage is not None)
