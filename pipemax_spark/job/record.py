"""Record a run of the job, for MLflow and the next run, for the scheduler, and for people.

Everything is counted in the output table, so a run's totals do not depend on which reports reached the driver.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipemax_spark.errors import EndedBy, cause_of
from pipemax_spark.job.run import Run
from pipemax_spark.options import JobOptions
from pipemax_spark.report.charts import charts_of, picture_of
from pipemax_spark.report.findings import (
    CommittedTotals,
    find_results,
    last_run,
    totals_of_run,
    totals_of_spec,
)
from pipemax_spark.report.report_page import report_page
from pipemax_spark.report.summary import Findings, Summary, print_report
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.report.time_accounts import working_seconds
from pipemax_spark.report.tracking import InputTable
from pipemax_spark.request.error_limits import tell_high_share
from pipemax_spark.rows.checked import Checked
from pipemax_spark.rows.written_rows import WrittenRows
from pipemax_spark.storage.fence import recovered_by
from pipemax_spark.storage.hadoop import write_file
from pipemax_spark.storage.output_table import OutputTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_REPORTED_CONF = (
    *("spark.master", "spark.executor.instances", "spark.executor.cores", "spark.executor.memory"),
    *("spark.task.cpus", "spark.executor.resource.gpu.amount", "spark.task.resource.gpu.amount"),
    *("spark.dynamicAllocation.enabled", "spark.speculation"),
)


_ARTIFACTS = ("summary.json", "engine_metrics.parquet", "throughput.svg", "report.html")
"""Files of a run's directory that MLflow gets, as far as they are there."""


