"""Count what tells how far the answers of a run may be trusted: probabilities, agreement, invalid answers, attempts.

It counts in the same pass over the rows as ``distributions``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipemax.wire import ErrorCode
from pipemax_spark.options import JobOptions
from pipemax_spark.report.sampled_rows import probability_column
from pipemax_spark.rows.annotated import ANNOTATION
from pipemax_spark.spark.sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

INVALID = (ErrorCode.RESPONSE_FORMAT, ErrorCode.REASONING_UNFINISHED)
"""The errors of answers that a model gave, and that are none."""
BINS = 20
"""Number of bins of probabilities, of equal width."""
_PERCENT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerQuality:
    """How sure, how unanimous and how valid the answers in one column are."""

    name: str
    """The column of answers."""
    became: Mapping[str, int] = field(default_factory=dict)
    """``answer``, or an error's code → rows."""
    rows_retried: int | None = None
    """Rows that took more than one attempt; None without ``--attempts``."""
    percents: Mapping[int, int] = field(default_factory=dict)
    """Probability of the answer in whole percents, rounded down, at most 99 → rows; empty without ``--logprobs``."""
    agreements: Mapping[float, int] = field(default_factory=dict)
    """Share of a row's samples that gave its answer → rows, the highest first; empty without ``--n``."""

    @property
    def rows(self) -> int:
        return sum(self.became.values())

    @property
    def invalid(self) -> Mapping[str, int]:
        """Error code → rows whose answer is invalid."""
        return {code: self.became[code] for code in INVALID if code in self.became}

    @property
    def unanimous_share(self) -> float:
        """Return the share of rows all of whose samples agree."""
        return self.agreements.get(1.0, 0) / sum(self.agreements.values())

    @property
    def mean_agreement(self) -> float:
        rows = sum(self.agreements.values())
        return sum(share * number for share, number in self.agreements.items()) / rows

    def percent_reached_by(self, share: float) -> int:
        """Return the lowest percent of probability that at least this share of the rows does not exceed."""
        needed, seen = share * sum(self.percents.values()), 0
        for percent, rows in sorted(self.percents.items()):
            seen += rows
            if seen >= needed:
                return percent
        raise ValueError(f"a share is between 0 and 1, not {share}")

    def rows_below(self, percent: int) -> int:
        """Return how many rows have an answer that is less probable."""
        return sum(rows for known, rows in self.percents.items() if known < percent)

    def bins(self) -> list[tuple[int, int, int]]:
        """Return ``BINS`` bins, each as (least percent, least percent of the next bin, rows)."""
        width = _PERCENT // BINS
        return [
            (low, low + width, sum(self.percents.get(percent, 0) for percent in range(low, low + width)))
            for low in range(0, _PERCENT, width)
        ]

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield what the report says of it: name and text."""
        of_question = "" if self.name == ANNOTATION else f"{self.name}: "
        if self.percents:
            rows, unsure = sum(self.percents.values()), self.rows_below(50)
            yield (
                "Probability",
                f"{of_question}median {self.percent_reached_by(0.5) / 100:.2f}, lowest quarter up to "
                f"{self.percent_reached_by(0.25) / 100:.2f}; {unsure:,} of {rows:,} answers ({unsure / rows:.1%}) are "
                "below 0.5",
            )
        if self.agreements:
            yield (
                "Agreement",
                f"{of_question}all samples agree in {self.unanimous_share:.1%} of "
                f"{sum(self.agreements.values()):,} rows; on average {self.mean_agreement:.1%} of a row's samples "
                "gave its answer",
            )
        parts = [f"{rows:,} ({rows / self.rows:.1%}) {code}" for code, rows in self.invalid.items()]
        if parts:
            yield "Invalid answers", f"{of_question}{', '.join(parts)}"
        if self.rows_retried:
            share = self.rows_retried / self.rows
            yield "Tried again", f"{of_question}{self.rows_retried:,} of {self.rows:,} rows ({share:.1%})"


def answer_columns(options: JobOptions) -> list[str]:
    """Return the columns that hold answers: one of each question, or the annotation."""
    return [question.name for question in options.ask] or [ANNOTATION]


def quality_to_count(rows: "DataFrame", options: JobOptions) -> "Iterator[tuple[str, Column]]":
    """Yield what ``quality_of`` needs counted over all rows: a name, and the expression whose values are counted."""
    from pyspark.sql import functions as F  # noqa: N812

    for name in answer_columns(options):
        fields, column = rows.select(f"{quoted(name)}.*").columns, quoted(name)
        code = F.col(f"{column}.error.code")
        yield f"{name} became", F.coalesce(code, F.lit("answer"))
        if "attempts" in fields:
            yield f"{name} retried", F.when(F.col(f"{column}.attempts") > 1, F.lit("again"))
        if "agreement" in fields:
            yield f"{name} agreement", F.when(code.isNull(), F.col(f"{column}.agreement"))
        if (probability := probability_column(rows, name)) is not None:
            percent = F.least(F.floor(probability * _PERCENT), F.lit(_PERCENT - 1))
            yield f"{name} percent", F.when(code.isNull(), percent)


def quality_of(
    rows: "DataFrame", options: JobOptions, counts: Mapping[str, Mapping[str, int]]
) -> list[AnswerQuality]:
    """Return the quality of each column of answers, by the counts of ``quality_to_count``."""
    made = []
    for name in answer_columns(options):
        percents, agreements = counts.get(f"{name} percent", {}), counts.get(f"{name} agreement", {})
        has_attempts = "attempts" in rows.select(f"{quoted(name)}.*").columns
        made.append(
            AnswerQuality(
                name=name,
                became=dict(counts.get(f"{name} became", {})),
                rows_retried=counts.get(f"{name} retried", {}).get("again", 0) if has_attempts else None,
                percents={int(percent): number for percent, number in percents.items()},
                agreements=dict(
                    sorted(((float(share), number) for share, number in agreements.items()), reverse=True)
                ),
            )
        )
    return made
