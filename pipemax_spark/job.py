"""The annotation job, step by step: read, check, fix what is left, run it in chunks, report.

The rows come in batches: the whole input is one, a stream has as many as it has to read. Whatever ends a run, the
next one finds what is left from the output table alone.
"""

import sys
import time
import uuid
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from pipemax_spark.annotate import ANNOTATION, annotated_schema, with_keys
from pipemax_spark.checks import Checked, check_job
from pipemax_spark.chunks import SlicedRows, number_of_slices, write_slices
from pipemax_spark.dry_run import print_dry_run
from pipemax_spark.errors import JobFailedError
from pipemax_spark.findings import RunTotals, find_results, run_totals
from pipemax_spark.hadoop import HadoopFiles
from pipemax_spark.incremental import Batch, MicroBatches
from pipemax_spark.left import check_ids, rows_left
from pipemax_spark.options import JobOptions
from pipemax_spark.prefix import PrefixShare, sample_by_beginning, shared_prefixes
from pipemax_spark.prompts import find_field
from pipemax_spark.recovery import commit_spooled
from pipemax_spark.report import Findings, Summary, print_report
from pipemax_spark.run import Run
from pipemax_spark.runner import Transactions, note_prefix
from pipemax_spark.slots import slots_of
from pipemax_spark.spec import AnnotationSpec
from pipemax_spark.tables import RUN_PROPERTY, DeltaTable, is_path, spec_property, spec_texts
from pipemax_spark.terminal import Terminal
from pipemax_spark.workdir import WorkDirectory

