"""Output tables that users have made beforehand: their layout and rules stay, and hold for the job's rows."""

import logging
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException

from pipemax.wire import GenerationSpec
from pipemax_spark.errors import JobError
from pipemax_spark.job.fit import check_rows_fit
from pipemax_spark.storage.tables import DeltaTable
from tests.fakes.settings import expected_text
from tests.spark.conftest import Jobs, words
from tests.spark.test_killed_job import SLOW, committed_chunks

SCHEMA = "id long, text string, lang string"


def details(run: Jobs, table: str) -> Any:
    return run.spark.sql(f"DESCRIBE DETAIL {table}").collect()[0]


def test_a_table_whose_creation_was_killed_is_created_again(spark: Any, tmp_path: Path) -> None:
    table = DeltaTable(spark, str(tmp_path / "out"))
    (tmp_path / "out" / "_delta_log" / "_staged_commits").mkdir(parents=True)
    (tmp_path / "out" / "part-00000.snappy.parquet").write_bytes(b"half")
    assert not table.exists()
    table.create(spark.createDataFrame([], "id long").schema)
    assert table.exists()
    assert table.read().count() == 0


@pytest.mark.long
def test_an_empty_table_keeps_its_partitions_properties_constraints_and_own_columns(run: Jobs) -> None:
    table = f"delta.`{run.output}`"
    run.spark.sql(
        f"CREATE TABLE {table} (lang STRING, number BIGINT GENERATED ALWAYS AS IDENTITY, "
        "upper STRING GENERATED ALWAYS AS (upper(text)), annotation STRUCT<spec_hash: STRING, text: STRING>, "
        "text VARCHAR(20), id BIGINT NOT NULL, empty INT, loaded TIMESTAMP DEFAULT current_timestamp()) "
        "USING delta PARTITIONED BY (lang) TBLPROPERTIES ('my.own' = '1', 'delta.enableChangeDataFeed' = 'true', "
        "'delta.feature.allowColumnDefaults' = 'supported')"
    )
    run.spark.sql(f"ALTER TABLE {table} ADD CONSTRAINT positive CHECK (id > 0)")
    run.write_input([(1, "one", "en"), (2, None, "de"), (3, "drei", "de")], SCHEMA)
    run.run(id_columns=("id",))
    run.write_input([(1, "one", "en"), (2, "zwei", "de"), (3, "drei", "de"), (4, "quatre", None)], SCHEMA)
    summary = run.run(id_columns=("id",), retry_errors=True, compact=True)
    assert (summary.rows_out, summary.rows_error) == (2, 0)
    rows = {row["id"]: row for row in run.rows()}
    assert {i: (row["lang"], row["upper"], row["empty"]) for i, row in rows.items()} == {
        1: ("en", "ONE", None),
        2: ("de", "ZWEI", None),
        3: ("de", "DREI", None),
        4: (None, "QUATRE", None),
    }
    assert len({row["number"] for row in rows.values()}) == 4
    assert all(row["loaded"] is not None for row in rows.values())
    assert all(row["annotation"]["text"] == expected_text(f"Say {row['text']}", 16) for row in rows.values())
    found = details(run, table)
    assert found["partitionColumns"] == ["lang"]
    assert {
        ("my.own", "1"),
        ("delta.enableChangeDataFeed", "true"),
        ("delta.constraints.positive", "id > 0"),
    } <= set(found["properties"].items())
    assert run.spark.read.format("delta").load(run.output).schema["id"].nullable is False


@pytest.mark.long
def test_a_clustered_table_by_name_stays_clustered_and_refuses_rows_that_break_its_rules_early(
    run: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.directory)
    run.spark.sql(
        "CREATE TABLE clustered (text VARCHAR(10) NOT NULL, id BIGINT, size INT, kind STRING NOT NULL DEFAULT 'new') "
        f"USING delta CLUSTER BY (id) LOCATION '{Path(run.directory, 'clustered')}' "
        "TBLPROPERTIES ('delta.feature.allowColumnDefaults' = 'supported')"
    )
    try:
        run.spark.sql("ALTER TABLE clustered ADD CONSTRAINT positive CHECK (id > 0)")
        run.spark.sql("ALTER TABLE clustered ADD CONSTRAINT unsized CHECK (size IS NULL)")
        run.write_input([(1, "a"), (-1, "b"), (-2, "c"), (3, None), (4, "much too long")])
        with pytest.raises(JobError) as refused:
            run.run(output="clustered")
        for told in (
            "column 'text' is NOT NULL: 1",
            "column 'text' is varchar(10): 1",
            "CHECK constraint 'positive' (id > 0): 2",
            "Exclude them with --where",
        ):
            assert told in str(refused.value)
        for kept in ("unsized", "kind"):
            assert kept not in str(refused.value)
        assert "Spark " not in run.printed, "the line before engines start"
        summary = run.run(output="clustered", where="id > 0 AND length(text) <= 10", compact=True)
        assert summary.rows_out == 1
        assert details(run, "clustered")["clusteringColumns"] == ["id"]
        assert [row["kind"] for row in run.spark.table("clustered").collect()] == ["new"]
        assert "depends on the answers" not in run.printed
    finally:
        run.spark.sql("DROP TABLE clustered")


