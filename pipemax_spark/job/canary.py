"""Do a few random rows first, and go on only if their answers are distributed like those of the last run.

Where answers are few and not sampled, as many rows of the last run are asked again: their answers must be the same.
Nothing of this second part is committed.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from pipemax_spark.errors import CanaryError, TooManyErrorsError
from pipemax_spark.job.job import Job
from pipemax_spark.job.preparing import Prepared
from pipemax_spark.job.run import Run
from pipemax_spark.report.distributions import closed_answers, distributions_of
from pipemax_spark.report.drift import Comparison, Drift, Sampled, asked_again, compared
from pipemax_spark.report.findings import CommittedTotals, totals_of_rows
from pipemax_spark.rows.annotated import ANNOTATION, annotate_requests
from pipemax_spark.spark.helper_columns import free_name
from pipemax_spark.spark.jobs import jobs_of
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.fence import CANARY_NOTE, runs_past_canary

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_BEFORE = "__pipemax_before"


def do_rows(job: Job, run: Run, prepared: Prepared) -> int:
    """Annotate and commit the rows, with ``--canary`` some of them first; return the number of the next chunk.

    Raise ``CanaryError``, with only the canary's rows committed, if these are distributed otherwise than those of the
    last run, or rows of that run are answered otherwise now, and ``TooManyErrorsError`` if too many are errors.
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
    if reason := job.options.error_limits.reason_to_fail(totals.rows, totals.errors, of=" of the canary"):
        raise TooManyErrorsError(f"{reason}. Nothing else was annotated")
    earlier = _earlier_run(job, held)
    if earlier is None:
        run.drift = Drift(rows=totals.rows, earlier_run=None)
    else:
        now = _sampled(job, rows, totals)
        of_earlier = held.where(f"{ANNOTATION}.run_id = '{earlier}'")
        before = _sampled(job, of_earlier, totals_of_rows(of_earlier))
        run.drift = Drift(
            rows=now.rows,
            earlier_run=earlier,
            earlier_rows=before.rows,
            comparisons=[*compared(before, now), *_asked_again(job, run, of_earlier, now.rows)],
        )
    if run.drift.moved:
        raise CanaryError(
            f"{run.drift}. Nothing else was annotated. If the change is right, run once without --canary: later runs "
            "are compared with that one"
        )
    job.terminal.say("Canary", str(run.drift))


def _earlier_run(job: Job, held: "DataFrame") -> str | None:
    """Return the last run under the spec that has gone on after its canary, or had none; None if none is known."""
    from pyspark.sql import functions as F  # noqa: N812

    runs = [run_id for run_id in runs_past_canary(job.table) if run_id != job.run_id]
    if not runs:
        return None
    run_id = F.col(f"{ANNOTATION}.run_id")
    with_rows = {row[0] for row in held.where(run_id.isin(runs)).select(run_id).distinct().collect()}
    return next((run for run in runs if run in with_rows), None)


def _asked_again(job: Job, run: Run, earlier: "DataFrame", wanted: int) -> list[Comparison]:
    """Ask the engines about so many rows of the earlier run again, and compare the answers; commit nothing.

    Return nothing where answers are sampled or free, or where the output lacks columns of the request.
    """
    from pyspark.sql import functions as F  # noqa: N812

    options = job.options
    generations = [question.generation for question in options.ask] or [options.generation]
    before = closed_answers(earlier, options)
    names = job.checked.source.rows.columns
    if not before or any(one.temperature > 0 for one in generations) or not {*names} <= {*earlier.columns}:
        return []
    helper = free_name(_BEFORE, names)
    answers = F.array(*(answer.cast("string") for answer in before.values())).alias(helper)
    answered = earlier.where(f"{ANNOTATION}.error IS NULL")
    some = answered.select(*map(quoted, names), answers).orderBy(F.rand()).limit(wanted)
    plan = replace(job.checked.plan, spool=None)
    done = annotate_requests(options.request_columns.add(some), plan)
    now = F.array(*(answer.cast("string") for answer in closed_answers(done, options).values()))
    jobs = jobs_of(job.spark)
    run.expect(wanted)
    jobs.tag(job.run_id)
    try:
        pairs = done.select(quoted(helper), now).collect()
    finally:
        jobs.untag(job.run_id)
    same = sum(old == new for old, new in pairs)
    return [asked_again(same=same, other=len(pairs) - same)] if pairs else []


def _sampled(job: Job, rows: "DataFrame", totals: CommittedTotals) -> Sampled:
    """Return what is compared of these rows, whose ``totals`` are known."""
    return Sampled(
        rows=totals.rows,
        distributions=distributions_of(rows, job.options),
        errors={code: count for code, (count, _) in totals.errors.items()},
    )
