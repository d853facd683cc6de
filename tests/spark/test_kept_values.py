"""Rows of every type are found again in the table that was given them, or are refused before it is claimed."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pipemax_spark.cascade.coins import coin, coin_sql, tie_break, tie_break_sql
from pipemax_spark.errors import JobError
from pipemax_spark.job.outcomes import written
from pipemax_spark.job.settings import job_settings
from pipemax_spark.rows.left import keys_left_by_content, rows_left
from pipemax_spark.rows.row_identity import identity
from pipemax_spark.storage.partition_values import changed_in_delta
from pipemax_spark.storage.tables import DeltaTable, Transaction
from tests.spark.conftest import Jobs
from tests.spark.spark_work import set_to
from tests.spark.typed_rows import SCALARS, TypedRows, typed_rows

MILLIS = "spark.sql.parquet.outputTimestampType"
ZONE = "spark.sql.session.timeZone"
SETTINGS = {
    MILLIS: ["TIMESTAMP_MILLIS", "TIMESTAMP_MICROS", "INT96"],
    "spark.sql.parquet.datetimeRebaseModeInWrite": ["LEGACY", "EXCEPTION"],
    "spark.sql.parquet.int96RebaseModeInWrite": ["LEGACY", "EXCEPTION"],
    "spark.sql.parquet.datetimeRebaseModeInRead": ["LEGACY"],
    "spark.sql.parquet.int96RebaseModeInRead": ["LEGACY"],
    "spark.sql.parquet.int96AsTimestamp": ["false"],
    "spark.sql.parquet.binaryAsString": ["true"],
    "spark.sql.parquet.inferTimestampNTZ.enabled": ["false"],
    "spark.sql.parquet.writeLegacyFormat": ["true"],
    "spark.sql.parquet.enableVectorizedReader": ["false"],
    "spark.databricks.delta.write.utcTimestampPartitionValues": ["false"],
    "spark.sql.timestampType": ["TIMESTAMP_NTZ"],
    "spark.sql.legacy.timeParserPolicy": ["LEGACY"],
    "spark.sql.jsonGenerator.ignoreNullFields": ["false"],
    "spark.sql.ansi.enabled": ["false"],
    "spark.sql.ansi.doubleQuotedIdentifiers": ["true"],
    "spark.sql.parser.escapedStringLiterals": ["true"],
    "spark.sql.legacy.castComplexTypesToString.enabled": ["true"],
    "spark.sql.caseSensitive": ["true"],
    ZONE: ["Europe/Berlin", "Asia/Kathmandu"],
}
"""Those that change how a value is stored, read, printed or compared."""


def numbers(frame: Any) -> list[int]:
    return sorted(row["n"] for row in frame.select("n").collect())


def identities(frame: Any, columns: list[str]) -> list[Any]:
    keys = [f"{identity(frame.schema, [name])} AS {name}" for name in columns]
    return [row[1:] for row in sorted(frame.selectExpr("n", *keys).collect())]


def check_kept(table: Any, rows: Any, directory: Path) -> None:
    """Ask which rows are left, write these as a job does, and ask again."""
    spark, every = rows.sparkSession, numbers(rows)
    recorded = written(spark, rows_left(rows, table.read(), ()), f"{directory}/recorded")
    assert keys_left_by_content(rows, recorded).isEmpty(), "the job's own files change no value"
    assert numbers(recorded) == every
    table.append(recorded, Transaction(app_id="test", version=1, note="test"))
    done = table.read()
    assert identities(done, rows.columns) == identities(rows, rows.columns)
    assert rows_left(rows, done, ()).isEmpty()
    assert keys_left_by_content(rows, done).isEmpty()
    with_ids = rows.where(f"{TEXT} IS NOT NULL AND {TIME} IS NOT NULL AND {DAY} IS NOT NULL")
    assert rows_left(with_ids, done, (TEXT, TIME, DAY)).isEmpty()


TEXT, TIME, DAY = (f"c{list(SCALARS).index(name)}" for name in ("STRING", "TIMESTAMP_LTZ", "DATE"))


@settings(
    max_examples=3 if os.environ.get("PIPEMAX_NIGHT") else 1,
    deadline=None,
    phases=[Phase.generate],  # an example takes seconds, and a smaller one as long
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
@given(
    rows=typed_rows(),
    partitions=st.lists(st.sampled_from(range(len(SCALARS))), max_size=2, unique=True),
    chosen=st.fixed_dictionaries({}, optional={name: st.sampled_from(SETTINGS[name]) for name in SETTINGS}),
)
def test_rows_of_every_type_are_left_once_and_then_no_more_whatever_the_settings(
    spark: Any,
    tmp_path_factory: pytest.TempPathFactory,
    rows: TypedRows,
    partitions: list[int],
    chosen: dict[str, str],
) -> None:
    directory = tmp_path_factory.mktemp("kept")
    by = ", ".join(f"c{place}" for place in partitions)
    with set_to(spark, chosen), job_settings(spark):
        spark.sql(
            f"CREATE TABLE delta.`{directory}/out` ({rows.ddl}) USING delta {by and f'PARTITIONED BY ({by})'}"
        )
        table, frame = DeltaTable(spark, f"{directory}/out"), rows.frame(spark)
        for place, keys in enumerate(zip(*identities(frame, frame.columns[1:]), strict=True)):
            texts = [row[place] for row in rows.values]
            assert len(set(keys)) == len(set(zip(keys, texts, strict=True))) == len(set(texts)), rows.columns[
                place
            ]
        changed = [f"coalesce({change.condition}, false)" for change in table.changed_values(frame.schema)]
        kept = frame.where(f"NOT ({' OR '.join(changed)})") if changed else frame
        check_kept(table, kept, directory)


BERLIN = {ZONE: "Europe/Berlin"}
AS_NULL, AS_OTHER, NOT_POSSIBLE = "stored as null", "stored as other bytes", "not possible in a file's path"
AS_OTHER_TIME = "stored as another time (set spark.sql.session.timeZone to UTC for the former)"
PARTITION_VALUES = {
    "''": AS_NULL,
    "'__HIVE_DEFAULT_PARTITION__'": AS_NULL,
    "CAST(X'68FF69' AS STRING)": AS_OTHER,
    "concat('a', char(0))": NOT_POSSIBLE,
    "X''": AS_NULL,
    "X'FF'": AS_OTHER,
    "X'4100'": NOT_POSSIBLE,
    "TIMESTAMP'2025-10-26T01:30:00Z'": AS_OTHER_TIME,
    "TIMESTAMP'-0004-01-01T00:00:00Z'": AS_OTHER_TIME,
    "TIMESTAMP'2025-10-26T00:30:00Z'": None,
    "TIMESTAMP'1582-10-10T00:00:00.000001Z'": None,
    "TIMESTAMP_NTZ'-0004-01-01T00:00:00'": None,
    "DATE'-0004-01-01'": None,
    "' a/b:c=%20\\n'": None,
    "X'C3A4'": None,
    "CAST(NULL AS STRING)": None,
    "CAST(NULL AS TIMESTAMP)": None,
    "CAST('-0.0' AS DOUBLE)": None,
    "CAST('NaN' AS FLOAT)": None,
}


@pytest.mark.parametrize("ansi", ["true", "false"])
def test_a_row_s_coin_in_sql_is_the_one_in_python_to_the_last_bit(spark: Any, ansi: str) -> None:
    seed = "0123456789abcdef" * 2
    rows = [(f"row {place % 500} ü", place // 500 + 1) for place in range(2_000)]
    columns = (coin_sql(seed, "name", "number"), tie_break_sql(seed, "name"), "name", "number")
    with set_to(spark, {"spark.sql.ansi.enabled": ansi, "spark.sql.parser.escapedStringLiterals": ansi}):
        thrown = spark.createDataFrame(rows, "name string, number int").selectExpr(*columns).collect()
    assert [tuple(row) for row in thrown] == [
        (coin(seed, name, number), tie_break(seed, name), name, number) for name, number in rows
    ]


def test_a_delta_table_s_partitions_keep_all_values_but_these(spark: Any) -> None:
    values = ", ".join(f"{value} AS c{place}" for place, value in enumerate(PARTITION_VALUES))
    with set_to(spark, BERLIN):
        row = spark.sql(f"SELECT {values} FROM range(1)")
        changes = changed_in_delta(row.schema, row.columns)
        is_changed = row.selectExpr(
            *(f"coalesce({change.condition}, false)" for change in changes)
        ).collect()[0]
    told = {change.column: change.stored for change, holds in zip(changes, is_changed, strict=True) if holds}
    assert {value: told.get(f"c{place}") for place, value in enumerate(PARTITION_VALUES)} == PARTITION_VALUES


@pytest.mark.parametrize("kind", ["MAP<STRING, INT>", "ARRAY<VARIANT>", "STRING COLLATE UTF8_LCASE"])
def test_an_id_that_cannot_be_compared_is_refused_by_name(run: Jobs, kind: str) -> None:
    run.spark.sql(f"SELECT 'a' AS text, CAST(NULL AS {kind}) AS id").write.parquet(
        f"{run.directory}/in.parquet"
    )
    with pytest.raises(JobError, match="id column 'id' is of type"):
        run.run(id_columns=("id",))


@pytest.mark.parametrize("value", ["NULL", "named_struct('a', array())"])
def test_a_column_without_a_type_is_refused_by_name(run: Jobs, value: str) -> None:
    run.spark.sql(f"SELECT 'a' AS text, {value} AS nothing").createOrReplaceTempView("untyped")
    with pytest.raises(JobError, match=r"column 'nothing' of the input is of type .*void"):
        run.run(input="untyped")
    assert not DeltaTable(run.spark, run.output).exists()


INEXACT = {name: values[0] for name, values in SETTINGS.items() if not name.endswith("binaryAsString")}
"""Spark itself reads no VARIANT under that one."""
WIDE = """
SELECT id, concat('word ', id) AS text, timestamp_micros(1761442200123456 + id DIV 2) AS at,
  date_from_unix_date(CAST(id - 141428 AS INT)) AS day, CAST(id AS DECIMAL(20,10)) AS number,
  CAST(if(id % 2 = 0, X'68FF69', X'68FE69') AS STRING) AS raw, map(X'01', at) AS m,
  map(named_struct('k', id), day) AS n,
  array(named_struct('t', at, 'x', CAST(NULL AS INT)), NULL) AS a, CAST(if(id = 1, 'NaN', '-0.0') AS DOUBLE) AS d,
  parse_json(concat('{"v": [1.50, null, ', id, ']}')) AS v
