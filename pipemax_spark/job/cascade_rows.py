"""The rows of a cascade in Spark: which are sampled, what both models said of them, and which keep the small answer.

Rows with equal requests share one small answer, the first in an order that depends only on the answers, so it is
settled before any coin is thrown. Each row still has its own coin.
"""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING

from pipemax_spark.cascade.batches import Decision
from pipemax_spark.cascade.coins import coin_sql, tie_break_sql
from pipemax_spark.cascade.draw import Draw
from pipemax_spark.cascade.equality import Equality
from pipemax_spark.cascade.ordered_rows import Kept, LabelledRow
from pipemax_spark.executor.requests import KEY_COLUMN
from pipemax_spark.job.cascade_answers import ComparedAnswer, row_score
from pipemax_spark.job.cascade_facts import AskedAgain, Labelled
from pipemax_spark.options import JobOptions
from pipemax_spark.rows.annotated import ANNOTATION, output_schema
from pipemax_spark.rows.row_identity import identity, occurrence
from pipemax_spark.spark.helper_columns import free_name, name_in
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.conforming import conformed

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructField, StructType

_IDENTITY, _OCCURRENCE = "__pipemax_identity", "__pipemax_occurrence"
_KEY, _SMALL, _LARGE, _AGAIN = "key", "small", "large", "again"


def manifest_digest(rows: "DataFrame") -> str:
    """Return a digest of the rows, in whatever order they come."""
    from pyspark.sql import functions as F  # noqa: N812

    keys = rows.selectExpr(f"{identity(rows.schema, rows.columns)} AS key")
    count, digest = keys.agg(F.count(F.lit(1)), F.bit_xor(F.xxhash64("key"))).collect()[0]
    return f"{count}-{(digest or 0) & (2**64 - 1):016x}"


def sampled_rows(rows: "DataFrame", draw: Draw, id_columns: tuple[str, ...]) -> "DataFrame":
    """Return the rows that both models answer to certify a threshold: those whose coins say so."""
    return _rows_of_coins(rows, draw, id_columns, first=draw.pilot_share, end=draw.sampled_below)


def pilot_rows(rows: "DataFrame", draw: Draw, id_columns: tuple[str, ...]) -> "DataFrame":
    """Return the rows of the pilot, which both models answer before the sample share is chosen."""
    return _rows_of_coins(rows, draw, id_columns, first=0.0, end=draw.pilot_share)


def _rows_of_coins(
    rows: "DataFrame", draw: Draw, id_columns: tuple[str, ...], *, first: float, end: float
) -> "DataFrame":
    names = id_columns or rows.columns
    key, number = free_name(_IDENTITY, rows.columns), free_name(_OCCURRENCE, rows.columns)
    numbered = rows.selectExpr("*", f"{identity(rows.schema, names, are_ids=bool(id_columns))} AS {key}")
    numbered = numbered.withColumn(number, occurrence(key))
    coin = coin_sql(draw.seed, key, number)
    chosen = numbered.where(f"{coin} >= {first!r}D AND {coin} < {end!r}D")
    return chosen.select(*map(quoted, rows.columns))


