"""Take answers over from an earlier output of the same spec (``--reuse``): of its rows that make the same request.

The rows that are left are joined once, by the key of their request, with the earlier table's rows that have an
answer. Those that find one are committed with the annotation as it stands, which names the run that computed it. Rows
of another spec, another model's for instance, are never taken, and neither are errors. A row that is sampled without a
seed is to have an answer of its own, so it takes none.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipemax_spark.errors import CommitRefusedError, JobError, TakenOverError
from pipemax_spark.executor.requests import KEY_COLUMN, OVERRIDES_COLUMN
from pipemax_spark.job.job import JobCall
from pipemax_spark.job.outcomes import Outcomes, written
from pipemax_spark.request.prompts import find_field
from pipemax_spark.request.spec import AnnotationSpec
from pipemax_spark.rows.annotated import ANNOTATION, holds_annotations, output_schema
from pipemax_spark.rows.checked import Checked
from pipemax_spark.spark.helper_columns import free_name, name_in
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.conforming import conformed
from pipemax_spark.storage.fence import Claim
from pipemax_spark.storage.hadoop import HadoopFiles
from pipemax_spark.storage.names import is_path
from pipemax_spark.storage.output_table import OutputTable, open_table
from pipemax_spark.storage.spec_properties import spec_texts

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_ANSWER = "__pipemax_answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused:
    """What was taken over."""

    rows: int = 0
    tokens: int = 0
    """Tokens of these rows, which were neither read nor generated."""

    def __add__(self, other: "Reused") -> "Reused":
        return Reused(rows=self.rows + other.rows, tokens=self.tokens + other.tokens)


@dataclass(frozen=True, slots=True)
class Reuse:
    """The earlier table of a job, whose rows may be taken over."""

    call: JobCall
    checked: Checked
    table: OutputTable

    @classmethod
    def of(cls, call: JobCall, checked: Checked) -> "Reuse | None":
        """Return the table that the options name, if they do."""
        name = call.options.reuse
        return None if name is None else cls(call, checked, _earlier_table(call.spark, name))

    def commit(
        self, left: "DataFrame", claim: Claim, outcomes: Outcomes, *, chunk: int, path: str
    ) -> "tuple[Reused, DataFrame, int]":
        """Commit those of the rows ``left`` that the table answers.

        Return what was taken over, the other rows and their number.
        ``chunk`` is an unused chunk number, ``path`` a directory for the rows in transit.
        """
        from pyspark.sql import functions as F  # noqa: N812

        answer = free_name(_ANSWER, left.columns)
        rows = written(self.call.spark, self._joined(left, answer), path)
        has_answer = F.col(answer).isNotNull()
        reused = _counted(rows, F.col(answer)[ANNOTATION])
        rest = rows.where(~has_answer).select(*map(quoted, left.columns))
        if not reused.rows:
            return reused, rest, int(rest.count())
        kept = self.call.options.request_columns.output_schema(left.schema).names
        columns = [F.col(answer)[name].alias(name) for name in self._answer_columns()]
        answered = rows.where(has_answer).select(*map(quoted, kept), *columns)
        transaction = claim.reuse(chunk, table=self.table.name)
        try:
            rows_kept = outcomes.commit(answered, transaction)
        except CommitRefusedError as error:
            raise TakenOverError(claim.taken_over()) from error
        claim.landed(transaction, expected_rows=reused.rows + rows_kept)
        return reused, rest, int(rest.count())

    def count(self, left: "DataFrame") -> Reused:
        """Return what of the rows ``left`` would be taken over."""
        from pyspark.sql import functions as F  # noqa: N812

        answer = free_name(_ANSWER, left.columns)
        return _counted(self._joined(left, answer), F.col(answer)[ANNOTATION])

    def _joined(self, left: "DataFrame", answer: str) -> "DataFrame":
        """Return the rows, each with its annotation columns in a struct ``answer``, null where none is known."""
        from pyspark.sql import functions as F  # noqa: N812

        columns = self.call.options.request_columns
        keyed = columns.add_with_keys(left)
        key = name_in(KEY_COLUMN, keyed.columns)
        if (sampled := self._is_sampled(keyed)) is not None:
            keyed = keyed.withColumn(key, F.when(~sampled, F.col(key)))
        asked = keyed.select(*map(quoted, left.columns), key)
        return asked.join(self._known(key, answer), on=key, how="left").select(
            *map(quoted, left.columns), answer
        )

    def _known(self, key: str, answer: str) -> "DataFrame":
        """Return the table's answers, one for each request."""
        from pyspark.sql import functions as F  # noqa: N812

        rows = self.table.read(version=self.table.version()).where(
            f"{ANNOTATION}.spec_hash = '{self.checked.spec.hash}' AND {ANNOTATION}.error.code IS NULL"
        )
        keyed = self.call.options.request_columns.add_with_keys(rows)
        options = self.call.options
        wanted = output_schema(self.checked.schema, options)
        fields = []
        for name in self._answer_columns():
            held = find_field(name, rows.schema)
            assert held is not None, f"{name} was looked for by check()"
            value = conformed(F.col(quoted(name)), held.dataType, wanted[name].dataType)
            fields.append(value.alias(name))
        known = keyed.select(name_in(KEY_COLUMN, keyed.columns), F.struct(*fields).alias(_ANSWER))
        return known.toDF(key, answer).dropDuplicates([key])

    def _answer_columns(self) -> list[str]:
        return [*(question.name for question in self.call.options.ask), ANNOTATION]

    def _is_sampled(self, requests: "DataFrame") -> "Column | None":
        """Return a condition on rows that say themselves that they are sampled without a seed, if any can."""
        from pyspark.sql import functions as F  # noqa: N812

        name = name_in(OVERRIDES_COLUMN, requests.columns)
        names = getattr(requests.schema[name].dataType, "names", ()) if name in requests.columns else ()
        if "temperature" not in names or all(one.seed is not None for one in self.call.options.generations):
            return None
        overrides = requests[name]
        sampled = F.coalesce(overrides["temperature"].try_cast("double"), F.lit(0.0)) != 0
        return sampled & overrides["seed"].isNull() if "seed" in names else sampled

    def check(self) -> None:
        """Raise ``JobError`` if the table cannot answer this job's rows."""
        name, table, output = self.call.options.reuse, self.table, self.call.table
        if not table.exists():
            raise JobError(f"--reuse {name!r}: there is no such Delta or Iceberg table")
        if output.exists() and output.table_id() == table.table_id():
            raise JobError(f"--reuse {name!r} is the output itself, whose rows are done anyway; leave it out")
        rows = table.read()
        if not holds_annotations(rows.schema):
            raise JobError(f"--reuse {name!r} holds no annotations; name the output of an earlier job")
        self._check_spec()
        if self.call.options.source.has_images(self.checked.source.rows.schema):
            raise JobError(
                "--reuse compares requests, and an image may have changed behind its path; leave it out"
            )
        for column in self._answer_columns():
            if find_field(column, rows.schema) is None:
                raise JobError(f"--reuse {name!r} lacks the column {column!r}, which holds its answers")
        try:
            self.call.options.request_columns.add(rows)
        except JobError as error:
            raise JobError(
                f"--reuse {name!r} lacks a column from which its requests were made, so they cannot be compared "
                f"(an output has the columns of its --select): {error}"
            ) from error

    def _check_spec(self) -> None:
        """Raise ``JobError`` if the table has no rows under the job's spec."""
        spec, table = self.checked.spec, self.table
        known = spec_texts(table.properties())
        if spec.hash in known:
            return
        # A copy of an output has its rows without its properties.
        held = {row[0] for row in table.read().select(f"{ANNOTATION}.spec_hash").distinct().collect()}
        if spec.hash in held:
            return
        others = [
            f"{spec_hash} ({'; '.join(spec.changes_from(AnnotationSpec.from_json(text)))})"
            for spec_hash, text in known.items()
        ] or sorted(filter(None, held))
        raise JobError(
            f"--reuse {self.call.options.reuse!r} has no rows under this job's spec {spec.hash}, so no answer of "
            f"it can be taken; its specs are {' and '.join(others) or 'none'}"
        )


def _counted(rows: "DataFrame", annotation: "Column") -> Reused:
    from pyspark.sql import functions as F  # noqa: N812

    annotations = rows.where(annotation.isNotNull()).select(annotation.alias(ANNOTATION))
    fields = annotations.select(f"{ANNOTATION}.*")
    counts = [name for name in ("prompt_tokens", "completion_tokens") if name in fields.columns]
    sums = [F.coalesce(F.sum(name), F.lit(0)) for name in counts]
    num_rows, *tokens = fields.agg(F.count(F.lit(1)), *sums).collect()[0]
    return Reused(rows=num_rows, tokens=sum(tokens))


def _earlier_table(spark: "SparkSession", name: str) -> OutputTable:
    return open_table(spark, HadoopFiles(spark).qualified(name) if is_path(name) else name)
