"""Run everything that accompanies the chunks of one run, from its first batch to its last.

This covers reports, progress, tracking and limits. A run has one batch, the whole input, or as many as a stream hands
out. Nothing starts before there are rows.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from pipemax_spark.errors import JobFailedError, LimitReachedError, TakenOverError, TooManyErrorsError
from pipemax_spark.job.description import input_table, run_description, run_manifest, run_params
from pipemax_spark.job.dry_run import known_speed
from pipemax_spark.job.job import Job
from pipemax_spark.job.limits import RunLimits
from pipemax_spark.job.preparing import Prepared
from pipemax_spark.job.runner import ChunkRunner
from pipemax_spark.report.collector import Collector, SilenceWatch, driver_hosts
from pipemax_spark.report.drift import Drift
from pipemax_spark.report.engine_log import ENGINE_METRICS, EngineLog
from pipemax_spark.report.engine_tracks import EngineTrack
from pipemax_spark.report.findings import totals_of_run
from pipemax_spark.report.metrics import RunMetrics, served
from pipemax_spark.report.policy_notes import PolicyNotes
from pipemax_spark.report.progress import Progress, ProgressLine
from pipemax_spark.report.report_totals import SILENT_S
from pipemax_spark.report.samples import Sample, in_rows
from pipemax_spark.report.summary import earlier_length_correlation
from pipemax_spark.report.time_accounts import whole_account
from pipemax_spark.report.tracking import Tracker
from pipemax_spark.rows.chunks import Chunk
from pipemax_spark.rows.prefix import hit_rate
from pipemax_spark.spark.jobs import jobs_of
from pipemax_spark.spark.slots import Slots, slots_of
from pipemax_spark.storage.executor_files import spool_fault_of

_TRACKING_PERIOD_S = 30.0


class StopSignal:
    """Stops the running chunks, and those that would follow, for a reason. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason: JobFailedError | None = None
        self._runner: ChunkRunner | None = None

    def stop(self, reason: JobFailedError) -> None:
        with self._lock:
            self._reason = reason
            runner = self._runner
        if runner is not None:
            runner.cancel(reason)

    def watch(self, runner: ChunkRunner) -> None:
        """Make this the runner that ``stop`` cancels. Raise the reason if it has come before the runner."""
        with self._lock:
            self._runner = runner
            if self._reason is not None:
                raise self._reason


def started_tracker(job: Job) -> Tracker:
    """Begin the job's run in MLflow."""
    options = job.options
    tracker = Tracker(
        options.mlflow_experiment, local_store=options.driver_dir / "mlflow", warn=job.terminal.warn
    )
    tracker.start(job.run_id, run_params(job), dataset=input_table(job), description=run_description(job))
    return tracker


@contextmanager
def begun_run(job: Job, prepared: Prepared, limits: RunLimits) -> Iterator["Run"]:
    """Yield a run whose collector listens, whose progress is shown and which MLflow knows, until the context ends.

    ``prepared`` are its first rows: the run after this one must know of them if this one dies.
    """
    options, terminal, slots = job.options, job.terminal, slots_of(job.spark)
    place = "over Spark Connect" if options.over_connect else job.spark.conf.get("spark.master")
    terminal.say("Spark", f"{job.spark.version}, {place}, {slots.total} task slots")
    if slots.per_executor == 1:
        terminal.warn(
            "each executor runs one task at a time, so its engine runs dry at the end of every partition; give it "
            "more task slots (spark.executor.cores, or local[4] as the master), because tasks mostly wait"
        )
    tracker = started_tracker(job)
    spool = _spool(job)
    job.work.write_manifest(run_manifest(job, prepared.reusable))
    signal = StopSignal()
    job.work.when_told_to_stop(
        lambda by: signal.stop(
            TakenOverError(
                f"run {by} has taken over the output {job.table.name} (--if-running take-over); what this run, "
                f"{job.run_id}, had committed stays"
            )
        )
    )
    run: Run | None = None
    try:
        with ExitStack() as stack:
            engine_log = stack.enter_context(EngineLog(job.directory / ENGINE_METRICS))
            collector = stack.enter_context(
                Collector.for_session(
                    job.spark, job.run_id, port=options.collector_port, on_report=engine_log.add
                )
            )
            show, period_s = stack.enter_context(terminal.progress_line())
            line = ProgressLine(
                show=show,
                period_s=period_s,
                prices=options.prices,
                unit="answers" if options.ask else "rows",
                limits_left=limits.left_text,
            )
            progress = Progress(
                collector,
                line,
                limits=options.error_limits,
                stop_job=lambda reason: signal.stop(TooManyErrorsError(reason)),
            )
            plan = job.checked.plan
            beats = job.work.heartbeat_path if options.over_connect else None
            plan = replace(
                plan, options=replace(plan.options, collector=collector.address), spool=spool, beats=beats
            )
            planned = replace(job, checked=replace(job.checked, plan=plan))
            run = Run(planned, collector, stack.enter_context(progress), tracker, signal, limits)
            if options.metrics_port is not None:
                _serve_metrics(stack, job, run, progress)
            yield run
    except LimitReachedError:
        raise  # it ends in order, with its own record
    except BaseException as error:
        status = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
        tracker.finish(status, [] if run is None else run.samples)
        raise


