"""Forget rows: remove them from an output and from everything else that its jobs have written.

The rows are removed from a cascade's parts, from pages, summaries, logs and MLflow first, and from the output last: it
is by the output's values that they are found there. So a command that died is given again. What runs that died have
left is deleted whole, because completions are kept without their rows. The command claims the output as a job does,
so no earlier run can bring a row back.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipemax_spark.errors import CommitRefusedError, JobError, TakenOverError, first_line
from pipemax_spark.job.arguments import log_directory
from pipemax_spark.job.job import new_run_id
from pipemax_spark.options import driver_directory
from pipemax_spark.report.forgetting import Trace, Traces, traces_in_files, traces_in_mlflow
from pipemax_spark.report.terminal import Terminal
from pipemax_spark.request.prompts import find_field, resolve_names
from pipemax_spark.rows.annotated import holds_annotations, is_annotation
from pipemax_spark.rows.row_identity import identity
from pipemax_spark.rows.workdir import WorkDirectory, work_base
from pipemax_spark.spark.sql import quoted
from pipemax_spark.storage.fence import Claim
from pipemax_spark.storage.hadoop import HadoopFiles
from pipemax_spark.storage.names import is_path
from pipemax_spark.storage.output_table import OutputTable, open_table
from pipemax_spark.storage.tables import KEY, DeltaTable, Replaced

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_MOST_ROWS = 100_000
_KEPT, _CASCADE, _CHECKPOINTS = ".kept", "cascade", "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetOptions:
    """Which rows of which output are forgotten."""

    output: str
    id_columns: tuple[str, ...]
    ids: str | None = None
    """File of ids: one a line, or with several id columns a CSV file that names them in its first line."""
    where: str | None = None
    """SQL condition on the output's rows."""
    work_dir: str | None = None
    log_dir: str | None = None
    is_confirmed: bool = False
    """Without it, the rows are only counted."""

    def __post_init__(self) -> None:
        if (self.ids is None) == (self.where is None):
            raise JobError(
                "give --ids FILE or --where CONDITION, one of the two: they say which rows are forgotten"
            )
        if not self.id_columns:
            raise JobError("give --id-columns, the columns by which the rows are known everywhere")


def forget(spark: "SparkSession", options: ForgetOptions, terminal: Terminal) -> int:
    """Count the rows everywhere and, if that is confirmed, forget them; return how many rows the output had of them.

    Raise ``JobError`` for what the user can fix, before anything is changed.
    """
    name = HadoopFiles(spark).qualified(options.output) if is_path(options.output) else options.output
    table = open_table(spark, name)
    if not table.exists() or not holds_annotations(table.read().schema):
        raise JobError(f"output {options.output!r} is not the output of a job; name one")
    table.check_usable(replaces="pipemax forget")
    if table.properties().get("delta.appendOnly", "").lower() == "true":
        raise JobError(
            f"output {table.name!r} has delta.appendOnly set, so no row can leave it; unset it first"
        )
    return _Forgetting(spark, options, terminal, table).run()