@dataclass(slots=True)
class RowCounts:
    """Row counts over all batches of a run; at its end each row is in exactly one of skipped, left_out and done."""

    rows_in: int = 0
    skipped: int = 0
    """Done by earlier runs."""
    left_out: int = 0
    """Beyond ``--limit``."""
    to_do: int | None = None
    """Found to be done by this run, committed or not; None as long as nothing was looked for."""
    done: int = 0
    """Committed by this run, and found in the table's history."""
    recovered_runs: Sequence[str] = ()
    """The dead runs of which this run has committed rows; these are among ``skipped``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Records what a run is and how it ended."""

    spark: "SparkSession"
    options: JobOptions
    terminal: Terminal
    table: OutputTable
    run_id: str
    checked: Checked

    def params(self) -> dict[str, Any]:
        """Return the run's parameters for MLflow."""
        conf = self.spark.sparkContext.getConf()
        generation = asdict(self.options.generation)
        return {
            "run": self.run_id,
            "spec_hash": self.checked.spec.hash,
            "input": self.checked.source.name,
            "input_version": self.checked.source.version,
            **({} if self.options.where is None else {"where": self.options.where}),
            "output": self.table.name,
            "model_fingerprint": self.checked.reply.model_fingerprint,
            **{f"engine.{name}": value for name, value in self.checked.reply.engine.items()},
            **{f"generation.{name}": value for name, value in generation.items()},
            **{f"ask.{question.name}": question.template for question in self.options.ask},
            **{name: conf.get(name) for name in _REPORTED_CONF if conf.get(name) is not None},
            "version.spark": self.spark.version,
            "version.python": sys.version.split()[0],
            **{f"version.{name}": version for name, version in self.checked.reply.versions.items()},
        }

    def read_table(self) -> InputTable:
        """Return the input as MLflow's dataset. Files and views have no version: the run's id stands for one."""
        source = self.checked.source
        if source.version is None:
            return InputTable(name=source.name, version=self.run_id, kind="spark")
        kind = "delta_table" if source.tells_appends else "spark"
        return InputTable(name=source.name, version=str(source.version), kind=kind)

    def description(self) -> str:
        """Return what the run does, in five lines of Markdown, for the top of its page in MLflow."""
        options, source, engine = self.options, self.checked.source, self.checked.reply.engine
        version = "" if source.version is None else f", version {source.version}"
        prompt = (
            options.source.template or options.source.prompt_column or options.source.messages_column or ""
        )
        generation = options.generation
        shape = "free text" if generation.response_format is None else "answers that follow a schema"
        generates = f"{shape}, up to {generation.max_tokens} tokens, temperature {generation.temperature:g}"
        stages = engine.get("pipeline_parallel_size") or "as many stages as fit"
        return "\n".join(
            [
                f"- **Reads** `{source.name}`{version}: {self.checked.rows_in:,} rows",
                f"- **Writes** `{self.table.name}`",
                f"- **Model** `{engine.get('model')}`, policy `{engine.get('policy')}`, stages: {stages}",
                f"- **Prompt** `{' '.join(prompt.split())[:200]}`",
                f"- **Task** {generation.task}" if generation.is_pooling else f"- **Generates** {generates}",
            ]
        )

    def manifest(self, rows: WrittenRows | None) -> dict[str, Any]:
        """Return what the next run must know about this one if it dies; ``rows`` are those that it could reuse."""
        source = {"name": self.checked.source.name, "version": self.checked.source.version}
        return {
            "source": source,
            "spec_hash": self.checked.spec.hash,
            "spec": dict(self.checked.spec.values),
            "rows": None if rows is None else rows.for_manifest(),
        }

    def compact(self) -> None:
        """Join the output's small files. The rows are committed, so a failure costs a warning only."""
        try:
            before, after = self.table.compact()
        except Exception as error:
            self.terminal.warn(f"small files of {self.table.name} were not compacted: {cause_of(error)}")
            return
        self.terminal.say("Files", f"{before:,} small files were compacted into {after:,}")

    def too_many_errors(self, of_run: CommittedTotals | None, recovered_runs: Sequence[str]) -> str | None:
        """Return why the job must fail because of its error rows, or None.

        A run is judged by the rows that it has committed, its own and those of dead runs that it has recovered. A run
        that found nothing to do, whose totals are None, judges the last one again, so that it does not turn it green.
        The rows in the table count, not what engines have reported.
        """
        limits, name = self.options.error_limits, self.table.name
        reason = None
        if of_run is not None:
            reason = limits.reason_to_fail(of_run.rows, of_run.errors)
        if reason is not None:
            return reason
        if limits.fails_on_first:
            of_spec = totals_of_spec(self.table, self.checked.spec.hash)
            reason = limits.reason_to_fail(of_spec.rows, of_spec.errors, of=f" in {name}")
        else:
            runs = recovered_runs if of_run is not None else self._last_runs(recovered_runs)
            for run_id in runs:
                of_other = totals_of_run(self.table, run_id)
                of = f" in {name}, written by run {run_id},"
                reason = reason or limits.reason_to_fail(of_other.rows, of_other.errors, of=of)
        return reason and f"{reason}. --retry-errors retries the error rows"

    def _last_runs(self, recovered_runs: Sequence[str]) -> Sequence[str]:
        """Return the last run that has left rows under the spec, and the dead runs that it has recovered."""
        last = last_run(self.table, self.checked.spec.hash)
        if recovered_runs or last is None:
            return recovered_runs
        return [last, *recovered_by(self.table, last)]

    def summarise(
        self, counts: RowCounts, seconds: float, engines: int, totals: CommittedTotals, *, has_failed: bool
    ) -> Summary:
        """Return the totals of a run that has ended. ``seconds`` is its duration with the engines' start.

        ``has_failed`` tells whether it has too many error rows.
        """
        return Summary(
            complete=not counts.left_out,
            rows_left=counts.left_out,
            ended_by=_ended_by(counts, has_failed=has_failed),
            rows_in=counts.rows_in,
            rows_out=counts.done,
            rows_error=totals.rows_error,
            rows_skipped=counts.skipped,
            rows_left_out=counts.left_out,
            prompt_tokens=totals.prompt_tokens,
            completion_tokens=totals.completion_tokens,
            reasoning_tokens=totals.reasoning_tokens,
            rows_retried=totals.rows_retried,
            extra_attempts=totals.extra_attempts,
            seconds=round(seconds, 3),
            rows_per_s=round(counts.done / seconds, 3),
            tokens_per_s=round(totals.completion_tokens / seconds, 3),
            output=self.table.name,
            output_format=self.table.format_name,
            engines=engines,
        )

    def conclude(
        self, summary: Summary, run: Run, totals: CommittedTotals, *, advice: str | None, status: str
    ) -> Summary:
        """Write and print the result of the run; return the summary with the facts that are known only now.

        ``advice`` ends the report, ``status`` is MLflow's.
        """
        samples, tracker = run.samples, run.tracker
        run_dir = run.directory
        places: dict[str, str] = {}
        account = {part: round(seconds, 3) for part, seconds in run.time_account().items()}
        drain_s = run.drain_at_full_rate_s()
        summary = replace(
            summary,
            rows_reused=min(run.rows_reused, summary.rows_out * max(1, len(self.options.ask))),
            time_account_s=account,
            working_rows_per_s=round(summary.rows_out / working_seconds(account, seconds=summary.seconds), 3),
            replicas=run.replicas,
            engine_rates=run.engine_rates,
            drain_at_full_rate_s=None if drain_s is None else round(drain_s, 3),
        )
        self._write(run_dir / "throughput.svg", picture_of(run.tracks))
        summary = replace(summary, mlflow_run_id=tracker.run_id)
        self._write(run_dir / "summary.json", summary.to_json())
        findings = replace(self._find(totals), advice=advice)
        page = report_page(
            summary,
            findings,
            self._places(summary, {"MLflow run": tracker.place}),
            charts_of(run.tracks),
            run_id=self.run_id,
            price_per_hour=self.options.price_per_hour,
        )
        if self._write(run_dir / "report.html", page):
            places["Report"] = str(run_dir / "report.html")
        figures = {key: float(v) for key, v in asdict(summary).items() if isinstance(v, int | float)}
        figures |= {f"time_{part}_s": seconds for part, seconds in account.items()}
        if findings.accuracy is not None and findings.accuracy.rows:
            figures["accuracy"] = findings.accuracy.right / findings.accuracy.rows
        artifacts = [run_dir / name for name in _ARTIFACTS]
        tracker.finish(status, samples, figures, [path for path in artifacts if path.exists()])
        # A store that was slow at first may have returned its run id only now.
        summary = replace(summary, mlflow_run_id=tracker.run_id)
        # A job that fails for its errors says so after the report.
        warning = None if status == "FAILED" else tell_high_share(totals.rows, findings.errors)
        self._finish(summary, findings, {"MLflow run": tracker.place, **places}, warning=warning)
        return summary

    def _write(self, path: Path, text: str) -> bool:
        """Write a file of the run's directory. The rows are committed, so a failure costs a warning only."""
        try:
            write_file(str(path), text, self.spark)
        except OSError as error:
            self.terminal.warn(f"{path} could not be written: {error}")
            return False
        return True

    def nothing_to_do(self, counts: RowCounts, *, has_failed: bool) -> Summary:
        """Write and print the summary of a run that found nothing left, and return it."""
        self.terminal.say("Output", f"{self.table.name}: nothing new to do, no engine was started")
        summary = Summary(
            complete=True,
            rows_left=0,
            ended_by=_ended_by(counts, has_failed=has_failed),
            rows_in=counts.rows_in,
            rows_skipped=counts.skipped,
            output=self.table.name,
            output_format=self.table.format_name,
        )
        self._finish(summary, self._find(), {})
        return summary

    def nothing_delivered(self) -> Summary:
        """Write and print the summary of a run whose input has no rows, and no columns to make an output of."""
        self.terminal.say(
            "Output", f"{self.table.name} is not made: the input has no rows and no columns yet"
        )
        summary = Summary(
            complete=True,
            rows_left=0,
            ended_by=_ended_by(RowCounts(), has_failed=False),
            rows_in=0,
            rows_skipped=0,
            output=self.table.name,
            output_format=self.table.format_name,
        )
        if self.options.summary is not None:
            write_file(self.options.summary, summary.to_json(), self.spark)
        return summary

    def _find(self, totals: CommittedTotals | None = None) -> Findings:
        """Find the results of this run and of its spec.

        Without ``totals``, because this run has done nothing, find only what all runs of the spec have.
        """
        return find_results(
            self.table,
            totals,
            spec_hash=self.checked.spec.hash,
            run_id=self.run_id,
            gold_column=self.options.gold_column,
            shown_columns=self.checked.id_columns,
            questions=[question.name for question in self.options.ask],
            shows_rows=not self.options.no_sample,
        )

    def _finish(
        self, summary: Summary, findings: Findings, places: dict[str, str], *, warning: str | None = None
    ) -> None:
        options = self.options
        if options.summary is not None:
            write_file(options.summary, summary.to_json(), self.spark)
        places = self._places(summary, places)
        print_report(
            self.terminal.console,
            summary,
            findings,
            places,
            price_per_hour=options.price_per_hour,
            warning=warning,
        )

    def _places(self, summary: Summary, places: Mapping[str, str]) -> dict[str, str]:
        return {
            f"{self.table.format_name} table": summary.output,
            **places,
            "Logs": str(self.options.log_dir),
        }


def _ended_by(counts: RowCounts, *, has_failed: bool) -> EndedBy:
    if has_failed:
        return EndedBy.ERROR_ROWS
    return EndedBy.LIMIT if counts.left_out else EndedBy.DONE