FROM range(6) UNION ALL SELECT 0, 'word 0', timestamp_micros(1761442200123456), date_from_unix_date(-141428), 0,
  CAST(X'68FF69' AS STRING), map(X'01', timestamp_micros(1761442200123456)), map(named_struct('k', 0L), NULL),
  NULL, NULL, NULL
"""
PLAIN = "id BIGINT, text STRING, day DATE, lang STRING, at TIMESTAMP, ratio DOUBLE"


def done_twice(run: Jobs, rows: int, **options: Any) -> list[Any]:
    """Run the same job twice, and return the output's rows after the first run and after the second."""
    before = DeltaTable(run.spark, run.output)
    first = run.run(**options)
    assert first.rows_out == rows
    version = before.version()
    again = run.run(**options)
    assert (again.rows_out, again.rows_skipped) == (0, rows)
    assert before.version() == version
    return run.rows()


@pytest.mark.long  # without jobs above
def test_a_job_over_wide_rows_finds_all_of_them_again_under_settings_that_lose_parts_of_values(
    run: Jobs,
) -> None:
    source = f"{run.directory}/in.parquet"
    run.spark.sql(WIDE).write.format("delta").save(source)
    with set_to(run.spark, INEXACT):
        done_twice(run, 7)
        assert run.spark.conf.get(MILLIS) == "TIMESTAMP_MILLIS", "the user's own writes are as they were"
    rows, out = (run.spark.read.format("delta").load(path) for path in (source, run.output))
    columns = rows.columns
    found, wanted = (
        sorted(row[0] for row in frame.select(*columns).selectExpr(identity(frame.schema, columns)).collect())
        for frame in (out, rows)
    )
    assert found == wanted


