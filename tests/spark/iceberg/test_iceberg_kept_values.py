"""Rows of every type are found again in the Iceberg table that was given them, or are refused before it is claimed."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pipemax_spark.errors import JobError
from pipemax_spark.job.settings import job_settings
from pipemax_spark.storage.iceberg import IcebergTable
from tests.spark.iceberg.conftest import IcebergJobs
from tests.spark.spark_work import set_to
from tests.spark.test_kept_values import SETTINGS, check_kept
from tests.spark.typed_rows import SCALARS, TypedRows, typed_rows

pytestmark = pytest.mark.iceberg


@settings(max_examples=3, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck])
@given(
    rows=typed_rows(),
    partitions=st.lists(st.sampled_from(range(len(SCALARS))), max_size=2, unique=True),
    chosen=st.fixed_dictionaries({}, optional={name: st.sampled_from(SETTINGS[name]) for name in SETTINGS}),
)
def test_rows_of_every_type_are_left_once_and_then_no_more_whatever_the_settings(
    spark: Any,
    name: str,
    tmp_path_factory: pytest.TempPathFactory,
    rows: TypedRows,
    partitions: list[int],
    chosen: dict[str, str],
) -> None:
    directory: Path = tmp_path_factory.mktemp("kept")
    by = ", ".join(f"c{place}" for place in partitions)
    spark.sql(f"DROP TABLE IF EXISTS {name}")
    with set_to(spark, chosen), job_settings(spark):
        spark.sql(f"CREATE TABLE {name} ({rows.ddl}) USING iceberg {by and f'PARTITIONED BY ({by})'}")
        table, frame = IcebergTable(spark, name), rows.frame(spark)
        changed = [f"coalesce({change.condition}, false)" for change in table.changed_values(frame.schema)]
        assert bool(changed) == (list(SCALARS).index("STRING") in partitions)
        check_kept(table, frame.where(f"NOT ({' OR '.join(changed)})") if changed else frame, directory)


@pytest.mark.parametrize("ids", [("id",), ()])
def test_a_job_over_partitions_of_strings_and_times_finds_its_rows_again_or_refuses_them(
    run: IcebergJobs, ids: tuple[str, ...]
) -> None:
    columns = "id BIGINT, text STRING, place STRUCT<lang: STRING>, at TIMESTAMP"
    run.spark.sql(f"CREATE TABLE {run.output} ({columns}) USING iceberg PARTITIONED BY (place.lang, at)")
    query = (
        "SELECT id, 'a' AS text, named_struct('lang', lang) AS place, timestamp_micros(1761442200123456) AS at "
        "FROM VALUES (0L, ''), (1L, NULL), (2L, 'a/b:c=%20'), (3L, '__HIVE_DEFAULT_PARTITION__'), "
        "(4L, CAST(X'68FF69' AS STRING)) AS given(id, lang)"
    )
    run.spark.sql(query).write.parquet(f"{run.directory}/in.parquet")
    version = IcebergTable(run.spark, run.output).version()
    with set_to(run.spark, {"spark.sql.session.timeZone": "Europe/Berlin"}):
        with pytest.raises(JobError, match=r"'place\.lang', of which 1 rows have bytes that are no UTF-8"):
            run.run(id_columns=ids)
        assert IcebergTable(run.spark, run.output).version() == version
        assert run.run(id_columns=ids, where="id < 4").rows_out == 4
        assert run.run(id_columns=ids, where="id < 4").rows_out == 0
    assert len(run.rows()) == 4


def test_an_error_row_with_values_in_maps_is_replaced_by_its_retry(run: IcebergJobs) -> None:
    source = f"{run.directory}/in.parquet"
    query = (
        "SELECT id, if(id < {}, NULL, 'a') AS text, map(X'01', array(DATE'1582-10-10')) AS m FROM range(3)"
    )
    run.spark.sql(query.format(1)).write.parquet(source)
    assert run.run().rows_error == 1
    assert run.run(retry_errors=True).rows_out == 1
    assert sorted(row["id"] for row in run.rows()) == [0, 1, 2]
