"""Record how a run ended: in MLflow, in the summary file that schedulers read, and on the terminal.

Everything is counted in the output table, so a run's totals do not depend on which reports reached the driver. A run
that is killed writes nothing more, so the file of ``--summary`` says from the start that the run is not complete.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from pipemax_spark.errors import EndedBy, JobError, LimitReachedError, RowCountError, cause_of, ended_by
from pipemax_spark.job.cascade_facts import phase_facts
from pipemax_spark.job.job import Job, JobCall
from pipemax_spark.job.published import Course, places_of, published, write_of_run, write_page
from pipemax_spark.job.reuse import Reused
from pipemax_spark.job.run import Run, started_tracker
from pipemax_spark.report.cascade_texts import with_costs
from pipemax_spark.report.charts import picture_of
from pipemax_spark.report.findings import (
    CommittedTotals,
    find_results,
    runs_of_spec,
    totals_of_run,
    totals_of_spec,
)
from pipemax_spark.report.notifier import Notifier
from pipemax_spark.report.run_speed import prefill_share, rate_factor
from pipemax_spark.report.summary import Findings, Summary, print_report, with_accuracies
from pipemax_spark.report.time_accounts import working_seconds
from pipemax_spark.request.error_limits import tell_high_share
from pipemax_spark.rows.prompt_order import Finding
from pipemax_spark.storage.fence import recovered_by, runs_named
from pipemax_spark.storage.hadoop import write_file

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RowCounts:
    """Row counts over all batches of a run; each row ends in one of skipped, left_out, undone and done."""

    rows_in: int = 0
    skipped: int = 0
    """Done by earlier runs."""
    left_out: int = 0
    """Beyond ``--limit``."""
    undone: int = 0
    """To be done by this run, which a limit on its cost, time or tokens has ended before."""
    to_do: int | None = None
    """To be done by this run, committed or not; None as long as nothing was looked for."""
    done: int = 0
    """Committed by this run, and found in the table's history."""
    deleted: int = 0
    """Rows of the output that were marked or removed, because the input has deleted theirs."""
    reused: Reused = Reused()  # noqa: RUF009  it is frozen
    """What was taken over from the table of ``--reuse``; these rows are among ``skipped``."""
    recovered_runs: Sequence[str] = ()
    """The dead runs of which this run has committed rows; these are among ``skipped``."""


class EndRecord:
    """The record of one run's end, from entry to exit; ``counts``, ``run`` and ``summary`` say what is known so far."""

    def __init__(self, call: JobCall) -> None:
        self._call = call
        self._path = call.options.summary
        self.counts = RowCounts()
        self.run: Run | None = None
        """The run, once there are rows to do."""
        self.notifier = Notifier(
            call.options.notify, run_id=call.run_id, output=call.table.name, warn=call.terminal.warn
        )
        self.summary: Summary | None = None
        """The run's own summary, which it has written, and after the exit that of its end."""

    @property
    def output(self) -> str:
        """The output's name."""
        return self._call.table.name

    def __enter__(self) -> Self:
        self.begin()
        return self

    def begin(self) -> None:
        """Say in the file that the run works. Raise ``JobError`` if the file cannot be written."""
        if self._path is not None:
            try:
                write_file(self._path, self._so_far().to_json(), self._call.spark)
            except OSError as error:
                raise JobError(f"summary {self._path!r} cannot be written: {error}") from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(error)

    def close(self, error: BaseException | None) -> None:
        """Write how an error has ended the run, if one has, and tell the URL of ``--notify``."""
        if error is not None:
            self.write(error)
        self._notify()

    def warn_of_limit(self, warning: str) -> None:
        """Print that the run's limits will leave rows undone, and tell the URL of ``--notify``."""
        self._call.terminal.warn(warning)
        assert self.run is not None, "a run has limits once it works"
        done = self.run.committed_rows
        self.notifier.budget(
            rows=done,
            rows_left=(self.counts.to_do or 0) + self.counts.left_out - done,
            errors=self.run.collector.totals().rows_error,
        )

    def _notify(self) -> None:
        summary = self.summary or self._so_far()
        reported = 0 if self.run is None else self.run.collector.totals().rows_error
        self.notifier.end(
            rows=summary.rows_out,
            rows_left=summary.rows_left,
            errors=summary.rows_error or reported,
            ended_by=summary.ended_by,
            complete=summary.complete,
        )

    def write(self, error: BaseException) -> None:
        """Write how the error ended the run."""
        self.summary = replace(self.summary or self._so_far(), ended_by=str(ended_by(error)))
        if isinstance(error, RowCountError):
            self.summary = replace(self.summary, rows_in=error.rows)
        of_run = None if self.run is None else str(self._call.directory / "summary.json")
        for path in (self._path, of_run):
            if path is None:
                continue
            try:
                write_file(path, self.summary.to_json(), self._call.spark)
            except Exception:  # the error that ended the run must reach the caller
                log.warning("%s could not be written", path, exc_info=True)

    def _so_far(self) -> Summary:
        counts, committed = self.counts, 0 if self.run is None else self.run.committed_rows
        rows_left = None
        if counts.to_do is not None and not self._call.options.incremental:
            rows_left = counts.to_do - committed + counts.left_out
        return Summary(
            complete=rows_left == 0,
            rows_left=rows_left,
            rows_in=counts.rows_in,
            rows_out=committed,
            rows_skipped=counts.skipped,
            rows_left_out=counts.left_out,
            rows_from_table=counts.reused.rows,
            tokens_from_table=counts.reused.tokens,
            output=self._call.table.name,
            output_format=self._call.table.format_name,
            mlflow_run_id=None if self.run is None else self.run.tracker.run_id,
            canary=None if self.run is None else _canary_facts(self.run),
        )


