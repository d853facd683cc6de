"""The forecast of a cascade in the dry run: both models answer 300 drawn rows, before anything is written or spent.

The seed of the run's coins is drawn later, so what is decided by these rows takes nothing from what is promised.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pipemax_spark.cascade.draw import Draw
from pipemax_spark.cascade.ordered_rows import LabelledRow
from pipemax_spark.cascade.pilot import PILOT_ROWS, Assessment, assess, of_all
from pipemax_spark.cascade.promise import Promise
from pipemax_spark.job.cascade_answers import ComparedAnswer
from pipemax_spark.job.trial import Trial
from pipemax_spark.options import JobOptions
from pipemax_spark.report.side_by_side import Answered
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.rows.annotated import ANNOTATION
from pipemax_spark.spark.sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_DRAWN_BY = 0
_NO_SEED = "0" * 32
"""A forecast throws no coins."""


def pilot(
    spark: "SparkSession",
    large: JobOptions,
    small: JobOptions,
    terminal: Terminal,
    *,
    promise: Promise,
    answers: Sequence[ComparedAnswer],
) -> Assessment:
    """Return what a cascade of these two jobs would keep. Starts one engine after the other, and stops both."""
    trial, rows_in = Trial.of_drawn_rows(spark, large, terminal, rows=PILOT_ROWS, seed=_DRAWN_BY)
    with trial:
        of_large = _answered(trial, large, answers, is_small=False)
    with trial.with_job(small) as other:
        of_small = _answered(other, small, answers, is_small=True)
    draw = Draw(
        seed=_NO_SEED,
        rows=rows_in,
        agree=promise.agree,
        confidence=promise.confidence,
        sample_share=promise.default_sample_share(rows_in),
        spec_hash="",
        manifest_digest="",
    )
    cost_ratio = of_large.rows_per_s / of_small.rows_per_s
    assessments = []
    for place, answer in enumerate(answers):
        labelled = [
            LabelledRow(
                one.compared[place].score,
                draw.tie_break(str(one.number)),
                answer.equality.differ(one.compared[place].value, other.compared[place].value),
            )
            for one, other in zip(of_small.rows, of_large.rows, strict=True)
        ]
        assessments.append(assess(draw, labelled, cost_ratio=cost_ratio))
    return (
        assessments[0] if not answers[0].is_question else of_all([one.column for one in answers], assessments)
    )


def _answered(
    trial: Trial, options: JobOptions, answers: Sequence[ComparedAnswer], *, is_small: bool
) -> Answered:
    """Return the rows with score and value of each answer; the large model's have no score."""
    from pyspark.sql import functions as F  # noqa: N812

    names = [*(question.name for question in options.ask), ANNOTATION]
    row = F.struct(*(F.col(quoted(name)) for name in names))
    compared = [
        F.struct(
            (one.score(row) if is_small else F.lit(None).cast("double")).alias("score"),
            one.value(row).alias("value"),
        )
        for one in answers
    ]
    return Answered(trial.answer(options.source, trial.render(options.source), compared=compared)[0])


def without_output(options: JobOptions) -> JobOptions:
    """Return the options of a job whose answers are only looked at."""
    return replace(options, cascade=None, certified=None, dry_run=False, limit=None)