def _serve_metrics(stack: ExitStack, job: Job, run: "Run", progress: Progress) -> None:
    """Serve the run's figures to Prometheus until the context ends, and say where."""
    metrics = RunMetrics(
        run.collector, progress, lambda: run.committed_rows, run_id=job.run_id, output=job.table.name
    )
    host, bind_hosts = driver_hosts(job.spark)
    port = stack.enter_context(served(metrics, port=job.options.metrics_port or 0, hosts=bind_hosts))
    job.terminal.say("Metrics", f"http://{host}:{port}/metrics")


class Run:
    """One run from its first rows on. ``begun_run`` makes it, and ``do`` takes each batch."""

    def __init__(
        self,
        job: Job,
        collector: Collector,
        progress: Progress,
        tracker: Tracker,
        signal: StopSignal,
        limits: RunLimits,
    ) -> None:
        """Prepare the run. The job's plan names the collector, and the spool if tasks can keep completions."""
        self._job = job
        self._progress = progress
        self._signal = signal
        self._limits = limits
        self._silence = SilenceWatch(
            collector,
            running_tasks=jobs_of(job.spark).running_tasks,
            warn=job.terminal.warn,
            now_s=time.monotonic(),
        )
        self._started_s = time.monotonic()
        self._next_logged_s = 0.0
        self._per_row = max(1, len(job.options.ask))
        """The number of requests of a row, one for each question."""
        is_pipemax = job.checked.reply.engine.get("policy") == "pipemax"
        runs, output = job.directory.parent, job.table.name
        self._earlier_correlation = None if is_pipemax else earlier_length_correlation(runs, output)
        self._runners: list[ChunkRunner] = []
        self.collector = collector
        self.tracker = tracker
        self.policies = PolicyNotes(collector, job.terminal, tracker)
        self.warn_of_limit: Callable[[str], None] = job.terminal.warn
        """Takes the sentence that the run's limits will leave rows undone."""
        self.drift: Drift | None = None
        """What the comparison of a canary with the last run came to."""
        self.seconds = 0.0
        """Time from the run's start to its last commit."""
        self.used = ""
        """What the run's limits count until its last Spark job of rows has ended, in words."""
        self.prefix_cache_hit_rate: float | None = None
        """As the engines reported it when the last batch ended."""

    @property
    def samples(self) -> Sequence[Sample]:
        """The samples, counted in rows of the table; engines count requests."""
        return [in_rows(sample, requests_per_row=self._per_row) for sample in self._progress.samples]

    @property
    def tracks(self) -> Mapping[str, EngineTrack]:
        """Each engine server's track, for the charts; complete once the run has ended."""
        return self._progress.tracks.by_server

    @property
    def committed_rows(self) -> int:
        """The number of rows that this run has committed so far."""
        return sum(runner.committed_rows for runner in self._runners)

    def time_account(self) -> dict[str, float]:
        """Return where the engines' time went: seconds by part, which add up to ``seconds`` for each engine.

        Engines that have done no row count too: their start took the time of their machines.
        """
        servers = max(self.collector.engines(), self.collector.accounts.num_servers())
        return whole_account(self.collector.accounts.total(), engines=servers, seconds=self.seconds)

    def expect(self, rows: int) -> None:
        """Add ``rows`` to the rows to be done, for the progress line, the engines and the run's limits."""
        self._limits.expect(rows)
        self._progress.expect(rows * self._per_row)
        self.collector.expect(rows * self._per_row)

    def do(self, prepared: Prepared) -> int:
        """Annotate and commit these rows, chunk by chunk; return the number of the next chunk.

        Raise ``LimitReachedError`` if the run's limits leave some of them undone.
        """
        if not self._runners:
            speed = known_speed(self._job, self._job.checked) if self._limits.limits else None
            self._limits.say_forecast(self._job.terminal, speed, self._job.checked.reply)
        runner = ChunkRunner(self._job, prepared, self)
        self._runners.append(runner)
        self._signal.watch(runner)
        try:
            runner.run()
        except LimitReachedError:
            self._look_at_engines()
            raise
        finally:
            self.seconds = time.monotonic() - self._started_s
            self.used = self._limits.used()
        self._look_at_engines()
        return runner.next_chunk

    def _look_at_engines(self) -> None:
        self.policies.look()  # a short batch may end before the first check
        self.prefix_cache_hit_rate = hit_rate(self.collector.servers())

    # What the runner asks, and what it tells.

    def slots(self) -> Slots:
        """Return the task slots of the present executors."""
        return slots_of(self._job.spark)

    def rows_per_s(self) -> float | None:
        """Return the rate so far; None while it is unknown."""
        if self.collector.address is None:  # the steps of its commits tell no rate
            return None
        rate = self._progress.rows_per_s()
        return None if rate is None else rate / self._per_row

    def engine_rows(self) -> int | None:
        """Return how many rows an engine has room for; None while that is unknown."""
        room = self.collector.engine_rows()
        return None if room is None else max(1, room // self._per_row)

    def length_correlation(self) -> float | None:
        """Return the correlation of the lengths of prompts and answers; None while it is unknown."""
        return self.collector.length_correlation(earlier=self._earlier_correlation)

    def most_rows(self) -> int | None:
        """Return how many rows may still begin by the run's limits; None for any number."""
        return self._limits.most_rows()

    def longest_chunk_s(self) -> float | None:
        """Return how long a chunk may take; None for any time."""
        return self._limits.longest_chunk_s()

    def none_fits(self) -> LimitReachedError:
        """Return the end of a run of which no chunk may begin any more."""
        return self._limits.none_fits()

    def begun(self, chunk: Chunk) -> None:
        """Note that a chunk begins."""
        self._limits.begun(chunk.number, chunk.rows)

    def committed(self, chunk: Chunk) -> None:
        """Stop the job if too many committed rows are error rows, in case no engine's report says so."""
        self._limits.committed(chunk.number)
        self.collector.committed(chunk.rows * self._per_row)
        if self.collector.silent_s() < SILENT_S:
            return
        totals = totals_of_run(self._job.table, self._job.run_id)
        if reason := self._job.options.error_limits.reason_to_stop(totals.rows, totals.errors):
            self._signal.stop(TooManyErrorsError(reason))

    def every_second(self) -> None:
        """Look for what has changed; called about once a second, on the main thread."""
        self.policies.look()
        self._silence.look(time.monotonic())
        totals = self.collector.totals()
        reached = self._limits.look(
            rows=max(totals.rows_done // self._per_row, self.committed_rows),
            tokens=totals.prompt_tokens + totals.completion_tokens,
            spent=totals.spent,
            warn=self.warn_of_limit,
        )
        if reached is not None:
            self._signal.stop(reached)
        if time.monotonic() >= self._next_logged_s:
            self._next_logged_s = time.monotonic() + _TRACKING_PERIOD_S
            self.tracker.log_samples(self.samples)


def _spool(job: Job) -> str | None:
    """Return the directory of the run's completions; None, with a warning, if tasks cannot write there."""
    path = job.work.spool_path
    if fault := spool_fault_of(job.spark, path):
        job.terminal.warn(
            f"tasks cannot keep their completions in {path} ({fault}), so a failure loses those of uncommitted "
            "chunks; give --work-dir a path that all executors see"
        )
        return None
    return path
