"""The annotation job, step by step: read, check, fix what is left, run it in chunks, report.

Whatever ends a run, the next one finds what is left from the output table alone.
"""

import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from pipemax.wire import PreflightReply, PreflightRequest
from pipemax_spark.annotate import ANNOTATION, annotated_schema, with_keys
from pipemax_spark.chunks import ChunkPlan, SlicedRows, number_of_slices, write_slices
from pipemax_spark.client import EngineOptions
from pipemax_spark.collector import Collector
from pipemax_spark.dry_run import print_dry_run, sample_prompts
from pipemax_spark.errors import JobError, JobFailedError
from pipemax_spark.findings import find_results, run_totals
from pipemax_spark.hadoop import HadoopFiles
from pipemax_spark.left import check_columns, check_ids, rows_left
from pipemax_spark.options import JobOptions
from pipemax_spark.preflight import run_preflight
from pipemax_spark.progress import ErrorLimits, Progress, Sample
from pipemax_spark.prompts import find_field, resolve_column, resolve_names
from pipemax_spark.recovery import commit_spooled
from pipemax_spark.report import Findings, Summary, print_report
from pipemax_spark.runner import ChunkRunner, note_prefix, recovery_transaction
from pipemax_spark.slots import task_slots
from pipemax_spark.sources import Source, read_source
from pipemax_spark.spec import AnnotationSpec
from pipemax_spark.spool import spool_fault
from pipemax_spark.tables import RUN_PROPERTY, DeltaTable, is_path, spec_property, spec_texts
from pipemax_spark.task import TaskPlan
from pipemax_spark.terminal import Terminal
from pipemax_spark.tracking import Tracker
from pipemax_spark.workdir import ChunkSpools, WorkDirectory

