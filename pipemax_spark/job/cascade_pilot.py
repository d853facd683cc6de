"""The forecast of a cascade in the dry run: both models answer 300 drawn rows, before anything is written or spent.

The seed of the run's coins is drawn later, so what is decided by these rows takes nothing from what is promised.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from pipemax_spark.cascade.draw import Draw
from pipemax_spark.cascade.equality import Equality
from pipemax_spark.cascade.ordered_rows import LabelledRow
from pipemax_spark.cascade.pilot import PILOT_ROWS, Assessment, assess
from pipemax_spark.cascade.promise import Promise
from pipemax_spark.job.trial import Trial
from pipemax_spark.options import JobOptions
from pipemax_spark.report.side_by_side import Answered
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.rows.annotated import ANNOTATION

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
    equality: Equality,
) -> Assessment:
    """Return what a cascade of these two jobs would keep. Starts one engine after the other, and stops both."""
    trial, rows_in = Trial.of_drawn_rows(spark, large, terminal, rows=PILOT_ROWS, seed=_DRAWN_BY)
    with trial:
        of_large = Answered(trial.answer(large.source, trial.render(large.source))[0])
    with trial.with_job(small) as other:
        of_small = Answered(other.answer(small.source, other.render(small.source))[0])
    draw = Draw(
        seed=_NO_SEED,
        rows=rows_in,
        agree=promise.agree,
        confidence=promise.confidence,
        sample_share=promise.default_sample_share(rows_in),
        spec_hash="",
        manifest_digest="",
    )
    labelled = [
        LabelledRow(
            one.score,
            draw.tie_break(str(one.number)),
            equality.differ(one.answers[ANNOTATION], other.answers[ANNOTATION]),
        )
        for one, other in zip(of_small.rows, of_large.rows, strict=True)
    ]
    return assess(draw, labelled, cost_ratio=of_large.rows_per_s / of_small.rows_per_s)


def without_output(options: JobOptions) -> JobOptions:
    """Return the options of a job whose answers are only looked at."""
    return replace(options, cascade=None, certified=None, dry_run=False, limit=None)