def compact(job: Job) -> None:
    """Join the output's small files. The rows are committed, so a failure costs a warning only."""
    try:
        before, after = job.table.compact()
    except Exception as error:
        job.terminal.warn(f"small files of {job.table.name} were not compacted: {cause_of(error)}")
        return
    job.terminal.say("Files", f"{before:,} small files were compacted into {after:,}")


def too_many_errors(job: Job, of_run: CommittedTotals | None, recovered_runs: Sequence[str]) -> str | None:
    """Return why the job must fail because of its error rows, or None.

    A run is judged by the rows that it has committed, its own and those of dead runs that it has recovered. A run
    that found nothing to do, whose totals are None, judges the last one again, so that it does not turn it green.
    The rows in the table count, not what engines have reported.
    """
    limits, name, spec_hash = job.options.error_limits, job.table.name, job.checked.spec.hash
    if of_run is not None and (reason := limits.reason_to_fail(of_run.rows, of_run.errors)) is not None:
        return reason
    reason = None
    if limits.fails_on_first:
        of_spec = totals_of_spec(job.table, spec_hash)
        reason = limits.reason_to_fail(of_spec.rows, of_spec.errors, of=f" in {name}")
    else:
        runs = recovered_runs
        # A run that found nothing judges the last run that has left rows under the spec, and those that it recovered.
        if of_run is None and not runs and (earlier := _earlier_runs(job)):
            runs = [earlier[0], *recovered_by(job.table, earlier[0])]
        for run_id in runs:
            of_other = totals_of_run(job.table, run_id)
            of = f" in {name}, written by run {run_id},"
            reason = reason or limits.reason_to_fail(of_other.rows, of_other.errors, of=of)
    return reason and f"{reason}. --retry-errors retries the error rows"


def _earlier_runs(job: Job) -> list[str]:
    """Return the runs of this table that computed rows under the spec, the latest first.

    Rows with answers of an earlier table (``--reuse``) name runs of that table, which are not to be judged here.
    """
    runs, named = runs_of_spec(job.table, job.checked.spec.hash), runs_named(job.table)
    return [run_id for run_id in runs if run_id in named] or runs


def conclude(
    job: Job,
    run: Run,
    counts: RowCounts,
    *,
    worth_a_try: Sequence[Finding],
    limit: LimitReachedError | None = None,
) -> tuple[Summary, str | None]:
    """Write and print the result of a run that had rows to do, all of which are done unless a ``limit`` has ended it.

    Return its summary, and why the job must fail because of its error rows, or None. Of what is worth a try, the report
    has what would have saved time in this run, or may have if its engines tell no times.
    """
    totals = totals_of_run(job.table, job.run_id)
    if limit is not None:
        counts.done = totals.rows
        counts.undone = (counts.to_do or 0) - totals.rows
    reason = too_many_errors(job, totals, counts.recovered_runs)
    summary = _summary(job, run, counts, totals, has_failed=reason is not None, limit=limit)
    summary = _with_costs(job, summary)
    write_of_run(job, "throughput.svg", picture_of(run.tracks))
    findings = replace(_findings(job, totals), drift=run.drift, advice=_advice(summary, worth_a_try))
    summary, places = published(
        job,
        _course(run),
        with_accuracies(summary, findings),
        findings,
        status="FAILED" if reason else "FINISHED",
        stopped_by=None if limit is None else str(limit),
    )
    # A job that fails for its errors says so after the report.
    warnings = [] if reason else [tell_high_share(totals.rows, findings.errors)]
    if limit is not None:
        warnings.append(_limit_line(limit, run.used, counts))
    _finish(job, summary, findings, places, warnings=[text for text in warnings if text])
    return summary, reason


