"""Run everything that accompanies the chunks of one run, from its first batch to its last.

This covers reports, progress, tracking and limits. A run has one batch, the whole input, or as many as a stream hands
out. Nothing starts before there are rows.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipemax_spark.errors import JobFailedError, TakenOverError, TooManyErrorsError
from pipemax_spark.executor.spool import spool_fault
from pipemax_spark.executor.task import TaskPlan
from pipemax_spark.job.outcomes import Outcomes
from pipemax_spark.job.runner import ChunkRunner
from pipemax_spark.options import JobOptions
from pipemax_spark.report.collector import Collector
from pipemax_spark.report.engine_log import EngineLog
from pipemax_spark.report.engine_tracks import EngineTrack
from pipemax_spark.report.findings import totals_of_run
from pipemax_spark.report.policy_notes import PolicyNotes
from pipemax_spark.report.progress import Progress, Sample, SilenceWatch, in_rows
from pipemax_spark.report.report_totals import SILENT_S
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.report.time_accounts import whole_account
from pipemax_spark.report.tracking import InputTable, Tracker
from pipemax_spark.rows.chunks import ChunkPlan, SlicedRows
from pipemax_spark.rows.prefix import hit_rate
from pipemax_spark.rows.workdir import ChunkSpools, WorkDirectory
from pipemax_spark.spark.slots import slots_of
from pipemax_spark.storage.fence import Claim
from pipemax_spark.storage.output_table import OutputTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TRACKING_PERIOD_S = 30.0


class StopSignal:
    """Stops the running chunks, and those that would follow, for a reason. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason: tuple[str, type[JobFailedError]] | None = None
        self._runner: ChunkRunner | None = None

    def stop(self, reason: str, kind: type[JobFailedError]) -> None:
        with self._lock:
            self._reason = reason, kind
            runner = self._runner
        if runner is not None:
            runner.cancel(reason, kind)

    def watch(self, runner: ChunkRunner) -> None:
        """Make this the runner that ``stop`` cancels. Raise the reason if it has come before the runner."""
        with self._lock:
            self._runner = runner
            if self._reason is not None:
                reason, kind = self._reason
                raise kind(reason)


@contextmanager
def begun_run(
    spark: "SparkSession",
    options: JobOptions,
    terminal: Terminal,
    *,
    table: OutputTable,
    plan: TaskPlan,
    work: WorkDirectory,
    params: Mapping[str, Any],
    read: InputTable,
    description: str,
    manifest: Mapping[str, Any],
    expected_rows: int | None = None,
) -> Iterator["Run"]:
    """Yield a run whose collector listens, whose progress is shown and which MLflow knows, until the context ends.

    ``params``, ``read`` and ``description`` are for MLflow, ``manifest`` is what the next run must know of this one if
    it dies. ``expected_rows``: see ``ChunkRunner``.
    """
    slots = slots_of(spark)
    terminal.say("Spark", f"{spark.version}, {spark.sparkContext.master}, {slots.total} task slots")
    if slots.per_executor == 1:
        terminal.warn(
            "each executor runs one task at a time, so its engine runs dry at the end of every partition; give it "
            "more task slots (spark.executor.cores, or local[4] as the master), because tasks mostly wait"
        )
    tracker = Tracker(
        options.mlflow_experiment, local_store=options.driver_dir / "mlflow", warn=terminal.warn
    )
    tracker.start(plan.run_id, params, read=read, description=description)
    spools = _chunk_spools(work, terminal)
    work.write_manifest(manifest)
    directory = options.driver_dir / "runs" / plan.run_id
    signal = StopSignal()
    work.when_told_to_stop(
        lambda by: signal.stop(
            f"run {by} has taken over the output {table.name} (--if-running take-over); what this run, "
            f"{plan.run_id}, had committed stays",
            TakenOverError,
        )
    )
    run: Run | None = None
    try:
        with ExitStack() as stack:
            engine_log = stack.enter_context(EngineLog(directory / "engine_metrics.parquet"))
            collector = stack.enter_context(
                Collector.for_session(
                    spark, plan.run_id, port=options.collector_port, on_report=engine_log.add
                )
            )
            show, period_s = stack.enter_context(terminal.progress_line())
            progress = stack.enter_context(
                Progress(
                    collector,
                    rows_total=0,
                    limits=options.error_limits,
                    stop_job=lambda reason: signal.stop(reason, TooManyErrorsError),
                    show=show,
                    show_period_s=period_s,
                    price_per_hour=options.price_per_hour,
                    unit="answers" if options.ask else "rows",
                )
            )
            run = Run(
                spark,
                options,
                terminal,
                table=table,
                plan=replace(plan, options=replace(plan.options, collector=collector.address)),
                work=work,
                spools=spools,
                tracker=tracker,
                collector=collector,
                progress=progress,
                signal=signal,
                directory=directory,
                expected_rows=expected_rows,
            )
            yield run
    except BaseException as error:
        status = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
        tracker.finish(status, [] if run is None else run.samples)
        raise