_TRACKING_PERIOD_S = 10.0
_FIXING_ATTEMPTS = 3
_REPORTED_CONF = (
    *("spark.master", "spark.executor.instances", "spark.executor.cores", "spark.executor.memory"),
    *("spark.task.cpus", "spark.executor.resource.gpu.amount", "spark.task.resource.gpu.amount"),
    *("spark.dynamicAllocation.enabled", "spark.speculation"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checked:
    """What is known once everything that can be wrong beforehand has been looked at."""

    source: Source
    rows_in: int
    id_columns: tuple[str, ...]
    reply: PreflightReply
    spec: AnnotationSpec
    plan: TaskPlan


class AnnotationJob:
    """One run."""

    def __init__(self, spark: Any, options: JobOptions, console: Console) -> None:
        self._spark = spark
        self._options = options
        self._terminal = Terminal(console)
        self._run_id = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:8]}"
        self._files = HadoopFiles(spark)
        output = self._files.qualified(options.output) if is_path(options.output) else options.output
        self._table = DeltaTable(spark, output)

    def run(self) -> Summary | None:
        """The summary; None after a dry run. ``JobError`` for what the user can mend, ``JobFailedError`` for a job
        that ended itself."""
        checked = self._check()
        if self._options.is_dry_run:
            self._dry_run(checked)
            return None
        is_new = self._make_output(checked)
        root = self._options.work_dir or f"{self._table.location().rstrip('/')}/_pipemax"
        with WorkDirectory(self._files, root, run_id=self._run_id, say=self._terminal.warn) as work:
            if self._options.retries_errors and not is_new:
                self._delete_errors(checked.spec)
            self._recover(checked, work)
            rows = self._fix_rows(checked, work, is_new=is_new)
            if rows is None:
                return self._nothing_to_do(checked)
            return self._annotate(checked, work, rows)

    # Before any engine starts.

    def _check(self) -> _Checked:
        """Nothing is written yet."""
        options = self._options
        source = read_source(
            self._spark, options.input, file_format=options.input_format, options=options.input_options
        )
        schema = source.rows.schema
        plan = self._plan()
        annotated_schema(schema, plan)
        options.source.column(schema)
        for name in (options.gold_column, options.overrides_column):
            if name is not None:
                resolve_column(name, schema)
        id_columns = tuple(resolve_names(options.id_columns, schema))
        if self._table.exists():
            check_columns(schema, self._table.read().schema, id_columns)
        if id_columns:
            check_ids(source.rows, id_columns)
        rows_in = source.rows.count()
        self._terminal.say("Input", f"{source.description}: {rows_in:,} rows")
        request = PreflightRequest(
            engine=dict(options.engine),
            generation=options.generation,
            prompts=sample_prompts(source.rows, options.source, rows_in) if options.is_dry_run else [],
        )
        reply = run_preflight(self._spark, request, engine_python=options.engine_python)
        self._terminal.say(
            "Model", f"{reply.model}, prompt and output at most {reply.max_model_len:,} tokens"
        )
        spec = AnnotationSpec.of(reply, source=options.source, generation=options.generation)
        self._check_spec(spec)
        return _Checked(
            source=source,
            rows_in=rows_in,
            id_columns=id_columns,
            reply=reply,
            spec=spec,
            plan=replace(plan, spec_hash=spec.hash),
        )

    def _plan(self) -> TaskPlan:
        options = self._options
        is_local = self._spark.sparkContext.master.startswith("local")
        return TaskPlan(
            options=EngineOptions(
                engine=options.engine,
                generation=options.generation,
                job_id=self._run_id,
                engine_python=options.engine_python,
                # On other machines this path means nothing: servers log beside their sockets there.
                log_dir=str(options.log_dir) if is_local else None,
            ),
            spec_hash="",
            run_id=self._run_id,
            output_column=ANNOTATION,
            fails_on_error=options.fails_on_error,
        )

    def _check_spec(self, spec: AnnotationSpec) -> None:
        """``JobError`` where the output holds rows of another spec, unless that is allowed."""
        if not self._table.exists():
            return
        known = spec_texts(self._table.properties())
        if find_field(ANNOTATION, self._table.read().schema) is None:
            raise JobError(f"output {self._table.name!r} is a table without annotations; name another one")
        if not known or spec.hash in known or self._options.allows_new_spec:
            return
        latest = AnnotationSpec.from_json(list(known.values())[-1])
        raise JobError(
            f"output {self._table.name!r} holds rows that were annotated in another way: "
            f"{'; '.join(spec.changes_from(latest))}. Name another output, or give --new-spec to annotate all rows "
            f"anew beside the old ones ({ANNOTATION}.spec_hash tells them apart)"
        )

    def _dry_run(self, checked: _Checked) -> None:
        done = self._done_rows(checked) if self._table.exists() else None
        left = rows_left(checked.source.rows, done, checked.id_columns).count()
        print_dry_run(
            self._terminal,
            rows_in=checked.rows_in,
            rows_left=left,
            limit=self._options.limit,
            reply=checked.reply,
            max_tokens=self._options.generation.max_tokens,
            output=self._table.name,
        )

    # The output, and what is left.

    def _make_output(self, checked: _Checked) -> bool:
        """Make the table, or add what it lacks; true when it is new. All changes of its schema happen here: beside
        a running chunk they would make its commit fail."""
        schema = annotated_schema(checked.source.rows.schema, checked.plan)
        if not self._table.exists():
            self._table.create(schema)
            return True
        if checked.spec.hash not in spec_texts(self._table.properties()) or not _holds(
            self._table.read().schema, schema
        ):
            self._table.add_columns(schema)
        return False

    def _delete_errors(self, spec: AnnotationSpec) -> None:
        deleted = self._table.delete(
            f"{ANNOTATION}.spec_hash = '{spec.hash}' AND {ANNOTATION}.error IS NOT NULL"
        )
        self._terminal.say("", f"{deleted:,} error rows were taken out of the output, to be tried again")

    def _done_rows(self, checked: _Checked, version: int | None = None) -> Any:
        return self._table.read(version=version).where(f"{ANNOTATION}.spec_hash = '{checked.spec.hash}'")

    def _fix_rows(self, checked: _Checked, work: WorkDirectory, *, is_new: bool) -> SlicedRows | None:
        """Write down what is left, and make this run the only one that may commit; None when nothing is left."""
        options, source = self._options, checked.source
        slots = task_slots(self._spark)
        for _ in range(_FIXING_ATTEMPTS):
            version = self._table.version()
            done = None if is_new else self._done_rows(checked, version)
            left = rows_left(source.rows, done, checked.id_columns)
            expected = checked.rows_in - (done.count() if done is not None else 0)
            if options.limit is not None:
                left, expected = left.limit(options.limit), min(expected, options.limit)
            slices = number_of_slices(expected, slots)
            text = options.source.text_column(source.rows.schema)
            keyed = with_keys(left, options.source, options.overrides_column)
            write_slices(keyed, text, work.rows_path, slices=slices, slots=slots)
            rows = SlicedRows(self._spark, work.rows_path, source.rows.schema, slices=slices)
            if rows.rows == 0:
                return None
            properties = {RUN_PROPERTY: self._run_id}
            if checked.spec.hash not in spec_texts(self._table.properties()):
                properties |= spec_property(checked.spec.hash, checked.spec.to_json(), self._run_id)
            self._table.set_properties(properties)
            if self._table.version() == version + 1:
                return rows
            # Someone committed between the look and the claim: those rows may be among what was left.
            self._files.delete(work.rows_path)
        raise JobFailedError(f"others keep committing to {self._table.name!r}; run the job when they do not")

    def _recover(self, checked: _Checked, work: WorkDirectory) -> None:
        """Commit what dead runs had completed under this spec."""
        for spool in work.left_spools:
            if spool.spec_hash != checked.spec.hash:
                continue
            # From here on the dead run, should it only have been paused, cannot commit.
            self._table.set_properties({RUN_PROPERTY: f"{self._run_id}, recovering {spool.run_id}"})
            left = rows_left(checked.source.rows, self._done_rows(checked), checked.id_columns)
            rows = commit_spooled(
                self._spark,
                self._table,
                with_keys(left, self._options.source, self._options.overrides_column),
                spool,
                plan=checked.plan,
                transaction=recovery_transaction(self._table.table_id(), spool.run_id),
            )
            self._terminal.say("", f"{rows:,} rows that run {spool.run_id} had completed were committed now")
        work.drop_left_spools()

    def _spools(self, work: WorkDirectory) -> ChunkSpools:
        if fault := spool_fault(work.spool_path):
            self._terminal.warn(
                f"tasks cannot keep their completions in {work.spool_path} ({fault}), so a failure costs those of the "
                "chunks that are not committed; give --work-dir a path that all executors see"
            )
            return ChunkSpools(self._files, None)
        return ChunkSpools(self._files, work.spool_path)

    def _nothing_to_do(self, checked: _Checked) -> Summary:
        self._terminal.say("Output", f"{self._table.name}: nothing new to do, no engine was started")
        summary = Summary(rows_in=checked.rows_in, rows_skipped=checked.rows_in, output=self._table.name)
        self._finish(summary, self._find(checked, shows_sample=False), {})
        return summary

    # Running.

    def _annotate(self, checked: _Checked, work: WorkDirectory, rows: SlicedRows) -> Summary:
        options, slots = self._options, task_slots(self._spark)
        skipped = checked.rows_in - rows.rows if options.limit is None else self._done_rows(checked).count()
        self._terminal.say("Output", f"{self._table.name}: {skipped:,} rows done before, {rows.rows:,} to do")
        self._terminal.say(
            "Spark", f"{self._spark.version}, {self._spark.sparkContext.master}, {slots} task slots"
        )
        tracker = Tracker(
            options.mlflow_experiment, local_store=options.driver_dir / "mlflow", warn=self._terminal.warn
        )
        tracker.start(self._run_id, self._params(checked))
        rows_version = self._table.version()
        chunks = ChunkPlan(
            rows=rows.rows, slices=rows.slices, slots=slots, commit_every_s=options.commit_every_s
        )
        status, progress = "FAILED", None
        started_s = time.monotonic()
        try:
            with Collector.for_session(self._spark, self._run_id, rows_total=rows.rows) as collector:
                reporting = replace(checked.plan.options, collector=collector.address)
                runner = ChunkRunner(
                    self._spark,
                    table=self._table,
                    rows=rows,
                    chunks=chunks,
                    source=options.source,
                    overrides_column=options.overrides_column,
                    plan=replace(checked.plan, options=reporting),
                    slots=slots,
                    note_chunk=lambda: work.write_manifest(self._manifest(checked), chunks.chunks),
                    spool=self._spools(work),
                )
                with self._progress(collector, rows.rows, runner) as progress:
                    self._run_chunks(runner, progress, tracker)
                # A short job may end before anyone looks.
                if reason := self._limits().reason_to_stop(collector.totals()):
                    raise JobFailedError(reason)
                engines = collector.engines()
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            samples = [] if progress is None else progress.samples
            if status != "FINISHED":
                tracker.finish(status, samples)
        seconds = time.monotonic() - started_s
        committed = self._table.rows_committed(note_prefix(self._run_id), since_version=rows_version)
        summary = self._summarise(checked.rows_in, skipped, committed, seconds, engines)
        return self._conclude(checked, summary, samples, tracker)

    def _run_chunks(self, runner: ChunkRunner, progress: Progress, tracker: Tracker) -> None:
        next_logged_s = 0.0

        def track() -> None:
            nonlocal next_logged_s
            if time.monotonic() >= next_logged_s:
                next_logged_s = time.monotonic() + _TRACKING_PERIOD_S
                tracker.log_samples(progress.samples)

        runner.run(progress.rows_per_s, every_second=track)

    def _limits(self) -> ErrorLimits:
        return ErrorLimits(max_rate=self._options.max_error_rate, fails_on_first=self._options.fails_on_error)

    @contextmanager
    def _progress(self, collector: Collector, rows: int, runner: ChunkRunner) -> Iterator[Progress]:
        options = self._options
        with (
            self._terminal.progress_line() as (show, period_s),
            Progress(
                collector,
                rows_total=rows,
                limits=self._limits(),
                stop_job=runner.cancel,
                show=show,
                show_period_s=period_s,
                price_per_hour=options.price_per_hour,
            ) as progress,
        ):
            yield progress

    # After.

    def _summarise(self, rows_in: int, skipped: int, committed: int, seconds: float, engines: int) -> Summary:
        totals = run_totals(self._table, self._run_id)
        return Summary(
            rows_in=rows_in,
            rows_out=committed,
            rows_error=totals.rows_error,
            rows_skipped=skipped,
            prompt_tokens=totals.prompt_tokens,
            completion_tokens=totals.completion_tokens,
            seconds=round(seconds, 3),
            rows_per_s=round(committed / seconds, 3),
            tokens_per_s=round(totals.completion_tokens / seconds, 3),
            output=self._table.name,
            engines=engines,
        )

    def _conclude(
        self, checked: _Checked, summary: Summary, samples: Sequence[Sample], tracker: Tracker
    ) -> Summary:
        run_dir = self._options.driver_dir / "runs" / self._run_id
        artifacts, places = [run_dir / "summary.json"], {}
        try:
            from pipemax_spark.plot import plot

            plot(samples, run_dir / "throughput.png")
            artifacts.append(run_dir / "throughput.png")
            places["Plot"] = str(run_dir / "throughput.png")
        except ImportError as error:
            self._terminal.warn(f"no plot was drawn, for matplotlib is not installed ({error})")
        summary = replace(summary, mlflow_run_id=tracker.run_id)
        summary.write(artifacts[0])
        findings = self._find(checked, shows_sample=True)
        figures = {key: float(v) for key, v in asdict(summary).items() if isinstance(v, int | float)}
        if findings.accuracy is not None and findings.accuracy.rows:
            figures["accuracy"] = findings.accuracy.right / findings.accuracy.rows
        tracker.finish("FINISHED", samples, figures, artifacts)
        # A store that was slow at first may have said its run id only now.
        summary = replace(summary, mlflow_run_id=tracker.run_id)
        self._finish(summary, findings, {"MLflow run": tracker.place, **places})
        return summary

    def _find(self, checked: _Checked, *, shows_sample: bool) -> Findings:
        return find_results(
            self._table,
            spec_hash=checked.spec.hash,
            run_id=self._run_id,
            gold_column=self._options.gold_column,
            shown_columns=checked.id_columns,
            shows_sample=shows_sample,
        )

    def _finish(self, summary: Summary, findings: Findings, places: dict[str, str]) -> None:
        options = self._options
        if options.summary_file is not None:
            summary.write(options.summary_file)
        places = {"Delta table": summary.output, **places, "Logs": str(options.log_dir)}
        print_report(self._terminal.console, summary, findings, places, price_per_hour=options.price_per_hour)

    def _manifest(self, checked: _Checked) -> dict[str, Any]:
        source = {"name": checked.source.name, "version": checked.source.version}
        return {"source": source, "spec_hash": checked.spec.hash, "spec": dict(checked.spec.values)}

    def _params(self, checked: _Checked) -> dict[str, Any]:
        conf = self._spark.sparkContext.getConf()
        generation = asdict(self._options.generation)
        return {
            "run": self._run_id,
            "spec_hash": checked.spec.hash,
            "input": checked.source.name,
            "input_version": checked.source.version,
            "output": self._table.name,
            "model_fingerprint": checked.reply.model_fingerprint,
            **{f"engine.{name}": value for name, value in checked.reply.engine.items()},
            **{f"generation.{name}": value for name, value in generation.items()},
            **{name: conf.get(name) for name in _REPORTED_CONF if conf.get(name) is not None},
            "version.spark": self._spark.version,
            "version.python": sys.version.split()[0],
            **{f"version.{name}": version for name, version in checked.reply.versions.items()},
        }


def _holds(table_schema: Any, needed: Any) -> bool:
    """The table has all top-level columns."""
    return all(find_field(name, table_schema) is not None for name in needed.names)