class _Forgetting:
    def __init__(
        self, spark: "SparkSession", options: ForgetOptions, terminal: Terminal, table: OutputTable
    ) -> None:
        self._spark, self._options, self._say, self._table = spark, options, terminal.say, table
        self._files = HadoopFiles(spark)
        rows = table.read()
        self._ids = tuple(resolve_names(options.id_columns, rows.schema))
        self._schema = type(rows.schema)([rows.schema[name] for name in self._ids])
        self._key = identity(self._schema, self._ids, are_ids=True)
        base = work_base(options.work_dir, table.location())
        self._base, self._root = base, f"{base}/{table.table_id()}"

    def run(self) -> int:
        """See ``forget``."""
        ids = self._wanted().cache()
        if ids.count() > _MOST_ROWS:
            raise JobError(f"these are more than {_MOST_ROWS:,} rows; forget them in several commands")
        keys = self._spark.createDataFrame(ids.selectExpr(f"{self._key} AS {KEY}").collect(), f"{KEY} string")
        num_rows = self._of(self._table.read(), keys).count()
        self._say("Output", f"{num_rows:,} rows of {self._table.name}")
        parts = self._parts_with(keys)
        left = [one for one in self._files.list(self._root) if self._is_of_run(one.name)]
        self._say("Work", f"{len(left):,} runs that died, which are deleted whole: {self._root}")
        traces = self._traces(ids, self._own_values(keys, parts))
        for trace in traces:
            self._say("Shown in", trace.place)
        if not self._options.is_confirmed:
            self._say("", "nothing was changed; the same command with --yes forgets these rows")
            return num_rows
        run_id = new_run_id()
        with WorkDirectory(
            self._files, self._base, table_id=self._table.table_id(), run_id=run_id, say=self._warn
        ) as work:
            for part in parts:
                self._blank(part, keys)
            for trace in traces:
                trace.remove()
            if num_rows:
                self._remove(keys, run_id, work)
            work.drop_left_runs()
        self._say("", f"forgotten; what is left is older versions: {self._history()}")
        return num_rows

    def _warn(self, text: str) -> None:
        self._say("", text)

    def _wanted(self) -> "DataFrame":
        """Return the distinct ids that are to be forgotten."""
        from pyspark.errors import PySparkException
        from pyspark.sql import functions as F  # noqa: N812

        columns = [*map(quoted, self._ids)]
        if self._options.where is not None:
            try:
                return self._table.read().where(self._options.where).select(*columns).distinct()
            except PySparkException as error:
                text = first_line(error)
                raise JobError(
                    f"--where {self._options.where!r} is not a condition on the output: {text}"
                ) from error
        rows = read_ids(self._options.ids or "", self._ids)
        names = ", ".join(f"{name} string" for name in columns)
        texts = self._spark.createDataFrame(rows, names)
        typed = [
            F.col(quoted(field.name)).try_cast(field.dataType).alias(field.name) for field in self._schema
        ]
        wanted = texts.select(*typed).distinct()
        wrong = wanted.where(" OR ".join(f"{name} IS NULL" for name in columns)).count()
        if wrong:
            kinds = ", ".join(f"{one.name} {one.dataType.simpleString()}" for one in self._schema)
            raise JobError(f"--ids {self._options.ids!r} has {wrong:,} ids that are no values of {kinds}")
        return wanted

    def _of(self, rows: "DataFrame", keys: "DataFrame", how: str = "left_semi") -> "DataFrame":
        from pyspark.sql import functions as F  # noqa: N812

        return rows.join(F.broadcast(keys), F.expr(self._key) == keys[KEY], how)

    def _is_of_run(self, name: str) -> bool:
        return name not in (_CASCADE, _CHECKPOINTS)

    def _parts_with(self, keys: "DataFrame") -> list[str]:
        """Return the tables of cascades that hold any of the rows.

        Raise ``JobError`` for a cascade that is under way.
        """
        tables: list[str] = []
        for spec in self._files.list(f"{self._root}/{_CASCADE}"):
            epochs = [one for one in self._files.list(spec.path) if one.name.isdecimal()]
            latest = max((int(one.name) for one in epochs), default=0)
            for epoch in epochs:
                with_rows = [part for part in self._parts(epoch.path) if self._holds(part, keys)]
                if with_rows and int(epoch.name) == latest and not self._files.exists(f"{epoch.path}/closed"):
                    raise JobError(
                        f"a cascade over these rows is under way ({epoch.path}); run its job to the end first, or "
                        "delete that directory, with which its certificate begins again"
                    )
                tables += with_rows
        if tables:
            self._say(
                "Cascade", f"{len(tables):,} tables in {self._root}/{_CASCADE}, whose rows are set to null"
            )
        return tables

    def _parts(self, epoch: str) -> list[str]:
        """Return the tables of an epoch, after finishing what an earlier command began."""
        entries = {one.path for one in self._files.list(epoch) if one.is_directory}
        for path in [path for path in entries if path.endswith(_KEPT)]:
            whole = path.removesuffix(_KEPT)
            if whole in entries:
                self._files.delete(path)
            else:
                self._files.rename(path, whole)
                entries.add(whole)
        tables = sorted(path for path in entries if not path.endswith(_KEPT))
        return [path for path in tables if self._files.exists(f"{path}/_delta_log")]

    def _holds(self, part: str, keys: "DataFrame") -> bool:
        rows = DeltaTable(self._spark, part).read()
        has_ids = all(find_field(name, rows.schema) is not None for name in self._ids)
        return has_ids and not self._of(rows, keys).isEmpty()

    def _blank(self, part: str, keys: "DataFrame") -> None:
        """Write a cascade's table again, with nulls in these rows: its numbers of rows stay."""
        from pyspark.sql import functions as F  # noqa: N812

        rows = DeltaTable(self._spark, part).read()
        both = self._of(rows, keys, "left")
        kept = [F.when(keys[KEY].isNull(), rows[quoted(name)]).alias(name) for name in rows.columns]
        both.select(*kept).write.format("delta").mode("overwrite").save(f"{part}{_KEPT}")
        self._files.delete(part)
        self._files.rename(f"{part}{_KEPT}", part)

    def _traces(self, ids: "DataFrame", values: Sequence[str]) -> list[Trace]:
        """Return the texts that speak of the rows."""
        known = [{name: str(row[name]) for name in self._ids} for row in ids.collect()]
        traces = Traces(known, values)
        output, driver = self._table.name, driver_directory(self._options.output)
        logs = log_directory(self._options.log_dir, self._options.output)
        directories = [driver / "runs", logs]
        cascade = Path(self._root) / _CASCADE
        directories += [path for kind in ("runs", "logs") for path in cascade.glob(f"*/*/{kind}")]
        in_files = traces_in_files(traces, directories, output=output)
        return [*in_files, *traces_in_mlflow(traces, driver / "mlflow", output=output)]

    def _own_values(self, keys: "DataFrame", parts: Sequence[str]) -> Sequence[str]:
        """Return the texts in the rows, of columns and answers, that no other row of the output has.

        A cascade's ``parts`` also have answers that are not in the output.
        """
        from pyspark.sql import functions as F  # noqa: N812

        output = self._table.read()
        of_rows = _texts(self._of(output, keys))
        for part in parts:
            of_rows = of_rows.union(_texts(self._of(DeltaTable(self._spark, part).read(), keys)))
        of_rows = of_rows.distinct()
        others = _texts(self._of(output, keys, "left_anti")).join(F.broadcast(of_rows), "value", "left_semi")
        return [row["value"] for row in of_rows.join(others, "value", "left_anti").collect()]

    def _remove(self, keys: "DataFrame", run_id: str, work: WorkDirectory) -> None:
        table = self._table
        claim = Claim.take(table, run_id, schema=self._schema if table.fills_columns else None)
        transaction = claim.forgetting()
        session = table.session_for_replacing()
        keys.write.parquet(work.outcomes_path)
        written = session.read.schema(keys.schema).parquet(work.outcomes_path)
        key = identity(self._schema, self._ids, table="t", are_ids=True)
        replaced = Replaced(keys=written, key=key, condition="true")
        try:
            table.replace(session, None, replaced, transaction)
        except CommitRefusedError as error:
            raise TakenOverError(claim.taken_over()) from error
        claim.landed(transaction, expected_rows=0)
        if table.properties().get("delta.enableDeletionVectors", "").lower() == "true":
            # Such a table only marks rows as deleted; this writes its files without them.
            self._spark.sql(f"REORG TABLE {table.sql_name} APPLY (PURGE)")

    def _history(self) -> str:
        name = self._table.sql_name
        if self._table.format_name == "Iceberg":
            return f"expire_snapshots and remove_orphan_files of {name} remove them"
        return f"VACUUM {name} removes them, and the log's retention the values in its statistics"


