"""Count how a run's answers are distributed: over the choices that a model had, and over lengths in tokens.

Choices are counted only where the job says what they can be (``--choice``, labels, and the enumerations and booleans of
a schema), so that the counts are few whatever the table's size. Lengths are counted exactly.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipemax.wire import GenerationSpec
from pipemax_spark.executor.response_format import load_schema
from pipemax_spark.options import JobOptions
from pipemax_spark.report.early_ends import EarlyEnds, early_ends, ends_to_count
from pipemax_spark.report.quality import AnswerQuality, quality_of, quality_to_count
from pipemax_spark.rows.annotated import ANNOTATION
from pipemax_spark.spark.sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_MOST_FIELDS = 12
_PRINTED_CHOICES, _PRINTED_CHARACTERS = 5, 40
_LENGTHS = {"prompt_tokens": "prompt tokens", "completion_tokens": "generated tokens"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """How often each choice was the answer."""

    name: str
    rows: Mapping[str, int]
    """Choice → rows, the most frequent first."""

    def first(self, number: int) -> tuple[dict[str, int], int, int]:
        """Return the most frequent choices, how many others there are, and the rows of these."""
        shown = dict([*self.rows.items()][:number])
        return shown, len(self.rows) - len(shown), sum(self.rows.values()) - sum(shown.values())

    def fact(self) -> tuple[str, str]:
        """Return what the report says of it: name and text."""
        total, (shown, left, rows_left) = sum(self.rows.values()), self.first(_PRINTED_CHOICES)
        parts = [f"{_on_a_line(choice)} {rows / total:.1%}" for choice, rows in shown.items()]
        parts += [f"{left:,} others {rows_left / total:.1%}"] if left else []
        return "Choices", f"{self.name}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How many rows had each number of tokens."""

    name: str
    rows: Mapping[int, int]
    """Tokens → rows, at least one, the fewest tokens first."""

    def quantile(self, share: float) -> int:
        """Return the smallest number of tokens that at least this share of the rows does not exceed."""
        needed, seen = share * sum(self.rows.values()), 0
        for tokens, rows in self.rows.items():
            seen += rows
            if seen >= needed:
                return tokens
        raise ValueError(f"a share is between 0 and 1, not {share}")

    def bins(self, max_bins: int) -> list[tuple[int, int, int]]:
        """Return at most so many bins of equal width, each as (least tokens, tokens of the next bin, rows)."""
        low, high = min(self.rows), max(self.rows)
        width = max(1, -(-(high - low + 1) // max_bins))
        counts: defaultdict[int, int] = defaultdict(int)
        for tokens, rows in self.rows.items():
            counts[(tokens - low) // width] += rows
        edges = [low + number * width for number in range(max(counts) + 2)]
        return [(edge, edge + width, counts[number]) for number, edge in enumerate(edges[:-1])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributions:
    """How the answers of a run are distributed; choices and lengths are empty for a run without answers."""

    choices: Sequence[Choices] = ()
    lengths: Sequence[Lengths] = ()
    quality: Sequence[AnswerQuality] = ()
    """Of each column of answers."""
    early_ends: EarlyEnds | None = None
    """None for a run that generated nothing."""

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield what the report says of them: name and text."""
        yield from (choices.fact() for choices in self.choices)
        for quality in self.quality:
            yield from quality.facts()
        if self.early_ends is not None:
            yield from self.early_ends.facts()


def distributions_of(rows: "DataFrame", options: JobOptions) -> Distributions:
    """Count the rows that have answers, and the outputs that ended early. Reads the annotations of the rows once.

    ``rows`` are those of a run in the output.
    """
    from pyspark.sql import functions as F  # noqa: N812

    fields = rows.select(f"{ANNOTATION}.*").columns
    counted = {name: F.col(f"{ANNOTATION}.{name}") for name in _LENGTHS if name in fields}
    counted = {name: F.when(F.col(f"{ANNOTATION}.error").isNull(), value) for name, value in counted.items()}
    for name, answer in closed_answers(rows, options).items():
        counted.setdefault(name, answer)
    chosen = dict([*counted.items()][: len(_LENGTHS) + _MOST_FIELDS])
    other = dict(ends_to_count(rows, options)) | dict(quality_to_count(rows, options))
    pairs = (
        F.struct(F.lit(name).alias("name"), value.cast("string").alias("value"))
        for name, value in (chosen | other).items()
    )
    values = rows.select(F.explode(F.array(*pairs)).alias("pair")).where("pair.value IS NOT NULL")
    by_name: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for row in values.groupBy("pair.name", "pair.value").count().collect():
        by_name[row["name"]][row["value"]] = row["count"]
    return Distributions(
        choices=[
            Choices(name=name, rows=dict(sorted(by_name[name].items(), key=lambda item: (-item[1], item[0]))))
            for name in chosen
            if name not in _LENGTHS and by_name[name]
        ],
        lengths=[
            Lengths(name=label, rows=dict(sorted((int(tokens), n) for tokens, n in by_name[name].items())))
            for name, label in _LENGTHS.items()
            if by_name[name]
        ],
        quality=quality_of(rows, options, by_name),
        early_ends=early_ends(rows, options, by_name),
    )


def closed_answers(rows: "DataFrame", options: JobOptions) -> "dict[str, Column]":
    """Return the answers that are one of few values, by field; null for an error row."""
    from pyspark.sql import functions as F  # noqa: N812

    asked = {question.name: question.generation for question in options.ask}
    answers: dict[str, Column] = {}
    for column, generation in (asked or {ANNOTATION: options.generation}).items():
        for name, value in _closed_fields(rows, column, generation):
            answers[f"{column}.{name}"] = F.when(F.col(f"{quoted(column)}.error").isNull(), value)
    return answers


def _closed_fields(
    rows: "DataFrame", column: str, generation: GenerationSpec
) -> "Iterator[tuple[str, Column]]":
    """Yield the fields of an annotation that hold one of few values, with their values."""
    from pyspark.sql import functions as F  # noqa: N812

    fields = rows.select(f"{quoted(column)}.*").columns
    if generation.choice:
        yield "text", F.col(f"{quoted(column)}.text")
    elif "label" in fields:
        yield "label", F.col(f"{quoted(column)}.label")
    elif "parsed" in fields and generation.response_format is not None:
        schema = load_schema(generation.response_format)
        parsed = rows.select(f"{quoted(column)}.parsed.*").columns
        for name, kind in schema.get("properties", {}).items():
            is_closed = isinstance(kind, dict) and ("enum" in kind or kind.get("type") == "boolean")
            if is_closed and name in parsed:
                yield f"parsed.{name}", F.col(f"{quoted(column)}.parsed.{quoted(name)}")


def _on_a_line(choice: str) -> str:
    text = " ".join(choice.split())
    return text if len(text) <= _PRINTED_CHARACTERS else f"{text[: _PRINTED_CHARACTERS - 1]}…"