_FIXING_ATTEMPTS = 3
_REPORTED_CONF = (
    *("spark.master", "spark.executor.instances", "spark.executor.cores", "spark.executor.memory"),
    *("spark.task.cpus", "spark.executor.resource.gpu.amount", "spark.task.resource.gpu.amount"),
    *("spark.dynamicAllocation.enabled", "spark.speculation"),
)


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
        self._is_empty = False
        self._prefixes: PrefixShare | None = None

    def run(self) -> Summary | None:
        """The summary; None after a dry run. ``JobError`` for what the user can mend, ``JobFailedError`` for a job
        that ended itself."""
        options = self._options
        checked = check_job(self._spark, options, self._table, run_id=self._run_id, terminal=self._terminal)
        if options.is_dry_run:
            self._dry_run(checked)
            return None
        self._is_empty = self._make_output(checked)
        root = options.work_dir or f"{self._table.location().rstrip('/')}/_pipemax"
        with WorkDirectory(self._files, root, run_id=self._run_id, say=self._terminal.warn) as work:
            if options.retries_errors and not self._is_empty:
                self._delete_errors(checked.spec)
            run = Run(
                self._spark,
                options,
                self._terminal,
                table=self._table,
                plan=checked.plan,
                work=work,
                params=self._params(checked),
                manifest=self._manifest(checked),
                expected_rows=checked.reply.expected_rows,
            )
            version = self._table.version()
            with run, self._batches(checked, work) as batches:
                rows_in, skipped = self._do_batches(checked, work, run, batches)
                run.check_limits()
                engines, hit_rate = run.engines, run.prefix_cache_hit_rate
            if not run.has_begun:
                return self._nothing_to_do(checked, rows_in)
            totals = run_totals(self._table, self._run_id)
            summary = self._summarise(rows_in, skipped, version, run.seconds, engines, totals)
            summary = replace(summary, policies=run.policies, prefix_cache_hit_rate=hit_rate)
            return self._conclude(checked, summary, run, totals)

    def _dry_run(self, checked: Checked) -> None:
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

    def _make_output(self, checked: Checked) -> bool:
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

    def _batches(self, checked: Checked, work: WorkDirectory) -> AbstractContextManager[Iterable[Batch]]:
        options = self._options
        if not options.is_incremental:
            return nullcontext([Batch(rows=checked.source.rows)])
        return MicroBatches(
            self._spark,
            checked.source,
            checkpoints=options.checkpoint or work.checkpoints_path,
            spec_hash=checked.spec.hash,
            options=options.input_options,
            skips_changes=options.skips_changes,
        )

    def _do_batches(
        self, checked: Checked, work: WorkDirectory, run: Run, batches: Iterable[Batch]
    ) -> tuple[int, int]:
        """(rows of all batches, those of them that were done before)."""
        table_id = self._table.table_id()
        rows_in = skipped = 0
        for number, batch in enumerate(batches):
            rows = self._rows_of(checked, batch)
            rows_in += rows
            transactions = Transactions(table_id=table_id, run_id=self._run_id, stream=batch.stream)
            self._recover(checked, work, batch, transactions)
            sliced = self._fix_rows(checked, work.rows_path(number), batch, rows)
            if sliced is None:
                skipped += rows
                continue
            before = rows - sliced.rows if self._options.limit is None else self._done_rows(checked).count()
            skipped += before
            self._terminal.say(
                "Output", f"{self._table.name}: {before:,} rows done before, {sliced.rows:,} to do"
            )
            self._is_empty = False
            if not self._options.groups_by_prefix and self._prefixes is None:
                self._prefixes = self._shared_prefixes(batch, rows)
            run.do(sliced, transactions)
            work.delete_rows(number)
        work.drop_left_spools()
        return rows_in, skipped

    def _shared_prefixes(self, batch: Batch, rows: int) -> PrefixShare:
        text = self._options.source.text_column(batch.rows.schema)
        return shared_prefixes(sample_by_beginning(batch.rows, text, rows_in=rows))

    def _rows_of(self, checked: Checked, batch: Batch) -> int:
        if batch.stream is None:
            return checked.rows_in
        if checked.id_columns:
            check_ids(batch.rows, checked.id_columns)
        rows: int = batch.rows.count()
        self._terminal.say(
            "Stream", f"batch {batch.stream.batch_id}: {rows:,} rows were appended to the input"
        )
        return rows

    def _done_rows(self, checked: Checked, version: int | None = None) -> Any:
        return self._table.read(version=version).where(f"{ANNOTATION}.spec_hash = '{checked.spec.hash}'")

    def _fix_rows(self, checked: Checked, path: str, batch: Batch, rows_in: int) -> SlicedRows | None:
        """Write down what is left, and make this run the only one that may commit; None when nothing is left."""
        options, schema = self._options, checked.source.rows.schema
        slots = slots_of(self._spark).total
        for _ in range(_FIXING_ATTEMPTS):
            version = self._table.version()
            done = None if self._is_empty else self._done_rows(checked, version)
            left = rows_left(batch.rows, done, checked.id_columns, whole=batch.whole)
            # Of a stream's batch, as a rule nothing is done.
            expected = rows_in - (done.count() if done is not None and batch.stream is None else 0)
            if options.limit is not None:
                left, expected = left.limit(options.limit), min(expected, options.limit)
            slices = number_of_slices(expected, slots)
            keyed = with_keys(left, options.source, options.overrides_column)
            text, by_prefix = options.source.text_column(schema), options.groups_by_prefix
            write_slices(keyed, text, path, slices=slices, slots=slots, by_prefix=by_prefix)
            rows = SlicedRows(self._spark, path, schema, slices=slices, by_prefix=by_prefix)
            if rows.rows == 0:
                return None
            properties = {RUN_PROPERTY: self._run_id}
            if checked.spec.hash not in spec_texts(self._table.properties()):
                properties |= spec_property(checked.spec.hash, checked.spec.to_json(), self._run_id)
            self._table.set_properties(properties)
            if self._table.version() == version + 1:
                return rows
            # Someone committed between the look and the claim: those rows may be among what was left.
            self._files.delete(path)
        raise JobFailedError(f"others keep committing to {self._table.name!r}; run the job when they do not")

    def _recover(
        self, checked: Checked, work: WorkDirectory, batch: Batch, transactions: Transactions
    ) -> None:
        """Commit what dead runs had completed of these rows under this spec: a stream's first batch is the one that
        they had not finished."""
        for spool in work.left_spools:
            if spool.spec_hash != checked.spec.hash:
                continue
            # From here on the dead run, should it only have been paused, cannot commit.
            self._table.set_properties({RUN_PROPERTY: f"{self._run_id}, recovering {spool.run_id}"})
            left = rows_left(batch.rows, self._done_rows(checked), checked.id_columns, whole=batch.whole)
            rows = commit_spooled(
                self._spark,
                self._table,
                with_keys(left, self._options.source, self._options.overrides_column),
                spool,
                plan=checked.plan,
                transaction=transactions.recovery(spool.run_id),
            )
            self._terminal.say("", f"{rows:,} rows that run {spool.run_id} had completed were committed now")
        work.drop_left_spools()

    def _nothing_to_do(self, checked: Checked, rows_in: int) -> Summary:
        self._terminal.say("Output", f"{self._table.name}: nothing new to do, no engine was started")
        summary = Summary(rows_in=rows_in, rows_skipped=rows_in, output=self._table.name)
        self._finish(summary, self._find(checked), {})
        return summary

    # After.

    def _summarise(
        self, rows_in: int, skipped: int, version: int, seconds: float, engines: int, totals: RunTotals
    ) -> Summary:
        """``version`` of the output, from before the first commit."""
        committed = self._table.rows_committed(note_prefix(self._run_id), since_version=version)
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

    def _conclude(self, checked: Checked, summary: Summary, run: Run, totals: RunTotals) -> Summary:
        samples, tracker = run.samples, run.tracker
        run_dir = run.directory
        artifacts, places = [run_dir / "summary.json", run_dir / "engine_metrics.parquet"], {}
        account = {part: round(seconds, 3) for part, seconds in run.time_account().items()}
        summary = replace(summary, time_account_s=account)
        try:
            from pipemax_spark.plot import plot

            plot(samples, run_dir / "throughput.png")
            artifacts.append(run_dir / "throughput.png")
            places["Plot"] = str(run_dir / "throughput.png")
        except ImportError as error:
            self._terminal.warn(f"no plot was drawn, for matplotlib is not installed ({error})")
        summary = replace(summary, mlflow_run_id=tracker.run_id)
        summary.write(artifacts[0])
        advice = None if self._prefixes is None else self._prefixes.advice
        findings = replace(self._find(checked, totals), advice=advice)
        figures = {key: float(v) for key, v in asdict(summary).items() if isinstance(v, int | float)}
        figures |= {f"time_{part}_s": seconds for part, seconds in account.items()}
        if findings.accuracy is not None and findings.accuracy.rows:
            figures["accuracy"] = findings.accuracy.right / findings.accuracy.rows
        tracker.finish("FINISHED", samples, figures, artifacts)
        # A store that was slow at first may have said its run id only now.
        summary = replace(summary, mlflow_run_id=tracker.run_id)
        self._finish(summary, findings, {"MLflow run": tracker.place, **places})
        return summary

    def _find(self, checked: Checked, totals: RunTotals | None = None) -> Findings:
        """Without ``totals``, where this run has done nothing, only what all runs of the spec have."""
        return find_results(
            self._table,
            totals,
            spec_hash=checked.spec.hash,
            run_id=self._run_id,
            gold_column=self._options.gold_column,
            shown_columns=checked.id_columns,
        )

    def _finish(self, summary: Summary, findings: Findings, places: dict[str, str]) -> None:
        options = self._options
        if options.summary_file is not None:
            summary.write(options.summary_file)
        places = {"Delta table": summary.output, **places, "Logs": str(options.log_dir)}
        print_report(self._terminal.console, summary, findings, places, price_per_hour=options.price_per_hour)

    def _manifest(self, checked: Checked) -> dict[str, Any]:
        source = {"name": checked.source.name, "version": checked.source.version}
        return {"source": source, "spec_hash": checked.spec.hash, "spec": dict(checked.spec.values)}

    def _params(self, checked: Checked) -> dict[str, Any]:
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