class CascadeRows:
    """The rows of one draw, as both models have answered them."""

    def __init__(
        self,
        options: JobOptions,
        *,
        rows: "DataFrame",
        small: "DataFrame",
        labels: "DataFrame",
        pilot: "DataFrame | None" = None,
    ) -> None:
        """``rows`` are all rows of the draw, ``small`` and ``labels`` those of the small and of the large answers.

        ``pilot`` are the large answers of the pilot: final, and no part of what is certified.
        """
        self._options = options
        self._rows = rows
        self._labels = labels
        self._of_large = labels if pilot is None else labels.unionByName(pilot)
        self._small = self._first_of_each_request(small, _SMALL)

    def labelled(self, draw: Draw, answers: Sequence[ComparedAnswer]) -> Iterator[tuple[Labelled, ...]]:
        """Yield the answers of each sampled row as both models have given them."""
        from pyspark.sql import functions as F  # noqa: N812

        both = self._by_request(self._labels, _LARGE).join(self._small, on=_KEY, how="left")
        small, large = F.col(_SMALL), F.col(_LARGE)
        facts = (F.struct(one.score(small), one.value(small), one.value(large)) for one in answers)
        answered_us = F.unix_micros(large[ANNOTATION]["completed_at"])
        for key, answered, *of_answers in both.select(_KEY, answered_us, *facts).toLocalIterator():
            tie = draw.tie_break(key)
            yield tuple(
                _labelled(one.equality, tie, answered, *of_answer)
                for of_answer, one in zip(of_answers, answers, strict=True)
            )

    def drawn_requests(self, sampled: "DataFrame", draw: Draw, number: int) -> "DataFrame":
        """Return so many of the sampled rows, each with another request, drawn by the coins of the requests."""
        from pyspark.sql import functions as F  # noqa: N812

        key = free_name(_KEY, sampled.columns)
        rows = self._keyed(sampled, key).dropDuplicates([key])
        order = F.expr(tie_break_sql(draw.seed, quoted(key)))
        return rows.orderBy(order, key).limit(number).select(*map(quoted, sampled.columns))

    def repeated(self, again: "DataFrame", answers: Sequence[ComparedAnswer]) -> list[AskedAgain]:
        """Count for each answer how often the large model has given the same one again."""
        from pyspark.sql import functions as F  # noqa: N812

        both = self._first_of_each_request(again, _AGAIN).join(
            self._first_of_each_request(self._labels, _LARGE), on=_KEY
        )
        values = (F.struct(one.value(F.col(_LARGE)), one.value(F.col(_AGAIN))) for one in answers)
        rows = both.select(*values).collect()
        return [
            AskedAgain(rows=len(rows), same=sum(not one.equality.differ(*row[place]) for row in rows))
            for place, one in enumerate(answers)
        ]

    def answered(
        self,
        certificates: Sequence[Decision],
        answers: Sequence[ComparedAnswer],
        schema: "StructType",
        spec_hash: str,
        *,
        models: tuple[str, str],
    ) -> "DataFrame":
        """Return the rows whose final answers are known, with them: the sample, the pilot, and what is kept.

        A row keeps them if each of ``answers`` may be kept by its certificate. Rows that make the request of one
        with large answers have these. ``schema`` is that of the rows in the output; ``models`` are the names of the
        small one and the large one.
        """
        from pyspark.sql import functions as F  # noqa: N812

        key = free_name(_KEY, self._rows.columns)
        small, large = free_name(_SMALL, self._rows.columns), free_name(_LARGE, self._rows.columns)
        sampled = self._first_of_each_request(self._of_large, _LARGE)
        both = (
            self._keyed(self._rows, key)
            .join(self._small.toDF(key, small), on=key, how="left")
            .join(sampled.toDF(key, large), on=key, how="left")
        )
        of_small = F.col(small)
        tie = F.expr(tie_break_sql(certificates[0].draw.seed, quoted(key)))
        may_keep = [
            keeps_small(certificate, one.score(of_small), tie)
            for certificate, one in zip(certificates, answers, strict=True)
        ]
        scores = {one.column: one.score(of_small) for one in answers}
        known = {
            name: {"spec_hash": F.lit(spec_hash), "score": scores.get(name, row_score(answers, of_small))}
            for name in self._columns
        }
        small_model, large_model = (F.lit(model) for model in models)
        wanted = output_schema(schema, self._options)
        final = (
            F.when(
                F.col(large).isNotNull(),
                _annotation(both.schema[large], name, wanted[name], known[name] | {"model": large_model}),
            )
            .when(
                reduce(operator.and_, may_keep),
                _annotation(both.schema[small], name, wanted[name], known[name] | {"model": small_model}),
            )
            .alias(name)
            for name in self._columns
        )
        rows = both.select(*map(quoted, self._rows.columns), *final)
        return rows.where(F.col(ANNOTATION).isNotNull())

    @property
    def _columns(self) -> list[str]:
        """The columns of annotations."""
        return [*(question.name for question in self._options.ask), ANNOTATION]

    def _first_of_each_request(self, rows: "DataFrame", name: str) -> "DataFrame":
        """Return the annotations of one row for each request, in a struct of this name: good ones, if there are any."""
        from pyspark.sql import functions as F  # noqa: N812

        order = F.struct(F.col(name)[ANNOTATION]["error"].isNotNull(), F.to_json(F.col(name)))
        return self._by_request(rows, name).groupBy(_KEY).agg(F.min_by(name, order).alias(name))

    def _by_request(self, rows: "DataFrame", name: str) -> "DataFrame":
        """Return each row's annotations in a struct of this name, with the key of its request."""
        from pyspark.sql import functions as F  # noqa: N812

        keyed = self._keyed(rows, _KEY)
        return keyed.select(_KEY, F.struct(*map(quoted, self._columns)).alias(name))

    def _keyed(self, rows: "DataFrame", key: str) -> "DataFrame":
        """Return the rows with the key of their request."""
        keyed = self._options.request_columns.add_with_keys(rows)
        return keyed.selectExpr(
            *map(quoted, rows.columns), f"{quoted(name_in(KEY_COLUMN, keyed.columns))} AS {quoted(key)}"
        )


def keeps_small(certificate: Decision, score: "Column", tie: "Column") -> "Column":
    """Return the condition on which a row that is not sampled keeps the small answer, as ``Certificate.keeps``."""
    from pyspark.sql import functions as F  # noqa: N812

    cut = certificate.cut
    if cut.kept is Kept.NONE:
        return F.lit(False)
    is_usable = score.isNotNull() & ~F.isnan(score) & (F.abs(score) < F.lit(math.inf))
    if cut.threshold is None:
        return is_usable
    threshold, threshold_tie = map(F.lit, cut.threshold)
    return is_usable & ((score > threshold) | ((score == threshold) & (tie > threshold_tie)))


def _labelled(
    equality: Equality,
    tie: float,
    answered_us: int | None,
    score: float | None,
    small: str | None,
    large: str | None,
) -> Labelled:
    usable = None if score is None or not math.isfinite(score) else float(score)
    return Labelled(
        row=LabelledRow(usable, tie, equality.differ(small, large)),
        small=None if small is None else equality.shown(small),
        large=None if large is None else equality.shown(large),
        answered_us=answered_us,
    )


def _annotation(
    answers: "StructField", name: str, wanted: "StructField", known: Mapping[str, "Column"]
) -> "Column":
    """Return an annotation of the struct ``answers`` as one of the output, which says whose answer it is."""
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import StructType

    held, kind, annotation = answers.dataType, wanted.dataType, F.col(answers.name)[name]
    assert isinstance(held, StructType), held
    held = held[name].dataType
    assert isinstance(held, StructType), held
    assert isinstance(kind, StructType), kind
    answer = kind.names[0]  # of a model that scores, ``score``
    fields = []
    for field in kind.fields:
        if field.name in known and field.name != answer:
            value = known[field.name]
        elif field.name in held.names:
            value = conformed(annotation[field.name], held[field.name].dataType, field.dataType)
        else:
            value = F.lit(None).cast(field.dataType)
        fields.append(value.alias(field.name))
    return F.struct(*fields)