@pytest.mark.long  # a job; check_rows_fit has it below
def test_a_rule_about_answers_is_told_at_the_start_and_ends_the_run_that_breaks_it(run: Jobs) -> None:
    run.spark.sql(
        f"CREATE TABLE delta.`{run.output}` (text STRING, id BIGINT, annotation STRUCT<text: STRING>) USING delta"
    )
    run.spark.sql(
        f"ALTER TABLE delta.`{run.output}` ADD CONSTRAINT brief CHECK (length(annotation.text) < 20)"
    )
    run.write_input([(5, "a b c d"), (6, "a b c d e")])
    with pytest.raises(
        Exception, match=r"CHECK constraint brief \(length\(annotation.text\) < 20\) violated"
    ):
        run.run()
    assert "the CHECK constraint 'brief' " in run.printed
    assert " depends on the answers" in run.printed


@pytest.mark.parametrize(
    ("made", "options", "told"),
    [
        (
            "(id INT, text STRING)",
            {},
            "column 'id' is of type bigint in the input and of type int in the output",
        ),
        (
            "(id BIGINT, text STRING, day DATE NOT NULL)",
            {},
            "has a NOT NULL column 'day', which the input's rows lack",
        ),
        (
            "(id BIGINT, annotation STRUCT<text: INT>)",
            {"dry_run": True},
            "has a column 'annotation.text' of type int, which must be of type string",
        ),
        pytest.param(
            "(id BIGINT, size STRUCT<x: INT NOT NULL>)",
            {},
            "has a NOT NULL column 'size.x', which the input",
            marks=pytest.mark.long,
        ),
        ("(id BIGINT, text CHAR(5))", {"id_columns": ()}, r"'text' .* is char\(5\), which pads values"),
        pytest.param(
            "(id BIGINT, number BIGINT GENERATED ALWAYS AS IDENTITY, day DATE NOT NULL)",
            {},
            "cannot take these rows: .*DELTA_MISSING_NOT_NULL_COLUMN_VALUE.*day",
            marks=pytest.mark.long,
        ),
        ("(text STRING, id BIGINT GENERATED ALWAYS AS IDENTITY)", {}, "cannot take these rows: .*IDENTITY"),
        (
            "(id BIGINT) TBLPROPERTIES ('delta.appendOnly' = 'true')",
            {"retry_errors": True},
            "delta.appendOnly set",
        ),
    ],
)
def test_a_table_that_cannot_take_the_rows_is_refused_before_any_engine_works(
    run: Jobs, made: str, options: dict[str, Any], told: str
) -> None:
    columns, _, properties = made.partition(" TBLPROPERTIES")
    properties = properties and f"TBLPROPERTIES{properties}"
    run.spark.sql(f"CREATE TABLE delta.`{run.output}` {columns} USING delta {properties}")
    run.write_input([(1, "a")])
    with pytest.raises(JobError, match=told):
        run.run(**{"id_columns": ("id",), **options})
    assert "Spark " not in run.printed, "the line before engines start"


@pytest.mark.long  # a variant of the first test
def test_chunks_of_a_table_with_an_identity_column_do_not_get_in_each_other_s_way(
    run: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    run.spark.sql(
        f"CREATE TABLE delta.`{run.output}` (number BIGINT GENERATED ALWAYS AS IDENTITY, id BIGINT) USING delta"
    )
    run.write_input([(i, f"word {i}") for i in range(1_200)])
    run.run(id_columns=("id",), engine=SLOW, commit_every=timedelta(seconds=0.5))
    rows = run.rows()
    assert sorted(row["id"] for row in rows) == list(range(1_200))
    assert len({row["number"] for row in rows}) == 1_200
    assert committed_chunks(run.output) > 1
    assert "is retried, because another writer changed the table" not in caplog.text


def test_a_table_with_rows_from_another_program_is_refused(run: Jobs) -> None:
    run.spark.sql("SELECT 1L AS id, 'a' AS text").write.format("delta").save(run.output)
    run.write_input([(1, "a")])
    with pytest.raises(JobError, match="holds rows without annotations; name another one"):
        run.run()


def test_a_rule_about_answers_does_not_change_the_session_s_errors(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a session that has not had an error before."""
    monkeypatch.delitem(logging.Logger.manager.loggerDict, "SQLQueryContextLogger", raising=False)
    path = str(tmp_path / "out")
    spark.sql(f"CREATE TABLE delta.`{path}` (id LONG, annotation STRUCT<text: STRING>) USING delta")
    spark.sql(f"ALTER TABLE delta.`{path}` ADD CONSTRAINT brief CHECK (length(annotation.text) < 20)")
    check_rows_fit(DeltaTable(spark, path), spark.range(3))
    with pytest.raises(AnalysisException, match="nope"):
        spark.range(3).where("nope > 1")


@pytest.mark.long  # an older version's table of the same spec
def test_a_table_that_lacks_a_later_field_of_the_annotation_gets_it_with_the_next_rows(run: Jobs) -> None:
    run.defaults = replace(
        run.defaults, id_columns=("id",), generation=GenerationSpec(choice=("mild", "spicy"), logprobs=True)
    )
    run.write_input(words(0, 5))
    run.run()
    older = run.spark.read.format("delta").load(run.output)
    older = older.withColumn("annotation", older["annotation"].dropFields("probability")).localCheckpoint()
    older.write.format("delta").mode("overwrite").option("overwriteSchema", "true").save(run.output)
    run.write_input(words(0, 9))
    assert run.run().rows_out == 4
    shown = {row["id"]: row["annotation"] for row in run.rows()}
    assert sorted(shown) == [*range(9)]
    assert all(shown[i]["probability"] is None for i in range(5))
    for i in range(5, 9):
        assert shown[i]["probability"] == shown[i]["probabilities"][shown[i]["text"]]