def _course(run: Run) -> Course:
    return Course(tracker=run.tracker, tracks=run.tracks, samples=run.samples)


def _limit_line(limit: LimitReachedError, used: str, counts: RowCounts) -> str:
    """Return what the last line says of a run that a limit has ended. The report's cost is of a shorter time."""
    left = f"{counts.undone:,} of {counts.to_do or 0:,} rows are left"
    return f"{limit} ({used}); {left}. Run the same command again to go on, from what engines had completed"


def _advice(summary: Summary, worth_a_try: Sequence[Finding]) -> str | None:
    """Return the first finding with its worth; None if there is none, or if decode took nearly all of the time."""
    if not worth_a_try:
        return None
    finding, share = worth_a_try[0], prefill_share(summary.time_account_s)
    if share is None:
        return str(finding)
    factor = rate_factor(finding, share)
    return None if factor is None else f"{finding}, about {factor:.1f} times the rows/s"


def stopped(job: Job, run: Run, counts: RowCounts, *, reason: str) -> None:
    """Write the page of a run that its error rows or its canary stopped: what it has committed, and the reason."""
    totals = totals_of_run(job.table, job.run_id)
    counts.done = totals.rows
    summary = replace(_summary(job, run, counts, totals, has_failed=True), complete=False, rows_left=None)
    findings = replace(_findings(job, totals), drift=run.drift)
    report = write_page(job, _course(run), summary, findings, stopped_by=reason)
    if report is not None:
        job.terminal.say("Report", str(report))


def nothing_to_do(job: Job, counts: RowCounts) -> tuple[Summary, str | None]:
    """Write and print the summary of a run that found nothing left; return it, and why the job must fail, or None.

    A run that has taken over all rows has filled a table: it gets a page and a run in MLflow as any other.
    """
    reason = too_many_errors(job, None, counts.recovered_runs)
    has_filled = bool(counts.reused.rows)
    left = "nothing is left to compute" if has_filled else "nothing new to do"
    # The large engine of a cascade has answered the sampled rows.
    engine = ", no engine was started" if job.options.certified is None else ""
    job.terminal.say("Output", f"{job.table.name}: {left}{engine}")
    summary = Summary(
        complete=True,
        rows_left=0,
        ended_by=_ended_by(counts, has_failed=reason is not None),
        rows_in=counts.rows_in,
        rows_skipped=counts.skipped,
        rows_deleted=counts.deleted,
        rows_from_table=counts.reused.rows,
        tokens_from_table=counts.reused.tokens,
        output=job.table.name,
        output_format=job.table.format_name,
        cascade=_cascade_facts(job),
    )
    summary = _with_costs(job, summary)
    if not has_filled:
        findings = find_results(job.table, job.options, job.checked, None)
        summary = with_accuracies(summary, findings)
        _finish(job, summary, findings, {})
        return summary, reason
    findings = _findings(job, CommittedTotals())
    summary, places = published(
        job,
        Course(tracker=started_tracker(job)),
        with_accuracies(summary, findings),
        findings,
        status="FAILED" if reason else "FINISHED",
        stopped_by=None,
    )
    _finish(job, summary, findings, places)
    return summary, reason


def nothing_delivered(call: JobCall) -> Summary:
    """Write and print the summary of a run whose input has no rows, and no columns to make an output of."""
    call.terminal.say("Output", f"{call.table.name} is not made: the input has no rows and no columns yet")
    summary = Summary(
        complete=True,
        rows_left=0,
        ended_by=EndedBy.DONE,
        rows_in=0,
        output=call.table.name,
        output_format=call.table.format_name,
    )
    if call.options.summary is not None:
        write_file(call.options.summary, summary.to_json(), call.spark)
    return summary