def read_ids(path: str, id_columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the ids in this file. Raise ``JobError`` if it cannot be read, or lacks an id column."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise JobError(f"--ids {path!r} cannot be read: {error}") from error
    lines = [line for line in lines if line.strip()]
    if len(id_columns) == 1:
        return [(line.strip(),) for line in lines if line.strip() != id_columns[0]]
    rows: list[Mapping[str, Any]] = list(csv.DictReader(lines))
    missing = [name for name in id_columns if rows and rows[0].get(name) is None]
    if missing:
        raise JobError(f"--ids {path!r} has no column {missing[0]!r}; its first line names the id columns")
    return [tuple(str(row[name]) for name in id_columns) for row in rows]


def _texts(rows: "DataFrame") -> "DataFrame":
    """Return the texts of the rows' columns, answers and errors, in the column ``value``."""
    from pyspark.sql import functions as F  # noqa: N812
    from pyspark.sql.types import StringType, StructType

    texts = [F.lit(None).cast("string")]
    for field in rows.schema:
        column = quoted(field.name)
        if isinstance(field.dataType, StringType):
            texts.append(F.col(column))
        elif is_annotation(field):
            assert isinstance(field.dataType, StructType), field
            texts.append(F.col(f"{column}.error.message"))
            texts += [F.col(f"{column}.text").cast("string")] if "text" in field.dataType.names else []
    return rows.select(F.explode(F.array(*texts)).alias("value")).where("value IS NOT NULL")