class Run:
    """One run from its first rows on. ``begun_run`` makes it, and ``do`` takes each batch."""

    def __init__(
        self,
        spark: "SparkSession",
        options: JobOptions,
        terminal: Terminal,
        *,
        table: OutputTable,
        plan: TaskPlan,
        work: WorkDirectory,
        spools: ChunkSpools | None,
        tracker: Tracker,
        collector: Collector,
        progress: Progress,
        signal: StopSignal,
        directory: Path,
        expected_rows: int | None,
    ) -> None:
        self._spark = spark
        self._options = options
        self._table = table
        self._plan = plan
        self._work = work
        self._spools = spools
        self._collector = collector
        self._progress = progress
        self._signal = signal
        self._expected_rows = expected_rows
        self._policies = PolicyNotes(collector, terminal, tracker)
        self._silence = SilenceWatch(
            collector,
            running_tasks=lambda: _running_tasks(spark),
            warn=terminal.warn,
            now_s=time.monotonic(),
        )
        self._started_s = time.monotonic()
        self._next_logged_s = 0.0
        self.tracker = tracker
        self.directory = directory
        """The driver's directory for this run."""
        self.seconds = 0.0
        """Time from the run's start to its last commit."""
        self._runners: list[ChunkRunner] = []

    @property
    def samples(self) -> Sequence[Sample]:
        """The samples, counted in rows of the table; engines count requests."""
        return [in_rows(sample, requests_per_row=self._per_row) for sample in self._progress.samples]

    @property
    def _per_row(self) -> int:
        """The number of requests of a row, one for each question."""
        return max(1, len(self._options.ask))

    @property
    def tracks(self) -> Mapping[str, EngineTrack]:
        """Each engine server's track, for the charts; complete once the run has ended."""
        return self._progress.tracks.by_server

    @property
    def committed_rows(self) -> int:
        """The number of rows that this run has committed so far."""
        return sum(runner.committed_rows for runner in self._runners)

    @property
    def engines(self) -> int:
        """The number of engine servers that have done rows."""
        return self._collector.engines()

    @property
    def prefix_cache_hit_rate(self) -> float | None:
        return hit_rate(self._collector.servers())

    @property
    def policies(self) -> list[dict[str, Any]]:
        """The policies that the engines ran by, and why."""
        return self._policies.choices

    @property
    def replicas(self) -> list[dict[str, Any]]:
        """What each replica of the engines has done; empty for engines without replicas."""
        return self._collector.replicas()

    @property
    def engine_rates(self) -> list[dict[str, Any]]:
        """How fast each engine was, the slowest first."""
        return self._collector.engine_rates()

    @property
    def rows_reused(self) -> int:
        """Rows that took the answer of an equal request, as far as the engines have reported it."""
        return self._collector.totals().rows_reused

    def time_account(self) -> dict[str, float]:
        """Return where the engines' time went: seconds by part, which add up to ``seconds`` for each engine.

        Engines that have done no row count too: their start took the time of their machines.
        """
        servers = max(self.engines, self._collector.accounted_servers())
        return whole_account(self._collector.time_account(), engines=servers, seconds=self.seconds)

    def drain_at_full_rate_s(self) -> float | None:
        """See ``Summary``."""
        return self._collector.drain_at_full_rate_s()

    def do(
        self,
        rows: SlicedRows,
        claim: Claim,
        outcomes: Outcomes,
        *,
        first_chunk: int,
        origin: str = "",
    ) -> int:
        """Annotate and commit these rows, chunk by chunk; return the number of the next chunk.

        The chunks are numbered from ``first_chunk`` on; see ``ChunkRunner``.
        """
        per_row = self._per_row
        self._progress.expect(rows.rows * per_row)
        self._collector.expect(rows.rows * per_row)
        chunks = ChunkPlan(
            slice_rows=rows.slice_rows,
            slots=slots_of(self._spark).total,
            commit_every_s=self._options.commit_every.total_seconds(),
            first_number=first_chunk,
        )
        runner = ChunkRunner(
            self._spark,
            rows=rows,
            chunks=chunks,
            request_columns=self._options.request_columns,
            plan=self._plan,
            slots=lambda: slots_of(self._spark),
            note_chunk=self._work.note_chunk,
            spool=self._spools,
            claim=claim,
            outcomes=outcomes,
            origin=origin,
            after_commit=self._check_committed,
            expected_rows=self._expected_rows,
        )
        self._runners.append(runner)
        self._signal.watch(runner)
        runner.run(
            lambda: None if (rate := self._progress.rows_per_s()) is None else rate / per_row,
            lambda: None if (room := self._collector.engine_rows()) is None else max(1, room // per_row),
            every_second=self._track,
            length_correlation=self._collector.length_correlation,
        )
        self._policies.look()  # a short batch may end before the first check
        self.seconds = time.monotonic() - self._started_s
        return first_chunk + len(chunks.chunks)

    def _check_committed(self) -> None:
        """Stop the job if too many committed rows are error rows, in case no engine's report says so."""
        if self._collector.silent_s() < SILENT_S:
            return
        totals = totals_of_run(self._table, self._plan.run_id)
        if reason := self._options.error_limits.reason_to_stop(totals.rows, totals.errors):
            self._signal.stop(reason, TooManyErrorsError)

    def _track(self) -> None:
        self._policies.look()
        self._silence.look(time.monotonic())
        if time.monotonic() >= self._next_logged_s:
            self._next_logged_s = time.monotonic() + _TRACKING_PERIOD_S
            self.tracker.log_samples(self.samples)


def _chunk_spools(work: WorkDirectory, terminal: Terminal) -> ChunkSpools | None:
    path = work.spool_path
    if fault := spool_fault(path):
        terminal.warn(
            f"tasks cannot keep their completions in {path} ({fault}), so a failure loses those of uncommitted "
            "chunks; give --work-dir a path that all executors see"
        )
        return None
    return work.chunk_spools()


def _running_tasks(spark: "SparkSession") -> int:
    tracker = spark.sparkContext.statusTracker()
    stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
    return sum(stage.numActiveTasks for stage in stages if stage is not None)
