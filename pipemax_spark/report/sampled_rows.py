"""Read a few annotated rows with their prompts, answers and probabilities, for a person to look at.

The prompt is rendered again from the row's own columns in the output, so rows of an output that lacks a column of the
template (``--select``) are shown without it. Rows are the first that the table gives, not drawn at random: a random
sample would read the whole table. This module knows nothing of how they are shown.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import TYPE_CHECKING, Any

from pipemax_spark.errors import JobError
from pipemax_spark.options import JobOptions
from pipemax_spark.request.columns import RequestColumns, prompt_text
from pipemax_spark.request.prompts import resolve_names
from pipemax_spark.rows.annotated import ANNOTATION
from pipemax_spark.spark.sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

log = logging.getLogger(__name__)

SHOWN_CHARACTERS = 1_000
"""Maximum number of characters of a prompt or an answer that a sample holds."""
_SHOWN_COLUMNS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """The beginning of a text."""

    text: str
    left_out: int = 0
    """Number of characters that the text has beyond it."""

    @classmethod
    def of(cls, text: str) -> "Excerpt":
        return cls(text=text[:SHOWN_CHARACTERS], left_out=max(0, len(text) - SHOWN_CHARACTERS))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledAnswer:
    """What became of a row, or of one of its questions."""

    name: str
    """The field that holds it, such as ``annotation.text``."""
    answer: Excerpt | None
    error: tuple[str, str] | None = None
    """Code and message; None for an answer."""
    probability: float | None = None
    """Of this answer, from 0 to 1; None if the model was not asked for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRow:
    """An annotated row."""

    columns: Mapping[str, str]
    """The columns that tell it from others, by name."""
    truths: Mapping[str, str] = field(default_factory=dict)
    """The right answers (``--gold-column``) that the row has: ``truth``, or ``truth of QUESTION`` → value."""
    prompt: Excerpt | None = None
    """The row's prompt without the system message; None if it cannot be rendered from the output."""
    answers: Sequence[SampledAnswer]
    """One, or with ``--ask`` one of each question."""


class RowSampler:
    """Reads rows of one run from the output."""

    def __init__(self, rows: "DataFrame", options: JobOptions, id_columns: Sequence[str]) -> None:
        """Prepare to read from ``rows``, which have the output's columns."""
        questions = [question.name for question in options.ask]
        self._answers = questions or [ANNOTATION]
        self._options = options
        of_input = [name for name in rows.columns if name not in (ANNOTATION, *questions)]
        self._shown = list(id_columns) or of_input[:_SHOWN_COLUMNS]
        self._id_columns = id_columns
        golds = [gold.column for gold in options.golds]
        self._names = dict(zip(golds, resolve_names(golds, rows.schema), strict=True))
        self._rows = rows

    def some(self, condition: "Column | str", *, max_rows: int) -> list[SampledRow]:
        """Return at most so many rows that meet the condition, the first ones of the table."""
        return self._read(self._rows.where(condition).limit(max_rows))

    def surest(self, condition: "Column", answers: str, *, max_rows: int) -> list[SampledRow]:
        """Return the rows that meet the condition whose answer is the most probable.

        ``answers`` is the column of the answer. Where probabilities are equal, or were not asked for, the order is that
        of the ids, or of the table if there are none.
        """
        order = [quoted(name) for name in self._id_columns]
        rows, probability = self._rows.where(condition), probability_column(self._rows, answers)
        if probability is not None:
            rows = rows.orderBy(probability.desc_nulls_last(), *order)
        elif order:
            rows = rows.orderBy(*order)
        return self._read(rows.limit(max_rows))

    def _read(self, rows: "DataFrame") -> list[SampledRow]:
        shown = _with_prompts(rows, self._options).collect()
        return [self._sampled(row["row"], row["prompt"], row["characters"]) for row in shown]

    def _sampled(self, row: "Row", prompt: str | None, characters: int | None) -> SampledRow:
        truths = {
            "truth" if gold.question is None else f"truth of {gold.question}": row[self._names[gold.column]]
            for gold in self._options.golds
        }
        return SampledRow(
            columns={name: _text(row[name]) for name in self._shown},
            truths={name: _text(value) for name, value in truths.items() if value is not None},
            prompt=None if prompt is None else Excerpt(text=prompt, left_out=(characters or 0) - len(prompt)),
            answers=tuple(_answer(name, row[name]) for name in self._answers),
        )


def _with_prompts(rows: "DataFrame", options: JobOptions) -> "DataFrame":
    """Return ``row``, the ``prompt``'s beginning and its number of ``characters``, both null if it is unknown."""
    from pyspark.errors import PySparkException
    from pyspark.sql import functions as F  # noqa: N812

    row = F.struct(*map(quoted, rows.columns)).alias("row")
    try:
        requests = RequestColumns(options.source).add(rows)
        text = prompt_text(requests)
        shown = F.substring(text, 1, SHOWN_CHARACTERS).alias("prompt")
        return requests.select(row, shown, F.length(text).alias("characters"))
    except (JobError, PySparkException) as error:
        log.info("the report shows no prompts: %s", error)
        unknown = F.lit(None).cast("string").alias("prompt"), F.lit(None).cast("int").alias("characters")
        return rows.select(row, *unknown)


def answer_of(annotation: "Row") -> tuple[str, str | None]:
    """Return the field of an annotation that holds the answer, and its text; of an embedding, only the beginning."""
    field = next(field for field in ("text", "embedding", "label", "score") if field in annotation)
    return field, None if annotation[field] is None else _text(annotation[field])


def _answer(name: str, annotation: "Row") -> SampledAnswer:
    field, text = answer_of(annotation)
    error = annotation["error"]
    return SampledAnswer(
        name=f"{name}.{field}",
        answer=None if text is None else Excerpt.of(text),
        error=None if error is None else (error["code"], error["message"] or ""),
        probability=None if error is not None else _probability(annotation, annotation[field]),
    )


def _probability(annotation: "Row", value: Any) -> float | None:
    if "probabilities" in annotation and annotation["probabilities"] is not None:
        probability: float | None = annotation["probabilities"].get(value)
        return probability
    if "logprob_sum" in annotation and annotation["logprob_sum"] is not None:
        return exp(min(0.0, annotation["logprob_sum"]))
    return None


def probability_column(rows: "DataFrame", answers: str) -> "Column | None":
    """Return the probability of the answer in a column of answers, from 0 to 1; None if no model was asked for it."""
    from pyspark.sql import functions as F  # noqa: N812

    fields, column = rows.select(f"{quoted(answers)}.*").columns, quoted(answers)
    if "probabilities" in fields:
        answer = F.col(f"{column}.{'label' if 'label' in fields else 'text'}")
        return F.try_element_at(F.col(f"{column}.probabilities"), answer)
    if "logprob_sum" in fields:
        return F.exp(F.least(F.lit(0.0), F.col(f"{column}.logprob_sum")))
    return None


def _text(value: object) -> str:
    """Return a value as text; of an embedding, only the beginning."""
    if isinstance(value, list) and len(value) > 4 and all(isinstance(number, float) for number in value):
        return f"[{', '.join(f'{number:.4g}' for number in value[:4])}, …] ({len(value)} values)"
    return f"{value}"
