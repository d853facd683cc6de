"""Compare answers with columns of right answers (``--gold-column``): accuracy, a confusion matrix, per-class figures.

A row without a right answer is left out and counted. An error is a wrong answer. Values are compared as texts, because
a cast of a text to a number would raise at the first word; numbers of different types are compared as numbers.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipemax_spark.report.intervals import share_interval, share_text
from pipemax_spark.report.sampled_rows import SampledRow
from pipemax_spark.request.golds import Gold
from pipemax_spark.spark.sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MOST_CLASSES = 20
"""Maximum number of classes of a confusion matrix."""
OTHER, ERROR = "another answer", "an error"
_PRINTED_CONFUSIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Confusions:
    """How often each class was answered for each: a row for each right answer."""

    classes: Sequence[str]
    """The right answers, the most frequent first."""
    rows: Mapping[tuple[str, str], int]
    """(right answer, class that was answered) → rows, at least one."""
    others: Mapping[str, int]
    """Right answer → rows with an answer that is no class."""
    errors: Mapping[str, int]
    """Right answer → rows with an error."""

    def counts(self, gold: str) -> list[int]:
        """Return how often each class was the answer where ``gold`` is right, then other answers, then errors."""
        answered = [self.rows.get((gold, answer), 0) for answer in self.classes]
        return [*answered, self.others.get(gold, 0), self.errors.get(gold, 0)]

    def recall(self, gold: str) -> float:
        """Return the share of the rows of this class that were answered with it."""
        return self.rows.get((gold, gold), 0) / sum(self.counts(gold))

    def precision(self, answer: str) -> float | None:
        """Return the share of the answers of this class that are right; None if it was never the answer."""
        answered = sum(self.rows.get((gold, answer), 0) for gold in self.classes)
        return self.rows.get((answer, answer), 0) / answered if answered else None

    def most_frequent(self) -> list[tuple[str, str, int]]:
        """Return (right answer, wrong answer, rows), the most frequent first."""
        wrong = [(gold, answer, rows) for (gold, answer), rows in self.rows.items() if gold != answer]
        wrong += [(gold, OTHER, rows) for gold, rows in self.others.items()]
        return sorted(wrong, key=lambda entry: (-entry[2], entry[:2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """The agreement of answers with a column of right answers."""

    column: str
    question: str | None = None
    """The question that it is about; None without questions."""
    right: int
    rows: int
    """Rows that have a right answer."""
    rows_error: int = 0
    """Rows of these with an error in place of an answer."""
    rows_without_gold: int = 0
    """Rows whose right answer is null, which ``rows`` leaves out."""
    confusions: Confusions | None = None
    """None with more than ``MOST_CLASSES`` classes, and where no rows may be shown."""
    worst_rows: Sequence[SampledRow] = ()
    """Some rows with wrong answers, those first of which the model was the surest."""

    def to_summary(self) -> dict[str, Any]:
        """Return the entry for the summary; without rows the interval is null."""
        low, high = share_interval(self.right, self.rows) if self.rows else (None, None)
        return {
            "question": self.question,
            "column": self.column,
            "rows": self.rows,
            "right": self.right,
            "rows_error": self.rows_error,
            "rows_without_gold": self.rows_without_gold,
            "low": low,
            "high": high,
        }

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield what the report says of it: name and text."""
        if not self.rows:
            yield "Accuracy", f"unknown: no row has a value in column {self.column!r}"
            return
        of_question = "" if self.question is None else f"{self.question}: "
        notes = [
            f"; {rows:,} {text}"
            for rows, text in (
                (self.rows_error, "with an error, which counts as wrong"),
                (self.rows_without_gold, "more without a value there"),
            )
            if rows
        ]
        yield (
            "Accuracy",
            f"{of_question}{share_text(self.right, self.rows)}: {self.right:,} of {self.rows:,} rows agree with "
            f"column {self.column!r}{''.join(notes)}",
        )
        if self.confusions is not None and (confused := self.confusions.most_frequent()):
            shown = [
                f"{gold!r} as {answer if answer == OTHER else repr(answer)} {rows:,}"
                for gold, answer, rows in confused[:_PRINTED_CONFUSIONS]
            ]
            yield "  confused", f"most often {', '.join(shown)}"


def accuracies_of(rows: "DataFrame", golds: Sequence[Gold], *, shows_values: bool) -> list[Accuracy]:
    """Return the accuracy for each column of right answers. Reads the rows once, and once more for confusions.

    Without ``shows_values`` there are no confusions: classes are values of rows.
    """
    if not golds:
        return []
    by_class = _rows_by_class(rows, golds)
    classes = {
        gold.answers: [value for value, *_ in by_class[gold.answers].classes if value is not None]
        for gold in golds
    }
    drawn = [gold for gold in golds if shows_values and 0 < len(classes[gold.answers]) <= MOST_CLASSES]
    confusions = _confusions(rows, drawn, classes) if drawn else {}
    made = []
    for gold in golds:
        total, known = by_class[gold.answers].total, by_class[gold.answers].classes
        without, of_error = next(((n, errors) for value, n, errors in known if value is None), (0, 0))
        made.append(
            Accuracy(
                column=gold.column,
                question=gold.question,
                right=total.right,
                rows=total.rows - without,
                rows_error=total.errors - of_error,
                rows_without_gold=without,
                confusions=confusions.get(gold.answers),
            )
        )
    return made