def _summary(
    job: Job,
    run: Run,
    counts: RowCounts,
    totals: CommittedTotals,
    *,
    has_failed: bool,
    limit: LimitReachedError | None = None,
) -> Summary:
    """Return the totals of a run that has ended."""
    collector, seconds = run.collector, run.seconds
    spent = collector.totals().spent if "endpoint" in job.checked.reply.engine else None
    account = {part: round(part_s, 3) for part, part_s in run.time_account().items()}
    drain_s = collector.accounts.drain_at_full_rate_s()
    return Summary(
        complete=not counts.left_out + counts.undone,
        # What an incremental run would have read after its limit is not known.
        rows_left=None if limit is not None and job.options.incremental else counts.left_out + counts.undone,
        ended_by=limit.ended_by if limit and not has_failed else _ended_by(counts, has_failed=has_failed),
        rows_in=counts.rows_in,
        rows_out=counts.done,
        rows_error=totals.rows_error,
        rows_skipped=counts.skipped,
        rows_left_out=counts.left_out,
        rows_deleted=counts.deleted,
        rows_reused=min(collector.totals().rows_reused, counts.done * max(1, len(job.options.ask))),
        rows_from_table=counts.reused.rows,
        tokens_from_table=counts.reused.tokens,
        prompt_tokens=totals.prompt_tokens,
        completion_tokens=totals.completion_tokens,
        reasoning_tokens=totals.reasoning_tokens,
        endpoint_requests=None if spent is None else spent.requests,
        endpoint_retries=None if spent is None else spent.retries,
        billed_prompt_tokens=None if spent is None else spent.prompt_tokens,
        billed_output_tokens=None if spent is None else spent.output_tokens,
        rows_retried=totals.rows_retried,
        extra_attempts=totals.extra_attempts,
        seconds=round(seconds, 3),
        rows_per_s=round(counts.done / seconds, 3),
        tokens_per_s=round(totals.completion_tokens / seconds, 3),
        working_rows_per_s=round(
            counts.done / working_seconds(account, seconds=max(1e-3, round(seconds, 3))), 3
        ),
        output=job.table.name,
        output_format=job.table.format_name,
        cascade=_cascade_facts(job, counts.left_out + counts.undone),
        mlflow_run_id=run.tracker.run_id,
        engines=collector.engines(),
        prefix_cache_hit_rate=run.prefix_cache_hit_rate,
        policies=run.policies.choices,
        tunings=run.policies.tunings,
        time_account_s=account,
        replicas=collector.replicas.totals(),
        engine_rates=collector.rates.totals(),
        drain_at_full_rate_s=None if drain_s is None else round(drain_s, 3),
        length_correlation=run.length_correlation(),
        canary=_canary_facts(run),
    )


def _with_costs(job: Job, summary: Summary) -> Summary:
    """Return the summary with what a cascade has cost, if there is one."""
    if summary.cascade is None:
        return summary
    final = phase_facts(summary, job.options.prices)
    return replace(summary, cascade=with_costs(summary.cascade, final, is_complete=summary.complete))


def _cascade_facts(job: Job, rows_left: int = 0) -> Mapping[str, Any] | None:
    """Return what is certified. Rows that keep the small answer come first, so the counts hold before the end too."""
    certified = job.options.certified
    if certified is None or certified.facts is None or not rows_left:
        return None if certified is None else certified.facts
    so_far = f"So far, {rows_left:,} rows are left for the large model. {certified.facts['sentence']}"
    return {**certified.facts, "sentence": so_far}


def _canary_facts(run: Run) -> dict[str, Any] | None:
    """Return what the run's canary came to; None without one."""
    return None if run.drift is None else run.drift.facts()


def _findings(job: Job, totals: CommittedTotals) -> Findings:
    """Read what the report shows of the rows. They are committed, so a failure costs a warning only."""
    try:
        return find_results(job.table, job.options, job.checked, totals)
    except Exception as error:
        job.terminal.warn(f"the report shows no rows: {cause_of(error)}")
        return Findings(errors={code: (rows, "") for code, (rows, _) in totals.errors.items()})


def _finish(
    job: Job, summary: Summary, findings: Findings, places: Mapping[str, str], *, warnings: Sequence[str] = ()
) -> None:
    if job.options.summary is not None:
        write_file(job.options.summary, summary.to_json(), job.spark)
    print_report(
        job.terminal.console,
        summary,
        findings,
        places_of(job, places),
        prices=job.options.prices,
        warnings=warnings,
    )


def _ended_by(counts: RowCounts, *, has_failed: bool) -> EndedBy:
    if has_failed:
        return EndedBy.ERROR_ROWS
    return EndedBy.LIMIT if counts.left_out else EndedBy.DONE