@pytest.mark.long  # wide rows have such values, above
def test_a_changed_row_is_found_by_ids_of_microseconds_and_fractions_in_a_table_with_partitions(
    run: Jobs,
) -> None:
    run.spark.sql(f"CREATE TABLE delta.`{run.output}` ({PLAIN}) USING delta PARTITIONED BY (day, lang)")
    query = (
        "SELECT id, concat('{}', id) AS text, date_from_unix_date(CAST(-141428 + id AS INT)) AS day, "
        "CAST(NULLIF(id, 1) AS STRING) AS lang, timestamp_micros(1761442200123456 + id) AS at, "
        "CAST(if(id = 2, 'NaN', '{}') AS DOUBLE) AS ratio FROM range(4)"
    )
    source, options = f"{run.directory}/in.parquet", {"id_columns": ("at", "ratio"), "redo_changed": True}
    run.spark.sql(query.format("a", "0.0")).write.parquet(source)
    changes = f"{query.format('a', '0.0')} WHERE id < 2 UNION ALL {query.format('b', '-0.0')} WHERE id >= 2"
    with set_to(run.spark, {MILLIS: "TIMESTAMP_MILLIS", **BERLIN}):
        done_twice(run, 4, **options)
    run.spark.sql(changes).write.mode("overwrite").parquet(source)
    with set_to(run.spark, {MILLIS: "TIMESTAMP_MILLIS", **BERLIN}):
        changed = run.run(**options)
        assert (changed.rows_out, changed.rows_skipped) == (2, 2)
    assert sorted(row["text"] for row in run.rows()) == ["a0", "a1", "b2", "b3"], "-0.0 equals 0.0, as an id"