def is_wrong(rows: "DataFrame", gold: Gold) -> "Column":
    """Return the condition that a row has a right answer, and another one as its answer. Error rows have none."""
    compared = Compared.of(rows, gold)
    return compared.gold.isNotNull() & ~compared.failed & ~compared.gold.eqNullSafe(compared.answer)


@dataclass(frozen=True, slots=True)
class Compared:
    """Expressions on rows that have answers."""

    gold: "Column"
    """The right answer as text, null if the row has none."""
    answer: "Column"
    """The answer as text that is equal to ``gold`` if the values are."""
    failed: "Column"
    """Whether the row has an error in place of an answer."""

    @property
    def is_right(self) -> "Column":
        """Null if the row has no right answer."""
        from pyspark.sql import functions as F  # noqa: N812

        is_equal = F.coalesce(~self.failed & (self.gold == self.answer), F.lit(False))
        return F.when(self.gold.isNotNull(), is_equal)

    @classmethod
    def of(cls, rows: "DataFrame", gold: Gold) -> "Compared":
        from pyspark.sql import functions as F  # noqa: N812
        from pyspark.sql.types import IntegralType, NumericType

        answers = quoted(gold.answers)
        field = "text" if gold.json_property is None else f"parsed.{quoted(gold.json_property)}"
        values = rows.select(quoted(gold.column), f"{answers}.{field}")
        kinds = [column.dataType for column in values.schema.fields]
        columns = [F.col(quoted(gold.column)), F.col(f"{answers}.{field}")]
        are_numbers = all(isinstance(kind, NumericType) for kind in kinds)
        if are_numbers and not all(isinstance(kind, IntegralType) for kind in kinds):
            # 3 and 3.0 are equal, and their texts shall be.
            columns = [
                F.regexp_replace(column.cast("double").cast("string"), r"\.0$", "") for column in columns
            ]
        texts = [column.cast("string") for column in columns]
        return cls(texts[0], texts[1], F.col(f"{answers}.error").isNotNull())


@dataclass(frozen=True, slots=True)
class _Total:
    rows: int
    right: int
    errors: int


@dataclass(frozen=True, slots=True)
class _ByClass:
    total: _Total
    classes: Sequence[tuple[str | None, int, int]]
    """(right answer, rows, errors), null first and then the most frequent; one more than fit into a matrix at most."""


def _rows_by_class(rows: "DataFrame", golds: Sequence[Gold]) -> dict[str, _ByClass]:
    """Return counts of rows by their right answers, by the column of answers. Reads the rows once."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    structs = []
    for gold in golds:
        compared = Compared.of(rows, gold)
        structs.append(
            F.struct(
                F.lit(gold.answers).alias("name"),
                compared.gold.alias("gold"),
                compared.is_right.alias("is_right"),
                compared.failed.alias("failed"),
            )
        )
    pairs = rows.select(F.explode(F.array(*structs)).alias("pair")).select("pair.*")
    counted = pairs.rollup("name", "gold").agg(
        F.grouping("gold").alias("is_total"),
        F.grouping("name").alias("is_all"),
        F.count(F.lit(1)).alias("rows"),
        F.count_if("is_right").alias("right"),
        F.count_if("failed").alias("errors"),
    )
    # Of a column of many values only the first are read by the driver.
    order = Window.partitionBy("name", "is_total").orderBy(
        F.col("gold").isNotNull(), F.col("rows").desc(), "gold"
    )
    first = counted.where("is_all = 0").withColumn("place", F.row_number().over(order))
    by_name: defaultdict[str, list[tuple[str | None, int, int]]] = defaultdict(list)
    totals = {gold.answers: _Total(0, 0, 0) for gold in golds}
    for row in first.where(F.col("place") <= MOST_CLASSES + 2).orderBy("name", "place").collect():
        if row["is_total"]:
            totals[row["name"]] = _Total(row["rows"], row["right"], row["errors"])
        else:
            by_name[row["name"]].append((row["gold"], row["rows"], row["errors"]))
    return {name: _ByClass(total, by_name[name]) for name, total in totals.items()}


def _confusions(
    rows: "DataFrame", golds: Sequence[Gold], classes: Mapping[str, Sequence[str]]
) -> dict[str, Confusions]:
    """Return the confusions of these columns of answers, whose classes are known. Reads the rows once."""
    from pyspark.sql import functions as F  # noqa: N812

    structs = []
    for gold in golds:
        compared = Compared.of(rows, gold)
        is_class = F.coalesce(compared.answer.isin(*classes[gold.answers]), F.lit(False))
        answer = F.when(~compared.failed & is_class, compared.answer)
        parts = {"name": F.lit(gold.answers), "gold": compared.gold, "failed": compared.failed}
        parts["answer"] = answer
        structs.append(F.struct(*(column.alias(name) for name, column in parts.items())))
    pairs = rows.select(F.explode(F.array(*structs)).alias("pair")).select("pair.*")
    counts = pairs.where("gold IS NOT NULL").groupBy("name", "gold", "failed", "answer").count().collect()
    made = {}
    for gold in golds:
        here = [row for row in counts if row["name"] == gold.answers]
        good = [row for row in here if not row["failed"]]
        made[gold.answers] = Confusions(
            classes=classes[gold.answers],
            rows={(row["gold"], row["answer"]): row["count"] for row in good if row["answer"] is not None},
            others={row["gold"]: row["count"] for row in good if row["answer"] is None},
            errors={row["gold"]: row["count"] for row in here if row["failed"]},
        )
    return made
