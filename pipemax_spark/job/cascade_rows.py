"""The rows of a cascade in Spark: which are sampled, what both models said of them, and which keep the small answer.

Rows with equal requests share one small answer, the first in an order that depends only on the answers, so it is
settled before any coin is thrown. Each row still has its own coin.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipemax_spark.cascade.certificate import Certificate
from pipemax_spark.cascade.coins import coin_sql, tie_break_sql
from pipemax_spark.cascade.draw import Draw
from pipemax_spark.cascade.equality import Equality
from pipemax_spark.cascade.ordered_rows import Kept, LabelledRow
from pipemax_spark.executor.requests import KEY_COLUMN
from pipemax_spark.options import JobOptions
from pipemax_spark.rows.annotated import ANNOTATION, output_schema
from pipemax_spark.rows.row_identity import identity, occurrence
from pipemax_spark.spark.helper_columns import free_name, name_in
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.conforming import conformed

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

_IDENTITY, _OCCURRENCE = "__pipemax_identity", "__pipemax_occurrence"
_SHOWN_DISAGREEMENTS, _SHOWN_LABELS = 10, 50
_KEY, _SMALL, _LARGE, _SCORE = "key", "small", "large", "score"


def manifest_digest(rows: "DataFrame") -> str:
    """Return a digest of the rows, in whatever order they come."""
    from pyspark.sql import functions as F  # noqa: N812

    keys = rows.selectExpr(f"{identity(rows.schema, rows.columns)} AS key")
    count, digest = keys.agg(F.count(F.lit(1)), F.bit_xor(F.xxhash64("key"))).collect()[0]
    return f"{count}-{(digest or 0) & (2**64 - 1):016x}"


def sampled_rows(rows: "DataFrame", draw: Draw, id_columns: tuple[str, ...]) -> "DataFrame":
    """Return the rows that both models answer: those whose coins say so."""
    names = id_columns or rows.columns
    key, number = free_name(_IDENTITY, rows.columns), free_name(_OCCURRENCE, rows.columns)
    numbered = rows.selectExpr("*", f"{identity(rows.schema, names, are_ids=bool(id_columns))} AS {key}")
    numbered = numbered.withColumn(number, occurrence(key))
    sampled = numbered.where(f"{coin_sql(draw.seed, key, number)} < {draw.sampled_below!r}D")
    return sampled.select(*map(quoted, rows.columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """A sampled row; an answer is None for an error."""

    row: LabelledRow
    """How sure the small model was, and whether the answers differ."""
    small: str | None
    large: str | None


def described(labelled: Sequence[Labelled], *, shows_answers: bool) -> dict[str, Any]:
    """Return what the report shows of the sampled rows: agreement by label, and the surest disagreements."""
    if not shows_answers:
        return {}
    by_label: dict[str, list[bool]] = defaultdict(list)
    for one in labelled:
        by_label[one.small if one.small is not None else "(error)"].append(not one.row.differs)
    apart = [one for one in labelled if one.row.differs and one.row.score is not None]
    apart.sort(key=lambda one: (-(one.row.score or 0.0), one.small or "", one.large or ""))
    facts: dict[str, Any] = {
        "disagreements": [
            {"score": one.row.score, "small": one.small, "large": one.large or "(error)"}
            for one in apart[:_SHOWN_DISAGREEMENTS]
        ]
    }
    if len(by_label) <= _SHOWN_LABELS:
        facts["labels"] = [
            {"label": label, "sampled": len(agrees), "agreeing": sum(agrees)}
            for label, agrees in sorted(by_label.items())
        ]
    return facts


class CascadeRows:
    """The rows of one draw, as both models have answered them."""

    def __init__(
        self, options: JobOptions, *, rows: "DataFrame", small: "DataFrame", labels: "DataFrame"
    ) -> None:
        """``rows`` are all rows of the draw, ``small`` and ``labels`` those of the small and of the large answers."""
        self._options = options
        self._rows = rows
        self._labels = labels
        self._small = self._first_of_each_request(small, _SMALL)

    def labelled(self, draw: Draw, equality: Equality) -> Iterator[Labelled]:
        """Yield each sampled row as both models have answered it."""
        both = self._by_request(self._labels, _LARGE).join(self._small, on=_KEY, how="left")
        facts = both.select(
            _KEY,
            score_of(self._options, _SMALL),
            answer_of(self._options, _SMALL),
            answer_of(self._options, _LARGE),
        )
        for key, score, small, large in facts.toLocalIterator():
            usable = None if score is None or not math.isfinite(score) else float(score)
            row = LabelledRow(usable, draw.tie_break(key), equality.differ(small, large))
            yield Labelled(row=row, small=small, large=large)

    def answered(
        self, certificate: Certificate, schema: "StructType", spec_hash: str, *, models: tuple[str, str]
    ) -> "DataFrame":
        """Return the rows whose final answer is known, with it: sampled ones, and those that keep the small answer.

        Rows that make the request of a sampled one have its large answer. ``schema`` is that of the rows in the
        output; ``models`` are the names of the small one and the large one.
        """
        from pyspark.sql import functions as F  # noqa: N812

        small_model, large_model = models
        key = free_name(_KEY, self._rows.columns)
        small, large = free_name(_SMALL, self._rows.columns), free_name(_LARGE, self._rows.columns)
        sampled = self._first_of_each_request(self._labels, _LARGE)
        both = (
            self._keyed(self._rows, key)
            .join(self._small.toDF(key, small), on=key, how="left")
            .join(sampled.toDF(key, large), on=key, how="left")
        )
        kinds = {name: both.schema[name].dataType for name in (small, large)}
        wanted = output_schema(schema, self._options)[ANNOTATION].dataType
        score = score_of(self._options, small)
        of_large = _annotation(large, kinds[large], wanted, large_model, score, spec_hash)
        of_small = _annotation(small, kinds[small], wanted, small_model, score, spec_hash)
        keeps = keeps_small(certificate, score, F.expr(tie_break_sql(certificate.draw.seed, quoted(key))))
        answer = F.when(F.col(large).isNotNull(), of_large).when(keeps, of_small)
        rows = both.select(*map(quoted, self._rows.columns), answer.alias(ANNOTATION))
        return rows.where(F.col(ANNOTATION).isNotNull())

    def _first_of_each_request(self, rows: "DataFrame", name: str) -> "DataFrame":
        """Return one annotation for each request, in a column of this name: a good one, if there is any."""
        from pyspark.sql import functions as F  # noqa: N812

        order = F.struct(F.col(name)["error"].isNotNull(), F.to_json(F.col(name)))
        return self._by_request(rows, name).groupBy(_KEY).agg(F.min_by(name, order).alias(name))

    def _by_request(self, rows: "DataFrame", name: str) -> "DataFrame":
        """Return each row's annotation, with the key of its request."""
        from pyspark.sql import functions as F  # noqa: N812

        keyed = self._keyed(rows, _KEY)
        return keyed.select(_KEY, F.col(ANNOTATION).alias(name))

    def _keyed(self, rows: "DataFrame", key: str) -> "DataFrame":
        """Return the rows with the key of their request."""
        keyed = self._options.request_columns.add_with_keys(rows)
        return keyed.selectExpr(
            *map(quoted, rows.columns), f"{quoted(name_in(KEY_COLUMN, keyed.columns))} AS {quoted(key)}"
        )