@pytest.mark.long  # the partitions' rules without jobs above
def test_partition_values_that_would_change_are_refused_before_the_claim_and_empty_ones_told(
    run: Jobs,
) -> None:
    table = f"delta.`{run.output}`"
    run.spark.sql(f"CREATE TABLE {table} ({PLAIN}) USING delta PARTITIONED BY (lang, at)")
    rows = "(0L, '', 0), (1L, NULL, 0), (2L, 'a/b:c=%20', 0), (3L, ' x ', NULL), (4L, 'b', 1761442200)"
    run.spark.sql(
        "SELECT id, 'a' AS text, DATE'1582-10-10' AS day, lang, timestamp_seconds(at) AS at "
        f"FROM VALUES {rows} AS given(id, lang, at)"
    ).write.parquet(f"{run.directory}/in.parquet")
    told = "is partitioned by the column 'lang', of which 1 rows have an empty value .*stored as null there"
    by_id = {"id_columns": ("id",)}
    with set_to(run.spark, BERLIN):
        with pytest.raises(JobError, match=told):
            run.dry_run(**by_id, redo_changed=True)
        with pytest.raises(
            JobError, match=r"column 'at', of which 1 rows have a time .*stored as another time"
        ):
            run.run(**by_id)
        [made] = run.spark.sql(f"DESCRIBE HISTORY {table}").collect()
        assert made["operation"] == "CREATE TABLE"
        found = done_twice(run, 4, where="id < 4", **by_id)
    assert "column 'lang', of which 1 rows have an empty value" in run.printed
    assert {row["id"]: row["lang"] for row in found} == {0: None, 1: None, 2: "a/b:c=%20", 3: " x "}
