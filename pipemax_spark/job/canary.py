"""Do a few random rows first, and go on only if their answers are distributed like those of the last run."""

from dataclasses import replace
from typing import TYPE_CHECKING

from pipemax_spark.errors import CanaryError, TooManyErrorsError
from pipemax_spark.job.job import Job
from pipemax_spark.job.preparing import Prepared
from pipemax_spark.job.run import Run
from pipemax_spark.report.distributions import distributions_of
from pipemax_spark.report.drift import Drift, Sampled, compared
from pipemax_spark.report.findings import totals_of_rows
from pipemax_spark.rows.annotated import ANNOTATION
from pipemax_spark.storage.fence import CANARY_NOTE, runs_past_canary

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def do_rows(job: Job, run: Run, prepared: Prepared) -> int:
    """Annotate and commit the rows, with ``--canary`` some of them first; return the number of the next chunk.

    Raise ``CanaryError``, with only the canary's rows committed, if these are distributed otherwise than those of the
    last run, and ``TooManyErrorsError`` if too many of them are errors.
    """
    run.expect(prepared.rows.rows)
    if not prepared.parts:
        return run.do(prepared)
    canary, others = prepared.parts
    next_chunk = run.do(replace(prepared, rows=canary, origin=f"{prepared.origin}{CANARY_NOTE}"))
    with job.terminal.doing("comparing the canary's rows with those of the last run"):
        _judge(job, run)
    return run.do(replace(prepared, rows=others, first_chunk=next_chunk))


def _judge(job: Job, run: Run) -> None:
    held = job.remaining.held()
    rows = held.where(f"{ANNOTATION}.run_id = '{job.run_id}'")
    totals = totals_of_rows(rows)
    earlier = _earlier_run(job, held)
    before = None if earlier is None else _sampled(job, held.where(f"{ANNOTATION}.run_id = '{earlier}'"))
    run.drift = Drift(
        rows=totals.rows,
        earlier_run=earlier,
        earlier_rows=0 if before is None else before.rows,
        comparisons=() if before is None else compared(before, _sampled(job, rows)),
    )
    if reason := job.options.error_limits.reason_to_fail(totals.rows, totals.errors, of=" of the canary"):
        raise TooManyErrorsError(f"{reason}. Nothing else was annotated")
    job.terminal.say("Canary", str(run.drift))
    if run.drift.moved:
        raise CanaryError(
            f"{run.drift}. Nothing else was annotated. If the change is right, run once without --canary: later runs "
            "are compared with that one"
        )


def _earlier_run(job: Job, held: "DataFrame") -> str | None:
    """Return the last run under the spec that has gone on after its canary, or had none; None if none is known."""
    from pyspark.sql import functions as F  # noqa: N812

    runs = [run_id for run_id in runs_past_canary(job.table) if run_id != job.run_id]
    if not runs:
        return None
    run_id = F.col(f"{ANNOTATION}.run_id")
    with_rows = {row[0] for row in held.where(run_id.isin(runs)).select(run_id).distinct().collect()}
    return next((run for run in runs if run in with_rows), None)


def _sampled(job: Job, rows: "DataFrame") -> Sampled:
    totals = totals_of_rows(rows)
    return Sampled(
        rows=totals.rows,
        distributions=distributions_of(rows, job.options),
        errors={code: count for code, (count, _) in totals.errors.items()},
    )