def keeps_small(certificate: Certificate, score: "Column", tie: "Column") -> "Column":
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


def score_of(options: JobOptions, annotation: str) -> "Column":
    """Return how sure the small model was of its answer: null for an error."""
    from pyspark.sql import functions as F  # noqa: N812

    generation, column = options.generation, F.col(annotation)
    if generation.choice or generation.task == "classify":
        score = column["probability"]
    elif generation.n > 1:
        score = column["agreement"]
    else:
        score = F.exp(column["logprob_sum"])
    return F.when(column["error"].isNull(), score.cast("double"))


def answer_of(options: JobOptions, annotation: str) -> "Column":
    """Return what is compared of an annotation: null for an error."""
    from pyspark.sql import functions as F  # noqa: N812

    column = F.col(annotation)
    value = column["label" if options.generation.task == "classify" else "text"]
    return F.when(column["error"].isNull(), value)


def _annotation(
    name: str, held: "DataType", wanted: "DataType", model: str, score: "Column", spec_hash: str
) -> "Column":
    """Return an annotation as one of the output, which says whose answer it is."""
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import StructType

    assert isinstance(held, StructType), held
    assert isinstance(wanted, StructType), wanted
    known = {"model": F.lit(model), "score": score, "spec_hash": F.lit(spec_hash)}
    fields = []
    for field in wanted.fields:
        if field.name in known:
            value = known[field.name]
        elif field.name in held.names:
            value = conformed(F.col(name)[field.name], held[field.name].dataType, field.dataType)
        else:
            value = F.lit(None).cast(field.dataType)
        fields.append(value.alias(field.name))
    return F.struct(*fields)
