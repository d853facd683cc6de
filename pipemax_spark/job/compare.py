"""``pipemax compare``: the same rows, drawn from a table, under two prompts by one engine.

The prompts are rendered, and the rows annotated, by the code of the job. Nothing is written but logs and a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipemax_spark.errors import JobError
from pipemax_spark.job.settings import job_settings
from pipemax_spark.job.trial import Trial
from pipemax_spark.options import JobOptions
from pipemax_spark.report.comparison import Comparison, print_comparison
from pipemax_spark.report.comparison_page import comparison_page
from pipemax_spark.report.side_by_side import Answered
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.storage.hadoop import write_file

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_ROWS = 200
COMPARED = frozenset({"gold_column", "price_per_hour", "id_columns"})
"""Of the job's options that a trial does not use, those that a comparison does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """The options of one comparison. ``JobError`` says what is wrong with them."""

    job: JobOptions
    """The job with the first template."""
    other_template: str
    rows: int = DEFAULT_ROWS
    """How many of the input's rows are answered."""
    draw_seed: int = 0
    """Another seed draws other rows."""
    page: str | None = None
    """File for the page; None writes none."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise JobError(f"rows is {self.rows}; give a number from 1")
        if self.job.source.template == self.other_template:
            raise JobError("both templates are the same text; give two that differ")

    @property
    def templates(self) -> tuple[str, str]:
        assert self.job.source.template is not None, "compared are two templates"
        return self.job.source.template, self.other_template


def two_templates(templates: Sequence[str]) -> tuple[str, str]:
    """Return the two templates. Raise ``JobError`` if there are more or fewer."""
    if len(templates) != 2:
        raise JobError(f"two templates are compared, and {len(templates)} are given; give two")
    return templates[0], templates[1]


def run_comparison(spark: "SparkSession", options: CompareOptions, terminal: Terminal) -> Comparison:
    """Draw the rows, answer them under both templates, print what differs, write the page, and return the comparison.

    Raise ``JobError`` for what the user can fix; a wrong template is said before the engine starts.
    """
    job = options.job
    with job_settings(spark):
        trial, rows_in = Trial.of_drawn_rows(spark, job, terminal, rows=options.rows, seed=options.draw_seed)
        with trial:
            sources = [replace(job.source, template=template) for template in options.templates]
            requests = [trial.render(source) for source in sources]
            first, second = (
                Answered(trial.answer(source, rendered)[0])
                for source, rendered in zip(sources, requests, strict=True)
            )
    comparison = Comparison(
        templates=options.templates,
        answered=(first, second),
        rows_in=rows_in,
        golds={gold.answers: gold.column for gold in job.golds},
        price_per_hour=job.price_per_hour,
    )
    print_comparison(terminal, comparison, shows_rows=not job.no_sample)
    if options.page is not None:
        _write_page(spark, options, comparison, terminal)
    return comparison


def _write_page(
    spark: "SparkSession", options: CompareOptions, comparison: Comparison, terminal: Terminal
) -> None:
    assert options.page is not None
    page = comparison_page(comparison, input_name=options.job.input, shows_rows=not options.job.no_sample)
    try:
        write_file(options.page, page, spark)
    except OSError as error:
        terminal.warn(f"{options.page} could not be written: {error}")
        return
    terminal.console.print(
        f"{'Page':<19}{Path(options.page).absolute() if '://' not in options.page else options.page}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
